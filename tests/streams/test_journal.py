"""Rows in an assembler survive its process: another process resumes from the journal."""

from __future__ import annotations

import copy
import random
import resource
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from assembly import Line, batch_of_lines, faulty_stream, same_rows
from fleets import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack

from headrace.transforms import BatchError, GroupAssembler

pytestmark = pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")

OPTIONS = {
    "plain": {},
    "partitions": {"partition_key": "partition", "groups": 2},
    "keep": {"on_failure": "keep", "min_rollouts": 1, "timeout": 4, "on_timeout": "keep"},
    "refill": {"on_failure": "refill", "refill": lambda group, missing: None, "timeout": 5},
    "few": {"max_pending_groups": 3, "group_size": 2},
    "stale": {"max_staleness": 1, "on_newer": "wait"},
    "masked": {"max_staleness": 1, "on_stale": "mask", "on_newer": "wait"},
    "again": {"max_staleness": 0, "on_stale": "refill", "refill": print, "on_newer": "wait"},
    "chosen": {"group_size": 2, "on_surplus": lambda rewards, k: rewards.argsort()[:k]},
    "seconds": {"timeout_seconds": 3.0, "on_timeout": "keep", "min_rollouts": 1},
}


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch):
        self.seconds = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.seconds)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def make(name: str, **more) -> GroupAssembler:
    return GroupAssembler(on_duplicate="drop", max_idle=10**6, **OPTIONS[name], **more)


def numbers(batch: TensorDictBase | None) -> list[int]:
    return [] if batch is None else batch["number"].tolist()


def known(assembler: GroupAssembler) -> dict:
    """The whole state of an assembler as plain values, with rows in the order of their arrival."""
    state = assembler.state_dict()
    plain = {name: value for name, value in state["state"].items() if name != "groups"}
    plain |= {name: {p: ids.tolist() for p, ids in plain[name].items() if len(ids)} for name in CLOSED}
    groups = {name: column.tolist() for name, column in state["state"]["groups"].items()}
    ages = [round(age, 6) for age in groups.pop("born_time")]
    plain["groups"] = sorted(zip(ages, *groups.values(), strict=True), key=str)
    rows: list[tuple[int, int]] = []
    if (held := state["rows"]) is not None:
        arrivals, numbers = held["arrival"].tolist(), held["rows"]["columns"]["number"].tolist()
        rows = sorted(zip(arrivals, numbers, strict=True))
    return plain | {"rows": rows, "gone": sorted(plain["gone"])}


CLOSED = ("closed_groups", "late_groups", "closed_rollouts")


def opened(path: Path, name: str) -> GroupAssembler:
    """An assembler that continues from a copy of a journal."""
    copied = Path(f"{path}-")
    shutil.copy(path, copied)
    return make(name, journal=copied)


def act(assembler: GroupAssembler, event: tuple) -> list[int]:
    """Apply an event to an assembler. Return the numbers of the rows that come out."""
    kind, *said = event
    if kind == "put":
        assembler.put(batch_of_lines(*said[:2]))
    elif kind == "announce":
        groups, expected = torch.tensor([said[0]]), torch.tensor([said[1]])
        draws = TensorDict({"group_id": groups, "expected_rollouts": expected}, batch_size=[1])
        if assembler.partition_key is not None:
            draws["partition"] = torch.zeros(1, dtype=torch.int64)
        assembler.announce(draws)
    elif kind == "take":
        return numbers(assembler.take(*said))
    elif kind == "version":
        assembler.version += 1
    elif kind == "commit" and assembler.journal is not None:
        assembler.commit()
    elif kind == "discard_batch":
        assembler.discard_batch()
    return []


def events_of(rng: random.Random, name: str) -> list[tuple]:
    """Random events: puts of pieces, some after a second, and other calls in between."""
    events, row = [("announce", 50, 2)], 0
    for piece in faulty_stream(rng, 2 if name == "partitions" else 1):
        piece = [line._replace(expected=max(line.expected, 2)) for line in piece]
        events.append(("put", piece, row, rng.random() < 0.3))
        row += len(piece)
        others = [("take",), ("take", 1), ("commit",), ("version",)]
        events += rng.choices(others, (4, 2, 2, 1), k=rng.randint(0, 3))
    return events + ([("discard_batch",)] if rng.random() < 0.3 else [])


