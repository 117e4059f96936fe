"""A baseline that goes on from batch to batch, for groups of one rollout."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.ids import Ids, mean_of
from headrace.transforms.options import above_zero, within
from headrace.transforms.required import require_rewards
from headrace.transforms.rows import Rows
from headrace.transforms.schema import COUNTED, REWARD
from headrace.transforms.stage import BatchTransform

from .peers import last_of

COUNTING = threading.Lock()  # several threads may share a stage; of a lock of its own there is no copy


class Tracked(NamedTuple):
    """What is known of the rewards of each key, on the CPU."""

    keys: Tensor
    """(K,) int64, ascending."""
    mean: Tensor
    """(K,) float64."""
    weight: Tensor
    """(K,) float64: how many rollouts that mean is worth."""

    def look_up(self, keys: Tensor, start: float, start_weight: float) -> tuple[Tensor, Tensor]:
        """Mean and weight of (M,) keys; of those not seen yet what they start with."""
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
        """With the rewards of a batch, in whatever order.

        m rewards of a key count as m times their mean r, one after the other. With ρ the decay::

            w' = ρ^m w + (1 − ρ^m)/(1 − ρ)      b' = (ρ^m w b + (1 − ρ^m)/(1 − ρ) r) / w'

        Args:
            keys: (M,) int64.
            reward: (M,) float64.
            decay: ρ in [0, 1].
            start: b of a key that was not seen.
            start_weight: w of it.
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
    """What a running baseline remembers."""

    before: Tracked
    """Before the last batch."""
    after: Tracked
    """After it."""
    last: Tensor
    """(3, M) int64: keys, rollouts and the bits of the rewards of the last batch, by which it is known."""

    def knows(self, came: Tensor) -> bool:
        """Whether these (3, M) are the last batch again."""
        return bool(came.shape[1]) and torch.equal(came, self.last)


class RunningBaseline(BatchTransform, columns=("baseline", "advantage", "rollout")):
    """Subtract from the advantage what the rewards of earlier batches were, by a key: ``A ← A − b(key)``.

    Behind ``GroupRelativeAdvantage(baseline="none", scale="none")`` that is R − b, for groups of one rollout.
    A batch is measured against what was known before it, and then it counts: with ρ the `decay`, each reward
    of a key makes of its mean b, which is worth w rollouts, ::

        w ← ρ w + 1      b ← b + (R − b)/w

    so that neither order nor cut of a batch changes a bit. Of several rewards of one key in a batch each
    counts as their mean. With `start_weight` 1/(1 − ρ), w stays what it is, and b is the exponential moving
    average of RAE (SPIRAL, arXiv:2506.24119), with a role as the key. With a prompt as the key it is the
    value tracker of SPO (arXiv:2509.13232), but for its ρ, which follows the KL divergence between policies.

    A batch that is given again, with the same keys, rollouts and rewards as the last, is measured as it was
    and counts once, also after ``load_state_dict``. What a stage of the pipeline refuses does not count.
    Rollouts that are out of the statistics or have no reward neither count nor change.

    Reads ``("headrace", "reward")``, `baseline_key`, `rollout_key`; reads and writes `advantage_key`.

    Args:
        decay: ρ in [0, 1].
        start: b of a key that was not seen.
        start_weight: how many rollouts `start` is worth, > 0; None: 1/(1 − ρ).
        names: other names of columns, such as `baseline_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a negative key; the rows of a rollout have several.

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
                "a batch that comes again is known by its rollouts, and row numbers are the same in every "
                "batch: RunningBaseline needs a rollout_key, of ids that no two batches share"
            )
        if start_weight is None and decay == 1:
            raise ValueError("decay=1 forgets nothing, and a start is never outweighed: give start_weight")
        self.start_weight = above_zero("start_weight", start_weight)
        weight = 1 / (1 - decay) if start_weight is None else start_weight
        self._formula = {"decay": decay, "start": start, "start_weight": weight}
        nothing = Tracked(torch.zeros(0, dtype=torch.int64), *torch.zeros(2, 0, dtype=torch.float64))
        self.memory = Memory(nothing, nothing, torch.zeros(3, 0, dtype=torch.int64))

    def _id_keys(self) -> list[NestedKey]:
        return [*super()._id_keys(), *([] if self.baseline_key is None else [self.baseline_key])]

    def decide(self, rows: Rows) -> None:
        """Rewrite the advantage; the batch counts when nobody has refused it (:meth:`state_after`)."""
        credit, reward = rows.number("advantage"), rows[REWARD]
        keys = torch.zeros(len(rows), dtype=torch.int64)
        if self.baseline_key is not None:
            keys = rows.integers("baseline", str(self.baseline_key))
        # Rewards are finite or missing, a rollout has one, and one key that is set.
        some, key, paid = rows.statistics, keys, reward.nan_to_num(0.0, torch.inf, -torch.inf)
        if rows.counted is not None:
            key, paid = keys[rows.counted], paid[rows.counted]
        require_rewards(some, paid, siblings_agree=True)
        some.require_set(key, last_of(self.baseline_key or ""), "rows without a key would have one baseline")
        some.require(
            some.rollouts.spread(key[some.rollouts.first]) == key,
            "the rows of a rollout have one baseline_key; found {found}",
            lambda row: f"{int(key[row])} at row {some.at(row)} (rollout {some.name('rollout', row)})",
        )
        counts = rows.rollouts.is_first & ~reward.isnan()
        came = torch.stack([keys, rows.rollouts.labels, reward.view(torch.int64)])[:, counts]
        came = came[:, came[1].argsort()]  # ranks and orders of rows are no matter
        known = self.memory
        before = known.before if known.knows(came) else known.after
        baseline = before.look_up(keys, self._formula["start"], 0.0)[0].masked_fill(reward.isnan(), 0.0)
        if rows.counted is not None:
            baseline = baseline * rows.counted
        dtype = rows.dtype("advantage")
        rows.put("advantage", credit - baseline, dtype=dtype if dtype.is_floating_point else torch.float64)
        rows.table.notes[self] = came
        own = rows.of_rank(baseline)
        rows.metric("mean", mean_of(own))
        rows.metric("keys", len(before.keys))

    def state_after(self, rows: Rows) -> None:
        """Let the batch count, once."""
        came = rows.table.notes.pop(self, None)
        with COUNTING:
            if came is not None and not self.memory.knows(came):
                before = self.memory.after
                after = before.after(came[0], came[2].view(torch.float64), **self._formula)
                self.memory = Memory(before, after, came)

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict`` saves."""
        before, after, last = self.memory
        return {"before": before._asdict(), "after": after._asdict(), "last": last}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.memory = Memory(Tracked(**state["before"]), Tracked(**state["after"]), state["last"])
