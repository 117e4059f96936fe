"""The documented loss is finite in any user loss, and trained rows are not trained again."""

from __future__ import annotations

import math

import pytest
import torch
from any_rank import collected, results_of
from batches import batch_of
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from recipes import CHAINS, of, pipeline_of
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
    TokenFilter,
    split_microbatches,
)

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


# -- the documented loss -------------------------------------------------------------------------------------


def high_entropy(batch: TensorDict) -> torch.Tensor:
    return batch["entropy", "full"] > 0.4


def seven_rows(seed: int) -> TensorDict:
    """Rewards that differ, a row that a filter takes out, tokens that another takes out, and numbers that
    came without a meaning: NaN and −inf out of the loss, and on one token that the mask has in it."""
    batch = batch_of([1.0, 3.0, 9.0, 2.0, 4.0, 4.5, 0.0], [0, 0, 0, 1, 1, 1, 1], tokens=5)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(7, 5, generator=generator) < 0.6
    mask[:, 1] = True
    batch[MASK] = mask
    batch["entropy", "full"] = torch.rand(7, 5, generator=generator).index_fill(1, torch.tensor([1]), 0.9)
    log_probs = -torch.rand(7, 5, generator=generator) - 0.1
    nothing = torch.where(torch.rand(7, 5, generator=generator) < 0.5, torch.nan, -torch.inf)
    batch[LOG_PROBS] = torch.where(mask | (torch.rand(7, 5, generator=generator) < 0.5), log_probs, nothing)
    batch[LOG_PROBS][3, 1] = torch.nan
    batch["ref_log_probs", "full"] = torch.where(mask, log_probs, torch.nan)
    return batch.exclude("prompt_text")


def stages(way: str) -> dict:
    return {
        "collapse": FanOutCollapse(),
        "filter": None
        if way == "tokens"
        else SampleFilter(criterion=RewardWithin(high=5.0), action="exclude"),
        "advantage": GroupRelativeAdvantage(scale="none"),
        "tokens": None if way == "rows" else TokenFilter(criterion=high_entropy),
    }


def trains(batch: TensorDict, way: str, row: int, token: int) -> bool:
    rows = way == "tokens" or float(batch["next", "reward"][row]) <= 5.0
    tokens = way == "rows" or float(batch["entropy", "full"][row, token]) > 0.4
    said = math.isfinite(float(batch[LOG_PROBS][row, token]))
    return rows and tokens and said and bool(batch[MASK][row, token])


def policy_loss(theta, token, log_prob, ref_log_prob, advantage):
    """The clipped loss of a token with a KL term, in plain PyTorch, of numbers or of whole columns."""
    new = theta.log_softmax(0)[token]
    ratio = (new - log_prob).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return 0.1 * ((ref_log_prob - new).exp() - (ref_log_prob - new) - 1) - clipped


def gradient_by_loops(batch: TensorDict, way: str) -> torch.Tensor:
    """Mean over the tokens that train, token by token."""
    theta = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    rewards, groups = batch["next", "reward"].flatten().tolist(), batch["group_id"].tolist()
    losses = []
    for row in range(len(batch)):
        mates = [
            reward
            for reward, group in zip(rewards, groups, strict=True)
            if group == groups[row] and (way == "tokens" or reward <= 5.0)
        ]
        advantage = rewards[row] - sum(mates) / len(mates)
        for token in range(5):
            if trains(batch, way, row, token):
                numbers = [float(batch[key][row, token]) for key in (LOG_PROBS, ("ref_log_probs", "full"))]
                losses.append(policy_loss(theta, batch["tokens", "full"][row, token], *numbers, advantage))
    (sum(losses) / len(losses)).backward()
    return theta.grad


