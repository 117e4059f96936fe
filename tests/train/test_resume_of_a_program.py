"""The program of tutorial 2 trains the same groups whether or not it is killed at some step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.collectors import Collector

from headrace.pipeline import Checkpoint, RepeatSampler, RolloutStream
from headrace.pipeline.reverse import DigitPolicy, ReverseEnv
from headrace.transforms import StalledError

pytestmark = pytest.mark.torchrl
STEPS = 6


class Program:
    """The objects of one process. Each step adds its groups to the weights."""

    def __init__(self, folder: Path, *, ahead: int = 1, **options):
        self.sampler = RepeatSampler(6, group_size=4, prompts_per_batch=2, seed=0, remainder="drop")
        self.weights = Groups()
        self.stream = RolloutStream(self.sampler, source=self.make, steps_ahead=ahead, **options)
        self.checkpoint = Checkpoint(folder, stream=self.stream, weights=self.weights)

    def make(self, stream: RolloutStream) -> Collector:
        env = ReverseEnv(self.sampler, draws=stream.draws(wait=True, patience=0.2), revised=0.5)
        frames = {"frames_per_batch": env.frames_per_batch, "total_frames": -1}
        return Collector(env, DigitPolicy(), auto_register_policy_transforms=False, **frames)

    def steps(self, every: int) -> Iterator[int]:
        """Train, and save every `every` steps."""
        begun = self.checkpoint.load() or 0
        for step, batch in enumerate(self.stream, start=begun + 1):
            self.weights.trained.append(sorted(set(batch["group_id"].flatten().tolist())))
            self.stream.version = step
            if step % every == 0:
                self.checkpoint.save(step)
            yield step


class Groups:
    """A stand-in for the weights: the groups of each step."""

    def __init__(self) -> None:
        self.trained: list[list[int]] = []

    def state_dict(self) -> dict:
        return {"trained": [list(groups) for groups in self.trained]}

    def load_state_dict(self, state: dict) -> None:
        self.trained = state["trained"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[list[int]]:
    """The groups of each step of a run without a restart."""
    program = Program(tmp_path_factory.mktemp("alone"))
    for step in program.steps(every=1):
        if step == STEPS:
            break
    program.stream.shutdown()
    return program.weights.trained


@settings(max_examples=4)
@given(kills=st.lists(st.integers(1, 3), min_size=1, max_size=2), every=st.integers(1, 2))
@pytest.mark.parametrize("journal", [False, True])
def test_a_killed_program_trains_the_groups_of_one_that_runs_through(
    tmp_path_factory, alone, journal, kills, every
):
    folder = tmp_path_factory.mktemp("run")
    options = {"journal": folder / "journal"} if journal else {}
    for kill in [*kills, None]:
        program = Program(folder, **options)
        for number, step in enumerate(program.steps(every), 1):
            if number == kill or step >= STEPS:
                break
        program.stream.shutdown()
        del program  # closes the journal
    last = Program(folder, **options)
    assert last.checkpoint.load() >= STEPS
    assert last.weights.trained[:STEPS] == alone


def test_a_state_loaded_after_the_collector_is_refused_with_the_right_order(tmp_path):
    """The collector has drawn prompts when it is constructed."""
    first = Program(tmp_path)
    next(first.steps(every=1))
    first.stream.shutdown()
    second = Program(tmp_path)
    assert second.stream.source is not None  # the collector is made here
    with pytest.raises(ValueError, match=r"load the state before draws\(\).*source=make"):
        second.checkpoint.load()
    second.stream.shutdown()


def test_an_environment_that_draws_too_far_ahead_is_refused(tmp_path):
    """A collector draws the next prompts before it returns a batch, so no step could make room for them."""
    program = Program(tmp_path, ahead=0)
    with pytest.raises(StalledError, match=r"No capacity to dispatch 2 groups for 0\.2 s"):
        next(program.steps(every=1))
