"""Turns that are rows, merged into one row as long as each prompt goes on from the row before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.errors import BatchError, who_stamps
from headrace.transforms.ids import Ids
from headrace.transforms.options import nested_key
from headrace.transforms.prefixes import END, left_aligned, words_of
from headrace.transforms.required import require_turns
from headrace.transforms.rows import Rows
from headrace.transforms.schema import (
    IN_LOSS,
    INIT,
    IS_FIRST_SEGMENT,
    LENGTH,
    MINIBATCH,
    REWARD,
    ROW,
    STATUS_KEYS,
    has_key,
)
from headrace.transforms.stage import BatchTransform
from headrace.transforms.tensordicts import count_true, device_of, entries_of, parts_of, send_packed
from headrace.transforms.tokens import (
    describe_row,
    in_loss_there,
    read_mask,
    read_tokens,
    write_tokens,
)

from .dense import PARTS
from .packing import TOKEN_KEYS

FULL = tuple((name, "full") for name in ("old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy"))
MERGED_KEYS: tuple[NestedKey, ...] = (*TOKEN_KEYS, *FULL, "turn_index", "turn_reward", "importance_weight")
LAST_KEYS: tuple[NestedKey, ...] = (
    *(("next", name) for name in ("done", "terminated", "truncated")),
    *("done", "terminated", "truncated"),
    *STATUS_KEYS,
)
OF_SEGMENTS = (IS_FIRST_SEGMENT, INIT, LENGTH)


class Merged(NamedTuple):
    """Where rows go that are merged. All (N,)."""

    into: Tensor
    """int64: the row that a row becomes a part of, the last of its segment; itself where it stays."""
    broken: Tensor
    """bool: there is a row before it in its rollout, which it does not go on from."""


def merge_turns(
    tokens: Tensor,
    trains: Tensor,
    first: Tensor,
    turn: Tensor | None = None,
    silent: Tensor | None = None,
    there: Tensor | None = None,
) -> Merged:
    """Find the rows of a rollout that are the beginning of the next one's prompt.

    A row goes on from the row before it in its rollout if all tokens of that are its own first ones, and
    none of them trains in it. Else, as where a conversation was tokenised anew, or compacted, a new segment
    begins. Rows are compared as bytes on the host, to which they are copied from another device.

    Args:
        tokens: (N, T) int64.
        trains: (N, T) bool, the tokens in the loss.
        first: (N,) int64, the first row of each row's rollout.
        turn: (N,) int64, orders the rows of a rollout; None: they are in order.
        silent: (N,) bool, rows out of the loss. A row is not merged into one that says of itself that it
            does not train, so those at the end of a segment stay as they are. None: there are none.
        there: (N, T) bool, which tokens are no padding; None: those that are not ``END``.

    Example:
        >>> tokens = torch.tensor([[5, 6, END, END], [5, 6, 7, 8], [5, 9, 9, END]])
        >>> trains = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).bool()
        >>> merge_turns(tokens, trains, torch.tensor([0, 0, 0])).into.tolist()
        [1, 1, 2]
    """
    device, first = first.device, first.cpu()
    there = tokens != END if there is None else there
    turn, silent = (None if each is None else each.cpu() for each in (turn, silent))
    row = torch.arange(len(first))
    order = Ids(first).positions(turn).sort(stable=True).indices
    order = order[first[order].sort(stable=True).indices]  # rollout by rollout, turn by turn
    follows = first[order] == first[order.roll(1)]
    follows[:1] = False
    rows, same = _contents(tokens.long().cpu(), there.cpu(), trains.cpu()), []
    for own, other in zip(order.tolist(), order.roll(1).tolist(), strict=True):
        (content, prompt), before = rows[own], rows[other][0]
        same.append(len(before) <= prompt and content.startswith(before))
    goes_on = follows & torch.tensor(same, dtype=torch.bool)
    extends = goes_on
    if silent is not None:
        segment = (~goes_on).long().cumsum(0) - 1
        last = torch.where(silent[order], -1, row)
        last = torch.full_like(row, -1).scatter_reduce_(0, segment, last, "amax")
        extends = goes_on & (row <= last.index_select(0, segment))
    ends = torch.ones_like(extends)
    ends[:-1] = ~extends[1:]
    at = torch.where(ends, row, len(row)).flip(0).cummin(0).values.flip(0)  # where its segment ends
    into = torch.empty_like(row).index_copy_(0, order, order[at])
    broken = torch.empty_like(ends).index_copy_(0, order, follows & ~goes_on)
    return Merged(into.to(device), broken.to(device))


def _contents(tokens: Tensor, there: Tensor, trains: Tensor) -> list[tuple[bytes, int]]:
    """Of each row its tokens as bytes, and how many of these are in front of the first that trains."""
    size = 8 * tokens.shape[1]
    begin, end = _edges(there)
    learns = torch.where(count_true(trains) > 0, _edges(trains)[0], tokens.shape[1])
    found, whole, closed = [], tokens.numpy().tobytes(), count_true(there) == end - begin
    columns = zip(begin.tolist(), end.tolist(), learns.tolist(), closed.tolist(), strict=True)
    for row, (start, stop, first, is_closed) in enumerate(columns):
        if is_closed:
            content = whole[row * size + 8 * start : row * size + 8 * stop]
            found.append((content, 8 * (first - start)))
        else:  # with holes between tokens
            own = there[row]
            found.append((tokens[row][own].numpy().tobytes(), 8 * int(own[:first].sum())))
    return found


def _edges(there: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) int64 each, of (N, T) bool on the CPU: the first column that is True, and that behind the last."""
    if there.shape[1] == 0 or len(there) == 0:
        return torch.zeros(2, len(there), dtype=torch.int64).unbind(0)
    real = there.numpy()  # NumPy finds a bool in a tenth of the time
    begin, behind = (torch.from_numpy(each.argmax(1)) for each in (real, real[:, ::-1]))
    return begin, torch.where(count_true(there) > 0, there.shape[1] - behind, 0)