@pytest.mark.slow
@given(
    choose=st.sampled_from(["product", "where"]),
    way=st.sampled_from(["rows", "tokens", "both"]),
    seed=st.integers(0, 99),
    ragged=st.booleans(),
    shuffle=st.booleans(),
    cut=st.sampled_from(
        [{}, {"microbatches": 3, "remainder": "pad"}, {"max_tokens": 11, "remainder": "pad"}]
    ),
    halves=st.booleans(),
)
def test_under_keep_the_documented_loss_is_finite_and_correct_in_plain_pytorch(
    choose, way, seed, ragged, shuffle, cut, halves
):
    batch = seven_rows(seed)
    expected = gradient_by_loops(batch, way)
    rows = lazy_stack(list(batch.unbind(0))) if ragged else batch
    split = ShuffleSplit(minibatches=1, seed=seed, shuffle=shuffle, **cut)
    named = stages(way) | {"split": split, "weight": LossWeight()}
    pipeline = Pipeline(named, masked_log_prob="keep")
    before = rows.clone()
    if halves:
        first, pipeline = pipeline.halves()
        rows = first(rows)
    theta = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    for minibatch in pipeline.minibatches(rows):
        for part in split_microbatches(minibatch):
            mask, weight = part[MASK], part["loss_weight"].unsqueeze(-1)
            columns = part["tokens", "full"], part[LOG_PROBS], part["ref_log_probs", "full"]
            loss = policy_loss(theta, *columns, part["advantage"].reshape(-1, 1))
            loss = mask * loss if choose == "product" else torch.where(mask, loss, 0.0)
            (weight * loss).sum().backward()
    torch.testing.assert_close(theta.grad, expected, rtol=1e-5, atol=1e-6)
    if not halves:
        assert all(
            torch.equal(rows[key].nan_to_num(7.0), before[key].nan_to_num(7.0)) for key in (LOG_PROBS, MASK)
        ), "the rows of the caller stay as they were"


PER_TOKEN = [
    (name, "full") for name in ("log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy")
]


@pytest.mark.slow
def test_under_keep_every_recipe_leaves_only_finite_numbers():
    """Each column that a loss may read, times the loss mask, is finite: padding and masked rows included."""
    for number, recipe in enumerate(CHAINS):
        batch = collected(("uniform", "uneven")[number % 2], recipe)
        mask = batch[MASK]
        for key in PER_TOKEN:
            batch[key] = torch.where(mask, batch[key], torch.nan)
        cut = {"microbatches": 3, "remainder": "pad"}
        pipeline = Pipeline(dict(pipeline_of(recipe, split=cut).stages.items()), masked_log_prob="keep")
        with of(recipe):
            (minibatch,) = pipeline.minibatches(batch)
            mask = minibatch[MASK]
            padding = minibatch.get(("headrace", "padding"), torch.zeros(len(mask), dtype=torch.bool))
            assert not mask[padding].any()
            for key in [*PER_TOKEN, "importance_weight", "advantage", "loss_weight"]:
                column = minibatch.get(key, None)
                if column is not None:
                    wide = column.reshape(len(column), -1)
                    assert (wide * mask[:, :1] if wide.shape[1] == 1 else wide * mask).isfinite().all(), key


def test_under_keep_a_loss_mask_is_required():
    batch = seven_rows(1).exclude(MASK)
    out = SampleFilter(criterion=RewardWithin(high=5.0))
    assert Pipeline({"collapse": FanOutCollapse(), "filter": out})(batch)[LOG_PROBS][2].isnan().all()
    with pytest.raises(
        BatchError, match=r"1 rows must be masked out of the loss, but .* under masked_log_prob='keep'"
    ):
        Pipeline({"collapse": FanOutCollapse(), "filter": out}, masked_log_prob="keep")(batch)
    split = ShuffleSplit(minibatches=1, microbatches=2, remainder="pad")
    with pytest.raises(BatchError, match=r"in \('masks', 'all_assistant_mask'\) \(loss_mask_key\), and the"):
        Pipeline({"split": split}, masked_log_prob="keep")(batch)


@pytest.mark.slow
def test_every_recipe_has_the_option():
    assert composed("pipeline=dapo").masked_log_prob == "nan"
    assert load_pipeline("as/verl", masked_log_prob="keep").halves()[1].masked_log_prob == "keep"
    with pytest.raises(Exception, match="masked_log_prob must be one of 'nan', 'keep'; got 'zero'"):
        load_pipeline("grpo", masked_log_prob="zero")


