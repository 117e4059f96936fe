"""What is wrong with a step that somebody has trained: each check is a function of the rows of its dump.

What a dump says is held against what a declared recipe makes of the same rows. A check returns what it found,
and what it could not look at, in words: it is passed only where both are empty.

Advantages say how a trainer counted. The declared recipe counts each rollout once, within its group, and
those without a token in the loss as it says. Other conventions are computed alike, of the same rewards and by
the same stages: each row a rollout; rollouts out of the loss counted; groups cut by position; the whole step
one group. A group is of another convention where its advantages are not the declared ones and all of them are
that convention's. Where two conventions give the same numbers nothing can be said, and nothing is.
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
from headrace.pipeline.order import place_of_cut
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.report.numbers import AGREE
from headrace.pipeline.report.row_columns import report_columns
from headrace.transforms import BatchError, Ids, Status, loss_weight
from headrace.transforms.errors import listing
from headrace.transforms.schema import FINISHED, FOLDED_WEIGHT, IN_LOSS, STEP_WEIGHT

from .logged import tolerance

ROWS, MASKED = "each row counts as a rollout", "rollouts out of the loss count"
BOTH = f"{ROWS}, and {MASKED}"
NO_ADVANTAGES = "the dump has no advantages"
NO_TOKENS = "the dump has no tokens: source.tokenizer=PATH makes them of its texts"


class AuditFinding(NamedTuple):
    """Something wrong with some rows of a step."""

    step: int
    group: str | None
    """Its label; None where it is of a whole step."""
    rollouts: list[str]
    """Labels of those that are meant."""
    rows: list[int]
    """Indices in the step, in the order of the dump."""
    expected: list[float]
    """What there should be: of each row, or one number."""
    found: list[float]
    """What there is, beside it."""
    text: str
    """In a sentence, with the first of the numbers."""
    share: float | None
    """Of the step's gradient, |weight × advantage × tokens|: that of `rows`; None where it is not known."""


class CheckOutcome(NamedTuple):
    """What a check says of a step."""

    findings: list[AuditFinding]
    lacking: str = ""
    """What could not be looked at, and why; empty: everything was."""


class DeclaredRecipe:
    """What a recipe makes of rows, whoever is missing: its stages before the cut, without its gate.

    Args:
        pipeline: of the recipe.
    """

    def __init__(self, pipeline: Pipeline):
        cut, stages = place_of_cut(pipeline.stages), pipeline.stages
        writes = {name: getattr(stage, "out_keys", ()) for name, stage in stages.items()}
        gates = [stages[name] for name, keys in writes.items() if FINISHED in keys]
        weights = [stages[name] for name, keys in writes.items() if {STEP_WEIGHT, FOLDED_WEIGHT} & {*keys}]
        names = [name for name in pipeline.order[:cut] if FINISHED not in writes[name]]
        self.counts_masked = (gates[0] if gates else pipeline).empty == "count"
        self.group_size: int | None = gates[0].group_size if gates else None
        self.weight = weights[0] if weights else None
        self.remembers = [name for name in names if getattr(stages[name], "stateful", False)]
        self._parts = [part_of(pipeline, names, None) for _ in range(2)]
        self._parts[0].empty, self._parts[1].empty = "exclude", "count"

    def advantage(self, batch: TensorDictBase, *, masked: bool) -> Tensor:
        """(N,) float64; NaN where the recipe gives none.

        Args:
            batch: of a step.
            masked: whether rollouts without a token in the loss count.

        Raises:
            BatchError: the recipe refuses the rows, or remembers earlier steps that are not known.
        """
        if self.remembers:
            raise BatchError(f"its stage {self.remembers[0]!r} remembers steps before the first of a dump")
        columns = report_columns(self._parts[masked].run(batch))
        if "advantage" not in columns:
            raise BatchError("no stage of it gives an advantage")
        return torch.from_numpy(columns["advantage"]).double()


