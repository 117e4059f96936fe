"""The example trains a model on prefix trees with the result of training on rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
pytestmark = [pytest.mark.llm, pytest.mark.slow]


def test_trees_give_the_weights_of_rows_with_a_third_of_the_tokens():
    path = Path(__file__).parents[2] / "examples" / "tree_llama.py"
    spec = importlib.util.spec_from_file_location("tree_llama", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    batch = example.collected(turns=4)
    rows, trees, before = (example.make_actor() for _ in range(3))
    example.train(rows, batch)
    run = example.train(trees, batch, transform="tree", tree="group")
    assert 0 < 3 * trees.seen < rows.seen
    said = run.report(batch=batch).numbers["tree/tokens/group"]
    assert 0.99 * said < trees.seen / 2 <= said  # in each of two epochs; groups may share tokens, too
    moved, apart = 0.0, 0.0
    for a, b, c in zip(*(actor.state_dict().values() for actor in (rows, trees, before)), strict=True):
        moved, apart = moved + float((a - c).norm()), apart + float((a - b).norm())
    assert 0 < apart < 1e-4 * moved
