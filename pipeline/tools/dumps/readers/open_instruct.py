"""Read rollouts of open-instruct (``--save_traces``), one in each line of ``<run>_rollouts_<shard>.jsonl``.

Schema: allenai/open-instruct at 00feb3a, ``open_instruct/rl_utils.py`` (``RolloutRecord``,
``save_rollouts_to_disk``): ``step``, ``sample_idx``, ``prompt_idx``, ``prompt_tokens``,
``response_tokens``, ``reward``, ``advantage``, ``finish_reason``, ``dataset``, ``ground_truth``,
``request_info``, ``logprobs``. A shard has about ten thousand rollouts, and a step is in one shard.

- ``prompt_idx`` is ``sample_idx`` divided by the rollouts per prompt. Under ``mask_truncated_completions``
  rows are removed before that division, so rollouts of different prompts may get the same ``prompt_idx``.
  Samples of a group with different prompts are therefore an error.
- A ``finish_reason`` other than ``stop`` means truncated, which is open-instruct's own rule.
- Two samples of a step with the same ``sample_idx`` are an error.
- The mask of tokens that tools wrote is not saved, so all tokens of the response train.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.transforms import Status

from .batch import Sample
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, read_json


def read_open_instruct(path: Path, reading: Reading) -> Iterator[Sample]:
    """Read the samples of one shard.

    Raises:
        SourceError: a record is not as documented, or two prompts share a ``prompt_idx``.
    """
    prompts: dict[int, tuple[list[int], str]] = {}
    current: int | None = None

    def parse(record: Record, reading: Reading) -> list[Sample]:
        nonlocal current
        samples = parse_row(record, reading)
        if samples[0].step != current:
            prompts.clear()
            current = samples[0].step
        tokens = record.data["prompt_tokens"]
        first, where = prompts.setdefault(record.data["prompt_idx"], (tokens, record.where))
        if first != tokens:
            raise record.fail(
                f"prompt_tokens must be those at {where}, which has the same prompt_idx (did "
                "mask_truncated_completions remove rows before the dump?)",
                tokens,
            )
        return samples

    return read_jsonl(path, reading, parse)


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the sample of one line of the dump.

    Raises:
        SourceError: the line is not as documented.
    """
    prompt, response = record.wholes("prompt_tokens"), record.wholes("response_tokens")
    return [
        Sample(
            group=record.whole("prompt_idx"),
            rollout=record.whole("sample_idx"),
            reward=record.number("reward"),
            status=Status.COMPLETED if record.text("finish_reason") == "stop" else Status.TRUNCATED,
            ground_truth=read_json(record, "ground_truth"),
            tokens=prompt + response,
            response_length=len(response),
            log_probs=record.numbers("logprobs", optional=True),
            step=record.whole("step"),
            advantage=record.number("advantage"),
            record=record.whole("sample_idx"),
        )
    ]


FORMAT = Format(
    read_open_instruct,
    files=("*_rollouts_*.jsonl",),
    keys=frozenset({"prompt_tokens", "response_tokens", "prompt_idx", "sample_idx", "reward"}),
    options=("group_size",),
    unsaid=("rollouts", "masks"),
)
