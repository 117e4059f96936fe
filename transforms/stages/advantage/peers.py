"""Combine several id columns into one id, for example group and role."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from torch import Tensor

from headrace.transforms.table import BatchTransform, Ids, Rows
from headrace.transforms.table.labels import last_of
from headrace.transforms.table.options import nested_key

PEER = "peer_id"
BITS = 62  # bits of an id, as in `number_labels`


def combine_ids(*ids: Tensor) -> Tensor:
    """Hash each tuple of ids to one id. Equal tuples get equal ids in every batch, process and run.

    The hash is the finaliser of SplitMix64 (doi:10.1145/2714064.2660195), applied to one id after another in
    the given order.

    Args:
        ids: (N,) int64 each.

    Returns:
        (N,) int64 ≥ 0; −1 if an id of the tuple is negative, which means missing.

    Example:
        >>> group, role = torch.tensor([7, 7, 7, 8]), torch.tensor([0, 1, 0, 0])
        >>> combine_ids(group, role).unique(return_inverse=True)[1].tolist()
        [1, 0, 1, 2]
    """
    mixed = torch.zeros_like(ids[0])
    for column in ids:
        mixed = mixed + column + -7046029254386353131  # 2^64 divided by the golden ratio, made odd
        # int64 arithmetic wraps around. The mask makes the right shift logical (zero-filled).
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    unset = torch.stack(ids).amin(0) < 0  # a hash would hide that the id is missing
    return ((mixed >> 1) & ((1 << BITS) - 1)).masked_fill(unset, -1)


class CombineIds(BatchTransform):
    """Combine several ids of each row into one id, which later stages use as group id (:func:`combine_ids`).

    With ``keys=["group_id", "role"]`` and ``advantage.group_key="peer_id"`` solvers are compared with the
    solvers of their group, and proposers with the proposers. With ``["episode_id", "role"]`` they are
    compared only within their episode.

    Reads `keys`, which may be text. Writes ``peer_id``.

    Args:
        keys: at least two columns, (N,) or (N, 1) int ≥ 0 or N strings each.

    Raises:
        MissingKeyError: a column is missing.
        BatchError: an id is missing, or two tuples have the same hash.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"group_id": [3, 3, 3], "role": ["solver", "judge", "solver"]}, batch_size=[3])
        >>> peers = CombineIds(keys=["group_id", "role"])(td)["peer_id"]
        >>> (peers[0] == peers[2], peers[0] == peers[1])
        (tensor(True), tensor(False))
    """

    within_groups = True

    def __init__(self, *, keys: Sequence[NestedKey]):
        self.keys = [nested_key(key) for key in keys]
        if isinstance(keys, str) or len(self.keys) < 2:
            raise ValueError(f"keys must be at least two columns; got {keys!r}")
        super().__init__(self.keys, [PEER])

    def _id_keys(self) -> list[NestedKey]:
        return self.keys

    def decide(self, rows: Rows) -> None:
        """Write the combined id."""
        # A plain name such as "turn" could be the role of a column with another key; a tuple is always a key.
        exact = [(key,) if isinstance(key, str) else key for key in self.keys]
        for key in exact:
            if not rows.has(key):
                raise rows.missing(key, "keys")
        columns = [rows.integers(key, str(name)) for key, name in zip(exact, self.keys, strict=True)]
        for key, ids in zip(self.keys, columns, strict=True):
            rows.require_set(ids, last_of(key), "rows without an id would be compared with one another")
        combined = combine_ids(*columns)
        first = Ids(combined)
        same = torch.stack([first.spread(column[first.first]) == column for column in columns]).all(0)
        rows.require(
            same | (combined < 0),
            "two tuples of ids have the same 62-bit hash; change an id of {found}",
            lambda row: f"{tuple(int(column[row]) for column in columns)} at row {rows.at(row)}",
        )
        rows.put((PEER,), combined, dtype=torch.int64, ndim=1, fill=-1)
