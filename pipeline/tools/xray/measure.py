"""Measure the weight that a training step gives to each token, for several numbers of micro-batches."""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn

from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.tools.report import FittedColumn, FittedTable
from headrace.transforms import group_relative_advantage
from headrace.transforms.table.options import at_least, takes_options
from headrace.transforms.table.schema import LOSS_WEIGHTS, MICROBATCH, ROW, TOKEN_WEIGHT, has_key

from .means import PADDED, WHOLE, StepTokens, TokenMean, nearest_mean, odd_part
from .token_table import LOSS, TokenTable, explain_gradient, padded_column, tokens_of
from .unique_pairs import Pad, xray_batch

Step = Callable[[nn.Module, TensorDictBase, int], object]
Gradients = Literal["mean", "sum", "reduced"]
LENGTHS = (3, 9, 5, 4, 8, 2, 6, 7, 5, 3, 10, 4)
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.75, 0.1, 0.3, 0.9, 0.0, 0.5)
CLOSE = 1e-6
CLOSE_IN = {torch.float64: CLOSE, torch.float32: 1e-4}  # float32 sums with cancellation round this much


@dataclass(frozen=True)
class Measured:
    """One run of a step.

    Attributes:
        cut: number of micro-batches of each rank.
        pad: the side of the padding; None: ragged rows.
        ranks: number of processes.
        shift: the number that was added to the old log-probabilities.
        coefficient: (N, T) float64, coefficients of tokens in the loss mask (:func:`token_weights`).
        outside: (N, T) float64, coefficients of tokens outside the loss mask.
        padding: the greatest absolute coefficient of padding.
        advantage: (N, T) float64, the advantage of each token.
        expected: (N, T) float64, the coefficients of the pipeline; None: no pipeline.
        expected_weight: (N, T) float64, the weights of the pipeline, without the advantage.
        tokens: the loss mask, and rollout, group, micro-batch and rank of each row.
        close: relative tolerance for equal numbers.
    """

    cut: int
    pad: Pad | None
    ranks: int
    shift: float
    coefficient: Tensor
    outside: Tensor
    padding: float
    advantage: Tensor
    expected: Tensor | None
    expected_weight: Tensor | None
    tokens: StepTokens
    close: float

    @property
    def weight(self) -> Tensor:
        """(N, T) coefficient / advantage; NaN where the advantage is (nearly) 0, and outside the mask."""
        least = self.close * self.advantage.abs().max()
        known = self.tokens.inside & (self.advantage.abs() > least)
        return torch.where(known, self.coefficient / torch.where(known, self.advantage, 1.0), torch.nan)

    @property
    def in_order(self) -> Tensor:
        """The weights of the tokens in the mask, row by row, on whichever side the padding is."""
        return self.weight[self.tokens.inside]

    @property
    def where(self) -> str:
        """A description of the run: micro-batches, ranks, padding and shift."""
        parts = {
            f"{self.cut} micro-batch{'es' * (self.cut > 1)}": True,
            f"{self.ranks} ranks": self.ranks > 1,
            "padding on the left": self.pad == "left",
            "ragged rows": self.pad is None,
            f"old log-probabilities shifted by {self.shift:g}": self.shift != 0,
        }
        return ", ".join(part for part, said in parts.items() if said)