def numbered(event: tuple) -> list[tuple]:
    """The lines of a put, each as (number of the piece's first row, index in the piece, line)."""
    return [(event[2], at, line) for at, line in enumerate(event[1])]


def all_that_is_left(assembler: GroupAssembler) -> list[int]:
    """The row numbers of all complete groups. The groups are taken while the policy version rises."""
    found = []
    for version in range(assembler.version, assembler.version + 4):
        assembler.version = version
        while batch := numbers(assembler.take_rest()):
            found += batch
    return found


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=3)
@given(seed=st.integers(0, 10**9))
def test_after_a_crash_rows_that_were_not_committed_come_again(name, seed, tmp_path_factory):
    """The reference is the assembler before the crash, plus the rows that it took without a commit."""
    rng, path = random.Random(seed), tmp_path_factory.mktemp("journal") / "rows"
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        events = events_of(rng, name)
        crash = rng.randint(1, len(events))
        first = make(name, journal=path)
        outs, committed = [], 0
        for place, event in enumerate(events[:crash]):
            clock.seconds += event[0] == "put" and event[3]
            outs.append(act(first, event))
            if event[0] == "commit":
                committed = place
        again = opened(path, name)
        clock.seconds += 50  # no time passes for a journal while no assembler has its file
        again = opened(Path(again.journal), name)
        clock.seconds, again_at = clock.seconds - 50, clock.seconds
        taken = sorted(number for out in outs[committed:] for number in out)
        assert again.counts == first.counts
        assert again.held == first.held + len(taken)
        assert again.ready >= first.ready
        versions = [event[0] for event in events[:committed]].count("version")
        assert again.version == versions
        if name in ("stale", "again", "masked"):  # at the committed version no row is too old
            state, first, again.version = first.state_dict() | {"version": versions}, make(name), versions
            first.load_state_dict(state)
        rest = all_that_is_left(first)
        clock.seconds = again_at
        came = all_that_is_left(again)
        before = {number for out in outs[:committed] for number in out}
        assert not before & set(came)
        undone = set(taken + rest) - set(came)
        assert sorted(came) == sorted({*taken, *rest} - undone)
        lines = {row + at: line for event in events if event[0] == "put" for row, at, line in numbered(event)}
        newer = {line.group for line in lines.values() if line.version > versions}
        assert {lines[number].group for number in undone} <= newer
        if first.max_staleness is None:
            assert not undone
        else:
            assert all(lines[number].version <= versions for number in came)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIONS if "stale" not in str(OPTIONS[name])])
@settings(max_examples=2)
@given(seed=st.integers(0, 10**9))
def test_state_after_crashes_equals_that_without_crashes(name, seed, tmp_path_factory):
    rng, path = random.Random(seed), tmp_path_factory.mktemp("journal") / "rows"
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        assembler, other = make(name, journal=path), make(name)
        for event in events_of(rng, name):
            clock.seconds += event[0] == "put" and event[3]
            if event[0] in ("put", "announce", "version", "discard_batch"):
                act(assembler, event)
                act(other, event)
            elif event[0] == "take" and rng.random() < 0.5:  # the step is trained, saved and committed
                out = act(assembler, event)
                assert out == act(other, event)
                act(assembler, ("commit",))
            elif event[0] == "take":  # the process dies before the commit
                act(assembler, event)
                other.take(10**6)  # like `take`, this call reads the clock
                assembler = opened(path, name)
                path = Path(assembler.journal)
            version, assembler.version = assembler.version, other.version
            if event[0] != "version":
                assert known(assembler) == known(other)
            assert version <= other.version


def bytes_of_events(path: Path) -> tuple[list[int], list[dict]]:
    """The length of a journal before each event, and the state of the assembler then."""
    assembler, sizes, states = make("plain", journal=path), [], []
    for place, piece in enumerate(faulty_stream(random.Random(3), 1)[:8]):
        sizes.append(path.stat().st_size)
        states.append(known(assembler))
        assembler.put(batch_of_lines([each._replace(expected=3) for each in piece], 10 * place))
    sizes.append(path.stat().st_size)
    states.append(known(assembler))
    return sizes, states


