"""StampIds gives ids to the rollouts of environments that sample their prompts themselves."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import quick_starts
from quizzes import QuizEnv, collect, make_quiz, quiz_makers
from saving import as_saved
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import EnvCreator, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.transforms import Compose, Transform

from headrace.pipeline import StampIds, assembled
from headrace.pipeline.collect.stamping import first_difference
from headrace.transforms import BatchError, CompletenessGate, GroupAssembler

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

IDS = ("group_id", "rollout_id", "expected_rollouts")


@pytest.fixture(autouse=True, scope="module")
def workers_start_quickly():
    with quick_starts():
        yield


def columns(batch: TensorDict, *keys) -> list[tuple]:
    return list(zip(*(batch[key].flatten().tolist() for key in keys), strict=True))


@settings(max_examples=25)
@given(
    slots=st.none() | st.integers(1, 5), repeats=st.integers(1, 4), workers=st.integers(1, 3), data=st.data()
)
def test_rollout_n_has_the_n_th_ids_for_any_order_of_resets(slots, repeats, workers, data):
    worker = data.draw(st.integers(0, workers - 1))
    env = make_quiz(worker, workers, slots=slots, repeats=repeats)
    steps = env.rollout(data.draw(st.integers(1, 12)), break_when_any_done=False)
    for batch in (steps, steps["next"]):
        for number, query, group, rollout, expected in columns(batch, "number", "query", *IDS):
            assert group == number // repeats * workers + worker
            assert rollout == group * repeats + number % repeats
            assert (expected, query) == (repeats, number // repeats + 1000 * worker)


@pytest.mark.parametrize(
    ("prompt", "last", "quoted"),
    [
        ("b", "a", "'b' after 'a'"),
        ("1234567b", "1234567a", "'1234567b' after '1234567a'"),
        ("12345678b", "12345678a", "'…2345678b' after '…2345678a'"),
        ("12345678", "12345678a", "'…2345678' after '…2345678a'"),
        ("b" + 50 * "c", "a", f"'b{39 * 'c'}' after 'a'"),
        ([1, 2], [1, 3], "'[1, 2]' after '[1, 3]'"),
    ],
)
def test_prompts_are_quoted_from_seven_characters_before_they_differ(prompt, last, quoted):
    assert first_difference(prompt, last) == quoted


# -- what is not a group is refused ---------------------------------------------------------------------


def test_different_prompts_in_a_group_are_refused_with_the_rows():
    env = TransformedEnv(QuizEnv(4, repeats=2), stamp := StampIds(repeats=4, worker=0))
    message = r"the same prompt \('query'\); row 2 of group 0 has '\[1\]' after .*append StampIds"
    with pytest.raises(BatchError, match=message):
        env.reset()
    assert stamp.state_dict()["_extra_state"]["dispatched"] == 0


def test_an_environment_reset_before_is_refused_with_group_resets():
    env = TransformedEnv(QuizEnv(3, repeats=2))
    env.reset()
    env.append_transform(StampIds(repeats=2))
    with pytest.raises(BatchError, match="row 1 of group 0 has"):
        env.reset()
    env = TransformedEnv(QuizEnv(1, repeats=2))
    env.reset()
    env.append_transform(StampIds(repeats=2))
    env.reset()
    with pytest.raises(BatchError, match=r"row 0 of group 0 has '\[1\]' after '\[0\]'"):
        env.reset()


class Repeating(Transform):
    """A transform that has the number of repeats of each prompt, as DataLoadingPrimer does."""

    def __init__(self, repeats):
        super().__init__()
        self.repeats = repeats


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (
            [Repeating(4), StampIds(2)],
            r"StampIds\(repeats=2\): Repeating repeats each prompt 4 times in a row",
        ),
        (
            [StampIds(4), Repeating(4)],
            r"append StampIds\(repeats=4\) after Repeating, which draws the prompts",
        ),
        ([StampIds(4), StampIds(4)], "the environment has 'group_id' already"),
    ],
)
def test_an_environment_that_cannot_be_stamped_is_refused(chain, message):
    env = TransformedEnv(QuizEnv(4, repeats=4), Compose(*[transform.clone() for transform in chain]))
    with pytest.raises(ValueError, match=message):
        check_env_specs(env)


def test_a_batch_and_a_step_without_ids_are_refused():
    env = make_quiz()
    with pytest.raises(
        TypeError, match=r"when they start: use env.append_transform\(StampIds\(repeats=2\)\)"
    ):
        StampIds(2)(env.rollout(2))
    with pytest.raises(BatchError, match=r"StampIds needs the key 'group_id'; .*\]\. It is stamped by reset"):
        env.step(env.rand_action(env.reset().exclude("group_id")))


# -- what was dispatched ----------------------------------------------------------------------------------


def test_each_group_is_announced_once_when_it_starts():
    env = make_quiz(1, 3, slots=3, repeats=2)
    stamp, assembler = env.transform[-1], GroupAssembler(group_size=2)
    assert len(stamp.draws()) == 0
    said = []
    for batch in collect(env, 6, 5):
        draws = stamp.draws()
        assembler.announce(draws)
        said += draws["group_id"].tolist()
        assert set(batch["group_id"].flatten().tolist()) <= set(said)
        assembler.put(batch)
    assert said == [g * 3 + 1 for g in range(len(said) // 2) for _ in "ab"]


def test_a_group_that_loses_a_rollout_before_its_first_step_is_not_announced():
    env = make_quiz(slots=3, repeats=2)
    stamp = env.transform[-1]
    env.reset()  # the groups of the three slots: 0 0 1
    env.rollout(1)  # the next rollouts are of the groups 1 2 2
    assert sorted(set(stamp.draws()["group_id"].tolist())) == [2]
    env.rollout(1)  # then of the groups 3 3 4
    assert columns(stamp.draws(), *IDS) == [(3, 6, 2), (3, 7, 2), (4, 8, 2), (4, 9, 2)]


def test_a_reset_of_one_row_loses_no_rollout_of_another_row():
    """Rollout 3 takes the place of rollout 0, so group 0 lost one. Group 1 has the rollouts 2 and 3."""
    env = make_quiz(slots=3, repeats=2)
    started = env.reset()
    started["_reset"] = torch.tensor([[True], [False], [False]])
    started = env.reset(started)
    env.step(env.rand_action(started))
    assert columns(env.transform[-1].draws(), *IDS) == [(1, 2, 2), (1, 3, 2)]


# -- its state --------------------------------------------------------------------------------------------


def test_a_restored_environment_starts_with_the_next_whole_group():
    env, other = make_quiz(slots=3), make_quiz(slots=3)
    env.reset()
    other.load_state_dict(as_saved(env.state_dict()))
    assert other.reset()["rollout_id"].flatten().tolist() == [4, 5, 6]
    with pytest.raises(ValueError, match=r"must have the same options .*'workers': 2"):
        make_quiz(1, 2).load_state_dict(env.state_dict())


def test_nested_environments_continue_separately():
    env, other = (SerialEnv(2, quiz_makers(2, slots=3)) for _ in "ab")
    env.reset()
    other.load_state_dict(env.state_dict())
    assert other.reset()["rollout_id"].flatten().tolist() == [8, 9, 12, 10, 11, 14]
    for each in (env, other):
        each.close()


def test_an_environment_of_a_creator_continues_its_numbers():
    env = EnvCreator(make_quiz)()
    assert env.reset()["rollout_id"].flatten().tolist() == [4, 5, 6]


# -- under TorchRL's collectors ---------------------------------------------------------------------------


def groups_of(batches) -> list[dict[int, set]]:
    """For each batch, the rollouts of each group. Every batch passes a strict gate."""
    found = []
    for batch in batches:
        CompletenessGate()(batch)
        found.append({})
        for group, rollout, query in columns(batch, "group_id", "rollout_id", "query"):
            found[-1].setdefault(group, set()).add((rollout, query))
    return found


def check_groups(batches, repeats: int = 2) -> int:
    found = groups_of(batches)
    for group, members in [item for groups in found for item in groups.items()]:
        assert {rollout for rollout, _ in members} == {group * repeats + i for i in range(repeats)}
        assert len({query for _, query in members}) == 1
    numbers = [group for groups in found for group in groups]
    assert len(set(numbers)) == len(numbers)
    return len(numbers)


@pytest.mark.parametrize("slots", [None, 3])
def test_rows_of_a_collector_make_complete_groups(slots):
    assert check_groups(assembled(collect(make_quiz(slots=slots), 12, 6), GroupAssembler())) > 10
    serial = collect(SerialEnv(2, quiz_makers(2, slots=slots)), 12, 6)
    assert check_groups(assembled(serial, GroupAssembler())) > 8


def test_rows_of_workers_make_complete_groups():
    collector = MultiSyncCollector(quiz_makers(2), frames_per_batch=24, total_frames=24 * 5)
    assert check_groups(assembled(collector, GroupAssembler(), patience=60)) > 12


class Zeros(torch.nn.Module):
    """A policy with a state."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, query):
        return query * self.weight.detach()


