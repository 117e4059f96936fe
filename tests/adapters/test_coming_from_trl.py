"""The adapter of docs/coming-from/trl.md is tested inside of TRL's GRPOTrainer and RLOOTrainer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.adapters import attach
from headrace.pipeline import load_pipeline
from headrace.transforms import BatchError, IncompleteGroupsError

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
pytestmark = [
    pytest.mark.llm,
    pytest.mark.slow,
    # transformers 5 warns of names that its own Trainer uses.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
]
trl = pytest.importorskip("trl", reason="TRL is not installed")
GROUP_SIZE, ROWS = 4, 8
ROOT = Path(__file__).parents[2]


@pytest.fixture
def theirs(monkeypatch) -> list[torch.Tensor]:
    """A list to which TRL's trainer adds the advantages that it computes for each batch."""
    found: list[torch.Tensor] = []

    def spy_on(kind):
        own = kind._generate_and_score_completions

        def spy(self, inputs):
            output = own(self, inputs)
            found.append(output["advantages"].clone())
            return output

        monkeypatch.setattr(kind, "_generate_and_score_completions", spy)

    spy_on(trl.GRPOTrainer)
    spy_on(trl.RLOOTrainer)
    return found


def ones(completions, **others) -> list[float]:
    return [completion.count("1") + 0.1 * len(completion) for completion in completions]


def short_or_none(completions, **others) -> list[float | None]:
    return [None if "2" in completion else -float(len(completion)) for completion in completions]


def none_of_odd(completions, **others) -> list[float | None]:
    """Return None where `short_or_none` does, and for some other completions."""
    return [None if "2" in completion or "3" in completion else 1.0 for completion in completions]


def one_each(completions, **others) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


@pytest.fixture
def make_trainer(tmp_path):
    """A function that makes a trainer of a one-layer model, and collects the batches of its loss."""
    from small_trl import small_trainer

    def make(*words, rewards=(ones,), steps=2, trainer=trl.GRPOTrainer, **options):
        made = small_trainer(tmp_path, trainer, rewards, steps, **options)
        attach(made, load_pipeline(*words) if words else None)
        return SimpleNamespace(trainer=made, batches=record(made))

    return make


def record(trainer) -> list[dict]:
    """A list to which the trainer adds each batch of its loss, with the rewards."""
    batches, own = [], trainer._generate_and_score_completions

    def spy(inputs):
        output = own(inputs)
        batches.append(output | trainer._scored)
        return output

    trainer._generate_and_score_completions = spy
    return batches


def assert_equal(run, theirs) -> None:
    for batch, advantages in zip(run.batches, theirs, strict=True):
        torch.testing.assert_close(
            batch["advantages"].view(len(advantages)), advantages, rtol=1e-4, atol=1e-5
        )


def test_with_the_recipe_as_trl_the_trainer_trains_its_usual_advantages(make_trainer, theirs):
    run = make_trainer("pipeline=as/trl")
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    run.trainer.train()
    assert_equal(run, theirs)
    assert len(theirs) == 2
    for batch, advantages in zip(run.batches, theirs, strict=True):
        assert advantages.abs().max() > 0.5
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    assert run.trainer.state.log_history[-1]["headrace/rows/trained"] == ROWS
    assert run.trainer.last_run.ledger.reason.tolist() == [0] * ROWS
    assert run.trainer.last_run.report().step == 1  # the global steps are 0 and 1
    after = [p.detach() for p in run.trainer.model.parameters()]
    assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_the_default_recipe_follows_scale_rewards(make_trainer, theirs, scale):
    run = make_trainer(scale_rewards=scale, steps=1)
    run.trainer.train()
    assert_equal(run, theirs)


def test_missing_rewards_are_summed_as_trl_does(make_trainer, theirs):
    words = "pipeline.stages.collapse.columns=2", "pipeline.stages.collapse.weights=[1.0,0.5]"
    rewards = short_or_none, none_of_odd
    run = make_trainer("pipeline=as/trl", *words, rewards=rewards)
    run.trainer.reward_weights = torch.tensor([1.0, 0.5])  # TRL uses them for its own advantages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.grpo_trainer.logger.warning", lambda *args, **kwargs: None)
        run.trainer.train()
    missing = torch.cat([batch["next", "reward"].isnan() for batch in run.batches])
    assert missing.all(1).any()
    assert (missing.any(1) & ~missing.all(1)).any()
    assert_equal(run, theirs)


def test_an_error_of_missing_rewards_names_their_function(make_trainer):
    run = make_trainer("pipeline=grpo", "pipeline.stages.collapse.columns=2", rewards=(ones, short_or_none))
    with pytest.raises(BatchError, match=r"Reward functions that gave None or NaN: short_or_none$"):
        run.trainer.train()


def test_each_reward_function_is_a_column(make_trainer, theirs):
    run = make_trainer(
        "pipeline=as/trl", "pipeline.stages.collapse.columns=2", rewards=(ones, one_each), steps=1
    )
    trainer = run.trainer
    trainer.__class__ = trl.GRPOTrainer
    del trainer.pipeline
    attach(trainer)  # no option names the two columns
    trainer.train()
    assert_equal(run, theirs)


