"""Measure each token's coefficient: the factor of its log-probability's gradient in a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .causal_lm import table_as_causal_lm
    from .measure import XRay, xray
    from .of_trl import trl_step
    from .page import xray_page
    from .token_table import TokenTable, kl_weights, token_weights
    from .unique_pairs import xray_batch
    from .xray_task import measure_trainer

__all__ = [
    "TokenTable",
    "XRay",
    "kl_weights",
    "measure_trainer",
    "table_as_causal_lm",
    "token_weights",
    "trl_step",
    "xray",
    "xray_batch",
    "xray_page",
]

__getattr__, __dir__ = lazy(__name__, __all__)
