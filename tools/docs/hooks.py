"""Hooks of `mkdocs build`: pages from outside docs/, links to the source, llms.txt.

Links in docs/ are paths in the repository, so that they work in the repository, too. On the site, a link to a
file outside docs/ goes to a page that shows this file. Three files at the root have pages of their own. Other
files and folders get a source page.
"""

from __future__ import annotations

import posixpath
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))

from llms import SitePage, write_llms
from topics import index_text, page_text, topics

ROOT = Path(__file__).parent.parent.parent
AT_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?(\))")
NAV: list[Any] = []
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def on_config(config: Any) -> Any:
    """Tell griffe where the packages are, because `headrace` is a namespace without a folder."""
    folder = ROOT / "build" / "docs" / "headrace"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("transforms", "pipeline"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(ROOT / name)
    named = pages_in(config.nav)
    config.nav = expanded(config.nav, sorted(set(pages_on_disk()) - named))
    return config


def pages_on_disk() -> list[str]:
    """All pages in docs/."""
    return [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]


def pages_in(nav: Any) -> set[str]:
    """The pages and the patterns that a navigation names."""
    if isinstance(nav, str):
        return {nav}
    items = nav.values() if isinstance(nav, dict) else nav
    return set().union(*(pages_in(item) for item in items))


def expanded(nav: Any, unnamed: list[str]) -> Any:
    """Replace each pattern of a navigation with the pages of `unnamed` that match it, each page once."""
    if isinstance(nav, dict):
        return {title: expanded(item, unnamed) for title, item in nav.items()}
    if isinstance(nav, str):
        return nav
    out = []
    for item in nav:
        if not isinstance(item, str) or "*" not in item:
            out.append(expanded(item, unnamed))
            continue
        depth = item.count("/")
        found = [page for page in unnamed if page.count("/") == depth and fnmatch(page, item)]
        unnamed[:] = [page for page in unnamed if page not in found]
        out += sorted(found, key=lambda page: (not page.endswith("README.md"), page))
    return out


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    pages = {target: (ROOT / name).read_text() for name, target in AT_ROOT.items()}
    pages |= {f"api/{page}.md": page_text(page) for page in topics()}
    pages["api/index.md"] = index_text()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    texts = {home(file.src_uri): file.content_string for file in files.documentation_pages()}
    for name in sorted({path for source, text in texts.items() for path in sources_named(source, text)}):
        page = File.generated(config, page_of(name), content=source_page(name))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the target of each link by the address of its page on the site."""
    source = home(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        target = resolved(source, found[2])
        if target is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(page_of(target), here or '.')}{found[3] or ''}{found[4]}"

    return outside_fences(markdown, lambda text: LINK.sub(moved, text))


def on_page_content(html: str, **_: Any) -> str:
    """Show the paths of source files as they are in the repository."""
    return html.replace("<code>build/docs/headrace/", "<code>")


def on_nav(nav: Any, **_: Any) -> None:
    """Keep the pages of the navigation. mkdocs adds their texts later."""
    NAV[:] = nav.pages


def on_post_build(config: Any) -> None:
    """Write llms.txt and llms-full.txt beside the pages."""
    pages = [
        SitePage(page.url, page.title, page.ancestors[-1].title if page.ancestors else "Home", page.markdown)
        for page in NAV
    ]
    write_llms(config, pages)


def home(uri: str) -> str:
    """The repository path of the file that holds a page's text."""
    back = {target: name for name, target in AT_ROOT.items()}
    return back.get(uri, f"docs/{uri}")


def page_of(path: str) -> str:
    """The page that shows a file or folder of the repository."""
    if path in AT_ROOT:
        return AT_ROOT[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def resolved(source: str, target: str) -> str | None:
    """The repository path that a link leads to. If this is None, mkdocs reports the link."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def sources_named(source: str, text: str) -> set[str]:
    """Paths outside docs/ to which a page links."""
    found: set[str] = set()

    def note(part: str) -> str:
        targets = {resolved(source, link[2]) for link in LINK.finditer(part)}
        found.update(path for path in targets if path and page_of(path).startswith("source/"))
        return part

    outside_fences(text, note)
    return found


def source_page(path: str) -> str:
    """The Markdown of a source page: the text of a file, or a list of the files in a folder."""
    place = ROOT / path
    files = sorted(place.glob("*.*")) if place.is_dir() else [place]
    blocks = [f"# {path}"]
    for file in files:
        if len(files) > 1:
            blocks.append(f"## {file.name}")
        blocks.append(f"`````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}`````")
    return "\n\n".join(blocks) + "\n"


def outside_fences(text: str, change: Any) -> str:
    """Apply a change to a text, but not to its fenced blocks."""
    pieces = re.split(r"(^`{3,}.*?^`{3,}$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if i % 2 else change(piece) for i, piece in enumerate(pieces))
