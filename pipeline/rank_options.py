"""Which ranks share a pipeline's batches, from its options and those of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from headrace.transforms.distributed import Ranks, SharedIds, check_sharing, resolve_group
from headrace.transforms.stage import BatchTransform


@dataclass(frozen=True)
class RankOptions:
    """The ranks that hold rows of their own of one batch.

    Attributes:
        process_group: of ranks; None: this process has the whole batch.
        shared_ids: what an id on several ranks means.
        patience: seconds to wait for the others.
    """

    process_group: dist.ProcessGroup | str | None
    shared_ids: SharedIds
    patience: float

    @classmethod
    def of(
        cls, stages: Iterable[Any], group: Any, shared_ids: SharedIds | None, patience: float
    ) -> RankOptions:
        """What a pipeline says, or one of its stages where it does not.

        Raises:
            ValueError: two say different things: statistics would be of other rows than denominators.
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
        check_sharing(found, meaning, patience)
        return cls(found, meaning, patience)

    def same_on_all(self, stages: Mapping[str, Any], epochs: int) -> str:
        """What must be the same on all ranks that share a batch, in words: a line each."""
        texts = [
            f"{name}: {stage.same_on_all_ranks() if isinstance(stage, BatchTransform) else repr(stage)}"
            for name, stage in stages.items()
        ]
        return "\n".join([f"epochs={epochs}", f"shared_ids={self.shared_ids!r}", *texts])

    def ranks(self) -> Ranks | None:
        """The ranks, for one batch; None where this process has the whole of it.

        Raises:
            ValueError: torch.distributed is not initialised.
        """
        group = resolve_group(self.process_group)
        return None if group is None else Ranks(group, self.shared_ids, self.patience)
