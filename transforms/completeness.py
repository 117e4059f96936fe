"""Only groups with all their rollouts pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, has_key, nested_key, one_of
from .collapse import reject_negative, same_length
from .errors import BatchError, IncompleteGroupsError, listing
from .ids import any_by, as_ids, first_row, is_first, sum_by
from .rows import take_rows
from .status import Status

OnIncomplete = Literal["raise", "drop", "keep"]


class Presence(NamedTuple):
    """Who is there, per row."""

    present: Tensor
    """(N,) bool: no segment of the row's rollout failed or was aborted."""
    have: Tensor
    """(N,) int64: present rollouts of the row's group."""


class IncompleteGroups(NamedTuple):
    """Groups that lack rollouts, (K,) int64 each."""

    group_id: Tensor
    have: Tensor
    expected: Tensor
    """-1 for a group without rows where the number per group is not known."""


def presence(groups: Tensor, rollouts: Tensor, status: Tensor | None) -> Presence:
    """Count each group's unique rollouts that neither failed nor were aborted. No device read."""
    first, group_first = first_row(rollouts), first_row(groups)
    present = torch.ones_like(first, dtype=torch.bool)
    if status is not None:
        present = ~any_by(first, (status == Status.FAILED) | (status == Status.ABORTED))
    return Presence(present, sum_by(group_first, (is_first(first) & present).long()))


def incomplete_groups(
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int],
    *,
    group_size: int | None = None,
    expected_rollouts: Tensor | Sequence[int] | None = None,
    status: Tensor | Sequence[int] | None = None,
    expected_groups: Sequence[int] | None = None,
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
    groups = as_ids(group_id, "group_id")
    device = groups.device
    rollouts = as_ids(rollout_id, "rollout_id", device=device)
    state = None if status is None else as_ids(status, "status", device=device)
    expected = _expected(len(groups), group_size, expected_rollouts, device)
    same_length(group_id=groups, rollout_id=rollouts, expected_rollouts=expected, status=state)
    have = groups
    rows = groups.new_empty(0)
    if len(groups):
        have = presence(groups, rollouts, state).have
        if bool(torch.stack(_problems(groups, rollouts, state, expected, have)).any()):
            _explain(groups, rollouts, state, expected, have)
        rows = ((have < expected) & is_first(first_row(groups))).nonzero().flatten()
    missing = _missing_groups(groups, expected_groups)
    unseen = torch.tensor(missing, dtype=torch.int64, device=device)
    nothing = torch.zeros_like(unseen)
    return IncompleteGroups(
        torch.cat([groups[rows], unseen]),
        torch.cat([have[rows], nothing]),
        torch.cat([expected[rows], nothing + (-1 if group_size is None else group_size)]),
    )


def _expected(
    rows: int, group_size: int | None, column: Tensor | Sequence[int] | None, device: torch.device
) -> Tensor:
    if group_size is not None:
        return torch.full((rows,), group_size, device=device)
    if column is None:
        raise BatchError(
            "how many rollouts a group should have is not known: give group_size, or the batch a column "
            "expected_rollouts"
        )
    return as_ids(column, "expected_rollouts", device=device)


def _problems(
    groups: Tensor, rollouts: Tensor, status: Tensor | None, expected: Tensor, have: Tensor
) -> list[Tensor]:
    problems = [
        (groups < 0).any(),
        (rollouts < 0).any(),
        (groups[first_row(rollouts)] != groups).any(),
        (expected < 1).any(),
        (expected[first_row(groups)] != expected).any(),
        (have > expected).any(),
    ]
    if status is not None:
        problems.append(((status < min(Status)) | (status > max(Status))).any())
    return problems


def _explain(groups: Tensor, rollouts: Tensor, status: Tensor | None, expected: Tensor, have: Tensor) -> None:
    reject_negative(groups, "group_id", "an unset id would compare strangers with one another")
    reject_negative(rollouts, "rollout_id", "an unset id would merge strangers into one rollout")
    known = {int(s) for s in Status}
    states = [] if status is None else status.tolist()
    if unknown := [f"{s} at row {i}" for i, s in enumerate(states) if s not in known]:
        raise BatchError(
            f"status must be one of {[f'{s.value} {s.name}' for s in Status]}; found {listing(unknown)}"
        )
    homes: dict[int, set[int]] = {}
    sizes: dict[int, set[int]] = {}
    for group, rollout, size in zip(groups.tolist(), rollouts.tolist(), expected.tolist(), strict=True):
        homes.setdefault(rollout, set()).add(group)
        sizes.setdefault(group, set()).add(size)
    if torn := [f"rollout {r} in groups {sorted(g)}" for r, g in homes.items() if len(g) > 1]:
        raise BatchError(f"a rollout belongs to one group; found {listing(torn)}. Are ids reused?")
    if odd := [f"group {g}: {sorted(s)}" for g, s in sizes.items() if len(s) > 1 or min(s) < 1]:
        raise BatchError(f"expected_rollouts must be one number ≥ 1 per group; found {listing(odd)}")
    rows = (have > expected).nonzero().flatten().tolist()
    over = {int(groups[i]): f"group {int(groups[i])} has {int(have[i])} of {int(expected[i])}" for i in rows}
    raise BatchError(
        f"a group cannot have more rollouts than were dispatched; found {listing(over.values())}. "
        "Is group_size right, or are group ids reused between steps?"
    )


