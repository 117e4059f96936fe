"""One minibatch in memory at a time."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from live_bytes import LiveBytes, bytes_of

from headrace.pipeline import Pipeline
from headrace.transforms import FanOutCollapse, GroupRelativeAdvantage, LossWeight, ShuffleSplit


@pytest.mark.parametrize(("count", "shuffle"), [(4, True), (8, True), (8, False)])
def test_a_loop_that_lets_go_holds_one_minibatch(count, shuffle):
    batch = batch_of([float(i % 5) for i in range(512)], [i // 4 for i in range(512)], tokens=512)
    pipeline = Pipeline(
        {
            "collapse": FanOutCollapse(),
            "advantage": GroupRelativeAdvantage(),
            "split": ShuffleSplit(minibatches=count, shuffle=shuffle),
            "weight": LossWeight(),
        }
    )
    stream = pipeline.minibatches(batch)
    with LiveBytes() as memory:
        taken = 0
        while (minibatch := next(stream, None)) is not None:
            taken += len(minibatch)
            del minibatch
    assert taken == 512
    # Rows that are in order are views: they cost nothing.
    assert (
        (0.5 / count if shuffle else 0) <= memory.peak / bytes_of(batch) <= (1.3 / count if shuffle else 0.01)
    )


def test_the_count_is_that_of_what_is_alive():
    with LiveBytes() as memory:
        kept = torch.zeros(1000) + 1
        del kept
        again = torch.ones(1000)
    assert 4000 <= memory.peak <= 8000
    assert memory.live == again.untyped_storage().nbytes()
