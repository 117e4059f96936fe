"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from .nemo_rl import read_nemo_rl
from .open_instruct import read_open_instruct
from .own import NEEDED, read_own
from .prime_rl import read_prime_rl
from .reading import Reading
from .sample import Sample
from .slime import read_slime
from .tinker import read_tinker
from .trl import read_trl
from .verifiers import read_verifiers
from .verl import read_verl

GROUPS = frozenset({"group_by", "group_size"})
REWARD = frozenset({"reward_key"})
SIZE = frozenset({"group_size"})


@dataclass(frozen=True, slots=True)
class Format:
    """How one format is found, recognised and read.

    Args:
        read: takes a file and the pass it belongs to, and yields :class:`Sample`, or batches as
            ``(step, TensorDict)``.
        files: glob patterns below a folder; the first that finds a file counts. One with ``.jsonl`` finds
            ``.jsonl.gz`` too.
        keys: what the first record has, or the columns of a table; empty: the suffix is enough.
        options: of ``group_by``, ``group_size``, ``reward_key``, those that it reads.
        leave: a file's name that is left aside in a folder, as a regular expression.
    """

    read: Callable[[Path, Reading], Iterator[Sample | tuple[int, TensorDictBase]] | Iterator[Any]]
    files: tuple[str, ...]
    keys: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    leave: str | None = None


READERS: dict[str, Format] = {
    "headrace": Format(
        read_own,
        ("step_*.parquet", "step_*.jsonl", "rollouts/step_*.parquet", "rollouts/step_*.jsonl"),
        frozenset(NEEDED),
    ),
    "slime": Format(read_slime, ("*.pt",), options=REWARD | SIZE, leave=r"(^|.*[^a-zA-Z])eval_\d+\.pt"),
    "verl": Format(read_verl, ("*.jsonl",), frozenset({"input", "output", "score", "step"}), GROUPS | REWARD),
    "trl": Format(
        read_trl,
        ("*.parquet", "completions/*.parquet"),
        frozenset({"step", "prompt", "completion", "advantage"}),
        GROUPS | REWARD,
    ),
    "verifiers": Format(
        read_verifiers,
        ("results.jsonl", "*/results.jsonl"),
        frozenset({"example_id", "prompt", "completion", "reward"}),
        REWARD | SIZE,
    ),
    "prime_rl": Format(
        read_prime_rl,
        ("traces.jsonl", "step_*/train/effective/traces.jsonl", "traces/stream.jsonl", "stream.jsonl"),
        frozenset({"id", "task", "traces"}),
        GROUPS | REWARD,
    ),
    "nemo_rl": Format(
        read_nemo_rl,
        ("train_data_step*.jsonl",),
        frozenset({"token_ids", "token_loss_mask", "sample_loss_mask", "rewards"}),
        GROUPS,
    ),
    "open_instruct": Format(
        read_open_instruct,
        ("*_rollouts_*.jsonl",),
        frozenset({"prompt_tokens", "response_tokens", "prompt_idx", "sample_idx", "reward"}),
        SIZE,
    ),
    "tinker": Format(
        read_tinker,
        (
            "train_rollout_summaries.jsonl",
            "*/train_rollout_summaries.jsonl",
            "train_iteration_*_rollout_summaries.jsonl",
        ),
        frozenset({"schema_version", "group_idx", "traj_idx", "total_reward"}),
        REWARD | SIZE,
    ),
}
