"""The ledger books as trained exactly what the minibatches train, compared with a loop."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from batches import batch_of
from composed import composed
from policies import OLD, with_old
from recipes import CHAINS, FEW

from headrace.pipeline import Pipeline
from headrace.pipeline.report import make_report
from headrace.transforms import LossWeight, ShuffleSplit

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


def batch_for(recipe: str, start: int = 0):
    """Twelve groups of two to four rollouts, one without spread; rows without a token, or with NaN.

    The latter where no stage reads log-probabilities, which would refuse them.
    """
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(12), [3, 2, 4, 2, 3, 4, 2, 2, 3, 4, 2, 3])
    rewards = rng.integers(0, 3, len(groups)).astype(float)
    rewards[groups == 4] = 1.0
    rewards /= 2  # shares, as some recipes need them
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
        batch[MASK] &= batch[LOG_PROBS].isfinite()  # which these stages ask of every token in the loss
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
    """Rows with a token in the loss, and a weight, in some minibatch: one after another."""
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
def test_the_ledger_books_as_trained_what_minibatches_train(recipe, quick):
    """Each recipe with a third of the splits and each fold; with one split in the quick run."""
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


def test_the_report_shows_a_pass_that_trained_each_trained_row():
    """Five minibatches of 36 rows leave one row out, a different one in each pass."""
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
