"""The contract of every transform: a whole batch in, an :class:`Outcome` out, nothing kept."""

from __future__ import annotations

import multiprocessing
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from .checks import Rule, enforce
from .distributed import Ranks, present_ranks, resolve_group, sharing
from .door import enter_rows, labels_in_errors
from .ids import as_ids
from .options import describe_options, nested_key
from .rows import device_of, shallow_copy
from .schema import DONE, EXPECTED_SEGMENTS, FINISHED, has_key, read_column, read_flags
from .tokens import lengths, masked_tokens

Effect = Literal["masked", "excluded", "dropped", "carried"]
"""What becomes of a row that leaves: out of the loss, out of the statistics too, gone, or kept for later."""


class Outcome(NamedTuple):
    """What one run of a transform knows."""

    batch: TensorDictBase
    """What comes out, TensorDict ``[M]``."""
    verdict: Tensor | None = None
    """(N,) int8 for the rows that came in: 0 stays, k leaves for the transform's ``reasons[k - 1]``."""
    measured: Mapping[str, Tensor | float] = MappingProxyType({})
    """Numbers by name; tensors until somebody reads them (:func:`read_numbers`)."""
    rules: Sequence[Rule] = ()
    """What must hold of the rows that came in. Not read yet: where one is broken, `batch` means nothing."""
    remember: Callable[[], None] | None = None
    """Makes a stage remember the batch: to be called where nobody has refused it."""
    into: Tensor | None = None
    """(N,) int64, where rows are merged, the one whose tokens theirs became; itself where a row stays."""

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured, as floats. One device read."""
        return read_numbers(self.measured)


class BatchTransform(Transform):
    """A TorchRL transform over whole batches: TensorDict ``[N]`` in, TensorDict ``[M]`` out, M ≤ N.

    One object works standalone, in ``Compose``, as ``Collector(postproc=...)``, as
    ``ReplayBuffer.append_transform(t, invert=True)`` and as a trainer hook. It leaves its input alone,
    keeps keys that it does not know, and flattens a collector's ``[envs, time]`` first. An empty batch
    comes back as it is. On the way into a replay buffer an empty result is None, which writes nothing.

    A call is :meth:`run`, a look at the rules, and ``outcome.remember`` where there is one and nobody has
    refused the batch. Nothing of a batch stays on the object, so that one transform may serve several
    pipelines and threads; those that have a state declare it (`stateful`).

    Subclasses implement :meth:`apply`, take keyword-only options, keep each under its own name, and declare
    what they are for others:

    Attributes:
        reasons: why rows leave the training here; the verdict ``k`` of a row means ``reasons[k - 1]``.
        effects: what becomes of those rows, by reason; empty: they are dropped.
        final_keys: columns that no later stage may write: it would have no effect on what was made here.
        weighed_keys: columns that it multiplies by weights: what a later stage added to one would not be
            weighed, so only those may write it that multiply it themselves, or stand behind the cut.
        before_baseline: it takes out rows whose reward would be left in the baselines of a stage in front of
            it that `compares`.
        keeps_rows: the rows that come out are those that came in, in their order.
        cuts: it cuts the batch into optimiser steps (``draw``), and what comes after it reads the cut.
        compares: it measures rewards against those of their group (``advantage_by_row``).
        among_others: what it makes of a reward follows from those of others, as a baseline does.
        of_whole_rollouts: what it makes of all rows of a rollout: one of their ``rewards``, or their
            ``places`` among them; empty: nothing.
        takes_rows: how it takes single rows out of rollouts, ``drop`` or ``exclude``; empty: it does not.
        gates: its `group_size` is the number of rollouts that each group was dispatched with.
        stateful: it remembers something from one batch to the next, which ``state_dict`` saves. TorchRL then
            refuses it in a replay buffer that several processes write, each with a copy of its own.
        spans_ranks: what it measures over rows is of a :class:`Population`. Where ranks share a batch it runs
            on all of them, also on one that has no rows.
        within_groups: what it makes of a row follows from the rows of its group, or of its optimiser step,
            alone: groups of one batch come out as each would by itself, whatever batches were before.
        own_of_rank: options that may differ on ranks that share a batch.
        silences: the columns in which it silences rows that are out of the loss, as it gathers them.
        asks_in_loss: it takes no row for trained that ``("headrace", "in_loss")`` says is not. In front of
            other stages a pipeline silences rows at once, else in the memory into which it gathers them.
    """

    reasons: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    final_keys: tuple[NestedKey, ...] = ()
    weighed_keys: tuple[NestedKey, ...] = ()
    before_baseline: bool = False
    keeps_rows: ClassVar[bool] = False
    cuts: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    among_others: ClassVar[bool] = False
    of_whole_rollouts: Literal["", "rewards", "places"] = ""
    takes_rows: Literal["", "drop", "exclude"] = ""
    gates: ClassVar[bool] = False
    stateful: ClassVar[bool] = False
    spans_ranks: ClassVar[bool] = False
    within_groups: bool = False
    own_of_rank: ClassVar[tuple[str, ...]] = ()
    silences: Collection[NestedKey] = ()
    asks_in_loss: bool = False
    _home: int | None = None  # the process in which a replay buffer took it

    def __init__(self, in_keys: Sequence[NestedKey | None] = (), out_keys: Sequence[NestedKey] = ()):
        reads = [nested_key(key) for key in in_keys if key is not None]
        super().__init__(in_keys=reads, out_keys=[nested_key(key) for key in out_keys])

    @property
    def shows_batch(self) -> bool:
        """Whether a hook sees the batch: a pipeline reads all rules before."""
        return getattr(self, "on_batch", None) is not None

    @abstractmethod
    def apply(self, batch: TensorDictBase) -> TensorDictBase | Outcome:
        """Transform a flat batch that is the transform's own shallow copy.

        It has at least one row, but for a stage that `spans_ranks`.

        Returns:
            The batch that comes out, or where more is known an :class:`Outcome`.
        """

    def requires(self, batch: TensorDictBase) -> Sequence[Rule]:
        """What must hold of the rows that come in, whatever is made of them.

        A pipeline asks a stage behind the one that cuts before it reads what it needs for the cut, so that a
        batch is read once.
        """
        return ()

    def apply_to_nothing(self, batch: TensorDictBase) -> None:
        """What a batch without rows means: nothing, unless rows were to come."""

    def run(self, batch: TensorDictBase, *, asked: bool = False) -> Outcome:
        """Run over a whole batch; what comes out is for the caller to :func:`enforce` and ``remember``.

        Args:
            batch: TensorDict ``[N]``, or ``[envs, time]``.
            asked: what it :meth:`requires` is known to the caller, and not among the rules.

        Raises:
            TypeError: the input is no TensorDict.
            BatchError: the batch has no row dimension; what keeps the transform from running at all.
            ProcessedTwiceError: a pipeline has been over this batch.
        """
        ranks = self._own_ranks()
        with sharing(ranks):
            flat: TensorDictBase | None = self.enter(batch)
            if ranks is not None:
                flat = ranks.admit(flat, self.same_on_all_ranks())
            if flat is None or (present_ranks() is None and flat.shape.numel() == 0):
                self.apply_to_nothing(batch)
                return Outcome(batch)
            required = () if asked else self.requires(flat)
            done = self.apply(shallow_copy(flat))
            outcome = done if isinstance(done, Outcome) else Outcome(done)
            outcome = outcome._replace(rules=[*required, *outcome.rules])
            if ranks is not None:
                enforce(outcome.rules)  # here, while the others can still raise with it
                outcome = outcome._replace(rules=())
            return outcome

    def _own_ranks(self) -> Ranks | None:
        """The ranks of the transform's own `process_group`, where it does not run within a pipeline."""
        group = resolve_group(getattr(self, "process_group", None))
        if group is None or present_ranks() is not None:
            return None
        return Ranks(group, getattr(self, "shared_ids", None))

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Run over a whole batch, and read the rules.

        Raises:
            BatchError: a rule is broken; as :meth:`run`.
        """
        with labels_in_errors(batch, self._id_keys()):
            outcome = self.run(batch)
            enforce(outcome.rules)
        if outcome.remember is not None:
            outcome.remember()
        return outcome.batch

    def enter(self, batch: TensorDictBase) -> TensorDictBase:
        """Check a batch at the door, flatten it, and number ids that are text (:func:`number_labels`)."""
        return enter_rows(batch, self._id_keys(), reader=type(self).__name__)

    def _id_keys(self) -> list[NestedKey]:
        """The columns of ids that this transform reads."""
        keys = [getattr(self, option, None) for option in ("group_key", "rollout_key", "state_key")]
        return [key for key in keys if key is not None]

    def train(self, mode: bool = True) -> BatchTransform:
        """As every module; replay buffers call it when they take a transform."""
        self._home = os.getpid()
        return super().train(mode)

    def _call(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        # Replay buffers call this on the way in; they fail on an empty batch and write nothing for None.
        if self._home not in (None, os.getpid()) and multiprocessing.parent_process() is not None:
            self.share_memory_()  # of a worker's copy of the buffer, which TorchRL asks on the way out alone
        if batch is None:
            return None
        out = self.forward(batch)
        return out if len(out) else None

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

    @property
    def requires_shared_write_state(self) -> bool:
        """Whether it is `stateful`, or a stage of it is: in TorchRL's words."""
        return any(part.stateful for part in self.modules() if isinstance(part, BatchTransform))

    def share_memory_(self) -> BatchTransform:
        """What TorchRL asks of the transforms of a replay buffer that several processes write.

        Raises:
            TypeError: it is `stateful`, or a stage of it is.
        """
        if self.requires_shared_write_state:
            raise TypeError(
                f"{type(self).__name__} remembers something from one batch to the next, and each process "
                "that writes to this buffer would have a copy of its own. Append the first of "
                "pipeline.halves(), and give the second what is sampled; or let one process write"
            )
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def same_on_all_ranks(self) -> str:
        """What must be the same on all ranks that share a batch, in words."""
        options = describe_options(self, leave_out=("process_group", *self.own_of_rank))
        return f"{type(self).__name__}({re.sub(' at 0x[0-9a-f]+', '', options)})"

    # -- what subclasses read with ------------------------------------------------------------------

    def column(self, batch: TensorDictBase, option: str) -> Tensor:
        """Read the per-row column whose key is the option `option`, flattened to (N,).

        Raises:
            MissingKeyError: it is not there; the message lists the keys that are.
            BatchError: it holds more than one number a row.
        """
        key = nested_key(getattr(self, option))
        return read_column(batch, key, reader=type(self).__name__, option=option)

    def ids(self, batch: TensorDictBase, unit: str) -> Tensor:
        """Read the (N,) int64 ids of a ``rollout`` or ``group``, by `rollout_key` or `group_key`.

        Where that key is None, each row is one: the ids are the row numbers.

        Raises:
            MissingKeyError: they are not there.
            BatchError: they are no integers, or not one a row.
        """
        if getattr(self, f"{unit}_key") is None:
            ranks = present_ranks()
            start = 0 if ranks is None else ranks.rank << 40  # rows of other ranks are others
            return torch.arange(start, start + len(batch), device=device_of(batch))
        return as_ids(self.column(batch, f"{unit}_key"), f"{unit}_id")

    def unseen_ends(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Where rollouts end, for `end_rules`, if ``("next", "done")`` is there and no gate has looked."""
        if not has_key(batch, DONE) or has_key(batch, FINISHED):
            return {}
        name = type(self).__name__
        ends = {"done": read_flags(batch, DONE, reader=name, option="where rollouts end")}
        if has_key(batch, EXPECTED_SEGMENTS):
            number = read_column(batch, EXPECTED_SEGMENTS, reader=name, option="how many segments end")
            ends["expected"] = as_ids(number, EXPECTED_SEGMENTS)
        return ends

    def tokens(self, batch: TensorDictBase, option: str = "loss_mask_key") -> Tensor:
        """Count, per row, the tokens in the mask whose key is the option `option`; (N,) int64.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it is not bool.
        """
        return masked_tokens(batch, getattr(self, option), reader=type(self).__name__, option=option)

    def lengths(self, batch: TensorDictBase) -> Tensor:
        """Count, per row, the tokens in `loss_mask_key`, of silenced rows those they had; (N,) int64.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it is not bool.
        """
        return lengths(batch, self.loss_mask_key, reader=type(self).__name__, option="loss_mask_key")


def read_numbers(measured: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Turn scalars, on whatever device, into Python floats with one read.

    Example:
        >>> read_numbers({"kept": torch.tensor(3), "share": 0.5})
        {'kept': 3.0, 'share': 0.5}
    """
    tensors = {name: value for name, value in measured.items() if isinstance(value, Tensor)}
    read = torch.stack([t.detach().double() for t in tensors.values()]).tolist() if tensors else []
    numbers = dict(zip(tensors, read, strict=True))
    return {name: numbers[name] if name in numbers else float(value) for name, value in measured.items()}
