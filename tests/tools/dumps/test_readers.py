"""Dumps of other frameworks are read in their documented schemas. Expected numbers are computed by hand."""

from __future__ import annotations

import copy
import functools
import gzip
import hashlib
import json
import math
import operator
import random
import re
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dumps import (
    COLUMNS,
    assert_refused,
    episode,
    gym_row,
    hosted_row,
    in_order,
    nemo_row,
    node,
    open_instruct_row,
    own_row,
    path_of,
    read_one,
    slime_dump,
    slime_sample,
    tinker_row,
    trained,
    trained_text,
    trl_dump,
    verifiers_row,
    verl_row,
    whole,
    write_lines,
)
from tensordict import TensorDict

from headrace.pipeline.tools.dumps.readers import READERS, Format, Sample, SourceError, open_dump, to_batch
from headrace.pipeline.tools.dumps.readers.record import Record
from headrace.transforms import Status

pytestmark = pytest.mark.slow

MASK = ("masks", "all_assistant_mask")


def only(source):
    ((step, batch),) = list(source)
    return step, batch


def rewards(batch):
    return batch["next", "reward"].flatten().tolist()


# -- all columns of a record ---------------------------------------------------------------------------

ASKED, ANSWERED = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CALLED = '[[true, "Add."], [true, "add"], [true, "{\\"a\\": 2}"], [false, "four"], [true, "4"]]'
CALLING = '<think>\nAdd.\n</think>\n<tool_call>\nadd({"a": 2})\n</tool_call>'
TEXTS = {
    "prompt_text": ["user: 2+2?"],
    "response_text": ["assistant: 4"],
    "response_parts": ['[[true, "4"]]'],
}
GYM = gym_row(3, 1, 0.5, more="x")
GYM["responses_create_params"]["input"] = "2+2?"
GYM["response"] = {"status": "incomplete", "output": GYM["response"]["output"]}
ATROPOS = {
    "tokens": [[1, 2, 3], [4, 5, 6, 7]],
    "masks": [[-100, 2, 3], [0, 0, 1, 0]],
    "scores": [1.0, 0.25],
    "advantages": [0.5, [9.0, 9.0, -0.5, 9.0]],
    "inference_logprobs": [[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0, -4.0]],
    "messages": [[ASKED, ANSWERED], [ASKED, {"role": "user", "content": "now"}, ANSWERED, ASKED]],
    "overrides": [None, {}],
    "more": 3,
}
EPISODE = episode("g", "a", {"r": {"score": 2, "weight": 0.25}}, more=True)
EPISODE["traces"] = [{**EPISODE["traces"][0], "agent": {"trainable": False}}, *EPISODE["traces"]]
EPISODE["traces"][1]["agent"] = {}  # it is trainable
EPISODE["traces"][1]["calls"] = [
    {"finish_reason": "stop"},
    {"finish_reason": "length"},
    {"finish_reason": "stop", "error": "no answer"},  # it gave no message
]
SLIME = slime_sample(4, 9, 0.5, rollout_id=8, loss_mask=[0, 1], weight_versions=["5", 4], status="pending")
del SLIME["remove_sample"]
# For each format: the record, the options to read it, its step, and all columns. Labels stand for the ids.
WHOLE = {
    "atropos": (
        ATROPOS,
        {"group_size": 2},
        0,
        {
            "group_label": ["1", "1"],
            "rollout_label": ["1/0", "1/1"],
            "next.reward": [[1.0], [0.25]],
            "expected_rollouts": [2, 2],
            "logged_advantage": [0.5, -0.5],
            "tokens.full": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "masks.all_attention_mask": [[0, 1, 1, 1], [1, 1, 1, 1]],
            "masks.all_assistant_mask": [[0, 0, 1, 1], [0, 0, 1, 0]],
            "log_probs.full": [[None, None, -2.0, -3.0], [None, None, -3.0, None]],
            "prompt_text": ["user: 2+2?", "user: 2+2?\nuser: now"],
            "response_text": ["assistant: 4", "assistant: 4\nuser: 2+2?"],
        },
    ),
    "nemo_gym": (
        GYM,
        {"group_size": 8},
        0,
        {
            "group_label": ["3"],
            "rollout_label": ["3/1"],
            "next.reward": [[0.5]],
            "expected_rollouts": [8],
            "status": [Status.TRUNCATED],
            "prompt_text": ["2+2?"],
            "response_text": [f"assistant: {CALLING}\ntool: four\nassistant: 4"],
            "response_parts": [CALLED],
            "other_columns": ['{"more": "x"}'],
        },
    ),
    "prime_hosted": (
        {**hosted_row(0, 5, 0.5, advantage=-0.25, answer=["4"], task="t"), "env_name": ""},
        {},
        3,
        {
            "group_label": ["t/0"],
            "rollout_label": ["5"],
            "next.reward": [[0.5]],
            "logged_advantage": [-0.25],
            "ground_truth": ['["4"]'],
            "other_columns": ['{"run_id": "r", "num_output_tokens": 2}'],
            **TEXTS,
        },
    ),
    "table": (
        own_row(
            "p", True, k="b", status="max_tokens", gold=4, note="x" * 1001, adv=0.125, ids=[7, 8, 9], q="2+2?"
        ),
        {
            "columns": {
                **COLUMNS,
                "rollout": "k",
                "status": "status",
                "ground_truth": "gold",
                "advantage": "adv",
                "length": "ids",
                "prompt": "q",
            },
            "group_size": 4,
        },
        0,
        {
            "group_label": ["p"],
            "rollout_label": ["p/b"],
            "next.reward": [[1.0]],
            "expected_rollouts": [4],
            "status": [Status.TRUNCATED],
            "logged_advantage": [0.125],
            "masks.all_assistant_mask": [[1, 1, 1]],
            "prompt_text": ["2+2?"],
            "response_text": ["4"],
            "ground_truth": ["4"],
            "other_columns": [json.dumps({"note": "x" * 1000 + "…"})],
        },
    ),
    "verl": (
        {**verl_row("a_b_2_3", 0.5), "acc": True, "pred": None},
        {},
        7,
        {
            "group_label": ["a_b"],
            "rollout_label": ["a_b_2"],
            "next.reward": [[0.5]],
            "prompt_text": ["1+1?"],
            "response_text": ["answer 0.5"],
            "ground_truth": ["2"],
            "other_columns": ['{"acc": true}'],
        },
    ),
    "prime_rl": (
        EPISODE,
        {},
        2,
        {
            "group_label": ["g"],
            "rollout_label": ["a"],
            "next.reward": [[0.5]],
            "next.policy_version": [1],
            "status": [Status.TRUNCATED],
            "tokens.full": [[1, 2, 3, 4, 5, 6, 7, 8]],
            "masks.all_attention_mask": [[1] * 8],
            "masks.all_assistant_mask": [[0, 0, 0, 0, 1, 1, 0, 1]],
            "log_probs.full": [[None, None, None, None, -0.5, -0.5, None, -0.5]],
            "prompt_text": ["user: user says"],
            "response_text": ["assistant: assistant says\ntool: tool says\nassistant: assistant says"],
            "other_columns": ['{"more": true}'],
        },
    ),
    "nemo_rl": (
        nemo_row(6, 0.5, advantages=[[9.0, 9.0, -0.5, -0.5, 9.0]], token_loss_mask=[[0, 0, 1, 1, 0]]),
        {"group_by": "prompt"},
        1,
        {
            "group_label": [f"[1, 2] #{hashlib.blake2b(b'[1, 2]', digest_size=8).hexdigest()}"],
            "rollout_label": ["6"],
            "next.reward": [[0.5]],
            "logged_advantage": [-0.5],
            "tokens.full": [[1, 2, 3, 4]],
            "masks.all_attention_mask": [[1] * 4],
            "masks.all_assistant_mask": [[0, 0, 1, 1]],
            "log_probs.full": [[None, None, -1.0, -2.0]],
            "response_text": ["some text"],
            "other_columns": ['{"idx": 6}'],
        },
    ),
    "open_instruct": (
        open_instruct_row(6, 3, 0.5, finish_reason="length"),
        {},
        3,
        {
            "group_label": ["3"],
            "rollout_label": ["6"],
            "next.reward": [[0.5]],
            "logged_advantage": [0.25],
            "status": [Status.TRUNCATED],
            "tokens.full": [[103, 101, 7, 8, 9]],
            "masks.all_attention_mask": [[1] * 5],
            "masks.all_assistant_mask": [[0, 0, 1, 1, 1]],
            "log_probs.full": [[None, None, -1.0, -2.0, -3.0]],
            "ground_truth": ["[4]"],
            "other_columns": ['{"dataset": "math"}'],
        },
    ),
    "tinker": (
        tinker_row(2, 1, 0.5),
        {},
        6,
        {
            "group_label": ["2"],
            "rollout_label": ["2/1"],
            "next.reward": [[0.5]],
            "next.policy_version": [5],
            "status": [Status.COMPLETED],
            "masks.all_assistant_mask": [[1, 1, 1, 1]],
            "other_columns": ['{"split": "train", "final_reward": 0.0, "final_ob_len": 0}'],
        },
    ),
    "verifiers": (
        verifiers_row(0, 0.5, is_truncated=True, answer="4"),
        {},
        0,
        {
            "group_label": ["math/0"],
            "rollout_label": ["1"],
            "next.reward": [[0.5]],
            "status": [Status.TRUNCATED],
            "ground_truth": ["4"],
            "other_columns": ['{"is_completed": true, "correct": 0.5}'],
            **TEXTS,
        },
    ),
    "slime": (
        SLIME,
        {},
        5,
        {
            "group_label": ["4"],
            "rollout_label": ["8"],
            "next.reward": [[0.5]],
            "next.policy_version": [4],
            "status": [Status.ABORTED],
            "tokens.full": [[1, 2, 19, 29]],
            "masks.all_attention_mask": [[1] * 4],
            "masks.all_assistant_mask": [[0, 0, 0, 1]],
            "log_probs.full": [[None, None, -0.5, -0.25]],
            "prompt_text": ["prompt 4"],
            "response_text": ["two tokens"],
            "ground_truth": ["42"],
            "other_columns": ['{"index": 9}'],
        },
    ),
}


