"""Make the page: one HTML file with its data, style and script. It fetches nothing and needs no server."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from graphlib import TopologicalSorter
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.pipeline.wording import printable
from headrace.transforms.carry import write_whole

from .page_schema import PageData, Step, check_keys

PAGE = files("headrace.pipeline.tools.report") / "page"
EXACT_IN_JAVASCRIPT = 2**53


def render_page(data: Mapping[str, Any]) -> str:
    """Return the page as text.

    Floats keep nine significant digits, enough for each float32. A number that is not finite is shown
    as missing. Ids beyond 2^53 keep all their digits.

    Args:
        data: the data, in the form of :class:`~headrace.pipeline.tools.report.page_schema.PageData`.

    Raises:
        ValueError: a key is missing or unknown, or the columns of a table differ in length.

    Example:
        >>> data = {"title": "GRPO", "recipe": [], "steps": [], "curve_steps": [], "curves": {}}
        >>> page = render_page(data)
        >>> page.splitlines()[0], "GRPO" in page
        ('<!doctype html>', True)
    """
    _check(data)
    style, script = read("page.css"), bundle(read_modules())
    contents = {"policy": policy(style, script), "style": style, "script": script, "data": embed(data)}
    # All names are replaced in one pass, so that a {{name}} within the data stays.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: contents[match[1]], read("page.html"))


def write_page(data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page to a file, completely or not at all.

    Args:
        data: as for :func:`render_page`.
        path: path of the file. Its folder must exist.

    Raises:
        ValueError: a key is missing or unknown, or the columns of a table differ in length.

    Example:
        >>> import tempfile
        >>> data = {"title": "GRPO", "recipe": [], "steps": [], "curve_steps": [], "curves": {}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(data, Path(folder) / "report.html")
        ...     [file.name for file in Path(folder).iterdir()]
        ['report.html']
    """
    page = render_page(data)
    write_whole(Path(path), lambda file: file.write_text(page, encoding="utf-8"))


def read_steps(path: Path) -> dict[int, Step]:
    """The steps on a page, by number; empty if there is no page, or if another version of headrace wrote it.

    Example:
        >>> read_steps(Path("no such page"))
        {}
    """
    try:
        found = re.search(r'id="page-data">(.*?)</script>', path.read_text(encoding="utf-8"))
        data = json.loads(found[1] if found else "{}")
        _check(data)
        return {step["step"]: step for step in data["steps"]}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # a file may hold anything
        return {}


def _check(data: Mapping[str, Any]) -> None:
    check_keys(data, PageData, "page")
    tables = [("curves", {"curve_steps": data["curve_steps"], **data["curves"]})]
    for step in data["steps"]:
        tables += [(f"{name} of step {step['step']}", step[name]) for name in ("groups", "rows")]
    for where, table in tables:
        lengths = {name: len(column) for name, column in table.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"columns of a table must be equally long; found in {where}: {lengths}; "
                "fill up unknown values with None"
            )


def plain_page(title: str, style: str, body: str, rules: str) -> str:
    """Make an HTML file. The `rules` of its content security policy say what `body` may load and run."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{as_html(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def as_html(text: str) -> str:
    """Escape a text for HTML, without characters that a terminal would act on."""
    return escape(printable(text))


def embed(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe within a script element: ASCII without `<`, `>` and `&`."""
    text = json.dumps(plain(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def plain(value: Any) -> Any:
    """Convert a value so that JSON can hold it and JavaScript reads it without loss."""
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
    """The content security policy that allows this style and this script, and nothing else."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; style-src 'sha256-{digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def read_modules() -> dict[str, str]:
    """The texts of the page's JavaScript modules, by file name."""
    return {name: read(name) for name in sorted(file.name for file in PAGE.iterdir()) if name.endswith(".js")}


def read(name: str) -> str:
    """The text of a file of the page."""
    return (PAGE / name).read_text(encoding="utf-8")


# -- JavaScript: modules are joined into one script, since a page without a server cannot import them -------

IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([^"]+)";\n', re.M)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.M)


def bundle(modules: Mapping[str, str]) -> str:
    """Join modules into one script. Each module becomes a function that follows the modules which it imports.

    Modules import by ``import { a, b } from "./file.js";``, on lines of their own. They export by ``export``
    before a function, class or const. Tests check this.

    Raises:
        CycleError: modules import one another in a circle.

    Example:
        >>> one, two = "export const one = 1;\\n", 'import { one } from "./one.js";\\nf(one);\\n'
        >>> print(bundle({"two.js": two, "one.js": one}))
        (() => {
        "use strict";
        const modules = {};
        modules["one.js"] = (() => {
        const one = 1;
        return { one };
        })();
        modules["two.js"] = (() => {
        const { one } = modules["one.js"];
        f(one);
        return {  };
        })();
        })();
    """
    sources = {name: [source for _, source in IMPORT.findall(modules[name])] for name in sorted(modules)}
    script = ["(() => {", '"use strict";', "const modules = {};"]
    for name in TopologicalSorter(sources).static_order():
        body = IMPORT.sub(r'const \1 = modules["\2"];\n', modules[name]).rstrip()
        exports = ", ".join(word for _, word in EXPORT.findall(body))
        body = EXPORT.sub(r"\1", body)
        script.append(f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();')
    return "\n".join([*script, "})();"])
