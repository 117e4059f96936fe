"""The names of recipes, one recipe for each chain of stages, and pipelines of recipes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from composed import composed

from headrace.pipeline import Pipeline

CONF = Path(__file__).parents[2] / "conf" / "pipeline"
NAMES = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.rglob("*.yaml"))

# Recipes that compute with TorchRL, if it is installed.
WITH_TORCHRL = ("ppo",) if find_spec("torchrl") else ()
# Recipes with the same names and classes of stages differ only in numbers and in the advantage's equation.
# One of them is enough for a law that names neither numbers nor equation. test_compose_recipes.py checks that
# the list is complete.
CHAINS = (
    "as/verl",
    "dapo",
    "gdpo",
    "gfpo",
    "gigpo",
    "gr3",
    "grpo",
    "gtpo",
    "high_entropy",
    "kl_in_advantage",
    "mgpo",
    "mis",
    "mlperf",
    "mt_grpo",
    "opd",
    "opsm",
    "otb",
    "rae",
    "rlsd",
    "roles",
    "spo",
    "tis",
    "tree_grpo",
    "w_reinforce",
    *WITH_TORCHRL,
)
# One recipe for each baseline and scale that CHAINS lacks.
ADVANTAGES = (
    *CHAINS,
    "as/nemo_rl",
    "as/slime",
    "asymre",
    "gpg",
    "lite_ppo",
    "maxrl",
    "mc_grpo",
    "opmd",
    "opo",
    "passk",
    "pkpo",
    "reinforce_pp",
    "rloo",
)
# Options of recipes whose stages use turns, for batches with a column of turns.
BY_TURN = {
    "gigpo": {"returns": {"turn_key": "turn"}},
    "ppo": {"gae": {"turn_key": "turn"}},
    "tree_grpo": {"tree": {"turn_key": "turn"}},
}
FEW = ("as/nemo_rl", "dapo", "gdpo", "mis", "tree_grpo")


def pipeline_of(recipe: str, **changes: dict[str, Any]) -> Pipeline:
    """The pipeline of a recipe, with changed options of some stages. Without changes it is composed once."""
    pipeline = composed(f"pipeline={recipe}")
    stages = dict(pipeline.stages.items())
    for name, options in changes.items():
        cls = type(stages[name])
        own = {option: getattr(stages[name], option) for option in inspect.signature(cls).parameters}
        stages[name] = cls(**own | options)
    return Pipeline(stages) if changes else pipeline


@contextmanager
def of(name: str) -> Iterator[None]:
    """Add the name of the recipe or stage to an error."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as err:  # pytest.fail: a required error was not raised
        raise AssertionError(f"{name}: {err}") from err
