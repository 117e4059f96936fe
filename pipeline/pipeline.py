"""Named stages, run in order, each row accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import nn

from headrace.transforms.base import BatchTransform
from headrace.transforms.distributed import SharedIds, sharing
from headrace.transforms.door import labels_in_errors
from headrace.transforms.once import asking_once
from headrace.transforms.options import nested_key
from headrace.transforms.rows import shallow_copy

from .accounting.account import Account
from .accounting.keys import Keys
from .accounting.last_run import LastRun
from .accounting.row_table import KEYS
from .chain.halves import Half, check_half, check_place, cut_in_two
from .chain.order import arrange, check_order
from .chain.rank_options import RankOptions
from .chain.rules import Deferred, Validate, check_validate
from .chain.stage import as_module
from .logs import log_batch, logging_refusals
from .notebook import StageListing
from .passage import Passage, run_empty
from .run import Run


class Pipeline(StageListing, LastRun, BatchTransform):
    """Run named stages in order over a batch, and record where each row went.

    A pipeline is a transform like its stages and goes wherever they go. It stamps what it has processed:
    a second pipeline, or a second pass, raises instead of filtering twice. Every input row is trained or
    has exactly one recorded reason why not.

    :meth:`run` returns what became of a batch; a call and :meth:`minibatches` return its rows.
    :attr:`metrics`, :attr:`ledger` and :meth:`report` are those of the calling thread's last run, or where
    it has had none, of the last of any thread.

    Reads what its stages read, and `loss_mask_key` if it is there; writes what they write, and
    ``("headrace", "row")`` and ``("headrace", "processed")``. One device read of its own, for what all
    stages require of their rows.

    Args:
        stages: transforms or callables from batch to batch, by name. One that is None is left out.
        order: names of all stages, where the mapping's order is not the order of execution.
        loss_mask_key: (N, T) bool; a row without a True in it has nothing to train, and is recorded so.
        log_prob_key: (N, T) float, which the loss reads; a token of which it is not finite is out of it.
            None: not looked at.
        group_key: (N,) or (N, 1) int, for counting groups.
        rollout_key: (N,) or (N, 1) int, for counting rollouts; None: they are not counted.
        report_keys: where the report finds ``reward``, ``status``, ``policy_version``, ``expected_rollouts``,
            ``advantage``, ``loss_weight``, ``prompt`` and ``response``, where they go by other names than
            the usual ones.
        process_group: a group, or ``world``, of ranks with rows of their own of one batch: all stages measure
            over those of all ranks, as one process would. Each runs every batch, also without rows.
        shared_ids: an id that several ranks have is the ``same`` rollout or group there, or ``different``
            ones, or must not be: ``raise``. None: as LossWeight says, else ``raise``.
        patience: seconds that ranks wait for one another; an error on one is raised on all.
        validate: ``at_once``: no row of a batch that breaks a rule is handed out; ``deferred``: rules are
            read when the next batch comes, or by :meth:`check`, after somebody may have trained on it.

    Raises:
        ValueError: at construction, an order that cannot work, with the two stages' names.
        BatchError: a stage refused a batch; of the class that the stage raised, with its name and options.
        StageError: a stage failed otherwise.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import FanOutCollapse, GroupRelativeAdvantage
        >>> advantage = GroupRelativeAdvantage(scale="none")
        >>> pipeline = Pipeline({"collapse": FanOutCollapse(), "advantage": advantage})
        >>> td = TensorDict(
        ...     {"rollout_id": [0, 1, 1], "group_id": [0, 0, 0], ("next", "reward"): [1.0, 3.0, 3.0]},
        ...     batch_size=[3],
        ... )
        >>> pipeline(td)["advantage"].flatten().tolist(), pipeline.metrics["rollouts/trained"]
        ([-1.0, 1.0, 1.0], 2.0)
    """

    def __init__(
        self,
        stages: Mapping[str, Callable[[TensorDictBase], TensorDictBase] | None],
        *,
        order: Sequence[str] | None = None,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        report_keys: Mapping[str, NestedKey] | None = None,
        process_group: dist.ProcessGroup | str | None = None,
        shared_ids: SharedIds | None = None,
        patience: float = 600.0,
        validate: Validate = "at_once",
    ):
        BatchTransform.__init__(self)
        arranged = arrange(stages, order)
        for name, stage in arranged.items():
            if not callable(stage):
                raise ValueError(f"stage {name!r} must be a transform or a callable; got {stage!r}")
            if isinstance(stage, Pipeline):
                raise ValueError(f"stage {name!r} is a pipeline: put its stages into this one instead")
        check_order(arranged)
        self.rank_options = RankOptions.of(arranged.values(), process_group, shared_ids, patience)
        self.validate = check_validate(validate, self.rank_options.process_group)
        self.stages = nn.ModuleDict({name: as_module(stage) for name, stage in arranged.items()})
        self.order = list(arranged)
        self.loss_mask_key, self.log_prob_key = nested_key(loss_mask_key), nested_key(log_prob_key)
        self.group_key, self.rollout_key = nested_key(group_key), nested_key(rollout_key)
        self.report_keys = dict(report_keys or {})
        if unknown := sorted(set(self.report_keys) - set(KEYS)):
            raise ValueError(f"report_keys must be among {', '.join(KEYS)}; got {', '.join(unknown)}")
        ids = {"rollouts": self.rollout_key, "groups": self.group_key}
        self._keys = Keys.of(arranged.values(), self.loss_mask_key, self.log_prob_key, ids, self.report_keys)
        self._half: Half | None = None  # the whole
        self._unread = Deferred()
        LastRun.__init__(self)

    def run(  # type: ignore[override]  # a Run has more to tell than an Outcome
        self, batch: TensorDictBase, epochs: int = 1
    ) -> Run:
        """Run all stages over a batch.

        The stages before the split run once. With several epochs the split draws an order for each, and the
        stages after it, which weigh the rows of a step, run for each.

        Args:
            batch: TensorDict, as collected.
            epochs: passes over the rows, ≥ 1.

        Returns:
            What became of it. Rows are gathered when its batch or minibatches are asked for.

        Raises:
            ValueError: `epochs` < 1.
            BatchError: a stage refused the batch; of the class that the stage raised, with its name.
            StageError: a stage failed otherwise.
        """
        return self._run(batch, epochs, whole=False)

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Rows in training order, all minibatches in one batch; see :meth:`run`."""
        return self._run(batch, 1, whole=True).batch

    apply = forward

    def minibatches(self, batch: TensorDictBase, *, epochs: int = 1) -> Iterator[TensorDictBase]:
        """Run all stages, now, and return the minibatches, which are gathered one at a time.

        Without a ShuffleSplit the whole batch is the one minibatch. A batch from which nothing is left has
        none. See :meth:`run` and :meth:`Run.minibatches`.
        """
        return self.run(batch, epochs=epochs).minibatches()

    def check(self) -> None:
        """Under ``validate="deferred"``, read what batches until now had to keep to. One device read each.

        Raises:
            BatchError: one did not; as :meth:`run`, but late: its rows are handed out.
        """
        with logging_refusals():
            self._unread.read(self._id_keys())

    @property
    def weighs(self) -> bool:
        """Whether a stage writes weights for the loss; else they are folded in, or there are none."""
        return self._keys.weight_is_written(dict(self.stages.items()))

    def halves(self) -> tuple[Pipeline, Pipeline]:
        """The stages before the split, for what comes into a replay buffer, and the others, for a sample.

        ``buffer.append_transform(first, invert=True)`` and ``second.minibatches(buffer.sample())``: weights
        belong to an optimiser step, which is not known before rows are sampled.

        Raises:
            ValueError: no stage cuts the batch.
        """
        return cut_in_two(self)

    @property
    def is_second_half(self) -> bool:
        """Whether it is the second of :meth:`halves`."""
        return self._half == "second"

    def enter(self, batch: TensorDictBase) -> TensorDictBase:
        """As every transform; of the second half, rows that the first has been over."""
        return super().enter(check_half(batch, self._half))

    def _inv_call(self, batch: TensorDictBase) -> TensorDictBase:
        return check_place(batch, self._half)

    def _run(self, batch: TensorDictBase, epochs: int, *, whole: bool) -> Run:
        if epochs < 1:
            raise ValueError(f"epochs must be ≥ 1; got {epochs}")
        self.check()
        self._last.account = None  # a refused batch leaves no account
        stages, ranks = dict(self.stages.items()), self.rank_options.ranks()
        seen = labels_in_errors(batch, self._id_keys())
        with logging_refusals(), sharing(ranks), asking_once(), seen:
            flat = self.enter(batch)
            admitted = (
                flat if ranks is None else ranks.admit(flat, self.rank_options.same_on_all(stages, epochs))
            )
            if admitted is None or (ranks is None and flat.shape.numel() == 0):
                run_empty(stages, flat)
                run = Run(Account.of(stages), batch, None, epochs)
            else:
                how = {"done": self._half != "first", "deferred": self.validate == "deferred"}
                passage = Passage(stages, shallow_copy(admitted), self._keys, **how)
                done, steps = passage.run(epochs, whole=whole)
                self._unread.put(passage.rules, batch, self._id_keys())
                run = Run(Account.of(stages, passage), done, steps, epochs)
        self._last.account = run.account
        log_batch(run.ledger)
        return run
