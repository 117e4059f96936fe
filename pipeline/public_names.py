"""Where the public names of headrace are, and where a name is that somebody looks for in vain."""

from __future__ import annotations

from headrace.faces import FOLDER, exported

from .wording import suggest

PACKAGES = ("adapters", "conf", "pipeline", "transforms")
# Where names are that somebody may look for in `headrace`.
INNER = (
    "adapters",
    "pipeline.reverse",
    "pipeline.tools.certify",
    "pipeline.tools.dumps.readers",
    "pipeline.tools.report",
    "pipeline.train",
)
OF_OTHERS = {
    "tensordict": ("TensorDict", "LazyStackedTensorDict", "NonTensorData"),
    "torchrl.collectors": ("Collector", "MultiCollector"),
    "torchrl.collectors.llm": ("LLMCollector",),
    "torchrl.data": ("ReplayBuffer",),
    "torchrl.objectives.llm": ("CISPOLoss", "DAPO", "GRPOLoss", "MCAdvantage"),
}


HOMES = {name: package for package in ("pipeline", "transforms") for name in exported(f"headrace.{package}")}
SHOWN = sorted(["__version__", *HOMES, *PACKAGES])


def hint(name: str) -> str:
    """Where a name is that is not here, or which is meant; nothing for those that Python asks for itself."""
    if name.startswith("_"):
        return ""
    for package in INNER:
        if name in exported(f"headrace.{package}"):
            return f": it is headrace.{package}.{name}"
    for module, names in OF_OTHERS.items():
        if name in names:
            return f": it is {module}.{name}"
    if (FOLDER / "conf" / "pipeline" / f"{name}.yaml").exists():
        return f": it is a recipe, headrace.load_pipeline({name!r})"
    return suggest(name, SHOWN) or "; dir(headrace) lists the public names"
