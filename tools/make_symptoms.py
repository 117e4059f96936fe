"""Make docs/symptoms.md from the symptoms that advisories name."""

from __future__ import annotations

from pathlib import Path

from headrace.pipeline.tools.report import Symptom, symptoms

PAGE = Path(__file__).parent.parent / "docs" / "symptoms.md"
HEAD = """# From symptom to stage

Your reward does not rise, or a report warns about a symptom. Find the symptom here. Each section
has three parts:

- **Rule**: the number of the report that shows the symptom.
- **Cause**: what may be wrong.
- **What you can do**: changes to try. Most of them are overrides for the `headrace` command.

A warning appears because a number is beyond its bound. So the number in it is more extreme, on average,
than that of the next steps, most of all if the steps have few groups. Before you change a run, look at the
curve of the number.

For example, if most advantages are 0, you can give more weight to prompts that are solved about half of the
time:

```sh
headrace pipeline=mgpo
```

In Python, overrides of `pipeline` are strings: `load_pipeline("pipeline=mgpo")`.
[Reports](reports.md#the-optimiser) says how to record the numbers of your optimiser.
[Streams](streams.md) explains the functions `assembled`, `informative` and `paced`.
"""


def section(symptom: Symptom) -> str:
    """A symptom as Markdown, under an anchor with its name."""
    lines = [
        f'<a id="{symptom.name}"></a>',
        "",
        f"## {symptom.title}",
        "",
        f"**Rule:** {symptom.shows}",
        "",
    ]
    lines += [f"**Cause:** {symptom.means}", "", "**What you can do:**", ""]
    for remedy in symptom.remedies:
        lines.append(f"- {remedy.text}" + (f": `{remedy.overrides}`" if remedy.overrides else ""))
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """The page, with its text."""
    every = list(symptoms().values())
    index = [f"- [{symptom.title}](#{symptom.name})" for symptom in every]
    return {PAGE: "\n".join([HEAD, *index, "", "\n\n".join(section(symptom) for symptom in every)]) + "\n"}
