"""Measure the memory of tensors while code runs."""

from __future__ import annotations

import weakref

import torch
from tensordict import TensorDictBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live storages that were made in this context, and the peak of their sum."""

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


def bytes_of(batch: TensorDictBase) -> int:
    """The bytes of all tensors of a batch."""
    return sum(t.untyped_storage().nbytes() for t in batch.values(True, True) if torch.is_tensor(t))
