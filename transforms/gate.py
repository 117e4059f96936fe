"""Only groups with all their rollouts pass: unique rollouts are counted, and never rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from .columns import ColumnNames
from .ends import Ends, finished, require_ends
from .errors import BatchError, IncompleteGroupsError, MissingKeyError, listing
from .options import above_zero, at_least, one_of, takes_options
from .required import require_identity
from .rows import Rows, few
from .schema import COUNTED, EXPECTED_SEGMENTS, FINISHED, Status, key_names
from .stage import BatchTransform

OnIncomplete = Literal["raise", "drop", "keep"]
Empty = Literal["exclude", "count", "raise"]
NAMES = ", ".join(f"{status.value} {status.name}" for status in Status)
REFUSAL = (
    "{count} incomplete group{s}: {found}. Wait for the rollouts that are missing, or set "
    "on_incomplete='drop', or 'keep' with min_rollouts"
)


class Presence(NamedTuple):
    """Which rollouts are there."""

    lost: Tensor
    """(n,) bool, by rollout: a segment of it failed or was aborted."""
    present: Tensor
    """(n,) bool, by rollout: it is finished, and not lost."""
    have: Tensor
    """(P,) int64, by group: present rollouts."""
    expected: Tensor
    """(P,) int64, by group: rollouts with which it was dispatched."""


class IncompleteGroups(NamedTuple):
    """Groups that lack rollouts, (K,) int64 each."""

    group_id: Tensor
    have: Tensor
    expected: Tensor
    """-1 for a group without rows where the number per group is not known."""


def count_present(rows: Rows, group_size: int | None, ends: Ends | None, status: Tensor | None) -> Presence:
    """Count each group's unique rollouts that are finished, and neither failed nor aborted.

    Args:
        rows: with ids, and ``expected``, but where `group_size` is given.
        group_size: rollouts that each group was dispatched with; ``expected``, if it is there, says the same.
        ends: where rollouts end; None: all are finished.
        status: (N,) int64, :class:`Status`; None: all completed.

    Raises:
        BatchError: a rollout in two groups or with wrong ends; an unknown status; numbers of rollouts that
            differ within a group, or from `group_size`, or more rollouts than that.
    """
    rollouts, groups = rows.rollouts.everyone, rows.groups.everyone
    require_identity(rows)
    if ends is not None:
        require_ends(rows, ends)
    lost = torch.zeros(rollouts.n, dtype=torch.bool)
    if status is not None:
        rows.require(
            (status >= min(Status)) & (status <= max(Status)),
            f"status must be one of {NAMES}; found {{found}}",
            lambda row: f"{int(status[row])} at row {rows.at(row)}",
        )
        lost = rollouts.any((status == Status.FAILED) | (status == Status.ABORTED))
    present = ~lost if ends is None else ~lost & finished(ends, rollouts)
    home = groups.of[rollouts.first]
    have = torch.bincount(home[present], minlength=groups.n)
    expected = torch.full_like(have, group_size or 0)
    if rows.has("expected"):
        sizes = rows.integers("expected", "expected_rollouts")
        expected = sizes[groups.first]
        rows.require(
            (sizes >= 1) & (groups.spread(expected) == sizes),
            "expected_rollouts must be one number ≥ 1 per group; found {found}",
            lambda row: (
                f"group {rows.name('group', row)}: "
                f"{sorted(set(sizes[groups.of == groups.of[row]].tolist()))[:3]}"
            ),
        )
        if group_size is not None:
            rows.require(
                sizes == group_size,
                f"group_size and the column {rows.key('expected')!r} (expected_key) both say how many "
                f"rollouts a group was dispatched with: group_size={group_size}, but {{found}}. Leave "
                "group_size out, or correct the column",
                lambda row: f"group {rows.name('group', row)} expects {int(sizes[row])}",
            )
    if bool((have > expected).any()):
        rows.require(
            groups.spread(have <= expected),
            "a group cannot have more rollouts than were dispatched; found {found}. Is group_size right, or "
            "are group ids reused between steps?",
            lambda row: (
                f"group {rows.name('group', row)} has {int(have[groups.of[row]])} of "
                f"{int(expected[groups.of[row]])}"
            ),
        )
    return Presence(lost, present, have, expected)


@takes_options
def incomplete_groups(
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int],
    *,
    group_size: int | None = None,
    expected_rollouts: Tensor | Sequence[int] | None = None,
    status: Tensor | Sequence[int] | None = None,
    expected_groups: Iterable[int] | None = None,
    done: Tensor | Sequence[bool] | None = None,
    begins: Tensor | Sequence[bool] | None = None,
    segment: Tensor | Sequence[int] | None = None,
    expected_segments: Tensor | Sequence[int] | None = None,
) -> IncompleteGroups:
    """Find the groups that lack rollouts, by counting unique rollout ids and never rows.

    Args:
        group_id: (N,) integers ≥ 0.
        rollout_id: (N,) integers ≥ 0; rows that share one are one rollout.
        group_size: rollouts that each group was dispatched with.
        expected_rollouts: (N,) integers ≥ 1, the same per group, and `group_size` where both are given.
        status: (N,) :class:`Status`; failed and aborted rollouts do not count. None: all completed.
        expected_groups: ids that were dispatched; one without a row lacks everything.
        done: (N,) bool, True where a rollout ends; one that does not does not count. None: all have ended.
        begins: (N,) bool, True where a rollout begins; one that does not does not count. Read with `done`.
        segment: (N,) integers, the order of a rollout's segments, which may end each by themselves.
        expected_segments: (N,) integers ≥ 1, the same per rollout: how many of its segments end.

    Returns:
        The incomplete groups in the order of their first rows, then those without rows.

    Raises:
        BatchError: a negative id, a rollout in two groups or that ends twice, more rollouts than expected,
            `group_size` and `expected_rollouts` that disagree, an unknown status, a group that was not
            dispatched, nothing to count against. Each names the ids.

    Example:
        >>> short = incomplete_groups([0, 0, 0, 5], [1, 1, 2, 3], group_size=2)
        >>> short.group_id.tolist(), short.have.tolist()
        ([5], [1])
    """
    if group_size is None and expected_rollouts is None:
        raise BatchError(
            "how many rollouts a group should have is not known: give group_size, or the batch a column "
            "expected_rollouts"
        )
    device = group_id.device if isinstance(group_id, Tensor) else torch.device("cpu")
    rows = Rows.of(
        group=group_id,
        rollout=rollout_id,
        expected=expected_rollouts,
        status=status,
        done=None if done is None else torch.as_tensor(done, device=device),
        begins=None if begins is None else torch.as_tensor(begins, device=device),
        segment=segment,
        expected_segments=expected_segments,
    )
    found = torch.zeros(0, 3, dtype=torch.int64)
    if len(rows):
        ends = None
        if done is not None:
            flags = (rows.flags(role) if rows.has(role) else None for role in ("done", "begins"))
            numbers = (rows[role] if rows.has(role) else None for role in ("segment", "expected_segments"))
            ends = Ends(*flags, *numbers)
        presence = count_present(rows, group_size, ends, rows["status"] if rows.has("status") else None)
        groups, short = rows.groups, presence.have < presence.expected
        found = torch.stack([groups.labels[groups.first], presence.have, presence.expected], 1)[short]
        found = found[groups.first[short].argsort()]
    missing = torch.tensor(missing_groups(rows["group"], expected_groups), dtype=torch.int64)
    nothing = torch.stack([missing, torch.zeros_like(missing), torch.full_like(missing, group_size or -1)], 1)
    return IncompleteGroups(*torch.cat([found, nothing]).to(device).unbind(1))


def missing_groups(groups: Tensor, expected_groups: Iterable[int] | None) -> list[int]:
    """Ids that were dispatched and have no row. Reads the groups' ids, but for None.

    Raises:
        BatchError: a group has rows and was not dispatched.
    """
    if expected_groups is None:
        return []
    dispatched = dict.fromkeys(int(g) for g in expected_groups)
    seen = set(groups.unique().tolist())
    if unknown := sorted(seen - set(dispatched)):
        raise BatchError(
            f"the batch has groups that were not dispatched: {listing(map(str, unknown))}. "
            "Do batches of two steps mix?"
        )
    return [g for g in dispatched if g not in seen]


def take_empty_out(rows: Rows, empty: Empty) -> None:
    """Take rollouts out of the statistics of which no row has arrived with a token in the loss.

    Where nothing says which tokens train, none is empty.

    Raises:
        BatchError: under ``raise``, with the rollouts.
    """
    if empty == "count":
        return
    tokens = rows.arrived_tokens
    if tokens is None:
        return
    nothing = tokens == 0
    if bool(nothing.any()):
        if rows.has("rollout"):  # else each row is one
            rollouts = rows.ids("rollout", checked=False).everyone
            nothing = rollouts.spread(rollouts.all(nothing))
        nothing = nothing & rows.from_arrival(rows.table.here)
    if empty == "raise":
        rows.require(
            ~nothing,
            "a rollout needs a token in the loss, or its reward moves a baseline and trains nothing; found "
            "{found}. Was it cut off, or masked as a whole? empty='exclude' leaves it out of the statistics",
            lambda row: f"rollout {rows.name('rollout', row)}",
        )
    rows.leave(nothing, "empty", "excluded", mask_tokens=False)


def describe_group(rows: Rows, row: int, status: Tensor | None, presence: Presence) -> str:
    """The group of a row in words, with how its rollouts ended."""
    groups, rollouts = rows.groups, rows.rollouts
    group = groups.of[row]
    own = groups.of == group
    text = (
        f"group {rows.name('group', row)} has {int(presence.have[group])} of {int(presence.expected[group])}"
    )
    worst: dict[int, int] = {}
    states = torch.zeros_like(own, dtype=torch.int64) if status is None else status
    for rollout, state in zip(rollouts.of[own].tolist(), states[own].tolist(), strict=True):
        worst[rollout] = max(state, worst.get(rollout, 0))
    unfinished = [rollout for rollout in worst if not (presence.present | presence.lost)[rollout]]
    for rollout in unfinished:
        worst.pop(rollout)
    ends = Counter(Status(state).name.lower() for state in worst.values())
    how = [f"{count} {name}" for name, count in sorted(ends.items())]
    if unfinished:
        how.append(
            f"{len(unfinished)} unfinished: {few(rollouts.labels[rollouts.first[unfinished]].sort().values)}"
        )
    return f"{text} ({', '.join(how)})"


@runtime_checkable
class KnowsDraws(Protocol):
    """What knows which groups were dispatched together, as a RepeatSampler does."""

    def drawn_with(self, groups: Iterable[int]) -> Iterable[int]:
        """All groups of the draws of which some are given."""


class CompletenessGate(
    BatchTransform,
    columns=(
        *("group", "rollout", "expected", "status", "done", "init", "segment", "expected_segments"),
        *("loss_mask", "log_prob"),
    ),
):
    """Let only groups pass that have all their rollouts (:func:`incomplete_groups`).

    Unique rollouts are counted, never rows; those that failed, were aborted or are not finished do not count
    and never pass, not even with a group that is kept. It knows no earlier batch: a group that is spread over
    two is incomplete in both. One device read, for who stays, where rows say how their rollouts ended or
    incomplete groups are no error; two more with `expected_groups`.

    A rollout is finished where its last row is done; one that ends twice is an error. Segments may end each
    by themselves, as sub-agents do, where `expected_segments_key` says how many there are, or where their
    numbers differ (`segment_key`): then all must have ended. A collector's batch may also begin in the middle
    of a rollout, which shows where TorchRL's ``InitTracker`` marks its first row (`init_key`).

    A rollout is empty where no token of its rows was in the loss as they arrived: it has nothing to learn
    from, and its reward, of a run that was cut off, say, would move the baseline of its siblings. It is
    there, so its group is complete.

    Reads `group_key`, `rollout_key`, `expected_key` if it is there or `group_size` is None, and if they are
    there `status_key`, `done_key` and with it `init_key`, `expected_segments_key`; `loss_mask_key` and
    `log_prob_key`. Writes ``("headrace", "finished")`` (N,) bool where the batch has ends, and
    ``("headrace", "counted")`` (N,) bool where it has tokens. Rows leave as ``incomplete``, where a sibling
    is missing, ``failed``, ``unfinished``, or ``empty``, which stay in the batch.

    Args:
        group_size: rollouts that each group was dispatched with. None: the column `expected_key` says;
            one that is there must say the same.
        expected_groups: ids that were dispatched, or a callable that returns those of this batch, to catch
            groups that are missing entirely; or a RepeatSampler, where each batch holds whole draws of it.
            None: not checked.
        on_incomplete: ``raise``; ``drop`` the group; ``keep`` it if it has `min_rollouts` and
            `min_fraction` of what was expected, else drop it.
        min_rollouts: for ``keep``, ≥ 1.
        min_fraction: for ``keep``, in (0, 1].
        empty: an empty rollout is out of all statistics (``exclude``), or in them (``count``), or refused
            (``raise``).
        names: other names of columns, such as `group_key` (:class:`ColumnNames`).

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

    reasons = ("incomplete", "failed", "unfinished", "empty")
    effects = ("dropped", "dropped", "dropped", "excluded")
    within_groups = True
    _own_of_rank = ("expected_groups",)

    def __init__(
        self,
        *,
        group_size: int | None = None,
        expected_groups: Iterable[int] | Callable[[], Iterable[int]] | KnowsDraws | None = None,
        on_incomplete: OnIncomplete = "raise",
        min_rollouts: int | None = None,
        min_fraction: float | None = None,
        empty: Empty = "exclude",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        ends = [self.done_key, self.init_key, self.segment_key, self.expected_segments_key]
        reads = [self.group_key, self.rollout_key, self.expected_key, self.status_key]
        self.empty = one_of("empty", empty, get_args(Empty))
        super().__init__([*reads, *ends], [FINISHED] + [COUNTED] * (empty == "exclude"))
        self.group_size, self.expected_groups = at_least("group_size", group_size, 1), expected_groups
        self.on_incomplete = one_of("on_incomplete", on_incomplete, get_args(OnIncomplete))
        given = min_rollouts is not None or min_fraction is not None
        if (on_incomplete == "keep") != given:
            raise ValueError("on_incomplete='keep', and only that, needs min_rollouts or min_fraction")
        at_least("min_rollouts", min_rollouts, 1)
        self.min_rollouts, self.min_fraction = min_rollouts, above_zero("min_fraction", min_fraction, 1)

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Those in the loss, by which a rollout is empty."""
        return [] if self.empty == "count" else [(self.loss_mask_key, self.log_prob_key)]

    def apply_to_nothing(self, batch: TensorDictBase) -> None:
        """Refuse a batch without rows where groups were dispatched for it."""
        nothing = torch.empty(0, dtype=torch.int64)
        missing = missing_groups(nothing, self._dispatched(nothing))
        if missing and self.on_incomplete == "raise":
            self._refuse([], missing)

    def needs_each_rank(self) -> str:
        """It does, to hear of the groups that each was dispatched."""
        return super().needs_each_rank() if self.expected_groups is None else "expected_groups"

    def decide(self, rows: Rows) -> None:
        """Take out, or refuse, what is incomplete."""
        ends, status = self._ends(rows), rows.status
        if self.group_size is None and not rows.has("expected"):
            raise MissingKeyError(
                "The gate must know how many rollouts each group was dispatched with: set group_size, or "
                f"give the batch a column {self.expected_key!r} (expected_key); it has "
                f"{key_names(rows.table.batch)}"
            )
        presence = count_present(rows, self.group_size, ends, status)
        rollouts, groups = rows.rollouts.everyone, rows.groups.everyone
        short = presence.have < presence.expected
        lacking, lacks = short.nonzero().flatten(), groups.spread(short)
        missing = self._missing(rows)
        if self.on_incomplete == "raise" and (missing or len(lacking)):
            firsts = groups.first[lacking].sort().values.tolist()
            found = [describe_group(rows, row, status, presence) for row in firsts]
            self._refuse(found, missing)
        if self.on_incomplete == "keep":
            short = (presence.have < (self.min_rollouts or 1)) | (
                presence.have.double() / presence.expected < (self.min_fraction or 0)
            )
        present, lost = rollouts.spread(presence.present), rollouts.spread(presence.lost)
        if self.done_key is None or rows.has("done"):  # who looks at ends behind the gate takes its word
            rows.put(FINISHED, present, dtype=torch.bool, ndim=1)
        rows.leave(groups.spread(short) & present, "incomplete")
        rows.leave(lost, "failed")
        rows.leave(~(present | lost), "unfinished")
        take_empty_out(rows, self.empty)
        rows.metric("missing_groups", len(missing))
        for view in rows.of_each_rank():
            view.metric("incomplete_rows", view.of_rank(lacks).sum())

    def _ends(self, rows: Rows) -> Ends | None:
        """What the batch says of where rollouts begin and end."""
        if self.rollout_key is None or not rows.has("done"):
            return None  # a row that is a rollout is all of it
        return Ends(
            done=rows.flags("done"),
            begins=rows.flags("init") if rows.has("init") else None,
            segment=None if self.segment_key is None else rows.integers("segment", "segment"),
            expected=rows.integers("expected_segments", EXPECTED_SEGMENTS)
            if rows.has("expected_segments")
            else None,
        )

    def _dispatched(self, own: Tensor) -> Iterable[int] | None:
        """The groups that were dispatched with those of this rank's rows."""
        if isinstance(self.expected_groups, KnowsDraws):
            return self.expected_groups.drawn_with(own.unique().tolist())
        return self.expected_groups() if callable(self.expected_groups) else self.expected_groups

    def _missing(self, rows: Rows) -> list[int]:
        """Groups that were dispatched and have no row.

        Ranks that share ids were dispatched groups together; those that number their own, each by itself.
        """
        if self.expected_groups is None:
            return []
        ranks = rows.table.ranks
        own = rows.of_rank(rows.groups.labels)
        dispatched = self._dispatched(own) or ()
        if ranks is not None and ranks.shared_ids != "different":
            every = ranks.gather_objects(list(map(int, dispatched)))
            dispatched = [group for groups in every for group in groups]
            own = rows.groups.labels
        return missing_groups(own, dispatched)

    def _refuse(self, lacking: list[str], missing: list[int]) -> None:
        """Refuse groups that lack rows, in words, and those that have none."""
        size = "all" if self.group_size is None else self.group_size
        found = [*lacking, *(f"group {group} has 0 of {size} (no rows)" for group in missing)]
        plural = "s" if len(found) > 1 else ""
        raise IncompleteGroupsError(REFUSAL.format(count=len(found), found=listing(found), s=plural))