def written(name, record, folder):
    if name == "slime":
        return slime_dump(folder / "5.pt", 5, [record])
    return write_lines(path_of(folder, name), [record])


@pytest.mark.parametrize("name", WHOLE)
def test_a_record_of_each_format_gives_these_columns_and_no_others(name, tmp_path):
    record, options, step, expected = WHOLE[name]
    ((number, batch),) = open_dump(written(name, record, tmp_path), name, **options)
    found = whole(batch)
    ids = [in_order(batch[f"{unit}_id"]) for unit in ("group", "rollout")]
    assert ids == [
        [sorted({*found[f"{unit}_label"]}).index(each) for each in found[f"{unit}_label"]]
        for unit in ("group", "rollout")
    ]
    for lacking in ("group_id", "rollout_id"):
        del found[lacking]
    has_lengths = "masks.all_assistant_mask" in expected
    assert number == step
    assert found == expected | ({} if has_lengths else {"headrace.no_lengths": [True] * len(batch)})


@pytest.mark.parametrize(
    ("name", "place", "required"),
    [
        ("atropos", (), "tokens masks scores"),
        ("nemo_gym", (), "responses_create_params response reward _ng_task_index _ng_rollout_index"),
        ("nemo_gym", ("response",), "output"),
        ("nemo_gym", ("responses_create_params",), "input"),
        ("prime_hosted", (), "step problem_id sample_id prompt completion reward"),
        ("table", (), "problem_id output metrics"),
        ("verl", (), "input output score step uid"),
        ("prime_rl", (), "id group traces"),
        ("prime_rl", ("run",), ""),
        ("prime_rl", ("run", "work"), "step"),
        ("prime_rl", ("run", "work", "policy"), "start"),
        ("prime_rl", ("traces", 1), "agent rewards"),
        ("prime_rl", ("traces", 1, "rewards", "r"), "score"),
        ("prime_rl", ("traces", 1, "nodes", 1), "message token_ids mask"),
        ("prime_rl", ("traces", 1, "calls", 1), ""),
        ("nemo_rl", (), "rewards input_lengths token_ids token_loss_mask sample_loss_mask idx"),
        (
            "open_instruct",
            (),
            "step sample_idx prompt_idx prompt_tokens response_tokens reward advantage finish_reason",
        ),
        ("tinker", (), "schema_version iteration group_idx traj_idx total_reward steps"),
        ("tinker", ("steps", 1), "ac_len episode_done"),
        ("verifiers", (), "example_id prompt completion reward"),
        ("slime", (), "group_index tokens response_length status"),
    ],
)
def test_a_record_without_a_required_key_is_refused_and_without_another_is_read(
    name, place, required, tmp_path
):
    """A null is as good as no key, but each value of NeMo RL is a list of one."""
    record, options, *_ = WHOLE[name]

    def is_read(change):
        row = copy.deepcopy(record)
        change(functools.reduce(operator.getitem, place, row))
        source = open_dump(written(name, row, tmp_path), name, **options)
        return not any(isinstance(found, SourceError) for _, found in source.outcomes())

    keys = functools.reduce(operator.getitem, place, record).keys()
    assert {key for key in keys if not is_read(lambda own, key=key: own.pop(key))} == {*required.split()}
    if name != "nemo_rl":
        assert {key for key in keys if not is_read(lambda own, key=key: own.update({key: None}))} == {
            *required.split()
        }


# -- slime and miles ---------------------------------------------------------------------------------


def test_slime_segments_share_the_rollout_id_or_use_the_index(tmp_path):
    samples = [
        slime_sample(8, 10, 1.0, rollout_id=10),
        slime_sample(8, 11, 3.0, rollout_id=77),
        slime_sample(8, 12, 3.0, rollout_id=77),
    ]
    batch = only(open_dump(slime_dump(tmp_path / "5.pt", 5, samples)))[1]
    assert batch["rollout_id"].tolist() == [10, 77, 77]
    assert list(batch["rollout_label"]) == ["10", "77", "77"]
    plain = only(open_dump(slime_dump(tmp_path / "6.pt", 6)))[1]
    assert plain["rollout_id"].tolist() == [0, 1]
    samples[0]["rollout_id"] = None
    mixed = only(open_dump(slime_dump(tmp_path / "7.pt", 7, samples)))[1]
    assert list(mixed["rollout_label"]) == ["index/10", "77", "77"]  # no other rollout_id is "index/10"


def test_slime_removed_samples_are_masked_and_lost_samples_may_lack_columns(tmp_path):
    lost = {"status": "aborted", "tokens": [], "response_length": 0, "rollout_log_probs": None}
    samples = [slime_sample(0, 0, 1.0, remove_sample=True), slime_sample(0, 1, 3.0)]
    samples += [slime_sample(1, 2, None, weight_versions=[], **lost), slime_sample(1, 3, 1.0)]
    batch = only(open_dump(slime_dump(tmp_path / "5.pt", 5, samples)))[1]
    assert batch[MASK].sum(1).tolist() == [0, 2, 0, 2]
    assert ("headrace", "in_loss") not in batch.keys(True)
    assert math.isnan(rewards(batch)[2])
    assert batch["next", "policy_version"].tolist() == [3, 3, -1, 3]
    assert batch["masks", "all_attention_mask"].sum(1).tolist() == [4, 4, 0, 4]


def test_slime_rewards_by_name_are_columns(tmp_path):
    samples = [slime_sample(0, i, {"score": float(i), "format": 1.0}) for i in range(2)]
    path = slime_dump(tmp_path / "5.pt", 5, samples)
    batch = only(open_dump(path))[1]
    assert batch["next", "reward"].tolist() == [[0.0, 1.0], [1.0, 1.0]]
    assert batch["reward_names"] == ["score", "format"]
    assert batch[:1]["reward_names"] == ["score", "format"]
    assert rewards(only(open_dump(path, reward_key="score"))[1]) == [0.0, 1.0]
    assert_refused(r"sample 0, reward: the key 'nope' is required|needs a reward", path, reward_key="nope")


# -- verl --------------------------------------------------------------------------------------------


def test_verl_rows_that_fill_a_batch_are_not_rollouts(tmp_path):
    rows = [verl_row(f"u_{session}_0", 1.0) for session in range(2)]
    filling = [verl_row(f"pad{7:032x}_{number}_0", 0.0) for number in range(3)]
    ((_, batch),) = open_dump(write_lines(tmp_path / "7.jsonl", rows + filling), "verl")
    assert list(batch["group_label"]) == ["u", "u"]


def test_verl_rows_without_a_uid_need_group_by_and_a_repeated_prompt_is_refused(tmp_path):
    path = write_lines(tmp_path / "7.jsonl", [verl_row(None, float(i)) for i in range(4)])
    assert_refused(r"7\.jsonl:1: a sample needs a group.*group_by='prompt'", path)
    batch = only(open_dump(path, group_by="prompt", group_size=4))[1]
    assert in_order(batch["group_id"]) == [0] * 4
    assert in_order(batch["rollout_id"]) == [0, 1, 2, 3]
    assert batch["expected_rollouts"].tolist() == [4] * 4
    assert_refused(
        r"dispatched with 2 rollouts; found 4: .*Was its prompt drawn twice",
        path,
        group_by="prompt",
        group_size=2,
    )


