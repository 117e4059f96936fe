"""What a report warns of: numbers of a stage that are below what was set for them."""

from __future__ import annotations

from collections.abc import Mapping


def warnings_of(numbers: Mapping[str, float]) -> list[str]:
    """A line for each number of a stage that is below its least: ``ess_token`` below ``ess_least``.

    A stage that measures ``<name>_least`` beside ``<name>_…`` asks for it.

    Args:
        numbers: by ``<stage>/<name>``.

    Example:
        >>> warnings_of({"correction/ess_token": 0.12, "correction/ess_least": 0.5})
        ['correction: ess_token is 0.12, below 0.5 (ess_least)']
    """
    lines = []
    for bound, least in numbers.items():
        if "/" not in bound or not bound.endswith("_least"):
            continue
        stage, name = bound.removesuffix("least").split("/", 1)
        lines += [
            f"{stage}: {key.removeprefix(f'{stage}/')} is {value:.3g}, below {least:g} ({name}least)"
            for key, value in numbers.items()
            if key.startswith(f"{stage}/{name}") and key != bound and value < least
        ]
    return lines
