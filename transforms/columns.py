"""Where each column is in a batch: its default key, stated once for all stages.

A stage takes another key as the keyword ``<role>_key``; in the table a column goes by its role.
"""

from __future__ import annotations

from tensordict import NestedKey

from .schema import DONE, EXPECTED_SEGMENTS, INIT, MINIBATCH, RETURN, REWARD

DEFAULTS: dict[str, NestedKey | None] = {
    "group": "group_id",
    "rollout": "rollout_id",
    "reward": ("next", "reward"),
    "advantage": "advantage",
    "status": None,  # ("next", "status"), else "status"
    "version": ("next", "policy_version"),
    "expected": "expected_rollouts",
    "done": DONE,
    "init": INIT,
    "expected_segments": EXPECTED_SEGMENTS,
    "segment": None,
    "turn": None,
    "loss_mask": ("masks", "all_assistant_mask"),
    "log_prob": ("log_probs", "full"),
    "weight": "loss_weight",
}

# The columns that a stage writes for later ones, and which stage.
WRITERS: dict[NestedKey, str] = {REWARD: "FanOutCollapse", RETURN: "RewardsToGo", MINIBATCH: "ShuffleSplit"}