def test_files_of_a_folder_are_read_in_the_order_of_steps_even_if_gzipped(tmp_path):
    for step in (2, 10):
        write_lines(tmp_path / f"{step}.jsonl", [verl_row("a_0_0", 1.0, step)])
    with gzip.open(tmp_path / "3.jsonl.gz", "wt") as file:
        file.write(json.dumps(verl_row("a_0_0", 1.0, 3)))
    source = open_dump(tmp_path)
    assert source.format == "verl"
    assert (source.read_bytes, source.skipped, source.messages) == (0, 0, [])
    assert [step for step, _ in source] == [2, 3, 10]
    assert [step for step, _ in open_dump(str(tmp_path / "*.jsonl"))] == [2, 10]
    assert source.read_bytes == source.total_bytes > 0


# -- TRL ---------------------------------------------------------------------------------------------


def test_trl_a_single_reward_function_gives_one_reward(tmp_path):
    path = trl_dump(tmp_path / "completions" / "completions_00004.parquet", note=["a", "b"])
    step, batch = only(open_dump(tmp_path, group_by="prompt", group_size=2))
    assert step == 4
    assert rewards(batch) == [1.0, 0.0]
    assert batch["logged_advantage"].tolist() == [0.5, -0.5]
    assert list(batch["response_text"]) == ["assistant: 4", "assistant: 5"]
    assert_refused(r"row 1: a sample needs a group", path)


def test_trl_reward_functions_are_columns_and_a_row_without_rewards_failed(tmp_path):
    path = trl_dump(tmp_path / "c.parquet", length=[math.nan, 2.0])
    batch = only(open_dump(path, group_by="prompt"))[1]
    assert batch["reward_names"] == ["accuracy", "length"]
    assert batch["next", "reward"][1].tolist() == [0.0, 2.0]
    assert batch["next", "reward"][0, 1].isnan()
    assert rewards(only(open_dump(path, group_by="prompt", reward_key=["accuracy"]))[1]) == [1.0, 0.0]
    lost = trl_dump(tmp_path / "d.parquet", accuracy=[None, 1.0])
    batch = only(open_dump(lost, group_by="prompt"))[1]
    assert batch["status"].tolist() == [Status.FAILED, -1]
    assert_refused(r"the columns \['nope'\] are required", path, group_by="prompt", reward_key="nope")


# -- verifiers, prime-rl -----------------------------------------------------------------------------


def test_verifiers_groups_are_examples_and_errors_are_failures(tmp_path):
    rows = [
        verifiers_row(0, 1.0),
        verifiers_row(0, 0.0, is_truncated=True),
        verifiers_row(1, None, error={"error": "Timeout"}, completion=None),
        verifiers_row(1, 1.0, completion="plain"),
    ]
    write_lines(tmp_path / "results.jsonl", rows)
    step, batch = only(open_dump(tmp_path))
    assert step == 0
    assert in_order(batch["group_id"]) == [0, 0, 1, 1]
    assert list(batch["group_label"])[2] == "math/1"
    assert batch["status"].tolist() == [Status.COMPLETED, Status.TRUNCATED, Status.FAILED, Status.COMPLETED]
    assert list(batch["response_text"]) == ["assistant: 4", "assistant: 4", "", "plain"]


def test_prime_rl_the_reward_is_the_sum_of_score_times_weight(tmp_path):
    """A missing weight is 1. Weights may be 0 or negative."""
    rng, rows, expected = random.Random(0), [], []
    for number in range(20):
        parts = [(rng.uniform(-1, 1), rng.choice([None, 0, 0.0, -0.5, 2.0])) for _ in range(3)]
        given = {f"r{k}": {"score": score, "weight": weight} for k, (score, weight) in enumerate(parts)}
        rows.append(episode("g", str(number), given))
        expected.append(math.fsum(score if weight is None else score * weight for score, weight in parts))
    path = write_lines(tmp_path / "traces.jsonl", rows)
    assert rewards(only(open_dump(path))[1]) == pytest.approx(expected, abs=1e-6)
    weighed = [row["traces"][0]["rewards"]["r1"] for row in rows]
    one = [each["score"] * (1 if each["weight"] is None else each["weight"]) for each in weighed]
    assert rewards(only(open_dump(path, reward_key="r1"))[1]) == pytest.approx(one, abs=1e-6)


def test_prime_rl_branches_are_segments_and_an_abandoned_compaction_is_masked(tmp_path):
    root = node(None, "user", [1], [False])
    work = node(0, "assistant", [2, 3], [True, True])
    given_up = node(1, "assistant", [4], [True], semantic_parents=[{"node": 1, "type": "compaction_attempt"}])
    fresh = node(None, "user", [5], [False])
    rest = node(3, "assistant", [6], [True])
    one = episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": [root, work, given_up, fresh, rest]})
    resumed = node(None, "user", [5], [False], semantic_parents=[{"node": 2, "type": "compaction"}])
    two = episode("g", "b", {"r": {"score": 3.0}}, trace={"nodes": [root, work, given_up, resumed, rest]})
    batch = only(open_dump(write_lines(tmp_path / "traces.jsonl", [one, two])))[1]
    assert in_order(batch["rollout_id"]) == [0, 0, 1, 1]
    assert batch["tokens", "full"].tolist() == [[1, 2, 3, 4], [0, 0, 5, 6]] * 2
    assert batch[MASK].int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]]


def test_prime_rl_the_folder_is_the_step_and_failures_are_rows(tmp_path):
    path = tmp_path / "step_9" / "train" / "effective" / "traces.jsonl"
    rows = [
        episode("g", "a", {"r": {"score": 1.0}}, trace={"stop_condition": "max_turns"}),
        episode("g", "b", {"r": None}, ok=False, trace={"ok": False}),
        episode("g", "c", {}, ok=False, traces=[]),
    ]
    write_lines(path, rows)
    step, batch = only(open_dump(tmp_path))
    assert step == 9
    assert batch["status"].tolist() == [Status.TRUNCATED, Status.FAILED, Status.FAILED]
    two = episode("g", "d", {"r": {"score": 1.0}})
    two["traces"] *= 2
    assert_refused(
        r"an episode has one trainable agent; found '2 trainable traces'",
        write_lines(tmp_path / "traces.jsonl", [two]),
    )


def test_prime_rl_paths_without_tokens_are_skipped_if_others_have_some(tmp_path):
    nodes = [
        node(None, "user", [1], [False]),
        node(0, "assistant", [2], [True]),
        node(0, "assistant", [], [], sampled=True),
    ]
    rows = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": nodes})]
    assert len(only(open_dump(write_lines(tmp_path / "traces.jsonl", rows)))[1]) == 1
    for row in (text := [node(None, "user", [], []), nodes[2]]):
        row["logprobs"] = []
    del text[0]["sampled"]  # then it was not sampled
    rows = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": text})]
    batch = only(open_dump(write_lines(tmp_path / "traces.jsonl", rows)))[1]
    assert MASK not in batch.keys(True)
    assert list(batch["response_text"]) == ["assistant: assistant says"]


# -- NeMo RL, open-instruct, tinker ------------------------------------------------------------------


def test_nemo_rl_rows_are_slices_of_one_tensor_up_to_their_length(tmp_path):
    rows = [
        nemo_row(0, 1.0),
        nemo_row(1, 3.0, sample_loss_mask=[0.0]),
        nemo_row(2, 5.0, prompt=9, advantages=[[0.0, 0.0, 0.5, 0.25, 0.0]]),
        nemo_row(3, 5.0, prompt=9, filtered_rewards=[7.0]),
    ]
    path = write_lines(tmp_path / "train_data_step12.jsonl", rows)
    assert_refused("a sample needs a group", path)
    step, batch = only(open_dump(tmp_path, group_by="prompt", group_size=2))
    assert step == 12
    assert rewards(batch) == [1.0, 3.0, 5.0, 7.0]
    assert in_order(batch["group_id"]) == [0, 0, 1, 1]
    assert batch[MASK].sum(1).tolist() == [2, 0, 2, 2]
    assert batch["logged_advantage"][[0, 1, 3]].tolist() == [0.5] * 3
    assert batch["logged_advantage"][2].isnan()