class AuditedStep:
    """The rows of a step, and how they may have been counted.

    Args:
        step: its number.
        batch: TensorDict ``[N]`` of a source.
        declared: the recipe that is held to have trained it.
        group_size: rollouts that each group was dispatched with; None: as ``expected_rollouts`` says.
        unsaid: what the dump's format does not say (:attr:`Source.unsaid`).
        by_prompt: whether groups were made of their prompts when the dump was read.
    """

    def __init__(
        self,
        step: int,
        batch: TensorDictBase,
        declared: DeclaredRecipe,
        *,
        group_size: int | None = None,
        unsaid: frozenset[str] = frozenset(),
        by_prompt: bool = False,
    ):
        self.step, self.declared, self.unsaid, self.by_prompt = step, declared, unsaid, by_prompt
        self.size = len(batch)
        columns = {key: each for key, each in batch.items(True, True) if isinstance(each, Tensor)}
        self._batch = TensorDict(columns, batch_size=[self.size])
        self.groups, self.rollouts = Ids(batch["group_id"]), Ids(batch["rollout_id"])
        self.group_names, self.rollout_names = (self._names(batch, unit) for unit in ("group", "rollout"))
        self.prompts = strings(batch["prompt_text"], self.size) if "prompt_text" in batch.keys() else None
        mask = batch.get(("masks", "all_assistant_mask"), None)
        self.tokens: Tensor | None = None if mask is None else mask.sum(1)  # None: the dump has no lengths
        in_loss = torch.ones(self.size, dtype=torch.bool) if self.tokens is None else self.tokens > 0
        self.in_loss = in_loss & batch.get(IN_LOSS, torch.ones_like(in_loss))
        nothing = torch.zeros(self.size, dtype=torch.int64)
        status = batch.get("status", nothing)
        self.lost = self.rollouts.spread(
            self.rollouts.any((status == Status.FAILED) | (status == Status.ABORTED))
        )
        self.rewarded = ~batch["next", "reward"].reshape(self.size, -1).isnan().all(1)
        self.expected_rollouts: Tensor | None = batch.get("expected_rollouts", None)
        if self.expected_rollouts is None and group_size is not None:
            self.expected_rollouts = torch.full((self.size,), group_size)
        self.logged: Tensor | None = batch.get("logged_advantage", None)
        if self.logged is not None:
            self.logged = self.logged.double()
        self.weight: Tensor | None = batch.get("logged_weight", None)
        self.minibatch: Tensor | None = batch.get("logged_minibatch", None)
        self.trains = self.in_loss & ~self.lost
        if self.weight is not None:
            self.trains &= self.weight > 0  # NaN: it was not trained

    def _names(self, batch: TensorDictBase, unit: str) -> list[str]:
        labels = strings(batch[f"{unit}_label"], self.size) if f"{unit}_label" in batch.keys() else None
        return [str(each) for each in batch[f"{unit}_id"].tolist()] if labels is None else list(labels)

    # -- how rows may have been counted -------------------------------------------------------------

    @cached_property
    def out_of_loss(self) -> Tensor:
        """(N,) bool: the rollout has a reward, and failed or has no token in the loss."""
        silent = self.rollouts.spread(self.rollouts.all(~self.in_loss))
        return (silent | self.lost) & self.rewarded

    @cached_property
    def several(self) -> Tensor:
        """(N,) bool: the rollout has several rows."""
        return self.rollouts.spread(self.rollouts.count > 1)

    def expected(self, *, rows: bool = False, masked: bool = False, group: Tensor | None = None) -> Tensor:
        """(N,) float64, the advantage that the recipe gives; NaN where it gives none.

        Args:
            rows: each row counts as a rollout.
            masked: rollouts out of the loss count, those that failed too.
            group: (N,) int64, other groups.

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
        """Why there are no advantages to compare; empty where there are."""
        if self.logged is None:
            return NO_ADVANTAGES
        try:
            _ = self.by_recipe
        except BatchError as err:
            return f"the recipe refuses step {self.step}: {err}"
        return ""

    @cached_property
    def by_recipe(self) -> Tensor:
        """(N,) float64, the advantage of the declared recipe; NaN where it gives none."""
        return self.expected()

    @cached_property
    def near(self) -> float:
        """Advantages no further apart are the same."""
        return 0.0 if self.logged is None else tolerance(self.logged[self.logged.isfinite()].numpy())

    def differs(self, advantage: Tensor) -> Tensor:
        """(N,) bool, rows that train whose logged advantage is another than this one; none without these."""
        if self.logged is None:
            return torch.zeros_like(self.trains)
        compared = self.trains & self.logged.isfinite() & advantage.isfinite()
        return compared & ((self.logged - advantage).abs() > self.near)

    @property
    def flipped(self) -> Tensor:
        """(N,) bool, rows that train whose logged advantage has the other sign, both beyond rounding."""
        if self.logged is None:
            return torch.zeros_like(self.trains)
        far = torch.minimum(self.logged.abs(), self.by_recipe.abs()) > self.near
        return self.differs(self.by_recipe) & far & (self.logged * self.by_recipe < 0)

    @cached_property
    def by_convention(self) -> dict[str, Tensor]:
        """(N,) advantages by convention: those that may differ from the declared ones here."""
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
            size = int(self.expected_rollouts[0])
            place = torch.arange(self.size) // max(size, 1)
            tried[f"groups are cut by position, {size} rows each"] = {"group": place, **every}
        if self.groups.n > 1:
            tried["the whole step is one group"] = {"group": torch.zeros_like(self.rollouts.of), **every}
        for name, how in tried.items():
            try:
                found[name] = self.expected(**how)
            except BatchError:  # rows that share a reward, say, and do not as rollouts of their own
                continue
        return found

    @cached_property
    def conventions(self) -> list[list[str]]:
        """Of each group, the conventions that its advantages fit in place of the declared one; most: none.

        One by which fewer things were counted otherwise is found before one by which more were. Other groups
        are those of a whole step: it must fit as a whole.
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
        """(N,) bool: rows of groups of which it is clear which other convention they fit."""
        return (
            self.groups_that_fit(ROWS, BOTH)
            | self.groups_that_fit(MASKED)
            | self.groups_that_fit(*self.other_groups)
        )

    def groups_that_fit(self, *conventions: str) -> Tensor:
        """(N,) bool: rows of groups that fit one of these conventions and no other."""
        fits = [bool(names) and set(names) <= set(conventions) for names in self.conventions]
        return self.groups.spread(torch.tensor(fits, dtype=torch.bool))

    @property
    def other_groups(self) -> set[str]:
        """Conventions by which groups are others, and which some group here fits."""
        return {name for names in self.conventions for name in names} - {ROWS, MASKED, BOTH}

    # -- what rows weigh, and findings ----------------------------------------------------------------

    @cached_property
    def declared_weight(self) -> Tensor | None:
        """(N,) float64: of each token by the recipe's mean over the rows that train; None: not known."""
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
        """(N,) float64: |weight × advantage × tokens| over the sum of all rows; None: not known."""
        advantage = self.logged
        if advantage is None:
            try:
                advantage = self.by_recipe
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
        group: bool = True,
        meant: Tensor | None = None,
    ) -> AuditFinding:
        """A finding about (N,) bool `rows`.

        Args:
            rows: whose share of the gradient it is.
            text: a sentence.
            expected: numbers, or (N,) of which those of the rows are taken.
            found: the same.
            group: whether the rows are of one group.
            meant: (N,) bool, rows of the rollouts that it names; None: all.
        """
        at = rows.nonzero().flatten()
        rollouts = self.names_of(rows if meant is None else rows & meant)
        numbers = [
            (each[at] if isinstance(each, Tensor) else torch.tensor(list(each), dtype=torch.float64)).tolist()
            for each in (expected, found)
        ]
        share = None if self.gradient is None else float(self.gradient[at].sum())
        label = self.group_names[int(at[0])] if group else None
        return AuditFinding(self.step, label, rollouts, at.tolist(), numbers[0], numbers[1], text, share)

    def names_of(self, rows: Tensor) -> list[str]:
        """Labels of the rollouts of (N,) bool `rows`."""
        return list(dict.fromkeys(self.rollout_names[row] for row in rows.nonzero().flatten().tolist()))

    def advantages_said(self, rows: Tensor) -> str:
        """The first of the advantages of these rows, expected and found."""
        logged = self.by_recipe if self.logged is None else self.logged
        said = (
            f"row {row} (rollout {self.rollout_names[row]}) {logged[row]:.4g}, by the recipe "
            f"{self.by_recipe[row]:.4g}"
            for row in rows.nonzero().flatten().tolist()
        )
        return listing(said, most=3)

    def by_group(self, rows: Tensor) -> list[tuple[str, Tensor]]:
        """The groups of these rows, in order: their labels, and (N,) bool, which of the rows are theirs."""
        found = dict.fromkeys(self.groups.of[rows].tolist())
        each = [rows & (self.groups.of == group) for group in found]
        return [(self.group_names[int(own.nonzero()[0])], own) for own in each]


