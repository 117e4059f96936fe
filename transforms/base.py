"""The contract that every transform keeps."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from .columns import PROCESSED
from .errors import BatchError, MissingKeyError, ProcessedTwiceError, listing
from .shallow import shallow_copy


class BatchTransform(Transform):
    """A TorchRL transform over whole batches: TensorDict ``[N]`` in, TensorDict ``[M]`` out, M ≤ N.

    One object works standalone, in ``Compose``, as ``Collector(postproc=...)``, as
    ``ReplayBuffer.append_transform(t, invert=True)`` and as a trainer hook. It leaves its input alone,
    keeps keys that it does not know, and flattens a collector's ``[envs, time]`` first. An empty batch
    comes back as it is. On the way into a replay buffer an empty result is None, which writes nothing.

    Subclasses implement :meth:`apply`, take keyword-only options and keep each under its own name.

    Attributes:
        final_keys: columns that no later stage may write: it would have no effect on what was made here.
        reasons: why rows leave the training here; the verdict ``k`` of a row means ``reasons[k - 1]``.
        verdict: (N,) int8 for the last batch, 0 for rows that stay in the loss; None if nobody can leave.
        metrics: numbers of the last batch. Tensors until somebody reads them.
    """

    reasons: tuple[str, ...] = ()
    final_keys: tuple[NestedKey, ...] = ()

    def __init__(self, in_keys: Sequence[NestedKey] = (), out_keys: Sequence[NestedKey] = ()):
        super().__init__(in_keys=list(in_keys), out_keys=list(out_keys))
        self.verdict: Tensor | None = None
        self.measured: dict[str, Tensor | float] = {}

    @abstractmethod
    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Transform a flat batch of at least one row that is the transform's own shallow copy."""

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Run over a whole batch.

        Raises:
            TypeError: the input is no TensorDict.
            BatchError: the batch has no row dimension, or the data are wrong.
            ProcessedTwiceError: a pipeline has been over this batch.
        """
        flat = self.enter(batch)
        return batch if flat is None else self.apply(flat)

    def enter(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Check a batch at the door: its flat shallow copy, or None if it has no rows."""
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"{type(self).__name__} takes a TensorDict of rows, got {type(batch).__name__}")
        if batch.batch_dims == 0:
            raise BatchError(
                f"{type(self).__name__} takes a batch of rows, got a TensorDict of batch size []"
            )
        self.verdict, self.measured = None, {}
        if batch.shape.numel() == 0:
            return None
        if has_key(batch, PROCESSED):
            raise ProcessedTwiceError(
                f"{type(self).__name__} got {batch.shape.numel()} rows a pipeline has processed already; "
                "filters and statistics must see rollouts once: attach the pipeline at one place, and put "
                "what else there is to do into its stages"
            )
        flat = batch.reshape(-1) if batch.batch_dims > 1 else batch
        return shallow_copy(flat)

    def _call(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        # Replay buffers call this on the way in; they fail on an empty batch and write nothing for None.
        if batch is None:
            return None
        out = self.forward(batch)
        return out if len(out) else None

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the last batch; reading them is one device read."""
        return read_numbers(self.measured)

    def set_container(self, container: Transform | EnvBase) -> None:
        """Accept a Compose or a replay buffer; refuse an environment, also around a Compose."""
        super().set_container(container)
        outermost = container
        while (
            isinstance(outermost, Transform) and (outer := outermost.__dict__.get("_container")) is not None
        ):
            outermost = outer()
        if isinstance(outermost, EnvBase):
            raise TypeError(
                f"{type(self).__name__} works on whole batches, not on an environment's steps: pass it as "
                "Collector(postproc=...), replay_buffer.append_transform(..., invert=True) or a trainer hook"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    # -- what subclasses read with ------------------------------------------------------------------

    def column(self, batch: TensorDictBase, option: str) -> Tensor:
        """Read the per-row column whose key is the option `option`, flattened to (N,).

        Raises:
            MissingKeyError: it is not there; the message lists the keys that are.
            BatchError: it holds more than one number a row.
        """
        return read_column(batch, getattr(self, option), reader=type(self).__name__, option=option)


def read_column(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Tensor:
    """Read one number a row: (N,), (N, 1) or (N, 1, 1) comes back as (N,)."""
    value = require(batch, key, reader=reader, option=option)
    if not isinstance(value, Tensor) or value.numel() != len(batch):
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise BatchError(
            f"{reader} needs one number a row in {key!r} ({option}), for {len(batch)} rows; found {found}"
        )
    return value.reshape(-1)


def written_column(batch: TensorDictBase, key: NestedKey, *, reader: str, writer: str) -> Tensor:
    """Read a column that an earlier stage writes.

    Raises:
        MissingKeyError: it did not.
        BatchError: it holds more than one number a row.
    """
    if not has_key(batch, key):
        raise MissingKeyError(
            f"{reader} needs the column {key!r}, written by {writer}: put {writer} before it"
        )
    return read_column(batch, key, reader=reader, option=f"written by {writer}")


def require(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Any:
    """What is under a key.

    Raises:
        MissingKeyError: nothing; the message lists the keys that are there and the option that renames it.
    """
    value = batch.get(key, None) if has_key(batch, key) else None
    if value is None:
        raise MissingKeyError(
            f"{reader} needs the key {key!r} ({option}); the batch has {key_names(batch)}. "
            f"If it goes by another name, set {option}"
        )
    return value


def read_numbers(measured: dict[str, Tensor | float]) -> dict[str, float]:
    """Turn scalars, on whatever device, into Python floats with one read."""
    tensors = {name: value for name, value in measured.items() if isinstance(value, Tensor)}
    read = torch.stack([t.detach().double() for t in tensors.values()]).tolist() if tensors else []
    numbers = dict(zip(tensors, read, strict=True))
    return {name: numbers[name] if name in numbers else float(value) for name, value in measured.items()}


def has_key(batch: TensorDictBase, key: NestedKey) -> bool:
    """Whether the batch has this column, dense or ragged.

    Raises:
        BatchError: some rows of a lazy stack have it and some have not.
    """
    nested = isinstance(key, tuple)
    if key in batch.keys(include_nested=nested):
        return True
    if isinstance(batch, LazyStackedTensorDict):
        rows = [i for i, td in enumerate(batch.tensordicts) if key in td.keys(include_nested=nested)]
        if rows:
            raise BatchError(
                f"a column is on every row or on none; {key!r} is on {len(rows)} of {len(batch)} rows: "
                f"{listing(map(str, rows))}"
            )
    return False


def key_names(batch: TensorDictBase) -> list[NestedKey]:
    """The leaves of a batch, in a stable order, without our own."""
    keys = batch.keys(include_nested=True, leaves_only=True)
    return sorted((k for k in keys if not (isinstance(k, tuple) and k[0] == "headrace")), key=str)


def nested_key(key: Any) -> Any:
    """A key from YAML by TorchRL's convention: ``[next, reward]`` is ``("next", "reward")``."""
    if key is None or isinstance(key, str):
        return key
    key = tuple(key)
    return key[0] if len(key) == 1 else key


def as_dtype(dtype: Any) -> torch.dtype | None:
    """A floating-point dtype, also by its name, as YAML has it.

    Raises:
        ValueError: it is none.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype of torch; got {dtype!r}")
    if dtype is not None and found is None:
        raise ValueError(f"dtype must be a floating-point dtype of torch; got {dtype!r}")
    return found


def one_of(option: str, value: Any, allowed: Sequence[Any]) -> Any:
    """Check a literal option at construction."""
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def describe_options(thing: Any) -> str:
    """The options of a transform or criterion that are not at their defaults, as they were given."""
    parameters = inspect.signature(type(thing).__init__).parameters.values()
    given = [(p.name, getattr(thing, p.name)) for p in parameters if hasattr(thing, p.name)]
    default = {p.name: p.default for p in parameters}
    return ", ".join(f"{name}={value!r}" for name, value in given if _differ(value, default[name]))


def _differ(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except (TypeError, ValueError, RuntimeError):  # an array compares element by element
        return True


def at_least(option: str, value: Any, low: int) -> Any:
    """Check a count at construction; None passes."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
        raise ValueError(f"{option} must be an integer ≥ {low}; got {value!r}")
    return value
