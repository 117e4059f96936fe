"""Rows in Ray's object store."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from headrace.pipeline.collect.stored_rows import LEAST_BYTES, MOST_PARTS, cut_by_group


def test_each_group_is_in_one_part_and_each_row_where_its_numbers_say():
    group = torch.randint(0, 40, (200,), generator=torch.Generator().manual_seed(0))
    x = torch.arange(200 * LEAST_BYTES // 8).view(200, -1)
    parts, places = cut_by_group(TensorDict({"x": x, "group_id": group}, batch_size=[200]), group)
    assert len(parts) == MOST_PARTS
    assert all(len(places[group == number, 0].unique()) == 1 for number in group.unique())
    assert all(parts[part]["x"][row].equal(x[number]) for number, (part, row) in enumerate(places.tolist()))


def test_few_bytes_are_one_part():
    parts, _ = cut_by_group(TensorDict({"x": torch.ones(9)}, batch_size=[9]), torch.arange(9))
    assert len(parts) == 1
