"""Damaged, malicious and random dumps give a valid batch or a SourceError."""

from __future__ import annotations

import gzip
import json
import math
import os
import pickle
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from dumps import slime_dump, slime_sample, trl_dump, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_audit import SOUND

from headrace.pipeline.sources import READERS, SourceError, open_source
from headrace.pipeline.sources.record import quote
from headrace.transforms import Status
from headrace.transforms.schema import NO_LENGTHS

pytestmark = pytest.mark.slow


def first_line(name):
    """A record of a format of JSON Lines, by itself, and the options to read it."""
    write, words = SOUND[name]
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder))
        record = json.loads(file.read_text().splitlines()[0])
    options = {"group_by": "prompt"} if "source.group_by=prompt" in words else {}
    return file.name, record, options


LINES = {
    name: first_line(name)
    for name in READERS
    if READERS[name].files[0].endswith(".jsonl") and name != "headrace"
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["\ud800", "a_1_2", "", 2**63, -1, 2**70, 1e300, 0, 1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fuzz = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def read(path, name, **options):
    """Batches that hold what is promised, or a SourceError with the place first; nothing else."""
    for skip_bad in (False, True):
        with suppress(SourceError):
            source = open_source(path, name, skip_bad=skip_bad, **options)
            found = list(source)
            assert found or (skip_bad and source.skipped_steps)
            for step, batch in found:
                valid(step, batch)


def valid(step, batch):
    rows = len(batch)
    assert isinstance(step, int)
    assert step >= 0
    assert rows > 0
    reward, unknown = batch["next", "reward"], torch.full((rows,), -1)
    status = batch.get("status", unknown)
    assert reward.dtype is torch.float64
    assert reward.shape[0] == rows
    assert not reward.isinf().any()
    lost = (status == Status.FAILED) | (status == Status.ABORTED)
    assert (lost | ~reward.isnan().all(1)).all()
    for key in ("group_id", "rollout_id"):
        assert batch[key].dtype is torch.int64
        assert (batch[key] >= 0).all()
    mask = batch.get(("masks", "all_assistant_mask"), None)
    assert (mask is None) == (NO_LENGTHS in batch.keys(True))
    if mask is None:
        return
    assert mask.dtype is torch.bool
    assert mask.shape[0] == rows
    if ("tokens", "full") in batch.keys(True):
        assert not (mask & ~batch["masks", "all_attention_mask"]).any()


def places(value, path=()):
    """Where a record can be changed."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def file_of(folder: Path, name: str, data: bytes) -> Path:
    path = folder / (LINES[name][0] if name in LINES else "dump.jsonl")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", LINES)
@fuzz
@given(data=st.data())
def test_any_value_in_any_field_of_a_line_reads_or_raises_source_error(tmp_path_factory, name, data):
    _, good, options = LINES[name]
    path = data.draw(st.sampled_from([p for p in places(good) if p]))
    bad = changed(good, path, data.draw(JSON))
    lines = "".join(json.dumps(row) + "\n" for row in data.draw(st.permutations([good, bad])))
    file = file_of(tmp_path_factory.getbasetemp(), name, lines.encode())
    read(file, name, **options)


@fuzz
@given(data=st.data())
def test_any_value_in_any_field_of_a_slime_sample(tmp_path_factory, data):
    good = {"rollout_id": 3, "samples": [slime_sample(0, 0, {"a": 1.0, "b": 2.0}, metadata={})] * 2}
    path = data.draw(st.sampled_from(list(places(good))))
    odd = st.sampled_from(
        [torch.ones(2), torch.ones(2, 2, dtype=torch.int64), torch.tensor([1, 0]), b"x", {1: 2}]
    )
    file = tmp_path_factory.getbasetemp() / "dump.pt"
    torch.save(changed(good, path, data.draw(JSON | odd)), file)
    read(file, "slime")
    read(file, "slime", reward_key="a")


@pytest.mark.parametrize("name", ["verl", "prime_rl", "auto"])
@fuzz
@given(
    data=st.binary(max_size=200)
    | st.text(max_size=100).map(str.encode)
    | JSON.map(lambda x: json.dumps(x).encode())
)
def test_any_bytes_for_lines(tmp_path_factory, name, data):
    folder = tmp_path_factory.getbasetemp()
    for suffix in ("", ".gz"):
        file = file_of(folder, name, data)
        target = file.with_name(file.name + suffix)
        target.write_bytes(data)
        read(target, name)


@pytest.mark.parametrize(
    ("name", "suffix"), [("slime", ".pt"), ("trl", ".parquet"), ("auto", ".pt"), ("auto", ".parquet")]
)
@fuzz
@given(data=st.binary(max_size=300))
def test_any_bytes_for_tables_and_pickles(tmp_path_factory, name, suffix, data):
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(data)
    read(file, name)


@pytest.mark.parametrize("name", LINES)
def test_lines_cut_at_every_byte_read_or_raise_source_error(tmp_path, name):
    _, good, options = LINES[name]
    whole = (json.dumps(good) + "\n").encode()
    for end in range(len(whole) - 1):
        file = file_of(tmp_path, name, whole[:end])
        with pytest.raises(SourceError):
            list(open_source(file, name, **options))


def good_files(folder):
    yield slime_dump(folder / "d.pt"), "slime", {}
    yield trl_dump(folder / "d.parquet"), "trl", {"group_by": "prompt"}
    path = folder / "d.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(LINES["verl"][1]) + "\n").encode()))
    yield path, "verl", {}


def test_binary_files_cut_at_any_byte(tmp_path):
    for path, name, options in good_files(tmp_path):
        whole = path.read_bytes()
        read(path, name, **options)
        for end in range(0, len(whole), max(1, len(whole) // 200)):
            path.write_bytes(whole[:end])
            with pytest.raises(SourceError):
                list(open_source(path, name, **options))


@pytest.mark.parametrize("kind", [0, 1, 2])
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bits_read_or_raise_source_error(tmp_path_factory, kind, data):
    path, name, options = list(good_files(tmp_path_factory.getbasetemp()))[kind]
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    read(path, name, **options)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def bombs(folder, path):
    """Pickles that run code where they are loaded carelessly: bare, in torch's file, and inside a field."""
    torch.save(Bomb(folder / "ran"), path)
    yield
    torch.save({"rollout_id": 1, "samples": [slime_sample(0, 0, Bomb(folder / "ran"))]}, path)
    yield
    torch.save(
        {"rollout_id": 1, "samples": [Bomb(folder / "ran")]}, path, _use_new_zipfile_serialization=False
    )
    yield
    path.write_bytes(pickle.dumps(Bomb(folder / "ran")))
    yield
    with zipfile.ZipFile(path, "w") as archive:  # what looks like a TorchScript archive
        archive.writestr("a/data.pkl", pickle.dumps(Bomb(folder / "ran")))
        archive.writestr("a/constants.pkl", pickle.dumps(Bomb(folder / "ran")))
        archive.writestr("a/version", "3")
    yield


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path):
    path = tmp_path / "dump.pt"
    for _ in bombs(tmp_path, path):
        with pytest.raises(SourceError, match="plain data and tensors, without running code"):
            list(open_source(path))
        assert not (tmp_path / "ran").exists()


def test_an_error_about_a_huge_pickle_is_short(tmp_path):
    bomb = []
    for _ in range(200):
        bomb = [bomb, bomb]
    huge = 1 << 100_000
    for value in (bomb, huge, [huge], {"x": bomb}):
        for field in ("tokens", "reward", "status", "group_index", "weight_versions", "prompt"):
            path = slime_dump(tmp_path / "5.pt", 5, [{**slime_sample(0, 0, 1.0), field: value}])
            with pytest.raises(SourceError) as caught:
                list(open_source(path))
            assert len(str(caught.value)) < 1000


@fuzz
@given(data=st.data())
def test_any_values_in_a_table(tmp_path_factory, data):
    column = st.sampled_from(["step", "prompt", "completion", "accuracy", "advantage", "more"])
    values = st.sampled_from(
        [
            ["a", "b"],
            [1, 2],
            [-1, 4],
            [4, 4],
            [None, None],
            [True, False],
            [math.inf, 1.0],
            [math.nan, 1.0],
            [[], []],
            [{"a": 1}, {"a": 2}],
            [[{"role": "user"}], [{"role": "x", "content": "y"}]],
            [b"\xff", b""],
        ]
    )
    file = trl_dump(
        tmp_path_factory.getbasetemp() / "any.parquet",
        **data.draw(st.dictionaries(column, values, max_size=3)),
    )
    read(file, "trl", group_by="prompt")
    read(file, "auto", group_by="prompt", reward_key="accuracy")


def test_every_undamaged_line_is_valid(tmp_path):
    for name, (_, good, options) in LINES.items():
        file = file_of(tmp_path, name, (json.dumps(good) + "\n").encode())
        ((step, batch),) = list(open_source(file, **options))
        valid(step, batch)
        write_lines(file, [good, {"nothing": 1}])
        source = open_source(file, skip_bad=True, **options)
        assert len(next(iter(source))[1]) == 1
        assert source.skipped == 1


def test_unprintable_values_are_still_reported():
    assert quote(10**5000) == "a int that cannot be printed" or len(quote(10**5000)) < 200
    assert len(quote(["x" * 10**6] * 100)) <= 200
