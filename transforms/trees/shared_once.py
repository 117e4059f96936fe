"""Sampled tokens that rows of one rollout share train once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.stages.sequences import END, left_aligned
from headrace.transforms.table import BatchTransform, ColumnNames, Effect, Rows
from headrace.transforms.table.schema import IN_LOSS, LENGTH, has_key
from headrace.transforms.table.tensordicts import count_true, device_of
from headrace.transforms.table.tokens import (
    describe_row,
    in_loss_there,
    mask_tokens,
    read_loss_mask,
    read_mask,
    read_tokens,
    same_width,
    tokens_of_all_ranks,
    whole_numbers,
)

from .prefixes import prefix_order


def train_shared_once(tokens: Tensor, trains: Tensor, rollout: Tensor, there: Tensor | None = None) -> Tensor:
    """Find the tokens in the loss that no earlier row of their rollout trains: (N, T) bool.

    Two rows of a rollout share token t if their first t + 1 tokens, of prompt and response, are equal. The
    first of the rows that train a shared token keeps it::

        keeps_it = trains_it ∧ ¬∃ j < i: trains_jt ∧ rollout_j = rollout_i ∧ tokens_j,≤t = tokens_i,≤t

    A row with a token in its prompt does not train this token, so a later row can keep it. Rows are compared
    exactly, on the CPU, and copied there if needed.

    Args:
        tokens: (N, T) int64.
        trains: (N, T) bool, the tokens in the loss. A token out of `there` does not train.
        rollout: (N,) int64, equal in the rows of a rollout.
        there: (N, T) bool, False at padding; None: only ``END`` is padding.

    Example:
        >>> tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 8]])
        >>> train_shared_once(tokens, tokens > 0, torch.tensor([0, 0])).int().tolist()
        [[1, 1, 1, 1], [0, 0, 1, 1]]
    """
    device, (rows, width) = tokens.device, tokens.shape
    tokens, trains, rollout = tokens.long().cpu(), trains.cpu(), rollout.cpu()
    there = (tokens != END if there is None else there).cpu()
    depth = there.cumsum(1)
    order, shared = prefix_order(left_aligned(tokens, there, depth), rollout, depth[:, -1:].sum(1))
    # 1. In sorted order, rows with equal first tokens are neighbours. Column t of `first` is the
    #    first of the rows that have the same first t + 1 tokens.
    place = torch.arange(rows)
    begins = shared[:, None] <= torch.arange(width)
    first = torch.where(begins, place[:, None], 0).cummax(0).values
    # 2. The first row, in the order of the batch, that trains the token of each such node.
    row, column = (trains & there).nonzero().unbind(1)
    at = depth[row, column] - 1
    node = first[torch.empty_like(order).index_copy_(0, order, place)[row], at] * width + at
    keeper = torch.full((rows * width,), rows).scatter_reduce_(0, node, row, "amin")
    keeps = torch.zeros_like(trains)
    keeps[row, column] = keeper[node] == row
    return keeps.to(device)


class TrainSharedOnce(
    BatchTransform,
    columns=("tokens", "attention", "loss_mask", "log_prob", "rollout"),
    needed=("rollout",),
):
    """Train each sampled token once, if rows of one rollout share it (:func:`train_shared_once`).

    If a rollout forks, each of its rows begins with the tokens before the fork. If these tokens are in the
    loss mask of several rows, they train several times, with a multiple of the weight of other tokens. With
    this stage, each shared token trains only in the first row of the batch that has it in the loss, with the
    log-probability, advantage and other columns of that row. In all other rows it leaves the loss, like a
    token of the prompt. Tokens that different rollouts share are not changed, because each rollout sampled
    its own.

    The loss mask of a token that leaves becomes False, and its behaviour log-probability NaN. In a pipeline
    with ``masked_log_prob=keep`` only the loss mask changes. Rewards, baselines and advantages do not change.
    Later stages still see the row's original length. If all tokens of a row train in other rows, the row is
    masked (``shared``).

    Put the stage after the filters, because a filter could take out the row that trains the token, and before
    the split. With prefix trees (``ShuffleSplit(tree="rollout")``) the stage is needed, too: a tree computes
    a shared token once, but the loss counts it in each row. Rows are compared by their token ids, not by
    images or other inputs. If a rollout has rows on several ranks, the ranks exchange the tokens of the
    batch.

    Reads `rollout_key`, `tokens_key`, `attention_key`, `loss_mask_key`, and `log_prob_key` if it exists: a
    token whose log-probability is not finite does not train. Writes `loss_mask_key`, `log_prob_key` and
    ``("headrace", "length")``. Measures ``shared_tokens``, the number of tokens that leave.

    Args:
        names: other names of columns, such as `tokens_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a row has no rollout id, or the loss mask is True on padding.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 8]])
        >>> masks = {"all_attention_mask": tokens > 0, "all_assistant_mask": tokens > 0}
        >>> rows = {"tokens": {"full": tokens}, "masks": masks, "rollout_id": [9, 9]}
        >>> td = TensorDict(rows, batch_size=[2])
        >>> TrainSharedOnce()(td)["masks", "all_assistant_mask"].int().tolist()
        [[1, 1, 1, 1], [0, 0, 1, 1]]
    """

    reasons: Mapping[str, Effect] = {"shared": "masked"}
    after_filters = True

    def __init__(self, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        own = [self.tokens_key, self.attention_key, self.loss_mask_key]
        super().__init__([self.rollout_key, *own], [IN_LOSS, LENGTH])

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """The columns of tokens of the rows that this stage masks."""
        return [(self.loss_mask_key, self.log_prob_key)]

    @property
    def masked_tokens_key(self) -> NestedKey | None:
        """The log-probabilities that become NaN at single tokens."""
        return self.log_prob_key

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Take out the tokens that earlier rows of their rollouts train."""
        # 1. The rows of rollouts that have several rows in the loss.
        rollouts, in_loss = rows.rollouts, rows.in_loss
        several = in_loss & (rollouts.spread(rollouts.sum(in_loss.long())) > 1)
        if not bool(several.any()):
            rows.leave(None, "shared", "masked")
            rows.metric("shared_tokens", 0)
            return batch
        # 2. The tokens of this rank.
        tokens = read_tokens(batch, self.tokens_key, reader=rows.reader, option="tokens_key")
        tokens = whole_numbers(tokens, self.tokens_key, "tokens_key")
        there = read_mask(batch, self.attention_key, reader=rows.reader, option="attention_key")
        mask = read_loss_mask(batch, self.loss_mask_key, in_loss_there(rows), reader=rows.reader)
        same_width(tokens, there, "tokens_key and attention_key")
        same_width(tokens, mask, "tokens_key and loss_mask_key")
        trains = mask
        if self.log_prob_key is not None and has_key(batch, self.log_prob_key):
            log_prob = read_tokens(batch, self.log_prob_key, reader=rows.reader, option="log_prob_key")
            same_width(tokens, log_prob, "tokens_key and log_prob_key")
            trains = trains & log_prob.isfinite()
        # 3. The shared tokens. Ranks exchange tokens only if a rollout has rows on several ranks.
        rank = rows.from_arrival(rows.table.rank_of_rows())
        apart = several & (rollouts.spread(rollouts.max(rank)) > rollouts.spread(rollouts.min(rank)))
        keeps = trains.clone()
        own = rows.of_this_rank(several).nonzero().flatten().to(device_of(batch))
        if bool(apart.any()):
            depth = there.cumsum(1)
            aligned = [left_aligned(each.long(), there, depth) for each in (tokens, trains)]
            every, learns = (each[several] for each in tokens_of_all_ranks(rows, *aligned, fill=END))
            kept = torch.zeros(len(rows), every.shape[1], dtype=torch.bool, device=every.device)
            kept[several] = train_shared_once(every, learns == 1, rollouts.of[several])
            kept = rows.of_this_rank(kept).to(trains.device).gather(1, (depth - 1).clamp_min(0))
            keeps[own] = (kept & trains)[own]
        else:
            ids = rows.of_this_rank(rollouts.of)[rows.of_this_rank(several)]
            keeps[own] = train_shared_once(tokens[own], trains[own], ids, there[own])
        # 4. Take shared tokens out of the loss, and mask rows that have no other tokens.
        out = trains & ~keeps
        found = rows.measured(
            tokens=count_true(mask),
            out=count_true(out),
            left=count_true(keeps),
            padding=count_true(mask > there) > 0,
        )
        rows.require(
            found["padding"] == 0,
            "tokens in the loss must be real tokens; the loss mask is True where the attention mask is False "
            "in {found}. Correct the mask that is wrong",
            describe_row(rows),
        )
        rows.metric("shared_tokens", found["out"].sum())
        mask_tokens(rows, batch, out, tokens=found["tokens"], taken=found["out"])
        rows.leave((found["out"] > 0) & (found["left"] == 0), "shared", "masked")
        return batch