# -- the checks ------------------------------------------------------------------------------------------


def wrong_signs(step: AuditedStep) -> CheckOutcome:
    """Rows whose advantage has the wrong sign: logged × declared < 0, both beyond rounding.

    Needs advantages. Groups that are of another convention are that check's, which says how many of their
    signs are wrong. A finding is a group; `expected` and `found` are advantages of its rows.
    """
    if step.refusal or step.logged is None:
        return CheckOutcome([], step.refusal)
    return CheckOutcome(
        [
            step.finding(
                rows,
                f"group {group}: wrong signs: {step.advantages_said(rows)}",
                step.by_recipe,
                step.logged,
            )
            for group, rows in step.by_group(step.flipped & ~step.explained)
        ]
    )


def mixed_groups(step: AuditedStep) -> CheckOutcome:
    """Groups of two prompts: no prompt is that of a row of each of its rollouts.

    Needs prompts, and groups that were not made of them when the dump was read. With advantages also groups
    of which these are measured against other groups' rollouts, cut by position or the whole step as one.
    `expected` is 1 prompt, and `found` how many there are; or both are advantages.
    """
    findings, lacking = [], ""
    if step.by_prompt:
        lacking = "groups were made of their prompts when the dump was read (source.group_by=prompt)"
    elif step.prompts is None:
        lacking = "the dump has no prompts"
    else:
        texts: dict[str, int] = {}
        number = torch.tensor([texts.setdefault(prompt, len(texts)) for prompt in step.prompts])
        here = ~step.lost  # the others may have no text
        groups, rollouts, prompts = (
            Ids(each[here]) for each in (step.groups.labels, step.rollouts.labels, number)
        )
        # How many rollouts of a group have a prompt: segments of one rollout may have prompts of their own.
        once = rollouts.paired_with(prompts).is_first
        have = Ids(groups.paired_with(prompts).labels, once)
        size = torch.bincount(groups.of[rollouts.is_first], minlength=groups.n)
        mixed = torch.zeros_like(here)
        mixed[here] = groups.spread(~groups.any(have.spread(have.count) == groups.spread(size)))
        for group, rows in step.by_group(mixed):
            own = list(dict.fromkeys(step.prompts[row] for row in rows.nonzero().flatten().tolist()))
            text = (
                f"group {group} has {len(own)} prompts: {listing([repr(each[-40:]) for each in own], most=3)}"
            )
            findings.append(step.finding(rows, text, [1], [len(own)]))
    if step.refusal or step.logged is None:
        return CheckOutcome(findings, lacking)
    for group, rows in step.by_group(step.groups_that_fit(*step.other_groups)):
        how = " or ".join(step.conventions[int(step.groups.of[rows][0])])
        text = f"group {group} is measured against others, as if {how}: {step.advantages_said(rows)}"
        findings.append(step.finding(rows, text, step.by_recipe, step.logged))
    return CheckOutcome(findings, lacking)


