"""Make the page with the table of all answers, and a page for each case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import CASES, Case
from judge import judge, number
from peers import PEERS

HEAD = """# Bugs of the field

Trainers for RL have the same silent bugs again and again. This page lists {cases} of them, and says which
projects have them. Each case has a page with a few rows, the correct result computed by hand, and links to
threads that report the bug.

| verdict | means |
|---|---|
| right | The result is correct. |
| refused | The code raised an error. The page of the case quotes it. |
| **wrong** | The result is another number. The page of the case says why. |
| by design | The result is another number, and the project documents it. |
| not run | The project has no code for such rows, or the code could not be run. |

The number after "wrong" or "by design" is the advantage that differs most from the correct one. In the cases
of denominators and sums, the numbers are the weights of a token in different rows. In the case of a
threshold, it is the weight that differs most. In the case of shared tokens, it is how often such a token
trains.

verl has two trainers. The column "verl v1" is for `trainer.use_v1=True`, the default of verl 0.9.1.

| case | {names} |
|---|{dashes}|
{rows}

## Bugs that need a whole run

A few rows cannot show two bugs of asynchronous trainers. [Lost and preferred rollouts](lost-rollouts.md)
simulates whole runs, with the code of each project. The numbers below are from its lognormal world and from
its restarts. That page has the versions, the settings, and more rules.