@dataclass(frozen=True)
class XRay:
    """The measurements of a step.

    Attributes:
        runs: the runs. They differ in micro-batches, padding, ranks or shift.
        mean: the mean whose weights are nearest to those of the first run.
        factor: the weights of the first run, divided by those of the mean.
        apart: the greatest relative difference of a weight from that mean.
        close: relative tolerance for equal weights.
    """

    runs: Sequence[Measured]
    mean: TokenMean
    factor: float
    apart: float
    close: float = CLOSE

    @property
    def spread(self) -> Mapping[str, tuple[float, float]]:
        """The least and greatest weight of a token in each run, divided by its weight in the pipeline.

        Without a pipeline, the divisor is the weight in the first run. If old log-probabilities are shifted,
        it is the weight in the first run with the same shift, because of clipping.
        """
        firsts, found = dict[float, Measured](), {}
        for run in self.runs:
            first = firsts.setdefault(run.shift, run)
            if run.shift and run is first:
                continue
            if run.expected is not None and not run.shift:
                ratio = run.coefficient / run.expected
                ratio = torch.where(ratio.isinf(), math.inf, ratio)  # tokens that must not train
            elif int(run.tokens.inside.sum()) != int(first.tokens.inside.sum()):
                ratio = torch.tensor([0.0, math.inf])
            else:
                ratio = run.in_order / first.in_order
            ratio = ratio[~ratio.isnan()]  # no advantage, or no weight in both runs
            ratio = ratio if len(ratio) else torch.ones(1)
            found[run.where] = float(ratio.min()) + 0.0, float(ratio.max()) + 0.0  # without −0
        return found

    @property
    def verdict(self) -> str:
        """The result as a sentence."""
        return self._sentence(self.close)

    def _sentence(self, close: float) -> str:
        """The verdict for a relative tolerance."""
        first, spread, causes = self.runs[0], self.spread, defaultdict(list)
        for run in self.runs:
            if cause := _cause(run, first, close):
                causes[cause].append(run.where)
        if always := [cause for cause, where in causes.items() if len(where) == len(self.runs)]:
            return f"{'; '.join(always)}, in {len(spread)} of {len(spread)} runs"
        base = "of the pipeline" if first.expected is not None else f"that they get with {first.where}"
        odd = [
            f"with {where}, tokens get {_range(low, high)} times the weight {base}"
            for where, (low, high) in spread.items()
            if max(abs(low - 1), abs(high - 1)) > close
        ]
        odd += [f"with {' and '.join(where)}, {cause}" for cause, where in causes.items()]
        if odd:
            return f"{self._name(close)}: {'; '.join(odd)}"
        what = "the weights of the pipeline" if first.expected is not None else self._name(close)
        return f"{what}, in {len(spread)} of {len(spread)} runs"

    def _name(self, close: float) -> str:
        """The name of the mean. The run with the greatest number of micro-batches shows its scope best."""
        runs = sorted((run for run in self.runs if not run.shift), key=lambda run: -run.cut * run.ranks)
        found = [nearest_mean(run.weight, run.tokens) for run in runs or self.runs]
        exact = [str(mean) for mean, _, apart in found if apart <= close]
        if exact:
            return exact[0]
        if self.runs[0].expected is not None:
            return "not the weights of the pipeline"
        mean, _, apart = found[-1]
        rounding = "; a loss in bfloat16 rounds as much" if self.close < apart < 0.02 else ""
        return f"no known mean (the nearest, the {mean}, differs by {apart:.2g}{rounding})"

    def assert_uniform(self, tolerance: float | None = None) -> None:
        """Raise if the weight of a token depends on micro-batches, ranks or padding.

        Without a pipeline, the weights must be those of a mean over the whole step, without padding.

        Args:
            tolerance: relative tolerance. None: ``close``.

        Raises:
            AssertionError: the weights differ; the message is the verdict.
        """
        tolerance, first = self.close if tolerance is None else tolerance, self.runs[0]
        differs = any(max(abs(low - 1), abs(high - 1)) > tolerance for low, high in self.spread.values())
        unknown = first.expected is None and self.apart > tolerance
        of_parts = first.expected is None and (self.mean.scope != WHOLE or self.mean.name in PADDED)
        if differs or unknown or of_parts or any(_cause(run, first, tolerance) for run in self.runs):
            raise AssertionError(self._sentence(tolerance))

    def curve(self) -> dict[float, tuple[float, float]]:
        """The clipping curve: mean coefficients by the ratio π / π_old, divided by those at the ratio 1.

        Each ratio has two numbers: one for tokens with positive advantages, and one for tokens with negative
        advantages.
        """
        base = next((run for run in self.runs if run.shift == 0.0), self.runs[0])
        found: dict[float, tuple[float, float]] = {}
        for run in self.runs:
            if (run.cut, run.pad, run.ranks) != (base.cut, base.pad, base.ranks):
                continue
            share = run.coefficient / torch.where(base.coefficient == 0, torch.nan, base.coefficient)
            up, down = (share[side & share.isfinite()] for side in (run.advantage > 0, run.advantage < 0))
            found[math.exp(-run.shift)] = float(up.mean()), float(down.mean())
        return dict(sorted(found.items()))

    @property
    def table(self) -> FittedTable:
        """The runs as a table for the terminal and for notebooks."""
        numbers = (FittedColumn(name, right=True) for name in ("least weight", "greatest weight"))
        table = FittedTable([FittedColumn("cut", gives="wrap"), *numbers], self.verdict)
        for where, (low, high) in self.spread.items():
            table.add(where, f"{low:.6g}", f"{high:.6g}")
        return table

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def __repr__(self) -> str:
        return f"XRay({self.verdict!r})"


