"""The example of a plain PyTorch loop learns its task."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from headrace.pipeline import Decision

EXAMPLE = Path(__file__).parents[2] / "examples" / "pytorch_grpo.py"


@pytest.mark.slow
def test_the_plain_pytorch_example_learns():
    rewards, decisions = zip(*runpy.run_path(str(EXAMPLE))["train"](steps=60), strict=True)
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.45
    assert all(isinstance(each, Decision) for each in decisions)
