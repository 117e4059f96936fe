"""What each process does in the laws of the rank that decides for all."""

from __future__ import annotations

import copy
import io
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from any_rank import PATIENCE, STREAM, cases_of, collected, of_stream, spread
from batches import batch_of
from rich.console import Console
from tensordict import TensorDict

from headrace.pipeline import Pipeline, Run, StageError
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    DifficultyWeight,
    FanOutCollapse,
    LossWeight,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
    take_rows,
)

MASK = ("masks", "all_assistant_mask")
WAYS = ("each_rank", "first_rank")


def both_ways(pipeline: Pipeline, **options: Any) -> list[Pipeline]:
    """Two pipelines of these stages: each rank decides, and the first does."""
    stages = dict(pipeline.stages.items())
    shared = {"process_group": "world", "shared_ids": "same", "patience": 60.0} | options
    shared |= {"masked_log_prob": pipeline.masked_log_prob}
    return [Pipeline(copy.deepcopy(stages), decide_on=way, **shared) for way in WAYS]


def plain(value: Any) -> Any:
    """Equal for equal bits: dtype and bytes of tensors, and the keys and values of anything else."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, TensorDict) or hasattr(value, "keys"):
        return {str(key): plain(value[key]) for key in sorted(value.keys(), key=str)}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def everything(run: Run, minibatches: list[TensorDict]) -> dict[str, Any]:
    """All that is known of a run, but for how long it took."""
    found: dict[str, Any] = {
        "metrics": {name: number for name, number in run.metrics.items() if not name.startswith("time/")},
        "minibatches": [
            {str(key): plain(part.get(key, as_list=True)) for key in part.keys(True, True)}
            for part in minibatches
        ],
    }
    if (ledger := run.ledger) is not None:
        found["ledger"] = plain([ledger.reason, ledger.left, ledger.names, ledger.actions, dict(ledger.ids)])
        report = run.report(console=Console(file=io.StringIO()))
        found["report"] = {name: column.tolist() for name, column in report.columns.items()}
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two of :func:`everything` differ."""
    return [
        f"{name}: {str(one.get(name))[:400]} and {str(other.get(name))[:400]}"
        for name in one.keys() | other.keys()
        if str(one.get(name)) != str(other.get(name))  # also where a number is NaN
    ]


def runs_of(recipe: str, pipeline: Pipeline, rows: TensorDict) -> Iterator[Run]:
    """Over the rows, in one pipeline or in its halves."""
    if recipe == "halves":
        first, pipeline = pipeline.halves()
        run = first.run(rows)
        yield run
        rows = run.batch if len(run.batch) else TensorDict({}, batch_size=[0])
    yield pipeline.run(rows, epochs=2)


def compare_ways(rank: int, world: int, pipelines: list[tuple[str, Pipeline]]) -> tuple[int, list[str]]:
    """Each recipe, kind of batch and way to spread it, two epochs of it: what differs."""
    differs, compared = [], 0
    for number, (recipe, pipeline) in enumerate(pipelines):
        ways = both_ways(pipeline)
        for kind, how in cases_of(number):
            batch = collected(kind, recipe)
            mine = spread(batch, how, world)[rank]
            rows = take_rows(batch, mine) if len(mine) else TensorDict({}, batch_size=[0])
            found = []
            for each in ways:
                known: dict[str, Any] = {}
                for number, run in enumerate(runs_of(recipe, each, rows)):
                    parts = list(run.minibatches())
                    compared += len(parts)
                    known |= {f"{number} {name}": all_ for name, all_ in everything(run, parts).items()}
                found.append(known | {"state": plain(each.state_dict())})
            differs += [f"{recipe} {kind} {how} {each}" for each in differences(*found)]
    return compared, differs


# -- what is remembered -----------------------------------------------------------------------------------


