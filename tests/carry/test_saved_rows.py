"""Rows are unchanged after they are saved and loaded."""

from __future__ import annotations

import io

import pytest
import torch
from tensordict import MetaData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from headrace.transforms import BatchError
from headrace.transforms.carry import from_plain, join_rows, to_plain


def row(width: int, **more) -> TensorDict:
    """One row of `width` tokens, with nested columns and a text."""
    inside = TensorDict({"full": torch.arange(width), "reward": torch.tensor(float(width))}, [])
    return TensorDict({"tokens": inside, "prompt": f"of {width}", **more}, [])


@tensorclass
class Turn:
    """A nested column of another class."""

    x: torch.Tensor
    text: str


def batches() -> dict[str, TensorDict]:
    """A batch in each form that its rows can have, by name."""
    dense = lazy_stack([row(3), row(3)]).contiguous()
    return {
        "dense": dense,
        "lists": dense.clone().set("turns", NonTensorStack(["a", "b"], ["c", "d"])),
        "one for all": dense.clone().set("model", MetaData("m", batch_size=[2])),
        "ragged": lazy_stack([row(1), row(4)]),
        "of a class": dense.clone().set("turn", Turn(torch.arange(2), "a", batch_size=[2])),
        "of two dtypes": lazy_stack([row(1, more=torch.ones(1)), row(2, more=torch.ones(1).long())]),
        "of two kinds": lazy_stack(
            [row(1, more=TensorDict({"y": torch.ones(1)}, [])), row(2, more=torch.ones(1))]
        ),
        "of other columns": lazy_stack([row(1), row(4, more=torch.ones(2))]),
    }


@pytest.mark.parametrize("kind", batches())
def test_saved_rows_load_with_weights_only_and_are_equal(kind):
    batch, file = batches()[kind], io.BytesIO()
    torch.save(to_plain(batch), file)
    file.seek(0)
    again = from_plain(torch.load(file, weights_only=True))
    assert type(again) is type(batch)
    assert len(again) == len(batch)
    for one, other in zip(batch.unbind(0), again.unbind(0), strict=True):
        keys = sorted(one.keys(True, True), key=str)
        assert sorted(other.keys(True, True), key=str) == keys
        for key in keys:
            assert str(other.get(key)) == str(one.get(key))
        if kind == "ragged":  # otherwise a row would hold the memory of all rows
            assert other["tokens", "full"].untyped_storage().nbytes() == other["tokens", "full"].nbytes


def test_rows_with_different_columns_are_not_joined():
    joined = join_rows([lazy_stack([row(1)]), lazy_stack([row(4), row(2)])], "parts")
    assert [len(each["tokens", "full"]) for each in joined.unbind(0)] == [1, 4, 2]
    dense = lazy_stack([row(3), row(3)]).contiguous()
    more = dense.clone().set("x", torch.ones(2)).set("y", torch.ones(2))
    with pytest.raises(BatchError, match=r"^parts must have the same columns; only some have x, y$"):
        join_rows([dense, dense, more], "parts")
    wide = lazy_stack([row(4), row(4)]).contiguous()
    said = "parts must have columns of the same width; pad them, or keep ragged rows in a lazy stack: "
    with pytest.raises(BatchError, match=f"^{said}.*3.*4"):
        join_rows([dense, wide], "parts")


def test_no_rows_and_rows_of_a_device_are_restored():
    assert to_plain(None) is None
    assert from_plain(None) is None
    for kind, batch in batches().items():
        plain = to_plain(batch)
        assert (plain["rows"][0] if "rows" in plain else plain)["device"] == ""
        assert from_plain(plain).device is None
        there = from_plain(to_plain(batch.to("cpu")))
        assert there.device == torch.device("cpu"), kind
