"""The gate: only groups with all their rollouts pass. It counts unique rollouts, never rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import (
    LISTED,
    BatchError,
    BatchTransform,
    ColumnNames,
    Effect,
    IncompleteGroupsError,
    MissingKeyError,
    Rows,
    count_of,
    few,
    listing,
    require_identity,
)
from headrace.transforms.table.empty import Empty, take_empty_out
from headrace.transforms.table.ends import Ends, finished, read_flags, require_ends
from headrace.transforms.table.options import above_zero, at_least, takes_options
from headrace.transforms.table.schema import COUNTED, EXPECTED_SEGMENTS, FINISHED, Status
from headrace.transforms.table.tensordicts import number_column

OnIncomplete = Literal["raise", "drop", "keep"]
NAMES = ", ".join(f"{status.value} {status.name}" for status in Status)
REFUSAL = (
    "{count} incomplete group{s}: {found}. {hint}Set {on_incomplete=drop}, or 'keep' with "
    "min_rollouts{or_wait}"
)
ALL_SHORT = "{count} incomplete groups: {found}. All {count} groups have the size {size}"
DISPATCHED = ". If so many were dispatched, %s{or_wait}"
WAIT = "wait for the missing rollouts"
UNEVEN = ". If groups have different sizes, give the column {column} instead of group_size"


class Presence(NamedTuple):
    """Which rollouts are present, and how many per group."""

    lost: Tensor
    """(n,) bool per rollout: whether a segment failed or was aborted."""
    present: Tensor
    """(n,) bool per rollout: whether it is finished and not lost."""
    have: Tensor
    """(P,) int64 per group: number of present rollouts."""
    expected: Tensor
    """(P,) int64 per group: number of dispatched rollouts."""


class IncompleteGroups(NamedTuple):
    """Groups with missing rollouts, (K,) int64 each."""

    group_id: Tensor
    have: Tensor
    expected: Tensor
    """-1 for a group without rows whose number of rollouts is not known."""


def count_present(rows: Rows, group_size: int | None, ends: Ends | None, status: Tensor | None) -> Presence:
    """Count the unique rollouts of each group that are finished and neither failed nor aborted.

    Args:
        rows: rows with ids, and with the column ``expected`` unless `group_size` is given.
        group_size: number of rollouts dispatched per group. The column ``expected`` must agree if it exists.
        ends: where rollouts end; None: all are finished.
        status: (N,) int64, :class:`Status`; None: all completed.

    Raises:
        BatchError: a rollout is in two groups or has wrong ends, a status is unknown, the expected number
            differs within a group or from `group_size`, or a group has more rollouts than expected.
    """
    rollouts, groups = rows.rollouts, rows.groups
    require_identity(rows)
    if ends is not None:
        require_ends(rows, ends)
    lost = torch.zeros(rollouts.n, dtype=torch.bool)
    if status is not None:
        rows.require(
            (status >= -1) & (status <= max(Status)),
            f"status must be one of {NAMES}, or -1 where it is not known; found {{found}}",
            lambda row: f"{'a text' if status[row] > 1 << 32 else int(status[row])} at row {rows.at(row)}",
        )
        lost = rollouts.any((status == Status.FAILED) | (status == Status.ABORTED))
    present = ~lost if ends is None else ~lost & finished(ends, rollouts)
    group_of = groups.of.index_select(0, rollouts.first)  # (n,), the group of each rollout
    have = torch.zeros(groups.n, dtype=torch.int64).scatter_add_(0, group_of, present.long())
    if rows.has("expected"):
        sizes = rows.integers("expected", "expected_rollouts")
        expected = groups.max(sizes)
        todo = "Correct the column {column}. Or are group ids reused between steps?"
        rows.require(
            groups.spread(expected.clamp_min(1)) == sizes,
            "expected_rollouts must be one number ≥ 1 per group; found {found}",
            lambda row: (
                f"group {rows.name('group', row)}: "
                f"{sorted(set(sizes[groups.of == groups.of[row]].tolist()))[:3]}"
            ),
        )
        if group_size is not None:
            rows.require(
                sizes == group_size,
                "group_size and the column {column} must give the same number of rollouts per group: "
                f"group_size={group_size}, but {{found}}. Leave group_size out, or correct the column",
                lambda row: f"group {rows.name('group', row)} expects {int(sizes[row])}",
                role="expected",
            )
    else:
        expected = torch.full_like(have, cast(int, group_size))
        todo = (
            "If groups have different sizes, give the column {column} instead of group_size. "
            "If not, are group ids reused between steps?"
        )
    if not torch.equal(have, expected):  # equal numbers need no check
        rows.require(
            groups.spread(have <= expected),
            f"a group cannot have more rollouts than were dispatched; found {{found}}. {todo}",
            lambda row: (
                f"group {rows.name('group', row)} has {int(have[groups.of[row]])} of "
                f"{int(expected[groups.of[row]])}"
            ),
            role="expected",
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
    """Find the groups with missing rollouts. Unique rollout ids are counted, never rows.

    Give `group_size`, `expected_rollouts` or both.

    Args:
        group_id: (N,) integers ≥ 0.
        rollout_id: (N,) integers ≥ 0; rows with the same id are one rollout.
        group_size: number of rollouts dispatched per group.
        expected_rollouts: (N,) integers ≥ 1, number of rollouts dispatched in the row's group.
        status: (N,) :class:`Status`; failed and aborted rollouts do not count. None: all completed.
        expected_groups: ids of the dispatched groups. All rollouts of a group without rows are missing.
        done: (N,) bool, True on the row where a rollout ends. A rollout without its end does not count. None:
            all rollouts have ended.
        begins: (N,) bool, True on the row where a rollout begins. A rollout without its beginning does not
            count. Only read with `done`.
        segment: (N,) integers, the order of a rollout's segments. Each segment may have its own end.
        expected_segments: (N,) integers ≥ 1, number of segments of the row's rollout. Each then has an end.

    Returns:
        The incomplete groups in the order of their first rows, then the groups without rows.

    Raises:
        BatchError: an id is negative, a rollout is in two groups or ends twice, a group has more rollouts
            than expected, `group_size` and `expected_rollouts` disagree, a status is unknown, a group was
            not dispatched, or neither `group_size` nor `expected_rollouts` is given. The message lists ids.

    Example:
        >>> short = incomplete_groups([0, 0, 0, 5], [1, 1, 2, 3], group_size=2)
        >>> short.group_id.tolist(), short.have.tolist()
        ([5], [1])
    """
    if group_size is None and expected_rollouts is None:
        raise BatchError(
            "the number of rollouts per group is not known: give group_size or expected_rollouts"
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
            ends = Ends(
                done=read_flags(rows, "done"),
                begins=read_flags(rows, "begins") if rows.has("begins") else None,
                segment=rows["segment"] if rows.has("segment") else None,
                expected=rows["expected_segments"] if rows.has("expected_segments") else None,
            )
        presence = count_present(rows, group_size, ends, rows["status"] if rows.has("status") else None)
        groups, incomplete = rows.groups, presence.have < presence.expected
        found = torch.stack([groups.labels[groups.first], presence.have, presence.expected], 1)[incomplete]
        found = found[groups.first[incomplete].argsort()]
    missing = torch.tensor(missing_groups(rows["group"], expected_groups), dtype=torch.int64)
    nothing = torch.stack([missing, torch.zeros_like(missing), torch.full_like(missing, group_size or -1)], 1)
    return IncompleteGroups(*torch.cat([found, nothing]).to(device).unbind(1))


def missing_groups(groups: Tensor, expected_groups: Iterable[int] | None) -> list[int]:
    """List the dispatched groups that have no row. Empty if `expected_groups` is None.

    Raises:
        BatchError: the batch has a group that was not dispatched.
    """
    if expected_groups is None:
        return []
    dispatched = dict.fromkeys(int(g) for g in expected_groups)
    seen = set(groups.unique().tolist())
    if unknown := sorted(seen - set(dispatched)):
        raise BatchError(
            f"the batch has groups that were not dispatched: {listing(map(str, unknown))}. "
            "Does the batch mix rows of two steps?"
        )
    return [g for g in dispatched if g not in seen]


def describe_group(rows: Rows, row: int, status: Tensor | None, presence: Presence) -> str:
    """Describe the group of a row: the number of its rollouts, and how they ended."""
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


def shared_ids(rows: Rows, presence: Presence) -> str:
    """A hint that rollout ids may be repeated: a group lacks ids, and two of its rows share an id."""
    groups, rollouts = rows.groups, rows.rollouts
    ids = torch.bincount(groups.of[rollouts.first], minlength=groups.n)
    size = torch.bincount(groups.of, minlength=groups.n)
    suspect = groups.spread((ids < presence.expected) & (ids < size)).nonzero().flatten()
    of = rollouts.of[suspect]
    twice = suspect[torch.bincount(of, minlength=rollouts.n)[of] > 1]
    if not len(twice):
        return ""
    row = int(twice[0])
    group = int(groups.of[row])
    own = [rows.at(each) for each in (rollouts.of == rollouts.of[row]).nonzero().flatten().tolist()]
    return (
        f"Are rollout ids repeated? Group {rows.name('group', row)} has {count_of(int(size[group]), 'row')}, "
        f"but {count_of(int(ids[group]), 'rollout id')}: rows {few(own)} have the id "
        f"{rows.name('rollout', row)}. "
    )


@runtime_checkable
class KnowsDraws(Protocol):
    """An object that knows which groups were dispatched together, such as a RepeatSampler."""

    def drawn_with(self, groups: Iterable[int]) -> Iterable[int]:
        """Return all groups that were dispatched together with a given group."""


class CompletenessGate(
    BatchTransform,
    columns=(
        *("group", "rollout", "expected", "status", "done", "init", "segment", "expected_segments"),
        *("loss_mask", "log_prob"),
    ),
):
    """Let only complete groups pass, which are groups with all their rollouts (:func:`incomplete_groups`).

    The gate counts unique rollouts, never rows. Rollouts that failed, were aborted or are unfinished do not
    count. The gate always takes these out, even if ``on_incomplete="keep"`` keeps other rollouts of their
    group. The gate does not see other batches: a group that is split over two batches is incomplete in both.

    A rollout is finished if its last row is done. A rollout that ends twice is an error. Segments, such as
    those of sub-agents, may each have an end if `expected_segments_key` gives the number of segments, or if
    `segment_key` numbers them. Then all segments must have ended. A collector's batch may also
    begin in the middle of a rollout. The gate detects this if TorchRL's ``InitTracker`` marks first rows
    (`init_key`).

    A rollout is empty if none of its rows arrived with a token in the loss. It cannot train, but its reward
    would change the baseline of its group. An empty rollout is present, so its group can be complete.

    Reads `group_key` and `rollout_key`. Reads, if they exist, `expected_key` (required if `group_size` is
    None), `status_key`, `done_key` and with it `init_key`, `segment_key`, `expected_segments_key`,
    `loss_mask_key` and `log_prob_key`. Writes ``("headrace", "finished")`` (N,) bool if the batch has ends,
    and ``("headrace", "counted")`` (N,) bool if the batch has tokens. Rows leave for the reasons
    ``incomplete`` (another rollout of the group is missing), ``failed``, ``unfinished`` and ``empty``. Empty
    rollouts stay in the batch.

    Args:
        group_size: number of rollouts dispatched per group. None: read it from the column `expected_key`. If
            both are given they must be equal.
        expected_groups: ids of the dispatched groups, to find groups without rows. Give the ids, a callable
            that returns the ids for this batch, or a RepeatSampler if each batch has all groups that were
            dispatched together. None: not checked.
        on_incomplete: ``raise`` an error; ``drop`` the group; ``keep`` it if it has `min_rollouts` and
            `min_fraction` of the expected rollouts, else drop it.
        min_rollouts: number of rollouts for ``keep``, ≥ 1.
        min_fraction: fraction of the expected rollouts for ``keep``, in (0, 1].
        empty: what happens to empty rollouts. ``exclude`` them from all statistics; ``count`` them; ``raise``
            an error.
        names: other names of columns, such as `group_key` (:class:`ColumnNames`).

    Raises:
        IncompleteGroupsError: under ``raise``; lists the groups, their rollouts and statuses.
        MissingKeyError: a column is missing.
        BatchError: as :func:`incomplete_groups`. More rollouts than expected, and a rollout that ends twice,
            are errors under each `on_incomplete`.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"group_id": [4, 4, 9], "rollout_id": [0, 1, 2]}, batch_size=[3])
        >>> CompletenessGate(group_size=2, on_incomplete="drop")(td)["group_id"].tolist()
        [4, 4]
    """

    set_later = ("expected_groups",)
    reasons: Mapping[str, Effect] = {
        "incomplete": "dropped",
        "failed": "dropped",
        "unfinished": "dropped",
        "empty": "excluded",
    }
    within_groups = True
    _own_of_rank = ("expected_groups",)  # each rank knows only the groups that it dispatched

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
        self.empty = empty
        super().__init__([*reads, *ends], [FINISHED] + [COUNTED] * (empty == "exclude"))
        self.group_size, self.expected_groups = at_least("group_size", group_size, 1), expected_groups
        self.on_incomplete = on_incomplete
        given = min_rollouts is not None or min_fraction is not None
        if on_incomplete == "keep" and not given:
            raise ValueError("on_incomplete='keep' needs min_rollouts or min_fraction; got neither")
        if given and on_incomplete != "keep":
            raise ValueError(
                "min_rollouts and min_fraction have an effect only with on_incomplete='keep'; got "
                f"on_incomplete={on_incomplete!r}"
            )
        at_least("min_rollouts", min_rollouts, 1)
        self.min_rollouts, self.min_fraction = min_rollouts, above_zero("min_fraction", min_fraction, 1)

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Tokens in the loss, which show whether a rollout is empty."""
        return [] if self.empty == "count" else [(self.loss_mask_key, self.log_prob_key)]

    def apply_to_nothing(self, batch: TensorDictBase) -> None:
        """Refuse a batch without rows if groups were dispatched for it."""
        nothing = torch.empty(0, dtype=torch.int64)
        missing = missing_groups(nothing, self._dispatched(nothing))
        if missing and self.on_incomplete == "raise":
            self._refuse([], missing)

    def decide(self, rows: Rows) -> None:
        """Take out or refuse incomplete groups."""
        rows = rows.with_excluded  # a rollout is present also if it is out of the statistics
        # 1. Count the present rollouts of each group. Without a rollout_key each row is a whole rollout.
        ends = self._ends(rows) if self.rollout_key is not None and rows.has("done") else None
        status = rows.status
        if self.group_size is None and not rows.has("expected"):
            raise MissingKeyError(
                "The gate must know how many rollouts each group was dispatched with: set {group_size=}, or "
                "give the batch a column {column}; {present}",
                **rows.facts("expected"),
            )
        presence = count_present(rows, self.group_size, ends, status)
        rollouts, groups = rows.rollouts, rows.groups
        incomplete = presence.have < presence.expected
        without_rows = [] if self.expected_groups is None else self._groups_without_rows(rows)

        # 2. Refuse the batch, or choose the groups to drop.
        if self.on_incomplete == "raise" and (without_rows or bool(incomplete.any())):
            firsts = groups.first[incomplete].sort().values
            found = [describe_group(rows, row, status, presence) for row in firsts[:LISTED].tolist()]
            # With ends, a rollout id that is repeated by mistake ends twice, and was refused above.
            hint = "" if ends is not None else shared_ids(rows, presence)
            text, facts, sizes = REFUSAL, rows.facts("expected"), presence.have.unique().tolist()
            if len(sizes) == 1 < len(firsts) and presence.present.all() and not (hint or without_rows):
                wrong = (
                    "correct the column {column}"
                    if self.group_size is None
                    else f"set {{group_size={sizes[0]}}}"
                )
                text = ALL_SHORT + DISPATCHED % wrong
                facts |= {"size": sizes[0], "or_wait": f", else {WAIT}", "without_remedy": ALL_SHORT}
            elif self.group_size is not None and len(sizes) > 1:
                text += UNEVEN
            hint += self._doubt(presence.have, incomplete)
            self._refuse(found, without_rows, hint, text, facts, of=len(firsts))
        dropped = incomplete
        if self.on_incomplete == "keep":
            share = presence.have.double() / presence.expected
            bounds = ((presence.have, self.min_rollouts), (share, self.min_fraction))
            dropped = torch.stack([found < least for found, least in bounds if least is not None]).any(0)

        # 3. Take out the rows of dropped groups, and of rollouts that are empty or not present.
        present, lost = rollouts.spread(presence.present), rollouts.spread(presence.lost)
        if self.done_key is None or rows.has("done"):  # later stages read this in place of the ends
            rows.put(FINISHED, present, dtype=torch.bool, ndim=1)
        # Only present rollouts leave as incomplete. Other rollouts have reasons of their own.
        rows.leave(groups.spread(dropped) & present, "incomplete")
        rows.leave(lost, "failed")
        rows.leave(~(present | lost), "unfinished")
        take_empty_out(rows, self.empty)

        # 4. Record the metrics; rows of incomplete groups count, whether they are kept or not.
        rows.metric("missing_groups", len(without_rows))
        rows.metric("incomplete_rows", groups.spread(incomplete).sum())

    def _ends(self, rows: Rows) -> Ends:
        """The columns that mark where rollouts begin and end."""
        return Ends(
            done=read_flags(rows, "done"),
            begins=read_flags(rows, "init") if rows.has("init") else None,
            segment=None if self.segment_key is None else rows.integers("segment", "segment"),
            expected=rows.integers("expected_segments", EXPECTED_SEGMENTS)
            if rows.has("expected_segments")
            else None,
        )

    def _dispatched(self, own: Tensor) -> Iterable[int] | None:
        """The groups that were dispatched for this batch; `own` are the group ids of this rank's rows."""
        if isinstance(self.expected_groups, KnowsDraws):
            return self.expected_groups.drawn_with(own.unique().tolist())
        return self.expected_groups() if callable(self.expected_groups) else self.expected_groups

    def _groups_without_rows(self, rows: Rows) -> list[int]:
        """List the dispatched groups of all ranks that have no row.

        Ranks with shared ids compare the groups of all ranks. Ranks with their own ids compare only theirs.
        """
        ranks, own = rows.table.ranks, rows.of_this_rank(rows.groups.labels)
        apart = ranks.shared_ids == "different"
        if apart:  # a rank's sampler knows the ids of the rank's own batch
            own = number_column(rows.tokens(), self.group_key).cpu()
        found: Iterable[int] = map(int, self._dispatched(own) or ())
        every = ranks.gather_objects(missing_groups(own, found) if apart else list(found))
        listed = [group for groups in every for group in groups]
        return listed if apart else missing_groups(rows.groups.labels, listed)

    def _doubt(self, have: Tensor, incomplete: Tensor) -> str:
        """A hint that `group_size` is wrong: most groups lack the same number of rollouts."""
        short, sizes = int(incomplete.sum()), have[incomplete].unique().tolist()
        if self.group_size is None or len(sizes) != 1 or short <= max(1, len(have) / 2):
            return ""
        return (
            f"Is group_size={self.group_size} wrong? {short} of {len(have)} groups have "
            f"{count_of(sizes[0], 'rollout')}. "
        )

    def _refuse(
        self,
        incomplete: list[str],
        without_rows: list[int],
        hint: str = "",
        text: str = REFUSAL,
        facts: Mapping[str, Any] | None = None,
        of: int = 0,
    ) -> None:
        """Raise for incomplete groups, which are described already, and for groups without rows.

        Args:
            incomplete: descriptions of the first incomplete groups.
            without_rows: ids of groups without rows.
            hint: what may be wrong.
            text: the text of the error.
            facts: facts about the column of group sizes.
            of: number of incomplete groups.
        """
        size = "all" if self.group_size is None else self.group_size
        found = [*incomplete, *(f"group {group} has 0 of {size} (no rows)" for group in without_rows)]
        count = of + len(without_rows)
        said = {"count": count, "found": listing(found, of=count), "s": "s" * (count > 1), "hint": hint}
        said["or_wait"] = f", or {WAIT}"
        raise IncompleteGroupsError(text, **said | dict(facts or {}))
