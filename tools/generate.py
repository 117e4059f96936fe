"""Write what follows from the code: listings, YAML nodes, the pages of recipes and symptoms.

python tools/generate.py          # writes what is out of date
python tools/generate.py --check  # names it, and exits with 1
"""

from __future__ import annotations

import sys
from pathlib import Path

import make_listings

ROOT = Path(__file__).parent.parent


def outdated() -> dict[Path, str]:
    """The files that are not what they should be, each with what it should hold."""
    import make_recipes
    import make_stages
    import make_symptoms

    modules = (make_listings, make_stages, make_recipes, make_symptoms)
    found = {path: text for module in modules for path, text in module.files().items()}
    return {path: text for path, text in found.items() if not path.exists() or path.read_text() != text}


def write(files: dict[Path, str]) -> None:
    """Write them, and say so."""
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    if "--check" not in sys.argv:
        listings = make_listings.files()
        make_listings.write(listings)  # first, since the others import what is listed
        write(listings | outdated())
    elif found := outdated():
        names = ", ".join(str(path.relative_to(ROOT)) for path in found)
        sys.exit(f"out of date: {names}. Run `make generate`")
