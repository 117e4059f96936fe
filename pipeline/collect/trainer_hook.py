"""A pipeline within TorchRL's trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper, TrainerHookBase

from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.train.optimiser_record import OptimiserRecord
from headrace.pipeline.train.optimiser_steps import check_loss, optimise, total_loss
from headrace.transforms import GroupAssembler, split_minibatches, weighted_loss
from headrace.transforms.options import one_of
from headrace.transforms.schema import FLOAT, MINIBATCH, has_key

Stepper = Literal["weighted", "trainer"]
COUNTED = ("rows", "rollouts", "groups", "out")  # the metrics that are counts


class PipelineHook(TrainerHookBase):
    """Run a pipeline over what a TorchRL trainer collects, and take an optimiser step per minibatch.

    ``PipelineHook(pipeline).register(trainer)``, or ``hooks=[…]`` of TorchRL's configurations. ``Trainer``
    and ``GRPOTrainer`` take it with ``optim_steps_per_batch=None`` and no replay buffer: the pipeline says
    how many steps a batch has, and the trainer's `num_epochs` are its epochs, each with its own order. The
    trainer counts frames as they are collected, logs the pipeline's metrics, and saves its state.

    With a replay buffer the trainer says how many batches it samples: append the first of
    ``pipeline.halves()`` to it, by ``append_transform(…, invert=True)``, and register
    ``PipelineHook(second)``, which cuts and weighs what is sampled, and trains all its minibatches.

    Args:
        pipeline: what runs over each batch.
        assembler: makes whole groups of the rows that are collected; those that are not whole wait, and at
            the end of the training are counted as ``unfinished``. None: each batch is taken as it is.
        stepper: ``weighted``, gradients by :func:`optimise`: micro-batches add up, rows weigh what the
            pipeline says, and the loss has terms per token (``aggregation="none"``), but where weights are
            folded in; the trainer logs the numbers of :class:`OptimiserRecord`. Or ``trainer``, whose own
            stepper adds up the loss's means, of pipelines that write no weights.

    Raises:
        ValueError: at registration: the trainer has a replay buffer and this is not a second half, or has
            none and counts its own steps; its stepper would ignore the pipeline's weights, or computes in
            mixed precision, which `weighted` does not.

    Example:
        >>> PipelineHook(Pipeline({}), stepper="trainer")
        PipelineHook(stepper='trainer')
    """

    def __init__(
        self, pipeline: Pipeline, *, assembler: GroupAssembler | None = None, stepper: Stepper = "weighted"
    ):
        self.pipeline, self.assembler = pipeline, assembler
        self.stepper = one_of("stepper", stepper, get_args(Stepper))
        self._whole: list[TensorDictBase] = []  # batches that wait for the next optimisation
        self._minibatches: Iterator[TensorDictBase] = iter(())
        self._measured: dict[str, float] = {}  # of the last batch that was trained
        self._record = OptimiserRecord()  # of that batch, where this steps the optimiser

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stepper={self.stepper!r})"

    def register(self, trainer: Trainer, name: str = "pipeline") -> None:
        """Put the pipeline into a trainer.

        Raises:
            ValueError: it does not fit there; the message says what to do.
        """
        self._check(trainer)
        self._epochs, self._loss = trainer.num_epochs, trainer.loss_module
        if self.stepper == "weighted":
            stepper = WeightedStepper(self.pipeline, trainer, lambda: self._record)
            trainer.optimization_stepper = stepper
        if trainer.replay_buffer is None:
            trainer.register_op("batch_process", self._collect)
            trainer.register_op("pre_optim_steps", self._begin)
            trainer.register_op("process_optim_batch", self._next)
        else:
            trainer.register_op("process_optim_batch", self._sampled)
        trainer.register_op("post_steps_log", self._log)
        trainer.register_op("shutdown", self._end)
        trainer.register_module(name, self)

    def _check(self, trainer: Trainer) -> None:
        fits = self.pipeline.is_second_half and self.assembler is None
        if trainer.async_collection or (trainer.replay_buffer is not None and not fits):
            raise ValueError(
                "PipelineHook(pipeline) is for trainers without a replay buffer. With one, take first, "
                "second = pipeline.halves(), append_transform(first, invert=True) to the buffer, behind "
                "AssembleOnWrite(assembler) where there is one, and register PipelineHook(second)"
            )
        if trainer.replay_buffer is None and trainer.optim_steps_per_batch is not None:
            raise ValueError(
                "the pipeline says how many optimiser steps a batch has: set optim_steps_per_batch=None on "
                f"the trainer; got {trainer.optim_steps_per_batch}"
            )
        if self.stepper == "trainer" and self.pipeline.weighs:
            raise ValueError(
                "the trainer's stepper adds up means and ignores the weights that the pipeline writes: take "
                "stepper='weighted', or fold them in (LossWeight's fold)"
            )
        if self.stepper == "weighted" and trainer.optimizer is None:
            raise ValueError(
                "stepper='weighted' steps the trainer's optimizer: pass optimizer=... to the trainer"
            )
        own = trainer.optimization_stepper
        if self.stepper == "weighted" and (
            getattr(own, "mixed_precision", False) or getattr(own, "gradient_accumulation_steps", 1) != 1
        ):
            raise ValueError(
                f"stepper='weighted' takes the place of {type(own).__name__}, computes in the precision of "
                "the model, and accumulates by the split's micro-batches alone: take stepper='trainer', or "
                "leave those options out"
            )

    # -- what the trainer calls, in this order --------------------------------------------------------

    def _collect(self, batch: TensorDictBase) -> None:
        if self.assembler is None:
            self._whole.append(batch)
            return
        self.assembler.put(batch)
        while (whole := self.assembler.take()) is not None:
            self._whole.append(whole)

    def _begin(self) -> None:
        self._measured, self._record = {}, OptimiserRecord()
        self._minibatches = self._all_minibatches()

    def _all_minibatches(self) -> Iterator[TensorDictBase]:
        while self._whole:
            run = self.pipeline.run(self._whole.pop(0), epochs=self._epochs)
            yield from run.minibatches()
            self._measure(run.metrics)

    def _next(self, batch: TensorDictBase | None) -> TensorDictBase:
        minibatch = next(self._minibatches)  # StopIteration ends the trainer's epoch
        check_loss(self._loss, minibatch)
        return minibatch

    def _sampled(self, batch: TensorDictBase) -> TensorDictBase:
        out = self.pipeline(batch)
        check_loss(self._loss, out)
        self._measured, self._record = {}, OptimiserRecord()
        self._measure(self.pipeline.metrics)
        return out

    def _measure(self, numbers: dict[str, float]) -> None:
        """Add up what is counted over the batches of the assembler; of the rest the last is what is known."""
        for key, value in numbers.items():
            counts = key.partition("/")[0] in COUNTED
            self._measured[key] = value + (self._measured.get(key, 0.0) if counts else 0.0)

    def _log(self, batch: TensorDictBase | None) -> dict[str, float]:
        return {**self._measured, **(self._record.numbers if self._record.steps else {})}

    def _end(self) -> None:
        if self.assembler is not None:
            self.assembler.discard_batch()

    # -- its state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the pipeline, and of the assembler."""
        held = {} if self.assembler is None else {"assembler": self.assembler.state_dict()}
        return {"pipeline": self.pipeline.state_dict()} | held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        self.pipeline.load_state_dict(state_dict["pipeline"])
        if self.assembler is not None:
            self.assembler.load_state_dict(state_dict["assembler"])


