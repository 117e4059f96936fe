"""Rows and columns of a batch are taken, written, masked and counted alike in every form of a batch."""

from __future__ import annotations

import math
import re

import pytest
import torch
from batches import batch_of, no_rows
from fake_device import DEVICE, FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_leaf_nontensor,
    lazy_stack,
    tensorclass,
)

from headrace.transforms import BatchError, take_rows
from headrace.transforms.table import schema
from headrace.transforms.table.tensordicts import (
    WIDE,
    any_row_has,
    as_texts,
    bits_of,
    column_of,
    count_in_loss,
    deep_copy,
    describe_columns,
    device_of,
    fill_out_of_loss,
    leave_out,
    leaves_of,
    listed,
    loss_mask_of,
    mask_tokens_of,
    number_column,
    number_of,
    of_bits,
    read_packed,
    rows_between,
    same_column,
    send_packed,
    shallow_copy,
    write_column,
)

NAN, INF = float("nan"), float("inf")


def row(number: int, width: int = 3) -> TensorDict:
    """One row with a number, nested tokens and a text."""
    inside = TensorDict({"full": torch.arange(width) + 10 * number, "real": torch.ones(width).bool()}, [])
    return TensorDict({"tokens": inside, "number": torch.tensor(number), "text": f"row {number}"}, [])


def of_form(form: str) -> TensorDict:
    """Four rows, in one of the forms of a batch."""
    if form == "ragged":
        return lazy_stack([row(number, 1 + number) for number in range(4)])
    batch = lazy_stack([row(number) for number in range(4)]).contiguous()
    if form == "named":
        batch.names = ["rows"]
    return batch if form != "without text" else batch.exclude("text")


FORMS = ("dense", "without text", "named", "ragged")
forms = pytest.mark.parametrize("form", FORMS)


def content(batch: TensorDict) -> list[dict[str, str]]:
    """The entries of each row as text, by key."""
    return [
        {str(key): str(each.get(key)) for key in each.keys(True, True, is_leaf_nontensor)}
        for each in batch.unbind(0)
    ]


# -- rows -------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("shared", [False, True])
def test_rows_are_taken_in_the_order_given(form, shared):
    batch, before = of_form(form), content(of_form(form))
    for rows in ([2, 0, 2], [3], [0, 1, 2, 3]):
        some = torch.tensor(rows)
        for on_cpu in (None, some):
            taken = take_rows(batch, some, on_cpu=on_cpu, shared=shared)
            assert content(taken) == [before[row] for row in rows]
            assert isinstance(taken, LazyStackedTensorDict) == (form == "ragged")
            if form == "ragged":  # a stack may hold the rows of the batch, or copies of them
                assert (taken.tensordicts[0] is batch.tensordicts[rows[0]]) == shared
    nothing = take_rows(batch, torch.tensor([], dtype=torch.int64))
    assert (type(nothing), nothing.batch_size) == (TensorDict, torch.Size([0]))
    width = 1 if form == "ragged" else 3
    shapes = {("tokens", "full"): (0, width), ("tokens", "real"): (0, width), "number": (0,)}
    assert {key: tuple(nothing.get(key).shape) for key in nothing.keys(True, True)} == shapes
    assert [nothing.get(key).dtype for key in shapes] == [torch.int64, torch.bool, torch.int64]
    assert take_rows(nothing, torch.tensor([], dtype=torch.int64)) is nothing


