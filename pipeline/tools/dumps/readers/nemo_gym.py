"""Read rollouts that NeMo Gym collects: a JSON Lines file with one rollout per line.

Schema: NVIDIA-NeMo/Gym, ``nemo_gym/rollout_collection.py``: ``responses_create_params`` (the request, with
``input``), ``response`` (of the Responses API, with ``output``), ``reward``, ``_ng_task_index``,
``_ng_rollout_index``, and the verifier's own keys.

- A group is a task. Rows are in the order in which rollouts ended. Two rows of a task with the same
  ``_ng_rollout_index`` are an error.
- The items of ``output`` are the response. Messages, reasoning and function calls are the policy's.
  ``function_call_output`` and messages of other roles are not.
- Items that carry ``prompt_token_ids`` and ``generation_token_ids``, as NeMo Gym writes them for training,
  are read as tokens. If the prompt of a call does not begin with all tokens before it, the call begins
  another segment of the rollout.
- A response with ``incomplete_details`` was truncated, and one with an ``error`` failed. Otherwise, its
  ``status`` decides. Without these keys, the status is not known.
- In a folder, the files of inputs, failures and metrics are ignored. So the rollouts that failed are missing,
  which ``group_size`` detects.
- Steps are not saved. Each file is one step, numbered in the order of the files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from headrace.transforms import Status

from .batch import Sample
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, conversation, read_messages, text_of


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the samples of one line: one, and one more for each prompt that does not continue earlier tokens.

    Raises:
        SourceError: the line is not as documented.
    """
    params, response = record.record("responses_create_params"), record.record("response")
    task, number = record.whole("_ng_task_index"), record.whole("_ng_rollout_index")
    status = _status(response)
    failed = status is Status.FAILED
    asked = read_messages(params, "input")
    answered = read_messages(response, "output", optional=failed) or []
    if response.get("output", optional=failed) is not None and not isinstance(response.data["output"], list):
        raise response.fail("'output' must be a list of items", response.data["output"])
    row = Sample(
        group=task,
        rollout=(task, number),
        reward=record.number(reading.reward_key or "reward", optional=failed),
        status=status,
        prompt=params.text("input") if asked is None else text_of(asked),
        response=text_of(answered),
        step=reading.file,
        record=(task, number),
    )
    user = [{"role": "user", "content": row.prompt}] if asked is None else asked
    row = replace(row, **conversation(user, answered))
    return _segments(response, row) or [row]


def _status(response: Record) -> Status | None:
    if response.says("error"):
        return Status.FAILED
    if response.says("incomplete_details"):
        return Status.TRUNCATED
    ends = {"completed": Status.COMPLETED, "incomplete": Status.TRUNCATED, "failed": Status.FAILED}
    ends |= {"cancelled": Status.ABORTED}
    if response.get("status", optional=True) is not None:
        return response.choice("status", ends)
    return Status.COMPLETED if "incomplete_details" in response.data else None


def _segments(response: Record, row: Sample) -> list[Sample]:
    """Samples with the tokens of the items that have tokens; none if no item has tokens."""
    segments: list[Sample] = []
    for item in response.records("output", optional=True):
        generated = item.wholes("generation_token_ids", optional=True)
        if generated is None:
            continue
        before = item.wholes("prompt_token_ids")
        log_probs = item.numbers("generation_log_probs", optional=True)
        if log_probs is not None and len(log_probs) != len(generated):
            raise item.fail(
                f"'generation_log_probs' has one for each of the {len(generated)} tokens", len(log_probs)
            )
        last = segments[-1] if segments else None
        if last is None or before[: len(last.tokens or ())] != last.tokens:
            last = replace(row, tokens=before, loss_mask=[], log_probs=[], response_length=0)
            segments.append(last)
        between = len(before) - len(last.tokens or ())  # number of tokens of a tool and of the template
        last.tokens = before + generated
        last.loss_mask = [*(last.loss_mask or ()), *[0] * between, *[1] * len(generated)]
        last.response_length = len(last.loss_mask)
        if last.log_probs is not None:
            gap = [math.nan] * between
            last.log_probs = None if log_probs is None else [*last.log_probs, *gap, *log_probs]
    if any(segment.log_probs is None for segment in segments):
        return [replace(segment, log_probs=None) for segment in segments]
    return segments


FORMAT = Format(
    partial(read_jsonl, parse=parse_row),
    files=("*rollouts*.jsonl", "*.jsonl"),
    ignored=r".*_(materialized_inputs|failures|reward_profiling|agent_metrics)\.jsonl(\.gz)?",
    keys=frozenset({"responses_create_params", "response", "reward", "_ng_task_index", "_ng_rollout_index"}),
    options=("group_size", "reward_key", "tokenizer"),
    unsaid=("tokens",),
)
