"""A running baseline, which is updated from batch to batch, for groups of one rollout."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchTransform, ColumnNames, Ids, Rows, require_rewards
from headrace.transforms.table.ids import mean_of
from headrace.transforms.table.labels import last_of
from headrace.transforms.table.options import above_zero, within
from headrace.transforms.table.schema import COUNTED, REWARD

COUNTING = threading.Lock()  # threads may share a stage; a lock on the stage could not be copied


class Tracked(NamedTuple):
    """The running mean of each key, on the CPU."""

    keys: Tensor
    """(K,) int64, ascending."""
    mean: Tensor
    """(K,) float64: the running mean b."""
    weight: Tensor
    """(K,) float64: the weight w of the mean, in rollouts."""

    def look_up(self, keys: Tensor, start: float, start_weight: float) -> tuple[Tensor, Tensor]:
        """Mean and weight of (M,) keys; `start` and `start_weight` for new keys."""
        if len(self.keys) == 0:
            starts = torch.tensor([[start], [start_weight]], dtype=torch.float64)
            mean, weight = starts.expand(2, len(keys))
            return mean, weight
        at = torch.searchsorted(self.keys, keys).clamp_max(len(self.keys) - 1)
        known = self.keys[at] == keys
        return torch.where(known, self.mean[at], start), torch.where(known, self.weight[at], start_weight)

    def after(
        self, keys: Tensor, reward: Tensor, *, decay: float, start: float, start_weight: float
    ) -> Tracked:
        """The means after the rewards of a batch, whatever their order.

        m rewards of a key are replaced by m times their mean r. With the decay ρ::

            w' = ρ^m w + (1 − ρ^m)/(1 − ρ)      b' = (ρ^m w b + (1 − ρ^m)/(1 − ρ) r) / w'

        Args:
            keys: (M,) int64.
            reward: (M,) float64.
            decay: ρ in [0, 1].
            start: b of a new key.
            start_weight: w of a new key.
        """
        if len(keys) == 0:
            return self
        ids = Ids(keys)
        found, count, total = keys[ids.first], ids.count, ids.sum(reward)
        mean, weight = self.look_up(found, start, start_weight)
        kept = torch.full((), decay, dtype=torch.float64).pow(count)
        old, new = weight * kept, count.double() if decay == 1 else (1 - kept) / (1 - decay)
        mean = (old * mean + new * (total / count)) / (old + new)
        others = ~torch.isin(self.keys, found)
        keys = torch.cat([self.keys[others], found])
        order = keys.argsort()
        every = ((self.mean, mean), (self.weight, old + new))
        return Tracked(keys[order], *(torch.cat([was[others], now])[order] for was, now in every))


class Memory(NamedTuple):
    """The state of a running baseline."""

    before: Tracked
    """The means before the last batch."""
    after: Tracked
    """The means after the last batch."""
    last: Tensor
    """(3, M) int64: keys, rollout ids and bits of the rewards of the last batch."""

    def knows(self, came: Tensor) -> bool:
        """Whether this (3, M) batch equals the last one."""
        return bool(came.shape[1]) and torch.equal(came, self.last)


class RunningBaseline(BatchTransform, columns=("baseline", "advantage", "rollout")):
    """Subtract the running mean of earlier rewards with the same key: ``A ← A − b(key)``.

    After ``GroupRelativeAdvantage(baseline="none", scale="none")`` the result is R − b, for groups of one
    rollout. The baseline of a batch uses only earlier batches. Then the batch updates the mean b and its
    weight w, with the `decay` ρ, for each reward of a key::

        w ← ρ w + 1      b ← b + (R − b)/w

    Several rewards of a key in one batch are each replaced by their mean, so the order of the rows changes no
    bit. With `start_weight` 1/(1 − ρ), w is constant and b is the exponential moving average of RAE (SPIRAL,
    arXiv:2506.24119), whose key is a role. With a prompt as the key b is the value tracker of SPO
    (arXiv:2509.13232), except that ρ of SPO follows the KL divergence between policies.

    If you pass the last batch again, with the same keys, rollouts and rewards, it gets the same baseline and
    counts once, also after ``load_state_dict``. A batch that the pipeline refuses does not count. Excluded
    rollouts, and rollouts without a reward, do not count, and keep their advantage.

    Reads ``("headrace", "reward")``, `baseline_key` and `rollout_key`. Reads and writes `advantage_key`.

    Args:
        decay: ρ in [0, 1].
        start: b of a new key.
        start_weight: weight w of `start`, in rollouts, > 0; None: 1/(1 − ρ).
        names: other names of columns, such as `baseline_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a key is negative, or the rows of a rollout have different keys.

    Example:
        >>> from tensordict import TensorDict
        >>> stage = RunningBaseline(decay=0.5)
        >>> def batch(rollout):
        ...     columns = {"rollout_id": [rollout], "advantage": [8.0], ("headrace", "reward"): [8.0]}
        ...     return TensorDict(columns, batch_size=[1])
        >>> [float(stage(batch(rollout))["advantage"]) for rollout in range(3)]
        [8.0, 4.0, 2.0]
    """

    stateful = True

    def __init__(
        self,
        *,
        decay: float = 0.95,
        start: float = 0.0,
        start_weight: float | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        built_on = (REWARD, COUNTED, self.baseline_key, self.rollout_key)
        super().__init__([self.advantage_key, *built_on], [self.advantage_key])
        self.final_keys = tuple(self.in_keys[1:])
        self.decay, self.start = within("decay", decay, 0, 1), start
        if self.rollout_key is None:
            raise ValueError(
                "RunningBaseline needs rollout_key, with ids that are unique across batches: it recognises a "
                "repeated batch by its rollouts"
            )
        if start_weight is None and decay == 1:
            raise ValueError("decay=1 needs start_weight, because the default 1/(1 − decay) is infinite")
        self.start_weight = above_zero("start_weight", start_weight)
        weight = 1 / (1 - decay) if start_weight is None else start_weight
        self._formula = {"decay": decay, "start": start, "start_weight": weight}
        nothing = Tracked(torch.zeros(0, dtype=torch.int64), *torch.zeros(2, 0, dtype=torch.float64))
        self.memory = Memory(nothing, nothing, torch.zeros(3, 0, dtype=torch.int64))

    def _id_keys(self) -> list[NestedKey]:
        return [*super()._id_keys(), *([] if self.baseline_key is None else [self.baseline_key])]

    def decide(self, rows: Rows) -> None:
        """Rewrite the advantage. :meth:`state_after` updates the means once the batch is accepted."""
        credit, reward = rows.number("advantage"), rows[REWARD]
        keys = torch.zeros(len(rows), dtype=torch.int64)
        if self.baseline_key is not None:
            keys = rows.integers("baseline", str(self.baseline_key))
        # A rollout has one reward, finite or missing, and one key ≥ 0.
        require_rewards(rows, reward.nan_to_num(0.0, torch.inf, -torch.inf), siblings_agree=True)
        rows.require_set(keys, last_of(self.baseline_key or ""), "rows without a key would have one baseline")
        rows.require(
            rows.rollouts.spread(keys[rows.rollouts.first]) == keys,
            "all rows of a rollout must have the same baseline_key; found {found}",
            lambda row: f"{int(keys[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
        )
        counts = rows.rollouts.is_first & ~reward.isnan()
        came = torch.stack([keys, rows.rollouts.labels, reward.view(torch.int64)])[:, counts]
        came = came[:, came[1].argsort()]  # a batch is recognised in any row order
        known = self.memory
        before = known.before if known.knows(came) else known.after
        baseline = before.look_up(keys, self._formula["start"], 0.0)[0].masked_fill(reward.isnan(), 0.0)
        if rows.counted is not None:
            baseline = baseline * rows.counted
        dtype = rows.dtype("advantage")
        rows.put("advantage", credit - baseline, dtype=dtype if dtype.is_floating_point else torch.float64)
        rows.table.notes[self] = came
        rows.metric("mean", mean_of(baseline))
        rows.metric("keys", len(before.keys))

    def state_after(self, rows: Rows) -> None:
        """Update the means with the batch, unless it equals the last batch."""
        came = rows.table.notes.pop(self, None)
        with COUNTING:
            if came is not None and not self.memory.knows(came):
                before = self.memory.after
                after = before.after(came[0], came[2].view(torch.float64), **self._formula)
                self.memory = Memory(before, after, came)

    def get_extra_state(self) -> dict[str, Any]:
        """The state that ``state_dict`` saves."""
        before, after, last = self.memory
        return {"before": before._asdict(), "after": after._asdict(), "last": last}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.memory = Memory(Tracked(**state["before"]), Tracked(**state["after"]), state["last"])
