"""The certificates in docs/certificates.json are those that the code computes now."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from composed import composed, configure

from headrace.pipeline.tools.certify import SmallTask, certify_recipe
from headrace.pipeline.tools.certify.certify_task import small_tasks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMMITTED = json.loads((ROOT / "docs" / "certificates.json").read_text())["certificates"]
BY_RECIPE = defaultdict(dict)
for each in COMMITTED:
    BY_RECIPE[each["recipe"]][each["task"]] = each


@cache
def tasks() -> dict[str, SmallTask]:
    return small_tasks(configure("config", "task=certify"))


def test_every_task_file_is_a_task_of_the_command():
    assert set(tasks()) == {path.stem for path in (ROOT / "conf" / "certify").glob("*.yaml")}


def test_the_defaults_of_a_task_are_those_of_its_files():
    """Each default of a task's class is in at least one of the files that make this task."""
    made, checked = defaultdict(list), 0
    for task in tasks().values():
        made[type(task)].append(task)
    for kind, each in made.items():
        own = {field.name: field.default for field in dataclasses.fields(kind)}
        for name in own.keys() & kind.__annotations__.keys():
            if own[name] not in (None, dataclasses.MISSING):
                values = [json.loads(json.dumps(getattr(task, name))) for task in each]
                assert json.loads(json.dumps(own[name])) in values, (kind.__name__, name)
                checked += 1
    assert checked > 5


@pytest.mark.parametrize("recipe", BY_RECIPE)
def test_committed_certificates_are_current(recipe):
    """One task of each recipe is certified again: the one with the fewest outcomes if this takes long.

    The changelog names intended changes.
    """
    node, mine = configure("load", f"pipeline={recipe}").pipeline, BY_RECIPE[recipe]
    name = list(mine)[list(BY_RECIPE).index(recipe) % len(mine)]
    if not all(stage.within_groups for stage in composed(f"pipeline={recipe}").stages.values()):
        name = min(mine, key=lambda each: mine[each]["outcomes"])
    certificate = certify_recipe(node, recipe, tasks()[name], name)
    where = f"{recipe} on {name}; `make certificates ARGS={recipe}` computes them again"
    assert_same(certificate.plain(), mine[name], where)


def assert_same(now, then, where: str) -> None:
    if isinstance(then, dict):
        assert list(now) == list(then), where
        for key in then:
            assert_same(now[key], then[key], f"{where}, {key}")
    elif isinstance(then, list):
        assert list(now) == pytest.approx(then, rel=1e-6, abs=1e-9), where
    elif isinstance(then, float):
        assert now == pytest.approx(then, rel=1e-6, abs=1e-9), where
    else:
        assert now == then, where
