"""Load NeMo RL's own pumps and buffer from a clone, with stand-ins for their imports.

These parts are NeMo RL's own: the rollout pump and `_abort_stale_inflight` of `SingleControllerActor`,
`generate_and_push` of `RolloutManager`, `TQReplayBuffer`, `KVBatchMeta`, all samplers and `create_sampler`.
Generation is a sleep. The train pump is that of tests/support/prompt_groups.py, which calls evict and select
in the same order.
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from prompt_groups import Run, World

COMMIT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"
REAL = {
    f"nemo_rl.{name}"
    for name in (
        *("algorithms.async_utils.replay_buffer", "algorithms.async_utils.staleness_sampler"),
        *("algorithms.single_controller", "data_plane.interfaces"),
        *("experience.failures", "experience.rollout_manager"),
    )
}


class OfClone(MetaPathFinder, Loader):
    """Finds the modules of NeMo RL in a clone, and gives empty modules for its imports."""

    def __init__(self, clone: str):
        self.clone = clone

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        ours = name.split(".")[0] in ("nemo_rl", "ray", "transformers", "wandb")
        return ModuleSpec(name, self, is_package=name not in REAL) if ours else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in REAL:
            file = module.__name__.replace(".", "/") + ".py"
            text = subprocess.run(
                ["git", "-C", self.clone, "show", f"{COMMIT}:{file}"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            exec(compile(text, file, "exec"), vars(module))
            return

        def anything(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Exception,) if name.endswith("Error") else (), {})

        module.__getattr__ = anything  # type: ignore[method-assign]


def load(clone: str) -> SimpleNamespace:
    """NeMo RL's modules by the last part of their names."""
    sys.meta_path.insert(0, OfClone(clone))
    ray = importlib.import_module("ray")
    ray.remote = lambda *thing, **_: thing[0] if thing else lambda thing: thing  # type: ignore[attr-defined]
    payload = importlib.import_module("nemo_rl.experience.payload")
    interfaces = importlib.import_module("nemo_rl.data_plane.interfaces")
    vars(importlib.import_module("nemo_rl.data_plane"))["KVBatchMeta"] = interfaces.KVBatchMeta

    def pack_payload(batch: dict[str, Any], *, weight_version: int, group_id: str) -> tuple[Any, ...]:
        tag = {"prompt": batch["prompt"], "weight_version": weight_version}
        return [f"{group_id}_g0"], {}, [tag]

    vars(payload)["pack_payload"] = pack_payload
    vars(payload)["record_to_train_batch"] = lambda record, **_: record
    vars(importlib.import_module("nemo_rl.utils.r3_trace"))["trace_rollout_payload"] = lambda **_: None
    modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in sorted(REAL)}
    modules["staleness_sampler"]._GATE_POLL_SECONDS = 1.0
    return SimpleNamespace(**modules)


class Batch(dict[str, Any]):
    """Prompts as the data loader gives them."""

    @property
    def size(self) -> int:
        return len(self["idx"])


def simulate(nemo: SimpleNamespace, world: World, config: dict[str, Any], hiccups: float = 0.0) -> Run:
    """Run a world with the sampler that `async_rl.sampler` names.

    Args:
        nemo: the modules of :func:`load`.
        world: latencies, failures and sizes.
        config: the value of ``async_rl.sampler``.
        hiccups: share of the prompts that are generated again because a server did not answer.
    """
    from pydantic import TypeAdapter

    samplers, buffers = nemo.staleness_sampler, nemo.replay_buffer

    def make_buffer() -> Any:
        client = SimpleNamespace(put_samples=lambda **_: None, clear_samples=lambda **_: None)
        return buffers.TQReplayBuffer(client, "rollout_data", pad_value_dict={})

    def make_sampler(buffer: Any) -> Any:
        return samplers.create_sampler(buffer, TypeAdapter(samplers.SamplerConfig).validate_python(config))

    class Manager(nemo.rollout_manager.RolloutManager):
        def __init__(self, run: Run):
            policy = {"max_infra_attempts": 3, "max_data_attempts": 1, "max_skipped_prompts": 10**9}
            self._retry_policy = SimpleNamespace(**policy, backoff_for=lambda attempt: 5.0)
            self._stats = nemo.rollout_manager.RolloutStats()
            self._tq_buffer, self._weight_version, self.run = run.buffer, 0, run
            self._skipped_prompts = self._consecutive_infra_drops = 0
            self.attempts: Counter[int] = Counter()

        async def run_rollout(self, input_sample: Any) -> Any:
            number = input_sample["idx"]
            hard, latency, fails = world.prompt(number)
            self.attempts[number] += 1
            if self.attempts[number] == 1:
                self.run.dispatched(number)
            await asyncio.sleep(latency)
            if self.attempts[number] == 1 and (hard * 997) % 1 < hiccups:
                raise nemo.failures.GenerationUnavailable("no answer")
            if fails:
                self.run.failed.add(number)
                raise ValueError("it fails")
            return {"prompt": number, "input_lengths": torch.tensor([1])}

    class Controller(nemo.single_controller.SingleControllerActor):
        _trainer_version = property(lambda self: self.run.version)

        def __init__(self, run: Run):
            self.run, self._sampler, self._buffer = run, run.sampler, run.buffer
            self._rollout_manager = Manager(run)
            failure = SimpleNamespace(on_dropped_prompt="shrink")
            self._async_cfg = SimpleNamespace(
                max_inflight_prompts=world.slots, rollout_failure=failure, diagnostics=False
            )
            grpo = SimpleNamespace(max_num_epochs=None, num_prompts_per_step=world.groups)
            self._master_config, self._current_epoch = SimpleNamespace(grpo=grpo), 0
            self._dataloader = (Batch(idx=batch) for batch in run.batches())
            self._buffer_capacity, self._rollout_exhausted = run.permits, asyncio.Event()
            self._rollout_permitted, self._inflight_rollouts = asyncio.Event(), 0
            self._rollout_permitted.set()
            self._dispatched_rollouts, self._inflight_by_group_id = set(), {}
            self._batch_shortfall, self._batch_replacements, self._batch_promotions = {}, {}, {}
            self._replacement_reserve, self._sampler_stamps_target_steps = deque(), False

    controllers: list[Any] = []

    async def pump(run: Run) -> None:
        controllers.append(Controller(run))
        await controllers[0]._rollout_pump()

    async def after_step(run: Run) -> None:  # stands for _sync_weights
        controllers[0]._rollout_permitted.clear()
        await controllers[0]._abort_stale_inflight()
        controllers[0]._rollout_manager.set_weight_version(run.version)
        controllers[0]._rollout_permitted.set()

    hooks: dict[str, Callable[..., Any]] = {"make_pump": pump, "after_step": after_step}
    capacity = 2 * world.groups * (1 + config.get("max_staleness_versions", 0))  # for no gate
    ungated = capacity if config["name"] == "windowed" else None
    return Run(world, make_sampler, make_buffer, capacity=ungated, **hooks).go()
