"""The checks of an audit: each is a function of the rows of one step of a dump.

A check compares the dump with the numbers that the declared recipe computes from the same rows. It returns
its findings and, if it could not check something, the reason. A check has passed if both are empty.

The advantages of a dump show how its trainer counted rollouts. The declared recipe counts each rollout once,
within its group. Its options say whether rollouts without a token in the loss count. The same stages also
compute advantages by other conventions from the same rewards: each row counts as a rollout; rollouts out of
the loss count; groups are cut by position, all with one of the dispatched sizes; the whole step is one group.
A group follows such a convention if its advantages differ from the declared ones, and equal those of the
convention. If two conventions give equal numbers, a check reports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from headrace.pipeline.conversations import strings
from headrace.pipeline.halves import part_of
from headrace.pipeline.order import index_of_split
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.tools.report import AGREE, report_columns
from headrace.transforms import BatchError, Ids, Status, loss_weight
from headrace.transforms.table import listing
from headrace.transforms.table.schema import FINISHED, FOLDED_WEIGHT, IN_LOSS, STEP_WEIGHT

from .logged import tolerance

ROWS, MASKED = "each row counts as a rollout", "rollouts out of the loss count"
BOTH = f"{ROWS}, and {MASKED}"
NO_ADVANTAGES = "the dump has no advantages"
NO_TOKENS = "the dump has no tokens: set source.tokenizer=PATH to make them from its texts"
MADE_FROM = {
    "prompt": "groups were made from prompts when the dump was read (source.group_by=prompt)",
    "order": "groups were made from the order of rows when the dump was read (source.group_by=order)",
}
UNKNOWN_SIZE = "the size of groups is not known; set it, as source.group_size=8"


class AuditFinding(NamedTuple):
    """A finding about some rows of a step."""

    step: int
    group: str | None
    """The group's label; None if the finding is about the whole step."""
    rollouts: list[str]
    """Labels of the rollouts that the finding is about."""
    rows: list[int]
    """Indices of the rows in the step, in the order of the dump."""
    expected: list[float]
    """Expected values: one for each row, or a single number."""
    found: list[float]
    """The dump's values, in the same form."""
    text: str
    """The finding as a sentence, with the first values."""
    share: float | None
    """Share of `rows` in the step's gradient, |weight × advantage × tokens|; None if it is not known."""


class CheckOutcome(NamedTuple):
    """The result of a check for one step."""

    findings: list[AuditFinding]
    lacking: str = ""
    """The reason why something could not be checked; empty if everything was checked."""


class DeclaredRecipe:
    """Compute the advantages of a recipe: run its stages before the split, without the gate, on all rows.

    Args:
        pipeline: the recipe's pipeline.
    """

    def __init__(self, pipeline: Pipeline):
        cut, stages = index_of_split(pipeline.stages), pipeline.stages
        writes = {name: getattr(stage, "out_keys", ()) for name, stage in stages.items()}
        gates = [stages[name] for name, keys in writes.items() if FINISHED in keys]
        weights = [stages[name] for name, keys in writes.items() if {STEP_WEIGHT, FOLDED_WEIGHT} & {*keys}]
        names = [name for name in pipeline.order[:cut] if FINISHED not in writes[name]]
        self.counts_masked = (gates[0] if gates else pipeline).empty == "count"
        self.group_size: int | None = gates[0].group_size if gates else None
        self.weight = weights[0] if weights else None
        self.remembers = [name for name in names if getattr(stages[name], "stateful", False)]
        self._parts = [part_of(pipeline, names, None, "exclude"), part_of(pipeline, names, None, "count")]

    def advantage(self, batch: TensorDictBase, *, masked: bool) -> Tensor:
        """Compute (N,) float64 advantages; NaN for rows without one.

        Args:
            batch: the rows of a step.
            masked: whether rollouts without a token in the loss count in the statistics.

        Raises:
            BatchError: the recipe refuses the rows, or has a state from earlier steps, which is unknown.
        """
        if self.remembers:
            raise BatchError(f"it has a state from steps before the dump, in {listing(self.remembers)}")
        columns = report_columns(self._parts[masked].run(batch))
        if "advantage" not in columns:
            raise BatchError("none of its stages writes an advantage")
        return torch.from_numpy(columns["advantage"]).double()


