"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDictBase

from .headrace_dump import read_headrace_dump
from .headrace_table import REQUIRED
from .nemo_rl import read_nemo_rl
from .open_instruct import read_open_instruct
from .prime_rl import read_prime_rl
from .reading import Reading
from .sample import Sample
from .slime import read_slime
from .tinker import REWARDS, read_tinker
from .trl import read_trl
from .verifiers import read_verifiers
from .verl import read_verl

GROUP_BY = frozenset({"group_by"})
GROUP_SIZE = frozenset({"group_size"})
REWARD_KEY = frozenset({"reward_key"})


@dataclass(frozen=True, slots=True)
class Format:
    """How files of one format are found, recognised and read.

    Args:
        read: takes a file and the pass that it belongs to, and yields :class:`Sample`, or batches as
            ``(step, TensorDict)``.
        files: glob patterns in a folder; the first that matches a file counts. Those of one place, with ``|``
            between them, count together. One with ``.jsonl`` matches ``.jsonl.gz`` too.
        keys: keys that the first record has, or columns of a table; empty: the suffix is enough.
        options: of ``group_by``, ``group_size``, ``reward_key``, those that it reads.
        reward_keys: whether `reward_key` may be ``one`` name or ``many``.
        rewards: names that `reward_key` may have; empty: any.
        ignored: names of files that are not read in a folder, as a regular expression.
    """

    read: Callable[[Path, Reading], Iterator[Sample | tuple[int, TensorDictBase]] | Iterator[Any]]
    files: tuple[str, ...]
    keys: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    reward_keys: Literal["one", "many"] = "one"
    rewards: tuple[str, ...] = ()
    ignored: str | None = None


READERS: dict[str, Format] = {
    "headrace": Format(
        read_headrace_dump,
        files=("step_*.parquet|step_*.jsonl", "rollouts/step_*.parquet|rollouts/step_*.jsonl"),
        keys=frozenset(REQUIRED),
    ),
    "slime": Format(
        read_slime,
        files=("*.pt",),
        options=REWARD_KEY | GROUP_SIZE,
        ignored=r"(^|.*[^a-zA-Z])eval_\d+\.pt",
    ),
    "verl": Format(
        read_verl,
        files=("*.jsonl",),
        keys=frozenset({"input", "output", "score", "step"}),
        options=GROUP_BY | GROUP_SIZE | REWARD_KEY,
    ),
    "trl": Format(
        read_trl,
        files=("*.parquet", "completions/*.parquet"),
        keys=frozenset({"step", "prompt", "completion", "advantage"}),
        options=GROUP_BY | GROUP_SIZE | REWARD_KEY,
        reward_keys="many",
    ),
    "verifiers": Format(
        read_verifiers,
        files=("results.jsonl", "*/results.jsonl"),
        keys=frozenset({"example_id", "prompt", "completion", "reward"}),
        options=REWARD_KEY | GROUP_SIZE,
    ),
    "prime_rl": Format(
        read_prime_rl,
        files=("traces.jsonl", "step_*/train/effective/traces.jsonl", "traces/stream.jsonl", "stream.jsonl"),
        keys=frozenset({"id", "task", "traces"}),
        options=GROUP_BY | GROUP_SIZE | REWARD_KEY,
    ),
    "nemo_rl": Format(
        read_nemo_rl,
        files=("train_data_step*.jsonl",),
        keys=frozenset({"token_ids", "token_loss_mask", "sample_loss_mask", "rewards"}),
        options=GROUP_BY | GROUP_SIZE,
    ),
    "open_instruct": Format(
        read_open_instruct,
        files=("*_rollouts_*.jsonl",),
        keys=frozenset({"prompt_tokens", "response_tokens", "prompt_idx", "sample_idx", "reward"}),
        options=GROUP_SIZE,
    ),
    "tinker": Format(
        read_tinker,
        files=(
            "train_rollout_summaries.jsonl",
            "*/train_rollout_summaries.jsonl",
            "train_iteration_*_rollout_summaries.jsonl",
        ),
        keys=frozenset({"schema_version", "group_idx", "traj_idx", "total_reward"}),
        options=REWARD_KEY | GROUP_SIZE,
        rewards=REWARDS,
    ),
}