def test_rows_of_further_dimensions_and_of_another_stack_keep_their_sizes():
    batch = TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=[3, 2])
    taken = take_rows(batch, torch.tensor([2, 0]))
    assert (taken.batch_size, taken["x"].tolist()) == (torch.Size([2, 2]), [[4, 5], [0, 1]])
    texts = lazy_stack([NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f")], 1)
    assert take_rows(texts, torch.tensor([2, 0])).tolist() == [["c", "f"], ["a", "d"]]
    part = rows_between(batch, slice(1, None))
    assert (part.batch_size, part["x"].tolist()) == (torch.Size([2, 2]), [[2, 3], [4, 5]])
    other = lazy_stack([TensorDict({"x": torch.arange(3) + 10 * at}, [3]) for at in range(2)], 1)
    taken = take_rows(other, torch.tensor([2, 0]))
    assert taken["x"].tolist() == [[2, 12], [0, 10]]
    taken["y"] = torch.zeros(2, 2)
    assert "y" not in other.keys()
    texts = take_rows(as_texts(["a", "b", "c"]), torch.tensor([2, 0]))
    assert texts.tolist() == ["c", "a"]


@forms
@pytest.mark.parametrize("some", [slice(1, 3), slice(3, 9), slice(0, 4)], ids=str)
def test_a_slice_of_rows_has_their_tensors(form, some):
    part, taken = rows_between(of_form(form), some), content(of_form(form))[some]
    assert part.batch_size == torch.Size([len(taken)])
    without_text = lambda each: {key: value for key, value in each.items() if key != "text"}  # noqa: E731
    assert list(map(without_text, content(part))) == list(map(without_text, taken))


@forms
def test_a_shallow_copy_shares_all_tensors_and_no_column(form):
    batch, before = of_form(form), content(of_form(form))
    copy = shallow_copy(batch)
    assert (type(copy), copy.batch_size, copy.names) == (type(batch), batch.batch_size, batch.names)
    assert content(copy) == before
    for key in ("number", ("tokens", "full")):
        assert same_column(batch, copy, key)
    assert not same_column(batch, deep_copy(batch), "number")
    write_column(copy, ("tokens", "more"), torch.arange(4))
    write_column(copy, ("new", "column"), torch.arange(4))
    write_column(copy, "text", as_texts([*"abcd"]))
    mask_tokens_of(copy, ("tokens", "real"), torch.tensor([True, False, False, True]))
    assert content(batch) == before
    assert [each["('new', 'column')"] for each in content(copy)] == [f"tensor({at})" for at in range(4)]
    assert listed(column_of(copy, "text")) == [*"abcd"]
    assert content(deep_copy(batch)) == before


@forms
def test_a_column_is_left_out_with_the_columns_that_are_then_empty(form):
    batch = of_form(form)
    keys = {str(key) for key in batch.keys(True)} - {"text"}
    assert keys == {"number", "tokens", "('tokens', 'full')", "('tokens', 'real')"}
    for gone, left in (
        ([("tokens", "full")], {"number", "tokens", "('tokens', 'real')"}),
        ([("tokens", "full"), ("tokens", "real")], {"number"}),
        (["number", "absent"], keys - {"number"}),
    ):
        assert {str(key) for key in leave_out(batch, gone).keys(True)} - {"text"} == left
    assert {str(key) for key in batch.keys(True)} - {"text"} == keys
    assert len(leave_out(take_rows(batch, torch.arange(0)), ["number"]).keys()) == 1


@tensorclass
class Turn:
    """A nested column of another class."""

    x: torch.Tensor
    text: str


def test_a_column_of_another_class_is_copied_and_written_like_others():
    rows = [
        TensorDict({"turn": Turn(torch.tensor(at), "a", batch_size=[]), "y": torch.ones(at)}) for at in (1, 2)
    ]
    dense = TensorDict({"turn": Turn(torch.tensor([1, 2]), "a", batch_size=[2])}, batch_size=[2])
    for batch in (lazy_stack(rows), dense):
        copy = shallow_copy(batch)
        write_column(copy, ("turn", "x"), torch.tensor([8, 9]))
        assert column_of(copy, ("turn", "x")).tolist() == [8, 9]
        assert column_of(batch, ("turn", "x")).tolist() == [1, 2]
        assert number_column(batch, ("turn", "x")).tolist() == [1, 2]
        taken = take_rows(batch, torch.tensor([1, 0]))
        assert column_of(taken, ("turn", "x")).tolist() == [2, 1]
        assert column_of(batch, ("turn", "absent")) is None


def test_a_batch_without_rows_is_copied_like_others():
    batch = no_rows(batch_of([1.0, 2.0], [0, 0]))
    copy = shallow_copy(batch)
    assert (copy.batch_size, {*copy.keys(True)}) == (torch.Size([0]), {*batch.keys(True)})
    copy["tokens", "more"] = torch.ones(0, 3)
    assert ("tokens", "more") not in batch.keys(True)


def test_a_column_is_found_at_any_depth():
    rows = [TensorDict({"a": {"b": {"c": torch.tensor(at)}}}) for at in (1, 2)]
    stack = lazy_stack(rows)
    for batch in (stack, stack.contiguous(), TensorDict({"a": lazy_stack([row["a"] for row in rows])}, [2])):
        assert column_of(batch, ("a", "b", "c")).tolist() == [1, 2]
        for absent in (("a", "b", "d"), ("a", "c", "c"), ("b",), ("a", "b", "c", "d")):
            assert column_of(batch, absent) is None
            assert not any_row_has(batch, absent)
        assert any_row_has(batch, ("a", "b", "c"))


def test_two_columns_are_the_same_if_they_are_the_same_memory():
    one, empty = torch.ones(3, 2), torch.ones(0)
    batch = TensorDict(
        {"x": one, "view": one.view(3, 2), "wide": one.view(3, 2, 1), "copy": one.clone()}, [3]
    )
    pairs = [
        ("x", "view", True),
        ("x", "wide", False),
        ("x", "copy", False),
        ("y", "z", True),
        ("x", "y", False),
    ]
    for first, second, alike in pairs:
        given = (
            TensorDict({"it": batch[key]} if key in batch.keys() else {}, [3]) for key in (first, second)
        )
        assert same_column(*given, "it") == alike, (first, second)
    both = (TensorDict({"it": each}, [0]) for each in (empty, empty.clone()))
    assert not same_column(*both, "it")
    ragged = lazy_stack([TensorDict({"it": torch.ones(width)}) for width in (1, 2)])
    assert same_column(ragged, shallow_copy(ragged), "it")
    assert not same_column(ragged, ragged[:1], "it")


def test_the_device_of_a_batch_is_that_of_its_first_tensor():
    with FakeDevice() as fake:
        there = fake.put(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]))
        assert device_of(there) == DEVICE
        assert device_of(there.clear_device_()) == DEVICE
        nested = TensorDict({"text": ["a", "b"], "in": {"x": there["x"]}}, [2])
        assert device_of(nested) == DEVICE
        rows = lazy_stack(
            [TensorDict({"text": "a", "x": there["x"][0]}), TensorDict({"text": "b", "x": there["x"][1]})]
        )
        assert device_of(rows) == DEVICE
    for nothing in (TensorDict({}, [2]), TensorDict({"text": ["a", "b"]}, [2])):
        assert device_of(nothing) == torch.device("cpu")
    assert device_of(TensorDict({}, [2], device="cpu")) == torch.device("cpu")


