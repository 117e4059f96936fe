"""The help, lists and errors of the command."""

from __future__ import annotations

import csv
import inspect
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import count, takewhile
from os import terminal_size
from types import SimpleNamespace

import pytest
import torch
from command import QUICK, headrace_here

from headrace.pipeline import ConfigError, load_pipeline
from headrace.pipeline.composing.compose import TASKS, compose_config, for_hydra, recipes
from headrace.pipeline.composing.nodes import complete_stages
from headrace.pipeline.tools.command.arguments import (
    CONF,
    answer,
    describe_node,
    hydra_arguments,
    list_files,
    options_in,
)
from headrace.transforms import GroupRelativeAdvantage

pytestmark = pytest.mark.slow


def test_help_fits_a_terminal_and_lists_every_task_and_command(tmp_path):
    shown = headrace_here(tmp_path, "--help").stdout
    lines = shown.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for word in (
        *(f"task={task} " for task in TASKS),
        "recipes",
        "stages",
        "doctor",
        "--version",
        "--cfg job",
    ):
        assert word in shown
    for option in ("group_by", "group_size", "tokenizer"):
        assert f"source.{option}=" in shown
    assert headrace_here(tmp_path, "-h").stdout == shown == headrace_here(tmp_path, "help").stdout


@pytest.mark.parametrize("task", TASKS)
def test_the_options_in_the_help_of_a_task_compose(task, tmp_path):
    shown = headrace_here(tmp_path, f"task={task}", "--help").stdout
    title, text, *_ = shown.split("\n\n")
    assert title == f"headrace task={task}"
    assert (
        "\n".join(f"# {line}" for line in text.splitlines()) in (CONF / "task" / f"{task}.yaml").read_text()
    )
    assert headrace_here(tmp_path, "--help", task).stdout == shown
    assert headrace_here(tmp_path, "--help", "task=train", "task=compare", f"task={task}").stdout == shown
    assert max(map(len, shown.splitlines())) <= 110
    assert not re.search(r"\$\{|^  task=", shown, re.M), "what another option decides is no option"
    reads = task in ("replay", "compare", "plan", "audit")
    for option in ("path", "group_by", "group_size", "tokenizer", "skip_bad"):
        assert (f"\n  source.{option}=" in shown) == reads
    options = [line.split()[0] for line in shown.splitlines() if re.match(r"  \w[\w.]*=", line)]
    assert options
    assert headrace_here(tmp_path, "--cfg", "job", f"task={task}", *options).stdout


def test_every_example_of_the_help_composes(tmp_path):
    shown = headrace_here(tmp_path, "--help").stdout
    examples = shown.split("Examples\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) == 5
    for example in examples:
        words = [word for word in shlex.split(example)[1:] if word not in ("-m", "--cfg", "job")]
        words = [word if "[" in word else word.split(",")[0] for word in words]
        assert headrace_here(tmp_path, "--cfg", "job", *words).stdout


def test_version_lists_the_main_dependencies(tmp_path):
    names = [line.split()[0] for line in headrace_here(tmp_path, "--version").stdout.splitlines()]
    assert names == ["headrace", "torch", "torchrl", "tensordict"]


def test_recipes_and_stages_are_listed_with_a_description(tmp_path):
    shown = headrace_here(tmp_path, "recipes").stdout
    assert re.findall(r"^  (\S+)", shown, re.M) == recipes()
    assert max(map(len, shown.splitlines())) <= 120
    shown = headrace_here(tmp_path, "stages").stdout
    assert "key of the column" not in shown, "the list has the text of an option"
    assert "\n  group_size=null " in headrace_here(tmp_path, "stages", "gate").stdout
    assert "scale: none" in headrace_here(tmp_path, "recipes", "dr_grpo").stdout


def first_paragraph(name: str) -> str:
    """The first paragraph of the comment at the head of a file in conf/, on one line."""
    lines = takewhile(re.compile("#").match, (CONF / name).read_text().splitlines())
    lines = [line[1:].strip() for line in lines if re.match("#(?! @package| Generated)", line)]
    return " ".join(takewhile(bool, lines))


def test_no_text_of_a_recipe_or_a_stage_is_cut(tmp_path):
    for kind, folders in (("recipes", ["pipeline"]), ("stages", ["stage", "criterion", "term"])):
        listing = " ".join(headrace_here(tmp_path, kind).stdout.split())
        for path in (path for folder in folders for path in sorted((CONF / folder).rglob("*.yaml"))):
            name = path.relative_to(CONF)
            assert f"{name.stem} {first_paragraph(name)}" in listing
            text = answer_of(kind, "/".join(name.with_suffix("").parts[1:]))
            assert not re.search(" …$", text, re.MULTILINE), name


def answer_of(*words: str) -> str:
    with redirect_stdout(StringIO()) as shown:
        answer(words)
    return shown.getvalue()


LONGEST = "of " * 27 + "it"  # a line of help has at most 100 characters, and the options take 17
TARGET = "_target_: headrace.transforms.Weigh\n"
NODE = f"""\
# Generated by `make generate` from the signature of Weigh.
# Weigh rows.
#
# W is a number.
{TARGET}# Which tokens,
# and how:
term: ??? # a function
also: null # a criterion
first: 2 # {LONGEST}s
bounds: [0, 1] # from low to high
most: 8 # {LONGEST}
reward_key: ${{...columns.reward}} # (N,) float
"""
HELP = f"""\
mine, the KIND Weigh

Weigh rows.

W is a number.

Options
  term           (required) Which tokens, and how: a function; or a name: directed_weight,
                 entropy_share, log_ratio, optimal_token_baseline, staleness_weight, top_share
  also=null      a criterion; or a name: CRITERIA
  first=2        {LONGEST[:-3]}
                 its
  bounds=[0, 1]  from low to high
  most=8         {LONGEST}
  reward_key     (N,) float

Example
  headrace WORDS"""


REQUIRED = "# Which tokens,\n# and how:\nterm: ??? # a function\n"


@pytest.mark.parametrize(
    ("kind", "required", "words"),
    [
        ("stage", True, "mine=mine MINE.term=entropy_share pipeline.after.mine=STAGE"),
        ("stage", False, "mine=mine MINE.first=2 pipeline.after.mine=STAGE"),
        ("term", False, "mine=token_advantage MINE.term=mine MINE.term.first=2 pipeline.after.mine=STAGE"),
        ("criterion", True, "filter.criterion=mine pipeline.stages.filter.criterion.term=entropy_share"),
        ("criterion", False, "filter.criterion=mine pipeline.stages.filter.criterion.first=2"),
    ],
)  # fmt: skip
def test_the_help_of_a_node_has_its_text_its_options_and_an_example(kind, required, words, tmp_path):
    """The example has the options that must be set or, without one, the first that is a number or a word."""
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "mine.yaml").write_text(NODE if required else NODE.replace(REQUIRED, ""))
    criteria = ", ".join(sorted(path.stem for path in (CONF / "criterion").glob("*.yaml")))
    words = f"pipeline.stages.{words}".replace("MINE", "pipeline.stages.mine")
    whole = HELP.replace("KIND", kind).replace("WORDS", words)
    if not required:
        whole = re.sub("\n  term .*?(?=\n  also)", "", whole, flags=re.S)
    head, tail = whole.split("CRITERIA")
    shown = describe_node(tmp_path / kind / "mine.yaml")
    assert (shown[: len(head)], shown[-len(tail) :]) == (head, tail)
    assert " ".join(shown[len(head) : -len(tail)].split()) == criteria


