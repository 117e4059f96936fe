"""`decide` gives for plain columns what a pipeline gives for a batch of the same rows."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from recipes import CHAINS, of
from tensordict import TensorDict, lazy_stack

import headrace
from headrace import Decider, Decision, Pipeline, decide, load_pipeline
from headrace.pipeline.tools.decide import decision
from headrace.transforms import BatchError, MissingKeyError, split_microbatches

MASK = ("masks", "all_assistant_mask")
TOKENS = {  # recipes that read numbers of each token
    "otb",
    "ppo",
    *("gtpo", "high_entropy", "kl_in_advantage", "mis", "mlperf", "mt_grpo", "opd", "opsm", "rlsd", "tis"),
    *("lite_ppo", "reinforce_pp", "tree_grpo", "icepop", "scalerl", "reinforce_pp_baseline"),
}
REMEMBER = {"rae", "spo"}


def columns_of(seed: int, groups: int = 4, size: int = 4) -> dict[str, list]:
    """Rollouts of one to three rows. Some rows have no token in the loss."""
    rng, rows = random.Random(seed), []
    for group in range(groups):
        for number in range(size):
            reward, tokens = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(2)], rng.randint(0, 5)
            reward = reward if group else [1.0, 1.0]
            segments = rng.choice([1, 1, 1, 2, 3])
            rows += [(group, 10 * group + number, reward, tokens, k == segments - 1) for k in range(segments)]
    columns = list(zip(*rows, strict=True))
    names = ("group_id", "rollout_id", "reward", "tokens", "done")
    found = {name: list(values) for name, values in zip(names, columns, strict=True)}
    return found | {
        "length": [tokens + 2 for tokens in found["tokens"]],
        "role": [rollout % 2 for rollout in found["rollout_id"]],
        "state_id": [row % 3 for row in range(len(rows))],
    }


def batch_of(columns: dict[str, list]) -> TensorDict:
    """The same rows with their tokens."""
    place = torch.arange(8).expand(len(columns["tokens"]), 8)
    return TensorDict(
        {
            "group_id": torch.tensor(columns["group_id"]),
            "rollout_id": torch.tensor(columns["rollout_id"]),
            ("next", "reward"): torch.tensor(columns["reward"], dtype=torch.float64),
            ("next", "done"): torch.tensor(columns["done"]),
            MASK: place < torch.tensor(columns["tokens"])[:, None],
            ("masks", "all_attention_mask"): place < torch.tensor(columns["length"])[:, None],
            "role": torch.tensor(columns["role"]),
            "state_id": torch.tensor(columns["state_id"]),
        },
        [len(place)],
    )


def is_same(found: Decision, pipeline: Pipeline, batch: TensorDict) -> None:
    """Check that a decision equals a loop over the minibatches that the pipeline gathers."""
    run = pipeline.run(batch)
    minibatches = list(run.minibatches())
    assert [step.tolist() for step in found.steps] == [
        step["headrace", "row"].flatten().tolist() for step in minibatches
    ]
    assert run.ledger.reason.tolist() == found.ledger.reason.tolist()
    assert [not reason for reason in found.reason] == found.keep.tolist() == (run.ledger.reason == 0).tolist()
    advantage, weight = [torch.zeros(len(batch), dtype=torch.float64) for _ in range(2)]
    for step in minibatches:
        row = step["headrace", "row"].flatten()
        advantage[row] = step["advantage"].flatten().double()
        weight[row] = step["loss_weight"].flatten().double()
    assert torch.allclose(found.advantage, torch.where(found.keep, advantage, 0.0), rtol=1e-6)
    assert torch.allclose(found.loss_weight, torch.where(found.keep, weight, 0.0), rtol=1e-6)
    own = {name: value for name, value in run.metrics.items() if not name.startswith("time/")}
    assert own == {name: value for name, value in found.metrics.items() if not name.startswith("time/")}


def read_by(recipe: str, columns: dict[str, list]) -> dict[str, list]:
    """The columns that a recipe reads."""
    roles, states = ["role"] * (recipe == "roles"), ["state_id"] * (recipe == "gigpo")
    names = ["group_id", "rollout_id", "reward", "tokens", "done", "length", *roles, *states]
    reward = {} if recipe == "gdpo" else {"reward": [each[0] for each in columns["reward"]]}
    return {name: (columns | reward)[name] for name in names}


@pytest.mark.slow
def test_recipes_decide_on_columns_as_on_a_batch():
    seen = set()
    words = {"minibatches": 2, "group_size": 4}
    for recipe in (name for name in CHAINS if name not in TOKENS | REMEMBER):
        pipeline = load_pipeline(recipe, **words)
        for seed in range(4):
            columns = read_by(recipe, columns_of(seed))
            pipeline.stages["split"].restart()
            pipeline.stages["split"].restart(seed)
            whole = columns | {"role": columns_of(seed)["role"], "state_id": columns_of(seed)["state_id"]}
            with of(recipe):
                found = decide(columns, recipe, seed=seed, **words)
                is_same(found, pipeline, batch_of(whole))
                seen |= set(found.reason)
    assert {"", "filter/zero_variance", "gate/empty"} <= seen


def test_columns_may_be_lists_arrays_tensors_or_text():
    columns = read_by("grpo", columns_of(1))
    lists = decide(columns, group_size=4)
    arrays = decide({name: np.array(values) for name, values in columns.items()}, group_size=4)
    tensors = decide({name: torch.tensor(values) for name, values in columns.items()}, group_size=4)
    texts = [f"prompt {group}" for group in columns["group_id"]]
    named = decide(columns | {"group_id": texts}, group_size=4)
    for other in (arrays, named):
        assert torch.equal(lists.advantage, other.advantage)
        assert torch.equal(lists.loss_weight, other.loss_weight)
    assert torch.allclose(lists.advantage, tensors.advantage, atol=1e-6)  # tensors are float32
    out = next(name for name in named.reason if name)
    assert all(str(row["group"]).startswith("prompt ") for row in named.ledger.rows(out))


class Series:
    """A column of a data frame, whose rows have the labels 7 and 8."""

    iloc = None

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, label):
        return {7: self.values[0], 8: self.values[1]}[label]

    def to_numpy(self):
        return np.array(self.values)


def test_arrays_may_be_read_only_masked_or_of_a_data_frame():
    columns = {"group_id": ["a", "a"], "rollout_id": [0, 1], "reward": [1.0, 0.0], "mine": [1, 2]}
    read_only = np.array([1.0, 0.0])
    read_only.setflags(write=False)
    usual = decide(columns, extra=["mine"], group_size=2).advantage
    for change in (
        {"reward": read_only},  # torch would warn
        {"reward": np.ma.array([1, 0], mask=[False, False])},
        {"reward": np.array([1, 0], dtype=np.int64)},
        {"mine": np.ma.array([1, 2], mask=[False, False])},
        {name: Series(values) for name, values in columns.items()},
    ):
        assert torch.equal(decide(columns | change, extra=["mine"], group_size=2).advantage, usual), change
    for change, said in (
        ({"reward": np.ma.array([1, 0], mask=[False, True])}, r"finite.*row 1\b"),
        ({"reward": np.array([1, 2**53 + 1])}, "9007199254740993"),
        ({"reward": [1j, 0]}, "reward must be one number for each row, or K of them: found complex128"),
        ({"mine": [1j, 0]}, "mine must be one number for each row, or K of them: found complex128"),
        ({"mine": np.array(["2026-01-01"] * 2, "M8[D]")}, r"found datetime64\[D\]"),
        ({"mine": np.array([1, 2], "m8[s]")}, r"found timedelta64\[s\]"),
        (
            {"mine": np.ma.array([1, 2], mask=[False, True])},
            "mine must have a value .* masked ones at rows 1$",
        ),
        (
            {"mine": np.ma.array([[1, 2], [3, 4]], mask=[[False] * 2, [False, True]])},
            "masked ones at rows 1$",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            decide(columns | change, extra=["mine"], group_size=2)


def test_a_seed_gives_the_same_order_in_every_call():
    columns = read_by("grpo", columns_of(2))
    options = {"group_size": 4, "minibatches": 2}
    first, again, other = (decide(columns, seed=seed, **options) for seed in (3, 3, 4))
    assert [step.tolist() for step in first.steps] == [step.tolist() for step in again.steps]
    assert [step.tolist() for step in first.steps] != [step.tolist() for step in other.steps]
    assert torch.equal(first.advantage, other.advantage)
    assert headrace.decide is decide


def test_advantages_need_no_tokens_and_weights_do():
    columns = {name: values for name, values in read_by("grpo", columns_of(3)).items() if name != "tokens"}
    found = decide(columns, group_size=4)
    assert found.advantage.any()
    with pytest.raises(MissingKeyError, match=r"columns\['tokens'\]"):
        found.loss_weight  # noqa: B018
    nothing = decide({name: [] for name in columns}, group_size=4)
    assert (len(nothing.advantage), nothing.reason, nothing.steps) == (0, [], [])


def test_rows_with_tokens_have_the_decision_of_their_columns():
    """A recipe that reads numbers of each token gives an advantage to each token."""
    for seed in range(2):
        columns = read_by("grpo", columns_of(seed))
        batch = batch_of(columns_of(seed) | columns)
        found, of_rows = [decide(each, group_size=4, minibatches=2, seed=seed) for each in (columns, batch)]
        assert torch.allclose(found.advantage, of_rows.advantage, atol=1e-6)  # the batch has float32
        assert torch.equal(found.loss_weight, of_rows.loss_weight)
        assert found.reason == of_rows.reason
        assert torch.equal(of_rows.in_loss, batch[MASK] & found.keep[:, None])
        assert torch.equal(found.in_loss, found.keep)
        batch["log_probs", "full"], batch["teacher_log_probs", "full"] = torch.rand(2, len(batch), 8) - 1
        by_token = decide(batch, "opd", group_size=4)
        term = (batch["teacher_log_probs", "full"] - batch["log_probs", "full"]).double()
        whole = decide(columns, "grpo", "~pipeline.stages.filter", group_size=4).advantage[:, None] + term
        assert torch.allclose(by_token.advantage, torch.where(by_token.in_loss, whole, 0.0), atol=1e-6)
        assert by_token.in_loss.any()


def batch_of_teacher(seed: int, first: int = 0) -> TensorDict:
    """A batch with the columns of ``opd``, and ids from `first` on."""
    batch = batch_of(columns_of(seed) | read_by("grpo", columns_of(seed)))
    batch["group_id"], batch["rollout_id"] = batch["group_id"] + first, batch["rollout_id"] + first
    torch.manual_seed(seed)
    batch["log_probs", "full"], batch["teacher_log_probs", "full"] = torch.rand(2, len(batch), 8) - 1
    return batch


@pytest.mark.parametrize("recipe", ["grpo", "opd"])
def test_padding_rows_are_not_input_rows(recipe):
    """`remainder=pad` fills micro-batches with copies of rows. The row number of a copy is −1."""
    batch = batch_of_teacher(0)
    whole, padded = [
        decide(
            batch,
            recipe,
            group_size=4,
            stages={"split": {"minibatch_size": 3, "minibatches": None, "remainder": remainder}},
            microbatches=2,
        )
        for remainder in ("uneven", "pad")
    ]
    assert (padded.run.batch["headrace", "row"] < 0).any()
    assert torch.equal(padded.advantage, whole.advantage)
    assert torch.equal(padded.in_loss, whole.in_loss)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("recipe", ["grpo", "opd"])
def test_a_carried_row_trains_its_own_tokens_with_the_advantage_of_its_batch(recipe, ragged):
    """Ragged batches differ in width, and the widest rows of each batch leave."""
    deciders = [
        Decider(
            recipe,
            group_size=4,
            on_incomplete="drop",
            stages={"split": {"minibatch_size": 5, "minibatches": None, "remainder": remainder}},
        )
        for remainder in ("carry", "uneven")
    ]
    every, carried = [], 0
    for call in range(4):
        batch = batch_of_teacher(call, 1000 * call)
        batch = batch[batch["rollout_id"] % 1000 > 0]  # without its rollout 0, group 0 is not complete
        if ragged:
            lengths = batch["masks", "all_attention_mask"].sum(1)
            lengths = lengths.clamp(max=6 - call % 2 * 2).where(batch["group_id"] % 1000 > 0, 8).tolist()
            batch = lazy_stack([lazy_row(*each) for each in zip(batch.unbind(0), lengths, strict=True)])
        found, alone = [decider.decide(batch) for decider in deciders]
        numbers = [*range(len(every), len(every) + len(batch)), *found.carried.tolist()]
        every += zip(alone.in_loss.tolist(), alone.advantage.tolist(), strict=True)
        for place, number in enumerate(numbers):
            mask, advantage = every[number]
            trains = bool(found.keep[place])
            assert found.in_loss[place].nonzero().flatten().tolist() == (
                [at for at, bit in enumerate(mask) if bit] if trains else []
            )
            own = found.advantage[place]
            if recipe == "grpo":
                assert own == (advantage if trains else 0.0)
            else:
                expected = [value for value, bit in zip(advantage, mask, strict=True) if bit and trains]
                assert own[found.in_loss[place]].tolist() == expected
                assert not own[~found.in_loss[place]].any()
        carried += int(found.keep[len(batch) :].sum())
        assert not ragged or found.in_loss.shape[1] == 8 > found.run.batch[-1][MASK].shape[0]
    assert carried >= 4


def lazy_row(row: TensorDict, length: int) -> TensorDict:
    """Cut each column of a row after `length` entries."""
    short = row.clone(False)
    for key in row.keys(include_nested=True, leaves_only=True):
        if row[key].ndim:
            short[key] = row[key][:length]
    return short


@pytest.mark.parametrize(
    "options", [{"microbatches": 2}, {"max_tokens": 16}, {"microbatches": 2, "ranks": 2}, {}]
)
def test_a_decision_has_the_micro_batches_of_the_pipeline(options):
    whole, words = columns_of(2), {"group_size": 4, "minibatches": 2} | options
    columns = read_by("grpo", whole)
    found = decide(columns, "grpo", **words)
    pipeline = load_pipeline("grpo", **words)
    gathered = [[*split_microbatches(step)] for step in pipeline.minibatches(batch_of(whole | columns))]
    rows = [[part["headrace", "row"].flatten().tolist() for part in step] for step in gathered]
    assert [[part.tolist() for part in step] for step in found.microbatches] == rows
    assert decide({name: values[:0] for name, values in columns.items()}, **words).microbatches == []


def test_without_a_split_all_rows_that_train_are_one_micro_batch():
    columns = read_by("grpo", columns_of(2))
    found = decide(columns, "grpo", group_size=4, stages={"split": None, "weight": None})
    trains = [row for row, in_loss in enumerate(found.in_loss.tolist()) if in_loss]
    assert [[part.tolist() for part in step] for step in found.microbatches] == [[trains]] != [[[]]]


def test_a_running_baseline_resumes_from_a_state():
    columns = read_by("rae", columns_of(5))
    one, other = [Decider("rae", minibatches=1, group_size=4) for _ in range(2)]
    first = one.decide(columns)
    other.load_state_dict(one.state_dict())
    later = columns | {"rollout_id": [1000 + rollout for rollout in columns["rollout_id"]]}
    assert torch.equal(one.decide(later).advantage, other.decide(later).advantage)
    assert not torch.equal(first.advantage, one.decide(later).advantage)
    with pytest.raises(ValueError, match=r"that of a Decider's state_dict\(\); it has stages"):
        other.load_state_dict(one.pipeline.state_dict())


def test_between_two_batches_no_minibatch_of_a_decider_is_left():
    """A state that was saved there resumes with the next batch, as a Decider that goes on."""
    columns = {"group_id": [0, 0, 1, 1], "reward": [1.0, 0.0, 0.0, 1.0], "tokens": [3, 2, 1, 4]}
    one, other = [Decider("grpo", group_size=2, minibatches=2) for _ in range(2)]
    one.decide(columns | {"rollout_id": [0, 1, 2, 3]})
    other.load_state_dict(one.state_dict())
    later = [each.decide(columns | {"rollout_id": [4, 5, 6, 7]}).steps for each in (one, other)]
    assert [step.tolist() for step in later[0]] == [step.tolist() for step in later[1]]


def test_decide_composes_a_recipe_once_and_keeps_the_last_ones(monkeypatch):
    made, columns = [], {"group_id": [0, 0], "rollout_id": [0, 1], "reward": [1.0, 0.0], "tokens": [1, 1]}
    compose = decision.Decider
    monkeypatch.setattr(decision, "Decider", lambda *a, **k: made.append(k["group_size"]) or compose(*a, **k))
    monkeypatch.setattr(decision, "COMPOSED", 2)
    decision._composed.clear()
    for size in (2, 2, 3, 2, 4, 3, 2):  # 4 drops 3, which was not used for the longest time
        with suppress(BatchError):  # other sizes are refused after they were composed
            decide(columns, "rloo", group_size=size)
    assert made == [2, 3, 4, 3, 2]


ERRORS: dict[str, dict[str, Any]] = {  # each with columns and options of a call; … is any text
    "stage 'collapse', FanOutCollapse() needs the column 'reward'; the columns are group_id, "
    "rollout_id, tokens": {"reward": None},
    "stage 'gate', CompletenessGate(group_size=2) needs the column 'group_id'; the columns are "
    "rollout_id, reward, tokens": {"group_id": None},
    "stage 'gate', CompletenessGate(): The gate must know how many rollouts each group was dispatched "
    "with: set group_size, or give the batch a column 'expected_rollouts'; the columns are group_id, "
    "rollout_id, reward, tokens": {"group_size": None},
    "… every row needs a group_id ≥ 0; found -1 at row 0: rows without an id would be compared with "
    "one another": {"group_id": [-1, 0]},
    "stage 'collapse', FanOutCollapse() needs one number per row in 'reward', for 2 rows; found (2, "
    "2). If these are several rewards, set columns to their number": {"reward": [[1, 0], [0, 1]]},
    "reward must be one number for each row, or K of them: found the text '1.0'": {"reward": ["1.0", "b"]},
    "reward must be one number for each row, or K of them: float() …": {"reward": [1.0, {}]},
    "columns must be lists, arrays or tensors; found group_id (list), rollout_id (list), reward "
    "(float), tokens (list)": {"reward": 1.0},
    "columns must have one entry for each row; got {'group_id': 2, 'rollout_id': 2, 'reward': 3, "
    "'tokens': 2}": {"reward": [1.0] * 3},
    "tokens must be integers, … 'tokens' is the number of tokens of each row in the loss": {
        "tokens": [[3, 4], [5]]
    },
    "tokens must be ≥ 0; found -1 at row 1": {"tokens": [3, -1]},
    "length must be ≥ 0; found -1 at row 1": {"length": [3, -1]},
    "tokens must be integers, got torch.float64. If these are whole numbers, convert them with "
    ".long(); ids may also be strings. 'tokens' is the number of tokens of each row in the loss": {
        "tokens": np.array([1.5, 2.5])
    },
    "tokens must be integers, got torch.bool. If these are whole numbers, convert them with .long(); "
    "ids may also be strings. 'tokens' is the number of tokens of each row in the loss: of a mask (N, "
    "T), give mask.sum(1)": {"tokens": torch.ones(2, 3) > 0},
    "tokens must be integers; found texts. 'tokens' is the number of tokens of each row in the loss": {
        "tokens": ["12", "7"]
    },
    "length must be integers; found texts. 'length' is the number of all tokens of each row": {
        "length": ["12", "7"]
    },
    "… needs the column 'role'; the columns are group_id, rollout_id, reward, tokens": {"recipe": "roles"},
    "… needs the column 'tokens', the number of tokens of each row in the loss; the columns are "
    "group_id, rollout_id, reward": {"tokens": None, "recipe": "gr3"},
    "stage 'teacher', TokenAdvantage(term=LogRatio()) reads numbers of each token, and plain columns "
    "have one number a row: give a TensorDict [N] of rows with ('teacher_log_probs', 'full'), "
    "('log_probs', 'full')": {"recipe": "opd"},
    "the recipe does not read the columns rewards, tokenss (did you mean 'reward'?); it can read done, "
    "expected_rollouts, expected_segments, group_id, is_init, length, policy_version, reward, "
    "rollout_id, status, tokens, votes_only. Leave out the others, or name those that a function of "
    "yours reads in extra=(...)": {"rewards": [1, 0], "tokenss": [1, 0]},
    "the recipe does not read the columns all_assistant_mask; it can read advantage, …": {
        "all_assistant_mask": [1, 1],
        "recipe": "gdpo",
    },
    "status must be one of completed, truncated, aborted, failed, or its number; found length, stop. "
    "Give 'completed' for 'stop', 'truncated' for 'length'": {"status": ["stop", "length"]},
    "status must be one of completed, truncated, aborted, failed, or its number; found completd, "
    "complete. Give 'completed' for 'completd' and 'complete'": {"status": ["complete", "completd"]},
    "status must be one of completed, truncated, aborted, failed, or its number; found zzz": {
        "status": ["zzz", "truncated"]
    },
    "there is no keyword 'clip'; set it as stages={'advantage': {'clip': 2}}": {"clip": 2},
    "group_id must be integers, got torch.float32. If these are whole numbers, convert them with "
    ".long(); ids may also be strings. 'group_id' is one id for each row, an integer or a text": {
        "group_id": [1.0, 0.0]
    },
    "… found group 'a' has 2 of 1. …": {"group_id": ["a", "a"], "group_size": 1},
    "stage 'gate', CompletenessGate(group_size=2): … Are group ids and rollout ids swapped? Are ids "
    "reused? Workers need their own ids": {"group_id": [0, 1], "rollout_id": [5, 5]},
    "stage 'split', ShuffleSplit(minibatches=3): … 'carry' to keep them for the next batch, which must "
    "have other ids": {"minibatches": 3},
    "the state of the stage running lasts from one batch to the next, and decide() keeps none. Make "
    "one headrace.Decider(recipe, **options), call its decide(columns) for each batch, and save its "
    "state_dict()": {"recipe": "rae"},
    "the state of the stages running, split lasts from one batch to the next, and decide() keeps none. "
    "Make one headrace.Decider(recipe, **options), call its decide(columns) for each batch, and save "
    "its state_dict(). Its ids must be unique over batches": {
        "recipe": "rae",
        "stages": {"split": {"remainder": "carry"}},
    },
    "columns must have one entry for each row; got no columns": {
        "group_id": None,
        "rollout_id": None,
        "reward": None,
        "tokens": None,
    },
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_columns_and_keywords_of_the_caller(message):
    """The errors name no key of a TensorDict, no option that holds a key, and no other function."""
    given = {"group_id": [0, 0], "rollout_id": [0, 1], "reward": [1.0, 0.0], "tokens": [3, 2]}
    given |= {"group_size": 2} | ERRORS[message]
    names = {"recipe", "group_size", "minibatches", "stages", "clip"} & given.keys()
    options = {name: given.pop(name) for name in names}
    given = {name: values for name, values in given.items() if values is not None}
    with pytest.raises(ValueError, match=f"^{re.escape(message).replace('…', '.*')}$") as caught:
        decide(given, **options)
    lacks = ("needs the column", "reads numbers of each token", "or give the batch a column")
    assert isinstance(caught.value, MissingKeyError) == any(words in message for words in lacks)


def test_values_that_no_recipe_takes_are_refused_before_it_runs():
    columns = {"group_id": [0, 0], "rollout_id": [0, 1], "reward": [1.0, 0.0]}
    with pytest.raises(BatchError, match=r"columns must not be None; found status, tokens\. Leave them out"):
        decide({**columns, "status": None, "tokens": None})
    for seed in (1.5, None, "1"):
        with pytest.raises(ValueError, match=rf"^seed must be an integer; got {seed!r}$"):
            decide(columns, seed=seed)
    for word in ({"group_size": 2}, {"minibatches": 1}):
        with pytest.raises(
            ValueError,
            match=rf"^options must not be given with a pipeline; got {[*word]!r}".replace("[", r"\["),
        ):
            Decider(load_pipeline("grpo"), **word)
    assert repr(Decider("grpo")) == "Decider(gate, collapse, filter, advantage, split, weight)"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (
            [[1.0, 0.0], ["a", "a"], [0, 1]],
            "numbers like rewards, then texts like ids, then whole numbers",
        ),
        (["grpo", {"reward": [1.0]}], "'grpo', then columns"),
        (["grpo"], "'grpo'"),
        ([{"reward": [1.0]}, [0]], "columns, then whole numbers"),
        ([{"reward": [1.0]}, Pipeline({})], "columns, then a Pipeline"),
        ([[[1.0], [1.0, 2.0]], (True, False)], "a list, then a tuple"),
        ([[1.0], "grpo", ["a"]], "numbers like rewards, then texts like ids"),
    ],
)
def test_an_error_describes_arguments_that_are_in_another_order(arguments, found):
    with pytest.raises(ValueError, match=f"columns must be one mapping of names.* Found {found}$"):
        decide(*arguments)


def test_columns_may_have_other_names():
    columns = {"group_id": [0, 0], "rollout_id": [0, 1], "score": [1.0, 0.0], "tokens": [3, 2]}
    found = decide(columns, "dr_grpo", group_size=2, columns={"reward": "score"}, minibatches=1)
    assert found.advantage.tolist() == [0.5, -0.5]


def test_the_advantage_stage_may_write_another_column():
    columns = read_by("dr_grpo", columns_of(0))
    options = {"group_size": 4, "minibatches": 2}
    usual = decide(columns, "dr_grpo", **options)
    for data in (columns, batch_of(columns_of(0) | columns)):
        found = decide(data, "dr_grpo", stages={"advantage": {"advantage_key": "other"}}, **options)
        assert torch.allclose(found.advantage, usual.advantage, atol=1e-6)  # a batch has float32
    assert found.advantage.any()


def test_a_report_takes_a_decision_and_the_texts_of_its_rows():
    columns = {"group_id": [0, 0], "rollout_id": [0, 1], "reward": [1.0, 0.0], "tokens": [1, 1]}
    decision = headrace.decide(columns, "grpo", group_size=2, minibatches=1)
    report = headrace.make_report(decision, texts={"prompt": ["1 + 1"] * 2, "response": ["2", "3"]})
    assert report.texts["response"] == ["2", "3"]
    with pytest.raises(
        ValueError, match=r"texts must have one text for each of 2 rows; found \{.response.: 1\}"
    ):
        headrace.make_report(decision, texts={"response": ["2"]})
    with pytest.raises(ValueError, match=r"no 'promt' \(did you mean 'prompt'\?\); its names are prompt"):
        headrace.make_report(decision, texts={"promt": ["1 + 1"] * 2})


def test_advantages_are_zero_if_every_row_leaves_before_the_advantage_stage():
    columns = {"group_id": [0, 0], "rollout_id": [0, 1], "reward": [1.0, 0.0], "expected_rollouts": [3, 3]}
    words = ("pipeline.stages.gate.on_incomplete=drop", "pipeline.stages.split.minibatches=1")
    plain = decide(columns | {"tokens": [2, 2]}, "grpo", *words)
    rows = TensorDict({name: torch.tensor(values) for name, values in columns.items()}, [2])
    rows["next", "reward"], rows["masks", "all_assistant_mask"] = rows.pop("reward"), torch.ones(2, 3).bool()
    for found in (plain, decide(rows, "grpo", *words)):
        assert found.reason == ["gate/incomplete"] * 2
        assert found.advantage.tolist() == found.loss_weight.tolist() == [0.0, 0.0]
        assert found.steps == []
    assert found.in_loss.shape == (2, 3)
    assert not found.in_loss.any()


def test_an_error_of_different_group_sizes_names_the_column_of_sizes():
    columns = {"group_id": [0] * 5 + [1] * 4, "rollout_id": range(9), "reward": [1.0, 0, 0, 0, 1, 0, 1, 0, 0]}
    for size, found in ((4, "has 5 of 4"), (5, "has 4 of 5"), (6, "2 incomplete groups")):
        with pytest.raises(
            BatchError, match=f"{found}.*the column 'expected_rollouts' instead of group_size"
        ):
            decide(columns, "rloo", group_size=size)
    # By hand, the reward less the mean of the others: 1 − 1/4 and 0 − 2/4 in the group of 5, and 1 − 0/3.
    found = decide(columns | {"expected_rollouts": [5] * 5 + [4] * 4}, "rloo", minibatches=1)
    assert found.advantage[[0, 1, 6]].tolist() == [0.75, -0.5, 1.0]


def test_each_carried_row_without_a_rollout_id_is_a_rollout_of_its_own():
    options = {"unit": "sample", "minibatch_size": 4, "minibatches": None, "remainder": "carry"}
    stages = {"filter": None, "gate": None, "split": options}
    decider = Decider("grpo", rollout_key=None, loss_unit="rollout", stages=stages)
    for first, sizes in ((0, [4]), (6, [4, 4])):
        ids = [first, first, first, first + 3, first + 3, first + 3]
        found = decider.decide({"group_id": ids, "reward": [1.0, 0.0, 0.5] * 2, "tokens": [2] * 6})
        assert [len(rows) for rows in found.steps] == sizes


def test_extra_columns_reach_a_criterion_of_the_caller():
    columns = {"group_id": [0] * 4 + [1] * 4, "rollout_id": range(8), "reward": [1.0, 0, 0, 4, 1, 0, 1, 0]}
    more = {"flag": [True, True, False, True] * 2, "note": ["", "", "", "bad", "", "", "", ""]}

    def sound(rows: TensorDict) -> torch.Tensor:
        return rows["flag"] & torch.tensor([text != "bad" for text in rows["note"]])

    options = {"group_size": 4, "scale": "none"}
    stages = {"filter": {"also": sound, "action": "exclude"}}
    found = decide(columns | more, "grpo", extra=("flag", "note"), stages=stages, **options)
    assert found.reason == ["", "", "filter/sound", "filter/sound", "", "", "filter/sound", ""]
    # By hand: the kept rewards are 1 and 0 with the mean 1/2, and 1, 0 and 0 with the mean 1/3.
    expected = torch.tensor([0.5, -0.5, 0, 0, 2 / 3, -1 / 3, 0, -1 / 3], dtype=torch.float64)
    torch.testing.assert_close(found.advantage, expected)
    for extra, message in (
        (("flag",), "columns note"),
        (("flag", "tone"), "found tone, which are missing"),
        (("flag", "note", "tokens"), "found tokens, which are missing or have a meaning"),
        (("headrace",), "found headrace"),
        ("flag", "extra must list names of columns; found 'flag'"),
        ((1,), "extra must list names"),
    ):
        with pytest.raises(ValueError, match=message):
            decide(columns | more | {"tokens": [1] * 8}, "grpo", extra=extra, **options)
    with pytest.raises(ValueError, match="extra is for plain columns"):
        decide(TensorDict({"x": torch.zeros(1)}, [1]), "grpo", extra=("x",), **options)


def test_a_decision_names_the_faults_that_its_columns_cannot_show():
    columns = {"group_id": [0, 0], "rollout_id": [0, 1], "reward": [1.0, 0.0]}
    nothing = "not checked: failed (no status), unfinished (no done), empty (no tokens)"
    assert repr(decide(columns, group_size=2)) == f"Decision(Ledger(trained: 2); {nothing})"
    columns |= {"tokens": [1, 1], "status": [0, 0]}
    assert repr(decide(columns, group_size=2)) == (
        "Decision(Ledger(trained: 2); not checked: unfinished (no done))"
    )
    assert repr(decide({**columns, "done": [True, True]}, group_size=2)) == "Decision(Ledger(trained: 2))"
