"""List the systems that are compared, with their settings, and the worlds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lost_rollouts import peers, rules
from lost_rollouts.clock import System
from lost_rollouts.ours import Headrace, Unannounced
from lost_rollouts.world import TOKENS_PER_SECOND, World, lognormal, published_tokens, two_classes

WORLDS = {
    "Two classes": World(two_classes(5, 100), slots=128),
    "Lognormal": World(),
    "Published lengths": World(
        lambda z, dice: published_tokens(z, dice) / TOKENS_PER_SECOND,
        size=8,
        groups=16,
        step=1466,
        ticks=30 * 1466,
    ),
    "Lognormal, and 2 % of the rollouts fail": World(slots=96, failing=0.02),
}
RESTARTS = World(lognormal(0.5, 0.2), slots=96, ticks=10**9, prompts=240)


@dataclass(frozen=True)
class Entry:
    """A system with its settings."""

    project: str
    settings: str
    make: Callable[..., System]
    restarts: bool = False
    """Whether the system is in the table of restarts."""

    @property
    def name(self) -> str:
        return f"{self.project}, {self.settings}" if self.settings else self.project


def _all(*entries: tuple[Any, ...]) -> dict[str, Entry]:
    made = [Entry(*entry) for entry in entries]
    return {entry.name: entry for entry in made}


SYSTEMS = _all(
    ("headrace", "`wait`, `max_staleness=2`", Headrace, True),
    ("headrace", "`wait`, `max_staleness=4`", partial(Headrace, bound=4, steps_ahead=2)),
    ("headrace", "`wait`, `max_staleness=8`", partial(Headrace, bound=8, steps_ahead=2)),
    ("headrace", "paced, `drop`, 2", partial(Headrace, on_stale="drop")),
    ("headrace", "not announced, `drop`, 2", partial(Unannounced, on_stale="drop")),
    ("verl", "`drop`, threshold 3", peers.Verl, True),
    ("verl", "`drop`, threshold 8, warm-up 1 (default)", partial(peers.Verl, bound=7, warmup=1)),
    ("verl", "`wait`, threshold 3", partial(peers.Verl, strategy="wait"), True),
    ("verl", "`wait`, threshold 9", partial(peers.Verl, bound=8, strategy="wait")),
    ("verl", "no threshold", partial(peers.Verl, bound=None)),
    ("TRL", "`max_staleness=2`", peers.TRL, True),
    ("TRL", "`max_staleness=4` (default)", partial(peers.TRL, bound=4)),
    ("TRL", "`max_staleness=8`", partial(peers.TRL, bound=8)),
    ("NeMo RL", "`in_order`, 2", partial(peers.Nemo, sampler="InOrderSampler"), True),
    ("NeMo RL", "`weight_fifo`, 2", partial(peers.Nemo, sampler="WeightFifoSampler")),
    ("NeMo RL", "`ready_first`, 2", partial(peers.Nemo, sampler="ReadyFirstSampler"), True),
    ("NeMo RL", "`windowed`, 2", partial(peers.Nemo, sampler="WindowedSampler")),
    ("AReaL", "`max_head_offpolicyness=2`", peers.AReaL, True),
    ("miles", "no `max_weight_staleness` (default)", partial(peers.Miles, bound=None), True),
    ("miles", "`max_weight_staleness=2`, `drop`", peers.Miles),
    ("miles", "`max_weight_staleness=2`, `retry`", partial(peers.Miles, handler="retry")),
    ("prime-rl *", "`max_off_policy_steps=2`", rules.PrimeRL),
    ("prime-rl *", "`max_off_policy_steps=8` (default)", partial(rules.PrimeRL, bound=8)),
    ("slime *", "", rules.Slime),
    ("tinker-cookbook *", "`max_steps_off_policy=2`", rules.Tinker),
)
OWN_LINES = {
    "headrace": ("this one", "`RolloutStream`, `GroupAssembler`, the journal", "rows, one for each rollout"),
    "verl": (
        "",
        "`ReplayBufferAsync` (`trainer/ppo/v1/replay_buffer.py`)",
        "a dict for TransferQueue; what `trainer_base.py` submits; equally old groups in order",
    ),
    "TRL": (
        "",
        "`RolloutQueueDataset` (`experimental/async_grpo/async_grpo_trainer.py`)",
        "the tasks of `AsyncRolloutWorker`; `prompt_index` of the checkpoint",
    ),
    "NeMo RL": (
        "",
        "the samplers (`algorithms/async_utils/staleness_sampler.py`), `TQReplayBuffer` with its state",
        "the two pumps of `single_controller.py`; retries; the watchdog",
    ),
    "AReaL": (
        "",
        "`StalenessManager`, `_select_results` (`areal/infra/`)",
        "the loop of `BatchTaskDispatcher`; the recovery of `utils/recover.py`",
    ),
    "miles": (
        "",
        "`DefaultDataBuffer` (`rollout/fully_async_data_buffer.py`)",
        "the loop of `FullyAsyncRolloutFn`; `sample_offset` of the checkpoint; its warning",
    ),
    "prime-rl *": ("559b44772e47", "none", "`dispatcher.py`, `train_sink.py`: what they cancel and drop"),
    "slime *": ("624b824a898a", "none", "`rollout/fully_async_rollout.py`"),
    "tinker-cookbook *": ("9dfcc3a2cf44", "none", "`do_async_training` of `rl/train.py`"),
}
"""By project: the version if `peers.SOURCES` lacks it, the code that is the project's, and our code."""
OURS = [name for name, entry in SYSTEMS.items() if entry.project == "headrace"]