def test_open_instruct_groups_are_prompts_and_metadata_are_skipped(tmp_path):
    rows = [open_instruct_row(i, i // 2, float(i)) for i in range(4)]
    write_lines(tmp_path / "run_metadata.jsonl", [{"run_name": "run"}])
    write_lines(tmp_path / "run_rollouts_000000.jsonl", rows)
    write_lines(tmp_path / "run_rollouts_000001.jsonl", [open_instruct_row(0, 0, 1.0, step=4)])
    source = open_dump(tmp_path)
    (step, batch), (after, _) = list(source)
    assert (source.format, step, after) == ("open_instruct", 3, 4)
    assert in_order(batch["group_id"]) == [0, 0, 1, 1]


def test_open_instruct_a_prompt_index_of_two_prompts_is_refused(tmp_path):
    rows = [open_instruct_row(0, 0, 1.0), open_instruct_row(1, 0, 0.0, prompt_tokens=[5])]
    assert_refused(
        r":2: prompt_tokens must be those at .*:1, which has the same prompt_idx",
        write_lines(tmp_path / "r_rollouts_0.jsonl", rows),
    )


def test_tinker_rewards_are_total_or_final(tmp_path):
    path = tmp_path / "iteration_000006" / "train_rollout_summaries.jsonl"
    write_lines(path, [tinker_row(0, at, 3.0) for at in range(2)])
    assert rewards(only(open_dump(tmp_path))[1]) == [3.0] * 2
    assert rewards(only(open_dump(path, reward_key="final_reward"))[1]) == [0.0] * 2


# -- verifiers, NeMo Gym, hosted prime, Atropos ------------------------------------------------------------


def test_nemo_gym_rows_are_grouped_by_task_and_their_items_are_messages(letters, tmp_path):
    rows = [gym_row(1, 0, 0.5), gym_row(0, 1, 1.0), gym_row(1, 1, 0.0), gym_row(0, 0, 0.0)]
    rows[2]["response"] = {"error": {"code": "server_error"}, "output": None}
    write_lines(tmp_path / "rollouts.jsonl", rows)
    for other in ("materialized_inputs", "failures"):
        write_lines(tmp_path / f"rollouts_{other}.jsonl", [{"_ng_task_index": 0}])
    source = open_dump(tmp_path, tokenizer=letters)
    ((_, batch),) = source
    assert source.format == "nemo_gym"
    assert list(batch["group_label"]) == ["1", "0", "1", "0"]
    assert list(batch["rollout_label"]) == ["1/0", "0/1", "1/1", "0/0"]
    assert trained_text(batch, 0) == 'Add.add{"a": 2}4'
    assert trained(batch)[2] == 0
    strange = gym_row(0, 0, 1.0)
    strange["response"]["output"].append({"type": "strange"})
    assert_refused("a known type; found 'strange'", write_lines(tmp_path / "rollouts.jsonl", [strange]))


def test_nemo_gym_items_with_tokens_are_read_as_tokens(tmp_path):
    """The second call continues the first. The third has another prompt, so it is another segment."""
    row = gym_row(0, 0, 1.0)
    given = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 9], [7, 8])]
    row["response"]["output"] = [
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "x"}],
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.5] * len(sampled),
        }
        for prompt, sampled in given
    ]
    batch = read_one(write_lines(tmp_path / "rollouts.jsonl", [row]))
    assert batch["tokens", "full"].tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 1, 9, 7, 8]]
    assert batch[MASK].int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]]
    assert in_order(batch["rollout_id"]) == [0, 0]
    assert batch["log_probs", "full"].isfinite().equal(batch[MASK])


def test_prime_hosted_samples_are_read_from_parquet_and_from_lines(letters, tmp_path):
    rows = [hosted_row(at // 2, at, float(at % 2), advantage=at / 8, is_truncated=at == 3) for at in range(4)]
    for row in rows:
        row["error"] = None
    rows[2] |= {"error": "Timeout", "reward": None, "completion": None, "advantage": None}
    write_lines(tmp_path / "lines" / "samples.jsonl", rows)
    (tmp_path / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table" / "samples.parquet")
    for folder in ("lines", "table"):
        source = open_dump(tmp_path / folder, tokenizer=letters)
        ((step, batch),) = source
        assert (source.format, step) == ("prime_hosted", 3)
        assert list(batch["group_label"]) == ["math/0", "math/0", "math/1", "math/1"]
        ends = [Status.COMPLETED, Status.COMPLETED, Status.FAILED, Status.TRUNCATED]
        assert batch["status"].tolist() == ends
        assert batch["logged_advantage"].nan_to_num(nan=-1).tolist() == [0.0, 0.125, -1.0, 0.375]
        assert trained(batch) == [1, 1, 0, 1]
        assert batch["prompt_text"][0] == "user: 2+2?"


@pytest.mark.parametrize(
    ("name", "change", "trains", "log_probs"),
    [
        ("nemo_rl", {"token_loss_mask": [[0] * 5]}, [[0] * 4], [[None] * 4]),
        ("nemo_rl", {"token_loss_mask": [[1] * 5]}, [[1] * 4], [[0.0, 0.0, -1.0, -2.0]]),
        (
            "nemo_rl",
            {"token_loss_mask": [[0, 0, 0, 0, 1]]},
            [[0] * 4],
            [[None] * 4],
        ),  # padding does not train
        ("nemo_rl", {"input_lengths": [5]}, [[0, 0, 1, 1, 0]], [[None, None, -1.0, -2.0, 0.0]]),
        ("atropos", {"masks": [[-100] * 3, [0] * 4]}, [[0] * 4] * 2, [[None] * 4] * 2),
        (
            "atropos",
            {"masks": [[1, 2, 3], [1] * 4]},
            [[0, 1, 1, 1], [1] * 4],
            [[None, -1.0, -2.0, -3.0], [-1.0, -2.0, -3.0, -4.0]],
        ),
        ("slime", {"loss_mask": [0, 0]}, [[0] * 4], [[None, None, -0.5, -0.25]]),
        (
            "slime",
            {"response_length": 0, "rollout_log_probs": [], "loss_mask": None},
            [[0] * 4],
            [[None] * 4],
        ),
        (
            "slime",
            {"response_length": 4, "rollout_log_probs": [-1.0] * 4, "loss_mask": None},
            [[1] * 4],
            [[-1.0] * 4],
        ),
    ],
)
def test_all_tokens_of_a_row_or_none_may_train(name, change, trains, log_probs, tmp_path):
    record, options, *_ = WHOLE[name]
    ((_, batch),) = open_dump(written(name, {**record, **change}, tmp_path), name, **options)
    found = whole(batch)
    assert (found["masks.all_assistant_mask"], found["log_probs.full"]) == (trains, log_probs)


DONE, CUT, LOST, GONE = Status.COMPLETED, Status.TRUNCATED, Status.FAILED, Status.ABORTED
DETAILS = {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("name", "place", "changes", "status"),
    [
        ("nemo_gym", ("response",), {"status": None}, None),
        ("nemo_gym", ("response",), {"status": "completed"}, DONE),
        ("nemo_gym", ("response",), {"status": "failed"}, LOST),
        ("nemo_gym", ("response",), {"status": "cancelled"}, GONE),
        ("nemo_gym", ("response",), {"status": "completed", "incomplete_details": DETAILS}, CUT),
        (
            "nemo_gym",
            ("response",),
            {"status": "completed", "incomplete_details": DETAILS, "error": "x"},
            LOST,
        ),
        ("nemo_gym", ("response",), {"status": None, "incomplete_details": None}, DONE),
        ("nemo_gym", ("response",), {"status": "incomplete", "incomplete_details": None}, CUT),
        ("prime_hosted", (), {}, None),
        ("prime_hosted", (), {"is_truncated": False}, DONE),
        ("prime_hosted", (), {"is_truncated": True}, CUT),
        ("prime_hosted", (), {"is_truncated": True, "error": "x"}, LOST),
        ("verifiers", (), {"is_truncated": None}, None),
        ("verifiers", (), {"is_truncated": None, "error": "x"}, LOST),
        ("prime_rl", (), {"ok": False}, LOST),
        ("prime_rl", (), {"ok": None}, LOST),
        ("prime_rl", ("traces", 1), {"ok": False}, LOST),
        ("prime_rl", ("traces", 1), {"calls": []}, DONE),
        (
            "prime_rl",
            ("traces", 1),
            {"calls": [{"finish_reason": "length"}, {"finish_reason": "stop"}]},
            DONE,
        ),
        ("prime_rl", ("traces", 1), {"calls": [], "stop_condition": "max_turns"}, CUT),
        ("prime_rl", ("traces", 1), {"calls": [], "stop_condition": "max_output_tokens"}, CUT),
        ("open_instruct", (), {"finish_reason": "stop"}, DONE),
        ("open_instruct", (), {"finish_reason": "other"}, CUT),
        ("tinker", (), {"steps": []}, DONE),
        ("tinker", ("steps", 1), {"episode_done": False}, CUT),
        ("slime", (), {"status": "completed"}, DONE),
        ("slime", (), {"status": "failed"}, LOST),
        ("slime", (), {"status": "truncated"}, CUT),
        *(
            ("table", (), {"status": word}, status)
            for status, words in {
                DONE: "completed stop eos end_turn stop_sequence tool_calls tool_use",
                CUT: "truncated length max_tokens max_output_tokens max_length",
                LOST: "failed error",
                GONE: "aborted abort cancelled",
            }.items()
            for word in words.split()
        ),
    ],
)
def test_a_rollout_has_the_status_of_its_record(name, place, changes, status, tmp_path):
    record, options, *_ = WHOLE[name]
    row = copy.deepcopy(record)
    functools.reduce(operator.getitem, place, row).update(changes)
    ((_, batch),) = open_dump(written(name, row, tmp_path), name, **options)
    assert (batch["status"].tolist() if "status" in batch.keys() else None) == (
        None if status is None else [status]
    )


def test_prime_rl_the_step_is_that_of_the_last_folder_or_of_the_episode_or_the_number_of_the_file(tmp_path):
    rows = [episode("g", "a", {"r": {"score": 1.0}})]
    for folder, step in {
        "step_3/step_9": 9,
        "x/step_12/y": 12,
        "step_x": 2,
        "my_step_4": 2,
        "step_0": 0,
    }.items():
        path = write_lines(tmp_path / folder / "traces.jsonl", rows)
        assert [number for number, _ in open_dump(path)] == [step]
    rows[0]["run"] = None
    path = write_lines(tmp_path / "files" / "a.jsonl", rows)
    write_lines(tmp_path / "files" / "b.jsonl", rows)
    assert [number for number, _ in open_dump(f"{tmp_path}/files/*.jsonl", "prime_rl")] == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "[]",
        '[{"role"',
        '[{"a": "role"}]',
        '{"role": "user"}',
        '["role"]',
        '[{"role": "user"}, 3]',
        'a "role"',
    ],
)
def test_table_a_text_that_is_no_list_of_messages_stays_a_text(text, tmp_path):
    row = own_row(0, 1.0, q=text, output=text)
    batch = read_one(write_lines(tmp_path / "a.jsonl", [row]), columns={**COLUMNS, "prompt": "q"})
    assert [batch["prompt_text"][0], batch["response_text"][0]] == [text, text]


# -- tables with named columns -----------------------------------------------------------------------------


def test_table_is_read_in_each_shape(tmp_path):
    """A line is a rollout, has a list of rollouts, or has lists of values. A column may be nested."""
    rewards, texts = [[1.0, 0.0], [0.5, 0.25]], [["4", "5"], ["6", "7"]]
    flat = [
        {"problem_id": group, "metrics": {"score": rewards[group][at]}, "output": texts[group][at], "k": at}
        for group in range(2)
        for at in range(2)
    ]
    nested = [
        {
            "prompt": f"{g}?",
            "samples": [{"score": r, "output": t} for r, t in zip(rewards[g], texts[g], strict=True)],
        }
        for g in range(2)
    ]
    lists = [{"prompt": f"{g}?", "scores": rewards[g], "outputs": texts[g]} for g in range(2)]
    shapes = (
        (flat, {**COLUMNS, "rollout": "k"}),
        (nested, {"rollouts": "samples", "prompt": "prompt", "reward": "score", "response": "output"}),
        (lists, {"prompt": "prompt", "reward": "scores", "response": "outputs"}),
    )
    for number, (rows, columns) in enumerate(shapes):
        for suffix in ("jsonl", "parquet"):
            path = tmp_path / f"{number}.{suffix}"
            if suffix == "jsonl":
                write_lines(path, rows)
            else:
                pq.write_table(pa.Table.from_pylist(rows), path)
            batch = read_one(path, columns=columns)
            assert in_order(batch["group_id"]) == [0, 0, 1, 1]
            assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0, 0.5, 0.25]
            assert list(batch["response_text"]) == ["4", "5", "6", "7"]
            if number:
                assert list(batch["prompt_text"]) == ["0?", "0?", "1?", "1?"]
    plain = {"prompt": "prompt", "reward": "correct", "response": "output"}
    rows = [{"prompt": "?", "correct": at == 0, "output": str(at)} for at in range(2)]
    batch = read_one(write_lines(tmp_path / "b.jsonl", rows), columns=plain, group_by="prompt")
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0]


