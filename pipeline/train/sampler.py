"""Prompts in the order in which groups are dispatched, and the ids of their rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Sampler

from headrace.transforms.options import describe_options, one_of
from headrace.transforms.split.seeds import stream_seed


class RepeatSampler(Sampler[int]):
    """Yield prompt indices, each `group_size` times in a row.

    With prompts p₁ … p_B in a batch of B = `prompts_per_batch`, one batch is p₁ (`group_size` times), …, p_B
    (`group_size` times), and the whole batch comes `repeats` times. A pass over all prompts is an epoch; each
    ``iter()`` continues where the last one stopped, and each epoch has an order of its own.

    Args:
        prompts: the dataset, or the number of prompts in it.
        group_size: rollouts per draw of a prompt, ≥ 1.
        prompts_per_batch: draws per batch, ≥ 1.
        repeats: how often each batch comes, ≥ 1.
        shuffle: False keeps the dataset's order.
        seed: of the order.
        remainder: what happens where the number of prompts is no multiple of `prompts_per_batch`: ``raise``,
            ``drop`` the last of each epoch's order, or make the last batch smaller (``uneven``).

    Raises:
        ValueError: an option with a wrong value, or a remainder under ``raise``.

    Example:
        >>> list(RepeatSampler(3, group_size=2, shuffle=False))
        [0, 0, 1, 1, 2, 2]
        >>> list(RepeatSampler(4, group_size=1, prompts_per_batch=2, repeats=2, shuffle=False))
        [0, 1, 0, 1, 2, 3, 2, 3]
    """

    def __init__(
        self,
        prompts: int | Sized,
        *,
        group_size: int,
        prompts_per_batch: int = 1,
        repeats: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Literal["raise", "drop", "uneven"] = "raise",
    ):
        self.prompts = prompts if isinstance(prompts, int) else len(prompts)
        counts = {
            "prompts": self.prompts,
            "group_size": group_size,
            "prompts_per_batch": prompts_per_batch,
            "repeats": repeats,
        }
        if low := [f"{name}={value}" for name, value in counts.items() if value < 1]:
            raise ValueError(f"{', '.join(counts)} must be ≥ 1; got {', '.join(low)}")
        over = self.prompts % prompts_per_batch
        if one_of("remainder", remainder, ("raise", "drop", "uneven")) == "raise" and over:
            raise ValueError(
                f"{self.prompts} prompts do not make batches of {prompts_per_batch}: {over} over. Set "
                "remainder='drop' or 'uneven'"
            )
        self.group_size, self.prompts_per_batch, self.repeats = group_size, prompts_per_batch, repeats
        self.shuffle, self.seed = one_of("shuffle", shuffle, (True, False)), seed
        self.remainder = remainder
        self.drawn = self.prompts - over if remainder == "drop" else self.prompts
        if self.drawn == 0:
            raise ValueError(f"{self.prompts} prompts make no batch of {prompts_per_batch}")
        self.epoch, self.position = 0, 0
        self._made_for: tuple[int, int] | None = None  # the seed and epoch of the order at hand
        self._made: list[int] = []

    def __len__(self) -> int:
        """Indices per epoch."""
        return self.drawn * self.group_size * self.repeats

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch."""
        indices = self._indices()
        for place in range(self.position, len(indices)):
            # Before the yield: an index that was yielded counts as drawn, even if no other is asked for.
            self.position += 1
            if self.position == len(indices):
                self.epoch, self.position = self.epoch + 1, 0
            yield indices[place]

    def draws(self) -> Iterator[TensorDict]:
        """Yield batches of draws without end, with the ids that rows carry from here to the loss.

        A batch that ``iter()`` has begun is finished first.

        Each TensorDict ``[prompts_per_batch · group_size]`` has ``prompt``, ``group_id``, ``rollout_id``
        and ``expected_rollouts``, (N,) int64; see :func:`stamp_ids`. Ids are unique over all epochs; a
        restored sampler continues with the next ones.
        """
        while True:
            start = self.epoch * len(self) + self.position
            size = self.prompts_per_batch * self.group_size
            # Batches end at multiples of `size` in each chunk of repeats, the last of which may be smaller.
            chunk = self.position // (size * self.repeats)
            size = min(size, self.drawn * self.group_size - chunk * size)
            inside = (self.position - chunk * self.prompts_per_batch * self.group_size * self.repeats) % size
            prompts = list(islice(self, size - inside))
            yield stamp_ids(prompts, group_size=self.group_size, first_rollout=start)

    def drawn_with(self, groups: Iterable[int]) -> list[int]:
        """All groups of the batches of :meth:`draws` that hold some of `groups`, by the ids that it stamps.

        It follows from the ids alone, whoever drew them and however far ahead. A gate that is given the
        sampler, ``CompletenessGate(expected_groups=sampler)``, so notices a prompt of which no row came back,
        where each collected batch holds whole draws. Where collection is asynchronous, and a draw comes in
        several batches, its groups are not missing: do not give it to the gate, or draw one prompt at a time.

        Example:
            >>> RepeatSampler(5, group_size=8, prompts_per_batch=2, remainder="uneven").drawn_with([3, 9])
            [2, 3, 9]
        """
        found: dict[int, None] = {}
        for group in groups:
            place = group % (self.drawn * self.repeats)
            chunk = place // (self.prompts_per_batch * self.repeats)
            size = min(self.prompts_per_batch, self.drawn - chunk * self.prompts_per_batch)
            inside = place - chunk * self.prompts_per_batch * self.repeats
            first = group - inside % size
            found |= dict.fromkeys(range(first, first + size))
        return list(found)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def _indices(self) -> list[int]:
        if self._made_for == (self.seed, self.epoch):
            return self._made
        order = torch.arange(self.prompts)
        if self.shuffle:
            generator = torch.Generator().manual_seed(stream_seed("prompts", self.seed, self.epoch))
            order = torch.randperm(self.prompts, generator=generator)
        chunks = order[: self.drawn].split(self.prompts_per_batch)
        groups = [chunk.repeat_interleave(self.group_size).repeat(self.repeats) for chunk in chunks]
        self._made_for, self._made = (self.seed, self.epoch), torch.cat(groups).tolist()
        return self._made

    def state_dict(self) -> dict[str, Any]:
        """The position and the options. A DataLoader with workers has drawn more than it has yielded."""
        return {"epoch": self.epoch, "position": self.position} | self._shape()

    def _shape(self) -> dict[str, Any]:
        names = ("prompts", "group_size", "prompts_per_batch", "repeats", "shuffle", "seed", "drawn")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: the state is of a sampler with other options: ids would be given twice.
        """
        other = {name: state.get(name) for name, value in self._shape().items() if state.get(name) != value}
        if other or not 0 <= state["position"] < len(self) or state["epoch"] < 0:
            raise ValueError(f"the state must be of a sampler like this one ({self._shape()}); got {state}")
        self.epoch, self.position = state["epoch"], state["position"]


def stamp_ids(prompts: Tensor | Sequence[int], *, group_size: int, first_rollout: int = 0) -> TensorDict:
    """Give draws their ids, once, where they are dispatched, so that nothing infers them from positions.

    Every draw of a prompt is a group of its own, so the same prompt drawn twice is two groups.

    Args:
        prompts: (N,) integers as :class:`RepeatSampler` yields them, each `group_size` times in a row.
        group_size: rollouts per draw.
        first_rollout: rollouts stamped before, a multiple of `group_size`.

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
    rollouts = first_rollout + rows
    return TensorDict(
        {
            "prompt": prompts,
            "group_id": rollouts // group_size,
            "rollout_id": rollouts,
            "expected_rollouts": torch.full_like(prompts, group_size),
        },
        batch_size=[len(prompts)],
    )
