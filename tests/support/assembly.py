"""A slow assembler that takes one row at a time, and streams with faults, to test the fast assembler."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase


class Line(NamedTuple):
    """A row as its worker sends it."""

    group: int
    rollout: int
    segment: int
    done: bool
    status: int = 0
    partition: int = 0
    version: int = 0
    expected: int = 2


def batch_of_lines(lines: Sequence[Line], start: int = 0) -> TensorDict:
    """A batch of these rows, numbered from `start`."""
    columns = list(zip(*lines, strict=True)) if lines else [()] * len(Line._fields)
    group, rollout, segment, done, status, partition, version, expected = (
        torch.tensor(column, dtype=torch.int64) for column in columns
    )
    number = torch.arange(start, start + len(lines))
    # tensordict 0.10 has no empty column of texts.
    texts = {"text": [f"row {int(n)}" for n in number]} if lines else {}
    return TensorDict(
        {
            **texts,
            "group_id": group,
            "rollout_id": rollout,
            "segment": segment,
            "partition": partition,
            "expected_rollouts": expected,
            "number": number,
            ("next", "done"): done.bool().unsqueeze(-1),
            ("next", "status"): status,
            ("next", "policy_version"): version,
            ("next", "reward"): (number * 7 % 5).float().unsqueeze(-1),
            ("tokens", "full"): number.unsqueeze(-1).expand(-1, 3).clone(),
            ("masks", "all_assistant_mask"): torch.ones(len(lines), 3, dtype=torch.bool),
        },
        batch_size=[len(lines)],
    )


def faulty_stream(rng: random.Random, partitions: int, anywhere: bool = False) -> list[list[Line]]:
    """Pieces of rows with faults: lost and repeated rows, and broken-off, failed and surplus rollouts.

    The rows of a rollout come in order, unless `anywhere` is True.
    """
    rollouts = []
    for group in range(rng.randint(1, 8)):
        partition, expected = rng.randrange(partitions), rng.randint(2, 4)
        for number in range(10 * group, 10 * group + expected):
            length, version = rng.randint(1, 3), rng.randint(0, 3)
            lines = [
                Line(group, number, each, each == length - 1, 0, partition, version, expected)
                for each in range(length)
            ]
            fault = rng.choice(["", "", "", "lost", "torn", "failed", "twice", "more"])
            if fault in ("lost", "torn"):
                lines = lines[:-1] if fault == "torn" else []
            elif fault == "failed":
                lines[-1] = lines[-1]._replace(status=rng.choice([2, 3]), done=rng.random() < 0.5)
            elif fault == "twice":
                lines += lines[rng.randrange(length) :]
            elif fault == "more":
                rollouts.append([line._replace(rollout=number + 5) for line in lines])
            rollouts.append(lines)
    rows, near = [], rng.choice([1, 5, 99])
    while rollouts := [rest for rest in rollouts if rest]:
        rows.append(rng.choice(rollouts[:near]).pop(0))
    if anywhere:
        rng.shuffle(rows)
    pieces = []
    while rows:
        size = rng.randint(0, 5)
        pieces, rows = [*pieces, rows[:size]], rows[size:]
    return pieces


class SlowAssembler:
    """GroupAssembler as its docstring describes it, with dicts and loops."""

    def __init__(
        self,
        *,
        group_size: int | None = None,
        by_segment: bool = False,
        on_failure: str = "drop",
        on_timeout: str = "drop",
        timeout: int | None = None,
        min_rollouts: int | None = None,
        max_pending_groups: int | None = None,
        max_staleness: int | None = None,
        on_newer: str = "raise",
    ):
        self.size, self.by_segment = group_size, by_segment
        self.on_failure, self.on_timeout = on_failure, on_timeout
        self.timeout, self.least, self.most = timeout, min_rollouts, max_pending_groups
        self.max_staleness, self.version, self.waits = max_staleness, 0, on_newer == "wait"
        self.rows: dict[tuple, list[tuple[Line, int]]] = {}  # the rows of each group with their numbers
        self.born: dict[tuple, int] = {}
        self.whole: list[tuple] = []
        self.closed: set = set()
        self.enough: set = set()  # groups that became complete when no other rollout was awaited
        self.seen: dict[tuple, list[tuple[Line, int]]] = {}  # the counted rows of each rollout
        self.counts: dict[str, int] = {}
        self.puts = self.number = 0

    def count(self, reason: str, rows: int = 1) -> None:
        if rows:
            self.counts[reason] = self.counts.get(reason, 0) + rows

    def rollouts(self, group: tuple) -> dict[int, list[tuple[Line, int]]]:
        found: dict[int, list] = {}
        for line, number in self.rows.get(group, []):
            found.setdefault(line.rollout, []).append((line, number))
        return found

    def ended(self, rows: Iterable[tuple[Line, int]]) -> bool:
        return self.complete(rows) and not self.failed(rows)

    def complete(self, rows: Iterable[tuple[Line, int]]) -> bool:
        lines = [line for line, _ in rows]
        last = [line.segment for line in lines if line.done]
        if not last:
            return False
        return not self.by_segment or {line.segment for line in lines} == set(range(last[0] + 1))

    @staticmethod
    def failed(rows: Iterable[tuple[Line, int]]) -> bool:
        return any(line.status >= 2 for line, _ in rows)

    def repeats(self, line: Line, rows: Iterable[tuple[Line, int]]) -> bool:
        had_end = any(other.done for other, _ in rows)
        if not self.by_segment:
            return had_end
        return any(other.segment == line.segment for other, _ in rows) or (line.done and had_end)

    def put(self, lines: Sequence[Line]) -> None:
        self.puts += 1
        ready = set(self.whole)
        for line in lines:
            number, self.number = self.number, self.number + 1
            group, rollout = (line.partition, line.group), (line.partition, line.rollout)
            before = self.seen.get(rollout, [])
            if self.repeats(line, before):
                self.count("duplicate")
                continue
            if group not in self.closed and group not in ready:
                self.rows.setdefault(group, []).append((line, number))
                self.born.setdefault(group, self.puts)
            elif not (self.failed(before) or group in self.enough):
                self.count("late")
                continue
            elif not self.failed([*before, (line, number)]):
                self.count("surplus")
            else:
                self.count("failed")
                if not self.failed(before):  # the earlier rows were counted as surplus
                    self.count("surplus", -len(before))
                    self.count("failed", len(before))
            self.seen.setdefault(rollout, []).append((line, number))
        self.settle()

    def settle(self) -> None:
        became = []
        for group in [g for g in self.rows if g not in self.whole]:
            rollouts = self.rollouts(group)
            expected = self.rows[group][0][0].expected
            ended = sorted((r for r in rollouts if self.ended(rollouts[r])), key=lambda r: rollouts[r][-1][1])
            lost = [r for r in rollouts if self.failed(rollouts[r])]
            size = self.size or expected
            reason, action = None, None
            if len(ended) >= size:
                reason = "surplus"
            elif len(ended) + len(lost) >= expected:
                reason, action = "failed", self.on_failure
            elif self.timeout is not None and self.puts - self.born[group] >= self.timeout:
                reason, action = "timeout", self.on_timeout
            if reason is None:
                continue
            if action is None or (action == "keep" and len(ended) >= self.least):
                stays = set(ended[:size])
                if reason != "timeout":
                    self.enough.add(group)
                for rollout, rows in rollouts.items():
                    if rollout not in stays:
                        left = "timeout" if reason == "timeout" else "surplus"
                        self.count("failed" if rollout in lost else left, len(rows))
                        self.forget(group, rollout)
                self.rows[group] = [row for row in self.rows[group] if row[0].rollout in stays]
                became.append((self.rows[group][-1][1], group))
            else:
                self.close(group, reason)
                if reason == "failed":
                    self.enough.add(group)
        self.whole += [group for _, group in sorted(became)]
        waiting = [g for g in self.rows if g not in self.whole]
        for group in waiting[: max(0, len(waiting) - (self.most or len(waiting)))]:
            self.close(group, "evicted")

    def close(self, group: tuple, reason: str | None = None) -> list[tuple[Line, int]]:
        for rollout in self.rollouts(group):
            self.forget(group, rollout)
        rows = self.rows.pop(group)
        self.closed.add(group)
        if group in self.whole:
            self.whole.remove(group)
        if reason:
            self.count(reason, len(rows))
        return rows

    def forget(self, group: tuple, rollout: int) -> None:
        """Treat further rows of a rollout as late, unless it is complete, has failed or is surplus."""
        rows = self.seen[group[0], rollout]
        if not (self.complete(rows) or self.failed(rows) or group in self.enough):
            del self.seen[group[0], rollout]

    def take(self, wanted: int | None) -> list[int] | None:
        """Take groups. Return the numbers of their rows."""
        if self.max_staleness is not None:
            for group in list(self.whole):
                if min(line.version for line, _ in self.rows[group]) < self.version - self.max_staleness:
                    self.close(group, "stale")
        best = None
        for partition in {p for p, _ in self.whole}:
            groups = [group for group in self.whole if group[0] == partition]
            if self.waits:
                newest = {group: max(line.version for line, _ in self.rows[group]) for group in groups}
                groups = [group for group in groups if newest[group] <= self.version]
            if len(groups) >= (wanted or 1):
                groups = groups[: wanted or len(groups)]
                last = self.whole.index(groups[-1])
                best = min(best or (last, groups), (last, groups))
        if best is None:
            return None
        out = []
        for group in best[1]:
            rows = self.close(group)
            rows.sort(key=lambda row: (row[0].rollout, row[0].segment if self.by_segment else 0, row[1]))
            out += [number for _, number in rows]
        return out

    @property
    def held(self) -> int:
        return sum(map(len, self.rows.values()))


def same_rows(found: TensorDictBase, expected: TensorDictBase) -> None:
    """Whether rows have equal columns, with dtypes, shapes and values; NaN is equal to NaN."""
    assert len(found) == len(expected)
    for row, other in zip(found.unbind(0), expected.unbind(0), strict=True):
        keys = set(other.keys(True, True))
        assert set(row.keys(True, True)) == keys
        for key in keys:
            value, wanted = row.get(key), other.get(key)
            if isinstance(wanted, torch.Tensor):
                assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), key
                assert torch.equal(value.nan_to_num(-99), wanted.nan_to_num(-99)), key
            else:
                assert value == wanted, key
