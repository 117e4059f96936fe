"""The default experiment: a small transformer learns from scratch to write digit strings backwards."""

from . import digits
from .env import ReverseEnv
from .policy import DigitPolicy

__all__ = ["DigitPolicy", "ReverseEnv", "digits"]
