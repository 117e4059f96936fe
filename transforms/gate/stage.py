"""The stage that lets only complete groups pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, enforce
from headrace.transforms.distributed import population_of, present_ranks
from headrace.transforms.errors import IncompleteGroupsError, MissingKeyError, listing
from headrace.transforms.options import at_least, nested_key, one_of
from headrace.transforms.rows import rows_that_stay
from headrace.transforms.schema import (
    DONE,
    EXPECTED_SEGMENTS,
    FINISHED,
    INIT,
    has_key,
    key_names,
    read_flags,
    read_status,
)

from .finished import Ends, as_ends
from .incomplete import Presence, as_columns, count_present, describe_group, missing_groups

OnIncomplete = Literal["raise", "drop", "keep"]
REFUSAL = (
    "{count} incomplete group{s}: {found}. Wait for the rollouts that are missing, or set "
    "on_incomplete='drop', or 'keep' with min_rollouts"
)


@runtime_checkable
class KnowsDraws(Protocol):
    """What knows which groups were dispatched together, as a RepeatSampler does."""

    def drawn_with(self, groups: Iterable[int]) -> Iterable[int]:
        """All groups of the draws of which some are given."""


class CompletenessGate(BatchTransform):
    """Let only groups pass that have all their rollouts (:func:`incomplete_groups`).

    Unique rollouts are counted, never rows; those that failed, were aborted or are not finished do not count
    and never pass, not even with a group that is kept. It knows no earlier batch: a group that is spread over
    two is incomplete in both. One device read, for who stays, where rows say how their rollouts ended or
    incomplete groups are no error; two more with `expected_groups`.

    A rollout is finished where its last row is done; one that ends twice is an error. Segments may end each
    by themselves, as sub-agents do, where `expected_segments_key` says how many there are, or where their
    numbers differ (`segment_key`): then all must have ended. A collector's batch may also begin in the middle
    of a rollout, which shows where TorchRL's ``InitTracker`` marks its first row (`init_key`).

    Reads `group_key`, `rollout_key`, `expected_key` where `group_size` is None, and if they are there
    `status_key`, `done_key` and with it `init_key`, `expected_segments_key`. Writes
    ``("headrace", "finished")`` (N,) bool where the batch has ends. Its verdicts are 1 ``incomplete``, for
    the siblings of who is missing, 2 ``failed`` and 3 ``unfinished``.

    Args:
        group_size: rollouts that each group was dispatched with. None: the column `expected_key` says.
        expected_groups: ids that were dispatched, or a callable that returns those of this batch, to catch
            groups that are missing entirely; or a RepeatSampler, where each batch holds whole draws of it.
            None: not checked.
        on_incomplete: ``raise``; ``drop`` the group; ``keep`` it if it has `min_rollouts` and
            `min_fraction` of what was expected, else drop it.
        min_rollouts: for ``keep``, ≥ 1.
        min_fraction: for ``keep``, in (0, 1].
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout, and finished.
        expected_key: (N,) or (N, 1) int ≥ 1.
        status_key: (N,) or (N, 1) :class:`Status`. None: ``("next", "status")`` if it is there, else
            ``status`` if that is, else all have completed.
        done_key: (N,) or (N, 1) bool, True where a rollout ends. A batch without it, or None: all are
            finished.
        init_key: (N,) or (N, 1) bool, True where a rollout begins. A batch without it, or None: all are there
            from their beginning.
        segment_key: (N,) or (N, 1) int, the order of a rollout's segments, which may end each by themselves.
            None: that of the rows.
        expected_segments_key: (N,) or (N, 1) int ≥ 1, how many segments of the rollout end, each by itself. A
            batch without it: the rollout ends once.

    Raises:
        IncompleteGroupsError: under ``raise``; lists group, have, expected and the statuses.
        MissingKeyError: a column is not there.
        BatchError: as :func:`incomplete_groups`; more rollouts than expected, and a rollout that ends twice,
            always.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"group_id": [4, 4, 9], "rollout_id": [0, 1, 2]}, batch_size=[3])
        >>> CompletenessGate(group_size=2, on_incomplete="drop")(td)["group_id"].tolist()
        [4, 4]
    """

    reasons = ("incomplete", "failed", "unfinished")
    gates = True
    spans_ranks = True
    within_groups = True
    asks_in_loss = True
    own_of_rank = ("expected_groups",)

    def __init__(
        self,
        *,
        group_size: int | None = None,
        expected_groups: Iterable[int] | Callable[[], Iterable[int]] | KnowsDraws | None = None,
        on_incomplete: OnIncomplete = "raise",
        min_rollouts: int | None = None,
        min_fraction: float | None = None,
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        expected_key: NestedKey = "expected_rollouts",
        status_key: NestedKey | None = None,
        done_key: NestedKey | None = DONE,
        init_key: NestedKey | None = INIT,
        segment_key: NestedKey | None = None,
        expected_segments_key: NestedKey = EXPECTED_SEGMENTS,
    ):
        self.group_key, self.rollout_key = nested_key(group_key), nested_key(rollout_key)
        self.expected_key, self.status_key = nested_key(expected_key), nested_key(status_key)
        self.done_key, self.init_key = nested_key(done_key), nested_key(init_key)
        self.segment_key = nested_key(segment_key)
        self.expected_segments_key = nested_key(expected_segments_key)
        ends = [self.done_key, self.init_key, self.segment_key, self.expected_segments_key]
        reads = [self.group_key, self.rollout_key, self.expected_key, self.status_key]
        super().__init__([*reads, *ends], [FINISHED])
        self.group_size, self.expected_groups = at_least("group_size", group_size, 1), expected_groups
        self.on_incomplete = one_of("on_incomplete", on_incomplete, get_args(OnIncomplete))
        given = min_rollouts is not None or min_fraction is not None
        if (on_incomplete == "keep") != given:
            raise ValueError("on_incomplete='keep', and only that, needs min_rollouts or min_fraction")
        at_least("min_rollouts", min_rollouts, 1)
        if min_fraction is not None and not 0 < min_fraction <= 1:
            raise ValueError(f"min_fraction must be in (0, 1]; got {min_fraction}")
        self.min_rollouts, self.min_fraction = min_rollouts, min_fraction

    def apply_to_nothing(self, batch: TensorDictBase) -> None:
        """Refuse a batch without rows where groups were dispatched for it."""
        nothing = torch.empty(0, dtype=torch.int64)
        self._refuse_missing(missing_groups(nothing, self._dispatched(nothing)))

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Take out, or refuse, what is incomplete."""
        people = population_of(batch, every=True)
        ids = {"groups": self.ids(batch, "group"), "rollouts": self.ids(batch, "rollout")}
        everyone = people.take(self._columns(batch), ids)
        ends = as_ends(everyone["groups"], *(everyone.get(name) for name in Ends._fields))
        groups, rollouts, expected, status = as_columns(
            everyone["groups"],
            everyone["rollouts"],
            self.group_size,
            everyone.get("expected_rollouts"),
            everyone.get("status"),
        )
        presence = count_present(groups, rollouts, expected, status, ends)
        short = presence.have < expected
        incomplete = Rule(
            short & presence.is_first,
            lambda row: describe_group(row, groups, rollouts, status, presence),
            REFUSAL,
            IncompleteGroupsError,
        )
        missing = self._missing(ids["groups"], presence, incomplete)
        stays = self._enough(presence) if self.on_incomplete == "keep" else ~short
        absent = torch.where(presence.lost, 2, 3)
        verdict = torch.where(presence.present, torch.where(stays, 0, 1), absent).to(torch.int8)
        verdict, present, short = (people.put_back(column) for column in (verdict, presence.present, short))
        if has_key(batch, DONE):  # whether it was read here, or is not to be read: nobody looks again
            batch.set(FINISHED, present)
        surely_whole = self.on_incomplete == "raise" and ends is None and "status" not in everyone
        return Outcome(
            batch if surely_whole else rows_that_stay(batch, verdict == 0),
            verdict,
            {"missing_groups": float(len(missing)), "incomplete_rows": short.sum()},
            people.rules([*presence.rules, *([incomplete] if self.on_incomplete == "raise" else [])]),
        )

    def _columns(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """How many rollouts were dispatched, how they ended, and where, as far as the batch says."""
        columns = self._ends(batch)
        if (expected := self._expected(batch)) is not None:
            columns["expected_rollouts"] = expected
        if (status := read_status(batch, self.status_key, reader=type(self).__name__)) is not None:
            columns["status"] = status
        return columns

    def _ends(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """What the batch says of where rollouts begin and end (:class:`Ends`)."""
        if self.rollout_key is None or not has_key(batch, self.done_key):
            return {}  # a row that is a rollout is all of it
        name = type(self).__name__
        ends = {"done": read_flags(batch, self.done_key, reader=name, option="done_key")}
        if has_key(batch, self.init_key):
            ends["begins"] = read_flags(batch, self.init_key, reader=name, option="init_key")
        if self.segment_key is not None:
            ends["segment"] = self.column(batch, "segment_key")
        if has_key(batch, self.expected_segments_key):
            ends["expected"] = self.column(batch, "expected_segments_key")
        return ends

    def _expected(self, batch: TensorDictBase) -> Tensor | None:
        if self.group_size is not None:
            return None
        if not has_key(batch, self.expected_key):
            raise MissingKeyError(
                "The gate must know how many rollouts each group was dispatched with: set group_size, or "
                f"give the batch a column {self.expected_key!r} (expected_key); it has {key_names(batch)}"
            )
        return self.column(batch, "expected_key")

    def _enough(self, presence: Presence) -> Tensor:
        enough = presence.have >= (self.min_rollouts or 1)
        return enough & (presence.have.double() / presence.expected >= (self.min_fraction or 0))

    def _dispatched(self, own: Tensor) -> Iterable[int] | None:
        """The groups that were dispatched with those of this rank's rows."""
        if isinstance(self.expected_groups, KnowsDraws):
            return self.expected_groups.drawn_with(own.unique().tolist())
        return self.expected_groups() if callable(self.expected_groups) else self.expected_groups

    def _missing(self, own: Tensor, presence: Presence, incomplete: Rule) -> list[int]:
        """Groups that were dispatched and have no row; under ``raise`` they are refused with the others.

        Ranks that share ids were dispatched groups together; those that number their own, each by itself.
        """
        dispatched = self._dispatched(own)
        if dispatched is None:
            return []
        enforce(presence.rules)
        if (ranks := present_ranks()) is not None and ranks.shared_ids != "different":
            every = ranks.gather_objects((list(map(int, dispatched)), own.unique().tolist()))
            dispatched = [group for groups, _ in every for group in groups]
            own = torch.tensor([group for _, groups in every for group in groups], dtype=torch.int64)
        missing = missing_groups(own, dispatched)
        self._refuse_missing(missing, incomplete)
        return missing

    def _refuse_missing(self, missing: list[int], incomplete: Rule | None = None) -> None:
        """Under ``raise``, refuse groups without rows, and name those that lack some rows beside them."""
        if missing and self.on_incomplete == "raise":
            found = []
            if incomplete is not None:
                found = list(map(incomplete.describe, incomplete.bad.nonzero().flatten().tolist()))
            size = "all" if self.group_size is None else self.group_size
            found += [f"group {group} has 0 of {size} (no rows)" for group in missing]
            plural = "s" if len(found) > 1 else ""
            raise IncompleteGroupsError(REFUSAL.format(count=len(found), found=listing(found), s=plural))
