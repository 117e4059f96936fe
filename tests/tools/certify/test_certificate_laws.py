"""Certificates of corrections, gates, filters and trees agree with theory and with sampling."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch
from composed import configure
from dumps import whole
from omegaconf import OmegaConf

from headrace.pipeline.tools.certify import (
    Certificate,
    FailingRollouts,
    FanOut,
    Forks,
    OneTurn,
    Prompt,
    Refused,
    SeveralRewards,
    SmallTask,
    StopOrContinue,
    Trajectory,
    TurnsAsRows,
    certify_recipe,
    judge_gradient,
)
from headrace.pipeline.tools.certify.exact_gradient import (
    ACTIONS,
    OUTCOME,
    all_outcomes,
    gradients_of,
    one_group_a_step,
    rows_of_trajectories,
)
from headrace.transforms import Status

pytestmark = pytest.mark.slow

TASKS = {
    "stop_or_continue": StopOrContinue(teacher=[0.1, 0.4, 0.6], reference=[0.2, -0.1, 0.5]),
    "turns_as_rows": TurnsAsRows(),
    "prompts": OneTurn(theta=[2.2, 0.0, -2.2], lengths=[3, 1]),
    "fan_out": FanOut(),
    "forks": Forks(),
    "several_rewards": SeveralRewards(),
    "stale": StopOrContinue(theta=[0.3, -0.2], ends=[0.0, 0.3, 1.0], sampler=[-1.0, 0.9]),
    "by_chance": FailingRollouts(dies=0.2),
    "by_outcome": FailingRollouts(fails=[0.0, 0.3]),
}


@cache
def certified(recipe: str, task: str, *words: str, group_size: int = 4) -> Certificate | Refused:
    config = configure("load", f"pipeline={recipe}", *words).pipeline
    return certify_recipe(config, recipe, TASKS[task], task, group_size=group_size, overrides=words)


def ratio(*arguments, **options) -> list[float]:
    return list(certified(*arguments, **options).advantage.ratio)


# -- by hand ---------------------------------------------------------------------------------------------


def test_the_certificate_of_two_rollouts_equals_one_by_hand(monkeypatch):
    """The rollouts differ with probability 2p(1 − p), p = σ(θ). Then A = ±½, so E g = ½ p(1 − p) = ½ ∇J."""
    monkeypatch.setitem(TASKS, "coin", OneTurn(theta=[0.7]))
    p = float(torch.tensor(0.7, dtype=torch.float64).sigmoid())
    found = certified("dr_grpo", "coin", group_size=2)
    differ = 2 * p * (1 - p)
    # If one is right and one is wrong, g = ½ (½ (1 − p) + (−½)(−p)) = ¼.
    assert found.advantage.ratio == pytest.approx([0.25 * differ / (p * (1 - p))])
    assert found.advantage.variance == pytest.approx(differ * 0.25**2 - (differ * 0.25) ** 2)


@pytest.mark.parametrize("task", sorted(TASKS.keys() - {"forks", "stale", "by_outcome"}))
def test_leave_one_out_is_unbiased_up_to_failed_rollouts(task):
    """If rollouts fail at random, the factor is the chance that the three others survive.

    The chance that the rollout itself survives is in the objective.
    """
    found = certified("rloo", task).advantage
    expected = 0.8**3 if task == "by_chance" else 1.0
    assert found.ratio == pytest.approx([expected] * len(found.ratio), abs=1e-12)
    assert found.cosine == pytest.approx(1, abs=1e-12)


def test_token_weights_are_in_the_gradient_of_the_loss():
    """Each turn inside a row has the weight 1. All actions after the first are in a second turn."""
    task = TASKS["stop_or_continue"]
    words = ("pipeline.stages.weight.unit=turn", "pipeline.stages.weight.turn_index_key=turn_index")
    batch, probability = all_outcomes(task, 2, turns_paid_apart=False)
    batch["turn_index"] = batch["turn_index"].clamp(max=1)
    pipeline = one_group_a_step(configure("load", "pipeline=grpo", *words).pipeline, task)
    advantage, found = gradients_of(pipeline, batch, task.score(), len(probability), 2)
    trained, score, expected = pipeline.run(batch).batch, task.score(), torch.zeros_like(found)
    credit = torch.zeros_like(found)
    for outcome in range(len(probability)):
        turns: dict = {}
        for row in trained[trained[OUTCOME] == outcome].unbind(0):
            for token in row["masks", "all_assistant_mask"].nonzero().flatten().tolist():
                whose = int(row["rollout_id"]), int(row["turn_index"][token])
                gradient = float(row["advantage"]) * score[row[ACTIONS][token]]
                turns.setdefault(whose, []).append(gradient)
        for gradients in turns.values():
            expected[outcome] += torch.stack(gradients).mean(0) / len(turns)
            credit[outcome] += torch.stack(gradients).sum(0) / 2
    assert max(map(int, trained["masks", "all_assistant_mask"].sum(1))) > 2
    assert float(expected.abs().max()) > 0.1
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-9)
    assert torch.allclose(advantage, credit, rtol=1e-5, atol=1e-9)


class AllKinds(SmallTask):
    """Two prompts: one whose rollouts all fail before an action, and one with two decisions.

    A rollout may have two rows, and two trajectories may have the same action.
    """

    def prompts(self):
        wrong, right = (0, 0), (0, 1)
        kinds = (
            Trajectory(
                ((wrong,), ((1, 0),)), (1.0,), ((4.0,), (-3.0,)), states=(6, 7), status=Status.TRUNCATED
            ),
            Trajectory(((wrong, (1, 1)),), (9.0,), states=(8,)),
            Trajectory(((right,),), (0.0,), states=(9,), chance=0.25, status=Status.ABORTED),
            Trajectory(((right,),), (4.0,), states=(3,), chance=0.75),
        )
        none = Trajectory(((),), (2.0,), states=(5,), status=Status.FAILED)
        return [Prompt(0.75, (none,)), Prompt(0.25, kinds)]


def test_the_rows_of_all_outcomes_equal_those_by_hand():
    """The policy is right with the probabilities ¾ and ½, the sampler ½ and ¾, and others always ½ or ¾.

    After the first action is wrong, the mean return is (1 + 9) / 2 = 5. It is ¼ · 5 + ¾ · ¾ · 4 = 3.5 before.
    """
    odds = math.log(3)
    task = AllKinds(theta=[odds, 0], sampler=[0, odds], teacher=[0, 0], reference=[odds, odds])
    batch, probability = all_outcomes(task, 1, turns_paid_apart=True)
    assert probability.tolist() == pytest.approx([3 / 4, 1 / 32, 3 / 32, 1 / 32, 3 / 32])
    few, half, most = math.log(1 / 4), math.log(1 / 2), math.log(3 / 4)
    unsure = -(few / 4 + most * 3 / 4)
    numbers = {
        "next.reward": [[2], [4], [-3], [9], [0], [4]],
        "log_probs.full": [[0] * 3, [0, half, 0], [0, few, 0], [0, half, most], *[[0, half, 0]] * 2],
        "old_log_probs.full": [[0] * 3, [0, few, 0], [0, half, 0], [0, few, half], *[[0, most, 0]] * 2],
        "teacher_log_probs.full": [[0] * 3, *[[0, half, 0]] * 2, [0, half, half], *[[0, half, 0]] * 2],
        "ref_log_probs.full": [[0] * 3, *[[0, few, 0]] * 2, [0, few, most], *[[0, most, 0]] * 2],
        "entropy.full": [[0] * 3, [0, unsure, 0], [0, -half, 0], [0, unsure, -half], *[[0, unsure, 0]] * 2],
        "sum_pi_squared.full": [[0] * 3, [0, 5 / 8, 0], [0, 0.5, 0], [0, 5 / 8, 0.5], *[[0, 5 / 8, 0]] * 2],
        "values.full": [[0] * 3, [0, 3.5, 0], [0, 5, 0], [0, 3.5, 5], *[[0, 3.5, 0]] * 2],
    }
    found = whole(batch)
    for name, expected in numbers.items():
        torch.testing.assert_close(torch.tensor(found.pop(name)).double(), torch.tensor(expected).double())
    actions = [[-1, -1, -1], [-1, 0, -1], [-1, 2, -1], [-1, 0, 3], [-1, 1, -1], [-1, 1, -1]]
    assert found == {
        "certify.outcome": [0, 1, 1, 2, 3, 4],
        "certify.actions": actions,
        "group_id": [0, 1, 1, 2, 3, 4],
        "rollout_id": [0, 1, 1, 2, 3, 4],
        "expected_rollouts": [1] * 6,
        "next.status": [Status.FAILED, *[Status.TRUNCATED] * 2, Status.COMPLETED, Status.ABORTED, 0],
        "role": [0] * 6,
        "state_id": [5, 6, 7, 8, 9, 3],
        "tokens.full": [[4, 6, 6], [5, 0, 6], [5, 2, 6], [5, 0, 3], [5, 1, 6], [5, 1, 6]],
        "masks.all_assistant_mask": [[action >= 0 for action in row] for row in actions],
        "masks.all_attention_mask": [[True, *(action >= 0 for action in row[1:])] for row in actions],
        "node_id": [[0, node, node] for node in (1, 2, 2, 3, 4, 5)],
    }


def test_turns_are_paid_in_their_own_column_or_in_the_reward():
    task = StopOrContinue(theta=[0.3, 0.1], ends=[0.25, 0.5, 1.0])
    for apart, rewards in ((True, [0.25, 0.5, 1.0]), (False, [0.25, 1.0, 2.0])):
        found = whole(all_outcomes(task, 1, turns_paid_apart=apart)[0])
        assert found["next.reward"] == [[reward] for reward in rewards]
        assert found["turn_index"] == [[-1, 0, -1], [-1, 0, 1], [-1, 0, 1]]
        assert found["turn_reward"] == [[0.0, 0.0], [0.5, 0.0], [0.5, 0.5]]


@pytest.mark.parametrize("votes", [True, False])
def test_an_outcome_has_the_rollouts_of_its_families_in_order(votes):
    """A family is two rollouts, which share the token of their first action. The last family votes."""
    task = TASKS["forks"]
    batch, probability = all_outcomes(task, 4, turns_paid_apart=False, votes=votes)
    families = task.sampled_families(task.prompts()[0])
    outcomes = [(one, other) for one in families for other in families]
    assert probability.tolist() == pytest.approx(
        [one.probability * other.probability for one, other in outcomes]
    )
    leaves = [[-1, first, 2 + 2 * first + second] for first in (0, 1) for second in (0, 1)]
    rollouts = [leaves[at] for outcome in outcomes for family in outcome for at in family.trajectories]
    found = whole(batch)
    assert found["certify.actions"] == rollouts
    assert found["rollout_id"] == [*range(4 * 64)]
    assert found["group_id"] == found["certify.outcome"] == [at // 4 for at in range(4 * 64)]
    assert found["expected_rollouts"] == [4] * 4 * 64
    assert found["node_id"] == [[0, 1 + at // 2 * 2, 1 + at] for at in range(4 * 64)]
    assert found.get("votes_only") == ([False, False, True, True] * 64 if votes else None)


def of_one_turn(at: int) -> tuple[Trajectory, ...]:
    return (
        Trajectory(((),), (0.0,), chance=0.2, status=Status.FAILED),
        Trajectory((((at, 0), (2, 0), (2, 0)),), (0.5,), chance=0.8),
        Trajectory((((at, 1),),), (2.0,), chance=0.4),
        Trajectory((((at, 1),),), (2.0,), ((0.0,),), chance=0.4, status=Status.FAILED),
    )


def one(*trajectories: Trajectory) -> list[tuple[float, tuple[Trajectory, ...]]]:
    return [(1.0, trajectories)]


TWO_TURNS = {"theta": [0.3, 0.1], "ends": [0.25, 0.5, 1.0]}
ONE_TURN = {"theta": [0.5, -1.0], "rewards": [0.5, 2.0], "lengths": [3, 1], "fails": [0, 0.5], "dies": 0.2}


@pytest.mark.parametrize(
    ("task", "prompts"),
    [
        (OneTurn(**ONE_TURN, shares=[0.25, 0.75]), [(0.25, of_one_turn(0)), (0.75, of_one_turn(1))]),
        (OneTurn(**ONE_TURN), [(0.5, of_one_turn(0)), (0.5, of_one_turn(1))]),
        (
            SeveralRewards(rewards=[(1, 2), (3, 4), (5, 6)]),
            one(*(Trajectory((((0, at),),), (2 * at + 1, 2 * at + 2)) for at in range(3))),
        ),
        (FanOut(rewards=[0.5, 0.25, 2.0]), one(
            Trajectory((((0, 0),),), (0.5,)),
            Trajectory((((0, 1),), ((1, 0),)), (0.25,)),
            Trajectory((((0, 1),), ((1, 1),)), (2.0,)),
        )),
        (Forks(rewards=[0.0, 0.5, 2.0, 1.0]), one(
            Trajectory((((0, 0), (1, 0)),), (0.0,)),
            Trajectory((((0, 0), (1, 1)),), (0.5,)),
            Trajectory((((0, 1), (2, 0)),), (2.0,)),
            Trajectory((((0, 1), (2, 1)),), (1.0,)),
        )),
        (StopOrContinue(**TWO_TURNS), one(
            Trajectory((((0, 0),),), (0.25,), turn_rewards=(0.0,)),
            Trajectory((((0, 1), (1, 0)),), (1.0,), turn_rewards=(0.5, 0.0)),
            Trajectory((((0, 1), (1, 1)),), (2.0,), turn_rewards=(0.5, 0.5)),
        )),
        (TurnsAsRows(**TWO_TURNS), one(
            Trajectory((((0, 0),),), (0.25,), ((0.25,),), states=(0,)),
            Trajectory((((0, 1),), ((1, 0),)), (1.0,), ((0.5,), (0.5,)), states=(0, 1)),
            Trajectory((((0, 1),), ((1, 1),)), (2.0,), ((0.5,), (1.5,)), states=(0, 1)),
        )),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_the_trajectories_of_a_task_equal_those_by_hand(task, prompts):
    assert task.prompts() == prompts


@pytest.mark.parametrize("task", dict.fromkeys(map(type, TASKS.values())), ids=lambda task: task.__name__)
def test_the_options_of_a_task_are_given_by_name(task):
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        task([0.0], theta=[0.0])


SPLIT = {"minibatches": 4, "unit": "rollout", "remainder": "spread", "microbatches": 2, "max_tokens": 64}
SPLIT |= {"ranks": 2, "rank": 1, "shuffle": True}
ITS_OWN = {"gate.group_size": 4, "gate.on_incomplete": "keep", "weight.fold": "sum", "collapse.columns": 3}


@pytest.mark.parametrize(
    ("task", "words", "changed"),
    [
        ("stop_or_continue", [], {}),
        ("several_rewards", [], {"collapse.columns": 2}),
        ("several_rewards", ["++pipeline.stages.collapse.columns=3"], {"collapse.columns": 3}),
        ("by_chance", [], {"gate.on_incomplete": "keep"}),  # the recipe has set this option
        ("turns_as_rows", [], {"collapse.reward": "sum"}),
        ("turns_as_rows", ["pipeline.stages.collapse.reward=shared"], {}),
    ],
)
def test_a_certificate_changes_these_options_of_a_recipe_and_no_others(task, words, changed, monkeypatch):
    monkeypatch.setattr(f"{one_group_a_step.__module__}.build_pipeline", OmegaConf.to_container)
    own = [f"pipeline.stages.split.{name}={value}" for name, value in SPLIT.items()]
    own += [f"pipeline.stages.{name}={value}" for name, value in ITS_OWN.items()]
    node = configure("load", "pipeline=grpo", "pipeline.process_group=world", *own).pipeline
    before = OmegaConf.to_container(node)
    found = one_group_a_step(node, TASKS[task], words)
    assert OmegaConf.to_container(node) == before
    expected = copy.deepcopy(before)
    expected["process_group"] = None
    cut = dict.fromkeys(("minibatches", "microbatches", "max_tokens", "rank"))
    cut |= {"minibatch_size": 1, "unit": "group", "remainder": "raise", "ranks": 1, "shuffle": False}
    more = {"gate.group_size": None, "weight.fold": "none", "collapse.columns": 1} | changed
    for name, value in ({f"split.{name}": value for name, value in cut.items()} | more).items():
        stage, _, option = name.partition(".")
        expected["stages"][stage][option] = value
    assert found == expected


@pytest.mark.parametrize(("rest", "second"), [(4e-15, 0.0), (4e-13, pytest.approx(1e-13, rel=0.01))])
def test_a_judgement_equals_one_by_hand_up_to_rounding(rest, second):
    """The mean of (4, 3, 0) and (0, −1, 4) with the chances ¼ and ¾ is (1, 0, 3).

    The true gradient is (2, 1, 4), so each parameter differs by 1. The squares of distances from the mean are
    27 and 3.
    """
    chances = torch.tensor([0.25, 0.75]).double()
    gradients = torch.tensor([[4, 3 + rest, 0], [0, -1, 4]]).double()
    found = judge_gradient(chances, gradients, torch.tensor([2.0, 1, 4]).double())
    assert found.ratio == (0.5, second, 0.75)
    assert found.relative_bias == pytest.approx((3 / 21) ** 0.5)
    assert found.cosine == pytest.approx(14 / (10 * 21) ** 0.5)
    assert (found.variance, found.scale) == pytest.approx((0.25 * 27 + 0.75 * 3, 14 / 21))
    nothing = judge_gradient(chances, gradients, torch.zeros(3).double())
    assert (nothing.ratio, nothing.relative_bias, nothing.cosine) == ((None,) * 3, None, None)


# -- corrections -----------------------------------------------------------------------------------------

UNBIASED = (
    "pipeline.stages.filter=null",
    "pipeline.stages.advantage.scale=none",
    "pipeline.stages.advantage.baseline=leave_one_out",
    "pipeline.stages.correction.level=sequence",
)
OPEN = ("pipeline.stages.correction.bound=none", "pipeline.stages.correction.high=null")


def test_untruncated_sequence_weights_correct_a_stale_sampler_exactly():
    assert ratio("tis", "stale", *UNBIASED, *OPEN) == pytest.approx([1, 1], abs=1e-12)
    assert certified("rloo", "stale").advantage.relative_bias > 0.05


def test_truncation_bias_vanishes_as_the_bound_grows():
    bounds = [f"pipeline.stages.correction.high={high}" for high in (1.5, 2.0, 3.0, 5.0)]
    biases = [certified("tis", "stale", *UNBIASED, word).advantage.relative_bias for word in bounds]
    assert biases == sorted(biases, reverse=True)
    assert biases[1] > 0.05
    assert biases[-1] < 1e-12  # above the largest weight, 4.1


def test_importance_weights_of_tokens_are_biased_for_several_tokens():
    words = [*UNBIASED[:3], *OPEN]
    assert certified("tis", "stale", *words).advantage.relative_bias > 0.05


# -- gates and filters -----------------------------------------------------------------------------------


def test_groups_lost_by_outcome_bias_the_direction_of_the_gradient():
    found = certified("rloo", "by_outcome").advantage
    assert found.ratio[0] < 0.75 * found.ratio[1]  # prompts that are solved more often fail more often
    assert found.cosine < 0.99


def test_gate_options_of_the_user_are_kept():
    refused = certified("rloo", "by_chance", "pipeline.stages.gate.on_incomplete=raise")
    assert isinstance(refused, Refused)
    assert "incomplete" in refused.reason
    assert "Set pipeline.stages.gate.on_incomplete=drop" in refused.reason
    keep = "pipeline.stages.gate.on_incomplete=keep"
    kept = ratio("rloo", "by_chance", keep, "pipeline.stages.gate.min_rollouts=2")
    assert kept == pytest.approx([kept[0]] * 2)
    assert kept[0] == pytest.approx(1 - 0.2**3)  # the chance that a rollout has another to be compared with


def test_a_loss_with_components_has_no_certificate():
    """A certificate uses the loss weight and the advantage, and would ignore the factor of a component."""
    refused = certified("rloo", "fan_out", "pipeline.stages.weight.components={objective:{factor:0.5}}")
    assert isinstance(refused, Refused)
    assert "this loss has components" in refused.reason


@pytest.mark.parametrize("recipe", ["grpo", "dapo"])
def test_filtering_equal_groups_changes_no_expectation(recipe):
    without = certified(recipe, "prompts", "pipeline.stages.filter=null")
    assert certified(recipe, "prompts").advantage == without.advantage
    assert certified(recipe, "prompts").loss == without.loss


def test_a_shift_is_unbiased_only_if_groups_of_equal_rewards_stay():
    """AsymRE's shift changes no expected gradient, unless groups of equal rewards are left out."""
    assert ratio("asymre", "prompts") == pytest.approx([0.75] * 3)
    words = (
        "+pipeline.stages.filter={_target_: headrace.transforms.SampleFilter, "
        "criterion: {_target_: headrace.transforms.RewardsVary}}",
    )
    assert ratio("asymre", "prompts", *words) != pytest.approx([0.75] * 3, abs=0.01)


