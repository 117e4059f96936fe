"""In a step of a trainer, each token has the weight that the attached recipe declares."""

from __future__ import annotations

import sys

import foreign
import pytest
from small_openrlhf import instead_of_openrlhf
from small_swift import instead_of_swift

pytestmark = [
    pytest.mark.slow,
    # transformers 5 warns of names that its own Trainer uses.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning"),  # verl's imports warn
]
LOST = "with 3 micro-batches, micro-batch 0, 1 (from 0) has no gradient"


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Stand-ins for trainers that are not installed, with their losses as loops."""
    foreign.verl_trainer(monkeypatch)
    foreign.verl_losses(monkeypatch)
    monkeypatch.delitem(sys.modules, "headrace.adapters.verl", raising=False)
    with instead_of_openrlhf(tmp_path), instead_of_swift():
        yield


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("trainer", ["trl", "verl", "openrlhf", "ms_swift"])
def test_a_recipe_in_a_trainer_trains_its_declared_weights_in_any_number_of_micro_batches(trainer):
    if trainer != "verl":
        pytest.importorskip("datasets", reason="the extra `llm` is not installed")
    if trainer == "trl":
        pytest.importorskip("trl", reason="TRL is not installed")
    from headrace.adapters import measured

    settings = getattr(measured, f"recipes_in_{trainer}")()
    dynamic = [each.name.rpartition("mean, ")[2] for each in settings if measured.DYNAMIC in each.name]
    stages = (2, 3) if trainer == "openrlhf" else ()
    assert dynamic == [f"{measured.DYNAMIC}=True, ds.zero_stage={stage}" for stage in stages]
    assert len(settings) == len(getattr(measured, f"OF_{trainer.upper()}")) + len(dynamic)
    for setting in settings:
        found = setting.measure((1, 3)).xray
        if setting.name.endswith(f"{measured.DYNAMIC}=True, ds.zero_stage=2"):  # as the trainer's page says
            assert found.verdict.endswith(LOST), found.verdict
            continue
        assert found.verdict == "the weights of the pipeline, in 2 of 2 runs", setting.name
        found.assert_uniform()
