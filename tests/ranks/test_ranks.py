"""Ranks exchange their tables: every rank gets the rows of all ranks. Threads play the ranks."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from rank_threads import on_ranks
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, CompletenessGate, GroupRelativeAdvantage, take_rows
from headrace.transforms.ranks import Ranks
from headrace.transforms.table import Rows

TOKENS, MASK, LOG_PROB = ("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")
NAN, INF = float("nan"), float("inf")
KEYS = ("group_id", "rollout_id", ("next", "reward"), "half", "flag", "pair", "byte")


def whole_batch() -> TensorDict:
    """Seven rows. Their columns have several dtypes and shapes, and values that a float would round."""
    columns = {
        "group_id": torch.tensor([7, 7, 2**62 + 1, 3, 3, 2**62 + 1, 9]),
        "rollout_id": torch.tensor([[0], [1], [2], [3], [-1], [5], [6]]),
        ("next", "reward"): torch.tensor([[0.1], [NAN], [-0.0], [INF], [1e-40], [2.5], [-3.0]]),
        "half": torch.tensor([0.5, 1.5, NAN, 3.5, 4.5, 5.5, 6.5], dtype=torch.float16),
        "flag": torch.tensor([True, False, True, True, False, False, True]),
        "pair": torch.tensor([[k, 10.0 + k] for k in range(7)], dtype=torch.float64),
        "byte": torch.arange(250, 257).clamp_max(255).to(torch.uint8),
        TOKENS: torch.arange(21).view(7, 3),
        MASK: torch.arange(3) < torch.tensor([1, 2, 3, 0, 1, 2, 3])[:, None],
        LOG_PROB: torch.tensor([[-1.0, NAN, -1.0]] * 7),
    }
    return TensorDict(columns, batch_size=[7])


PARTS = {
    "one rank": [range(7)],
    "uneven": [range(2), range(2, 7)],
    "the first without": [range(0), range(7)],
    "one with rows": [range(0), range(7), range(0)],
    "mixed": [range(5, 7), range(0), range(1), range(1, 5)],
}


def part_of(batch: TensorDict, rows: range) -> TensorDict:
    return take_rows(batch, torch.tensor(rows)) if len(rows) else TensorDict({}, batch_size=[0])


def bits(column: torch.Tensor) -> list:
    return [repr(value) for value in column.flatten().tolist()]


class EqualColumns(Ranks):
    """Ranks with rows and equal columns send no descriptions of them."""

    def gather_objects(self, value):
        raise AssertionError("a third collective")


@pytest.mark.parametrize("how", PARTS)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_rank_reads_the_table_of_all_rows(how, ragged):
    """Every column, with its bits, its dtype and its shape; and which rows are of which rank.

    A batch without rows has no columns, or (if not `ragged`) only those of the table.
    """
    batch, parts = whole_batch(), PARTS[how]
    order = torch.tensor([row for part in parts for row in part])
    counted = [(MASK, LOG_PROB)]
    expected = Rows.read(take_rows(batch, order), keys=KEYS, tokens=counted).table

    def read(group):
        own = part_of(batch, parts[group.rank])
        own = lazy_stack(list(own.unbind(0))) if ragged and len(own) else own
        own = own if ragged or len(own) else batch[:0].exclude(TOKENS)
        of_parts = Ranks if range(0) in parts else EqualColumns
        ranks = of_parts(group, "same", 9.0, {"group_id": "group_id"})
        rows = Rows.read(own, keys=KEYS, tokens=counted, ranks=ranks, about=lambda: "the same")
        return rows.table, rows.table.from_batch(torch.arange(len(own)) + 100.0 * group.rank)

    for rank, (table, numbers) in enumerate(on_ranks(read, len(parts))):
        assert table.columns.keys() == expected.columns.keys()
        for key, column in expected.columns.items():
            assert (table.columns[key].dtype, table.columns[key].shape) == (column.dtype, column.shape), key
            assert bits(table.columns[key]) == bits(column), key
        assert table.dtypes == expected.dtypes
        ends = [sum(map(len, parts[:end])) for end in range(len(parts) + 1)]
        assert table.starts == [ends]
        owned = [list(range(start, end)) for start, end in pairwise(ends)]
        assert [rows.tolist() for rows in table.rows_of_ranks()] == owned
        assert numbers.tolist() == [100.0 * r + k for r, part in enumerate(parts) for k in range(len(part))]
        assert table.ranks.rank == rank
        assert len(table.batch) == len(parts[rank])
        assert set(table.batch.keys(True, True)) == set(batch.keys(True, True))
        for key in batch.keys(True, True):
            assert table.batch[key].dtype == batch[key].dtype
            assert table.batch[key].shape[1:] == batch[key].shape[1:]


@pytest.mark.parametrize(("rows", "keys", "together"), [(0, KEYS, (0, 1)), (2, (), (4, 2))])
def test_ranks_without_any_row_or_column_read_a_table_of_the_rows(rows, keys, together):
    def read(group):
        return Rows.read(TensorDict({}, batch_size=[rows]), keys=keys, ranks=Ranks(group)).table

    for table in on_ranks(read, 2):
        assert ((table.size, table.ranks.size), table.columns) == (together, {})


def messages(function, world: int, *more) -> list[str]:
    """The error of each rank; empty if it has none."""

    def attempt(group):
        try:
            function(group, *more)
        except BatchError as err:
            return re.sub(r"^rank \d: ", "", str(err))  # the rank whose error came first
        return ""

    return on_ranks(attempt, world)


def without(*keys):
    return lambda batch: batch.exclude(*keys)


def with_other(key, dtype):
    return lambda batch: batch.set(key, batch[key].to(dtype))


def wider(key):
    return lambda batch: batch.set(key, batch[key].view(len(batch), -1).expand(-1, 2).contiguous())


ODD = {
    "lacks": (without("group_id", "flag"), "lacks flag, group_id"),
    "dtype": (with_other("half", torch.float32), "has others in half"),
    "of the count": (with_other(("next", "reward"), torch.float64), "has others in ('next', 'reward')"),
    "several": (
        lambda batch: with_other("byte", torch.int64)(with_other("half", torch.float64)(batch)),
        "has others in byte, half",
    ),
}


@pytest.mark.parametrize(("change", "found"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("odd", [1, 2])
def test_columns_that_differ_are_refused_by_the_rank_that_differs_from_the_first(change, found, odd):
    parts = [range(0), range(3), range(3, 7)]
    if odd == 1:  # then the first rank with rows is rank 0
        parts = [range(3), range(3, 7), range(0)]

    def read(group):
        own = part_of(whole_batch(), parts[group.rank])
        own = change(own) if group.rank == odd else own
        Rows.read(own, keys=KEYS, ranks=Ranks(group, "same"))

    needed = "all ranks must have the same columns, with equal dtypes and shapes; rank"
    assert messages(read, 3) == [f"{needed} {odd} {found}"] * 3


def test_a_column_whose_width_differs_is_left_out_if_all_ranks_have_it():
    """A rank with short rows has a narrow column of tokens, which looks like numbers of rows."""

    def read(group, keys):
        own = part_of(whole_batch(), [range(3), range(3, 7)][group.rank])
        own = wider("flag")(own) if group.rank else own
        return Rows.read(own, keys=keys, ranks=Ranks(group, "same")).table

    for table in on_ranks(read, 2, KEYS):
        assert "flag" not in table.columns
        assert table.columns["half"].isnan().tolist() == [False] * 2 + [True] + [False] * 4


def test_a_column_that_one_rank_lacks_and_is_wider_on_another_is_refused():
    def read(group):
        own = part_of(whole_batch(), [range(2), range(2, 4), range(4, 7)][group.rank])
        own = [lambda batch: batch, without("flag"), wider("flag")][group.rank](own)
        Rows.read(own, keys=KEYS, ranks=Ranks(group, "same"))

    said = "all ranks must have the same columns, with equal dtypes and shapes; rank 1 lacks flag"
    assert messages(read, 3) == [said] * 3


def advantages(group, shared_ids, group_size):
    """Two rollouts of group 4 on each rank, with the rewards 0 and 1 on rank 0, and 0 and 3 on rank 1."""
    first, reward = 2 * group.rank, [0.0, 1.0 + 2 * group.rank]
    columns = {"group_id": [4, 4], "rollout_id": [first, first + 1], ("next", "reward"): reward}
    stages = {
        "gate": CompletenessGate(group_size=group_size),
        "advantage": GroupRelativeAdvantage(scale="none"),
    }
    run = Pipeline(stages, process_group=group, shared_ids=shared_ids, patience=9.0).run(
        TensorDict(columns, batch_size=[2])
    )
    return run.batch["advantage"].flatten().tolist()


def test_an_id_on_two_ranks_is_one_group_or_two_or_refused():
    assert on_ranks(advantages, 2, "same", 4) == [[-1.0, 0.0], [-1.0, 2.0]]
    assert on_ranks(advantages, 2, "different", 2) == [[-0.5, 0.5], [-1.5, 1.5]]
    assert (
        messages(advantages, 2, "raise", 2)
        == [
            "group_id 4 on more than one rank: set pipeline.shared_ids=same if it is the same unit on all "
            "ranks, or pipeline.shared_ids=different if each rank has its own ids"
        ]
        * 2
    )
    for refused in messages(advantages, 2, "different", 3):
        assert "2 incomplete groups: group 4 has 2 of 3 (2 completed), group 14 has 2 of 3" in refused


@pytest.mark.parametrize("shared_ids", ["same", "different"])
def test_a_message_says_how_rows_and_ids_of_ranks_are_numbered(shared_ids):
    def refuse(group):
        ranks = Ranks(group, shared_ids, 9.0, {"group_id": "group_id"})
        rows = Rows.read(part_of(whole_batch(), [range(2), range(2, 7)][group.rank]), keys=KEYS, ranks=ranks)
        rows.require(torch.arange(7) != 4, "no row may be wrong; found {found}", lambda at: f"row {at}")

    note = " (Short ids have the number of their rank in front.)" if shared_ids == "different" else ""
    assert messages(refuse, 2) == [
        "no row may be wrong; found row 4 (Rows are numbered over all ranks, from "
        f"{first} on rank {rank}.){note}"
        for rank, first in ((0, 0), (1, 2))
    ]


def test_objects_are_gathered_by_rank_and_sent_by_one_rank():
    def exchange(group):
        ranks = Ranks(group)
        return ranks.gather_objects(("of", group.rank)), ranks.send_object([group.rank], 1)

    assert on_ranks(exchange, 3) == [([("of", 0), ("of", 1), ("of", 2)], [1])] * 3