class AuditedStep:
    """The rows of a step, and the conventions by which its rollouts may have been counted.

    Args:
        step: number of the step.
        batch: the step of a source, TensorDict ``[N]``.
        declared: the recipe that ``pipeline=`` names.
        group_size: rollouts of each group at dispatch. None: read from ``expected_rollouts``.
        unsaid: what the dump's format does not contain (:attr:`Source.unsaid`).
        group_by: ``source.group_by``: what the groups were made from when the dump was read.
    """

    def __init__(
        self,
        step: int,
        batch: TensorDictBase,
        declared: DeclaredRecipe,
        *,
        group_size: int | None = None,
        unsaid: frozenset[str] = frozenset(),
        group_by: str | None = None,
    ):
        self.step, self.declared, self.unsaid, self.group_by = step, declared, unsaid, group_by
        self.size = len(batch)
        columns = {key: each for key, each in batch.items(include_nested=True) if isinstance(each, Tensor)}
        self._batch = TensorDict(columns, batch_size=[self.size])
        self.groups, self.rollouts = Ids(batch["group_id"]), Ids(batch["rollout_id"])
        self.group_names, self.rollout_names = (self._names(batch, unit) for unit in ("group", "rollout"))
        texts = batch["prompt_text"] if "prompt_text" in batch.keys() else None
        self.prompts = None if texts is None else strings(texts, self.size)
        mask = batch.get(("masks", "all_assistant_mask"), None)
        self.tokens: Tensor | None = None if mask is None else mask.sum(1)  # None: the dump has no lengths
        in_loss = torch.ones(self.size, dtype=torch.bool) if self.tokens is None else self.tokens > 0
        self.in_loss = in_loss & batch.get(IN_LOSS, torch.ones_like(in_loss))
        nothing = torch.zeros(self.size, dtype=torch.int64)
        status = batch.get("status", nothing)
        self.lost = self.rollouts.spread(
            self.rollouts.any((status == Status.FAILED) | (status == Status.ABORTED))
        )
        self.rewards = batch["next", "reward"].reshape(self.size, -1)
        self.rewarded = ~self.rewards.isnan().all(1)
        self.expected_rollouts: Tensor | None = batch.get("expected_rollouts", None)
        if self.expected_rollouts is None and group_size is not None:
            self.expected_rollouts = torch.full((self.size,), group_size)
        self.has_advantages = "logged_advantage" in batch.keys()
        unknown = torch.full((self.size,), torch.nan)
        self.logged: Tensor = batch.get("logged_advantage", unknown).double()  # NaN: the row has none
        self.weight: Tensor | None = batch.get("logged_weight", None)
        self.minibatch: Tensor | None = batch.get("logged_minibatch", None)
        self.trains = self.in_loss & ~self.lost
        if self.weight is not None:
            self.trains &= self.weight > 0  # NaN for rows that were not trained

    def _names(self, batch: TensorDictBase, unit: str) -> list[str]:
        labels = strings(batch[f"{unit}_label"], self.size) if f"{unit}_label" in batch.keys() else None
        return [str(each) for each in batch[f"{unit}_id"].tolist()] if labels is None else list(labels)

    # -- conventions of counting --------------------------------------------------------------------

    @cached_property
    def out_of_loss(self) -> Tensor:
        """(N,) bool: rows with a reward, of rollouts that are lost or have no token in the loss."""
        silent = self.rollouts.spread(self.rollouts.all(~self.in_loss))
        return (silent | self.lost) & self.rewarded

    @cached_property
    def several(self) -> Tensor:
        """(N,) bool: rows of rollouts with several rows."""
        return self.rollouts.spread(self.rollouts.count > 1)

    def expected(self, *, rows: bool = False, masked: bool = False, group: Tensor | None = None) -> Tensor:
        """Compute the recipe's advantages by a convention, (N,) float64; NaN for rows without one.

        Args:
            rows: whether each row counts as a rollout.
            masked: whether rollouts out of the loss count, including failed and aborted rollouts.
            group: (N,) int64, the groups to compare; None: those of the dump.

        Raises:
            BatchError: the recipe refuses the rows.
        """
        here = self.rewarded & (~self.lost | masked)
        found = torch.full((self.size,), float("nan"), dtype=torch.float64)
        if not bool(here.any()):
            return found
        batch = self._batch[here]
        if rows:
            batch["rollout_id"] = torch.arange(len(batch))
        if group is not None:
            batch["group_id"] = group[here]
        found[here] = self.declared.advantage(batch, masked=masked or self.declared.counts_masked)
        return found

    @cached_property
    def refusal(self) -> str:
        """The reason why no advantages can be compared; empty if they can be."""
        if not self.has_advantages:
            return NO_ADVANTAGES
        try:
            _ = self.by_recipe
        except BatchError as err:
            return f"the recipe refuses step {self.step}: {err}"
        return ""

    @cached_property
    def by_recipe(self) -> Tensor:
        """(N,) float64, the advantages of the declared recipe; NaN for rows without one."""
        return self.expected()

    @cached_property
    def near(self) -> float:
        """The greatest difference at which two advantages count as equal."""
        return tolerance(self.logged[self.logged.isfinite()].numpy())

    def differs(self, advantage: Tensor) -> Tensor:
        """(N,) bool, rows that train and whose logged advantage differs from `advantage`."""
        compared = self.trains & self.logged.isfinite() & advantage.isfinite()
        return compared & ((self.logged - advantage).abs() > self.near)

    @property
    def flipped(self) -> Tensor:
        """(N,) bool, rows that train with a logged advantage of the opposite sign, beyond rounding."""
        far = torch.minimum(self.logged.abs(), self.by_recipe.abs()) > self.near
        return self.differs(self.by_recipe) & far & (self.logged * self.by_recipe < 0)

    @cached_property
    def by_convention(self) -> dict[str, Tensor]:
        """(N,) advantages for each convention that may differ from the declared one in this step."""
        found: dict[str, Tensor] = {}
        masked = bool(self.out_of_loss.any()) and not self.declared.counts_masked
        masked |= bool((self.out_of_loss & self.lost).any())
        fanned = bool(self.several.any())
        tried: dict[str, dict[str, Any]] = {}
        if fanned:
            tried[ROWS] = {"rows": True}
        if masked:
            tried[MASKED] = {"masked": True}
        if fanned and masked:
            tried[BOTH] = {"rows": True, "masked": True}
        every = {"rows": True, "masked": True}
        if self.expected_rollouts is not None:
            sizes = self.expected_rollouts
            for size in sizes[sizes > 0].unique().tolist():
                place = torch.arange(self.size) // size
                tried[f"groups are cut by position, {size} rows each"] = {"group": place, **every}
        if self.groups.n > 1:
            tried["the whole step is one group"] = {"group": torch.zeros_like(self.rollouts.of), **every}
        for name, how in tried.items():
            try:
                found[name] = self.expected(**how)
            except BatchError:  # for example, if single rows have no rewards
                continue
        return found

    @cached_property
    def conventions(self) -> list[list[str]]:
        """For each group: the other conventions that its advantages fit. Most groups have an empty list.

        Conventions that differ from the declared one in one point are tried before those that differ in two.
        Conventions with other groups must fit the whole step.
        """
        names: list[list[str]] = [[] for _ in range(self.groups.n)]
        off = self.groups.any(self.differs(self.by_recipe))
        if not bool(off.any()):
            return names
        for ranked in ((ROWS, MASKED), (BOTH,), self.by_convention.keys() - {ROWS, MASKED, BOTH}):
            open_groups = [bool(bad) and not found for bad, found in zip(off, names, strict=True)]
            for name in sorted(name for name in ranked if name in self.by_convention):
                differs = self.differs(self.by_convention[name])
                if name not in (ROWS, MASKED, BOTH) and bool(differs.any()):
                    continue
                fits = ~self.groups.any(differs)
                for at in (fits & torch.tensor(open_groups)).nonzero().flatten().tolist():
                    names[at].append(name)
        return names

    @property
    def explained(self) -> Tensor:
        """(N,) bool: rows of groups whose advantages identify another convention."""
        return (
            self.groups_that_fit(ROWS, BOTH)
            | self.groups_that_fit(MASKED)
            | self.groups_that_fit(*self.other_groups)
        )

    def groups_that_fit(self, *conventions: str) -> Tensor:
        """(N,) bool: rows of groups that fit at least one of these conventions, and no other."""
        fits = [bool(names) and set(names) <= set(conventions) for names in self.conventions]
        return self.groups.spread(torch.tensor(fits, dtype=torch.bool))

    @property
    def other_groups(self) -> set[str]:
        """Conventions with other groups that fit a group of this step."""
        return {name for names in self.conventions for name in names} - {ROWS, MASKED, BOTH}

    # -- weights of rows, and findings ----------------------------------------------------------------

    @cached_property
    def declared_weight(self) -> Tensor | None:
        """(N,) float64, the weight of each token of a row in the recipe's mean; None: unknown."""
        stage = self.declared.weight
        if stage is None or stage.unit == "turn" or self.tokens is None:
            return None
        known = self.minibatch is not None and bool((self.minibatch >= 0).any())
        weighed = loss_weight(
            torch.where(self.trains, self.tokens, 0),
            stage.unit,
            rollout_id=self.rollouts.labels,
            group_id=self.groups.labels,
            minibatch=self.minibatch if known else None,
            length=stage.length,
            power=stage.power,
            dtype=torch.float64,
        )
        return weighed.weight * (stage.ranks if stage.gradients == "mean" else 1)

    @cached_property
    def gradient(self) -> Tensor | None:
        """(N,) float64: |weight × advantage × tokens|, divided by its sum over all rows; None: unknown."""
        try:
            advantage = self.logged if self.has_advantages else self.by_recipe
        except BatchError:
            return None
        if self.tokens is None:
            return None
        weight = self.declared_weight if self.weight is None else self.weight
        if weight is None:
            weight = torch.ones(self.size, dtype=torch.float64)
        size = torch.where(self.trains, (weight * advantage * self.tokens).abs(), 0.0).nan_to_num()
        total = float(size.sum())
        return size / total if total > 0 else None

    def finding(
        self,
        rows: Tensor,
        text: str,
        expected: Sequence[float] | Tensor,
        found: Sequence[float] | Tensor,
        *,
        group: str | None = None,
        meant: Tensor | None = None,
    ) -> AuditFinding:
        """Make a finding about (N,) bool `rows`.

        Args:
            rows: the rows that the finding is about.
            text: the finding as a sentence.
            expected: the expected values: a list, or an (N,) tensor, of which the values of `rows` are taken.
            found: the dump's values, in the same form.
            group: the label of the group that the finding is about. None: the whole step.
            meant: (N,) bool, the rows whose rollouts the finding names. None: `rows`.
        """
        at = rows.nonzero().flatten()
        rollouts = self.names_of(rows if meant is None else rows & meant)
        numbers = [
            (each[at] if isinstance(each, Tensor) else torch.tensor(list(each), dtype=torch.float64)).tolist()
            for each in (expected, found)
        ]
        share = None if self.gradient is None else float(self.gradient[at].sum())
        return AuditFinding(self.step, group, rollouts, at.tolist(), numbers[0], numbers[1], text, share)

    def names_of(self, rows: Tensor) -> list[str]:
        """Labels of the rollouts of (N,) bool `rows`."""
        return list(dict.fromkeys(self.rollout_names[row] for row in rows.nonzero().flatten().tolist()))

    def first_advantages(self, rows: Tensor) -> str:
        """The first advantages of these rows, logged and expected, as text."""
        pairs = (
            f"row {row} (rollout {self.rollout_names[row]}) {self.logged[row]:.4g}, by the recipe "
            f"{self.by_recipe[row]:.4g}"
            for row in rows.nonzero().flatten().tolist()
        )
        return listing(pairs, most=3)

    def by_group(self, rows: Tensor) -> list[tuple[int, str, Tensor]]:
        """The groups of these rows, in order: the index and the label of each, and (N,) bool, its rows."""
        found = []
        for group in dict.fromkeys(self.groups.of[rows].tolist()):
            own = rows & (self.groups.of == group)
            found.append((group, self.group_names[int(self.groups.first[group])], own))
        return found


