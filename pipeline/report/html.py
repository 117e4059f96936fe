"""The page: one HTML file with data, style and script in it, which fetches nothing and needs no server."""

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
from typing import Any, NamedTuple

from .dump import write_whole
from .page_schema import PageData, check_keys

PAGE = files("headrace.pipeline.report") / "page"
EXACT_IN_JAVASCRIPT = 2**53


def render_page(data: Mapping[str, Any]) -> str:
    """The page as text.

    Floats keep nine significant digits, which is all of a float32. A number that is not finite is shown
    as missing. Ids beyond 2^53 keep all their digits.

    Args:
        data: as :class:`~headrace.pipeline.report.page_schema.PageData` describes it.

    Raises:
        ValueError: a key is missing or unknown, or the columns of a table differ in length.

    Example:
        >>> data = {"title": "GRPO", "recipe": [], "steps": [], "curve_steps": [], "curves": {}}
        >>> page = render_page(data)
        >>> page.splitlines()[0], "GRPO" in page
        ('<!doctype html>', True)
    """
    check(data)
    style, script = read("page.css"), bundle(read_modules(), "page.js")
    contents = {"policy": policy(style, script), "style": style, "script": script, "data": embed(data)}
    # In one pass: a {{name}} within the data is not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: contents[match[1]], read("page.html"))


def write_page(data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page to a file, whole or not at all.

    Args:
        data: as for :func:`render_page`.
        path: of the file; its folder must exist.

    Raises:
        ValueError: as :func:`render_page`.

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


def check(data: Mapping[str, Any]) -> None:
    """Check that the keys are those of the schema, and that the columns of each table are equally long.

    Raises:
        ValueError: they are not.
    """
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


def embed(data: Mapping[str, Any]) -> str:
    """JSON that is safe within a script element: ASCII without `<`, `>` and `&`."""
    text = json.dumps(plain(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def plain(value: Any) -> Any:
    """The value as JSON can hold it and JavaScript can read it without loss."""
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
    """The texts of the page's JavaScript modules by file name."""
    return {name: read(name) for name in sorted(file.name for file in PAGE.iterdir()) if name.endswith(".js")}


def read(name: str) -> str:
    """The text of a file of the page."""
    return (PAGE / name).read_text(encoding="utf-8")


# -- its JavaScript: modules in one script, since a page without a server cannot import modules -------------

IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([^"]+)";\n', re.M)
EXPORT = re.compile(r"^export (?=(?:async )?function |const |class )", re.M)
TOP_LEVEL = re.compile(r"^(export )?(?:async )?(?:function|const|let|class) (\w+)", re.M)
OTHER = re.compile(r"^(?:import\b|export\b|(?:var|(?:const|let) [^\w]|function\*)).*", re.M)
MODULES = "modules"


class Module(NamedTuple):
    """A parsed module: names that it imports (by file), exports and declares, and the rest of its text."""

    imports: dict[str, list[str]]
    exports: list[str]
    names: list[str]
    body: str


def bundle(modules: Mapping[str, str], entry: str) -> str:
    """One script that does what the module `entry` does, with every module that it imports before it.

    Each module is in a function of its own, where it sees its imports and nothing else. Supported are
    ``import { a, b } from "./file.js";``, and ``export`` before a function, class or const. All names of the
    outermost level differ, so that a name means one thing in the whole script.

    Args:
        modules: text by file name.
        entry: the file name of the module that runs last.

    Raises:
        ValueError: modules import one another in a circle; a module or a name that is imported does not
            exist; two modules use one name; or an import or export is written in another way.

    Example:
        >>> one, two = "export const one = 1;\\n", 'import { one } from "./one.js";\\nf(one);\\n'
        >>> print(bundle({"one.js": one, "two.js": two}, "two.js"))
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
        return {};
        })();
        })();
    """
    parsed = {name: parse(name, text) for name, text in modules.items()}
    order = ordered(parsed, entry)
    check_names({name: parsed[name] for name in order})
    return "\n".join(
        ["(() => {", '"use strict";', f"const {MODULES} = {{}};"]
        + [wrapped(name, parsed[name]) for name in order]
        + ["})();"]
    )


def parse(name: str, text: str) -> Module:
    """Parse the text of one module.

    Raises:
        ValueError: an import, an export or a declaration is written in another way.
    """
    body = EXPORT.sub("", IMPORT.sub("", text))
    if unsupported := OTHER.search(body):
        raise ValueError(
            f'{name} must import as `import {{ a }} from "./file.js";`, on lines of its own, export before a '
            f"function, class or const, and declare one name at a time; found: {unsupported[0]}"
        )
    imports: dict[str, list[str]] = {}
    for names, source in IMPORT.findall(text):
        imports.setdefault(source, []).extend(word.strip() for word in names.split(",") if word.strip())
    declared = TOP_LEVEL.findall(text)
    exports = [word for exported, word in declared if exported]
    return Module(imports, exports, names=[word for _, word in declared], body=body)


def ordered(modules: Mapping[str, Module], entry: str) -> list[str]:
    """The names of all modules that `entry` needs, each after those that it imports.

    Raises:
        ValueError: modules import one another in a circle, or one does not exist.
    """
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " -> ".join((*path[path.index(name) :], name))
            raise ValueError(f"modules must not import one another in a circle; found: {circle}")
        if name in order:
            return
        if name not in modules:
            raise ValueError(
                f"{' -> '.join(path) or 'the page'} needs the module {name}; there are {', '.join(modules)}"
            )
        for source in modules[name].imports:
            visit(source, (*path, name))
        order.append(name)

    visit(entry, ())
    return order


def check_names(modules: Mapping[str, Module]) -> None:
    """Check that each imported name is exported, and that all names of the outermost level differ.

    Raises:
        ValueError: they are not.
    """
    owners = {MODULES: "the bundle"}
    for name, module in modules.items():
        for source, words in module.imports.items():
            if missing := [word for word in words if word not in modules[source].exports]:
                raise ValueError(
                    f"{name} imports {', '.join(missing)} from {source}, which exports "
                    f"{', '.join(modules[source].exports) or 'nothing'}"
                )
        for word in module.names:
            if word in owners:
                raise ValueError(
                    f"{word} is a name of the outermost level in {owners[word]} and in {name}: rename one"
                )
            owners[word] = name


def wrapped(name: str, module: Module) -> str:
    """The text of the module as a function that returns its exports."""
    imports = [
        f'const {{ {", ".join(words)} }} = {MODULES}["{source}"];\n'
        for source, words in module.imports.items()
    ]
    result = f"return {{ {', '.join(module.exports)} }};" if module.exports else "return {};"
    return f'{MODULES}["{name}"] = (() => {{\n{"".join(imports)}{module.body.rstrip()}\n{result}\n}})();'
