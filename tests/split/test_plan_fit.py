"""With a token budget and without padding, ranks drop as few units as possible, from the end of the batch."""

from __future__ import annotations

import pytest
import torch
from budgets import run_budget
from cutting import cut_alone
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import results_in_threads
from tensordict import TensorDict

from headrace.transforms import BatchError, ShuffleSplit, assign_rows
from headrace.transforms.table.schema import MICROBATCH, MINIBATCH, RANK

pytestmark = pytest.mark.slow

ATTENTION = ("masks", "all_attention_mask")
ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=20)


def batch_of(rows) -> TensorDict:
    lengths = torch.tensor([tokens for _, tokens in rows])
    columns = {"rollout_id": torch.tensor([unit for unit, _ in rows]), "row": torch.arange(len(rows))}
    return TensorDict(columns | {ATTENTION: torch.arange(12) < lengths[:, None]}, batch_size=[len(rows)])


def by_unit(rows) -> list[list[int]]:
    """The row numbers of each unit. Units are in the order of their first rows."""
    units: dict[int, list[int]] = {}
    for row, (unit, _) in enumerate(rows):
        units.setdefault(unit, []).append(row)
    return list(units.values())


def longest_start(units, rows, **how) -> list[int]:
    """The reference: drop one unit after another until no micro-batch is empty."""
    for count in range(len(units), 0, -1):
        kept = [row for unit in units[:count] for row in unit]
        assigned = assign_rows(torch.tensor([rows[row][1] for row in kept]), **how)
        if all(len(microbatch) for passes in assigned for microbatch in passes):
            return kept
    return []


@given(ROWS, st.integers(1, 4), st.integers(3, 20))
def test_whole_units_are_dropped_until_no_micro_batch_is_empty(rows, ranks, max_tokens):
    how = {"ranks": ranks, "max_tokens": max_tokens}
    split = ShuffleSplit(minibatches=1, shuffle=False, remainder="drop", **how)
    expected = longest_start(by_unit(rows), rows, **how)
    if not expected:
        with pytest.raises(BatchError, match=rf"would drop all {len(rows)} rows"):
            cut_alone(split, batch_of(rows))
        return
    out, verdict, *_ = cut_alone(split, batch_of(rows))
    assert sorted(out["row"].tolist()) == sorted(expected)
    assert (verdict == 0).nonzero().flatten().tolist() == sorted(expected)
    assert verdict.max() <= 1
    place = torch.stack([out.get(RANK, torch.zeros(len(out), dtype=torch.int64)), out[MICROBATCH]], 1)
    counts = [len(place[place[:, 0] == rank].unique(dim=0)) for rank in range(ranks)]
    assert len(set(counts)) == 1
    for number in place.unique(dim=0):
        held = out[(place == number).all(1)]
        assert len(held) == 1 or int(held[ATTENTION].sum()) <= max_tokens


def test_a_minibatch_without_rows_makes_no_optimiser_step():
    """Rollout 2 has one row for two ranks. The other rollouts fill a minibatch."""
    rows = [(0, 4), (1, 4), (2, 4)]
    split = ShuffleSplit(minibatches=None, minibatch_size=2, max_tokens=4, ranks=2, remainder="drop")
    out, _, measured, *_ = cut_alone(split, batch_of(rows))
    assert (measured["minibatches"], measured["left"]) == (1, 1)
    assert out[MINIBATCH].tolist() == [0, 0]
    rows += [(2, 4)]
    fanned = ShuffleSplit(minibatches=3, max_tokens=4, ranks=2, remainder="drop", shuffle=False)
    out = cut_alone(fanned, batch_of(rows)).batch
    assert out["rollout_id"].tolist() == [2, 2]
    assert out[MINIBATCH].tolist() == [0, 0]


def test_ranks_with_own_rows_agree_on_dropped_units():
    first, second = results_in_threads(run_budget, 2)
    for mine, number in ((first, 0), (second, 3)):
        (rollouts, _, _, microbatch), verdict = mine["equal counts"]
        assert sorted(rollouts) == [number, number + 1, number + 2]
        assert (microbatch, verdict) == ([0, 0, 1], [0, 0, 0])
    # The second rank's two rows make at most two micro-batches, so the first rank keeps its first two rows.
    assert first["one has few rows"] == ([[0, 1], [9, 9], [0, 0], [0, 1]], [0, 0, 1, 1, 1])
    assert second["one has few rows"] == ([[5, 6], [1, 1], [0, 0], [0, 1]], [0, 0])
    # The first rank has three micro-batches, the second two: the first drops a whole rollout, of three rows.
    rollouts, lengths, minibatch, microbatch = first["one has long rollouts"][0]
    assert (rollouts, lengths, minibatch) == ([0, 0, 0], [5, 5, 5], [0, 0, 0])
    assert sorted(microbatch) == microbatch
    assert set(microbatch) == {0, 1}
    assert first["one has long rollouts"][1] == [0, 0, 0, 1, 1, 1]
    assert second["one has long rollouts"] == ([[2, 3], [9, 9], [0, 0], [0, 1]], [0, 0])
    assert "would drop all" in first["all rows would be dropped"]
    assert "would drop all" in second["all rows would be dropped"]
