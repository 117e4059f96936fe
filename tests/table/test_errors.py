"""Errors keep their facts, and name columns and options as the caller does."""

from __future__ import annotations

import ast
import math
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import HashStore

from headrace import decide
from headrace.pipeline import ConfigError, Decider, Pipeline, load_pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    CombineIds,
    CompletenessGate,
    FanOutCollapse,
    IncompleteGroupsError,
    LossWeight,
    MissingKeyError,
    RolloutCorrection,
    Rows,
    SampleFilter,
    group_relative_advantage,
    number_labels,
)
from headrace.transforms.ranks import barrier
from headrace.transforms.table import (
    COLUMNS,
    as_ids,
    as_rewards,
    check_kind,
    enter_rows,
    listing,
    require_identity,
    require_rewards,
    schema,
    who_stamps,
)
from headrace.transforms.table.checks import require_turns
from headrace.transforms.table.empty import take_empty_out
from headrace.transforms.table.ends import Ends, read_flags, require_ends
from headrace.transforms.table.options import above_zero, as_dtype, at_least, within
from headrace.transforms.table.places import places_on_arrival, require_edge
from headrace.transforms.table.votes import note_votes_only

ROOT = Path(__file__).parents[2]
NAN = float("nan")


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
            if "{{" not in (source := path.read_text()):
                continue
            tree = ast.parse(source)
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


# -- whole messages ----------------------------------------------------------------------------------------


def rows_of(**columns) -> Rows:
    """The table of a batch, whose columns may have the names of roles."""
    names = {"reward": ("next", "reward"), "done": ("next", "done")}
    count = len(next(iter(columns.values())))
    given = {names.get(name, name): torch.tensor(values) for name, values in columns.items()}
    return Rows.read(TensorDict(given, batch_size=[count]))


def reading(column, option: str = "x_key"):
    batch = TensorDict({"x": column}, batch_size=[2])
    return lambda: schema.read_column(batch, "x", reader="Mine", option=option)


def ends_of(rollouts, done, **columns):
    rows = rows_of(rollout_id=rollouts, done=done)
    given = {name: torch.tensor(values) for name, values in columns.items()}
    return lambda: require_ends(rows, Ends(torch.tensor(done), **given))


class Base(BatchTransform, columns=("group",), unset=("group",)):
    """A stage without arithmetic."""

    def __init__(self, **names):
        self.name_columns(names)
        super().__init__()


class NoGroup(Base, columns=("group", "reward"), needed=("group",), optional=("reward",)):
    """A stage whose columns may be None, or may not."""


def without_row_0() -> Rows:
    """A view of the rows of rollouts 7 and 8, without the first row of rollout 7."""
    rows = rows_of(rollout_id=[7, 8, 7])
    rows.leave(torch.tensor([True, False, False]), "gone", "dropped")
    return rows.seen_by(SimpleNamespace())