class WeightedStepper(OptimizationStepper):
    """An optimiser step per minibatch by :func:`optimise`, in place of a trainer's own stepper.

    Args:
        pipeline: of which the minibatches are.
        trainer: of which it takes the optimiser, the loss and the norm that clips gradients.
        record: gives what takes the optimiser's numbers of the batch at hand; None: nothing does.
    """

    def __init__(
        self, pipeline: Pipeline, trainer: Trainer, record: Callable[[], OptimiserRecord] | None = None
    ):
        self.record = record
        clips = trainer.clip_norm if trainer.clip_grad_norm else None
        self.max_grad_norm = getattr(trainer.optimization_stepper, "clip_norm", clips)
        self.reduce: Callable[..., Tensor] = weighted_loss if pipeline.weighs else total_loss
        self.keys = {"loss_mask_key": pipeline.loss_mask_key, "log_prob_key": pipeline.log_prob_key}

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Take the step; its loss, and how many steps that was: none where no token is in the loss."""
        losses: list[Tensor] = [torch.zeros((), dtype=FLOAT)]

        def reduce(terms: TensorDictBase, batch: TensorDictBase) -> Tensor:
            loss = self.reduce(terms, batch)
            losses.append(loss.detach().cpu())
            return loss

        record = None if self.record is None else self.record()
        options = {"reduce": reduce, "max_grad_norm": self.max_grad_norm, "record": record, **self.keys}
        cut = has_key(sub_batch, MINIBATCH)  # a half's output holds all its steps
        minibatches = split_minibatches(sub_batch) if cut else [sub_batch]
        steps = optimise(minibatches, trainer.compute_loss, trainer.optimizer, **options)
        return TensorDict({"loss": sum(losses), "steps": torch.tensor(float(steps), dtype=FLOAT)})
