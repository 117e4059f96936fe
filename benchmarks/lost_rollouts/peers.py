"""Run the code of other projects' buffers and samplers in the simulated clock, in our loops.

The docstring of a class says which code is the project's. The loop around it follows the trainer of that
project, at the same version.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import queue
import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from lost_rollouts.clock import Dispatched, RunEnds, System
from lost_rollouts.sources import Blocks, Source, result_of, run_module
from lost_rollouts.world import Group, World

GITHUB = "https://github.com/"
VERL, TRL_ = Source("verl", "verl", "0.9.1"), Source("TRL", "trl", "1.16.0")
NEMO = Source("NeMo RL", "NeMo-RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909", GITHUB + "NVIDIA-NeMo/RL")
AREAL = Source("AReaL", "AReaL", "cbff54d645d2cd8ee1f1c358a82f3f473588433d", GITHUB + "areal-project/AReaL")
MILES = Source("miles", "miles", "31f1ca961a94cb860cec3b2dea34ec332bfa8f76", GITHUB + "radixark/miles")
SOURCES = [VERL, TRL_, NEMO, AREAL, MILES]


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a call that does nothing here."""


# -- verl -----------------------------------------------------------------------------------------------


@cache
def verl_buffer() -> dict[str, Any]:
    """The names of verl's module."""
    logging.getLogger("peer").disabled = True
    skips = SimpleNamespace(annotate_tq=lambda **_: lambda function: function)
    stubs = {"transfer_queue": {"KVBatchMeta": SimpleNamespace}, "omegaconf": {"DictConfig": dict}}
    stubs |= {"verl": {}, "verl.utils": {}, "verl.utils.skip": {"SkipManager": skips}}
    return run_module(VERL.text("verl/trainer/ppo/v1/replay_buffer.py"), stubs=stubs)


class Verl(System):
    """verl's `ReplayBufferAsync`, with its strategies, over a dict in place of TransferQueue."""

    def __init__(self, world: World, bound: int | None = 2, strategy: str = "drop", warmup: int = 2):
        super().__init__(world, bound)
        threshold = None if bound is None else bound + 1  # verl also counts the step that trains
        self.store: dict[str, dict[str, Any]] = {}
        names = dict(verl_buffer())
        self.owed = warmup * world.groups
        """Prompts that the trainer has submitted and that are not dispatched yet."""
        self.target, self.asked = self.owed, False

        class Buffer(names["ReplayBufferAsync"]):  # type: ignore[misc]
            def _wait_for_next_poll(self, *_: Any) -> float:
                raise Blocks

            def _sampleable_terminal_keys(self, *places: Any) -> list[str]:
                """Sort keys by prompt, because the order of a set of texts varies between processes."""
                return sorted(super()._sampleable_terminal_keys(*places), key=int)

        options = {"max_off_policy_threshold": threshold, "max_off_policy_strategy": strategy}
        self.buffer = Buffer("async", None, **options, sampler_kwargs=None, refill_fn=self.refill)

    def refill(self, prompts: int) -> None:
        self.owed += prompts

    def kv_list(self) -> dict[str, dict[str, Any]]:
        return {"train": self.store}

    def kv_clear(self, partition_id: str, keys: Sequence[str]) -> None:
        for key in keys:
            self.store.pop(key, None)

    def room(self) -> int:
        return self.owed

    def dispatch(self, free: int) -> Dispatched:
        if not self.asked:  # the trainer submits a batch before it samples one
            self.owed, self.asked = self.owed + self.world.groups, True
        found = super().dispatch(self.world.size * self.owed)
        self.owed -= len(found)
        for group, _ in found:
            tag = {"is_prompt": True, "status": "running", "global_steps": self.version + 1}
            self.store[str(group.number)] = tag
        return found

    def end(self, group: Group, at: int) -> None:
        if self.has(group):
            self.store[f"{group.number}_{at}_0"] = {}
            if group.ended == self.world.size:
                status = "failure" if any(group.fails) else "finished"
                self.store[str(group.number)]["status"] = status

    def take(self) -> Sequence[Group] | None:
        queues = verl_buffer()["tq"]
        queues.kv_list, queues.kv_clear = self.kv_list, self.kv_clear
        try:
            batch, _ = self.buffer.sample(self.version + 1, "train", self.world.groups)
            chosen = dict.fromkeys(int(key.split("_")[0]) for key in batch.keys)
        except Blocks:
            chosen = {}
        groups = [self.held[number] for number in chosen]
        self.held = {number: group for number, group in self.held.items() if str(number) in self.store}
        return groups or None

    def pass_step(self) -> None:
        super().pass_step()
        self.asked = False

    def save(self) -> Any:
        return super().save() | {"store": copy.deepcopy(self.store)}

    def load(self, saved: Any) -> None:
        """Restore the whole TransferQueue, which was saved. Unfinished prompts are submitted again."""
        super().load(saved)
        self.store = saved["store"]
        prompts = [key for key, tag in self.store.items() if tag.get("is_prompt")]
        self.owed = max(0, self.target - len(prompts))
        for key in prompts:
            if self.store[key]["status"] == "running":
                self.kv_clear("train", [name for name in self.store if name.split("_")[0] == key])
                self.again.append(int(key))
            else:
                group = self.held[int(key)] = self.world.group(int(key))
                group.ended, group.born = self.world.size, self.store[key]["global_steps"] - 1
                group.drawn = group.born
        self.owed += len(self.again)