@forms
def test_columns_are_described_by_key_dtype_and_shape_of_a_row(form):
    width = 1 if form == "ragged" else 3
    described = [
        ("number", torch.int64, ()),
        (("tokens", "full"), torch.int64, (width,)),
        (("tokens", "real"), torch.bool, (width,)),
    ]
    assert sorted(describe_columns(of_form(form)), key=str) == sorted(described, key=str)
    leaves = [] if form == "ragged" else [key for key, *_ in described]
    assert sorted((key for key, _ in leaves_of(of_form(form))), key=str) == sorted(leaves, key=str)


# -- columns ----------------------------------------------------------------------------------------------

WHOLE = torch.tensor([5, 2**40, 7])
NUMBERS = {  # a column, and its numbers per row
    "a vector": (torch.tensor([0.5, 1, 2]), torch.tensor([0.5, 1, 2])),
    "trailing dimensions of size 1": (torch.tensor([0.5, 1, 2]).view(3, 1, 1), torch.tensor([0.5, 1, 2])),
    "several numbers": (torch.arange(6).view(3, 2), torch.arange(6).view(3, 2)),
    "a matrix per row": (torch.arange(12).view(3, 2, 2), torch.arange(12).view(3, 4)),
    "unsigned": (WHOLE.to(torch.uint64).view(3, 1), WHOLE),
    "a parameter": (torch.ones(3, requires_grad=True), torch.ones(3)),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_column_of_numbers_is_read_as_a_vector_or_a_matrix(kind, ragged):
    column, expected = NUMBERS[kind]
    batch = TensorDict({"a": {"b": column}}, batch_size=[3])
    batch = lazy_stack([TensorDict({"a": {"b": each}}) for each in column]) if ragged else batch
    key, width = ("a", "b"), max(expected[0].numel(), 1)
    found = number_column(batch, key)
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad) == (expected.dtype, False)
    assert torch.equal(number_column(batch, key, most=width), expected)
    assert (number_column(batch, key, most=width - 1) is WIDE) == (width > 0)
    assert torch.equal(number_column(batch, key, raw=True).detach().long(), column.detach().long())
    assert number_column(batch, "b") is None
    assert number_column(batch, ("a", "b", "c")) is None


