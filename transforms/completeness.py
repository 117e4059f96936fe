"""Only groups with all their rollouts pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, at_least, has_key, key_names, nested_key, one_of, read_column
from .collapse import same_length
from .errors import BatchError, IncompleteGroupsError, MissingKeyError, listing
from .ids import any_by, as_ids, first_row, is_first, sum_by
from .rows import take_rows
from .rules import Rule, broken, explain, identity_rules
from .status import Status

OnIncomplete = Literal["raise", "drop", "keep"]


class Presence(NamedTuple):
    """Who is there, per row."""

    present: Tensor
    """(N,) bool: no segment of the row's rollout failed or was aborted."""
    have: Tensor
    """(N,) int64: present rollouts of the row's group."""
    rules: list[Rule]
    """What must hold of the rows for these numbers to mean anything."""


class IncompleteGroups(NamedTuple):
    """Groups that lack rollouts, (K,) int64 each."""

    group_id: Tensor
    have: Tensor
    expected: Tensor
    """-1 for a group without rows where the number per group is not known."""


def presence(groups: Tensor, rollouts: Tensor, expected: Tensor, status: Tensor) -> Presence:
    """Count each group's unique rollouts that neither failed nor were aborted. No device read.

    Args:
        groups: (N,) int64.
        rollouts: (N,) int64; rows that share one are one rollout.
        expected: (N,) int64, rollouts of the row's group when it was dispatched.
        status: (N,) int64, :class:`Status`.
    """
    first, group_first = first_row(rollouts), first_row(groups)
    present = ~any_by(first, (status == Status.FAILED) | (status == Status.ABORTED))
    have = sum_by(group_first, (is_first(first) & present).long())
    sizes = expected.index_select(0, group_first)
    rules = [
        *identity_rules(rollouts, groups, first),
        Rule(
            (status < min(Status)) | (status > max(Status)),
            lambda row: f"{int(status[row])} at row {row}",
            f"status must be one of {', '.join(f'{s.value} {s.name}' for s in Status)}; found {{found}}",
        ),
        Rule(
            (expected < 1) | (sizes != expected),
            lambda row: f"group {int(groups[row])}: {sorted({int(sizes[row]), int(expected[row])})}",
            "expected_rollouts must be one number ≥ 1 per group; found {found}",
        ),
        Rule(
            have > expected,
            lambda row: f"group {int(groups[row])} has {int(have[row])} of {int(expected[row])}",
            "a group cannot have more rollouts than were dispatched; found {found}. Is group_size right, or "
            "are group ids reused between steps?",
        ),
    ]
    return Presence(present, have, rules)


def incomplete_groups(
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int],
    *,
    group_size: int | None = None,
    expected_rollouts: Tensor | Sequence[int] | None = None,
    status: Tensor | Sequence[int] | None = None,
    expected_groups: Iterable[int] | None = None,
) -> IncompleteGroups:
    """Find the groups that lack rollouts, by counting unique rollout ids and never rows.

    Args:
        group_id: (N,) integers ≥ 0.
        rollout_id: (N,) integers ≥ 0; rows that share one are one rollout.
        group_size: rollouts that each group was dispatched with.
        expected_rollouts: (N,) integers ≥ 1, the same per group; used where `group_size` is None.
        status: (N,) :class:`Status`; failed and aborted rollouts do not count. None: all completed.
        expected_groups: ids that were dispatched; one without a row lacks everything.

    Returns:
        The incomplete groups in the order of their first rows, then those without rows.

    Raises:
        BatchError: a negative id, a rollout in two groups, more rollouts than expected, an unknown status,
            a group that was not dispatched, nothing to count against. Each names the ids.

    Example:
        >>> found = incomplete_groups([0, 0, 0, 5], [1, 1, 2, 3], group_size=2)
        >>> found.group_id.tolist(), found.have.tolist()
        ([5], [1])
    """
    groups, rollouts, expected, states = _columns(group_id, rollout_id, group_size, expected_rollouts, status)
    rows, have = groups.new_empty(0), groups
    if len(groups):
        _, have, rules = presence(groups, rollouts, expected, states)
        explain(rules)
        rows = ((have < expected) & is_first(first_row(groups))).nonzero().flatten()
    missing = groups.new_tensor(_missing_groups(groups, expected_groups))
    nothing = torch.zeros_like(missing)
    return IncompleteGroups(
        torch.cat([groups[rows], missing]),
        torch.cat([have[rows], nothing]),
        torch.cat([expected[rows], nothing + (-1 if group_size is None else group_size)]),
    )


