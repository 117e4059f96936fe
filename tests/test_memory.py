"""One minibatch in memory at a time."""

from __future__ import annotations

import weakref

import pytest
import torch
from conftest import batch_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.pipeline import Pipeline
from headrace.transforms import FanOutCollapse, GroupRelativeAdvantage, LossWeight, ShuffleSplit


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all storages made under it that are still alive, and their greatest sum."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
        }
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf):
                storage = leaf.untyped_storage()
                key = storage.data_ptr()
                if key in before or key in self._known or storage.nbytes() == 0:
                    continue
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize(("count", "shuffle"), [(4, True), (8, True), (8, False)])
def test_a_loop_that_lets_go_holds_one_minibatch(count, shuffle):
    batch = batch_of([float(i % 5) for i in range(512)], [i // 4 for i in range(512)], tokens=512)
    size = sum(t.untyped_storage().nbytes() for t in batch.values(True, True) if torch.is_tensor(t))
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
    assert (0.5 / count if shuffle else 0) <= memory.peak / size <= (1.3 / count if shuffle else 0.01)


def test_the_count_is_that_of_what_is_alive():
    with LiveBytes() as memory:
        kept = torch.zeros(1000) + 1
        del kept
        again = torch.ones(1000)
    assert 4000 <= memory.peak <= 8000
    assert memory.live == again.untyped_storage().nbytes()
