"""A real batch with fan-out and masked rows, and the gradient of its loss on one or several ranks."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, optimise, total_loss
from headrace.transforms import BatchError, LossWeight, SampleFilter, ShuffleSplit, take_rows

LENGTH = 6


def halve(batch: TensorDict) -> torch.Tensor:
    """A criterion that removes every third rollout."""
    return batch["rollout_id"].flatten() % 3 != 0


def make_scene(dtype: torch.dtype) -> tuple[torch.nn.Module, TensorDict]:
    """A policy whose ratios to the sampling policy are not 1, and a batch before the split."""
    from rollouts import make_collector, make_env, make_pipeline, make_policy

    torch.manual_seed(3)
    policy = make_policy()
    recipe = make_pipeline("~pipeline.stages.filter", "~pipeline.stages.split", "~pipeline.stages.weight")
    batch = recipe(next(iter(make_collector(make_env(), policy=policy))))
    batch = SampleFilter(criterion=halve)(batch.exclude(("headrace", "processed"), ("headrace", "row")))
    policy = policy.to(dtype)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    batch["advantage"] = torch.randn(len(batch), 1, 1, dtype=dtype)
    batch["log_probs", "full"] = batch["log_probs", "full"].to(dtype)
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"].nan_to_num() - 0.1
    return policy, batch


def gradient(
    policy, batch, mean, *, fold="none", group=None, gradients="sum", transform=None, **cut
) -> torch.Tensor:
    """The gradient of one optimiser step over the whole batch, which may be cut."""
    from torchrl.objectives.llm import GRPOLoss

    from headrace.pipeline import TokenGRPOLoss

    terms = {"entropy_coeff": 0.01, "kl_to_ref_coeff": 0.1} if fold == "none" else {"entropy_bonus": False}
    make_loss = TokenGRPOLoss if fold == "none" else GRPOLoss
    loss = make_loss(policy, masking_strategy="generic", **terms)
    world = "world" if group == "own rows" else None
    options = {"remainder": "uneven", "minibatches": 1} | cut
    weight = LossWeight(
        unit=mean,
        length=LENGTH if mean == "constant" else None,
        fold=fold,
        gradients=gradients,
        ranks=options.get("ranks", 1),
        process_group=world,
        shared_ids="same",
    )
    pipeline = Pipeline({"split": ShuffleSplit(process_group=world, **options), "weight": weight})
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    policy.zero_grad()
    reduce = {} if fold == "none" else {"reduce": total_loss}
    steps = optimise(
        pipeline.minibatches(batch),
        loss,
        optimizer,
        transform=transform,
        process_group=None if group is None else "world",
        **reduce,
    )
    if steps != 1:
        raise RuntimeError(f"one step was to be taken, {steps} were")
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative distance in the Euclidean norm."""
    return float((found - expected).norm() / expected.norm())


MEANS = ("token", "sample", "rollout", "group", "constant")


def run_rank(rank: int, world: int) -> dict:
    """In each process: the distance of every gradient from that of the whole batch, in both precisions."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        policy, batch = make_scene(dtype)
        mine = take_rows(batch, torch.arange(rank, len(batch), world))
        for unit in MEANS:
            whole = gradient(policy, batch, unit)
            shared = {"group": "shared rows", "ranks": world, "rank": rank, "remainder": "pad"}
            own = {"group": "own rows", "remainder": "pad"}
            ways = {
                "shared": gradient(policy, batch, unit, **shared, microbatches=2),
                "shared, balanced": gradient(policy, batch, unit, **shared, max_tokens=40, balance="tokens"),
                "own rows": gradient(policy, mine, unit, **own, microbatches=2),
                "own rows, by tokens": gradient(policy, mine, unit, **own, max_tokens=40),
                "averaged": gradient(policy, batch, unit, **shared, gradients="mean") / world,
            }
            for way, grad in ways.items():
                found[str(dtype), unit, way] = distance(grad, whole)
    return found


class SumOfWeights(torch.nn.Module):
    """A per-token term whose gradient is the sum of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"loss_objective": self.scale * batch["masks", "all_assistant_mask"]}, [])


def run_uneven(rank: int, world: int) -> dict:
    """In each process: the results and errors if one process has no rows, other rows or wrong rows."""
    _, batch = make_scene(torch.float32)
    mine = take_rows(batch, torch.arange(rank, len(batch), world))
    wrong = mine.clone()
    if rank == 1:
        wrong["rollout_id"][:] = -1
    cases = {
        "one is empty": mine[:0] if rank == 1 else mine,
        "all are empty": mine[:0],
        "one has wrong ids": wrong,
        "one has too few": mine[:1] if rank == 1 else mine,
    }
    told = {}
    for name, rows in cases.items():
        for how in ("minibatches", "call"):
            split = ShuffleSplit(minibatches=2, unit="sample", remainder="uneven", process_group="world")
            weight = LossWeight(unit="rollout", process_group="world", shared_ids="same")
            pipeline = Pipeline({"split": split, "weight": weight})
            try:
                found = list(pipeline.minibatches(rows)) if how == "minibatches" else [pipeline(rows)]
                told[name, how] = len(found)
            except BatchError as err:
                told[name, how] = str(err)
    # One rank has neither rows nor columns in a step.
    loss, step = SumOfWeights(), TensorDict({}, batch_size=[0])
    if rank == 0:
        step = LossWeight(unit="rollout")(ShuffleSplit(minibatches=1)(batch))
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    told["steps"] = optimise([step], loss, optimizer, process_group="world")
    told["scale"] = float(loss.scale.detach())
    return told
