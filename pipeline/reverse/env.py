"""An environment with rollouts of one or two turns, whose batches contain complete groups."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

from headrace.pipeline.train import RepeatSampler
from headrace.transforms import Status

from . import digits

IDS = ("prompt", "group_id", "rollout_id", "expected_rollouts")


class ReverseEnv(EnvBase):
    """Ask for reversed digit strings. A share of the rollouts writes a draft and then a revision.

    A revised rollout is two rows (segments): the draft has the reward 0, the revision the reward of the
    rollout. The environment has half as many slots as a batch has rows, and two turns in each batch. A slot
    runs either one revised rollout, or two rollouts of one turn. So each batch of `frames_per_batch` rows
    contains all rollouts of all groups that were dispatched for it.

    A turn reads ``("tokens", "response")``. Rows have ``("tokens", "prompt")`` (B, P) int64, and `prompt`,
    `group_id`, `rollout_id` and `expected_rollouts` (B, 1) int64. Under ``next`` they have `reward` (B, 1)
    float, the share of correct tokens, and `status` (B, 1): truncated if the response has no END, failed if
    the grader fails.

    Args:
        sampler: draws prompts, as indices of :data:`digits.STRINGS`, with their ids.
        draws: the draws to dispatch, such as ``stream.draws(…)`` of a RolloutStream over the sampler; None:
            all draws of the sampler.
        revised: share of a group's rollouts that are revised, in [0, 1]; rounded to whole rollouts.
        failing: probability that the grader fails on a row, in [0, 1).
        seed: seed of the grader.
        device: device of the environment.
    """

    whole_draws = True  # batches contain complete groups, so a gate can tell if a group has no row
    reward_seconds = 0.0  # spent on grading so far

    def __init__(
        self,
        sampler: RepeatSampler,
        *,
        draws: Iterator[TensorDictBase] | None = None,
        revised: float = 0.25,
        failing: float = 0.0,
        seed: int = 0,
        device: str | None = None,
    ):
        if not 0 <= revised <= 1 or not 0 <= failing < 1:
            raise ValueError(f"revised must be in [0, 1] and failing in [0, 1); got {revised} and {failing}")
        self.sampler, self.failing = sampler, failing
        self.revised = round(revised * sampler.group_size)
        if (sampler.group_size + self.revised) % 2:
            raise ValueError(
                f"group_size + revised rollouts must be even, because each slot runs two turns; got "
                f"{sampler.group_size} + {self.revised}"
            )
        slots = sampler.prompts_per_batch // sampler.ranks * (sampler.group_size + self.revised) // 2
        super().__init__(batch_size=torch.Size([slots]), device=device)
        self.frames_per_batch = 2 * slots
        self._draws, self._over = sampler.draws() if draws is None else draws, True
        self._set_seed(seed)
        self._asked, self._answers = digits.prompts().to(self.device), digits.answers().to(self.device)

        def ints(width: int) -> Unbounded:
            return Unbounded((slots, width), dtype=torch.int64, device=self.device)

        prompt = Composite(prompt=ints(digits.PROMPT_LENGTH), shape=[slots], device=self.device)
        ids = {name: ints(1) for name in (*IDS, "status")}
        self.observation_spec = Composite(tokens=prompt, **ids, shape=[slots], device=self.device)
        response = Composite(response=ints(digits.RESPONSE_LENGTH), shape=[slots], device=self.device)
        self.action_spec = Composite(tokens=response, shape=[slots], device=self.device)
        self.reward_spec = Unbounded((slots, 1), device=self.device)
        done = Binary(shape=(slots, 1), dtype=torch.bool, device=self.device)
        self.done_spec = Composite(done=done, shape=[slots], device=self.device)

    def _dispatch(self) -> None:
        """Dispatch the groups of a batch: assign their rollouts to slots with two turns each."""
        draws = next(self._draws)
        groups = torch.arange(len(draws), device=self.device).view(-1, self.sampler.group_size)
        two_turns, one_turn = groups[:, : self.revised], groups[:, self.revised :]
        first = torch.cat([two_turns, one_turn[:, 0::2]], 1).flatten()
        second = torch.cat([two_turns, one_turn[:, 1::2]], 1).flatten()
        slots = torch.stack([first, second])  # (2, B) index of the rollout by turn and slot
        self._ids = {name: draws[name].to(self.device)[slots].unsqueeze(-1) for name in IDS}
        self._turn, self._over = 0, False
        self._prompt = self._asked[self._ids["prompt"][0, :, 0]]

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        # All slots end after the second turn. After the first turn, slots that run another rollout
        # next are reset (all of them if none is revised); _step has set their prompts already.
        if tensordict is None or "_reset" not in tensordict.keys() or self._over:
            self._dispatch()
        return self._rows(done=torch.zeros(*self.batch_size, 1, dtype=torch.bool, device=self.device))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        response = tensordict["tokens", "response"]
        rollouts = self._ids["rollout_id"]
        is_first = not self._turn
        goes_on = (rollouts[0] == rollouts[1]) & is_first
        answer = self._answers[self._ids["prompt"][self._turn, :, 0]]
        began = time.perf_counter()
        reward = digits.graded(response, answer).unsqueeze(-1).masked_fill(goes_on, 0.0)
        self.reward_seconds += time.perf_counter() - began
        ended = (response == digits.END).any(-1, keepdim=True)
        status = torch.where(ended, int(Status.COMPLETED), int(Status.TRUNCATED))
        drawn = torch.rand(status.shape, generator=self._grader, dtype=torch.float32)
        gave_up = drawn.to(self.device) < self.failing
        status = status.masked_fill(gave_up, int(Status.FAILED))
        out = self._rows(done=~goes_on, reward=reward, status=status)
        self._over = not is_first
        if is_first:
            self._turn = 1
            # Two rollouts of one slot are in one group, so they have the same prompt.
            revision = digits.revision_prompts(self._prompt, response)
            self._prompt = torch.where(goes_on, revision, self._prompt)
            out["tokens", "prompt"] = self._prompt
        return out

    def _rows(self, **more: Tensor) -> TensorDict:
        rows = TensorDict(
            {name: value[self._turn] for name, value in self._ids.items()},
            batch_size=self.batch_size,
            device=self.device,
        )
        rows["status"] = torch.zeros_like(rows["prompt"])
        rows["tokens", "prompt"] = self._prompt
        return rows.update(more)

    def _set_seed(self, seed: int | None) -> None:
        self._grader = torch.Generator().manual_seed(seed or 0)
