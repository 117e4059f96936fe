"""Sample whole groups with TorchRL's samplers, which draw rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ConsumingSampler, Sampler, SampleUnit, StalenessAwareSampler, Storage

from headrace.transforms import BatchError, CompletenessGate
from headrace.transforms.table import Ids, Rows, as_ids, enter_rows, few, first_row, who_stamps
from headrace.transforms.table.options import at_least, describe_options, takes_options
from headrace.transforms.table.schema import STATUS_KEYS, has_key, read_column

Anchors = Literal["any", "first"]


@takes_options
class GroupUnit(SampleUnit):
    """Expand each row that a sampler draws to its whole group: ``ReplayBuffer(sample_unit=GroupUnit(), …)``.

    Use it for buffers of collected rows or of the assembler's batches. Each drawn group is in the sample
    once, with all its rows that the buffer holds, in order of writing. Groups are in the order in which they
    were drawn. Each group must pass the gate. So a batch of `batch_size` drawn rows has at most `batch_size`
    groups. Each sample reads the ids of all rows in the buffer.

    It works with samplers that draw at random, by priority, without replacement, by freshness or by prompt.
    With ``StalenessAwareSampler``, a group is left out if one of its rows exceeds `max_staleness`.
    ``ConsumingSampler`` is refused, because it counts and frees single rows; use `max_uses` instead.

    ``info`` holds ``anchor_index``: for each row, the drawn row of its group. It also holds the sampler's
    values for drawn rows, such as ``priority_weight``, repeated for all rows of their groups.

    Args:
        anchors: with ``any``, each drawn row selects its group, so a group is drawn in proportion to its
            number of rows or their priorities. With ``first``, only the first row of a group in the buffer
            selects it. Without replacement each group is then drawn once per epoch; batches have
            `batch_size` rows on average, and may be empty.
        max_uses: how often a group can be sampled, ≥ 1; None: any number.
        gate: the check of each group; None: a strict gate. With ``on_incomplete="drop"`` it leaves out groups
            that the writer has partly overwritten.

    Raises:
        BatchError: when sampled: a row has no id; the gate refuses a group; or no drawn group is left.
        TypeError: when sampled: the sampler or the storage cannot work with groups.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=1, sample_unit=GroupUnit())
        >>> rows = {"group_id": [7, 7], "rollout_id": [0, 1], "expected_rollouts": [2, 2]}
        >>> _ = buffer.extend(TensorDict(rows, batch_size=[2]))
        >>> buffer.sample()["rollout_id"].tolist()
        [0, 1]
    """

    def __init__(
        self,
        *,
        anchors: Anchors = "any",
        max_uses: int | None = None,
        gate: CompletenessGate | None = None,
    ):
        self.anchors = anchors
        self.max_uses = at_least("max_uses", max_uses, 1)
        self.gate = CompletenessGate() if gate is None else gate
        self.uses: dict[int, int] = {}  # number of times that each group in the buffer was sampled

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self, leave_out=('gate',))})"

    def expand(
        self, index: Tensor | tuple, info: dict[str, Any], storage: Storage
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the rows of the drawn groups. The buffer calls this with its lock held."""
        sampler = self._sampler(storage)
        if isinstance(index, tuple) or storage.ndim > 1:
            raise TypeError(
                f"{type(self).__name__} needs a storage of rows [N]; this one has {storage.ndim} dimensions"
            )
        stored = storage[: len(storage)]
        columns = stored.select(*self.gate.in_keys, *STATUS_KEYS, strict=False)
        ids = [key for key in (self.gate.group_key, self.gate.rollout_key) if key is not None]
        columns = enter_rows(columns, ids, reader=type(self).__name__)
        key, name = self.gate.group_key, type(self.gate).__name__
        group = as_ids(read_column(columns, key, reader=name, option="group_key"), "group_id")
        if bool((group < 0).any()):
            unset = (group < 0).nonzero().flatten()
            raise BatchError(
                f"every row needs a group_id ≥ 0; found none at rows {few(unset)}: rows without an id would "
                f"be treated as one group{who_stamps('group_id')}"
            )
        first = first_row(group)
        heads, places = groups_drawn(first, index.reshape(-1).to(first.device), self.anchors)
        used = [number for number, uses in self.uses.items() if uses >= (self.max_uses or uses + 1)]
        used_up = torch.isin(group, torch.tensor(used, dtype=torch.int64, device=group.device))
        usable = (fresh_groups(stored, first, sampler) & ~used_up)[heads]
        rows, draw = rows_of_groups(first, heads[usable])
        rows, draw = self._as_written(rows, draw, columns, storage)
        if len(heads) and not len(rows):
            raise BatchError(
                f"none of the drawn groups {few(group[heads])} can be used: each has reached "
                f"max_uses={self.max_uses}, or is too old for {{sampler}}",
                sampler=repr(sampler),
            )
        if len(rows):
            candidates = Rows.read(columns[rows], keys=self.gate.in_keys)
            self.gate.decide(candidates.seen_by(self.gate))
            stays = candidates.table.fates.here.to(rows.device)
            if not bool(stays.any()):
                raise BatchError(f"none of the drawn groups {few(group[heads])} passes the gate")
            rows, draw = rows[stays], draw[stays]
        in_buffer = set(group.unique().tolist())
        self.uses = {number: uses for number, uses in self.uses.items() if number in in_buffer}
        for number in group[rows].unique().tolist():
            self.uses[number] = self.uses.get(number, 0) + 1
        return self._result(index, info, rows, places[usable][draw])

    def _sampler(self, storage: Storage) -> Sampler | None:
        """The sampler of the buffer that uses this unit."""
        buffers = [buffer for buffer in storage._attached_entities_iter() if hasattr(buffer, "_sample_unit")]
        sampler = next((buffer.sampler for buffer in buffers if buffer._sample_unit is self), None)
        if isinstance(sampler, ConsumingSampler):
            raise TypeError(
                "ConsumingSampler counts and frees single rows, which leaves incomplete groups: use another "
                f"sampler with {type(self).__name__}(max_uses={sampler.max_sample_count})"
            )
        return sampler

    def _as_written(
        self, rows: Tensor, draw: Tensor, columns: TensorDictBase, storage: Storage
    ) -> tuple[Tensor, Tensor]:
        """Sort the rows of each group by time of writing. A full buffer has its oldest row at its cursor."""
        size, name = len(storage), type(self.gate).__name__
        if not len(rows) or size < storage.max_size or self.gate.rollout_key is None:
            return rows, draw
        key = self.gate.rollout_key
        rollouts = as_ids(read_column(columns, key, reader=name, option="rollout_key"), "rollout_id")
        has_ends = all(has_key(columns, key) for key in (self.gate.done_key, self.gate.init_key))
        if not has_ends and len(rollouts.unique()) < size:
            raise BatchError(
                "the buffer is full and overwrites rows of rollouts with several rows. Without "
                f"{self.gate.done_key!r} and {self.gate.init_key!r} a rollout that lost its first rows "
                "cannot be detected: append InitTracker to the environment, or make the buffer larger"
            )
        cursor = next(b._writer._cursor for b in storage._attached_entities_iter() if hasattr(b, "_writer"))
        order = ((rows - cursor) % size + draw * size).argsort()
        return rows[order], draw[order]

    def _result(
        self, index: Tensor, info: dict[str, Any], rows: Tensor, places: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Repeat the sampler's values of each drawn row for the rows of its group."""
        anchors, places = index.reshape(-1), places.to(index.device)
        values = {name: torch.as_tensor(value) for name, value in info.items()}
        repeated = {
            name: value[places.to(value.device)] if value.shape[:1] == anchors.shape else info[name]
            for name, value in values.items()
        }
        return rows.to(index.device), {**repeated, "anchor_index": anchors[places]}

    def state_dict(self) -> dict[str, Any]:
        """The number of times that each group was sampled. A buffer does not save it with its own state."""
        return {"groups": list(self.uses), "uses": list(self.uses.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts."""
        self.uses = dict(zip(state["groups"], state["uses"], strict=True))


def groups_drawn(first: Tensor, drawn: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Find the groups of drawn rows, each once, in the order of drawing.

    Args:
        first: (N,) int64, the first row of each row's group.
        drawn: (B,) int64, the drawn rows.
        anchors: which row selects its group: ``any``, or only the ``first``.

    Returns:
        The first rows of these groups, and the positions in `drawn` of the rows that selected them.

    Example:
        >>> heads, places = groups_drawn(torch.tensor([0, 0, 2, 2]), torch.tensor([3, 0, 2]), "any")
        >>> heads.tolist(), places.tolist()
        ([2, 0], [0, 1])
    """
    places = torch.arange(len(drawn), device=drawn.device)
    heads = first[drawn]
    if anchors == "first":
        places, heads = places[heads == drawn], heads[heads == drawn]
    again = ~Ids(heads).is_first
    return heads[~again], places[~again]


def rows_of_groups(first: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the groups that begin with `heads`, group by group, and the index in `heads` for each row.

    Example:
        >>> first = torch.tensor([0, 1, 0, 1, 4])
        >>> [found.tolist() for found in rows_of_groups(first, torch.tensor([1, 0]))]
        [[1, 3, 0, 2], [0, 0, 1, 1]]
    """
    draw = torch.full_like(first, -1)
    draw[heads] = torch.arange(len(heads), device=first.device)
    draw = draw[first]
    rows = (draw >= 0).nonzero().flatten()
    order = draw[rows].sort(stable=True).indices
    return rows[order], draw[rows[order]]


def fresh_groups(stored: TensorDictBase, first: Tensor, sampler: Sampler | None) -> Tensor:
    """(N,) bool, True if all rows of the row's group are within the sampler's `max_staleness`.

    Raises:
        BatchError: a row is newer than the sampler's version, so that version was not updated.
    """
    if not isinstance(sampler, StalenessAwareSampler) or sampler.max_staleness < 0:
        return torch.ones_like(first, dtype=torch.bool)
    reader = type(sampler).__name__
    version = read_column(stored, sampler._version_key, reader=reader, option="version_key")
    if bool((version > sampler.consumer_version).any()):
        raise BatchError(
            f"no row may be newer than the sampler's consumer_version={sampler.consumer_version}; found "
            f"{int(version.max())}. Call increment_consumer_version() of the {reader} when you update the "
            "policy, before the workers get the weights"
        )
    groups = Ids(first)
    return sampler.consumer_version - groups.spread(groups.min(version)) <= sampler.max_staleness