# -- the checks ------------------------------------------------------------------------------------------


def wrong_signs(step: AuditedStep) -> CheckOutcome:
    """Find rows whose advantage has the wrong sign: logged × declared < 0, and neither is 0 up to rounding.

    Needs advantages. Groups that follow another convention are reported by the check of that convention. A
    finding is about a group. `expected` and `found` are advantages of its rows.
    """
    if step.refusal:
        return CheckOutcome([], step.refusal)
    return CheckOutcome(
        [
            step.finding(
                rows,
                f"group {group}: wrong signs: {step.first_advantages(rows)}",
                step.by_recipe,
                step.logged,
                group=group,
            )
            for _, group, rows in step.by_group(step.flipped & ~step.explained)
        ]
    )


def mixed_groups(step: AuditedStep) -> CheckOutcome:
    """Find groups with several prompts: no prompt is on a row of every rollout of the group.

    Needs prompts, and groups that were made neither from prompts nor from the order of rows. With advantages,
    it also finds groups that were compared with rollouts of other groups: groups were cut by position, or the
    whole step was one group. `expected` is 1 and `found` the number of prompts, or both are advantages.
    """
    findings, lacking = [], MADE_FROM.get(step.group_by or "", "")
    if step.prompts is None:
        lacking = lacking or "the dump has no prompts"
    elif not lacking:
        texts: dict[str, int] = {}
        number = torch.tensor([texts.setdefault(prompt, len(texts)) for prompt in step.prompts])
        here = ~step.lost  # failed rollouts may have no text
        groups, rollouts, prompts = (
            Ids(each[here]) for each in (step.groups.labels, step.rollouts.labels, number)
        )
        # For each prompt of a group, count the rollouts: segments of a rollout may have different prompts.
        once = rollouts.paired_with(prompts).is_first
        have = Ids(groups.paired_with(prompts).labels, once)
        size = torch.bincount(groups.of[rollouts.is_first], minlength=groups.n)
        mixed = torch.zeros_like(here)
        mixed[here] = groups.spread(~groups.any(have.spread(have.count) == groups.spread(size)))
        for _, group, rows in step.by_group(mixed):
            own = list(dict.fromkeys(step.prompts[row] for row in rows.nonzero().flatten().tolist()))
            text = (
                f"group {group} has {len(own)} prompts: {listing([repr(each[-40:]) for each in own], most=3)}"
            )
            findings.append(step.finding(rows, text, [1], [len(own)], group=group))
    if step.refusal:
        return CheckOutcome(findings, lacking)
    for at, group, rows in step.by_group(step.groups_that_fit(*step.other_groups)):
        how = " or ".join(step.conventions[at])
        text = f"group {group} is compared with other groups, as if {how}: {step.first_advantages(rows)}"
        findings.append(step.finding(rows, text, step.by_recipe, step.logged, group=group))
    return CheckOutcome(findings, lacking)


