"""Without TorchRL, the class that stands for its Transform has the parts that a stage uses."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from torch import nn

FILE = Path(__file__).parents[2] / "transforms" / "table" / "torchrl_base.py"


@pytest.fixture
def parts(monkeypatch):
    """The names of the module, if TorchRL cannot be imported."""
    for name in ("torchrl.envs", "torchrl.envs.transforms"):
        monkeypatch.setitem(sys.modules, name, None)
    return runpy.run_path(str(FILE))


def test_the_stand_in_has_keys_and_notes_its_container(parts):
    transform, outer = parts["Transform"](["a"], ("b", "c")), nn.Module()
    assert (transform.in_keys, transform.out_keys) == (["a"], ["b", "c"])
    assert (parts["Transform"]().in_keys, parts["Transform"]().out_keys) == ([], [])
    transform.in_keys, transform.out_keys = ["d"], ["e"]
    assert (transform.in_keys, transform.out_keys) == (["d"], ["e"])
    # A pickle that is loaded where TorchRL is installed needs all attributes of TorchRL's class.
    own = {name: value for name, value in vars(transform).items() if name not in vars(nn.Module())}
    assert own == {
        "_in_keys": ["d"],
        "_out_keys": ["e"],
        "_in_keys_inv": None,
        "_out_keys_inv": None,
        "_missing_tolerance": False,
        "_container": None,
        "_parent": None,
    }
    transform.set_container(outer)
    assert transform.__dict__["_container"]() is outer
    assert transform.__getstate__() == transform.__dict__ | {"_container": None}
    transform.set_container(None)
    assert transform.__dict__["_container"] is None
    transform.set_container(outer)
    transform.__dict__["_parent"] = outer
    transform.reset_parent()
    assert (transform.__dict__["_container"], transform.__dict__["_parent"]) == (None, None)
    assert not isinstance(transform, parts["EnvBase"])
    assert isinstance(transform, nn.Module)
