"""Each turn inside a row has weight 1 in the loss of its optimiser step, as in a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, load_pipeline, optimise
from headrace.transforms import (
    BatchError,
    BatchTransform,
    LossWeight,
    ShuffleSplit,
    loss_weight,
    pack,
    rewards_to_go,
    split_minibatches,
    state_groups,
    turn_weight,
    turns_to_go,
    weighted_loss,
)
from headrace.transforms.table.schema import IN_LOSS, PADDING, ROW, TOKEN_WEIGHT

TOKENS, MASK, LOG_PROB = ("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")
REAL = ("masks", "all_attention_mask")
INSIDE = {"unit": "turn", "turn_index_key": "turn_index", "dtype": "float64"}
NAMES = 5  # number of different tokens

# -- against a loop ---------------------------------------------------------------------------------------


@st.composite
def drawn_rows(draw):
    """Rows of tokens (name, turn, in the mask, has a log-probability). The first token is a prompt."""
    mostly, turn = st.sampled_from([True, True, True, False]), st.sampled_from([0, 0, 0, 1, 700, -1])
    row = st.lists(st.tuples(st.integers(0, NAMES - 1), turn, mostly, mostly), max_size=8)
    rows = draw(st.lists(row, min_size=2, max_size=9))
    placed = [[(name, turn, mask and turn >= 0, there) for name, turn, mask, there in row] for row in rows]
    return [[(0, -1, False, True), *row] for row in placed]


def batch_of_rows(rows, ragged):
    """The rows as a dense batch, padded on the right (padding has turn −1), or as a lazy stack."""
    made = []
    for number, row in enumerate(rows):
        name, turn, mask, there = (torch.tensor(column) for column in zip(*row, strict=True))
        columns = {TOKENS: name, "turn_index": turn, MASK: mask, REAL: torch.ones_like(mask)}
        columns[LOG_PROB] = torch.where(there, -1.0, torch.nan)
        made.append(TensorDict(columns | {"group_id": number // 2, "rollout_id": number}))
    if ragged:
        return lazy_stack(made)
    width = max(map(len, rows))
    fill = {"turn_index": -1, LOG_PROB: torch.nan}
    columns = {
        key: torch.stack(
            [
                torch.nn.functional.pad(row[key], (0, width - len(row[key])), value=fill.get(key, 0))
                for row in made
            ]
        )
        for key in (TOKENS, "turn_index", MASK, REAL, LOG_PROB)
    }
    ids = {key: torch.stack([row[key] for row in made]) for key in ("group_id", "rollout_id")}
    return TensorDict(columns | ids, batch_size=[len(rows)])


def stated(rows, theta):
    """The loss and gradient of an optimiser step: the mean over turns of the mean over their tokens."""
    loss, gradient = 0.0, [0.0] * NAMES
    turns = []
    for row in rows:
        trained = [(name, turn) for name, turn, mask, there in row if mask and there]
        for number in dict.fromkeys(turn for _, turn in trained):
            turns.append([name for name, turn in trained if turn == number])
    for names in turns:
        for name in names:
            loss += theta[name] ** 2 / len(names) / len(turns)
            gradient[name] += 2 * theta[name] / len(names) / len(turns)
    return loss, gradient


class Squares(torch.nn.Module):
    """The loss of a token is the square of its parameter."""

    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.arange(1.0, NAMES + 1).double())

    def forward(self, rows):
        inside = rows[MASK] & rows[LOG_PROB].isfinite()
        return TensorDict({"loss_squares": (self.theta[rows[TOKENS]].square() * inside).unsqueeze(-1)})


CUTS = {
    "whole": {},
    "in micro-batches": {"microbatches": 2},
    "row by row": {"microbatches": 99},
    "by tokens": {"max_tokens": 9, "balance": "attention"},
    "padded": {"microbatches": 2, "remainder": "pad"},
}
WAYS = {"dense": None, "packed": "pack", "a tree": "tree"}


@pytest.mark.slow
@settings(max_examples=20)
@given(
    drawn_rows(), st.sampled_from(list(CUTS)), st.sampled_from(list(WAYS)), st.booleans(), st.integers(1, 2)
)
def test_each_turn_has_weight_1_in_the_loss_of_its_step_for_any_cut(rows, cut, way, ragged, minibatches):
    """Ragged rows are always packed, because losses pad them on different sides."""
    ragged = ragged and way != "dense"
    split = ShuffleSplit(
        unit="sample", minibatches=minibatches, seed=3, **({"remainder": "uneven"} | CUTS[cut])
    )
    pipeline, loss = Pipeline({"split": split, "weight": LossWeight(**INSIDE)}), Squares()
    steps = list(pipeline.minibatches(batch_of_rows(rows, ragged), epochs=2))
    for step in steps:
        found = [0.0]

        def reduce(terms, part, found=found):
            total = weighted_loss(terms, part)
            found[0] += float(total.detach())
            return total

        mine = [rows[number] for number in step[ROW].tolist() if number >= 0]  # padding rows have −1
        expected, gradient = stated(mine, loss.theta.tolist())
        taken = optimise(
            [step], loss, torch.optim.SGD(loss.parameters(), lr=0.0), reduce=reduce, transform=WAYS[way]
        )
        assert taken == any(mask and there for row in mine for _, _, mask, there in row)
        if taken:
            assert found[0] == pytest.approx(expected, rel=1e-12)
            assert loss.theta.grad.tolist() == pytest.approx(gradient, rel=1e-12)


@given(drawn_rows(), st.booleans())
def test_the_documented_sum_of_weights_gives_the_loss(rows, ragged):
    """The loss is Σ loss_weight · Σ mask · token_weight · token loss. Token weights have mean 1 in a row."""
    batch = LossWeight(**INSIDE)(batch_of_rows(rows, ragged))
    theta, total = torch.arange(1.0, NAMES + 1).double(), 0.0
    for row in batch.unbind(0):
        inside = row[MASK] & row[LOG_PROB].isfinite()
        assert row[TOKEN_WEIGHT].shape == row[TOKENS].shape
        assert not row[TOKEN_WEIGHT][~inside].any()
        if inside.any():
            assert float(row[TOKEN_WEIGHT][inside].mean()) == pytest.approx(1, rel=1e-12)
        total += float(row["loss_weight"] * (inside * row[TOKEN_WEIGHT] * theta[row[TOKENS]].square()).sum())
    assert total == pytest.approx(stated(rows, theta.tolist())[0], rel=1e-12)


@given(drawn_rows())
def test_turns_inside_rows_have_the_weights_of_turns_that_are_rows(rows):
    inside = LossWeight(**INSIDE)(batch_of_rows(rows, False))
    found = inside["loss_weight"].unsqueeze(1) * inside[TOKEN_WEIGHT]
    turns = [(i, turn) for i, row in enumerate(rows) for turn in dict.fromkeys(token[1] for token in row)]
    apart = inside[[i for i, _ in turns]].exclude(TOKEN_WEIGHT)
    turn = torch.tensor([turn for _, turn in turns])
    apart[MASK] = apart[MASK] & (apart["turn_index"] == turn.unsqueeze(1))
    apart["turn"] = turn.clamp_min(0)  # no token of the prompt trains
    apart = apart[turn >= 0]
    weighed = LossWeight(unit="turn", turn_key="turn", dtype="float64")(apart) if len(apart) else apart
    for row in weighed.unbind(0):
        trains = row[MASK] & row[LOG_PROB].isfinite()
        weight = found[row["rollout_id"]][trains]
        assert weight.tolist() == pytest.approx([float(row["loss_weight"])] * len(weight), rel=1e-12)


# -- by hand ----------------------------------------------------------------------------------------------


def test_a_turn_of_one_token_weighs_as_much_as_a_turn_of_three():
    """Three turns of 3, 1 and 2 tokens each weigh 1/3. Two of them are in one row."""
    batch = batch_of([0.0, 0.0], [0, 0], tokens=5)
    batch[MASK] = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]).bool()
    batch["turn_index"] = torch.tensor([[-1, 4, 4, 4, 2], [-1, 0, 0, 1, -1]])
    out = LossWeight(**INSIDE)(batch)
    share = out["loss_weight"].unsqueeze(1) * out[TOKEN_WEIGHT]
    assert share[out[MASK]].tolist() == pytest.approx([1 / 9] * 3 + [1 / 3] + [1 / 6] * 2)
    weight, turns = turn_weight(batch["turn_index"], batch[MASK])
    assert torch.equal(weight, out[TOKEN_WEIGHT])
    assert turns.tolist() == [2, 1]
    weighed = loss_weight(batch[MASK].sum(1), "turn", turns=turns, dtype=torch.float64)
    assert torch.equal(weighed.weight, out["loss_weight"])
    one = TensorDict({"loss_one": (batch["turn_index"] == 2).double()})  # the turn of one token
    assert float(weighted_loss(one, out)) == pytest.approx(1 / 3)


def test_each_token_may_be_a_turn():
    weight, turns = turn_weight(torch.tensor([[2, 0, 1]]), torch.ones(1, 3, dtype=torch.bool))
    assert (weight.tolist(), turns.tolist()) == ([[1.0] * 3], [3])


def test_turn_weights_of_a_recipe_sum_to_1_without_padding():
    """The ordered batch and the minibatches have the same weights."""
    batch = batch_of([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2], tokens=6)
    batch[MASK][:, 0] = False
    batch[MASK][:, -1] = True
    batch["turn_index"] = torch.arange(6).div(2, rounding_mode="floor").repeat(6, 1)
    stages = {"weight": {"unit": "turn", "turn_index_key": "turn_index"}, "split": {"remainder": "pad"}}
    made = load_pipeline("grpo", group_size=2, microbatches=4, minibatches=1, stages=stages)
    run = made.run(batch)
    (step,), (same,) = split_minibatches(run.batch), run.minibatches()
    assert torch.equal(step[TOKEN_WEIGHT], same[TOKEN_WEIGHT])
    assert step.get(PADDING).any()
    weight = step["loss_weight"].unsqueeze(1) * step[TOKEN_WEIGHT]
    assert float(weight.sum()) == pytest.approx(1)
    assert not weight[~step[MASK]].any()


class NumberTurns(BatchTransform):
    """A user's own stage. It gives each turn two tokens when rows are gathered."""

    def __init__(self):
        super().__init__(out_keys=["turn_index"])

    def decide(self, rows):
        rows.when_gathered(self.write_turns, ["turn_index"])

    @staticmethod
    def write_turns(batch, _):
        batch["turn_index"] = (torch.arange(6) // 2).repeat(len(batch), 1)


def test_turns_written_by_a_stage_equal_those_of_a_column():
    batch = batch_of([0.0] * 4, [0] * 4, tokens=6)
    split = ShuffleSplit(minibatches=2, unit="sample", shuffle=False)
    cut = {"split": split, "weight": LossWeight(**INSIDE)}
    written = list(Pipeline({"turns": NumberTurns()} | cut).minibatches(batch))
    there = list(Pipeline(cut).minibatches(batch.set("turn_index", (torch.arange(6) // 2).repeat(4, 1))))
    for one, other in zip(written, there, strict=True):
        for key in ("turn_index", "loss_weight", TOKEN_WEIGHT):
            assert torch.equal(one[key], other[key])


# -- turns that are rows ----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 4)), max_size=9),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
    st.data(),
)
def test_the_turns_and_rewards_after_a_row_are_those_of_a_loop(rows, discount, in_order, data):
    ids, rewards = [3 * rollout for rollout, _ in rows], [float(reward) for _, reward in rows]
    order = list(range(len(rows))) if in_order else data.draw(st.permutations(range(len(rows))))
    turn = None if in_order else torch.tensor(order, dtype=torch.int64) * 7
    rollout = torch.tensor(ids, dtype=torch.int64)
    later = [
        sorted((order[j], j) for j in range(len(rows)) if ids[j] == ids[row] and order[j] >= order[row])
        for row in range(len(rows))
    ]
    assert turns_to_go(rollout, turn).tolist() == [len(own) - 1 for own in later]
    expected = [sum(discount**k * rewards[j] for k, (_, j) in enumerate(own)) for own in later]
    for dtype in (torch.float32, torch.float64):
        found = rewards_to_go(torch.tensor(rewards, dtype=dtype), rollout, turn, discount=discount)
        assert found.dtype is dtype
        assert found.tolist() == expected


def test_two_rows_of_a_rollout_with_one_turn_are_refused():
    rollout, turn = torch.tensor([5, 8, 5]), torch.tensor([1, 1, 1])
    with pytest.raises(BatchError, match=r"must have different turns; found rollout 5"):
        turns_to_go(rollout, turn)
    with pytest.raises(BatchError, match=r"must have different turns; found rollout 5"):
        rewards_to_go(torch.ones(3), rollout, turn)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 2**40)), min_size=1, max_size=9))