def _present(step: AuditedStep) -> tuple[Tensor, Tensor]:
    """For each group, the number of rollouts that are not lost, and the number of all rollouts; both (P,)."""
    group, lost = (each[step.rollouts.first] for each in (step.groups.of, step.lost))
    every = torch.bincount(group, minlength=step.groups.n)
    return every - torch.bincount(group[lost], minlength=step.groups.n), every


def short_groups(step: AuditedStep) -> CheckOutcome:
    """Find incomplete groups that train: some dispatched rollouts failed, were aborted, or are missing.

    Needs the size of groups, and groups that were not made from the order of rows. Without the size, it only
    finds groups with a failed or aborted rollout. `expected` and `found` are numbers of rollouts.
    """
    have, every = _present(step)
    expected, lacking = every, UNKNOWN_SIZE
    if step.expected_rollouts is not None:
        expected, lacking = step.expected_rollouts[step.groups.first], ""
    if step.group_by == "order":  # a missing rollout shifts all later groups
        lacking = MADE_FROM["order"]
    short = (have < expected) & step.groups.any(step.trains)
    findings = []
    for at, group, rows in step.by_group(step.groups.spread(short)):
        gone = step.names_of(rows & step.lost)
        text = f"group {group} has {int(have[at])} of {int(expected[at])} rollouts"
        text += f"; failed or aborted: {listing(gone)}" if gone else ""
        findings.append(step.finding(rows, text, [int(expected[at])], [int(have[at])], group=group))
    return CheckOutcome(findings, lacking)


