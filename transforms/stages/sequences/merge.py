"""Merge turns that are rows into one row, as long as each prompt continues the row before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Effect, Ids, Rows, Table
from headrace.transforms.table.checks import require_turns
from headrace.transforms.table.schema import (
    IN_LOSS,
    INIT,
    INTO,
    IS_FIRST_SEGMENT,
    LENGTH,
    MINIBATCH,
    REWARD,
    ROW,
    STATUS_KEYS,
    has_key,
)
from headrace.transforms.table.tensordicts import count_true, device_of, entries_of, parts_of, send_packed
from headrace.transforms.table.tokens import describe_row, in_loss_there, read_mask, read_tokens, write_tokens

from .dense import PARTS
from .packing import TOKEN_KEYS
from .words import END, left_aligned, repeated, words_of

OF_TOKENS = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy", "values", "sum_pi_squared")
FULL = tuple((name, "full") for name in OF_TOKENS)
MERGED_KEYS: tuple[NestedKey, ...] = (*TOKEN_KEYS, *FULL, "turn_index", "turn_reward", "importance_weight")
LAST_KEYS: tuple[NestedKey, ...] = (
    *(("next", name) for name in ("done", "terminated", "truncated")),
    *("done", "terminated", "truncated"),
    *STATUS_KEYS,
)
OF_SEGMENTS = (IS_FIRST_SEGMENT, INIT, LENGTH)


class Merged(NamedTuple):
    """The assignment of rows and tokens to merged rows."""

    into: Tensor
    """(N,) int64: the row that each row is merged into, the last of its segment; itself if it stays."""
    broken: Tensor
    """(N,) bool: the row does not continue the row before it in its rollout."""
    source: Tensor
    """(K,) int64: trained tokens of rows that are not kept, as row · T + column."""
    to: Tensor
    """(K,) int64: the new positions of these tokens, as row · T + column among the kept rows."""


def merge_turns(
    tokens: Tensor,
    trains: Tensor,
    rollout: Tensor,
    turn: Tensor | None = None,
    masked: Tensor | None = None,
    there: Tensor | None = None,
) -> Merged:
    """Find rows whose tokens are the beginning of the next row's prompt, in the same rollout.

    A row continues the row before if it starts with all tokens of that row, and none of these tokens are in
    the loss mask of the row itself. Otherwise a new segment starts, for example after the conversation was
    tokenised again or compacted. Rows are compared by their bytes on the CPU, and copied there if needed.

    Args:
        tokens: (N, T) int64.
        trains: (N, T) bool, the tokens in the loss.
        rollout: (N,) int64, equal in the rows of a rollout.
        turn: (N,) int64, orders the rows of a rollout; None: the rows are in order.
        masked: (N,) bool, rows out of the loss. No row is merged into one of these, so masked rows at the end
            of a segment are not merged. None: no row is masked.
        there: (N, T) bool, False at padding; None: only ``END`` is padding.

    Example:
        >>> tokens = torch.tensor([[5, 6, END, END], [5, 6, 7, 8], [5, 9, 9, END]])
        >>> trains = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).bool()
        >>> merged = merge_turns(tokens, trains, torch.tensor([0, 0, 0]))
        >>> merged.into.tolist(), merged.source.tolist(), merged.to.tolist()
        ([1, 1, 2], [1], [1])
    """
    device, width = tokens.device, tokens.shape[1]
    rollout, turn, masked = (None if each is None else each.cpu() for each in (rollout, turn, masked))
    there = (tokens != END if there is None else there).cpu()
    tokens, trains = tokens.long().cpu(), trains.cpu()

    # 1. Sort the rows by rollout, then by turn.
    row = torch.arange(len(tokens))
    order = row if turn is None else turn.sort(stable=True).indices
    order = order[rollout[order].sort(stable=True).indices]
    previous = order.roll(1)
    follows = rollout[order] == rollout[previous]
    follows[:1] = False  # `roll` compares the first row with the last

    # 2. The tokens of a row start at `begin`. If some rows have holes, move all tokens to the left.
    begin, count = _first(there), count_true(there)
    real = there.numpy()
    begins = len((real[:, 1:] > real[:, :-1]).ravel().nonzero()[0]) + int(there[:, :1].sum())
    together = begins == int((count > 0).sum())
    if not together:
        tokens, trains = left_aligned(tokens, there), left_aligned(trains.long(), there) == 1
        begin = torch.zeros_like(begin)

    # 3. Find rows that start with all tokens of the row before, none of them in the loss.
    learns = count_true(trains)
    prompt = torch.where(learns > 0, _first(trains) - begin, count)
    goes_on = follows & (count[previous] <= prompt[order])
    at = goes_on.nonzero().flatten()
    # An int64 token has 8 bytes. `startswith` compares slices in place, without a tensor for each pair.
    starts, content = 8 * (row * width + begin), tokens.numpy().tobytes()
    view, before = memoryview(content), previous[at]
    known = [each.tolist() for each in (starts[order[at]], starts[before], (starts + 8 * count)[before])]
    same = [content.startswith(view[start:stop], own) for own, start, stop in zip(*known, strict=True)]
    goes_on[at] = torch.tensor(same, dtype=torch.bool)

    # 4. Find the last row of each segment.
    extends = goes_on
    if masked is not None:
        segment = (~goes_on).long().cumsum(0) - 1
        last = torch.where(masked[order], -1, row)
        last = torch.full_like(row, -1).scatter_reduce_(0, segment, last, "amax")
        extends = goes_on & (row <= last.index_select(0, segment))
    ends = torch.ones_like(extends)
    ends[:-1] = ~extends[1:]
    at = torch.where(ends, row, len(row)).flip(0).cummin(0).values.flip(0)
    into = torch.empty_like(row).index_copy_(0, order, order[at])
    broken = torch.empty_like(ends).index_copy_(0, order, follows & ~goes_on)

    # 5. Find the position of each trained token in the last row of its segment.
    kept, leaves = (into == row).nonzero().flatten(), (into != row).nonzero().flatten()
    target, counts = into[leaves], learns[leaves]
    at = torch.from_numpy(trains.index_select(0, leaves).view(-1).numpy().nonzero()[0])
    source = at + repeated(width * (leaves - row[: len(leaves)]), counts)
    moves = width * (torch.searchsorted(kept, target) - leaves) + begin[target] - begin[leaves]
    to = source + repeated(moves, counts)
    if not together:
        for mask, places in ((there, source), (there[kept], to)):
            places.copy_(left_aligned(torch.arange(mask.numel()).view_as(mask), mask).view(-1)[places])
    return Merged(*send_packed([into, broken, source, to], device))


def _first(flags: Tensor) -> Tensor:
    """(N,) int64: the first True column of (N, T) bool on the CPU, or 0."""
    if flags.shape[1] == 0:
        return torch.zeros(len(flags), dtype=torch.int64)
    return torch.from_numpy(flags.numpy().argmax(1))  # ten times faster than torch


class MergeTurns(
    BatchTransform,
    columns=("turn", "tokens", "attention", "loss_mask", "advantage", "rollout"),
    needed=("rollout",),
):
    """Merge consecutive rows of a rollout into the last of them (:func:`merge_turns`).

    Use this stage for trainers without attention over trees. If rows are turns, and each has all earlier
    turns as its prompt, one row with the loss masks of all turns trains the same tokens. Each token keeps the
    log-probabilities, advantage and other token columns of the row in which it is trained. Its loss weight is
    unchanged, except with the units ``sample`` and ``turn`` of LossWeight, where a merged row counts once.
    Put the stage after the gate, the filters and the advantages, and before the split.

    If a prompt differs from the row before, for example because it was tokenised again, a new segment
    starts. The metric ``broken`` counts such rows. Columns per row must be equal in merged rows. Exceptions
    are texts, the status and the ends of rollouts, and the reward after FanOutCollapse: these are taken from
    the last row. TorchRL's ``prompt`` and ``response`` of tokens and log-probabilities are removed. Rows
    leave for the reason ``merged``; their tokens then count in the row that remains.

    Reads `rollout_key`, `tokens_key`, `attention_key`, `loss_mask_key`, and `turn_key` if it is set. Writes
    `loss_mask_key`, other existing token columns, and `advantage_key`, (N, T, 1).

    Args:
        names: other names of columns, such as `turn_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: rows to merge differ in a column per row; the batch is cut already; turns are not
            distinct; or the loss mask is True on padding.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]])
        >>> masks = {"all_attention_mask": tokens > 0, "all_assistant_mask": (tokens == 6) | (tokens == 8)}
        >>> masks["all_assistant_mask"][1, 1] = False  # row 0 trains this token
        >>> rows = {"tokens": {"full": tokens}, "masks": masks, "rollout_id": [3, 3]}
        >>> td = TensorDict(rows, batch_size=[2])
        >>> MergeTurns()(td)["masks", "all_assistant_mask"].int().tolist()
        [[0, 1, 0, 1]]
    """

    reasons: Mapping[str, Effect] = {"merged": "dropped"}

    def __init__(self, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        own = [self.tokens_key, self.attention_key, self.loss_mask_key]
        super().__init__([self.rollout_key, *own, self.turn_key], [])  # it moves columns, and makes none

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Merge rows, and remove the merged ones."""
        if has_key(batch, MINIBATCH):
            raise BatchError("rows must be merged before they are split: put MergeTurns before ShuffleSplit")
        rows = rows.with_excluded  # rows out of the statistics are merged, too
        batch = rows.write()
        device = device_of(batch)
        tokens = read_tokens(batch, self.tokens_key, reader=rows.reader, option="tokens_key").long()
        there, loss = (self._mask(batch, option, tokens) for option in ("attention_key", "loss_mask_key"))

        # 1. Find rows that continue the one before them in their rollout.
        rollout = rows.integers("rollout", "rollout_id")
        rows.require(
            rollout >= 0,
            "every row needs a rollout_id ≥ 0; found {found}: rows without an id would be merged",
            lambda row: f"{int(rollout[row])} at row {rows.at(row)}",
            ids="rollout_id",
        )
        turn = None if self.turn_key is None else rows.integers("turn", "turn")
        if turn is not None:
            require_turns(rows, turn)
        in_loss = in_loss_there(rows)
        trains = loss if in_loss is None else loss & in_loss[:, None]
        into, broken, source, to = merge_turns(
            tokens,
            trains,
            rows.of_this_rank(rollout),
            None if turn is None else rows.of_this_rank(turn),
            None if in_loss is None else ~rows.of_this_rank(rows.in_loss),
            there,
        )

        # 2. Check that columns per row are equal in merged rows, with one copy to the table.
        may_differ = {self.tokens_key, self.attention_key, self.loss_mask_key, self.advantage_key}
        may_differ |= {self.turn_key, *MERGED_KEYS, *LAST_KEYS, *PARTS}
        may_differ |= {ROW, IN_LOSS, *OF_SEGMENTS, *([("next", "reward")] if has_key(batch, REWARD) else [])}
        differs = {}
        for key in batch.keys(include_nested=True):
            if key not in may_differ and (column := _differs(batch, key, into)) is not None:
                differs[key] = column
        rows.table.load(OF_SEGMENTS)
        of_segments = {key for key in OF_SEGMENTS if rows.has(key)}
        tokens_of_rows = {"tokens": count_true(trains)} if LENGTH in of_segments else {}
        found = rows.measured(
            into=rows.table.live.to(device).index_select(0, into),
            broken=broken,
            padding=count_true(loss > there) > 0,
            **tokens_of_rows,
            **{f"differs in {key}": column for key, column in differs.items()},
        )
        rows.require(
            found["padding"] == 0,
            "tokens in the loss must be real; the loss mask is True where the attention mask is False in "
            "{found}, and merging would drop those tokens. Correct the wrong mask",
            describe_row(rows),
        )
        for key in differs:
            rows.require(
                found[f"differs in {key}"] == 0,
                "merged rows of a rollout must be equal in columns per row; {column} differs in {found}. "
                "Give it one value per rollout, or remove it (batch.exclude)",
                describe_row(rows),
                role=(key,) if isinstance(key, str) else key,
            )

        # 3. Update the table columns that describe whole segments.
        target = found["into"].long()
        if of_segments:
            segments = Ids(target)
            for key in of_segments - {LENGTH}:
                rows.put(key, segments.spread(segments.any(rows.number(key) != 0)), dtype=torch.bool)
        if LENGTH in of_segments:
            before = rows[LENGTH]
            whole = segments.sum(torch.where(before < 0, found["tokens"].long(), before))
            known = segments.any(before >= 0)
            rows.put(LENGTH, segments.spread(torch.where(known, whole, -1)), ndim=1)
        stays = target == rows.from_arrival(rows.table.every)
        rows.metric("merged", (~stays).sum())
        rows.metric("broken", found["broken"].sum())
        leave_merged(rows, target)

        # 4. Move token columns to the rows that are kept.
        kept = rows.of_this_rank(stays).nonzero().flatten().to(device)

        def moved(values: Tensor) -> Tensor:
            made = values.index_select(0, kept)
            made.flatten(0, 1).index_copy_(0, to, values.flatten(0, 1).index_select(0, source))
            return made

        same = (self.tokens_key, self.attention_key, self.loss_mask_key)
        by_token = [key for key in (*MERGED_KEYS, self.advantage_key) if key not in same]
        made = rows.tokens().exclude(*PARTS)
        for key in [key for key in dict.fromkeys(by_token) if has_key(batch, key)]:
            write_tokens(made, key, moved(_by_token(batch, key, self.tokens_key)), self.tokens_key)
        write_tokens(made, self.loss_mask_key, moved(trains), self.tokens_key)
        return made

    def _mask(self, batch: TensorDictBase, option: str, tokens: Tensor) -> Tensor:
        """(B, T) bool, the mask that an option names."""
        key = getattr(self, option)
        mask = read_mask(batch, key, reader=type(self).__name__, option=option)
        if mask.shape != tokens.shape:
            raise BatchError(
                f"a mask must have the shape of the tokens, {tuple(tokens.shape)}; {key!r} has "
                f"{tuple(mask.shape)}"
            )
        return mask


def leave_merged(rows: Rows, into: Tensor) -> None:
    """Take merged rows out, and note in the table which rows have their tokens (:func:`with_merged`).

    The tokens of rows out of the loss are not merged.

    Args:
        rows: the view of the stage.
        into: (M,) int64, for each row of the view the table index of the row that it is merged into; its
            own table index if it stays.
    """
    columns, every = rows.table.columns, rows.table.every
    own = rows.from_arrival(every)
    step = every.index_copy(0, own, torch.where(rows.in_loss, into, own))
    before = columns.get(INTO, torch.full_like(every, -1))
    now = step[torch.where(before < 0, every, before)]
    columns[INTO] = torch.where(now == every, -1, now)
    rows.leave(into != own, "merged", "dropped")


def with_merged(table: Table, counts: Tensor) -> Tensor:
    """(N,) counts per row. The count of a merged row is added to the row that it was merged into."""
    if (into := table.columns.get(INTO)) is None:
        return counts
    into = torch.where(into < 0, torch.arange(len(into)), into)
    return torch.zeros_like(counts).index_add_(0, into, counts)


def _by_token(batch: TensorDictBase, key: NestedKey, like: NestedKey) -> Tensor:
    """(B, T, ...) of a token column, or of a column with one entry per row, which is repeated."""

    def widened(column: Tensor, width: int, dim: int) -> Tensor:
        if column.shape[dim : dim + 1] not in ((width,), (1,)):
            raise BatchError(
                f"a token column must have the width of the tokens, {width}; {key!r} has "
                f"{tuple(column.shape[dim : dim + 1])}: cut or pad it like the tokens, or remove it"
            )
        return column.expand(*column.shape[:dim], width, *column.shape[dim + 1 :])

    if not isinstance(batch, LazyStackedTensorDict):
        return widened(batch.get(key), batch.get(like).shape[1], 1)
    pairs: Any = zip(entries_of(batch, key) or [], entries_of(batch, like) or [], strict=True)
    return nn.utils.rnn.pad_sequence([widened(own, len(whole), 0) for own, whole in pairs], batch_first=True)


def _differs(batch: TensorDictBase, key: NestedKey, into: Tensor) -> Tensor | None:
    """(B,) bool: the row differs in this column from the row it is merged into; None for texts."""
    parts = parts_of(batch, key)
    if not all(isinstance(part, Tensor) for part in parts):
        return None
    if isinstance(batch, LazyStackedTensorDict):
        column = words_of(parts)
        return (column != column.index_select(0, into)).any(1)
    column = parts[0]
    column = column.detach().flatten(1) if column.ndim > 1 else column.detach()[:, None]
    other = column.index_select(0, into)
    return ((column != other) & ~((column != column) & (other != other))).any(1)
