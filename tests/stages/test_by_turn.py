"""Turn advantages equal those of a loop."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.transforms import (
    BatchError,
    StateAdvantage,
    TurnAdvantage,
    group_relative_advantage,
    turn_advantage,
)
from headrace.transforms.table.schema import COUNTED, RETURN

MASK = ("masks", "all_assistant_mask")

# -- against a loop ---------------------------------------------------------------------------------------


def stated(rollouts, *, discount):
    """The advantage of each turn, for rollouts (group, {turn: reward})."""
    returns = [
        {k: sum(discount ** (u - k) * r for u, r in turns.items() if u >= k) for k in turns}
        for _, turns in rollouts
    ]
    found = []
    for i, (group, turns) in enumerate(rollouts):
        mine = {}
        for k in turns:
            there = [j for j, (g, other) in enumerate(rollouts) if g == group and k in other]
            others = [returns[j][k] for j in there if j != i]
            mine[k] = returns[i][k] - (math.fsum(others) / len(others) if others else 0.0)
        found.append(mine)
    return found


@st.composite
def drawn_rollouts(draw):
    """Rollouts of up to 3 groups. Each rollout has any of 4 turns."""
    number = st.floats(-4, 4, width=32)
    rollout = st.tuples(st.integers(0, 2), st.dictionaries(st.integers(0, 3), number, max_size=4))
    return draw(st.lists(rollout, min_size=1, max_size=8))


OPTIONS = {"discount": st.sampled_from([0.0, 0.5, 1.0])}


@given(drawn_rollouts(), st.fixed_dictionaries(OPTIONS), st.data())
def test_the_advantage_of_turns_equals_that_of_a_loop(rollouts, options, data):
    """The turns of a rollout are on one to three rows, and the rows have any order."""
    rows = []
    for number, (group, turns) in enumerate(rollouts):
        pieces = defaultdict(dict)
        for k, reward in turns.items():
            pieces[data.draw(st.integers(0, 2))][k] = reward
        rows += [(group, number, piece) for piece in pieces.values()] or [(group, number, {})]
    rows = data.draw(st.permutations(rows))
    reward = torch.full((len(rows), 4), float("nan"), dtype=torch.float64)
    has_turn = torch.zeros(len(rows), 4, dtype=torch.bool)
    for row, (_, _, turns) in enumerate(rows):
        for k, r in turns.items():
            reward[row, k], has_turn[row, k] = r, True
    groups, numbers = (torch.tensor([row[at] for row in rows]) for at in (0, 1))
    found = turn_advantage(reward, has_turn, groups, numbers, **options)
    expected = stated(rollouts, **options)
    for row, (_, number, turns) in enumerate(rows):
        for k in range(4):
            value = expected[number][k] if k in turns else 0.0
            assert float(found[row, k]) == pytest.approx(value, rel=1e-12, abs=1e-12)


@given(drawn_rollouts(), st.sampled_from(["turn", "token"]), st.booleans(), st.data())
def test_the_stage_writes_the_advantage_of_a_turn_to_its_tokens(rollouts, where, ragged, data):
    """Rows are dense or ragged. The outcome counts at the last turn. Rewards are per turn or per token."""
    outcomes = [data.draw(st.sampled_from([0.0, 1.0, 2.5])) for _ in rollouts]
    rows = []
    for number, (group, turns) in enumerate(rollouts):
        index, reward = [-1], [0.0]
        for k, r in turns.items():
            tokens = data.draw(st.integers(1, 3))
            index += [k] * tokens + [-1]
            reward += [r / 2, *[0.0] * (tokens - 2), r / 2][-tokens:] if tokens > 1 else [r]
            reward += [0.0]
        table = [turns.get(k, 0.0) for k in range(4)]
        row = {"group_id": group, "rollout_id": number, ("next", "reward"): [outcomes[number]]}
        paid = table if where == "turn" else reward
        rows.append(row | {"turn_index": index, "turn_reward": paid})
    width = max(len(row["turn_index"]) for row in rows)
    tds = []
    for row in rows:
        if not ragged:
            row["turn_index"] = row["turn_index"] + [-1] * (width - len(row["turn_index"]))
            if where == "token":
                row["turn_reward"] = row["turn_reward"] + [0.0] * (width - len(row["turn_reward"]))
        td = TensorDict({key: torch.tensor(value) for key, value in row.items()}, batch_size=[])
        td["turn_reward"] = td["turn_reward"].float()
        tds.append(td)
    batch = lazy_stack(tds) if ragged else torch.stack(tds)
    out = TurnAdvantage(turn_rewards=where)(batch)
    with_outcome = []
    for (group, turns), outcome in zip(rollouts, outcomes, strict=True):
        last = max(turns, default=None)
        with_outcome.append((group, {k: r + outcome * (k == last) for k, r in turns.items()}))
    expected = stated(with_outcome, discount=1.0)
    for row, credit in enumerate(out.get("advantage", as_list=True) if ragged else out["advantage"]):
        index = tds[row]["turn_index"].tolist()
        assert credit.shape == (len(index), 1)
        values = [expected[row].get(k, 0.0) for k in index]
        assert credit.flatten().tolist() == pytest.approx(values, rel=1e-5, abs=1e-5)


def test_an_outcome_is_added_once_at_the_last_turn_on_any_row():
    """The outcomes 8 and 2 of rollouts 0 and 1 count at turn 1, and half of them at turn 0."""
    has_turn = torch.tensor([[False, True], [True, False], [True, True]])
    reward, outcome = torch.zeros(3, 2), torch.tensor([8.0, 8.0, 2.0])
    groups, rollouts = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    found = turn_advantage(reward, has_turn, groups, rollouts, outcome=outcome, discount=0.5)
    assert found.tolist() == [[0, 6], [3, 0], [-3, -6]]


def test_the_function_takes_no_turns_and_names_wrong_shapes():
    reward, has_turn, group = torch.ones(2, 3), torch.ones(2, 3) > 0, torch.tensor([0, 0])
    assert turn_advantage(reward[:, :0].half(), has_turn[:, :0], group).shape == (2, 0)
    assert turn_advantage(reward[:, :0].half(), has_turn[:, :0], group).dtype is torch.float32
    message = r"^reward and has_turn must be \(N, K\); found \(2, 2\) and \(2, 3\)$"
    with pytest.raises(BatchError, match=message):
        turn_advantage(reward[:, :2], has_turn, group)


def turns_as_rows(rewards, groups, rollouts, **columns):
    batch = TensorDict(
        {
            "group_id": torch.tensor(groups),
            "rollout_id": torch.tensor(rollouts),
            ("next", "reward"): torch.tensor(rewards, dtype=torch.float64),
        },
        batch_size=[len(rewards)],
    )
    for name, values in columns.items():
        batch[name] = torch.tensor(values)
    return batch


@given(drawn_rollouts(), st.fixed_dictionaries(OPTIONS), st.data())
def test_turns_as_rows_have_the_advantages_of_turns_inside_rows(rollouts, options, data):
    """The k-th row of a rollout is its turn k. Gaps in turn numbers are ignored."""
    rollouts = [(group, dict(enumerate(turns.values()))) for group, turns in rollouts if turns]
    rows = [(group, number, k, r) for number, (group, turns) in enumerate(rollouts) for k, r in turns.items()]
    if not rows:
        return
    rows = data.draw(st.permutations(rows))
    groups, numbers, turns, rewards = (list(column) for column in zip(*rows, strict=True))
    batch = turns_as_rows(rewards, groups, numbers, turn=[10 * k for k in turns])
    out = TurnAdvantage(turn_index_key=None, turn_key="turn", **options)(batch)["advantage"]
    expected = stated(rollouts, **options)
    assert out.shape == (len(rows), 1, 1)
    assert out.flatten().tolist() == pytest.approx(
        [expected[number][k] for _, number, k, _ in rows], rel=1e-12, abs=1e-12
    )


def test_an_excluded_turn_keeps_its_index():
    """Two rollouts have two turns each. The first turn of rollout 0 is excluded."""
    batch = turns_as_rows([10.0, 1.0, 20.0, 2.0], [0] * 4, [0, 0, 1, 1], turn=[0, 1, 0, 1])
    batch[COUNTED] = torch.tensor([False, True, True, True])
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        out = TurnAdvantage(turn_index_key=None, turn_key="turn")(batch[order])["advantage"].flatten()
        found = dict(zip(order, out.tolist(), strict=True))
        assert found == {0: 0, 1: -1, 2: 22, 3: 1}  # turn 0 of rollout 1 is alone: its return is 20 + 2


# -- states -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3, st.floats(-4, 4, width=32)), min_size=1, max_size=9))
def test_a_row_is_compared_with_the_rows_of_its_group_in_its_state(steps):
    groups, rollouts, states, returns = (list(column) for column in zip(*steps, strict=True))
    rollouts = [3 * g + r for g, r in zip(groups, rollouts, strict=True)]
    batch = turns_as_rows(returns, groups, rollouts, state_id=states)
    batch[RETURN] = batch["next", "reward"]
    batch["advantage"] = torch.full((len(steps), 1, 1), 0.5, dtype=torch.float64)
    out = StateAdvantage(weight=2.0)(batch)["advantage"].flatten()
    for row in range(len(steps)):
        same = [j for j in range(len(steps)) if (groups[j], states[j]) == (groups[row], states[row])]
        expected = returns[row] - math.fsum(returns[j] for j in same) / len(same)
        assert float(out[row]) == pytest.approx(0.5 + 2 * expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "nonzero", "none"])
def test_a_scale_within_a_state_has_the_defaults_of_the_group_relative_advantage(scale):
    groups, states, returns = [0, 0, 0, 0, 1, 1, 1], [4, 4, 4, 2, 4, 4, 2], [1.0, 3, 5, 2, 0, 0.5, 7]
    batch = turns_as_rows(returns, groups, [*range(7)], state_id=states)
    batch[RETURN], batch["advantage"] = batch["next", "reward"], torch.zeros(7, 1, 1).double()
    stage = StateAdvantage(weight=2.0, scale=scale)
    expected = 2 * group_relative_advantage(
        batch[RETURN], [10 * g + s for g, s in zip(groups, states, strict=True)], scale=scale
    )
    assert torch.equal(stage(batch)["advantage"].flatten(), expected)
    assert stage.within_groups == (scale in ("group", "none"))


# -- what is refused --------------------------------------------------------------------------------------


def inside(**columns):
    batch = TensorDict(
        {
            "group_id": torch.tensor([0, 0, 1]),
            "rollout_id": torch.tensor([4, 5, 6]),
            ("next", "reward"): torch.tensor([1.0, 3.0, 7.0]),
            "turn_index": torch.tensor([[-1, 0, 1], [-1, 0, -1], [-1, 0, 1]]),
            "turn_reward": torch.zeros(3, 3),
            MASK: torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1]]).bool(),
        },
        batch_size=[3],
    )
    for name, values in columns.items():
        batch[{"mask": MASK, "reward": ("next", "reward")}.get(name, name)] = torch.tensor(values)
    return batch


@pytest.mark.parametrize("where", ["none", "turn", "token"])
def test_rows_without_tokens_have_no_advantages(where):
    batch = inside()
    for key in ("turn_index", "turn_reward", MASK):
        batch[key] = batch[key][:, :0]
    assert TurnAdvantage(turn_rewards=where)(batch)["advantage"].shape == (3, 0, 1)


def test_any_negative_index_means_that_a_token_has_no_turn():
    batch = inside(turn_index=[[-100, 0, 1], [-2, 0, -3], [-1, 0, 1]])
    assert torch.equal(TurnAdvantage()(batch)["advantage"], TurnAdvantage()(inside())["advantage"])


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"mask": [[True, True, True]] * 3}, {}, r"in the loss needs a turn.*row 0 \(rollout 4\)"),
        (
            {"turn_reward": [[0.0, 0, 0], [2.0, 0, 0], [0, 0, 0]]},
            {"turn_rewards": "token"},
            r"must belong to a turn of its row.*in row 1 \(rollout 5\)",
        ),
        (
            {"turn_reward": [[0.0, 0, 0], [0, 2.0, 0], [0, 0, 0]]},
            {"turn_rewards": "turn"},
            r"must belong to a turn of its row.*in row 1 \(rollout 5\)",
        ),
        ({"turn_reward": [[0.0]] * 3}, {"turn_rewards": "turn"}, "below the number of rewards.*row 0"),
        (
            {"turn_reward": [[0.0, float("nan"), 0], [0, 0, 0], [0, 0, 0]]},
            {"turn_rewards": "token"},
            r"the reward of every turn must be finite; found \[nan, 0.0\] at row 0 \(rollout 4\)",
        ),
        ({"rollout_id": [4, 4, 6], "reward": [1.0, 1.0, 7.0]}, {"turn_rewards": "token"},
         "turn 0 of rollout 4 on row 0 and on another row"),
        ({"rollout_id": [4, -5, 6]}, {}, "rollout_id ≥ 0; found -5"),
        ({"group_id": [0, -1, 1]}, {}, "group_id ≥ 0; found -1"),
        ({"mask": [[0, 1, 1]] * 3}, {}, "a loss mask is bool, True trains; .* is torch.int64"),
        ({"turn_index": [[0.0, 1.0, 2.0]] * 3}, {}, "must hold integers; found torch.float32"),
        ({"turn_index": [0, 1, 2]}, {}, r"needs one number per token, \(N, T\), in 'turn_index'"),
        ({"turn_index": [[0, 1]] * 3}, {}, "one number for each token of a row; found 2 and 3"),
    ],
)  # fmt: skip
def test_invalid_rows_are_refused_with_their_ids(columns, options, message):
    with pytest.raises(BatchError, match=message):
        TurnAdvantage(**options)(inside(**columns))


def test_an_advantage_beyond_its_dtype_is_refused():
    batch = inside(turn_reward=[[0.0, 3e38, 3e38], [0, 0, 0], [0, 0, 0]])
    batch["next", "reward"] = batch["next", "reward"].float()
    with pytest.raises(BatchError, match="must fit into torch"):
        TurnAdvantage(turn_rewards="token")(batch)
