"""Choose the page that documents each public name."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

LISTINGS = (
    "headrace.transforms",
    "headrace.pipeline",
    "headrace.pipeline.tools.report",
    "headrace.pipeline.tools.dumps.readers",
    "headrace.pipeline.tools.certify",
)

# Names in these listings that only other folders of headrace use.
INNER = {
    *("AGREE", "Draws", "FAILED", "FailedStep", "FittedColumn", "FittedTable", "LENGTH", "REWARD"),
    *("TrainingDisplay", "as_html", "asked_line", "certify", "compared_values", "differs", "has_reward"),
    *("history_table", "json_text", "plain_page", "policy", "prompt_label", "quarter_means", "read_failed"),
    *("report_columns", "said_of_failed", "show_pipeline"),
}

SHOWN = (  # the order of the listings
    *("stages", "functions", "criteria", "loss-rows", "pipeline", "collect", "reports", "sources", "certify"),
    "own-parts",
)
WITHOUT_MEMBERS = ("stages", "criteria", "loss-rows")  # their members are documented in "own-parts"


def _of(*modules: str) -> Callable[[Any, str], bool]:
    return lambda thing, home: home.startswith(tuple(f"headrace.{module}" for module in modules))


def _kind(*bases: str) -> Callable[[Any, str], bool]:
    transforms = import_module("headrace.transforms")
    classes = tuple(getattr(transforms, base) for base in bases)
    return lambda thing, home: isinstance(thing, type) and issubclass(thing, classes)


@cache
def topics() -> dict[str, tuple[str, str, Callable[[Any, str], bool]]]:
    """For each page: its title, its subject, and a function that chooses its names from the rest."""
    return {
        "own-parts": (
            "Parts of your own",
            "The table, the contract of stages and criteria, the errors, and the columns of stages.",
            _of("transforms.table", "transforms.ranks"),
        ),
        "loss-rows": (
            "Rows for the loss",
            "Ragged rows made dense, scored, packed, merged, or laid out as a tree.",
            _of("transforms.stages.sequences", "transforms.trees.prefix_tree"),
        ),
        "criteria": (
            "Criteria and token terms",
            "What `SampleFilter`, `TokenFilter` and `TokenAdvantage` ask of a row or a token.",
            _kind("Criterion", "TokenTerm"),
        ),
        "collect": (
            "Collecting",
            "Where ids are stamped, and how rows that come one by one become complete groups.",
            _of("pipeline.collect", "pipeline.queues", "transforms.streams", "pipeline.train.sampler"),
        ),
        "reports": (
            "Reports",
            "What happened to a batch: in the terminal, on a page, in a dump, in a tracker.",
            _of("pipeline.tools.report"),
        ),
        "sources": (
            "Sources",
            "Dumps of this library and of others, read as batches.",
            _of("pipeline.tools.dumps"),
        ),
        "certify": (
            "Certificates",
            "The exact bias and variance of a recipe's gradient, on small tasks.",
            _of("pipeline.tools.certify"),
        ),
        "pipeline": (
            "Pipeline and steps",
            "How stages are chained and run, and optimiser steps taken.",
            _of("pipeline"),
        ),
        "stages": (
            "Stages",
            "TensorDict in, TensorDict out: each reads the columns `in_keys` and writes `out_keys`.",
            _kind("BatchTransform"),
        ),
        "functions": (
            "Functions",
            "Tensors in, tensors out: the arithmetic of the stages, for anybody's loop.",
            _of("transforms"),
        ),
    }  # fmt: skip


def public_things() -> dict[str, Any]:
    """All public objects, by the full names under which they are first listed."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrl warns about its own classes, and mkdocs would show it
        for listing in LISTINGS:
            package = import_module(listing)
            for name in sorted({*package.__all__} - INNER):
                thing = getattr(package, name)
                if all(thing is not other for other in found.values()):
                    found[f"{listing}.{name}"] = thing
    return found


@cache
def entries_by_topic() -> dict[str, list[str]]:
    """The full names of all public objects on each page. Each object is on one page.

    Raises:
        LookupError: a public name belongs to no page.
    """
    pages: dict[str, list[str]] = {page: [] for page in topics()}
    for path, thing in public_things().items():
        listing = path.rpartition(".")[0]
        home = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", listing)
        found = [page for page, (_, _, belongs) in topics().items() if belongs(thing, home)]
        if not found:
            raise LookupError(f"{path} belongs to no page of tools/docs/topics.py")
        pages[found[0]].append(entry_of(path, thing))
    return pages


def entry_of(path: str, thing: Any) -> str:
    """The full name of a public object. If a module has the same name, it is the path of the definition."""
    hidden = path in sys.modules and not inspect.ismodule(thing)
    return f"{thing.__module__}.{thing.__qualname__}" if hidden else path


def page_text(page: str) -> str:
    """The page of a topic, in Markdown. Classes come first, except on pages about functions."""
    title, about, _ = topics()[page]
    names = {path.rpartition(".")[2]: path for path in entries_by_topic()[page]}
    order = sorted(names, key=str.swapcase if page == "functions" else str)
    options = "\n    options:\n      members: false" if page in WITHOUT_MEMBERS else ""
    return "\n\n".join([f"# {title}", about, *(f"::: {names[name]}{options}" for name in order)]) + "\n"


def index_text() -> str:
    """The text of the list of topics, with the names on each page."""
    lines = [
        "# API",
        "",
        "Every public name by topic, with its docstring. Import a name from the path that is shown.",
        "",
    ]
    for page in SHOWN:
        title, about, _ = topics()[page]
        names = ", ".join(f"[`{path.rpartition('.')[2]}`][{path}]" for path in entries_by_topic()[page])
        lines += [f"## [{title}]({page}.md)", "", f"{about}", "", names, ""]
    return "\n".join(lines)