def oversized_groups(step: AuditedStep) -> CheckOutcome:
    """Find groups that train with more rollouts than were dispatched: a prompt drawn twice, or reused ids.

    Needs the size of groups, and groups that were not made from the order of rows. `expected` and `found` are
    numbers of rollouts.
    """
    if step.group_by == "order":
        return CheckOutcome([], MADE_FROM["order"])
    if step.expected_rollouts is None:
        return CheckOutcome([], UNKNOWN_SIZE)
    _, every = _present(step)
    expected = step.expected_rollouts[step.groups.first]
    large = (every > expected) & step.groups.any(step.trains)
    findings = []
    for at, group, rows in step.by_group(step.groups.spread(large)):
        text = f"group {group} has {int(every[at])} rollouts, but was dispatched with {int(expected[at])}"
        findings.append(step.finding(rows, text, [int(expected[at])], [int(every[at])], group=group))
    return CheckOutcome(findings)


def _counted_otherwise(step: AuditedStep, convention: str, about: Tensor, text: str) -> CheckOutcome:
    """Find groups whose advantages follow a convention other than the declared one.

    A group that fits neither convention was not checked, if the two conventions differ for this group.
    """
    if step.refusal:
        return CheckOutcome([], step.refusal)
    findings = []
    for _, group, rows in step.by_group(step.groups_that_fit(convention, BOTH)):
        off = step.differs(step.by_recipe) & rows
        flipped = int((off & step.flipped).sum())
        line = f"group {group}: {text}: {listing(step.names_of(rows & about))}; {step.first_advantages(off)}"
        line += f"; wrong signs among these: {flipped}" if flipped else ""
        findings.append(step.finding(rows, line, step.by_recipe, step.logged, group=group, meant=about))
    off, lacking = step.groups.any(step.differs(step.by_recipe)), ""
    if bool(off.any()) and convention in step.by_convention:
        tell = step.groups.any((step.by_convention[convention] - step.by_recipe).abs() > step.near)
        unknown = off & tell & torch.tensor([not names for names in step.conventions])
        if named := [group for _, group, _ in step.by_group(step.groups.spread(unknown))]:
            lacking = f"the advantages of groups {listing(named)} of step {step.step} fit neither convention"
    return CheckOutcome(findings, lacking)


