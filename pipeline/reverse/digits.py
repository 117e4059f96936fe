"""Tokens, prompts and answers of the default experiment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

PAD, END, ASK, REVISE = 10, 11, 12, 13  # 0 … 9 are the digits
VOCABULARY = 14
LONGEST = 3
PROMPT_LENGTH = 2 * LONGEST + 3  # digits and ASK; for a revision, then the draft with its END, and REVISE
RESPONSE_LENGTH = LONGEST + 1  # digits and END

STRINGS: list[tuple[int, ...]] = [
    digits for length in range(1, LONGEST + 1) for digits in itertools.product(range(10), repeat=length)
]


def prompts() -> Tensor:
    """(1110, PROMPT_LENGTH) int64: all strings of 1 to 3 digits, each followed by ASK, left-padded."""
    return torch.tensor([[*[PAD] * (PROMPT_LENGTH - 1 - len(digits)), *digits, ASK] for digits in STRINGS])


def answers() -> Tensor:
    """(1110, RESPONSE_LENGTH) int64: the reversed strings, each followed by END, right-padded."""
    return torch.tensor([[*digits[::-1], END, *[PAD] * (LONGEST - len(digits))] for digits in STRINGS])


def revision_prompts(asked: Tensor, draft: Tensor) -> Tensor:
    """(B, PROMPT_LENGTH) int64: the prompt, the draft and REVISE, left-padded."""
    joined = torch.cat([asked, draft, torch.full_like(draft[:, :1], REVISE)], dim=1)
    # A stable sort by "is not padding" moves the padding to the left and keeps the order of the tokens.
    order = (joined != PAD).long().sort(dim=1, stable=True).indices
    return joined.gather(1, order)[:, -PROMPT_LENGTH:]


def token_texts(ids: Sequence[int]) -> list[str]:
    """Return the text of each token.

    Example:
        >>> "".join(token_texts([1, 2, ASK, 1, 2, END, REVISE, 2, 1, END]))
        '12 backwards? 12. Again: 21.'
    """
    words = {PAD: "", END: ".", ASK: " backwards? ", REVISE: " Again: "}
    return [words.get(token, str(token)) for token in ids]


def graded(response: Tensor, answer: Tensor) -> Tensor:
    """(B,) float: the share of the answer's tokens, END included, that the response has at their position."""
    asked = answer != PAD
    return ((response == answer) & asked).sum(-1) / asked.sum(-1)