def _missing_groups(groups: Tensor, expected_groups: Sequence[int] | None) -> list[int]:
    if expected_groups is None:
        return []
    dispatched = [int(g) for g in expected_groups]
    seen = set(groups.unique().tolist())
    if strangers := sorted(seen - set(dispatched)):
        raise BatchError(
            f"the batch has groups that were not dispatched: {listing(map(str, strangers))}. "
            "Do batches of two steps mix?"
        )
    return [g for g in dict.fromkeys(dispatched) if g not in seen]


class CompletenessGate(BatchTransform):
    """Let only groups pass that have all their rollouts (:func:`incomplete_groups`).

    Unique rollouts are counted, never rows; those that failed or were aborted do not count and never pass,
    not even with a group that is kept. The gate is stateless: what came before does not matter. One device
    read for the checks; one more where rows go, one with `expected_groups`.

    Reads `group_key`, `rollout_key`, `expected_key` where `group_size` is None, `status_key` if it is
    there. Writes nothing; its verdicts are 1 ``incomplete``, 2 ``failed``.

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
        status_key: (N,) or (N, 1) :class:`Status`; None: not looked at.

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
        expected_groups: Sequence[int] | Callable[[], Sequence[int]] | None = None,
        on_incomplete: OnIncomplete = "raise",
        min_rollouts: int | None = None,
        min_fraction: float | None = None,
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey = "rollout_id",
        expected_key: NestedKey = "expected_rollouts",
        status_key: NestedKey | None = "status",
    ):
        keys = [nested_key(k) for k in (group_key, rollout_key, expected_key, status_key)]
        super().__init__([k for k in keys if k is not None])
        self.group_key, self.rollout_key, self.expected_key, self.status_key = keys
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size must be ≥ 1; got {group_size}")
        self.group_size, self.expected_groups = group_size, expected_groups
        self.on_incomplete = one_of("on_incomplete", on_incomplete, ("raise", "drop", "keep"))
        given = min_rollouts is not None or min_fraction is not None
        if (on_incomplete == "keep") != given:
            raise ValueError("on_incomplete='keep', and only that, needs min_rollouts or min_fraction")
        if min_rollouts is not None and min_rollouts < 1:
            raise ValueError(f"min_rollouts must be ≥ 1; got {min_rollouts}")
        if min_fraction is not None and not 0 < min_fraction <= 1:
            raise ValueError(f"min_fraction must be in (0, 1]; got {min_fraction}")
        self.min_rollouts, self.min_fraction = min_rollouts, min_fraction

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Drop, or raise for, what is incomplete."""
        groups = as_ids(self.column(batch, "group_key"), "group_id")
        rollouts = as_ids(self.column(batch, "rollout_key"), "rollout_id")
        status = None
        if self.status_key is not None and has_key(batch, self.status_key):
            status = as_ids(self.column(batch, "status_key"), "status")
        column = self.column(batch, "expected_key") if self.group_size is None else None
        expected = _expected(len(groups), self.group_size, column, groups.device)

        present, have = presence(groups, rollouts, status)
        short = have < expected
        stays = ~short if self.on_incomplete != "keep" else self._enough(have, expected)
        problems = _problems(groups, rollouts, status, expected, have)
        flags = torch.stack([*problems, short.any(), ~(present & stays).all()]).tolist()
        if any(flags[:-2]):
            _explain(groups, rollouts, status, expected, have)
        missing = _missing_groups(groups, self._dispatched())
        if self.on_incomplete == "raise" and (flags[-2] or missing):
            self._raise(groups, rollouts, status, expected, have, missing)

        self.verdict = torch.where(stays, torch.where(present, 0, 2), 1).to(torch.int8)
        self.measured = {"missing_groups": float(len(missing)), "incomplete_rows": short.sum()}
        return take_rows(batch, (self.verdict == 0).nonzero().flatten()) if flags[-1] else batch

    def _enough(self, have: Tensor, expected: Tensor) -> Tensor:
        enough = have >= (self.min_rollouts or 1)
        return enough & (have >= (self.min_fraction or 0) * expected)

    def _dispatched(self) -> Sequence[int] | None:
        return self.expected_groups() if callable(self.expected_groups) else self.expected_groups

    def _raise(
        self,
        groups: Tensor,
        rollouts: Tensor,
        status: Tensor | None,
        expected: Tensor,
        have: Tensor,
        missing: list[int],
    ) -> None:
        states = status if status is not None else torch.zeros_like(groups)
        found = []
        for group in dict.fromkeys(groups[have < expected].tolist()):
            rows = (groups == group).nonzero().flatten()
            worst: dict[int, int] = {}
            for rollout, state in zip(rollouts[rows].tolist(), states[rows].tolist(), strict=True):
                worst[rollout] = max(state, worst.get(rollout, 0))
            counts = Counter(Status(state).name.lower() for state in worst.values())
            told = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
            found.append(f"group {group} has {int(have[rows[0]])} of {int(expected[rows[0]])} ({told})")
        size = "all" if self.group_size is None else self.group_size
        found += [f"group {group} has 0 of {size} (no rows)" for group in missing]
        raise IncompleteGroupsError(
            f"{len(found)} incomplete group{'s' if len(found) > 1 else ''}: {listing(found)}. "
            "Collect them to the end, or set on_incomplete='drop', or 'keep' with min_rollouts"
        )
