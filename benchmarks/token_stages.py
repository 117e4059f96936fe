"""Time token-level stages, each relative to its formula in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from batches import GROUP_SIZE, collected
from stages import with_token_columns
from tables import Cell, Row
from tensordict import TensorDict
from timing import measure, median_ms, ratio
from torch import Tensor

from headrace.transforms import (
    BatchTransform,
    BatchWhitening,
    Diverged,
    LogRatio,
    OverlongPunishment,
    RolloutCorrection,
    Rows,
    SampleFilter,
    TokenAdvantage,
    TokenFilter,
    TurnAdvantage,
)
from headrace.transforms.table.schema import REWARD

LARGE, SMALL = (4000, 2048), (32, 16)  # rows, tokens of each row
OLD, SAMPLER, MASK = ("old_log_probs", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask")
RATIO, KL, FACTOR, EPS = 1.005, 1e-4, 0.1, 1e-8
NOTE = """The time of each stage, divided by that of its formula in plain torch. The formula checks
nothing, and computes in float32. headrace computes in float64 and rounds once."""


# -- the formulas ------------------------------------------------------------------------------------------


def corrected(batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Compute the importance weight of each token, and its product with the advantage."""
    weight = torch.where(batch[MASK], (batch[OLD] - batch[SAMPLER]).clamp(-20.0, 20.0).exp(), 0.0)
    return weight, weight * batch["advantage"].squeeze(-1)


def corrected_and_measured(batch: TensorDict, high: float) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Compute truncated importance weights, and the numbers that a trainer logs, by token and by row."""
    mask = batch[MASK]
    inside, length = mask.float(), mask.sum(-1)
    log_ratio = (batch[OLD] - batch[SAMPLER]).clamp(-20.0, 20.0)
    rho = log_ratio.exp()
    weight = rho.clamp(max=high) * inside
    product = weight * batch["advantage"].squeeze(-1)
    row_log, row_weight = (log_ratio * inside).sum(-1).clamp(-20.0, 20.0), weight.sum(-1) / length
    out = (rho > high) * inside
    parts = {
        "token": (weight, mask.sum(), out.sum() / mask.sum(), -log_ratio, rho, inside),
        "sequence": (row_weight, len(mask), (out.sum(-1) / length).mean(), -row_log, row_log.exp(), 1.0),
    }
    found = {}
    for by, (each, number, outside, d, ratio_of_each, counts) in parts.items():
        found |= {
            f"weight_mean_{by}": each.sum() / number,
            f"weight_max_{by}": each.max(),
            f"ess_{by}": each.sum().square() / (number * each.square().sum()),
            f"out_of_bounds_{by}": outside,
            f"kl_k1_{by}": (d * counts).sum() / number,
            f"kl_k3_{by}": ((ratio_of_each - 1 + d) * counts).sum() / number,
            f"chi2_{by}": (ratio_of_each.square() * counts).sum() / number - 1,
        }
    return weight, product, {name: float(value) for name, value in found.items()}


def tokens_filtered(batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Remove tokens whose μ / π_old is beyond bounds from the mask, and make their log-probability NaN."""
    ratio_of_each, mask = (batch[SAMPLER] - batch[OLD]).exp(), batch[MASK]
    out = mask & ((ratio_of_each < 1 / RATIO) | (ratio_of_each > RATIO))
    return mask & ~out, batch[SAMPLER].masked_fill(out, float("nan"))


def rows_filtered(batch: TensorDict) -> Tensor:
    """Find the rows whose mean k3 over their tokens is within bounds."""
    d, mask = batch[OLD] - batch[SAMPLER], batch[MASK]
    return torch.where(mask, d.exp() - 1 - d, 0.0).sum(-1) / mask.sum(-1) <= KL


def distilled(batch: TensorDict) -> Tensor:
    """Add a log-ratio to the advantage of each token in the loss."""
    credit = batch["advantage"].squeeze(-1)
    return torch.where(batch[MASK], credit + FACTOR * (batch[OLD] - batch[SAMPLER]), credit)


def of_turns(batch: TensorDict) -> Tensor:
    """Give each token its turn's return minus the other rollouts' mean at that turn. Rows have all turns."""
    reward = batch["turn_reward"].clone()
    reward[:, -1] += batch[REWARD]
    returns = reward.flip(1).cumsum(1).flip(1).view(-1, GROUP_SIZE, reward.shape[1])
    others = (returns.sum(1, keepdim=True) - returns) / (GROUP_SIZE - 1)
    turn = batch["turn_index"]
    return torch.where(turn >= 0, (returns - others).view(reward.shape).gather(1, turn.clamp_min(0)), 0.0)


