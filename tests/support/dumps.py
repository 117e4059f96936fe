"""Small dumps, exactly as the frameworks write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from headrace.pipeline.tools.dumps.readers import SourceError, open_dump


def batch_of(columns: dict[Any, torch.Tensor]) -> TensorDict:
    """A batch of plain columns."""
    return TensorDict(columns, batch_size=[len(next(iter(columns.values())))])


def in_order(ids: torch.Tensor) -> list[int]:
    """The ids as numbers, in the order of their first appearance."""
    return [list(dict.fromkeys(ids.tolist())).index(each) for each in ids.tolist()]


MASK = ("masks", "all_assistant_mask")


def letters_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are ASCII codes. Token 0 is for ``?`` and for all other characters."""
    package = pytest.importorskip("tokenizers")
    vocabulary = {"?": 0} | {chr(code): code for code in range(1, 127) if chr(code) != "?"}
    tokenizer = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def read_one(*arguments: Any, **options: Any) -> TensorDict:
    """The batch of a dump that has one step."""
    ((_, batch),) = open_dump(*arguments, **options)
    return batch


def whole(batch: TensorDictBase, before: str = "") -> dict[str, Any]:
    """All columns of a batch as lists, with None for NaN."""
    found: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            found |= whole(value, f"{before}{key}.")
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            rows = value.reshape(len(batch), -1).tolist()
            rows = [[None if math.isnan(each) else each for each in row] for row in rows]
            found[before + key] = rows if value.ndim > 1 else [row[0] for row in rows]
        else:
            found[before + key] = value.tolist()
    return found


def trained(batch: TensorDict) -> list[int]:
    """The number of tokens in the loss of each row."""
    return batch[MASK].sum(1).tolist()


def trained_text(batch: TensorDict, row: int) -> str:
    """The text of the tokens in the loss of a row, by :func:`letters_tokenizer`."""
    tokens = batch["tokens", "full"][row][batch[MASK][row]].tolist()
    return "".join(chr(token or ord("?")) for token in tokens)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def slime_sample(group: int, index: int, reward: Any, **changes: Any) -> dict[str, Any]:
    return {
        "group_index": group,
        "index": index,
        "prompt": f"prompt {group}",
        "tokens": [1, 2, 10 + index, 20 + index],
        "multimodal_inputs": None,
        "response": "two tokens",
        "response_length": 2,
        "label": "42",
        "reward": reward,
        "loss_mask": None,
        "weight_versions": ["3"],
        "rollout_log_probs": [-0.5, -0.25],
        "rollout_routed_experts": None,
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
        **changes,
    }


def slime_dump(path: Path, step: int = 5, samples: list[dict[str, Any]] | None = None) -> Path:
    samples = [slime_sample(0, 0, 1.0), slime_sample(0, 1, 3.0)] if samples is None else samples
    torch.save({"rollout_id": step, "samples": samples}, path)
    return path


def slime_details(
    folder: Path, samples: list[dict[str, Any]], advantages: list[float], step: int = 5
) -> Path:
    """Write the files of ``--dump-details``: the rollouts, and what two ranks trained."""
    for name in ("rollout_data", "train_data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    slime_dump(folder / "rollout_data" / f"{step}.pt", step, samples)
    trained = []
    for place, (sample, advantage) in enumerate(zip(samples, advantages, strict=True)):
        length = sample["response_length"]
        mask = sample["loss_mask"] or [1] * length
        row = {
            "data_parallel_rank": place % 2,
            "sample_index": sample["index"],
            "rollout_position": place,
            "tokens": torch.tensor(sample["tokens"]),
            "response_lengths": length,
            "rewards": advantage,
            "loss_masks": torch.tensor([0] * length if sample["remove_sample"] else mask, dtype=torch.int),
            "advantages": torch.full((length,), advantage),
            "returns": torch.full((length,), advantage),
        }
        trained.append(row)
    shards = [{"rank": rank, "data_parallel_rank": rank} for rank in range(2)]
    payload = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": trained, "dp_shards": shards}
    torch.save(payload, folder / "train_data" / f"{step}.pt")
    return folder


def verl_row(uid: str | None, score: Any, step: int = 7, prompt: str = "1+1?") -> dict[str, Any]:
    row = {"input": prompt, "output": f"answer {score}", "gts": "2", "score": score, "step": step}
    return row if uid is None else {**row, "uid": uid}


def trl_dump(path: Path, **columns: list[Any]) -> Path:
    table = {
        "step": [4, 4],
        "prompt": [[{"role": "user", "content": "2+2?"}]] * 2,
        "completion": [[{"role": "assistant", "content": text}] for text in ("4", "5")],
        "accuracy": [1.0, 0.0],
        "advantage": [0.5, -0.5],
    }
    ordered = {name: columns.get(name, values) for name, values in table.items() if name != "advantage"}
    ordered |= {name: values for name, values in columns.items() if name not in table}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({**ordered, "advantage": columns.get("advantage", table["advantage"])}), path)
    return path