@pytest.mark.parametrize("letters", [44, 45])
def test_the_comment_of_a_long_option_begins_in_column_48_or_on_the_next_line(letters, tmp_path):
    name = "x" * (letters - 2)
    node = f"{NODE.partition(TARGET)[0]}{TARGET}{name}: 1 # why\n"
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "mine.yaml").write_text(node)
    shown = describe_node(tmp_path / "stage" / "mine.yaml").split("\nOptions\n")[1]
    assert shown.startswith(f"  {name}=1{'  ' if letters == 44 else chr(10) + ' ' * 48}why\n")


def test_options_are_read_with_the_nodes_around_them():
    text = (
        "task: plan\nplan:\n  _target_: mine\n  sizes: [2, 4]  # to compare\n  of:\n    low: 0\n  most: 8\n"
        "# none\nlast: a b\n"
    )
    found = [("sizes", "[2,4]", "to compare"), ("of.low", "0", ""), ("most", "8", "")]
    assert options_in(f"defaults:\n  - grpo\n{text}", "own.") == [
        ("own.task", "plan", ""),
        *((f"own.plan.{name}", value, said) for name, value, said in found),
        ("own.last", "a b", ""),
    ]


@pytest.mark.parametrize(("columns", "room"), [(40, 33), (500, 113), (10, 20), (None, 93)])
def test_a_list_of_files_wraps_the_first_paragraph_of_each_beside_its_name(
    columns, room, tmp_path, monkeypatch
):
    """Names take 3 columns, and spaces 4. A list is at most 120 wide, a text at least 20, and a file 100.

    A word that is too long is cut at the last column, and not at a hyphen.
    """
    monkeypatch.setattr(
        "shutil.get_terminal_size", lambda of_a_file: terminal_size((columns or of_a_file[0], 24))
    )
    text = "x-y" * 200
    (tmp_path / "a.yaml").write_text(f"# @package pipeline\n# Generated by me.\n# {text}\n#\n# more\n")
    (tmp_path / "b.yaml").write_text("# One\n# two.\nname: 1\n# three\n")
    lines = list_files({"a": tmp_path / "a.yaml", "b/c": tmp_path / "b.yaml"}).splitlines()
    first, *wrapped = (text[at : at + room] for at in range(0, 600, room))
    assert lines == [f"  a    {first}", *(" " * 7 + more for more in wrapped), "  b/c  One two."]


