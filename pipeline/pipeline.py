"""Named stages, run in order, each row accounted for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.transforms.columns import COLUMNS, OF_TOKENS, REFERENCE, ColumnNames
from headrace.transforms.distributed import (
    DecideOn,
    OtherRankError,
    RankOptions,
    Ranks,
    SharedIds,
    hand_out,
    resolve_group,
    sharing,
)
from headrace.transforms.entry import labels_in_errors
from headrace.transforms.errors import BatchError, listing
from headrace.transforms.gate import Empty, take_empty_out
from headrace.transforms.options import nested_key, one_of
from headrace.transforms.rows import Rows, column_keys, few
from headrace.transforms.schema import FOLDED_WEIGHT, MICROBATCH, MINIBATCH, PROCESSED, RANK, ROW
from headrace.transforms.stage import BatchTransform
from headrace.transforms.table import AHEAD, Table, TokenCount, Tokens, Written
from headrace.transforms.tensordicts import column_of, describe_columns, device_of, without_rows

from .account_keys import KEYS, Asked, Keys
from .halves import Half, check_half, check_place, cut_in_two
from .notebook import StageListing
from .one_decides import Epoch, check_by_table, hand_out_passes, take_passes
from .order import arrange, check_column_names, check_order, place_of_cut
from .report.row_columns import note_advantage, note_carried, note_collected, texts_with_carried
from .run import LastRun, Run
from .stage import as_module, with_stage
from .wording import printable

log = logging.getLogger(__name__.rpartition(".")[0])

MaskedLogProb = Literal["nan", "keep"]


class Pipeline(StageListing, LastRun, BatchTransform, columns=("loss_mask", "log_prob", "group", "rollout")):
    """Run named stages in order over a batch, and record where each row went.

    A pipeline is a transform like its stages and goes wherever they go. It stamps what it has processed:
    a second pipeline, or a second pass, raises instead of filtering twice. Every input row is trained or
    has exactly one recorded reason why not.

    :meth:`run` returns what became of a batch; a call and :meth:`minibatches` return its rows.
    :attr:`metrics`, :attr:`ledger` and :meth:`report` are those of the calling thread's last run, or where
    it has had none, of the last of any thread.

    Reads what its stages read, and `loss_mask_key` if it is there; writes what they write, and
    ``("headrace", "row")`` and ``("headrace", "processed")``.

    Args:
        stages: transforms or callables from batch to batch, by name. One that is None is left out.
        order: names of all stages, where the mapping's order is not the order of execution.
        columns: other names of columns, by role (:data:`headrace.transforms.columns.COLUMNS`). A recipe hands
            them to its stages; stages that are made already must have them, by ``<role>_key``.
        report_keys: where the report finds ``reward``, ``status``, ``policy_version``, ``expected_rollouts``,
            ``advantage``, ``loss_weight``, ``prompt`` and ``response``, where they go by other names than
            the usual ones.
        process_group: a group, or ``world``, of ranks with rows of their own of one batch: all stages measure
            over those of all ranks, as one process would. Each runs every batch, also without rows.
        shared_ids: an id that several ranks have is the ``same`` rollout or group there, or ``different``
            ones, or must not be: ``raise``. None: as LossWeight says, else ``raise``.
        patience: seconds that ranks wait for one another; an error on one is raised on all.
        decide_on: ``each_rank`` of the process group has the table of all rows, and makes all decisions; or
            the ``first_rank`` does, and gives each of the others those about its own rows: equal bits, with
            stages that decide by the table alone. ``docs/scale.md`` says where it pays.
        masked_log_prob: what stands in `log_prob_key` where a row or token is out of the loss: ``nan``, by
            which TorchRL's GRPOLoss leaves it out under any of its masking strategies; or ``keep``: the
            number that came, for a loss of your own that multiplies by the loss mask. Under ``keep`` no
            column of tokens that stages know is NaN or infinite out of the mask: what came so becomes 0
            there, and a token whose log-probability came so leaves the mask. A stage alone writes NaN.
        empty: where no gate says so: a rollout none of whose rows arrives with a token in the loss is out of
            all statistics (``exclude``), or in them (``count``), or refused (``raise``).
        names: other names of its own columns, such as `loss_mask_key` (:class:`ColumnNames`). A row without
            a token in the mask, and with a finite log-probability, has nothing to train. Groups and rollouts
            are counted by their ids.

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
        columns: Mapping[str, NestedKey | None] | None = None,
        report_keys: Mapping[str, NestedKey] | None = None,
        process_group: dist.ProcessGroup | str | None = None,
        shared_ids: SharedIds | None = None,
        patience: float = 600.0,
        decide_on: DecideOn = "each_rank",
        masked_log_prob: MaskedLogProb = "nan",
        empty: Empty = "exclude",
        **names: Unpack[ColumnNames],
    ):
        BatchTransform.__init__(self)
        arranged = arrange(stages, order)
        for name, stage in arranged.items():
            if not callable(stage):
                raise ValueError(f"stage {name!r} must be a transform or a callable; got {stage!r}")
            if isinstance(stage, Pipeline):
                raise ValueError(f"stage {name!r} is a pipeline: put its stages into this one instead")
        check_order(arranged)
        check_column_names(arranged, columns or {}, names)
        self.rank_options = RankOptions.of(arranged.values(), process_group, shared_ids, patience, decide_on)
        if decide_on == "first_rank":
            check_by_table(arranged)
        self.stages = nn.ModuleDict({name: as_module(stage) for name, stage in arranged.items()})
        self.order, self._cut_at = list(arranged), place_of_cut(arranged)
        self.columns, own = dict(columns or {}), self._columns
        self.name_columns({f"{role}_key": key for role, key in self.columns.items() if role in own} | names)
        self.masked_log_prob = one_of("masked_log_prob", masked_log_prob, get_args(MaskedLogProb))
        self.empty = one_of("empty", empty, get_args(Empty))
        self.report_keys = dict(report_keys or {})
        if unknown := sorted(set(self.report_keys) - set(KEYS)):
            raise ValueError(f"report_keys must be among {', '.join(KEYS)}; got {', '.join(unknown)}")
        ids = {"rollouts": self.rollout_key, "groups": self.group_key}
        self._keys = Keys.of(arranged.values(), self.loss_mask_key, self.log_prob_key, ids, self.report_keys)
        self.asked = Asked.of([self, *arranged.values()], self._keys)
        self._half: Half | None = None  # the whole
        LastRun.__init__(self)

    def run(self, batch: TensorDictBase, epochs: int = 1) -> Run:
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
        return super().enter(batch if self._half is None else check_half(batch, self._half))

    def _id_keys(self) -> list[NestedKey]:
        return list(self.asked.ids)

    def _inv_call(self, batch: TensorDictBase) -> TensorDictBase:
        return check_place(batch, self._half)

    def _run(self, batch: TensorDictBase, epochs: int, *, whole: bool) -> Run:
        self._last.run = None  # a refused batch leaves no account
        try:
            run = self._account_for(batch, epochs, whole=whole)
        except Exception as err:  # on its way to the caller, who may be a worker that nobody sees
            log.info("a batch was refused: %s", printable(str(err), keep="\n"))
            raise
        self._last.run = run.without_batch()
        if log.isEnabledFor(logging.DEBUG) and run.ledger is not None:
            log.debug("a batch: %s", run.ledger.in_words())
        return run

    def _ranks(self) -> Ranks | None:
        """The ranks that share this batch; None where this process has the whole of it."""
        if self.rank_options.process_group is None:
            return None
        group = resolve_group(self.rank_options.process_group)
        options = self.rank_options
        return Ranks(group, options.shared_ids, options.patience, options.decide_on)

    def _same_on_all_ranks(self, epochs: int) -> str:
        """What must be the same on all ranks that share a batch, in words: a line each."""
        texts = [
            f"{name}: {stage.same_on_all_ranks() if isinstance(stage, BatchTransform) else repr(stage)}"
            for name, stage in self.stages.items()
        ]
        own = [f"epochs={epochs}", f"shared_ids={self.rank_options.shared_ids!r}"]
        own += [f"decide_on={self.rank_options.decide_on!r}"]
        own += [f"masked_log_prob={self.masked_log_prob!r}", f"empty={self.empty!r}"]
        return "\n".join([*own, *texts])

    def _finite(self) -> Tokens | None:
        """The columns of tokens that stay finite out of the loss, as far as this and its stages name them."""
        if self.masked_log_prob == "nan":
            return None
        usual = [self.columns.get(role, COLUMNS[role].default) for role in OF_TOKENS]
        keys = [*map(nested_key, usual), *REFERENCE]
        for stage in (self, *self.stages.values()):
            for part in (stage, getattr(stage, "criterion", None), getattr(stage, "term", None)):
                named = {} if part is None else column_keys(part)
                keys += [key for role, key in named.items() if role in OF_TOKENS]
        others = [key for key in dict.fromkeys(keys) if key is not None]
        return Tokens(self.loss_mask_key, self.log_prob_key, others)

    def _account_for(self, batch: TensorDictBase, epochs: int, *, whole: bool) -> Run:
        """One batch on its way: read the table, let every stage decide; rows are gathered when asked for."""
        if epochs < 1:
            raise ValueError(f"epochs must be ≥ 1; got {epochs}")
        stages, ranks = dict(self.stages.items()), self._ranks()
        with ExitStack() as held:
            with sharing(ranks), labels_in_errors(batch, self._id_keys()):
                flat, about, rows, permuted = self.enter(batch), "", None, None
                if ranks is not None:
                    ranks.place, ranks.id_keys = "a batch", self.asked.ids
                    about = self._same_on_all_ranks(epochs)
                if len(flat) or ranks is not None:
                    asked = self.asked
                    rows = Rows.read(flat, keys=asked.columns, tokens=asked.counts, ranks=ranks, about=about)
                    rows.table.finite = self._finite()
                if rows is None or not (rows.table.size or rows.table.starts):  # nobody has any
                    refuse_nothing(stages, flat)
                    run, rows = Run(stages, self._keys, None, batch=batch, epochs=epochs), None
                else:
                    run, permuted = self._decide(stages, rows, epochs, held, whole=whole)
            if rows is not None:  # nobody has refused the batch, on any rank
                remember(stages, rows, permuted)
        return run

    def _decide(
        self, stages: dict[str, nn.Module], rows: Rows, epochs: int, held: ExitStack, *, whole: bool
    ) -> tuple[Run, Any]:
        """Let the stages decide. The split is locked while `held`: the next batch takes what it carries."""
        table, keys, at = rows.table, self._keys, self._cut_at
        texts = note_collected(rows, keys)
        weights_came = column_of(table.batch, keys.weight) is not None
        table.written[ROW], table.columns[ROW] = Written(torch.int64, 1), table.row_numbers()
        if table.decides:
            if self._half != "second" and not any(hasattr(stage, "empty") for stage in stages.values()):
                take_empty_out(rows.seen_by(self, "pipeline"), self.empty)
            for name in list(stages)[:at]:
                self._stage(name, stages[name], rows)
            note_advantage(rows, keys)
        hand_out(table)
        name, split, carried = "", cast(Any, None), None
        if at is not None:
            name, split = list(stages.items())[at]
            held.enter_context(split.lock)
            carried = split.carried_rows()
        passes, permuted = self._cut(stages, rows, at, epochs)
        if table.carried is not None:
            note_carried(rows, keys)
            texts = texts_with_carried(texts, carried, keys)
        places = [each.places for each in passes]
        self._record_no_loss_tokens(rows, places, weights_came)
        processed = torch.full((table.size,), self._half != "first")
        table.columns[PROCESSED], table.written[PROCESSED] = processed, Written(torch.bool, 1)
        steps = None
        if permuted is not None:
            for each in passes:
                each.columns[PROCESSED] = (processed, torch.bool, 1)
            with self._named(name, split, table):
                steps = permuted.steps([each[1:] for each in passes])
                if whole:
                    steps.refuse_to_resume()
        run = Run(stages, keys, rows, steps=steps, epochs=epochs, places=places, texts=texts)
        return run, permuted

    def _cut(
        self, stages: dict[str, nn.Module], rows: Rows, at: int | None, epochs: int
    ) -> tuple[list[Epoch], Any]:
        """Draw the minibatches of every epoch, and let the stages behind the cut weigh the rows of each."""
        if at is None:
            return [], None
        table, names, passes = rows.table, list(stages), list[Epoch]()
        split: Any = stages[names[at]]
        if table.left == 0 and table.ranks is None:
            name_reasons(rows, names[at], split)
            return [], None
        with self._named(names[at], split, table):
            # What a replay buffer samples again is trained again: that is for its sampler to say.
            if not self.is_second_half and split.take_out_trained(rows.seen_by(split, names[at])):
                return [], None
            table.extend(split.carried_rows(), split.remainder)
            seen = rows.seen_by(split, names[at])
            if not table.decides:
                return take_passes(seen, split)
            permuted = split.permute(seen, epochs)
        before = table.columns, table.written, table.late
        whole = table.batch, table.live, table.kept
        for each in permuted.passes:
            table.columns, table.written, table.late = dict(before[0]), dict(before[1]), list(before[2])
            table.batch, table.live, table.kept = whole
            self._put_places(rows, each)
            for name in names[at + 1 :]:
                self._stage(name, stages[name], rows, after_cut=True)
            places, columns = self._places(rows, each), table.written_columns()
            passes.append(Epoch(places, columns, table.late, table.batch))
        table.columns, table.written, table.late = before
        hand_out_passes(table, passes, permuted.of_ranks)
        return passes, permuted

    def _stage(self, name: str, stage: nn.Module, rows: Rows, *, after_cut: bool = False) -> None:
        """Let one stage decide, or change tokens; code that is not ours sees a batch, and is read again."""
        table, start = rows.table, perf_counter()
        if table.left == 0:
            name_reasons(rows, name, stage)
            return
        with self._named(name, stage, table):
            before = table.left
            if isinstance(stage, BatchTransform) and stage.knows_the_table():
                stage.work_on(rows.seen_by(stage, name))
            else:
                self._foreign(name, stage, rows)
            if after_cut and table.left < before:
                raise BatchError(
                    "a stage after the split leaves all rows where they are, since they were cut"
                )
        table.metrics[f"time/{name}"] = table.metrics.get(f"time/{name}", 0.0) + perf_counter() - start

    @contextmanager
    def _named(self, name: str, stage: nn.Module, table: Table) -> Iterator[None]:
        """Name the stage in an error that is raised inside."""
        if table.ranks is not None:
            table.ranks.place = f"stage {name!r}"
        try:
            yield
        except OtherRankError:
            raise
        except Exception as err:
            if hasattr(err, "stage_named"):
                raise
            named = with_stage(name, stage, err)
            named.stage_named = name  # type: ignore[attr-defined]
            raise named from err

    def _foreign(self, name: str, stage: nn.Module, rows: Rows) -> None:
        """Any callable from a batch to a batch: it gets what was decided so far; the table is read again."""
        table = rows.table
        batch = rows.seen_by(self).write()
        numbers = table.live
        if len(batch):
            batch = stage(batch)
            if not isinstance(batch, TensorDictBase) or (len(batch) and column_of(batch, ROW) is None):
                raise BatchError(
                    f"a stage returns a TensorDict that keeps the column {ROW!r}, by which rows are "
                    f"accounted for; it returned {type(batch).__name__} without it"
                )
            numbers = table.numbers_of(batch)
        if bool((numbers[1:] < numbers[:-1]).any()):
            raise BatchError(
                "a stage must keep the order of the rows, on which segments and permutations depend; it "
                f"returned rows {few(numbers)}. Sort before the pipeline"
            )
        found, times = numbers.unique(return_counts=True)
        if len(found) < len(numbers):
            twice = listing(map(str, found[times > 1].tolist()))
            raise BatchError(f"a stage may drop rows but not repeat them; found twice: rows {twice}")
        stays = numbers
        if table.ranks is not None:
            every = table.ranks.gather_objects((numbers, describe_columns(batch) if len(batch) else None))
            stays = torch.cat([each for each, _ in every])
            known = next((columns for _, columns in every if columns is not None), None)
            if len(batch) == 0 and known is not None:  # the stage has not seen it: others say what it has
                batch = without_rows(known, device_of(batch))
        gone = torch.ones(table.size, dtype=torch.bool).index_fill_(0, stays, False)
        seen = rows.seen_by(stage, name)
        seen.leave(gone if seen.index is None else gone[seen.index], "gone")
        if len(stays):  # of nothing there is nothing to read
            table.reread(batch, numbers)

    # -- after the cut ------------------------------------------------------------------------------------

    @staticmethod
    def _put_places(rows: Rows, each: Any) -> None:
        """Say where an epoch trains each row, for the stages that weigh the rows of a step."""
        table = rows.table
        places = {MINIBATCH: each.minibatch, MICROBATCH: each.microbatch, RANK: each.rank}
        for key, values in places.items():
            if values is None:
                table.columns.pop(key, None)
                table.written.pop(key, None)
            else:
                table.columns[key], table.written[key] = values, Written(torch.int64, 1)

    def _places(self, rows: Rows, each: Any) -> dict[str, Tensor]:
        rows.table.load([self._keys.weight], most=AHEAD)
        columns = rows.table.columns
        found = {"minibatch": each.minibatch, "microbatch": each.microbatch}
        if each.rank is not None:
            found["rank"] = each.rank
        key = FOLDED_WEIGHT if FOLDED_WEIGHT in columns else self._keys.weight
        weight = columns.get(key)
        if weight is not None and weight.ndim == 1:
            found["loss_weight"] = weight.to(rows.dtype(key)).double()  # as it trains
        return found

    def _record_no_loss_tokens(self, rows: Rows, places: list[dict[str, Tensor]], weights_came: bool) -> None:
        """Record the rows that train nothing: no token in the loss, or no weight in any pass."""
        table, count = rows.table, TokenCount(self.loss_mask_key, self.log_prob_key)
        rows.table.load([] if places else [self._keys.weight], [count], most=AHEAD)
        masked = ~table.in_loss
        if count in table.columns:
            masked = masked | (table.columns[count] == 0)
        ours = not weights_came or self.weighs
        weights = [each["loss_weight"] for each in places if "loss_weight" in each]
        if not places and (weight := table.columns.get(self._keys.weight)) is not None and weight.ndim == 1:
            weights = [weight]
        if ours and weights and len(weights) == max(len(places), 1):
            masked = masked | torch.stack([weight == 0 for weight in weights]).all(0)
        seen = Rows(table, rows.names, stage="pipeline")
        seen.record(masked & table.here, "no_loss_tokens", "masked")


def name_reasons(rows: Rows, name: str, stage: Any) -> None:
    """What a stage does where no row is left: the ledger has its reasons, all the same."""
    reasons = getattr(stage, "reasons", ())
    effects = getattr(stage, "effects", ()) or ("dropped",) * len(reasons)
    for reason, effect in zip(reasons, effects, strict=True):
        rows.seen_by(stage, name).name_reason(reason, effect)


def remember(stages: Mapping[str, nn.Module], rows: Rows, permuted: Any) -> None:
    """Let the stages that have a state take the batch in."""
    if permuted is not None:
        permuted.split.accept(permuted)
    for stage in stages.values():
        if isinstance(stage, BatchTransform):
            stage.state_after(rows)


def refuse_nothing(stages: Mapping[str, nn.Module], batch: TensorDictBase) -> None:
    """What stages say of a batch of which nobody has rows: groups may be missing."""
    for name, stage in stages.items():
        if isinstance(stage, BatchTransform):
            try:
                stage.enter(batch)
                stage.apply_to_nothing(batch)
            except BatchError as err:
                raise with_stage(name, stage, err) from err
