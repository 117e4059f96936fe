"""How two recipes differ in what they train on, given the same rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headrace.pipeline.wording import printable
from headrace.transforms import BatchError

from .numbers import gradient_cosine, gradient_share, row_weight
from .step import StepReport
from .texts import TokenValues

MOVERS = 8  # groups that differ most
ROUNDED = 1e-5  # of two numbers: they differ by more than float32 rounding


class Mover(NamedTuple):
    """A group of a step that the recipes treat differently."""

    step: int
    group: int | str
    """As the dump calls it."""
    first: float
    """Share of the step's gradient under the first recipe; NaN where lengths are not known."""
    second: float
    """The same under the second."""
    apart: float = 0.0
    """How far its advantages are apart, at the row where they are furthest; one that is not trained has 0."""
    prompt: str = ""
    """What the user asked last; empty: the dump has no texts."""


@dataclass
class Comparison:
    """Sums over steps, from which :attr:`numbers` and :attr:`shares` follow.

    A row's share of the gradient is that of :func:`gradient_share`.

    Attributes:
        names: of the two recipes.
        steps: number of batches.
        rows: of all batches.
        both: rows that both recipes train.
        only: rows that the first alone trains, and the second alone.
        changed: rows whose advantage × loss weight × tokens differs; without lengths, whose advantage in the
            loss does.
        by_token: rows among them of which the tokens alone differ.
        factors: least and greatest factor from the first gradient of a step to the second, of steps at which
            one is a multiple of the other; NaN once one is not.
        differ: rows whose advantages differ.
        furthest: the greatest difference of two advantages.
        weighed: rows that both train with loss weights that differ.
        ratio: the greatest ratio of two of these weights.
        flips: rows whose advantages differ in their sign.
        moments: (6,) n, Σx, Σy, Σx², Σy², Σxy of the two advantages.
        moved: sum over steps of the share of the gradient that goes to another group.
        cosines: of steps at which both train something, that of what rows weigh (:func:`gradient_cosine`).
        trains: steps at which the first recipe has a gradient, and the second.
        movers: the groups that differ most, of all steps: by their share, else by their advantages.
        shares: by table (``segments`` of the rollout, ``tokens`` of the row, ``prompt``), by line, (3,): the
            two shares of the gradient and the number of rows, summed over steps (:meth:`mean_shares`).
    """

    names: tuple[str, str]
    steps: int = 0
    rows: int = 0
    both: int = 0
    only: list[int] = field(default_factory=lambda: [0, 0])
    changed: int = 0
    by_token: int = 0
    factors: tuple[float, float] = (np.inf, -np.inf)
    differ: int = 0
    furthest: float = 0.0
    weighed: int = 0
    ratio: float = 1.0
    flips: int = 0
    moments: np.ndarray = field(default_factory=lambda: np.zeros(6))
    moved: float = 0.0
    cosines: list[float] = field(default_factory=list)
    trains: list[int] = field(default_factory=lambda: [0, 0])
    movers: list[Mover] = field(default_factory=list)
    shares: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """How the recipes differ, over all steps.

        ``rows``; ``trained_by_both``, ``trained_only_by_first``, ``trained_only_by_second``; of the rows that
        have an advantage under both ``correlation`` (Pearson's), ``differ`` (by more than float32 rounding)
        and ``sign_flips``; ``gradient_moved``, the share of the gradient that goes to another group,
        ½ Σ |s₁ − s₂|; and ``gradient_cosine``, the cosine of what rows weigh in the two gradients. The last
        two are means over the steps of :attr:`averaged`, and NaN for a dump without tokens or their number.
        """
        n, x, y, xx, yy, xy = self.moments
        with np.errstate(invalid="ignore", divide="ignore"):
            correlation = (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))
        return {
            "rows": float(self.rows),
            "trained_by_both": float(self.both),
            "trained_only_by_first": float(self.only[0]),
            "trained_only_by_second": float(self.only[1]),
            "correlation": float(correlation),
            "differ": float(self.differ),
            "sign_flips": float(self.flips),
            "gradient_moved": self.moved / max(self.steps, 1),
            "gradient_cosine": float(np.mean(self.cosines)) if self.cosines else float("nan"),
        }

    @property
    def aligned(self) -> bool:
        """Whether the second gradient of each step is a multiple of the first."""
        return not self.changed or self.factors[0] <= self.factors[1]

    @property
    def said(self) -> str:
        """Whether both give the same gradient, and else where they differ, in a few words.

        The gradient is that of advantage × loss weight × tokens. Clipping and other terms are of the loss.

        Example:
            >>> Comparison(("grpo", "rloo"), steps=1, rows=8).said
            'grpo and rloo give the same gradient: advantage × loss weight × tokens is equal in all 8 rows.'
        """
        first, second = map(printable, self.names)
        rows = f"{self.rows:,} rows" + (f" of {self.steps:,} steps" if self.steps > 1 else "")
        only = [
            f"{count:,} rows only {name} trains"
            for count, name in zip(self.only, (first, second), strict=True)
            if count
        ]
        unknown = bool(np.isnan(self.moved))
        if not self.changed:
            zero = f" {' and '.join(only)}, with the advantage 0." if only else ""
            if not unknown:
                same = "advantage × loss weight × tokens is equal in all"
                return f"{first} and {second} give the same gradient: {same} {rows}.{zero}"
            return f"{first} and {second} give the same advantages, in all {rows}.{zero}"
        parts = []
        if self.differ:
            flips = f" ({self.flips:,} change their sign)" if self.flips else ""
            parts.append(f"the advantages of {self.differ:,} rows, by up to {self.furthest:.3g}{flips}")
        if self.weighed and not unknown:
            parts.append(f"the loss weights of {self.weighed:,} rows, by up to × {self.ratio:.3g}")
        if self.by_token:
            parts.append(f"the tokens of {self.by_token:,} rows")
        parts += [f"which rows are trained: {' and '.join(only)}"] if only else []
        low, high = self.factors
        what = "advantages" if unknown else "gradients"
        if self.aligned:
            factor = f"{low:.3g}" if high - low <= ROUNDED * high else f"{low:.3g} to {high:.3g}"
            said = f"{first} and {second} give {what} of the same direction: {second} × {factor}."
        else:
            said = f"{first} and {second} give different {what}, at {self.changed:,} of {rows}."
        said += f" They differ in {'; '.join(parts)}."
        if not self.aligned and not unknown:
            said += f" {self.numbers['gradient_moved']:.1%} of the gradient moves to other groups."
        elif self.aligned and only:
            said += " Rows that only one of them trains have the advantage 0: they only change the divisor."
        return said

    @property
    def averaged(self) -> dict[str, int]:
        """The number of steps over which each mean of :attr:`numbers` is taken.

        ``gradient_moved``: all steps. One at which neither recipe has a gradient moves 0, one at which only
        one of them has a gradient moves ½. ``gradient_cosine``: the steps at which both have a gradient.
        """
        return {"gradient_moved": self.steps, "gradient_cosine": len(self.cosines)}

    def mean_shares(self) -> dict[str, dict[str, list[float]]]:
        """By table and line the two shares, each a mean over the steps at which its recipe has a gradient.

        So the shares of a table add up to 1. The third number is that of the rows.
        """
        first, second = (max(steps, 1) for steps in self.trains)
        return {
            table: {label: [a / first, b / second, rows] for label, (a, b, rows) in lines.items()}
            for table, lines in self.shares.items()
        }

    def add(self, first: StepReport, second: StepReport) -> dict[str, float]:
        """Add the reports of one batch under the two recipes.

        Returns:
            What the step adds to the means of :attr:`numbers`: ``gradient_moved``, and where both recipes
            train something ``gradient_cosine``. Nothing where lengths are not known.

        Raises:
            BatchError: they are not of the same rows.
        """
        for name in ("group_id", "rollout_id"):
            ids = [report.columns.get(name) for report in (first, second)]
            if len(first) != len(second) or (ids[0] is not None and not np.array_equal(ids[0], ids[1])):
                raise BatchError(
                    f"two recipes are compared row by row, over the same batch; one has {len(first)} rows "
                    f"and the other {len(second)}, or their {name}s differ"
                )
        pair, rows = (first, second), len(first)
        trained = np.stack([report.columns["reason"] == 0 for report in pair])  # (2, N), as what follows
        advantage = np.stack([report.columns.get("advantage", np.full(rows, np.nan)) for report in pair])
        both = trained.all(0)
        self.steps, self.rows, self.both = self.steps + 1, self.rows + rows, self.both + int(both.sum())
        self.only = [n + int((each & ~both).sum()) for n, each in zip(self.only, trained, strict=True)]
        a, b = advantage[:, np.isfinite(advantage).all(0)]
        differ = _differ(a, b)
        self.differ += int(differ.sum())
        self.furthest = max(self.furthest, float(np.abs(a - b)[differ].max(initial=0.0)))
        self.flips += int((differ & (a * b < 0)).sum())
        sums = (len(a), a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum())
        self.moments = self.moments + np.array(sums, dtype=float)
        if all("loss_weight" in report.columns for report in pair):
            weights = np.stack([report.columns["loss_weight"][both] for report in pair])
            a, b = weights[:, (weights > 0).all(0)]
            self.weighed += int((differ := _differ(a, b)).sum())
            self.ratio = max(self.ratio, float(np.maximum(a / b, b / a)[differ].max(initial=1.0)))
        # What is in the loss of each row; a row that is not trained, or has no advantage, has 0.
        credit = np.where(trained & np.isfinite(advantage), advantage, 0)
        if "no_lengths" in first.columns:  # what a row weighs is not known
            self._add_changed(first, second, *credit)
            self.moved = float("nan")
            self._move(first, np.full((2, rows), np.nan), credit)
            return {}
        self._add_changed(first, second, *(row_weight(report.columns) for report in pair))
        share = np.stack([gradient_share(report.columns) for report in pair])
        self.trains = [n + int(each.any()) for n, each in zip(self.trains, share, strict=True)]
        of_step = {"gradient_moved": self._move(first, share, credit)}
        if np.isfinite(cosine := gradient_cosine(first.columns, second.columns)):
            self.cosines.append(cosine)
            of_step["gradient_cosine"] = cosine
        for table, labels in _labels(first).items():
            lines = self.shares.setdefault(table, {})
            distinct, index = np.unique(labels, return_inverse=True)
            totals = [np.bincount(index.reshape(-1), weights) for weights in (*share, np.ones(rows))]
            for label, line in zip(distinct, np.stack(totals, 1), strict=True):
                lines[str(label)] = lines.get(str(label), np.zeros(3)) + line
        return of_step

    def _add_changed(self, first: StepReport, second: StepReport, a: np.ndarray, b: np.ndarray) -> None:
        """Add the rows whose weight `a` (N,) in the first gradient is not their `b` (N,) in the second."""
        changed, by_token = _differ(a, b), np.zeros(len(a), bool)
        for row in {*first.by_token, *second.by_token}:
            if first.columns["reason"][row] == second.columns["reason"][row] == 0 and not changed[row]:
                by_token[row] = not _same_tokens(first.by_token.get(row), second.by_token.get(row))
        self.by_token += int(by_token.sum())
        self.changed += int((changed | by_token).sum())
        if not a.any() and not b.any():
            return
        factor = float(a @ b / (a @ a)) if a.any() else 0.0
        if factor <= 0 or by_token.any() or _differ(factor * a, b).any():
            self.factors = (np.nan, np.nan)
        elif not np.isnan(self.factors[0]):
            self.factors = (min(self.factors[0], factor), max(self.factors[1], factor))

    def _move(self, report: StepReport, share: np.ndarray, credit: np.ndarray) -> float:
        """Add how far the shares (2, N) move from group to group, and which groups differ most."""
        ids = report.columns.get("group_id", np.zeros(len(report), int))
        groups, rows, index = np.unique(ids, return_index=True, return_inverse=True)
        index = index.reshape(-1)
        names = report.ids("group", rows) if "group_id" in report.columns else groups.tolist()
        one, other = (np.bincount(index, weights, len(groups)) for weights in share)
        apart = np.zeros(len(groups))
        np.maximum.at(apart, index, np.where(_differ(*credit), np.abs(credit[0] - credit[1]), 0.0))
        size = np.where(np.abs(one - other) > ROUNDED * (one + other), np.abs(one - other), 0.0)
        moved = float(size.sum() / 2)
        self.moved += moved
        a, b, far = one.tolist(), other.tolist(), apart.tolist()
        found = [
            Mover(report.step, names[k], a[k], b[k], far[k], report.asked(int(rows[k])) or "")
            for k in np.lexsort((-apart, -size))[:MOVERS].tolist()
            if size[k] or apart[k]
        ]
        self.movers = sorted(self.movers + found, key=_most)[:MOVERS]
        return moved


