"""Functions that each process of a group runs, for tests of ranks that share a batch."""

from __future__ import annotations

import copy
import math
import os
import random
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from batches import batch_of, no_rows
from composed import composed
from policies import MASK, with_old
from processes import run_processes
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, StageError, on_every_rank, optimise
from headrace.transforms import (
    BatchError,
    BatchTransform,
    CompletenessGate,
    GroupRelativeAdvantage,
    LossWeight,
    RewardsVary,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
    StalledError,
    TrainSharedOnce,
    split_microbatches,
    split_minibatches,
    take_rows,
)

PATIENCE = 2.0  # seconds
TOGETHER = {"process_group": "world", "shared_ids": "same", "patience": 60.0}
SHARED = ("pipeline.process_group=world", "pipeline.shared_ids=same", "pipeline.patience=60")


def results_of(function, world: int, folder: Path, *more) -> list:
    """The results of ``function(rank, world, *more)`` in each of the `world` processes of a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    run_processes(run_on_rank, function, world, folder, more, count=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def run_on_rank(rank: int, function, world: int, folder: Path, more: Sequence) -> None:
    """Join the group through a store on a port, which is faster than a file. Save the result."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.save(function(rank, world, *more), folder / f"{rank}.pt")
    dist.barrier()  # rank 0 holds the store, which other ranks need until the last batch has ended
    dist.destroy_process_group()


