"""The task ``audit``: check the dump of a finished run against the recipe that trained it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.tools.dumps import DumpSteps, TaskResult, open_configured, print_files, write_files
from headrace.pipeline.tools.report import (
    FittedColumn,
    FittedTable,
    as_html,
    json_text,
    plain_page,
    read_recipe,
)
from headrace.pipeline.tools.report.html import read
from headrace.pipeline.wording import printable
from headrace.spelling import suggest
from headrace.transforms.table import count_of

from .audit_checks import CHECKS, NO_ADVANTAGES, AuditedStep, AuditFinding, CheckOutcome, DeclaredRecipe
from .logged import MOST, LoggedRows, explain_logged

LINES = 8  # for each check, the terminal shows at most this many findings
ON_PAGE = 500  # for each check, the page shows at most this many findings
REASONS = 2  # for each check, at most this many reasons for "not checked" are printed
# For each format, how its dumps get the advantages of the trainer.
SAVES = {
    "slime": "Train with --dump-details, which saves them.",
    "verl": "verl saves none. In the next run, let headrace compute them: see docs/coming-from/verl.md.",
}
SHARE = (
    "A row's share of a step's gradient is |weight × advantage × tokens| over the sum of all rows. The share "
    "of a check is the mean over all steps. A check that was not made has not passed."
)


class AuditFailed(RuntimeError):
    """``audit.strict`` is set, and there are findings, refused steps or checks not made. Exit status 1."""


@dataclass
class CheckResult:
    """The results of one check over all steps."""

    name: str
    title: str
    findings: list[AuditFinding] = field(default_factory=list)
    lacking: dict[str, int] = field(default_factory=dict)
    """Reasons why a step could not be checked, and the number of steps for each."""
    hint: str = ""

    def add(self, outcome: CheckOutcome) -> None:
        """Add the result of the next step."""
        self.findings += outcome.findings
        if outcome.lacking:
            self.lacking[outcome.lacking] = self.lacking.get(outcome.lacking, 0) + 1

    @property
    def state(self) -> str:
        """``found`` if there are findings, ``not checked`` if a step lacked something, else ``passed``."""
        return "found" if self.findings else "not checked" if self.lacking else "passed"

    def share(self, steps: int) -> float | None:
        """Return the share of rows with findings in a step's gradient, mean over `steps`; None: not known."""
        shares = [each.share for each in self.findings]
        known = [share for share in shares if share is not None]
        return sum(known) / max(steps, 1) if len(known) == len(shares) else None

    def plain(self, steps: int) -> dict[str, Any]:
        """The result as JSON."""
        found = {
            "check": self.name,
            "title": self.title,
            "state": self.state,
            "gradient_share": self.share(steps),
        }
        findings = [each._asdict() for each in self.findings]
        return found | {"not_checked": self.lacking, "hint": self.hint, "findings": findings}


