"""A batch that can be written to while its original is left alone."""

from __future__ import annotations

from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase


def shallow_copy(batch: TensorDictBase) -> TensorDictBase:
    """The same columns in another TensorDict, nested ones too. Nothing is copied but the references.

    ``td.clone(recurse=False)`` does the same, but visits every single string: 8,192 rows with two texts take
    it a quarter of a second.

    Example:
        >>> import torch
        >>> td = TensorDict({"next": {"reward": torch.zeros(2)}}, batch_size=[2])
        >>> copy = shallow_copy(td)
        >>> copy["next", "done"] = torch.ones(2)
        >>> ("next", "done") in td.keys(True), copy["next", "reward"] is td["next", "reward"]
        (False, True)
    """
    if type(batch) is not TensorDict:
        return batch.clone(recurse=False)
    columns = {}
    for key in batch.keys():
        value = batch.get(key)
        own = isinstance(value, TensorDictBase) and not isinstance(value, NonTensorData | NonTensorStack)
        columns[key] = shallow_copy(value) if own else value
    names = batch.names if batch._has_names() else None
    return TensorDict(columns, batch_size=batch.batch_size, device=batch.device, names=names)