def whitened(batch: TensorDict) -> Tensor:
    """Give the tokens in the loss the mean 0 and the variance 1."""
    credit, length = batch["advantage"].flatten(), batch[MASK].sum(-1)
    total = length.sum()
    centred = credit - (credit * length).sum() / total
    return centred / ((centred.square() * length).sum() / (total - 1) + EPS).sqrt()


def punished(batch: TensorDict, most: int, cache: int) -> Tensor:
    """Compute DAPO's soft punishment of long responses."""
    over = (batch[MASK].sum(-1) - (most - cache)).clamp(0, cache)
    return batch[REWARD] - over / cache


# -- the stages --------------------------------------------------------------------------------------------


def own_work(
    stage: BatchTransform, batch: TensorDict, times: int, *, measured: bool = False
) -> Callable[[], object]:
    """Calls of a stage on tables that were read before. With `measured`, its metrics are read, too."""
    tables = [Rows.read(batch, keys=stage.in_keys, tokens=stage.tokens_counted) for _ in range(times)]

    def work() -> object:
        rows = tables.pop()
        stage.work_on(rows.seen_by(stage))
        return rows.table.as_decided(), rows.table.metrics if measured else None

    return work


def with_reading(stage: BatchTransform, batch: TensorDict) -> Callable[[], object]:
    """Calls of a stage that also read the table."""
    return lambda: own_work(stage, batch, 1)()


def token_stages(rounds: int, quick: bool) -> list[Row]:
    """Make a line for each stage: the time of its formula, and the stage's time divided by it."""
    rows, tokens = SMALL if quick else LARGE
    batch = collected(rows, tokens)
    batch[REWARD] = batch["next", "reward"].flatten()
    batch = with_token_columns(batch)
    mask = batch[MASK]
    place, length = mask.cumsum(1) - 1, mask.sum(1, keepdim=True)
    batch["turn_index"] = torch.where(mask, 4 * place // length, -1)  # −1: the prompt is in no turn
    batch["advantage"] = torch.randn(rows, 1, 1, generator=torch.Generator().manual_seed(0))
    most, cache = 3 * tokens // 4, tokens // 4
    times = rounds + 1  # one more round warms up
    credit = TokenAdvantage(term=LogRatio(numerator_key=OLD, denominator_key=SAMPLER), factor=FACTOR)
    by_turn = TurnAdvantage(turn_rewards="turn")
    kept = TokenFilter(criterion=Diverged(estimator="k1", level="token", high=RATIO))
    stays = SampleFilter(criterion=Diverged(estimator="k3", high=KL))
    overlong = OverlongPunishment(max_length=most, cache=cache)
    pairs: dict[str, tuple[float, Callable[[], object], Callable[[], object]]] = {
        "RolloutCorrection by token": (
            2.0,
            lambda: corrected(batch),
            own_work(RolloutCorrection(), batch, times),
        ),
        "RolloutCorrection by token, and reading its 14 metrics": (
            1.5,
            lambda: corrected_and_measured(batch, 2.0),
            own_work(RolloutCorrection(), batch, times, measured=True),
        ),
        "TokenFilter, k1": (2.0, lambda: tokens_filtered(batch), own_work(kept, batch, times)),
        "SampleFilter, k3": (2.5, lambda: rows_filtered(batch), own_work(stays, batch, times)),
        "TokenAdvantage, LogRatio": (2.0, lambda: distilled(batch), own_work(credit, batch, times)),
        "TurnAdvantage inside rows": (3.0, lambda: of_turns(batch), own_work(by_turn, batch, times)),
        "BatchWhitening by token": (2.0, lambda: whitened(batch), with_reading(BatchWhitening(), batch)),
        "OverlongPunishment": (
            2.0,
            lambda: punished(batch, most, cache),
            with_reading(overlong, batch),
        ),
    }
    found = []
    for name, (goal, formula, stage) in pairs.items():
        seconds = measure({"formula": formula, "stage": stage}, rounds)
        cells = Cell(median_ms(seconds, "formula")), Cell(ratio(seconds, "stage", "formula"), target=goal)
        found.append(Row(name, cells))
    return found
