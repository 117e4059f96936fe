"""Convert docstrings for mkdocstrings: Sphinx roles and literal blocks become Markdown."""

from __future__ import annotations

import re
import sys
import textwrap
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from topics import WITHOUT_MEMBERS, entries_by_topic

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`([~.\w]+)`")
TABLE = re.compile(r"^( *)=+(?: +=+)+\n(?:.+(?:\n|\Z))+", re.MULTILINE)
RETURNS = re.compile(r"^(Returns|Yields|Return):\n((?:(?:    .*)?\n)*(?:    .*)?)", re.MULTILINE)


@cache
def public_paths() -> dict[str, str]:
    """The path of each public name's documentation, by name."""
    return {path.rpartition(".")[2]: path for entries in entries_by_topic().values() for path in entries}


@cache
def has_entry(path: str, member: str) -> bool:
    """Whether a class documents a member: the class defines it, and the member has a docstring."""
    module, _, name = path.rpartition(".")
    own = vars(getattr(import_module(module), name)).get(member)
    bare = any(path in entries_by_topic()[page] for page in WITHOUT_MEMBERS)
    return bool(getattr(own, "__doc__", None)) and member not in ("apply", "forward") and not bare


def link(target: str, owner: str) -> str:
    """Return a reference to the entry of a role's target, or code if it has no entry. `owner` is a class."""
    *outer, name = target.lstrip("~.").split(".")
    paths = public_paths()
    if name in paths:
        return f"[`{name}`][{paths[name]}]"
    holder = outer[-1] if outer else owner
    if holder in paths and has_entry(paths[holder], name):
        return f"[`{'.'.join([*outer[-1:], name])}`][{paths[holder]}.{name}]"
    return f"`{name}`"


def with_tables(text: str) -> str:
    """Make literal blocks of tables that have rulers of ``===``."""

    def fenced(found: re.Match[str]) -> str:
        table = ROLE.sub(lambda role: role[1], found[0])
        return f"{found[1]}```text\n{table}{found[1]}```\n"

    return TABLE.sub(fenced, text)


def with_fences(text: str) -> str:
    """Put literal blocks, which follow ``::``, between fences."""
    out: list[str] = []
    lines = text.split("\n")
    while lines:
        line = lines.pop(0)
        if not line.endswith("::"):
            out.append(line)
            continue
        indent = len(line) - len(line.lstrip())
        block = []
        while lines and (not lines[0].strip() or len(lines[0]) - len(lines[0].lstrip()) > indent):
            block.append(lines.pop(0))
        said = line.rstrip(":").rstrip()
        out += [said + ":" if said.strip() else "", ""]
        code = textwrap.indent(textwrap.dedent("\n".join(block)).strip("\n"), " " * indent)
        out += [f"{' ' * indent}```text", *code.split("\n"), f"{' ' * indent}```", ""]
    return "\n".join(out)


def as_markdown(text: str, owner: str = "") -> str:
    """Convert a docstring of this project to Google-style Markdown.

    Example:
        >>> as_markdown("Sum::\\n\\n    a + b\\n")
        'Sum:\\n\\n```text\\na + b\\n```\\n'
    """
    text = with_tables(with_fences(text))
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    # "Returns" has a sentence with a shape, not "type: description".
    text = RETURNS.sub(lambda found: f"**{found[1]}:**\n\n{textwrap.dedent(found[2])}\n", text)
    return ROLE.sub(lambda found: link(found[1], owner), text)


class PlainDocstrings(griffe.Extension):
    """Convert each docstring before it is parsed, and link each public name to its definition."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of an object that griffe has found."""
        if obj.docstring is not None:
            parent = obj.parent if obj.parent is not None and obj.parent.is_class else obj
            obj.docstring.value = as_markdown(obj.docstring.value, parent.name)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """List the keywords of a TypedDict as parameters, if the docstring explains them."""
        *others, last = [*func.parameters] or [None]
        if str(last and last.annotation) != "Unpack[PipelineOptions]" or not func.docstring:
            return
        if f" {last.name}: " not in func.docstring.value:
            words = func.module["PipelineOptions"].attributes.values()
            more = {"kind": griffe.ParameterKind.keyword_only, "default": "..."}
            keywords = (griffe.Parameter(each.name, annotation=each.annotation, **more) for each in words)
            func.parameters = griffe.Parameters(*others, *keywords)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Choose the function if its file has the same name, because griffe would choose the file."""
        for path in public_paths().values() if pkg.name == "headrace" else ():
            listing, name = path.rsplit(".", 1)
            thing = getattr(import_module(listing), name)
            target = f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else path
            if target != path:
                parent = pkg[listing.removeprefix("headrace.")]
                parent.members[name] = griffe.Alias(name, target, parent=parent)