- **Rows in flight are skipped at a restart.** The position in the data is saved, but not the prompts whose
  rollouts are not finished. After a restart, these prompts are never trained. The correct number is 0.
  [NVIDIA-NeMo/RL #3599](https://github.com/NVIDIA-NeMo/RL/issues/3599), 2026-08-12, reports and corrects it.
- **Slow rollouts are under-represented.** A rule that drops old groups drops those with slow rollouts. The
  slowest tenth of the prompts should have the same share in what is trained as in what was dispatched.
  [tinker-cookbook #822](https://github.com/thinking-machines-lab/tinker-cookbook/issues/822), 2026-07-13,
  reports it, and [marin #8955](https://github.com/marin-community/marin/issues/8955), 2026-09-16.

| system | skipped at a restart, % of the prompts | slowest tenth: dispatched → trained, % |
|---|---|---|
{runs}

## Other kinds

Two more kinds of bugs have no case here. A few rows cannot show them in the functions that were run:

- **A filter that judges another number than the advantage.** With several rewards, each normalised alone, a
  group of equal sums can have advantages that are not 0. Such filters are in the loops of trainers, which
  were not run. A review of [huggingface/trl #7242](https://github.com/huggingface/trl/issues/7242),
  2026-09-16, reports that a filter ranks rewards that are already normalised.
- **Tool calls that count no token.** A reader of dumps that only reads the text of a message leaves out
  tokens that were sampled as a tool call. The functions here get tokens and masks, and read no messages.

## How it was run

The rows of each case went through the installed code of each project. Only the functions in the table below
were run, on a CPU, and no whole training run. A trainer may remove such rows before it calls its function.

| project | version | functions for advantages; for the loss |
|---|---|---|
{projects}

Each project ran with its defaults, or with the settings that it documents for such rows. The pages of the
cases name these settings. headrace was run in the same way.

{missing}Some projects were not run:

| project | reason |
|---|---|
| miles, prime-rl, rLLM | They are not on the Python package index. |
| slime, NeMo RL | The index only has version 0.0.0. NeMo RL also needs Python 3.13. |
| SkyRL | Version 0.4.0 cannot be imported with Python before 3.12, because of pydantic. |
| torchtitan | Version 0.3.0 divides by a std with the divisor n. The correct results here have n − 1. |
| verifiers | Version 0.4.0 only scores rollouts, and leaves the advantages to a trainer. |

Special settings:

- **agentlightning** 1.0.2 requires Python 3.12. It was run with an older Python, because the functions
  that were run do not need 3.12.
- **OpenRLHF** imports `flash_attn` and `vllm`, which need a GPU. They were replaced by empty modules. The
  functions that were run do not call them.
- **ms-swift** 4.6.0 computes its loss in its `GRPOTrainer`, which was not run. It imports
  `trl.experimental.ppo`, which TRL 1.16.0 does not have.
- **torchrl**: `MCAdvantage` got the documented options `prompt_key` and `trajectory_return="max"`. By
  default it groups by the text of the prompt. Then the case
  [a prompt drawn twice](field-bugs/prompt-drawn-twice.md) is wrong.
- **headrace** computes its weights once for the whole step, so micro-batches and ranks do not change them.
  `tests/tools/xray/test_xray_recipes.py` also measures the gradient, in micro-batches and in two processes.

To run it again, with access to a package index:

```text
python benchmarks/field_bugs                     # all projects
python benchmarks/field_bugs --only verl trl     # some of them
```

Each project gets an environment in `build/field_bugs`, without a second torch. The command writes this page.
"""
NAMES = {"micro": "micro-batch", "tokens": "tokens in the loss", "version": "policy version"}
NAMES |= {"score": "entropy", "deviation": "deviation, of KL-Cov", "sampled": "sampled tokens"}
ASKED = {"weight": "weight per token", "times": "number of times"}
RUNS = Path(__file__).parent.parent / "results" / "lost_rollouts.json"
PROMPTS = 2400  # ten runs of 240 prompts, each killed once


def cell(peer: str, case: Case, result: dict[str, Any]) -> str:
    """A cell of the table: a verdict, with a number if the answer is not right."""
    if "cases" not in result:
        return "not run"
    answer = result["cases"][case.name]
    verdict, _ = judge(peer, case, answer)
    if verdict in ("wrong", "by design"):
        marked = f"**{verdict}**" if verdict == "wrong" else verdict
        return marked if case.asks == "paths" else f"{marked} {number(case, answer)}"
    return {"not seen": "not run"}.get(verdict, verdict)


def runs() -> list[str]:
    """The results of the simulation of whole runs, for systems that the simulation also restarts."""
    stored = json.loads(RUNS.read_text())
    lines = []
    for system, restart in stored["restarts"].items():
        world = stored["worlds"]["Lognormal"][system]
        sent, trained = (100 * world[f"{what}_slow"] / world[what] for what in ("sent", "trained"))
        skipped = 100 * restart["skipped"] / PROMPTS
        lines.append(f"| {system} | {skipped:.0f} | {sent:.1f} → {trained:.1f} |")
    return lines


def table(results: dict[str, Any]) -> str:
    names = [name for name in PEERS if name in results]
    there = [name for name in names if "cases" in results[name]]
    lines = [
        f"| [{case.title}](field-bugs/{case.name}.md) | "
        + " | ".join(cell(name, case, results[name]) for name in there)
        + " |"
        for case in CASES
    ]
    projects = [
        f"| {name} | {results[name].get('version', 'not run')} | {PEERS[name].calls} |" for name in names
    ]
    missing = [
        f"{name} could not be installed, or did not run: {results[name]['not_run']}.\n\n"
        for name in names
        if name not in there
    ]
    return HEAD.format(
        cases=len(CASES),
        names=" | ".join(there),
        dashes="|".join("---" for _ in there),
        rows="\n".join(lines),
        runs="\n".join(runs()),
        projects="\n".join(projects),
        missing="".join(missing),
    )


def shown(value: Any, digits: int = 4) -> str:
    if value is None:
        return "–"
    text = f"{value:.{digits}g}" if isinstance(value, float) else str(value)
    return text.replace("-", "−").replace("nan", "NaN")


def page(case: Case, results: dict[str, Any]) -> str:
    """Make the page of a case: the bug, its rows, the correct result, all results, and threads."""
    threads = [
        f"- [{each.project} #{each.number}](https://github.com/{each.project}/issues/{each.number}), "
        f"{each.date}: {each.says}"
        for each in case.threads
    ]
    names = [name for name in case.rows if name in case.columns or name == "tokens"]
    asked = ASKED.get(case.asks, "advantage")
    of_what = (
        "how often the tokens of each turn train" if case.asks == "times" else f"the {asked} of each row"
    )
    accepted = {
        f"also correct{' ' * (n - 1)}" if n else f"correct {asked}": each
        for n, each in enumerate(case.accepted)
    }
    head = [*(NAMES.get(name, name) for name in names), *accepted]
    columns = [*(case.rows[name] for name in names), *accepted.values()]
    lines = ["| " + " | ".join(shown(value, 6) for value in row) + " |" for row in zip(*columns, strict=True)]
    found, all_values = [], []
    for name, result in results.items():
        if "cases" not in result:
            continue
        answer = result["cases"][case.name]
        verdict, says = judge(name, case, answer)
        values = ", ".join(map(shown, answer["found"])) if "found" in answer else ""
        said = {"not seen": "not run", "wrong": "**wrong**"}.get(verdict, verdict)
        all_values.append(values)
        found.append(f"| {name} | {said} | {values} | {says.replace('|', '/')} |")
    must_not = any(None in each for each in case.accepted)
    none = must_not or any("–" in shown_in for shown_in in all_values)
    zero = " The sign “–” means that the row does not train. "
    zero += "The results 0 and “–” count as equal, because neither makes a gradient."
    absent = " The sign “–” means that the row must not train." if must_not else ""
    return "\n".join(
        [
            f"# {case.title}",
            "",
            case.bug.strip(),
            "",
            "## The rows",
            "",
            f"The configured group size is {case.group_size}.{absent}",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *lines,
            "",
            "## The correct result",
            "",
            case.why.strip(),
            "",
            "## What each project does",
            "",
            "[Bugs of the field](../field-bugs.md) explains the verdicts. "
            f"The result is {of_what}.{zero if none else ''}",
            "",
            "| project | verdict | result | notes |",
            "|---|---|---|---|",
            *found,
            "",
            "## Threads",
            "",
            *threads,
            "",
            "`python benchmarks/field_bugs` writes this page.",
            "",
        ]
    )


def write(docs: Path, results: dict[str, Any]) -> None:
    """Write docs/field-bugs.md and docs/field-bugs/."""
    (docs / "field-bugs").mkdir(parents=True, exist_ok=True)
    (docs / "field-bugs.md").write_text(table(results))
    for case in CASES:
        (docs / "field-bugs" / f"{case.name}.md").write_text(page(case, results))
