"""How ranks share a batch, as options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist

from headrace.transforms.options import at_least, one_of, within

SharedIds = Literal["raise", "same", "different"]
DecideOn = Literal["each_rank", "first_rank"]


@dataclass(frozen=True)
class RankOptions:
    """The ranks that hold rows of their own of one batch.

    Attributes:
        process_group: of ranks; None: this process has the whole batch.
        shared_ids: what an id on several ranks means.
        patience: seconds to wait for the others.
        decide_on: who decides about the rows of all.
    """

    process_group: dist.ProcessGroup | str | None
    shared_ids: SharedIds
    patience: float
    decide_on: DecideOn

    @classmethod
    def of(
        cls,
        stages: Iterable[Any],
        group: Any,
        shared_ids: SharedIds | None,
        patience: float,
        decide_on: DecideOn,
    ) -> RankOptions:
        """What a pipeline says, or one of its stages where it does not.

        Raises:
            ValueError: two say different things: statistics would be of other rows than denominators; or an
                option is none of its values.
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
                "all stages of a pipeline share their batches with the same ranks: set process_group and "
                f"shared_ids on the pipeline; got {list(groups.values())} and {sorted(map(str, meanings))}"
            )
        found = next(iter(groups.values()), None)
        meaning: Any = next(iter(meanings), "raise")
        check_group(found)
        one_of("shared_ids", meaning, get_args(SharedIds))
        within("patience", patience, 0)
        if one_of("decide_on", decide_on, get_args(DecideOn)) == "first_rank" and found is None:
            raise ValueError("decide_on='first_rank' is for ranks that share a batch: set process_group")
        return cls(found, meaning, patience, decide_on)


def resolve_group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    """A process group, also by the name ``world``, as YAML has it.

    Raises:
        ValueError: torch.distributed is not initialised.
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
        ValueError: a name that is none.
    """
    if isinstance(group, str) and group != "world":
        raise ValueError(f"process_group must be a process group, 'world' or None; got {group!r}")


def check_one_way(ranks: int, process_group: object) -> None:
    """Check that rows are spread over ranks in one way.

    Raises:
        ValueError: each rank would hold the whole batch, and rows of its own.
    """
    at_least("ranks", ranks, 1)
    if ranks > 1 and process_group is not None:
        raise ValueError(
            "give ranks where each rank holds the whole batch, process_group where each holds rows of its "
            f"own; got {ranks=} and {process_group=}"
        )