def test_table_has_steps_and_lengths(tmp_path):
    rows = [own_row("p", 1.0, it=step, n=2 + step) for step in range(2) for _ in range(4)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = open_dump(path, columns={**COLUMNS, "step": "it", "length": "n"})
    assert [(step, trained(batch)) for step, batch in found] == [(0, [2] * 4), (1, [3] * 4)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "The column 'step' is not read, so each file is one step"),
        ({"step": "step"}, ""),
        (
            {"step": "step", "prompt": "outputt", "status": "why"},
            "No row has a value in the column 'outputt' (source.columns.prompt) (did you mean 'output'?)",
        ),
    ],
)
def test_table_a_notice_names_columns_that_are_not_read(columns, said, tmp_path):
    """A column is read if at least one row has it."""
    rows = [own_row("p", 1.0, step=3, why="stop"), own_row("p", 0.0, step=3)]
    dump = open_dump(write_lines(tmp_path / "a.jsonl", rows), columns={**COLUMNS, **columns})
    for _ in range(2):  # each pass has the notice once
        list(dump)
        assert (said in "".join(dump.notices), len(dump.notices)) == (True, bool(said))


def test_a_file_of_lines_is_not_called_a_damaged_parquet_file(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [own_row("p", 1.0)])
    said = "found JSON Lines. For a file of your own, set source.columns"
    assert_refused(re.escape(said), path, "trl")
    for begin in (b"z", b"|", b""):
        path.write_bytes(begin + b"a text")
        assert_refused("found (?!JSON)", path, "trl")


def test_table_lines_with_one_prompt_are_one_group_only_with_group_by(tmp_path):
    """The fields that no column names are kept. A column that is set to None is not read."""
    line = {
        "prompt": "q?",
        "samples": [{"score": float(at), "output": "4", "tag": f"t{at}"} for at in (0, 1)],
    }
    columns = {"rollouts": "samples", "prompt": "prompt", "reward": "score", "response": "output"}
    path = write_lines(tmp_path / "a.jsonl", [line, line])
    for words, groups in ({}, 2), ({"group_by": "prompt"}, 1):
        batch = read_one(path, columns={**columns, "status": None}, **words)
        assert len(batch["group_id"].unique()) == groups
        assert len(batch["rollout_id"].unique()) == 4
        assert list(batch["other_columns"]) == ['{"tag": "t0"}', '{"tag": "t1"}'] * 2


def test_table_the_reward_of_a_failed_rollout_is_a_number_or_missing(tmp_path):
    columns = {**COLUMNS, "status": "why"}
    rows = [own_row("p", 1.0, why="stop"), own_row("p", None, why="error")]
    batch = read_one(write_lines(tmp_path / "a.jsonl", rows), columns=columns)
    assert batch["next", "reward"].isnan().flatten().tolist() == [False, True]
    rows[1] = own_row("p", "none", why="error")
    assert_refused("a finite number", write_lines(tmp_path / "a.jsonl", rows), columns=columns)


def test_table_a_value_of_the_line_applies_only_if_no_rollout_has_the_column(tmp_path):
    columns = {"rollouts": "samples", "reward": "m.score", "response": "output", "status": "end"}
    line = {"m": {"score": 0.75}, "output": "4", "end": "length"}
    for samples, rewards, ends in (
        ([{}, {}], [0.75] * 2, [Status.TRUNCATED] * 2),
        ([{"m": {"score": 0.0}}] * 2, [0.0] * 2, [Status.TRUNCATED] * 2),
        ([{"end": "stop"}, {"end": None}], [0.75] * 2, [Status.COMPLETED, -1]),
    ):
        path = write_lines(tmp_path / "a.jsonl", [{**line, "samples": samples}])
        batch = read_one(path, columns=columns)
        assert batch["next", "reward"].flatten().tolist() == rewards
        assert batch["status"].tolist() == ends
    for other in ({"m": {"score": None}}, {"m": {}}, {}):
        write_lines(path, [{**line, "samples": [{"m": {"score": 1.0}}, other]}])
        assert_refused("rollout 1: 'm.score' .* is required, a finite number", path, columns=columns)


def test_table_rollout_ids_may_repeat_in_different_groups_by_order(tmp_path):
    rows = [own_row(None, 1.0, k=at % 2) for at in range(4)]
    columns = {"reward": "metrics.score", "response": "output", "rollout": "k"}
    batch = read_one(write_lines(tmp_path / "a.jsonl", rows), columns=columns, group_by="order", group_size=2)
    assert in_order(batch["group_id"]) == [0, 0, 1, 1]
    assert in_order(batch["rollout_id"]) == [0, 1, 2, 3]