def counted_twice(step: AuditedStep) -> CheckOutcome:
    """Find rollouts that count once for each of their rows, because the statistics were over rows.

    Needs advantages and rollout ids. `expected` and `found` are advantages of the group.
    """
    if "rollouts" in step.unsaid:
        return CheckOutcome([], "the dump has no rollout ids, and each row is read as a rollout")
    return _counted_otherwise(step, ROWS, step.several, "rollouts that count once for each of their rows")


def masked_counted(step: AuditedStep) -> CheckOutcome:
    """Find rollouts that are in the baseline only: they are out of the loss, but their rewards count.

    Such a rollout has a reward, and it failed, was aborted or has no token in the loss. Needs advantages and
    loss masks, and a recipe that does not count such rollouts. `expected` and `found` are advantages of the
    group.
    """
    text = "rollouts that are out of the loss but count in the baseline"
    outcome = _counted_otherwise(step, MASKED, step.out_of_loss, text)
    if "masks" in step.unsaid:
        return outcome._replace(lacking="the dump has no loss masks")
    if step.declared.counts_masked and not outcome.lacking:
        why = "the recipe counts masked rollouts; to find them, set pipeline.empty=exclude"
        return outcome._replace(lacking=why)
    return outcome


def other_advantages(step: AuditedStep) -> CheckOutcome:
    """Find advantages that differ from the declared ones, if no other check explains the difference.

    Needs advantages. A finding is about a step; `expected` and `found` are advantages.
    """
    if step.refusal:
        return CheckOutcome([], step.refusal)
    off = step.differs(step.by_recipe) & ~step.explained & ~step.flipped
    if not bool(off.any()):
        return CheckOutcome([])
    compared = int((step.trains & step.logged.isfinite() & step.by_recipe.isfinite()).sum())
    text = (
        f"{int(off.sum())} of {compared} advantages are not those of the recipe: {step.first_advantages(off)}"
    )
    for at, group, _ in step.by_group(off):
        if names := step.conventions[at]:
            text += f"; those of group {group} are as if {' as well as if '.join(names)}"
        if step.expected_rollouts is None and (said := drawn_again(step, at)):
            text += f"; group {group}: {said}"
    return CheckOutcome([step.finding(off, text, step.by_recipe, step.logged)])