@contextmanager
def group_of_one() -> Iterator[None]:
    """In this context, this process is a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def collected(kind: str, recipe: str) -> TensorDict:
    """A batch of 5 groups of 4 or of 2 to 5 rollouts. Some rollouts have two or three segments."""
    generator = torch.Generator().manual_seed(len(recipe) + len(kind))
    sizes = [4] * 5 if kind == "uniform" else [2, 5, 3, 4, 2]
    rows = []
    for group, size in enumerate(sizes):
        for number in range(size):
            reward = torch.rand(2, generator=generator).tolist()
            if recipe == "maxrl" or torch.rand((), generator=generator) < 0.3:
                reward = [round(reward[0]), round(reward[1])]
            segments = 1 if kind == "uniform" else int(torch.randint(1, 4, (), generator=generator))
            rows += [(group * 7, group * 100 + number, reward, k) for k in range(segments)]
    groups, rollouts, rewards, places = (list(column) for column in zip(*rows, strict=True))
    batch = batch_of([r[0] for r in rewards], groups, rollouts, tokens=6)
    batch["masks", "all_assistant_mask"] &= torch.rand(len(rows), 6, generator=generator) < 0.8
    batch["masks", "all_assistant_mask"][:, 0] = True
    if recipe == "as/trl":
        batch["next", "reward"][batch["rollout_id"] % 5 == 1] = math.nan
    if recipe == "gdpo":
        batch["next", "reward"] = torch.tensor(rewards)
    batch["expected_rollouts"] = torch.tensor([sizes[g // 7] for g in groups])
    batch["state_id"] = torch.arange(len(rows)) % 3
    batch["turn_index"] = torch.tensor([[2 * k] * 3 + [2 * k + 1] * 3 for k in places])
    batch["turn_reward"] = torch.rand(len(rows), 6, generator=generator)
    batch["turn_reward"] *= torch.tensor([[float(t // 2 == k) for t in range(6)] for k in places])
    return with_old(batch, 0.0005)


def spread(batch: TensorDict, how: str, world: int) -> list[torch.Tensor]:
    """Give rows to the ranks in turn, in pieces, at random, or without any for the second rank."""
    rows = torch.arange(len(batch))
    if how == "in turn":
        return [rows[rank::world] for rank in range(world)]
    if how == "in pieces":
        return list(rows.tensor_split(world))
    if how == "at random":
        home = torch.randint(0, world, (len(batch),), generator=torch.Generator().manual_seed(world))
        return [rows[home == rank] for rank in range(world)]
    return [rows[:0] if rank == 1 else part for rank, part in enumerate(_around(rows, world))]


def _around(rows: torch.Tensor, world: int) -> list[torch.Tensor]:
    parts = list(rows.tensor_split(world - 1))
    return [parts[0], rows[:0], *parts[1:]]


COLUMNS = (
    "advantage",
    "importance_weight",
    "loss_weight",
    ("headrace", "token_weight"),
    ("headrace", "reward"),
    "num_tokens",
    "num_rollouts",
    "num_groups",
)


def by_row(rows: torch.Tensor, out: TensorDict) -> dict:
    """The output columns, by the number of each row in the whole batch."""
    found = {}
    if len(out):
        numbers = rows[out["headrace", "row"]].tolist()
        for key in COLUMNS:
            if key in out.keys(True):
                values = [row[key].flatten().tolist() for row in out.unbind(0)]
                found[str(key)] = dict(zip(numbers, values, strict=True))
    return found


CORRECTION, REJECT = "pipeline.stages.correction", "pipeline.stages.reject.criterion"
WEIGHT = "pipeline.stages.weight"
VARIED = (  # options that no recipe sets
    ("tis", f"{CORRECTION}.level=sequence", f"{CORRECTION}.unit=rollout"),
    ("mt_grpo", f"{WEIGHT}.unit=turn", f"{WEIGHT}.length=null", f"{WEIGHT}.turn_index_key=turn_index"),
    ("mis", f"{REJECT}.unit=rollout", f"{CORRECTION}.level=mean"),
    ("mlperf", "pipeline.stages.mask.denominator=kept"),  # its stages differ on a rank without rows
    ("gtpo", "pipeline.stages.weight.fold=sum"),
    ("as/trl", "pipeline.stages.collapse.missing=mask"),  # some batches lack rewards
)


CASES = (("uniform", "in turn"), ("ragged", "at random"), ("uniform", "one without"), ("ragged", "in pieces"))


def cases_of(number: int) -> tuple[tuple[str, str], ...]:
    """Two pairs of a kind of batch and a way to spread the rows. The next recipe gets two other pairs."""
    return CASES[2 * (number % 2) :][:2]


def without_seconds(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics without the seconds of stages."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def compare_with_one_process(
    rank: int, world: int, pipelines: list[tuple[str, Pipeline]]
) -> tuple[int, list[str]]:
    """Try each recipe on its cases. Return the number of comparisons, and differences from one process."""
    differs, compared = [], 0
    for number, (recipe, of_one) in enumerate(pipelines):
        pipeline = Pipeline(copy.deepcopy(dict(of_one.stages.items())), **TOGETHER)
        for kind, how in cases_of(number):
            batch = collected(kind, recipe)
            parts = spread(batch, how, world)
            order, mine = torch.cat(parts), parts[rank]
            alone = by_row(order, of_one(take_rows(batch, order)))
            rows = take_rows(batch, mine) if len(mine) else TensorDict({}, batch_size=[0])
            if kind == "ragged" and len(mine):
                rows = lazy_stack(list(rows.unbind(0)))
            found = by_row(mine, pipeline(rows))
            measured, expected = without_seconds(pipeline.metrics), without_seconds(of_one.metrics)
            compared += len(measured)
            if measured.keys() != expected.keys():
                differs.append((recipe, kind, how, "metrics", sorted(measured.keys() ^ expected.keys())))
            # Ragged rows are padded to the longest row of a rank, so the sums in metrics round differently.
            near = 1e-12 if kind == "ragged" else 0.0
            differs += [
                (recipe, kind, how, name, one, expected.get(name))
                for name, one in measured.items()
                if not name.startswith("split/")  # each rank permutes its own rows
                and not math.isclose(one, expected.get(name, math.nan), rel_tol=near, abs_tol=near)
            ]
            of_first = [measured]
            dist.broadcast_object_list(of_first, 0)
            if measured != of_first[0]:
                differs.append((recipe, kind, how, "metrics of the first rank", of_first[0]))
            for key, values in found.items():
                compared += len(values)
                other = [(row, value, alone[key].get(row)) for row, value in values.items()]
                differs += [(recipe, kind, how, key, each) for each in other if each[1] != each[2]]
            here = set(alone["advantage"]) & set(mine.tolist())
            if set(found.get("advantage", ())) != here:
                differs.append((recipe, kind, how, "rows that stay", sorted(here)))
    return compared, [str(each) for each in differs]


def metrics_of_stages(
    rank: int, world: int, stages: dict[str, BatchTransform], batch: TensorDict
) -> tuple[int, list[str]]:
    """Run each stage in its own pipeline. Return the number of metrics, and differences from one process."""
    recorded, wrong, each = 0, list[str](), torch.arange(len(batch))
    for parts in (each.split([4, 4]), each.split([8, 0])):
        for name, stage in stages.items():
            of_one, together = (Pipeline({"it": copy.deepcopy(stage)}, **how) for how in ({}, TOGETHER))
            expected = without_seconds(of_one.run(batch).metrics)
            mine = take_rows(batch, parts[rank]) if len(parts[rank]) else TensorDict({}, batch_size=[0])
            found = without_seconds(together.run(mine).metrics)
            recorded += sum(each.startswith("it/") for each in found)
            of_first = [found]
            dist.broadcast_object_list(of_first, 0)
            if found != of_first[0]:
                wrong.append(f"{name}: {found}, of the first rank {of_first[0]}")
            if name.startswith("split"):  # each rank permutes its own rows
                found, expected = ({"rows/in": numbers["rows/in"]} for numbers in (found, expected))
            if found != expected:
                wrong.append(f"{name}: {found}, of one process {expected}")
    return recorded, wrong


def lack_groups(rank: int, world: int, shared_ids: str) -> tuple[float, str]:
    """The error, and the number of groups that have no row on any rank. Ranks may use equal group ids."""
    first = 0 if shared_ids == "different" else 10 * rank
    groups = [first, first, first + 1, first + 1]
    batch = batch_of([0.0, 1, 1, 0], groups, [2 * first + k for k in range(4)])
    sent = [first, first + 1, *range(first + 2, first + 3 + rank)]  # one more group of each rank has no row
    ranks = TOGETHER | {"shared_ids": shared_ids}
    gates = [
        CompletenessGate(group_size=2, expected_groups=sent, on_incomplete=way) for way in ("drop", "raise")
    ]
    said = Pipeline({"gate": gates[0]}, **ranks).run(batch).metrics["gate/missing_groups"]
    try:
        Pipeline({"gate": gates[1]}, **ranks).run(batch)
    except BatchError as err:
        return said, str(err)
    return said, ""


# -- a stream of batches ----------------------------------------------------------------------------------

STREAM = (5, 3, 0, 4)  # groups of each batch on the last rank; each rank before it has two more


def of_stream(number: int, rank: int, world: int, *, alike: bool) -> TensorDict:
    """The rows of a rank in a batch of a stream: complete groups, with two segments in some rollouts.

    Args:
        number: number of the batch.
        rank: the rank that gets the rows.
        world: number of ranks.
        alike: whether ranks use the same ids for different rollouts.
    """
    groups = STREAM[number] + 2 * (world - 1 - rank)
    first = 100 * number + (0 if alike else 1000 * rank)
    rollouts = [(first + group, 10 * (first + group) + k) for group in range(groups) for k in range(2)]
    rows = [each for each in rollouts for _ in range(1 + each[1] % 2)]
    rewards = [float((7 * rollout + rank) % 5) for _, rollout in rows]
    if not rows:
        return TensorDict({}, batch_size=[0])
    batch = batch_of(rewards, [group for group, _ in rows], [rollout for _, rollout in rows], tokens=6)
    return batch.exclude("prompt_text") if rank else batch


def fold_stream(rank: int, world: int) -> tuple[float, float, list[tuple[float, int]]]:
    """Run a stream with carried rows, with and without folded weights. Return the largest error."""

    def cut(fold: str) -> Pipeline:
        split = ShuffleSplit(minibatches=2, microbatches=2, remainder="carry", unit="sample")
        return Pipeline({"split": split, "weight": LossWeight(fold=fold)}, **TOGETHER)

    off, carried, counted, folded, plain = 0.0, 0.0, [], cut("token_mean"), cut("none")
    for number in range(len(STREAM)):
        rows = of_stream(number, rank, world, alike=False)
        if len(rows):
            rows["advantage"] = torch.arange(len(rows)) + 1.0
        tokens = 0
        for one, other in zip(folded.minibatches(rows), plain.minibatches(rows), strict=True):
            for part, same in zip(split_microbatches(one), split_microbatches(other), strict=True):
                held = same["masks", "all_assistant_mask"] & same["log_probs", "full"].isfinite()
                expected = same["advantage"].double() * same["loss_weight"].double() * held.sum()
                of_rows = (part["advantage"].double() / expected - 1).abs()[held.any(1)]  # without padding
                off = max([off, *of_rows.flatten().tolist()])
                tokens += int(held.sum())
        every: list = [None] * world
        dist.all_gather_object(every, tokens)
        counted.append((plain.metrics.get("weight/tokens", 0), sum(every)))
        carried += folded.metrics.get("split/carried_in", 0)
    return off, carried, counted


def carry_masked(rank: int, world: int) -> list[tuple[list[str], list[int]]]:
    """Return the reasons and the trained rows of three batches. The last pipeline has no filters.

    Rank 0 carries a masked row, and rank 1 a row that will train.
    """
    split = {"split": ShuffleSplit(minibatch_size=3, unit="sample", remainder="carry", shuffle=False)}
    out = SampleFilter(criterion=RewardWithin(high=5.0))
    stages = {"gate": CompletenessGate(group_size=2, on_incomplete="drop"), "filter": out, **split}
    rewards = [[1.0, 2.0, 1.0, 9.0] if rank == 0 else [1.0, 2.0, 9.0, 1.0], [1.0], [1.0, 2.0]]
    whole, last, found = (*(Pipeline(copy.deepcopy(each), **TOGETHER) for each in (stages, split)), [])
    for number, of_rows in enumerate(rewards):
        batch = batch_of(of_rows, [10 * number + 100 * rank + row // 2 for row in range(len(of_rows))])
        batch["rollout_id"] += 1000 * number + 100 * rank
        if number == 2:
            last.stages["split"].load_state_dict(whole.stages["split"].state_dict())
        run = (last if number == 2 else whole).run(batch)
        trained = sorted(
            row
            for part in run.minibatches()
            for row, mask in zip(part["headrace", "row"].tolist(), part[MASK], strict=True)
            if mask.any()
        )
        found.append(([run.ledger.names[code] for code in run.ledger.reason], trained))
    return found


def carry_at_random(rank: int, world: int, streams: int) -> list[str]:
    """Run streams of small batches with random cuts. Return the broken laws, and errors that end a stream."""
    wrong = list[str]()
    for seed in range(streams):
        shared, own = random.Random(seed), random.Random(seed * world + rank)
        cut = {
            shared.choice(["minibatches", "minibatch_size"]): shared.choice([1, 2, 2, 4]),
            "unit": shared.choice(["sample", "rollout", "group"]),
            "shuffle": shared.random() < 0.7,
            "balance": shared.choice(["none", "tokens"]),
        }
        cut |= shared.choice(
            [{}, {"microbatches": shared.randint(1, 4)}, {"max_tokens": shared.randint(3, 9)}]
        )
        epochs = shared.randint(1, 2)
        split = ShuffleSplit(remainder="carry", seed=seed, **cut)
        pipeline = Pipeline(
            {"split": split, "weight": LossWeight()}, **TOGETHER | {"shared_ids": "different"}
        )
        if world == 1:
            pipeline = Pipeline({"split": split, "weight": LossWeight()})
        born, waiting = (
            dict[int, int](),
            set[int](),
        )  # the batch of each row by its id; the carried rows
        for number in range(6):
            ids = [1000 * number + each for each in range(own.randint(0, 9 if rank == 0 else 3))]
            born |= dict.fromkeys(ids, number)
            rows = batch_of(
                [1.0] * len(ids), [each // 3 for each in ids], [each // 2 for each in ids], tokens=4
            )
            rows["sample"] = torch.tensor(ids)
            rows[MASK] = torch.arange(4) < torch.tensor([own.randint(1, 4) for _ in ids]).view(-1, 1)
            try:
                steps = [list(split_microbatches(each)) for each in pipeline.minibatches(rows, epochs=epochs)]
            except BatchError as err:
                wrong.append(f"{seed} {cut}: batch {number} ends the stream: {err}")
                break
            trained = [
                sample
                for step in steps
                for part in step
                for sample, mask in zip(part["sample"].tolist(), part[MASK].any(1).tolist(), strict=True)
                if mask
            ]
            carried = split.memory.state.carried
            left = set() if carried is None else set(carried["sample"].tolist())
            if sorted(trained) != sorted([*((waiting | {*ids}) - left)] * epochs):
                wrong.append(
                    f"{seed} {cut}: batch {number} trains {trained}, carries {left} of {waiting} + {ids}"
                )
            if left and trained and max(map(born.get, trained)) > min(map(born.get, left)):
                wrong.append(f"{seed} {cut}: batch {number} trains {trained} before the older {left}")
            every: list = [[len(step) for step in steps]]
            if world > 1:
                every = [None] * world
                dist.all_gather_object(every, [len(step) for step in steps])
            if any(counts != every[0] for counts in every):
                wrong.append(f"{seed} {cut}: batch {number} has micro-batches {every}")
            waiting = left
    return wrong


# -- equal numbers of steps and micro-batches on each rank ------------------------------------------------

CUTS = (
    {"minibatches": 1},
    {"minibatches": 2, "microbatches": 3},
    {"minibatches": 2, "microbatches": 2, "shuffle": False},
    {"minibatches": 2, "max_tokens": 13},
    {"minibatches": 1, "max_tokens": 13, "tree": "group"},
)


def parts_of_ranks(batch: TensorDict, how: str, world: int) -> list[torch.Tensor]:
    """The rows of each rank. With "a few", the second rank has one group. With "none", no rank has rows."""
    rows = torch.arange(len(batch))
    if how == "none":
        return [rows[:0]] * world
    if how == "a few":
        return [rows[4:], rows[:4], *[rows[:0]] * (world - 2)]
    return spread(batch, how, world)


def take_as_many_steps(rank: int, world: int) -> tuple[int, list[str]]:
    """Compare the numbers of micro-batches on all ranks. Return the number of cases, and the differences."""
    tried, wrong = 0, list[str]()
    batch = collected("uniform", "grpo")
    for remainder in ("uneven", "drop"):  # numbers of steps are equal even without padding rows
        mine = parts_of_ranks(batch, "one without", world)[rank]
        rows = take_rows(batch, mine) if len(mine) else TensorDict({}, batch_size=[0])
        split = {"split": ShuffleSplit(remainder=remainder, minibatches=2, microbatches=2)}
        steps = list(map(len, Pipeline(split, **TOGETHER).minibatches(rows)))
        if len(steps) != 2 or any(steps) != bool(len(mine)):
            wrong.append(f"{remainder}: {steps}")
    for cut in CUTS:
        for how in ("one without", "a few", "none"):
            for kind in ("dense", "ragged"):
                if kind == "ragged" and "tree" in cut:
                    continue
                mine = parts_of_ranks(batch, how, world)[rank]
                rows = take_rows(batch, mine) if len(mine) else TensorDict({}, batch_size=[0])
                if kind == "ragged" and len(mine):
                    rows = lazy_stack(list(rows.unbind(0)))
                alone = ShuffleSplit(remainder="pad", process_group="world", **cut)
                stages = {"split": ShuffleSplit(remainder="pad", **cut), "weight": LossWeight()}
                through = Pipeline(stages, **TOGETHER)
                for name, minibatches in (
                    ("alone", split_minibatches(alone(rows))),
                    ("pipeline", through.minibatches(rows, epochs=2)),
                ):
                    steps = [[len(part) for part in split_microbatches(each)] for each in minibatches]
                    every: list = [None] * world
                    dist.all_gather_object(every, [len(sizes) for sizes in steps])
                    tried += len(steps)
                    if any(counts != every[0] for counts in every) or not all(map(all, steps)):
                        wrong.append(f"{cut} {how} {kind} {name}: {steps}, of the ranks {every}")
    return tried, wrong


def gradients_of_ddp(rank: int, world: int) -> list[float]:
    """The distances of the gradients of DDP and `optimise` from the gradient of one process."""
    off = []
    for how in ("one without", "a few"):
        batch = collected("uniform", "grpo")
        mine = parts_of_ranks(batch, how, world)[rank]
        rows = take_rows(batch, mine) if len(mine) else TensorDict({}, batch_size=[0])
        cut = {"minibatches": 1, "microbatches": 3, "remainder": "pad"}
        for gradients in ("mean", "sum"):
            model = torch.nn.Embedding(50, 1, dtype=torch.float64)
            torch.nn.init.zeros_(model.weight)
            stages = {"advantage": GroupRelativeAdvantage(), "split": ShuffleSplit(**cut)}
            together = Pipeline({**stages, "weight": LossWeight(gradients=gradients)}, **TOGETHER)
            net = torch.nn.parallel.DistributedDataParallel(model) if gradients == "mean" else model
            group = None if gradients == "mean" else "world"
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            optimise(together.minibatches(rows), partial(linear_loss, net), optimizer, process_group=group)
            expected = torch.nn.Embedding(50, 1, dtype=torch.float64)
            torch.nn.init.zeros_(expected.weight)
            stages = {"advantage": GroupRelativeAdvantage(), "split": ShuffleSplit(**cut)}
            alone = Pipeline({**stages, "weight": LossWeight()})
            optimizer = torch.optim.SGD(expected.parameters(), lr=1.0)
            optimise(alone.minibatches(batch), partial(linear_loss, expected), optimizer)
            assert float(expected.weight.detach().abs().max()) > 1e-3
            off.append(float((model.weight - expected.weight).detach().abs().max()))
    return off


def factors_of_gradients(rank: int, world: int) -> list[tuple[str, str, float, list[str]]]:
    """The size of the gradient and the warnings, for each way to combine gradients and each `gradients`."""
    batch, found = collected("uniform", "grpo"), []
    for combined in ("ddp", "optimise", "both"):
        sums = {}
        for gradients in ("sum", "mean"):
            model = torch.nn.Embedding(50, 1, dtype=torch.float64)
            torch.nn.init.zeros_(model.weight)
            stages = {"advantage": GroupRelativeAdvantage(), "split": ShuffleSplit(minibatches=1)}
            pipeline = Pipeline({**stages, "weight": LossWeight(gradients=gradients)}, **TOGETHER)
            net = model if combined == "optimise" else torch.nn.parallel.DistributedDataParallel(model)
            group, rows = (
                None if combined == "ddp" else "world",
                take_rows(batch, spread(batch, "in turn", world)[rank]),
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimise(
                    pipeline.minibatches(rows), partial(linear_loss, net), optimizer, process_group=group
                )
            said = [str(each.message) for each in caught if "gradients of" in str(each.message)]
            sums[gradients] = float(model.weight.detach().abs().sum()), said
        for gradients, (size, said) in sums.items():
            found.append((combined, gradients, size, said))
    return found


def linear_loss(model: torch.nn.Module, rows: TensorDict) -> TensorDict:
    """A loss per token: the advantage times the value that an embedding has for the token."""
    said = model(rows["tokens", "full"] % 50).squeeze(-1)
    return TensorDict({"loss_objective": rows["advantage"].reshape(len(rows), -1) * said}, [len(rows)])


# -- refusing together ------------------------------------------------------------------------------------


def fails(batch: TensorDict) -> TensorDict:
    """A user's own stage, which raises on broken rows."""
    if bool(batch.get("broken", torch.zeros(1)).any()):
        raise RuntimeError("the reward model is gone")
    return batch


