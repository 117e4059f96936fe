"""Prompts in the order in which groups are dispatched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch.utils.data import Sampler

from headrace.pipeline.collect.stamping import stamp_ids
from headrace.transforms.options import describe_options, one_of, takes_options
from headrace.transforms.split.shuffle import stream_seed


@takes_options
class RepeatSampler(Sampler[int]):
    """Yield prompt indices, each `group_size` times in a row.

    With prompts p₁ … p_B in a batch of B = `prompts_per_batch`, one batch is p₁ (`group_size` times), …, p_B
    (`group_size` times), and the whole batch comes `repeats` times. A pass over all prompts is an epoch; each
    ``iter()`` continues where the last one stopped, and each epoch has an order of its own.

    Of several `ranks` with the same seed each yields its share of every batch: prompts p_r, p_(r + ranks), …
    for rank r. Together they draw what one process would, with the same ids.

    Args:
        prompts: the dataset, or the number of prompts in it.
        group_size: rollouts per draw of a prompt, ≥ 1.
        prompts_per_batch: draws per batch, ≥ 1.
        repeats: how often each batch comes, ≥ 1.
        shuffle: False keeps the dataset's order.
        seed: of the order.
        remainder: what happens where the number of prompts is no multiple of `prompts_per_batch`: ``raise``,
            ``drop`` the last of each epoch's order, or make the last batch smaller (``uneven``).
        rank: which of the ranks this one is, from 0.
        ranks: how many draw together, ≥ 1; `prompts_per_batch`, which is that of all, must be a multiple.

    Raises:
        ValueError: an option with a wrong value, a remainder under ``raise``, or a batch that leaves a rank
            without a prompt.

    Example:
        >>> list(RepeatSampler(3, group_size=2, shuffle=False))
        [0, 0, 1, 1, 2, 2]
        >>> list(RepeatSampler(4, group_size=1, prompts_per_batch=2, repeats=2, shuffle=False))
        [0, 1, 0, 1, 2, 3, 2, 3]
        >>> list(RepeatSampler(4, group_size=2, prompts_per_batch=2, shuffle=False, rank=1, ranks=2))
        [1, 1, 3, 3]
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
        rank: int = 0,
        ranks: int = 1,
    ):
        self.prompts = prompts if isinstance(prompts, int) else len(prompts)
        self.group_size, self.prompts_per_batch, self.repeats = group_size, prompts_per_batch, repeats
        names = ("prompts", "group_size", "prompts_per_batch", "repeats")
        if low := [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) < 1]:
            raise ValueError(f"{', '.join(names)} must be ≥ 1; got {', '.join(low)}")
        over = self.prompts % prompts_per_batch
        if one_of("remainder", remainder, ("raise", "drop", "uneven")) == "raise" and over:
            raise ValueError(
                f"{self.prompts} prompts do not make batches of {prompts_per_batch}: {over} over. Set "
                "remainder='drop' or 'uneven'"
            )
        self.shuffle, self.seed = one_of("shuffle", shuffle, (True, False)), seed
        self.remainder = remainder
        self.drawn = self.prompts - over if remainder == "drop" else self.prompts
        if self.drawn == 0:
            raise ValueError(f"{self.prompts} prompts make no batch of {prompts_per_batch}")
        self.rank, self.ranks = rank, ranks
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to ranks - 1; got rank={rank}, ranks={ranks}")
        last = over if remainder == "uneven" else 0
        if prompts_per_batch % ranks or 0 < last < ranks:
            raise ValueError(
                f"each of {ranks} ranks needs a share of every batch: prompts_per_batch must be a "
                f"multiple of ranks, and a smaller last batch no less than it; got {prompts_per_batch}"
                + (f", and {last} in the last" if last else "")
            )
        self._groups, self._batches, self._places = self._share()
        self.epoch, self.position = 0, 0
        self._made_for: tuple[int, int] | None = None  # the seed and epoch of the order at hand
        self._made: list[int] = []

    def _share(self) -> tuple[list[int], list[int], torch.Tensor]:
        """By group of an epoch that this rank draws: its number, its batch, its prompt's place."""
        group = torch.arange(self.drawn * self.repeats)
        chunk = group // (self.prompts_per_batch * self.repeats)
        size = (self.drawn - chunk * self.prompts_per_batch).clamp(max=self.prompts_per_batch)
        inside = group - chunk * self.prompts_per_batch * self.repeats
        mine = inside % size % self.ranks == self.rank
        batch, place = chunk * self.repeats + inside // size, chunk * self.prompts_per_batch + inside % size
        return group[mine].tolist(), batch[mine].tolist(), place[mine]

    def __len__(self) -> int:
        """Indices per epoch, of this rank."""
        return len(self._groups) * self.group_size

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch."""
        epoch = self.epoch
        while self.epoch == epoch:  # the position is the sampler's: others draw from it, too
            indices, place = self._indices(), self.position
            # Before the yield: an index that was yielded counts as drawn, even if no other is asked for.
            self.position += 1
            if self.position == len(indices):
                self.epoch, self.position = self.epoch + 1, 0
            yield indices[place]

    def draws(self) -> Iterator[TensorDict]:
        """Yield batches of draws without end, with the ids that rows carry from here to the loss.

        A batch that ``iter()`` has begun is finished first.

        Each TensorDict ``[N]``, N = prompts_per_batch / ranks · group_size, has ``prompt``, ``group_id``,
        ``rollout_id`` and ``expected_rollouts``, (N,) int64; see :func:`stamp_ids`. Ids are unique over all
        epochs and ranks; a restored sampler continues with the next ones.
        """
        while True:
            turn, begun = divmod(self.position, self.group_size)
            size = (bisect_right(self._batches, self._batches[turn]) - turn) * self.group_size
            group = self.epoch * self.drawn * self.repeats + self._groups[turn]
            prompts = list(islice(self, size - begun))
            first = group * self.group_size + begun
            yield stamp_ids(prompts, group_size=self.group_size, first_rollout=first, stride=self.ranks)

    def drawn_with(self, groups: Iterable[int]) -> list[int]:
        """All groups of the batches of :meth:`draws`, of whatever rank, that hold some of `groups`.

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
            rank = inside % size % self.ranks
            found |= dict.fromkeys(range(first + rank, first + size, self.ranks))
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
        self._made_for = (self.seed, self.epoch)
        self._made = order[self._places].repeat_interleave(self.group_size).tolist()
        return self._made

    def state_dict(self) -> dict[str, Any]:
        """The position and the options. A DataLoader with workers has drawn more than it has yielded."""
        return {"epoch": self.epoch, "position": self.position} | self._shape()

    def _shape(self) -> dict[str, Any]:
        names = ["prompts", "group_size", "prompts_per_batch", "repeats", "shuffle", "seed", "drawn"]
        names += ["rank", "ranks"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: the state is of a sampler with other options: ids would be given twice.
        """
        state = {"rank": 0, "ranks": 1} | state  # as one was before there were ranks
        other = {name: state.get(name) for name, value in self._shape().items() if state.get(name) != value}
        if other or not 0 <= state["position"] < len(self) or state["epoch"] < 0:
            raise ValueError(f"the state must be of a sampler like this one ({self._shape()}); got {state}")
        self.epoch, self.position = state["epoch"], state["position"]
