"""`import headrace` has every public name, imports lazily, and says where other names are."""

from __future__ import annotations

import ast
import doctest
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from public import public

import headrace
import headrace.pipeline
import headrace.transforms
from headrace.faces import FOLDER, exported
from headrace.pipeline.public_names import BY_TASK, OF_OTHERS, PACKAGES, all_answers, hint

ROOT = Path(__file__).parents[2]
PUBLIC = {*headrace.pipeline.__all__, *headrace.transforms.__all__}


def test_headrace_has_the_public_names_of_both_packages():
    assert not set(headrace.pipeline.__all__) & set(headrace.transforms.__all__)
    assert set(headrace.__all__) == PUBLIC | {"__version__"}
    for package in (headrace.pipeline, headrace.transforms):
        assert set(dir(package)) == set(package.__all__)
        assert all(getattr(headrace, name) is thing for name, thing in public(package))


def test_dir_the_help_and_the_page_show_at_most_45_names_by_task():
    names = [name for task in BY_TASK.values() for name in task]
    assert len(names) == len(set(names)) <= 45
    assert set(names) < PUBLIC
    assert set(dir(headrace)) == {*names, *PACKAGES, "__version__"}
    rows = re.findall(r"^(\w[\w ]+?)  *((?:\w+, )+\w+)$", headrace.__doc__, re.MULTILINE)
    assert [(task, tuple(shown.split(", "))) for task, shown in rows] == list(BY_TASK.items())
    page = (ROOT / "docs" / "python.md").read_text()
    rows = re.findall(r"^\| (\w[\w ]+) \| (`.*`) \|$", page, re.MULTILINE)
    assert [(task, tuple(re.findall(r"`(\w+)`", shown))) for task, shown in rows] == list(BY_TASK.items())


def test_no_function_has_the_name_of_a_folder_beside_it():
    """With such a name, `package.name` would be the function or the folder, whichever was imported last."""
    folders = {path.parent for path in FOLDER.glob("**/__init__.py")}
    for folder in folders:
        package = ".".join(["headrace", *folder.relative_to(FOLDER).parts])
        names = PUBLIC if folder == FOLDER else set(exported(package))
        assert not names & {each.name for each in folder.iterdir() if each in folders}, package


def test_type_checkers_see_all_names_of_both_packages():
    """Star imports take the names of `__all__`, so there is no second list."""
    tree = ast.parse(Path(headrace.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    stars = [ast.unparse(node) for node in guarded.body if isinstance(node, ast.ImportFrom)]
    assert stars == ["from .pipeline import *", "from .transforms import *"]


@pytest.mark.slow
def test_names_are_listed_and_misspelt_without_torch_and_stages_are_imported_without_hydra():
    code = (
        "import sys, headrace",
        "assert 'load_pipeline' in dir(headrace) and 'whiten' in dir(headrace.transforms)",
        "assert not hasattr(headrace, 'regrade') and not hasattr(headrace, 'load_pipelines')",
        "headrace.pipeline",
        "assert 'torch' not in sys.modules",
        "headrace.GroupRelativeAdvantage",
        "assert 'torch' in sys.modules and 'hydra' not in sys.modules",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("regrade", ": it is headrace.pipeline.tools.dumps.readers.regrade"),
        ("certify", ": it is headrace.pipeline.tools.certify.certify"),
        ("trl", ": it is headrace.adapters.trl"),
        ("GRPOLoss", ": it is torchrl.objectives.llm.GRPOLoss"),
        ("TensorDict", ": it is tensordict.TensorDict"),
        ("DrGRPO", ": it is a recipe, headrace.load_pipeline('dr_grpo')"),
        ("DAPO", ": it is a recipe, headrace.load_pipeline('dapo'); the loss is torchrl.objectives.llm.DAPO"),
        ("doctor", ": it is a command, `headrace doctor`"),
        ("view", ": it is a command, `headrace view`"),
        ("overlong", ": it is the node of headrace.OverlongPunishment"),
        ("not_truncated", " (did you mean 'NotTruncated'?)"),
        ("entropy_share", " (did you mean 'EntropyShare'?)"),
        ("Train_Step", ": use headrace.optimise"),
        ("load_pipelines", " (did you mean 'load_pipeline' or 'build_pipeline'?)"),
        ("BatchErorr", " (did you mean 'BatchError' or 'BatchTransform'?)"),
        ("CompletnessGate", " (did you mean 'CompletenessGate'?)"),
        ("Punishment", " (did you mean 'OverlongPunishment'?)"),
        ("Shaping", " (did you mean 'RewardShaping'?)"),
        ("qqq", "; dir(headrace) lists the names to begin with"),
        ("__path_hooks__", ""),
    ],
)
def test_an_unknown_name_is_refused_with_its_module_or_nearest_name(name, hint):
    for module in (headrace, headrace.pipeline, headrace.transforms):
        with pytest.raises(AttributeError) as refused:
            getattr(module, name)
        assert str(refused.value) == f"module {module.__name__!r} has no attribute {name!r}{hint}"


def test_a_package_says_that_a_name_is_in_the_other_package():
    for package, name in ((headrace.transforms, "load_pipeline"), (headrace.pipeline, "ShuffleSplit")):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}': it is headrace\.{name}$"):
            getattr(package, name)


