"""What an adapter settles before the first rollout: the default scale, and whether the recipe can run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from tensordict import TensorDict

from headrace.pipeline import Decider, Pipeline
from headrace.transforms import BatchError, MissingKeyError, Status
from headrace.transforms.columns import DEFAULTS

SETS_SCALE = re.compile(r"[+~]*(\S*@)?pipeline\.stages\.advantage(\.scale)?(=.*)?")
KEYS = {"reward": DEFAULTS["reward"], "tokens": DEFAULTS["loss_mask"]}


def scale_overrides(
    trainers: Any, recipe: str | None, default: str, overrides: Iterable[str]
) -> tuple[str, ...]:
    """The override that gives the default recipe the scale that the trainer is set to.

    Empty if you name another recipe, or the scale.

    Args:
        trainers: the trainer's setting: ``group`` (or True), ``batch`` or ``none`` (or False).
        recipe: the recipe that you name; None: the default one.
        default: name of the adapter's default recipe.
        overrides: your overrides.

    Example:
        >>> scale_overrides(False, None, "as/verl", ["pipeline.stages.gate.group_size=8"])
        ('pipeline.stages.advantage.scale=none',)
        >>> scale_overrides(False, None, "as/verl", ["pipeline.stages.advantage.scale=batch"])
        ()
    """
    if recipe not in (None, default) or any(SETS_SCALE.fullmatch(word) for word in overrides):
        return ()
    scale = {"True": "group", "False": "none"}.get(str(trainers), str(trainers))
    return (f"pipeline.stages.advantage.scale={scale}",)


def require_columns(
    pipeline: Pipeline, names: Iterable[str], hook: str, *, rewards: int = 1, of_tokens: bool = False
) -> None:
    """Refuse a recipe that reads a column which the hook of a trainer does not have.

    The recipe runs on one made-up group with the columns of the hook, so this error is the one that the first
    batch would raise. The pipeline itself sees no batch. Pipelines over several ranks are not checked.

    Args:
        pipeline: the recipe; only stages before the split run.
        names: of the columns, as :func:`headrace.decide` takes them.
        hook: of the trainer, for the message.
        rewards: number of rewards of a row.
        of_tokens: whether the hook gives a TensorDict with a loss mask. False: plain columns.

    Raises:
        MissingKeyError: the recipe reads another column.

    Example:
        >>> from headrace.pipeline import load_pipeline
        >>> require_columns(load_pipeline("grpo"), ["group_id", "rollout_id", "expected_rollouts"], "TRL")
        Traceback (most recent call last):
        headrace.transforms.errors.MissingKeyError: ...
    """
    if pipeline.rank_options.process_group is not None:
        return
    sizes = [getattr(stage, "group_size", None) for stage in pipeline.stages.values()]
    size = max([size for size in sizes if size is not None], default=2)
    rows = torch.arange(size)
    reward = (rows % 2).float()
    known = {
        "group_id": torch.zeros_like(rows),
        "rollout_id": rows,
        "expected_rollouts": torch.full_like(rows, size),
        "status": torch.full_like(rows, int(Status.COMPLETED)),
        "reward": reward if rewards == 1 else reward.unsqueeze(1).expand(-1, rewards),
        "tokens": torch.ones(size, 2, dtype=torch.bool) if of_tokens else torch.full_like(rows, 2),
        "length": torch.full_like(rows, 2),
        "turn": torch.zeros_like(rows),
        "role": ["role"] * size,
        "episode_id": list(map(str, range(size))),
    }
    decider = Decider(deepcopy(pipeline))
    columns: Mapping[str, Any] = {name: known[name] for name in names}
    if of_tokens:
        columns = TensorDict({KEYS.get(name, name): column for name, column in columns.items()}, [size])
    else:
        columns = {name: column for name, column in columns.items() if decider.reads(name)}
    try:
        decider.decide(columns)
    except MissingKeyError as err:
        raise MissingKeyError(
            f"the recipe does not fit {hook}, which gives it the columns {', '.join(names)}: {{why}}",
            why=str(err),
        ) from err
    except (BatchError, ValueError):  # about the rows that were made up, and not about a column
        return