def follow_stream(
    rank: int, world: int, pipelines: list[tuple[str, str, Pipeline]]
) -> tuple[list[str], int, list[int]]:
    """A stream in both ways: after each batch, and after an interruption that the other way resumes."""
    differs, carried, refused = [], 0, []
    for name, shared_ids, pipeline in pipelines:
        ways = both_ways(pipeline, shared_ids=shared_ids)
        for number in range(len(STREAM)):
            rows = of_stream(number, rank, world, alike=shared_ids == "different")
            found: list[dict[str, Any]] = []
            for each in ways:
                run, before = each.run(rows, epochs=2), each.state_dict()
                steps = run.minibatches()
                taken = list(islice(steps, 1))
                middle = plain(each.state_dict())
                taken += list(steps)
                found.append(everything(run, taken) | {"state": plain([before, middle, each.state_dict()])})
                carried += int(run.metrics.get("split/carried_in", 0))
            differs += [f"{name} {number} {each}" for each in differences(*found)]
        # Each is interrupted, and goes on in the other way; then it is known to have been trained.
        rows = of_stream(0, rank, world, alike=shared_ids == "different")
        rows["group_id"] += 5000
        rows["rollout_id"] += 50000
        found = []
        for before, after in zip(ways, both_ways(pipeline, shared_ids=shared_ids)[::-1], strict=True):
            next(before.minibatches(rows, epochs=2))
            after.load_state_dict(before.state_dict())
            run = after.run(rows, epochs=2)
            parts, again = list(run.minibatches()), both_ways(pipeline, shared_ids=shared_ids)
            after_all = after.state_dict()
            for each in again:
                each.load_state_dict(after_all)
                run_again = each.run(rows, epochs=2)
                steps = list(run_again.minibatches())
                found.append(everything(run_again, steps) | {"state": plain(each.state_dict())})
            found.append({"resumed": everything(run, parts)})
        differs += [f"{name} resumed {each}" for each in differences(found[0], found[1])]
        differs += [f"{name} resumed {each}" for each in differences(found[3], found[4])]
        differs += [f"{name} resumed {each}" for each in differences(found[2], found[5])]
        refused += [len(found[0]["minibatches"])]
    return differs, carried, refused


def carry_masked(rank: int, world: int) -> list[tuple[list[str], list[int]]]:
    """The reasons and the trained rows of three batches, in both ways; the third has a pipeline without
    filters. Rank 0 carries a masked row, and rank 1 one that waits to be trained."""
    split = {"split": ShuffleSplit(minibatch_size=3, unit="sample", remainder="carry", shuffle=False)}
    out = SampleFilter(criterion=RewardWithin(high=5.0))
    stages = {"gate": CompletenessGate(group_size=2, on_incomplete="drop"), "filter": out, **split}
    rewards = [[1.0, 2.0, 1.0, 9.0] if rank == 0 else [1.0, 2.0, 9.0, 1.0], [1.0], [1.0, 2.0]]
    found = []
    for whole, last in zip(both_ways(Pipeline(stages)), both_ways(Pipeline(split)), strict=True):
        for number, of_rows in enumerate(rewards):
            batch = batch_of(of_rows, [10 * number + 100 * rank + row // 2 for row in range(len(of_rows))])
            batch["rollout_id"] += 1000 * number + 100 * rank
            if number == 2:
                last.stages["split"].load_state_dict(whole.stages["split"].state_dict())
            run = (last if number == 2 else whole).run(batch)
            trained = [
                row
                for part in run.minibatches()
                for row, mask in zip(part["headrace", "row"].tolist(), part[MASK], strict=True)
                if mask.any()
            ]
            found.append(([run.ledger.names[code] for code in run.ledger.reason], trained))
    return found


# -- refusing together ------------------------------------------------------------------------------------


def refuse_what_one_decides(rank: int, world: int, folder: Path) -> None:
    """What each rank is told, batch after batch, and at last without the last rank, whose process ends."""
    stages = {"gate": CompletenessGate(group_size=2), "split": ShuffleSplit(minibatches=2)}
    pipeline = both_ways(Pipeline(stages | {"weight": LossWeight()}), patience=PATIENCE)[1]
    mine, told, last = of_stream(0, rank, world, alike=False), [], rank == world - 1
    split = {"split": ShuffleSplit(minibatches=2, unit="group", remainder="carry")}
    carrying = both_ways(Pipeline(split), patience=PATIENCE, shared_ids="different")[1]

    def attempt(batch: TensorDict, run: Pipeline = pipeline) -> None:
        start = time.monotonic()
        try:
            said: object = len(run(batch))
        except (BatchError, StageError) as err:
            said = str(err)
        told.append((said, time.monotonic() - start))
        torch.save(told, folder / f"{rank}.pt")

    attempt(mine)
    attempt(mine[1:] if last else mine)  # whose group lacks a rollout
    attempt(mine)
    of_tokens = mine.clone().set("advantage", torch.ones(len(mine), 6))
    of_tokens["next", "reward"][:] = 1.0
    weighed = Pipeline({"collapse": FanOutCollapse(), "difficulty": DifficultyWeight()})
    attempt(of_tokens, both_ways(weighed, patience=PATIENCE)[1])
    attempt(mine, carrying)
    attempt(mine if last else of_stream(1, rank, world, alike=True), carrying)  # ids of rows that wait
    if rank == 0:
        pipeline.stages["gate"].decide = lambda rows: time.sleep(1.5 * PATIENCE)
    attempt(mine)
    if rank == 0:
        del pipeline.stages["gate"].decide
    attempt(mine)
    if last:  # while it waits for its passes
        pipeline.stages["split"].carried_rows = lambda: os._exit(0)
    attempt(mine)
    if rank == 0:  # which has the store
        time.sleep(PATIENCE)
    os._exit(0)
