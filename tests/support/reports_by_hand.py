"""A report of four rows whose numbers can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headrace.pipeline.tools.report import StepReport
from headrace.pipeline.tools.report.texts import TokenValues

NAN = math.nan
COLUMNS: dict[str, list[Any]] = {
    "row": [0, 1, 2, 3],
    "reason": [0, 1, 0, 2],
    "group_id": [5, 5, 3, 3],
    "rollout_id": [10, 11, 12, 12],
    "reward": [1.0, 0.0, NAN, NAN],
    "rewards": [[1.0, 0.0], [0.0, 0.0], [NAN, 1.0], [NAN, NAN]],
    "advantage": [0.5, -0.5, NAN, NAN],
    "advantage_by_row": [0.25, -0.25, NAN, NAN],
    "baseline": [0.5, 0.5, NAN, NAN],
    "compared": [2, 2, -1, -1],
    "expected_rollouts": [3, 3, -1, -1],
    "tokens": [3, 4, 2, -1],
    "loss_weight": [0.5, 0.25, NAN, NAN],
    "other_share": [0.75, 0.25, 0.0, NAN],
    "status": [0, 1, -1, 3],
    "policy_version": [4, -1, 7, 6],
    "minibatch": [1, -1, 0, -1],
    "microbatch": [0, -1, 2, -1],
    "rank": [3, -1, 0, -1],
}
TEXTS = {
    "prompt": ["user: One\nand one?", "user: One\nand one?", "Two?", "Two?"],
    "response": ["Eins", "Zwei", "Drei\x1b", "Vier"],
    "ground_truth": ["2", "", "4", ""],
    "other_columns": ["", '{"acc": true, "n": null, "in": [1]}', "no JSON", "[1]"],
    "group_label": ["five", "five", "three", "three"],
    "rollout_label": ["a", "b", "c", "c"],
}


def report_by_hand(texts: dict[str, list[str]] | None = None, **columns: list[Any]) -> StepReport:
    """The report of four rows: one is trained, one is masked, and one rollout of two rows failed."""
    names, actions = ("trained", "filter/low", "gate/failed"), ("trained", "masked", "dropped")
    found = {name: np.array(column) for name, column in (COLUMNS | columns).items()}
    by_token = {
        0: TokenValues(["x", "y\x00"], {"advantage": [0.123456, NAN]}),
        2: TokenValues(None, {"advantage": [1.0]}),
    }
    recipe = (("gate", "Gate()"), ("filter", "Filter()"))
    return StepReport(7, recipe, found, names, actions, TEXTS if texts is None else texts, by_token=by_token)