def score(batch: TensorDict) -> TensorDict:
    """A user's own stage, which writes a column and does not expect batches without rows."""
    reward = batch["next", "reward"]
    return batch.set("scored", reward - 0 * reward.min())


def choose(batch: TensorDict) -> torch.Tensor:
    """A user's own criterion."""
    return fails(batch)["rollout_id"] >= 0


def go_on(batch: TensorDict) -> list[int]:
    """The trained rows of a batch that stops after a minibatch and goes on in another pipeline."""

    def cut() -> Pipeline:
        stages = {"split": ShuffleSplit(minibatches=2), "weight": LossWeight()}
        return Pipeline(stages, process_group="world", shared_ids="same")

    before, after = cut(), cut()
    steps = before.minibatches(batch)
    rows = next(steps).get(("headrace", "row")).tolist()
    after.load_state_dict(before.state_dict())
    for minibatch in after.minibatches(batch):
        rows += minibatch.get(("headrace", "row")).tolist()
    return sorted(set(rows))


def refuse_together(rank: int, world: int) -> tuple[list[tuple[str, object, float]], int]:
    """The errors that each rank gets, batch after batch, when the second rank has wrong data."""
    mine = take_rows(collected("uniform", "grpo"), torch.arange(20).tensor_split(world)[rank])
    wrong = rank == 1
    share = {"process_group": "world", "shared_ids": "same"}
    stages = dict(composed("pipeline=grpo", "pipeline.stages.split.minibatches=1").stages.items())
    pipeline = Pipeline({"own": fails, **stages}, patience=PATIENCE, **share)
    lacking = mine[1:] if wrong else mine
    nan = mine.clone()
    nan["next", "reward"][0] = float("nan") if wrong else 0.0
    columns = mine.exclude("group_id") if wrong else mine
    wide = mine.clone()
    if wrong:  # because wrong rewards change the rounding
        wide["next", "reward"] = wide["next", "reward"].double()
    broken = mine.clone().set("broken", torch.full((len(mine),), wrong))
    unset = mine.clone()
    unset["group_id"][0] = -1 if wrong else 0
    judging = Pipeline({"filter": SampleFilter(criterion=RewardsVary(), unit="sample")}, **share)
    told: list[tuple[str, object, float]] = []

    def attempt(name, batch, run=pipeline):
        start = time.monotonic()
        try:
            out = run(batch)
            found: object = len(out)
        except (BatchError, StageError) as err:
            found = f"{type(err).__name__}: {err}"
        told.append((name, found, time.monotonic() - start))

    attempt("well", mine)
    odd = {"gate": lacking, "rule": nan, "column": columns, "dtype": wide, "stage": broken}
    for name, batch in odd.items():
        attempt(name, batch)
        attempt(f"after {name}", mine)
    attempt("last rule", unset, judging)
    split = {"split": ShuffleSplit(minibatches=1), "weight": LossWeight()}
    choosing = Pipeline({"filter": SampleFilter(criterion=choose, action="drop"), **split}, **share)
    attempt("criterion", broken, choosing)
    attempt("after criterion", mine, choosing)
    if wrong:  # until the other ranks have given up two batches
        time.sleep(PATIENCE * 2.5)
    attempt("hung", mine)
    attempt("hung again", mine)
    attempt("after hung", mine)
    if wrong:  # this rank has one batch less, which its next batch reports
        time.sleep(PATIENCE * 1.5)
        attempt("skipped", mine)
    else:
        attempt("skipped", mine)
    attempt("after skipped", mine)
    attempt("no rows at all", no_rows(mine))
    whole = collected("uniform", "grpo")
    attempt("no rows", whole if rank == 0 else no_rows(whole))
    scored = dict(composed("pipeline=grpo", "pipeline.stages.collapse.reward_key=scored").stages.items())
    attempt(
        "no rows to score",
        whole if rank == 0 else no_rows(whole),
        Pipeline({"own": score, **scored}, **share),
    )
    dropping = composed("pipeline=grpo", "pipeline.stages.gate.on_incomplete=drop", *SHARED)
    parts = {0: whole[:16], 1: whole[16:17]}  # the second rank has only incomplete groups
    attempt("all dropped", parts.get(rank, no_rows(whole)), dropping)
    attempt("resumed", whole if rank == 0 else no_rows(whole), go_on)
    other = composed("pipeline=grpo", f"pipeline.stages.advantage.eps={1e-4 if wrong else 1e-6}", *SHARED)
    attempt("options", mine, other)
    other = composed("pipeline=grpo", *SHARED)
    try:
        other.run(mine, epochs=2 if wrong else 1)
    except BatchError as err:
        told.append(("epochs", str(err), 0.0))
    different = Pipeline({"own": fails, **stages}, process_group="world", shared_ids="raise")
    attempt("ids", mine, different)
    torn = Pipeline({"split": ShuffleSplit(minibatches=2, unit="group", remainder="uneven")}, **share)
    attempt("torn", mine, torn)
    carry = {"split": ShuffleSplit(minibatches=2, unit="group", remainder="carry")}
    carrying = Pipeline(carry, process_group="world", shared_ids="different", patience=PATIENCE)
    attempt("before carried", of_stream(0, rank, world, alike=False), carrying)
    # The last rank puts groups again that still wait in its assembler.
    attempt("carried", of_stream(0 if rank == world - 1 else 1, rank, world, alike=False), carrying)
    return told, pipeline.stages["split"].state.calls