# -- what was trained ----------------------------------------------------------------------------------------


def make(remainder: str = "uneven", **options) -> Pipeline:
    return Pipeline({"split": ShuffleSplit(minibatch_size=3, unit="sample", remainder=remainder, **options)})


def numbered(batch: int, rows: int) -> TensorDict:
    """Rows of the n-th batch, with ids that no other batch has, and rewards that all have."""
    ids = torch.arange(rows) + 100 * batch
    return TensorDict({"rollout_id": ids, ("next", "reward"): torch.ones(rows)}, batch_size=[rows])


def trained(minibatches) -> list[list[int]]:
    return [part["rollout_id"].tolist() for part in minibatches]


@given(
    rows=st.lists(st.integers(3, 10), min_size=2, max_size=3),
    epochs=st.integers(1, 2),
    remainder=st.sampled_from(["uneven", "carry", "drop"]),
    again=st.sampled_from(["as it was", "permuted", "not at all"]),
    saved=st.sampled_from(["before the next batch", "when the next batch has begun"]),
    data=st.data(),
)
def test_an_interruption_anywhere_trains_nothing_again(rows, epochs, remainder, again, saved, data):
    """An uninterrupted loop over all minibatches, compared with one interrupted after the n-th.

    The source gives the batch again that came last, whether or not it was finished, and then the others.
    """
    batches = [numbered(number, size) for number, size in enumerate(rows)]
    whole = make(remainder)
    of_batch = [trained(whole.minibatches(batch, epochs=epochs)) for batch in batches]
    expected = [part for parts in of_batch for part in parts]
    last = data.draw(st.integers(0, len(batches) - 1))
    taken = data.draw(st.integers(0, len(of_batch[last])))

    pipeline, found = make(remainder), []
    for batch in batches[:last]:
        found += trained(pipeline.minibatches(batch, epochs=epochs))
    stream = pipeline.minibatches(batches[last], epochs=epochs)
    found += [next(stream)["rollout_id"].tolist() for _ in range(taken)]
    finished = taken == len(of_batch[last])
    if finished and saved == "when the next batch has begun" and last + 1 < len(batches):
        pipeline.minibatches(batches[last + 1], epochs=epochs)
    state = pipeline.state_dict()

    restored = make(remainder)
    restored.load_state_dict(state)
    first = batches[last]
    if finished and again == "permuted":
        first = first[torch.randperm(len(first))]
    if not (finished and again == "not at all"):
        run = restored.run(first, epochs=epochs)
        found += trained(run.minibatches())
        if finished:
            assert run.ledger.counts()["split/trained_before"] == len(first)
            assert trained([run.batch]) == [[]]
    for batch in batches[last + 1 :]:
        found += trained(restored.minibatches(batch, epochs=epochs))
    assert found == expected


@pytest.mark.parametrize("how", ["minibatches", "call", "stage alone"])
def test_a_second_pass_in_one_process_is_trained(how):
    def rows_of(pipeline, batch):
        if how == "minibatches":
            return sorted(row for part in trained(pipeline.minibatches(batch)) for row in part)
        stage = pipeline if how == "call" else pipeline.stages["split"]
        return sorted(stage(batch)["rollout_id"].tolist())

    pipeline, batch = make(), numbered(0, 7)
    for _ in range(3):
        assert rows_of(pipeline, batch) == list(range(7))
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    assert [len(rows_of(restored, batch)) for _ in range(3)] == [0, 7, 7], "what was saved, then new passes"
    restored.load_state_dict(restored.state_dict())
    assert rows_of(restored, numbered(1, 7)) == list(range(100, 107))
    assert len(rows_of(restored, batch)) == 7, "the last batch is known, and none before it"


