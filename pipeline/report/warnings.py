"""What a report warns of: numbers of a stage that are below what was set for them."""

from __future__ import annotations

from collections.abc import Mapping


def warnings_of(numbers: Mapping[str, float]) -> list[str]:
    """A line for each number of a stage that is below its least: ``ess_token`` below ``least_ess``.

    A stage that measures its option ``least_<name>`` beside ``<name>_…`` asks for it.

    Args:
        numbers: by ``<stage>/<name>``.

    Example:
        >>> warnings_of({"correction/ess_token": 0.12, "correction/least_ess": 0.5})
        ['correction: ess_token is 0.12, below 0.5 (least_ess)']
    """
    lines = []
    for bound, least in numbers.items():
        stage, _, option = bound.partition("/least_")
        lines += [
            f"{stage}: {key.removeprefix(f'{stage}/')} is {value:.3g}, below {least:g} (least_{option})"
            for key, value in numbers.items()
            if option and key.startswith(f"{stage}/{option}_") and value < least
        ]
    return lines
