"""Put each stage, criterion and token term into `transforms/__init__.py`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "transforms"
CONTRACTS = {"BatchTransform", "Criterion", "TokenTerm"}


def parts() -> dict[str, Path]:
    """The file of every public stage, criterion and token term, found without importing it."""
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
    """The listing with the missing parts added; empty if no part is missing."""
    listing = FOLDER / "__init__.py"
    before = text = listing.read_text()
    for name, path in parts().items():
        if f'"{name}"' not in text:
            module = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
            text = text.replace(
                "\nif TYPE_CHECKING:\n", f"\nif TYPE_CHECKING:\n    from .{module} import {name}\n"
            )
            text = text.replace("__all__ = [", f'__all__ = [\n    "{name}",', 1)
    return {} if text == before else {listing: tidy(text)}


def write(listings: dict[Path, str]) -> None:
    """Write the listings. If the package cannot be imported with them, restore the old ones.

    Raises:
        SystemExit: the package cannot be imported; the message names the file.
    """
    before = {path: path.read_text() for path in listings}
    for path, text in listings.items():
        path.write_text(text)
    every = "import headrace.transforms as all; [getattr(all, name) for name in all.__all__]"
    run = subprocess.run([sys.executable, "-c", every], capture_output=True, text=True, cwd=ROOT)
    if run.returncode == 0:
        return
    for path, text in before.items():
        path.write_text(text)
    where = re.findall(r'File ".*/(transforms/.*\.py)"', run.stderr)
    found = f"{where[-1] if where else 'transforms'}: {run.stderr.strip().splitlines()[-1]}"
    sys.exit(f"{found}. Nothing was written")


def tidy(text: str) -> str:
    """Sort imports and names like the linter."""
    ruff = (sys.executable, "-m", "ruff")
    for words in (("check", "--quiet", "--fix", "--select", "I001,RUF022"), ("format", "--quiet")):
        text = subprocess.run(
            [*ruff, *words, "-"], input=text, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return text
