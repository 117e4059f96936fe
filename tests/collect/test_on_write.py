"""Only complete groups are written to a buffer, wherever a collector cuts its batches."""

from __future__ import annotations

import copy
import os
import pickle
from functools import partial

import pytest
import torch
from clocks import Clock
from fleets import Fleet, Sent
from processes import process_context, quick_starts
from rollouts import make_env, make_policy
from saving import as_saved
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose
from turns import OneAction, TurnsEnv, makers, of_one_process

from headrace.pipeline import AssembleOnWrite, assembled, buffer_account, groups_on_write, load_pipeline
from headrace.transforms import BatchError, GroupAssembler, MissingKeyError, StalledError

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

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


@pytest.mark.parametrize(("kind", "frames"), [(ReplayBuffer, 9), (TensorDictReplayBuffer, 18)])
def test_rows_are_in_the_buffer_once_their_group_is_complete(kind, frames):
    assembler, sizes = GroupAssembler(), []
    buffer = make_buffer(AssembleOnWrite(assembler), kind=kind)
    collect_into(buffer, frames, 72, sizes)
    rows = buffer[:]
    for at in sizes:  # after each write, the buffer has only rows of whole groups
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


def test_a_pipeline_behind_the_transform_gets_complete_groups():
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


def with_factory(**options) -> ReplayBuffer:
    """A buffer that makes its transform by a factory, as a buffer in an actor of Ray does."""
    factory = partial(groups_on_write, *RECIPE, **options)
    return ReplayBuffer(storage=LazyTensorStorage(2000), transform_factory=factory, batch_size=4)


@pytest.mark.parametrize("make", [with_factory, lambda: make_buffer(AssembleOnWrite(GroupAssembler()))])
def test_waiting_rows_are_in_the_buffers_state(make):
    def run(at: int | None) -> list:
        buffer = make()
        for number, batch in enumerate(of_one_process(240)):
            for piece in batch.split(1):  # one slot per write, so that writes cut groups
                buffer.extend(piece)
            if number == at:
                state, buffer = as_saved(buffer.state_dict()), make()
                buffer.load_state_dict(state)
        return buffer[:]["rollout_id"].flatten().tolist()

    assert run(None) == run(0) == run(2)


def test_the_error_for_a_wrong_attachment_names_the_right_one():
    transform = AssembleOnWrite(GroupAssembler())
    right = r"append_transform\(…, invert=True\); it got {}.*assembled\(drained\(buffer\), assembler\)"
    with pytest.raises(TypeError, match=right.format("an environment's steps")):
        TransformedEnv(TurnsEnv(), transform)
    plain = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    plain.append_transform(AssembleOnWrite(GroupAssembler()))
    rows = next(of_one_process(60)).reshape(-1)
    plain.extend(rows)
    with pytest.raises(TypeError, match=right.format("sampled rows")):
        plain.sample()
    with pytest.raises(RuntimeError, match="keeps replay-buffer write state"):
        ReplayBuffer(storage=LazyTensorStorage(9), shared=True).append_transform(transform)
    with pytest.raises(MissingKeyError, match="group_id"):
        make_buffer(AssembleOnWrite(GroupAssembler())).extend(rows.exclude("group_id"))


def test_copies_work_but_in_a_worker(monkeypatch):
    transform = AssembleOnWrite(GroupAssembler())
    rows = next(of_one_process(60)).reshape(-1)
    for twin in (pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert twin._call(rows) is not None
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="a copy of it in a worker process"):
            transform._call(rows)
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


# -- a buffer with a factory, as one in an actor of Ray has -----------------------------------------------


def test_a_factory_writes_as_the_transform_and_counts_its_last_run():
    (rows,) = of_one_process(60)
    made = with_factory()
    first, _ = load_pipeline(*RECIPE).halves()
    appended = make_buffer(Compose(AssembleOnWrite(GroupAssembler()), first))
    for buffer in (made, appended):
        for piece in rows.reshape(-1).split(7):
            buffer.extend(piece.clone())
    assert torch.equal(made[:]["advantage"], appended[:]["advantage"])
    account, again = buffer_account(made), buffer_account(appended)
    for name in ("counts", "held", "ready", "emitted"):
        assert getattr(account, name) == getattr(again, name)
    assert account.ledger.counts() == again.ledger.counts()
    assert account.metrics["groups/trained"] >= 1
    assert account.held + len(made) == 60


def test_a_writers_error_is_raised_once_on_sampling():
    (rows,) = of_one_process(60)
    buffer = with_factory()
    buffer.extend(rows.reshape(-1).clone())
    with pytest.raises(BatchError, match="end only once"):
        buffer.extend(rows.reshape(-1)[:3].clone())
    assert "end only once" in buffer_account(buffer).error
    with pytest.raises(BatchError, match=r"refused when they were written into the buffer: .*end only once"):
        buffer.sample()
    assert len(buffer.sample()) == 4


def test_a_silent_worker_is_raised_on_sampling(monkeypatch):
    clock = Clock(monkeypatch, 0.0)
    fleet, buffer = Fleet(2, 1, 1, 99), with_factory(worker_patience=4)
    for rollout, worker in enumerate((0, 1, 0, 1, 0, 0, 0)):
        group = rollout if rollout < 4 else 2 * rollout
        rows = fleet.batch([Sent(group, group, 0, True, worker, 0)])
        mask = torch.ones(1, 2, dtype=torch.bool)
        rows.update({("next", "reward"): torch.ones(1), ("masks", "all_assistant_mask"): mask})
        buffer.extend(rows)
        assert len(buffer.sample()) == 4  # the worker has been silent for up to 3 seconds
        clock.now += 1
    with pytest.raises(StalledError, match=r"worker 1 .*its last was row 0 of rollout 3 of group 3"):
        buffer.sample()
