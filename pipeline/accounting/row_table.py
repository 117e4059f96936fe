"""What is known of each row of a batch: as it came in, and as far as the stages took it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.options import nested_key
from headrace.transforms.rewards import weighted_reward
from headrace.transforms.rows import device_of, flat_rows, listed
from headrace.transforms.schema import (
    COUNTED,
    FOLDED_WEIGHT,
    MICROBATCH,
    MINIBATCH,
    RANK,
    REWARD,
    ROW,
    has_key,
)
from headrace.transforms.tokens import knows_loss_tokens, loss_tokens

from .messages import message_lines

# Where a report looks for what it shows; the first key that the batch has.
KEYS: dict[str, tuple[NestedKey, ...]] = {
    "reward": (("next", "reward"), "reward"),
    "status": (("next", "status"), "status"),
    "policy_version": (("next", "policy_version"), "policy_version"),
    "expected_rollouts": ("expected_rollouts",),
    "advantage": ("advantage",),
    "importance_weight": ("importance_weight",),
    "loss_weight": ("loss_weight",),
    "prompt": ("prompt_text", ("text", "prompt"), ("history", "prompt"), "query"),
    "response": ("response_text", ("text", "response"), ("history", "response")),
    "ground_truth": ("ground_truth",),
    "group_label": ("group_label",),
    "rollout_label": ("rollout_label",),
    "logged_advantage": ("logged_advantage",),
}
# The option under which stages know what a report shows.
OPTIONS = {
    "reward": "reward_key",
    "status": "status_key",
    "policy_version": "version_key",
    "expected_rollouts": "expected_key",
    "advantage": "advantage_key",
    "importance_weight": "importance_key",
    "loss_weight": "weight_key",
}
FLOATS = ("collected_reward", "reward", "advantage", "advantage_size", "loss_weight", "logged_advantage")
AT_THE_DOOR = ("status", "policy_version", "expected_rollouts")
TEXTS = ("prompt", "response", "ground_truth", "group_label", "rollout_label")
WRITTEN = {"minibatch": MINIBATCH, "microbatch": MICROBATCH, "rank": RANK, "counted": COUNTED}

# From values (n,), (n, 1, 1) or (n, T, 1), and the loss mask, to a number for each row.
Reduction = Callable[[Tensor, Tensor | None], Tensor | None]
OF_A_PASS = ("minibatch", "microbatch", "rank", "loss_weight")


class RowTable:
    """One entry for each row, on the batch's device; nothing is read from it before somebody asks.

    Attributes:
        columns: (N,) float64 (NaN: unknown) or int64 (-1: unknown) by name.
        texts: N strings by name, where the batch has any.
        rewards: (N, K) float64, where a row has several.

    Args:
        batch: TensorDict ``[N]``, as it came in.
        keys: where the batch has what a report shows, by name.
        loss_mask_key: (N, T) bool.
        log_prob_key: (N, T) float; None: not looked at.
        ids: (N,) int64 by unit, ``rollouts`` and ``groups``.
        weights: by which several rewards become one; None: all 1.
    """

    def __init__(
        self,
        batch: TensorDictBase,
        *,
        keys: Mapping[str, NestedKey],
        loss_mask_key: NestedKey,
        log_prob_key: NestedKey | None,
        ids: Mapping[str, Tensor],
        weights: Sequence[float] | None = None,
    ):
        self.keys = KEYS | {name: (nested_key(key),) for name, key in keys.items()}
        self.rows, self.device = len(batch), device_of(batch)
        self.columns: dict[str, Tensor] = {}
        self.texts: dict[str, Any] = {}
        self.rewards: Tensor | None = None
        self.weights = weights
        for name, values in ids.items():
            self._enter(f"{name.removesuffix('s')}_id", values)
        for name in AT_THE_DOOR:
            if (values := self._found(batch, name)) is not None:
                self._enter(name, values)
        if (reward := self._found(batch, "reward", several=True)) is not None:
            several = flat_rows(reward).double()
            self.rewards = several if several.shape[1] > 1 else None
            self._enter("collected_reward", self._one(reward))
            self._enter("reward", self._one(reward))
        if (logged := self._found(batch, "logged_advantage")) is not None:
            self._enter("logged_advantage", logged)
        self.loss_mask_key, self.log_prob_key = loss_mask_key, log_prob_key
        if knows_loss_tokens(batch, loss_mask_key):
            self._enter("tokens", loss_tokens(batch, loss_mask_key, log_prob_key))
        for name in TEXTS:
            if (text := self._text(batch, name)) is not None:
                self.texts[name] = text

    def update(self, batch: TensorDictBase, *, credit: bool = True, last: bool = False) -> None:
        """Take over what stages have written; rows by ``("headrace", "row")``. No device read.

        Args:
            batch: TensorDict ``[n]``, after some stage.
            credit: False leaves rewards, and the advantage, into which weights may have been folded.
            last: whether no stage comes after it: the tokens that are in the loss now are those that train.
        """
        if len(batch) == 0:
            return
        rows = batch.get(ROW)
        found = {name: batch.get(key) for name, key in WRITTEN.items() if has_key(batch, key)}
        for name in ("advantage", "loss_weight") if credit else ("loss_weight",):
            if (values := self._per_row(batch, name, _mean)) is not None:
                found[name] = values
        if not credit and has_key(batch, FOLDED_WEIGHT):  # else the advantage that is taken over has it
            found["loss_weight"] = batch.get(FOLDED_WEIGHT)
        if last and knows_loss_tokens(batch, self.loss_mask_key):
            found["trained_tokens"] = loss_tokens(batch, self.loss_mask_key, self.log_prob_key)
        if "peers" in self.keys and (peers := self._found(batch, "peers")) is not None:
            found["peers"] = peers
        if credit and (size := self._per_row(batch, "advantage", _size)) is not None:
            found["advantage_size"] = size
        if credit and (reward := self._reward_now(batch, rows)) is not None:
            found["reward"] = reward
        for name, values in self._with_earlier_places(rows, found).items():
            self._column(name).index_copy_(0, rows, values.to(self._column(name).dtype))

    def move_tokens(self, rows: Tensor, into: Tensor) -> None:
        """Count the tokens of `rows` as those of the rows that they were merged `into`. No device read."""
        if "tokens" in self.columns:
            tokens = self.columns["tokens"]
            moved = tokens.index_select(0, rows)
            tokens.index_fill_(0, rows, 0).index_add_(0, into, moved)

    def _reward_now(self, batch: TensorDictBase, rows: Tensor) -> Tensor | None:
        """(n,) float64, the rollouts' rewards; who is out of the statistics keeps what it had."""
        if not has_key(batch, REWARD):
            reward = self._found(batch, "reward", several=True)
            return None if reward is None else self._one(reward)
        reward = batch.get(REWARD).reshape(-1).double()
        counted = batch.get(COUNTED, None)
        return reward if counted is None else torch.where(counted, reward, self._column("reward")[rows])

    def _with_earlier_places(self, rows: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """A row that a later pass leaves out keeps its place, and its weight, of the pass that trained it."""
        if "minibatch" not in found or "minibatch" not in self.columns:  # the first pass
            return found
        keeps = (self._column("minibatch")[rows] >= 0) & (found["minibatch"] < 0)
        earlier = {name: self._column(name)[rows] for name in found if name in OF_A_PASS}
        return found | {
            name: torch.where(keeps, old, found[name].to(old.dtype)) for name, old in earlier.items()
        }

    def add_carried(self, carried: TensorDictBase, ids: Mapping[str, Tensor], rows: Tensor) -> None:
        """Make room for rows of an earlier batch."""
        more = len(rows)
        self.rows += more
        for name, column in self.columns.items():
            self.columns[name] = torch.cat([column, column.new_full((more,), _unknown(column.dtype))])
        for name, values in ids.items():
            self.columns[f"{name.removesuffix('s')}_id"] = values.clone()
        for name in AT_THE_DOOR:
            if name in self.columns and (values := self._found(carried, name)) is not None:
                self.columns[name][-more:] = values.long()
        if "tokens" in self.columns and knows_loss_tokens(carried, self.loss_mask_key):
            self.columns["tokens"][-more:] = loss_tokens(carried, self.loss_mask_key, self.log_prob_key)
        if "reward" in self.columns and (reward := self._found(carried, "reward", several=True)) is not None:
            for name in ("collected_reward", "reward"):
                self.columns[name][-more:] = self._one(reward)
        if self.rewards is not None:
            several = self.rewards.new_full((more, self.rewards.shape[1]), math.nan)
            reward = self._found(carried, "reward", several=True)
            if reward is not None and reward.numel() == several.numel():
                several = reward.reshape(several.shape).double()
            self.rewards = torch.cat([self.rewards, several])
        self._column("carried_in").fill_(0)[-more:] = 1
        before = self.rows - more
        for name, text in list(self.texts.items()):
            here, carried_text = strings(text, before), self._text(carried, name)
            behind = None if carried_text is None else strings(carried_text, more)
            self.texts.pop(name)
            if here is not None and behind is not None:
                self.texts[name] = [*here, *behind]

    def _one(self, reward: Tensor) -> Tensor:
        """(n,) float64, of one reward a row or several. Weights that do not fit are for a stage to refuse."""
        several = flat_rows(reward).double()
        fits = self.weights is not None and len(self.weights) == several.shape[1] > 1
        return weighted_reward(several, self.weights if fits else None)

    def _text(self, batch: TensorDictBase, name: str) -> Any:
        """The texts under the first of their keys, or None."""
        found = [key for key in self.keys[name] if has_key(batch, key)]
        value = batch.get(found[0]) if found else None
        return None if isinstance(value, Tensor) else value

    def _per_row(self, batch: TensorDictBase, name: str, number: Reduction) -> Tensor | None:
        """(n,) one number a row, of values by token or of one value."""
        key = next((key for key in self.keys[name] if has_key(batch, key)), None)
        if key is None:
            return None
        mask_key = self.loss_mask_key if has_key(batch, self.loss_mask_key) else None
        if isinstance(batch, LazyStackedTensorDict):
            of_rows = [
                number(row.get(key)[None], mask_key and row.get(mask_key)[None]) for row in batch.tensordicts
            ]
            known = [each for each in of_rows if each is not None]
            return torch.cat(known) if len(known) == len(of_rows) else None
        return number(batch.get(key), mask_key and batch.get(mask_key))

    def _found(self, batch: TensorDictBase, name: str, *, several: bool = False) -> Tensor | None:
        """The column under the first of its keys, if it is one that a report can show."""
        for key in self.keys[name]:
            if has_key(batch, key):
                if (
                    isinstance(batch, LazyStackedTensorDict)
                    and len({row.get(key).shape for row in batch.tensordicts}) > 1
                ):
                    return None  # ragged
                value = batch.get(key, None)
                fits = isinstance(value, Tensor) and value.shape[:1] == (len(batch),)
                if fits and (several or value.numel() == len(batch)):
                    return value if several else value.reshape(-1)
                return None
        return None

    def _enter(self, name: str, values: Tensor) -> None:
        dtype = torch.float64 if name in FLOATS else torch.int64
        values = values.detach() if values.requires_grad else values
        flat = values if values.ndim == 1 else values.reshape(-1)
        self.columns[name] = flat.to(self.device, dtype, copy=True)

    def _column(self, name: str) -> Tensor:
        if name not in self.columns:
            dtype = torch.float64 if name in FLOATS else torch.int64
            self.columns[name] = torch.full((self.rows,), _unknown(dtype), dtype=dtype, device=self.device)
        return self.columns[name]

    def read(
        self, more: Mapping[str, Tensor], scalars: Mapping[str, Tensor | float]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """All columns and (N,) int64 `more` as NumPy arrays, and `scalars` as floats, by one device read."""
        columns = {**self.columns, **more}
        if self.rewards is not None:
            columns["rewards"] = self.rewards
        found = {k: v.detach().double().reshape(1) for k, v in scalars.items() if isinstance(v, Tensor)}
        # Floats travel as the integers of the same bits, so that one tensor holds all and ids stay exact.
        parts = {**columns, **{f"scalar/{name}": value for name, value in found.items()}}
        bits = [p.reshape(-1).view(torch.int64) if p.is_floating_point() else p for p in parts.values()]
        read = torch.cat(bits).cpu() if bits else torch.empty(0, dtype=torch.int64)
        back = dict(zip(parts, read.split([part.numel() for part in parts.values()]), strict=True))
        arrays = {
            name: (back[name].view(torch.float64) if column.is_floating_point() else back[name])
            .reshape(column.shape)
            .numpy()
            for name, column in columns.items()
        }
        numbers = {
            name: float(back[f"scalar/{name}"].view(torch.float64)) if name in found else float(value)
            for name, value in scalars.items()
        }
        return arrays, numbers


def keys_of_stages(stages: Iterable[Any]) -> dict[str, NestedKey]:
    """The keys of what a report shows: of the first stage that writes it, else of the first that reads it."""
    stages, keys = [each for stage in stages for each in (stage, getattr(stage, "criterion", None))], {}
    for name, option in OPTIONS.items():
        using = [stage for stage in stages if getattr(stage, option, None) is not None]
        writing = [stage for stage in using if getattr(stage, option) in getattr(stage, "out_keys", ())]
        if using:
            keys[name] = getattr((writing or using)[0], option)
    return keys


def weights_of_stages(stages: Iterable[Any]) -> Sequence[float] | None:
    """The weights by which several rewards become one, of the stage that writes the rollout's reward."""
    writing = (stage for stage in stages if REWARD in getattr(stage, "out_keys", ()))
    return next((stage.weights for stage in writing if getattr(stage, "weights", None) is not None), None)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """(n,) of (n,), (n, 1, 1) or per-token (n, T, 1) values; by tokens in the loss, 0 where there is none."""
    flat = flat_rows(values).double()
    if mask is None or mask.numel() != flat.numel():
        return flat.mean(1)
    inside = flat_rows(mask)
    return torch.where(inside, flat, 0.0).sum(1) / inside.sum(1).clamp_min(1)


def _size(values: Tensor, mask: Tensor | None) -> Tensor | None:
    """(n,) sums of sizes over tokens in the loss, of values (n, T, 1); None where they are not by token."""
    flat = flat_rows(values)
    if mask is None or mask.numel() != flat.numel():
        return None
    return torch.where(flat_rows(mask), flat.double().abs(), 0.0).sum(1)


def _unknown(dtype: torch.dtype) -> float:
    return float("nan") if dtype == torch.float64 else -1


def strings(texts: Any, rows: int) -> Sequence[str] | None:
    """A column of texts or conversations as strings (:func:`message_lines`), or None where it is none."""
    values = [texts[row] for row in range(len(texts))] if hasattr(texts, "role") else listed(texts)
    flat = [_string(value) for value in values]
    return flat if len(flat) == rows and None not in flat else None  # type: ignore[return-value]


def _string(value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return value if isinstance(value, str) else message_lines(value)


def labels_of_ids(texts: Any, ids: Sequence[int]) -> Sequence[str] | None:
    """N labels of N ids; None where there are none, where they are the ids, or one is of two ids.

    Example:
        >>> labels_of_ids(["a", "b", "a"], [5, 7, 5]), labels_of_ids(["5", "7"], [5, 7])
        (['a', 'b', 'a'], None)
    """
    labels = strings(texts, len(ids))
    pairs = set(zip(ids, labels or (), strict=False))
    one_each = len({number for number, _ in pairs}) == len(pairs) == len({label for _, label in pairs})
    return labels if one_each and any(str(number) != label for number, label in pairs) else None