class MergeTurns(
    BatchTransform,
    columns=("turn", "tokens", "attention", "loss_mask", "advantage", "rollout"),
    needed=("rollout",),
):
    """Merge rows of a rollout that go on from one another into the last of them (:func:`merge_turns`).

    For trainers without attention over trees. Where rows are turns, each with all that came before it as its
    prompt, one row with the masks of all computes the same: a token is trained with the log-probabilities,
    advantage and other columns by token of the row in which it trains. A token trained before and after
    weighs the same under every mean of LossWeight but those of ``sample`` and ``turn``, to which a merged row
    is one. It stands before the cut, behind all that measures rows: gate, filters, advantages.

    Where a prompt is not what was sampled before, such as one that was tokenised anew, a new segment begins,
    counted as ``broken``. Columns by row must agree between rows that are merged, but for `last_keys`, texts
    and the reward behind FanOutCollapse, of which that of the last row stays. TorchRL's ``prompt`` and
    ``response`` of tokens and log-probabilities are left out. Rows leave as ``merged``; their tokens are
    counted in the rows into which they are merged.

    Reads `rollout_key`, `tokens_key`, `attention_key`, `loss_mask_key`, and `turn_key` where it is given.
    Writes `loss_mask_key`, other columns by token that are there, and `advantage_key`, (N, T, 1).

    Args:
        token_keys: (N, T, ...) or ragged, columns by token that this library and TorchRL do not know.
        last_keys: columns by row that may differ, besides the status and where rollouts end.
        names: other names of columns, such as `turn_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is not there.
        BatchError: rows to merge differ in a column by row; the batch is cut already; turns are not distinct;
            a token in the loss is no real one.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]])
        >>> masks = {"all_attention_mask": tokens > 0, "all_assistant_mask": (tokens == 6) | (tokens == 8)}
        >>> masks["all_assistant_mask"][1, 1] = False  # its own turn trains there
        >>> rows = {"tokens": {"full": tokens}, "masks": masks, "rollout_id": [3, 3]}
        >>> td = TensorDict(rows, batch_size=[2])
        >>> MergeTurns()(td)["masks", "all_assistant_mask"].int().tolist()
        [[0, 1, 0, 1]]
    """

    reasons = ("merged",)
    effects = ("dropped",)

    def __init__(
        self,
        *,
        token_keys: Sequence[NestedKey] = (),
        last_keys: Sequence[NestedKey] = (),
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.token_keys, self.last_keys = (tuple(map(nested_key, keys)) for keys in (token_keys, last_keys))
        own = [self.tokens_key, self.attention_key, self.loss_mask_key]
        super().__init__([self.rollout_key, *own, self.turn_key], [])  # it moves what others have measured

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Merge, and take out what was merged."""
        if has_key(batch, MINIBATCH):
            raise BatchError("rows are merged before they are cut: put MergeTurns before ShuffleSplit")
        batch = rows.write()
        device = device_of(batch)
        tokens = read_tokens(batch, self.tokens_key, reader=rows.reader, option="tokens_key").long()
        there, loss = (self._mask(batch, option, tokens) for option in ("attention_key", "loss_mask_key"))

        # 1. Which rows go on from the one before them in their rollout.
        ids = rows.ids("rollout", checked=False).everyone
        rows.require(
            ids.labels >= 0,
            "every row needs a rollout_id ≥ 0; found {found}: rows without an id would be merged"
            + who_stamps("rollout_id"),
            lambda row: f"{int(ids.labels[row])} at row {rows.at(row)}",
        )
        turn = None if self.turn_key is None else rows.integers("turn", "turn")
        require_turns(rows, turn)
        own = Ids(rows.of_rank(ids.labels))
        in_loss = in_loss_there(rows)
        trains = loss if in_loss is None else loss & in_loss[:, None]
        into, broken = merge_turns(
            tokens,
            trains,
            own.spread(own.first),
            None if turn is None else rows.of_rank(turn),
            None if in_loss is None else ~rows.of_rank(rows.in_loss),
            there,
        )
        into, broken = into.to(device), broken.to(device)

        # 2. Columns by row are those of the row into which it is merged. One copy tells the table all of it.
        may_differ = {self.tokens_key, self.attention_key, self.loss_mask_key, self.advantage_key}
        may_differ |= {self.turn_key, *MERGED_KEYS, *self.token_keys, *LAST_KEYS, *self.last_keys, *PARTS}
        may_differ |= {ROW, IN_LOSS, *OF_SEGMENTS, *([("next", "reward")] if has_key(batch, REWARD) else [])}
        differs = {}
        for key in batch.keys(include_nested=True, leaves_only=True):
            if key not in may_differ and (column := _differs(batch, key, into)) is not None:
                differs[key] = column
        found = rows.measured(
            into=rows.table.live.to(device).index_select(0, into),
            broken=broken,
            tokens=count_true(trains),
            padding=count_true(loss & ~there) > 0,
            **{f"differs in {key}": column for key, column in differs.items()},
        )
        rows.require(
            found["padding"] == 0,
            "a token in the loss is a real one; the loss mask is True where the attention mask is False in "
            "{found}, and merging would drop those tokens. Correct the mask that is wrong",
            describe_row(rows),
        )
        for key in differs:
            rows.require(
                found[f"differs in {key}"] == 0,
                f"merged rows of a rollout agree in each column by row; {key!r} differs in {{found}}."
                " Where that of the last row will do, name it in last_keys; where it is by token, in "
                "token_keys; or leave it out (batch.exclude)",
                describe_row(rows),
            )

        # 3. What the table says of a segment as a whole.
        segments = Ids(found["into"].long())
        rows.table.load(OF_SEGMENTS)
        for key in (IS_FIRST_SEGMENT, INIT):
            if rows.has(key):
                rows.put(key, segments.spread(segments.any(rows.number(key) != 0)), dtype=torch.bool)
        if rows.has(LENGTH):
            before = rows[LENGTH]
            whole = segments.sum(torch.where(before < 0, found["tokens"].long(), before))
            known = segments.any(before >= 0)
            rows.put(LENGTH, segments.spread(torch.where(known, whole, -1)), ndim=1)
        home = rows.table.places(rows.of_rank(segments.labels))
        stays = home == torch.arange(len(home))
        rows.metric("merged", (~stays).sum())
        rows.metric("broken", rows.of_rank(found["broken"]).sum())
        rows.merge(segments.labels, self.reasons[0])

        # 4. What is said of a token goes to where the row has it that it becomes a part of.
        width, kept, real = tokens.shape[1], stays.nonzero().flatten(), there.cpu()
        leaves = (~stays).nonzero().flatten()
        goes = trains.cpu().index_select(0, leaves).view(-1)
        at = torch.from_numpy(goes.numpy().nonzero()[0])
        source, column = leaves[at // max(width, 1)], at % max(width, 1)
        target = home[source]
        begin, end = _edges(real)
        if torch.equal(end - begin, count_true(real)):  # tokens lie together in all rows
            to = column - begin[source] + begin[target]
        else:
            places = torch.arange(width).expand(real.shape)
            to = left_aligned(places, real)[target, real.cumsum(1)[source, column] - 1]
        to += torch.searchsorted(kept, target) * width
        kept, source, column, to = send_packed([kept, source, column, to], device)

        def moved(values: Tensor) -> Tensor:
            made = values.index_select(0, kept)
            made.flatten(0, 1).index_copy_(0, to, values[source, column])
            return made

        same = (self.tokens_key, self.attention_key, self.loss_mask_key)
        by_token = [key for key in (*MERGED_KEYS, *self.token_keys, self.advantage_key) if key not in same]
        made = rows.tokens().exclude(*PARTS)
        for key in [key for key in dict.fromkeys(by_token) if has_key(batch, key)]:
            write_tokens(made, key, moved(_by_token(batch, key, self.tokens_key)), self.tokens_key)
        write_tokens(made, self.loss_mask_key, moved(trains), self.tokens_key)
        return made

    def _mask(self, batch: TensorDictBase, option: str, tokens: Tensor) -> Tensor:
        """(B, T) bool, of an option that names a mask."""
        key = getattr(self, option)
        mask = read_mask(batch, key, reader=type(self).__name__, option=option)
        if mask.shape != tokens.shape:
            raise BatchError(
                f"a mask is as wide as the tokens, {tuple(tokens.shape)}; {key!r} is {tuple(mask.shape)}"
            )
        return mask


def _by_token(batch: TensorDictBase, key: NestedKey, like: NestedKey) -> Tensor:
    """(B, T, ...) of a column by token, or of one with an entry a row that stands for all of them."""

    def widened(column: Tensor, width: int, dim: int) -> Tensor:
        if column.shape[dim : dim + 1] not in ((width,), (1,)):
            raise BatchError(
                f"a column by token is as wide as the tokens, {width}; {key!r} is "
                f"{tuple(column.shape[dim : dim + 1])}: cut or pad it like them, or leave it out"
            )
        return column.expand(*column.shape[:dim], width, *column.shape[dim + 1 :])

    if not isinstance(batch, LazyStackedTensorDict):
        return widened(batch.get(key), batch.get(like).shape[1], 1)
    pairs: Any = zip(entries_of(batch, key) or [], entries_of(batch, like) or [], strict=True)
    return nn.utils.rnn.pad_sequence([widened(own, len(whole), 0) for own, whole in pairs], batch_first=True)


def _differs(batch: TensorDictBase, key: NestedKey, into: Tensor) -> Tensor | None:
    """(B,) bool: a column says other things of a row than of the one it is merged into; None of texts."""
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