# -- TRL ------------------------------------------------------------------------------------------------


class Sample(SimpleNamespace):
    """A rollout in TRL's queue. The fields that do not matter here are 0."""

    enqueued_at, metrics = None, {}  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return 0


@cache
def trl_dataset() -> Any:
    torch = SimpleNamespace(utils=SimpleNamespace(data=SimpleNamespace(IterableDataset=object)))
    names = {"torch": torch, "queue": queue, "threading": threading, "time": time, "contextvars": contextvars}
    names |= {"logger": logging.getLogger("trl"), "log_rollout_traces": nothing}
    text = TRL_.text("trl/experimental/async_grpo/async_grpo_trainer.py")
    return run_module(text, "RolloutQueueDataset", **names)["RolloutQueueDataset"]


class TRL(System):
    """TRL's `RolloutQueueDataset`. As in TRL's worker, each free task begins a rollout."""

    MOST = 1024  # queue_maxsize

    def __init__(self, world: World, bound: int = 2):
        super().__init__(world, bound)
        self.tasks = max(bound, 1) * world.groups * world.size  # max_inflight_tasks, as the trainer infers it
        self.queue: queue.Queue[Sample] = queue.Queue()
        self.partial: tuple[Group, int] | None = None
        self.read: list[int] = []
        self.first_group, self.trained = 0, set[int]()
        data = trl_dataset()(
            self.queue, lambda: self.version, self.block, 300.0, defaultdict(list), bound, poll_interval_s=0
        )
        data._traces_per_log = 10**9  # no traces
        self.data, self.samples = data, iter(data)

    def block(self, _: float) -> None:
        raise Blocks

    def dispatch(self, free: int) -> Dispatched:
        found: list[tuple[Group, Sequence[int]]] = []
        size = self.world.size
        flying = sum(size - group.ended for group in self.flying()) - (
            size - self.partial[1] if self.partial else 0
        )
        tasks = self.tasks - flying if self.queue.qsize() < self.MOST else 0
        while tasks > 0:
            if self.partial is None:
                if not (groups := self.draw(1)):
                    break
                self.partial = groups[0], 0
            group, begun = self.partial
            more = min(tasks, size - begun)
            found.append((group, range(begun, begun + more)))
            self.partial = None if begun + more == size else (group, begun + more)
            tasks -= more
        return found

    def end(self, group: Group, at: int) -> None:
        if group.fails[at]:
            raise RunEnds("its worker ends at the first rollout that raises an error")
        super().end(group, at)

    def whole(self, group: Group) -> None:
        for _ in range(self.world.size):
            self.queue.put(Sample(model_version=group.born, group_id=group.number))

    def take(self) -> Sequence[Group] | None:
        size = self.world.size
        while len(self.read) < self.world.groups * size and self.queue.qsize():
            try:
                self.read.append(next(self.samples)["group_id"])
            except Blocks:
                self.samples = iter(self.data)  # the old iterator has ended
        waiting = {sample.group_id for sample in self.queue.queue} | {*self.read}
        for group in [
            group for group in self.held.values() if group.ended == size and group.number not in waiting
        ]:
            del self.held[group.number]
        if len(self.read) < self.world.groups * size:
            return None
        chosen, self.read = dict.fromkeys(self.read), []
        self.trained |= {*chosen}
        return [self.held.pop(number) for number in chosen]

    def save(self) -> Any:
        """The first prompt that was not trained, as in `_save_checkpoint` of TRL's trainer."""
        cursor = self.first_group
        while cursor in self.trained:
            cursor += 1
        return super().save() | {"cursor": cursor}

    def load(self, saved: Any) -> None:
        super().load(saved)
        self.first_group = self.cursor


