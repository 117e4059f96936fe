"""Find holes in the ids of a dump's groups, and test if groups with long rollouts are missing more often.

A dump has only groups that were trained. If groups were dispatched with the ids 0, 1, 2, …, a missing id is a
group that was not trained. Its length is not known. Its prompt may have a known length in another epoch.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from hashlib import blake2b

import numpy as np

from headrace.pipeline.tools.report import BIASED, FittedTable, StepReport, percent, tenths_table
from headrace.transforms.streams import Survivors, bin_of
from headrace.transforms.table import count_of

MISSING = "missing"
OTHER = "length in another epoch"


class GroupHoles:
    """Collect the groups of a dump, step by step. If the dump shows no holes, :attr:`said` is empty.

    A hole is counted if its id is below all ids of the last step: groups with greater ids may have been
    outstanding when the run ended. The ids must be whole numbers that occur in one step each, and at least
    half of them must be in the dump. Otherwise the ids do not follow the order of dispatch.

    An **epoch** ends, in the order of the ids, before the first group whose prompt is in the epoch already.
    Each epoch but the last must have at least half of all prompts. Otherwise, prompts were not drawn in
    epochs. In each epoch but the last, a prompt is ``trained`` or ``missing``. Its length is the length of
    its group in the next epoch, or else in the previous epoch. A prompt with a group in neither is not
    counted. A mean over several epochs would vary less for prompts that are rarely lost, so the length is
    from one epoch. If losses do not depend on length, ``trained`` and ``missing`` then have the same
    distribution of lengths: z has the bound of :func:`headrace.transforms.streams.survival.slow_loss`.
    """

    def __init__(self) -> None:
        self._steps: list[np.ndarray] = []  # (3, G) the id, the prompt and the length of each group of a step
        self._unknown = ""  # the reason why lengths are not known
        self._numbered = True  # whether the ids are whole numbers

    def add(self, report: StepReport) -> None:
        """Add the groups of a step."""
        self._numbered &= bool(report.groups) and "group_label" not in report.texts
        if not self._numbered:
            return
        each, (ids, rows) = report.rollouts, (report.groups[name] for name in ("id", "row"))
        ids, at = np.unique(ids, return_index=True)
        lengths, prompts = np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.int64)
        if "tokens" not in report.columns or "no_lengths" in report.columns:
            self._unknown = "the dump has no lengths in tokens"
        elif "prompt" not in report.texts:
            self._unknown = "the dump has no texts of prompts"
        else:
            np.maximum.at(lengths, np.searchsorted(ids, each["group"]), each["tokens"])
            texts = [
                report.texts["prompt"][row].encode("utf-8", "surrogatepass") for row in rows[at].tolist()
            ]
            prompts[:] = [int.from_bytes(blake2b(text, digest_size=7).digest(), "big") for text in texts]
        self._steps.append(np.stack([ids, prompts, lengths]))

    @cached_property
    def holes(self) -> tuple[int, int, int]:
        """The number of missing ids, and the first and the last id of the range in which they are counted."""
        if not self._numbered or not self._steps:
            return 0, 0, 0
        ids = np.concatenate([step[0] for step in self._steps])
        first, over = int(ids.min()), min(self._steps[-1][0].tolist(), default=0)
        inside = int((ids < over).sum())
        holes = over - first - inside
        known = len(np.unique(ids)) == len(ids) and 0 < holes <= inside
        return (holes, first, over - 1) if known else (0, 0, 0)

    @cached_property
    def survivors(self) -> Survivors | None:
        """The numbers of trained and missing prompts, by the length in another epoch; None: not known."""
        holes, _, over = self.holes
        if not holes or self._unknown:
            return None
        every = np.concatenate(self._steps, 1)
        ids, prompts, lengths = every[:, np.argsort(every[0])].tolist()
        epochs: list[dict[int, int]] = [{}]  # the length of each prompt's group
        ends: list[int] = []
        for number, prompt, length in zip(ids, prompts, lengths, strict=True):
            if prompt in epochs[-1]:
                epochs.append({})
                ends.append(number)
            epochs[-1][prompt] = length
        if len(epochs) < 2:
            self._unknown = "no prompt is in the dump twice"
        elif 2 * min(map(len, epochs[:-1])) < len({*prompts}):
            self._unknown = "prompts were not drawn in epochs"
        if self._unknown:
            return None
        fates: Counter[tuple[str, bool, int]] = Counter()
        for at, end in enumerate(ends):
            if end <= over + 1:  # no group of this epoch was outstanding
                for prompt, length in {**(epochs[at - 1] if at else {}), **epochs[at + 1]}.items():
                    fates["trained" if prompt in epochs[at] else MISSING, True, bin_of(length)] += 1
        return Survivors({"length": fates}, outstanding=0)

    @property
    def table(self) -> FittedTable | None:
        """A table of prompts by tenths of their lengths; None if no prompt is missing, or no length known."""
        if self.survivors is None or len(tenths := self.survivors.tenths("length")) < 2:
            return None
        return tenths_table(tenths, OTHER) if any(tenth.lost for tenth in tenths) else None

    @property
    def said(self) -> list[str]:
        """Sentences about the holes. They say whether groups with long rollouts are missing more often."""
        holes, first, last = self.holes
        if not holes:
            return []
        text = f"This dump lacks {count_of(holes, 'group')} of the ids {first} to {last}, "
        text += "lost or left out before the dump was written."
        found = {} if self.survivors is None else self.survivors.numbers()
        if self._unknown:
            return [f"{text} It is not known whether their rollouts are long: {self._unknown}."]
        if (z := found.get("survivors/length/z", 0.0)) < BIASED:
            slow, others = (percent(found[f"survivors/length/{name}_trained"]) for name in ("slow", "others"))
            least = math.ceil(found["survivors/length/slow"])
            text += (
                " They are more often groups with long rollouts: of the groups whose prompt has a rollout of "
                f"at least {least:,} tokens in another epoch, {slow} are in the dump, and of the others "
                f"{others} (z = {z:.1f}). The symptom slow-groups-lost says what to set."
            )
        return [text]