WORKERS = "Workers need their own ids: set StampIds(worker=…) or RepeatSampler(rank=…)"
OWN_ENDS = (
    "If segments have their own ends, such as those of sub-agents, give the batch a column "
    "expected_segments, or "
    "set segment_key of the gate"
)
SEVEN = "rollout 7 (rows [0, 1]: [True, True])"
MORE = (
    f"found more ends (True) in {SEVEN}. Are ids reused by two workers, or did a sampler repeat rows? Their "
    f"rewards "
    f"would be added up. {WORKERS}."
)
NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
MESSAGES = {
    # schema.py
    "two numbers per row": (
        reading(torch.ones(2, 3)),
        "Mine needs one number per row in 'x' (x_key), for 2 rows; found (2, 3)",
    ),
    "texts in place of numbers": (
        reading(["a", "b"]),
        "Mine needs one number per row in 'x' (x_key), for 2 rows; found NonTensorStack. "
        "headrace.transforms.number_labels makes them numbers",
    ),
    "texts in place of a status": (
        reading(["a", "b"], "status_key"),
        "Mine needs one number per row in 'x' (status_key), for 2 rows; found NonTensorStack. Write the "
        "numbers of "
        "headrace.transforms.Status, such as Status.FAILED",
    ),
    "a column that no stage wrote": (
        lambda: schema.read_written(TensorDict({}, [1]), "x", reader="Mine", writer="Other"),
        "Mine needs the column 'x', written by Other: put Other before it",
    ),
    "a written column of two numbers": (
        lambda: schema.read_written(
            TensorDict({"x": torch.ones(1, 2)}, [1]), "x", reader="Mine", writer="Other"
        ),
        "Mine needs one number per row in 'x' (written by Other), for 1 row; found (1, 2)",
    ),
    "no lengths": (
        lambda: schema.require(
            TensorDict({schema.NO_LENGTHS: torch.ones(1)}, [1]), "x", reader="Mine", option="tokens_key"
        ),
        "Mine needs the tokens of each response, or their number, and this dump has neither. Set "
        "source.tokenizer=PATH, a tokenizer.json or a folder of transformers (in Python open_dump(..., "
        "tokenizer=PATH))",
    ),
    "no lengths in a pipeline": (
        lambda: (
            Rows.read(TensorDict({schema.NO_LENGTHS: torch.ones(1)}, [1]))
            .seen_by(LossWeight(), "mine")
            .lengths
        ),
        "LossWeight needs the tokens of each response, or their number, and this dump has neither. Set "
        "source.tokenizer=PATH, a tokenizer.json or a folder of transformers (in Python open_dump(..., "
        "tokenizer=PATH)); or leave the stage out: ~pipeline.stages.mine",
    ),
    "an unknown unit": (
        lambda: schema.unit_keys("turn", None, None),
        "unit must be one of 'sample', 'rollout', 'group'; got 'turn'",
    ),
    # checks.py
    "a rollout in two groups": (
        lambda: require_identity(rows_of(group_id=[3, 4, 3, 3], rollout_id=[7, 7, 8, 9])),
        f"a rollout belongs to one group; found rollout 7 in groups [3, 4] (rows [0, 1]). Are ids reused? "
        f"{WORKERS}",
    ),
    "swapped ids": (
        lambda: require_identity(rows_of(group_id=[3, 4, 5], rollout_id=[7, 7, 8])),
        "a rollout belongs to one group; found rollout 7 in groups [3, 4] (rows [0, 1]). Are group ids and "
        "rollout "
        f"ids swapped? Are ids reused? {WORKERS}",
    ),
    "rewards that are not finite": (
        lambda: require_rewards(
            rows_of(rollout_id=[7, 8, 9]), torch.tensor([1.0, NAN, -math.inf]), siblings_agree=False
        ),
        "every reward must be finite; found nan at row 1 (rollout 8), -inf at row 2 (rollout 9). Score those "
        "rollouts, or mask them: for NaN pipeline.stages.collapse.missing=mask (in Python missing='mask'), "
        "for "
        "infinity SampleFilter(criterion=Finite(), action='exclude') before the collapse",
    ),
    "segments with different rewards": (
        lambda: require_rewards(
            rows_of(rollout_id=[7, 8, 7, 7]), torch.tensor([1.0, 2, 1, 3]), siblings_agree=True
        ),
        "all segments of a rollout must have the same reward; found rollout 7 (rows [0, 2, 3]: [1.0, 1.0, "
        "3.0]). If "
        "each segment has its own reward, set how they are reduced: pipeline.stages.collapse.reward=sum (in "
        "Python "
        "reward='sum'), 'last', …",
    ),
    "segments with the same turn": (
        lambda: require_turns(rows_of(rollout_id=[7, 8, 7]), torch.tensor([1, 1, 1])),
        "the segments of a rollout must have different turns; found rollout 7 (rows [0, 2]: [1, 1])",
    ),
    # ends.py
    "two ends": (ends_of([7, 7, 8], [True, True, True]), f"a rollout ends once; {MORE} {OWN_ENDS}"),
    "more ends than segments": (
        ends_of([7, 7, 8], [True, True, True], expected=[1, 1, 1]),
        f"a rollout ends at most expected_segments times; {MORE}",
    ),
    "two beginnings": (
        ends_of([7, 7, 8], [False, True, True], begins=[True, True, True]),
        f"a rollout begins once; found several beginnings (True) in {SEVEN}. Was it restarted with the same "
        f"id? The "
        f"rewards of both attempts would be added up. {WORKERS}. If segments have their own beginnings, "
        f"such as "
        "those of sub-agents, give the batch a column expected_segments, or set segment_key of the gate",
    ),
    "no segments": (
        ends_of([7, 7, 8], [False, True, True], expected=[0, 0, 1]),
        "expected_segments must be one number ≥ 1 per rollout; found rollout 7 (rows [0, 1]: [0, 0])",
    ),
    "rows after the end": (
        ends_of([7, 8, 7], [True, True, False]),
        "a rollout ends with its last row; found rows after the end (True) in rollout 7 (rows [0, 2]: "
        "[True, False]). "
        f"Are ids reused by two workers? {WORKERS}. If the rows are in another order, set segment_key to "
        f"the column "
        "that numbers them",
    ),
    "rows after the last of the ends": (
        ends_of([7, 7, 7, 8], [True, True, False, True], expected=[2, 2, 2, 1]),
        "a rollout ends with its last row; found rows after the end (True) in rollout 7 (rows [0, 1, 2]: "
        "[True, True, "
        f"False]). Are ids reused by two workers? {WORKERS}. If the rows are in another order, set "
        f"segment_key to the "
        "column that numbers them",
    ),
    "ends that are no bools": (
        lambda: read_flags(rows_of(done=[1, 0]), "done"),
        "a stage needs one bool per row in ('next', 'done') (done_key); found torch.int64",
    ),
    # entry.py
    "no TensorDict": (
        lambda: enter_rows([1], [], reader="Mine"),
        "Mine takes a TensorDict of rows, got list",
    ),
    "a dict of columns": (
        lambda: enter_rows({"x": [1]}, [], reader="Mine"),
        "Mine takes a TensorDict of rows, got dict. headrace.decide takes columns without a TensorDict",
    ),
    "no rows": (
        lambda: enter_rows(TensorDict({}, []), [], reader="Mine"),
        "Mine takes a batch of rows, got a TensorDict of batch size []",
    ),
    "nested tensors": (
        lambda: enter_rows(
            TensorDict({"a": {"x": NESTED}, "y": NESTED, "z": torch.ones(2)}, [2]), [], reader="Mine"
        ),
        "Mine takes dense columns, or a lazy stack of ragged rows; found nested tensors in ('a', 'x'), y: "
        "pass "
        "batch.to_lazystack()",
    ),
    "a batch that was processed": (
        lambda: enter_rows(TensorDict({schema.PROCESSED: torch.ones(2)}, [2]), [], reader="Mine"),
        "Mine got 2 rows, and a pipeline has already processed at least one of them; filters and statistics "
        "must see "
        "each rollout once: attach the pipeline at one place, and add other transforms as its stages",
    ),
    "padding that is no bool": (
        lambda: enter_rows(TensorDict({schema.COLLECTED: torch.ones(2)}, [2]), [], reader="Mine"),
        "Mine needs one bool per row in ('collector', 'mask'): False for a collector's padding",
    ),
    # labels.py
    "labels of several types": (
        lambda: number_labels(["a", 5, None, *range(10)]),
        "labels must be one string per row; found 5 at row 1, None at row 2, 0 at row 3, 1 at row 4, 2 at "
        "row 5, 3 at "
        "row 6, 4 at row 7, 5 at row 8 and 4 more: write texts alone, or numbers alone",
    ),
    "empty labels": (
        lambda: number_labels(["", "a", ""]),
        "every row needs a label; found empty ones at rows 0, 2",
    ),
    "ids that are None": (
        lambda: as_ids([None, 4, None], "group_id"),
        "every row needs a group_id; None at rows 0, 2 of 3. Ids are stamped where rollouts are dispatched: "
        "by "
        "headrace.pipeline.StampIds if the environment draws its own prompts, else by RepeatSampler.draws()",
    ),
    "ids that are floats": (
        lambda: as_ids([1.5, 2.0], "turn"),
        "turn must be integers, got torch.float32. If these are whole numbers, convert them with .long(); "
        "ids may "
        "also be strings",
    ),
    "ids that are bools": (
        lambda: as_ids([True, False], "turn"),
        "turn must be integers, got torch.bool. If these are whole numbers, convert them with .long(); ids "
        "may also "
        "be strings",
    ),
    "ids of two numbers": (
        lambda: as_ids(torch.ones(2, 2).long(), "turn"),
        "turn must be one integer per row, (N,) or (N, 1); got shape (2, 2)",
    ),
    "one id": (
        lambda: as_ids(torch.tensor(3), "turn"),
        "turn must be one integer per row, (N,) or (N, 1); got shape ()",
    ),
    # rewards.py
    "rewards that are None": (
        lambda: as_rewards([1.0, None, None]),
        "every row needs a reward; None at rows 1, 2",
    ),
    "rewards that are texts": (
        lambda: as_rewards([1.0, "a", "b"]),
        "every reward must be a number; found 'a' at row 1. Are these ids?",
    ),
    "many large rewards": (
        lambda: as_rewards([2**53, 2**53 + 1, -(2**53) - 1, *[2**60] * 8]),
        "rewards that are whole numbers must be at most 2^53, beyond which float64 does not tell them "
        "apart; found "
        f"9007199254740993, -9007199254740993, {', '.join([str(2**60)] * 6)} and 2 more. Subtract an "
        f"offset, or scale "
        "them",
    ),
    "rewards of several numbers": (
        lambda: as_rewards(torch.ones(2, 3)),
        "each row needs one reward, (N,) or (N, 1, ...); got (2, 3)",
    ),
    "a single reward": (
        lambda: as_rewards(torch.tensor(1.0)),
        "each row needs one reward, (N,) or (N, 1, ...); got ()",
    ),
    "rewards of a batch that are texts": (
        lambda: (
            Rows.read(
                TensorDict({("next", "reward"): ["1.0", "", "b"], "rollout_id": [7, 8, 9]}, [3]),
                keys=[("next", "reward")],
            ).reward
        ),
        "every reward must be a number; ('next', 'reward') (reward_key) has texts: '1.0' at row 0, rollout "
        "7, '' at "
        "row 1, rollout 8, 'b' at row 2, rollout 9. Convert them with float(), or name the column that has "
        "the "
        "rewards",
    ),
    "large rewards of a batch": (
        lambda: rows_of(reward=[[1, 2], [2**53 + 1, 3], [4, -(2**53) - 1]]).exactly(
            torch.tensor([[1, 2], [2**53 + 1, 3], [4, -(2**53) - 1]])
        ),
        "rewards that are whole numbers must be at most 2^53, beyond which float64 does not tell them "
        "apart; found "
        "[9007199254740993, 3] at row 1, [4, -9007199254740993] at row 2. Subtract an offset, or scale them",
    ),
    # places.py
    "rows that were dropped before": (
        lambda: places_on_arrival(
            Rows.read(TensorDict({"rollout_id": [7, 8, 7], schema.SEGMENTS: torch.tensor([3, 1, 3])}, [3]))
        ),
        "a stage needs the index of each row in its rollout; found rollout 7 with rows that were merged, or "
        "dropped "
        "outside this pipeline. Put a stage before the stage that does so, mask or exclude the rows, or "
        "drop whole "
        "rollouts (unit='rollout'). Rows that are dropped within a pipeline keep their indices",
    ),
    "a first segment that was taken out": (
        lambda: require_edge(without_row_0(), "first"),
        "the reward of a rollout is that of its first segment, but this segment was taken out of rollout 7 "
        "and others "
        "stay. Take whole rollouts out (unit='rollout'), or mask the row",
    ),
    # votes.py
    "votes that differ": (
        lambda: note_votes_only(rows_of(rollout_id=[7, 8, 7], votes_only=[True, False, False])),
        "all rows of a rollout vote only, or none does; 'votes_only' (votes_only_key) differs in rollout 7 "
        "(rows [0, "
        "2]: [True, False]). Give all rows of a rollout the same value",
    ),
    # options.py
    "an integer that is too low": (lambda: at_least("k", 1, 2), "k must be an integer ≥ 2; got 1"),
    "a number below a range": (lambda: within("k", -0.5, 0, 2), "k must be in [0, 2]; got -0.5"),
    "a number above a range": (lambda: within("k", 2.5, 0, 2), "k must be in [0, 2]; got 2.5"),
    "a number below a bound": (lambda: within("k", 0.5, 1), "k must be finite and ≥ 1; got 0.5"),
    "zero": (lambda: above_zero("k", 0, 1), "k must be in (0, 1]; got 0"),
    "more than one": (lambda: above_zero("k", 1.5, 1), "k must be in (0, 1]; got 1.5"),
    "a negative number": (lambda: above_zero("k", -1), "k must be finite and > 0; got -1"),
    "a dtype of integers": (
        lambda: as_dtype("int64"),
        "dtype must be a floating-point dtype of torch; got 'int64'",
    ),
    "no dtype": (lambda: as_dtype("nothing"), "dtype must be a floating-point dtype of torch; got 'nothing'"),
    # columns.py
    "an unknown option": (
        lambda: NoGroup(grup_key="uid"),
        "NoGroup has no option 'grup_key' (did you mean 'group_key'?); its options are group_key, reward_key",
    ),
    "a key that may not be None": (
        lambda: NoGroup(group_key=None),
        "NoGroup needs the column 'group': group_key may not be None",
    ),
    "an option that is set again": (
        lambda: setattr(Base(), "group_key", "uid"),
        "group_key of Base is fixed at construction: construct a new Base with group_key='uid'",
    ),
    "an unknown column of a class": (
        lambda: type("Odd", (Base,), {}, columns=("group", "grp", "rewrd")),
        f"Odd: unknown column 'grp'; known are {', '.join(COLUMNS)}",
    ),
    # stage.py
    "a stage without decide": (
        lambda: BatchTransform()(TensorDict({"x": [1]}, [1])),
        "BatchTransform must define decide(rows), or apply(batch, rows)",
    ),
    "a class in place of an object": (
        lambda: check_kind(Base, "term"),
        "a term is an object; got the class Base: give Base()",
    ),
    "a stage in place of a criterion": (
        lambda: check_kind(Base(), "criterion", "here"),
        "Base() is a stage, and a criterion is required. Put it into the pipeline: load_pipeline(…, "
        "stages=dict(here=Base()), after=…)",
    ),
    # empty.py
    "an empty rollout": (
        lambda: take_empty_out(
            Rows.read(
                TensorDict({"m": torch.tensor([[True], [False], [False]]), "rollout_id": [4, 5, 5]}, [3])
            ).seen_by(SimpleNamespace(loss_mask_key="m", log_prob_key=None)),
            "raise",
        ),
        "each rollout needs at least one token in the loss; found none in rollout 5. Its reward would "
        "change the "
        "baseline of its group, but the rollout would not train. Was its response cut off or masked? Set "
        "empty='exclude' to leave it out of the statistics",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_refusal_says_what_is_required_what_was_found_and_what_to_do(name):
    call, said = MESSAGES[name]
    with pytest.raises(
        (ValueError, TypeError, AttributeError, NotImplementedError), match=f"^{re.escape(said)}$"
    ):
        call()


def test_values_at_their_limits_are_accepted():
    assert rows_of(reward=[2**53, -(2**53)]).reward.tolist() == [2.0**53, -(2.0**53)]
    require_edge(without_row_0(), "last")
    assert [at_least("k", value, 2) for value in (2, 3, None)] == [2, 3, None]
    assert [within("k", value, 0, 2) for value in (0, 2, 1.5, None)] == [0, 2, 1.5, None]
    assert [above_zero("k", value, 2) for value in (2, 1e-9, None)] == [2, 1e-9, None]
    assert as_dtype("bfloat16") is as_dtype(torch.bfloat16) is torch.bfloat16
    assert as_dtype(None) is None
    assert as_rewards([2**53, -(2**53)]).tolist() == [2.0**53, -(2.0**53)]
    assert as_rewards(torch.tensor([[2**53], [-(2**53)]])).tolist() == [2.0**53, -(2.0**53)]
    assert as_rewards(torch.ones(2, 1, 1, requires_grad=True).half()).requires_grad is False
    assert as_rewards(torch.ones(2).half()).dtype is torch.float16
    assert as_ids(torch.tensor([[4], [5]], dtype=torch.uint8), "turn").tolist() == [4, 5]
    assert (
        as_ids([], "turn").dtype is as_ids(torch.tensor([1], dtype=torch.uint64), "turn").dtype is torch.int64
    )
    ends_of([7, 7, 8], [False, True, True], expected=[1, 1, 1], begins=[True, False, True])()
    ends_of([7, 8], [True, True], begins=[True, True])()
    require_turns(rows_of(rollout_id=[7, 8, 7]), torch.tensor([1, 1, 2]))
    check_kind(Base(), "stage")
    assert (Base().group_key, Base(group_key="uid").group_key, NoGroup(reward_key=None).reward_key) == (
        None,
        "uid",
        None,
    )


@pytest.mark.parametrize(
    ("items", "options", "said"),
    [
        ("abc", {"most": 2}, "a, b and 1 more"),
        ("abc", {"most": 3}, "a, b, c"),
        ("ab", {"of": 9}, "a, b and 7 more"),
        ("ab", {"of": 2}, "a, b"),
        ("abcdefgh", {}, "a, b, c, d, e, f, g, h"),
        ("abcdefghi", {}, "a, b, c, d, e, f, g, h and 1 more"),
        ("", {}, ""),
    ],
)
def test_the_first_items_are_listed_and_the_others_counted(items, options, said):
    assert listing(iter(items), **options) == said


def test_an_error_shows_step_recipe_stage_and_labels_around_its_text():
    error = BatchError(
        "Gate needs {count} of group 7: set {size=4}, {filter/action=drop} or {low=}", count=70
    )
    assert str(error) == (
        "Gate needs 70 of group 7: set size=4, pipeline.stages.filter.action=drop (in Python action='drop') "
        "or low"
    )
    assert error.options == [("", "size", "4"), ("filter", "action", "drop"), ("", "low", "")]
    assert repr(error) == f"BatchError({str(error)!r})"
    error.stage, error.made_by, error.step, error.recipe = "gate", "Gate(x=1)", 3, "grpo"
    error.labels, error.more = {"7": "'a'"}, "!"
    assert str(error) == (
        "step 3: grpo refuses it: stage 'gate', Gate(x=1) needs 70 of group 'a': set size=4, "
        "pipeline.stages.filter.action=drop (in Python action='drop') or low!"
    )
    assert error.options[0] == ("gate", "size", "4")
    error.made_by = "Gates()"
    assert ": stage 'gate', Gates(): Gate needs 70" in str(error)


def test_the_end_of_a_message_says_who_stamps_a_column():
    for name in ("group_id", "rollout_id", "unit_id", "group_key", "rollout_key"):
        assert who_stamps(name).startswith(". Ids are stamped where rollouts are dispatched: by headrace")
    assert who_stamps("version_key").startswith(". It is the version of the policy that sampled the row: ")
    assert who_stamps("old_log_prob_key").startswith(
        '. ScoreRows(log_prob_key=("old_log_probs", "full")) in '
    )
    assert who_stamps("reward_key") == who_stamps("turn") == ""


def test_the_keys_of_a_batch_are_sorted_without_those_that_stages_write_for_each_other():
    keys = [
        "b",
        ("next", "reward"),
        ("a", "headrace"),
        "headrace_of",
        ("headrace", "reward"),
        ("c", "d", "e"),
    ]
    batch = TensorDict({key: torch.ones(1) for key in keys}, [1])
    assert schema.key_names(batch) == [
        ("a", "headrace"),
        ("c", "d", "e"),
        ("next", "reward"),
        "b",
        "headrace_of",
    ]
    assert schema.key_names(None) == []
