"""A copy of a pipeline says that it is a copy. Shared buffers refuse stages with memory."""

from __future__ import annotations

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from any_rank import collected
from composed import composed
from processes import process_context, quick_starts

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, CompletenessGate, FanOutCollapse, ShuffleSplit

if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer
    from torchrl.envs.transforms import Compose


def make_pipeline() -> Pipeline:
    return composed("pipeline=grpo")


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}
ASKED = (
    lambda pipeline: pipeline.ledger,
    lambda pipeline: pipeline.metrics,
    lambda pipeline: pipeline.last_run,
    lambda pipeline: pipeline.report(),
)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_no_results_until_it_runs_a_batch(copied):
    pipeline = make_pipeline()
    batch = collected("uniform", "grpo")
    pipeline(batch)
    other = copied(pipeline)
    for ask in ASKED:
        with pytest.raises(RuntimeError, match="this pipeline is a copy that has run no batch"):
            ask(other)
        with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="a copy"):
            thread.submit(ask, other).result()
    other(batch)
    for ask in ASKED:
        ask(other)
    assert other.metrics == pipeline.metrics
    with pytest.raises(BatchError):
        other(batch.exclude("group_id"))
    assert other.ledger is None  # the batch was refused


# -- in a buffer that several processes write ---------------------------------------------------------------


def buffer_with(transform, *, invert: bool = True, shared: bool = True) -> ReplayBuffer:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    storage = LazyTensorStorage(200, shared_init=shared)
    buffer = ReplayBuffer(storage=storage, batch_size=6, shared=shared)
    return buffer.append_transform(transform, invert=invert)


def split() -> ShuffleSplit:
    return ShuffleSplit(minibatches=2)


REFUSED = r"keeps a state .*Append the first of pipeline.halves\(\)"


def split_in_a_compose() -> Compose:
    from torchrl.envs.transforms import Compose

    return Compose(split())


@pytest.mark.torchrl
@pytest.mark.parametrize("make", [make_pipeline, split, split_in_a_compose])
def test_stages_with_memory_are_refused_by_a_shared_buffer(make):
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    with pytest.raises(TypeError, match=REFUSED):
        buffer_with(make(), invert=False)
    with pytest.raises(TypeError, match=REFUSED):
        len(ReplayBuffer(storage=LazyTensorStorage(64), transform=make(), shared=True))


@pytest.mark.torchrl
@pytest.mark.parametrize(
    "make", [CompletenessGate, lambda: make_pipeline().halves()[0], lambda: Pipeline({"f": FanOutCollapse()})]
)
def test_stages_without_memory_are_accepted_by_a_shared_buffer(make):
    assert not make().requires_shared_write_state
    buffer_with(make(), invert=False)


def extend(buffer: ReplayBuffer, batch, answers=None) -> str:
    try:
        buffer.extend(batch)
        said = f"{len(buffer)} rows"
    except TypeError as err:
        said = str(err)
    if answers is not None:
        answers.put(said)
    return said


def elsewhere(function, *args) -> str:
    """Run a function in its own process, and return the result."""
    context = process_context()
    answers = context.Queue()
    process = context.Process(target=function, args=(*args, answers))
    process.start()
    try:
        return answers.get(timeout=120)
    finally:
        process.kill()
        process.join()
        process.close()
        answers.close()


@pytest.mark.torchrl
@pytest.mark.slow
def test_a_worker_that_writes_to_a_shared_buffer_refuses_only_the_split():
    """TorchRL 0.14.1 does not look for stages with memory when rows are written."""
    batch = collected("uniform", "grpo").exclude("prompt_text")
    assert re.search(REFUSED, elsewhere(extend, buffer_with(make_pipeline()), batch))
    assert elsewhere(extend, buffer_with(make_pipeline().halves()[0]), batch) == "20 rows"
    assert elsewhere(take_in_and_extend, make_pipeline(), batch) == "20 rows"
    assert extend(buffer_with(make_pipeline(), shared=False), batch) == "20 rows"


def take_in_and_extend(pipeline: Pipeline, batch, answers) -> str:
    """Make a buffer in this process, and write to it."""
    return extend(buffer_with(pipeline, shared=False), batch, answers)


@pytest.mark.torchrl
@pytest.mark.slow
def test_after_an_asynchronous_collector_the_original_has_no_run():
    from quizzes import quiz_makers
    from torchrl.collectors import MultiAsyncCollector

    pipeline = Pipeline({"gate": CompletenessGate(on_incomplete="drop")})
    with quick_starts():
        collector = MultiAsyncCollector(
            quiz_makers(2), frames_per_batch=24, total_frames=24 * 4, postproc=pipeline
        )
        assert sum(len(batch) for batch in collector) > 0
    with pytest.raises(RuntimeError, match=r"If a copy of the pipeline ran, .* report from this copy"):
        pipeline.report()
