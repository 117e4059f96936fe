"""One HTML file of a run: data, style and script in it, nothing fetched, no server."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from .bundle import bundle
from .page_schema import PageRun, check_keys

PAGE = files(__package__) / "page"
EXACT_IN_JAVASCRIPT = 2**53


def render_page(run: Mapping[str, Any]) -> str:
    """The page of a run, as text.

    Floats keep nine significant digits, which is all of a float32. A number that is not finite is shown
    as missing. Ids beyond 2^53 keep all their digits.

    Args:
        run: as :class:`~headrace.pipeline.report.page_schema.PageRun` says.

    Raises:
        ValueError: a key is missing or unknown, or the columns of a table differ in length.

    Example:
        >>> run = {"title": "mine", "recipe": [], "steps": [], "curve_steps": [], "curves": {}}
        >>> page = render_page(run)
        >>> page.splitlines()[0], "mine" in page
        ('<!doctype html>', True)
    """
    check(run)
    style, script = read("page.css"), bundle(read_modules(), "page.js")
    parts = {"policy": policy(style, script), "style": style, "script": script, "run": embed(run)}
    # One pass: what is put in is not looked at again, so that no data can name a part.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read("page.html"))


def write_page(run: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page of a run to `path`, whole or not at all: readers never see half a page.

    Example:
        >>> import tempfile
        >>> run = {"title": "mine", "recipe": [], "steps": [], "curve_steps": [], "curves": {}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(run, Path(folder) / "report.html")
        ...     [file.name for file in Path(folder).iterdir()]
        ['report.html']
    """
    path = Path(path)
    page = render_page(run)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(page, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def check(run: Mapping[str, Any]) -> None:
    """Raise unless the keys are those of the schema and the columns of each table are of one length."""
    check_keys(run, PageRun, "run")
    tables = [("curves", {"curve_steps": run["curve_steps"], **run["curves"]})]
    for step in run["steps"]:
        tables += [(f"{name} of step {step['step']}", step[name]) for name in ("groups", "rows")]
    for where, table in tables:
        lengths = {name: len(column) for name, column in table.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"columns of a table must be equally long; found in {where}: {lengths}; "
                "fill up what is not known with None"
            )


def embed(run: Mapping[str, Any]) -> str:
    """JSON that is safe within a script element: no `<`, `>` or `&`, and ASCII alone."""
    text = json.dumps(plain(run), separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def plain(value: Any) -> Any:
    """The value as JSON has it and as JavaScript reads it without loss."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) > EXACT_IN_JAVASCRIPT:
        return str(value)
    return value


def policy(style: str, script: str) -> str:
    """The content security policy under which this style and this script alone are used."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; style-src 'sha256-{digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def read_modules() -> dict[str, str]:
    """The texts of the page's JavaScript modules by file name."""
    return {name: read(name) for name in sorted(file.name for file in PAGE.iterdir()) if name.endswith(".js")}


def read(name: str) -> str:
    """The text of a file of the page."""
    return (PAGE / name).read_text(encoding="utf-8")