@takes_options
def xray(
    step: Step,
    pipeline: Pipeline | None = None,
    *,
    cuts: Sequence[int] = (1, 2, 4),
    ranks: Sequence[int] = (1,),
    pad: Sequence[Pad | None] = ("right",),
    shifts: Sequence[float] = (0.0,),
    lengths: Sequence[int] = LENGTHS,
    rewards: Sequence[float] | Tensor = REWARDS,
    group_size: int = 4,
    segments: int | Sequence[int] = 1,
    gradients: Gradients = "mean",
    holes: bool = False,
    prepare: Callable[[TensorDictBase], object] | None = None,
    dtype: torch.dtype = torch.float64,
) -> XRay:
    """Measure the weight that a training step gives to each token.

    The step gets a :class:`TokenTable`, a batch of :func:`xray_batch` with GRPO's advantages in ``advantage``
    (N, 1, 1), and the number of micro-batches. Micro-batches must have equal numbers of rows, in order. The
    step calls ``backward()`` without an optimiser step.

    If a step computes its own advantages, assigns rows to micro-batches in another order, or masks rows, it
    must write these columns: ``advantage`` (N, 1, 1), ``("headrace", "microbatch")`` (N,), from 0, and
    ``("masks", "all_assistant_mask")`` (N, T). This is only possible with a single rank.

    Args:
        step: the loss and backward pass of a trainer, ``step(model, batch, cut)``.
        pipeline: the pipeline whose weights and advantages are expected. If its loss has components,
            ``loss_objective`` must be the policy gradient, and each other term −log π, a cross entropy. None:
            the step's weights are compared with those of its first run, and with the means that trainers use.
        cuts: numbers of micro-batches of a rank.
        ranks: numbers of processes, with gloo. Each process runs the step on groups of its own. If a number
            is above 1, a single rank also runs in a process with a process group.
        pad: sides of the padding; None: ragged rows.
        shifts: numbers that are added to the old log-probabilities, for :meth:`XRay.curve`.
        lengths: see :func:`xray_batch`.
        rewards: see :func:`xray_batch`.
        group_size: see :func:`xray_batch`.
        segments: see :func:`xray_batch`.
        gradients: how the gradients of several ranks are combined: by their ``mean``, as in DDP, or by their
            ``sum``. ``reduced``: the step combines them itself.
        holes: see :func:`xray_batch`.
        prepare: a function that adds to each batch the columns that the pipeline or the loss also reads, such
            as reference log-probabilities or turns.
        dtype: dtype of the table. In float32 weights are equal up to 1e-4, in float64 up to 1e-6.

    Raises:
        ValueError: an option has a wrong value; the step changed the table; or the pipeline writes no weights
            or changes the rows; see also :func:`token_weights`.
        BatchError: parts of the gradient are not explained by any token; or the pipeline refused the batch.

    Example:
        >>> def step(model, batch, cut):
        ...     for part in batch.chunk(cut):
        ...         log_probs = model.get_dist(part).log_prob(part["tokens", "full"])
        ...         terms = log_probs * part["advantage"].squeeze(-1) * part["masks", "all_assistant_mask"]
        ...         (-terms.sum() / part["masks", "all_assistant_mask"].sum() / cut).backward()
        >>> xray(step, cuts=(1, 2)).verdict[:75]
        'mean over the tokens of each micro-batch: with 2 micro-batches, tokens get '
    """
    for name, values in {"cuts": cuts, "ranks": ranks, "pad": pad, "shifts": shifts}.items():
        if isinstance(values, str) or values is None or len(set(values)) != len(values) or not values:
            raise ValueError(f"{name} must be a list of distinct values, such as (1, 2); got {values!r}")
    groups, close = len(rewards) // at_least("group_size", group_size, 1), CLOSE_IN.get(dtype, 0.05)
    at_least("cuts", min(cuts), 1)
    at_least("ranks", min(ranks), 1)
    if max(ranks) > groups or max(cuts) * max(ranks) > len(lengths):
        raise ValueError(
            f"each rank needs a group, and each micro-batch a row; got ranks={ranks} and cuts={cuts} for "
            f"{groups} groups and {len(lengths)} rows. Set lengths, rewards and group_size"
        )
    runs = []
    for side, count, shift, cut in product(pad, ranks, shifts, cuts):
        # 1. The batch: the micro-batch and the rank of each row, and what is expected of its tokens.
        options: Any = {"segments": segments, "holes": holes, "pad": side, "old_log_prob_shift": shift}
        batch = xray_batch(lengths, rewards, group_size, **options)
        if prepare is not None:
            prepare(batch)
        inside = tokens_of(batch)[2]
        group, rollout = batch["group_id"].flatten(), batch["rollout_id"].flatten()
        of_rank, micro = group * count // (int(group.max()) + 1), torch.empty_like(group)
        for rank in range(count):
            for number, part in enumerate((of_rank == rank).nonzero().flatten().chunk(cut)):
                micro[part] = rank * cut + number
        reward = batch["next", "reward"].sum(-1)
        advantage = group_relative_advantage(reward, group, rollout).double()[:, None]
        says = declared(pipeline, batch) if pipeline is not None else None
        if says is not None:
            advantage = says.advantage
        batch["advantage"] = advantage[..., None]

        # 2. The step. If there is one rank, it may write its own advantages, mask and micro-batches.
        model = TokenTable.of(batch, dtype)
        before = model.table.detach().clone()
        if max(ranks) == 1:
            names = ("advantage", LOSS) if side is not None else ()
            own = {key: (batch.get(key), batch.get(key).clone()) for key in names}
            step(model, batch, cut)
            for key, (column, was) in own.items():
                if batch.get(key) is column and not torch.equal(column, was):
                    raise ValueError(
                        f"the step has changed {key!r} of the batch in place, so the expected values are "
                        f"lost. Change a clone; a step with its own values must set batch[{key!r}] = ..."
                    )
            inside, micro = tokens_of(batch)[2], batch.get(MICROBATCH, micro)
            advantage = padded_column(batch, "advantage").double().flatten(1)
        else:
            model.table.grad = _over_ranks(step, model, batch, cut, of_rank, gradients)
        if not torch.equal(model.table.detach(), before):
            raise ValueError("the step has changed the table: remove optimizer.step(), or set its lr to 0")

        # 3. The coefficient of each token, from the gradient; with a shift, all tokens may be clipped.
        coefficient, padding = torch.zeros(inside.shape, dtype=torch.float64), 0.0
        if not shift or model.table.grad is None or bool(model.table.grad.any()):
            found = explain_gradient(model, batch)
            coefficient = torch.where(found.weights.abs() > found.exact, found.weights, 0.0)
            padding = found.padding if found.padding > found.exact else 0.0
        if says is not None and says.has_components:  # tokens of components may be outside the loss mask
            inside = says.weight != 0
            advantage = torch.where(inside, says.coefficient / says.weight.masked_fill(~inside, 1.0), 0.0)
        tokens = StepTokens(inside, rollout, group, micro, of_rank)
        found_in, found_out, given = coefficient * inside, coefficient * ~inside, advantage * inside
        expected, weight = (says.coefficient, says.weight) if says is not None else (None, None)
        columns = found_in, found_out, padding, given, expected, weight
        runs.append(Measured(cut, side, count, shift, *columns, tokens, close))
    return XRay(runs, *nearest_mean(runs[0].weight, runs[0].tokens), close)


