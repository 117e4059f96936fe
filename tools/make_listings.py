"""Put each stage, criterion and token term into the `__init__.py` files above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "transforms"
CONTRACTS = {"BatchTransform", "Criterion", "TokenTerm"}


def parts() -> dict[str, Path]:
    """The file of every public class that keeps one of the contracts, without importing it."""
    bases: dict[str, set[str]] = {}
    files: dict[str, Path] = {}
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                files[node.name] = path
    found = set(CONTRACTS)
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return {name: files[name] for name in sorted(found) if not name.startswith("_")}


def files() -> dict[Path, str]:
    """The listings that lack a part, with all parts in them."""
    texts: dict[Path, str] = {}
    for name, path in parts().items():
        module = path
        while module != FOLDER:
            listing = module.parent / "__init__.py"
            text = texts.get(listing) or listing.read_text()
            if f'"{name}"' not in text:
                text = text.replace(
                    "__all__ = [", f'from .{module.stem} import {name}\n\n__all__ = [\n    "{name}",', 1
                )
                texts[listing] = text
            module = module.parent
    return {path: tidy(text) for path, text in texts.items()}


def tidy(text: str) -> str:
    """As the linter orders imports and names."""
    ruff = (sys.executable, "-m", "ruff")
    for words in (("check", "--quiet", "--fix", "--select", "I001,RUF022"), ("format", "--quiet")):
        text = subprocess.run(
            [*ruff, *words, "-"], input=text, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return text
