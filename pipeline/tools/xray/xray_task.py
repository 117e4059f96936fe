"""The task ``xray``: measure the weight that a trainer gives to each token, for each of its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.text import Text

from headrace.installed import version_of, why_not
from headrace.pipeline.composing.compose import ConfigError
from headrace.pipeline.load import build_pipeline
from headrace.pipeline.tools.dumps import import_callable, print_files, write_files
from headrace.pipeline.tools.report import FittedColumn, FittedTable, json_text
from headrace.pipeline.wording import printable, shown_range
from headrace.spelling import suggest

# The package of each trainer, and how to install it. Three packages require other versions of torch or TRL.
# The measured code does not, so they are installed without dependencies. No package compiles CUDA code.
ASIDE = "PYTHONPATH=FOLDER in front of the command, after pip install --no-deps --target FOLDER"
SWIFT = "ms-swift 'trl<1.0' peft modelscope modelscope_hub json_repair einops dacite msgspec"
DEEPSPEED = "deepspeed==0.19.6 einops hjson msgpack ninja py-cpuinfo"
OPENRLHF = f"openrlhf==0.11.2 {DEEPSPEED} peft pillow pylatexenc torchdata"
TRAINERS = {
    "torchrl": ("torchrl", "pip install 'headrace[torchrl]'"),
    "trl": ("trl", "pip install 'headrace[llm]' trl"),
    "verl": ("verl", f"{ASIDE} verl codetiming"),
    "openrlhf": ("openrlhf", f"{ASIDE} {OPENRLHF}"),
    "ms_swift": ("ms-swift", f"{ASIDE} {SWIFT}"),
}


def measure_trainer(
    config: DictConfig, output: Path, overrides: Sequence[str] = (), console: Console | None = None
) -> float:
    """Measure every setting of a trainer; print a table, and write JSON and a page.

    Args:
        config: the configuration, composed with ``task=xray``.
        output: folder for ``config.yaml``, ``xray.json`` and ``report.html``.
        overrides: command-line overrides. If one of them sets ``pipeline``, your own step is compared with
            that recipe.
        console: where to print; None: standard output.

    Returns:
        The greatest relative difference of a weight from the documented weight.

    Raises:
        ConfigError: the trainer is unknown or not installed; or ``source`` is missing or cannot be imported.
        BatchError: parts of a gradient are not explained by any token.
    """
    console, of = console or Console(), config.xray.of
    title, settings = (_own if of == "mine" else _of_trainer)(config, overrides)
    if config.xray.only is not None:
        names = [setting.name for setting in settings]
        settings = [setting for setting in settings if config.xray.only in setting.name]
        if not settings:
            raise ConfigError(
                f"xray.only={config.xray.only} matches no setting; the settings are {'; '.join(names)}"
            )
    cuts = list(config.xray.cuts)
    try:
        found = [
            setting.measure(cuts, curve=config.xray.curve)
            for setting in track(settings, "measuring", console=console, transient=True)
        ]
    except ValueError as err:
        raise ConfigError(f"xray={of}: {err}") from err
    lines = ",\n".join(json_text(each.plain()) for each in found)
    text = f'{{"trainer": {json_text(title)}, "micro_batches": {cuts}, "settings": [\n{lines}\n]}}\n'
    files = {"xray.json": text}
    if config.report.html:
        from .page import xray_page

        files["report.html"] = xray_page(f"The weight of each token: {title}", found)
    write_files(config, output, files)
    show_settings(title, found, console)
    print_files(console, output)
    return max(max(abs(share - 1) for share in each.over_documented()) for each in found)


def _of_trainer(config: DictConfig, _: Sequence[str]) -> tuple[str, list[Any]]:
    """Return the trainer's name and version, and its settings."""
    of = config.xray.of
    if of not in TRAINERS:
        raise ConfigError(
            f"xray.of: unknown trainer {of!r}{suggest(of, TRAINERS)}; choose from {', '.join(TRAINERS)}"
        )
    package, install = TRAINERS[of]
    version = version_of(package)
    if version is None:
        needs = why_not(package) if package == "torchrl" else f"{package}: {install}"
        raise ConfigError(f"xray={of} needs {needs}")
    module = import_module(f"headrace.pipeline.tools.xray.of_{of}")
    settings: Callable[[], list[Any]] = getattr(module, f"{of}_settings")
    try:
        more = config.xray.get("also")  # adapters, which tools may not import
        also = import_callable(more, f"xray.also={more}", "a function")() if more else []
        return f"{package} {version}", [*settings(), *also]
    except ImportError as err:
        raise ConfigError(f"xray={of} cannot import {package} {version}: {err}. {install}") from err


def _own(config: DictConfig, overrides: Sequence[str]) -> tuple[str, list[Any]]:
    """Return the step that ``source=module:function`` names, as a single setting."""
    from .setting import RECIPE, Setting

    source = config.xray.source
    if source is None or ":" not in source:
        raise ConfigError(
            "xray=mine needs a step to measure: source=module:function, called as function(model, batch, "
            f"cut); got {source}"
        )
    step = import_callable(source, f"source={source}", "a function(model, batch, cut)")

    def named(model: Any, batch: Any, cut: int) -> None:
        try:
            step(model, batch, cut)
        except Exception as err:  # HYDRA_FULL_ERROR=1 shows the traceback
            raise ConfigError(f"{source}(model, batch, cut) raised {type(err).__name__}: {err}") from err

    recipe = any(each.startswith(("pipeline=", "pipeline.")) for each in overrides)
    pipeline = build_pipeline(config.pipeline) if recipe else None
    return source, [Setting(source, named, RECIPE if recipe else "", pipeline=pipeline, curve=True)]


def show_settings(title: str, found: Sequence[Any], console: Console) -> None:
    """Print a line for each setting, and then the verdicts on settings that differ from their docs."""
    cuts = list(found[0].over_one_cut())
    columns = [FittedColumn("setting", gives="wrap"), FittedColumn("documented", gives="wrap", leaves=2)]
    columns += [FittedColumn("measured / documented", gives="wrap", right=True)]
    columns += [
        FittedColumn(f"{cut} / {cuts[0]} micro-batches", gives="wrap", right=True) for cut in cuts[1:]
    ]
    table = FittedTable(columns, f"\n{printable(title)}: the weight of a token")
    for each in found:
        ranges = [each.over_documented(), *list(each.over_one_cut().values())[1:]]
        documented = each.documented or "–"
        table.add(each.name, documented, *map(shown_range, ranges))
    console.print(table)
    for each in found:
        ranges = [each.over_documented(), *each.over_one_cut().values()]
        if any(shown_range(each) != "1" for each in ranges) or not each.documented:
            note = f". Its documentation: {each.note}" if each.note else ""
            console.print(Text(printable(f"{each.name}: {each.xray.verdict}{note}")), soft_wrap=True)
