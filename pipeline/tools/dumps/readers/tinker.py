"""Read rollout summaries of tinker-cookbook, one in each line of ``train_rollout_summaries.jsonl``.

Schema: tinker-cookbook 0.6.1, ``tinker_cookbook/rl/rollout_logging.py`` (``serialize_rollout_summaries``,
schema_version 1): ``iteration``, ``group_idx``, ``traj_idx``, ``sampling_client_step``, ``total_reward``,
``final_reward``, ``steps`` with ``ac_len`` and ``episode_done`` each, and more. A file is one iteration.

Tokens and texts are not saved. The length of a response is the sum of the lengths of its actions, which all
train. The tokens of the environment between the actions are not counted. A trajectory was truncated if its
last step did not end the episode. Two trajectories of a group with the same ``traj_idx`` are an error.
"""

from __future__ import annotations

from functools import partial

from headrace.transforms import Status

from .batch import Sample
from .file_kinds import Format, Reading, read_jsonl
from .record import Record

REWARDS = ("total_reward", "final_reward")  # the first is the default


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the sample of one line of the summaries.

    Raises:
        SourceError: the line is not as documented.
    """
    version = record.whole("schema_version")
    if version != 1:
        raise record.fail("'schema_version' must be 1, the only known version", version)
    group, steps = record.whole("group_idx"), record.records("steps")
    rollout = (group, record.whole("traj_idx"))
    ended = steps[-1].flag("episode_done") if steps else True
    return [
        Sample(
            group=group,
            rollout=rollout,
            reward=record.number(reading.reward_key or REWARDS[0]),
            status=Status.COMPLETED if ended else Status.TRUNCATED,
            response_length=sum(step.whole("ac_len") for step in steps),
            policy_version=record.whole("sampling_client_step", optional=True),
            step=record.whole("iteration"),
            record=rollout,
        )
    ]


FORMAT = Format(
    partial(read_jsonl, parse=parse_row),
    files=(
        "train_rollout_summaries.jsonl",
        "*/train_rollout_summaries.jsonl",
        "train_iteration_*_rollout_summaries.jsonl",
    ),
    keys=frozenset({"schema_version", "group_idx", "traj_idx", "total_reward"}),
    options=("group_size", "reward_key"),
    rewards=REWARDS,
    unsaid=("masks",),
)
