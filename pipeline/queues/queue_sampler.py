"""Make a sampler for TransferQueue that samples whole groups, by the ids in the tags of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from headrace.installed import import_extra
from headrace.transforms import GroupAssembler
from headrace.transforms.streams import columns_to_send
from headrace.transforms.table import enter_rows

INDEX = ("headrace", "queue_index")  # TransferQueue's number of a row
TAG = "headrace"  # the entry of a tag with the columns that the assembler reads


def group_tags(batch: TensorDictBase, assembler: GroupAssembler) -> list[dict[str, Any]]:
    """Make tags for ``transfer_queue.kv_batch_put(..., tags=…)`` with the columns that an assembler reads.

    Args:
        batch: TensorDict ``[N]``, dense or a lazy stack, with the columns that the assembler reads.
        assembler: the assembler of :func:`group_sampler`, or one with equal options. It is not changed.

    Returns:
        N tags. You can add your own entries to each.

    Raises:
        MissingKeyError, BatchError: :meth:`GroupAssembler.put` would raise it for this batch.

    Example:
        >>> from tensordict import TensorDict
        >>> columns = {"group_id": [4, 4], "rollout_id": [0, 1], ("next", "done"): [True, True]}
        >>> group_tags(TensorDict(columns, batch_size=[2]), GroupAssembler(group_size=2))[1]["headrace"]
        [['group_id', 4], ['rollout_id', 1], ['next.done', True]]
    """
    keys = [assembler.group_key, assembler.rollout_key]
    rows = enter_rows(batch, keys, reader="group_tags")
    if not len(rows):
        return []
    columns = {
        key if isinstance(key, str) else ".".join(key): column.squeeze(1).tolist()
        for key, column in columns_to_send(rows, assembler._options).items()
    }
    return [{TAG: [[name, column[row]] for name, column in columns.items()]} for row in range(len(rows))]


def group_sampler(assembler: GroupAssembler) -> Any:
    """Make a ``transfer_queue.BaseSampler`` that samples whole groups, wherever their rows are in the queue.

    ``GRPOGroupNSampler`` treats n rows with consecutive numbers as a group. This sampler uses ids. So groups
    may have any size, rollouts may have several rows, and rows may arrive in any order and from several
    producers. The options of the assembler decide about groups with failed rollouts::

        assembler = GroupAssembler(segment_key="segment", on_failure="keep", min_rollouts=4)
        transfer_queue.init(conf)  # with conf.controller.sampler = group_sampler(assembler), and polling_mode
        transfer_queue.kv_batch_put(keys, partition, fields, tags=group_tags(rows, assembler))  # producers

    The sampler takes groups in the order in which they became whole, until they have at least `batch_size`
    rows. If whole groups have fewer rows, it takes nothing. Dropped rows stay in the queue until you clear
    them. Each task and partition has its own assembler. If several tasks read one partition, set
    ``task_name`` in the `sampling_config` of each, as TransferQueue's loader does. Calls with the same
    ``dp_rank`` and ``batch_index`` get the same rows.

    Args:
        assembler: provides the options, and is not changed. Without `segment_key` the rows of a rollout must
            be put, and become ready, in order.

    Returns:
        The sampler, for ``controller.sampler`` of TransferQueue's configuration.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: the assembler has `max_staleness`. TransferQueue does not tell its sampler the policy
            version, and its dispatcher cannot ask the sampler how many groups it may dispatch.

    Example:
        >>> sampler = group_sampler(GroupAssembler(segment_key="segment"))  # doctest: +SKIP
    """
    if assembler.max_staleness is not None:
        raise ValueError(
            f"max_staleness={assembler.max_staleness} needs the policy version, which TransferQueue does not "
            "tell its sampler. The sampler can neither wait for slow groups nor limit the dispatch. Read the "
            "queue with RolloutStream(sampler, source=RolloutQueue(...)), which does both, or leave "
            "max_staleness out"
        )
    base = import_extra("transfer_queue", "group_sampler").BaseSampler

    class GroupSampler(base):  # type: ignore[misc, valid-type]  # the base is from an extra
        """Samples whole groups."""

        def __init__(self, prototype: GroupAssembler):
            super().__init__()
            self.prototype = prototype
            self.groups: dict[tuple[str, str], SampledGroups] = {}

        def sample(
            self,
            ready_indexes: Sequence[int],
            batch_size: int,
            task_name: str = "",
            partition_id: str = "",
            *args: Any,
            partition: Any = None,
            dp_rank: int | None = None,
            batch_index: int | None = None,
            **options: Any,
        ) -> tuple[list[int], list[int]]:
            """Sample and consume whole groups with at least `batch_size` rows, or nothing."""
            partition_id = partition_id or partition.partition_id
            known = (
                self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(dp_rank, {})
            )
            if dp_rank is not None and batch_index in known:
                return known[batch_index]
            groups = self.groups.setdefault((partition_id, task_name), SampledGroups(self.prototype))
            found = groups.sample(partition.get_custom_meta(list(ready_indexes)), batch_size)
            if dp_rank is not None and found:
                known[batch_index] = found, list(found)
            return found, list(found)

        def clear_cache(self, partition_id: str) -> None:
            """Forget a partition."""
            super().clear_cache(partition_id)
            for key in [key for key in self.groups if key[0] == partition_id]:
                del self.groups[key]

        def save_checkpoint(self) -> dict[str, Any]:
            """The state of all groups."""
            groups = {key: each.state_dict() for key, each in self.groups.items()}
            return super().save_checkpoint() | {"groups": groups}

        def load_checkpoint(self, state: dict[str, Any]) -> None:
            """Restore the output of :meth:`save_checkpoint`."""
            super().load_checkpoint(state)
            self.groups = {key: SampledGroups(self.prototype, each) for key, each in state["groups"].items()}

    return GroupSampler(assembler)


class SampledGroups:
    """The groups of one partition for one task.

    Args:
        prototype: an assembler with the options.
        state: the output of :meth:`state_dict`, to continue from; None: start empty.
    """

    def __init__(self, prototype: GroupAssembler, state: Mapping[str, Any] | None = None):
        self.assembler = deepcopy(prototype)
        self.seen: dict[int, Any] = {}
        """The tags of rows that were put, by the queue's number of the row. The queue reuses numbers."""
        self.whole: list[list[int]] = []
        """The rows of each whole group that was not sampled yet."""
        if state is not None:
            self.assembler.load_state_dict(state["assembler"])
            self.seen, self.whole = dict(state["seen"]), list(state["whole"])

    def sample(self, tags: Mapping[int, Mapping[str, Any]], batch_size: int) -> list[int]:
        """The row numbers of whole groups with at least `batch_size` rows; none while there are fewer.

        Args:
            tags: the tags of all ready rows, by number.
            batch_size: smallest number of rows.
        """
        read = {index: tag[TAG] for index, tag in sorted(tags.items()) if TAG in tag}  # tags may arrive later
        if new := [index for index, tag in read.items() if self.seen.get(index) != tag]:
            names = [name for name, _ in read[new[0]]]
            rows = TensorDict({INDEX: torch.tensor(new)}, batch_size=[len(new)])
            for place, name in enumerate(names):
                rows[tuple(name.split("."))] = torch.tensor([read[index][place][1] for index in new])
            self.assembler.put(rows)
            self.seen |= {index: read[index] for index in new}
        while (group := self.assembler.take(1)) is not None:
            self.whole.append(group[INDEX].tolist())
        count, rows_found = 0, 0
        while rows_found < batch_size and count < len(self.whole):
            rows_found, count = rows_found + len(self.whole[count]), count + 1
        if rows_found < batch_size:
            return []
        found = [index for group in self.whole[:count] for index in group]
        del self.whole[:count]
        for index in found:
            del self.seen[index]
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state, which another object takes as its option `state`."""
        return {"assembler": self.assembler.state_dict(), "seen": self.seen, "whole": self.whole}
