"""Rollouts of one turn or two, in batches that hold whole groups."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

from headrace.pipeline.train.sampler import RepeatSampler
from headrace.transforms import Status

from . import digits

IDS = ("prompt", "group_id", "rollout_id", "expected_rollouts")


class ReverseEnv(EnvBase):
    """Ask for digit strings backwards; a share of the rollouts writes a draft and then a revision.

    A revised rollout is two rows of the batch, its two segments: the draft has a reward of 0, the revision
    that of the rollout. The environment has half as many slots as a batch has rows, and two turns per batch:
    in a slot either one rollout is revised, or two rollouts of one turn follow each other. So each batch of
    `frames_per_batch` rows holds every rollout of every group that was dispatched for it.

    A turn reads ``("tokens", "response")``; rows carry ``("tokens", "prompt")`` (B, P) int64, `prompt`,
    `group_id`, `rollout_id` and `expected_rollouts` (B, 1) int64, and under ``next`` `reward` (B, 1) float:
    the share of tokens in place, and `status` (B, 1): truncated where the response has no end, failed where
    the grader gave up.

    Args:
        sampler: the prompts, as indices of :data:`digits.STRINGS`, and their ids.
        revised: share of a group's rollouts that are revised, in [0, 1]; rounded to whole rollouts.
        failing: probability that the grader gives up on a row, in [0, 1).
        seed: of the grader.
        device: of the environment.
    """

    whole_draws = True  # so a gate can notice a group of which no row came back
    reward_seconds = 0.0  # that grading took so far

    def __init__(
        self,
        sampler: RepeatSampler,
        *,
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
                f"slots run two turns each: group_size + revised rollouts must be even; got "
                f"{sampler.group_size} + {self.revised}"
            )
        slots = sampler.prompts_per_batch // sampler.ranks * (sampler.group_size + self.revised) // 2
        super().__init__(batch_size=torch.Size([slots]), device=device)
        self.frames_per_batch = 2 * slots
        self._draws, self._over = sampler.draws(), True
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
        """Draw the groups of a batch, and assign their rollouts to the slots, two turns each."""
        draws = next(self._draws)
        groups = torch.arange(len(draws), device=self.device).view(-1, self.sampler.group_size)
        two_turns, one_turn = groups[:, : self.revised], groups[:, self.revised :]
        first = torch.cat([two_turns, one_turn[:, 0::2]], 1).flatten()
        second = torch.cat([two_turns, one_turn[:, 1::2]], 1).flatten()
        slots = torch.stack([first, second])  # (2, B) the index of the rollout, by turn and slot
        self._ids = {name: draws[name].to(self.device)[slots].unsqueeze(-1) for name in IDS}
        self._turn, self._over = 0, False
        self._prompt = self._asked[self._ids["prompt"][0, :, 0]]

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        # All slots end together after the second turn. After the first, those are reset whose second turn is
        # of another rollout, all of them where none is revised, and _step has set its prompt already.
        if tensordict is None or "_reset" not in tensordict.keys() or self._over:
            self._dispatch()
        return self._rows(done=torch.zeros(*self.batch_size, 1, dtype=torch.bool, device=self.device))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        response = tensordict["tokens", "response"]
        rollouts = self._ids["rollout_id"]
        goes_on = (rollouts[0] == rollouts[1]) if self._turn == 0 else torch.zeros_like(rollouts[0]).bool()
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
        self._over = self._turn == 1
        if self._turn == 0:
            self._turn = 1
            asked = self._asked[self._ids["prompt"][1, :, 0]]
            revision = digits.revision_prompts(tensordict["tokens", "prompt"], response)
            self._prompt = torch.where(goes_on, revision, asked)
            # The second prompt of a revised rollout; the other slots are reset and ask another.
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
