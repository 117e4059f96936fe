"""Functions that each process of a group runs, for tests of batches that lose all rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from any_rank import TOGETHER, collected
from batches import no_rows
from recipes import CHAINS
from tensordict import TensorDict, TensorDictBase, lazy_stack

from headrace.pipeline import Pipeline, make_report
from headrace.transforms import BatchTransform, CompletenessGate, SampleFilter


class AllLeave(BatchTransform):
    """A stage that takes out every row."""

    def __init__(self, effect: str):
        super().__init__()
        self.reasons = {"all": effect}

    def decide(self, rows) -> None:
        rows.leave(torch.ones(len(rows), dtype=torch.bool), "all", self.reasons["all"])


def keep_none(batch: TensorDictBase) -> TensorDictBase:
    """A user's own stage, which does not expect batches without rows."""
    assert batch["group_id"].max() >= 0
    return no_rows(batch)


def choose_none(batch: TensorDictBase) -> torch.Tensor:
    """A user's own criterion, which does not expect batches without rows."""
    return batch["group_id"] > batch["group_id"].max()


def emptied(recipe: str, stages: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Add to a pipeline a stage that removes all rows, at each index before the cut, or as the gate.

    At every second index the stage drops the rows. At the other indices, four other stages take turns.
    """
    names = list(stages)
    other = {
        "excluded": AllLeave("excluded"),
        "own stage": keep_none,
        "masked": AllLeave("masked"),
        "own criterion": SampleFilter(criterion=choose_none, unit="rollout", action="drop"),
    }
    for place in range(names.index("split") + 1):
        number = place + CHAINS.index(recipe)
        what = list(other)[number // 2 % len(other)] if number % 2 else "dropped"
        items = list(stages.items())
        items.insert(place, ("nothing", other.get(what, AllLeave("dropped"))))
        yield f"{what} before {names[place]}", dict(items)
    if "gate" in stages:
        yield "gate", {**stages, "gate": CompletenessGate(on_incomplete="drop")}


def run_to_nothing(rank: int, world: int, pipelines: Sequence[tuple[str, Pipeline]]) -> tuple[int, list[str]]:
    """Try each recipe with each way to remove all rows. Return the number of cases, and the failed ones.

    In turn, one of two ranks has no rows, or both have some.
    """
    together = TOGETHER if world > 1 else {}
    tried, wrong = 0, list[str]()
    for recipe, base in pipelines:
        for number, (what, stages) in enumerate(emptied(recipe, dict(base.stages.items()))):
            batch = collected("uniform", recipe)
            if what == "gate":
                batch["expected_rollouts"] += 5
            if number % 2:
                batch = lazy_stack(list(batch.unbind(0)))
            if world > 1 and number % 3 < 2:
                mine = batch if rank == number % 3 else TensorDict({}, batch_size=[0])
            else:
                mine = batch[rank * 8 : len(batch) if rank == world - 1 else (rank + 1) * 8]
            try:
                pipeline = Pipeline(copy.deepcopy(stages), **together)
            except ValueError as err:  # the pipeline refuses this order of stages
                if "rejects single rows" not in str(err) and "would have no effect" not in str(err):
                    wrong.append(f"{recipe}, {what}: {err}")
                continue
            tried += 1
            run = pipeline.run(mine, epochs=2)
            stays = what.startswith(("excluded", "masked"))
            minibatches = sum(map(len, run.minibatches()))
            found = len(run.batch), minibatches, run.ledger.counts()["trained"], len(run.ledger.reason)
            expected = (len(mine), 2 * len(mine)) if stays else (0, 0)
            if found != (*expected, 0, len(mine)):
                wrong.append(f"{recipe}, {what}, rank {rank}: {found}")
            make_report(run)
    return tried, wrong
