"""The table has the rows of all ranks, and makes changes of tokens when rows are gathered."""

from __future__ import annotations

import math
import re
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.transforms import BatchError, Rows
from headrace.transforms.table import Alone, Table, unknown
from headrace.transforms.table.fates import Fates
from headrace.transforms.table.masking import Masking, Tokens
from headrace.transforms.table.tensordicts import number_of
from headrace.transforms.table.tokens import tokens_of_all_ranks

# -- rows of several ranks --------------------------------------------------------------------------------


class Among(Alone):
    """One of several ranks, which knows the values of all ranks."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.values: list[torch.Tensor] = []

    def gather_rows(self, values, counts):
        assert torch.equal(values, self.values[self.rank])
        assert counts == list(map(len, self.values))
        return torch.cat(self.values)


def shared(rank: int, came: list[int], carried: list[int] | None) -> Table:
    """The table of a rank. Each rank has as many rows that came, and then as many that were carried."""
    table = Table(None, 0)
    table.ranks = Among(rank, len(came))
    table.begin([0, *accumulate(came)])
    if carried is not None:
        first = table.size
        table.starts.append([first + before for before in (0, *accumulate(carried))])
        table.size = first + sum(carried)
        table.every, table.fates = torch.arange(table.size), Fates(table.size)
        table.live = torch.cat([table.every[a:b] for a, b in table.spans(rank)])
        table.kept = table.fates.here
    return table


COUNTS = st.lists(st.integers(0, 3), min_size=3, max_size=3)


@settings(max_examples=30)
@given(came=COUNTS, carried=st.none() | COUNTS, data=st.data())
def test_each_row_of_the_table_has_a_rank(came, carried, data):
    """A list of the rank of each row is compared, for each of the three ranks."""
    owner = [
        rank for counts in (came, carried or []) for rank, count in enumerate(counts) for _ in range(count)
    ]
    chosen = data.draw(st.lists(st.booleans(), min_size=len(owner), max_size=len(owner)))
    for rank in range(3):
        table, flags = shared(rank, came, carried), torch.tensor(chosen, dtype=torch.bool)
        own = [row for row, of in enumerate(owner) if of == rank]
        assert table.rank_of_rows().tolist() == owner
        assert [row for a, b in table.spans(rank) for row in range(a, b)] == own == table.live.tolist()
        assert table.of_this_rank(table.every * 10).tolist() == [10 * row for row in own]
        some = [row for row, there in enumerate(chosen) if there]
        part = table.of_this_rank(
            torch.tensor(some, dtype=torch.int64) * 10, torch.tensor(some, dtype=torch.int64)
        )
        assert part.tolist() == [10 * row for row in own if chosen[row]]
        assert table.row_numbers().tolist() == [
            own.index(row) if row in own else 0 for row in range(len(owner))
        ]
        by_rank = [[row for row in some if owner[row] == other] for other in range(3)]
        assert [each.tolist() for each in table.indices_by_rank(flags)] == by_rank
        assert (
            table.carried is None
            if carried is None
            else table.carried.tolist() == list(range(sum(came), len(owner)))
        )
        table.fates.leave(~flags, "gone", "dropped")
        assert [each.tolist() for each in table.rows_of_ranks()] == by_rank
        table.kept = table.fates.here  # the batch of each rank has these rows
        for nothing, kind in ((math.nan, torch.float64), (-1, torch.int64), (False, torch.bool)):
            values = (table.every % 2 + 1).to(kind)
            table.ranks.values = [values[rows] for rows in by_rank]
            found = table.from_batch(values[by_rank[rank]])
            expected = torch.tensor(
                [float(values[row]) if chosen[row] else float(nothing) for row in range(len(owner))]
            )
            assert str(found.tolist()) == str(expected.to(kind).tolist())
        wide = table.every[:, None] * torch.tensor([1, 2])
        table.ranks.values = [wide[rows] for rows in by_rank]
        assert table.from_batch(wide[by_rank[rank]]).tolist() == [
            [row, 2 * row] if chosen[row] else [-1, -1] for row in range(len(owner))
        ]


class InTurn(Among):
    """A rank that gets what the ranks gather in each call."""

    def __init__(self, rank: int, calls: list[list[torch.Tensor]]):
        super().__init__(rank, len(calls[0]))
        self.calls = iter(calls)

    def gather_rows(self, values, counts):
        self.values = next(self.calls)
        return super().gather_rows(values, counts)


def test_token_columns_of_all_ranks_are_as_wide_as_the_widest():
    one = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0, 5.0]])]  # of rank 0 and of rank 1
    widths = [torch.tensor([[1.0], [1.0]], dtype=torch.float64), torch.tensor([[3.0]], dtype=torch.float64)]
    padded = [torch.tensor([[1.0, 9, 9], [2, 9, 9]]), one[1]]
    wide = [torch.cat([each, -torch.where(each == 9, -9, each)], 1) for each in padded]
    for rank in range(2):
        table = shared(rank, [2, 1], None)
        table.ranks = InTurn(rank, [widths, wide])
        found = tokens_of_all_ranks(Rows(table, {}), one[rank], -one[rank], fill=9.0)
        assert found[0].tolist() == [[1.0, 9.0, 9.0], [2.0, 9.0, 9.0], [3.0, 4.0, 5.0]]
        assert found[1].tolist() == [[-1.0, 9.0, 9.0], [-2.0, 9.0, 9.0], [-3.0, -4.0, -5.0]]
        nothing = [torch.empty(2, 0), torch.empty(1, 0)]
        table.ranks = InTurn(rank, [[each * 0 for each in widths], nothing])
        assert [each.shape[1] for each in tokens_of_all_ranks(Rows(table, {}), nothing[rank])] == [0]
    alone = tokens_of_all_ranks(Rows.of(turn=[1, 2]), one[0])
    assert alone[0] is one[0]


def test_one_rank_has_all_rows():
    table = Table(None, 3)
    assert table.rank_of_rows().tolist() == [0, 0, 0]
    assert table.row_numbers().tolist() == table.rows_of_ranks()[0].tolist() == [0, 1, 2]
    assert (table.carried, len(table.fates)) == (None, 3)
    table.fates.leave(torch.tensor([False, True, False]), "gone", "carried")
    assert (table.rows_of_ranks()[0].tolist(), len(table.fates)) == ([0, 2], 2)
    assert unknown(torch.ones(1, 2), 2).tolist() == [[-1.0, -1.0]] * 2
    assert Alone().send_object("it", 0) == "it"
    assert Alone().gather_objects("it") == ["it"]


def test_columns_of_up_to_sixteen_numbers_are_read_ahead():
    batch = TensorDict({name: torch.ones(2, width) for name, width in (("a", 1), ("b", 16), ("c", 17))}, [2])
    rows = Rows.read(batch, keys=["a", "b", "c", "d", None])
    assert {"a", "b"} == rows.table.columns.keys() & {*"abcd"}
    assert rows["c"].shape == (2, 17)


# -- changes that are made when rows are gathered ----------------------------------------------------------


def with_late_change(count: int) -> Rows:
    """Rows whose column ``x`` is later multiplied by their number. Rows 1, 4, 7, … have left."""
    batch = TensorDict({"x": torch.ones(count, 2), "y": torch.zeros(count)}, batch_size=[count])
    rows = Rows.read(batch)
    rows.leave(torch.arange(count) % 3 == 1, "gone", "dropped")

    def change(some, numbers):
        some["x"] = some["x"] * numbers["number"][:, None]

    seen = rows.seen_by(object())
    seen.when_gathered(change, ["x"], number=seen.from_arrival(torch.arange(count)))
    return seen


@pytest.mark.parametrize(("count", "parts"), [(0, 1), (1, 1), (3, 2), (24, 16), (25, 9), (49, 11)])
def test_late_changes_in_parts_are_those_of_all_rows(count, parts):
    """Two thirds of the rows are left. At most sixteen parts have them."""
    expected = [[float(row)] * 2 for row in range(count) if row % 3 != 1]
    rows = with_late_change(count)
    made = [part["x"].tolist() for part in rows.table.decided_in_parts()]
    assert len(made) == parts
    assert sum(made, []) == expected  # noqa: RUF017
    assert rows.table.decided_between(slice(1, 3))["x"].tolist() == expected[1:3]
    assert rows.table.as_decided()["x"].tolist() == expected
    assert rows.write()["x"].tolist() == expected
    assert rows.table.batch["x"].tolist() == [[1.0, 1.0]] * len(expected), "the change was made early"


def test_a_late_change_is_made_once_a_stage_reads_its_column():
    rows = with_late_change(3)
    assert [rows.table.is_late(key) for key in ("x", "y", None)] == [True, False, False]
    assert rows["y"].tolist() == [0.0, 0.0]
    assert rows.table.late
    assert rows["x"].tolist() == [[0.0, 0.0], [2.0, 2.0]]
    assert (rows.table.late, rows.table.is_late("x")) == ([], False)
    assert rows.write()["x"].tolist() == [[0.0, 0.0], [2.0, 2.0]]
    with_late_change(3).tokens()["x"].tolist()
    assert with_late_change(3).token_column("x").tolist() == [[0.0, 0.0], [2.0, 2.0]]


def test_columns_are_restored_at_the_end_of_a_block():
    rows = with_late_change(3)
    rows["z"] = torch.ones(2)
    with rows.table.restoring_columns():
        rows["z"] = torch.zeros(2)
        rows["w"] = torch.zeros(2)
        rows.table.late.clear()
    assert (rows["z"].tolist(), rows.has("w"), len(rows.table.late)) == ([1.0, 1.0], False, 1)
    assert {*rows.table.written} == {"z"}


def test_columns_that_a_stage_has_changed_are_read_again():
    rows = with_late_change(4)
    rows["z"] = torch.ones(3)
    batch = rows.tokens()
    assert (rows["y"].tolist(), batch["x"].tolist()) == ([0.0] * 3, [[0.0, 0.0], [2.0, 2.0], [3.0, 3.0]])
    batch["y"] = torch.tensor([5.0, 6.0, 7.0])
    rows.table.accept(batch)
    assert rows["y"].tolist() == [5.0, 6.0, 7.0]
    assert rows["z"].tolist() == [1.0, 1.0, 1.0]  # only the table has this column
    assert rows.table.columns["y"].isnan().tolist() == [False, True, False, False]
    said = "a stage must return the 3 rows that have not left; it returned 2. Take rows out with rows.leave"
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        rows.table.accept(batch[:2])
    assert rows.table.measure("size", torch.tensor([1, 2, 3])).tolist() == [1, -1, 2, 3]
    assert rows["size"].tolist() == [1, 2, 3]
    assert rows.dtype("size") is torch.int64


# -- tokens that are stored elsewhere -----------------------------------------------------------------------

MASK, LOG_PROB = ("masks", "m"), ("log_probs", "full")


@pytest.mark.parametrize("counts", [[3, 4], [[3, 2], [4, 4]]])
def test_rows_whose_tokens_are_elsewhere_are_masked_in_their_counts(counts):
    masking = Masking(elsewhere=True)
    batch = TensorDict({number_of(MASK): torch.tensor(counts)}, batch_size=[2])
    assert masking.note(batch, MASK, LOG_PROB, torch.tensor([True, False]))
    assert list(masking.columns) == [MASK, LOG_PROB]
    masking.mask(batch, torch.tensor([True, False]))
    assert batch[number_of(MASK)].tolist() == [0 if counts[0] == 3 else [0, 0], counts[1]]
    assert not masking.note(batch.exclude("headrace"), MASK, LOG_PROB, torch.tensor([True, False]))
    assert [(each.elsewhere, each.no_lengths) for each in (Masking(), Masking(no_lengths=True))] == [
        (False, False),
        (True, True),
    ]


def test_under_keep_only_the_loss_mask_is_masked():
    masking = Masking()
    batch = TensorDict({MASK: torch.ones(2, 3).bool(), LOG_PROB: torch.zeros(2, 3)}, batch_size=[2])
    out = torch.tensor([True, False])
    assert masking.note(batch, MASK, LOG_PROB, out)
    assert list(masking.columns) == [MASK, LOG_PROB]
    assert not Masking().note(batch.exclude(MASK), MASK, LOG_PROB, out)
    keeps = Masking()
    keeps.kept_finite = Tokens(MASK, LOG_PROB, ())
    assert keeps.note(batch, MASK, LOG_PROB, out)
    keeps.mask(batch, out)
    assert batch[MASK].any(1).tolist() == [False, True]
    assert batch[LOG_PROB].isfinite().all()
    assert not keeps.note(batch.exclude("masks"), MASK, LOG_PROB, out & False)
    said = (
        "1 row must be masked out of the loss, but the batch has no ('masks', 'm') (loss_mask_key), the "
        "only mask "
        "under masked_log_prob='keep', so they would still train; it has [('log_probs', 'full')]. Set the "
        "keys, or "
        "drop the rows"
    )
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        keeps.note(batch.exclude("masks"), MASK, LOG_PROB, out)


# -- fates -------------------------------------------------------------------------------------------------


def test_carried_rows_are_appended_with_their_reasons():
    """A reason that no stage has registered is one of the pipeline that carried the rows."""
    fates = Fates(3)
    fates.leave(torch.tensor([True, False, False]), "filter/low", "masked")
    fates.leave(torch.tensor([True, False, True]), "gone", "dropped")
    flags = torch.tensor([False, True, False, False])
    fates.extend(
        ["filter/low", "trained", "old/out", "old/low"], flags, torch.tensor([True, True, False, True])
    )
    assert fates.reasons_of(torch.arange(7)) == [
        *("filter/low", "trained", "gone", "filter/low", "trained", "old/out", "old/low")
    ]
    assert list(zip(fates.names, fates.effects, strict=True)) == [
        *(("trained", "trained"), ("filter/low", "masked"), ("gone", "dropped")),
        *(("old/out", "excluded"), ("old/low", "masked")),
    ]
    assert fates.in_loss.tolist() == [False, True, False, False, True, False, False]
    assert fates.counts.tolist() == [True, True, True, True, True, False, True]
    assert fates.index.tolist() == [1, 3, 4, 5, 6]
    assert len(fates) == 5


def test_a_batch_says_which_rows_are_out_of_the_loss_and_the_statistics():
    fates = Fates(3)
    fates.came(None, None)
    assert (fates.masks, fates.excludes, fates.counted) == (False, False, None)
    fates.came(torch.tensor([True, False, True]), torch.ones(3).bool())
    assert (fates.in_loss.tolist(), fates.masks, fates.excludes) == ([True, False, True], True, True)
    assert fates.counted is None
    fates.came(torch.tensor([False, True, True]), torch.tensor([True, True, False]))
    fates.came(None, torch.tensor([False, True, True]))
    assert (fates.in_loss.tolist(), fates.counted.tolist()) == ([False, False, True], [False, True, False])
    fates.let_vote(torch.tensor([False, False, True]), "votes")
    assert (fates.in_loss.any(), fates.votes_only.tolist()) == (False, [False, False, True])
    assert fates.reasons_of(torch.tensor([2, 0])) == ["votes", "trained"]
    assert fates.here.all()
    said = "rows that leave for 'votes' are dropped; give those that are masked another reason"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        fates.register("votes", "masked")
