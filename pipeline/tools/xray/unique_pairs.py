"""Make a batch in which each pair of tokens occurs once, so that a gradient identifies the token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from headrace.transforms.table.options import at_least, takes_options

Pad = Literal["left", "right"]
SPARE = 2  # tokens of the vocabulary that are in no pair: the padding, and a token that is never used


@takes_options
def xray_batch(
    lengths: Sequence[int],
    rewards: Sequence[float] | Tensor,
    group_size: int,
    *,
    vocabulary: int | None = None,
    prompts: int | Sequence[int] = 2,
    segments: int | Sequence[int] = 1,
    pad: Pad | None = "right",
    holes: bool = False,
    old_log_prob_shift: float = 0.0,
) -> TensorDictBase:
    """Make a batch in which every pair (previous token, next token) occurs once.

    The tokens are a walk over all pairs of the vocabulary, cut into rows. The pairs do not use the last two
    tokens of the vocabulary: V − 2 is the padding, and V − 1 does not occur.

    Args:
        lengths: number of tokens of each row's response, N numbers ≥ 1.
        rewards: (R,), one reward for each rollout, or (R, K).
        group_size: number of rollouts of a group. The rollouts of a group are consecutive.
        vocabulary: V. None: the smallest possible.
        prompts: number of tokens of each row's prompt, ≥ 1; one number for all rows, or N numbers.
        segments: number of rows of each rollout; one number for all rollouts, or R numbers.
        pad: the side of the padding. None: ragged rows, in a lazy stack.
        holes: whether every third token of a response is masked, as the answer of a tool would be.
        old_log_prob_shift: a number that is added to the log-probabilities, which are −log V in the loss mask
            and lower by 1 outside it. So the ratio of a policy with equal logits to the sampling policy is
            e^−shift.

    Returns:
        TensorDict ``[N]`` with the columns that recipes read, floats in float64: ``("tokens", "full")``,
        ``("masks", "all_attention_mask")``, ``("masks", "all_assistant_mask")``, ``("log_probs", "full")``
        (N, T); ``("next", "reward")``, ``("next", "done")``, ``group_id``, ``rollout_id``,
        ``expected_rollouts`` (N, 1).

    Raises:
        ValueError: the numbers of rows, rollouts or groups do not match; or the vocabulary is too small (the
            message says how large it must be).

    Example:
        >>> batch = xray_batch([2, 3], [0.0, 1.0], group_size=2, prompts=1)
        >>> batch["tokens", "full"].tolist()
        [[0, 0, 1, 3], [0, 2, 1, 1]]
    """
    reward = torch.as_tensor(rewards, dtype=torch.float64).reshape(len(rewards), -1)
    rollouts = torch.arange(len(rewards)).repeat_interleave(
        torch.as_tensor(_of_each("segments", segments, len(rewards)))
    )
    rows = len(rollouts)
    if len(lengths) != rows or len(rewards) % at_least("group_size", group_size, 1):
        raise ValueError(
            f"lengths must have one number for each row: {len(rewards)} rewards and segments={segments} make "
            f"{rows} rows; got {len(lengths)}. The number of rewards must be a multiple of "
            f"group_size={group_size}"
        )
    heads = _of_each("prompts", prompts, rows)
    sizes = [head + at_least("lengths", length, 1) for head, length in zip(heads, lengths, strict=True)]
    least = math.isqrt(sum(sizes) - 1) + 1 + SPARE
    if (size := vocabulary or least) < least:
        raise ValueError(
            f"{sum(sizes)} tokens with unique pairs need a vocabulary of at least {least}; got {vocabulary}"
        )
    walk = _all_pairs(size - SPARE)
    width, singles = max(sizes), []
    for row, (head, length) in enumerate(zip(heads, lengths, strict=True)):
        real = torch.ones(head + length, dtype=torch.bool)
        place = torch.arange(head + length)
        inside = (place >= head) & ((place - head) % 3 != 2 if holes else real)
        tokens = torch.tensor(list(islice(walk, head + length)))
        before, behind = ((width - head - length, 0), (0, width - head - length))[pad == "right"]
        fill = (before, behind) if pad else (0, 0)
        last = row + 1 == rows or int(rollouts[row + 1]) != int(rollouts[row])
        rollout = int(rollouts[row])
        columns = {
            ("tokens", "full"): _filled(tokens, fill, size - 2),
            ("masks", "all_attention_mask"): _filled(real, fill, False),
            ("masks", "all_assistant_mask"): _filled(inside, fill, False),
            # Other values outside the mask, so that the ratio of a misaligned token is not 1.
            ("log_probs", "full"): _filled(
                old_log_prob_shift - math.log(size) - (~inside).double(), fill, 0.0
            ),
            ("next", "reward"): reward[rollout],
            ("next", "done"): torch.tensor([last]),
            "group_id": torch.tensor([rollout // group_size]),
            "rollout_id": torch.tensor([rollout]),
            "expected_rollouts": torch.tensor([group_size]),
        }
        singles.append(TensorDict(columns, batch_size=[]))
    return lazy_stack(singles) if pad is None else torch.stack(singles)


def _of_each(name: str, number: int | Sequence[int], count: int) -> list[int]:
    numbers = [number] * count if isinstance(number, int) else list(number)
    if len(numbers) != count or min(numbers, default=1) < 1:
        raise ValueError(f"{name} must be a number ≥ 1, or {count} of them; got {number}")
    return numbers


def _filled(values: Tensor, fill: tuple[int, int], value: float) -> Tensor:
    return torch.nn.functional.pad(values, fill, value=value)


def _all_pairs(tokens: int) -> Iterator[int]:
    """Yield tokens² tokens in which each pair occurs once (a de Bruijn sequence of order 2)."""
    for first in range(tokens):
        yield first
        for second in range(first + 1, tokens):
            yield from (first, second)
