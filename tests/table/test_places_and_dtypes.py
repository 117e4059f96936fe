"""Edge cases of a batch: indices of dropped rows, clips, dtypes, padding, parents."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import pytest
import torch
from alone import said_by
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import ADVANTAGES, FEW, of, pipeline_of
from tensordict import TensorDict
from test_recipes_of_the_field import NO_LONE, columns_for, ragged_batch

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LengthPenalty,
    MergeTurns,
    OverlongPunishment,
    RewardsToGo,
    RunningBaseline,
    SampleFilter,
    ShuffleSplit,
    TreeAdvantage,
    TurnAdvantage,
    TurnDiscount,
    group_relative_advantage,
    length_penalty,
    loss_weight,
    overlong_punishment,
    pack,
    relative_length,
    tree_advantage,
    turn_advantage,
)
from headrace.transforms.table.schema import IN_LOSS, RETURN, REWARD, ROW, read_column

MASK, REAL, WORDS = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask"), ("tokens", "full")
NAN = float("nan")

# -- the index of a row in its rollout --------------------------------------------------------------------

SEGMENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(-4, 4).map(float), st.booleans()), min_size=1, max_size=9
)
PLACED = {
    "to_go": partial(RewardsToGo, discount=0.5),
    "discount": partial(TurnDiscount, discount=0.5),
    "turns": partial(TurnAdvantage, turn_index_key=None, discount=0.5),
    "tree": partial(TreeAdvantage, attention_key=None),
}


def segments_of(rollouts, rewards, bad) -> TensorDict:
    rows = len(rollouts)
    columns = {"rollout_id": torch.tensor(rollouts), "group_id": torch.zeros(rows, dtype=torch.int64)}
    columns |= {("next", "reward"): torch.tensor(rewards), "advantage": torch.ones(rows)}
    columns |= {"bad": torch.tensor(bad), MASK: torch.ones(rows, 2, dtype=torch.bool)}
    columns |= {WORDS: torch.arange(2 * rows).view(rows, 2)}
    return TensorDict(columns, batch_size=[rows])


def good(batch) -> torch.Tensor:
    return ~batch["bad"]


def only_good(batch):
    """A user's stage that drops rows."""
    return batch[~batch["bad"]]


def numbers_by_loop(kind, rollouts, rewards, turns, pays) -> list[float]:
    """For each row, its discount factor or its return. Rows that have left keep their index."""
    found = []
    for rollout, turn in zip(rollouts, turns, strict=True):
        later = [j for j, other in enumerate(rollouts) if other == rollout and turns[j] >= turn]
        later.sort(key=lambda j: turns[j])
        if kind == "discount":
            found.append(0.5 ** (len(later) - 1))
        else:
            found.append(sum(0.5**k * rewards[j] for k, j in enumerate(later) if pays[j]))
    return found


@settings(max_examples=20)
@given(SEGMENTS, st.sampled_from(["to_go", "discount"]), st.booleans(), st.data())
def test_rows_keep_their_index_when_other_rows_leave(segments, kind, by_turn, data):
    """Rows are masked, excluded or dropped. A stage without a pipeline refuses rollouts with missing rows."""
    rollouts, rewards, bad = map(list, zip(*segments, strict=True))
    turns = list(range(len(rollouts)))
    batch = segments_of(rollouts, rewards, bad)
    if by_turn:
        turns = data.draw(st.permutations(turns))
        batch["turn"] = torch.tensor(turns)
    stage = PLACED[kind](turn_key="turn" if by_turn else None)
    key = RETURN if kind == "to_go" else "advantage"
    expected = {
        action: numbers_by_loop(kind, rollouts, rewards, turns, [action == "mask" or not b for b in bad])
        for action in ("mask", "exclude", "drop")
    }
    stays = [row for row in range(len(bad)) if not bad[row]]
    for action in expected:
        first = SampleFilter(criterion=good, unit="sample", action=action)
        for chain in (Pipeline({"filter": first, "stage": stage}), torch.nn.Sequential(first, stage)):
            rows = stays if action == "drop" else range(len(bad))
            lacking = {rollouts[r] for r in stays} & {r for r, b in zip(rollouts, bad, strict=True) if b}
            if action == "drop" and isinstance(chain, torch.nn.Sequential) and lacking:
                with pytest.raises(BatchError, match="index of each row") as refused:
                    chain(batch)
                assert set(map(int, re.findall(r"rollout (\d+)", str(refused.value)))) == lacking
            elif rows:
                assert chain(batch)[key].tolist() == [expected[action][row] for row in rows]
    if stays:
        out = Pipeline({"theirs": only_good, "stage": stage})(batch)
        assert out[key].tolist() == [expected["drop"][row] for row in stays]


