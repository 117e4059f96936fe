"""Collect the keys of the columns that a pipeline counts and reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensordict import NestedKey

from headrace.transforms.table import TokenCount, label_key, stage_parts, stages_of_values
from headrace.transforms.table.options import nested_key
from headrace.transforms.table.schema import REWARD, TRAINER_VERSION

__all__ = ["OF_TOKENS", "OF_VERSIONS", "TEXTS", "keys_of_stages", "weights_of_stages"]

# Keys of the values that a report shows. A report reads the first key that the batch has.
KEYS: dict[str, tuple[NestedKey, ...]] = {
    "reward": (("next", "reward"), "reward"),
    "status": (("next", "status"), "status"),
    "policy_version": (("next", "policy_version"), "policy_version"),
    "trainer_version": (TRAINER_VERSION,),
    "expected_rollouts": ("expected_rollouts",),
    "advantage": ("advantage",),
    "importance_weight": ("importance_weight",),
    "loss_weight": ("loss_weight",),
    "prompt": ("prompt_text", ("text", "prompt"), ("history", "prompt"), "query"),
    "response": ("response_text", ("text", "response"), ("history", "response")),
    "response_parts": ("response_parts",),
    "ground_truth": ("ground_truth",),
    "other_columns": ("other_columns",),
    "group_label": ("group_label",),
    "rollout_label": ("rollout_label",),
    "logged_advantage": ("logged_advantage",),
}
# The option of stages that names each of these columns.
OPTIONS = {
    "reward": "reward_key",
    "status": "status_key",
    "policy_version": "version_key",
    "expected_rollouts": "expected_key",
    "advantage": "advantage_key",
    "importance_weight": "importance_key",
    "loss_weight": "weight_key",
}
OF_TOKENS = "advantage of tokens"  # (N, 2): mean of a row's advantages, and sum of their absolute values
OF_VERSIONS = "versions of tokens"  # (N, 4): oldest, newest, sum and number of a row's versions per token
TEXTS = (
    *("prompt", "response", "response_parts", "ground_truth", "other_columns"),
    *("group_label", "rollout_label"),
)
# Rewards and counts, before any stage changes them.
NUMBERS = (
    *("reward", "status", "policy_version", "trainer_version", "expected_rollouts"),
    "logged_advantage",
)


@dataclass(frozen=True)
class Keys:
    """The columns that a pipeline counts and reports.

    Attributes:
        loss_mask: the loss mask.
        log_prob: log-probabilities; non-finite ones are out of the loss. None: not read.
        weight: loss weights.
        units: the ids of ``rollouts`` and ``groups``, if these are counted.
        found: the keys of each value that a report shows, by its name. The report reads the first that the
            batch has.
        reward_weights: weights of the sum of several rewards; None: not known.
    """

    loss_mask: NestedKey
    log_prob: NestedKey | None
    weight: NestedKey
    units: Mapping[str, NestedKey]
    found: Mapping[str, tuple[NestedKey, ...]]
    reward_weights: Sequence[float] | None

    @classmethod
    def of(
        cls,
        stages: Iterable[Any],
        loss_mask: NestedKey,
        log_prob: NestedKey | None,
        ids: Mapping[str, NestedKey | None],
        report: Mapping[str, NestedKey],
    ) -> Keys:
        """Collect the keys of stages.

        Args:
            stages: the stages, in order.
            loss_mask: key of the loss mask.
            log_prob: key of the log-probabilities. None: not read.
            ids: keys of ``rollouts`` and ``groups``. A unit whose key is None is not counted.
            report: the pipeline's `report_keys`, which override the keys of the stages.
        """
        stages = list(stages)
        named = keys_of_stages(stages)
        units = {unit: key for unit, key in ids.items() if key is not None}
        named |= {f"{unit.removesuffix('s')}_label": label_key(key) for unit, key in units.items()}
        every = (own for stage in stages for own in stages_of_values(stage).values())
        comparing = [own.group_key for own in every if hasattr(own, "advantage_by_row")]
        if comparing and comparing[0] != units.get("groups"):
            named["peers"] = comparing[0]
        named |= {name: nested_key(key) for name, key in report.items()}
        found = KEYS | {name: (key,) for name, key in named.items()}
        weight = keys_of_stages(stages).get("loss_weight", "loss_weight")
        return cls(loss_mask, log_prob, weight, units, found, weights_of_stages(stages))

    def weight_is_written(self, stages: Mapping[str, Any]) -> bool:
        """Whether a stage has the loss weights in its `out_keys`."""
        return any(self.weight in getattr(stage, "out_keys", ()) for stage in stages.values())

    @property
    def read_first(self) -> list[NestedKey]:
        """The keys of columns whose values on arrival are kept for the report."""
        return [*self.units.values(), *(key for name in NUMBERS for key in self.found[name])]


class Asked(NamedTuple):
    """The columns that stages and the report need. The pipeline reads all of them at once."""

    columns: list[NestedKey]
    """Columns with a few numbers for each row."""
    counts: list[TokenCount]
    """Counts of tokens."""
    ids: dict[NestedKey, str]
    """Columns of ids, and their names in messages."""

    @classmethod
    def of(cls, stages: Iterable[Any], keys: Keys) -> Asked:
        """Collect the columns of stages.

        Args:
            stages: the stages in order, and the pipeline itself.
            keys: the columns of the report.
        """
        parts = [part for stage in stages for part in stage_parts(stage)]
        names = ("loss_mask_key", "log_prob_key", "tokens_key", "length_key")
        tokens = {nested_key(getattr(part, name, None)) for part in parts for name in names}
        read = [key for part in parts for key in getattr(part, "in_keys", ())]
        counts = [TokenCount(keys.loss_mask, keys.log_prob)]
        counts += [TokenCount(*pair) for part in parts for pair in getattr(part, "tokens_counted", ())]
        named = {"rollout_key": "rollout_id", "group_key": "group_id"}
        ids = {nested_key(getattr(part, key, None)): name for part in parts for key, name in named.items()}
        ids.pop(None, None)
        written = {nested_key(key) for part in parts for key in getattr(part, "out_keys", ())}
        came = [key for key in (keys.found["advantage"][0], keys.weight) if key not in written]
        stamped = [nested_key(getattr(part, "votes_only_key", None)) for part in parts]
        came += [key for key in stamped if key is not None]
        columns = [*keys.read_first, *came, *(key for key in read if key not in tokens)]
        return cls(list(dict.fromkeys(columns)), list(dict.fromkeys(counts)), ids)


def keys_of_stages(stages: Iterable[Any]) -> dict[str, NestedKey]:
    """The key of each column of :data:`OPTIONS` in the first stage that writes it, or else reads it."""
    stages, keys = [part for stage in stages for part in stage_parts(stage)], {}
    for name, option in OPTIONS.items():
        using = [stage for stage in stages if getattr(stage, option, None) is not None]
        writing = [stage for stage in using if getattr(stage, option) in getattr(stage, "out_keys", ())]
        if using:
            keys[name] = nested_key(getattr((writing or using)[0], option))
    return keys


def weights_of_stages(stages: Iterable[Any]) -> Sequence[float] | None:
    """The weights of the sum of several rewards, from the stage that writes the rollout's reward."""
    writing = (stage for stage in stages if REWARD in getattr(stage, "out_keys", ()))
    return next((stage.weights for stage in writing if getattr(stage, "weights", None) is not None), None)