class Declared(NamedTuple):
    """The numbers of a pipeline for the tokens of a batch, in float64; 0 for tokens that do not train.

    Attributes:
        advantage: (N, 1) or (N, T), the advantage.
        coefficient: (N, T), the row's weight × the token's weight × the advantage. If the loss has
            components, it is the sum of their weights; the weight of ``objective`` is multiplied by the
            advantage.
        weight: (N, T), the coefficient without the advantage: the sum of the weights.
        has_components: whether the loss has components.
    """

    advantage: Tensor
    coefficient: Tensor
    weight: Tensor
    has_components: bool


def declared(pipeline: Pipeline, batch: TensorDictBase) -> Declared:
    """Compute the advantages, weights and coefficients of a pipeline for the rows of a batch.

    Raises:
        ValueError: the pipeline writes no weights, or changes the rows.
    """
    out = pipeline(batch)
    tokens, _, inside = tokens_of(out)
    if not has_key(out, "loss_weight"):
        raise ValueError(
            "the pipeline writes no loss weights (loss_weight): the loss decides them. Add LossWeight with "
            "fold=none, or measure the step without the pipeline"
        )
    rows = out[ROW].flatten()
    if tokens.shape[1] != inside.shape[1] or not torch.equal(tokens, tokens_of(batch)[0][rows]):
        raise ValueError(
            "the pipeline changes the rows (it merges or pads them), so their tokens cannot be identified. "
            "Measure it without those stages"
        )
    of_row = padded_column(out, "advantage").double().reshape(len(out), -1)
    if has_components := has_key(out, LOSS_WEIGHTS):
        names = [*out.get(LOSS_WEIGHTS).keys()]
        weights = {name: padded_column(out, (LOSS_WEIGHTS, name)).double() for name in names}
    else:
        weight = out["loss_weight"].double().reshape(-1, 1) * inside
        factor = padded_column(out, TOKEN_WEIGHT) if has_key(out, TOKEN_WEIGHT) else 1.0
        weights = {"objective": weight * factor}
    total = torch.stack([*weights.values()]).sum(0)
    with_advantage = weights.get("objective", 0.0) * (of_row - 1.0)

    def of_batch(column: Tensor) -> Tensor:
        nothing = torch.zeros(len(batch), column.shape[1], dtype=torch.float64)
        return nothing.index_add(0, rows, column)

    return Declared(of_batch(of_row), of_batch(total + with_advantage), of_batch(total), has_components)