@pytest.mark.parametrize("kind", PLACED)
def test_stages_that_use_row_indices_refuse_missing_rows(kind):
    """Rows were dropped outside of the pipeline, or merged. Rollouts without missing rows are accepted."""
    batch = segments_of([4, 4, 4, 7, 8], [0.0, 0.0, 8.0, 1.0, 2.0], [False, True, False, True, False])
    drop = SampleFilter(criterion=good, unit="sample", action="drop")
    stage = PLACED[kind]()
    with pytest.raises(BatchError, match="index of each row in its rollout; found rollout 4 with"):
        stage(drop(batch))
    with pytest.raises(BatchError, match="found rollout 4 with"):
        Pipeline({"filter": torch.nn.Sequential(drop), "inner": lambda rows: stage(rows)})(batch)
    stage(SampleFilter(criterion=good, unit="rollout", action="drop")(batch))
    merging = batch.exclude("bad", "advantage", ("next", "reward"))
    merging["rollout_id"] = torch.tensor([4, 4, 5, 7, 8])
    merging[WORDS] = torch.tensor([[1, 2, 0], [1, 2, 3], [4, 5, 6], [7, 8, 0], [9, 1, 2]])
    merging[REAL] = merging[WORDS] > 0
    merging[MASK] = torch.arange(1, 4) == merging[REAL].sum(1, keepdim=True)  # the last real token
    merging["advantage"], merging["next", "reward"] = torch.ones(5, 1, 1), torch.zeros(5)
    with pytest.raises(BatchError, match="rollout 4 with rows that were merged"):
        stage(MergeTurns()(merging))
    with pytest.raises(BatchError, match="rollout 4 with rows that were merged"):
        Pipeline({"merge": MergeTurns(), "stage": stage})(merging)


@given(SEGMENTS, st.sampled_from(["first", "last"]), st.sampled_from(["exclude", "drop"]))
def test_a_rollout_has_the_reward_of_the_segment_that_arrived_first_or_last(segments, how, action):
    """If this segment has left and others stay, the batch is refused with the ids of the rollouts."""
    rollouts, rewards, bad = map(list, zip(*segments, strict=True))
    edges, lacking = {}, set()
    for rollout in set(rollouts):
        rows = [row for row, other in enumerate(rollouts) if other == rollout]
        edges[rollout] = rows[0 if how == "first" else -1]
        if bad[edges[rollout]] and not all(bad[row] for row in rows):
            lacking.add(rollout)
    first = SampleFilter(criterion=good, unit="sample", action=action)
    pipeline = Pipeline({"filter": first, "collapse": FanOutCollapse(reward=how)})
    batch = segments_of(rollouts, rewards, bad)
    if lacking:
        with pytest.raises(BatchError, match=f"its {how} segment, but this segment was taken out") as refused:
            pipeline(batch)
        assert set(map(int, re.findall(r"rollout (\d+)", str(refused.value)))) == lacking
    elif not all(bad):
        out = pipeline(batch)
        for row, reward in zip(out[ROW].tolist(), out[REWARD].tolist(), strict=True):
            assert reward == (0.0 if bad[row] else rewards[edges[rollouts[row]]])


# -- a clip of several rewards ----------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 2), *[st.one_of(st.just(NAN), st.integers(-4, 4).map(float))] * 2),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([None, [-0.5, 0.5], [None, 0.25], [0.25, None], [-1.0, 2.0]]),
    st.sampled_from(["group", "none"]),
    st.sampled_from([[1.0, 1.0], [0.5, 2.0], [-1.0, 0.25]]),
)
def test_with_several_rewards_the_sum_of_advantages_is_clipped(rollouts, clip, scale, weights):
    """A loop adds up the weighted columns, and clips the sum once."""
    groups, (low, high) = [each[0] for each in rollouts], clip or (None, None)
    batch = TensorDict({"group_id": groups, "rollout_id": list(range(len(groups)))}, batch_size=[len(groups)])
    batch["next", "reward"] = torch.tensor([each[1:] for each in rollouts], dtype=torch.float64)
    options = {"weights": weights, "missing": "skip"}
    stages = [
        FanOutCollapse(columns=2, **options),
        GroupRelativeAdvantage(several="decoupled", scale=scale, clip=clip, **options),
    ]
    found = torch.nn.Sequential(*stages)(batch)["advantage"].flatten().tolist()
    for row, (group, *rewards) in enumerate(rollouts):
        total = 0.0
        for place, (weight, reward) in enumerate(zip(weights, rewards, strict=True)):
            among = [each[1 + place] for each in rollouts if each[0] == group]
            among = [value for value in among if not math.isnan(value)]
            if not math.isnan(reward) and len(set(among)) > 1:
                spread = statistics.stdev(among) + 1e-6 if scale == "group" else 1
                total += weight * (reward - statistics.fmean(among)) / spread
        if not all(map(math.isnan, rewards)):
            total = min(max(total, -math.inf if low is None else low), math.inf if high is None else high)
        assert found[row] == pytest.approx(total, abs=1e-12)


