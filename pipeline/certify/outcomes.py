"""All outcomes of a group, as rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from tensordict import TensorDict
from torch import Tensor

from .small_task import Course, Prompt, SmallTask

OUTCOME, ACTIONS = ("certify", "outcome"), ("certify", "actions")
LOSS_MASK = ("masks", "all_assistant_mask")
POLICIES = {"log_probs": "sampler", "old_log_probs": "theta", "teacher_log_probs": "teacher",
            "ref_log_probs": "reference"}  # fmt: skip


def all_outcomes(task: SmallTask, group_size: int, *, turns_paid_apart: bool) -> tuple[TensorDict, Tensor]:
    """Every outcome of a group of a task as a group of its own, and the probability of each.

    Rows carry what the rows of a collector do: ids, the reward, the status, tokens with their masks, and
    log-probabilities of the policies that the task has, with the entropy of the one that trains. A row is a
    token of its prompt and a token for each action. ``("certify", "outcome")`` says of which outcome a row
    is, ``("certify", "actions")`` (N, T) the number of each action, −1 where there is none, and ``node_id``
    (N, T) labels tokens by what was drawn, for trees whose branches may be equal by chance.

    Args:
        task: whose outcomes.
        group_size: rollouts of a group.
        turns_paid_apart: the rewards of turns are in ``turn_reward`` alone; else the reward of the rollout
            has them too.

    Returns:
        TensorDict ``[N]``, and (outcomes,) float64.
    """
    prompts, probabilities, groups = task.prompts(), [], []
    first_course, sampled_together = 0, 1
    for prompt in prompts:
        families = task.sampled_families(prompt)
        sampled_together = len(families[0].courses)
        for families_of_group in product(families, repeat=group_size // len(families[0].courses)):
            courses = [first_course + number for family in families_of_group for number in family.courses]
            groups.append(courses)
            probabilities.append(
                prompt.probability * prod(family.probability for family in families_of_group)
            )
        first_course += len(prompt.courses)
    table, rows_of_course = rows_of_courses(task, prompts, turns_paid_apart=turns_paid_apart)
    index, outcome, rollout = [], [], []
    for number, courses in enumerate(groups):
        for place, course in enumerate(courses):
            rows = rows_of_course[course]
            index += rows
            outcome += [number] * len(rows)
            rollout += [number * group_size + place] * len(rows)
    batch = table[torch.tensor(index)]
    batch[OUTCOME] = batch["group_id"] = torch.tensor(outcome)
    batch["rollout_id"] = torch.tensor(rollout)
    batch["expected_rollouts"] = torch.full((len(batch),), group_size)
    batch["node_id"] = nodes_of(batch, task.shared, sampled_together)
    return batch, torch.tensor(probabilities, dtype=torch.float64)


def nodes_of(batch: TensorDict, shared: int, sampled_together: int) -> Tensor:
    """(N, T) int64: by what was drawn: tokens have one label that were sampled once, and only those.

    Args:
        batch: TensorDict ``[N]``; rollouts that are sampled together have ids one after another.
        shared: how many first actions these have in common.
        sampled_together: how many they are.
    """
    rollout = 1 + batch["rollout_id"][:, None].expand_as(batch[ACTIONS])
    family = 1 + (batch["rollout_id"] // sampled_together * sampled_together)[:, None]
    place = torch.arange(batch[ACTIONS].shape[1])  # 0 is the prompt
    return torch.where(place == 0, 0, torch.where(place <= shared, family, rollout))


def rows_of_courses(
    task: SmallTask, prompts: Sequence[Prompt], *, turns_paid_apart: bool
) -> tuple[TensorDict, list[list[int]]]:
    """The rows of every course of every prompt, once, and which of them are whose.

    Args:
        task: that the prompts are of.
        prompts: all of them.
        turns_paid_apart: as for :func:`all_outcomes`.
    """
    courses = [(number, course) for number, prompt in enumerate(prompts) for course in prompt.courses]
    rows = [(number, course, place) for number, course in courses for place in range(len(course.rows))]
    starts, of_course = 0, []
    for _, course in courses:
        of_course.append(list(range(starts, starts + len(course.rows))))
        starts += len(course.rows)
    actions = numbered_actions(task, [course.rows[place] for _, course, place in rows])
    mask = actions >= 0
    kinds = task.score().shape[0]
    tokens = torch.where(mask, actions, kinds + len(prompts))  # padding
    tokens[:, 0] = torch.tensor([kinds + number for number, _, _ in rows])
    table = TensorDict(
        {
            ACTIONS: actions,
            ("tokens", "full"): tokens,
            LOSS_MASK: mask,
            ("masks", "all_attention_mask"): tokens < kinds + len(prompts),
            ("next", "status"): torch.tensor([int(course.status) for _, course, _ in rows]),
            "role": torch.zeros(len(rows), dtype=torch.int64),  # one agent does all there is to do
        },
        batch_size=[len(rows)],
    )
    table["next", "reward"] = torch.tensor(
        [paid(course, place, turns_paid_apart=turns_paid_apart) for _, course, place in rows],
        dtype=torch.float64,
    )
    add_policies(table, task, actions)
    add_turns(table, [course for _, course, _ in rows], actions)
    if all(course.states is not None for _, course in courses):
        table["state_id"] = torch.tensor([(course.states or ())[place] for _, course, place in rows])
    return table, of_course


def numbered_actions(task: SmallTask, rows: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """(N, T) int64: decision · actions + action behind a token of the prompt; −1 where there is no action."""
    kinds = task.log_probs(task.theta).shape[1]
    width = 1 + max(len(row) for row in rows)
    return torch.tensor(
        [[-1, *(d * kinds + a for d, a in row)] + [-1] * (width - 1 - len(row)) for row in rows]
    )


def paid(course: Course, place: int, *, turns_paid_apart: bool) -> tuple[float, ...]:
    """What the reward column says of a row, a number for each reward."""
    if course.paid is not None:
        return course.paid[place]
    if turns_paid_apart and course.turn_rewards is not None:
        return (course.worth[0] - sum(course.turn_rewards),)
    return course.worth


def add_policies(table: TensorDict, task: SmallTask, actions: Tensor) -> None:
    """Write the log-probability of each action under each policy, and the entropy of the decision."""
    there = actions >= 0
    at = actions.clamp_min(0)
    for name, policy in POLICIES.items():
        if (theta := getattr(task, policy)) is not None:
            each = task.log_probs(theta).flatten()[at]
            table[name, "full"] = torch.where(there, each, 0.0)
    log_probs = task.log_probs(task.theta)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    table["entropy", "full"] = torch.where(there, entropy[at // log_probs.shape[1]], 0.0)


def add_turns(table: TensorDict, courses: Sequence[Course], actions: Tensor) -> None:
    """Write the turn of each action and what each turn was paid, where the courses say it."""
    if any(course.turn_rewards is None for course in courses):
        return
    places = torch.arange(actions.shape[1]).expand_as(actions) - 1
    table["turn_index"] = torch.where(actions >= 0, places, -1)
    turns = actions.shape[1] - 1
    given = [list(course.turn_rewards or ()) for course in courses]
    table["turn_reward"] = torch.tensor(
        [each + [0.0] * (turns - len(each)) for each in given], dtype=torch.float64
    )
