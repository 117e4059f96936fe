"""A new part is in every table; one failure lists the files that lack it, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composed import composed
from recipes import ADVANTAGES, CHAINS, NAMES
from test_audit import SOUND
from test_contract import NEEDED, STAGES

import headrace.pipeline
import headrace.transforms
from headrace.pipeline.sources import READERS
from headrace.transforms import BatchTransform

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def lacking_stages() -> list[str]:
    parts = {
        thing
        for module in (headrace.transforms, headrace.pipeline)
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, BatchTransform) and thing is not BatchTransform
    }
    untried = sorted(part.__name__ for part in parts - {type(make()) for make in STAGES.values()})
    return [f"{name}: a line of STAGES and of NEEDED in tests/test_contract.py" for name in untried] + [
        f"{name}: a line of NEEDED in tests/test_contract.py, its columns" for name in STAGES.keys() - NEEDED
    ]


def lacking_recipes() -> list[str]:
    """Recipes whose stages differ in numbers alone share the tests of one of them."""
    certified = json.loads((ROOT / "docs" / "certificates.json").read_text())["certificates"]
    missing = set(NAMES) - {each["recipe"] for each in certified}
    lacking = [f"{name}: its certificates. Run `make certificates`" for name in sorted(missing)]
    chains: dict[object, list[str]] = {}
    measures: dict[object, list[str]] = {}
    for name in NAMES:
        stages = dict(composed(f"pipeline={name}").stages.items())
        chain = [(stage, type(made), type(getattr(made, "criterion", 0))) for stage, made in stages.items()]
        chains.setdefault(tuple(chain), []).append(name)
        advantage = stages.get("advantage")
        measure = tuple(getattr(advantage, option, None) for option in ("baseline", "scale", "dtype"))
        measures.setdefault(measure, []).append(name)
    for alike in chains.values():
        if len(set(alike) & set(CHAINS)) != 1:
            lacking.append(
                f"one of {', '.join(alike)}: a line of CHAINS in tests/recipes.py, for their stages"
            )
    for alike in measures.values():
        if not set(alike) & set(ADVANTAGES):
            lacking.append(f"one of {', '.join(alike)}: a line of ADVANTAGES in tests/recipes.py")
    return lacking


def lacking_readers() -> list[str]:
    return [f"{name}: a sound dump in SOUND of tests/test_audit.py" for name in READERS.keys() - SOUND]


def out_of_date(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr("headrace.pipeline.load_pipeline", composed)  # of which tests compose most as well
    import generate

    return [f"{path.relative_to(ROOT)}: run `make generate`" for path in generate.outdated()]


def test_every_table_lists_a_new_part(monkeypatch):
    lacking = out_of_date(monkeypatch) + lacking_stages() + lacking_readers() + lacking_recipes()
    assert not lacking, "to be added:\n" + "\n".join(lacking)
