"""Whole groups from TorchRL's samplers, which draw rows."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ConsumingSampler, Sampler, SampleUnit, StalenessAwareSampler, Storage

from headrace.transforms import BatchError, CompletenessGate
from headrace.transforms.entry import enter_rows
from headrace.transforms.errors import who_stamps
from headrace.transforms.ids import Ids, as_ids, first_row
from headrace.transforms.options import at_least, describe_options, one_of, takes_options
from headrace.transforms.rows import Rows, few
from headrace.transforms.schema import STATUS_KEYS, has_key, read_column

Anchors = Literal["any", "first"]


@takes_options
class GroupUnit(SampleUnit):
    """Make of each row that a sampler draws its whole group: ``ReplayBuffer(sample_unit=GroupUnit(), …)``.

    For buffers of rows as they were collected, or of the assembler's batches. Groups come in the order of the
    rows that drew them, each once a batch, with all rows that the buffer has of it in their order, and must
    pass the gate. So a batch has at most as many groups as `batch_size` says rows. Each sample reads the ids
    of all rows in the buffer.

    Samplers that draw at random, by priority, without replacement, by freshness or by prompt keep groups
    whole so. Of ``StalenessAwareSampler`` a group with a row beyond its `max_staleness` is left out.
    ``ConsumingSampler`` counts rows and frees their places one by one: it is refused, and `max_uses` counts.

    ``info`` has ``anchor_index``, the row that drew each row's group, and what a sampler says of the rows
    that it drew, such as ``priority_weight``, on all rows of the group, whose priority is that of its rows.

    Args:
        anchors: ``any`` row stands for its group, which so is drawn in proportion to its rows or their
            priorities; or only its ``first`` in the buffer does: without replacement each group is then drawn
            once an epoch, in batches of as many rows as `batch_size` says on average, or of none.
        max_uses: how often a group is handed out at most, ≥ 1; None: without end.
        gate: what a group must pass; one with ``on_incomplete="drop"`` leaves out those that the writer has
            overwritten in part. None: a strict one.

    Raises:
        BatchError: when sampled: a row without an id; as the gate says; no group that was drawn is left.
        TypeError: when sampled: a sampler or a storage that cannot keep groups whole.

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
        self.anchors = one_of("anchors", anchors, get_args(Anchors))
        self.max_uses = at_least("max_uses", max_uses, 1)
        self.gate = CompletenessGate() if gate is None else gate
        self.uses: dict[int, int] = {}  # of the groups that the buffer has

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self, leave_out=('gate',))})"

    def expand(
        self, index: Tensor | tuple, info: dict[str, Any], storage: Storage
    ) -> tuple[Tensor, dict[str, Any]]:
        """The rows of the groups that were drawn; a buffer calls it within its lock."""
        sampler = self._sampler(storage)
        if isinstance(index, tuple) or storage.ndim > 1:
            raise TypeError(
                f"{type(self).__name__} takes a storage of rows [N]; this one has {storage.ndim} dims"
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
                f"be one group{who_stamps('group_id')}"
            )
        first = first_row(group)
        heads, places = groups_drawn(first, index.reshape(-1).to(first.device), self.anchors)
        used = [number for number, uses in self.uses.items() if uses >= (self.max_uses or uses + 1)]
        used_up = torch.isin(group, torch.tensor(used, dtype=torch.int64, device=group.device))
        usable = (fresh_groups(stored, first, sampler) & ~used_up)[heads]
        rows, turn = rows_of_groups(first, heads[usable])
        rows, turn = self._as_written(rows, turn, columns, storage)
        if len(heads) and not len(rows):
            raise BatchError(
                f"of the groups that were drawn, {few(group[heads])}, none is left: each has been used "
                f"{self.max_uses} times, or is too old for {sampler!r}"
            )
        if len(rows):
            candidates = Rows.read(columns[rows], keys=self.gate.in_keys)
            self.gate.decide(candidates.seen_by(self.gate))
            stays = candidates.table.here.to(rows.device)
            if not bool(stays.any()):
                raise BatchError("none of the groups that were drawn passes the gate")
            rows, turn = rows[stays], turn[stays]
        there = set(group.unique().tolist())
        self.uses = {number: uses for number, uses in self.uses.items() if number in there}
        for number in group[rows].unique().tolist():
            self.uses[number] = self.uses.get(number, 0) + 1
        return self._result(index, info, rows, places[usable][turn])

    def _sampler(self, storage: Storage) -> Sampler | None:
        """Who draws for the buffer that this is the unit of."""
        buffers = [buffer for buffer in storage._attached_entities_iter() if hasattr(buffer, "_sample_unit")]
        sampler = next((buffer.sampler for buffer in buffers if buffer._sample_unit is self), None)
        if isinstance(sampler, ConsumingSampler):
            raise TypeError(
                "ConsumingSampler counts rows and frees their places one by one, which tears groups: take "
                f"another sampler, and {type(self).__name__}(max_uses={sampler.max_sample_count})"
            )
        return sampler

    def _as_written(
        self, rows: Tensor, turn: Tensor, columns: TensorDictBase, storage: Storage
    ) -> tuple[Tensor, Tensor]:
        """The rows of each group in the order of writing: a full buffer's oldest row is at its cursor."""
        size, name = len(storage), type(self.gate).__name__
        if not len(rows) or size < storage.max_size or self.gate.rollout_key is None:
            return rows, turn
        key = self.gate.rollout_key
        rollouts = as_ids(read_column(columns, key, reader=name, option="rollout_key"), "rollout_id")
        there = all(has_key(columns, key) for key in (self.gate.done_key, self.gate.init_key))
        if not there and len(rollouts.unique()) < size:
            raise BatchError(
                "rollouts of several rows, and a full buffer, which overwrites some of them: without "
                f"{self.gate.done_key!r} and {self.gate.init_key!r} nothing says which have lost their "
                "first rows. Append InitTracker to the environment, or make the buffer larger"
            )
        cursor = next(b._writer._cursor for b in storage._attached_entities_iter() if hasattr(b, "_writer"))
        order = ((rows - cursor) % size + turn * size).argsort()
        return rows[order], turn[order]

    def _result(
        self, index: Tensor, info: dict[str, Any], rows: Tensor, places: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """What was said of the rows that drew, by their places, said of the rows of their groups."""
        anchors, places = index.reshape(-1), places.to(index.device)
        values = {name: torch.as_tensor(value) for name, value in info.items()}
        said = {
            name: value[places.to(value.device)] if value.shape[:1] == anchors.shape else info[name]
            for name, value in values.items()
        }
        return rows.to(index.device), {**said, "anchor_index": anchors[places]}

    def state_dict(self) -> dict[str, Any]:
        """How often groups were handed out. A buffer does not save its unit: save it beside it."""
        return {"groups": list(self.uses), "uses": list(self.uses.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.uses = dict(zip(state["groups"], state["uses"], strict=True))


def groups_drawn(first: Tensor, drawn: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Which groups some rows draw, each once, in their order.

    Args:
        first: (N,) int64, the first row of each row's group.
        drawn: (B,) int64, rows.
        anchors: whether ``any`` row draws its group, or its ``first``.

    Returns:
        The first rows of those groups, and the places in `drawn` of the rows that draw them.

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
    """All rows of some groups, group by group, and which of the groups each is of.

    Example:
        >>> first = torch.tensor([0, 1, 0, 1, 4])
        >>> [found.tolist() for found in rows_of_groups(first, torch.tensor([1, 0]))]
        [[1, 3, 0, 2], [0, 0, 1, 1]]
    """
    turn = torch.full_like(first, -1)
    turn[heads] = torch.arange(len(heads), device=first.device)
    turn = turn[first]
    rows = (turn >= 0).nonzero().flatten()
    order = turn[rows].sort(stable=True).indices
    return rows[order], turn[rows[order]]


def fresh_groups(stored: TensorDictBase, first: Tensor, sampler: Sampler | None) -> Tensor:
    """(N,) bool, whether no row of the row's group is beyond the staleness that the sampler allows.

    Raises:
        BatchError: a row is newer than the sampler's version, which nobody counts up then.
    """
    if not isinstance(sampler, StalenessAwareSampler) or sampler.max_staleness < 0:
        return torch.ones_like(first, dtype=torch.bool)
    reader = type(sampler).__name__
    version = read_column(stored, sampler._version_key, reader=reader, option="version_key")
    if bool((version > sampler.consumer_version).any()):
        raise BatchError(
            f"no row is newer than the policy version that trains, {sampler.consumer_version}; found "
            f"{int(version.max())}. Call the {reader}'s increment_consumer_version() where the policy is "
            "updated, before workers get it"
        )
    groups = Ids(first)
    return sampler.consumer_version - groups.spread(groups.min(version)) <= sampler.max_staleness
