"""Into a buffer of one process go whole groups alone, wherever a collector cuts its batches."""

from __future__ import annotations

import copy
import io
import os
import pickle

import pytest
import torch
from processes import process_context
from rollouts import make_env, make_policy
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose
from turns import OneAction, TurnsEnv, makers, of_one_process, quick_starts

from headrace.pipeline import AssembleOnWrite, assembled, load_pipeline
from headrace.transforms import GroupAssembler, MissingKeyError

pytestmark = pytest.mark.slow

RECIPE = ("pipeline=grpo", "pipeline.stages.collapse.reward=sum", "pipeline.stages.split.minibatches=1")


def make_buffer(*transforms, kind=ReplayBuffer, storage=LazyTensorStorage) -> ReplayBuffer:
    buffer = kind(storage=storage(2000), sampler=SamplerWithoutReplacement(), batch_size=8)
    for transform in transforms:
        buffer.append_transform(transform, invert=True)
    return buffer


def collect_into(buffer: ReplayBuffer, frames: int, total: int, sizes: list | None = None) -> None:
    env = make_env(prompts=3)
    collector = Collector(
        env,
        make_policy(),
        frames_per_batch=frames,
        total_frames=total,
        replay_buffer=buffer,
        auto_register_policy_transforms=False,
    )
    for _ in collector:
        if sizes is not None:
            sizes.append(len(buffer))
    collector.shutdown()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("frames", [9, 18])
def test_what_a_collector_writes_is_in_the_buffer_once_its_group_is_whole(kind, frames):
    assembler, sizes = GroupAssembler(), []
    buffer = make_buffer(AssembleOnWrite(assembler), kind=kind)
    collect_into(buffer, frames, 72, sizes)
    rows = buffer[:]
    for at in sizes:  # the first and the last row of what is there at any time are of whole groups
        there = rows[:at]
        for group in there["group_id"].unique():
            of_group = there[(there["group_id"] == group).flatten()]
            assert of_group["next", "done"].sum() == 4 == len(of_group["rollout_id"].unique())
    assert len(rows) + assembler.held == 72
    whole, cut = make_buffer(AssembleOnWrite(GroupAssembler())), rows
    collect_into(whole, 36, 72)
    order = [batch[(batch["rollout_id"]).flatten().argsort(stable=True)] for batch in (whole[:], cut)]
    for key in ("group_id", "rollout_id", ("next", "reward"), ("tokens", "full")):
        assert torch.equal(order[0][key][: len(order[1])], order[1][key]), key


def test_a_pipeline_behind_it_sees_whole_groups_and_a_sample_trains_with_their_advantages():
    first, second = load_pipeline(*RECIPE).halves()
    buffer = make_buffer(Compose(AssembleOnWrite(GroupAssembler()), first))
    for batch in of_one_process(240):
        for piece in batch.split(1):
            buffer.extend(piece)
    reference = torch.cat(list(assembled(of_one_process(240), GroupAssembler())))
    expected = load_pipeline(*RECIPE)(reference)
    expected = expected[expected["rollout_id"].flatten().argsort(stable=True)]
    rows = buffer[:]
    rows = rows[rows["rollout_id"].flatten().argsort(stable=True)]
    assert torch.equal(rows["rollout_id"], expected["rollout_id"])
    assert torch.equal(rows["advantage"], expected["advantage"])
    assert [len(step) for step in second.minibatches(buffer.sample())] == [8]


def test_rows_that_wait_are_in_the_state_of_the_buffer():
    def run(at: int | None) -> list:
        buffer = make_buffer(AssembleOnWrite(GroupAssembler()))
        for number, batch in enumerate(of_one_process(240)):
            for piece in batch.split(1):  # a slot each, so that groups are cut
                buffer.extend(piece)
            if number == at:
                file = io.BytesIO()
                torch.save(buffer.state_dict(), file)
                file.seek(0)
                buffer = make_buffer(AssembleOnWrite(GroupAssembler()))
                buffer.load_state_dict(torch.load(file, weights_only=True))
        return buffer[:]["rollout_id"].flatten().tolist()

    assert run(None) == run(0) == run(2)


def test_wrong_places_are_refused_with_the_right_one():
    transform = AssembleOnWrite(GroupAssembler())
    right = r"append_transform\(…, invert=True\); it got {}.*assembled\(drained\(buffer\), assembler\)"
    with pytest.raises(TypeError, match=right.format("an environment's steps")):
        TransformedEnv(TurnsEnv(), transform)
    plain = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    plain.append_transform(AssembleOnWrite(GroupAssembler()))
    rows = next(of_one_process(60)).reshape(-1)
    plain.extend(rows)
    with pytest.raises(TypeError, match=right.format("rows that are sampled")):
        plain.sample()
    with pytest.raises(RuntimeError, match="keeps replay-buffer write state"):
        ReplayBuffer(storage=LazyTensorStorage(9), shared=True).append_transform(transform)
    with pytest.raises(ValueError, match="without partition_key"):
        AssembleOnWrite(GroupAssembler(partition_key="partition"))
    with pytest.raises(MissingKeyError, match="group_id"):
        make_buffer(AssembleOnWrite(GroupAssembler())).extend(rows.exclude("group_id"))


def test_a_copy_is_made_for_a_file_and_none_for_a_worker(monkeypatch):
    transform = AssembleOnWrite(GroupAssembler())
    rows = next(of_one_process(60)).reshape(-1)
    for twin in (pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert twin._call(rows) is not None
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    with pytest.raises(RuntimeError, match="a copy of it in a worker process"):
        transform._call(rows)


def test_workers_are_not_given_assemblers_of_their_own():
    buffer = make_buffer(AssembleOnWrite(GroupAssembler()))
    buffer.extend(next(of_one_process(60)))
    buffer.share()
    process_context()
    with quick_starts(), pytest.raises(RuntimeError, match="a copy of it in a worker process"):
        MultiAsyncCollector(
            makers(2),
            OneAction(),
            frames_per_batch=12,
            total_frames=-1,
            replay_buffer=buffer,
            auto_register_policy_transforms=False,
        )