@pytest.mark.slow
def test_a_journal_cut_at_any_byte_keeps_its_complete_events(tmp_path, clock):
    path = tmp_path / "rows"
    sizes, states = bytes_of_events(path)
    content, cut = path.read_bytes(), tmp_path / "cut"
    for length in [*range(sizes[0], sizes[-1], 1021), *range(sizes[-2], sizes[-1] + 1, 113), *sizes]:
        cut.write_bytes(content[:length])
        whole = max(place for place, size in enumerate(sizes) if size <= length)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assembler = make("plain", journal=cut)
        assert known(assembler) == states[whole]
        words = [str(each.message) for each in said]
        lost = length - sizes[whole]
        assert [f"ends with {lost} bytes of an incomplete event" in each for each in words] == [True][:lost]
        assert known(opened(cut, "plain")) == states[whole]  # the file after the cut has the same state again
    for length in (0, 5, sizes[0] - 1):
        cut.write_bytes(content[:length])
        if length == 5:
            with pytest.raises(ValueError, match="is no journal of this version of headrace"):
                make("plain", journal=cut)
        else:
            assert known(make("plain", journal=cut)) == states[0]


@pytest.mark.slow
def test_a_changed_byte_raises_unless_it_is_in_the_last_event(tmp_path, clock):
    path = tmp_path / "rows"
    sizes, states = bytes_of_events(path)
    content, wrong = path.read_bytes(), tmp_path / "wrong"
    rng, refused = random.Random(0), 0
    for _ in range(60):
        at, bit = rng.randrange(sizes[0], len(content)), 1 << rng.randrange(8)
        flipped = bytearray(content)
        flipped[at] ^= bit
        wrong.write_bytes(flipped)
        event = max(place for place, size in enumerate(sizes) if size <= at)
        try:
            found, said = known(make("plain", journal=wrong)), ""
        except ValueError as err:
            found, said = None, str(err)
        if found is None:  # the changed byte is before the last event
            assert f"is damaged at byte {sizes[event]} (" in said
            assert f"next readable event is at byte {sizes[event + 1]}:" in said
            assert event < len(sizes) - 2
            refused += 1
        else:  # the last event is cut off, or no reader uses this byte
            assert found in ((states[-2], states[-1]) if event == len(sizes) - 2 else (states[-1],))
    assert refused > 30


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True])
def test_columns_of_any_dtype_come_out_unchanged(lazy, tmp_path):
    rows = batch_of_lines([Line(0, 0, 0, True), Line(0, 1, 0, False)])
    rows["half"] = torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16)
    rows["complex"] = torch.tensor([1 + 2j, 3 - 1j]).conj()
    rows["none"] = torch.empty(2, 0)
    rows["float"] = torch.tensor([float("nan"), float("inf")])
    rows["inner", "data"] = ["a \N{SNOWMAN}", "\ud800 half of a pair"]
    rows.set_non_tensor("meta", {"a": [1, (2.5, None)], 3: True})
    if lazy:
        rows = lazy_stack([row.clone() for row in rows.unbind(0)])
        rows.tensordicts[1]["tokens", "full"] = torch.arange(7)
    path = tmp_path / "rows"
    make("plain", journal=path).put(rows)
    plain, again = make("plain"), make("plain", journal=path)
    plain.put(rows)
    last = rows[1:].clone()
    last["next", "done"] = torch.ones_like(last["next", "done"])
    for assembler in (plain, again):
        assembler.put(last)
    same_rows(again.take(), plain.take())


def test_a_single_row_of_an_expanded_tensor_is_written(tmp_path):
    """Rows of an expanded tensor have the stride 0, for example if a policy gives all rows one action."""
    rows = batch_of_lines([Line(0, 0, 0, True)])
    rows["action"] = torch.tensor(2.5).expand(1)
    path = tmp_path / "rows"
    GroupAssembler(group_size=1, journal=path).put(rows)
    again = GroupAssembler(group_size=1, journal=path)
    assert again.take()["action"].tolist() == [2.5]


def test_a_refused_put_is_not_in_the_journal(tmp_path):
    path = tmp_path / "rows"
    assembler = GroupAssembler(journal=path)
    rows = batch_of_lines([Line(0, 0, 0, True)]).set("odd", ["text"])
    assembler.put(rows)
    size = path.stat().st_size
    with pytest.raises(BatchError, match="found again"):
        assembler.put(rows)
    for value in ({1, 2}, b"bytes", object(), [1, {"a": print}]):
        rows = batch_of_lines([Line(0, 1, 0, True)])
        rows.set_non_tensor("odd", value)
        message = r"a journal can store .*found a \w+ in column odd: remove the column"
        with pytest.raises(BatchError, match=message):
            assembler.put(rows)
    assert (assembler.held, path.stat().st_size) == (1, size)
    assert GroupAssembler(journal=path).held == 1