def lose_a_rank(rank: int, world: int, folder: Path) -> None:
    """End the process of the last rank within a batch, and save the errors of the other ranks."""
    of_one = composed("pipeline=grpo", "pipeline.stages.split.minibatches=1")
    pipeline = Pipeline(dict(of_one.stages.items()), **TOGETHER | {"patience": PATIENCE})
    mine = take_rows(collected("uniform", "grpo"), torch.arange(20).tensor_split(world)[rank])
    pipeline.run(mine)
    torch.save(("", 0.0), folder / f"{rank}.pt")
    if rank == world - 1:
        pipeline.stages["gate"].decide = lambda rows: os._exit(0)
    start = time.monotonic()
    try:
        pipeline.run(mine)
    except BatchError as err:
        torch.save((str(err), time.monotonic() - start), folder / f"{rank}.pt")
    if rank == 0:  # rank 0 holds the store
        time.sleep(PATIENCE)
    os._exit(0)


def take_in_step(
    rank: int, world: int, lengths: Sequence[int], fails: int | None
) -> tuple[list[tuple[int, int]], str]:
    """The number of rows in and out of each batch of this rank, and the error that ends the loop."""

    def source():
        for step in range(lengths[rank]):
            yield batch_of([1.0, 2.0], [step] * 2, [2 * step, 2 * step + 1])
        if rank == fails:
            raise StalledError("writer 3 is lost")

    words = ("pipeline.process_group=world", "pipeline.shared_ids=different")
    pipeline = composed("pipeline=grpo", "pipeline.stages.gate.group_size=2", *words)
    taken, error = [], ""
    try:
        for batch in on_every_rank(source(), patience=60):
            rows = len(pipeline.run(batch).batch)
            taken.append((len(batch), rows))
    except Exception as err:
        error = f"{type(err).__name__}: {err}"
    return taken, error


def trained_once_of_rank(
    rank: int, world: int, seeds: Sequence[int]
) -> list[list[tuple[torch.Tensor, float]]]:
    """The loss mask and the count of TrainSharedOnce, for half of the rows, and for all or none of them."""
    from test_shared_once import forked

    found = []
    for seed in seeds:
        batch = forked(seed)
        half = torch.arange(len(batch)).tensor_split(world)[rank]
        parts = half, torch.arange(len(batch))[: 0 if rank else len(batch)]
        pipeline = Pipeline({"once": TrainSharedOnce()}, process_group="world", shared_ids="same")
        runs = [pipeline.run(take_rows(batch, rows) if len(rows) else batch[:0]) for rows in parts]
        masks = [run.ungathered["masks", "all_assistant_mask"] for run in runs]
        found.append(
            [(mask, run.metrics["once/shared_tokens"]) for mask, run in zip(masks, runs, strict=True)]
        )
    return found
