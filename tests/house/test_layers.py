"""Three layers: an inner layer imports no outer one, and an outer layer uses only its public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from types import ModuleType

import pytest
from public import public
from test_house import DOORS, FACES, MODULES, NAMES, TREES, imports, public_names, taken

from headrace.installed import MissingPackageError, lacking

CORE, EXTENSION, TOOL = range(3)
EXTENSIONS = {f"transforms.{name}" for name in ("carry", "ranks", "trees", "streams")}
EXTENSIONS |= {f"pipeline.{name}" for name in ("collect", "queues", "train", "reverse")}
# These modules list the names of all layers, and import a name only when it is used.
LISTINGS = {"headrace", "headrace.transforms", "headrace.pipeline"}

PLAIN = (
    "from headrace import load_pipeline; import torch; from tensordict import TensorDict; "
    "mask = {'all_assistant_mask': torch.ones(4, 3, dtype=torch.bool)}; "
    "reward = {'reward': torch.tensor([0.0, 1, 0, 1])}; ids = torch.arange(4); "
    "columns = {'masks': mask, 'next': reward, 'group_id': ids // 4, 'rollout_id': ids}; "
    "run = load_pipeline('grpo', group_size=4, minibatches=2).run(TensorDict(columns, batch_size=[4])); "
    "assert len(list(run.minibatches())) == 2"
)


def layer(module: str) -> int:
    """The number of the layer that a module belongs to."""
    folder = ".".join(module.split(".")[1:3])
    if folder.startswith(("adapters", "pipeline.tools")):
        return TOOL
    return EXTENSION if folder in EXTENSIONS else CORE


OURS = {name: path for name, path in MODULES.items() if name not in LISTINGS}


def test_no_inner_layer_imports_an_outer_layer():
    """A door is an exception. Modules that list the names of all layers are not part of the core."""
    doors = {(f"headrace.{inner}", f"headrace.{outer}") for inner, outer in DOORS}
    found = {
        (name, other)
        for name, path in OURS.items()
        for other in imports(path)
        if layer(other) > layer(name) or (other in LISTINGS and layer(name) == CORE)
    }
    assert found - {("headrace.__main__", "headrace.pipeline")} == {
        (inner, outer) for inner, outer in doors if layer(outer) > layer(inner)
    }


def test_an_outer_layer_uses_only_public_names_of_an_inner_layer():
    wrong = []
    for name, path in OURS.items():
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("headrace."):
                continue
            for module, what in taken(node):
                if layer(module) < layer(name) and what not in public_names(module.removeprefix("headrace.")):
                    wrong.append(f"{name}: {module}.{what}")
    assert not wrong


def test_public_names_are_the_same_after_every_module_is_imported():
    """A folder or module with the name of a public function of its package would replace the function."""
    for name in MODULES:
        if not name.endswith("__main__") and not name.startswith("headrace.adapters."):
            try:
                importlib.import_module(name)
            except ImportError as err:
                if not isinstance(lacking(name, err), MissingPackageError):
                    raise
    found = set[str]()
    for path in FACES:
        package = sys.modules[NAMES[path]]
        found |= {f"{NAMES[path]}.{name}" for name, each in public(package) if isinstance(each, ModuleType)}
    # These three names are modules on purpose.
    assert found == {
        "headrace.transforms.table.schema",
        "headrace.transforms.schema",
        "headrace.pipeline.reverse.digits",
    }


def test_each_package_has_a_face():
    """The `__init__` of each package has an `__all__`. Only the package of tools has no names."""
    for path in FACES:
        names = getattr(importlib.import_module(NAMES[path]), "__all__", None)
        assert names or path.parent.name == "tools", path


TABLE = "import headrace.transforms.table"
PLAIN_NEEDS_NO = (
    *("rich", "pyarrow", "headrace.pipeline.tools", "headrace.pipeline.collect", "headrace.pipeline.train"),
    *(f"headrace.transforms.{name}" for name in ("ranks", "trees", "streams")),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "without"),
    [
        (TABLE, ("headrace.transforms.stages", "headrace.transforms.split", "hydra")),
        ("import headrace", ("torch", "hydra", "rich", "pyarrow")),
        (PLAIN, PLAIN_NEEDS_NO),
    ],
)
def test_modules_that_are_not_needed_are_not_imported(code, without):
    """Even a plain batch needs the memory of the split, so that a state can be saved after each batch."""
    program = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    loaded = subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded for each in without if f"{name}.".startswith(f"{each}.")]
