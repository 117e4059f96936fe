"""A process that is killed repeatedly, at any point of its stream, resumes from its journal."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from assembly import Line, batch_of_lines
from processes import process_context

from headrace.transforms import GroupAssembler

pytestmark = pytest.mark.slow

SIZE, SPREAD = 3, 4  # rollouts of a group, and the number of pieces that its rows are in
FOREVER = 10**9


def lines_of_group(group: int) -> list[tuple[int, Line]]:
    """The rows of a group, each with its piece. In every seventh group a rollout fails."""
    rng, lines = random.Random(group), []
    for rollout in range(SIZE * group, SIZE * group + SIZE):
        length, piece = rng.randint(1, 3), group
        for segment in range(length):
            piece = rng.randint(piece, group + SPREAD - 1)
            status = 3 if group % 7 == 0 and rollout % SIZE == 0 and segment == 0 else 0
            line = Line(group, rollout, segment, segment == length - 1, status, expected=SIZE)
            lines.append((piece, line))
    return lines


def lines_of_piece(piece: int) -> list[Line]:
    groups = range(max(0, piece - SPREAD + 1), piece + 1)
    return [line for group in groups for place, line in lines_of_group(group) if place == piece]


def note(path: Path, *words: object) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


def train(folder: Path, until: int, seed: int) -> None:
    """Put the pieces that the journal may lack, and take complete groups."""
    log, rng = folder / "log", random.Random(seed)
    assembler = GroupAssembler(
        journal=folder / "rows", segment_key="segment", on_duplicate="drop", max_idle=FOREVER
    )
    sent = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("put")]
    note(log, "begin")
    for piece in range(max(sent, default=-1) + 1, until):
        assembler.put(batch_of_lines(lines_of_piece(piece), 0))
        note(log, "put", piece)
        if rng.random() < 0.5 and (batch := assembler.take(1)) is not None:
            note(log, "out", *batch["group_id"].unique().tolist())
            if rng.random() < 0.3:
                note(log, "commits")
                assembler.commit()
                note(log, "committed")
    while (batch := assembler.take()) is not None:
        note(log, "out", *batch["group_id"].unique().tolist())
    assembler.commit()
    note(log, "committed")
    note(log, "end", assembler.held, *assembler.counts.values())


def die_again_and_again(folder: Path, kills: int) -> None:
    context, rng, log = process_context(), random.Random(kills), folder / "log"
    log.touch()
    for kill in range(kills):
        before = log.stat().st_size
        process = context.Process(target=train, args=(folder, FOREVER, kill))
        process.start()
        while "begin" not in log.read_text()[before:]:
            time.sleep(0.005)
            assert process.is_alive()
        time.sleep(rng.random() * 0.4)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    sent = max(int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("put"))
    process = context.Process(target=train, args=(folder, sent + 20, kills))
    process.start()
    process.join()
    assert process.exitcode == 0


def check(log: list[list[str]]) -> None:
    """Check that committed groups come out once, and that only groups after the last commit come again."""
    committed: set[int] = set()
    out: set[int] = set()  # groups that came out since the last commit
    doubtful: set[int] = set()  # groups that were being committed at a kill
    again: set[int] = set()  # groups that must come out again
    commits = False
    for word, *said in log:
        groups = set(map(int, said)) if word == "out" else set()
        if word == "begin":
            doubtful |= out if commits else set()
            again |= set() if commits else out
            out, commits = set(), False
        assert not groups & (committed | out)
        out |= groups
        again -= groups
        commits = word == "commits" or (commits and word != "committed")
        if word == "committed":
            committed, out = committed | out, set()
    assert not again
    pieces = max(int(said[0]) for word, *said in log if word == "put") + 1
    whole = {group for group in range(pieces) if group % 7 and is_whole(group, pieces)}
    assert committed | doubtful == whole
    held, *counts = map(int, log[-1][1:])
    names = list(GroupAssembler().counts)
    left = Counter(dict(zip(names, counts, strict=True)))
    rows = sum(len(lines_of_piece(piece)) for piece in range(pieces))
    trained = sum(len(lines_of_group(group)) for group in whole)
    duplicates = left.pop("duplicate")
    assert rows == trained + held + sum(left.values())
    begun = sum(word == "begin" for word, *_ in log)
    assert duplicates <= begun * max(len(lines_of_piece(piece)) for piece in range(pieces))


def is_whole(group: int, pieces: int) -> bool:
    return all(piece < pieces for piece, _ in lines_of_group(group))


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
def test_a_process_killed_at_any_point_loses_nothing(kills, tmp_path):
    die_again_and_again(tmp_path, kills)
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert sum(word == "begin" for word, *_ in log) == kills + 1
    check(log)