def test_table_draws_of_a_prompt_are_told_apart_by_the_order_of_lines_alone(tmp_path):
    """A line with several rollouts may have several draws, whose order is not known."""
    columns = {"prompt": "q", "reward": "r", "response": "a"}
    lines = [{"q": q, "r": float(at % 2), "a": "4"} for at, q in enumerate("aaaabb")]
    lists = [{"q": q, "r": [1.0, 0.0], "a": ["4", "5"]} for q in "aab"]
    for rows, sizes in ((lines, [2, 2, 2]), (lists, [2])):
        path = write_lines(tmp_path / "a.jsonl", rows)
        batch = read_one(path, columns=columns, group_by="prompt", group_size=2)
        assert [in_order(batch["group_id"]).count(group) for group in range(len(sizes))] == sizes


def test_table_a_failure_takes_precedence_over_a_truncation(tmp_path):
    columns = {**COLUMNS, "status": "end", "truncated": "cut"}
    found = {
        (end, cut): read_one(
            write_lines(tmp_path / "a.jsonl", [own_row(0, 1.0, end=end, cut=cut)]), columns=columns
        )["status"].tolist()
        for end in ("error", "abort", "length", "stop", None)
        for cut in (True, False)
    }
    assert [end[0] for end in found.values()] == [
        *[Status.FAILED] * 2,
        *[Status.ABORTED] * 2,
        *[Status.TRUNCATED] * 2,
        *[Status.TRUNCATED, Status.COMPLETED] * 2,
    ]


def test_table_groups_of_prompts_need_prompts(tmp_path):
    """Rows without a prompt are not a group. The prompt is all messages before the assistant's first."""
    columns = {"reward": "metrics.score", "response": "output"}
    path = write_lines(tmp_path / "a.jsonl", [own_row(0, 1.0, q=None)] * 2)
    for named in (columns, {**columns, "prompt": "q"}):
        assert_refused(
            "a.jsonl:1: .* a prompt is required; found none", path, columns=named, group_by="prompt"
        )
    chats = [
        [
            {"role": "system", "content": system},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "4"},
        ]
        for system in ("Be brief.", "Be brief.", "Be kind.")
    ]
    write_lines(path, [own_row(0, 1.0, output=each) for each in chats])
    batch = read_one(path, columns=columns, group_by="prompt")
    assert in_order(batch["group_id"]) == [0, 0, 1]


@pytest.mark.parametrize("nothing", [None, "", False, {}])
def test_an_empty_error_is_not_a_failure(nothing, tmp_path):
    whole = gym_row(0, 0, 1.0)
    whole["response"] |= {"error": nothing, "incomplete_details": nothing}
    for name, row in (
        ("verifiers", verifiers_row(0, 1.0, error=nothing)),
        ("prime_hosted", hosted_row(0, 0, 1.0, error=nothing, is_truncated=False)),
        ("nemo_gym", whole),
    ):
        batch = read_one(write_lines(tmp_path / "a.jsonl", [row]), name)
        assert batch["status"].tolist() == [Status.COMPLETED], name


TOKEN_ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
TOKEN_ITEM |= {"prompt_token_ids": [1], "generation_token_ids": [2, 3]}


@pytest.mark.parametrize(
    ("name", "place", "change", "message"),
    [
        ("atropos", (), {"scores": []}, "'scores' must have a score for each rollout; found []"),
        ("atropos", (), {"tokens": 3}, "'tokens' must be a list with an entry for each rollout; found 3"),
        ("atropos", (), {"tokens": [[1]]}, "'tokens' must have one entry for each score (2); found 1"),
        (
            "atropos",
            (),
            {"messages": [None] * 3},
            "'messages' must have one entry for each score (2); found 3",
        ),
        (
            "atropos",
            ("masks", 1),
            [0, 0, 1],
            "'mask' must be a list as long as the tokens (4); found [0, 0, 1]",
        ),
        (
            "atropos",
            ("masks", 1),
            [-100, 9, 6, 7],
            "'mask' must have the token itself or -100, or 1 and 0, at each token; found [-100, 9, 6, 7]",
        ),
        (
            "atropos",
            ("advantages", 1),
            [0.5, 0.5],
            "'advantages' has one, or one for each token (4); found 2",
        ),
        (
            "atropos",
            ("inference_logprobs", 1),
            [0.5],
            "'inference_logprobs' has one for each token (4); found 1",
        ),
        (
            "nemo_gym",
            ("response", "output"),
            [{**TOKEN_ITEM, "generation_log_probs": [-1.0]}],
            "'generation_log_probs' has one for each of the 2 tokens; found 1",
        ),
        (
            "nemo_rl",
            (),
            {"advantages": [[0.5] * 2]},
            "'advantages' has one, or one for each token (5); found 2",
        ),
        (
            "nemo_rl",
            (),
            {"input_lengths": [6]},
            "'input_lengths' is at most the length of token_ids (5); found 6",
        ),
        (
            "nemo_rl",
            (),
            {"token_loss_mask": [[1]]},
            "'token_loss_mask' must be as long as token_ids (5); found 1",
        ),
        (
            "nemo_rl",
            (),
            {"generation_logprobs": [[]]},
            "'generation_logprobs' must be as long as token_ids (5); found 0",
        ),
        (
            "nemo_rl",
            (),
            {"rewards": [1.0, 2.0]},
            "'rewards' must be a list of one, the sample's slice of the batch; found [1.0, 2.0]",
        ),
        (
            "prime_rl",
            ("traces", 1, "nodes", 1, "mask"),
            [True],
            "'mask' must be as long as token_ids (3); found [1]",
        ),
        (
            "prime_rl",
            ("traces", 1, "nodes", 1, "logprobs"),
            [-1.0],
            "'logprobs' has one for each sampled token (2); found [-1.0]",
        ),
        (
            "prime_rl",
            ("traces", 1, "nodes", 1, "parent"),
            1,
            "'parent' must be a node before this one (1); found 1",
        ),
        (
            "slime",
            (),
            {"loss_mask": [1]},
            "the loss mask covers the response (2 tokens) or the sequence (4); found",
        ),
        (
            "slime",
            (),
            {"rollout_log_probs": [1.0]},
            "log-probabilities cover the response (2 tokens); found 1 entries",
        ),
        (
            "slime",
            (),
            {"response_length": 5},
            "the response is a part of the tokens; found a response of 5 in 4",
        ),
        ("slime", (), {"weight_versions": 3}, "'weight_versions' must be a list; found 3"),
        ("slime", (), {"weight_versions": [-1]}, "'weight_versions' must hold version numbers; found [-1]"),
        (
            "slime",
            (),
            {"reward": {}},
            "'reward' must be a number or a dict of numbers, else give reward_key; found {}",
        ),
        ("tinker", (), {"schema_version": 2}, "'schema_version' must be 1, the only known version; found 2"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_with_the_numbers(name, place, change, message, tmp_path):
    record, options, *_ = WHOLE[name]
    row = copy.deepcopy(record)
    if isinstance(change, dict):
        functools.reduce(operator.getitem, place, row).update(change)
    else:
        functools.reduce(operator.getitem, place[:-1], row)[place[-1]] = change
    assert_refused(re.escape(f": {message}"), written(name, row, tmp_path), name, **options)


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        (["12", 9, "0010"], 9),
        ([0, 5], 0),
        ([], None),
        ([4, "unknown"], None),
        (["9" * 18], 10**18 - 1),
        (["9" * 19], None),
    ],
)
def test_slime_the_policy_version_is_the_oldest_of_a_rollout(versions, oldest, tmp_path):
    batch = read_one(slime_dump(tmp_path / "5.pt", 5, [slime_sample(0, 0, 1.0, weight_versions=versions)]))
    found = batch.get(("next", "policy_version"), None)
    assert (None if found is None else found.tolist()) == (None if oldest is None else [oldest])


def test_table_a_conversation_in_one_column_is_split_at_the_assistant(letters, tmp_path):
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "tool", "content": "said"},
    ]
    for value in (messages, json.dumps(messages)):
        path = write_lines(tmp_path / "a.jsonl", [own_row(0, 1.0, output=value)])
        batch = read_one(path, columns=COLUMNS, tokenizer=letters)
        assert (batch["prompt_text"][0], trained_text(batch, 0)) == ("user: 2+2?", "4")