def test_the_help_of_a_stage_has_the_equation_and_the_unit_of_each_option():
    shown = answer_of("stages", "advantage")
    assert shown == answer_of("stages", "GroupRelativeAdvantage")
    assert "A_i = (R_i − b_i − δ) / s_i" in shown
    assert "b_i = Σ_{j∈g, j≠i} R_j / (n − 1)" in shown
    assert re.search(r"^  shift=0.0 +δ, added to the baseline, in units of the reward$", shown, re.M)
    assert "−1                               L > L_max" in answer_of("stages", "overlong")
    options = list(inspect.signature(GroupRelativeAdvantage).parameters)
    assert [name for name in options if not re.search(rf"^  {name}\b", shown, re.M)] == []


@pytest.mark.parametrize("folder", ["stage", "criterion", "term"])
def test_the_examples_in_the_help_of_each_stage_criterion_and_term_compose(folder):
    """All stages and terms are added to one recipe, and criteria to one recipe each."""
    ready = []
    for number, path in enumerate(sorted((CONF / folder).glob("*.yaml"))):
        shown = answer_of("stages", path.stem)
        assert not re.search(r"make generate|\?\?\?|\$\{|^#", shown, re.M), shown
        examples = shown.partition("\nExample\n")[2].splitlines()
        assert examples, path
        for example in examples:
            words = example.replace("VALUE", "1").replace("STAGE", "advantage")
            ready.append(for_hydra(words.replace(".mine", f".mine{number}").split()[1:]))
    for together in ready if folder == "criterion" else [[word for words in ready for word in words]]:
        complete_stages(compose_config("load", *together).pipeline)


@pytest.mark.parametrize(
    ("module", "words"), [("headrace", ["recipes", "grpo"]), ("headrace.pipeline", ["--cfg", "job"])]
)
def test_python_runs_the_command_as_a_module(module, words, tmp_path):
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == headrace_here(tmp_path, *words).stdout


LAZY = """
import os, sys
from headrace.pipeline.main import main
for line in ("--version", "stages gate", "--cfg job", "sed=1", "task=plan source.path=no"):
    sys.argv[1:] = line.split()
    os.environ.pop("HYDRA_FULL_ERROR", None)
    try:
        main()
    except SystemExit:
        pass
    loaded = [name for name in ("torch", "tensordict", "pyarrow") if name in sys.modules]
    assert not loaded, (line, loaded)
"""


def test_listing_and_hints_need_no_torch(tmp_path):
    subprocess.run([sys.executable, "-c", LAZY], check=True, cwd=tmp_path)


def test_python_and_the_command_give_the_same_hint():
    with pytest.raises(ConfigError, match=r"did you mean pipeline\.stages\.gate\.group_size=3\?"):
        load_pipeline("group_size=3")


def test_flags_may_be_mixed_with_overrides():
    found = hydra_arguments(["a=1", "--cfg", "job", "~pipeline.stages.filter"])
    assert found == ["--cfg", "job", "a=1", "pipeline.stages.filter=null"]


@pytest.mark.torchrl
def test_the_error_of_a_full_disk_is_one_paragraph(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "metrics.csv")

    monkeypatch.setattr("headrace.pipeline.tools.report.display.write_csv", full)
    done = headrace_here(tmp_path, *QUICK, check=False)
    assert (done.returncode, "metrics.csv: no space left on device." in done.stderr) == (2, True)


@pytest.mark.torchrl
def test_an_unexpected_error_says_how_to_get_its_traceback(tmp_path, monkeypatch):
    def break_down(*_, **__):
        raise KeyError("out of the blue")

    monkeypatch.setattr("headrace.pipeline.tools.command.job.build_pipeline", break_down)
    done = headrace_here(tmp_path, check=False)
    assert done.returncode == 1
    assert "out of the blue" in done.stderr
    assert "HYDRA_FULL_ERROR=1 before the command shows where" in done.stderr


@pytest.mark.torchrl
def test_overrides_reach_the_task_as_typed_and_its_times_are_recorded(tmp_path, monkeypatch):
    """The clock of the task goes on by a quarter of a second each time that it is read."""
    clock = SimpleNamespace(perf_counter=count(0.25, 0.25).__next__)
    monkeypatch.setattr("headrace.pipeline.tools.command.job.time", clock)
    words = [*QUICK, "train.steps=1", "hydra.run.dir=out", "sampler.prompts_per_batch=${group_size}"]
    printed = headrace_here(tmp_path, *words).stdout
    assert "\nwhere the rows went\n" in printed
    assert f"the page: {(tmp_path / 'out' / 'report.html').as_uri()}" in printed
    assert '"title":"grpo, 1 step"' in (tmp_path / "out" / "report.html").read_text()
    with (tmp_path / "out" / "metrics.csv").open() as file:
        (step,) = csv.DictReader(file)
    assert float(step["seconds/headrace"]) == 0.25
    # A batch is collected and graded in another quarter. The environment measures the time for rewards.
    assert float(step["seconds/reward"]) > 0
    assert float(step["seconds/collect"]) + float(step["seconds/reward"]) == pytest.approx(0.25)


@pytest.mark.torchrl
@pytest.mark.parametrize(("threads", "used"), [("2", 2), ("null", 3)])
def test_a_run_sets_the_threads_of_torch_only_if_threads_is_given(tmp_path, threads, used):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        headrace_here(tmp_path, *QUICK, "train.steps=1", f"threads={threads}")
        assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)
