"""Enumerate all outcomes of a group as rows, and compute the gradient of each after a pipeline."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from math import exp, fsum, prod
from typing import Any, NamedTuple

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, open_dict
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from headrace.pipeline.account_keys import keys_of_stages
from headrace.pipeline.load import build_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.transforms import CompletenessGate, ShuffleSplit
from headrace.transforms.table import BatchError, stage_parts
from headrace.transforms.table.schema import LOSS_WEIGHTS, MINIBATCH, TOKEN_WEIGHT, has_key

from .small_task import Prompt, SmallTask, Trajectory

OUTCOME, ACTIONS = ("certify", "outcome"), ("certify", "actions")
LOSS_MASK = ("masks", "all_assistant_mask")
POLICIES = {"log_probs": "sampler", "old_log_probs": "theta", "teacher_log_probs": "teacher",
            "ref_log_probs": "reference"}  # fmt: skip
CUT = {
    "minibatches": None,
    "minibatch_size": 1,
    "unit": "group",
    "remainder": "raise",
    "microbatches": None,
    "max_tokens": None,
    "ranks": 1,
    "rank": None,
    "shuffle": False,
}
"""Options of the split: each group is an optimiser step, in order, on one rank."""


def one_group_a_step(config: DictConfig, task: SmallTask, overrides: Sequence[str] = ()) -> Pipeline:
    """Build a composed ``pipeline`` node for the groups of a task, with one group in each optimiser step.

    These options are changed: those of ShuffleSplit; `process_group`; the gate's `group_size`, which is then
    read from its column; `fold`, so that weights are columns and not factors of the advantage (this gives the
    same loss); the number of rewards; and options of the task's `settings` that have their default values in
    the recipe. All other options are the recipe's.

    Args:
        config: the composed node; it is not changed.
        task: the task whose rows the pipeline runs.
        overrides: command-line overrides. They take precedence over the task's settings.

    Raises:
        ConfigError: see :func:`build_pipeline`.
    """
    node = copy.deepcopy(config)
    stages = node.get("stages") or {}
    settings: dict[str, Any] = {"collapse.columns": task.columns, **task.settings}
    with open_dict(node):
        if "process_group" in node:
            node["process_group"] = None  # one process has all outcomes
        for name, stage in stages.items():
            if stage is None or "_target_" not in stage:
                continue
            made_by: Any = None
            with suppress(Exception):  # `build_pipeline` raises if the target cannot be imported
                made_by = get_object(str(stage["_target_"]))
            defaults = {}
            if callable(made_by):
                defaults = {key: each.default for key, each in inspect.signature(made_by).parameters.items()}
            options: dict[str, Any] = {"fold": "none"}
            if made_by is ShuffleSplit:
                options |= CUT
            if made_by is CompletenessGate:
                options["group_size"] = None
            for path, value in settings.items():
                owner, _, option = path.partition(".")
                typed = any(each.lstrip("+").startswith(f"pipeline.stages.{path}=") for each in overrides)
                by_default = option not in defaults or defaults[option] == stage.get(option)
                if owner == name and not typed and (option == "columns" or by_default):
                    options[option] = value
            for option in options.keys() & set(stage.keys()):
                stage[option] = options[option]
    return build_pipeline(node)


def all_outcomes(
    task: SmallTask, group_size: int, *, turns_paid_apart: bool, votes: bool = False
) -> tuple[TensorDict, Tensor]:
    """Return every outcome of a group of a task as a group of its own, and the probability of each.

    Rows have the columns of a collector: ids, reward, status, tokens with their masks, log-probabilities of
    the task's policies, and the entropy of the training policy. A row has one token for its prompt and one
    for each action. ``("certify", "outcome")`` (N,) is the row's outcome, ``("certify", "actions")`` (N, T)
    the number of each action, −1 for none. ``node_id`` (N, T) identifies tokens that were sampled once, for
    trees whose branches may have equal tokens by chance.

    Args:
        task: the task.
        group_size: rollouts of a group.
        turns_paid_apart: whether turn rewards are only in ``turn_reward``. If not, the rollout's reward
            includes them.
        votes: whether the last rollout of a group votes and does not train (``votes_only``). If rollouts are
            sampled in families, the last family votes, so that votes do not depend on rollouts that train.

    Returns:
        TensorDict ``[N]``, and (outcomes,) float64.
    """
    prompts, probabilities, groups = task.prompts(), [], []
    first, sampled_together = 0, 1
    for prompt in prompts:
        families = task.sampled_families(prompt)
        sampled_together = len(families[0].trajectories)
        for families_of_group in product(families, repeat=group_size // len(families[0].trajectories)):
            trajectories = [first + number for family in families_of_group for number in family.trajectories]
            groups.append(trajectories)
            probabilities.append(
                prompt.probability * prod(family.probability for family in families_of_group)
            )
        first += len(prompt.trajectories)
    table, rows_of_trajectory = rows_of_trajectories(task, prompts, turns_paid_apart=turns_paid_apart)
    index, outcome, rollout = [], [], []
    for number, trajectories in enumerate(groups):
        for place, trajectory in enumerate(trajectories):
            rows = rows_of_trajectory[trajectory]
            index += rows
            outcome += [number] * len(rows)
            rollout += [number * group_size + place] * len(rows)
    batch = table[torch.tensor(index)]
    batch[OUTCOME] = batch["group_id"] = torch.tensor(outcome)
    batch["rollout_id"] = torch.tensor(rollout)
    batch["expected_rollouts"] = torch.full((len(batch),), group_size)
    if votes:
        batch["votes_only"] = batch["rollout_id"] % group_size >= group_size - sampled_together
    # A token that was sampled once has one label in all rows: 0 for the prompt's token, and one for each
    # family's shared actions.
    of_rollout, place = 1 + batch["rollout_id"][:, None], torch.arange(batch[ACTIONS].shape[1])
    of_family = 1 + (batch["rollout_id"] // sampled_together * sampled_together)[:, None]
    batch["node_id"] = torch.where(place == 0, 0, torch.where(place <= task.shared, of_family, of_rollout))
    return batch, torch.tensor(probabilities, dtype=torch.float64)


def rows_of_trajectories(
    task: SmallTask, prompts: Sequence[Prompt], *, turns_paid_apart: bool
) -> tuple[TensorDict, list[list[int]]]:
    """Return the rows of all trajectories of all prompts, and the row indices of each trajectory."""
    trajectories = [
        (number, trajectory) for number, prompt in enumerate(prompts) for trajectory in prompt.trajectories
    ]
    rows = [
        (number, trajectory, place)
        for number, trajectory in trajectories
        for place in range(len(trajectory.rows))
    ]
    starts, of_trajectory = 0, []
    for _, trajectory in trajectories:
        of_trajectory.append(list(range(starts, starts + len(trajectory.rows))))
        starts += len(trajectory.rows)
    log_probs = task.log_probs(task.theta)
    choices, width = log_probs.shape[1], 1 + max(len(trajectory.rows[place]) for _, trajectory, place in rows)
    # An action's number is decision · choices + action. −1: no action, as at the prompt's token.
    numbered = [[d * choices + a for d, a in trajectory.rows[place]] for _, trajectory, place in rows]
    actions = torch.tensor([[-1, *row] + [-1] * (width - 1 - len(row)) for row in numbered])
    mask, at = actions >= 0, actions.clamp_min(0)
    kinds = task.score().shape[0]
    tokens = torch.where(mask, actions, kinds + len(prompts))  # padding
    tokens[:, 0] = torch.tensor([kinds + number for number, _, _ in rows])
    table = TensorDict(
        {
            ACTIONS: actions,
            ("tokens", "full"): tokens,
            LOSS_MASK: mask,
            ("masks", "all_attention_mask"): tokens < kinds + len(prompts),
            ("next", "status"): torch.tensor([int(trajectory.status) for _, trajectory, _ in rows]),
            "role": torch.zeros(len(rows), dtype=torch.int64),  # a single agent
        },
        batch_size=[len(rows)],
    )
    rewards = []
    for _, trajectory, place in rows:
        reward = trajectory.returns if trajectory.paid is None else trajectory.paid[place]
        if turns_paid_apart and trajectory.paid is None and trajectory.turn_rewards is not None:
            reward = (trajectory.returns[0] - sum(trajectory.turn_rewards),)
        rewards.append(reward)
    table["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    for name, policy in POLICIES.items():
        if (theta := getattr(task, policy)) is not None:
            table[name, "full"] = torch.where(mask, task.log_probs(theta).flatten()[at], 0.0)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    squares = log_probs.exp().square().sum(1)
    for name, of_decision in (("entropy", entropy), ("sum_pi_squared", squares)):
        table[name, "full"] = torch.where(mask, of_decision[at // choices], 0.0)
    values = torch.tensor(expected_returns(trajectories, log_probs), dtype=torch.float64)
    table["values", "full"] = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter_(mask, values)
    if all(trajectory.turn_rewards is not None for _, trajectory, _ in rows):
        table["turn_index"] = torch.where(mask, torch.arange(width) - 1, -1)
        given = [list(trajectory.turn_rewards or ()) for _, trajectory, _ in rows]
        padded = [each + [0.0] * (width - 1 - len(each)) for each in given]
        table["turn_reward"] = torch.tensor(padded, dtype=torch.float64)
    if all(trajectory.states is not None for _, trajectory in trajectories):
        table["state_id"] = torch.tensor([(trajectory.states or ())[place] for _, trajectory, place in rows])
    return table, of_trajectory


def expected_returns(trajectories: Sequence[tuple[int, Trajectory]], log_probs: Tensor) -> list[float]:
    """The values of a perfect critic: for each action, the mean return after the same prompt and actions.

    Args:
        trajectories: pairs of the prompt's number and the trajectory.
        log_probs: (decisions, choices), log-probabilities of the policy that trains.
    """
    sums: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, trajectory in trajectories:
        chance = trajectory.chance * exp(fsum(float(log_probs[each]) for each in trajectory.actions))
        for action in range(len(trajectory.actions)):
            before = sums[number, tuple(trajectory.actions[:action])]
            before[0] += chance
            before[1] += chance * sum(trajectory.returns)
    pairs = [
        sums[number, tuple(trajectory.actions[:action])]
        for number, trajectory in trajectories
        for action in range(len(trajectory.actions))
    ]
    return [total / chance if chance else 0.0 for chance, total in pairs]


class Gradients(NamedTuple):
    """The gradient of each outcome, in the direction of greater reward; (outcomes, P) float64."""

    advantage: Tensor
    """Σ A ∇log π over the tokens in the loss of the group, divided by its rollouts that may train."""
    loss: Tensor | None
    """Σ w A ∇log π with the recipe's loss weights; None if the recipe writes none."""


