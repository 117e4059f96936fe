"""Simulate a rollout that never ends: count the steps that follow, and the time until a message."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from lost_rollouts import peers
from lost_rollouts.clock import Account, System, simulate
from lost_rollouts.ours import Headrace
from lost_rollouts.systems import WORLDS
from lost_rollouts.world import World
from tensordict import TensorDict

from headrace.transforms import StreamWarning

HANGS = 100  # number of the prompt whose first rollout does not end
POLL = 10  # seconds after which a waiting trainer asks again


class Told(Headrace):
    """Notes when headrace warns of a wait, and whether the warning names the group."""

    def __init__(self, world: World, **options: Any):
        super().__init__(world, **options)
        self.said: list[tuple[int, bool]] = []

    def ask(self) -> TensorDict | None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StreamWarning)
            batch = super().ask()
        texts = [str(each.message) for each in caught]
        self.said += [(self.now, f"group {HANGS} " in text) for text in texts if "has waited" in text]
        return batch


def warns(system: Any, account: Account) -> list[tuple[int, bool]]:
    """The warnings of headrace."""
    return system.said


def watchdog(system: System, account: Account) -> list[tuple[int, bool]]:
    """NeMo RL, rewritten: every 30 s, report if for 600 s no group was committed and no step ended."""
    progress = [tick for tick, what in account.log if what != "take"] + [account.world.ticks]
    late = [(a // 30 + 1) * 30 + 600 for a, b in pairwise(progress) if b - a > 630]
    return [(tick, False) for tick in late]


def no_progress(system: System, account: Account) -> list[tuple[int, bool]]:
    """miles, rewritten: warn if the trainer waits and no group has become whole for 30 s."""
    found, waits, since = [], True, 0
    for tick, what in [*account.log, (account.world.ticks, "end")]:
        if waits and tick - since > 30:
            found.append((since + 30, False))
        waits, since = (what != "take") if what in ("take", "step") else waits, tick
    return found


def silent(system: System, account: Account) -> list[tuple[int, bool]]:
    """Return no messages: the system does not report a wait."""
    return []


@dataclass(frozen=True)
class Case:
    """A system, and the way in which it reports a wait."""

    make: Callable[..., System]
    tells: Callable[[Any, Account], list[tuple[int, bool]]]
    how: str


CASES = {
    "headrace, `wait`, `max_staleness=4`": Case(
        partial(Told, bound=4, steps_ahead=2), warns, "a warning after four times the longest wait so far"
    ),
    "headrace, `wait`, `max_staleness=4`, `timeout_seconds=14400`": Case(
        partial(Told, bound=4, steps_ahead=2, timeout_seconds=14400.0),
        warns,
        "drops the group after the timeout",
    ),
    "verl, `wait`, threshold 5": Case(
        partial(peers.Verl, bound=4, strategy="wait"),
        silent,
        "logs the number of prompts every 60 s of a wait",
    ),
    "verl, `drop`, threshold 5": Case(partial(peers.Verl, bound=4), silent, "the same"),
    "TRL, `max_staleness=4`": Case(
        partial(peers.TRL, bound=4), silent, "`check_health` asks whether the worker's loop is alive; it is"
    ),
    "NeMo RL, `in_order`, 4": Case(
        partial(peers.Nemo, sampler="InOrderSampler", bound=4),
        watchdog,
        "`stall_watchdog`, 600 s, with counts",
    ),
    "NeMo RL, `ready_first`, 4": Case(
        partial(peers.Nemo, sampler="ReadyFirstSampler", bound=4), watchdog, "the same"
    ),
    "AReaL, `max_head_offpolicyness=4`": Case(
        partial(peers.AReaL, ahead=4), silent, "`prepare_batch` waits without a limit"
    ),
    "miles, `max_weight_staleness=4`": Case(
        partial(peers.Miles, bound=4),
        no_progress,
        "a warning after 30 s without a whole group, also in a healthy run",
    ),
}


def stall(name: str) -> dict[str, Any]:
    """Simulate a run in which one rollout hangs.

    Returns:
        ``after``: seconds from the dispatch of the rollout until the first message that a healthy run does
        not have. ``names``: whether the message names the group. ``steps``: number of steps after the
        dispatch. ``healthy``: number of these steps in a healthy run.
    """
    case, world = CASES[name], WORLDS["Published lengths"]
    steps, messages, begun = [], [], 0
    for hangs in (None, HANGS):
        system = case.make(replace(world, hangs=hangs))
        account = simulate(system, poll=POLL)
        begun = next(group.begun for group in account.groups if group.number == HANGS)
        steps.append(sum(what == "step" and tick > begun for tick, what in account.log))
        messages.append(case.tells(system, account))
    healthy = {tick for tick, _ in messages[0]}
    new = [each for each in messages[1] if each[0] not in healthy and each[0] > begun]
    told = next((each for each in new if each[1]), new[0] if new else None)
    return {
        "healthy": steps[0],
        "steps": steps[1],
        "after": told and told[0] - begun,
        "names": bool(told and told[1]),
        "false": len(healthy),
    }