# -- NeMo RL ----------------------------------------------------------------------------------------------


class Meta(SimpleNamespace):
    """Stands for NeMo RL's `KVBatchMeta`."""

    def concat(self, *others: Meta) -> Meta:
        return Meta(sample_ids=[*self.sample_ids, *(each for other in others for each in other.sample_ids)])


async def block(_: float) -> None:
    raise Blocks


@cache
def nemo() -> dict[str, Any]:
    """The names of NeMo RL's samplers and buffer."""

    def packed(batch: Any, *, weight_version: int, group_id: str) -> Any:
        ids = [f"{group_id}_{at}" for at in range(len(batch["input_lengths"]))]
        return ids, {}, [{} for _ in ids]

    names: dict[str, Any] = {"record_to_train_batch": lambda record, **_: record, "pack_payload": packed}
    names |= {
        "KVBatchMeta": Meta,
        "trace_rollout_payload": nothing,
        "uuid": uuid,
        "asyncio": asyncio,
        "print": nothing,
    }
    place = "nemo_rl.algorithms.async_utils"
    buffer = run_module(NEMO.text(f"{place.replace('.', '/')}/replay_buffer.py"), "TQReplayBuffer", **names)
    stubs: dict[str, Any] = {"nemo_rl": {}, "nemo_rl.algorithms": {}, place: {}}
    stubs |= {
        f"{place}.replay_buffer": {"TQReplayBuffer": object},
        "nemo_rl.data_plane": {"KVBatchMeta": Meta},
    }
    samplers = run_module(NEMO.text(f"{place.replace('.', '/')}/staleness_sampler.py"), stubs=stubs)
    samplers["asyncio"] = SimpleNamespace(sleep=block)
    return samplers | {"TQReplayBuffer": buffer["TQReplayBuffer"]}


class Lengths(list):  # type: ignore[type-arg]
    """Stands for a tensor."""

    def tolist(self) -> list[int]:
        return [*self]


