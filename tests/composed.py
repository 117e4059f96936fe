"""Pipelines from recipes, each composed once: composing takes longer than most of what is tried with it."""

from __future__ import annotations

import copy
from functools import cache

from headrace.pipeline import Pipeline, load_pipeline


def composed(*overrides: str) -> Pipeline:
    """``load_pipeline(*overrides)``, or a copy of what that returned before it ran anything."""
    return copy.deepcopy(_composed(*overrides))


@cache
def _composed(*overrides: str) -> Pipeline:
    return load_pipeline(*overrides)