def audit_dump(
    config: DictConfig, output: Path, overrides: Sequence[str] = (), console: Console | None = None
) -> TaskResult:
    """Check every step of a dump against the recipe that trained it; print and write the findings.

    Args:
        config: the configuration, composed with ``task=audit``; its ``pipeline`` is the recipe.
        output: folder for ``config.yaml``, ``audit.json`` and ``report.html``.
        overrides: command-line overrides, which hold the recipe's name.
        console: where to print; None: standard output.

    Returns:
        The number of findings, and the contents of ``audit.json``.

    Raises:
        ConfigError: ``source.path`` is missing, or a stage, option or check is unknown.
        SourceError: a file cannot be read.
        AuditFailed: with ``audit.strict``, there are findings or refused steps, no check was made, or a check
            that ``audit.strict`` names was not made.
        StepsFailed: some steps failed, and ``source.skip_bad`` does not allow it. All files are written by
            then.
    """
    console = console or Console()
    demanded = checks_demanded(config.audit.strict)
    declared = DeclaredRecipe(build_pipeline(config.pipeline))
    size = config.source.group_size or declared.group_size
    made = config.source.group_by in ("prompt", "order")
    # Groups made from prompts or from the order get the recipe's group size if none is set. For other
    # `group_by`, a reader may refuse a group size, so it gets one only if set.
    dispatched = {"source": {"group_size": size if made else config.source.group_size}}
    source = open_configured(OmegaConf.merge(config, dispatched))  # type: ignore[arg-type]
    source.keeps_oversized = True
    results = {name: CheckResult(name, title) for name, (title, _) in CHECKS.items()}
    steps, rows, refused, differing, unlike = 0, 0, 0, 0, list[LoggedRows]()

    def checked(number: int, batch: TensorDictBase) -> tuple[TensorDictBase, AuditedStep, list[CheckOutcome]]:
        how: dict[str, Any] = {"group_size": size, "unsaid": source.unsaid}
        step = AuditedStep(number, batch, declared, group_by=config.source.group_by, **how)
        return batch, step, [check(step) for _, check in CHECKS.values()]

    read = DumpSteps(source, console)
    for batch, step, outcomes in read.results(checked):
        refused += step.has_advantages and bool(step.refusal)
        before = len(results["advantages"].findings)
        for result, outcome in zip(results.values(), outcomes, strict=True):
            result.add(outcome)
        if len(results["advantages"].findings) > before and (differ := _logged_rows(step, batch)):
            differing += 1
            unlike += differ * (sum(len(each.logged) for each in unlike) < MOST)
        steps, rows = steps + 1, rows + len(batch)
    if unlike:
        results["advantages"].hint = explain_logged(unlike, of=differing)
    named = [each.partition("=")[2] for each in overrides if each.startswith("pipeline=")]
    recipe, found = named[-1] if named else "grpo", sum(len(each.findings) for each in results.values())
    head = {
        "dump": str(config.source.path),
        "format": source.format,
        "pipeline": recipe,
        "steps": steps,
        "rows": rows,
    }
    own = read_recipe(source.files[0].parent) if source.format == "headrace" else ""
    if own not in ("", recipe):
        recorded = f"the run has recorded the recipe pipeline={own}{source.advice}"
        results["advantages"].hint += f"{'; ' * bool(unlike)}{recorded}"
    notices, failed = read.said, [each._asdict() for each in read.failed]
    verdict = verdict_of(results, source.format)
    verdict += f" The recipe refuses {refused:,} of {steps:,} steps{source.advice}." * bool(refused)
    report = head | {"verdict": verdict, "findings": found, "notices": notices, "failed_steps": failed}
    report["checks"] = [each.plain(steps) for each in results.values()]
    title = f"{config.source.path} ({source.format}), {rows:,} rows, steps: {steps:,}, against {recipe}"
    tables = [_summary(results, steps, title)]
    files = {"audit.json": json_text(report, indent=1)}
    if config.report.html:
        found_by = [_findings(each, ON_PAGE) for each in results.values() if each.findings]
        said = [verdict, *notices]
        files["report.html"] = _page(title, said, [*tables, *found_by], _lines_below(results))
    write_files(config, output, files)
    console.print(Text(verdict, style="bold"))
    console.print(*tables, *(_findings(each, LINES) for each in results.values() if each.findings))
    for line in _lines_below(results):
        console.print(Text(printable(line)), soft_wrap=True)
    read.show()
    checks = f"{read.counted}; {said_of_checks(results)}"
    print_files(console, output, read.counted)
    if config.audit.strict:
        missing = [each.name for each in results.values() if each.state == "not checked"]
        lacking = missing if len(missing) == len(results) else [name for name in missing if name in demanded]
        if missing:
            others = "" if demanded else f". To demand some: audit.strict=[{','.join(missing)}]"
            console.print(Text(f"checks that were not made: {', '.join(missing)}{others}"), soft_wrap=True)
        if found or refused or lacking:
            why = f"the audit has {count_of(found, 'finding')}"
            why += f", and the recipe refused {refused:,} of {steps:,} steps" * bool(refused)
            why += f", and these checks were not made: {', '.join(lacking)}" * bool(lacking)
            raise AuditFailed(why)
    read.end()
    return TaskResult(float(found), report, checks)


def checks_demanded(strict: Any) -> list[str]:
    """The names of the checks that ``audit.strict`` demands; empty if it is true or false.

    Raises:
        ConfigError: a name is not the name of a check.

    Example:
        >>> checks_demanded(True), checks_demanded(["signs"])
        ([], ['signs'])
    """
    names = [] if isinstance(strict, bool) else list(strict)
    if unknown := [name for name in names if name not in CHECKS]:
        raise ConfigError(
            f"audit.strict must be true, false or a list of checks: {', '.join(CHECKS)}; got {unknown[0]!r}"
            f"{suggest(unknown[0], CHECKS)}"
        )
    return names


def verdict_of(results: Mapping[str, CheckResult], format: str) -> str:
    """Say what the audit found. If a step has no advantages, also say how to get them, if that is known.

    Args:
        results: the results, by name of the check.
        format: the format of the dump.

    Example:
        >>> verdict_of({"advantages": CheckResult("advantages", "other advantages")}, "trl")
        '1 check: 1 passed.'
    """
    said = said_of_checks(results, why=False) + "."
    if NO_ADVANTAGES not in results["advantages"].lacking:
        return said
    why = "This dump cannot show whether the advantages were right, because it has none."
    return " ".join(filter(None, [why, SAVES.get(format), said]))


