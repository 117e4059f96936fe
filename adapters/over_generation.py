"""Over-generation: more groups are sampled than trained, and those that pass the filter are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.pipeline import Pipeline
from headrace.pipeline.halves import before_the_split, part_of
from headrace.transforms import Criterion, SampleFilter
from headrace.transforms.table import Rows
from headrace.transforms.table.annotations import fits

STAGE = "over_generation"


class FirstGroups(Criterion, columns=("group",)):
    """Keep the first groups that have a row in the loss. Reason: ``left_over``.

    Args:
        groups: number of groups to keep, in the order of the batch.
    """

    reason = "left_over"

    def __init__(self, *, groups: int):
        self.name_columns({})
        self.groups, self.in_keys = groups, (self.group_key,)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        number, trains = rows.groups.of, rows.in_loss
        chosen = list(dict.fromkeys(number[trains].tolist()))[: self.groups]
        return ~trains | torch.isin(number, number.new_tensor(chosen))


def train_first(pipeline: Pipeline, groups: int) -> Pipeline:
    """Return the stages before the split, then a filter that keeps the first `groups` groups in the loss."""
    first = before_the_split(pipeline)
    more = {STAGE: SampleFilter(criterion=FirstGroups(groups=groups), action="mask")}
    return part_of(first, first.order, first._half, more=more)


def rows_to_train(in_loss: Tensor, group_size: int, number: int) -> Tensor:
    """Choose groups for a trainer, those with a token in the loss first. Return the (number,) rows, in order.

    If these groups are too few, other groups fill the batch up, because a trainer's batch has a fixed size.
    The tokens of other groups are out of the loss.

    Args:
        in_loss: (N, T) bool.
        group_size: rows of a group, which are consecutive.
        number: how many rows to keep, a multiple of `group_size`.

    Example:
        >>> in_loss = torch.tensor([[False], [False], [True], [False], [True], [True]])
        >>> rows_to_train(in_loss, 2, 4).tolist()
        [2, 3, 4, 5]
    """
    trains = in_loss.any(1).view(-1, group_size).any(1)
    taken = trains.int().argsort(descending=True, stable=True)[: number // group_size].sort().values
    return (taken.unsqueeze(1) * group_size + torch.arange(group_size, device=taken.device)).flatten()


def rows_of(output: dict[str, Any], rows: Tensor, number: int) -> dict[str, Any]:
    """Select some rows of a trainer's batch.

    Args:
        output: the batch. Its values are tensors of `number` rows, tensors without dimensions, or None.
        rows: (K,) the rows to keep.
        number: rows of the batch.

    Raises:
        ValueError: a value does not have one row for each completion, such as the pixels of images.
    """
    kept = dict[str, Any]()
    for name, value in output.items():
        if value is None or (isinstance(value, Tensor) and not value.ndim):
            kept[name] = value
        elif isinstance(value, Tensor) and len(value) == number and name != "pixel_values":
            kept[name] = value[rows.to(value.device)]
        else:
            raise ValueError(
                f"over_generation trains some of the {number} completions, and {name!r} has no row for each. "
                "Attach the recipe without over_generation"
            )
    return kept


def check_over_generation(trainer: Any, pipeline: Pipeline, factor: int) -> None:
    """Check that a trainer of TRL can train one of every `factor` groups.

    Raises:
        ValueError: the trainer cannot.
    """
    if not fits(factor, int) or factor < 1:
        raise ValueError(f"over_generation must be an integer ≥ 1; got {factor!r:.200}")
    if factor == 1:
        return
    rows, size = trainer.args.per_device_train_batch_size, trainer.num_generations
    generated = rows * trainer.args.steps_per_generation
    if rows % factor or generated % (factor * size):
        raise ValueError(
            f"over_generation={factor} trains 1 of {factor} groups: per_device_train_batch_size must be a "
            f"multiple of {factor}, and per_device_train_batch_size * steps_per_generation a multiple "
            f"of {factor} * num_generations = {factor * size}; got {rows} and {generated}"
        )
    if not any(isinstance(stage, SampleFilter) for stage in pipeline.stages.values()):
        raise ValueError(
            f"over_generation={factor} trains the groups that pass the recipe's filter, and the recipe has "
            "none: name a recipe with a filter, such as 'dapo'"
        )
    if pipeline.rank_options.process_group is not None:
        raise ValueError(
            "over_generation chooses the groups of each rank by itself: leave out process_group, and let "
            f"per_device_train_batch_size * steps_per_generation be a multiple of num_generations ({size})"
        )
