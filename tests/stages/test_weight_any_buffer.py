"""Loss weights belong to an optimiser step. So rows from a buffer are weighted after sampling, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from batches import batch_of
from composed import composed
from gradients import SumOfWeights
from tensordict import TensorDict

from headrace.pipeline import Pipeline, optimise
from headrace.transforms import BatchError, FanOutCollapse, ProcessedTwiceError, ShuffleSplit

if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer

pytestmark = pytest.mark.slow

RECIPE = ("pipeline=grpo", "pipeline.stages.gate.group_size=4")


def collected(first_group: int = 0) -> TensorDict:
    """Four groups of four rollouts, in 22 rows. Every third rollout has two segments."""
    rows = [(g, 4 * g + k, float((g + k) % 3)) for g in range(first_group, first_group + 4) for k in range(4)]
    rows = [row for i, row in enumerate(rows) for _ in range(2 if i % 3 == 0 else 1)]
    groups, rollouts, rewards = zip(*rows, strict=True)
    return batch_of(rewards, groups, rollouts)


def buffer_of(*transforms: tuple[Pipeline, bool], size: int = 6) -> ReplayBuffer:
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

    buffer = ReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=size)
    for transform, invert in transforms:
        buffer.append_transform(transform, invert=invert)
    return buffer


def weight_of(minibatches) -> float:
    loss = SumOfWeights()
    optimise(minibatches, loss, torch.optim.SGD(loss.parameters(), lr=1.0))
    return -float(loss.scale.detach())


@pytest.mark.torchrl
@pytest.mark.parametrize("unit", ["token", "group"])
def test_rows_that_are_weighted_after_sampling_have_weights_with_the_sum_1(unit):
    first, second = composed(*RECIPE, f"pipeline.stages.weight.unit={unit}").halves()
    buffer = buffer_of((first, True))
    buffer.extend(collected())
    for sample in buffer:
        assert weight_of(second.minibatches(sample)) == pytest.approx(1.0)
    through = buffer_of((first, True), (second, False))
    through.extend(collected(4))
    assert weight_of([through.sample()]) == pytest.approx(1.0)


def test_two_halves_equal_the_whole_pipeline():
    pipeline = composed(*RECIPE, "pipeline.stages.split.shuffle=false")
    first, second = pipeline.halves()
    whole, halved = pipeline(collected()), second(first(collected()))
    assert (first.order, second.order) == (["gate", "collapse", "filter", "advantage"], ["split", "weight"])
    for key in ("advantage", "loss_weight", "num_tokens", ("headrace", "minibatch")):
        assert torch.equal(whole[key], halved[key])
    assert halved["headrace", "processed"].all()
    assert first.metrics["rows/trained"] == second.metrics["rows/in"] == len(halved)


PLACES = (("headrace", "minibatch"), ("headrace", "microbatch"))


@pytest.mark.parametrize("fold", ["none", "token_mean"])
def test_rows_that_were_not_weighted_together_are_refused(fold):
    pipeline = composed(*RECIPE, f"pipeline.stages.weight.fold={fold}")
    one, two = pipeline(collected()), pipeline(collected(4))
    for step in (one[:4], torch.cat([one, two]), torch.cat([one[:4], two[:4]])):
        with pytest.raises(
            BatchError, match=r"of one weighted step: .* found \d+ tokens .*pipeline.halves\(\)"
        ):
            weight_of([step.exclude(*PLACES)])


def test_duplicate_rows_with_the_tokens_of_a_step_are_refused():
    batch = batch_of([1.0] * 5 + [2.0, 3.0, 4.0], [0] * 8, [0] * 5 + [1, 2, 3])
    batch["masks", "all_assistant_mask"] = torch.ones(8, 4, dtype=torch.bool)
    done = composed(*RECIPE, "pipeline.stages.weight.unit=rollout")(batch).exclude(*PLACES)
    done = done[done["headrace", "row"].argsort()]
    assert weight_of([done[torch.tensor([5, 6, 7, 0, 1, 2, 3, 4])]]) == pytest.approx(1.0)
    for rows in ([5, 6, 7, 5, 6, 7, 5, 6], [0] * 8):
        with pytest.raises(BatchError, match=r"found 32 tokens .* \d duplicate rows"):
            weight_of([done[torch.tensor(rows)]])


@pytest.mark.parametrize("unit", ["rollout", "group"])
def test_rows_of_two_batches_with_equal_tokens_are_refused(unit):
    pipeline = composed(*RECIPE, f"pipeline.stages.weight.unit={unit}", "pipeline.stages.split.shuffle=false")
    one, two = pipeline(collected()), pipeline(collected(4))
    for batch in (one, two):
        batch["masks", "all_assistant_mask"] = torch.ones(len(batch), 4, dtype=torch.bool)
    half = len(one) // 2
    with pytest.raises(BatchError, match="rows must be those of one weighted step"):
        weight_of([torch.cat([one[:half], two[half:]]).exclude(*PLACES)])


@pytest.mark.torchrl
def test_a_pipeline_on_the_wrong_side_of_a_buffer_is_refused():
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    pipeline = composed(*RECIPE)
    first, second = pipeline.halves()
    for buffer in (
        buffer_of((pipeline, False)),
        buffer_of((first, False)),
        ReplayBuffer(storage=LazyTensorStorage(64), batch_size=6, transform=composed(*RECIPE)),
    ):
        with pytest.raises(TypeError, match=r"append_transform\(pipeline, invert=True\)"):
            buffer.extend(collected())
    weighed = buffer_of((second, True))
    weighed.extend(first(collected()))
    with pytest.raises(TypeError, match=r"second.minibatches\(buffer.sample\(\)\)"):
        weighed.sample()


def test_halves_take_each_row_once_and_in_order():
    first, second = composed(*RECIPE).halves()
    with pytest.raises(BatchError, match="needs rows that the first half has processed; got 22"):
        second(collected())
    assert len(second(collected()[:0])) == len(second(first(collected())[:0])) == 0  # no row lacks its mark
    with pytest.raises(ProcessedTwiceError):
        first(first(collected()))
    with pytest.raises(ProcessedTwiceError, match="second half has already processed 22"):
        second(second(first(collected())))
    with pytest.raises(ValueError, match="needs a pipeline with a ShuffleSplit, and not a half"):
        Pipeline({"collapse": FanOutCollapse()}).halves()


def test_halves_have_the_options_of_the_pipeline():
    keys = ("group_key", "rollout_key", "loss_mask_key", "log_prob_key", "votes_only_key")
    options = {name: f"my_{name}" for name in keys} | {"report_keys": {"prompt": "asked"}, "empty": "count"}
    options |= {"masked_log_prob": "keep"}
    split = ShuffleSplit(minibatches=1, log_prob_key="my_log_prob_key")
    whole = Pipeline({"split": split}, patience=3.0, shared_ids="same", **options)
    for half, names in zip(whole.halves(), ([], ["split"]), strict=True):
        assert half.order == names
        assert {name: getattr(half, name) for name in options} == options
        assert (half.rank_options.patience, half.rank_options.shared_ids) == (3.0, "same")
