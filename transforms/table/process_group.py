"""The options for ranks that share a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from .options import at_least, takes_options, within

SharedIds = Literal["raise", "same", "different"]


@takes_options
@dataclass(frozen=True)
class RankOptions:
    """The options of a pipeline for ranks that each hold their own rows of a batch.

    Attributes:
        process_group: the ranks; None: this process has the whole batch.
        shared_ids: whether an id on several ranks is the same unit.
        patience: seconds to wait for the other ranks.
    """

    process_group: dist.ProcessGroup | str | None
    shared_ids: SharedIds
    patience: float

    @classmethod
    def of(
        cls,
        stages: Iterable[Any],
        group: Any,
        shared_ids: SharedIds | None,
        patience: float,
    ) -> RankOptions:
        """The options of a pipeline, with those of its stages as defaults.

        Raises:
            ValueError: two stages, or a stage and the pipeline, have different options, so statistics and
                denominators would cover different rows; or an option has an invalid value.
        """
        groups = {id(group) if not isinstance(group, str) else group: group} if group is not None else {}
        meanings: set[Any] = {shared_ids} - {None}
        for stage in stages:
            own = getattr(stage, "process_group", None)
            if own is not None:
                groups[own if isinstance(own, str) else id(own)] = own
                meanings |= {getattr(stage, "shared_ids", "raise")} - {"raise"}
        if len(groups) > 1 or len(meanings) > 1:
            raise ValueError(
                "all stages of a pipeline must share their batches with the same ranks: set "
                "pipeline.process_group and pipeline.shared_ids, and no others on stages; got "
                f"{list(groups.values())} and {sorted(map(str, meanings))}"
            )
        found = next(iter(groups.values()), None)
        meaning: Any = next(iter(meanings), "raise")
        check_group(found)
        within("patience", patience, 0)
        return cls(found, meaning, patience)


def resolve_group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    """Resolve a process group; the name ``world`` is the default group.

    Raises:
        ValueError: the name is unknown, or torch.distributed is not initialised.
    """
    check_group(group)
    if not isinstance(group, str):
        return group
    if not dist.is_initialized():
        raise ValueError(
            "process_group='world' needs torch.distributed: call init_process_group before the first batch"
        )
    return dist.group.WORLD


def check_group(group: object) -> None:
    """Check a process group.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(group, str) and group != "world":
        raise ValueError(f"process_group must be a process group, 'world' or None; got {group!r}")


def check_one_way(ranks: int, process_group: object) -> None:
    """Check that `ranks` and `process_group` are not both given.

    Raises:
        ValueError: both are given, or `ranks` is below 1.
    """
    at_least("ranks", ranks, 1)
    if ranks > 1 and process_group is not None:
        raise ValueError(
            "give ranks if each rank holds the whole batch, or process_group if each rank holds its own "
            f"rows, not both; got {ranks=} and {process_group=}"
        )
