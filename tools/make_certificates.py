"""Write docs/certificates.json: the certificate of every recipe on every task, in a minute or two.

python tools/make_certificates.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from headrace.pipeline.certify import Certificate, certify_recipe
from headrace.pipeline.composing import compose_config, recipes
from headrace.pipeline.tasks.certify import small_tasks
from headrace.pipeline.valid_json import json_text

PAGE = Path(__file__).parent.parent / "docs" / "certificates.json"


def rounded(value: Any) -> Any:
    """Numbers with nine digits, and what is rounding alone as 0, so that machines write the same file."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return 0.0 if math.fabs(value) < 1e-11 else float(f"{value:.9g}")
    return value


def certificates() -> list[dict[str, Any]]:
    """All of them, but of recipes that refuse a task's rows."""
    tasks = small_tasks(compose_config("config", "task=certify"))
    found = []
    for recipe in recipes():
        node = compose_config("load", f"pipeline={recipe}").pipeline
        for name, task in tasks.items():
            certificate = certify_recipe(node, recipe, task, name)
            if isinstance(certificate, Certificate):
                found.append(rounded(certificate.plain()))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = ",\n".join(json_text(each) for each in certificates())
    PAGE.write_text(f'{{"certificates": [\n{lines}\n]}}\n')
