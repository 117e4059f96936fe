"""The recipes by name, and one for each chain of stages."""

from __future__ import annotations

from pathlib import Path

CONF = Path(__file__).parent.parent / "conf" / "pipeline"
NAMES = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.rglob("*.yaml"))

# Recipes whose stages have the same names and classes differ in numbers and in the advantage's equation. One
# of them is enough for a law that names neither; test_recipes.py says that the list is complete.
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
    "rae",
    "rlsd",
    "roles",
    "spo",
    "tis",
    "tree_grpo",
    "w_reinforce",
)