def _over_ranks(
    step: Step, model: TokenTable, batch: TensorDictBase, cut: int, of_rank: Tensor, gradients: Gradients
) -> Tensor:
    """Run a step in several processes, each on the rows of its groups, and combine their gradients."""
    count = int(of_rank.max()) + 1
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        found = [f"{folder}/{rank}.pt" for rank in range(count)]
        workers = [
            context.Process(
                target=_on_rank, args=(rank, count, folder, step, model, batch[of_rank == rank], cut)
            )
            for rank in range(count)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise ValueError("the step failed on a rank; its error is on stderr, above")
        every = torch.stack([torch.load(file, weights_only=True) for file in found])
    return every.sum(0) if gradients == "sum" else every.mean(0)


def _on_rank(
    rank: int, count: int, folder: str, step: Step, model: TokenTable, batch: TensorDictBase, cut: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    step(model, batch, cut)
    gradient = model.table.grad
    torch.save(torch.zeros_like(model.table) if gradient is None else gradient, f"{folder}/{rank}.pt")
    dist.barrier()  # a rank that exits early would break the others' connections
    dist.destroy_process_group()


# -- verdicts ---------------------------------------------------------------------------------------------


def _range(low: float, high: float) -> str:
    return f"{low:.3g}" if abs(high - low) < CLOSE else f"{low:.3g} to {high:.3g}"


def _shift(run: Measured, close: float) -> str:
    """Describe a shifted loss mask: each token has the weight of its neighbour. Empty if not shifted."""
    every = run.coefficient + run.outside
    advantage = run.advantage.amax(1, keepdim=True) + run.advantage.amin(1, keepdim=True)
    for shift, words in ((1, "after"), (-1, "before")):
        moved = torch.where(run.tokens.inside, every.roll(shift, 1) / advantage, torch.nan)
        moved[moved == 0] = torch.nan  # the weight went to padding, whose rows are unknown
        elsewhere = (every != 0) & ~run.tokens.inside.roll(-shift, 1)
        if bool(elsewhere.any()) or not bool(moved.isfinite().any()):
            continue
        if nearest_mean(moved, run.tokens)[2] > close:
            continue
        if bool(run.outside.any()) or run.padding:
            return f"the loss mask is shifted: each token has the weight of the token {words} it"
        end = "last" if shift > 0 else "first"
        return f"the {end} token of each response has no weight: is the loss mask shifted or too short?"
    return ""


def _cause(run: Measured, first: Measured, close: float) -> str:
    """Describe the error that a run's weights show; empty if there is none."""
    if run.shift:
        return ""
    weight, micro = run.weight, run.tokens.micro
    known = run.tokens.inside & weight.isfinite()
    there, usual = int(run.tokens.inside.sum()), int(first.tokens.inside.sum())
    if there != usual:
        return f"{there} tokens are in the loss, and with {first.where} {usual} are"
    if not torch.allclose(
        run.advantage[run.tokens.inside], first.advantage[first.tokens.inside], rtol=close, atol=1e-12
    ):
        return f"the step's own advantages differ from those with {first.where}"
    outside = bool(run.outside.any()) or bool(run.padding)
    says = None if outside else run.expected
    if says is not None and torch.allclose(run.coefficient, says, rtol=close, atol=1e-12):
        return ""  # even if the pipeline gives the last tokens no weight, which looks like a shifted mask
    if shifted := _shift(run, close):
        return shifted
    if outside:
        found = [f"{int((run.outside != 0).sum())} tokens outside the loss mask"] * bool(run.outside.any())
        return " and ".join(found + ["padding"] * bool(run.padding)) + " have a weight"
    means = None
    if (given := run.expected_weight) is not None:
        if unknown := int(((given == 0) & (run.coefficient != 0)).sum()):
            return f"{unknown} tokens have a weight, although the pipeline gives them none"
        means = [TokenMean("mean of the pipeline", WHOLE, given)]
    bare = run.tokens.inside & (run.advantage == 0) & (run.coefficient != 0)
    _, factor, apart = nearest_mean(weight, run.tokens, means)
    if apart <= close and not bool(bare.any()):
        return "the step increases the loss: each weight is negative" if factor < 0 else ""
    if neighbour := _neighbour(run, means, close):
        return neighbour
    if bool(bare.any()):
        return f"{int(bare.sum())} tokens without an advantage have a weight"
    trains = known if given is None else known & (given != 0)
    parts = {number: weight[trains & (micro == number)[:, None]] for number in micro.unique().tolist()}
    missing = [number for number, of_part in parts.items() if len(of_part) and not bool(of_part.any())]
    if missing:
        names = ", ".join(str(number) for number in missing)
        return f"micro-batch {names} (from 0) has no gradient"
    if (odd := odd_part(weight, run.tokens, means)) is not None:
        return f"micro-batch {odd[0]} (from 0) counts {odd[1]:.3g} times"
    return ""


def _neighbour(run: Measured, means: Sequence[TokenMean] | None, close: float) -> str:
    """Describe rows that have the advantage of the next or previous row; empty if there are none."""
    for shift, words in ((1, "before"), (-1, "after")):
        other_advantage = run.advantage.amax(1) + run.advantage.amin(1)
        neighbour = other_advantage.roll(shift)[:, None]
        known = run.tokens.inside & (neighbour != 0)
        ratio = torch.where(known, run.coefficient / torch.where(known, neighbour, 1.0), torch.nan)
        several = int(ratio.isfinite().any(1).sum()) > 1  # a single row fits any neighbour
        nothing = bool((run.coefficient[run.tokens.inside & (neighbour == 0)] == 0).all())
        if several and nothing and nearest_mean(ratio, run.tokens, means)[2] <= close:
            return f"each row has the advantage of the row {words} it"
    return ""
