"""Deciding on the first rank gives the bits that each rank would have computed."""

from __future__ import annotations

import re

import pytest
from any_rank import PATIENCE, results_of
from composed import composed
from first_rank import carry_masked, compare_ways, follow_stream, refuse_what_one_decides
from recipes import CHAINS, FEW, of

from headrace.pipeline import Pipeline

pytestmark = pytest.mark.slow

STAGE, SPLIT = "pipeline.stages", "pipeline.stages.split"
EACH = {  # recipes with stages that take part on each rank
    "gtpo": "'entropy' (it reads tokens)",
    "high_entropy": "'forks' (it reads tokens)",
    "kl_in_advantage": "'kl' (it reads tokens)",
    "mis": "'reject' (it reads tokens), 'correction' (it reads tokens)",
    "mlperf": "'mask' (it reads tokens), 'correction' (it reads tokens)",
    "mt_grpo": "'turns' (it reads tokens)",
    "opd": "'teacher' (it reads tokens)",
    "opsm": "'mask' (it reads tokens)",
    "rae": "'running' (it remembers rollouts of all ranks)",
    "rlsd": "'teacher' (it reads tokens)",
    "spo": "'running' (it remembers rollouts of all ranks)",
    "tis": "'correction' (it reads tokens)",
    "tree_grpo": "'tree' (it reads tokens)",
}
VARIED = (
    (f"{SPLIT}.minibatches=3", f"{SPLIT}.remainder=drop", f"{SPLIT}.unit=sample"),
    (f"{SPLIT}.minibatches=2", f"{SPLIT}.remainder=pad", f"{SPLIT}.max_tokens=14", f"{SPLIT}.unit=sample"),
    (f"{SPLIT}.remainder=drop", f"{SPLIT}.max_tokens=14", f"{SPLIT}.balance=attention"),
    (f"{SPLIT}.microbatches=2", f"{SPLIT}.remainder=pad", f"{STAGE}.weight.fold=token_mean"),
    (f"{STAGE}.filter.action=drop", "pipeline.masked_log_prob=keep", f"{STAGE}.weight.gradients=mean"),
    (f"~{SPLIT}", f"~{STAGE}.weight"),
)
CARRIED = (f"{SPLIT}.remainder=carry", f"{SPLIT}.minibatches=2")


@pytest.mark.parametrize(("world", "recipes", "varied"), [(2, CHAINS, ()), (3, FEW, VARIED)])
def test_deciding_on_the_first_rank_changes_no_result(world, recipes, varied, tmp_path):
    """For every recipe that supports it: rows, columns, metrics, ledger, report and state."""
    pipelines = [(recipe, composed(f"pipeline={recipe}")) for recipe in recipes if recipe not in EACH]
    pipelines += [("grpo", composed("pipeline=grpo", *words)) for words in varied]
    pipelines += [("halves", composed("pipeline=grpo"))]
    results = results_of(compare_ways, world, tmp_path, pipelines)
    assert [differs for _, differs in results] == [[]] * world
    assert sum(compared for compared, _ in results) > 6 * world * len(pipelines)


def test_deciding_on_the_first_rank_keeps_the_same_state(tmp_path):
    """Carried rows and minibatches taken: a run resumes with the other option."""
    weigh = (f"{STAGE}.gate.group_size=2", f"{STAGE}.weight.unit=rollout")
    pipelines = [
        ("carried", shared_ids, composed("pipeline=grpo", *weigh, *CARRIED, f"{SPLIT}.unit={unit}"))
        for shared_ids, unit in (("same", "rollout"), ("different", "group"), ("raise", "group"))
    ]
    pipelines += [("cut", "different", composed("pipeline=grpo", *weigh, f"{SPLIT}.minibatches=2"))]
    for differs, carried, steps_again in results_of(follow_stream, 2, tmp_path, pipelines):
        assert differs == []
        assert carried > 4
        assert steps_again == [0] * len(pipelines)


@pytest.mark.slow
def test_carried_rows_of_ranks_keep_their_first_reason(tmp_path):
    masked, waits, gone = "filter/reward_bounds", "split/carried", "gate/incomplete"
    for rank, found in enumerate(results_of(carry_masked, 2, tmp_path)):
        reasons = [["trained"] * 3 + [masked], [gone, masked], ["trained", "trained", masked]]
        if rank == 1:
            reasons = [["trained", "trained", masked, waits], [gone, waits], ["trained"] * 3]
        trained = [[row for row, why in enumerate(of_batch) if why == "trained"] for of_batch in reasons]
        assert found == list(zip(reasons, trained, strict=True)) * 2


def test_an_error_on_the_first_rank_is_raised_on_all_in_time(tmp_path):
    world = 3
    for rank, told in enumerate(results_of(refuse_what_one_decides, world, tmp_path, tmp_path)):
        said = [said for said, _ in told]
        assert said[0] == said[2] == said[7] > 0
        assert re.search(r"stage 'gate', .*1 incomplete group: group 2\d* has 1 of 2", said[1])
        assert re.search(
            r"stage 'difficulty', .*this stage reads tokens .*pipeline.decide_on=each_rank", said[3]
        )
        assert re.search(
            r"stage 'split', .*rows of groups \[\d+\] were carried over, and the batch has", said[5]
        )
        assert re.search(rf"rank 0 did not come to what rank 0 decides within {PATIENCE:g} s", said[6])
        if rank < world - 1:  # the last one is no more
            assert re.search(rf"rank 2 did not come to what rank 0 decides within {PATIENCE:g} s", said[8])
        assert max(seconds for _, seconds in told) < 3 * PATIENCE


def test_stages_that_run_on_each_rank_are_named():
    for recipe, named in EACH.items():
        stages = dict(composed(f"pipeline={recipe}").stages.items())
        message = re.escape(f"must run on each rank: {named}. Set pipeline.dec")
        with of(recipe), pytest.raises(ValueError, match=message):
            Pipeline(stages, process_group="world", decide_on="first_rank")
