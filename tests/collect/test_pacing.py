"""As many groups are dispatched as there is capacity for. After a restart, lost groups come first."""

from __future__ import annotations

import pytest
from tensordict import TensorDict

from headrace.pipeline import RepeatSampler, paced
from headrace.transforms import GroupAssembler, StalledError


def test_a_sampler_ahead_or_behind_goes_on_at_the_first_unannounced_group():
    assembler = GroupAssembler(groups=2, max_staleness=3, steps_ahead=1, group_size=2)
    draws = paced(sampler := RepeatSampler(9, group_size=2, shuffle=False), assembler)
    announced = [next(draws)["group_id"].tolist() for _ in range(3)]
    assert announced == [[0, 0], [1, 1], [2, 2]]
    state = assembler.state_dict()
    for epoch, position in ((0, 0), (0, 16), (7, 4)):
        again = GroupAssembler(groups=2, max_staleness=3, steps_ahead=1, group_size=2)
        again.load_state_dict(state)
        other = RepeatSampler(9, group_size=2, shuffle=False)
        other.load_state_dict(sampler.state_dict() | {"epoch": epoch, "position": position})
        found = [draw["group_id"].tolist() for _, draw in zip(range(4), paced(other, again), strict=False)]
        assert found == [*announced, [3, 3]]


def test_a_partly_announced_draw_goes_on_with_the_rest():
    options = {"groups": 2, "group_size": 1, "steps_ahead": 0}
    assembler, sampler = GroupAssembler(**options), RepeatSampler(6, group_size=1, prompts_per_batch=3)
    assert next(paced(sampler, assembler))["group_id"].tolist() == [0, 1]
    again = GroupAssembler(**options)
    again.load_state_dict(assembler.state_dict())
    draws = paced(RepeatSampler(6, group_size=1, prompts_per_batch=3), again, patience=1)
    assert next(draws)["group_id"].tolist() == [0, 1]
    again.discard_batch()
    assert next(draws)["group_id"].tolist() == [2]


def test_a_draw_is_cut_only_if_nothing_is_pending():
    """There is room for two groups. While one is pending, a draw of three groups waits and is not cut."""
    draws = [TensorDict({"group_id": ids}, [len(ids)]) for ids in ([0], [1, 2, 3])]
    assembler = GroupAssembler(groups=2, group_size=1, steps_ahead=0)
    source = paced(iter(draws), assembler, patience=0.01)
    assert next(source)["group_id"].tolist() == [0]
    assert (assembler.pending, assembler.capacity()) == (1, 1)
    with pytest.raises(StalledError, match="No capacity to dispatch 3 groups"):
        next(source)
    source = paced(iter(draws[1:]), assembler)
    assembler.discard_batch()
    assert (assembler.pending, assembler.capacity()) == (0, 2)
    assert next(source)["group_id"].tolist() == [1, 2]


def test_a_draw_is_cut_to_the_capacity():
    """A whole group that was not taken uses capacity, although it is not pending."""
    assembler = GroupAssembler(groups=1, group_size=1, steps_ahead=0)
    draws = paced(iter([TensorDict({"group_id": [0, 1]}, [2])]), assembler, patience=0.01)
    assert next(draws)["group_id"].tolist() == [0]
    rows = {"group_id": [0], "rollout_id": [0], ("next", "done"): [True]}
    assembler.put(TensorDict(rows, [1]))
    assert (assembler.pending, assembler.capacity()) == (0, 0)
    with pytest.raises(StalledError, match="No capacity to dispatch 1 group"):
        next(draws)


def test_the_limit_on_running_rollouts_holds_for_groups_of_several_sizes():
    assembler = GroupAssembler(max_concurrent_rollouts=4)
    ids = [0, 0, 0, 1, 2]
    draw = TensorDict({"group_id": ids, "expected_rollouts": [ids.count(each) for each in ids]}, [5])
    draws = paced(iter([draw]), assembler, patience=0.01)
    assert next(draws)["group_id"].tolist() == [0, 0, 0]
    with pytest.raises(StalledError, match="No capacity to dispatch 2 groups"):
        next(draws)


@pytest.mark.parametrize("announced", [1, 2, 3])
def test_after_a_restart_each_draw_of_an_iterator_comes_once(announced):
    """After a restart, a source without `go_on` repeats the draws that were announced."""

    def draws_of(numbers):
        return (TensorDict({"group_id": [number]}, [1]) for number in numbers)

    options = {"groups": 9, "group_size": 1, "steps_ahead": 0}
    assembler = GroupAssembler(**options)
    draws = paced(draws_of(range(announced)), assembler)
    assert [draw["group_id"].item() for draw in draws] == [*range(announced)]
    again = GroupAssembler(**options)
    again.load_state_dict(assembler.state_dict())
    found = [number for draw in paced(draws_of(range(5)), again) for number in draw["group_id"].tolist()]
    assert found == [0, 1, 2, 3, 4]
