"""Compare what two recipes train on, given the same rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headrace.pipeline.wording import printable
from headrace.transforms import BatchError
from headrace.transforms.table import count_of

from .numbers import gradient_cosine, gradient_share, row_weight
from .step import StepReport

MOVERS = 8  # this many groups that differ most are kept
ROUNDED = 1e-5  # numbers with a greater relative difference differ by more than float32 rounding


class Mover(NamedTuple):
    """A group of a step that the recipes treat differently."""

    step: int
    group: int | str
    """The group's id in the dump."""
    first: float
    """The group's share of the step's gradient under the first recipe."""
    second: float
    """The group's share of the step's gradient under the second recipe."""
    prompt: str = ""
    """The last user turn of its prompt; empty: the dump has no texts."""


@dataclass
class Comparison:
    """Sums over steps, from which :attr:`numbers` and :meth:`mean_shares` follow.

    :func:`gradient_share` defines a row's share of the gradient.

    Attributes:
        names: the names of the two recipes.
        steps: number of batches.
        rows: number of rows of all batches.
        both: number of rows that both recipes train.
        only: number of rows that only the first recipe trains, and that only the second trains.
        changed: number of rows whose advantage × loss weight × tokens differs; without lengths, of rows in
            the loss whose advantage differs.
        by_token: whether a recipe has an advantage or weight for each token. Then the mean over the row is
            compared.
        differ: number of rows whose advantages differ.
        flips: number of rows whose advantages have opposite signs.
        moments: (6,) n, Σx, Σy, Σx², Σy², Σxy of the two advantages.
        moved: the share of the gradient that moves to other groups, summed over steps.
        cosines: :func:`gradient_cosine` of each step at which both recipes train something.
        trains: number of steps at which the first recipe has a gradient, and at which the second has one.
        movers: the groups of all steps whose shares differ most.
        kept: like `only`, for rows whose advantage is not 0.
        causes: number of rows whose advantages differ by one factor for all rows, by one factor for each
            ``group``, or ``otherwise``; and of rows whose loss ``weights`` differ by more than one factor for
            each step.
        by_length: the correlation, within each step, of log(second loss weight / first loss weight) with
            log(tokens of the row), summed over rows.
        shares: for each table (``segments`` of the rollout, ``tokens`` of the row) and each line, (3,): the
            two shares of the gradient and the number of rows, summed over steps (:meth:`mean_shares`).
    """

    names: tuple[str, str]
    steps: int = 0
    rows: int = 0
    both: int = 0
    only: list[int] = field(default_factory=lambda: [0, 0])
    changed: int = 0
    by_token: bool = False
    differ: int = 0
    flips: int = 0
    moments: np.ndarray = field(default_factory=lambda: np.zeros(6))
    moved: float = 0.0
    cosines: list[float] = field(default_factory=list)
    trains: list[int] = field(default_factory=lambda: [0, 0])
    movers: list[Mover] = field(default_factory=list)
    kept: list[int] = field(default_factory=lambda: [0, 0])
    causes: Counter[str] = field(default_factory=Counter)
    by_length: float = 0.0
    shares: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers that say how the recipes differ, over all steps.

        The numbers are ``rows``; ``trained_by_both``, ``trained_only_by_first``, ``trained_only_by_second``;
        for rows with an advantage under both recipes, ``correlation`` (Pearson's), ``differ`` (by more than
        float32 rounding) and ``sign_flips``; ``gradient_moved``, the share of the gradient that moves to
        other groups, ½ Σ |s₁ − s₂|; and ``gradient_cosine``, the cosine between the rows' weights in the two
        gradients. The last two are means over the steps of :attr:`averaged`, and NaN for a dump without
        tokens or lengths.
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
    def said(self) -> str:
        """Say whether the recipes give the same gradient: advantage × loss weight × tokens, without clipping.

        Example:
            >>> Comparison(("grpo", "rloo"), steps=1, rows=8).said
            'grpo and rloo give the same gradient: advantage × loss weight × tokens is equal in all 8 rows.'
        """
        names = " and ".join(map(printable, self.names))
        rows = count_of(self.rows, "row") + (f" of {self.steps:,} steps" if self.steps > 1 else "")
        what, product = "gradient", "advantage × loss weight × tokens "
        if np.isnan(self.moved):
            what, product = "advantage", ""
        differs = f"{product}differs" if product else "they differ"
        if not self.changed:
            if self.by_token:
                what = "gradient, up to the weights of single tokens"
            return f"{names} give the same {what}: {product or 'it '}is equal in all {rows}."
        said = f"{names} give different {what}s: {differs} in {self.changed:,} of {rows}."
        if self.cosines and self.trains == [len(self.cosines)] * 2 and min(self.cosines) > 1 - 1e-9:
            said += " The two gradients of each step have the same direction."
        elif not np.isnan(self.moved):
            said += f" {self.numbers['gradient_moved']:.1%} of the gradient moves to other groups."
        return f"{said} {self.why}".rstrip()

    @property
    def why(self) -> str:
        """Say in which respects the recipes differ: trained rows, advantages, or weights of rows.

        Example:
            >>> print(Comparison(("grpo", "rloo"), changed=8, causes=Counter(group=8)).why)
            They differ in the scale of each group alone: its advantages differ by a factor.
        """
        names, reasons = list(map(printable, self.names)), []
        if self.causes["otherwise"]:
            reasons.append("in the advantages of a group, by more than a factor")
        elif self.causes["group"]:
            reasons.append("in the scale of each group")
        elif self.causes["all"]:
            reasons.append("in the scale of all advantages, by one factor")
        if rows := self.causes["weights"]:
            more = names[self.by_length > 0]
            long = abs(self.by_length) > rows / 2
            reasons.append(
                f"in the weights of long rows, which are greater in {more}"
                if long
                else "in the weights of rows"
            )
        for name, kept in zip(names, self.kept, strict=True):
            if kept:
                reasons.append(f"in {count_of(kept, 'row')} that only {name} trains")
        if reasons == ["in the scale of each group"]:
            return "They differ in the scale of each group alone: its advantages differ by a factor."
        return f"They differ {', and '.join(reasons)}." if reasons else ""

    def _explain(self, pair: Sequence[StepReport], trained: np.ndarray, advantage: np.ndarray) -> None:
        """Count why rows of a step differ. `trained` and `advantage` are (2, N), a line for each recipe."""
        columns, both = [report.columns for report in pair], trained.all(0) & np.isfinite(advantage).all(0)
        one, other = advantage[:, both]
        _, group = np.unique(
            columns[0].get("group_id", np.zeros(len(pair[0]), int))[both], return_inverse=True
        )
        size = np.bincount(group, one**2)
        factor = np.bincount(group, one * other) / np.where(size, size, 1.0)
        off = _differ(factor[group] * one, other) | ((factor[group] <= 0) & _differ(one, other))
        apart = np.bincount(group, off)[group] > 0
        scaled = ~apart & (one != 0) & (np.abs(factor[group] - 1) > ROUNDED)
        self.causes["otherwise"] += int(apart.sum())
        used = factor[size > 0]
        same = len(used) > 1 and float(np.ptp(used)) <= ROUNDED * float(np.abs(used).max())
        self.causes["all" if same else "group"] += int(scaled.sum())
        for k in (0, 1):
            alone = trained[k] & ~trained[1 - k]
            self.kept[k] += int((alone & (np.nan_to_num(advantage[k]) != 0)).sum())
        if all({"loss_weight", "tokens"} <= each.keys() for each in columns):
            known = both & (columns[0]["loss_weight"] > 0) & (columns[1]["loss_weight"] > 0)
            ratio = np.log(columns[1]["loss_weight"][known] / columns[0]["loss_weight"][known])
            if len(ratio) and np.ptp(ratio) > ROUNDED:
                length = np.log(np.maximum(columns[0]["tokens"][known], 1))
                self.causes["weights"] += len(ratio)
                with np.errstate(invalid="ignore", divide="ignore"):
                    related = float(np.corrcoef(ratio, length)[0, 1])
                self.by_length += len(ratio) * float(np.nan_to_num(related))

    @property
    def averaged(self) -> dict[str, int]:
        """The number of steps over which each mean of :attr:`numbers` is taken.

        ``gradient_moved``: all steps. A step at which neither recipe has a gradient moves 0; a step at which
            only one has a gradient moves ½. ``gradient_cosine``: the steps at which both have a gradient.
        """
        return {"gradient_moved": self.steps, "gradient_cosine": len(self.cosines)}

    def mean_shares(self) -> dict[str, dict[str, list[float]]]:
        """For each table and line, the two shares, and the number of rows.

        A share is the mean over the steps at which the recipe has a gradient. So the shares of a table add up
        to 1.
        """
        first, second = (max(steps, 1) for steps in self.trains)
        return {
            table: {label: [a / first, b / second, rows] for label, (a, b, rows) in lines.items()}
            for table, lines in self.shares.items()
        }

    def add(self, first: StepReport, second: StepReport) -> dict[str, float]:
        """Add the reports of one batch under the two recipes.

        Returns:
            The numbers of this step: ``gradient_moved`` and, if both recipes train something,
            ``gradient_cosine``. Empty if lengths are not known.

        Raises:
            BatchError: the reports are not of the same rows.
        """
        for name in ("group_id", "rollout_id"):
            ids = [report.columns.get(name) for report in (first, second)]
            if len(first) != len(second) or (ids[0] is not None and not np.array_equal(ids[0], ids[1])):
                raise BatchError(
                    f"two recipes are compared row by row, over the same batch; one has {len(first)} rows "
                    f"and the other {len(second)}, or their {name}s differ"
                )
        pair, rows = (first, second), len(first)
        trained = np.stack([report.columns["reason"] == 0 for report in pair])  # (2, N)
        advantage = np.stack([report.columns.get("advantage", np.full(rows, np.nan)) for report in pair])
        both = trained.all(0)
        self.steps, self.rows, self.both = self.steps + 1, self.rows + rows, self.both + int(both.sum())
        self.only = [n + int((each & ~both).sum()) for n, each in zip(self.only, trained, strict=True)]
        a, b = advantage[:, np.isfinite(advantage).all(0)]
        differ = _differ(a, b)
        self._explain(pair, trained, advantage)
        self.differ += int(differ.sum())
        self.flips += int((differ & (a * b < 0)).sum())
        sums = (len(a), a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum())
        self.moments = self.moments + np.array(sums, dtype=float)
        self.by_token |= any(report.by_token for report in pair)
        if "no_lengths" in first.columns:  # without lengths, the rows' weights are not known
            credit = np.where(trained & np.isfinite(advantage), advantage, 0)
            self.changed, self.moved = self.changed + int(_differ(*credit).sum()), float("nan")
            return {}
        self.changed += int(_differ(*(row_weight(report.columns) for report in pair)).sum())
        share = np.stack([gradient_share(report.columns) for report in pair])
        self.trains = [n + int(each.any()) for n, each in zip(self.trains, share, strict=True)]
        of_step = {"gradient_moved": self._move(first, share)}
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

    def _move(self, report: StepReport, share: np.ndarray) -> float:
        """Add the part of (2, N) shares that moves between groups, and the groups that differ most."""
        ids = report.columns.get("group_id", np.zeros(len(report), int))
        groups, rows, index = np.unique(ids, return_index=True, return_inverse=True)
        names = report.ids("group", rows) if "group_id" in report.columns else groups.tolist()
        one, other = (np.bincount(index.reshape(-1), weights, len(groups)) for weights in share)
        size = np.where(np.abs(one - other) > ROUNDED * (one + other), np.abs(one - other), 0.0)
        moved = float(size.sum() / 2)
        self.moved += moved
        found = [
            Mover(report.step, names[k], float(one[k]), float(other[k]), report.asked(int(rows[k])) or "")
            for k in np.argsort(-size, kind="stable")[:MOVERS].tolist()
            if size[k]
        ]
        self.movers = sorted(self.movers + found, key=lambda each: -abs(each.first - each.second))[:MOVERS]
        return moved


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N,) bool: whether numbers differ by more than the rounding of numbers and sums."""
    size = np.maximum(np.abs(a), np.abs(b)) + min(np.abs(a).max(initial=0), np.abs(b).max(initial=0))
    return np.abs(a - b) > ROUNDED * size


def _labels(report: StepReport) -> dict[str, np.ndarray]:
    """For each table, (N,) the line of each row."""
    labels = {}
    if "rollout_id" in report.columns:
        _, rollout, segments = np.unique(
            report.columns["rollout_id"], return_inverse=True, return_counts=True
        )
        labels["segments"] = segments[rollout.reshape(-1)]
    if "tokens" in report.columns:
        labels["tokens"] = 2 ** np.ceil(np.log2(np.maximum(report.columns["tokens"], 1))).astype(int)
    return labels
