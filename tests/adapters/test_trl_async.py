"""A recipe trains in TRL's own AsyncGRPOTrainer, with the stand-ins of tests/support/async_trl.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from headrace.adapters import attach
from headrace.adapters.trl_async import LAST, ROLLOUT, Dispatched, WholeGroups

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
pytest.importorskip("trl.experimental.async_grpo", reason="TRL is not installed")
pytestmark = [
    pytest.mark.llm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning"),
]
GROUP_SIZE = 4


def handed_out(trainer: Any) -> list[Any]:
    """A list to which the trainer's dataset adds each sample that it gets, with the policy version."""
    found, own = [], WholeGroups.get

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        sample = own(self, *args, **options)
        found.append((sample, self.trainer.model_version))
        return sample

    trainer.test_patch.setattr(WholeGroups, "get", spy)
    return found


@pytest.fixture
def make(tmp_path, monkeypatch):
    from async_trl import async_trainer, stand_in

    stand_in(monkeypatch)

    def made(**options: Any) -> Any:
        trainer = async_trainer(tmp_path, **options)
        trainer.test_patch = monkeypatch
        return trainer

    return made


def own_worker(reward: Any, **options: Any) -> Any:
    from async_trl import OwnWorker

    return OwnWorker(reward, **options)


def adds_up(queued: WholeGroups) -> None:
    counts = dict(queued.counts)
    assert counts.pop("came") == sum(counts.values())


def test_with_the_default_recipe_the_trainer_trains_its_usual_advantages(make):
    worker = own_worker(lambda answer, random: float(random.integers(-5, 5)))
    trainer = attach(make(rollout_worker=worker))
    found = handed_out(trainer)
    before = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 10
    theirs = {id(sample): advantage for sample, advantage in worker.sent}
    assert len(found) >= 80
    for sample, _ in found:
        assert sample.advantage == pytest.approx(theirs[id(sample)], abs=1e-5)
    assert any(not each.equal(old) for each, old in zip(trainer.model.parameters(), before, strict=True))
    adds_up(trainer.queued)
    assert trainer.last_run.ledger.counts()["trained"] == 8
    assert trainer.state.log_history[0]["headrace/rows/trained"] == 8


def test_equal_and_old_groups_are_replaced_and_no_row_is_lost_or_trained_twice(make):
    worker = own_worker(
        lambda answer, random: float(random.integers(0, 2)), lag=lambda random: int(random.integers(0, 7))
    )
    trainer = attach(make(rollout_worker=worker, max_staleness=3), "dapo")
    found = handed_out(trainer)
    trainer.train()
    assert trainer.state.global_step == 10
    assert len({id(sample) for sample, _ in found}) == len(found)  # no sample is trained twice
    groups = Counter(sample.group_id for sample, _ in found)
    assert {*list(groups.values())[:-1]} == {GROUP_SIZE}  # complete groups, except perhaps the last
    for sample, version in found:
        assert version - sample.model_version <= 3
        assert sample.advantage != 0 or sample.metrics["reward_std"] > 0
    adds_up(trainer.queued)
    counts = trainer.queued.counts
    assert counts["filter/zero_variance"] > 0
    assert counts["stale"] > 0
    assert counts["stale"] % GROUP_SIZE == 0  # complete groups, while TRL drops single samples
    assert counts["came"] <= len(worker.sent)
    assert {group for group in trainer._trained_groups if group not in groups}  # counted, so not repeated


def test_the_real_worker_dispatches_by_the_rule_and_no_group_is_too_old(make):
    from async_trl import Server, ones

    server = Server()
    trainer = make(reward_funcs=[ones], vllm_server_base_url=server.url, max_staleness=4)
    attach(trainer, "grpo", stages={"filter": {"action": "drop"}})
    found = handed_out(trainer)
    worker, processes = trainer.rollout_worker, list[Any]()
    stop = worker.stop
    trainer.test_patch.setattr(worker, "stop", lambda: (processes.append(worker._process), stop()))
    try:
        trainer.train()
    finally:
        server.close()
    assert trainer.state.global_step == 10
    assert processes[0].exitcode == 0  # the worker ends even if some groups have not begun
    queued = trainer.queued
    adds_up(queued)
    assert set(queued.counts) <= {"came", "handed_out", "waiting", "filter/zero_variance"}  # no row is stale
    assert max(queued.assembler.ages) <= 4
    assert len({id(sample) for sample, _ in found}) == len(found) >= 80
    assert not any(ROLLOUT in sample.metrics or LAST in sample.metrics for sample, _ in found)
    assert queued.announced <= queued.allowed.value
    assert all(sample.metrics["reward_std"] > 0 for sample, _ in found)
    assert trainer.rollout_worker._process is None  # the worker has ended


def test_rollouts_of_several_samples_count_once_and_their_rows_train(make):
    """Each row names its rollout. One rollout has two rows, and one row has no token."""
    worker = own_worker(lambda answer, random: 0.0)
    trainer = attach(make(rollout_worker=worker, gradient_accumulation_steps=1), scale="none")
    worker.put(0, np.random.default_rng(1), 0)
    samples = [worker.rollout_buffer.get() for _ in range(GROUP_SIZE)]
    samples.append(samples[0].__class__(**{n: getattr(samples[0], n) for n in samples[0].__slots__}))
    samples[-1].metrics = dict(samples[0].metrics)
    samples[3].completion_mask = 0 * samples[3].completion_mask
    queued = WholeGroups(trainer)
    places = [(0, False), (1, True), (2, True), (3, True), (0, True)]
    for sample, (rollout, last), reward in zip(samples, places, [8.0, 0.0, 0.0, 4.0, 8.0], strict=True):
        sample.metrics |= {ROLLOUT: rollout, LAST: last, "reward": reward}
        worker.rollout_buffer.put(sample)
    found = [queued.get(timeout=1) for _ in range(4)]
    assert sorted(sample.advantage for sample in found) == [-3.0, -3.0, 5.0, 5.0]  # the mean is 12 / 4
    assert queued.counts == {"came": 5, "handed_out": 4, "waiting": 0, "pipeline/no_loss_tokens": 1}


def test_settings_that_the_adapter_cannot_handle_are_refused_by_name(make):
    worker = own_worker(lambda answer, random: float(random.integers(-5, 5)))
    trainer = make(rollout_worker=worker)
    with pytest.raises(ValueError, match="AsyncGRPOTrainer always"):
        attach(trainer, "dapo", over_generation=2)
    trainer.args.gradient_accumulation_steps, trainer.args.per_device_train_batch_size = 1, 6
    with pytest.raises(ValueError, match=r"processes \(6\) to a multiple of num_generations \(4\)"):
        attach(trainer)


def test_an_announcement_is_not_a_sample(make):
    trainer = attach(make(rollout_worker=own_worker(lambda answer, random: 1.0)))
    queued = WholeGroups(trainer)
    queued._take_in(Dispatched(3, 0))
    assert (queued.announced, queued.came, queued.assembler.pending) == (1, 0, 1)