def _present(step: AuditedStep) -> tuple[Tensor, Tensor]:
    """(P,) rollouts of each group that did not fail, and all of them."""
    home, lost = (each[step.rollouts.first] for each in (step.groups.of, step.lost))
    every = torch.bincount(home, minlength=step.groups.n)
    return every - torch.bincount(home[lost], minlength=step.groups.n), every


def short_groups(step: AuditedStep) -> CheckOutcome:
    """Groups that train and lack rollouts: fewer neither failed nor were aborted than were dispatched.

    Needs how large groups were; without it, groups are found of which a rollout failed. `expected` and
    `found` are numbers of rollouts.
    """
    have, every = _present(step)
    expected, lacking = every, "how large groups were is not known: source.group_size=8, say"
    if step.expected_rollouts is not None:
        expected, lacking = step.expected_rollouts[step.groups.first], ""
    short = (have < expected) & step.groups.any(step.trains)
    findings = []
    for group, rows in step.by_group(step.groups.spread(short)):
        at = int(step.groups.of[rows][0])
        gone = step.names_of(rows & step.lost)
        text = f"group {group} has {int(have[at])} of {int(expected[at])} rollouts"
        text += f"; failed or aborted: {listing(gone)}" if gone else ""
        findings.append(step.finding(rows, text, [int(expected[at])], [int(have[at])]))
    return CheckOutcome(findings, lacking)


