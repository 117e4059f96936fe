"""One sample of a dump, in the terms that all formats share."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.transforms import Status

from .malformed import SourceError

MAX_TOKENS = 2**24  # a length from a dump decides how much memory a batch takes
MAX_ROWS = 2**22  # of a step
MAX_CELLS = 2**31  # of a step's loss mask: rows × the longest
Label = str | int | tuple[str | int, ...]  # a tuple where it has parts, which a text would run together


@dataclass(slots=True)
class Sample:
    """One sample: a rollout, or one of its segments.

    Tokens are one sequence, prompt first. The response is its end, from the first token that the policy
    produced on, including what tools wrote in between. A sample without `tokens` and `response_length` counts
    as one token.

    Args:
        group: label of the group, unique within its step.
        rollout: label of the rollout, unique within its step; its segments share it.
        group_label: text of the label, where `group` is a number that was made of it.
        rollout_label: the same of the rollout.
        reward: None where there is none.
        rewards: two or more rewards by name, instead of `reward`; NaN for one that is missing.
        status: how the rollout ended.
        prompt: text.
        response: text.
        ground_truth: what the response is graded by, as text.
        tokens: (L,) token ids of the whole sequence.
        loss_mask: (R,) over the response or (L,) over all tokens, 1 trains; None: all of the response.
        response_length: R, in tokens.
        log_probs: (R,) log-probabilities of the policy that acted, over the response.
        policy_version: of the policy that acted; the oldest, where it was updated on the way.
        step: the training step.
        advantage: as the framework computed it; NaN where it is not one number.
        in_loss: False takes the whole sample out of the loss.
        scored: False where the row was out of the training, and may have no reward.
        expected_rollouts: rollouts that the group was dispatched with.
        record: label of the record that the sample was in, unique within its step, in formats that have one:
            a record that is there twice is an error.
        where: ``file:line``, for messages.

    Example:
        >>> Sample(group="a", rollout=0, reward=1.0, tokens=[5, 6, 7], response_length=2).extent()
        (3, 2)
    """

    group: Label
    rollout: Label
    reward: float | None = None
    rewards: dict[str, float] | None = None
    status: Status = Status.COMPLETED
    prompt: str | None = None
    response: str | None = None
    ground_truth: str | None = None
    tokens: list[int] | None = None
    loss_mask: list[int] | None = None
    response_length: int | None = None
    log_probs: list[float] | None = None
    policy_version: int | None = None
    step: int | None = None
    advantage: float | None = None
    in_loss: bool = True
    expected_rollouts: int | None = None
    scored: bool = True
    group_label: str | None = None
    rollout_label: str | None = None
    record: Label | None = None
    where: str = "a sample"

    @property
    def lost(self) -> bool:
        """Whether the rollout failed or was aborted; its reward, if it has one, means nothing."""
        return self.status in (Status.FAILED, Status.ABORTED)

    def extent(self) -> tuple[int, int]:
        """How many tokens the row has, and how many of them are the response."""
        response = self.response_length
        for values in (self.log_probs, self.loss_mask):
            if response is None and values is not None:
                response = len(values)
        if self.tokens is None:
            response = 1 if response is None else response
            return response, response
        length = len(self.tokens)
        return length, length if response is None else response

    def check(self) -> Sample:
        """The sample itself, if its fields agree.

        Raises:
            SourceError: lengths that do not fit one another, or no reward where there must be one.
        """
        length, response = self.extent()
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
        has_reward = self.reward is not None if self.rewards is None else _any_number(self.rewards)
        if self.scored and not has_reward and not self.lost:
            raise self._fail(
                "a rollout that neither failed nor was aborted needs a reward",
                f"none, with the status {self.status.name.lower()}",
            )
        return self

    def _fail(self, required: str, found: object) -> SourceError:
        return SourceError(f"{self.where}: {required}; found {found}")


def _any_number(rewards: dict[str, float]) -> bool:
    return any(value == value for value in rewards.values())
