"""A fake device: it computes on the CPU, and counts the calls that would make the host wait for a CUDA
device.

Its tensors say that they are on ``lazy:0``, the only device that every build of PyTorch can name without a
driver. So code takes its path for accelerators, ``device.type != "cpu"``, and its numbers can be checked.

    with FakeDevice() as fake:
        out = pipeline(fake.put(batch))
        print(fake.reads, fake.copies, fake.asynchronous)
        assert_equal(fake.get(out), on_cpu)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("transforms", "pipeline"))
DEVICE, CPU = torch.device("lazy:0"), torch.device("cpu")
aten = torch.ops.aten

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEX = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
BY_ITEM = {aten.masked_fill, aten.masked_fill_, aten.index_fill, aten.index_fill_}
NUMBERS = BY_ITEM | {aten.fill, aten.fill_, aten.index_put, aten.index_put_}
COPIES = {aten._to_copy, aten.copy_, aten.copy}
ADDED = {aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_}
SCATTERED = {aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_}
SCATTERED |= {aten.scatter_reduce, aten.scatter_reduce_}


class Event(NamedTuple):
    """A call for which the host waits."""

    operator: str
    place: str
    """``file:line function`` of the innermost frame in headrace or, without one, in the test."""

    def __repr__(self) -> str:
        return f"{self.operator} at {self.place}"


class FakeTensor(Tensor):
    """A tensor on the fake device, around one on the CPU."""

    held: Tensor
    is_number: bool
    """Whether the tensor is made of a Python number. CUDA gets such a number without a copy."""

    @staticmethod
    def __new__(cls, held: Tensor, is_number: bool = False) -> FakeTensor:
        if held.is_nested or held.layout is not torch.strided:
            raise NotImplementedError("the fake device has dense tensors only")
        options: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        fake = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=DEVICE, **options)
        fake.held, fake.is_number = held.detach() if held.requires_grad else held, is_number
        return fake

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        raise RuntimeError(f"{operator} of a tensor on the fake device, outside of `with FakeDevice()`")

    def tolist(self) -> Any:
        """Tensor's own method refuses subclasses."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FakeTensor({tuple(self.shape)}, {self.dtype})"


