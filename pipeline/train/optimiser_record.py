"""Record numbers of the optimiser at a step, under ``optimiser/…`` and ``seconds/…``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor


class OptimiserRecord:
    """Collect numbers of :func:`optimise` on one batch. Give `numbers` to the report of that batch.

    ================================ ========================================================================
    ``optimiser/steps``              optimiser steps taken
    ``optimiser/lr``                 greatest learning rate of the parameter groups, at the last step
    ``optimiser/loss``               mean over steps of the loss, which `reduce` has summed
    ``optimiser/grad_norm``          mean over steps of the gradient norm before clipping
    ``optimiser/clipped``            share of steps with a clipped gradient, if there is a bound
    ``optimiser/<name>``             mean of a number that the loss returns besides ``loss_*`` terms, such as
                                     ``entropy``, ``clip_fraction``, ``kl_approx`` and ``ESS`` of TorchRL's
                                     losses: over micro-batches, weighted by tokens in the loss. TorchRL's own
                                     means are over all positions, padding included
    ``optimiser/tokens_per_second``  tokens in the loss per second of ``seconds/optimise``
    ``seconds/<what>``               times of :meth:`add_seconds`: ``optimise`` and, from the training job,
                                     ``collect``, ``reward`` and ``headrace``
    ================================ ========================================================================

    Numbers that were not measured are absent. So without an optimiser step there is no loss and no norm.

    Example:
        >>> record = OptimiserRecord()
        >>> record.numbers
        {'optimiser/steps': 0.0}
        >>> record.add_step(torch.tensor(0.5), lr=0.0, norm=2.0, tokens=10.0, clips=1.0)
        >>> record.numbers["optimiser/lr"], record.numbers["optimiser/clipped"]
        (0.0, 1.0)
    """

    def __init__(self) -> None:
        self.steps = 0
        self._lr: float | None = None
        self._norms: list[float] = []
        self._clipped: list[bool] = []
        self._tokens = 0.0
        self._losses: list[Tensor] = []  # on the device until the numbers are read
        self._terms: dict[str, list[tuple[Tensor, Tensor]]] = {}  # values and token counts, by name
        self._seconds: dict[str, float] = {}

    def add_step(
        self, loss: Tensor, *, lr: float | None, norm: float, tokens: float, clips: float | None
    ) -> None:
        """Record an optimiser step.

        Args:
            loss: () float, the loss of all micro-batches of the step.
            lr: the greatest learning rate; None: not known.
            norm: gradient norm before clipping.
            tokens: number of tokens in the loss.
            clips: gradient norm above which the gradient is clipped; None: no clipping.
        """
        self.steps += 1
        self._lr = lr
        self._norms.append(norm)
        self._tokens += tokens
        self._losses.append(loss.detach().double())
        if clips is not None:
            self._clipped.append(norm > clips)

    def add_terms(self, terms: TensorDictBase, tokens: Tensor) -> None:
        """Record the scalars of a loss for a micro-batch, except its ``loss_*`` terms.

        Args:
            terms: output of the loss.
            tokens: (n,) number of tokens in the loss of each row.
        """
        count = tokens.detach().sum().double()
        for name, value in terms.items():
            single = isinstance(value, Tensor) and value.numel() == 1 and not str(name).startswith("loss_")
            if single:
                self._terms.setdefault(str(name), []).append((value.detach().double().reshape(()), count))

    def add_seconds(self, what: str, seconds: float) -> None:
        """Add to ``seconds/<what>``; :func:`optimise` adds its own time as ``optimise``."""
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    @property
    def numbers(self) -> Mapping[str, float]:
        """The numbers by name."""
        found = {"optimiser/steps": float(self.steps)}
        if self._lr is not None:
            found["optimiser/lr"] = self._lr
        if self.steps:
            found["optimiser/grad_norm"] = sum(self._norms) / self.steps
        if self._clipped:
            found["optimiser/clipped"] = sum(self._clipped) / len(self._clipped)
        if self.steps:
            found |= self._of_losses()
        if seconds := self._seconds.get("optimise"):
            found["optimiser/tokens_per_second"] = self._tokens / seconds
        return found | {f"seconds/{what}": value for what, value in self._seconds.items()}

    def _of_losses(self) -> dict[str, float]:
        sums = [torch.stack(self._losses).sum()]
        for pairs in self._terms.values():
            values, tokens = (torch.stack(each) for each in zip(*pairs, strict=True))
            weighted = torch.where(tokens > 0, values * tokens, 0.0)  # a mean over no tokens is NaN
            sums += [weighted.sum(), tokens.sum()]
        total, *terms = torch.stack(sums).tolist()
        found = {"optimiser/loss": total / self.steps}
        means = zip(self._terms, terms[::2], terms[1::2], strict=True)
        return found | {f"optimiser/{name}": weighted / count for name, weighted, count in means if count}
