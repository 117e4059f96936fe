"""Rows of LLMCollector become rows of GRPOLoss, in every mode and with any padding."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector

from headrace.pipeline import Pipeline, load_pipeline, make_report, optimise
from headrace.pipeline.tools.report import decoder_of
from headrace.transforms import DenseRows, LossWeight, ScoreRows

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
from chats import make_actor, make_env, make_model, make_policy, make_tokenizer
from torchrl.objectives.llm import GRPOLoss

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.llm,
    pytest.mark.slow,
    # torchrl 0.14.1 computes log-probabilities in a way that torch has deprecated.
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
]
FULL, LOSS_MASK, ATTENTION = (
    ("tokens", "full"),
    ("masks", "all_assistant_mask"),
    ("masks", "all_attention_mask"),
)
RESPONSE, LOG_PROB = ("tokens", "response"), ("log_probs", "full")
TOKENIZER = make_tokenizer()
PAD = TOKENIZER.pad_token_id


def steps_of(mode: str, envs: int) -> int:
    """The env steps of a group. ChatEnv with tokens takes one: in a second it would read the first mask."""
    return 1 if mode == "tokens" else 16 // envs


def collect(mode: str, envs: int, most: int, **options) -> tuple[TensorDict, torch.nn.Module]:
    """Copies of the first batch, [envs, turns], and of its model. Both are made once."""
    batch, model = collected(mode, envs, most, *options)
    return batch.clone(), copy.deepcopy(model)


@cache
def collected(mode: str, envs: int, most: int, *switched_on: str) -> tuple[TensorDict, torch.nn.Module]:
    model, options = make_model(TOKENIZER), dict.fromkeys(switched_on, True)
    turns = envs * steps_of(mode, envs)
    collector = LLMCollector(
        make_env(TOKENIZER, envs=envs, mode=mode, most=most),
        policy=make_policy(model, TOKENIZER, mode, **options),
        dialog_turns_per_batch=turns,
        total_dialog_turns=turns,
    )
    batch = next(iter(collector))
    collector.shutdown()
    return batch, model


# TransformersWrapper cannot batch histories of different lengths.
CASES = [
    ("text", 3, 3, {}),
    ("text", 3, 1, {"pad_output": True, "return_log_probs": True}),
    ("history", 1, 3, {}),
    ("history", 4, 1, {}),
    ("tokens", 4, 1, {}),
]
every_mode = pytest.mark.parametrize(
    ("mode", "envs", "most", "options"), CASES, ids=lambda value: str(value).replace(" ", "")
)


def real(row: TensorDict, key) -> list[int]:
    return [token for token in row.get(key).tolist() if token != PAD]


def says(model: torch.nn.Module, row: TensorDict) -> torch.Tensor:
    """The log-probabilities of the response of a row, from a forward pass without padding."""
    full = torch.tensor(real(row, FULL))
    logits = model(full[None]).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, full[1:, None]).flatten()[-len(real(row, RESPONSE)) :]


@every_mode
def test_each_row_is_padded_on_the_left_and_trains_its_response(mode, envs, most, options):
    batch, _ = collect(mode, envs, most, **options)
    assert batch.shape == (envs, steps_of(mode, envs))
    rows, dense = batch.reshape(-1).unbind(0), DenseRows(pad_id=PAD)(batch)
    width = dense[FULL].shape[1]
    assert type(dense) is TensorDict
    for row, tokens, attention, trains in zip(
        rows, dense[FULL], dense[ATTENTION], dense[LOSS_MASK], strict=True
    ):
        full, response = real(row, FULL), real(row, RESPONSE)
        assert tokens.tolist() == [PAD] * (width - len(full)) + full
        assert attention.tolist() == [False] * (width - len(full)) + [True] * len(full)
        assert trains.tolist() == [False] * (width - len(response)) + [True] * len(response)
        assert tokens[trains].tolist() == response
    for key in (
        "rollout_id",
        "group_id",
        "is_init",
        ("next", "reward"),
        ("next", "done"),
        ("next", "rollout_id"),
    ):
        assert torch.equal(dense[key], torch.stack([row[key] for row in rows])), key
    if mode != "tokens":
        assert list(dense["text", "response"]) == [row["text", "response"] for row in rows]
    assert list(dense["query"]) == [row["query"] for row in rows]
    if mode == "history":
        for number, row in enumerate(rows):
            assert list(dense[number]["history"].full.content) == list(row["history"].full.content)
    assert LossWeight()(dense)["num_tokens"][0] == sum(len(real(row, RESPONSE)) for row in rows)


@every_mode
def test_scores_and_the_loss_equal_those_of_rows_without_padding(mode, envs, most, options):
    """Forward passes of single rows give the expected numbers. Both masking strategies give one loss."""
    batch, model = collect(mode, envs, most, **options)
    flat = batch.reshape(-1)
    actor = make_actor(model, TOKENIZER)
    dense = ScoreRows(actor=actor, max_rows=3)(DenseRows(pad_id=PAD)(batch))
    for row, scored in zip(flat.unbind(0), dense.unbind(0), strict=True):
        alone = says(model, row).detach()
        torch.testing.assert_close(scored[LOG_PROB][scored[LOSS_MASK]], alone, rtol=0, atol=1e-5)
        assert (alone < 0).all()  # log-probabilities of TransformersWrapper begin with 0
    generator = torch.Generator().manual_seed(0)
    dense["advantage"] = torch.randn(len(dense), 1, 1, generator=generator)
    with torch.no_grad():  # so that ratios are not 1
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    losses = [
        GRPOLoss(actor, masking_strategy=strategy, entropy_bonus=False)(dense).loss_objective.item()
        for strategy in ("rlhf", "sft")
    ]
    assert losses[0] == losses[1]
    token_losses = []
    for row, scored in zip(flat.unbind(0), dense.unbind(0), strict=True):
        ratio = (says(model, row) - scored[LOG_PROB][scored[LOSS_MASK]]).exp()
        gain = torch.stack([ratio, ratio.clamp(0.8, 1.2)]) * scored["advantage"].flatten()
        token_losses.append(-gain.min(0).values)
    assert losses[0] == pytest.approx(torch.cat(token_losses).mean().item(), abs=1e-5)


@every_mode
def test_a_report_shows_prompts_and_responses(mode, envs, most, options):
    """Tokens without texts are decoded by the tokenizer of the policy. A history has its own messages."""
    batch, model = collect(mode, envs, most, **options)
    rows = batch.reshape(-1).unbind(0)
    decode = decoder_of(None, make_actor(model, TOKENIZER))
    report = make_report(Pipeline({}).run(batch), batch=batch, decode=decode)
    assert [report.asked(row) for row in range(len(rows))] == [row["query"] for row in rows]
    spoken = [TOKENIZER.decode(real(row, RESPONSE)) for row in rows]
    said = report.texts["response"] if mode != "history" else None
    if mode == "tokens":
        assert said == spoken
    elif mode == "text":
        assert said == [row["text", "response"] for row in rows]
    else:
        alone = make_report(Pipeline({}).run(batch.exclude("text")))
        assert [alone.asked(row) for row in range(len(rows))] == [row["query"] for row in rows]
        assert alone.texts["response"] == [row["history"].response.content[0] for row in rows]


@every_mode
def test_a_recipe_trains_the_batch_of_a_collector(mode, envs, most, options):
    """Rows keep their texts and histories, and the batch of the collector is unchanged."""
    batch, model = collect(mode, envs, most, **options)
    untouched = batch.clone()
    recipe = load_pipeline(
        "pipeline=grpo",
        "rows=llm",
        f"pipeline.stages.dense.pad_id={PAD}",
        "pipeline.stages.score.max_rows=3",
        "pipeline.stages.gate.on_incomplete=drop",
        "pipeline.stages.collapse.reward=sum",
        "pipeline.stages.split.minibatches=1",
        "pipeline.stages.split.microbatches=2",
    )
    actor = recipe.stages["score"].actor = make_actor(model, TOKENIZER)
    run = recipe.run(batch)
    assert run.metrics["rows/in"] == len(batch.reshape(-1))
    assert run.metrics["rows/trained"] >= 2
    assert run.report().groups["reward_mean"].size
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False, aggregation="none")
    assert optimise(run.minibatches(), loss, torch.optim.SGD(model.parameters(), lr=0.1)) == 1
    assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    rows = {int(row["headrace", "row"]): row for row in run.batch.unbind(0)}
    for number, row in enumerate(batch.reshape(-1).unbind(0)):
        if number in rows and mode != "tokens":
            assert rows[number]["text", "response"] == row["text", "response"]
        if number in rows and mode == "history":
            assert list(rows[number]["history"].full.content) == list(row["history"].full.content)
    for row, old in zip(batch.reshape(-1).unbind(0), untouched.reshape(-1).unbind(0), strict=True):
        assert torch.equal(row[FULL], old[FULL])
        assert set(row.keys(True, True)) == set(old.keys(True, True))
