"""The default experiment: a small transformer learns from scratch to reverse digit strings."""

from . import digits
from .env import ReverseEnv
from .policy import DigitPolicy

__all__ = ["DigitPolicy", "ReverseEnv", "digits"]
