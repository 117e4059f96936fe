"""What a call would make a device wait for, counted on the CPU: reads of data, copies of Python's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose answer is a number for Python, or has as many entries as the data says.
READS = ["_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount"]
READS += ["_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"]
COPIES = (torch.tensor, torch.as_tensor, torch.from_numpy)


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Counter[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        sized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None
        if by_mask or (name in READS and not sized):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """What shows itself to no operator on the CPU, where there is nothing to copy."""

    def __init__(self, seen: Counter[str]):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            self.seen["tolist"] += 1
        if func in COPIES and not isinstance(args[0], torch.Tensor):
            self.seen["copy"] += 1
        return func(*args, **(kwargs or {}))


def waits_of(call: Callable[[], Any]) -> dict[str, int]:
    """How often a call reads, by operator, and how often it makes a tensor of Python's numbers (``copy``)."""
    seen: Counter[str] = Counter()
    with _Operators(seen), _Functions(seen):
        call()
    return dict(seen)
