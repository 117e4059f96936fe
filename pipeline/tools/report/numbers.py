"""Compute the numbers that trackers show, under the names that the field uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from .funnel import Columns
from .groups import newest_version

AGREE = 1e-4  # advantages that differ by less count as equal: they are logged in float32, or rounded


def numbers_of(
    columns: Columns,
    rollouts: Mapping[str, np.ndarray],
    groups: Mapping[str, np.ndarray],
    solved: float,
    *,
    compared: Mapping[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """Compute the statistics of a step. A statistic without values is left out.

    A number about the rewards of groups includes all rollouts of :func:`has_reward`, after the stages that
    change rewards. So it does not depend on the action of the filter.

    ======================================= =================================================================
    ``frac_reward_zero_std``                share of groups of several rollouts whose rewards are equal (TRL)
    ``groups/informative``                  share of groups of several rollouts whose rewards differ
    ``groups/incomplete``                   share of groups with fewer counted rollouts than were dispatched,
                                            if both numbers are known
    ``groups/largest_gradient_share``       greatest share of a group of the step's gradient
                                            (:func:`gradient_share`)
    ``group_size/mean``, ``min``, ``max``   counted rollouts per group
    ``solve_none``, ``solve_all``           share of groups in which no rollout, or each, reaches `solved`
    ``solve_partial``                       share of the other groups (prime-rl, SkyRL's pass statistics)
    ``reward/all/…``, ``reward/effective/`` ``mean``, ``std``, ``min``, ``max`` over rollouts: all that have a
                                            reward, and those that are trained
    ``advantages/all/…``, ``effective/``    the same for the advantage
    ``advantages/fraction_zero``            share of trained rollouts with an advantage of exactly 0
    ``staleness/mean``, ``staleness/max``   policy versions behind the trainer when it took the rows, over
                                            rollouts; needs an assembler with `max_staleness`
    ``staleness/token_mean``                the mean over sampled tokens, if versions are per token. The other
                                            two are then of the oldest sampled token of a rollout
    ``behind_newest/…``                     for other batches: the same, behind the newest row or token
    ``fan_out/mean``, ``fan_out/max``       rows per rollout
    ``rollouts/truncated``, ``failed``      share of rollouts that were cut off; that failed or were aborted.
                                            ``truncated`` only if it is known how each row ended
    ``rollouts/unrewarded``                 share of rollouts that arrive without a reward
    ``rollouts/empty``                      share of rollouts without a token in the loss, as collected
    ``rollouts/no_reward``                  number of rollouts that are trained without a reward
    ``response_length/mean``, ``max``       tokens in the loss per rollout, of all its rows, as collected
    ``tokens/mean``, ``tokens/max``         tokens in the loss per row, as collected
    ``tokens/trained_again``                tokens in the loss that an earlier row of the rollout trains, too
                                            (:func:`count_trained_again`, by :func:`make_report`)
    ``response_characters/mean``, ``max``   characters of the response per rollout, if a dump has texts and
                                            no tokens (only in :attr:`StepReport.numbers`)
    ``logged_advantage/…``                  distance of a dump's advantages from ours (:func:`logged_numbers`)
    ======================================= =================================================================

    Args:
        columns: (N,) columns of rows, by name.
        rollouts: (R,) columns of :func:`rollouts_of`, by name.
        groups: (G,) columns of :func:`groups_of`, by name.
        solved: least reward of a solved rollout.
        compared: the same columns for the groups within which rewards are compared; None: `groups`.

    Example:
        >>> from .groups import groups_of, rollouts_of
        >>> columns = {"reward": np.array([1.0, 0.0]), "group_id": np.array([3, 3])}
        >>> columns["reason"] = np.array([0, 0])  # trained
        >>> numbers = numbers_of(columns, rollouts_of(columns), groups_of(columns, None), solved=1.0)
        >>> numbers["reward/all/mean"], numbers["solve_partial"]
        (0.5, 1.0)
    """
    numbers: dict[str, float] = {}
    for name, key in (("reward", "reward"), ("advantages", "advantage")):
        known = np.isfinite(rollouts[key])
        for which, rows in (("all", known), ("effective", known & rollouts["trained"])):
            numbers |= _statistics(f"{name}/{which}", rollouts[key][rows], ("mean", "min", "max", "std"))
    effective = rollouts["advantage"][np.isfinite(rollouts["advantage"]) & rollouts["trained"]]
    if len(effective):
        numbers["advantages/fraction_zero"] = float((effective == 0).mean())
    if groups:
        among = groups if compared is None else compared
        if (several := among["rollouts"] > 1).any():
            differ = np.isfinite(among["reward_std"]) & ~among["zero_variance"]
            numbers["frac_reward_zero_std"] = float(among["zero_variance"][several].mean())
            numbers["groups/informative"] = float(differ[several].mean())
        numbers |= _statistics("group_size", groups["rollouts"], ("mean", "min", "max"))
        if (dispatched := groups["expected"] >= 0).any():
            numbers["groups/incomplete"] = float((~groups["complete"])[dispatched].mean())
        if (scored := np.isfinite(groups["reward_max"])).any():
            none, every = groups["reward_max"][scored] < solved, groups["reward_min"][scored] >= solved
            numbers |= {"solve_none": float(none.mean()), "solve_all": float(every.mean())}
            numbers["solve_partial"] = float((~none & ~every).mean())
        if "no_lengths" not in columns and (share := gradient_share(columns)).any():
            _, group = np.unique(columns["group_id"], return_inverse=True)
            numbers["groups/largest_gradient_share"] = float(np.bincount(group.reshape(-1), share).max())
    if "collected_reward" in columns and len(columns["collected_reward"]):
        _, of = np.unique(columns.get("rollout_id", columns["row"]), return_inverse=True)
        scored = np.bincount(of.reshape(-1), np.isfinite(columns["collected_reward"])) > 0
        numbers["rollouts/unrewarded"] = float(1 - scored.mean())
    if "reward" in columns:
        numbers["rollouts/no_reward"] = float((rollouts["trained"] & np.isnan(rollouts["reward"])).sum())
    if "status" in columns and len(rollouts["failed"]):
        names = ("truncated", "failed") if (columns["status"] >= 0).all() else ("failed",)
        numbers |= {f"rollouts/{name}": float(rollouts[name].mean()) for name in names}
    if "tokens" in columns:
        numbers |= _statistics("response_length", rollouts["tokens"], ("mean", "max"))
        if len(rollouts["tokens"]):
            numbers["rollouts/empty"] = float((rollouts["tokens"] == 0).mean())
    stale = rollouts["staleness"][rollouts["staleness"] >= 0]
    known = columns.get("trainer_version", np.empty(0))
    name = "staleness" if len(known) and known.min() >= 0 else "behind_newest"
    numbers |= _statistics(name, stale, ("mean", "max"))
    if (sampled := columns.get("version_tokens", np.zeros(1))).sum():
        behind = newest_version(columns) * sampled - columns["version_sum"]
        numbers[f"{name}/token_mean"] = float(behind.sum() / sampled.sum())
    numbers |= _statistics("fan_out", rollouts["segments"], ("mean", "max"))
    numbers |= _statistics("tokens", columns.get("tokens", np.empty(0)), ("mean", "max"))
    return numbers | logged_numbers(columns)


def logged_numbers(columns: Columns) -> dict[str, float]:
    """Measure how far logged advantages are from ours; empty if no row has both.

    Returns:
        ``logged_advantage/rows``, the number of rows with both; ``max_difference``; ``mean_difference``
        (absolute); and ``agree``, the share within 1e-4.

    Example:
        >>> columns = {"logged_advantage": np.array([1.0, -1.0]), "advantage": np.array([1.0, -0.5])}
        >>> logged_numbers(columns)["logged_advantage/max_difference"]
        0.5
    """
    if not {"logged_advantage", "advantage"} <= set(columns):
        return {}
    apart = np.abs(columns["logged_advantage"] - columns["advantage"])
    apart = apart[np.isfinite(apart)]
    if not len(apart):
        return {}
    found = {"rows": len(apart), "max_difference": apart.max(), "mean_difference": apart.mean()}
    found["agree"] = (apart <= AGREE).mean()
    return {f"logged_advantage/{name}": float(value) for name, value in found.items()}


def _statistics(name: str, values: np.ndarray, which: tuple[str, ...]) -> dict[str, float]:
    """Statistics as ``<name>/<statistic>``. `std` (ddof 1) needs two values, the others need one."""
    if len(values) == 0:
        return {}
    functions = {"mean": np.mean, "min": np.min, "max": np.max, "std": partial(np.std, ddof=1)}
    defined = [key for key in which if key != "std" or len(values) > 1]
    return {f"{name}/{key}": float(functions[key](values)) for key in defined}


# -- which rows the gradient comes from -----------------------------------------------------------------


def gradient_share(columns: Columns) -> np.ndarray:
    """Compute each row's share of the step's gradient, as if the gradients of all tokens were equally long.

    The size of a row says how much its tokens weigh in the loss. Its share is the size divided by the sum of
    all sizes of the step::

        size_i = Σₜ |advantage_it| · loss weight_i,   share_i = size_i / Σ size

    If all tokens of a row have one advantage, the size is |advantage| · loss weight · tokens, even if tokens
    have weights of their own, because their mean is 1. If tokens have their own advantages too, their weights
    are left out. A row that is not trained has size 0. The gradients of tokens also differ in length and may
    cancel, which is not known before the backward pass. So a share says where the gradient comes from, not
    how much of it remains.

    Args:
        columns: (N,) columns of a :class:`StepReport`: `reason` and, if they are known, `advantage`,
            `advantage_size` (the sum of |advantage| over the row's tokens, if it is per token),
            `trained_tokens` (in the loss of the step) or else `tokens`, and `loss_weight`. Without tokens
            each row has one token; without weights each weight is 1. With `no_lengths` the numbers of tokens
            are not known.

    Returns:
        (N,) float64 with sum 1, or sum 0 if no row trains or all advantages are 0; NaN with `no_lengths`.

    Example:
        >>> columns = {"reason": np.array([0, 0, 1]), "advantage": np.array([-1.0, 0.5, 9.0])}
        >>> gradient_share(columns | {"tokens": np.array([10, 60, 5])}).tolist()
        [0.25, 0.75, 0.0]
    """
    rows = len(columns["reason"])
    size = np.abs(row_weight(columns))
    if "advantage_size" in columns:
        of_tokens = columns["advantage_size"] * _loss_weight(columns, rows)
        size = np.where((columns["reason"] == 0) & np.isfinite(of_tokens), of_tokens, size)
    return size / (size.sum() or 1.0)


def row_weight(columns: Columns) -> np.ndarray:
    """Compute each row's signed weight in the gradient: advantage · loss weight · tokens.

    Args:
        columns: as for :func:`gradient_share`. If advantages are per token, `advantage` is their mean.

    Returns:
        (N,) float64, 0 for rows that are not trained; NaN with `no_lengths`.
    """
    rows = len(columns["reason"])
    if "no_lengths" in columns:
        return np.full(rows, np.nan)
    tokens = np.maximum(columns.get("trained_tokens", columns.get("tokens", np.ones(rows))), 0)
    weight = columns.get("advantage", np.zeros(rows)) * _loss_weight(columns, rows) * tokens
    return np.where((columns["reason"] == 0) & np.isfinite(weight), weight, 0.0)


def gradient_cosine(first: Columns, second: Columns) -> float:
    """Compute the cosine between the weights that two recipes give the same rows (:func:`row_weight`).

    It is 1 if both weigh the rows in the same proportion, and −1 if they do so with opposite signs. As for
    the shares, the gradients of tokens count as equally long, and as independent of one another.

    Args:
        first: (N,) columns of a report.
        second: (N,) columns of another report of the same rows.

    Returns:
        A number in [−1, 1]; NaN if a recipe trains nothing.

    Example:
        >>> one = {"reason": np.array([0, 0]), "advantage": np.array([1.0, -1.0])}
        >>> gradient_cosine(one, one | {"advantage": np.array([2.0, 0.0])}).__round__(4)
        0.7071
    """
    a, b = row_weight(first), row_weight(second)
    with np.errstate(invalid="ignore", divide="ignore"):
        a, b = a / np.abs(a).max(initial=0.0), b / np.abs(b).max(initial=0.0)  # so that no square underflows
        return float(np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b)))


def _loss_weight(columns: Columns, rows: int) -> np.ndarray:
    return np.nan_to_num(columns.get("loss_weight", np.ones(rows)), nan=1.0)