def said_of_checks(results: Mapping[str, CheckResult], *, why: bool = True) -> str:
    """Say how many checks are in each state, and which were not made, each with its first reason.

    Example:
        >>> blind = CheckResult("signs", "wrong signs", lacking={"the dump has no advantages": 2})
        >>> said_of_checks({"signs": blind, "sizes": CheckResult("sizes", "wrong sizes")})
        '2 checks: 1 passed, 1 not checked: signs (the dump has no advantages)'
    """
    states = Counter(each.state for each in results.values())
    counts = [f"{states[state]} {state}" for state in ("found", "passed", "not checked") if states[state]]
    said = f"{count_of(len(results), 'check')}: {', '.join(counts)}"
    by_reason = dict[str, list[str]]()
    for each in results.values():
        if why and each.state == "not checked":
            by_reason.setdefault(next(iter(each.lacking)), []).append(each.name)
    named = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return said + (f": {named}" if named else "")


def _logged_rows(step: AuditedStep, batch: TensorDictBase) -> list[LoggedRows]:
    """The rows of a step with a logged and a declared advantage; empty if rollouts have several rewards."""
    reward = batch["next", "reward"].reshape(len(batch), -1)
    if reward.shape[1] > 1:
        return []
    rewards = reward.flatten().double()
    both = step.trains & step.logged.isfinite() & step.by_recipe.isfinite()
    columns = (
        step.logged,
        step.by_recipe,
        rewards,
        rewards,
        batch["group_id"],
        batch["rollout_id"],
        step.tokens,
    )
    return [LoggedRows(*(None if each is None else each[both].numpy() for each in columns))]


def _summary(results: dict[str, CheckResult], steps: int, title: str) -> FittedTable:
    columns = [
        FittedColumn("check", gives="wrap"),
        FittedColumn("verdict"),
        FittedColumn("findings", right=True),
    ]
    table = FittedTable(
        [*columns, FittedColumn("share of the gradient", gives="wrap", right=True)], f"\n{title}"
    )
    for each in results.values():
        share = each.share(steps)
        shown = "–" if share is None or each.state == "not checked" else f"{share:.1%}"
        table.add(
            each.title, each.state, f"{len(each.findings):,}", shown, style="" if each.findings else "dim"
        )
    return table


def _findings(result: CheckResult, most: int) -> FittedTable:
    columns = [
        FittedColumn("step", right=True),
        FittedColumn("", gives="wrap"),
        FittedColumn("share", right=True),
    ]
    more = len(result.findings) - most
    caption = f"and {more:,} more, see audit.json" if more > 0 else ""
    table = FittedTable(columns, f"\n{result.title}", caption)
    for each in result.findings[:most]:
        table.add(str(each.step), each.text, "–" if each.share is None else f"{each.share:.1%}")
    return table


def _lines_below(results: dict[str, CheckResult]) -> list[str]:
    """Lines below the tables: hints, what was not checked and why, and the formula of the share."""
    lines = [f"{each.title}: {each.hint}" for each in results.values() if each.hint]
    unchecked: dict[str, list[str]] = {}
    for each in results.values():
        for why, steps in list(each.lacking.items())[:REASONS]:
            unchecked.setdefault(why + (f" ({steps:,} steps)" if steps > 1 else ""), []).append(each.title)
    lines += [f"not checked: {', '.join(titles)}: {why}" for why, titles in unchecked.items()]
    for each in results.values():
        if (more := len(each.lacking) - REASONS) > 0:
            lines.append(f"not checked: {each.title}: {count_of(more, 'more reason')}, see audit.json")
    return [*lines, SHARE]


def _page(title: str, above: Sequence[str], tables: Sequence[FittedTable], lines: Sequence[str]) -> str:
    verdict, *notices = map(as_html, above)
    body = f"<header><h1>Audit</h1><p id=verdict>{verdict}</p>"
    body += "".join(f"<p>{notice}</p>" for notice in notices) + "</header><main>"
    for table in tables:  # the class adds a shadow where a wide table is cut
        body += "<section>" + table._repr_html_().replace("<div ", "<div class=across ", 1) + "</section>"
    body += f"<section>{''.join(f'<p>{as_html(line)}</p>' for line in lines)}</section></main>"
    style = read("page.css") + "main{display:block}section{margin-bottom:16px}"
    style += "table{font-size:clamp(12px,3.4vw,15px)}caption{font-weight:600}"
    inline = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return plain_page(f"audit of {title}", style, body, inline)  # cells have a style attribute
