"""Orders of stages that cannot work are refused before any rollout."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.transforms import ShuffleSplit


def arrange(stages: Mapping[str, Any], order: Sequence[str] | None) -> dict[str, Any]:
    """Put stages into the order given; a stage that is None is left out.

    Raises:
        ValueError: the order lacks a stage, or names one that there is not; with a hint.
    """
    present = {name: stage for name, stage in stages.items() if stage is not None}
    if order is None:
        return present
    if unknown := [name for name in order if name not in present]:
        hints = "; ".join(f"{name!r}{suggest(name, present)}" for name in unknown)
        raise ValueError(f"order names stages that there are not: {hints}. There are {list(present)}")
    if len(set(order)) < len(order) or len(order) < len(present):
        raise ValueError(f"order must name each stage once; got {list(order)}, there are {list(present)}")
    return {name: present[name] for name in order}


def check_order(stages: Mapping[str, Callable]) -> None:
    """Refuse a stage that reads a column before a later one writes it, and anything after the split.

    Raises:
        ValueError: naming the two stages and the column.
    """
    names = list(stages)
    for i, name in enumerate(names):
        for later in names[i + 1 :]:
            if isinstance(stages[name], ShuffleSplit):
                raise ValueError(
                    f"stage {later!r} comes after {name!r}, which cuts the batch into minibatches and must "
                    f"be last; put {later!r} before it"
                )
            late = set(getattr(stages[name], "in_keys", ())) & set(getattr(stages[later], "out_keys", ()))
            if late:
                columns = ", ".join(repr(key) for key in sorted(late, key=str))
                raise ValueError(
                    f"stage {name!r} reads {columns}, which {later!r} writes after it: {later!r} would have "
                    f"no effect on it. Put {later!r} before {name!r}, or take it out"
                )


def suggest(word: str, words: Iterable[str]) -> str:
    """Close matches, as the end of a sentence; nothing if there are none."""
    close = difflib.get_close_matches(word, list(words), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