# -- fan-out, trees, several rewards ---------------------------------------------------------------------

EACH_ROW = ("pipeline.stages.collapse.rollout_key=null", "pipeline.stages.advantage.rollout_key=null")


def test_counting_rows_is_biased_under_fan_out():
    once, each = certified("rloo", "fan_out").advantage, certified("rloo", "fan_out", *EACH_ROW).advantage
    assert once.cosine == pytest.approx(1, abs=1e-12)
    assert each.cosine < 0.999
    assert each.relative_bias > once.relative_bias + 0.03


def test_a_baseline_with_a_shared_prefix_is_biased_at_the_fork():
    """One of three others has the same first action, so the ratio of this action is 2/3. Others have 1."""
    assert ratio("rloo", "forks") == pytest.approx([2 / 3, 1, 1], abs=1e-12)


def test_a_tree_of_draws_is_unbiased_and_a_tree_of_equal_tokens_is_biased():
    """If two forks draw the same first action, equal tokens make them one node with four leaves."""
    drawn = ratio("tree_grpo", "forks", "pipeline.stages.tree.tokens_key=node_id")
    assert drawn == pytest.approx([1, 1, 1], abs=1e-12)
    assert ratio("tree_grpo", "forks")[1] > 1.5
    alone = "pipeline.stages.tree.tokens_key=node_id"
    assert ratio("tree_grpo", "stop_or_continue", alone) == pytest.approx([1, 1, 1], abs=1e-12)


