"""Write the files that are generated from code: listings, YAML nodes, pages of recipes and symptoms.

python tools/generate.py          # writes the files that are out of date
python tools/generate.py --check  # names these files, and exits with 1
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import make_listings

ROOT = Path(__file__).parent.parent
# In this order, because makers read earlier files: YAML is made of listed stages, and recipes read the YAML.
MAKERS = ("make_listings", "make_stages", "make_recipes", "make_symptoms", "make_beside", "make_policies")


def outdated(maker: str) -> dict[Path, str]:
    """The files of a maker that are out of date, each with the text that it must have."""
    found: dict[Path, str] = import_module(maker).files()
    return {path: text for path, text in found.items() if not path.exists() or path.read_text() != text}


def write(files: dict[Path, str]) -> None:
    """Write files, and print their names."""
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}", flush=True)


def check() -> None:
    """Exit with the names of the files that are out of date, for the first maker that has such files.

    Raises:
        SystemExit: a file is out of date.
    """
    for maker in MAKERS:
        if found := outdated(maker):
            names = ", ".join(str(path.relative_to(ROOT)) for path in found)
            sys.exit(f"out of date: {names}. Run `make generate`")


def generate() -> None:
    """Write the files of one maker after the other."""
    some = False
    for maker in MAKERS:
        found = outdated(maker)
        if found and maker == "make_listings":
            make_listings.write(found)  # restores the old files if the package cannot be imported
        write(found)
        some = some or bool(found)
    if not some:
        print("up to date")


if __name__ == "__main__":
    check() if "--check" in sys.argv else generate()
