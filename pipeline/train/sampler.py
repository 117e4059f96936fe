"""Sample prompts, each repeated for its group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import count, islice
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch.utils.data import Sampler

from headrace.pipeline.collect import stamp_ids
from headrace.transforms.split import stream_seed
from headrace.transforms.table.options import at_least, describe_options, takes_options


@takes_options
class RepeatSampler(Sampler[int]):
    """Yield prompt indices, each `group_size` times in a row.

    A batch has B = `prompts_per_batch` prompts: p₁ (`group_size` times), …, p_B (`group_size` times). Each
    batch is yielded `repeats` times. One pass over all prompts is an epoch, and each epoch has its own
    permutation. Each ``iter()`` continues where the last one stopped.

    Several `ranks` with the same seed share each batch: rank r yields prompts p_r, p_(r + ranks), …. Together
    they yield the prompts and ids of one process.

    Args:
        prompts: the dataset, or its number of prompts.
        group_size: rollouts of each group, ≥ 1.
        prompts_per_batch: number of prompts (each is one group) in each batch, over all ranks, ≥ 1.
        repeats: number of times that each batch is yielded, ≥ 1.
        shuffle: whether prompts are in random order. False keeps the order of the dataset.
        seed: seed of the permutation.
        remainder: if the number of prompts is not a multiple of `prompts_per_batch`: ``raise`` an error,
            ``drop`` the last prompts of each epoch, or make the last batch smaller (``uneven``).
        rank: index of this rank, from 0.
        ranks: number of ranks, ≥ 1. `prompts_per_batch` must be a multiple of it.

    Raises:
        ValueError: an option has a wrong value; or prompts are left over with ``raise``; or a batch has no
            prompt for one of the ranks.

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
        self.prompts = at_least("prompts", prompts if isinstance(prompts, int) else len(prompts), 1)
        self.group_size = at_least("group_size", group_size, 1)
        self.prompts_per_batch = at_least("prompts_per_batch", prompts_per_batch, 1)
        self.repeats = at_least("repeats", repeats, 1)
        over = self.prompts % prompts_per_batch
        if remainder == "raise" and over:
            raise ValueError(
                f"the number of prompts must be a multiple of prompts_per_batch={prompts_per_batch}; got "
                f"{self.prompts}, with {over} left over. Set remainder='drop' or 'uneven'"
            )
        self.shuffle, self.seed = shuffle, seed
        self.remainder = remainder
        self.drawn = self.prompts - over if remainder == "drop" else self.prompts
        if self.drawn == 0:
            raise ValueError(
                f"there must be at least prompts_per_batch={prompts_per_batch} prompts; got {self.prompts}"
            )
        self.rank, self.ranks = rank, ranks
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to ranks - 1; got rank={rank}, ranks={ranks}")
        last = over if remainder == "uneven" else 0
        if prompts_per_batch % ranks or 0 < last < ranks:
            raise ValueError(
                f"each of {ranks} ranks needs prompts of every batch: prompts_per_batch must be a multiple "
                f"of ranks, and the last batch must have at least {ranks}; got {prompts_per_batch}"
                + (f", and {last} in the last" if last else "")
            )
        self._groups, self._batches, self._places = self._share()
        self.epoch, self.position = 0, 0
        self._has_drawn = False
        self._made_for: tuple[int, int] | None = None  # seed and epoch of the cached permutation
        self._made: list[int] = []

    def _share(self) -> tuple[list[int], list[int], torch.Tensor]:
        """For each group of this rank in an epoch: its number, its batch, and its prompt's index."""
        group = torch.arange(self.drawn * self.repeats)
        chunk = group // (self.prompts_per_batch * self.repeats)
        size = (self.drawn - chunk * self.prompts_per_batch).clamp(max=self.prompts_per_batch)
        inside = group - chunk * self.prompts_per_batch * self.repeats
        mine = inside % size % self.ranks == self.rank
        batch, place = chunk * self.repeats + inside // size, chunk * self.prompts_per_batch + inside % size
        return group[mine].tolist(), batch[mine].tolist(), place[mine]

    def __len__(self) -> int:
        """The number of indices of this rank in an epoch."""
        return len(self._groups) * self.group_size

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of the epoch."""
        epoch = self.epoch
        while self.epoch == epoch:  # all iterators share the sampler's position
            indices, place = self._indices(), self.position
            # The position moves before the yield, so the index counts even if the iterator ends here.
            self.position, self._has_drawn = self.position + 1, True
            if self.position == len(indices):
                self.epoch, self.position = self.epoch + 1, 0
            yield indices[place]

    def draws(self) -> Iterator[TensorDict]:
        """Yield batches of prompts with ids, without end.

        Each TensorDict ``[N]``, N = prompts_per_batch / ranks · group_size, has ``prompt``, ``group_id``,
        ``rollout_id`` and ``expected_rollouts``, (N,) int64; see :func:`stamp_ids`. Ids are unique over all
        epochs and ranks. A restored sampler continues with the next ids. If ``iter()`` has started a batch,
        the first TensorDict has the rest of the batch.

        Raises:
            ValueError: while iterating: ``iter()`` has stopped within a group.
        """
        while True:
            turn, begun = divmod(self.position, self.group_size)
            if begun:
                raise ValueError(
                    f"draws() needs complete groups, and iter() has yielded {begun} of the {self.group_size} "
                    "indices of a group: read the others from iter() first"
                )
            size = (bisect_right(self._batches, self._batches[turn]) - turn) * self.group_size
            group = self.epoch * self.drawn * self.repeats + self._groups[turn]
            prompts, first = list(islice(self, size)), group * self.group_size
            yield stamp_ids(prompts, group_size=self.group_size, first_rollout=first, stride=self.ranks)

    def go_on(self, known: Callable[[int], bool]) -> None:
        """Continue :meth:`draws` at the first group that is not known, in the order of the draws.

        Args:
            known: a function that says whether the group with an id was drawn. All groups before a known one
                must be known.

        Example:
            >>> sampler = RepeatSampler(5, group_size=2, shuffle=False)
            >>> sampler.go_on(lambda group: group < 8)
            >>> next(sampler.draws())["group_id"].tolist()
            [8, 8]
        """

        def is_new(turn: int) -> bool:
            epoch, turn = divmod(turn, len(self._groups))
            return not known(epoch * self.drawn * self.repeats + self._groups[turn])

        most = next(2**power for power in count() if is_new(2**power - 1))
        self.epoch, turn = divmod(bisect_left(range(most), True, key=is_new), len(self._groups))
        self.position = turn * self.group_size

    def drawn_with(self, groups: Iterable[int]) -> list[int]:
        """Return all groups, of all ranks, in those batches of :meth:`draws` that contain one of `groups`.

        The result follows from the ids alone. With ``CompletenessGate(expected_groups=sampler)`` the gate
        finds groups without any row. For this, collected batches must hold all rows of a batch of
        :meth:`draws`. If asynchronous collection spreads a batch of draws over several collected batches, do
        not give the sampler to the gate, or set `prompts_per_batch` to 1.

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
        """Return the position and the options. With a DataLoader that has workers, the position is ahead."""
        return {"epoch": self.epoch, "position": self.position} | self._shape()

    def _shape(self) -> dict[str, Any]:
        names = ["prompts", "group_size", "prompts_per_batch", "repeats", "shuffle", "seed", "drawn"]
        names += ["rank", "ranks"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: the state is of a sampler with other options, so that ids would repeat; or this
                sampler has drawn prompts already, whose rollouts have ids of their own.
        """
        other = {name: state.get(name) for name, value in self._shape().items() if state.get(name) != value}
        if other or not 0 <= state["position"] < len(self) or state["epoch"] < 0:
            raise ValueError(f"the state must be of a sampler like this one ({self._shape()}); got {state}")
        if self._has_drawn and (self.epoch, self.position) != (state["epoch"], state["position"]):
            raise ValueError(
                "load the state before anything draws from this sampler, for example before you construct "
                f"the collector, which resets its environment; it is at epoch {self.epoch}, position "
                f"{self.position}, and the state at epoch {state['epoch']}, position {state['position']}"
            )
        self.epoch, self.position = state["epoch"], state["position"]