@pytest.mark.parametrize("unit", [2.0**-60, 2.0**60])
def test_the_true_gradient_is_proportional_to_the_unit_of_the_rewards(unit):
    for task in TASKS.values():
        one = task.true_gradient()
        assert one.any()
        assert torch.equal(task.true_gradient([unit] * task.columns), unit * one)


def test_the_objective_uses_the_recipes_reward_weights():
    words = ("pipeline.stages.collapse.columns=2", "pipeline.stages.collapse.weights=[1,0.1]")
    assert ratio("rloo", "several_rewards", *words) == pytest.approx([1, 1], abs=1e-12)
    assert ratio("rloo", "several_rewards") == pytest.approx([1, 1], abs=1e-12)
    both = TASKS["several_rewards"].true_gradient(), TASKS["several_rewards"].true_gradient([1, 0.1])
    assert not torch.allclose(*both)


# -- plain sampling, through the same pipeline -----------------------------------------------------------

GROUPS = {True: 1000, False: 100}  # number of groups if they share a batch, and if each has its own
ERRORS = 4.5  # standard errors


def walk(task: SmallTask, prompt, generator: torch.Generator) -> int:
    """Sample a rollout action by action, and return the index of its trajectory."""
    log_probs, left, step = task.log_probs(task.sampler), list(range(len(prompt.trajectories))), 0
    while True:
        going = [number for number in left if len(prompt.trajectories[number].actions) > step]
        if not going:
            chances = torch.tensor([prompt.trajectories[number].chance for number in left])
            return left[int(torch.multinomial(chances, 1, generator=generator))]
        decision = prompt.trajectories[going[0]].actions[step][0]
        action = int(torch.multinomial(log_probs[decision].exp(), 1, generator=generator))
        left = [number for number in going if prompt.trajectories[number].actions[step] == (decision, action)]
        step += 1