def drawn_again(step: AuditedStep, group: int) -> str:
    """Say that a group of unknown size has the advantages of several draws of its prompt.

    The rollouts of a group, in the order of the dump, are cut into equal parts. The parts are draws if in
    each part the logged advantages have the mean 0, and are the expected ones up to a constant and a factor
    above 0. If several cuts fit, the text names the cut with the fewest parts. Without one, it is empty.

    Args:
        step: the rows of the step.
        group: index of the group.
    """
    of_group = step.groups.of == group
    first = torch.zeros_like(of_group).index_fill(0, step.rollouts.first, True)
    rows = (of_group & first & step.trains).nonzero().flatten()
    logged, expected = step.logged[rows], step.by_recipe[rows]
    count = len(rows)
    if not bool((logged.isfinite() & expected.isfinite()).all()):
        return ""
    for runs in (runs for runs in range(2, count // 2 + 1) if count % runs == 0):
        one, other = (each.reshape(runs, -1) for each in (logged, expected))
        centred = other - other.mean(1, keepdim=True)
        equal = (other == other[:, :1]).all(1, keepdim=True)  # draws with equal rewards show no factor
        factor = (centred * one).sum(1, keepdim=True) / (centred**2).sum(1, keepdim=True)
        factor = torch.where(equal, 1.0, factor)
        fits = ((one - factor * centred).abs() <= step.near) & (factor > 0)  # logged zeros alone show no draw
        if not bool(fits.all()):
            continue
        draws = "each half" if runs == 2 else f"each of {runs} equal parts"
        shifts = listing([f"{value:+.4g}" for value in (one - factor * other).mean(1).tolist()], most=4)
        scaled = "" if bool(((factor - 1).abs() <= AGREE).all()) else " and a factor"
        return (
            f"{draws} of its {count} rollouts is off by a constant{scaled} ({shifts}), as if its prompt was "
            f"drawn {runs} times: if it was, set source.group_size={count // runs}"
        )
    return ""


def wrong_weights(step: AuditedStep) -> CheckOutcome:
    """Find minibatches with a row i whose loss weight w_i is not the recipe's: |w_i / w*_i − 1| > ``AGREE``.

    w* are the weights of the recipe's LossWeight for the rows that trained
    (``headrace.transforms.loss_weight``). Needs weights, minibatches and tokens. `expected` and `found` are
    the weights of a token of each row.
    """
    if step.weight is None:
        return CheckOutcome([], "the dump has no loss weights")
    if step.minibatch is None or not bool((step.minibatch >= 0).any()):
        return CheckOutcome([], "the dump does not have all rows of each minibatch")
    if step.tokens is None:
        return CheckOutcome([], NO_TOKENS)
    declared = step.declared_weight
    if declared is None:
        return CheckOutcome([], "the recipe's mean is not over rows, rollouts, groups or tokens")
    findings = []
    ratio = step.weight / declared
    off = step.trains & ((ratio - 1).abs() > AGREE)
    for minibatch in step.minibatch[off].unique().tolist():
        rows = off & (step.minibatch == minibatch)
        mine = step.trains & (step.minibatch == minibatch)
        total = float((step.weight * step.tokens)[mine].sum())
        text = (
            f"minibatch {minibatch}: {int(rows.sum())} of {int(mine.sum())} rows have "
            f"{ratio[rows].min():.4g} to {ratio[rows].max():.4g} times the weight of the declared mean; "
            f"Σ weight × tokens is {total:.4g}"
        )
        findings.append(step.finding(rows, text, declared, step.weight))
    return CheckOutcome(findings)


CHECKS: dict[str, tuple[str, Callable[[AuditedStep], CheckOutcome]]] = {
    "signs": ("advantages of the wrong sign", wrong_signs),
    "mixed": ("groups of several prompts", mixed_groups),
    "incomplete": ("incomplete groups", short_groups),
    "oversized": ("groups with too many rollouts", oversized_groups),
    "counted_twice": ("rollouts that count more than once", counted_twice),
    "masked": ("rollouts in the baseline only", masked_counted),
    "advantages": ("other advantages than the recipe's", other_advantages),
    "weights": ("other weights than the recipe's", wrong_weights),
}
"""The title and the function of each check, by name."""