def gradients_of(
    pipeline: Pipeline, batch: TensorDictBase, score: Tensor, outcomes: int, group_size: int
) -> Gradients:
    """Run a pipeline on all outcomes, and compute the gradient of each::

        advantage  g = 1/n Σ_rows Σ_t A_t ∇log π_t       n rollouts that may train
        loss       g =     Σ_rows w Σ_t A_t ∇log π_t     w the row's loss weight × the token's, if it has one

    The gradient of an outcome without trained rows is 0. If each stage declares `within_groups` and each
    group is an optimiser step, all outcomes are one batch. Otherwise each outcome is a batch of its own, and
    a pipeline with a state is reset before each.

    Args:
        pipeline: a pipeline with one group in each optimiser step (:func:`one_group_a_step`).
        batch: TensorDict ``[N]`` of :func:`all_outcomes`.
        score: (actions, P) ∇ log π of each action.
        outcomes: number of outcomes.
        group_size: number of rollouts of a group: the n that may train, and those that vote only.

    Raises:
        BatchError: a stage refused the rows, or wrote an advantage that is not finite.
    """
    stages, keys = list(pipeline.stages.values()), keys_of_stages(pipeline.stages.values())
    cutting = [each for each in stages if MINIBATCH in getattr(each, "out_keys", ())]
    how = [(getattr(each, "unit", None), getattr(each, "minibatch_size", None)) for each in cutting]
    together = _keep_within(stages) and ("group", 1) in how
    # A stage that is not headrace's may have a state that it does not declare.
    remembers = any(
        getattr(each, "stateful", False) or not type(each).__module__.startswith("headrace.")
        for each in stages
        if not getattr(each, "within_groups", False) and each not in cutting
    )
    if has_key(batch, "votes_only"):
        voting = batch["rollout_id"][batch["votes_only"] & (batch[OUTCOME] == 0)]
        group_size = max(group_size - len(voting.unique()), 1)  # if all vote only, the gradient is 0
    rows_of_outcomes = batch[OUTCOME].bincount(minlength=outcomes).tolist()
    batches = [batch] if together else batch.split(rows_of_outcomes)
    fresh = copy.deepcopy(pipeline) if remembers else pipeline
    advantage, loss = score.new_zeros(2, outcomes, score.shape[1])
    for rows in batches:
        if remembers:
            pipeline = copy.deepcopy(fresh)
        trained = pipeline(rows)
        if len(trained) == 0:
            continue
        if has_key(trained, LOSS_WEIGHTS):
            raise BatchError(
                "a certificate is of the policy gradient alone, and this loss has components: certify the "
                "recipe without components of LossWeight"
            )
        credit = trained[keys.get("advantage", "advantage")].reshape(len(trained), -1)  # (N, 1) or (N, T)
        inside = trained[LOSS_MASK] & (trained[ACTIONS] >= 0)
        credit = torch.where(inside, credit.to(score.dtype), 0.0)
        scores = score[trained[ACTIONS].clamp_min(0)]
        each = torch.einsum("nt,ntp->np", credit, scores)
        if not bool(each.isfinite().all()):
            raise BatchError("the advantage of every token in the loss must be finite; found NaN or infinity")
        advantage.index_add_(0, trained[OUTCOME], each / group_size)
        if pipeline.weighs:
            weight = trained[keys.get("loss_weight", "loss_weight")].reshape(-1, 1)
            if has_key(trained, TOKEN_WEIGHT):
                each = torch.einsum("nt,ntp->np", credit * trained[TOKEN_WEIGHT], scores)
            loss.index_add_(0, trained[OUTCOME], each * weight)
    return Gradients(advantage, loss if pipeline.weighs else None)


def _keep_within(stages: list[nn.Module]) -> bool:
    """Whether each stage declares `within_groups`, and its groups never span two outcomes."""
    within: set[NestedKey | None] = {None, "group_id", "rollout_id", OUTCOME}
    for stage in stages:
        if not getattr(stage, "within_groups", False):
            return False
        for part in stage_parts(stage):
            for option in ("group_key", "rollout_key"):
                if getattr(part, option, None) not in within:
                    return False
        if within.intersection(getattr(stage, "keys", ())):  # a combined id that includes the group id
            within.update(getattr(stage, "out_keys", ()))
    return True
