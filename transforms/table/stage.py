"""The base class of all stages. A stage decides on the table of a batch and keeps nothing of the batch."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, cast

from tensordict import NestedKey, TensorDictBase

from .alone import Alone, connect
from .columns import DEFAULTS, TakesColumns
from .empty import take_empty_out
from .entry import enter_rows
from .fates import Effect
from .labels import labels_in_errors
from .options import describe_options, nested_key
from .rows import Rows, stages_of_values
from .schema import COUNTED, REWARD
from .tensordicts import shallow_copy
from .torchrl_base import EnvBase, Transform
from .votes import note_votes_only

ID_OPTIONS = {"group_key": "group_id", "rollout_key": "rollout_id"}  # option: name of the ids in messages


class BatchTransform(TakesColumns, Transform):
    """A TorchRL transform over whole batches: TensorDict ``[N]`` in, TensorDict ``[M]`` out, M ≤ N.

    You can use one object on its own, in ``Compose``, as ``Collector(postproc=...)``, as
    ``ReplayBuffer.append_transform(t, invert=True)`` or as a trainer hook. It does not modify its input and
    keeps keys that it does not know. It flattens a collector's ``[envs, time]`` batch first. An empty batch
    is returned unchanged. On the way into a replay buffer an empty result becomes None, so nothing is
    written.

    A subclass takes keyword-only options, stores each once under its own name, and implements one of these
    methods:

    - ``decide(rows)`` decides on the table (:class:`Rows`): it refuses the batch, takes rows out, or writes
      columns;
    - ``apply(batch, rows) -> batch`` also changes token columns, on their device;
    - ``apply(batch) -> batch`` does not use the table. Rows that it does not return are recorded as dropped.

    Outside a pipeline, a stage reads the table, decides, and writes the batch. The first stage that runs on a
    batch excludes empty rollouts, as a pipeline does. A stage stores nothing of the batch on the object, so
    several pipelines and threads can share one transform. A stage that has a state sets ``stateful``.

    Attributes:
        reasons: the reasons for which rows leave at this stage, each with its effect (:data:`Effect`).
        final_keys: columns that no later stage may write, because this stage has already used their values.
        weighed_keys: columns that this stage multiplies by weights. A later stage may not add to them, since
            its terms would have no weight. It may multiply them, or write them after the split.
        before_baseline: this stage takes out rows, so it must be before the stages that compute a baseline.
            Otherwise the rewards of these rows would stay in the baselines.
        after_filters: no stage with a criterion may follow, because this stage has chosen one row to train
            the tokens that several rows share. The criterion might take out that row.
        of_whole_rollouts: ``rewards`` if this stage computes one reward from all rows of a rollout;
            ``places`` if it uses the index of each row in its rollout; empty if it does neither.
        stateful: this stage keeps a state from one batch to the next, which ``state_dict`` saves. TorchRL
            refuses it in a replay buffer that several processes write, because each would have its own copy.
        within_groups: the result for a row depends only on the rows of its group, or of its optimiser step.
            Earlier batches and other groups of the batch do not change it.
    """

    reasons: Mapping[str, Effect] = {}
    final_keys: tuple[NestedKey, ...] = ()
    weighed_keys: tuple[NestedKey, ...] = ()
    before_baseline: bool = False
    after_filters: bool = False
    of_whole_rollouts: Literal["", "rewards", "places"] = ""
    stateful: ClassVar[bool] = False
    within_groups: bool = False
    _kind: ClassVar[str] = "stage"
    _own_of_rank: ClassVar[tuple[str, ...]] = ()  # options that may differ between ranks that share a batch
    _home: int | None = None  # id of the process in which a replay buffer took this transform

    def __init__(self, in_keys: Sequence[NestedKey | None] = (), out_keys: Sequence[NestedKey] = ()):
        reads = [nested_key(key) for key in in_keys if key is not None]
        super().__init__(in_keys=reads, out_keys=[nested_key(key) for key in out_keys])

    # -- what a subclass implements -----------------------------------------------------------------------

    def decide(self, rows: Rows) -> None:
        """Decide on the table: refuse the batch, take rows out, or write columns.

        Args:
            rows: the rows that have not left, with columns under the names that this stage uses.
        """
        raise NotImplementedError

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Transform a flat batch, which is a shallow copy that the stage may change."""
        raise NotImplementedError(f"{type(self).__name__} must define decide(rows), or apply(batch, rows)")

    def apply_to_nothing(self, batch: TensorDictBase) -> None:
        """Handle a batch without rows. Raise if rows were required."""

    def check_ranks(self, process_group: Any) -> None:
        """Refuse a group of ranks that the options do not allow. A pipeline calls this with its group.

        Raises:
            ValueError: an option is wrong for ranks that each hold their own rows.
        """

    def state_after(self, rows: Rows) -> None:
        """Update the state of the stage. Called once all stages have accepted the batch."""

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Token counts that this stage reads: pairs of a loss mask and log-probabilities (or None)."""
        return []

    def __getattr__(self, name: str) -> Any:
        """Name the missing call of ``super().__init__`` instead of a missing `_forward_hooks`."""
        kind = type(self)
        if name.startswith("_") and not name.startswith("__") and "_modules" not in self.__dict__:
            owner = next(each for each in kind.__mro__ if "__init__" in vars(each))
            taken = inspect.signature(super(cast(Any, owner), self).__init__).parameters.values()
            names = "".join(f"**{each.name}" for each in taken if each.kind is each.VAR_KEYWORD)
            raise AttributeError(f"{owner.__name__}.__init__ must call super().__init__({names}) first")
        return super().__getattr__(name)

    # -- how it is run ------------------------------------------------------------------------------------

    def knows_the_table(self) -> bool:
        """Whether this stage implements ``decide(rows)`` or ``apply(batch, rows)``."""
        return type(self).decide is not BatchTransform.decide or _takes_rows(cast(Any, type(self)))

    def work_on(self, rows: Rows) -> None:
        """Run the stage on the rows that it sees: call ``apply(batch, rows)`` or ``decide(rows)``."""
        if _takes_rows(cast(Any, type(self))):
            rows.table.accept(self.apply(rows.tokens(), rows))  # type: ignore[call-arg]
        elif (given := cast(Any, self).decide(rows.only_declared(self))) is not None:
            raise TypeError(
                f"{type(self).__name__}.decide returned a {type(given).__name__}, and must return nothing: "
                "write a column with rows.put(name, values), and take rows out with rows.leave(rows, reason)"
            )

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Read the table, decide, and write the decisions into a new batch.

        Raises:
            TypeError: the input is not a TensorDict.
            BatchError: the stage refuses the batch.
            ProcessedTwiceError: a pipeline has already processed this batch.
        """
        return self._alone(batch)

    def _alone(self, batch: TensorDictBase) -> TensorDictBase:
        ranks = self._own_ranks()
        with labels_in_errors(batch, self._id_keys()), ranks.block():
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

    def _own_ranks(self) -> Alone:
        """The ranks of this transform's `process_group`."""
        named = {getattr(self, option, None): name for option, name in ID_OPTIONS.items()}
        id_keys = {key: name for key, name in named.items() if key is not None}
        group, shared_ids = getattr(self, "process_group", None), getattr(self, "shared_ids", None)
        return connect(group, shared_ids, id_keys=id_keys)

    def read_table(self, batch: TensorDictBase, ranks: Alone) -> Rows | None:
        """Read the table of a batch outside a pipeline; None if no rank has rows."""
        flat, about = self.enter(batch), self.same_on_all_ranks
        keys = [*self.in_keys, DEFAULTS["votes_only"]]
        rows = Rows.read(flat, keys=keys, tokens=self.tokens_counted, ranks=ranks, about=about)
        if not rows.table.size:
            return None
        if DEFAULTS["votes_only"] in rows.table.columns:
            note_votes_only(rows.seen_by(self))
        # The first stage that compares rewards excludes empty rollouts, by the tokens that arrived. It writes
        # COUNTED. So no later stage excludes rollouts whose tokens were masked in between.
        compares = REWARD in self.in_keys or "group" in self._columns
        decides = any(hasattr(own, "empty") for own in stages_of_values(self).values())
        if compares and not decides and rows.table.find(COUNTED) is None:
            take_empty_out(rows.seen_by(self), "exclude")
        return rows

    def enter(self, batch: TensorDictBase) -> TensorDictBase:
        """Check a batch on input, flatten it, and replace text ids by numbers (:func:`number_labels`)."""
        return enter_rows(batch, self._id_keys(), reader=type(self).__name__)

    def _id_keys(self) -> list[NestedKey]:
        """The id columns that this transform reads."""
        keys = [getattr(self, option, None) for option in ("group_key", "rollout_key", "state_key")]
        return [key for key in keys if key is not None]

    def train(self, mode: bool = True) -> BatchTransform:
        """Set the training mode. Replay buffers call this when they take a transform."""
        self._home = os.getpid()
        return super().train(mode)

    def _call(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        # Replay buffers call this when rows are added. They fail on an empty batch; None writes nothing.
        if self._home not in (None, os.getpid()) and multiprocessing.parent_process() is not None:
            # TorchRL checks a worker's copy of the buffer only when the worker samples, so check it here.
            self.share_memory_()
        if batch is None:
            return None
        out = self.forward(batch)
        return out if len(out) else None

    def set_container(self, container: Transform | EnvBase) -> None:
        """Accept a Compose or a replay buffer. Refuse an environment, even one that contains the Compose."""
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
        """Whether this transform or a stage in it is `stateful`. TorchRL defines the name."""
        return any(part.stateful for part in self.modules() if isinstance(part, BatchTransform))

    def share_memory_(self) -> BatchTransform:
        """Refuse a stateful transform in a replay buffer that several processes write. TorchRL calls this.

        Raises:
            TypeError: this transform or a stage in it is `stateful`.
        """
        if self.requires_shared_write_state:
            raise TypeError(
                f"{type(self).__name__} keeps a state from one batch to the next, and each process that "
                "writes to this buffer would have its own copy of the state. Append the first of "
                "pipeline.halves() to the buffer and run the second on sampled batches, or write from one "
                "process"
            )
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def same_on_all_ranks(self) -> str:
        """The stage and its options as text, which must be equal on all ranks that share a batch."""
        options = describe_options(self, leave_out=("process_group", *self._own_of_rank))
        return f"{type(self).__name__}({re.sub(' at 0x[0-9a-f]+', '', options)})"


BELONGS = {  # where each kind of object is put
    "stage": "Put it into the pipeline: load_pipeline(…, stages=dict({name}={given}), after=…)",
    "criterion": "Put it into a filter: SampleFilter(criterion={given}), or on the command line "
    "pipeline.stages.{name}=filter pipeline.stages.{name}.criterion=…",
    "term": "Put it into the stage TokenAdvantage(term={given}), or on the command line "
    "pipeline.stages.{name}=token_advantage pipeline.stages.{name}.term=…",
}


def check_kind(given: Any, kind: Literal["stage", "criterion", "term"], name: str = "mine") -> None:
    """Refuse an object where another kind of object is required. It would fail at the first batch.

    Args:
        given: an object of a user, also of a class without a base class.
        kind: the required kind.
        name: name of the stage.

    Raises:
        ValueError: the object is of another kind, or a class.
    """
    if isinstance(given, type):
        raise ValueError(f"a {kind} is an object; got the class {given.__name__}: give {given.__name__}()")
    own = getattr(given, "_kind", "criterion" if hasattr(given, "decide") else kind)
    if own != kind:
        place = BELONGS[own].format(name=name, given=given)
        raise ValueError(f"{given!r:.200} is a {own}, and a {kind} is required. {place}")


@cache
def _takes_rows(kind: type) -> bool:
    """Whether stages of this class implement ``apply(batch, rows) -> batch``."""
    return len(inspect.signature(kind.apply).parameters) == 3  # type: ignore[attr-defined]
