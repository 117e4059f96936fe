"""Examples in docstrings and pages run and print what they show; names in the pages exist."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from pages_as_written import PAGES, fences
from tensordict import TensorDict

import headrace.adapters
import headrace.pipeline
import headrace.transforms
from headrace.pipeline import ConfigError, load_pipeline
from headrace.pipeline.composing.compose import recipes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODULES = [
    name
    for package in (headrace.transforms, headrace.pipeline, headrace.adapters)
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    # Of the adapters, only modules that import no trainer's package have examples that run here.
    if not name.endswith("__main__")
    and (not name.startswith("headrace.adapters.") or name.endswith((".attaching", ".environment")))
]
NOW = [page for page in PAGES if page != "CHANGELOG.md"]  # a changelog names removed files
LITERAL = re.compile(r"#  ?((?:[\[({'\"\d-]|Ledger\(|tensor\().*)$", re.MULTILINE)
NOT_RUN = 6  # the limit for all pages together


@pytest.mark.torchrl
@pytest.mark.parametrize("package", ["headrace.transforms", "headrace.pipeline", "headrace.adapters"])
def test_docstring_examples(package):
    for name in (name for name in MODULES if name.startswith(package)):
        assert doctest.testmod(importlib.import_module(name), raise_on_error=False).failed == 0, name


@pytest.mark.torchrl
def test_every_exported_transform_and_function_has_an_example():
    for package in (headrace.transforms, headrace.pipeline):
        for name in package.__all__:
            thing = getattr(package, name)
            on_pages = ("BatchTransform", "build_pipeline", "optimise", "replay", "audit", "plan", "compare")
            if name not in on_pages and (not isinstance(thing, type) or hasattr(thing, "forward")):
                assert ">>>" in thing.__doc__, name


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")])
def test_python_blocks_run_in_order_and_print_what_is_shown(page, capsys):
    if "import torchrl" in (text := (ROOT / page).read_text()) or "from torchrl" in text:
        pytest.importorskip("torchrl")
    scope: dict = {"__name__": "readme"}
    for block in fences(page, "python"):
        if block.mark == "from":
            assert block.text in (ROOT / block.said).read_text(), block.text
        if block.mark is not None:
            continue
        exec(compile(block.text, page, "exec"), scope)
        printed = capsys.readouterr().out
        for line in block.text.splitlines():
            said = LITERAL.search(line)
            if "print(" in line and said and "…" not in said[1]:
                assert said[1] in printed, line


def test_blocks_that_are_not_run_have_a_reason():
    blocks = [block for page in PAGES for language in ("python", "sh") for block in fences(page, language)]
    assert {block.mark for block in blocks} <= {None, "from", "fails", "not run"}
    not_run = [(block.page, block.said) for block in blocks if block.mark == "not run"]
    assert all(len(said.split()) > 2 for _, said in not_run)
    assert len(not_run) <= NOT_RUN, not_run


def test_the_readme_takes_five_minutes_to_read():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


def test_the_first_screen_names_two_commands_that_install_and_run():
    """A screen has 24 lines. `make -n` prints the commands that a target would run on a fresh machine."""
    screen = (ROOT / "README.md").read_text().splitlines()[:24]
    for command, runs in (("make demo", "bin/headrace"), ("make test", "bin/python -m pytest -n auto")):
        assert [line for line in screen if line.startswith(f"{command} ")], command
        words = [*command.split(), "-n", "STAMP=.no-such-venv/.installed"]
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert 0 < said.index("-m venv") < said.index("pip install") < said.index(runs), said


def test_the_page_of_losses_has_every_recipe_that_names_a_loss():
    page = (ROOT / "docs/losses.md").read_text()
    table = page.partition("## Which loss for which recipe")[2].partition("\n## ")[0]
    paired = {
        name
        for line in table.splitlines()
        if "|" in line
        for name in re.findall(r"`(\w+)`", line.split("|")[2])
    }
    texts = {name: (ROOT / f"conf/pipeline/{name}.yaml").read_text() for name in recipes()}
    named = {
        name for name, text in texts.items() if re.search(r"# .*(Loss:|clip range|columns and loss)", text)
    }
    assert paired - set(recipes()) == set()
    assert named - paired == set()


def test_the_rules_of_contributing_have_at_most_150_lines():
    rules = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Appendices\n")[0]
    assert len(rules.splitlines()) <= 150
    assert "needs a recipe, an adapter or an issue that sets it" in rules


def test_links_within_the_project_resolve():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), (page, target)


def test_files_and_targets_in_the_pages_exist():
    folders = "transforms|pipeline|adapters|conf|docs|tests|tools|examples|benchmarks"
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in NOW:
        text, own = (ROOT / page).read_text(), ("rloo_scaled.yaml",)
        for name in re.findall(rf"`((?:{folders})/[\w./*-]*)`", text):
            assert name.endswith(own) or list(ROOT.glob(name.rstrip("/"))), (page, name)
        for name in re.findall(r"(?:`|^)make (\w+)", text, re.MULTILINE):
            assert name in targets or page == "docs/recipes.md", (page, name)  # a tool writes it


def test_a_decision_is_short_and_has_a_reason_and_a_price():
    sections = (ROOT / "docs/decisions.md").read_text().split("\n## ")[1:]
    assert sections
    for section in sections:
        parts = re.findall(r"^- \*\*(\w+)\.\*\*", section, re.MULTILINE)
        assert parts == ["Question", "Decision", "Reason", "Price"], section
        assert len(section.splitlines()) <= 15, section


def test_the_recipes_in_contributing_load_and_the_first_gives_its_numbers(tmp_path):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    recipe, other = re.findall(r"```yaml\n# conf/(\S+)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "pipeline").mkdir()
    for name, text in (recipe, other):
        (tmp_path / name).write_text(text)
    path = tmp_path / recipe[0]
    shaped = load_pipeline(f"pipeline={Path(other[0]).stem}", f"hydra.searchpath=[file://{tmp_path}]")
    assert "NotTruncated" in str(shaped.stages["filter"])
    assert "high=1.0" in str(shaped.stages["shaped"])
    batch = TensorDict(
        {
            "group_id": [0] * 8 + [1] * 8,
            "rollout_id": list(range(16)),
            ("next", "reward"): [1.0, *[0.0] * 7, *range(8)],
            ("masks", "all_assistant_mask"): [[True]] * 16,
        },
        batch_size=[16],
    )

    def advantages(*words):
        words = ("pipeline.stages.gate.group_size=8", "pipeline.stages.split.shuffle=false", *words)
        pipeline = load_pipeline(f"pipeline={path.stem}", f"hydra.searchpath=[file://{tmp_path}]", *words)
        return pipeline(batch)["advantage"].flatten().tolist()[:8]

    won, *lost = advantages()
    # By hand: the mean is 1/8 and the std √(1/8), so GRPO gives (7/8) / √(1/8). Leave-one-out gives 8/7 times
    # as much.
    assert won == pytest.approx(8**0.5, rel=1e-5)
    assert lost == pytest.approx([-(8**0.5) / 7] * 7, rel=1e-5)
    assert f"{won:.2f} and −{-lost[0]:.2f}" in page
    with pytest.raises(ConfigError, match="scale='leave_one_out' needs eps_mode='skip'"):
        advantages("pipeline.stages.advantage.scale=leave_one_out")


def test_forms_and_workflows_are_yaml_and_run_the_tests():
    found = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
    for form in ("bug-report.yml", "new-recipe.yml"):
        fields = [item["id"] for item in found[form]["body"] if item["type"] != "markdown"]
        assert len(set(fields)) == len(fields) >= 4
    made = {step.get("run") for job in found["ci.yml"]["jobs"].values() for step in job.get("steps", ())}
    assert made >= {"make lint types", "make quick", "make slow SHARD=${{ matrix.shard }}", "make docs"}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        for word in hook["entry"].split():
            assert not word.startswith("tools/") or (ROOT / word).exists(), word


def test_every_promise_names_an_existing_test():
    page = (ROOT / "docs/guarantees.md").read_text()
    for section in page.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        promises = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
        lines = re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE)
        assert promises == [str(number + 1) for number in range(len(promises))] != [], title
        assert [number for number, _ in lines] == promises, f"{title}: a line of tests for each promise"
        for number, tests in lines:
            found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
            assert found, (title, number)
            for file, test in found:
                assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test
