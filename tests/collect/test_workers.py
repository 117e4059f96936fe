"""Groups spread over worker processes equal those of one process, or the error has the reason."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator

import pytest
import torch
from faults import pipeline
from processes import quick_starts
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from turns import (
    SLOTS,
    OneAction,
    TurnsEnv,
    die,
    last_turn,
    makers,
    of_one_process,
    reward_of,
    sleep,
)

from headrace.pipeline import DrainWriter, assembled, drained
from headrace.pipeline.collect.workers import WorkerWatch
from headrace.transforms import BatchError, GroupAssembler, StalledError
from headrace.transforms.table.schema import ORIGIN, Origin

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

FRAMES, PATIENCE = 240, 60.0
SECOND = 4000  # the first rollout of the second run
KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


@contextlib.contextmanager
def collecting(kind: str, environments: list, *, hangs: bool = False, **options) -> Iterator:
    """A collector with a worker for each environment; the workers end with it."""
    with quick_starts():
        collector = KINDS[kind](
            environments,
            options.pop("policy", None) or OneAction(),
            frames_per_batch=4 * SLOTS,
            total_frames=options.pop("total_frames", FRAMES),
            auto_register_policy_transforms=False,
            **options,
        )
        try:
            yield collector
        finally:
            for process in collector.procs if hangs else ():
                process.kill()  # TorchRL would wait for the worker
            collector.shutdown(raise_on_error=False)


def by_group(batches: list[TensorDictBase]) -> dict[int, TensorDictBase]:
    """The trained rows of each group; no group may come twice."""
    found = {}
    for batch in batches:
        out = pipeline()(batch)
        for group in out["group_id"].unique().tolist():
            assert group not in found
            rows = out[out["group_id"].flatten() == group]
            found[group] = rows[(rows["rollout_id"] * 10 + rows["turn"]).flatten().argsort()]
    return found


@functools.cache
def reference() -> dict[int, TensorDictBase]:
    """The groups of a first and a second run in one process."""
    batches = []
    for first in (0, SECOND):
        batches += assembled(of_one_process(3 * FRAMES, first), GroupAssembler(max_idle=10**4))
    return by_group(batches)


def check_groups(batches: list[TensorDictBase]) -> dict[int, TensorDictBase]:
    """Check that each group has the bits of the same group from one process. Return the groups."""
    found = by_group(batches)
    for group, rows in found.items():
        expected = reference()[group]
        for key in (
            "rollout_id",
            "turn",
            ("next", "reward"),
            ("next", "done"),
            "advantage",
            "expected_rollouts",
        ):
            assert torch.equal(rows[key].flatten(), expected[key].flatten()), (group, key)
    return found


def test_the_reference_follows_from_the_ids():
    for rows in reference().values():
        rollout, turn = rows["rollout_id"], rows["turn"]
        assert torch.equal(rows["next", "reward"], reward_of(rollout, turn))
        assert torch.equal(rows["next", "done"], turn == last_turn(rollout))
    assert len({len(rows) for rows in reference().values()}) > 1


class Counting:
    """A collector that counts the rows it yields."""

    def __init__(self, collector):
        self.collector, self.rows = collector, 0

    def __iter__(self) -> Iterator[TensorDictBase]:
        for batch in self.collector:
            mask = batch.get(("collector", "mask"), None)
            self.rows += batch.shape.numel() if mask is None else int(mask.sum())
            yield batch

    def __getattr__(self, name: str):
        return getattr(self.collector, name)


def take_groups(stream, count: int, then=lambda batch: None) -> list[TensorDictBase]:
    """Take batches until they have `count` groups, however long the workers take."""
    batches: list[TensorDictBase] = []
    for batch in stream:
        batches.append(batch)
        then(batch)
        if sum(len(batch["group_id"].unique()) for batch in batches) >= count:
            break
    came, held = stream.source.rows, stream.assembler.held
    assert came == sum(map(len, batches)) + sum(stream.assembler.counts.values()) + held
    return batches


@pytest.mark.parametrize(("kind", "patience"), [("sync", None), ("async", PATIENCE)])
def test_groups_spread_over_workers_equal_those_of_one_process(kind, patience):
    with collecting(kind, makers(2), total_frames=-1) as collector:
        stream = assembled(Counting(collector), GroupAssembler(groups=2), patience=patience)
        batches = take_groups(stream, 10)
    assert len(check_groups(batches)) == 10
    assert all(len(batch["group_id"].unique()) == 2 for batch in batches)


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_reach_the_workers_and_stale_rows_are_not_trained(kind):
    """The trainer counts versions; the asynchronous collector does not need them."""
    limit = {"max_staleness": 2} if kind == "sync" else {}
    policy, assembler, stream = OneAction(), GroupAssembler(**limit), None

    def train(batch: TensorDictBase) -> None:
        versions = batch["next", "policy_version"]
        assert not limit or assembler.version - 2 <= versions.min() <= versions.max() <= assembler.version
        policy.weight.data += 1
        stream.update_policy_weights_()
        assembler.version += 1

    options = {"policy": policy, "track_policy_version": True, "total_frames": -1}
    with collecting(kind, makers(2), **options) as collector:
        stream = assembled(Counting(collector), assembler, patience=PATIENCE)
        rows = torch.cat(take_groups(stream, 15, train))
        assert collector.policy_version == 0  # only the trainer counts versions
    assert torch.equal(rows["next", "reward"], reward_of(rows["rollout_id"], rows["turn"]) * rows["action"])
    assert len(rows["action"].unique()) > 1
    assert assembler.version > 3
    assert (assembler.counts["stale"] > 0) == bool(limit)


def test_the_state_of_collecting_workers_is_refused_because_it_loses_rows():
    with collecting("async", makers(2)) as collector:
        stream = assembled(collector, GroupAssembler(), patience=PATIENCE)
        next(iter(stream))
        with pytest.raises(TypeError, match=r"drops the rows.*stream.own_state\(\)"):
            stream.state_dict()
    assembler = GroupAssembler()
    with collecting("sync", makers(2)) as collector:
        stream, batches = assembled(collector, assembler, patience=PATIENCE), []
        for batch in stream:
            batches.append(batch)
            assert stream.state_dict().keys() == {"source", "assembler"}
    assert len(check_groups(batches)) >= 8
    assert sum(map(len, batches)) + assembler.counts["unfinished"] == FRAMES


# -- a buffer that the workers write --------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [None, "dies"])
def test_workers_fill_a_buffer_as_one_process_until_one_fails(trouble):
    assembler = GroupAssembler(max_idle=100)
    buffer = ReplayBuffer(storage=LazyTensorStorage(3000, ndim=2), writer=DrainWriter(), shared=True)
    what = functools.partial(die, at=12) if trouble else None
    with collecting("async", makers(2, what), replay_buffer=buffer, total_frames=-1) as collector:
        collector.start()
        drain, batches, error = drained(buffer, wait=0.02), [], None
        stream = iter(assembled(drain, assembler, patience=20))
        try:
            while trouble or len(batches) < 5:
                batches.append(next(stream))
        except StalledError as err:
            error = err
    assert len(check_groups(batches)) > 4
    assert (error is not None) == (trouble is not None)
    if error is not None:
        assert "Waiting: group " in str(error)


def test_workers_whose_rows_do_not_fit_the_buffer_are_detected():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3000), writer=DrainWriter(), shared=True)
    with collecting("async", makers(2), replay_buffer=buffer, total_frames=-1) as collector:
        collector.start()
        with pytest.raises(BatchError, match=r"write.* to the buffer failed, and those rows are lost"):
            next(iter(assembled(drained(buffer), GroupAssembler(), patience=20)))


def test_workers_stopped_near_their_end_return_their_rows():
    assembler = GroupAssembler(groups=2)
    options = {"preemptive_threshold": 0.5, "total_frames": -1}
    with collecting("sync", makers(2, sleep), **options) as collector:
        batches = take_groups(assembled(Counting(collector), assembler), 4)
    check_groups(batches)


@pytest.mark.parametrize("layout", ["padded", "cat"])
def test_whole_trajectories_are_groups_without_padding(layout):
    collector = Collector(
        TurnsEnv(),
        OneAction(),
        frames_per_batch=4 * SLOTS,
        total_frames=FRAMES,
        auto_register_policy_transforms=False,
        trajs_per_batch=4,
        traj_format=layout,
    )
    yielded = list(collector)
    collector.shutdown()
    assert {batch.batch_dims for batch in yielded} == ({2} if layout == "padded" else {1})
    assert len(check_groups(list(assembled(yielded, GroupAssembler())))) > 10
    assert check_groups(yielded[:1]).keys() == {0}  # a pipeline is enough if the batch has whole groups


def test_a_group_names_a_worker_only_if_it_waits_for_one_known_worker():
    rows = TensorDict(
        {"group_id": [5], "rollout_id": [6], ORIGIN: torch.tensor([Origin(0, 1, 2, 0, 3)])}, [1]
    )
    watch = WorkerWatch(None, None, workers=2)
    assert watch.numbered([1]) is None
    watch.saw(rows, GroupAssembler(group_size=2))
    assert watch.numbered([1]) == (1, 2)
    for workers in ([], [0, 1]):
        assert watch.numbered(workers) is None
    for workers in (0, 3):
        other = WorkerWatch(None, None, workers=workers)
        other.saw(rows, GroupAssembler(group_size=2))
        assert other.numbered([1]) is None


def test_the_limit_of_silence_depends_on_a_workers_own_pauses_and_rows_of_others(monkeypatch):
    """The reference is a loop over the times of all rows."""
    clock, assembler, raised = [0.0], GroupAssembler(), 0
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for seed in range(80):
        dice = random.Random(seed)
        patience, own = dice.choice([(1.0, None), (40.0, None), (None, 15.0), (None, None)])
        watch, clock[0] = WorkerWatch(patience, own, workers=3), 100.0
        watch.begin()
        times: list[list[float]] = [[100.0], [100.0], [100.0]]
        paused = [0.0] * 3
        for _ in range(20):
            clock[0] += dice.choice([0.5, 1.0, 7.0])
            now, worker = clock[0], dice.choice([0, 0, 0, 1, 1, 2])
            origin = torch.tensor([Origin(0, worker, 3, 0, 1)])
            watch.saw(TensorDict({"group_id": [worker], "rollout_id": [0], ORIGIN: origin}, [1]), assembler)
            if sum(map(len, times)) == 3:
                paused = [now - 100.0] * 3
            paused[worker] = max(paused[worker], now - times[worker][-1])
            times[worker].append(now)
            late = [
                now - each[-1] >= (own or max(patience or 0.0, 10 * pause))
                and any(other[-3] > each[-1] for other in times if len(other) > 3)
                for each, pause in zip(times, paused, strict=True)
            ]
            if (patience or own) and any(late):
                raised += 1
                silent = "".join(str(number) for number in range(3) if late[number])
                with pytest.raises(StalledError, match=f"worker [{silent}] has been silent"):
                    watch.check(assembler)
                break
            watch.check(assembler)
    assert 15 < raised < 65