def test_a_batch_with_several_integer_rewards_is_known_again():
    def rows_after_a_restart(batch):
        restored = make()
        restored.load_state_dict(state)
        return len([row for part in trained(restored.minibatches(batch)) for row in part])

    pipeline, batch = make(), numbered(0, 30)
    batch["next", "reward"] = torch.arange(60).view(30, 2) % 3
    trained(pipeline.minibatches(batch))
    state = pipeline.state_dict()
    regraded, other = batch.clone(), numbered(1, 30)
    regraded["next", "reward"][-1] += 1
    other["next", "reward"] = batch["next", "reward"]
    again = [rows_after_a_restart(each) for each in (batch, batch[torch.randperm(30)], regraded, other)]
    assert again == [0, 0, 30, 30]


def test_a_discarded_batch_is_not_trained_again():
    pipeline, batch = make(), numbered(0, 7)
    next(pipeline.minibatches(batch))
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    restored.stages["split"].discard_batch()
    pipeline.stages["split"].discard_batch()
    for state in (pipeline.state_dict(), restored.state_dict()):
        other = make()
        other.load_state_dict(state)
        assert trained(other.minibatches(batch)) == []
    assert trained(restored.minibatches(batch)) == []
    assert len(trained(restored.minibatches(numbered(1, 7)))) == 3


def test_an_interrupted_second_pass_resumes():
    pipeline, batch = make(), numbered(0, 7)
    list(pipeline.minibatches(batch))
    stream = pipeline.minibatches(batch)
    next(stream)
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    assert trained(restored.minibatches(batch)) == trained(stream)


def test_other_batches_and_batches_without_ids_are_trained():
    """Equal ids are not the same batch if rewards differ."""
    other = numbered(0, 7)
    other["next", "reward"][3] = 0.0
    for first, second in ((numbered(0, 7), other), (numbered(0, 7), numbered(0, 6)), (None, None)):
        nothing = TensorDict({"x": torch.ones(7)}, batch_size=[7])
        pipeline, restored = make(), make()
        list(pipeline.minibatches(nothing if first is None else first))
        restored.load_state_dict(pipeline.state_dict())
        assert len(list(restored.minibatches(nothing if second is None else second))) >= 2


def test_the_second_half_trains_repeated_samples_of_a_buffer():
    first, second = Pipeline(
        {"collapse": FanOutCollapse(group_key="rollout_id"), "split": ShuffleSplit(minibatches=2)}
    ).halves()
    rows = first(numbered(0, 6))
    list(second.minibatches(rows))
    second.load_state_dict(second.state_dict())
    assert len(list(second.minibatches(rows))) == 2


def interrupt_on_ranks(rank: int, world: int) -> dict[str, object]:
    """What a rank trains of two batches, interrupted behind each minibatch of the first."""

    def shared() -> Pipeline:
        split = ShuffleSplit(minibatches=2, unit="sample", remainder="uneven")
        return Pipeline({"split": split}, process_group="world", shared_ids="different", patience=30)

    found: dict[str, object] = {}
    for name, rows in {"even": (6, 6), "uneven": (7, 3), "one has none": (6, 0)}.items():
        first, second = (numbered(2 * batch + rank, rows[rank]) for batch in (0, 1))
        whole = trained(shared().minibatches(first))
        for taken in range(len(whole) + 1):
            pipeline, restored = shared(), shared()
            stream = pipeline.minibatches(first)
            parts = [next(stream)["rollout_id"].tolist() for _ in range(taken)]
            restored.load_state_dict(pipeline.state_dict())
            parts += trained(restored.minibatches(first))
            found[f"{name}, {taken} taken"] = parts == whole
            follows = trained(pipeline.minibatches(second)) if taken == len(whole) else None
            found[f"{name}, {taken} taken, next"] = follows in (None, trained(restored.minibatches(second)))
    restored.load_state_dict(pipeline.state_dict())
    try:
        restored.minibatches(numbered(2 + rank if rank == 0 else 9, 6))
    except BatchError as err:
        found["torn"] = str(err)
    return found


@pytest.mark.slow
def test_ranks_agree_on_what_was_trained(tmp_path):
    for found in results_of(interrupt_on_ranks, 2, tmp_path):
        assert "ranks [0] hold rows that were trained before" in found.pop("torn")
        assert all(found.values()), [name for name, right in found.items() if not right]
