"""The ids of rollouts, stamped once, where they are dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Compose, Transform

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.options import describe_options, nested_key, takes_options
from headrace.transforms.schema import ORIGIN, Origin, require

PROMPTS: tuple[NestedKey, ...] = (
    "query",
    ("text", "prompt"),
    ("tokens", "prompt"),
    ("history", "prompt", "content"),
)
"""Where TorchRL's environments have the prompt, in the order of looking."""


@takes_options
def stamp_ids(
    prompts: Tensor | Sequence[int], *, group_size: int, first_rollout: int = 0, stride: int = 1
) -> TensorDict:
    """Give draws their ids, once, where they are dispatched, so that nothing infers them from positions.

    Every draw of a prompt is a group of its own, so the same prompt drawn twice is two groups.

    Args:
        prompts: (N,) integers as :class:`RepeatSampler` yields them, each `group_size` times in a row.
        group_size: rollouts per draw.
        first_rollout: rollouts stamped before, a multiple of `group_size`.
        stride: from one group's id to the next, where others number the groups between.

    Returns:
        TensorDict ``[N]`` of int64: ``prompt``, ``group_id``, ``rollout_id``, ``expected_rollouts``.

    Raises:
        ValueError: a prompt is not repeated `group_size` times in a row; the message names the row.

    Example:
        >>> stamp_ids([7, 7, 3, 3], group_size=2, first_rollout=10)["group_id"].tolist()
        [5, 5, 6, 6]
    """
    prompts = torch.as_tensor(prompts, dtype=torch.int64)
    rows = torch.arange(len(prompts))
    broken = prompts != prompts[rows - rows % group_size]
    if len(prompts) % group_size or first_rollout % group_size or bool(broken.any()):
        row = int(broken.nonzero()[0]) if bool(broken.any()) else len(prompts)
        raise ValueError(
            f"each prompt must come {group_size} times in a row, from a whole group on; {len(prompts)} "
            f"prompts after {first_rollout} rollouts break that at row {row}"
        )
    ids = _ids(rows, group_size, first_rollout // group_size, stride)
    return TensorDict({"prompt": prompts, **ids}, batch_size=[len(prompts)])


def _ids(places: Tensor, group_size: int, first_group: int, stride: int) -> dict[str, Tensor]:
    """The ids of rollouts by their places (N,) in the order of dispatch, `group_size` of them a group."""
    groups = first_group + places // group_size * stride
    return {
        "group_id": groups,
        "rollout_id": groups * group_size + places % group_size,
        "expected_rollouts": torch.full_like(groups, group_size),
    }


@takes_options
class StampIds(Transform):
    """Stamp the ids of rollouts in an environment that draws its prompts itself.

    ``env.append_transform(StampIds(repeats=G))``, for environments such as TorchRL's GSM8KEnv, CountdownEnv
    and DatasetChatEnv with ``repeats=G``, which have each prompt G times in a row. Each row that is reset is
    a rollout; G that were dispatched one after the other are a group, over whatever resets they are spread,
    and must have one prompt. The rows of a rollout keep its ids up to its end.

    Writes `group_key`, `rollout_key` and `expected_key`, each (*B, 1) int64, at the root and under ``next``;
    and ``("headrace", "origin")`` (*B, 5) int32: the number of the row in its rollout, from 0, the worker,
    how many workers there are, the row's environment in the worker, and how many of these there are. By it
    :class:`GroupAssembler` knows which rollouts were lost on their way.

    Workers number their own groups w, w + W, w + 2 W, …, so give each of W its number:
    ``MultiSyncCollector([partial(make_env, worker=w, workers=2) for w in range(2)], …)``. Two that number
    alike are noticed by the gate and the assembler: their rollouts end twice.

    A collector may reset rows of which no step is taken, as LLMCollector does with the first of all. Where
    their number is no multiple of G, a group has lost rollouts and is never whole: the gate refuses or drops
    it, and an assembler with a `timeout` lets it go.

    A restored environment has no rollouts under way: it goes on with the next whole group.

    Args:
        repeats: rollouts per group, ≥ 1: how often the environment has each prompt in a row.
        worker: which of the workers this one is, from 0.
        workers: how many number their rollouts, ≥ 1.
        prompt_key: what the rows of a group share; None: ``query``, else the prompt of ``text``, ``tokens``
            or ``history``, else it is not looked at.
        group_key: (*B, 1) int64, written.
        rollout_key: (*B, 1) int64, written.
        expected_key: (*B, 1) int64, written.

    Raises:
        ValueError: an option with a wrong value; the environment repeats its prompts another number of times,
            has such ids already, or draws prompts behind this transform.
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
        self._mask: Tensor | None = None  # of the reset under way
        self._restart(dispatched=0)

    def _restart(self, dispatched: int) -> None:
        self._dispatched = dispatched  # rollouts
        self._prompt: Any = None  # of the last of them
        self._places = torch.empty(0, dtype=torch.int64)  # in the order of dispatch, by row; −1: none yet
        self._stepped = torch.empty(0, dtype=torch.bool)  # whether the row's rollout has taken a step
        self._steps = torch.empty(0, dtype=torch.int32)  # that the row's rollout has taken
        self._waiting: frozenset[int] = frozenset()  # groups of which no rollout has, nor was lost
        self._begun: tuple[range, ...] = ()  # groups that draws() has yet to say

    def draws(self) -> TensorDict:
        """Who was dispatched: the rollouts of the groups that have begun since the last call.

        A group begins with the first step of any of its rollouts. One that lost a rollout before is left out.

        Returns:
            TensorDict ``[N]`` of (N,) int64 ids, as ``GroupAssembler.announce`` takes them.
        """
        groups = torch.tensor([group for run in self._begun for group in run], dtype=torch.int64)
        self._begun = ()
        places = (groups[:, None] * self.repeats + torch.arange(self.repeats)).flatten()
        return TensorDict(self._columns(places), batch_size=[len(places)])

    def _columns(self, places: Tensor) -> dict[NestedKey, Tensor]:
        ids = _ids(places, self.repeats, self.worker, self.workers)
        return dict(zip((self.group_key, self.rollout_key, self.expected_key), ids.values(), strict=True))

    # -- what an environment calls ------------------------------------------------------------------

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        # Here alone: who loads prompts returns another TensorDict, without the mask.
        self._mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._dispatch(tensordict_reset, self._mask)

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._dispatch(tensordict_reset, tensordict.get("_reset", None))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key in self.out_keys:
            ids = require(tensordict, key, reader=type(self).__name__, option="stamped when it was reset")
            if key == ORIGIN:
                ids = ids + torch.tensor([1, 0, 0, 0, 0], dtype=ids.dtype, device=ids.device)
                self._steps = ids[..., 0].flatten().cpu()
            next_tensordict.set(key, ids)
        self._begin()
        return next_tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the ids."""
        for key in self.out_keys:
            if key in observation_spec.keys(True, True):
                raise ValueError(f"{key!r} is stamped once; the environment has it without {self!r}")
            width, dtype = (len(Origin._fields), torch.int32) if key == ORIGIN else (1, torch.int64)
            observation_spec[key] = Unbounded(
                (*observation_spec.shape, width), dtype=dtype, device=observation_spec.device
            )
        return observation_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse a batch: ids are stamped where rollouts begin."""
        raise TypeError(
            f"{type(self).__name__} stamps rollouts where they begin: env.append_transform({self!r})"
        )

    # -- who is dispatched --------------------------------------------------------------------------

    def _dispatch(self, rows: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        """Give each row that is reset the next rollout, in the order in which prompts are handed out."""
        if self._dispatched == 0:
            self._check_environment()
        count = rows.shape.numel()
        if mask is None:
            mask = torch.ones(count, dtype=torch.bool)
        fresh = mask.cpu().reshape(count, -1).any(-1).nonzero().flatten()
        new = torch.arange(self._dispatched, self._dispatched + len(fresh))
        self._check_prompts(rows, fresh.tolist())
        same = len(self._places) == count
        places = self._places.clone() if same else torch.full((count,), -1)
        stepped = self._stepped.clone() if same else torch.zeros(count, dtype=torch.bool)
        lost = self._places[~self._stepped] if not same else places[fresh][~stepped[fresh]]
        heads = new[new % self.repeats == 0]
        self._waiting = (self._waiting | self._groups(heads)) - self._groups(lost)
        steps = self._steps.clone() if same else torch.zeros(count, dtype=torch.int32)
        places[fresh], stepped[fresh], steps[fresh] = new, False, 0
        self._places, self._stepped, self._steps = places, stepped, steps
        self._dispatched += len(fresh)
        numbers = Origin(steps, self.worker, self.workers, torch.arange(count), count)
        parts = [torch.as_tensor(part, dtype=torch.int32).expand(count) for part in numbers]
        origin = torch.stack(parts, 1)
        for key, ids in (*self._columns(places).items(), (ORIGIN, origin)):
            rows.set(key, ids.reshape(*rows.shape, -1).to(rows.device or "cpu"))
        return rows

    def _groups(self, places: Tensor) -> frozenset[int]:
        return frozenset((places // self.repeats).tolist())

    def _begin(self) -> None:
        """All rows have taken a step."""
        if bool(self._stepped.all()):
            return
        begun = self._waiting & self._groups(self._places[~self._stepped])
        for group in sorted(begun):
            *runs, last = self._begun or (range(group, group),)
            follows = last.stop == group
            new = [range(last.start, group + 1)] if follows else [last, range(group, group + 1)]
            self._begun = (*runs, *new)
        self._waiting -= begun
        self._stepped = torch.ones_like(self._stepped)

    # -- what must be so ----------------------------------------------------------------------------

    def _check_environment(self) -> None:
        """Look at who repeats the prompts, where the environment says so.

        Raises:
            ValueError: another number of times; or behind this transform, which then sees not who is reset.
        """
        environment = self.container
        chain = getattr(environment, "transform", None)
        chain = list(chain) if isinstance(chain, Compose) else [chain]
        place = next((i for i, transform in enumerate(chain) if transform is self), len(chain))
        for i, transform in enumerate(chain):
            if transform is self or not hasattr(transform, "repeats"):
                continue
            name, repeats = type(transform).__name__, max(1, transform.repeats)
            if i > place:
                raise ValueError(f"append {self!r} behind {name}, which draws the prompts")
            if self.repeats % repeats:
                raise ValueError(
                    f"{self!r}: {name} has each prompt {repeats} times in a row; set repeats={repeats}"
                )

    def _check_prompts(self, rows: TensorDictBase, fresh: list[int]) -> None:
        """The rollouts of a group have one prompt.

        Raises:
            BatchError: they have not; with the rows.
        """
        key = self.prompt_key
        if key is not None:
            require(rows, key, reader=type(self).__name__, option="prompt_key")
        elif (key := next((key for key in PROMPTS if rows.get(key, None) is not None), None)) is None:
            return
        flat = rows.reshape(rows.shape.numel())
        prompts = [flat[place].get(key) for place in fresh]  # text, or lists of numbers or texts
        prompts = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]
        found, last = [], self._prompt
        for place, (row, prompt) in enumerate(zip(fresh, prompts, strict=True), start=self._dispatched):
            if place % self.repeats and prompt != last:
                group = int(self._columns(torch.tensor([place]))[self.group_key])
                found.append(f"row {row} of group {group} has {first_difference(prompt, last)}")
            last = prompt
        if found:
            raise BatchError(
                f"the {self.repeats} rollouts of a group have one prompt ({key!r}); {listing(found)}. Set "
                "repeats to how often the environment has each prompt in a row, and append "
                f"{type(self).__name__} before it is first reset"
            )
        self._prompt = last

    # -- its state ----------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, int]:
        """How many rollouts were dispatched, for ``state_dict``."""
        return {"dispatched": self._dispatched} | self._shape()

    def _shape(self) -> dict[str, int]:
        return {"repeats": self.repeats, "worker": self.worker, "workers": self.workers}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Go on with the next whole group: the rollouts that were under way are lost.

        Raises:
            ValueError: the state is of one with other options: ids would be given twice.
        """
        if {name: state.get(name) for name in self._shape()} != self._shape():
            raise ValueError(f"the state must be of one like this ({self._shape()}); got {state}")
        self._restart(-(-state["dispatched"] // self.repeats) * self.repeats)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"


def first_difference(prompt: Any, last: Any) -> str:
    """Two prompts from where they differ: they begin alike, with the system's words.

    >>> first_difference("You are kind. What is 5 + 3?", "You are kind. Who is it?")
    "'…ind. What is 5 + 3?' after '…ind. Who is it?'"
    """
    texts = [value if isinstance(value, str) else str(value) for value in (prompt, last)]
    differ = (place for place, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1)
    start = max(0, next(differ, min(map(len, texts))) - 7)
    one, other = ("…" * bool(start) + text[start : start + 40] for text in texts)
    return f"{one!r} after {other!r}"
