"""An edit in place of a minibatch changes neither the caller's batch nor a later minibatch or epoch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import ShuffleSplit
from headrace.transforms.split.gather import SMALL

MASK = ("masks", "all_assistant_mask")


def rows(kind: str) -> TensorDictBase:
    """Groups of four. A large batch is gathered one minibatch at a time, and a small batch at once."""
    tokens = SMALL // 64 if kind == "large" else 4
    ids = torch.arange(16)
    generator = torch.Generator().manual_seed(0)
    columns = {
        "group_id": ids // 4,
        "rollout_id": ids,
        ("next", "reward"): torch.rand(16, 1, generator=generator),
        MASK: torch.ones(16, tokens, dtype=torch.bool),
        ("log_probs", "full"): -torch.rand(16, tokens, generator=generator),
        "a number": torch.rand(16, generator=generator),
    }
    batch = TensorDict(columns, batch_size=[16])
    if kind != "ragged":
        return batch
    singles = [row.clone() for row in batch.unbind(0)]
    for number, row in enumerate(singles):
        for key in (MASK, ("log_probs", "full")):
            row[key] = row[key][: 1 + number % 4].clone()
    return lazy_stack(singles)


def tensors(batch: TensorDictBase) -> Iterator[torch.Tensor]:
    for row in batch.tensordicts if hasattr(batch, "tensordicts") else [batch]:
        yield from (value for value in row.values(True, True) if isinstance(value, torch.Tensor))


def taken(kind: str, options: dict, *, edits: bool) -> tuple[list[list[torch.Tensor]], TensorDictBase]:
    """The columns of each minibatch when it is taken, and the batch at the end."""
    batch, found = rows(kind), []
    pipeline = load_pipeline("grpo", group_size=4, seed=1, masked_log_prob="keep", **options)
    for minibatch in pipeline.run(batch, epochs=2).minibatches():
        found.append([value.clone() for value in tensors(minibatch)])
        for value in tensors(minibatch) if edits else ():
            value.copy_(torch.zeros_like(value))
    return found, batch


@pytest.mark.parametrize("kind", ["small", "large", "ragged"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_an_edit_in_place_changes_nothing_else(kind, shuffle, minibatches):
    options = {"shuffle": shuffle, "minibatches": minibatches}
    expected, _ = taken(kind, options, edits=False)
    found, batch = taken(kind, options, edits=True)
    assert len(found) == len(expected) == 2 * minibatches
    for now, before in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors(batch), tensors(rows(kind)), strict=True))


def test_a_batch_below_the_limit_is_gathered_at_once_and_a_larger_one_by_minibatch():
    """Then minibatches are parts of one tensor, or each has its own."""
    half = torch.zeros(16, SMALL // 32, dtype=torch.uint8)
    for width, rows in ((SMALL // 32 - 1, 16), (SMALL // 32, 4)):
        batch = TensorDict({"x": half, "a": {"b": half[:, :width].clone()}}, batch_size=[16])
        pipeline = Pipeline({"split": ShuffleSplit(minibatches=4, unit="sample")})
        for part in pipeline.minibatches(batch):
            assert part["x"].untyped_storage().nbytes() == rows * SMALL // 32
