"""Errors keep their facts, and name columns and options as the caller does."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import HashStore

from headrace import decide
from headrace.pipeline import ConfigError, Decider, Pipeline, load_pipeline
from headrace.transforms import (
    BatchError,
    CombineIds,
    CompletenessGate,
    FanOutCollapse,
    IncompleteGroupsError,
    MissingKeyError,
    RolloutCorrection,
    Rows,
    SampleFilter,
    TreeAdvantage,
    group_relative_advantage,
    number_labels,
)
from headrace.transforms.ranks import barrier

ROOT = Path(__file__).parents[2]


def test_a_pickled_error_keeps_its_facts(make_batch):
    with pytest.raises(IncompleteGroupsError, match=r"group 7 has 1 of 2 .*Set on_incomplete='drop'") as info:
        load_pipeline("grpo", group_size=2).run(make_batch([1.0, 2.0, 3.0], [5, 5, 7]))
    came = pickle.loads(pickle.dumps(info.value))
    assert (came.stage, came.options) == ("gate", [("gate", "on_incomplete", "drop")])
    assert str(came) == str(info.value)


def test_no_text_of_the_package_doubles_its_braces():
    """A text that is formatted has single braces. Only the source of an f-string doubles them."""
    for folder in ("transforms", "pipeline", "adapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            formatted = {
                part for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for part in each.values
            }
            texts = [
                each for each in ast.walk(tree) if isinstance(each, ast.Constant) and each not in formatted
            ]
            assert [
                each.value for each in texts if isinstance(each.value, str) and "{{" in each.value
            ] == [], path


def test_an_error_names_its_stage_once():
    rows = TensorDict({"rollout_id": [0, 1], ("next", "reward"): [1.0, 0.0]}, batch_size=[2])
    rows["masks", "all_assistant_mask"] = torch.ones(2, 2, dtype=torch.bool)
    pipeline = Pipeline({"correction": RolloutCorrection()})
    with pytest.raises(MissingKeyError, match=r"^stage 'correction', RolloutCorrection\(\) needs the key \("):
        pipeline.run(rows)
    with pytest.raises(MissingKeyError, match=r"^RolloutCorrection needs the key \("):
        RolloutCorrection()(rows)


def test_braces_in_the_ids_of_a_batch_are_not_fields_of_an_error():
    columns = {"group_id": ["{found}", "{found}", "{s}"], "rollout_id": [0, 1, 2], "reward": [1.0, 0.0, 1.0]}
    with pytest.raises(BatchError, match=r"1 incomplete group: group '\{s\}' has 1 of 2"):
        decide(columns, group_size=2)


@pytest.mark.parametrize(
    ("option", "name"), [("also", "best_of"), ("criterion", "fresh"), ("also", "diverged")]
)
def test_the_advice_for_a_short_name_without_its_option_composes(option, name):
    with pytest.raises(
        ConfigError, match=rf"filter\.{option}: {name} needs \w+\. Set, for example, "
    ) as info:
        load_pipeline("grpo", f"pipeline.stages.filter.{option}={name}")
    words = str(info.value).partition("Set, for example, ")[2].split()
    part = getattr(load_pipeline("grpo", *words).stages["filter"], option)
    assert type(part).__name__ == name.title().replace("_", "")


@pytest.mark.parametrize("text", ["found {fuond}", "the column {column}", "{missing}", "{found} {present}"])
def test_every_field_of_an_error_must_be_among_its_facts(text):
    with pytest.raises(KeyError, match="is not among the facts"):
        BatchError(text, found=1)
    facts = {"found": 1, "fuond": 1, "key": "reward", "option": "", "batch": []}
    error = BatchError(text + "{drop=all}", **facts)
    assert "{" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


class Odd:
    """A criterion that does not return bools, and whose repr has braces."""

    def __init__(self, text):
        self.text = text

    def __call__(self, batch):
        return self.text

    def __repr__(self):
        return self.text


def one_rank():
    ranks = barrier.Barrier.__new__(barrier.Barrier)
    ranks.size, ranks.rank, ranks.patience, ranks._store = 1, 0, 9, HashStore()
    return ranks


@pytest.mark.parametrize("data", ["{found}", "{a=b}", "{gate/a=b}", "{missing}"])
def test_braces_in_data_are_shown_unchanged(make_batch, data):
    ids = {"group_id": [0, 0], "rollout_id": [0, 1]}
    for refuse in (
        lambda: number_labels([(data,)]),
        lambda: decide(ids | {"group_id": [data, (data,)], "reward": [1.0, 0.0]}),
        lambda: decide(ids | {"reward": [data, data]}),
        lambda: decide(ids | {data: [0]}),
        lambda: SampleFilter(criterion=Odd(data))(make_batch([1.0, 2.0], [5, 5])),
        lambda: one_rank().meet("a batch", ValueError(data)),
        lambda: CombineIds(keys=(data, "b"))(TensorDict({data: [-1], "b": [0]}, batch_size=[1])),
        lambda: Rows.of(group=[1]).require(torch.zeros(1, dtype=torch.bool), "{found} {column}", role=data),
        lambda: Rows.of(group=[1])[data],
    ):
        with pytest.raises(BatchError) as info:
            refuse()
        assert data in str(info.value)
        assert not info.value.options


def test_the_error_for_segments_with_different_rewards_names_an_option_of_the_collapse(make_batch):
    with pytest.raises(BatchError, match=r"must have the same reward") as info:
        TreeAdvantage()(make_batch([1.0, 2.0, 3.0], [5, 5, 5], [0, 0, 1]))
    assert info.value.options == [("collapse", "reward", "sum")]


@pytest.mark.parametrize(
    ("expected", "todo"),
    [
        (
            {"group_size": 2},
            "give the column 'expected_rollouts' instead of group_size. If not, are group ids",
        ),
        ({"expected_rollouts": [2, 2, 2]}, "Correct the column 'expected_rollouts'. Or are group ids"),
    ],
)
def test_the_error_for_too_many_rollouts_says_where_the_size_is_from(expected, todo):
    columns = {"group_id": [5, 5, 5], "rollout_id": [0, 1, 2], "reward": [1.0, 0.0, 1.0]}
    size = expected.pop("group_size", None)
    with pytest.raises(BatchError, match=rf"has 3 of 2\. .*{todo} reused"):
        decide(columns | expected, group_size=size)


@pytest.mark.parametrize("recipe", ["grpo", "tis", "mt_grpo", "tree_grpo", "gtpo", "rae", "mgpo"])
def test_errors_about_plain_columns_name_no_option_of_a_key(recipe):
    columns = {"group_id": [5, 5], "rollout_id": [0, 1], "reward": [1.0, 0.0]}
    columns |= {"expected_rollouts": [2, 2], "tokens": [3, 3], "length": [3, 3]}
    decider = Decider(recipe, group_size=2)
    columns |= {name: [0, 0] for name in ("turn", "role", "policy_version") if decider.reads(name)}
    said = []
    for name in columns:
        others = {other: values for other, values in columns.items() if other != name}
        for wrong in (None, torch.ones(2, 2), torch.tensor([0.5, 1.5]), [1, 3], [3, 3]):
            given = others if wrong is None else others | {name: wrong}
            try:
                decider.decide(given)
            except BatchError as err:
                said.append(str(err))
            except ValueError:  # the recipe does not read this column
                continue
    assert said
    assert not [words for words in said if "_key)" in words]


@pytest.mark.slow
@pytest.mark.parametrize(
    "refuse",
    [
        lambda ids, odd: FanOutCollapse()(odd),
        lambda ids, odd: CompletenessGate(group_size=2)(odd),
        lambda ids, odd: group_relative_advantage(torch.arange(len(ids)).float(), ids, ids),
        lambda ids, odd: SampleFilter(criterion=lambda b: b["group_id"] < 0, unit="group")(odd),
    ],
    ids=["rows that disagree", "a rollout in many groups", "many rewards of one rollout", "an unset id"],
)
def test_an_error_is_short_for_any_number_of_rows(make_batch, refuse):
    rows = 50_000
    ids = torch.zeros(rows, dtype=torch.int64)
    odd = make_batch([0.0], [0]).exclude("prompt_text").expand(rows).clone()
    odd["next", "reward"] = torch.arange(rows).float()[:, None]
    odd["group_id"] = torch.arange(rows) - 1
    odd["rollout_id"] = ids
    with pytest.raises(BatchError) as info:
        refuse(ids, odd)
    assert len(str(info.value)) < 10_000