@pytest.mark.parametrize(
    ("columns", "change", "message"),
    [
        ({"reward": "r"}, {}, r"the format table needs columns.response, such as columns="),
        ({**COLUMNS, "rewards": "r"}, {}, "columns has no 'rewards'"),
        ({**COLUMNS, "tokens": "r"}, {}, r"columns has no 'tokens' \(did you mean 'length'\?\)"),
        ({**COLUMNS, "step": 3}, {}, "columns.step must be the name of a column; got 3"),
        (
            {**COLUMNS, "reward": "metrics.nope"},
            {},
            r"'metrics.nope' \(source.columns.reward\) is required, a finite",
        ),
        (
            COLUMNS,
            {"metrics": {"score": "high"}},
            r"'metrics.score' \(source.columns.reward\) must be a finite",
        ),
        (COLUMNS, {"problem_id": None}, r"'problem_id' \(source.columns.group\) is required"),
        (COLUMNS, {"output": None}, r"'output' \(source.columns.response\) is required"),
        (
            {**COLUMNS, "rollouts": "output"},
            {},
            r"'output' \(source.columns.rollouts\) must be a list of objects",
        ),
        ({**COLUMNS, "status": "s"}, {"s": "odd"}, "'status' must be one of completed"),
        (COLUMNS, {"metrics": {"score": [1, 2]}, "output": ["4"]}, "a list as long as that of the rewards"),
        ({**COLUMNS, "rollout": "k"}, {"k": 1}, "a record must occur once in a step"),
        ({"reward": "metrics.score", "response": "output"}, {}, "a sample needs a group"),
        (COLUMNS, {"metrics": {"score": []}, "output": []}, "source.columns.reward.* must be a list with a"),
        ({**COLUMNS, "rollouts": "k"}, {"k": []}, "source.columns.rollouts.* must be a list with a rollout"),
    ],
)
def test_table_that_does_not_fit_its_columns_is_refused(columns, change, message, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [own_row(0, 1.0, **change)] * 2)
    with pytest.raises((ValueError, SourceError), match=message):
        list(open_dump(path, columns=columns))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": "m.scor"}, "'m' has the keys 'score' (did you mean 'm.score'?)"),
        ({"reward": "m.score.value"}, "'m.score' is 1.0 (did you mean 'm.score'"),
        (
            {"reward": "score"},
            "the keys 'm', 'out' of the rollout and 'prompt', 'samples', 'meta' of the line",
        ),
        ({"reward": "score"}, "of the line (did you mean 'm.score'?)"),
        ({"reward": "samples.m.score"}, "'samples' is [{'m': {...}, 'out': '4'}] (did you mean "),
        ({"response": "outt"}, "(did you mean 'out'?)"),
        ({"group": "meta.idd"}, "'meta' has the keys 'id' (did you mean 'meta.id'"),
        ({"rollouts": "sampls"}, "'prompt', 'samples', 'meta' of the line (did you mean 'samples'?)"),
    ],
)
def test_table_an_error_of_a_wrong_path_has_the_keys_where_the_path_ends(change, said, tmp_path):
    columns = {"rollouts": "samples", "reward": "m.score", "response": "out", "group": "meta.id"}
    line = {"prompt": "2+2?", "samples": [{"m": {"score": 1.0}, "out": "4"}], "meta": {"id": 3}}
    path = write_lines(tmp_path / "a.jsonl", [line])
    assert_refused(re.escape(said), path, columns=columns | change)
    assert read_one(path, columns=columns)["group_id"].tolist() == [3]


def test_an_error_of_a_missing_key_names_the_nearest_key():
    with pytest.raises(SourceError, match=r"found the keys 'rewrad', 'id' \(did you mean 'rewrad'\?\)$"):
        Record({"rewrad": 1.0, "id": 2}, "a.jsonl:1").number("reward")


# -- the batch ---------------------------------------------------------------------------------------


def row(**changes):
    return Sample(**{"group": 0, "rollout": 0, "reward": 1.0, "where": "here", **changes})


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one sample"),
        (
            [row(), row(rollout=1, policy_version=3)],
            "policy_version must be on all .* 1 of 2 have none: here",
        ),
        (
            [row(), row(rollout=1, tokens=[1], response_length=1)],
            "^response_length must be on all samples of a step or on none; 1 of 2 have none: here$",
        ),
        (
            [row(expected_rollouts=2, status=Status.FAILED), row(rollout=1, status=Status.FAILED)],
            "expected_rollouts must be on all",
        ),
        (
            [row(where="there"), row(group=("a", 1))],
            "here: a rollout belongs to one group; found the rollout 0 in the group 'a/1', and at there in "
            "the group "
            "'0'$",
        ),
        (
            [row(expected_rollouts=1), row(rollout=1, expected_rollouts=1)],
            "^here: the group '0' was dispatched with 1 rollout; found 2: here, here. Was its prompt "
            "drawn twice, or is "
            "source.group_size wrong.$",
        ),
        ([row(reward=None)], "needs a reward; found none, with the status completed"),
        ([row(rewards={"a": math.nan}, reward=None)], "needs a reward"),
        ([row(rewards={"a": 1.0}), row(rollout=1, rewards={"b": 1.0})], "all samples have the same rewards"),
        ([row(tokens=[1], response_length=2)], "a part of the tokens; found a response of 2 in 1"),
        ([row(tokens=[1, 2, 3], response_length=2, loss_mask=[1])], "the loss mask covers .*found 1 entries"),
        ([row(tokens=[1, 2], response_length=2, log_probs=[0.0])], "log-probabilities cover the response"),
        ([row(response_length=2**40)], "at most 16777216 tokens"),
    ],
)
def test_contradicting_samples_are_refused(samples, message):
    with pytest.raises(SourceError, match=message):
        to_batch(samples)


@pytest.mark.parametrize(
    ("known", "extent"),
    [
        ({}, None),
        ({"response_length": 2}, (2, 2)),
        ({"log_probs": [-1.0] * 3}, (3, 3)),
        ({"loss_mask": [1] * 4}, (4, 4)),
        ({"tokens": [7] * 5}, (5, 5)),
        ({"tokens": [7] * 5, "response_length": 0}, (5, 0)),
        ({"tokens": [7] * 5, "log_probs": [-1.0] * 3}, (5, 3)),
        ({"tokens": [7] * 5, "loss_mask": [1] * 4}, (5, 4)),
        ({"tokens": [7] * 5, "log_probs": [-1.0] * 3, "loss_mask": [1] * 5}, (5, 3)),
        ({"tokens": [7] * 5, "response_length": 2, "loss_mask": [1] * 5}, (5, 2)),
    ],
)
def test_the_length_of_a_response_is_that_of_the_first_list_for_it(known, extent):
    assert row(**known).check().extent() == extent


def test_samples_up_to_the_limits_are_read(monkeypatch):
    """A sample has at most 5 tokens. A step has at most 15 with padding, and at most 6 or twice its own."""
    batch = "headrace.pipeline.tools.dumps.readers.batch"
    for name, value in {"MAX_TOKENS": 5, "MAX_CELLS": 15, "UNPADDED": 6, "PADDING": 2}.items():
        monkeypatch.setattr(f"{batch}.{name}", value)

    def shape(*lengths, **known):
        samples = [
            row(rollout=at, tokens=[7] * length, response_length=0) for at, length in enumerate(lengths)
        ]
        return tuple(to_batch(samples)["tokens", "full"].shape)

    said = (
        "at most {} tokens with padding (rows × tokens of the longest row); found {} rows, and {} tokens in"
    )
    assert shape(5, 5, 5) == (3, 5)
    assert shape(5, 0) == (2, 5)  # 10 tokens with padding are 2 times 5
    assert shape(3, 0) == (2, 3)  # 6 tokens with padding are always allowed
    assert shape(0) == (1, 1)
    for lengths, most in {(5, 5, 5, 5): 15, (4, 0, 0): 8, (3, 0, 0): 6}.items():
        with pytest.raises(SourceError, match=re.escape(said.format(most, len(lengths), max(lengths)))):
            shape(*lengths)
    with pytest.raises(SourceError, match=r"^here: a sample has at most 5 tokens; found 6$"):
        shape(6)
    lengths = [row(rollout=at, response_length=5) for at in range(4)]
    assert to_batch(lengths[:3])[MASK].shape == (3, 5)
    with pytest.raises(SourceError, match=re.escape(said.format(15, 4, 5))):
        to_batch(lengths)


