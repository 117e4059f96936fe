"""Metrics and the numbers of a report are the same for excluded and for dropped rows."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline, make_report
from headrace.transforms import (
    BatchWhitening,
    FanOutCollapse,
    GroupRelativeAdvantage,
    NotTruncated,
    RunningBaseline,
    SampleFilter,
)

RECIPES = ["grpo", "dapo", "dr_grpo", "gfpo", "length_bonus", "lite_ppo", "maxrl", "mc_grpo", "mgpo", "mis"]
RECIPES += ["opmd", "opo", "passk", "pkpo", "rloo", "scalerl", "tis", "icepop", "opsm"]


def batch() -> TensorDict:
    """Groups of six rollouts of one or two rows. About 30% of the rollouts are truncated."""
    generator = torch.Generator().manual_seed(0)
    rollout = torch.repeat_interleave(torch.arange(24), torch.randint(1, 3, (24,), generator=generator))
    rows = len(rollout)
    logs = lambda: -torch.rand(rows, 5, generator=generator, dtype=torch.float64)  # noqa: E731
    columns = {
        "group_id": rollout // 6,
        "rollout_id": rollout,
        ("next", "reward"): torch.randint(0, 2, (24,), generator=generator)[rollout].double(),
        ("next", "status"): (torch.rand(24, generator=generator) < 0.3)[rollout].long(),
        ("masks", "all_assistant_mask"): torch.rand(rows, 5, generator=generator) < 0.8,
        ("log_probs", "full"): logs(),
        ("old_log_probs", "full"): logs(),
    }
    return TensorDict(columns, batch_size=[rows])


def by_hand(action: str) -> Pipeline:
    """A pipeline with stages that no recipe combines with a filter."""
    return Pipeline(
        {
            "collapse": FanOutCollapse(),
            "filter": SampleFilter(criterion=NotTruncated(), action=action),
            "advantage": GroupRelativeAdvantage(),
            "running": RunningBaseline(baseline_key="group_id"),
            "whitening": BatchWhitening(per="sample"),
        }
    )


def made(recipe: str, action: str) -> Pipeline:
    if recipe == "by hand":
        return by_hand(action)
    stages = {"gate": None, "filter": {"criterion": "not_truncated", "action": action}}
    return load_pipeline(recipe, shuffle=False, stages=stages)


@pytest.mark.parametrize("recipe", [*RECIPES, "by hand"])
def test_excluded_rows_give_the_numbers_of_dropped_rows(recipe):
    found = []
    for action in ("drop", "exclude"):
        run = made(recipe, action).run(batch())
        numbers = run.metrics | make_report(run).numbers
        found.append({name: value for name, value in numbers.items() if not name.startswith("time/")})
    dropped, excluded = found
    assert dropped.keys() == excluded.keys()
    assert dropped == pytest.approx(excluded, abs=1e-9, nan_ok=True)
