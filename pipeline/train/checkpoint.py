"""Save the weights, the optimiser, the pipeline and the stream of a run at one step, and go on from there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.transforms.carry import write_whole
from headrace.transforms.table import listing
from headrace.transforms.table.options import at_least, takes_options

NAME = "step_{step:010d}.rank{rank}of{ranks}.pt"
FORM = re.compile(r"step_(\d+)\.rank(\d+)of(\d+)\.pt")


class Checkpoint:
    """The states of all parts of a run, in a file for each saved step.

    :meth:`save` writes a new file, syncs it, renames it, and then commits the stream. The process may be
    killed at any point: :meth:`load` finds a complete file, and groups that the saved weights have trained
    are not taken again. Construct all parts as at the first start, then load, and then begin.

    Several ranks share the folder. Each writes its own files, and all load the newest step that every rank
    has saved.

    Args:
        folder: folder of the files, which is made if it does not exist.
        keep: number of saved steps to keep, ≥ 1; older ones are deleted.
        rank: rank of this process; None: its rank in :mod:`torch.distributed`, or 0.
        ranks: number of ranks; None: their number in :mod:`torch.distributed`, or 1.
        stream: a :class:`RolloutStream`, which is committed; or another object with a state.
        states: objects with ``state_dict`` and ``load_state_dict``, by name: policy, optimizer, pipeline, …

    Raises:
        TypeError: a part has no state.
        ValueError: an option has an invalid value, or there is nothing to save.

    Example:
        >>> import tempfile
        >>> policy = torch.nn.Linear(1, 1)
        >>> checkpoint = Checkpoint(tempfile.mkdtemp(), policy=policy)
        >>> checkpoint.load() is None
        True
        >>> checkpoint.save(7)
        >>> checkpoint.load()
        7
    """

    @takes_options
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        rank: int | None = None,
        ranks: int | None = None,
        stream: Any = None,
        **states: Any,
    ):
        self.folder, self.keep = Path(folder), at_least("keep", keep, 1)
        shared = _is_shared()
        self.rank = rank if rank is not None else dist.get_rank() if shared else 0
        self.ranks = ranks if ranks is not None else dist.get_world_size() if shared else 1
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be from 0 to ranks - 1; got rank={self.rank}, ranks={self.ranks}")
        if self.ranks > 1 and keep < 2:
            raise ValueError("several ranks need keep ≥ 2, because a rank may be killed before it has saved")
        self.stream, self.states = stream, states | ({"stream": stream} if stream is not None else {})
        if not self.states:
            raise ValueError(
                "a checkpoint needs something to save, by name: "
                "Checkpoint(folder, policy=policy, optimizer=optimizer, pipeline=pipeline); got nothing"
            )
        for name, part in self.states.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"{name} must have state_dict() and load_state_dict(); {type(part).__name__} has not"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begun = False  # whether the files in the folder are known to be of this run

    def save(self, step: int) -> None:
        """Save all parts at a step, and commit the stream.

        Args:
            step: number of optimiser steps so far, ≥ 0.

        Raises:
            FileExistsError: the folder has steps of another run, and :meth:`load` was not called.
            OSError: the file could not be written. Earlier files are unchanged.
        """
        if not self._begun and (own := sorted(self._own_steps())):
            raise FileExistsError(
                f"{self.folder} has the steps of another run: {listing(map(str, own))}. Call load() first to "
                "go on from them, or take another folder"
            )
        self._begun = True
        state = {name: part.state_dict() for name, part in self.states.items()}
        write_whole(self._path(at_least("step", step, 0)), partial(torch.save, state), durable=True)
        if self.ranks > 1 and _is_shared():
            dist.barrier()  # a stream is committed once all ranks have this step
        if hasattr(self.stream, "commit"):
            self.stream.commit(step)
        for old in sorted(self._own_steps())[: -self.keep]:
            self._path(old).unlink()

    def load(self, step: int | None = None) -> int | None:
        """Restore all parts, before anything is dispatched. Newer files of this rank are deleted.

        Args:
            step: the step to go on from; None: the newest step that every rank has saved.

        Returns:
            The step; None if there is none.

        Raises:
            FileNotFoundError: `step` was not saved by all ranks; or, for None, there are files but no step of
                all ranks.
            ValueError: the file has other parts; or the stream refuses its state, for example because its
                journal was committed for newer weights.
        """
        self._begun = True
        known = self._complete_steps()
        if step is None:
            step = max(known, default=None)
        elif step not in known:
            found = ", ".join(map(str, sorted(known))) or "none"
            raise FileNotFoundError(
                f"{self.folder} must have step {step} of all {self.ranks} ranks; it has {found}"
            )
        if step is None:
            if own := sorted(self._own_steps()):
                raise FileNotFoundError(
                    f"{self.folder} must have a step of all {self.ranks} ranks; this rank has {own}"
                )
            return None
        state = torch.load(self._path(step), map_location="cpu", weights_only=True)
        if odd := state.keys() ^ self.states.keys():
            raise ValueError(
                f"{self._path(step)} must have the parts of this Checkpoint: the file has "
                f"{', '.join(state) or 'none'}, and the Checkpoint {', '.join(self.states) or 'none'}; only "
                f"one of both has {', '.join(sorted(odd))}. Construct the Checkpoint with the parts of the "
                "file; to take some of them, read it with torch.load, which returns a dict of states by part"
            )
        for name, part in self.states.items():
            part.load_state_dict(state[name])
        for newer in self._own_steps():
            if newer > step:  # newer steps are trained again
                self._path(newer).unlink()
        return step

    def _path(self, step: int) -> Path:
        return self.folder / NAME.format(step=step, rank=self.rank, ranks=self.ranks)

    def _files(self) -> Iterable[tuple[int, int]]:
        """The step and the rank of each file that was written for this number of ranks."""
        for path in self.folder.iterdir():
            if (named := FORM.fullmatch(path.name)) and int(named[3]) == self.ranks:
                yield int(named[1]), int(named[2])

    def _own_steps(self) -> set[int]:
        return {step for step, rank in self._files() if rank == self.rank}

    def _complete_steps(self) -> set[int]:
        """The steps that every rank has saved: exchanged between ranks if possible, else read from files."""
        if self.ranks > 1 and _is_shared():
            every: list[Any] = [None] * self.ranks
            dist.all_gather_object(every, self._own_steps())
            return set.intersection(*every)
        found = set(self._files())
        return {step for step, _ in found if all((step, rank) in found for rank in range(self.ranks))}


def _is_shared() -> bool:
    """Whether this process is one of several ranks that can exchange data."""
    return dist.is_available() and dist.is_initialized()
