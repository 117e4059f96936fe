"""A sampler for TransferQueue that hands out whole groups, which it finds by the ids in the tags of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from headrace.pipeline.installed import import_extra
from headrace.transforms import GroupAssembler
from headrace.transforms.assembler.arriving import find_columns
from headrace.transforms.assembler.pieces import RowPiece
from headrace.transforms.entry import enter_rows
from headrace.transforms.tensordicts import parts_of

INDEX = ("headrace", "queue_index")  # TransferQueue's number of a row
TAG = "headrace"  # under which a row's tag has what the assembler reads of it


def group_tags(batch: TensorDictBase, assembler: GroupAssembler) -> list[dict[str, Any]]:
    """What an assembler reads of rows, as tags for ``transfer_queue.kv_batch_put(..., tags=…)``.

    Args:
        batch: TensorDict ``[N]``, dense or a lazy stack, with the columns that the assembler reads.
        assembler: of :func:`group_sampler`, or one with the same options; it is left alone.

    Returns:
        N tags; add your own to each.

    Raises:
        MissingKeyError, BatchError: as :meth:`GroupAssembler.put`.

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
    found = find_columns(RowPiece(rows, range(len(rows))), assembler._options)
    columns = {}
    for key in dict.fromkeys(found.values()):
        column = torch.cat([entry.reshape(-1) for entry in parts_of(rows, key) or []])
        name = key if isinstance(key, str) else ".".join(key)
        columns[name] = column.view(len(rows), -1).squeeze(1).tolist()
    return [{TAG: [[name, column[row]] for name, column in columns.items()]} for row in range(len(rows))]


def group_sampler(assembler: GroupAssembler) -> Any:
    """A ``transfer_queue.BaseSampler`` that hands out whole groups, wherever their rows are in the queue.

    ``GRPOGroupNSampler`` takes n rows with consecutive numbers for a group. This one goes by ids, so that
    groups may be of any size, rollouts may have several rows, rows may come in any order and from several
    producers, and a group of which rollouts failed is dropped, kept or waited for as the assembler says::

        assembler = GroupAssembler(segment_key="segment", on_failure="keep", min_rollouts=4)
        transfer_queue.init(conf)  # with conf.controller.sampler = group_sampler(assembler), and polling_mode
        transfer_queue.kv_batch_put(keys, partition, fields, tags=group_tags(rows, assembler))  # producers

    It samples groups in the order in which they became whole, until there are at least `batch_size` rows, and
    nothing while there are fewer. Rows that are dropped stay in the queue until you clear them. Each task and
    partition has an assembler of its own; where several tasks read one partition, each says its ``task_name``
    in its `sampling_config`, as TransferQueue's loader does. Calls with one ``dp_rank`` and ``batch_index``
    get the same rows.

    Args:
        assembler: whose options say what is whole; it is left alone. Without `segment_key` the rows of a
            rollout are to be put in their order, and be ready in it.

    Returns:
        The sampler, for ``controller.sampler`` of TransferQueue's configuration.

    Raises:
        ImportError: the extra `tq` is not installed.

    Example:
        >>> sampler = group_sampler(GroupAssembler(segment_key="segment"))  # doctest: +SKIP
    """
    base = import_extra("transfer_queue", "tq", "group_sampler").BaseSampler

    class GroupSampler(base):  # type: ignore[misc, valid-type]  # which is of an extra
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
            """Whole groups of at least `batch_size` rows, or none; all of them are consumed."""
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
            """All that is known of rows."""
            groups = {key: each.state_dict() for key, each in self.groups.items()}
            return super().save_checkpoint() | {"groups": groups}

        def load_checkpoint(self, state: dict[str, Any]) -> None:
            """Go on from it."""
            super().load_checkpoint(state)
            self.groups = {key: SampledGroups(self.prototype, each) for key, each in state["groups"].items()}

    return GroupSampler(assembler)


class SampledGroups:
    """The rows of one partition that a task has seen.

    Args:
        prototype: whose options say what is whole.
        state: of another one, from which this goes on.
    """

    def __init__(self, prototype: GroupAssembler, state: Mapping[str, Any] | None = None):
        self.assembler = deepcopy(prototype)
        self.seen: dict[int, Any] = {}
        """The tags of rows that were put, by their number in the queue, which may be used again."""
        self.whole: list[list[int]] = []
        """Rows of groups that are whole and were not sampled."""
        if state is not None:
            self.assembler.load_state_dict(state["assembler"])
            self.seen, self.whole = dict(state["seen"]), list(state["whole"])

    def sample(self, tags: Mapping[int, Mapping[str, Any]], batch_size: int) -> list[int]:
        """The numbers of rows of whole groups, at least so many; none while there are fewer.

        Args:
            tags: of all rows that are ready, by number.
            batch_size: rows.
        """
        said = {index: tag[TAG] for index, tag in sorted(tags.items()) if TAG in tag}  # tags may come later
        if new := [index for index, tag in said.items() if self.seen.get(index) != tag]:
            names = [name for name, _ in said[new[0]]]
            rows = TensorDict({INDEX: torch.tensor(new)}, batch_size=[len(new)])
            for place, name in enumerate(names):
                rows[tuple(name.split("."))] = torch.tensor([said[index][place][1] for index in new])
            self.assembler.put(rows)
            self.seen |= {index: said[index] for index in new}
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
        """All of it."""
        return {"assembler": self.assembler.state_dict(), "seen": self.seen, "whole": self.whole}