def _most(mover: Mover) -> tuple[float, float]:
    """Greatest difference of the shares first, then of the advantages."""
    moved = abs(mover.first - mover.second)
    return (0.0 if np.isnan(moved) else -moved, -mover.apart)


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N,) bool: of small numbers, too, and none of a sum of rounded ones."""
    size = np.maximum(np.abs(a), np.abs(b)) + min(np.abs(a).max(initial=0), np.abs(b).max(initial=0))
    return np.abs(a - b) > ROUNDED * size


def _same_tokens(first: TokenValues | None, second: TokenValues | None) -> bool:
    """Whether each token of a row has the same numbers; what only one of them has must be 1 everywhere."""
    one, other = (each.values if each is not None else {} for each in (first, second))
    for name in {*one, *other}:
        a, b = (np.asarray(each.get(name, 1.0), float) for each in (one, other))
        a, b = np.broadcast_arrays(a, b)
        here = ~np.isnan(a) & ~np.isnan(b)
        if name == "advantage" and not (name in one and name in other):
            continue  # a row's one advantage was compared already
        if _differ(a[here], b[here]).any():
            return False
    return True


def _labels(report: StepReport) -> dict[str, np.ndarray]:
    """(N,) by table, the line that each row belongs to."""
    labels = {}
    if "rollout_id" in report.columns:
        _, rollout, segments = np.unique(
            report.columns["rollout_id"], return_inverse=True, return_counts=True
        )
        labels["segments"] = segments[rollout.reshape(-1)]
    if "tokens" in report.columns:
        labels["tokens"] = 2 ** np.ceil(np.log2(np.maximum(report.columns["tokens"], 1))).astype(int)
    if "prompt" in report.texts:
        labels["prompt"] = np.array(report.texts["prompt"], dtype=object)
    return labels
