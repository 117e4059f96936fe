"""With over-generation, TRL's trainers generate more groups than a step trains."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from headrace.adapters import FewerRowsWarning, attach
from headrace.adapters.over_generation import (
    FirstGroups,
    check_over_generation,
    rows_of,
    rows_to_train,
    train_first,
)
from headrace.pipeline import advantages_of, load_pipeline
from headrace.transforms import BatchError


def batch_of(rewards: list[list[float]]) -> TensorDict:
    number, size = len(rewards), len(rewards[0])
    groups = torch.arange(number).repeat_interleave(size)
    columns = {"group_id": groups, "rollout_id": torch.arange(number * size)}
    batch = TensorDict(columns, [number * size])
    batch["next", "reward"] = torch.tensor(rewards).flatten()
    batch["expected_rollouts"] = torch.full((number * size,), size)
    batch["masks", "all_assistant_mask"] = torch.ones(number * size, 3, dtype=torch.bool)
    return batch


@pytest.mark.parametrize("action", ["drop", "mask", "exclude"])
def test_the_first_informative_groups_train_and_other_rows_have_a_reason(action):
    generator = torch.Generator().manual_seed(0)
    for groups in (1, 2, 3, 5):
        rewards = torch.randint(0, 2, (6, 2), generator=generator).float()
        pipeline = load_pipeline("grpo", stages={"filter": {"action": action}})
        result = advantages_of(train_first(pipeline, groups), batch_of(rewards.tolist()))
        informative = [at for at, (one, other) in enumerate(rewards.tolist()) if one != other]
        counts = result.run.ledger.counts()
        assert counts["trained"] == 2 * len(informative[:groups])
        assert counts["over_generation/left_over"] == 2 * len(informative[groups:])
        assert sum(counts.values()) == 12
        kept = rows_to_train(result.in_loss, 2, 2 * groups)
        assert len(kept) == 2 * groups
        assert {int(row) // 2 for row in kept} >= {*informative[:groups]}
        assert {int(row) // 2 for row in result.in_loss.any(1).nonzero()} == {*informative[:groups]}
        assert ((result.advantage != 0).any(1) == result.in_loss.any(1)).all()


@pytest.mark.parametrize("training", [10, 20, 30])
def test_the_first_of_many_groups_in_the_loss_are_chosen(training):
    """Every second group is in the loss, up to `training` groups. The first other groups make up the 20."""
    in_loss = torch.zeros(120, 3, dtype=torch.bool)
    in_loss[1 : 4 * training : 4, 2] = True
    mine = [group for group in range(60) if in_loss[2 * group : 2 * group + 2].any()]
    others = [group for group in range(60) if group not in mine]
    chosen = sorted([*mine, *others][:20])
    assert rows_to_train(in_loss, 2, 40).tolist() == [2 * group + at for group in chosen for at in (0, 1)]


def test_over_generation_changes_no_advantage_of_a_trained_row():
    batch = batch_of([[0.0, 1.0], [1.0, 1.0], [2.0, 0.0], [0.0, 5.0]])
    pipeline = load_pipeline("lite_ppo")  # its scale is over the whole batch
    whole = advantages_of(pipeline, batch.clone()).advantage
    part = advantages_of(train_first(pipeline, 2), batch.clone())
    rows = part.in_loss.any(1)
    assert rows.tolist() == [True, True, False, False, True, True, False, False]
    torch.testing.assert_close(part.advantage[rows], whole[rows], rtol=0, atol=0)


def test_columns_without_a_row_for_each_completion_are_refused():
    rows = torch.tensor([0, 2])
    kept = rows_of({"a": torch.arange(3), "n": torch.tensor(7), "no": None}, rows, 3)
    assert kept["a"].tolist() == [0, 2]
    assert (kept["n"].item(), kept["no"]) == (7, None)
    for name, value in (
        ("pixel_values", torch.zeros(3, 4)),
        ("image_sizes", torch.zeros(5)),
        ("n", [1, 2, 3]),
    ):
        with pytest.raises(ValueError, match=f"'{name}' has no row for each"):
            rows_of({name: value}, rows, 3)


@pytest.mark.parametrize(
    ("factor", "rows", "steps", "recipe", "message"),
    [
        (0, 8, 1, "grpo", "over_generation must be an integer ≥ 1; got 0"),
        (1.5, 12, 1, "grpo", r"over_generation must be an integer ≥ 1; got 1\.5"),
        (2.0, 8, 1, "grpo", r"over_generation must be an integer ≥ 1; got 2\.0"),
        (3, 8, 1, "grpo", r"a multiple of 3, .*3 \* num_generations = 12; got 8 and 8"),
        (2, 4, 1, "grpo", r"2 \* num_generations = 8; got 4 and 4"),
        (2, 3, 8, "grpo", "must be a multiple of 2, .*got 3 and 24"),
        (2, 4, 3, "grpo", "8; got 4 and 12"),
        (2, 8, 1, "as/trl", "the recipe's filter, and the recipe has none"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(factor, rows, steps, recipe, message):
    trainer = SimpleNamespace(
        args=SimpleNamespace(per_device_train_batch_size=rows, steps_per_generation=steps), num_generations=4
    )
    with pytest.raises(ValueError, match=message):
        check_over_generation(trainer, load_pipeline(recipe, group_size=4), factor)
    check_over_generation(trainer, load_pipeline(recipe, group_size=4), 1)


def test_over_generation_needs_whole_groups_of_a_rank_over_all_steps_of_a_generation():
    settings = SimpleNamespace(per_device_train_batch_size=4, steps_per_generation=2)
    trainer = SimpleNamespace(args=settings, num_generations=4)
    check_over_generation(trainer, pipeline := load_pipeline("grpo", group_size=4), 2)
    pipeline.rank_options = replace(pipeline.rank_options, process_group=object())
    with pytest.raises(ValueError, match=r"leave out process_group, .* multiple of num_generations \(4\)"):
        check_over_generation(trainer, pipeline, 2)


def test_first_groups_refuses_a_batch_without_groups():
    with pytest.raises(BatchError, match="group_id"):
        FirstGroups(groups=1)(TensorDict({"rollout_id": [1, 2]}, [2]))


def stand_in(**options: Any) -> Any:
    made = type(
        "GRPOTrainer", (), {"__module__": "swift.trainers" if "swift" in options else "trl.trainer"}
    )()
    made.reward_weights, made.num_generations = torch.ones(1), 4
    made.args = SimpleNamespace(per_device_train_batch_size=8, steps_per_generation=1)
    return made


def test_a_recipe_that_drops_rows_says_that_no_new_prompts_are_sampled():
    drops = {"filter": {"action": "drop"}}
    attach(stand_in(), "grpo")  # warnings are errors here
    attach(stand_in(), "dapo", over_generation=2)
    of_trl = r"drops rows \(filter\), and GRPOTrainer samples no new prompts .*over_generation=2"
    for trainer, recipe, options, said in (
        (stand_in(), "dapo", {}, of_trl),
        (stand_in(), "grpo", {"stages": drops}, of_trl),
        (stand_in(swift=True), "dapo", {}, "dynamic_sample=true"),
    ):
        with pytest.warns(FewerRowsWarning, match=said) as found:
            attach(trainer, recipe, **options)
        assert [each.filename for each in found] == [__file__]


def test_over_generation_is_refused_outside_of_trl():
    with pytest.raises(ValueError, match="an option for TRL's GRPOTrainer"):
        attach(stand_in(swift=True), "dapo", over_generation=2)


@pytest.mark.slow
@pytest.mark.llm
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
def test_in_trl_each_step_trains_the_first_informative_groups(tmp_path, kind):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from small_trl import small_trainer, some_equal

    settings = {"gradient_accumulation_steps": 2} | ({"beta": 0.0} if kind == "RLOOTrainer" else {})
    trainer = small_trainer(tmp_path, getattr(trl, kind), (some_equal,), 4, **settings)
    attach(trainer, "grpo", over_generation=2, scale="none")
    own, steps, runs = trainer._compute_loss, [], []
    trainer._compute_loss = lambda model, inputs: steps.append(inputs) or own(model, inputs)
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda each: (generate(each), runs.append(trainer.last_run))[0]
    before = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.train()
    # A step generates 16 rows and trains 2 micro-batches of 4 rows.
    assert [len(each["completion_ids"]) for each in steps] == [4] * 8
    assert len(runs) == 4
    for at, run in enumerate(runs):
        counts, mine = run.ledger.counts(), steps[2 * at : 2 * at + 2]
        trained = sum(int((each["advantages"].flatten() != 0).sum()) for each in mine)
        assert counts["trained"] == min(8, 16 - counts["filter/zero_variance"])
        assert trained <= counts["trained"]
        assert sum(counts.values()) == 16
        if kind == "GRPOTrainer":
            for each in mine:
                assert each["num_items_in_batch"] == sum(part["tool_mask"].sum() for part in mine)
    assert any(run.ledger.counts()["filter/zero_variance"] for run in runs)
    after = [each.detach() for each in trainer.model.parameters()]
    assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
    own_size = trainer.evaluate(trainer.train_dataset)
    assert len(trainer.last_run.ledger.reason) == 8  # no row of an evaluation batch is left over
    assert "over_generation/left_over" not in trainer.last_run.ledger.counts()
    assert own_size["eval_headrace/rows/in"] == 8


@pytest.mark.slow
@pytest.mark.llm
def test_each_of_two_ranks_trains_its_own_groups_over_the_tokens_of_both(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    from any_rank import results_of
    from small_trl import over_generating

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = results_of(over_generating, 2, tmp_path, str(tmp_path), port)
    assert all(each["ranks"] == [2] for each in ranks)
    for each in ranks:
        for at, counts in enumerate(each["counts"]):  # 16 rows are generated for a step, and 8 are trained
            assert sum(counts.values()) == 16
            assert counts["trained"] == min(8, 16 - counts["filter/zero_variance"])
            mine = each["advantages"][2 * at : 2 * at + 2]
            assert [len(part) for part in mine] == [4, 4]
            assert sum(value != 0 for part in mine for value in part) <= counts["trained"]
    for at in range(2):  # each rank divides by the tokens of both ranks
        steps = slice(2 * at, 2 * at + 2)
        tokens = sum(sum(each["tokens"][steps]) for each in ranks)
        assert [each["denominators"][steps] for each in ranks] == [[tokens, tokens]] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["advantages"] != ranks[1]["advantages"]
