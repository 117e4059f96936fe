"""Tokens: their columns, how many of a row's are in a mask and how many in the loss, or none of them."""

from .blocks import in_blocks
from .counting import (
    ATTENTION,
    PROMPT,
    RESPONSE,
    knows_loss_tokens,
    knows_response,
    lengths,
    loss_tokens,
    masked_tokens,
)
from .per_token import (
    check_lengths,
    check_mask,
    padded,
    read_advantage,
    read_loss_mask,
    read_tokens,
    write_tokens,
)
from .silencing import remember_lengths, silence, silence_gathered, silencing_later

__all__ = [
    "ATTENTION",
    "PROMPT",
    "RESPONSE",
    "check_lengths",
    "check_mask",
    "in_blocks",
    "knows_loss_tokens",
    "knows_response",
    "lengths",
    "loss_tokens",
    "masked_tokens",
    "padded",
    "read_advantage",
    "read_loss_mask",
    "read_tokens",
    "remember_lengths",
    "silence",
    "silence_gathered",
    "silencing_later",
    "write_tokens",
]