@cache
def sampled(name: str, groups: int, apart: bool):
    """A batch of the rows of `groups` groups of four rollouts."""
    task, generator = TASKS[name], torch.Generator().manual_seed(7)
    prompts = task.prompts()
    table, rows_of_trajectory = rows_of_trajectories(task, prompts, turns_paid_apart=apart)
    shares = torch.tensor([prompt.probability for prompt in prompts])
    index, outcome, rollout = [], [], []
    for group in range(groups):
        which = int(torch.multinomial(shares, 1, generator=generator))
        before = sum(len(prompt.trajectories) for prompt in prompts[:which])
        for place in range(4):
            rows = rows_of_trajectory[before + walk(task, prompts[which], generator)]
            index += rows
            outcome += [group] * len(rows)
            rollout += [4 * group + place] * len(rows)
    batch = table[torch.tensor(index)]
    batch[OUTCOME] = batch["group_id"] = torch.tensor(outcome)
    batch["rollout_id"], batch["expected_rollouts"] = torch.tensor(rollout), torch.full((len(batch),), 4)
    return batch


def by_autograd(task: SmallTask, trained, groups: int, coefficient) -> torch.Tensor:
    """(groups, P) ∇ Σ coefficient · A · log π, by automatic differentiation."""

    def objective(theta):
        log_prob = task.log_policy(theta).flatten()[trained[ACTIONS].clamp_min(0)]
        inside = trained["masks", "all_assistant_mask"]
        credit = trained["advantage"].reshape(len(trained), -1) * coefficient[:, None]
        each = torch.where(inside, credit * log_prob, 0.0).sum(1)
        return torch.zeros(groups, dtype=torch.float64).index_add(0, trained[OUTCOME], each)

    theta = torch.tensor(task.theta, dtype=torch.float64)
    ways = torch.eye(len(theta), dtype=torch.float64)
    return torch.stack([torch.autograd.functional.jvp(objective, theta, way)[1] for way in ways], 1)


