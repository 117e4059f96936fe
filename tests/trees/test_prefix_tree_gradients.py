"""A tree has the gradient of its rows."""

from __future__ import annotations

import pytest
from any_rank import results_of
from gradients import distance
from tree_models import as_tree, gradient_of, make_actor, make_batch, run_rank
from tries import Trie, scenes

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

SCENES = scenes()
every_scene = pytest.mark.parametrize("name", list(SCENES))
CUTS = {
    "whole": {},
    "in micro-batches": {"microbatches": 2},
    "row by row": {"microbatches": 99},
    "by nodes": {"max_tokens": 20, "tree": "group", "balance": "attention"},
    "shuffled otherwise": {"seed": 7, "microbatches": 2, "balance": "tokens"},
}


def check_gradients(kind: str, name: str, side: str, most: float) -> None:
    actor = make_actor(kind)
    batch = make_batch(actor, SCENES[name], side)
    rows = gradient_of(actor, batch)
    assert rows.norm() > 1e-3
    for how, cut in CUTS.items():
        assert distance(gradient_of(actor, batch, as_tree, **cut), rows) <= most, how


@every_scene
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tree_has_the_gradient_of_its_rows(name, side):
    check_gradients("tiny", name, side, 1e-12)


@every_scene
def test_a_model_sees_each_node_once(name):
    actor, nodes = make_actor("tiny"), len(Trie(SCENES[name]).paths)
    batch = make_batch(actor, SCENES[name])
    for transform, tokens in ((as_tree, nodes), ("pack", sum(map(len, SCENES[name])))):
        actor.seen = 0
        gradient_of(actor, batch, transform)
        assert actor.seen == tokens


@pytest.mark.parametrize("name", SCENES)
def test_a_tree_of_a_llama_has_the_gradient_of_its_rows(name):
    pytest.importorskip("transformers", reason="the extra `llm` is not installed")
    check_gradients("sdpa" if list(SCENES).index(name) % 2 else "eager", name, "left", 1e-6)


def test_a_tree_has_the_gradient_of_its_rows_on_two_processes(tmp_path):
    for found in results_of(run_rank, 2, tmp_path):
        assert len(found) == 4 * len(SCENES)  # each scene in four ways
        assert {way: far for way, far in found.items() if far > 1e-12} == {}