def test_masked_rows_have_no_tokens_in_the_loss(make_trainer):
    words = (
        "criterion@pipeline.stages.filter.criterion=not_truncated",
        "pipeline.stages.filter.action=exclude",
    )
    run = make_trainer("pipeline=dr_grpo", *words)
    run.trainer.train()
    silent = 0
    for batch in run.batches:
        last = batch["completion_mask"].sum(1, keepdim=True) - 1
        ended = batch["completion_ids"].gather(1, last).squeeze(1) <= 1  # TRL's ids of the end and of padding
        for start in range(0, ROWS, GROUP_SIZE):
            rows = range(start, start + GROUP_SIZE)
            mine = [batch["next", "reward"][row].item() for row in rows if ended[row]]
            for row in rows:
                expected = (
                    batch["next", "reward"][row].item() - math.fsum(mine) / len(mine) if ended[row] else 0.0
                )
                assert batch["advantages"][row].item() == pytest.approx(expected, abs=1e-5)
        assert torch.equal(batch["tool_mask"], batch["completion_mask"] * ended[:, None])
        assert batch["num_items_in_batch"] == batch["tool_mask"].sum()
        silent += int((~ended).sum())
    assert silent


def test_evaluation_groups_have_their_own_size(make_trainer, theirs):
    run = make_trainer("pipeline=as/trl", num_generations_eval=2, per_device_eval_batch_size=4)
    from datasets import Dataset

    run.trainer.evaluate(Dataset.from_dict({"prompt": ["1", "2"]}))
    assert_equal(run, theirs)


def test_prompts_that_are_not_repeated_are_refused(make_trainer, theirs):
    class OneOfEach(trl.GRPOTrainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(dataset or self.train_dataset)

    run = make_trainer("pipeline=as/trl", trainer=OneOfEach, steps=1)
    with pytest.raises(IncompleteGroupsError, match=r"0: 12.* 1 of 4"):
        run.trainer.train()
    assert theirs[0].abs().max() > 0.1  # TRL compares unrelated prompts


def test_a_recipe_is_attached_once_by_name_and_options(make_trainer):
    run = make_trainer("pipeline=as/trl")
    with pytest.raises(ValueError, match=r"has a recipe already: set trainer\.pipeline"):
        attach(run.trainer, "grpo")
    del run.trainer.pipeline
    run.trainer.__class__ = trl.GRPOTrainer
    with pytest.raises(ValueError, match="options must not be given with a pipeline"):
        attach(run.trainer, load_pipeline("grpo"), scale="none")
    assert attach(run.trainer, "grpo", scale="none") is run.trainer
    assert run.trainer.pipeline.stages["advantage"].scale == "none"
    assert isinstance(run.trainer, trl.GRPOTrainer)
    assert type(run.trainer).__name__ == "GRPOTrainer"


# -- RLOOTrainer ----------------------------------------------------------------------------------------


def by_chance(completions, **others) -> list[float | None]:
    """Random rewards of two digits, and None for a quarter of the completions on average."""
    values = torch.randint(-20, 20, (len(completions),)).tolist()
    return [None if value % 4 == 0 else value / 10 for value in values]


def also_by_chance(completions, **others) -> list[float | None]:
    return by_chance(completions)


def rloo(make_trainer, *words, **options) -> SimpleNamespace:
    return make_trainer(*words, trainer=trl.RLOOTrainer, **{"beta": 0.0} | options)


def test_with_the_default_recipe_rloo_trains_its_usual_advantages(make_trainer, theirs, monkeypatch):
    monkeypatch.setattr("trl.trainer.rloo_trainer.logger.warning", lambda *args, **kwargs: None)
    run = rloo(make_trainer, rewards=(by_chance, also_by_chance), steps=12)
    run.trainer.train()
    assert len(theirs) == 12
    assert_equal(run, theirs)
    rewards = torch.cat([batch["next", "reward"] for batch in run.batches])
    assert (rewards.isnan().all(1)).any()
    assert (rewards.isnan().any(1) & ~rewards.isnan().all(1)).any()
    assert all(advantages.abs().max() > 0.1 for advantages in theirs)


def test_rloo_steps_give_the_same_parameters_with_and_without_a_recipe(make_trainer):
    after = []
    for attached in (True, False):
        run = rloo(make_trainer, steps=3)
        if not attached:
            run.trainer.__class__ = trl.RLOOTrainer
            del run.trainer._generate_and_score_completions  # the spy of `record`
        before = [each.detach().clone() for each in run.trainer.model.parameters()]
        torch.manual_seed(1)
        run.trainer.train()
        after.append([each.detach() for each in run.trainer.model.parameters()])
        assert any(not torch.equal(x, y) for x, y in zip(before, after[-1], strict=True))
        assert hasattr(run.trainer, "last_run") is attached
    for ours, own in zip(*after, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)


def test_a_row_that_a_filter_masks_has_no_gradient_in_rloo(make_trainer):
    run = rloo(make_trainer, "pipeline=rloo", "criterion@pipeline.stages.filter.criterion=not_truncated")
    run.trainer.train()
    out = 0
    for batch in run.batches:
        cut_off = batch["status"] == 1
        assert batch["advantages"].shape == (ROWS,)
        assert (batch["advantages"][cut_off] == 0).all()
        out += int(cut_off.sum())
    assert out
    assert run.trainer.last_run.metrics["out/filter/truncated"]


def test_the_recipe_of_the_page_whitens_and_clips_as_rloo_does(make_trainer, theirs, monkeypatch):
    """The advantages equal those that TRL computes with normalize_advantages and reward_clip_range."""
    lines = (ROOT / "docs/coming-from/trl.md").read_text()
    block = lines[lines.index("<!-- rloo: whiten and clip -->") :].split("```")[1].removeprefix("text\n")
    run = rloo(make_trainer, steps=6)
    trainer = run.trainer
    trainer.__class__ = trl.RLOOTrainer
    del trainer.pipeline
    exec(block, {"trainer": trainer, "attach": attach})
    trainer.normalize_advantages, trainer.reward_clip_range = True, (-1.0, 1.0)  # for TRL's own advantages
    trainer.train()
    assert_equal(run, theirs)
    assert any((batch["next", "reward"] > 1.0).any() for batch in run.batches)
