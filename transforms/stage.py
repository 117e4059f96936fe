"""The contract of every stage: it decides on the table, and keeps nothing of a batch."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal, cast

from tensordict import NestedKey, TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from .columns import TakesColumns
from .distributed import Ranks, resolve_group, sharing
from .entry import enter_rows, labels_in_errors
from .options import describe_options, nested_key
from .rows import Rows
from .table import Effect
from .tensordicts import shallow_copy

ID_OPTIONS = {"group_key": "group_id", "rollout_key": "rollout_id"}  # and what messages call the ids


class BatchTransform(TakesColumns, Transform):
    """A TorchRL transform over whole batches: TensorDict ``[N]`` in, TensorDict ``[M]`` out, M ≤ N.

    One object works standalone, in ``Compose``, as ``Collector(postproc=...)``, as
    ``ReplayBuffer.append_transform(t, invert=True)`` and as a trainer hook. It leaves its input alone,
    keeps keys that it does not know, and flattens a collector's ``[envs, time]`` first. An empty batch
    comes back as it is. On the way into a replay buffer an empty result is None, which writes nothing.

    A subclass takes keyword-only options, keeps each under its own name, and implements one of three methods:

    - ``decide(rows)`` decides on the table (:class:`Rows`): it refuses rows, takes rows out, writes columns;
    - ``apply(batch, rows) -> batch`` also changes columns of tokens, on their device;
    - ``apply(batch) -> batch`` knows nothing of the table: rows that do not come out are recorded as gone.

    Alone, a stage reads the table, decides, and writes the batch. Nothing of a batch stays on the object, so
    that one transform may serve several pipelines and threads; those that have a state declare it.

    Attributes:
        reasons: why rows leave here.
        effects: what becomes of those rows, by reason; empty: they are dropped.
        final_keys: columns that no later stage may write: it would have no effect on what was made here.
        weighed_keys: columns that it multiplies by weights: what a later stage added to one would not be
            weighed, so only those may write it that multiply it themselves, or stand behind the cut.
        before_baseline: it takes out rows whose reward would be left in the baselines of earlier stages.
        of_whole_rollouts: what it makes of all rows of a rollout: one of their ``rewards``, or their
            ``places`` among them; empty: nothing.
        stateful: it remembers something from one batch to the next, which ``state_dict`` saves. TorchRL then
            refuses it in a replay buffer that several processes write, each with a copy of its own.
        within_groups: what it makes of a row follows from the rows of its group, or of its optimiser step,
            alone: groups of one batch come out as each would by itself, whatever batches were before.
    """

    reasons: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    final_keys: tuple[NestedKey, ...] = ()
    weighed_keys: tuple[NestedKey, ...] = ()
    before_baseline: bool = False
    of_whole_rollouts: Literal["", "rewards", "places"] = ""
    stateful: ClassVar[bool] = False
    within_groups: bool = False
    _own_of_rank: ClassVar[tuple[str, ...]] = ()  # options that may differ on ranks that share a batch
    _home: int | None = None  # the process in which a replay buffer took it

    def __init__(self, in_keys: Sequence[NestedKey | None] = (), out_keys: Sequence[NestedKey] = ()):
        reads = [nested_key(key) for key in in_keys if key is not None]
        super().__init__(in_keys=reads, out_keys=[nested_key(key) for key in out_keys])

    # -- what a subclass implements -----------------------------------------------------------------------

    def decide(self, rows: Rows) -> None:
        """Decide on the table: refuse rows, take rows out, write columns.

        Args:
            rows: those that are here, with the columns by the names of this stage.
        """
        raise NotImplementedError

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Transform a flat batch that is the transform's own shallow copy; see the class."""
        raise NotImplementedError

    def apply_to_nothing(self, batch: TensorDictBase) -> None:
        """What a batch without rows means: nothing, unless rows were to come."""

    def state_after(self, rows: Rows) -> None:
        """Take the batch in, where the stage has a state: nobody has refused the batch."""

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Pairs of a loss mask and log-probabilities (or None) whose tokens it asks for."""
        return []

    def needs_each_rank(self) -> str:
        """Why it takes part on each rank that shares a batch, in words; empty: one can decide for all."""
        if not type(self).__module__.startswith("headrace.transforms."):
            return "code of your own"
        if type(self).decide is BatchTransform.decide:
            return "it reads tokens"
        return "it remembers rollouts of all ranks" if self.stateful else ""

    # -- how it is run ------------------------------------------------------------------------------------

    def knows_the_table(self) -> bool:
        """Whether it decides on the table, and does not ask for a batch alone."""
        return type(self).decide is not BatchTransform.decide or _takes_rows(cast(Any, type(self)))

    def work_on(self, rows: Rows) -> None:
        """Decide, or change tokens; `rows` are those that it sees."""
        if _takes_rows(cast(Any, type(self))):
            rows.accept(self.apply(rows.tokens(), rows))  # type: ignore[call-arg]
        else:
            self.decide(rows)

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Read the table, decide, and write what was decided.

        Raises:
            TypeError: the input is no TensorDict.
            BatchError: the stage refuses the batch.
            ProcessedTwiceError: a pipeline has been over this batch.
        """
        return self._alone(batch)

    def _alone(self, batch: TensorDictBase) -> TensorDictBase:
        ranks = self._own_ranks()
        with labels_in_errors(batch, self._id_keys()), sharing(ranks):
            if not self.knows_the_table():
                flat = self.enter(batch)
                return self.apply(shallow_copy(flat)) if flat.shape.numel() else batch
            rows = self.read_table(batch, ranks)
            if rows is None:
                self.apply_to_nothing(batch)
                return batch
            self.work_on(rows.seen_by(self))
            out = rows.seen_by(self).write()
        self.state_after(rows)
        return out

    def _own_ranks(self) -> Ranks | None:
        """The ranks of the transform's own `process_group`."""
        group = resolve_group(getattr(self, "process_group", None))
        return None if group is None else Ranks(group, getattr(self, "shared_ids", None))

    def read_table(self, batch: TensorDictBase, ranks: Ranks | None) -> Rows | None:
        """The table of a batch that comes to this transform alone; None where nobody has rows."""
        flat, about = self.enter(batch), ""
        if ranks is not None:
            named = [(getattr(self, option, None), name) for option, name in ID_OPTIONS.items()]
            ranks.id_keys = {key: name for key, name in named if key is not None}
            about = self.same_on_all_ranks()
        elif flat.shape.numel() == 0:
            return None
        rows = Rows.read(flat, keys=self.in_keys, tokens=self.tokens_counted, ranks=ranks, about=about)
        return rows if rows.table.size else None

    def enter(self, batch: TensorDictBase) -> TensorDictBase:
        """Check a batch on input, flatten it, and number ids that are text (:func:`number_labels`)."""
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
        options = describe_options(self, leave_out=("process_group", *self._own_of_rank))
        return f"{type(self).__name__}({re.sub(' at 0x[0-9a-f]+', '', options)})"


@cache
def _takes_rows(kind: type) -> bool:
    """Whether stages of this class change columns of tokens: ``apply(batch, rows) -> batch``."""
    return len(inspect.signature(kind.apply).parameters) == 3  # type: ignore[attr-defined]