def _columns(
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int],
    group_size: int | None,
    expected_rollouts: Tensor | Sequence[int] | None,
    status: Tensor | Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(N,) int64 each: groups, rollouts, expected rollouts, statuses."""
    groups = as_ids(group_id, "group_id")
    rollouts = as_ids(rollout_id, "rollout_id", device=groups.device)
    if group_size is not None:
        expected = torch.full_like(groups, group_size)
    elif expected_rollouts is not None:
        expected = as_ids(expected_rollouts, "expected_rollouts", device=groups.device)
    else:
        raise BatchError(
            "how many rollouts a group should have is not known: give group_size, or the batch a column "
            "expected_rollouts"
        )
    completed = torch.full_like(groups, int(Status.COMPLETED))
    states = completed if status is None else as_ids(status, "status", device=groups.device)
    same_length(group_id=groups, rollout_id=rollouts, expected_rollouts=expected, status=states)
    return groups, rollouts, expected, states


def _missing_groups(groups: Tensor, expected_groups: Iterable[int] | None) -> list[int]:
    if expected_groups is None:
        return []
    dispatched = dict.fromkeys(int(g) for g in expected_groups)
    seen = set(groups.unique().tolist())
    if strangers := sorted(seen - set(dispatched)):
        raise BatchError(
            f"the batch has groups that were not dispatched: {listing(map(str, strangers))}. "
            "Do batches of two steps mix?"
        )
    return [g for g in dispatched if g not in seen]


class CompletenessGate(BatchTransform):
    """Let only groups pass that have all their rollouts (:func:`incomplete_groups`).

    Unique rollouts are counted, never rows; those that failed or were aborted do not count and never pass,
    not even with a group that is kept. The gate is stateless: what came before does not matter. One device
    read for the checks; one more where rows go, two with `expected_groups`.

    Reads `group_key`, `rollout_key`, `expected_key` where `group_size` is None, `status_key` if it is
    there. Writes nothing; its verdicts are 1 ``incomplete``, for the siblings of who is missing, and 2
    ``failed``.

    Args:
        group_size: rollouts that each group was dispatched with. None: the column `expected_key` says.
        expected_groups: ids that were dispatched, or a callable that returns those of this batch, to catch
            groups that are missing entirely. None: not checked.
        on_incomplete: ``raise``; ``drop`` the group; ``keep`` it if it has `min_rollouts` and
            `min_fraction` of what was expected, else drop it.
        min_rollouts: for ``keep``, ≥ 1.
        min_fraction: for ``keep``, in (0, 1].
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0.
        expected_key: (N,) or (N, 1) int ≥ 1.
        status_key: (N,) or (N, 1) :class:`Status`. None: ``("next", "status")`` if it is there, else
            ``status`` if that is, else all have completed.

    Raises:
        IncompleteGroupsError: under ``raise``; lists group, have, expected and the statuses.
        MissingKeyError: a column is not there.
        BatchError: as :func:`incomplete_groups`; more rollouts than expected, always.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"group_id": [4, 4, 9], "rollout_id": [0, 1, 2]}, batch_size=[3])
        >>> CompletenessGate(group_size=2, on_incomplete="drop")(td)["group_id"].tolist()
        [4, 4]
    """

    reasons = ("incomplete", "failed")

    def __init__(
        self,
        *,
        group_size: int | None = None,
        expected_groups: Iterable[int] | Callable[[], Iterable[int]] | None = None,
        on_incomplete: OnIncomplete = "raise",
        min_rollouts: int | None = None,
        min_fraction: float | None = None,
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey = "rollout_id",
        expected_key: NestedKey = "expected_rollouts",
        status_key: NestedKey | None = None,
    ):
        keys = [nested_key(k) for k in (group_key, rollout_key, expected_key, status_key)]
        super().__init__([k for k in keys if k is not None])
        self.group_key, self.rollout_key, self.expected_key, self.status_key = keys
        self.group_size, self.expected_groups = at_least("group_size", group_size, 1), expected_groups
        self.on_incomplete = one_of("on_incomplete", on_incomplete, ("raise", "drop", "keep"))
        given = min_rollouts is not None or min_fraction is not None
        if (on_incomplete == "keep") != given:
            raise ValueError("on_incomplete='keep', and only that, needs min_rollouts or min_fraction")
        at_least("min_rollouts", min_rollouts, 1)
        if min_fraction is not None and not 0 < min_fraction <= 1:
            raise ValueError(f"min_fraction must be in (0, 1]; got {min_fraction}")
        self.min_rollouts, self.min_fraction = min_rollouts, min_fraction

    def enter(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Check a batch at the door; one without rows lacks every group that was dispatched."""
        flat = super().enter(batch)
        if flat is None:
            self._refuse([], _missing_groups(torch.empty(0), self._dispatched()))
        return flat

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Drop, or raise for, what is incomplete."""
        groups, rollouts, expected, status = _columns(
            self.column(batch, "group_key"),
            self.column(batch, "rollout_key"),
            self.group_size,
            self._expected(batch),
            self._status(batch),
        )
        present, have, rules = presence(groups, rollouts, expected, status)
        short = have < expected
        stays = self._enough(have, expected) if self.on_incomplete == "keep" else ~short
        flags = torch.stack([broken(rules), short.any(), ~(present & stays).all()])
        wrong, incomplete, leaving = flags.tolist()
        if wrong:
            explain(rules)
        missing = _missing_groups(groups, self._dispatched())
        if incomplete and self.on_incomplete == "raise":
            self._refuse(_tell(groups, rollouts, status, have, expected), missing)
        self._refuse([], missing)

        self.verdict = torch.where(present, torch.where(stays, 0, 1), 2).to(torch.int8)
        self.measured = {"missing_groups": float(len(missing)), "incomplete_rows": short.sum()}
        return take_rows(batch, (self.verdict == 0).nonzero().flatten()) if leaving else batch

    def _expected(self, batch: TensorDictBase) -> Tensor | None:
        if self.group_size is not None:
            return None
        if not has_key(batch, self.expected_key):
            raise MissingKeyError(
                "The gate must know how many rollouts each group was dispatched with: set group_size, or "
                f"give the batch a column {self.expected_key!r} (expected_key); it has {key_names(batch)}"
            )
        return self.column(batch, "expected_key")

    def _status(self, batch: TensorDictBase) -> Tensor | None:
        if self.status_key is not None:
            return self.column(batch, "status_key")
        for key in (
            ("next", "status"),
            "status",
        ):  # at the root an environment leaves the one before the step
            if has_key(batch, key):
                return read_column(batch, key, reader=type(self).__name__, option="status_key")
        return None

    def _enough(self, have: Tensor, expected: Tensor) -> Tensor:
        enough = have >= (self.min_rollouts or 1)
        return enough & (have.double() / expected >= (self.min_fraction or 0))

    def _dispatched(self) -> Iterable[int] | None:
        return self.expected_groups() if callable(self.expected_groups) else self.expected_groups

    def _refuse(self, incomplete: list[str], missing: list[int]) -> None:
        size = "all" if self.group_size is None else self.group_size
        found = incomplete + [f"group {group} has 0 of {size} (no rows)" for group in missing]
        if found and self.on_incomplete == "raise":
            raise IncompleteGroupsError(
                f"{len(found)} incomplete group{'s' if len(found) > 1 else ''}: {listing(found)}. "
                "Collect them to the end, or set on_incomplete='drop', or 'keep' with min_rollouts"
            )


def _tell(groups: Tensor, rollouts: Tensor, status: Tensor, have: Tensor, expected: Tensor) -> list[str]:
    """Each incomplete group in words, with how its rollouts ended."""
    told: dict[int, tuple[int, int, dict[int, int]]] = {}
    short = (have < expected).nonzero().flatten()
    columns = (column[short].tolist() for column in (groups, rollouts, status, have, expected))
    for group, rollout, state, got, wanted in zip(*columns, strict=True):
        worst = told.setdefault(group, (got, wanted, {}))[2]
        worst[rollout] = max(state, worst.get(rollout, 0))
    words = []
    for group, (got, wanted, worst) in told.items():
        ends = Counter(Status(state).name.lower() for state in worst.values())
        how = ", ".join(f"{count} {name}" for name, count in sorted(ends.items()))
        words.append(f"group {group} has {got} of {wanted} ({how})")
    return words