def test_each_answer_to_a_guess_names_only_what_exists():
    lines = (FOLDER / "pipeline" / "guesses.txt").read_text().splitlines()[1:]
    pairs = [line.partition(": ")[::2] for line in lines]
    guesses = [guess for some, _ in pairs for guess in some.split()]
    assert sorted({each for each in guesses if guesses.count(each) > 1}) == []
    assert not [each for each in guesses if each in PUBLIC]
    for _, answer in pairs:
        for name in re.findall(r"headrace\.([\w.]+)", answer):
            thing = headrace
            for part in name.split("."):
                thing = getattr(thing, part)
        assert set(re.findall(r"recipe '(\w+)'", answer)) <= set(headrace.recipes())
        assert all((ROOT / page).exists() for page in re.findall(r"docs/\w+\.md", answer))


def test_each_guess_of_the_file_is_answered_by_its_line():
    """No earlier rule, such as the rule for recipe names, answers instead."""
    assert {guess for guess, answer in all_answers().items() if hint(guess) != f": use {answer}"} == set()


def objects() -> dict[str, object]:
    """An object of each class that has guesses, by the name that answers give it."""
    columns = {"group_id": [1, 1], "rollout_id": [4, 5], "reward": [0.0, 1.0], "tokens": [5, 5]}
    decider = headrace.Decider("rloo", group_size=2)
    decision = decider.decide(columns)
    run, pipeline = decision.run, decider.pipeline
    made = {"run": run, "decision": decision, "decider": decider, "pipeline": pipeline}
    return made | {"ledger": run.ledger}


def test_a_guess_about_an_object_is_answered_with_what_it_has():
    made, seen = objects(), set()
    for guess, answer in all_answers().items():
        kind, _, name = guess.removesuffix("[]").partition(".")
        if kind not in made or kind == guess:
            continue
        seen.add(kind)
        assert not hasattr(made[kind], name or guess), guess
        with pytest.raises((AttributeError, TypeError), match=re.escape(f": use {answer}") + "$"):
            getattr(made[kind], name) if name else made[kind][0]
        for owner, known in re.findall(r"\b(\w+)\.(\w+)", answer):
            assert owner not in made or hasattr(made[owner], known), answer
    assert seen == made.keys()


def test_a_loop_over_a_run_is_answered_with_its_minibatches():
    with pytest.raises(TypeError, match=r"^'Run' object has no items: use a loop over run.minibatches\(\)"):
        list(objects()["run"])


def test_a_guess_about_a_class_of_ones_own_is_answered_as_about_its_base_class():
    class Mine(headrace.Run):
        def __init__(self):
            pass

        @property
        def broken(self):
            return self.qqq

    with pytest.raises(AttributeError, match=r"^'Mine' object has no attribute 'mask': use run.ledger"):
        _ = Mine().mask
    for name in ("qqq", "broken"):  # the error of a property says what is missing inside
        with pytest.raises(AttributeError, match=r"^'Mine' object has no attribute 'qqq'$") as refused:
            getattr(Mine(), name)
        assert refused.value.name == "qqq"  # from which Python itself suggests a near name
    assert vars(pickle.loads(pickle.dumps(objects()["decision"].ledger))).keys() >= {"reason", "names"}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=pytest.mark.torchrl if module.startswith("torchrl") else ())
        for module in OF_OTHERS
    ],
)
def test_each_hinted_module_has_the_name(module):
    assert all(hasattr(import_module(module), name) for name in OF_OTHERS[module])


def test_the_example_of_the_package_runs():
    assert doctest.testmod(headrace).failed == 0
