"""Turns that are rows, merged into one row as long as each prompt goes on from the row before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, set_rule, turn_rules
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import any_by, as_ids, first_row, places_by_turn, sum_by
from headrace.transforms.options import nested_key
from headrace.transforms.prefixes import END, left_aligned, same_content
from headrace.transforms.rows import rows_that_stay
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
from headrace.transforms.tokens import ATTENTION, check_mask, read_tokens, write_tokens

from .dense import PARTS
from .describing import describe_row
from .packing import TOKEN_KEYS

FULL = tuple((name, "full") for name in ("old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy"))
MERGED_KEYS: tuple[NestedKey, ...] = (*TOKEN_KEYS, *FULL, "turn_index", "turn_reward", "importance_weight")
LAST_KEYS: tuple[NestedKey, ...] = (
    *(("next", name) for name in ("done", "terminated", "truncated")),
    *("done", "terminated", "truncated"),
    *STATUS_KEYS,
)


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
) -> Merged:
    """Find the rows of a rollout that are the beginning of the next one's prompt.

    A row goes on from the row before it in its rollout if all tokens of that are its own first ones, and
    none of them trains in it. Else, as where a conversation was tokenised anew, or compacted, a new segment
    begins. No device read.

    Args:
        tokens: (N, T) int64, from the left on, with ``END`` behind (``left_aligned``).
        trains: (N, T) bool, likewise, the tokens in the loss.
        first: (N,) int64, the first row of each row's rollout.
        turn: (N,) int64, orders the rows of a rollout; None: they are in order.
        silent: (N,) bool, rows out of the loss. A row is not merged into one that says of itself that it
            does not train, so those at the end of a segment stay as they are. None: there are none.

    Example:
        >>> tokens = torch.tensor([[5, 6, END, END], [5, 6, 7, 8], [5, 9, 9, END]])
        >>> trains = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).bool()
        >>> merge_turns(tokens, trains, torch.tensor([0, 0, 0])).into.tolist()
        [1, 1, 2]
    """
    row = torch.arange(len(first), device=first.device)
    order = places_by_turn(first, turn).place.sort(stable=True).indices
    order = order[first[order].sort(stable=True).indices]  # rollout by rollout, turn by turn
    before = order.roll(1)
    follows = first[order] == first[before]
    follows[:1] = False
    inside = tokens[before] != END
    same = (tokens[order] == tokens[before]) & ~trains[order]
    extends = goes_on = follows & (same | ~inside).all(1)
    if silent is not None:
        segment = (~goes_on).long().cumsum(0) - 1
        last = torch.where(silent[order], -1, row)
        last = torch.full_like(row, -1).scatter_reduce_(0, segment, last, "amax")
        extends = goes_on & (row <= last.index_select(0, segment))
    ends = torch.ones_like(extends)
    ends[:-1] = ~extends[1:]
    at = torch.where(ends, row, len(row)).flip(0).cummin(0).values.flip(0)  # where its segment ends
    into = torch.empty_like(row).index_copy_(0, order, order[at])
    return Merged(into, torch.empty_like(ends).index_copy_(0, order, follows & ~goes_on))


class MergeTurns(BatchTransform):
    """Merge rows of a rollout that go on from one another into the last of them (:func:`merge_turns`).

    For trainers without attention over trees. Where rows are turns, each with all that came before it as its
    prompt, one row with the masks of all computes the same: a token is trained with the log-probabilities,
    advantage and other columns by token of the row in which it trains. A token trained before and after
    weighs the same under every mean of LossWeight but those of ``sample`` and ``turn``, to which a merged row
    is one. It stands before the cut, behind all that measures rows: gate, filters, advantages.

    Where a prompt is not what was sampled before, such as one that was tokenised anew, a new segment begins,
    counted as ``broken``. Columns by row must agree between rows that are merged, but for `last_keys`, texts
    and the reward behind FanOutCollapse, of which that of the last row stays. TorchRL's ``prompt`` and
    ``response`` of tokens and log-probabilities are left out. Its verdict is 1 ``merged``.

    Reads `rollout_key`, `tokens_key`, `attention_key`, `loss_mask_key`, and `turn_key` where it is given.
    Writes `loss_mask_key`, other columns by token that are there, and `advantage_key`, (N, T, 1).
    One device read, of who stays.

    Args:
        token_keys: (N, T, ...) or ragged, columns by token that this library and TorchRL do not know.
        last_keys: columns by row that may differ, besides the status and where rollouts end.
        turn_key: (N,) or (N, 1) int that orders a rollout's rows; None: the order of the rows.
        tokens_key: (N, T) int64.
        attention_key: (N, T) bool, True at real tokens.
        loss_mask_key: (N, T) bool, True trains.
        advantage_key: (N, 1, 1) or (N, T, 1) float; it may be missing.
        rollout_key: (N,) or (N, 1) int.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: rows to merge differ in a column by row; the batch is cut already; turns are not distinct.

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
        turn_key: NestedKey | None = None,
        tokens_key: NestedKey = ("tokens", "full"),
        attention_key: NestedKey = ATTENTION,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        advantage_key: NestedKey = "advantage",
        rollout_key: NestedKey = "rollout_id",
    ):
        self.token_keys, self.last_keys = (tuple(map(nested_key, keys)) for keys in (token_keys, last_keys))
        self.turn_key, self.rollout_key = nested_key(turn_key), nested_key(rollout_key)
        self.tokens_key, self.attention_key = nested_key(tokens_key), nested_key(attention_key)
        self.loss_mask_key, self.advantage_key = nested_key(loss_mask_key), nested_key(advantage_key)
        own = [self.tokens_key, self.attention_key, self.loss_mask_key]
        super().__init__([self.rollout_key, *own, self.turn_key], [])  # it moves what others have measured

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Merge, and take out what was merged."""
        if has_key(batch, MINIBATCH):
            raise BatchError("rows are merged before they are cut: put MergeTurns before ShuffleSplit")
        name = type(self).__name__
        tokens = read_tokens(batch, self.tokens_key, reader=name, option="tokens_key").long()
        there, loss = (self._mask(batch, option, tokens) for option in ("attention_key", "loss_mask_key"))
        silent = ~batch.get(IN_LOSS) if has_key(batch, IN_LOSS) else None
        trains = loss & there if silent is None else loss & there & ~silent[:, None]
        rollouts, turn = self.ids(batch, "rollout"), None
        first = first_row(rollouts)
        if self.turn_key is not None:
            turn = as_ids(self.column(batch, "turn_key"), "turn")
        inside = left_aligned(trains.long(), there) == 1
        merged = merge_turns(left_aligned(tokens, there), inside, first, turn, silent)
        rules = [set_rule(rollouts, "rollout_id", "rows without an id would be merged")]
        rules += [*turn_rules(rollouts, first, turn), *self._agreement(batch, merged.into)]
        batch = batch.exclude(*PARTS)
        self._merge_tokens(batch, _Moves(there, trains, merged.into))
        self._merge_rows(batch, merged.into, trains.sum(1))
        stays = merged.into == torch.arange(len(batch), device=merged.into.device)
        measured = {"merged": (~stays).sum(), "broken": merged.broken.sum()}
        left = (~stays).to(torch.int8)
        moved = merged.into
        if silent is not None:  # what does not train does not become what does
            moved = torch.where(silent, torch.arange(len(left), device=left.device), moved)
        return Outcome(rows_that_stay(batch, stays), left, measured, rules, into=moved)

    def _mask(self, batch: TensorDictBase, option: str, tokens: Tensor) -> Tensor:
        """(N, T) bool of an option that names a mask."""
        key = getattr(self, option)
        mask = read_tokens(batch, key, reader=type(self).__name__, option=option)
        check_mask(batch, key)
        if mask.shape != tokens.shape:
            raise BatchError(
                f"a mask is as wide as the tokens, {tuple(tokens.shape)}; {key!r} is {tuple(mask.shape)}"
            )
        return mask

    def _merge_tokens(self, batch: TensorDictBase, moves: _Moves) -> None:
        """Write columns by token, of rows that stay with what was moved to them."""
        own = (self.tokens_key, self.attention_key, self.loss_mask_key)
        keys = [key for key in (*MERGED_KEYS, *self.token_keys) if key not in own and has_key(batch, key)]
        for key in [*keys, *([self.advantage_key] if has_key(batch, self.advantage_key) else [])]:
            write_tokens(batch, key, moves.column(_by_token(batch, key, self.tokens_key)), self.tokens_key)
        write_tokens(batch, self.loss_mask_key, moves.mask(), self.tokens_key)

    def _merge_rows(self, batch: TensorDictBase, into: Tensor, tokens: Tensor) -> None:
        """Write what is said of segments as a whole."""
        for key in (IS_FIRST_SEGMENT, IN_LOSS, INIT):
            if has_key(batch, key):
                column = batch.get(key)
                batch.set(key, any_by(first_row(into), column.reshape(-1)).view(column.shape))
        if has_key(batch, LENGTH):
            before, home = batch.get(LENGTH), first_row(into)
            whole = sum_by(home, torch.where(before < 0, tokens, before))
            batch.set(LENGTH, torch.where(any_by(home, before >= 0), whole, -1))

    def _agreement(self, batch: TensorDictBase, into: Tensor) -> Iterator[Rule]:
        """Columns by row are those of the row into which it is merged."""
        may_differ = {self.tokens_key, self.attention_key, self.loss_mask_key, self.advantage_key}
        may_differ |= {*MERGED_KEYS, *self.token_keys, *LAST_KEYS, *self.last_keys, *PARTS}
        may_differ |= {self.turn_key, ROW, LENGTH}
        may_differ |= {IS_FIRST_SEGMENT, IN_LOSS, INIT}
        may_differ |= {("next", "reward")} if has_key(batch, REWARD) else set()
        describe = describe_row(batch, self.rollout_key)
        for key in batch.keys(include_nested=True, leaves_only=True):
            if key not in may_differ and (differs := _differs(batch, key, into)) is not None:
                yield Rule(differs, describe, _message(key))


class _Moves:
    """What is taken from rows that are merged, and where it goes.

    Args:
        there: (N, T) bool, real tokens.
        trains: (N, T) bool, those of them that are in the loss.
        into: (N,) int64, the row that each becomes a part of.
    """

    def __init__(self, there: Tensor, trains: Tensor, into: Tensor):
        rows, width = there.shape
        column = torch.arange(width, device=there.device).expand(rows, width)
        place = (there.long().cumsum(1) - 1).clamp_min(0)
        target = left_aligned(column, there)[into].gather(1, place)  # where the row it goes to has that token
        leaves = trains & (into != torch.arange(rows, device=into.device))[:, None]
        self.to = torch.where(leaves, into[:, None] * width + target, rows * width).flatten()
        self.trains = trains

    def column(self, values: Tensor) -> Tensor:
        """(N, T, ...), of rows that stay with what the others say of the tokens that train in them."""
        flat = values.flatten(0, 1)
        room = torch.cat([flat, flat[:1]])  # one entry for all that stays where it is
        return room.index_copy_(0, self.to, flat)[:-1].view(values.shape)

    def mask(self) -> Tensor:
        """(N, T) bool, what trains in merged rows."""
        return self.column(self.trains)


def _by_token(batch: TensorDictBase, key: NestedKey, like: NestedKey) -> Tensor:
    """(N, T, ...) of a column by token, or of one with an entry a row that stands for all of them."""
    if not isinstance(batch, LazyStackedTensorDict):
        column, width = batch.get(key), batch.get(like).shape[1]
        _check_width(column.shape[1:2], width, key)
        return column.expand(len(batch), width, *column.shape[2:])
    rows = []
    for row in batch.tensordicts:
        column, width = row.get(key), row.get(like).shape[0]
        _check_width(column.shape[:1], width, key)
        rows.append(column.expand(width, *column.shape[1:]))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _check_width(found: Sequence[int], width: int, key: NestedKey) -> None:
    if tuple(found) not in ((width,), (1,)):
        raise BatchError(
            f"a column by token is as wide as the tokens, {width}; {key!r} is {tuple(found)}: cut or pad it "
            "like them, or leave it out (batch.exclude)"
        )


def _differs(batch: TensorDictBase, key: NestedKey, into: Tensor) -> Tensor | None:
    """(N,) bool: a column says other things of a row than of the one it is merged into; None of texts."""
    if isinstance(batch, LazyStackedTensorDict):
        rows = list(batch.get(key, as_list=True))
        if not all(isinstance(row, Tensor) for row in rows):
            return None
        content = same_content(rows)
        return content != content[into]
    column = batch.get(key)
    if not isinstance(column, Tensor):
        return None
    column = column.detach().reshape(len(batch), -1)
    other = column.index_select(0, into)
    return ((column != other) & ~((column != column) & (other != other))).any(1)


def _message(key: NestedKey) -> str:
    return (
        f"rows of a rollout that are merged agree in each column by row; {key!r} differs in {{found}}. Where "
        "that of the last row will do, name it in last_keys; where it is by token, in token_keys; or leave "
        "it out (batch.exclude)"
    )
