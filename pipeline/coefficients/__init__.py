"""Measure the coefficient of the gradient of each token's log-probability in a training step."""

from .causal_lm import table_as_causal_lm
from .measure import XRay, xray
from .of_trl import trl_step
from .page import xray_page
from .token_table import TokenTable, kl_weights, token_weights
from .unique_pairs import xray_batch

__all__ = [
    "TokenTable",
    "XRay",
    "kl_weights",
    "table_as_causal_lm",
    "token_weights",
    "trl_step",
    "xray",
    "xray_batch",
    "xray_page",
]
