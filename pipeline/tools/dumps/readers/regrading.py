"""Replace the rewards of a dump by those of a function that grades its texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms import Status
from headrace.transforms.table import Ids, listing
from headrace.transforms.table.schema import has_key
from headrace.transforms.table.tensordicts import listed, shallow_copy

from .record import SourceError, first_line, quote

Grade = Callable[..., Any]
STALE = ("logged_advantage", "reward_names")  # columns that belong to the old rewards


class Regraded(NamedTuple):
    """The changes that another grader makes. :meth:`with_step` adds those of a further step."""

    rollouts: int = 0
    """Number of graded rollouts."""
    changed: int = 0
    """Number of rollouts whose reward has changed."""
    known: int = 0
    """Number of rollouts that had a reward before."""
    before: float = 0.0
    """Sum of the old rewards of these rollouts, over all reward columns."""
    after: float = 0.0
    """Sum of the new rewards of the same rollouts."""
    groups: int = 0
    """Number of groups with at least two graded rollouts."""
    gained: int = 0
    """Number of groups whose rewards were equal and now differ."""
    lost: int = 0
    """Number of groups whose rewards differed and are now equal."""

    def with_step(self, step: Regraded) -> Regraded:
        """Add the changes in another step."""
        return Regraded(*(a + b for a, b in zip(self, step, strict=True)))  # type: ignore[arg-type]

    def __str__(self) -> str:
        means = f"mean {self.before / self.known:.4g} → {self.after / self.known:.4g}; " if self.known else ""
        share = f" ({self.changed / self.rollouts:.0%})" if self.rollouts else ""
        return (
            f"re-graded: {self.rollouts:,} rollouts, {self.changed:,}{share} have another reward; {means}"
            f"of {self.groups:,} groups {self.gained:,} became informative and {self.lost:,} uninformative"
        )


def regrade(batch: TensorDictBase, grade: Grade) -> tuple[TensorDictBase, Regraded]:
    """Grade each rollout of a batch from :func:`open_dump` once, by its texts.

    If a rollout has several rows, its response is the responses of its rows, in order, joined by line breaks.
    Its prompt is that of the first row. Each row gets the new reward. Rollouts that failed or were aborted
    are not graded.

    Args:
        batch: TensorDict ``[N]``; it is not changed.
        grade: a function of two lists of R strings, the prompts (empty strings if the dump has none) and the
            responses. It returns R rewards, or R lists of K rewards. If it has a parameter ``columns``, it
            gets a dict of lists of R: ``group`` and ``rollout`` (labels), ``reward`` (the old one), and
            ``ground_truth`` (texts) if the dump has it.

    Returns:
        - The batch with the new rewards, (N, K) float64, and without the logged advantages, which belong to
          the old rewards.
        - The changes.

    Raises:
        SourceError: the batch has no texts; there is not one reward for each rollout; or a reward is not
            finite.

    Example:
        >>> from headrace.pipeline.tools.dumps.readers import Sample, to_batch
        >>> batch = to_batch([Sample("a", i, 0.0, response=text) for i, text in enumerate(["4", "5"])])
        >>> again, changed = regrade(batch, lambda prompts, responses: [text == "4" for text in responses])
        >>> again["next", "reward"].flatten().tolist(), changed.changed, changed.gained
        ([1.0, 0.0], 1, 1)
    """
    if not has_key(batch, "response_text"):
        raise SourceError("re-grading needs the texts of the responses, and this dump has none")
    ids, status = Ids(batch.get("rollout_id")), batch.get("status", None)
    rollout = ids.spread(ids.first)
    lost = torch.zeros(len(batch), dtype=torch.bool)
    if status is not None:  # one lost row is enough
        lost = ids.spread(ids.any(torch.isin(status, torch.tensor([Status.FAILED, Status.ABORTED]))))
    heads = (ids.is_first & ~lost).nonzero().flatten()
    changed = shallow_copy(batch).exclude(*STALE)
    old = batch.get(("next", "reward")).double().reshape(len(batch), -1)
    if not len(heads):
        return changed, Regraded()
    new = _grades(batch, grade, heads, rollout, old)
    place = torch.zeros(len(batch), dtype=torch.int64)
    place[heads] = torch.arange(len(heads))
    rewards = old.new_full((len(batch), new.shape[1]), float("nan"))
    if old.shape[1] == new.shape[1]:
        rewards = old.clone()
    rewards[~lost] = new[place[rollout[~lost]]]
    changed["next", "reward"] = rewards
    return changed, _change(old[heads], new, batch.get("group_id")[heads])


def _grades(batch: TensorDictBase, grade: Grade, heads: Tensor, rollout: Tensor, old: Tensor) -> Tensor:
    """(R, K) float64, the new rewards of the rollouts whose first rows are `heads` (R,)."""
    responses: dict[int, list[str]] = {}
    for head, text in zip(rollout.tolist(), listed(batch.get("response_text")), strict=True):
        responses.setdefault(head, []).append(text)
    at = heads.tolist()

    def of_heads(key: str, otherwise: Sequence[Any]) -> Sequence[Any]:
        if not has_key(batch, key):
            return otherwise
        values = listed(batch.get(key))
        return [values[row] for row in at]

    prompts = of_heads("prompt_text", [""] * len(at))
    labels = of_heads("rollout_label", batch["rollout_id"][heads].tolist())
    columns = {"group": of_heads("group_label", batch["group_id"][heads].tolist()), "rollout": labels}
    reward = old[heads]
    columns["reward"] = reward.flatten().tolist() if reward.shape[1] == 1 else reward.tolist()
    if has_key(batch, "ground_truth"):
        columns["ground_truth"] = of_heads("ground_truth", [])
    signature, texts = inspect.signature(grade), (prompts, ["\n".join(responses[head]) for head in at])
    takes_columns = any(
        each.name == "columns" or each.kind is each.VAR_KEYWORD for each in signature.parameters.values()
    )
    more = {"columns": columns} if takes_columns else {}
    try:
        signature.bind(*texts, **more)
    except TypeError as err:
        raise SourceError(f"a grader takes two lists, of prompts and of responses: {err}") from err
    given = grade(*texts, **more)
    return _checked(given, [str(label) for label in labels])


def _checked(given: Any, labels: Sequence[str]) -> Tensor:
    """Check new rewards, and return them as (R, K) float64.

    Raises:
        SourceError: the values have another shape, or are not finite.
    """
    try:
        new = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as err:
        raise SourceError(
            f"a grader returns a number, or K of them, for each rollout; found {quote(given)}: "
            f"{first_line(err)}"
        ) from err
    if new.ndim not in (1, 2) or len(new) != len(labels) or new.numel() == 0:
        raise SourceError(
            f"a grader returns ({len(labels)},) or ({len(labels)}, K) rewards, one for each rollout; found "
            f"{tuple(new.shape)} for the rollouts {listing(labels)}"
        )
    new = new.reshape(len(new), -1)
    if len(bad := (~new.isfinite()).any(1).nonzero().flatten().tolist()):
        found = listing(f"{quote(new[row].tolist())} for the rollout {labels[row]}" for row in bad)
        raise SourceError(f"a reward is finite; found {found}")
    return new


def _change(old: Tensor, new: Tensor, group: Tensor) -> Regraded:
    """The changes from old to new rewards of R rollouts, (R, K) each."""
    same = old.shape == new.shape
    changed = (old != new).any(1) if same else torch.ones(len(new), dtype=torch.bool)
    known = ~old.isnan().all(1)
    groups = Ids(group)
    several = groups.is_first & (groups.spread(groups.count) > 1)
    differed, differ = (_differ(values, groups) for values in (old, new))
    return Regraded(
        rollouts=len(new),
        changed=int(changed.sum()),
        known=int(known.sum()),
        before=float(old[known].nansum()),
        after=float(new[known].sum()),
        groups=int(several.sum()),
        gained=int((several & differ & ~differed).sum()),
        lost=int((several & differed & ~differ).sum()),
    )


def _differ(values: Tensor, groups: Ids) -> Tensor:
    """(R,) bool: whether one of K rewards differs within the rollout's group; `values` is (R, K)."""
    differ = torch.zeros(len(values), dtype=torch.bool)
    for column in values.T:
        low, high = (column.nan_to_num(nan=end) for end in (float("inf"), float("-inf")))
        differ |= groups.spread(groups.max(high) > groups.min(low))
    return differ