def test_a_column_without_rows_is_a_vector_or_a_matrix():
    batch = TensorDict({"x": torch.empty(0, 1, 1), "y": torch.empty(0, 2, 2), "z": torch.empty(0)}, [0])
    assert [tuple(number_column(batch, key).shape) for key in "xyz"] == [(0,), (0, 4), (0,)]


def test_texts_are_read_as_one_text_per_row():
    rows = [TensorDict({"x": NonTensorData([each])}) for each in ("a", "b")]
    assert number_column(TensorDict({"x": ["a", "b"]}, [2]), "x") == ["a", "b"]
    assert number_column(lazy_stack(rows), "x") == ["a", "b"]


RAGGED = lazy_stack([TensorDict({"x": torch.ones(width)}) for width in (1, 2)])
PARTLY = lazy_stack(
    [TensorDict({"x": torch.ones(1)} if at % 2 else {"y": torch.ones(1)}) for at in range(20)]
)
REFUSED = {
    "ragged rows": (RAGGED, "one number per row is needed in 'x'; found ragged rows"),
    "some rows": (
        PARTLY,
        "a column is on every row or on none; 'x' is on 10 of 20 rows: 1, 3, 5, 7, 9, 11, 13, 15 and 2 more",
    ),
    "a group": (
        TensorDict({"x": {"y": {"z": torch.ones(2)}}}, [2]),
        "'x' is a group of columns: name one of them, such as ('x', 'y', 'z')",
    ),
    "an empty group": (
        TensorDict({"x": TensorDict({}, [2])}, [2]),
        "'x' is a group of columns: name one of them, such as ('x', 'NAME')",
    ),
    "a group of an empty group": (
        TensorDict({"x": {"y": TensorDict({}, [2])}}, [2]),
        "'x' is a group of columns: name one of them, such as ('x', 'NAME')",
    ),
    "complex numbers": (
        TensorDict({"x": torch.tensor([1j])}, [1]),
        "a column must have real numbers; 'x' has torch.complex64",
    ),
    "64 bits": (
        TensorDict({"x": torch.tensor([-1, 5, -2]).view(torch.uint64)}, [3]),
        "a number must have at most 63 bits; 'x' has 18446744073709551615, 18446744073709551614",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_column_that_is_no_column_of_numbers_is_refused(kind):
    batch, said = REFUSED[kind]
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        number_column(batch, "x")
    if kind == "ragged rows":
        assert number_column(batch, "x", most=9) is WIDE
        assert [len(each) for each in number_column(batch, "x", raw=True)] == [1, 2]


# -- tokens -----------------------------------------------------------------------------------------------

VALUES = st.sampled_from([0.0, -1.5, -2.0, NAN, INF, -INF])
ROWS = st.lists(st.lists(st.tuples(st.booleans(), VALUES, VALUES), max_size=4), min_size=1, max_size=5)
MASK, LOG_PROB, OTHER, SHORT = "mask", ("log_probs", "full"), "other", "short"


def tokens_of(rows, form: str) -> TensorDict:
    """A batch of tokens (in the mask, log-probability, another number). Dense rows are padded."""
    if form != "ragged":
        width = max(map(len, rows))
        rows = [each + [(False, NAN, NAN)] * (width - len(each)) for each in rows]
    made = []
    for each in rows:
        mask, log_prob, other = (torch.tensor([token[at] for token in each]) for at in range(3))
        columns = {MASK: mask.bool(), LOG_PROB: log_prob.float(), OTHER: other.float()}
        if form == "wide":
            columns[LOG_PROB] = columns[LOG_PROB].unsqueeze(-1)
        made.append(TensorDict(columns | {SHORT: torch.tensor([NAN] * (len(each) + 1))}))
    return lazy_stack(made) if form == "ragged" else torch.stack(made)


def lists(batch: TensorDict, key) -> list[list[float]]:
    return [each[key].flatten().tolist() for each in batch.unbind(0)]


def near(found, expected) -> bool:
    return all(
        len(one) == len(other)
        and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True))
        for one, other in zip(found, expected, strict=True)
    )