class Nemo(System):
    """NeMo RL's samplers and its `TQReplayBuffer`. A group that fails is generated once more."""

    def __init__(self, world: World, sampler: str, bound: int = 2, **options: Any):
        super().__init__(world, None if sampler == "ReadyFirstSampler" else bound)
        plane = SimpleNamespace(put_samples=nothing, clear_samples=nothing, get_samples=nothing)
        self.buffer = nemo()["TQReplayBuffer"](plane, "train", pad_value_dict={})
        limit = "max_lookahead_versions" if sampler == "InOrderSampler" else "max_staleness_versions"
        self.sampler = nemo()[sampler](self.buffer, **{limit: bound}, **options)
        self.capacity = (bound + 1) * world.groups  # max_buffered_rollouts, max_inflight_prompts
        self.chosen: dict[int, None] = {}
        """Groups of the step that is being collected; min_groups_for_streaming_train is 1."""
        self.left, self.target = 0, None
        """Prompts of the admitted batch that are not dispatched yet, and their step."""
        self.targets: list[Any] = []
        """Steps of the prompts that are generated once more."""

    def dispatch(self, free: int) -> Dispatched:
        found: list[Group] = []
        while len(self.buffer) < self.capacity:
            if self.again:
                number, target = self.again.pop(0), self.targets.pop(0)
                group = self.held[number] = self.world.group(number, attempt=1)
            elif self.left or self.admit():
                if not (groups := self.draw(1)):
                    break
                (group,), target, self.left = groups, self.target, self.left - 1
            else:
                break
            self.buffer.reserve(weight_version=self.version, target_step=target, group_id=str(group.number))
            found.append(group)
        return [(group, range(self.world.size)) for group in found]

    def admit(self) -> bool:
        """Whether a batch may begin. Groups that the buffer has for its step are not generated again."""
        try:
            self.target = result_of(self.sampler.admit(trainer_version_fn=lambda: self.version))
        except Blocks:
            return False
        buffered = self.buffer.count_for_target_step(self.target) if self.target is not None else 0
        skipped = self.draw(buffered)  # so many prompts of the batch are skipped
        for group in skipped:
            del self.held[group.number]
        self.left = self.world.groups - buffered
        return self.left > 0 or self.admit()

    def end(self, group: Group, at: int) -> None:
        if not self.has(group):
            return
        key = str(group.number)
        if group.fails[at]:
            place = self.buffer._group_ids.index(key)
            self.targets.append(self.buffer.target_step_list[place])
            result_of(self.buffer.remove_group(key))
            del self.held[group.number]
            self.cancelled.append(group)
            self.again.append(group.number)
        elif group.ended == self.world.size:
            record = {"input_lengths": Lengths(group.ticks)}
            result_of(self.buffer.commit(key, record, self.version, self.version))

    def take(self) -> Sequence[Group] | None:
        while (missing := self.world.groups - len(self.chosen)) > 0:
            result_of(self.sampler.evict(current_train_weight=self.version))
            bounds = {"min_prompt_groups": 1, "max_prompt_groups": missing}
            meta, _ = result_of(self.sampler.select(current_train_weight=self.version, **bounds))
            if meta is None:
                break
            self.chosen |= {int(each.split("_")[0]): None for each in meta.sample_ids}
        left = {int(key) for key in self.buffer._group_ids} | {*self.chosen}
        self.held = {number: group for number, group in self.held.items() if number in left}
        if missing:
            return None
        chosen, self.chosen = self.chosen, {}
        return [self.held.pop(number) for number in chosen]

    def pass_step(self) -> None:
        super().pass_step()
        for group in self.flying():
            place = self.buffer._group_ids.index(str(group.number))
            versions = {"start_weight_version": self.buffer.start_weight_list[place]}
            if self.sampler.should_abort_inflight(**versions, current_train_weight=self.version):
                result_of(self.buffer.remove_group(str(group.number)))
                del self.held[group.number]
                self.cancelled.append(group)

    def save(self) -> Any:
        return super().save() | {"buffer": result_of(self.buffer.state_dict(saved_capacity=self.capacity))}

    def load(self, saved: Any) -> None:
        super().load(saved)
        expected = {"expected_partition_id": "train", "expected_group_size": self.world.size}
        result_of(self.buffer.load_state_dict(saved["buffer"], max_groups=self.capacity, **expected))
        self.sampler.set_dispatch_index(self.version)
        for key, version in zip(self.buffer._group_ids, self.buffer.start_weight_list, strict=True):
            group = self.held[int(key)] = self.world.group(int(key))
            group.ended, group.drawn, group.born = self.world.size, version, version


# -- AReaL ------------------------------------------------------------------------------------------------


@cache
def areal() -> tuple[Any, Any]:
    @dataclass
    class RolloutStat:
        accepted: int = 0
        enqueued: int = 0
        running: int = 0
        rejected: int = 0

    stubs = {"areal": {}, "areal.api": {"RolloutStat": RolloutStat}}
    manager = run_module(AREAL.text("areal/infra/staleness_manager.py"), stubs=stubs)["StalenessManager"]
    text = AREAL.text("areal/infra/workflow_executor.py")
    return manager, run_module(text, "_select_results", random=random.Random(0))["_select_results"]


