"""JavaScript modules bundled into one script, since a page without a server cannot import modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

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