FORMS_OF_TOKENS = ("dense", "wide", "ragged")
of_tokens = st.sampled_from(FORMS_OF_TOKENS)


@settings(max_examples=25)
@given(of_tokens, ROWS)
def test_tokens_in_the_loss_are_counted_as_in_a_loop(form, rows):
    batch = tokens_of(rows, form)
    in_mask = [sum(mask for mask, *_ in each) for each in rows]
    finite = [sum(mask and math.isfinite(value) for mask, value, _ in each) for each in rows]
    for key, expected in ((LOG_PROB, finite), (None, in_mask), ("absent", in_mask)):
        found = [column.tolist() for column in count_in_loss(batch, MASK, key)]
        assert found == [in_mask, expected]
    assert count_in_loss(batch, "absent", LOG_PROB) == (None, None)


@pytest.mark.parametrize("form", FORMS_OF_TOKENS)
def test_tokens_in_the_loss_are_counted_on_a_device(form):
    batch = tokens_of([[(True, NAN, 0.0)] * 3, [(True, 0.0, 0.0)] * 2, [(False, 0.0, 0.0)]], form)
    with FakeDevice() as fake:
        there = [fake.get(column).tolist() for column in count_in_loss(fake.put(batch), MASK, LOG_PROB)]
    assert there == [[3, 2, 0], [0, 2, 0]]
    nothing = TensorDict({MASK: torch.ones(0, 3).bool(), LOG_PROB: torch.ones(0, 3)}, batch_size=[0])
    assert [each.tolist() for each in count_in_loss(nothing, MASK, LOG_PROB)] == [[], []]


def test_counts_of_tokens_that_are_stored_elsewhere_are_read_from_their_column():
    one, two = torch.tensor([3, 5]), torch.tensor([[3, 2], [5, 5]])
    for counts, log_prob, expected in (
        (one, LOG_PROB, ([3, 5], [3, 5])),
        (two, LOG_PROB, ([3, 5], [2, 5])),
        (two, None, ([3, 5], [3, 5])),
    ):
        batch = TensorDict({number_of(LOG_PROB): counts}, [2])
        assert tuple(each.tolist() for each in count_in_loss(batch, LOG_PROB, log_prob)) == expected
    assert number_of(MASK) == ("headrace", "number_of", "mask")
    assert number_of(LOG_PROB) == ("headrace", "number_of", "log_probs.full")


@pytest.mark.parametrize(
    ("form", "found"), [("dense", ("(2, 3)", "(2, 4)")), ("ragged", ("[1, 3]", "[2, 4]"))]
)
def test_a_mask_and_log_probabilities_of_different_sizes_are_refused(form, found):
    batch = tokens_of([[(True, 0.0, 0.0)] * width for width in (1, 3)], form)
    said = "a token has one mask and one log-probability; found 'mask' (loss_mask_key) {} and 'short' "
    with pytest.raises(BatchError, match=re.escape((said + "(log_prob_key) {}").format(*found))):
        count_in_loss(batch, MASK, SHORT)


@pytest.mark.parametrize("form", FORMS_OF_TOKENS)
def test_a_loss_mask_must_be_bool(form):
    batch = tokens_of([[(True, 0.0, 0.0)] * width for width in (1, 3)], form)
    said = "a loss mask is bool, True trains; 'other' is torch.float32: convert it by `mask != 0`"
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        loss_mask_of(batch, OTHER)


@settings(max_examples=25)
@given(of_tokens, ROWS, st.data())
def test_masked_rows_are_false_in_a_mask_and_nan_in_log_probabilities(form, rows, data):
    batch = tokens_of(rows, form)
    out = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    before = {key: lists(batch, key) for key in (MASK, LOG_PROB)}
    masked = shallow_copy(batch)
    for key in before:
        mask_tokens_of(masked, key, torch.tensor(out))
    for key, nothing in ((MASK, False), (LOG_PROB, NAN)):
        expected = [[nothing] * len(own) if gone else own for own, gone in zip(before[key], out, strict=True)]
        assert near(lists(masked, key), expected)
        assert near(lists(batch, key), before[key]), "the batch is changed"
        assert column_of(masked[:1], key)[0].dtype is (torch.bool if key == MASK else torch.float32)


