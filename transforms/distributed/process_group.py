"""How ranks share a batch, as options."""

from __future__ import annotations

from typing import Literal, get_args

import torch.distributed as dist

from headrace.transforms.options import at_least, one_of, within

SharedIds = Literal["raise", "same", "different"]


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


def check_sharing(group: object, shared_ids: str, patience: float) -> None:
    """Check how ranks share a batch.

    Raises:
        ValueError: an option is none of its values.
    """
    check_group(group)
    one_of("shared_ids", shared_ids, get_args(SharedIds))
    within("patience", patience, 0, float("inf"))


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
