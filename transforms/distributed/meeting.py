"""Ranks meet: each says where it is or what it has to refuse, and nobody waits for ever."""

from __future__ import annotations

import logging
import time

import torch.distributed as dist

from headrace.transforms.errors import BatchError, listing

GO = "go"
LONGEST = 8000  # characters of what is told
LONG = 30.0  # seconds after which it is said for whom a rank waits
LAST = 2.0  # seconds that rank 0 stays for others to read why a batch was refused

log = logging.getLogger(__name__)


class OtherRankError(BatchError):
    """What one rank refused, raised on all of them."""


class Meetings:
    """The meetings of the ranks of a process group, numbered by the group's store.

    All ranks come to a meeting before each exchange. Whoever comes about something else, or with something
    to refuse, ends it for all; and so does who has waited for longer than `patience`. Who comes late finds
    the decision and raises as well, so that all stay in step. A meeting is a handful of messages to the store
    whatever the number of ranks; what it leaves there is deleted at the next, but for one number of each that
    was refused.

    Args:
        group: of which this process is a rank.
        patience: seconds to wait for the others.
    """

    def __init__(self, group: dist.ProcessGroup, patience: float):
        self.size, self.rank, self.patience = dist.get_world_size(group), dist.get_rank(group), patience
        self._store = group.get_group_store()

    def meet(self, about: str, error: BaseException | None = None) -> None:
        """Wait until all ranks are here about the same thing, or one of them ends the meeting.

        Args:
            about: equal on all ranks. Its first line says what they come to.
            error: what this rank has to refuse.

        Raises:
            OtherRankError: a rank refuses, is about something else, or did not come.
        """
        store = self._store
        number = store.add(f"headrace/{self.rank}", 1)
        meeting = f"headrace/{number}"
        # 1. This rank says what it refuses, or that it is here; the last of all that they go on.
        decision = ""
        if error is not None:
            decision = self._decide(meeting, f"rank {self.rank}: {error}")
        else:
            first = store.compare_set(f"{meeting}/about", "", f"rank {self.rank}\n{about}").decode()
            who, _, theirs = first.partition("\n")
            if theirs != about:
                decision = self._decide(meeting, describe_difference(who, theirs, f"rank {self.rank}", about))
            elif store.add(f"{meeting}/here", 1) == self.size:
                decision = self._decide(meeting, GO)
        # 2. The others wait for the decision.
        decision = decision or self._wait(meeting, number, about.split("\n")[0])
        if decision == GO:
            if self.rank == 0:  # all are here, so all have left the meeting before
                for key in ("about", "here", "decision"):
                    store.delete_key(f"headrace/{number - 1}/{key}")
            return
        # 3. Rank 0, whose process may hold the store and end now, goes last of those that came.
        store.add(f"{meeting}/left", 1)
        start = time.monotonic()
        while self.rank == 0 and time.monotonic() - start < LAST:
            if store.add(f"{meeting}/left", 0) >= self.size - len(self._absent(number)):
                break
            time.sleep(0.01)
        raise OtherRankError(decision) from error

    def _decide(self, meeting: str, decision: str) -> str:
        """What was decided: the first decision stands."""
        return self._store.compare_set(f"{meeting}/decision", "", decision[:LONGEST]).decode()

    def _wait(self, meeting: str, number: int, about: str) -> str:
        """What was decided, by then."""
        start, said = time.monotonic(), False
        while not self._store.check([f"{meeting}/decision"]):
            waited = time.monotonic() - start
            if waited > LONG and not said:
                said, absent = True, listing(self._absent(number))
                words = "rank %d has waited %.0f s for %s to come to %s; patience is %g s"
                log.warning(words, self.rank, waited, absent, about, self.patience)
            if waited > self.patience:
                return self._decide(
                    meeting,
                    f"{listing(self._absent(number))} did not come to {about} within {self.patience:g} s "
                    "(patience): is it hung, or has it fewer batches? All ranks give this batch up",
                )
            # A tenth of what was waited already, so that the store is asked often only at first.
            time.sleep(min(max(waited / 10, 1e-4), 0.1))
        return self._store.get(f"{meeting}/decision").decode()

    def _absent(self, number: int) -> list[str]:
        """The ranks that have not come to a meeting."""
        came = [self._store.add(f"headrace/{rank}", 0) for rank in range(self.size)]
        return [f"rank {rank}" for rank, last in enumerate(came) if last < number]


def describe_difference(who: str, theirs: str, me: str, mine: str) -> str:
    """What two ranks are about, in words.

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