# -- torch's global default dtype -------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


OTHERS = (torch.float16, torch.bfloat16, torch.float64)


def bits(thing):
    """The numbers, dtypes and shapes in any object, to compare them bit by bit."""
    if isinstance(thing, torch.Tensor):
        return str(thing.dtype), tuple(thing.shape), thing.double().numpy().tobytes()
    if isinstance(thing, TensorDict):
        return [(str(key), bits(value)) for key, value in sorted(thing.items(True, True), key=str)]
    if isinstance(thing, dict):
        return [(key, bits(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [bits(each) for each in thing]
    return repr(thing)


def of_a_run(pipeline, batch):
    run = pipeline.run(batch)
    return list(run.minibatches()), run.metrics


@pytest.mark.slow
def test_no_number_of_a_recipe_depends_on_torchs_default_dtype(make_batch, quick):
    """Minibatches and metrics are compared under float16, bfloat16 or float64.

    Recipes in `FEW` are tried with rewards of three dtypes, and the others with one.
    """
    names, kinds, others = ADVANTAGES, (torch.float64, torch.int64, torch.float32), OTHERS
    if quick:
        names, kinds, others = (*FEW, "gigpo", "gtpo", "spo"), kinds[:1], OTHERS[1:2]
    for number, name in enumerate(names):
        batch = columns_for(name, ragged_batch(make_batch, "grid", 3, lone=name not in NO_LONE))
        pipeline = pipeline_of(name)
        for place, dtype in enumerate(kinds if name in FEW else [kinds[number % len(kinds)]]):
            batch["next", "reward"] = (batch["next", "reward"] * 1.01).abs().clamp(max=1).to(dtype)
            torch.manual_seed(0)
            expected = bits(of_a_run(deepcopy(pipeline), batch))
            other = others[(number + place) % len(others)]
            with of(f"{name}, rewards {dtype}, default {other}"), default_dtype(other):
                torch.manual_seed(0)
                assert bits(of_a_run(deepcopy(pipeline), batch)) == expected


class Halved(BatchTransform):
    """A user's stage that writes a new column."""

    def __init__(self):
        super().__init__([("next", "reward")], ["halved"])

    def decide(self, rows):
        rows["halved"] = rows["reward"] / 3


def balanced(batch):
    lengths = torch.tensor([1, 2, 2001, 3001])[:, None]
    batch[REAL] = torch.arange(3001) < lengths
    options = {"balance": "attention", "unit": "sample", "shuffle": False}
    return ShuffleSplit(minibatches=1, microbatches=2, **options)(batch)


def calls() -> dict:
    ids, lengths = torch.tensor([0, 0, 0, 1]), torch.tensor([3, 70_001, 12, 5])
    mask, whole = torch.tensor([[True, False], [True, True]]), torch.tensor([1, 4])
    with default_dtype(torch.float32):
        rewards = TensorDict({"group_id": ids, "rollout_id": [5, 6, 7, 8], "advantage": torch.ones(4)}, [4])
        rewards["next", "reward"] = torch.tensor([0.1, 0.2, 0.3, 0.7])
        rewards[REWARD] = rewards["next", "reward"]
        rewards["key"] = ids
    return {
        "advantage": partial(group_relative_advantage, [0.1, 0.2, 0.7, 1.0], ids),
        "of integers": partial(group_relative_advantage, torch.tensor([1, 2, 4, 7]), ids, scale="none"),
        "overlong": partial(overlong_punishment, lengths, max_length=70_003, cache=7),
        "penalty": partial(length_penalty, lengths, coefficient=0.0011),
        "relative": partial(relative_length, torch.tensor([1, 1, 0, 1]), lengths, ids, coefficient=0.3),
        "weight": partial(loss_weight, lengths, "rollout", rollout_id=ids),
        "turns": partial(turn_advantage, whole[:, None].expand(2, 2), mask, whole, discount=0.3),
        "tree": partial(tree_advantage, [0.1, 0.7], torch.tensor([[1, 2], [1, 3]]), whole * 0),
        "balance": lambda: balanced(rewards.select("group_id")),
        "running": lambda: RunningBaseline(start=0.1, baseline_key="key")(rewards),
        "column": lambda: Halved()(rewards),
        "to go": lambda: RewardsToGo(discount=0.3)(rewards),
    }


@pytest.mark.parametrize("name", calls())
def test_no_number_of_a_function_or_stage_depends_on_torchs_default_dtype(name):
    expected = calls()[name]()
    for other in OTHERS:
        with default_dtype(other):
            assert bits(calls()[name]()) == bits(expected), other


def test_lengths_beyond_half_precision_are_penalized_as_by_python_floats():
    lengths = [random.Random(0).randrange(150_000) for _ in range(20)] + [70_001, 80]
    for other in (torch.float32, *OTHERS):
        with default_dtype(other):
            found = length_penalty(torch.tensor(lengths), coefficient=0.0011).tolist()
            assert found == [-0.0011 * length for length in lengths]
            found = overlong_punishment(torch.tensor(lengths), max_length=70_003, cache=7).tolist()
            assert found == [-min(max(length - 69_996, 0), 7) / 7 for length in lengths]
            rows = TensorDict({"rollout_id": [0, 1], REWARD: torch.tensor([80, 80]).double()}, [2])
            rows[MASK] = torch.ones(2, 437, dtype=torch.bool)
            found = LengthPenalty(coefficient=0.0011)(rows)[REWARD].tolist()
            assert found == [80 - 0.0011 * 437] * 2
            found = OverlongPunishment(max_length=440, cache=7)(rows)[REWARD].tolist()
            assert found == [80 - 4 / 7] * 2
            metrics = said_by(LengthPenalty(coefficient=0.001), rows).metrics
            assert metrics == {"reward_changed": 1, "mean": pytest.approx(-0.437, rel=1e-12)}


# -- padding tokens in the loss -----------------------------------------------------------------------------


ROW_OF_TOKENS = st.tuples(st.booleans(), st.lists(st.sampled_from("ptx"), min_size=4, max_size=4))


@given(st.lists(ROW_OF_TOKENS, min_size=1))
def test_a_padding_token_in_the_loss_is_refused_with_its_row(rows):
    """p is padding, t a token in the loss, x a masked token. A row may also train its first token."""
    real = torch.tensor([[each != "p" for each in row] for _, row in rows])
    loss = torch.tensor([[each == "t" for each in row] for _, row in rows])
    loss[:, 0] |= torch.tensor([first for first, _ in rows])
    wrong = [row for row in range(len(rows)) if bool((loss & ~real)[row].any())]
    batch = TensorDict({REAL: real, MASK: loss, "rollout_id": list(range(len(rows)))}, [len(rows)])
    batch[WORDS] = torch.arange(4 * len(rows)).view(-1, 4) + 1
    if not wrong:
        out = MergeTurns()(batch)
        assert torch.equal(out[MASK], loss)
        return
    with pytest.raises(BatchError, match="tokens in the loss must be real") as refused:
        MergeTurns()(batch)
    assert list(map(int, re.findall(r"row (\d+)", str(refused.value)))) == wrong[:8]  # 8 rows are listed
    with pytest.raises(BatchError):
        pack(batch)
    batch["group_id"], batch["next", "reward"] = batch["rollout_id"], torch.ones(len(rows))
    with pytest.raises(BatchError, match="tokens in the loss must be real") as refused:
        TreeAdvantage()(batch)
    assert list(map(int, re.findall(r"row (\d+)", str(refused.value)))) == wrong[:8]  # 8 rows are listed
    batch[IN_LOSS] = ~(loss & ~real).any(1)  # rows out of the loss do not train
    TreeAdvantage()(batch)


# -- parents without a reward -----------------------------------------------------------------------------


def test_a_parent_outside_the_batch_is_refused_only_if_the_tree_needs_it():
    batch = TensorDict({"rollout_id": [1, 2, 3], "group_id": [0, 0, 0]}, [3])
    batch["next", "reward"] = torch.tensor([NAN, 2.0, 3.0])
    batch[WORDS] = torch.tensor([[1, 2], [1, 3], [4, 5]])
    stage = TreeAdvantage(attention_key=None, forks="parent", missing="skip")
    batch["parent_id"] = torch.tensor([9, -1, -1])  # no other rollout continues rollout 1
    stage(batch)
    batch["parent_id"] = torch.tensor([9, 1, -1])
    with pytest.raises(BatchError, match=r"in the same group; found parent 9 of rollout 1 \(row 0\)"):
        stage(batch)
    batch["parent_id"] = torch.tensor([2, 1, -1])
    with pytest.raises(BatchError, match="a cycle of parent 2 of rollout 1"):
        stage(batch)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_a_column_of_one_number_per_row_is_read_as_a_vector(shape):
    batch = TensorDict({"x": torch.arange(3).reshape(shape)}, batch_size=[3])
    assert read_column(batch, "x", reader="the test", option="x_key").tolist() == [0, 1, 2]