def verifiers_row(example: int, reward: Any, **changes: Any) -> dict[str, Any]:
    return {
        "example_id": example,
        "prompt": [{"role": "user", "content": "2+2?"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "task": "math",
        "reward": reward,
        "is_completed": True,
        "is_truncated": False,
        "metrics": {"correct": reward},
        "correct": reward,
        **changes,
    }


def node(
    parent: int | None, role: str, tokens: list[int], mask: list[bool], **changes: Any
) -> dict[str, Any]:
    sampled = any(mask)
    row = {
        "parent": parent,
        "message": {"role": role, "content": f"{role} says"},
        "sampled": sampled,
        "token_ids": tokens,
        "mask": mask,
        "logprobs": [-0.5] * sum(mask),
    }
    return {**row, **changes}


def episode(group: str, name: str, rewards: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Two turns: four tokens of prompt and scaffold, two sampled tokens, one of a tool, one sampled token."""
    trace = {
        "version": 1,
        "id": f"trace-{name}",
        "task": {"type": "Task", "data": {"idx": 0}, "key": "k"},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": [
            node(None, "user", [1, 2, 3], [False] * 3),
            node(0, "assistant", [4, 5, 6], [False, True, True]),
            node(1, "tool", [7], [False]),
            node(2, "assistant", [8], [True]),
        ],
        "calls": [{"node": 1, "finish_reason": "stop"}, {"node": 3, "finish_reason": "stop"}],
        "rewards": rewards,
        "is_completed": True,
        "ok": True,
        "stop_condition": "agent_completed",
    }
    return {
        "id": name,
        "env": {"id": "gsm8k"},
        "task": {"type": "Task", "data": {"idx": 0}, "key": "k"},
        "group": {"id": group},
        "run": {
            "type": "train",
            "id": "r",
            "work": {"type": "train", "step": 2, "policy": {"start": 1, "end": 2}},
        },
        "ok": True,
        "errors": [],
        "traces": [trace | changes.pop("trace", {})],
        **changes,
    }


def nemo_row(idx: int, reward: float, prompt: int = 1, **changes: Any) -> dict[str, Any]:
    """A row with two tokens of prompt, two of response and one of padding."""
    return {
        "content": ["some text"],
        "rewards": [reward],
        "input_lengths": [4],
        "token_ids": [[prompt, 2, 3, 4, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5, 0.5, 0.5, 0.5, 0.5]],
        "generation_logprobs": [[0.0, 0.0, -1.0, -2.0, 0.0]],
        "prev_logprobs": [[0.0, 0.0, -1.1, -2.1, 0.0]],
        "idx": idx,
        **changes,
    }


def open_instruct_row(sample: int, prompt: int, reward: float, **changes: Any) -> dict[str, Any]:
    return {
        "step": 3,
        "sample_idx": sample,
        "prompt_idx": prompt,
        "prompt_tokens": [100 + prompt, 101],
        "response_tokens": [7, 8, 9],
        "reward": reward,
        "advantage": 0.25,
        "finish_reason": "stop",
        "dataset": "math",
        "ground_truth": [4],
        "request_info": None,
        "logprobs": [-1.0, -2.0, -3.0],
        **changes,
    }


def tinker_row(group: int, trajectory: int, reward: float, **changes: Any) -> dict[str, Any]:
    step = {"ob_len": 9, "reward": 0.0, "episode_done": False, "metrics": {}, "logs": {}}
    return {
        "schema_version": 1,
        "split": "train",
        "iteration": 6,
        "group_idx": group,
        "traj_idx": trajectory,
        "tags": ["math"],
        "sampling_client_step": 5,
        "total_reward": reward,
        "final_reward": 0.0,
        "trajectory_metrics": {},
        "steps": [
            {**step, "step_idx": 0, "ac_len": 2},
            {**step, "step_idx": 1, "ac_len": 1 + trajectory, "episode_done": True},
        ],
        "final_ob_len": 0,
        **changes,
    }


def gym_row(task: int, rollout: int, reward: Any, **changes: Any) -> dict[str, Any]:
    """A row with a tool call, its output, and an answer."""
    output = [
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Add."}],
            "encrypted_content": None,
        },
        {"type": "function_call", "name": "add", "arguments": '{"a": 2}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "four"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]},
        "response": {"output": output, "incomplete_details": None, "error": None},
        "reward": reward,
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        **changes,
    }


def hosted_row(problem: int, sample: int, reward: Any, **changes: Any) -> dict[str, Any]:
    """A row whose messages are JSON, as in the uploaded Parquet file."""
    return {
        "run_id": "r",
        "step": 3,
        "problem_id": problem,
        "sample_id": sample,
        "prompt": json.dumps([{"role": "user", "content": "2+2?"}]),
        "completion": json.dumps([{"role": "assistant", "content": "4"}]),
        "answer": "4",
        "env_name": "math",
        "reward": reward,
        "advantage": 0.5,
        "num_output_tokens": 2,
        **changes,
    }


def atropos_group(scores: list[float], **changes: Any) -> dict[str, Any]:
    """A group of rollouts with two tokens of prompt and two of response each."""
    count = len(scores)
    return {
        "tokens": [[1, 2, 3 + at, 9] for at in range(count)],
        "masks": [[-100, -100, 3 + at, 9] for at in range(count)],
        "scores": scores,
        "advantages": None,
        "messages": None,
        "overrides": None,
        **changes,
    }


def own_row(problem: Any, score: Any, **changes: Any) -> dict[str, Any]:
    """A line of a user's own file, which COLUMNS describes."""
    return {"problem_id": problem, "k": 0, "output": "4", "metrics": {"score": score}, **changes}


COLUMNS = {"group": "problem_id", "reward": "metrics.score", "response": "output"}
PROMPT = {"group_by": "prompt"}
# One record of each line format, and the options to read it.
RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "atropos": (atropos_group([1.0, 0.0]), {}),
    "nemo_gym": (gym_row(0, 0, 1.0), {}),
    "prime_hosted": (hosted_row(0, 0, 1.0), {}),
    "table": (own_row(0, 1.0), {"columns": {**COLUMNS, "rollout": "k"}}),
    "verl": (verl_row("a_0_0", 1.0), {}),
    "prime_rl": (episode("g", "a", {"r": {"score": 1}}), {}),
    "nemo_rl": (nemo_row(0, 1.0), PROMPT),
    "open_instruct": (open_instruct_row(0, 0, 1.0), {}),
    "tinker": (tinker_row(0, 0, 1.0), {}),
    "verifiers": (verifiers_row(0, 1.0, timing={"total_ms": 8.25}), {}),
}


def path_of(folder: Path, name: str) -> Path:
    """A path that a file of this format may have."""
    return folder / ("train_data_step1.jsonl" if name == "nemo_rl" else "dump.jsonl")


def assert_refused(match: str, path: Path | str, *more: str, **options: Any) -> None:
    """Check that reading the dump raises a SourceError that matches."""
    with pytest.raises(SourceError, match=match):
        list(open_dump(path, *more, **options))
