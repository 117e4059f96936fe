"""The fake device counts the reads that CUDA would wait for, and computes the same numbers."""

from __future__ import annotations

import weakref

import pytest
import torch
from fake_device import CPU, DEVICE, FakeDevice

WHAT = {  # for each operator: reads, copies, asynchronous; x, mask and ids are on the device
    # the host reads a value
    "x.sum().item()": (1, 0, 0),
    "bool(mask.any())": (1, 0, 0),
    "x.tolist()": (1, 0, 0),
    "x.cpu().numpy()": (1, 0, 0),
    "torch.zeros(3, dtype=torch.int64).copy_(x)": (1, 0, 0),
    "torch.equal(x, x)": (1, 0, 0),
    "[1 for each in x if each > 0]": (3, 0, 0),
    # the host needs a shape that depends on values
    "mask.nonzero()": (1, 0, 0),
    "torch.unique(x, return_inverse=True)": (1, 0, 0),
    "x[mask] + x[mask]": (2, 0, 0),
    "x.__setitem__(mask, x[:2].clone())": (1, 0, 0),
    "x.repeat_interleave(x)": (1, 0, 0),
    # the host reads no value and no shape
    "x.repeat_interleave(x, output_size=3)": (0, 0, 0),
    "x[ids]": (0, 0, 0),
    "x.__setitem__(mask, 7)": (0, 0, 0),
    "x * torch.tensor(2)": (0, 0, 0),
    "x[1:].view(torch.int32).clone()": (0, 0, 0),
    "torch.rand(3, device=device).cumsum(0)": (0, 0, 0),
    "(len(x), x.shape, x.dtype, x.device, x.numel(), repr(x))": (0, 0, 0),
    # numbers of the host go to the device
    "here.to(device)": (0, 1, 0),
    "torch.tensor([1, 2], device=device)": (0, 1, 0),
    "x.copy_(here)": (0, 1, 0),
    "x[here]": (0, 1, 0),
    "x[here > 0]": (1, 1, 0),
    # non_blocking calls do not wait, with one exception
    "here.to(device, non_blocking=True)": (0, 0, 1),
    "here.pin_memory().to(device, non_blocking=True)": (0, 0, 1),
    "here.clone().copy_(x, non_blocking=True)": (1, 0, 0),  # a copy to pageable memory waits
}


@pytest.fixture
def fake():
    with FakeDevice() as device:
        yield device


def made(fake: FakeDevice, device: torch.device) -> dict[str, object]:
    """The values of the names in the table, on this device."""
    here = torch.arange(3)
    x, mask, ids = here.clone(), torch.tensor([True, False, True]), torch.tensor([2, 0])
    on = [x, mask, ids] if device == CPU else [fake.put(each) for each in (x, mask, ids)]
    return dict(zip(("x", "mask", "ids", "here", "device", "torch"), [*on, here, device, torch], strict=True))


@pytest.mark.parametrize("words", WHAT)
def test_device_reads_that_block_cuda_are_counted(fake, words):
    there, here = made(fake, DEVICE), made(fake, CPU)
    fake.forget()
    torch.manual_seed(0)
    found = eval(words, there)
    assert (len(fake.reads), len(fake.copies), len(fake.asynchronous)) == WHAT[words], (
        fake.reads + fake.copies
    )
    torch.manual_seed(0)
    same(fake, found, eval(words, here))
    same(fake, there["x"], here["x"])


def same(fake: FakeDevice, found, expected) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(fake.get(found), expected)
    elif isinstance(expected, tuple) and isinstance(expected[0], torch.Tensor):
        for pair in zip(found, expected, strict=True):
            same(fake, *pair)
    elif isinstance(expected, list | bool | int | float):
        assert found == expected


def test_operators_without_order_on_a_gpu_are_reordered_here(fake):
    to, index = torch.zeros(1, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    values = torch.tensor([1.0, 1e16, -1e16, 0.0], dtype=torch.float64)
    there = [fake.put(each) for each in (to, index, values)]
    for name in ("index_add_", "scatter_add_", "index_copy_", "scatter_"):
        here = getattr(to.clone(), name)(0, index, values)
        found = getattr(there[0].clone(), name)(0, *there[1:])
        assert (here.item(), found.item()) == (0, 1), name


def test_views_share_memory_and_writes_count_versions(fake):
    base = torch.zeros(4, device=DEVICE)
    view, bits, other = base[1:], base.view(torch.int32), base.clone()
    view.add_(1)
    assert fake.get(base).tolist() == [0, 1, 1, 1]
    assert fake.get(bits).bool().tolist() == [False, True, True, True]
    assert (base._version, view._version, bits._version, other._version) == (1, 1, 1, 0)
    assert base.add_(1) is base
    assert base.storage_offset() + 1 == view.storage_offset()
    gone = weakref.ref(other)
    del other
    assert gone() is None


def test_mixing_devices_raises(fake):
    for words in ("x + here", "x.index_select(0, here)", "here[ids]", "torch.equal(x, here)", "x.to('meta')"):
        with pytest.raises(RuntimeError, match=r"of the cpu|from or to meta"):
            eval(words, made(fake, DEVICE))


def test_the_fake_device_leaves_nothing_behind(fake):
    x = fake.put(torch.ones(2))
    with pytest.raises(NotImplementedError, match="changes the shape of a tensor in place"):
        x.unsqueeze_(0)
    fake.__exit__(None, None, None)
    try:
        with pytest.raises(RuntimeError, match="outside of `with FakeDevice"):
            x.sum()
    finally:
        fake.__enter__()
