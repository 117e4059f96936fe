"""Text ids give the results of numbers, and errors show the texts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, lazy_stack
from test_contract import NEEDED, STAGES, every, rows, same

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    FanOutCollapse,
    IncompleteGroupsError,
    ShuffleSplit,
    number_labels,
)
from headrace.transforms.table import as_ids, label_key, labels_of, labels_said
from headrace.transforms.table.labels import number_ids

IDS = ("group_id", "rollout_id")


def as_text(batch: TensorDict, *keys: str) -> TensorDict:
    """The batch with labels in place of the numbers of its ids."""
    batch = batch.clone()
    for key in keys or IDS:
        batch[key] = [f"{key[0]}-{number}" for number in batch[key].tolist()]
    return batch


def as_numbers(batch: TensorDict) -> TensorDict:
    """The batch of :func:`as_text`, with the number of each label in place of the label."""
    numbered = as_text(batch)
    for key in IDS:
        numbered[key] = number_labels([f"{key[0]}-{number}" for number in batch[key].tolist()])
    return numbered


# -- text ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every
def test_text_ids_give_the_results_of_their_numbers(name):
    if name == "by-column":  # its entries are ids, here numbers
        return
    for made in (lambda batch: batch, lambda batch: lazy_stack(list(batch.unbind(0)))):
        text = made(as_text(rows()))
        out = STAGES[name]()(text)
        expected = STAGES[name]()(made(as_numbers(rows())))
        assert list(out["prompt_text"]) == list(expected["prompt_text"])
        unread = [key for key in IDS if not isinstance(out.get(key), torch.Tensor)]  # stays unchanged
        assert set(unread).isdisjoint(NEEDED[name])
        labels = [f"{key[:-3]}_label" for key in IDS]
        assert same(out.exclude("prompt_text", *unread, *labels), expected.exclude("prompt_text", *unread))
        assert text.get("group_id").tolist()[0] == "g-0", "the input is left alone"


def test_a_label_stays_with_its_rows(make_batch):
    batch = as_text(rows())
    out = CompletenessGate(group_size=3, on_incomplete="drop")(batch)
    assert list(out["group_label"]) == ["g-0"] * 4 + ["g-1"] * 3
    assert torch.equal(out["group_id"], number_labels(list(out["group_label"])))
    batch["group_label"] = [f"kept {row}" for row in range(8)]
    assert FanOutCollapse()(batch).get("group_label").tolist() == batch.get("group_label").tolist()
    nested = TensorDict({("x", "uid"): ["a", "b"], ("next", "reward"): [1.0, 2.0]}, batch_size=[2])
    out = FanOutCollapse(rollout_key=("x", "uid"), group_key=None)(nested)
    assert list(out["x", "uid_label"]) == ["a", "b"]


def test_errors_show_the_labels(make_batch):
    batch = as_text(make_batch([1.0, 2, 3, 4], [0, 0, 1, 2], [5, 6, 7, 8]))
    batch["next", "done"] = torch.tensor([True, True, True, False])[:, None]
    words = r"2 incomplete groups: group 'g-1' has 1 of 2 .*'g-2' has 0 of 2 \(1 unfinished: \['r-8'\]\)"
    gate = CompletenessGate(group_size=2)
    cut = {"gate": gate, "split": ShuffleSplit(minibatches=1)}
    for stage in (gate, Pipeline({"gate": gate}), Pipeline(cut)):
        with pytest.raises(IncompleteGroupsError, match=words):
            stage(batch)
    batch["rollout_id"] = ["x", "y", "y", "z"]
    with pytest.raises(BatchError, match="rollout 'y' in groups"):
        FanOutCollapse()(batch)


def test_a_recipe_takes_text_ids(make_batch):
    batch = rows()[:7]
    options = ("pipeline=grpo", "pipeline.stages.gate.group_size=3")
    text, numbers = (load_pipeline(*options).run(each) for each in (as_text(batch), as_numbers(batch)))
    assert torch.equal(text.batch["advantage"], numbers.batch["advantage"])
    assert text.metrics == numbers.metrics
    left, by_number = (run.ledger.rows("filter/zero_variance") for run in (text, numbers))
    assert left[0] == {"row": 4, "rollout": "r-3", "group": "g-1"}
    assert [row["row"] for row in left] == [row["row"] for row in by_number]
    assert [number_labels([row["group"]]).item() for row in left] == [row["group"] for row in by_number]


def test_text_ids_are_carried_and_saved(make_batch):
    split = ShuffleSplit(minibatch_size=3, remainder="carry", shuffle=False)
    batch = as_text(make_batch([1.0, 2, 3, 4], [0, 0, 1, 1], [0, 1, 2, 3]))
    split(batch)
    resumed = ShuffleSplit(minibatch_size=3, remainder="carry", shuffle=False)
    resumed.load_state_dict(split.state_dict())
    assert len(resumed(batch)) == 0, "every row was trained before the state was saved, or is carried"
    with pytest.raises(BatchError, match="carried"):
        resumed(batch)
    later = as_text(make_batch([5.0, 6], [2, 2], [4, 5]))
    assert sorted(resumed(later)["rollout_label"]) == ["r-3", "r-4", "r-5"]


@given(st.lists(st.text(min_size=1, max_size=4), max_size=20))
def test_labels_are_equal_if_and_only_if_their_numbers_are(labels):
    numbers = number_labels(labels).tolist()
    assert all(0 <= number < 2**62 for number in numbers)
    assert [[a == b for b in labels] for a in labels] == [[a == b for b in numbers] for a in numbers]
    assert numbers == [int(number_labels([label])) for label in labels], "the number depends on other labels"


def test_a_label_has_the_same_number_in_every_process():
    """Dumps and checkpoints store the number, so the number must not change."""
    assert number_labels(["ünï", "b"]).tolist() == [1592140951099421541, 2385976210466362333]


def test_two_labels_with_the_same_number_are_refused(monkeypatch):
    monkeypatch.setattr("headrace.transforms.table.labels._hashed", lambda label: len(label))
    with pytest.raises(BatchError, match="'ab' and 'cd' have the same hash: rename one"):
        number_labels(["ab", "x", "cd"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", ""], r"group_id: every row needs a label; found empty ones at rows 1"),
        (["a", None], r"every row needs a group_id; None at rows 1 of 2"),
        (["a", 5], r"group_id: labels must be one string per row; found 5 at row 1"),
        ([{}, {}], r"group_id must be integers, at most 63 bits, or strings"),
    ],
)
def test_invalid_labels_are_refused(labels, message):
    batch = TensorDict({("next", "reward"): [1.0, 2.0], "rollout_id": [0, 1]}, batch_size=[2])
    batch["group_id"] = lazy_stack([NonTensorData(label) for label in labels])
    with pytest.raises(BatchError, match=message):
        FanOutCollapse()(batch)


@pytest.mark.parametrize(
    ("key", "label", "name"),
    [
        ("group_id", "group_label", "group_id"),
        ("uid", "uid_label", "uid"),
        ("id_of", "id_of_label", "id_of"),
        (("a", "rollout_id"), ("a", "rollout_label"), "rollout_id"),
        (("a", "b", "uid"), ("a", "b", "uid_label"), "uid"),
    ],
)
def test_an_id_column_has_a_label_column_beside_it(key, label, name):
    assert label_key(key) == label
    batch = TensorDict({key: ["b", "a", "b"], "x": [1, 2, 3], ("next", "reward"): torch.ones(3)}, [3])
    for rows_of in (batch, lazy_stack([*batch.unbind(0)])):
        numbered = number_ids(rows_of, ["x", "absent", key])
        assert torch.equal(numbered[key], number_labels(["b", "a", "b"]))
        assert list(numbered[label]) == labels_of(rows_of, key) == ["b", "a", "b"]
        assert (numbered["x"].tolist(), "x_label" in numbered.keys()) == ([1, 2, 3], False)
        assert label not in rows_of.keys(True, True)
        assert number_ids(numbered, ["x", key]) is numbered
    with pytest.raises(BatchError, match=rf"^{name}: every row needs a label; found empty ones at rows 1$"):
        number_ids(TensorDict({key: ["a", ""]}, [2]), [key])


def test_the_labels_of_a_batch_are_one_per_row():
    batch = TensorDict({"uid": ["a", "b", "c", "d"], "x": torch.ones(4)}, batch_size=[4])
    assert labels_of(batch.reshape(2, 2), "uid") == ["a", "b", "c", "d"]
    assert labels_of({"uid": ["a"]}, "uid") is None
    assert labels_of(batch.exclude("uid")[:0], "uid") is None
    assert [labels_of(batch, key) for key in ("x", "absent")] == [None, None]


def test_only_errors_of_a_batch_get_the_texts_of_its_ids():
    numbers = number_labels(["a", "b"]).tolist()
    for known, labels in (
        ([["a"], ["b"]], {str(numbers[0]): "'a'", str(numbers[1]): "'b'"}),
        ([[]], {}),
        ([["a"], ["b", ""]], {str(numbers[0]): "'a'"}),
    ):
        with pytest.raises(BatchError) as refused, labels_said(lambda known=known: known):
            raise BatchError("no")
        assert refused.value.labels == labels
    with pytest.raises(ValueError, match="no") as other, labels_said(lambda: [["a"]]):
        raise ValueError("no")
    assert not hasattr(other.value, "labels")
    assert as_ids(["a", "b"], "group_id").tolist() == numbers


# -- jagged columns --------------------------------------------------------------------------------------


def jagged(batch: TensorDict) -> TensorDict:
    batch = batch.clone()
    for key in (("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")):
        ragged = [row[: i % 4 + 1] for i, row in enumerate(batch[key])]
        batch[key] = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    batch["masks"] = batch["masks"].exclude("all_attention_mask")
    return batch


@every
def test_nested_tensors_are_refused_with_advice(name):
    words = r"nested tensors in \('tokens', 'full'\), .*: pass batch\.to_lazystack\(\)"
    with pytest.raises(BatchError, match=words):
        STAGES[name]()(jagged(rows()))
