"""The ledger counts a row as trained exactly if a minibatch trains it."""

from __future__ import annotations

import io
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from batches import batch_of
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from policies import OLD, with_old
from recipes import CHAINS, FEW
from tensordict import NestedKey, TensorDict, lazy_stack

from headrace.pipeline import Pipeline, load_pipeline
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.tools.report import make_report
from headrace.transforms import LossWeight, SampleFilter, ShuffleSplit
from headrace.transforms.table.schema import MINIBATCH
from headrace.transforms.table.tensordicts import as_texts

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


def batch_for(recipe: str, start: int = 0):
    """Twelve groups of two to four rollouts. Group 4 has equal rewards. Some rows have no token, or NaN.

    NaN is in the loss only if no stage reads log-probabilities, because such a stage would refuse NaN.
    """
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(12), [3, 2, 4, 2, 3, 4, 2, 2, 3, 4, 2, 3])
    rewards = rng.integers(0, 3, len(groups)).astype(float)
    rewards[groups == 4] = 1.0
    rewards /= 2  # some recipes need rewards in [0, 1]
    batch = batch_of(rewards.tolist(), (groups + start).tolist(), tokens=5)
    batch["rollout_id"] += 100 * start
    batch["expected_rollouts"] = torch.tensor([int((groups == g).sum()) for g in groups])
    batch["state_id"] = torch.arange(len(groups)) // 2
    batch["turn_index"], batch["turn_reward"] = (
        torch.zeros(len(groups), 5).long(),
        torch.zeros(len(groups), 1),
    )
    batch[MASK][[2, 11]] = False
    stages = stages_of(recipe).values()
    if any(OLD in getattr(stage, "in_keys", ()) for stage in stages):
        batch[LOG_PROBS][[5, 20]] = float("nan")
        batch[LOG_PROBS][7, 0] = float("nan")
        batch[MASK] &= batch[LOG_PROBS].isfinite()  # these stages refuse NaN in the loss
        with_old(batch, 0.0005)
    elif not any(LOG_PROBS in getattr(stage, "in_keys", ()) for stage in stages):
        batch[LOG_PROBS][[5, 20]] = float("nan")
        batch[LOG_PROBS][7, 0] = float("nan")
    if recipe.endswith("gdpo"):
        batch["next", "reward"] = torch.stack(
            [batch["next", "reward"].flatten(), torch.tensor(rewards) ** 2], 1
        )
    return batch


@cache
def stages_of(recipe: str) -> dict:
    return dict(composed(f"pipeline={recipe}").stages.items())


def trained_in(run, *, weighs: bool) -> set[int]:
    """The rows with a token in the loss in some minibatch, and with a weight if the recipe `weighs`."""
    found = set()
    for part in run.minibatches():
        trains = (part[MASK] & part[LOG_PROBS].isfinite()).any(1)
        if weighs:
            trains &= part["loss_weight"] != 0
        found |= set(part["headrace", "row"][trains].tolist())
    assert -1 not in found, "padding has no token in the loss"
    return found