class FakeDevice(TorchDispatchMode):
    """In this context ``lazy:0`` is a device. Calls that wait for CUDA are counted, except in :meth:`unseen`.

    A copy with ``non_blocking=True`` is counted only as asynchronous. Operators that add or write in no fixed
    order on CUDA run backwards here, so a result that depends on an order differs from the CPU's.

    Attributes:
        reads: values that come to the host, and shapes that depend on values.
        copies: copies from the host to the device.
        asynchronous: copies in both directions that do not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Event] = []
        self.copies: list[Event] = []
        self.asynchronous: list[Event] = []
        self._seen = True
        self._pinned: dict[int, Tensor] = {}

    def __enter__(self) -> FakeDevice:
        # `torch.tensor(list, device=...)` would ask the device for memory before this class sees the call.
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifts)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """A context in which nothing is counted."""
        before, self._seen = self._seen, False
        try:
            yield
        finally:
            self._seen = before

    def forget(self) -> None:
        """Restart the counts."""
        for events in (self.reads, self.copies, self.asynchronous):
            events.clear()

    def put(self, thing: Any) -> Any:
        """Copy a tensor or TensorDict to the device, without counting."""
        with self.unseen():
            return thing.to(DEVICE)

    def get(self, thing: Any) -> Any:
        """Copy a tensor or TensorDict to the CPU, without counting."""
        with self.unseen():
            return thing.to(CPU)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        faked = any(isinstance(each, FakeTensor) for each in given)
        target = kwargs.get("device")
        home = torch.device(target) if target is not None else DEVICE if faked else CPU
        if operator is aten._pin_memory.default or kwargs.get("pin_memory"):  # pinning needs a driver
            made = operator(*args, **kwargs | {"pin_memory": False}) if kwargs else args[0].clone()
            self._pinned[made.untyped_storage().data_ptr()] = made
            return made
        if not faked and home != DEVICE:
            return operator(*args, **kwargs)
        if home not in (DEVICE, CPU):
            raise RuntimeError(f"{operator} from or to {home}: there are cpu and {DEVICE}")
        self._count(operator, args, kwargs, given, home)
        kwargs |= {"device": CPU} if target is not None else {}
        known = {id(_held(each)): each for each in given}
        result = operator(*_backwards(operator, tree_map(_held, args)), **tree_map(_held, kwargs))
        number = operator is aten.scalar_tensor.default

        def wrap(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            if (old := known.get(id(each))) is not None:  # the operator wrote this tensor in place
                if old.shape != each.shape or old.stride() != each.stride():
                    raise NotImplementedError(f"{operator} changes the shape of a tensor in place")
                return old
            return FakeTensor(each, number) if home == DEVICE else each

        return tree_map(wrap, result)

    def _count(self, operator: Any, args: Any, kwargs: Any, given: list[Tensor], home: torch.device) -> None:
        """Count the waits of an operator.

        Raises:
            RuntimeError: the operator gets tensors of both devices, and does not allow them together.
        """
        packet = operator.overloadpacket
        here = [each for each in given if not isinstance(each, FakeTensor)]
        if packet in COPIES:
            self._count_copy(operator, args, kwargs, home)
            return
        if here:
            self._check_mixed(operator, args, here)
        if packet in INDEX:
            self._count_index(operator, args)
        elif _waits(operator, args, kwargs):
            self._enter(self.reads, operator)

    def _count_copy(self, operator: Any, args: Any, kwargs: Any, home: torch.device) -> None:
        """Count a copy. Empty copies do not wait. Copies to pageable memory wait even if asynchronous."""
        new = operator.overloadpacket is aten._to_copy
        source, target = (args[0], home) if new else (args[1], args[0].device)
        if source.device == target or source.numel() == 0:
            return
        if target == CPU:
            asked = kwargs.get("non_blocking") if new else args[2:3] == (True,) and self._is_pinned(args[0])
            self._enter(self.asynchronous if asked else self.reads, operator)
        else:
            asked = kwargs.get("non_blocking") or (not new and args[2:3] == (True,))
            self._enter(self.asynchronous if asked else self.copies, operator)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _count_index(self, operator: Any, args: Any) -> None:
        """Count copies of indices to the device, and reads of masks. Filling in one number reads no mask."""
        indices = [each for each in args[1] if each is not None]
        if any(not isinstance(each, FakeTensor) for each in indices):
            self._enter(self.copies, operator)
        value = args[2] if operator.overloadpacket not in (aten.index, aten._unsafe_index) else None
        number = value is not None and value.numel() == 1 and getattr(value, "is_number", True)
        filled = number and len(indices) == 1 and not any(args[3:4])
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices) and not filled:
            self._enter(self.reads, operator)

    def _check_mixed(self, operator: Any, args: Any, here: list[Tensor]) -> None:
        packet = operator.overloadpacket
        if packet in INDEX and isinstance(args[0], FakeTensor):
            here = [each for each in here if all(each is not index for index in args[1])]
        if all(each.ndim == 0 for each in here) and (packet in NUMBERS or _is_pointwise(operator)):
            return  # the kernel gets a number
        if here:
            shapes = [tuple(each.shape) for each in here]
            raise RuntimeError(f"{operator} takes tensors of {DEVICE}, and of the cpu: {shapes}")

    def _enter(self, events: list[Event], operator: Any) -> None:
        if self._seen:
            events.append(Event(str(operator).removeprefix("aten."), _place()))


def _held(each: Any) -> Any:
    return each.held if isinstance(each, FakeTensor) else each


def _backwards(operator: Any, args: Any) -> Any:
    """The arguments with which the operator reads its rows backwards."""
    packet = operator.overloadpacket
    if packet in ADDED and args[2].ndim == 1:
        to, dim, index, source, *more = args
        return (to, dim, index.flip(0), source.flip(dim), *more)
    if packet in SCATTERED and isinstance(args[3], Tensor) and args[2].ndim > 0:
        to, dim, index, source, *more = args
        source = source[tuple(slice(size) for size in index.shape)]
        return (to, dim, index.flip(dim), source.flip(dim), *more)
    return args


def _waits(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether CUDA's kernel waits for a value. PyTorch marks most such operators; this adds the others."""
    packet = operator.overloadpacket
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if packet is aten.isin and all(isinstance(each, Tensor) for each in args[:2]):
        few = 10 * args[0].numel() ** 0.145  # CUDA compares fewer elements one by one, and sorts more
        return not kwargs.get("assume_unique") and args[1].numel() >= few
    if packet in BY_ITEM:
        return isinstance(args[-1], FakeTensor) and not args[-1].is_number
    return packet is aten.multinomial or bool(WAITS & set(operator.tags))


def _is_pointwise(operator: Any) -> bool:
    """Whether the operator is pointwise, or applies a pointwise operator in place."""
    packet = getattr(aten, operator.overloadpacket.__name__.removesuffix("_"), None)
    twin = getattr(packet, operator._overloadname, operator)
    return torch.Tag.pointwise in (*operator.tags, *twin.tags)


def _place() -> str:
    frame, outside = sys._getframe(1), "?"
    while frame is not None:
        code = frame.f_code
        file = os.path.realpath(code.co_filename)  # the packages are imported through links
        where = f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno} {code.co_name}"
        if file.startswith(OURS):
            return where
        if outside == "?" and Path(file).is_relative_to(ROOT / "tests") and file != __file__:
            outside = where
        frame = frame.f_back  # type: ignore[assignment]
    return outside


def waits_of(call: Callable[[Any], Any], batch: Any) -> tuple[int, int]:
    """The numbers of reads and copies of a call with a batch on the fake device."""
    with FakeDevice() as fake:
        there = fake.put(batch)
        fake.forget()
        call(there)
        return len(fake.reads), len(fake.copies) + len(fake.asynchronous)
