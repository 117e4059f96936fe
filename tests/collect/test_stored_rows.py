"""Rows are packed into parts for Ray's object store."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from headrace.pipeline.collect.stored_rows import (
    LEAST_BYTES,
    MOST_PARTS,
    cut_by_group,
    pack_rows,
    unpack_rows,
)


def test_each_group_is_in_one_part_and_each_row_at_its_numbers():
    group = torch.randint(0, 40, (200,), generator=torch.Generator().manual_seed(0))
    x = torch.arange(200 * LEAST_BYTES // 8).view(200, -1)
    parts, places = cut_by_group(TensorDict({"x": x, "group_id": group}, batch_size=[200]), group)
    assert len(parts) == MOST_PARTS
    assert all(len(places[group == number, 0].unique()) == 1 for number in group.unique())
    assert all(parts[part]["x"][row].equal(x[number]) for number, (part, row) in enumerate(places.tolist()))


def test_a_small_batch_is_one_part():
    parts, _ = cut_by_group(TensorDict({"x": torch.ones(9)}, batch_size=[9]), torch.arange(9))
    assert len(parts) == 1


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64, torch.complex64]


@pytest.mark.parametrize("ragged", [False, True])
def test_packed_rows_are_the_same_rows_in_their_own_memory(ragged):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    numbers = torch.arange(24).view(4, 6)
    columns = {str(dtype): numbers.to(dtype) for dtype in DTYPES}
    columns |= {"every second": numbers[:, ::2], "conj": numbers.to(torch.complex64).conj()}
    rows = TensorDict(
        {**columns, "none": torch.ones(4, 0), "text": list("abcd"), ("next", "x"): numbers[:, :1]}, [4]
    )
    if ragged:
        rows = lazy_stack([row.clone().set("x", torch.ones(n)) for n, row in enumerate(rows.unbind(0))])
    packed = pack_rows(rows)
    before = packed.copy()
    again = unpack_rows(packed)
    assert type(again) is type(rows)
    for row, expected in zip(again.unbind(0), rows.unbind(0), strict=True):
        assert set(row.keys(True, True)) == set(expected.keys(True, True))
        assert all(
            row[key] == value if key == "text" else torch.equal(row[key], value)
            for key, value in expected.items(True, True)
        )
    again["torch.int64"].add_(1) if not ragged else again[0]["torch.int64"].add_(1)
    assert (packed == before).all()