def oversized_groups(step: AuditedStep) -> CheckOutcome:
    """Groups that train with more rollouts than were dispatched: a prompt drawn twice, or ids used again.

    Needs how large groups were. `expected` and `found` are numbers of rollouts.
    """
    if step.expected_rollouts is None:
        return CheckOutcome([], "how large groups were is not known: source.group_size=8, say")
    _, every = _present(step)
    expected = step.expected_rollouts[step.groups.first]
    large = (every > expected) & step.groups.any(step.trains)
    findings = []
    for group, rows in step.by_group(step.groups.spread(large)):
        at = int(step.groups.of[rows][0])
        text = f"group {group} has {int(every[at])} rollouts, and was dispatched with {int(expected[at])}"
        findings.append(step.finding(rows, text, [int(expected[at])], [int(every[at])]))
    return CheckOutcome(findings)


def _counted_otherwise(step: AuditedStep, convention: str, about: Tensor, text: str) -> CheckOutcome:
    """Groups whose advantages are of a convention in place of the declared one.

    Groups that fit none of the two are what it lacks, where the two differ.
    """
    if step.refusal or step.logged is None:
        return CheckOutcome([], step.refusal)
    findings = []
    for group, rows in step.by_group(step.groups_that_fit(convention, BOTH)):
        off = step.differs(step.by_recipe) & rows
        flipped = int((off & step.flipped).sum())
        said = f"group {group}: {text}: {listing(step.names_of(rows & about))}; {step.advantages_said(off)}"
        said += f"; wrong signs among these: {flipped}" if flipped else ""
        findings.append(step.finding(rows, said, step.by_recipe, step.logged, meant=about))
    off, lacking = step.groups.any(step.differs(step.by_recipe)), ""
    if bool(off.any()) and convention in step.by_convention:
        tell = step.groups.any((step.by_convention[convention] - step.by_recipe).abs() > step.near)
        unknown = off & tell & torch.tensor([not names for names in step.conventions])
        if named := [group for group, _ in step.by_group(step.groups.spread(unknown))]:
            lacking = (
                f"the advantages of groups {listing(named)} of step {step.step} are of neither convention"
            )
    return CheckOutcome(findings, lacking)


def counted_twice(step: AuditedStep) -> CheckOutcome:
    """Rollouts that count once for each of their rows: advantages are those of rows, and not of rollouts.

    Needs advantages, and which rows are one rollout. `expected` and `found` are advantages of the group.
    """
    if "rollouts" in step.unsaid:
        return CheckOutcome([], "the dump does not say which rows are one rollout, and each is read as one")
    return _counted_otherwise(step, ROWS, step.several, "rollouts that count once for each of their rows")