def collected(env) -> Collector:
    policy = TensorDictModule(Zeros(), in_keys=["query"], out_keys=["action"])
    options = {"total_frames": 360, "auto_register_policy_transforms": False}
    return Collector(env, policy, frames_per_batch=12, **options)


@pytest.mark.filterwarnings("ignore:.* got lost")
@pytest.mark.parametrize("slots", [None, 3])
@pytest.mark.parametrize("order", ["the stream", "the environment before", "environment and assembler"])
def test_a_collector_goes_on_with_unused_ids_for_any_order_of_loading(slots, order):
    """The constructor of a collector resets the environment, before a state can be loaded."""
    env = make_quiz(slots=slots)
    stream = assembled(collected(env), GroupAssembler(groups=2), patience=60)
    before = list(islice(stream, 3))
    state, of_env = as_saved(stream.state_dict()), as_saved(env.state_dict())
    other = make_quiz(slots=slots)
    if order != "the stream":
        other.load_state_dict(of_env)
    again = assembled(collected(other), GroupAssembler(groups=2), patience=60)
    if order == "environment and assembler":
        again.load_own_state(state)
    else:
        again.load_state_dict(state)
    after = list(islice(again, 3))
    assert check_groups([*before, *after]) == 12
    assert {reason for reason, number in again.assembler.counts.items() if number} <= {"lost"}


@pytest.mark.parametrize("slots", [3, 300])
def test_a_state_loaded_while_rollouts_run_requires_a_reset_of_all_rows(slots):
    env, action = make_quiz(slots=slots), torch.zeros(slots, 1)
    state = env.state_dict()
    rows = env.reset()
    env.load_state_dict(state)
    some = rows.clone().set("_reset", torch.arange(slots)[:, None] > 0)
    for running in (rows, env.reset(some)):
        with pytest.raises(ValueError, match=r"Call reset\(\) of the collector after load_state_dict"):
            env.step(running.set("action", action))
    env.step(env.reset().set("action", action))


def test_the_error_for_workers_with_equal_ids_says_what_to_do():
    batch = next(iter(collect(SerialEnv(2, [make_quiz] * 2), 24, 1)))
    with pytest.raises(BatchError, match=r"Workers need their own ids: set StampIds\(worker=…\)"):
        CompletenessGate(on_incomplete="drop")(batch)
    with pytest.raises(BatchError, match=r"end only once.*set StampIds\(worker=…\)"):
        GroupAssembler().put(batch)
