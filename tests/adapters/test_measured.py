"""In TRL's whole step, each token has the weight that the attached recipe declares."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.slow,
    # transformers 5 warns of names that its own Trainer uses.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
]


def test_a_recipe_in_trl_trains_its_declared_weights_in_any_number_of_micro_batches():
    pytest.importorskip("trl", reason="TRL is not installed")
    from headrace.adapters.measured import OF_TRL, recipes_in_trl

    settings = recipes_in_trl()
    assert len(settings) == len(OF_TRL)
    for setting in settings:
        found = setting.measure((1, 3)).xray
        assert found.verdict == "the weights of the pipeline, in 2 of 2 runs", setting.name
        found.assert_uniform()
