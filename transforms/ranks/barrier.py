"""A barrier for ranks. It compares what they are about to do, shares their errors, and has a time limit."""

from __future__ import annotations

import logging
import time

import torch.distributed as dist

from headrace.transforms.table import OtherRankError, listing

GO = "go"
LONGEST = 8000  # largest number of characters of a decision
LONG = 30.0  # seconds after which a waiting rank logs which ranks are missing
LAST = 2.0  # seconds that rank 0 stays at most, so that the other ranks can read the reason of a refusal

log = logging.getLogger(__name__)


class Barrier:
    """All ranks of a process group wait here before each exchange.

    Each rank passes a description of what it is about to do, or an error. If all descriptions are equal, all
    ranks continue. All ranks raise if one passes an error, if two descriptions differ, or if a rank does not
    arrive within `patience`. A rank that arrives late finds this decision in the store, and raises as well.

    A barrier costs a few messages to the store of the process group, for any number of ranks. When the next
    barrier lets all ranks continue, it deletes the keys of this barrier. A refused barrier leaves some keys.

    Args:
        group: the process group; this process is one of its ranks.
        patience: seconds to wait for the other ranks.
    """

    def __init__(self, group: dist.ProcessGroup, patience: float):
        self.size, self.rank, self.patience = dist.get_world_size(group), dist.get_rank(group), patience
        self._store = group.get_group_store()

    def meet(self, about: str, error: BaseException | None = None) -> None:
        """Wait for all ranks.

        Args:
            about: what this rank is about to do; must be equal on all ranks. Messages show its first line.
            error: the error of this rank; all ranks raise it.

        Raises:
            OtherRankError: a rank has an error, is about to do something else, or did not arrive in time.
        """
        store = self._store
        number = store.add(f"headrace/{self.rank}", 1)
        key = f"headrace/{number}"
        # 1. This rank writes its error, or that it has arrived. The last rank decides that all continue.
        decision = ""
        if error is not None:
            decision = self._decide(key, f"rank {self.rank}: {error}")
        else:
            first = store.compare_set(f"{key}/about", "", f"rank {self.rank}\n{about}").decode()
            first_rank, _, first_about = first.partition("\n")
            if first_about != about:
                me = f"rank {self.rank}"
                decision = self._decide(key, describe_difference(first_rank, first_about, me, about))
            elif store.add(f"{key}/here", 1) == self.size:
                decision = self._decide(key, GO)
        # 2. The other ranks wait for the decision.
        decision = decision or self._wait(key, number, about.split("\n")[0])
        if decision == GO:
            if self.rank == 0:  # all have arrived, so all have left the previous barrier
                for key in ("about", "here", "decision"):
                    store.delete_key(f"headrace/{number - 1}/{key}")
            return
        # 3. The process of rank 0 may hold the store, so rank 0 is the last to leave.
        store.add(f"{key}/left", 1)
        start = time.monotonic()
        while self.rank == 0 and time.monotonic() - start < LAST:
            if store.add(f"{key}/left", 0) >= self.size - len(self._absent(number)):
                break
            time.sleep(0.01)
        raise OtherRankError("{decision}", decision=decision) from error

    def _decide(self, key: str, decision: str) -> str:
        """Write a decision if there is none yet, and return the one that is stored."""
        return self._store.compare_set(f"{key}/decision", "", decision[:LONGEST]).decode()

    def _wait(self, key: str, number: int, about: str) -> str:
        """Wait for a decision, for at most `patience` seconds."""
        start, logged = time.monotonic(), False
        while not self._store.check([f"{key}/decision"]):
            waited = time.monotonic() - start
            if waited > LONG and not logged:
                logged, absent = True, listing(self._absent(number))
                words = "rank %d has waited %.0f s for %s to come to %s; patience is %g s"
                log.warning(words, self.rank, waited, absent, about, self.patience)
            if waited > self.patience:
                return self._decide(
                    key,
                    f"{listing(self._absent(number))} did not come to {about} within {self.patience:g} s "
                    "(pipeline.patience). Check for a rank that hangs or has fewer batches. All ranks "
                    "discard this batch",
                )
            # Sleep a tenth of the time waited so far, to poll the store less and less often.
            time.sleep(min(max(waited / 10, 1e-4), 0.1))
        return self._store.get(f"{key}/decision").decode()

    def _absent(self, number: int) -> list[str]:
        """The ranks that have not reached a barrier."""
        reached = [self._store.add(f"headrace/{rank}", 0) for rank in range(self.size)]
        return [f"rank {rank}" for rank, last in enumerate(reached) if last < number]


def describe_difference(who: str, theirs: str, me: str, mine: str) -> str:
    """Describe how the descriptions of two ranks differ.

    Example:
        >>> describe_difference("rank 0", "a batch\\nepochs=1", "rank 1", "a batch\\nepochs=2")
        'ranks must do the same with a batch: rank 0 has epochs=1, rank 1 has epochs=2'
    """
    lines = [text.split("\n") for text in (theirs, mine)]
    if lines[0][0] != lines[1][0]:
        return f"ranks must be at the same place: {who} is at {lines[0][0]}, {me} at {lines[1][0]}"
    pairs = [pair for pair in zip(*lines, strict=False) if pair[0] != pair[1]]
    one, other = pairs[0] if pairs else [f"{len(each)} lines" for each in lines]
    return f"ranks must do the same with {lines[0][0]}: {who} has {one.strip()}, {me} has {other.strip()}"