# There is a recipe for each way to enumerate outcomes: with rows that are turns, with several prompts, one
# by one, and with advantages of nodes.
SAMPLED = {
    "gigpo": "turns_as_rows",
    "mgpo": "prompts",
    "gdpo": "stop_or_continue",
    "tree_grpo": "stop_or_continue",
}


@pytest.mark.parametrize("recipe", SAMPLED)
def test_sampling_agrees_within_its_standard_error(recipe):
    name = SAMPLED[recipe]
    task, exact = TASKS[name], certified(recipe, name)
    assert isinstance(exact, Certificate), exact
    pipeline = one_group_a_step(configure("load", f"pipeline={recipe}").pipeline, task)
    together = all(stage.within_groups for stage in pipeline.stages.values())
    groups = GROUPS[together]
    apart = any("turn_reward" in stage.in_keys for stage in pipeline.stages.values())
    batch = sampled(name, groups, apart)
    true = task.true_gradient()
    if together:
        trained = pipeline.run(batch).batch
        advantage = by_autograd(task, trained, groups, torch.full((len(trained),), 0.25).double())
        loss = by_autograd(task, trained, groups, trained["loss_weight"])
    else:
        advantage, loss = gradients_of(pipeline, batch, task.score(), groups, 4)
    for found, judgement in ((advantage, exact.advantage), (loss, exact.loss)):
        mean, error = found.mean(0), found.std(0) / groups**0.5
        expected = torch.tensor(judgement.ratio, dtype=torch.float64) * true
        assert ((mean - expected).abs() <= ERRORS * error + 1e-12).all(), (mean / true, judgement.ratio)
        spread = float(found.var(0).sum())
        assert spread == pytest.approx(judgement.variance, rel=0.8 if groups < 500 else 0.35)
