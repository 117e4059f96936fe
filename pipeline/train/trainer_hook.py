"""Run a pipeline in TorchRL's trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper, TrainerHookBase

from headrace.pipeline.pipeline import Pipeline
from headrace.transforms import GroupAssembler, split_minibatches, weighted_loss
from headrace.transforms.table.options import takes_options
from headrace.transforms.table.schema import FLOAT, MINIBATCH, has_key

from .optimiser_record import OptimiserRecord
from .optimiser_steps import check_loss, optimise, total_loss

Stepper = Literal["weighted", "trainer"]
COUNTED = ("rows", "rollouts", "groups", "out")  # prefixes of metrics that are added up over batches


@takes_options
class PipelineHook(TrainerHookBase):
    """Run a pipeline on the batches of a TorchRL trainer, with one optimiser step per minibatch.

    Register it with ``PipelineHook(pipeline).register(trainer)``, or list it in ``hooks=[…]`` of TorchRL's
    configurations. The trainer counts collected frames, logs the pipeline's metrics, and saves its state.

    Without a replay buffer, give ``Trainer`` or ``GRPOTrainer`` ``optim_steps_per_batch=None``: the pipeline
    decides the number of steps per batch. The trainer's `num_epochs` are the pipeline's epochs, each with
    its own permutation.

    With a replay buffer, the trainer decides how many batches it samples. Append the first of
    ``pipeline.halves()`` to the buffer with ``append_transform(…, invert=True)``, and register
    ``PipelineHook(second)``. The second half cuts and weighs each sampled batch and trains all its
    minibatches.

    Args:
        pipeline: the pipeline that runs on each batch.
        assembler: makes whole groups of the collected rows. Incomplete groups wait; at the end of the
            training their rows are counted as ``unfinished``. None: the pipeline runs on the batches as they
            are collected.
        stepper: ``weighted`` computes gradients with :func:`optimise`. It accumulates over micro-batches and
            multiplies by the weights of the pipeline. The loss must return one term per token
            (``aggregation="none"``), unless the weights are folded in. The trainer logs the metrics of
            :class:`OptimiserRecord`. ``trainer`` uses the trainer's own stepper, which adds up mean losses.
            It is only for pipelines that write no weights.

    Raises:
        ValueError: at registration. The trainer has a replay buffer, and the pipeline is not a second half or
            has an `assembler`. Or it has no buffer and sets its own number of steps. Or its stepper would
            ignore the pipeline's weights. Or it has no optimizer, or uses mixed precision or gradient
            accumulation, with ``weighted``.

    Example:
        >>> PipelineHook(Pipeline({}), stepper="trainer")
        PipelineHook(stepper='trainer')
    """

    def __init__(
        self, pipeline: Pipeline, *, assembler: GroupAssembler | None = None, stepper: Stepper = "weighted"
    ):
        self.pipeline, self.assembler = pipeline, assembler
        self.stepper = stepper
        self._whole: list[TensorDictBase] = []  # batches for the next optimisation
        self._minibatches: Iterator[TensorDictBase] = iter(())
        self._measured: dict[str, float] = {}  # metrics of the last optimisation
        self._record = OptimiserRecord()  # numbers of the last optimisation, with stepper="weighted"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stepper={self.stepper!r})"

    def register(self, trainer: Trainer, name: str = "pipeline") -> None:
        """Register the pipeline with a trainer.

        Raises:
            ValueError: the trainer's settings do not allow it (see the class).
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
                "PipelineHook(pipeline) is for trainers without a replay buffer. With one, call first, "
                "second = pipeline.halves(), append_transform(first, invert=True) to the buffer, after "
                "AssembleOnWrite(assembler) if you use it, and register PipelineHook(second)"
            )
        if trainer.replay_buffer is None and trainer.optim_steps_per_batch is not None:
            raise ValueError(
                "the pipeline decides the number of optimiser steps per batch: set "
                f"optim_steps_per_batch=None on the trainer; got {trainer.optim_steps_per_batch}"
            )
        if self.stepper == "trainer" and self.pipeline.weighs:
            raise ValueError(
                "the trainer's stepper adds up mean losses and ignores the weights that the pipeline writes: "
                "set stepper='weighted', or fold the weights in (pipeline.stages.weight.fold)"
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
                f"stepper='weighted' replaces {type(own).__name__}. It computes in the precision of the "
                "model and accumulates only over the split's micro-batches: remove mixed_precision and "
                "gradient_accumulation_steps, or set stepper='trainer'"
            )

    # -- called by the trainer, in this order ---------------------------------------------------------

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
        """Add up counts over the batches of one optimisation; keep the last value of other metrics."""
        for key, value in numbers.items():
            counts = key.partition("/")[0] in COUNTED
            self._measured[key] = value + (self._measured.get(key, 0.0) if counts else 0.0)

    def _log(self, batch: TensorDictBase | None) -> dict[str, float]:
        return {**self._measured, **(self._record.numbers if self._record.steps else {})}

    def _end(self) -> None:
        if self.assembler is not None:
            self.assembler.discard_batch()

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the pipeline and the assembler."""
        held = {} if self.assembler is None else {"assembler": self.assembler.state_dict()}
        return {"pipeline": self.pipeline.state_dict()} | held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""
        self.pipeline.load_state_dict(state_dict["pipeline"])
        if self.assembler is not None:
            self.assembler.load_state_dict(state_dict["assembler"])


class WeightedStepper(OptimizationStepper):
    """A trainer's stepper that takes one optimiser step per minibatch (:func:`optimise`).

    Args:
        pipeline: makes the minibatches.
        trainer: provides the optimiser, the loss and the norm for gradient clipping.
        record: a function that returns the record for the optimiser's metrics of the current batch; None: no
            record.
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
        """Take the steps of a batch. Return the loss and the number of steps (0: no token in the loss)."""
        losses: list[Tensor] = [torch.zeros((), dtype=FLOAT)]

        def reduce(terms: TensorDictBase, batch: TensorDictBase) -> Tensor:
            loss = self.reduce(terms, batch)
            losses.append(loss.detach().cpu())
            return loss

        record = None if self.record is None else self.record()
        options = {"reduce": reduce, "max_grad_norm": self.max_grad_norm, "record": record, **self.keys}
        cut = has_key(sub_batch, MINIBATCH)  # the output of a second half holds all its minibatches
        minibatches = split_minibatches(sub_batch) if cut else [sub_batch]
        steps = optimise(minibatches, trainer.compute_loss, trainer.optimizer, **options)
        return TensorDict({"loss": sum(losses), "steps": torch.tensor(float(steps), dtype=FLOAT)})
