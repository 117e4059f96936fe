"""Steps of a dump that fail are left out and named, and sentences say what was read."""

from __future__ import annotations

import io
import re

import pytest
from dumps import verl_row, write_lines
from rich.console import Console

from headrace.pipeline.tools.dumps import DumpSteps, StepsFailed
from headrace.pipeline.tools.dumps.dump_steps import said_of_draws
from headrace.pipeline.tools.dumps.readers import Draws, open_dump
from headrace.transforms import BatchError, MissingKeyError

BY_ORDER = (
    "split into the draws, by the order of the dump. This is right if the trainer dumps rollouts in the "
    "order "
    "in which it drew their prompts. verl does so with trainer.balance_batch=False."
)
CONFIRMED = "split into the draws, and the logged advantages are those of the draws."
LEFT_OUT = "left out: the dump does not have the order of the draws."


def drawn(*names):
    return tuple((name, 4) for name in names)


@pytest.mark.parametrize(
    ("draws", "said"),
    [
        ({}, []),
        (
            {3: Draws(1, 0, 0, drawn("a"), 1)},
            [
                "1 prompt was drawn several times in one step: step 3, a, 4 rollouts.",
                f"1 of these groups was {CONFIRMED}",
            ],
        ),
        (
            {3: Draws(4, 1, 4, drawn("a", "b"), 3), 5: Draws(1, 0, 0, (("c", 16),))},
            [
                "3 prompts were drawn several times in one step: step 3, a, 4 rollouts; step 3, b, 4 "
                "rollouts; "
                "step 5, c, 16 rollouts.",
                f"3 of these groups were {CONFIRMED}",
                f"2 of these groups were {BY_ORDER}",
                f"1 of these groups, 4 rows, was {LEFT_OUT}",
            ],
        ),
        (
            {0: Draws(1, 1000, 1000, drawn(*"abcdef")), 1: Draws(0, 2, 200)},
            [
                "6 prompts were drawn several times in one step: "
                f"{'; '.join(f'step 0, {name}, 4 rollouts' for name in 'abcdef')}.",
                f"1 of these groups was {BY_ORDER}",
                f"1,002 of these groups, 1,200 rows, were {LEFT_OUT}",
            ],
        ),
        (
            {0: Draws(drawn=drawn(*"abcdefg"))},
            [
                "7 prompts were drawn several times in one step: "
                f"{'; '.join(f'step 0, {name}, 4 rollouts' for name in 'abcdef')}, and others."
            ],
        ),
    ],
)
def test_sentences_say_which_prompts_were_drawn_again_and_how_they_were_split(draws, said):
    assert said_of_draws(draws) == said


def dump_of(folder, steps=5, faults=()):
    """Write two rollouts for each step. A step in `faults` has a malformed record, too."""
    for step in range(steps):
        rows = [verl_row(f"a_{i}_0", float(i), step) for i in range(2)]
        rows += [{**verl_row("a_2_0", "high", step)}] * (step in faults)
        write_lines(folder / f"{step}.jsonl", rows)
    return folder


def task(refused, error=BatchError):
    """A task whose result is the step, and that refuses some steps."""

    def of(step, batch):
        if step in refused:
            raise error(f"no {step}")
        return step

    return of


def read(folder, of, **options):
    """The results of a task, the message of its error, what it prints, and the object that read the steps."""
    console = Console(width=40, file=io.StringIO())  # no sentence is wrapped
    steps, found, error = DumpSteps(open_dump(folder, "verl", **options), console), [], ""
    try:
        for result in steps.results(of):
            found.append(result)
        steps.show()
        steps.end()
    except (BatchError, StepsFailed) as err:
        error = str(err)
    return found, error, console.file.getvalue(), steps


FAILED = (
    "{} of 5 steps failed, which is an error. With source.skip_bad=true, malformed records are skipped, and "
    "steps that still fail are left out without an error"
)


@pytest.mark.parametrize(
    ("refused", "skips", "results", "error"),
    [
        ({}, False, [0, 1, 2, 3, 4], ""),
        ({0, 1}, False, [2, 3, 4], FAILED.format(2)),
        ({1, 2, 3, 4}, False, [0], FAILED.format(4)),
        ({0, 1, 2}, False, [], "step 0: no 0"),
        ({0, 1, 2}, True, [3, 4], ""),
        ({0, 1, 2, 3, 4}, True, [], "step 0: no 0"),
    ],
)
def test_a_task_ends_if_no_step_passes_or_the_first_three_fail(refused, skips, results, error, tmp_path):
    found, message, said, steps = read(dump_of(tmp_path), task(refused), skip_bad=skips)
    assert (found, message) == (results, error)
    assert ([each.step for each in steps.failed], steps.passed) == (sorted(refused), len(results))
    if results:
        left_out = f", without {len(refused)} steps that failed" * bool(refused)
        assert (
            steps.counted
            == f"{2 * len(results)} rows in {len(results)} step{'s' * (len(results) != 1)}{left_out}"
        )
        shown = [each.strip() for each in said.splitlines()]
        reasons = [f"step {step}: no {step}" for step in sorted(refused)]
        assert shown[1 : 1 + len(reasons)] == reasons
        assert shown[1 + len(reasons) :] == [error] * bool(error)


def test_a_missing_column_ends_a_task_only_until_a_step_passes(tmp_path):
    dump_of(tmp_path)
    found, message, _, steps = read(tmp_path, task({0, 1}, MissingKeyError))
    assert (found, message, len(steps.failed)) == ([], "step 0: no 0", 1)
    found, message, _, steps = read(tmp_path, task({1, 2}, MissingKeyError))
    assert (found, message) == ([0, 3, 4], FAILED.format(2))


@pytest.mark.parametrize(
    ("faults", "said"), [((1,), "1 malformed record was"), ((1, 3), "2 malformed records were")]
)
def test_skipped_records_are_counted_and_shown(faults, said, tmp_path):
    _, error, text, steps = read(dump_of(tmp_path, faults=faults), task({}), skip_bad=True)
    assert error == ""
    shown = [f"  {tmp_path}/{step}.jsonl:3: 'score' must be a finite number; found 'high'" for step in faults]
    assert text.splitlines() == [f"{said} skipped", *shown]
    assert steps.counted == f"10 rows in 5 steps, without {len(faults)} malformed records"


def test_rows_of_repeated_prompts_are_counted(tmp_path):
    rows = [verl_row(None, float(i), 7, prompt) for i, prompt in enumerate("abacca")]
    write_lines(tmp_path / "7.jsonl", rows)
    _, _, _, steps = read(tmp_path, task({}), group_by="prompt", group_size=2)
    assert steps.counted == "3 rows in 1 step, without 3 rows of repeated prompts"
    assert steps.said == said_of_draws(steps.source.draws)


@pytest.mark.parametrize(("names", "shown"), [([], "1"), (["x"], "?")])
def test_a_terminal_shows_the_step_that_was_read_last_or_that_its_file_names_none(names, shown, tmp_path):
    dump_of(tmp_path, steps=2)
    for name in names:
        write_lines(tmp_path / f"{name}.jsonl", [])  # a file without records, whose step would be its name
    text, looks = io.StringIO(), {"force_terminal": True, "color_system": None, "_environ": {"TERM": "xterm"}}
    console = Console(width=80, file=text, **looks)
    assert [*DumpSteps(open_dump(tmp_path, "verl"), console).results(task({}))] == [0, 1]
    assert re.findall(r"step (\S)", text.getvalue())[-1] == shown
