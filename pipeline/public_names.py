"""Where the public names of headrace are, and where a name is that somebody looks for in vain.

To import a package may bring torch along. So the names are read from its text.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from .wording import suggest

FOLDER = Path(__file__).parents[1]
PACKAGES = ("adapters", "conf", "pipeline", "transforms")
# Where names are that somebody may look for in `headrace`.
INNER = (
    "adapters",
    "pipeline.certify",
    "pipeline.report",
    "pipeline.reverse",
    "pipeline.sources",
    "pipeline.train",
)
OF_OTHERS = {
    "tensordict": ("TensorDict", "LazyStackedTensorDict", "NonTensorData"),
    "torchrl.collectors": ("Collector", "MultiCollector"),
    "torchrl.collectors.llm": ("LLMCollector",),
    "torchrl.data": ("ReplayBuffer",),
    "torchrl.objectives.llm": ("CISPOLoss", "DAPO", "GRPOLoss", "MCAdvantage"),
}


@cache
def _face(package: str) -> ast.Module:
    path = FOLDER.joinpath(*package.split("."), "__init__.py")
    return ast.parse(path.read_text(encoding="utf-8"))


def exported(package: str) -> list[str]:
    """The `__all__` of a package of headrace."""
    for node in _face(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


@cache
def modules_of(package: str) -> dict[str, str]:
    """The module of each name that a package imports from its own, under `TYPE_CHECKING` too."""
    imports = [node for node in ast.walk(_face(package)) if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


HOMES = {name: package for package in ("pipeline", "transforms") for name in exported(package)}
SHOWN = sorted(["__version__", *HOMES, *PACKAGES])


def hint(name: str) -> str:
    """Where a name is that is not here, or which is meant; nothing for those that Python asks for itself."""
    if name.startswith("_"):
        return ""
    for package in INNER:
        if name in exported(package):
            return f": it is headrace.{package}.{name}"
    for module, names in OF_OTHERS.items():
        if name in names:
            return f": it is {module}.{name}"
    if (FOLDER / "conf" / "pipeline" / f"{name}.yaml").exists():
        return f": it is a recipe, headrace.load_pipeline({name!r})"
    return suggest(name, SHOWN) or "; dir(headrace) lists the public names"