FOLDS = ("none", "sum", "token_mean")
CUTS = list(product((1, 2, 3), ("drop", "uneven", "pad", "carry")))


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in CHAINS]
)
def test_the_ledger_counts_as_trained_the_rows_that_minibatches_train(recipe, quick):
    """Each recipe is tried with a third of the splits and each fold, or with few splits in the quick run."""
    stages, first = stages_of(recipe), CHAINS.index(recipe)
    weight = stages["weight"]
    for number, (epochs, remainder) in enumerate(CUTS):
        if (number + first) % (11 if quick else 3):
            continue
        fold = FOLDS[(number // 3 + first) % 3]
        split = ShuffleSplit(minibatches=5, remainder=remainder, microbatches=2)
        folding = LossWeight(unit=weight.unit, length=weight.length, fold=fold)
        pipeline = Pipeline(stages | {"split": split, "weight": folding})
        for start in (0, 50):
            run = pipeline.run(batch_for(recipe, start), epochs=epochs)
            booked = (run.ledger.reason == 0).nonzero().flatten().tolist()
            assert booked == sorted(trained_in(run, weighs=fold == "none")), (epochs, remainder, fold, start)


def test_the_report_shows_each_trained_row_in_a_pass_that_trained_it():
    """Five equal minibatches leave rows out, and other rows in each pass."""
    stages = stages_of("grpo") | {"split": ShuffleSplit(minibatches=5, remainder="drop")}
    run = Pipeline(stages).run(batch_for("grpo"), epochs=3)
    orders = [
        {row: (k, float(weight)) for row, weight in zip(rows, part["loss_weight"], strict=True)}
        for k, part in enumerate(run.minibatches())
        for rows in [part["headrace", "row"].tolist()]
    ]
    columns = make_report(run).columns
    trained = (run.ledger.reason == 0).nonzero().flatten().tolist()
    last = set(orders[-5] | orders[-4] | orders[-3] | orders[-2] | orders[-1])
    assert set(trained) - last, "some row is left out in the last pass"
    for row in trained:
        shown = int(columns["minibatch"][row]), float(columns["loss_weight"][row])
        assert shown in [(k % 5, weight) for order in orders if row in order for k, weight in [order[row]]]


# -- carried rows ----------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One row."""

    rollout: int
    fails: str
    """Names of the criteria that the row fails."""
    tokens: int


def first(batch: TensorDict) -> torch.Tensor:
    return batch["fails_first"] == 0


def second(batch: TensorDict) -> torch.Tensor:
    return batch["fails_second"] == 0


class Foreign(torch.nn.Module):
    """A user's own stage. It gets a batch, so the table is written into the batch and read again."""

    def __init__(self, *in_keys: NestedKey):
        super().__init__()
        self.in_keys = in_keys

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.clone()


STEPS = st.fixed_dictionaries(
    {
        "lines": st.lists(
            st.tuples(st.sampled_from(["", "", "first", "second", "first second"]), st.integers(0, 2)),
            min_size=1,
            max_size=6,
        ),
        "saved": st.sampled_from(["no", "before the batch", "within the batch"]),
    }
)


def rows_of(lines: list[Line], *, ragged: bool) -> TensorDict:
    batch = batch_of([float(line.rollout % 3) for line in lines], [line.rollout for line in lines], tokens=2)
    batch["rollout_id"] = torch.tensor([line.rollout for line in lines])
    batch[MASK] = torch.tensor([[token < line.tokens for token in range(2)] for line in lines])
    for name in ("first", "second"):
        batch[f"fails_{name}"] = torch.tensor([int(name in line.fails) for line in lines])
    return lazy_stack(list(batch.unbind(0))) if ragged else batch


def restored(state: dict, pipeline: Pipeline) -> Pipeline:
    """The pipeline with a state that was saved to a file and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    pipeline.load_state_dict(torch.load(file, weights_only=True))
    return pipeline


@given(
    steps=st.lists(STEPS, min_size=2, max_size=4),
    size=st.integers(1, 3),
    actions=st.tuples(*[st.sampled_from(["mask", "exclude", "drop", "none"])] * 2),
    ragged=st.booleans(),
    foreign=st.sampled_from(["", "before", "after"]),
    empty=st.sampled_from(["exclude", "count"]),
    loses_filters=st.booleans(),
    weighs=st.booleans(),
)
def test_a_row_keeps_its_first_reason_in_each_batch_that_carries_it(
    steps, size, actions, ragged, foreign, empty, loses_filters, weighs
):
    """A loop over lists of rows gives the reasons. States are saved and loaded between and within batches.

    The last pipeline may have no filters, so that none of its stages masks a row.
    """

    def make(*, filters: bool) -> Pipeline:
        named: dict = {"before": Foreign() if foreign == "before" else None}
        for criterion, action in zip((first, second), actions, strict=True):
            if filters and action != "none":
                named[criterion.__name__] = SampleFilter(criterion=criterion, action=action)
        named["split"] = ShuffleSplit(minibatch_size=size, unit="sample", remainder="carry", shuffle=False)
        named |= {"weight": LossWeight() if weighs else None}
        named["after"] = Foreign(MINIBATCH) if foreign == "after" else None
        return Pipeline(named, empty=empty)

    pipeline, waiting = make(filters=True), list[tuple[Line, str]]()
    for number, step in enumerate(steps):
        lines = [Line(10 * number + k, *drawn) for k, drawn in enumerate(step["lines"])]
        filters = not (loses_filters and number == len(steps) - 1)
        # 1. A loop: the reason of each row, then which rows are in a minibatch.
        why = {line.rollout: reason for line, reason in waiting}
        stays = []
        for line in lines:
            why[line.rollout] = "pipeline/empty" if empty == "exclude" and not line.tokens else ""
            actions_on = ["exclude"] if why[line.rollout] else []
            for name, action in zip(("first", "second"), actions if filters else (), strict=filters):
                is_judged = not {"exclude", "drop"} & {*actions_on}
                if action != "none" and name in line.fails and is_judged:
                    why[line.rollout] = why[line.rollout] or f"{name}/{name}"
                    actions_on.append(action)
            stays += [] if "drop" in actions_on else [line]
        came = [*lines, *(line for line, _ in waiting)] if stays else lines
        queue = [*(line for line, _ in waiting), *stays] if stays else []
        in_steps = len(queue) // size * size
        trains = [line for line in queue[:in_steps] if line.tokens and not why[line.rollout]]
        if stays:
            waiting = [(line, why[line.rollout]) for line in queue[in_steps:]]
        carried = {line.rollout for line in queue[in_steps:]}
        expected = []
        for line in came:
            late = "split/carried" if line.rollout in carried else "pipeline/no_loss_tokens"
            expected.append(why[line.rollout] or ("trained" if line in trains else late))
        # 2. The pipeline.
        if step["saved"] == "before the batch" or not filters:
            pipeline = restored(pipeline.state_dict(), make(filters=filters))
        batch = rows_of(lines, ragged=ragged)
        run = pipeline.run(batch)
        stream, parts = run.minibatches(), list[TensorDict]()
        if step["saved"] == "within the batch" and in_steps > size:
            parts.append(next(stream))
            pipeline = restored(pipeline.state_dict(), make(filters=filters))
            run = pipeline.run(batch)
            stream = run.minibatches()
        parts += stream
        # 3. Both give the same reason to each row, and the loss agrees.
        assert [run.ledger.names[code] for code in run.ledger.reason] == expected
        assert run.ledger.left.tolist() == [line not in queue[:in_steps] for line in came]
        found = [
            int(rollout)
            for part in parts
            for row, rollout in enumerate(part["rollout_id"])
            if (part[row][MASK] & part[row][LOG_PROBS].isfinite()).any()
        ]
        assert found == [line.rollout for line in trains]


def test_carried_rows_have_the_texts_the_rewards_and_the_tokens_with_which_they_arrived():
    """The first two of three rows are a minibatch. The third, with one token less, joins the next batch."""
    split = ShuffleSplit(minibatch_size=2, unit="sample", remainder="carry", shuffle=False)
    pipeline = Pipeline({"split": split})
    for rewards, first, texts, carried in (([1.0, 2, 3], 0, "abc", []), ([9.0], 3, "d", ["c"])):
        rollouts = [first + row for row in range(len(rewards))]
        batch = batch_of(rewards, [first] * len(rewards), rollouts, tokens=4)
        batch[MASK][:] = True
        batch[MASK][2:, 0] = False
        batch["prompt_text"] = as_texts([*texts])
        run = pipeline.run(batch)
        assert make_report(run).texts["prompt"] == [*texts, *carried]
    collected = {
        name: run.of_rank(run.rows.table.columns[f"collected {name}"]) for name in ("reward", "tokens")
    }
    assert {name: values.flatten().tolist() for name, values in collected.items()} == {
        "reward": [9.0, 3.0],
        "tokens": [4, 3],
    }


def test_a_run_that_drops_all_rows_lists_the_same_reasons(make_batch):
    words = ("pipeline.stages.gate.group_size=2", "pipeline.stages.gate.on_incomplete=drop")
    full = load_pipeline(*words).run(make_batch([1.0, 2], [0, 0]))
    nothing = load_pipeline(*words).run(make_batch([1.0], [0]))
    assert set(full.ledger.names) == set(nothing.ledger.names)
    assert len(full.ledger.names) == len(full.ledger.actions)


def test_the_numbers_and_texts_of_a_ledger_by_hand():
    """Five rows of three rollouts in two groups. The groups have labels, and no row has the last reason."""
    ledger = Ledger(
        reason=torch.tensor([0, 2, 2, 0, 1]),
        names=["trained", "gate/failed", "filter/low", "filter/high"],
        actions=["trained", "dropped", "masked", "masked"],
        left=torch.tensor([False, False, False, False, True]),
        ids={"rollouts": torch.tensor([4, 4, 7, 9, 7]), "groups": torch.tensor([1, 1, 3, 1, 3])},
        labels={"rollouts": None, "groups": ["a", "a", "b", "a", "b"]},
    )
    assert ledger.counts() == {"trained": 2, "gate/failed": 1, "filter/low": 2, "filter/high": 0}
    assert ledger.numbers() == {
        **{"rows/in": 5, "rows/trained": 2, "rollouts/in": 3, "rollouts/trained": 2},
        **{"groups/in": 2, "groups/trained": 1},
        **{"out/gate/failed": 1, "out/filter/low": 2, "out/filter/high": 0},
    }
    low = [{"row": 1, "rollout": 4, "group": "a"}, {"row": 2, "rollout": 7, "group": "b"}]
    assert (ledger.rows("filter/low"), ledger.rows("filter/high")) == (low, [])
    assert repr(ledger) == "Ledger(trained: 2, gate/failed: 1, filter/low: 2)"
    trained = "2 of 5 rows, 2 of 3 rollouts, 1 of 2 groups trained"
    assert ledger.sentence() == f"{trained}; out: gate/failed 1 row, filter/low 2 rows"
    none = torch.zeros(0).long()
    assert Ledger(none, ["trained"], ["trained"], none.bool(), {}, {}).sentence() == "0 of 0 rows trained"
    with pytest.raises(
        KeyError, match=r"unknown reason 'low'; the reasons are \['trained', 'gate/failed', 'fi"
    ):
        ledger.rows("low")


def test_ledgers_of_equal_batches_are_different_and_hashable():
    batch = TensorDict({"rollout_id": [4, 5]}, batch_size=[2])
    first, second = (Pipeline({}).run(batch).ledger for _ in range(2))
    assert first != second
    assert len({first, second, first}) == 2