def masked_counted(step: AuditedStep) -> CheckOutcome:
    """Rollouts out of the loss that count: advantages are those with them in the baseline, not without.

    Out of the loss are those that failed or have no token in the loss, and have a reward. Needs advantages
    and loss masks, and a recipe that does not count them. `expected` and `found` are advantages of the group.
    """
    text = "rollouts that are out of the loss and count in the baseline"
    outcome = _counted_otherwise(step, MASKED, step.out_of_loss, text)
    if "masks" in step.unsaid:
        return outcome._replace(lacking="the dump has no loss masks")
    if step.declared.counts_masked and not outcome.lacking:
        said = "the recipe declares that masked rollouts count; pipeline.empty=exclude looks for them"
        return outcome._replace(lacking=said)
    return outcome


def other_advantages(step: AuditedStep) -> CheckOutcome:
    """Advantages that are of no convention here: not the declared ones, nor what another check has found.

    Needs advantages. A finding is of a step; `expected` and `found` are advantages.
    """
    if step.refusal or step.logged is None:
        return CheckOutcome([], step.refusal)
    off = step.differs(step.by_recipe) & ~step.explained & ~step.flipped
    if not bool(off.any()):
        return CheckOutcome([])
    compared = int((step.trains & step.logged.isfinite() & step.by_recipe.isfinite()).sum())
    text = (
        f"{int(off.sum())} of {compared} advantages are not those of the recipe: {step.advantages_said(off)}"
    )
    for group, rows in step.by_group(off):
        if names := step.conventions[int(step.groups.of[rows][0])]:
            text += f"; those of group {group} are as if {' as well as if '.join(names)}"
    return CheckOutcome([step.finding(off, text, step.by_recipe, step.logged, group=False)])


def wrong_weights(step: AuditedStep) -> CheckOutcome:
    """How far weights are from the declared mean: w_i / w*_i − 1 of each row, at most, in each minibatch.

    w* is what the recipe's LossWeight gives to the rows that trained (``headrace.transforms.loss_weight``).
    Needs weights and minibatches. `expected` and `found` are weights of a token of each row.
    """
    if step.weight is None:
        return CheckOutcome([], "the dump has no loss weights")
    if step.minibatch is None or not bool((step.minibatch >= 0).any()):
        return CheckOutcome([], "the dump does not have all rows of each minibatch")
    if step.tokens is None:
        return CheckOutcome([], NO_TOKENS)
    declared = step.declared_weight
    if declared is None:
        return CheckOutcome([], "the recipe's mean is not one of rows, rollouts, groups or tokens")
    findings = []
    ratio = step.weight / declared
    off = step.trains & ((ratio - 1).abs() > AGREE)
    for minibatch in step.minibatch[off].unique().tolist():
        rows = off & (step.minibatch == minibatch)
        mine = step.trains & (step.minibatch == minibatch)
        total = float((step.weight * step.tokens)[mine].sum())
        text = (
            f"minibatch {minibatch}: {int(rows.sum())} of {int(mine.sum())} rows weigh "
            f"{ratio[rows].min():.4g} to {ratio[rows].max():.4g} of what the declared mean gives them; "
            f"weight × tokens is {total:.4g} in all"
        )
        findings.append(step.finding(rows, text, declared, step.weight, group=False))
    return CheckOutcome(findings)


CHECKS: dict[str, tuple[str, Callable[[AuditedStep], CheckOutcome]]] = {
    "signs": ("advantages of the wrong sign", wrong_signs),
    "mixed": ("groups of several prompts", mixed_groups),
    "incomplete": ("incomplete groups", short_groups),
    "oversized": ("groups with too many rollouts", oversized_groups),
    "counted_twice": ("rollouts that count more than once", counted_twice),
    "masked": ("rollouts out of the loss that count", masked_counted),
    "advantages": ("other advantages than the recipe's", other_advantages),
    "weights": ("other weights than the recipe's", wrong_weights),
}
"""By name: what is looked for, and the function that does."""