class AReaL(System):
    """AReaL's `StalenessManager`, and `_select_results` of its executor. No group is dropped for its age."""

    def __init__(self, world: World, ahead: int = 2):
        super().__init__(world, None)
        manager, self.select = areal()
        versions = SimpleNamespace(get_version=lambda: self.version)
        self.manager = manager(versions, (ahead + 1) * world.groups, world.groups, ahead)
        self.begun = 0

    def room(self) -> int:
        return max(0, self.manager.get_capacity())

    def dispatch(self, free: int) -> Dispatched:
        found = super().dispatch(self.world.size * self.world.slots)
        for group, _ in found:
            self.manager.on_rollout_enqueued()
            self.manager.on_rollout_submitted()
            self.begun += 1
            group.create_time = self.begun  # type: ignore[attr-defined]
        return found

    def whole(self, group: Group) -> None:
        self.manager.on_rollout_accepted()
        self.ready.append(group)

    def failed(self, group: Group) -> None:
        self.manager.on_rollout_rejected()

    def take(self) -> Sequence[Group] | None:
        if len(self.ready) < self.world.groups:
            return None
        chosen, self.ready = self.select(self.ready, self.world.groups, False)
        for group in chosen:
            del self.held[group.number]
        return chosen

    def save(self) -> Any:
        """The position in the data, which is ahead by `get_pending_limit()` prompts."""
        cursor = self.cursor + self.manager.get_pending_limit()
        return super().save() | {"cursor": min(cursor, self.world.prompts or cursor)}

    def load(self, saved: Any) -> None:
        super().load(saved)
        self.manager.on_version_recovered(self.version)


# -- miles ------------------------------------------------------------------------------------------------


class Condition:
    """Stands for asyncio's class. A wait raises Blocks."""

    async def __aenter__(self) -> Condition:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def wait(self) -> None:
        raise Blocks

    def notify_all(self) -> None: ...


@cache
def miles() -> dict[str, Any]:
    class Sample:
        Status = SimpleNamespace(ABORTED="aborted")

    kept = SimpleNamespace(keep=True)
    names: dict[str, Any] = {"call_dynamic_filter": lambda *_: kept, "MetricGatherer": SimpleNamespace}
    stubs: dict[str, Any] = {
        "miles": {},
        "miles.rollout": {},
        "miles.rollout.filter_hub": {},
        "miles.utils": {},
    }
    stubs |= {"miles.rollout.filter_hub.base_types": names, "miles.utils.misc": {"load_function": nothing}}
    stubs |= {"miles.utils.types": {"Sample": Sample}}
    return run_module(MILES.text("miles/rollout/fully_async_data_buffer.py"), stubs=stubs)


class Miles(System):
    """miles' `DefaultDataBuffer`. Groups begin by the rule of `FullyAsyncRolloutFn`."""

    def __init__(self, world: World, bound: int | None = 2, handler: str = "drop"):
        super().__init__(world, bound)
        options = {"async_data_buffer_capacity_factor": 2.0, "rollout_batch_size": world.groups}
        args = SimpleNamespace(**options, dynamic_sampling_filter_path=None, max_weight_staleness=bound)
        given = SimpleNamespace(args=args, unused_handler_fn=self.unused)
        self.buffer, self.handler = miles()["DefaultDataBuffer"](given), handler
        self.buffer._cond = Condition()
        self.blocked: list[Any] = []
        self.found: list[Group] = []

    def unused(self, prompts: Sequence[Any]) -> None:
        number = prompts[0].of.number
        del self.held[number]
        if self.handler == "retry":
            self.again.append(number)

    def room(self) -> int:
        flying = sum(self.world.size - group.ended for group in self.flying())
        return 0 if self.blocked else (self.world.slots - flying) // self.world.size

    def end(self, group: Group, at: int) -> None:
        if group.ended == self.world.size:
            status = "aborted" if any(group.fails) else "done"
            sample = SimpleNamespace(status=status, oldest_weight_version=group.born, of=group)
            self.blocked.append(miles()["DataBufferInput"](prompt_group=[sample], group=[sample]))
            self.fill()

    def fill(self) -> None:
        while self.blocked:
            try:
                result_of(self.buffer.put(self.blocked[0]))
            except Blocks:
                return
            del self.blocked[0]

    def take(self) -> Sequence[Group] | None:
        while len(self.found) < self.world.groups:
            try:
                self.found.append(result_of(self.buffer.get(current_version=self.version)).group[0].of)
            except Blocks:
                break
            finally:
                self.fill()
        if len(self.found) < self.world.groups:
            return None
        chosen, self.found = self.found, []
        for group in chosen:
            del self.held[group.number]
        return chosen