def test_a_lost_sample_may_lack_all_columns_but_its_ids():
    """The other samples of the step have them. A lost one has NaN, −1, an empty text or no token instead."""
    full = {"tokens": [1, 2, 3], "response_length": 2, "log_probs": [-0.5, -1.0], "policy_version": 0}
    full |= {"advantage": 0.25, "prompt": "q", "response": "a", "ground_truth": "g"}
    lost = row(rollout=1, reward=None, status=Status.FAILED)
    found = whole(to_batch([row(**full), lost, row(**full, rollout=2, in_loss=False)]))
    del found["group_id"], found["rollout_id"], found["group_label"]
    assert found == {
        "rollout_label": ["0", "1", "2"],
        "status": [Status.COMPLETED, Status.FAILED, Status.COMPLETED],
        "next.reward": [[1.0], [None], [1.0]],
        "next.policy_version": [0, -1, 0],
        "logged_advantage": [0.25, None, 0.25],
        "tokens.full": [[1, 2, 3], [0, 0, 0], [1, 2, 3]],
        "masks.all_attention_mask": [[True] * 3, [False] * 3, [True] * 3],
        "masks.all_assistant_mask": [[False, True, True], [False] * 3, [False] * 3],
        "log_probs.full": [[None, -0.5, -1.0], [None] * 3, [None, -0.5, -1.0]],
        "prompt_text": ["q", "", "q"],
        "response_text": ["a", "", "a"],
        "ground_truth": ["g", "", "g"],
    }
    for name in set(full) - {"response_length", "ground_truth", "tokens"}:
        with pytest.raises(SourceError, match=f"^{name} must be on all samples .* 1 of 3 have none: here$"):
            to_batch([row(**full), lost, row(**{**full, name: None}, rollout=2)])
    assert (
        "ground_truth" not in to_batch([row(**full), row(**{**full, "ground_truth": None}, rollout=2)]).keys()
    )


def test_a_loss_mask_may_cover_all_tokens_and_ids_may_mix_types(tmp_path):
    samples = [row(tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1, 0]), row(group="0", rollout="0")]
    samples[1].tokens, samples[1].response_length = [4], 1
    batch = to_batch(samples)
    assert batch[MASK].int().tolist() == [[0, 1, 0], [0, 0, 1]]
    assert batch["group_id"].tolist() == [0, 1]
    assert batch["group_id"].dtype == batch["rollout_id"].dtype == batch["status"].dtype == torch.int64
    assert batch["next", "reward"].dtype == torch.float64


# -- the stream --------------------------------------------------------------------------------------


def test_invalid_records_are_skipped_and_counted_if_allowed(tmp_path):
    good = [json.dumps(verl_row(f"u{i}_0_0", 1.0)) for i in range(3)]
    odd = json.dumps(verl_row("v_0_0", "high"))
    lines = [good[0], "[1]", "{", odd, "", good[1], '{"a": 1, "a": 2}', good[2]]
    path = tmp_path / "7.jsonl"
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    source = open_dump(path, skip_bad=True)
    for _ in range(2):  # each pass counts from 0
        assert len(only(source)[1]) == 3
        assert source.skipped == 5
    assert source.messages[0] == f"{path}:2: a line must be one JSON object; found [1]"
    assert ":4: 'score' must be a finite number; found 'high'" in source.messages[2]
    assert_refused(r"7\.jsonl:2: a line must be one JSON object; found \[1\]", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "NaN", "score": NaN}', "'score' is the literal NaN, which is no JSON"),
        ('{"rewards": [1, -Infinity]}', "'rewards' is the literal -Infinity"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' twice"),
        ("[" * 100_000, "must be one JSON object"),
        ("9" * 5000, "must be one JSON object"),
        ("3", "must be one JSON object; found 3"),
        (
            '{"input": "x"',
            """is no valid JSON: it breaks off after '{"input": "x"', and the file ends there""",
        ),
        ('{"input": "x\n"}', """is no valid JSON: it breaks off after '{"input": "x'$"""),
        ('{"input": x}', "is no valid JSON: at column 11 it has 'x}'"),
        (f'{{"input": {"x" * 50}', f"is no valid JSON: at column 11 it has '{'x' * 20}'$"),
        (f'{{"input": "{"x" * 50}"', f"""it breaks off after '{"x" * 19}"', and the file ends there"""),
        ("", "the file is empty"),
        ('{"input": "\\ud800", "output": "", "score": 1, "step": 1}', "a string of valid Unicode"),
        (
            '{"input": "x", "output": "", "score": true, "step": 1}',
            "'score' must be a finite number; found True",
        ),
        ('{"input": "x", "output": "", "score": 1e999, "step": 1}', "'score' must be a finite number"),
        ('{"input": "x", "output": "", "score": 1, "step": 1.0}', "'step' must be an integer"),
        (f'{{"input": "x", "output": "", "score": 1, "step": {2**63}}}', "'step' must be an integer"),
        ('{"input": "x", "output": "", "score": null, "step": 1}', "'score' must be set"),
        ('{"input": "x", "output": "", "step": 1}', "the key 'score' is required; found the keys 'input'"),
    ],
)
def test_an_invalid_line_is_named_with_its_line_number(tmp_path, text, message):
    path = tmp_path / "1.jsonl"
    path.write_text(text)
    with pytest.raises(SourceError, match=message) as caught:
        list(open_dump(path, "verl", group_by="prompt"))
    assert str(caught.value).startswith(str(path))


def test_a_line_that_is_too_long_is_one_invalid_record(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.pipeline.tools.dumps.readers.file_kinds.MAX_LINE", 200)
    rows = [verl_row("a_0_0", 1.0), verl_row("b_0_0", 1.0, prompt="x" * 1000), verl_row("c_0_0", 1.0)]
    source = open_dump(write_lines(tmp_path / "7.jsonl", rows), "verl", skip_bad=True)
    assert list(only(source)[1]["group_label"]) == ["a", "c"]
    assert source.skipped == 1


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path):
    path = tmp_path / "all.jsonl"
    text = "x" * 50_000
    with path.open("w") as file:
        for i in range(400):
            file.write(json.dumps(verl_row(f"u{i}_{i % 2}_0", 1.0, i // 4, text)) + "\n")
    source, last = open_dump(path, "verl"), -1.0
    tracemalloc.start()
    for _, batch in source:
        assert len(batch) == 4
        assert source.read_bytes >= last
        last = source.read_bytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.total_bytes == last > 20_000_000
    assert peak < source.total_bytes / 20


# -- formats and options -----------------------------------------------------------------------------


def test_a_group_uid_has_to_be_declared(tmp_path):
    rows = [verl_row("math_7", score) for score in (1.0, 0.0)] + [verl_row("algebra", 1.0)]
    path = write_lines(tmp_path / "7.jsonl", rows)
    for uid in ("math_7", "7", "_1_0", "math_1_x", "math_x_1", "math__1", "math_1_", "math_١_0", "math_1_²"):
        said = (
            "'uid' must be a key {uid}_{session}_{index} with two numbers at its end; if it is the id of the"
        )
        said += f" group, set source.group_by=uid; found {uid!r}"
        assert_refused(re.escape(said), write_lines(tmp_path / "8.jsonl", [verl_row(uid, 1.0)]), "verl")
    ((_, batch),) = open_dump(path, "verl", group_by="uid")
    assert in_order(batch["group_id"]) == [0, 0, 1]
    assert len(batch["rollout_id"].unique()) == 3
    with pytest.raises(ValueError, match="group_by='uid' is for the format verl"):
        open_dump(write_lines(tmp_path / "a.jsonl", [{}]), "nemo_rl", group_by="uid")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "verll"}, "format must be auto or one of atropos, headrace"),
        ({"group_by": "input"}, "group_by must be one of 'prompt', 'uid', 'order' or None"),
        ({"group_size": 0}, "group_size must be an integer ≥ 1"),
        (
            {"format": "tinker", "group_by": "prompt"},
            "tinker does not read group_by; it reads group_size, reward_key",
        ),
        ({"format": "tinker", "reward_key": "score"}, "reward_key must be one of total_reward, final_reward"),
        ({"format": "verl", "reward_key": ["a", "b"]}, "takes one reward_key"),
    ],
)
def test_invalid_values_of_options_are_refused(tmp_path, options, message):
    path = write_lines(tmp_path / "7.jsonl", [verl_row("a_0_0", 1.0)])
    with pytest.raises(ValueError, match=message):
        open_dump(path, **options)


def test_a_registered_reader_may_yield_batches(tmp_path, monkeypatch):
    def read(path, reading):
        for step in map(int, path.read_text().split()):
            yield step, TensorDict({"group_id": torch.zeros(2)}, batch_size=[2])

    monkeypatch.setitem(READERS, "mine", Format(read, ("*.txt",)))
    path = tmp_path / "a.txt"
    path.write_text("1 2 5")
    assert [(step, len(batch)) for step, batch in open_dump(path, "mine")] == [(1, 2), (2, 2), (5, 2)]
    for last in (1, 2):
        path.write_text(f"1 2 {last}")
        assert_refused(f"found step {last} after step 2", path, "mine")
