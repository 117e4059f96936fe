"""Define a sample of a dump in any format, and make a dense batch of the samples of one step."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from headrace.pipeline.tools.report import AGREE, asked_line
from headrace.transforms import Status, number_labels
from headrace.transforms.table import count_of, listing
from headrace.transforms.table.schema import FLOAT, IN_LOSS, NO_LENGTHS
from headrace.transforms.table.tensordicts import as_texts

from .record import SourceError, quote

MAX_TOKENS = 2**24  # tokens of a sample: a wrong length in a dump must not take all memory
MAX_ROWS = 2**22  # rows of a step
MAX_CELLS = 2**31  # cells of a step's loss mask: rows × tokens of the longest row
ZERO = 1e-6  # advantages up to this size count as 0: equal rewards give such values after rounding
Label = str | int | tuple[str | int, ...]  # the parts of a tuple would be ambiguous if joined
BY_ORDER = ("by order",)  # the group of a sample, until group_by_order makes it from the order
UNPADDED, PADDING = 2**26, 64  # a step may have UNPADDED cells, or PADDING × its tokens if that is more


@dataclass(slots=True)
class Sample:
    """One sample: a rollout, or one of its segments.

    The tokens are one sequence, with the prompt first. The response begins at the first token of the policy.
    It includes the tokens that tools wrote later. The length of a sample is unknown if it has none of
    `tokens`, `response_length`, `loss_mask` and `log_probs`. A tokenizer can add the tokens
    (:mod:`~headrace.pipeline.tools.dumps.readers.tokenizing`).

    Args:
        group: label of the group, unique within its step.
        rollout: label of the rollout, unique within its step; its segments share it.
        reward: the reward; None if there is none.
        rewards: two or more rewards by name, instead of `reward`; NaN for one that is missing.
        status: how the rollout ended; None if the dump does not have it.
        prompt: the prompt as text.
        response: the response as text.
        response_parts: pairs (sampled, text), one for each text of the response's messages; `sampled` is True
            if the policy sampled the text. The texts are contents, reasoning, names and arguments of tool
            calls, in order. None if the response is one text.
        chat: pairs (in_loss, message), one for each message of the prompt and response, for a tokenizer with
            a chat template; `in_loss` is True if the policy sampled the message and it is in the loss. None:
            there are no messages.
        ground_truth: the text by which the response is graded.
        other_columns: further columns of the record, as a JSON object; an empty text: there are none. None:
            all texts, numbers and booleans of the record that the reader of the format has not read.
        tokens: (L,) token ids of the whole sequence.
        loss_mask: (R,) for the response or (L,) for all tokens, 1 trains; None: the whole response trains.
        response_length: R, the number of tokens of the response.
        log_probs: (R,) log-probabilities of the response under the policy that acted.
        policy_version: version of the policy that acted; the oldest one if it was updated during the rollout.
        step: the training step.
        advantage: the advantage that the framework computed; NaN if it is not one number.
        in_loss: False takes the whole sample out of the loss.
        expected_rollouts: number of rollouts that were dispatched for the group. None: the option
            `group_size`.
        record: label of the sample's record, in formats that have one. Two records of a step with the same
            label are an error.
        place: index of the sample in the order of arrival. Rollouts of one draw of a prompt have consecutive
            indices. None: the dump does not have the order of arrival.
        where: ``file:line`` of the record, for messages.

    Example:
        >>> Sample(group="a", rollout=0, reward=1.0, tokens=[5, 6, 7], response_length=2).extent()
        (3, 2)
    """

    group: Label
    rollout: Label
    reward: float | None = None
    rewards: dict[str, float] | None = None
    status: Status | None = Status.COMPLETED
    prompt: str | None = None
    response: str | None = None
    response_parts: list[tuple[bool, str]] | None = None
    chat: list[tuple[bool, Mapping[str, Any]]] | None = None
    ground_truth: str | None = None
    other_columns: str | None = None
    tokens: list[int] | None = None
    loss_mask: list[int] | None = None
    response_length: int | None = None
    log_probs: list[float] | None = None
    policy_version: int | None = None
    step: int | None = None
    advantage: float | None = None
    in_loss: bool = True
    expected_rollouts: int | None = None
    record: Label | None = None
    place: int | None = None
    where: str = "a sample"

    @property
    def lost(self) -> bool:
        """Whether the rollout failed or was aborted. Then its reward has no meaning."""
        return self.status in (Status.FAILED, Status.ABORTED)

    def extent(self) -> tuple[int, int] | None:
        """The numbers of tokens of the row and of its response; None if they are not known."""
        response = self.response_length
        for values in (self.log_probs, self.loss_mask):
            if response is None and values is not None:
                response = len(values)
        if self.tokens is None:
            return None if response is None else (response, response)
        length = len(self.tokens)
        return length, length if response is None else response

    def check(self) -> Sample:
        """Check that the fields agree, and return the sample.

        Raises:
            SourceError: lengths contradict one another, or a required reward is missing.
        """
        length, response = self.extent() or (0, 0)
        if length > MAX_TOKENS:
            raise self._fail(f"a sample has at most {MAX_TOKENS} tokens", length)
        if response > length:
            raise self._fail(
                "the response is a part of the tokens", f"a response of {response} in {length} tokens"
            )
        if self.loss_mask is not None and len(self.loss_mask) not in (response, length):
            raise self._fail(
                f"the loss mask covers the response ({response} tokens) or the sequence ({length})",
                f"{len(self.loss_mask)} entries",
            )
        if self.log_probs is not None and len(self.log_probs) != response:
            raise self._fail(
                f"log-probabilities cover the response ({response} tokens)", f"{len(self.log_probs)} entries"
            )
        has_reward = self.reward is not None
        if self.rewards is not None:
            has_reward = any(value == value for value in self.rewards.values())
        if not has_reward and not self.lost:
            raise self._fail(
                "a rollout that neither failed nor was aborted needs a reward",
                "none" if self.status is None else f"none, with the status {self.status.name.lower()}",
            )
        return self

    def _fail(self, required: str, found: object) -> SourceError:
        return SourceError(f"{self.where}: {required}; found {found}")


def to_batch(samples: Iterable[Sample]) -> TensorDict:
    """Make a dense batch of the samples of one step.

    A column must be on all rows or on none. But a row whose rollout failed or was aborted may lack all values
    except the ids and `expected_rollouts`. It has NaN, −1, no tokens or an empty text instead. The status,
    the ground truth, parts of the response and other columns may be on some rows only. Tokens are padded on
    the left, to the length T of the longest row.

    ====================================== ================= =============================================
    column                                  shape, dtype      meaning; when it is there
    ====================================== ================= =============================================
    ``group_id``, ``rollout_id``            (N,) int64        the dump's own, by :func:`label_ids`
    ``group_label``, ``rollout_label``      N strings         the ids as text (:func:`label_text`)
    ``("next", "reward")``                  (N, 1) float64    NaN: a failed row has none; (N, K): K rewards
    ``reward_names``                        K strings         names of K rewards, in order of the columns
    ``status``                              (N,) int64        :class:`~headrace.transforms.Status`, −1 where
                                                              it is not known; a row has it
    ``("masks", "all_assistant_mask")``     (N, T) bool       tokens that train; rows have tokens or lengths
    ``("headrace", "no_lengths")``          (N,) bool         True; rows have no tokens and no lengths
    ``("headrace", "in_loss")``             (N,) bool         rows in the loss; rows have no tokens and no
                                                              lengths, and a row is out of the loss
    ``("tokens", "full")``                  (N, T) int64      rows have tokens; 0 is padding
    ``("masks", "all_attention_mask")``     (N, T) bool       rows have tokens
    ``("log_probs", "full")``               (N, T) float32    rows have them; NaN outside of the response
    ``("next", "policy_version")``          (N,) int64        rows have it
    ``expected_rollouts``                   (N,) int64        rows have it
    ``logged_advantage``                    (N,) float32      rows have it
    ``prompt_text``, ``response_text``      N strings         rows have them
    ``response_parts``                      N strings         JSON of :attr:`Sample.response_parts`, or empty;
                                                              a row has any, and no row has a length
    ``ground_truth``                        N strings         all rows have it
    ``other_columns``                       N strings         a JSON object, or empty; a row has any
    ====================================== ================= =============================================

    Args:
        samples: the samples of one step, at least one.

    Raises:
        SourceError: there are no samples; they have too many tokens; a column is on some rows only; a rollout
            is in two groups; a group has more rollouts than expected; or :meth:`Sample.check` raised.

    Example:
        >>> batch = to_batch([Sample(3, 0, 1.0, response="yes"), Sample(5, 1, 0.0, response="no")])
        >>> batch["group_id"].tolist(), batch["next", "reward"].flatten().tolist()
        ([3, 5], [1.0, 0.0])
    """
    rows = [sample.check() for sample in samples]
    if not rows:
        raise SourceError("a batch has at least one sample; found none")
    check_groups(rows)
    batch = TensorDict({}, batch_size=[len(rows)])
    for name in ("group", "rollout"):
        batch[f"{name}_id"] = label_ids([getattr(row, name) for row in rows])
    if any(row.status is not None for row in rows):
        batch["status"] = torch.tensor([-1 if row.status is None else int(row.status) for row in rows])
    by_name = column(rows, "rewards", default={})
    if by_name is None or not any(by_name):
        rewards = [[math.nan if row.reward is None else row.reward] for row in rows]
    else:
        names = list(next(values for values in by_name if values))
        for row, values in zip(rows, by_name, strict=True):
            if values and set(values) != set(names):
                raise SourceError(
                    f"{row.where}: all samples have the same rewards ({listing(names)}); "
                    f"found {listing(values)}"
                )
        rewards = [[values.get(name, math.nan) for name in names] for values in by_name]
        batch["reward_names"] = NonTensorData(names, batch_size=batch.batch_size)
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    put_tokens(batch, rows)
    if (version := column(rows, "policy_version", default=-1)) is not None:
        batch["next", "policy_version"] = torch.tensor(version)
    if (expected := column(rows, "expected_rollouts", default=None)) is not None:
        batch["expected_rollouts"] = torch.tensor(expected)
    if (advantage := column(rows, "advantage", default=math.nan)) is not None:
        batch["logged_advantage"] = torch.tensor(advantage, dtype=torch.float32)
    # Labels and texts come last, because they take longest, and refused rows need none.
    texts = {f"{name}_text": column(rows, name, default="") for name in ("prompt", "response")}
    if all(row.ground_truth is not None or row.lost for row in rows):  # otherwise not all rows can be graded
        texts["ground_truth"] = column(rows, "ground_truth", default="")
    if NO_LENGTHS in batch.keys(True) and any(row.response_parts is not None for row in rows):
        parts = [row.response_parts for row in rows]
        texts["response_parts"] = [
            "" if each is None else json.dumps(each, allow_nan=False) for each in parts
        ]
    if any(row.other_columns for row in rows):
        texts["other_columns"] = [row.other_columns or "" for row in rows]
    for name in ("group", "rollout"):
        texts[f"{name}_label"] = [label_text(getattr(row, name)) for row in rows]
    for key, text in texts.items():
        if text is not None:
            batch[key] = as_texts(text)
    return batch


def label_text(label: Label) -> str:
    r"""Write a label as text. The parts of a tuple are joined by ``/``; a slash in a part becomes ``\/``.

    >>> label_text("a/b"), label_text(("math", 7)), label_text(("a/b", "c")) == label_text(("a", "b/c"))
    ('a/b', 'math/7', False)
    """
    if not isinstance(label, tuple) or len(label) == 1:
        return str(label[0] if isinstance(label, tuple) else label)
    return "/".join(str(part).replace("\\", r"\\").replace("/", r"\/") for part in label)


def label_ids(labels: Sequence[Label]) -> Tensor:
    """Make ids from the labels of a dump. If all labels are integers, the ids are the labels.

    Otherwise :func:`~headrace.transforms.number_labels` numbers them, in the same way in every step. If two
    labels have the same text (7 and ``"7"``), or one is empty, they are numbered by first appearance.

    Args:
        labels: N labels.

    Returns:
        (N,) int64 ≥ 0.

    Example:
        >>> label_ids([12, 7, 12]).tolist(), label_ids(["7", 7]).tolist()
        ([12, 7, 12], [0, 1])
    """
    distinct = list(dict.fromkeys(labels))
    if all(type(label) is int for label in distinct):
        return torch.tensor(labels, dtype=torch.int64)
    texts = [label_text(label) for label in distinct]
    written_alike = len(set(texts)) < len(distinct) or "" in texts
    numbers = range(len(distinct)) if written_alike else number_labels(texts).tolist()
    number = dict(zip(distinct, numbers, strict=True))
    return torch.tensor([number[label] for label in labels])


def check_groups(rows: Sequence[Sample]) -> None:
    """Check that a rollout is in one group, and that no group has more rollouts than it was dispatched with.

    Raises:
        SourceError: a rollout is in two groups, or a group has more rollouts.
    """
    first_rows: dict[Label, Sample] = {}
    members: dict[Label, dict[Label, Sample]] = {}
    for row in rows:
        first = first_rows.setdefault(row.rollout, row)
        if first.group != row.group:
            here, there = (quote(label_text(each.group)) for each in (row, first))
            raise SourceError(
                f"{row.where}: a rollout belongs to one group; found the rollout {quote(row.rollout)} in the "
                f"group {here}, and at {first.where} in the group {there}"
            )
        members.setdefault(row.group, {})[row.rollout] = row
    for row in rows:
        rollouts = members[row.group]
        if row.expected_rollouts is not None and len(rollouts) > row.expected_rollouts:
            places = listing([other.where for other in rollouts.values()])
            raise SourceError(
                f"{row.where}: the group {quote(label_text(row.group))} was dispatched with "
                f"{count_of(row.expected_rollouts, 'rollout')}; found {len(rollouts)}: {places}. "
                "Was its prompt drawn twice, or is source.group_size wrong?"
            )


def group_by_order(samples: Sequence[Sample], size: int) -> list[Sample]:
    """Make a group of every `size` consecutive rollouts, in the order of the file.

    The label of a group has what the user asked, and the number of the group.

    Args:
        samples: the samples of one step. All must have the group :data:`BY_ORDER`.
        size: rollouts of a group.

    Raises:
        SourceError: the dump has ids of groups; `size` does not divide the number of rollouts; or the
            rollouts of a group have different prompts.

    Example:
        >>> rows = [Sample(BY_ORDER, i, 1.0, prompt="What is this?") for i in range(4)]
        >>> [row.group for row in group_by_order(rows, 2)]
        [('What is this? #1',), ('What is this? #1',), ('What is this? #2',), ('What is this? #2',)]
    """
    if named := [row for row in samples if row.group != BY_ORDER]:
        raise SourceError(
            f"{named[0].where}: source.group_by=order is for rows without a group; found the group "
            f"{quote(label_text(named[0].group))}. Leave source.group_by out"
        )
    numbers = {rollout: at for at, rollout in enumerate(dict.fromkeys(row.rollout for row in samples))}
    if len(numbers) % size:
        raise SourceError(
            f"with source.group_by=order, source.group_size must divide the rollouts of each step; found "
            f"{len(numbers)} rollouts and source.group_size={size}. Were rows left out of the dump?"
        )
    first: dict[int, Sample] = {}
    grouped, seen = [], set[Label]()
    for row in samples:
        number = numbers[row.rollout] // size + 1
        head = first.setdefault(number, row)
        if row.rollout in seen or row.prompt == head.prompt:  # later segments have longer prompts
            seen.add(row.rollout)
            grouped.append(replace(row, group=(f"{asked_line(head.prompt or 'rollouts')} #{number}",)))
            continue
        raise SourceError(
            f"{row.where}: with source.group_by=order, every {size} consecutive rollouts must have the same "
            f"prompt; found another prompt than at {head.where}. Is source.group_size wrong, or were rows "
            "permuted before they were dumped?"
        )
    return grouped


def separate_draws(
    samples: Sequence[Sample], *, by_prompt: bool = True, leave_out: bool = True
) -> tuple[list[Sample], Draws]:
    """Split groups that contain several draws of one prompt.

    A group is too large if its prompt was drawn twice in a step and the dump has only the prompt. For
    example, it has 16 rollouts, and 8 were dispatched for each draw. Then each block of 8 consecutive
    rollouts may be a draw. The first draw keeps the label of the group. The labels of the others also have
    their number. A group is split if

    1. its logged advantages were computed within the blocks (:func:`draws_by_advantages`), in any format; or
    2. groups were made from prompts, the dump has the order of arrival, each block has consecutive indices of
       arrival, and not all groups of the step are too large, or advantages confirmed a split.

    Groups that are too large and fit neither rule are left out, if both options are true. If the advantages
    of a group were computed over all of its rollouts, it has one draw, and is left out, too.

    If all groups of a step are too large, and advantages confirm no split, `expected_rollouts` may be wrong.
    Then nothing is split, and :func:`to_batch` raises an error.

    Args:
        samples: the samples of one step.
        by_prompt: whether groups were made from prompts. False: only the first rule holds.
        leave_out: whether groups that cannot be split are left out. False: they stay unchanged.

    Returns:
        The samples that stay, in order; and counts of the groups that were too large.

    Example:
        >>> rows = [Sample(("q",), i, 1.0, expected_rollouts=2, place=i) for i in range(4)]
        >>> rows.append(Sample(("p",), 4, 1.0, expected_rollouts=2, place=4))
        >>> found, draws = separate_draws(rows)
        >>> [row.group for row in found]
        [('q',), ('q',), ('q', 2), ('q', 2), ('p',)]
        >>> draws
        Draws(split=1, groups_left_out=0, rows_left_out=0, drawn=(('q', 4),), confirmed=0)
    """
    groups: dict[Label, dict[Label, list[Sample]]] = {}
    sizes: dict[Label, int | None] = {}
    for sample in samples:
        groups.setdefault(sample.group, {}).setdefault(sample.rollout, []).append(sample)
        sizes.setdefault(sample.group, sample.expected_rollouts)
    large: dict[Label, tuple[int, list[list[Sample]]]] = {}  # size and rollouts of groups that are too large
    for label, members in groups.items():
        rollouts, size = list(members.values()), sizes[label]
        if size is not None and len(rollouts) > size:
            if all(row.place is not None for rows in rollouts for row in rows):
                rollouts.sort(key=lambda rows: rows[0].place or 0)
            large[label] = size, rollouts
    draws: dict[Label, list[list[list[Sample]]]] = {}
    for label, (size, rollouts) in large.items():
        if runs := draws_by_advantages(rollouts, size):
            draws[label] = runs
    confirmed = len(draws)
    if not by_prompt or (len(large) == len(groups) and not draws):
        large = {label: large[label] for label in draws}
    for label, (size, rollouts) in large.items():
        runs = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        whole = label in draws or fits_advantages(rollouts)
        if not whole and all(len(run) == size and consecutive(run) for run in runs):
            draws[label] = runs
    renamed: dict[int, Label] = {}  # the new group of each sample, by its `id()`
    for label, runs in draws.items():
        parts = label if isinstance(label, tuple) else (label,)
        for number, run in enumerate(runs, start=1):
            new = label if number == 1 else (*parts, number)
            renamed |= {id(row): new for rows in run for row in rows}
    left = large.keys() - draws.keys()
    stay = [
        replace(sample, group=renamed.get(id(sample), sample.group))
        for sample in samples
        if not leave_out or sample.group not in left
    ]
    drawn = tuple((label_text(label), len(rollouts)) for label, (_, rollouts) in large.items())
    return stay, Draws(len(draws), len(left) * leave_out, len(samples) - len(stay), drawn, confirmed)


def consecutive(rollouts: Sequence[list[Sample]]) -> bool:
    """Whether the indices of arrival of samples are known and consecutive."""
    places = [row.place for rows in rollouts for row in rows]
    return places[0] is not None and places == list(range(places[0], places[0] + len(places)))


def draws_by_advantages(rollouts: Sequence[list[Sample]], size: int) -> list[list[list[Sample]]]:
    """Split a group into blocks of rollouts that explain their own logged advantages; empty if no split fits.

    A block explains its advantages if they were computed within it (:func:`fits_advantages`). A split fits if
    each block has `size` rollouts, at least one block explains its advantages, and the whole group does not.
    Then the advantages of another block may have a fault, which an audit finds. A split also fits if every
    block explains its advantages. Then one block may have fewer rollouts, if some are missing. If all rewards
    are equal and all advantages are 0, every split into blocks of `size` fits.

    Args:
        rollouts: the rollouts of a group, in the order of arrival. Each is a list of samples.
        size: number of rollouts of a draw.
    """
    whole, best, most = fits_advantages(rollouts), list[list[list[Sample]]](), 0
    count, rest = len(rollouts) // size, len(rollouts) % size
    zero = whole is None and any(math.isfinite(_advantage(row)) for rows in rollouts for row in rows)
    if zero and not rest:  # every cut fits
        return [list(rollouts[start : start + size]) for start in range(0, len(rollouts), size)]
    for short in range(count + 1 if rest else 1):
        lengths = [size] * count
        if rest:
            lengths.insert(short, rest)
        ends = list(itertools.accumulate(lengths, initial=0))
        runs = [list(rollouts[start:end]) for start, end in itertools.pairwise(ends)]
        fits = [fits_advantages(run) for run in runs]
        if fits.count(True) > most and (False not in fits or not (whole or rest)):
            best, most = runs, fits.count(True)
    return best


def fits_advantages(rollouts: Sequence[list[Sample]]) -> bool | None:
    """Whether the logged advantages of some rollouts can have been computed within exactly these rollouts.

    This is so if there are factors c, not all 0, with A_i = Σ_k c_k · (R_ik − mean_k). The condition holds
    for every baseline that is a mean of the group, with or without the rollout itself, and for every scale
    that all rollouts of the group share. The mean is over all rollouts that did not fail, or over those with
    an advantage.

    Args:
        rollouts: the rollouts. Each is a list of samples.

    Returns:
        True or False; None if the advantages do not show it: all rewards are equal and all advantages are 0,
        or there are no advantages.

    Example:
        >>> own = [Sample(0, i, reward, advantage=reward - 0.5) for i, reward in enumerate([1.0, 0.0])]
        >>> fits_advantages([[sample] for sample in own]), fits_advantages([own[:1]])
        (True, False)
    """
    voters = [rows for rows in rollouts if not rows[0].lost]
    own = ([rows[0].reward] if rows[0].rewards is None else [*rows[0].rewards.values()] for rows in voters)
    rewards = np.array(list(own), dtype=float)
    known = [[each for row in rows if math.isfinite(each := _advantage(row))] for rows in voters]
    has = np.array([bool(each) for each in known], bool)
    if not has.any():
        return None
    if not np.isfinite(rewards).all():  # how these were counted is not known
        return False
    logged = np.array([each[0] for each in known if each])
    far = np.abs(logged).max()
    if (rewards[has] == rewards[has][0]).all() and far <= ZERO:
        return None
    for voters in (np.ones_like(has), has):
        centred = rewards[has] - rewards[voters].mean(0)
        factors, *_ = np.linalg.lstsq(centred, logged, rcond=None)
        close = np.abs(centred @ factors - logged).max() <= AGREE * far
        if close and far > ZERO and rewards.shape[1] < len(voters):
            return True
    return False


def _advantage(sample: Sample) -> float:
    return math.nan if sample.advantage is None else sample.advantage


class Draws(NamedTuple):
    """The groups of a step whose prompts were drawn several times."""

    split: int = 0
    """Number of groups that were split into their draws."""
    groups_left_out: int = 0
    """Number of groups that were left out because they could not be split."""
    rows_left_out: int = 0
    """Number of rows of the groups that were left out."""
    drawn: tuple[tuple[str, int], ...] = ()
    """The label and the number of rollouts of each group that was too large, split or not."""
    confirmed: int = 0
    """Number of groups that were split because their logged advantages are those of the draws."""


def column(rows: Sequence[Sample], name: str, *, default: Any) -> list[Any] | None:
    """The values of a field on all rows, with `default` for failed rows without one. None: no row has it.

    Raises:
        SourceError: some rows have the field, and a row of a rollout that neither failed nor was aborted
            lacks it; failed rows need `expected_rollouts`, too.
    """
    values = [getattr(row, name) for row in rows]
    if all(value is None for value in values):
        return None
    some = [row for row, value in zip(rows, values, strict=True) if value is None]
    _refuse(name, [row for row in some if not row.lost or name == "expected_rollouts"], len(rows))
    return [default if value is None else value for value in values]


def _refuse(name: str, lacking: Sequence[Sample], rows: int) -> None:
    """Refuse samples that lack a field which other samples of the step have."""
    if lacking:
        raise SourceError(
            f"{name} must be on all samples of a step or on none; {len(lacking)} of {rows} have none: "
            f"{listing(row.where for row in lacking)}"
        )


def common_advantage(advantages: Sequence[float], trains: Sequence[int]) -> float:
    """The common advantage of all tokens that train; NaN if they differ or there are none.

    Example:
        >>> common_advantage([0.0, 0.5, 0.5], [0, 1, 1])
        0.5
    """
    values = {value for value, bit in zip(advantages, trains, strict=False) if bit}
    return values.pop() if len(values) == 1 else math.nan


def put_tokens(batch: TensorDict, rows: Sequence[Sample]) -> None:
    """Write the loss mask and, if rows have them, tokens and log-probabilities. All are padded on the left.

    If no row has a length, write ``("headrace", "no_lengths")`` instead.

    Args:
        batch: TensorDict ``[N]``, to write to.
        rows: N samples, in the order of the batch.

    Raises:
        SourceError: some rows have a length, and a row of a rollout that neither failed nor was aborted has
            none; or the padded batch would have more than :data:`MAX_CELLS` cells, or more than the larger of
            :data:`UNPADDED` and :data:`PADDING` times its tokens.
    """
    column(rows, "response_length", default=0)
    tokens = column(rows, "tokens", default=[])
    log_probs = column(rows, "log_probs", default=[])
    known = [row.extent() for row in rows]
    if all(extent is None for extent in known):
        batch[NO_LENGTHS] = torch.ones(len(rows), dtype=torch.bool)
        if not all(row.in_loss for row in rows):
            batch[IN_LOSS] = torch.tensor([row.in_loss for row in rows])
        return
    without = [row for row, extent in zip(rows, known, strict=True) if extent is None and not row.lost]
    _refuse("a response's length", without, len(rows))
    extents = [extent or (0, 0) for extent in known]
    width = max(1, *(length for length, _ in extents))
    # Refuse before the memory is allocated.
    most = MAX_CELLS if tokens is None else min(MAX_CELLS, max(UNPADDED, PADDING * sum(map(len, tokens))))
    if len(rows) * width > most:
        raise SourceError(
            f"a step has at most {most} tokens with padding (rows × tokens of the longest row); found "
            f"{len(rows)} rows, and {width} tokens in the longest"
        )
    masks = [
        ([1] * response if row.loss_mask is None else row.loss_mask) if row.in_loss and response else []
        for row, (_, response) in zip(rows, extents, strict=True)
    ]
    batch["masks", "all_assistant_mask"] = padded_left(masks, width, 0, torch.bool)
    if tokens is not None:
        batch["tokens", "full"] = padded_left(tokens, width, 0, torch.int64)
        lengths = torch.tensor([len(ids) for ids in tokens])
        batch["masks", "all_attention_mask"] = torch.arange(width) >= width - lengths[:, None]
    if log_probs is not None:
        batch["log_probs", "full"] = padded_left(log_probs, width, math.nan, FLOAT)


def padded_left(rows: Sequence[Sequence[float]], width: int, filler: float, dtype: torch.dtype) -> Tensor:
    """(N, width): the values of each row, with `filler` to their left."""
    padded = torch.full((len(rows), width), filler, dtype=dtype)
    for row, values in zip(padded, rows, strict=True):
        row[width - len(values) :] = torch.tensor(values, dtype=dtype)
    return padded