def test_a_write_that_fails_in_its_middle_leaves_no_trace(tmp_path):
    """The disk is full after some number of bytes, and the put is refused. Then the next put is readable."""
    rows = [batch_of_lines([Line(group, 2 * group + r, 0, True) for r in range(2)]) for group in range(3)]
    path = tmp_path / "rows"
    assembler = GroupAssembler(journal=path)
    assembler.put(rows[0])
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    for free in (0, 1, 7, 100, 999):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + free, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                assembler.put(rows[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (path.stat().st_size, assembler.held) == (size, 2)
    assembler.put(rows[2])
    assert GroupAssembler(journal=path).take()["group_id"].tolist() == [0, 0, 2, 2]


@pytest.fixture
def committed(tmp_path) -> GroupAssembler:
    """Of three groups, two are committed with step 7 and the third was taken after that."""
    assembler = GroupAssembler(groups=1, group_size=1, journal=tmp_path / "rows")
    for group in range(3):
        assembler.put(batch_of_lines([Line(group, group, 0, True, expected=1)]))
    for _ in range(2):
        assembler.take()
    assembler.commit(7)
    assembler.take()
    return assembler


def test_an_error_of_a_journal_has_all_its_words(committed, tmp_path):
    path, nowhere = tmp_path / "rows", tmp_path / "nowhere"
    (tmp_path / "text").write_text("hello")
    (tmp_path / "old").write_bytes(path.read_bytes().replace(b"journal 3", b"journal 2"))
    again = GroupAssembler(groups=1, group_size=1, journal=path)
    cases = {
        f"the journal {path} was written with other options: groups is 1 in the file and 2 here, timeout is "
        "None in the file and 3 here. Open it with the same options. To change them, load its state_dict() "
        "into an assembler with a new file": lambda: GroupAssembler(
            groups=2, group_size=1, timeout=3, journal=path
        ),
        f"the folder of journal='{nowhere}/rows' must exist, and does not. Make it first: "
        f"Path('{nowhere}').mkdir(parents=True)": lambda: GroupAssembler(journal=nowhere / "rows"),
        f"{tmp_path}/text is no journal of this version of headrace: set another path": lambda: (
            GroupAssembler(journal=tmp_path / "text")
        ),
        f"{tmp_path}/old is no journal of this version of headrace: set another path": lambda: GroupAssembler(
            groups=1, group_size=1, journal=tmp_path / "old"
        ),
        "commit() needs a journal: set journal=PATH": GroupAssembler().commit,
        f"the weights have trained 4 groups, and the journal {path} has 2 that were committed and 1 after "
        "them. Load the weights of step 7, or begin a new journal": lambda: again.commit(8, emitted=4),
        f"the weights have trained 1 group, and the journal {path} has 2 that were committed and 1 after "
        "them. Load the weights of step 7, or begin a new journal": lambda: again.commit(8, emitted=1),
        f"this assembler continues from its journal {path}, which is at least as new as the state: do not "
        "load the state; or set journal to a new path, and load the state then": lambda: (
            again.load_state_dict(again.state_dict())
        ),
        f"another assembler has opened the journal {path}, or the file was changed, so this assembler cannot "
        "continue. Give each assembler its own file": committed.commit,
        f"an assembler with a journal ({path}) cannot be copied or pickled, because only one may write to "
        "the file: create it in the process that uses it, or save state_dict()": lambda: copy.copy(again),
    }
    for message, call in cases.items():
        with pytest.raises((ValueError, FileNotFoundError, RuntimeError, TypeError)) as caught:
            call()
        assert str(caught.value) == message
    new = GroupAssembler(groups=1, group_size=1, journal=tmp_path / "new")
    with pytest.raises(
        ValueError, match=r"has 0 that were committed and 0 after them\. Begin a new journal$"
    ):
        new.commit(emitted=1)
    for emitted, ready in ((2, 1), (3, 0)):  # the weights have trained what was committed, or one more
        copied = shutil.copy(path, tmp_path / str(emitted))
        last = GroupAssembler(groups=1, group_size=1, journal=copied)
        last.commit(9, emitted=emitted)
        assert (last.emitted, last.ready, last.committed) == (emitted, ready, 9)


def test_a_commit_rewrites_the_file_once_it_is_more_than_twice_as_long_and_16_kib_longer(tmp_path):
    path, rewritten, begun = tmp_path / "rows", 0, 0
    assembler = make("plain", journal=path)
    assembler.put(batch_of_lines([Line(999, 9990, 0, True)]))  # this row waits, and stays in the file
    for group in range(40):
        assembler.put(batch_of_lines([Line(group, 2 * group + r, 0, True) for r in (0, 1)], 2 * group))
        assembler.take()
        before = path.stat().st_size
        assembler.commit(group)
        after = path.stat().st_size
        assert (after < before) == (before > 2**14 + 2 * begun), group
        if after < before:
            begun, rewritten = after, rewritten + 1
    assert rewritten > 1
    again = make("plain", journal=path)
    assert (again.committed, again.held, again.ready) == (39, 1, 0)


def test_the_last_process_that_opens_a_journal_continues_and_others_raise(tmp_path):
    """For example, a process that hangs is taken for dead and replaced, and then continues."""
    first = make("plain", journal=tmp_path / "rows")
    second = make("plain", journal=tmp_path / "rows")
    rows = batch_of_lines([Line(0, 0, 0, True), Line(0, 1, 0, True)])
    for act_of_first in (lambda: first.put(rows), first.commit, first.discard_batch):
        with pytest.raises(RuntimeError, match="another assembler has opened the journal"):
            act_of_first()
    assert first.held == 0
    second.put(rows)
    second.commit()
    assert len(second.take()) == 2


def test_a_journal_begins_with_a_state_that_is_loaded(tmp_path):
    other, path = make("plain"), tmp_path / "rows"
    other.put(batch_of_lines([Line(0, 0, 0, True)]))
    assembler = make("plain", journal=path)
    assembler.load_state_dict(other.state_dict())
    assembler.put(batch_of_lines([Line(0, 1, 0, True)], 1))
    again = make("plain", journal=path)
    assert numbers(again.take()) == [0, 1]


def test_rollouts_are_not_requested_again(tmp_path):
    asked = []
    options = {"on_failure": "refill", "refill": lambda *missing: asked.append(missing), "max_refills": 9}
    assembler = GroupAssembler(journal=tmp_path / "rows", **options)
    assembler.put(batch_of_lines([Line(0, 0, 0, True, 3), Line(0, 1, 0, True)]))
    again = GroupAssembler(journal=tmp_path / "rows", **options)
    assert asked == [(0, 1)]
    again.put(batch_of_lines([Line(0, 2, 0, True)], 2))
    assert numbers(again.take()) == [1, 2]


def test_rejected_groups_that_come_again_count_once_in_capacity(tmp_path):
    options = {"groups": 1, "max_staleness": 3}
    assembler = GroupAssembler(journal=tmp_path / "rows", **options)
    room = assembler.capacity()
    rows = batch_of_lines([Line(0, 0, 0, True), Line(0, 1, 0, True)])
    assembler.put(rows)
    assembler.take()
    assembler.reject(1)
    again = GroupAssembler(journal=tmp_path / "rows", **options)
    assert again.capacity() == room - 1
    again.take()
    again.reject(1)
    assert again.capacity() == room


def test_rows_of_workers_with_lost_rollouts_count_alike_after_a_crash(tmp_path, clock):
    rng = random.Random(1)
    fleet, path = Fleet(2, 2, 2, 6), tmp_path / "rows"
    streams = [list(fleet.rows(worker, rng)) for worker in range(2)]
    assembler, other = GroupAssembler(journal=path), GroupAssembler()
    for start in range(0, max(map(len, streams)), 3):
        for rows in streams:
            some = [row for row in rows[start : start + 3] if rng.random() > 0.1]
            if some:
                assembler.put(fleet.batch(some))
                other.put(fleet.batch(some))
                if rng.random() < 0.5:
                    assembler.take()
                    assembler = GroupAssembler(journal=path)
    assert assembler.counts == other.counts
    assert assembler.counts["lost"] > 0
    assert (assembler.held, assembler.ready, assembler.pending) == (other.held, other.ready, other.pending)
    assert torch.equal(assembler.take()["rollout_id"], other.take()["rollout_id"])
