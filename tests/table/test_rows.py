"""A view has the values of its rows, writes only its rows, and describes its rows in errors."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.transforms import BatchError, MissingKeyError, Rows
from headrace.transforms.table import Ids, few
from headrace.transforms.table.schema import LENGTH, SEGMENTS

NAN = float("nan")
MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


def rows_of(rollouts, **columns) -> Rows:
    """The table of a batch, with the number of each row in the column ``x``."""
    given = {"rollout_id": torch.tensor(rollouts), "x": torch.arange(len(rollouts))}
    return Rows.read(TensorDict(given | columns, batch_size=[len(rollouts)]))


# -- values ------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), *[st.booleans()] * 3), min_size=1, max_size=8))
def test_a_view_has_the_values_of_its_rows(drawn):
    """Some rows are dropped, some are excluded, and a view has some of the others."""
    ids, gone, out, chosen = map(list, zip(*drawn, strict=True))
    count = len(ids)
    rows = rows_of(ids)
    rows.leave(torch.tensor(out), "out", "excluded", mask_tokens=False)
    rows.leave(torch.tensor(gone), "gone", "dropped")
    seen = rows.seen_by(object())
    here = [row for row in range(count) if not gone[row]]
    own = [row for row in here if chosen[row]]
    for view, some in ((seen, here), (seen.where(torch.tensor([chosen[row] for row in here]).bool()), own)):
        counts = [row for row in some if not out[row]]
        first: dict[int, int] = {}
        for row in counts:
            first.setdefault(ids[row], row)
        values = 10 * view["x"] + 1
        assert (view["x"].tolist(), len(view), [view.at(row) for row in range(len(view))]) == (
            some,
            len(some),
            some,
        )
        assert view.voters["x"].tolist() == sorted(first.values())
        assert view.to_voters(values).tolist() == [10 * row + 1 for row in sorted(first.values())]
        spread = [10 * first[ids[row]] + 1 if row in counts else 0 for row in some]
        assert view.from_voters(view.to_voters(values)).tolist() == spread
        wide = torch.stack([values, -values], 1)
        assert view.from_voters(view.to_voters(wide)).tolist() == [[each, -each] for each in spread]
        assert view.to_arrival(wide)[:, 1].tolist() == view.to_arrival(-values).tolist()
        assert view.to_arrival(values).tolist() == [
            10 * row + 1 if row in some else 0 for row in range(count)
        ]
        assert view.of_this_rank(values).tolist() == values.tolist()
        assert (
            view.counted is None if not any(out) else view.counted.tolist() == [row in counts for row in some]
        )
        assert view.with_excluded["x"].tolist() == some
        assert view.with_excluded.counted is None
        assert view.in_loss.tolist() == [row in counts for row in some]
        assert view.on_arrival["x"].tolist() == list(range(count))
        assert view.on_arrival.counted is None
        both = view.measured(one=torch.arange(count), two=torch.arange(2 * count).view(count, 2))
        assert both["one"].tolist() == some
        assert both["two"].tolist() == [[2 * row, 2 * row + 1] for row in some]
    rows.table.compact()
    assert seen.tokens()["x"].tolist() == here
    assert seen.to_batch(seen["x"]).tolist() == here
    assert seen.from_batch(torch.tensor(here)).tolist() == here


def test_the_first_row_of_a_rollout_that_counts_is_found_again_once_rows_are_excluded():
    rows = rows_of([5, 5, 6])
    assert rows.voters["x"].tolist() == [0, 2]
    rows.leave(torch.tensor([True, False, False]), "out", "excluded", mask_tokens=False)
    assert rows.voters["x"].tolist() == [1, 2]


# A column of the batch that was read (or None), and what is written to rows 0 and 2 of 3 with these options;
# then the column of the new batch, its dtype and its number of dimensions.
F32, F64, I64, I32 = torch.float32, torch.float64, torch.int64, torch.int32
WRITTEN = [
    (None, torch.tensor([0.5, 2.5]), {}, [0.5, NAN, 2.5], F32, 1),
    (None, torch.tensor([0.5, 2.5], dtype=F64), {}, [0.5, NAN, 2.5], F32, 1),
    (None, torch.tensor([0.5, 2.5]).half(), {}, [0.5, NAN, 2.5], torch.float16, 1),
    (None, torch.tensor([4, 5]), {}, [4, 0, 5], I64, 1),
    (None, torch.tensor([4, 5], dtype=I32), {}, [4, 0, 5], I32, 1),
    (None, torch.tensor([True, True]), {}, [True, False, True], torch.bool, 1),
    (None, torch.tensor([4, 5]), {"fill": -1, "ndim": 2}, [4, -1, 5], I64, 2),
    (None, torch.tensor([4, 5]), {"dtype": F64, "ndim": 3}, [4.0, 0.0, 5.0], F64, 3),
    (None, torch.tensor([[1.0, 2], [3, 4]]), {}, [1, 2, NAN, NAN, 3, 4], F32, 2),
    (torch.tensor([[7.0], [8], [9]]), torch.tensor([0.5, 2.5], dtype=F64), {}, [0.5, 8.0, 2.5], F32, 2),
    (torch.tensor([7, 8, 9]), torch.tensor([0.5, 2.5]), {"fill": -1}, [0, 8, 2], I64, 1),
    (torch.tensor([7, 8, 9]), torch.tensor([0.5, 2.5]), {"dtype": F64}, [0.5, 8.0, 2.5], F64, 1),
    (torch.tensor([7.5, 8.5, 9.5]), torch.tensor([4, 5]), {}, [4.0, 8.5, 5.0], F32, 1),
    (torch.tensor([True, True, False]), torch.tensor([4, 0]), {"dtype": I64}, [4, 1, 0], I64, 1),
    (
        torch.tensor([7.0, 8, 9]),
        torch.tensor([[1.0, 2], [3, 4]]),
        {"ndim": 2},
        [1, 2, NAN, NAN, 3, 4],
        F32,
        2,
    ),
]


@pytest.mark.parametrize(("before", "values", "options", "after", "dtype", "ndim"), WRITTEN)
def test_a_written_column_has_the_documented_dtype_and_shape_and_keeps_other_rows(
    before, values, options, after, dtype, ndim
):
    columns = {} if before is None else {"y": before}
    rows = rows_of([0, 1, 2], **columns)
    assert rows.has("y") == (before is not None)
    rows.where(torch.tensor([True, False, True])).put("y", values, **options)
    assert rows.dtype("y") is dtype
    made = rows.write()["y"]
    assert (made.dtype, made.ndim) == (dtype, ndim)
    assert str(made.flatten().tolist()) == str(torch.tensor(after, dtype=dtype).tolist())
    rows.where(torch.tensor([False, True, False]))["y"] = torch.ones_like(
        values[:1]
    )  # the same dtype and shape
    again = rows.write()["y"]
    assert (again.dtype, again.shape) == (made.dtype, made.shape)
    assert torch.equal(again[[0, 2]], made[[0, 2]])
    assert again[1].flatten().tolist() == [1] * (made[1].numel())
    rows["y"] = torch.zeros(3)
    assert (rows.write()["y"].dtype, rows.write()["y"].flatten().tolist()) == (dtype, [0] * 3)


def tokens(*counts: int, ragged: bool = False) -> TensorDict:
    """Rows with as many tokens in the loss."""
    mask = torch.arange(4) < torch.tensor(counts)[:, None]
    batch = TensorDict({MASK: mask, "rollout_id": torch.arange(len(counts))}, batch_size=[len(counts)])
    return lazy_stack([*batch.unbind(0)]) if ragged else batch


@pytest.mark.parametrize("ragged", [False, True])
def test_the_length_of_a_row_is_that_before_it_was_masked_first(ragged):
    rows = Rows.read(tokens(3, 2, 4, 0, ragged=ragged))
    assert rows.lengths.tolist() == [3, 2, 4, 0]
    rows.leave(torch.tensor([True, False, False, False]), "one", "masked")
    rows.table.accept(tokens(1, 1, 4, 0, ragged=ragged))
    rows.leave(torch.tensor([True, True, False, False]), "two", "masked")
    rows.leave(torch.tensor([False, False, False, True]), "three", "masked", mask_tokens=False)
    assert rows[LENGTH].tolist() == [3, 1, -1, -1]
    assert rows.lengths.tolist() == [3, 1, 4, 0]
    assert rows.count("loss_mask").tolist() == [1, 1, 4, 0]
    out = rows.write()
    assert [each[MASK].sum().item() for each in out.unbind(0)] == [0, 0, 4, 0]
    assert [each["headrace", "in_loss"].item() for each in out.unbind(0)] == [False, False, True, False]
    assert rows.table.fates.reasons_of(torch.arange(4)) == ["one", "two", "trained", "three"]


def test_a_rollout_that_lost_rows_keeps_the_number_that_it_had():
    def without(batch, *gone):
        rows = Rows.read(batch)
        rows.leave(torch.isin(rows["x"], torch.tensor(gone)), "gone", "dropped")
        return rows.write()

    batch = TensorDict({"rollout_id": [4, 4, 4, 7, 7, 9], "x": [0, 1, 2, 3, 4, 5]}, batch_size=[6])
    whole = without(batch, 3, 4)
    assert (whole["x"].tolist(), SEGMENTS in whole.keys(True)) == ([0, 1, 2, 5], False)
    once = without(batch, 0)
    assert once[SEGMENTS].tolist() == [3, 3, 2, 2, 1]
    assert without(once, 1, 3)[SEGMENTS].tolist() == [3, 2, 1]
    assert without(once, 5)[SEGMENTS].tolist() == [3, 3, 2, 2]
    assert SEGMENTS not in without(batch.exclude("rollout_id"), 0).keys(True)


# -- errors ------------------------------------------------------------------------------------------------

FIRST = "row 0, row 1, row 2, row 3, row 4, row 5, row 6, row 7"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (1, "1 row: row 0"),
        (2, "2 rows: row 0, row 1"),
        (8, f"8 rows: {FIRST}"),
        (9, f"9 rows: {FIRST} and 1 more"),
        (100, f"100 rows: {FIRST} and 92 more"),
        (101, f"101 rows: {FIRST} and 92 more (the first 100 of 101 rows)"),
    ],
)
def test_an_error_describes_the_first_rows_and_counts_all(bad, said):
    rows, number = rows_of([0] * 120), torch.arange(120)
    rows.require(number >= 0, "never {found}")
    with pytest.raises(BatchError, match=f"^found {re.escape(said)}!$"):
        rows.require(number >= bad, "found {count} row{s}: {found}!")
    later = rows.where(number >= 10)
    shifted = re.sub(r"row (\d)", lambda found: f"row {int(found[1]) + 10}", said)
    with pytest.raises(BatchError, match=f"^found {re.escape(shifted)}!$"):
        later.require(number[10:] >= bad + 10, "found {count} row{s}: {found}!")


def test_an_error_describes_a_unit_by_its_first_bad_row_and_equal_rows_once():
    rows, ok = rows_of([5, 5, 6, 6, 7]), torch.tensor([True, False, False, False, False])
    with pytest.raises(BatchError, match=r"^4 rows: row 1, row 2, row 4$"):
        rows.require(ok, "{count} rows: {found}", unit=Ids(torch.tensor([5, 5, 6, 6, 7])))
    with pytest.raises(BatchError, match=r"^4: odd, even$"):
        rows.require(ok, "{count}: {found}", lambda row: "odd" if row % 2 else "even")


def test_excluded_rows_are_not_checked_except_where_they_count():
    rows, ok = rows_of([5, 6, 7]), torch.tensor([True, False, False])
    rows.leave(torch.tensor([False, True, False]), "out", "excluded", mask_tokens=False)
    with pytest.raises(BatchError, match=r"^row 2$"):
        rows.require(ok, "{found}")
    rows.require(ok | torch.tensor([False, False, True]), "{found}")
    with pytest.raises(BatchError, match=r"^row 1, row 2$"):
        rows.with_excluded.require(ok, "{found}")


UNSET = TensorDict({"group_id": [3, -1, -2], "rollout_id": [4, 5, -1]}, batch_size=[3])
RAGGED = lazy_stack([TensorDict({"t": torch.ones(width)}) for width in (1, 2)])
STAMPED = (
    ". Ids are stamped where rollouts are dispatched: by headrace.pipeline.StampIds if the environment "
    "draws its "
    "own prompts, else by RepeatSampler.draws()"
)
ERRORS = {
    "columns of different lengths": (
        lambda: Rows.of(group=[1, 2], reward=torch.ones(3), turn=None),
        "all columns must have the same length and device; found group_id 2 on cpu, reward 3 on cpu",
    ),
    "several numbers per row": (
        lambda: Rows.of(turn=[1, 2], reward=torch.ones(2, 3)).number("reward"),
        "a stage needs one number per row in 'reward', for 2 rows; found (2, 3)",
    ),
    "a group without an id": (
        lambda: Rows.read(UNSET).groups,
        "every row needs a group_id ≥ 0; found -1 at row 1, -2 at row 2: rows without an id would be "
        "compared "
        "with one another" + STAMPED,
    ),
    "a rollout without an id": (
        lambda: Rows.read(UNSET).where(torch.tensor([False, True, True])).rollouts,
        "every row needs a rollout_id ≥ 0; found -1 at row 2: rows without an id would be taken for one "
        "rollout" + STAMPED,
    ),
    "some rows that need an id": (
        lambda: Rows.read(UNSET).require_set(
            torch.tensor([-1, -7, -1]),
            "unit_id",
            "why",
            who="each",
            needed=torch.tensor([False, True, False]),
        ),
        "each needs a unit_id ≥ 0; found -7 at row 1: why" + STAMPED,
    ),
    "a ragged token column": (
        lambda: Rows.read(RAGGED).token_column("t"),
        "a stage needs dense rows in 't'; found ragged rows",
    ),
    "a column of texts": (
        lambda: Rows.read(TensorDict({"t": ["a", "b"]}, [2])).token_column("t"),
        "a stage needs dense rows in 't'; found NonTensorStack",
    ),
    "a missing column": (
        lambda: Rows.read(TensorDict({"b": [1], "a": [1]}, [1]))["c"],
        "a stage needs the key 'c'; the batch has ['a', 'b']",
    ),
    "a missing column of a role": (
        lambda: Rows.read(TensorDict({"b": [1], "a": [1]}, [1]))["turn_index"],
        "a stage needs the key 'turn_index'; the batch has ['a', 'b']. If it goes by another name, add "
        "'turn_index' to the `columns` of a stage, and set turn_index_key",
    ),
    "a column with an option": (
        lambda: Rows.read(TensorDict({"b": [1]}, [1]))["reward"],
        "a stage needs the key ('next', 'reward') (reward_key); the batch has ['b']. If it goes by another "
        "name, "
        "set reward_key",
    ),
    "the batch": (
        lambda: Rows.read(TensorDict({"b": [1]}, [1]))["batch"],
        "a stage finds no column 'batch': a token column is rows.token_column(KEY), and the batch with its "
        "tokens "
        "is rows.tokens()",
    ),
    "a column of an earlier stage": (
        lambda: Rows.read(TensorDict({"b": [1]}, [1]))["headrace", "return"],
        "a stage needs the column ('headrace', 'return'), written by RewardsToGo: put RewardsToGo before it",
    ),
    "tokens in the loss": (
        lambda: Rows.read(TensorDict({"b": [1]}, [1])).count("loss_mask", finite=True),
        "tokens in the loss are those of the mask ('masks', 'all_assistant_mask') (loss_mask_key), or of a "
        "response after its prompt: ('tokens', 'prompt') and ('tokens', 'response'), together as wide as "
        "('masks', "
        "'all_attention_mask'). Finite log-probabilities do not say which tokens train, because those of a "
        "scored "
        "prompt are finite too. Write the mask into the batch, True where a token trains; it has ['b']",
    ),
    "no column to mask": (
        lambda: Rows.read(TensorDict({"b": [1, 2]}, [2])).leave(torch.ones(2).bool(), "out", "masked"),
        "2 rows must be masked out of the loss, but the batch has neither ('masks', 'all_assistant_mask') "
        "(loss_mask_key) nor ('log_probs', 'full') (log_prob_key), so they would still train; it has ['b']. "
        "Set "
        "the keys, or drop the rows",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_is_needed_and_what_the_batch_has(name):
    call, said = ERRORS[name]
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$") as refused:
        call()
    missing = name.startswith(("a missing", "the batch", "a column with", "a column of an", "tokens"))
    assert isinstance(refused.value, MissingKeyError) == missing


def test_rows_of_plain_columns_have_the_names_of_their_roles():
    rows = Rows.of(group=["a", "b", "a"], reward=torch.tensor([1.0, 2.0, 4.0]), turn=[2, 0, 1], rollout=None)
    assert rows.groups.spread(rows.groups.sum(rows["reward"])).tolist() == [5.0, 2.0, 5.0]
    assert rows["turn"].tolist() == [2, 0, 1]
    assert rows.rollouts.of.tolist() == [0, 1, 2]  # without ids, each row is a rollout
    assert rows.name("rollout", 1) == "1"
    assert rows["turn"].dtype is torch.int64


@pytest.mark.parametrize(
    ("values", "most", "said"),
    [
        (range(8), 8, "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (range(9), 8, "[0, 1, 2, 3, 4, 5, 6, 7] and 1 more"),
        (range(4), 3, "[0, 1, 2] and 1 more"),
        ([], 3, "[]"),
    ],
)
def test_the_first_values_are_shown_and_the_others_counted(values, most, said):
    assert few(torch.tensor([*values], dtype=torch.int64), most) == few([*values], most) == said
    assert most != 8 or few([*values]) == said


def test_a_status_is_read_from_the_first_column_that_is_found():
    batch = TensorDict({("next", "status"): [1, 2], "status": [3, 0], "mine": [0, 1]}, batch_size=[2])
    assert Rows.read(batch).status.tolist() == [1, 2]
    assert Rows.read(batch.exclude(("next", "status"))).status.tolist() == [3, 0]
    assert Rows.read(batch.select("mine")).status is None
    assert Rows.read(batch).seen_by(SimpleNamespace(status_key="mine")).status.tolist() == [0, 1]
    with pytest.raises(BatchError, match=r"^status must be integers, got torch\.float64"):
        _ = Rows.read(TensorDict({"status": [1.0]}, batch_size=[1])).status


def test_a_tuple_of_one_name_is_a_key_and_a_name_may_be_a_role():
    batch = TensorDict({"turn": [1, 2], "mine": [3, 4], ("a", "b"): [5, 6]}, batch_size=[2])
    rows = Rows.read(batch).seen_by(SimpleNamespace(turn_key="mine"))
    assert [rows[name].tolist() for name in ("turn", ("turn",), "mine", ("a", "b"))] == [
        *([3, 4], [1, 2], [3, 4], [5, 6])
    ]
    assert (rows.key("turn"), rows.key(("turn",)), rows.key(("a", "b")), rows.key("status")) == (
        *("mine", "turn", ("a", "b"), None),
    )
