"""Make llms.txt, an index of the site for language models, and llms-full.txt with its text (llmstxt.org)."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

NO_PROSE = (
    "#",
    "|",
    "!",
    "- ",
    ":::",
    "*A headrace",
)  # headings, tables, pictures, lists and other text that is no sentence


class SitePage(NamedTuple):
    """A page of the site: its address, its title, its section in the navigation, and its Markdown."""

    url: str
    title: str
    section: str
    text: str


def first_sentence(text: str) -> str:
    """The first sentence of a page after its heading, without markup."""
    body = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", body)]
    prose = next((part for part in paragraphs if part and not part.startswith(NO_PROSE)), "")
    line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[.!?]) ", line.replace("*", ""))[0].rstrip(":")


def described(path: str) -> str:
    """The text of an entry of the API: its signature and docstring."""
    module, _, name = path.rpartition(".")
    thing = getattr(import_module(module), name)
    try:
        signature = str(inspect.signature(thing)) if callable(thing) else ""
    except ValueError:
        signature = ""
    return f"## {path}{signature}\n\n{inspect.getdoc(thing) or ''}\n"


def index(name: str, about: str, pages: list[SitePage]) -> str:
    """The text of the index: a line for each page, below the heading of its section."""
    lines, section = [f"# {name}", "", f"> {about}"], None
    for page in pages:
        if page.section != section:
            section = page.section
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{page.title}]({page.url}): {first_sentence(page.text)}")
    return "\n".join(lines) + "\n"


def full(pages: list[SitePage]) -> str:
    """The text of all pages. In pages of the API, docstrings replace the references to their objects."""
    entry = re.compile(r"^::: (\S+)$(?:\n    .*)*", re.MULTILINE)
    return "\n\n".join(entry.sub(lambda found: described(found[1]), page.text) for page in pages)


def write_llms(config: Any, pages: list[SitePage]) -> None:
    """Write both files to the root of the site."""
    folder = Path(config.site_dir)
    (folder / "llms.txt").write_text(index(config.site_name, config.site_description, pages))
    (folder / "llms-full.txt").write_text(full(pages))
