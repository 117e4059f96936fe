"""One pipeline object works wherever TorchRL takes a transform, on real rollouts."""

from __future__ import annotations

import pytest
import torch
from quizzes import collect, make_quiz
from rollouts import make_collector, make_env, make_pipeline
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs.transforms import Compose

from headrace.pipeline import Pipeline, RepeatSampler
from headrace.pipeline.reverse import ReverseEnv
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    IncompleteGroupsError,
    ProcessedTwiceError,
    RewardWithin,
    SampleFilter,
    split_minibatches,
)

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]


def collected(**options) -> TensorDict:
    return next(iter(make_collector(make_env(**options))))


def by_rollout(batch: TensorDict) -> dict[tuple[int, float], float]:
    """The advantage by rollout and reward, so that the order of the rows does not matter."""
    return {
        (int(r), float(w)): float(a)
        for r, w, a in zip(
            batch["rollout_id"].flatten(),
            batch["next", "reward"].flatten(),
            batch["advantage"].flatten(),
            strict=True,
        )
    }


def buffer_with(transform, *, invert: bool = True, **options) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=6, **options)
    buffer.append_transform(transform, invert=invert)
    return buffer


@pytest.fixture
def expected() -> dict[tuple[int, float], float]:
    return by_rollout(make_pipeline()(collected()))


def test_batches_of_the_collector_are_flattened_and_complete(expected):
    batch = collected()
    assert batch.shape == (9, 2)  # 3 prompts of 4 rollouts, 2 of which have a second turn: 18 rows in 9 slots
    assert len(set(batch["rollout_id"].flatten().tolist())) == 12
    pipeline = make_pipeline()
    assert pipeline(batch).shape == (18,)
    assert pipeline.metrics["rollouts/in"] == 12


@pytest.mark.parametrize("revised", [0.0, 1.0])
def test_any_share_of_revisions_gives_complete_groups(revised):
    """Without a revision, each rollout ends after its first turn, and the batch is half full."""
    sampler = RepeatSampler(1110, group_size=4, prompts_per_batch=2, remainder="drop")
    for at, batch in enumerate(make_collector(ReverseEnv(sampler, revised=revised), batches=2)):
        assert sorted({*batch["rollout_id"].flatten().tolist()}) == list(range(8 * at, 8 * at + 8))


def test_works_inside_a_compose(expected):
    assert by_rollout(Compose(make_pipeline())(collected())) == expected


def test_works_as_a_collector_postproc(expected):
    for batch in make_collector(make_env(), postproc=make_pipeline()):
        assert by_rollout(batch) == expected
        assert sum(len(part) for part in split_minibatches(batch)) == 18


@pytest.mark.parametrize("filled_by", ["extend", "collector"])
def test_works_when_a_replay_buffer_is_written(filled_by):
    pipeline, raw = make_pipeline(), []
    buffer = buffer_with(pipeline, sampler=SamplerWithoutReplacement())
    if filled_by == "extend":
        raw.append(collected())
        buffer.extend(raw[0])
    else:
        for _ in make_collector(
            make_env(), replay_buffer=buffer, postproc=lambda b: raw.append(b.clone()) or b
        ):
            pass
    sampled = torch.cat([buffer.sample() for _ in range(3)])
    assert by_rollout(sampled) == by_rollout(make_pipeline()(raw[0]))
    with pytest.raises(ProcessedTwiceError):
        pipeline(sampled)


def test_an_empty_result_is_not_written_to_a_replay_buffer():
    within = "pipeline.stages.filter.criterion"
    pipeline = make_pipeline(
        f"criterion@{within}=reward_within", f"{within}.low=100", "pipeline.stages.filter.action=drop"
    )
    buffer = buffer_with(Compose(pipeline))
    buffer.extend(collected())
    assert len(buffer) == 0
    assert pipeline.metrics["out/filter/reward_bounds"] == 18


def test_replay_buffers_save_the_state_of_the_split():
    first, restored = buffer_with(make_pipeline()), make_pipeline()
    first.extend(collected())
    buffer_with(restored).load_state_dict(first.state_dict())
    assert restored.stages["split"].state.calls == 1


def test_a_second_application_is_refused():
    once = next(iter(make_collector(make_env(), postproc=make_pipeline())))
    narrow = SampleFilter(criterion=RewardWithin(high=0.0), action="drop")
    read = buffer_with(make_pipeline(), invert=False)
    read.extend(once)
    for again in (
        lambda: make_pipeline()(once),
        lambda: Compose(make_pipeline(), make_pipeline())(collected()),
        lambda: next(make_pipeline().minibatches(once)),
        lambda: narrow(once),
        lambda: buffer_with(make_pipeline()).extend(once),
        read.sample,
        lambda: make_pipeline()(once.clone().reshape(2, 9)),
    ):
        with pytest.raises(ProcessedTwiceError, match="attach the pipeline at one place"):
            again()


def test_chunks_of_trajectories_are_refused_as_unfinished():
    """With trajs_per_batch, TorchRL runs the postproc on chunks before it joins trajectories."""
    gate = Pipeline({"gate": CompletenessGate()})
    chunks = {"trajs_per_batch": 4, "traj_format": "cat", "postproc": gate}
    with pytest.raises(IncompleteGroupsError, match=r"group 1 has 1 of 2 .*1 unfinished"):
        list(collect(make_quiz(slots=2), 6, 10, **chunks))


def test_invalid_data_stop_the_collector_with_the_stage_name():
    with pytest.raises(BatchError, match=r"stage 'gate', CompletenessGate\(group_size=9.*expects"):
        list(make_collector(make_env(), postproc=make_pipeline("pipeline.stages.gate.group_size=9")))
