"""Damaged, malicious and random dumps give a valid batch or a SourceError."""

from __future__ import annotations

import gzip
import json
import math
import os
import pickle
import zipfile
from contextlib import suppress

import pytest
import torch
from dumps import RECORDS, assert_refused, path_of, slime_dump, slime_sample, trl_dump, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.pipeline.tools.dumps.readers import READERS, SourceError, open_dump
from headrace.pipeline.tools.dumps.readers.record import quote
from headrace.transforms import Status
from headrace.transforms.table.schema import NO_LENGTHS

pytestmark = pytest.mark.slow


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
    """Check that a dump gives valid batches or raises a SourceError."""
    for skip_bad in (False, True):
        with suppress(SourceError):
            source = open_dump(path, name, skip_bad=skip_bad, **options)
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
    """The paths at which a record can be changed."""
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


@fuzz
@given(data=st.data())
def test_any_value_in_any_field_of_a_line_reads_or_raises_source_error(tmp_path_factory, data):
    name = data.draw(st.sampled_from(list(RECORDS)))
    good, options = RECORDS[name]
    bad = changed(good, data.draw(st.sampled_from([p for p in places(good) if p])), data.draw(JSON))
    file = path_of(tmp_path_factory.getbasetemp(), name)
    read(write_lines(file, data.draw(st.permutations([good, bad]))), name, **options)


@fuzz
@given(data=st.data())
def test_any_value_in_any_field_of_a_slime_sample_reads_or_raises_source_error(tmp_path_factory, data):
    good = {"rollout_id": 3, "samples": [slime_sample(0, 0, {"a": 1.0, "b": 2.0}, metadata={})] * 2}
    path = data.draw(st.sampled_from(list(places(good))))
    odd = st.sampled_from(
        [torch.ones(2), torch.ones(2, 2, dtype=torch.int64), torch.tensor([1, 0]), b"x", {1: 2}]
    )
    file = tmp_path_factory.getbasetemp() / "dump.pt"
    torch.save(changed(good, path, data.draw(JSON | odd)), file)
    read(file, "slime")
    read(file, "slime", reward_key="a")


@fuzz
@given(
    data=st.binary(max_size=300)
    | st.text(max_size=100).map(str.encode)
    | JSON.map(lambda x: json.dumps(x).encode()),
    kind=st.sampled_from([("verl", ".jsonl"), ("verl", ".jsonl.gz"), ("slime", ".pt"), ("trl", ".parquet")]),
)
def test_any_bytes_read_or_raise_source_error(tmp_path_factory, kind, data):
    name, suffix = kind
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(data)
    for format in (name, "auto"):
        read(file, format)


def good_files(folder):
    yield slime_dump(folder / "d.pt"), "slime", {}
    yield trl_dump(folder / "d.parquet"), "trl", {"group_by": "prompt"}
    path = write_lines(folder / "d.jsonl", [RECORDS["verl"][0]])
    packed = folder / "d.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.write_bytes(path.read_bytes().rstrip())  # the last line has no line break
    yield packed, "verl", {}
    yield path, "verl", {}


def test_files_cut_at_any_byte_raise_source_error(tmp_path):
    for path, name, options in good_files(tmp_path):
        whole = path.read_bytes()
        read(path, name, **options)
        for end in range(0, len(whole), max(1, len(whole) // 60)):
            path.write_bytes(whole[:end])
            with pytest.raises(SourceError):
                list(open_dump(path, name, **options))


@fuzz
@given(data=st.data())
def test_flipped_bits_read_or_raise_source_error(tmp_path_factory, data):
    path, name, options = data.draw(st.sampled_from(list(good_files(tmp_path_factory.getbasetemp()))))
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
    """Write files that run code if they are unpickled: three of torch, a plain pickle, and an archive."""
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
    with zipfile.ZipFile(path, "w") as archive:  # this looks like a TorchScript archive
        archive.writestr("a/data.pkl", pickle.dumps(Bomb(folder / "ran")))
        archive.writestr("a/constants.pkl", pickle.dumps(Bomb(folder / "ran")))
        archive.writestr("a/version", "3")
    yield


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path):
    path = tmp_path / "dump.pt"
    for _ in bombs(tmp_path, path):
        assert_refused("plain data and tensors, without running code", path)
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
                list(open_dump(path))
            assert len(str(caught.value)) < 1000


@fuzz
@given(data=st.data())
def test_any_values_in_a_table_read_or_raise_source_error(tmp_path_factory, data):
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
    assert {*RECORDS, "headrace"} == {
        n for n, reader in READERS.items() if reader.files[0].endswith(".jsonl")
    }
    for name, (good, options) in RECORDS.items():
        file = write_lines(path_of(tmp_path, name), [good])
        ((step, batch),) = open_dump(file, **options)
        valid(step, batch)


def test_the_quotation_of_any_value_is_short():
    assert quote(10**5000) == "a value of type int that cannot be printed" or len(quote(10**5000)) < 200
    assert len(quote(["x" * 10**6] * 100)) <= 200