def test_rows_have_one_number_if_their_group_and_state_are_equal(rows):
    groups, states = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = state_groups(groups, states)
    assert [found.tolist().index(number) for number in found.tolist()] == [rows.index(row) for row in rows]
    assert sorted(set(found.tolist())) == list(range(len(set(rows))))


# -- what is refused --------------------------------------------------------------------------------------


def three_rows():
    batch = batch_of([0.0] * 3, [0] * 3, [5, 6, 7], tokens=3)
    batch[MASK] = torch.tensor([[0, 1, 1]] * 3).bool()
    return batch.set("turn_index", torch.tensor([[-1, 0, 1], [-1, 0, -1], [0, 0, -1]]))


def test_a_token_in_the_loss_without_a_turn_is_refused_with_its_row():
    weight = LossWeight(**INSIDE)
    with pytest.raises(
        BatchError,
        match=r"needs a turn index ≥ 0; found others in row 1 \(rollout 6\), row 2 \(rollout 7\)\.",
    ):
        weight(three_rows())
    masked = three_rows().set(IN_LOSS, torch.tensor([True, False, False]))
    assert weight(masked)["loss_weight"].tolist() == [0.5, 0.0, 0.0]
    out = three_rows()
    out[LOG_PROB][1:, 2] = torch.nan  # out of the loss
    assert float(weight(out)["loss_weight"].sum()) == pytest.approx(3 / 4)  # three rows, four turns
    with pytest.raises(
        BatchError, match=r"'turn_index' \(turn_index_key\) must hold integers; found torch.float32"
    ):
        weight(out.set("turn_index", out["turn_index"].float()))
    with pytest.raises(BatchError, match="one number for each token of a row; found 2 and 3 tokens"):
        weight(out.set("turn_index", torch.zeros(3, 2).long()))
    with pytest.raises(BatchError, match="needs the key 'turn_index'"):
        weight(out.exclude("turn_index"))