def test_a_true_of_any_byte_stays_in_a_mask():
    mask = (torch.tensor([[1, 0], [1, 1]], dtype=torch.uint8) * 2).view(torch.bool)
    batch = TensorDict({"mask": mask}, [2])
    mask_tokens_of(batch, "mask", torch.tensor([False, True]))
    assert (batch["mask"].view(torch.uint8) != 0).tolist() == [[True, False], [False, False]]


@settings(max_examples=25)
@given(of_tokens, ROWS)
def test_token_columns_are_finite_at_each_token_out_of_the_loss(form, rows):
    """A token without a finite log-probability leaves the mask. Other numbers in the mask stay."""
    batch, given_form = tokens_of(rows, form), tokens_of(rows, form)
    filled = shallow_copy(batch)
    fill_out_of_loss(filled, MASK, LOG_PROB, [OTHER, SHORT, "absent", MASK])
    padded = [
        list(zip(*columns, strict=True))
        for columns in zip(*(lists(batch, key) for key in (MASK, LOG_PROB, OTHER)), strict=True)
    ]
    stays = [[mask and math.isfinite(value) for mask, value, _ in each] for each in padded]
    assert lists(filled, MASK) == stays
    for key, at in ((LOG_PROB, 1), (OTHER, 2)):
        expected = [
            [
                token[at] if inside or math.isfinite(token[at]) else 0.0
                for token, inside in zip(*each, strict=True)
            ]
            for each in zip(padded, stays, strict=True)
        ]
        assert near(lists(filled, key), expected)
    assert all(math.isnan(value) for each in lists(filled, SHORT) for value in each)
    for key in (MASK, LOG_PROB, OTHER):
        assert near(lists(batch, key), lists(given_form, key)), "the batch is changed"
    without = shallow_copy(batch)
    fill_out_of_loss(without, MASK, None, [OTHER])
    assert lists(without, MASK) == lists(batch, MASK)
    assert near(lists(without, LOG_PROB), lists(batch, LOG_PROB))
    fill_out_of_loss(without, "absent", LOG_PROB, [OTHER])
    assert near(lists(without, LOG_PROB), lists(batch, LOG_PROB))


# -- columns between devices -------------------------------------------------------------------------------

MIXED = [
    torch.tensor([True, False, True]),
    torch.tensor([[1, 2], [3, 4]], dtype=torch.int16),
    torch.tensor([0.1, NAN], dtype=torch.float64),
    torch.tensor([2**62, -5]),
    torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([7], dtype=torch.int8).expand(1),
    torch.zeros(0, 3),
]


def test_columns_of_any_dtype_are_read_and_sent_unchanged():
    kinds = [torch.bool, torch.int64, torch.float64, torch.int64, torch.float64, torch.int64, torch.float64]
    expected = [column.to(kind) for column, kind in zip(MIXED, kinds, strict=True)]
    with FakeDevice() as fake:
        there = send_packed(MIXED, DEVICE)
        assert [each.device for each in there] == [DEVICE] * len(MIXED)
        came = [fake.get(each) for each in there]
        read = read_packed(there)
        assert len(fake.reads) == 1
    for found, wanted in ((came, MIXED), (read, expected), (read_packed(MIXED), expected)):
        for one, other in zip(found, wanted, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert str(one.tolist()) == str(other.tolist())
    assert read_packed(MIXED)[3].data_ptr() != MIXED[3].data_ptr()  # the caller may write to its tensor
    assert send_packed(MIXED, torch.device("cpu"))[3] is MIXED[3]
    assert [str(of_bits(bits_of(each), each.dtype).tolist()) for each in MIXED] == [
        str(each.tolist()) for each in MIXED
    ]


def test_the_components_of_a_loss_are_those_of_its_weights():
    weights = {schema.LOSS_WEIGHTS: {"policy": torch.ones(2, 3), "kl": torch.ones(2, 3)}}
    dense = TensorDict(weights, [2])
    for batch in (dense, lazy_stack([*dense.unbind(0)])):
        assert schema.component_names(batch) == ["policy", "kl"]
        assert schema.component_names(batch.exclude(schema.LOSS_WEIGHTS)) == []
