"""Write docs/certificates.json: the certificate of every recipe on every task, in a minute or two.

python tools/make_certificates.py               # all recipes
python tools/make_certificates.py dapo as/verl  # only these; the others keep their certificates
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from headrace.pipeline.composing.compose import compose_config, recipes
from headrace.pipeline.tools.certify import Certificate, certify_recipe
from headrace.pipeline.tools.certify.certify_task import small_tasks
from headrace.pipeline.tools.report import json_text

PAGE = Path(__file__).parent.parent / "docs" / "certificates.json"


def rounded(value: Any) -> Any:
    """Round numbers to nine digits, and rounding errors to 0, so that all machines write the same file."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return 0.0 if math.fabs(value) < 1e-11 else float(f"{value:.9g}")
    return value


def certificates(named: Collection[str] = ()) -> list[dict[str, Any]]:
    """Compute certificates, and return all. A recipe that refuses a task has no certificate.

    Args:
        named: the recipes to compute, or none for all recipes. Other recipes keep their certificates.

    Raises:
        SystemExit: a named recipe does not exist.
    """
    if unknown := set(named) - set(recipes()):
        sys.exit(f"unknown recipes: {', '.join(sorted(unknown))}. The recipes are {', '.join(recipes())}")
    tasks = small_tasks(compose_config("config", "task=certify"))
    before = json.loads(PAGE.read_text())["certificates"] if named else []
    found = []
    for recipe in recipes():
        if named and recipe not in named:
            found += [each for each in before if each["recipe"] == recipe]
            continue
        node = compose_config("load", f"pipeline={recipe}").pipeline
        for name, task in tasks.items():
            certificate = certify_recipe(node, recipe, task, name)
            if isinstance(certificate, Certificate):
                found.append(rounded(certificate.plain()))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = ",\n".join(json_text(each) for each in certificates(sys.argv[1:]))
    PAGE.write_text(f'{{"certificates": [\n{lines}\n]}}\n')