def test_the_function_takes_turns_inside_rows_only_for_unit_turn():
    tokens = torch.tensor([2, 3])
    for options in ({"unit": "token"}, {"unit": "turn", "turn": tokens, "rollout_id": tokens}):
        with pytest.raises(ValueError, match="turns is only read with unit='turn' and without turn"):
            loss_weight(tokens, turns=tokens, **options)


def test_token_weights_that_would_not_be_applied_once_are_refused():
    rows = [[(0, -1, False, True), (1, 0, True, True)], [(0, -1, False, True)] + [(2, 0, True, True)] * 2]
    out = LossWeight(**INSIDE)(batch_of_rows(rows, True))
    terms = TensorDict({"loss_one": torch.ones(2, 3)})
    with pytest.raises(BatchError, match="not known on which side the loss padded ragged rows"):
        weighted_loss(terms, out)
    dense = LossWeight(**INSIDE)(batch_of_rows(rows, False))
    for shape in ((), (2,), (3, 3), (2, 4)):
        with pytest.raises(BatchError, match="needs per-token terms"):
            weighted_loss(TensorDict({"loss_one": torch.ones(shape)}), dense)
    for shape in ((), (2,), (3, 3)):  # the weights of rows fit any number of tokens
        with pytest.raises(BatchError, match="needs per-token terms"):
            weighted_loss(
                TensorDict({"loss_one": torch.ones(shape)}), LossWeight()(batch_of_rows(rows, False))
            )
    for again in (LossWeight(), LossWeight(**INSIDE)):
        with pytest.raises(BatchError, match="already have token weights"):
            again(out)
    with pytest.raises(BatchError, match="already have token weights"):
        Pipeline({"first": LossWeight(**INSIDE), "second": LossWeight(weight_key="w")})(
            batch_of_rows(rows, False)
        )
    packed = pack(out, token_keys=[MASK])
    assert packed[TOKEN_WEIGHT].tolist() == [[0, 1, 0, 1, 1]]
