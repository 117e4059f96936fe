"""By which coefficient a training step multiplies the gradient of each token's log-probability."""

from .measure import XRay, xray
from .token_table import TokenTable, kl_weights, token_weights
from .unique_pairs import xray_batch

__all__ = ["TokenTable", "XRay", "kl_weights", "token_weights", "xray", "xray_batch"]
