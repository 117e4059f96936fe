"""Stamp ids on rollouts when they are dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms.table import BatchError, MissingKeyError, listing
from headrace.transforms.table.options import at_least, describe_options, nested_key, takes_options
from headrace.transforms.table.schema import ORIGIN, Origin, facts_of, has_key, require
from headrace.transforms.table.torchrl_base import Transform

if TYPE_CHECKING:
    from torchrl.data import Composite

PROMPTS: tuple[NestedKey, ...] = (
    "query",
    ("text", "prompt"),
    ("tokens", "prompt"),
    ("history", "prompt", "content"),
)
"""Keys under which TorchRL's environments store the prompt; the first that exists is used."""


@takes_options
def stamp_ids(
    prompts: Tensor | Sequence[int], *, group_size: int, first_rollout: int = 0, stride: int = 1
) -> TensorDict:
    """Make the ids of rollouts when their prompts are dispatched, so that no stage must infer them later.

    Each draw of a prompt is its own group: the same prompt drawn twice is two groups.

    Args:
        prompts: (N,) integers, the output of :class:`RepeatSampler`: each `group_size` times in a row.
        group_size: rollouts per draw.
        first_rollout: number of rollouts that were stamped before, a multiple of `group_size`.
        stride: difference between consecutive group ids, if other workers use the ids between.

    Returns:
        TensorDict ``[N]`` of int64: ``prompt``, ``group_id``, ``rollout_id``, ``expected_rollouts``.

    Raises:
        ValueError: `group_size` is below 1; `first_rollout` is not a multiple of it; or a prompt is not
            repeated `group_size` times in a row.

    Example:
        >>> stamp_ids([7, 7, 3, 3], group_size=2, first_rollout=10)["group_id"].tolist()
        [5, 5, 6, 6]
    """
    at_least("group_size", group_size, 1)
    prompts = torch.as_tensor(prompts, dtype=torch.int64)
    rows = torch.arange(len(prompts))
    broken = prompts != prompts[rows - rows % group_size]
    if len(prompts) % group_size or first_rollout % group_size or bool(broken.any()):
        row = f", with another prompt at row {int(broken.nonzero()[0])}" if bool(broken.any()) else ""
        raise ValueError(
            f"each prompt must be repeated group_size={group_size} times in a row, and first_rollout must be "
            f"a multiple of group_size; got {len(prompts)} prompts and first_rollout={first_rollout}{row}"
        )
    ids = _ids(rows, group_size, first_rollout // group_size, stride)
    return TensorDict({"prompt": prompts, **ids}, batch_size=[len(prompts)])


def _ids(numbers: Tensor, group_size: int, first_group: int, stride: int) -> dict[str, Tensor]:
    """The ids of rollouts from their numbers (N,) in the order of dispatch."""
    groups = first_group + numbers // group_size * stride
    return {
        "group_id": groups,
        "rollout_id": groups * group_size + numbers % group_size,
        "expected_rollouts": torch.full_like(groups, group_size),
    }


@takes_options
class StampIds(Transform):
    """Stamp ids on rollouts in an environment that draws its own prompts.

    Append it with ``env.append_transform(StampIds(repeats=G))`` to an environment that repeats each prompt G
    times in a row, such as TorchRL's GSM8KEnv, CountdownEnv and DatasetChatEnv with ``repeats=G``. Each reset
    row starts a rollout. G consecutive rollouts are a group, even if several resets start them, and must have
    the same prompt. The rows of a rollout keep its ids until it ends.

    Writes `group_key`, `rollout_key` and `expected_key`, each (*B, 1) int64, at the root and under ``next``.
    Writes ``("headrace", "origin")``, (*B, 5) int32: the number of the row in its rollout from 0, the worker,
    the number of workers, the environment of the row in the worker, and the number of environments.
    :class:`GroupAssembler` uses it to detect lost rollouts.

    Worker w of W uses the group ids w, w + W, w + 2 W, …, so give each worker its number:
    ``MultiSyncCollector([partial(make_env, worker=w, workers=2) for w in range(2)], …)``. If two workers use
    the same numbers, the gate and the assembler refuse their rollouts as duplicates.

    A collector may reset rows and never step them; LLMCollector does so with its first reset. If their number
    is not a multiple of G, a group has lost rollouts and never becomes complete. The gate refuses or drops
    it, and an assembler with a `timeout` closes it.

    After ``load_state_dict`` the environment continues with the next group.

    Args:
        repeats: rollouts per group, ≥ 1: how often the environment repeats each prompt in a row.
        worker: the number of this worker, from 0.
        workers: number of workers, ≥ 1.
        prompt_key: column that must be equal within a group; None: ``query``, else the prompt of ``text``,
            ``tokens`` or ``history``; if there is none, prompts are not checked.
        group_key: (*B, 1) int64, written.
        rollout_key: (*B, 1) int64, written.
        expected_key: (*B, 1) int64, written.

    Raises:
        ValueError: an option has an invalid value; or the environment does not repeat its prompts `repeats`
            times, has such ids already, or draws prompts in a transform after this one.
        BatchError: the rollouts of a group have different prompts.

    Example:
        >>> from torchrl.envs import PendulumEnv, TransformedEnv
        >>> env = TransformedEnv(PendulumEnv(), StampIds(repeats=2))
        >>> [int(env.reset()["group_id"]) for _ in range(5)]
        [0, 0, 1, 1, 2]
    """

    def __init__(
        self,
        repeats: int,
        *,
        worker: int = 0,
        workers: int = 1,
        prompt_key: NestedKey | None = None,
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey = "rollout_id",
        expected_key: NestedKey = "expected_rollouts",
    ):
        if repeats < 1 or not 0 <= worker < workers:
            raise ValueError(
                "repeats must be ≥ 1 and worker from 0 to workers - 1; got "
                f"repeats={repeats}, worker={worker}, workers={workers}"
            )
        keys = [nested_key(key) for key in (group_key, rollout_key, expected_key)]
        super().__init__(out_keys=[*keys, ORIGIN])
        self.repeats, self.worker, self.workers = repeats, worker, workers
        self.prompt_key = nested_key(prompt_key)
        self.group_key, self.rollout_key, self.expected_key = keys
        self._mask: Tensor | None = None  # the rows of the current reset
        self.needs_reset = False
        """Whether a state was loaded while rollouts were running. Their ids are from before the state."""
        self._started = 0  # rollouts in this process
        self._restart(dispatched=0)

    def _restart(self, dispatched: int) -> None:
        self._dispatched = dispatched  # number of rollouts
        self._prompt: Any = None  # the prompt of the last rollout
        self._numbers = torch.empty(0, dtype=torch.int64)  # number of each row's rollout; −1: none
        self._stepped = torch.empty(0, dtype=torch.bool)  # whether the rollout of the row has taken a step
        self._steps = torch.empty(0, dtype=torch.int32)  # steps of the rollout of the row
        self._waiting: frozenset[int] = frozenset()  # groups without a step and without a lost rollout
        self._begun: tuple[range, ...] = ()  # groups for the next draws()

    def draws(self) -> TensorDict:
        """The rollouts of the groups that have started since the last call.

        A group starts with the first step of any of its rollouts. A group that lost a rollout before that
        step is left out.

        Returns:
            TensorDict ``[N]`` of (N,) int64 ids, for ``GroupAssembler.announce``.
        """
        groups = torch.tensor([group for run in self._begun for group in run], dtype=torch.int64)
        self._begun = ()
        numbers = (groups[:, None] * self.repeats + torch.arange(self.repeats)).flatten()
        return TensorDict(self._columns(numbers), batch_size=[len(numbers)])

    def _columns(self, numbers: Tensor) -> dict[NestedKey, Tensor]:
        ids = _ids(numbers, self.repeats, self.worker, self.workers)
        return dict(zip((self.group_key, self.rollout_key, self.expected_key), ids.values(), strict=True))

    # -- called by the environment ------------------------------------------------------------------

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        # Read here: transforms that load prompts return another TensorDict without the mask.
        self._mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._dispatch(tensordict_reset, self._mask)

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._dispatch(tensordict_reset, tensordict.get("_reset", None))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.needs_reset:
            raise ValueError(
                f"{self!r} got a state after its environment was reset, so the running rollouts have ids "
                "that were used before. Call reset() of the collector after load_state_dict, as assembled() "
                "does; or load the state of the environment before you construct the collector"
            )
        for key in self.out_keys:
            if not has_key(tensordict, key):
                facts = facts_of(tensordict, key, "", type(self).__name__)
                raise MissingKeyError(
                    "{reader} {missing}. It is stamped by reset(): step its output", **facts
                )
            ids = tensordict.get(key)
            if key == ORIGIN:
                ids = ids + torch.tensor([1, 0, 0, 0, 0], dtype=ids.dtype, device=ids.device)
                self._steps = ids[..., 0].flatten().cpu()
            next_tensordict.set(key, ids)
        self._begin()
        return next_tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the ids to the spec."""
        from torchrl.data import Unbounded  # here: `stamp_ids` needs no TorchRL

        for key in self.out_keys:
            if key in observation_spec.keys(True, True):
                raise ValueError(f"the environment has {key!r} already, so do not append {self!r}")
            width, dtype = (len(Origin._fields), torch.int32) if key == ORIGIN else (1, torch.int64)
            observation_spec[key] = Unbounded(
                (*observation_spec.shape, width), dtype=dtype, device=observation_spec.device
            )
        return observation_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse a batch: ids can only be stamped in the environment."""
        raise TypeError(
            f"{type(self).__name__} stamps rollouts when they start: use env.append_transform({self!r})"
        )

    # -- dispatch -----------------------------------------------------------------------------------

    def _dispatch(self, rows: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        """Give the ids of the next rollouts to the reset rows, in the order in which prompts are loaded."""
        if self._dispatched == 0:
            self._check_environment()
        count = rows.shape.numel()
        if mask is None:
            mask = torch.ones(count, dtype=torch.bool)
        fresh = mask.cpu().reshape(count, -1).any(-1).nonzero().flatten()
        new = torch.arange(self._dispatched, self._dispatched + len(fresh))
        self._check_prompts(rows, fresh.tolist())
        self.needs_reset &= len(fresh) < count
        same = len(self._numbers) == count
        numbers = self._numbers.clone() if same else torch.full((count,), -1)
        stepped = self._stepped.clone() if same else torch.zeros(count, dtype=torch.bool)
        lost = self._numbers[~self._stepped] if not same else numbers[fresh][~stepped[fresh]]
        heads = new[new % self.repeats == 0]
        self._waiting = (self._waiting | self._groups(heads)) - self._groups(lost)
        steps = self._steps.clone() if same else torch.zeros(count, dtype=torch.int32)
        numbers[fresh], stepped[fresh], steps[fresh] = new, False, 0
        self._numbers, self._stepped, self._steps = numbers, stepped, steps
        self._dispatched, self._started = self._dispatched + len(fresh), self._started + len(fresh)
        parts = Origin(steps, self.worker, self.workers, torch.arange(count), count)
        origin = torch.stack([torch.as_tensor(part, dtype=torch.int32).expand(count) for part in parts], 1)
        for key, ids in (*self._columns(numbers).items(), (ORIGIN, origin)):
            rows.set(key, ids.reshape(*rows.shape, -1).to(rows.device or "cpu"))
        return rows

    def _groups(self, numbers: Tensor) -> frozenset[int]:
        return frozenset((numbers // self.repeats).tolist())

    def _begin(self) -> None:
        """Record that all rows have taken a step."""
        if bool(self._stepped.all()):
            return
        begun = self._waiting & self._groups(self._numbers[~self._stepped])
        for group in sorted(begun):
            *runs, last = self._begun or (range(group, group),)
            follows = last.stop == group
            new = [range(last.start, group + 1)] if follows else [last, range(group, group + 1)]
            self._begun = (*runs, *new)
        self._waiting -= begun
        self._stepped = torch.ones_like(self._stepped)

    # -- checks -------------------------------------------------------------------------------------

    def _check_environment(self) -> None:
        """Check the environment's transforms that repeat prompts.

        Raises:
            ValueError: a transform does not repeat prompts `repeats` times, or draws prompts after this
                transform.
        """
        environment = self.container
        chain = getattr(environment, "transform", None)
        chain = list(getattr(chain, "transforms", [chain]))  # of a Compose
        own = next((i for i, transform in enumerate(chain) if transform is self), len(chain))
        for i, transform in enumerate(chain):
            if transform is self or not hasattr(transform, "repeats"):
                continue
            name, repeats = type(transform).__name__, max(1, transform.repeats)
            if i > own:
                raise ValueError(f"append {self!r} after {name}, which draws the prompts")
            if self.repeats % repeats:
                raise ValueError(
                    f"{self!r}: {name} repeats each prompt {repeats} times in a row; set repeats={repeats}"
                )

    def _check_prompts(self, rows: TensorDictBase, fresh: list[int]) -> None:
        """Check that the rollouts of a group have the same prompt.

        Raises:
            BatchError: rollouts of a group have different prompts. The message lists the rows.
        """
        key = self.prompt_key
        if key is not None:
            require(rows, key, reader=type(self).__name__, option="prompt_key")
        elif (key := next((key for key in PROMPTS if rows.get(key, None) is not None), None)) is None:
            return
        flat = rows.reshape(rows.shape.numel())
        prompts = [flat[row].get(key) for row in fresh]  # text, or lists of numbers or texts
        prompts = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]
        found, last = [], self._prompt
        for number, (row, prompt) in enumerate(zip(fresh, prompts, strict=True), start=self._dispatched):
            if number % self.repeats and last is not None and prompt != last:
                group = int(self._columns(torch.tensor([number]))[self.group_key])
                found.append(f"row {row} of group {group} has {first_difference(prompt, last)}")
            last = prompt
        if found:
            raise BatchError(
                f"the {self.repeats} rollouts of a group must have the same prompt ({{prompt}}); "
                "{found}. Set repeats to how often the environment repeats each prompt in a row, "
                f"and append {type(self).__name__} before the first reset",
                found=listing(found),
                prompt=repr(key),
            )
        self._prompt = last

    # -- state --------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, int]:
        """The number of dispatched rollouts and the options, for ``state_dict``."""
        return {"dispatched": self._dispatched} | self._shape()

    def _shape(self) -> dict[str, int]:
        return {"repeats": self.repeats, "worker": self.worker, "workers": self.workers}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Continue with the next group. Unfinished rollouts of the saved environment are lost.

        If the environment was reset before, which a collector does when it is constructed, it must be reset
        again before its next step.

        Raises:
            ValueError: the state has other options, with which ids would be used twice.
        """
        if {name: state.get(name) for name in self._shape()} != self._shape():
            raise ValueError(f"the state must have the same options ({self._shape()}); got {state}")
        self.needs_reset = self._dispatched > 0
        first = -(-state["dispatched"] // self.repeats) * self.repeats
        # The environment repeats its last prompt for the rest of a group. The group's first rollouts are
        # lost.
        self._restart(first + self._started % self.repeats)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"


def first_difference(prompt: Any, last: Any) -> str:
    """Quote two prompts from where they differ. They often share a system prompt.

    >>> first_difference("You are kind. What is 5 + 3?", "You are kind. Who is it?")
    "'…ind. What is 5 + 3?' after '…ind. Who is it?'"
    """
    texts = [value if isinstance(value, str) else str(value) for value in (prompt, last)]
    differ = (at for at, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1)
    start = max(0, next(differ, min(map(len, texts))) - 7)
    prompt, last = ("…" * bool(start) + text[start : start + 40] for text in texts)
    return f"{prompt!r} after {last!r}"
