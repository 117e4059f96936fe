"""Random groups of rollouts of one to three segments, drawn by hypothesis."""

from __future__ import annotations

import torch
from batches import batch_of
from hypothesis import strategies as st

from headrace.transforms import FanOutCollapse

MASK = ("masks", "all_assistant_mask")


REWARDS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1000).map(lambda x: x / 1000))


@st.composite
def rollouts(draw):
    """Draw rollouts as (group, id, reward, length of each segment), and an order of their rows."""
    number = draw(st.integers(1, 10))
    labels = draw(st.lists(st.integers(0, 2**40), min_size=number, max_size=number, unique=True))
    found = [
        (
            draw(st.integers(0, 2)) * 7,
            label,
            draw(REWARDS),
            draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        )
        for label in labels
    ]
    rows = sum(len(lengths) for *_, lengths in found)
    return found, draw(st.permutations(range(rows)))


def batch_of_rollouts(found, order, **extra):
    """The rollouts as a collapsed batch with one row per segment."""
    rows = [(group, label, reward, length) for group, label, reward, lengths in found for length in lengths]
    groups, ids, rewards, lengths = (list(column) for column in zip(*(rows[i] for i in order), strict=True))
    batch = batch_of(rewards, groups, ids, tokens=4)
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    batch[MASK] = torch.arange(4) < torch.tensor(lengths)[:, None]
    return FanOutCollapse()(batch)


def per_rollout(batch, column):
    return dict(zip(batch["rollout_id"].tolist(), column.flatten().tolist(), strict=True))
