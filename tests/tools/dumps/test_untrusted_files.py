"""Repeated records and false sizes are refused, and `printable` escapes control characters."""

from __future__ import annotations

import gzip
import io
import json
import math
import sys
import traceback
import unicodedata
import zipfile
from functools import cache
from itertools import islice, product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from composed import configure
from dumps import (
    PROMPT,
    RECORDS,
    assert_refused,
    episode,
    gym_row,
    hosted_row,
    in_order,
    nemo_row,
    open_instruct_row,
    own_row,
    path_of,
    slime_dump,
    slime_sample,
    tinker_row,
    trl_dump,
    verifiers_row,
    verl_row,
    write_lines,
)
from rich.console import Console

from headrace.pipeline import ConfigError, Pipeline, make_report, write_dump
from headrace.pipeline.tools.dumps.readers import Sample, SourceError, open_dump, to_batch
from headrace.pipeline.tools.dumps.readers.record import Record, first_line
from headrace.pipeline.tools.plan import tabulate_group_sizes
from headrace.pipeline.tools.replay import compare_recipes, replay_dump
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow

MANY = 12_000


def lines_of(folder, name, rows):
    return write_lines(path_of(folder, name), rows)


def read(path, format="auto", **options):
    return list(open_dump(path, format, **options))


def refusal(path, format="auto", **options):
    """The message with which a file is refused. It is empty if the file can be read."""
    try:
        read(path, format, **options)
    except SourceError as err:
        shown = "".join(traceback.format_exception(err)).replace(str(err), "")
        return f"{err}{shown if obeyed(shown) else ''}"  # a traceback also shows chained errors
    return ""


# -- repeated records --------------------------------------------------------------------------------


def scored_episode(name, score):
    return episode("g", name, {"r": {"score": score}})


AGAIN = {  # the rollout of `RECORDS` under another id, and another record with the same id
    "verl": (verl_row("a_0_1", 1.0), verl_row("a_0_0", 0.0)),
    "prime_rl": (scored_episode("b", 1), scored_episode("a", 0)),
    "nemo_rl": (nemo_row(1, 1.0), nemo_row(0, 0.0)),
    "open_instruct": (open_instruct_row(1, 0, 1.0), open_instruct_row(0, 0, 0.0)),
    "tinker": (tinker_row(0, 1, 1.0), tinker_row(0, 0, 0.0)),
    "nemo_gym": (gym_row(0, 1, 1.0), gym_row(0, 0, 0.0)),
    "prime_hosted": (hosted_row(0, 1, 1.0), hosted_row(0, 0, 0.0)),
    "table": (own_row(0, 1.0, k=1), own_row(0, 0.0)),
    "verifiers": (
        verifiers_row(0, 1.0, timing={"total_ms": 8.5}),
        verifiers_row(0, 1.0, timing={"total_ms": 8.25}),
    ),
}


def test_each_format_of_lines_with_ids_is_tried():
    assert RECORDS.keys() - AGAIN.keys() == {"atropos"}  # its groups have no ids


@pytest.mark.parametrize("name", AGAIN)
def test_a_repeated_record_is_refused_and_is_no_second_segment(tmp_path, name):
    record, options = RECORDS[name]
    other, again = AGAIN[name]
    path = lines_of(tmp_path, name, [record, other, record])
    assert_refused(r"jsonl:3: a record must occur once.*jsonl:1$", path, name, **options)
    source = open_dump(path, name, skip_bad=True, **options)
    assert [len(batch) for _, batch in source] == [2]
    assert source.skipped == 1
    assert_refused(
        r"jsonl:2: a record must occur once", lines_of(tmp_path, name, [record, again]), name, **options
    )


@pytest.mark.parametrize(
    ("name", "row"), [("verl", verl_row(None, 1.0)), ("verifiers", verifiers_row(0, 1.0))]
)
def test_equal_records_without_an_id_are_two_rollouts(tmp_path, name, row):
    [(_, batch)] = read(lines_of(tmp_path, name, [row, row]), name, **(PROMPT if name == "verl" else {}))
    assert in_order(batch["rollout_id"]) == [0, 1]


@pytest.fixture
def dump(make_batch, tmp_path):
    """A function that writes a step of five rows, or only the given `rows`."""

    def write(step=0, format="parquet", folder=tmp_path, rows=None):
        pipeline = Pipeline({})
        pipeline(make_batch([0.0, 1, 2, 3, 4], [0, 0, 1, 1, 1]))
        path = write_dump(make_report(pipeline, step=step), folder, format=format)
        if rows is not None and format == "parquet":
            pq.write_table(pq.read_table(path).take(rows), path)
        elif rows is not None:
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(lines[row] for row in rows))
        return path

    return write


def test_a_skipped_line_leaves_a_recorded_gap(dump):
    path = dump(format="jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{", *lines[2:]]))
    source = open_dump(path, skip_bad=True)
    assert [len(batch) for _, batch in source] == [4]
    assert source.skipped == 1
    path.write_text("\n".join([lines[0], lines[1].replace('"step": 0', '"step": 1')]))
    assert_refused(r"jsonl: a file is one step.*found 0, 1", path)


# -- several files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "rollouts"])
def test_steps_of_all_formats_in_a_folder_come_in_order(dump, tmp_path, place):
    for step, format in enumerate(["jsonl", "parquet", "jsonl", "parquet"]):
        dump(step=step, format=format, folder=tmp_path / place)
    packed = dump(step=10, format="jsonl", folder=tmp_path / place)
    packed.with_name(f"{packed.name}.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    assert [step for step, _ in open_dump(tmp_path)] == [0, 1, 2, 3, 10]


@pytest.mark.parametrize("other", ["parquet", "jsonl.gz"])
def test_a_step_in_two_formats_is_refused_with_both_files(dump, tmp_path, other):
    path = dump(step=3, format="jsonl")
    if other == "parquet":
        dump(step=3)
    else:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert_refused(rf"3\.{other}: a step is in one file; found step 3 in .*3\.jsonl", tmp_path)
    dump(step=2, format="jsonl", folder=tmp_path / "a")
    dump(step=2, folder=tmp_path / "b")
    assert_refused(r"b.*parquet: a step is in one file.*a.*jsonl", f"{tmp_path}/[ab]/*")


def test_a_malformed_record_does_not_hide_that_its_step_is_in_two_files(tmp_path):
    line = json.dumps(verl_row("a_0_0", 1.0))
    for name, first in (("6", line), ("7", "{")):
        (tmp_path / f"{name}.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(SourceError, match=r"7\.jsonl: a step is in one file; found step 7 in .*6\.jsonl"):
        [*open_dump(tmp_path).outcomes()]


# -- false sizes -------------------------------------------------------------------------------------


def tensors():
    whole = torch.zeros(1, dtype=torch.int64)
    yield "expanded", whole.expand(2**33), r"tensor \(8589934592,\) of torch.int64 in 8 bytes"
    yield "expanded halves", whole.half().expand(2**33), r"tensor \(8589934592,\) of torch.float16 in 2 bytes"
    yield "overlapping", torch.zeros(9).as_strided((2**20,), (0,)), r"tensor \(1048576,\) of .*32 in 36 bytes"
    yield "of a plane", whole.expand(2**20, 2**20), r"tensor \(1048576, 1048576\) of .*64 in 8 bytes"
    yield "NumPy", np.zeros(3), "a call of _codecs.encode|Weights only load failed"
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    yield "jagged", nested, "a call of torch"
    yield "meta", torch.zeros(2**33, device="meta"), "a call of torch._utils._rebuild_meta_tensor"
    yield "sparse", torch.zeros(9).to_sparse(), "a call of torch._utils._rebuild_sparse_tensor"


FIELDS = ["tokens", "loss_mask", "rollout_log_probs", "reward", "status", "group_index"]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_tensor_larger_than_its_file_is_refused_with_its_key(tmp_path):
    for field, (name, value, message) in product(FIELDS, tensors()):
        path = slime_dump(tmp_path / "5.pt", 5, [slime_sample(0, 0, 1.0) | {field: value}])
        assert path.stat().st_size < 4000, name
        place = rf"sample 0: '{field}' must be .*" if "tensor " in message else ""
        assert_refused(place + message, path)


def test_a_tensor_of_the_right_size_is_read(tmp_path):
    row = torch.arange(8)
    sample = slime_sample(0, 0, 1.0, tokens=row[2:6], loss_mask=torch.ones(2, dtype=torch.uint8))
    shape, scores = torch.Size([2]), torch.ones(2).bfloat16()
    sample["metadata"] = {"shape": shape, "dtype": torch.int8, "set": {1}, "scores": scores}
    sample["rollout_log_probs"] = torch.nn.Parameter(torch.tensor([-0.5, -0.25]))
    [(_, batch)] = read(slime_dump(tmp_path / "5.pt", 5, [sample]))
    assert batch["tokens", "full"].tolist() == [[2, 3, 4, 5]]


def repacked(path, change, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path) as archive:
        items = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in items.items():
            archive.writestr(name, change(data) if name.endswith(".pkl") else data)
    return path


CALLS = {  # functions and their pickled arguments, such as the size 2^36
    b"__builtin__\nbytearray": b"\x8a\x05\x00\x00\x00\x00\x10",
    b"builtins\nbytearray": b"\x8a\x05\x00\x00\x00\x00\x10",
    b"torch._utils\n_rebuild_qtensor": b"N",
    b"torch\nLongTensor": b"\x8a\x05\x00\x00\x00\x00\x10",
    b"torch.storage\nUntypedStorage": b"\x8a\x05\x00\x00\x00\x00\x10",
    b"_codecs\nencode": b"X\x01\x00\x00\x00aX\x06\x00\x00\x00utf-32",
}
BEFORE = (b"", b"X\x0e\x00\x00\x00ctorch\nfloat32", b"ctorch\nSize\n")  # a text like a call, a harmless call


def test_a_pickled_call_of_another_function_is_refused(tmp_path):
    for (function, argument), before in product(CALLS.items(), BEFORE):
        data = b"\x80\x02" + before + b"c" + function + b"\n(" + argument + b"tR."
        path = repacked(slime_dump(tmp_path / "5.pt"), lambda _, data=data: data)
        name = function.decode().replace("\n", ".")
        assert f"without running code; found a call of {name}" in refusal(path)


def test_a_compressed_archive_is_refused(tmp_path):
    samples = [slime_sample(0, 0, 1.0, tokens=torch.zeros(2**16, dtype=torch.int64))]
    path = slime_dump(tmp_path / "5.pt", 5, samples)
    assert_refused("found a compressed archive", repacked(path, bytes, zipfile.ZIP_DEFLATED))


def test_shared_tokens_count_once_for_each_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.pipeline.tools.dumps.readers.slime.SHARED", 2**10)
    tokens = torch.arange(2**12)
    shared = [slime_sample(0, i, 1.0, tokens=tokens, loss_mask=None) for i in range(100)]
    assert_refused(
        r"sample \d+: the lists in a file of this size have at most", slime_dump(tmp_path / "5.pt", 5, shared)
    )
    assert len(read(slime_dump(tmp_path / "6.pt", 6, shared[:2]))) == 1


def test_one_long_row_with_many_short_rows_is_refused():
    rows = [Sample(0, i, 1.0, tokens=[1] * (2**20 if i == 0 else 1)) for i in range(100)]
    with pytest.raises(SourceError, match=r"with padding .*; found 100 rows, and 1048576 tokens"):
        to_batch(rows)
    assert to_batch(rows[:2])["tokens", "full"].shape == (2, 2**20)


def test_rows_are_counted_before_they_are_read(dump, monkeypatch):
    path = dump()
    values = 5 * len(pq.read_schema(path).names)
    for name, most in (("MAX_ROWS", 5), ("MAX_VALUES", values)):
        for fewer in (0, 1):
            with monkeypatch.context() as patch:
                patch.setattr(f"headrace.pipeline.tools.dumps.readers.file_kinds.{name}", most - fewer)
                said = f"found 5 rows, with {values}"
                assert refusal(path)[-len(said) :] == said * fewer


# -- control characters ------------------------------------------------------------------------------

NASTY = "\x1b[31m[bold]\u202e\a\r\x9b:100:\x00"


def obeyed(text):
    """The characters of a text that control a terminal or a browser."""
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def nasty(value):
    """Copies of the value. Each copy has control characters in another text or key."""
    if isinstance(value, dict):
        yield {NASTY: 1, **value}
        for key, inner in value.items():
            yield {name: v for name, v in value.items() if name != key} | {f"{key}{NASTY}": inner}
            for other in nasty(inner):
                yield {**value, key: other}
    elif isinstance(value, list) and value:
        for other in nasty(value[0]):
            yield [other, *value[1:]]
    yield NASTY
    yield [NASTY]
    yield {NASTY: NASTY}


def outcome(function, *arguments):
    """The text that a task prints and the message of its error, as the command would show them."""
    console = Console(width=200, file=io.StringIO())
    error = ""
    try:
        function(*arguments, console)
    except (SourceError, BatchError, ConfigError) as err:
        error = str(err)
    return console.file.getvalue() + error


@pytest.mark.parametrize("name", RECORDS)
def test_values_of_a_line_are_escaped_in_errors(tmp_path, name):
    good, options = RECORDS[name]
    for bad in nasty(good):
        path = lines_of(tmp_path / NASTY.replace("\0", ""), name, [bad])
        for format in (name, "auto"):
            message = refusal(path, format, **options)
            assert not obeyed(message)
            assert not message or "[bold]" in message


def test_values_of_a_table_are_escaped_in_errors(tmp_path, dump):
    odd = {NASTY: 1}
    path = tmp_path / f"{NASTY[:-1]}.parquet"
    for name, value in {"accuracy": NASTY, NASTY: odd, "step": NASTY, "prompt": odd}.items():
        trl_dump(path, **{name: [value] * 2})
        message = refusal(path, "trl", reward_key=name, **PROMPT)
        assert message
        assert not obeyed(message)
    ours = dump()
    whole = pq.read_table(ours)
    for name in whole.column_names:
        for value in (NASTY, odd):
            pq.write_table(
                whole.set_column(whole.column_names.index(name), name, pa.array([value] * 5)), ours
            )
            assert not obeyed(refusal(ours))
    pq.write_table(whole.replace_schema_metadata({"headrace.schema": NASTY}), ours)
    assert r"found '\x1b[31m[bold]\u202e" in refusal(ours)


def test_values_of_a_pickle_are_escaped_in_errors(tmp_path):
    path = tmp_path / f"{NASTY[:-1]}.pt"
    for bad in nasty({"rollout_id": 1, "samples": [slime_sample(0, 0, 1.0)]}):
        torch.save(bad, path)
        assert not obeyed(refusal(path))
    call = b"\x80\x02c\x1b[31m\xe2\x80\xae\nx\n."
    message = refusal(repacked(slime_dump(path), lambda _: call))
    assert message
    assert not obeyed(message)


TASKS = {"replay": replay_dump, "compare": compare_recipes, "plan": tabulate_group_sizes}


def files_of_all_formats(folder, dump, step):
    """Files of each format with a nasty value at every `step`-th place, and the options to read them."""
    for name, (good, options) in RECORDS.items():
        for bad in islice(nasty(good), 0, None, step):
            yield (
                lines_of(folder, name, [bad, good]),
                {"format": name, **options},
            )  # the good record repeats the id of a bad record that can be read
    for bad in islice(nasty(slime_sample(0, 0, 1.0)), 0, None, step):
        yield slime_dump(folder / "1.pt", 1, [slime_sample(0, 1, 0.0), bad]), {}
    for name in ("prompt", "completion", NASTY):
        yield trl_dump(folder / "c.parquet", **{name: [NASTY] * 2}), PROMPT
    yield dump(folder=folder), {}
    path = dump(folder=folder, format="jsonl")
    for bad in islice(nasty(json.loads(path.read_text().splitlines()[0])), 0, None, step):
        yield write_lines(path, [bad]), {}


@pytest.mark.parametrize("task", TASKS)
def test_values_of_a_file_of_any_format_are_escaped_in_the_terminal(tmp_path, dump, task, monkeypatch):
    recipes = sys.modules["headrace.pipeline.tools.dumps.source"]  # composed once for all files
    monkeypatch.setattr(recipes, "compose_config", cache(recipes.compose_config))
    words = [f"task={task}", "source.path=x", "source.skip_bad=true", "report.html=false", "report.dump=null"]
    gate = "pipeline.stages.gate=null"
    config = configure("config", *words, *(["pipelines=[grpo,dr_grpo]"] if task == "compare" else [gate]))
    arguments = [tmp_path / "out", *([[gate]] if task == "compare" else [])]
    shown = set()
    for path, options in files_of_all_formats(tmp_path / "in", dump, 200):
        fresh = {"format": "auto", "group_by": None, "columns": None}
        config.source.update({"path": str(path)} | fresh | options)
        text = outcome(TASKS[task], config, *arguments)
        assert not obeyed(text)
        shown |= {path.name} if "[bold]" in text else set()
    assert "dump.jsonl" in shown


def test_the_page_escapes_control_characters(make_batch):
    from headrace.pipeline.tools.report import page_data

    batch = make_batch([1.0, 2], [0, 0])
    batch["prompt_text"] = [f"one\n{NASTY}\ttwo"] * 2
    pipeline = Pipeline({})
    pipeline(batch)
    data = page_data([make_report(pipeline)], title=NASTY)
    groups = data["steps"][0]["groups"]
    assert groups["label"] == [r"one \x1b[31m[bold]\u202e\x07 \x9b:100:\x00 two"]
    assert groups["asked"][0]["start"] == r"one" "\n" r"\x1b[31m[bold]\u202e\x07\r\x9b:100:\x00" "\t" "two"
    assert not obeyed(data["title"])


# -- messages about many samples ---------------------------------------------------------------------


def crowds():
    """Steps with many samples that are all wrong in the same way."""
    yield [Sample(i, 0, 1.0) for i in range(MANY)]
    yield [Sample(0, i, 1.0, expected_rollouts=1, where="x" * 300) for i in range(MANY)]
    yield [Sample(0, i, 1.0, policy_version=1 if i == 0 else None, where="x" * 300) for i in range(MANY)]
    yield [Sample(0, 0, rewards={str(j): 1.0 for j in range(i, MANY + i)}) for i in range(2)]
    yield [Sample("g" * 10**6, 0, 1.0), Sample("h" * 10**6, 0, 1.0)]


def assert_short(message):
    assert 20 < len(message.encode()) < 10_000


def test_messages_about_many_samples_are_short():
    for rows in crowds():
        with pytest.raises(SourceError) as caught:
            to_batch(rows)
        assert_short(str(caught.value))


def crowded_lines():
    names = {f"key {i}": 0 for i in range(MANY)}
    yield json.dumps(names)
    yield json.dumps({"x" * MANY: 0})
    yield "{" + ", ".join(f'"{name}": 0' for name in [*names, f"key {MANY - 1}"]) + "}"
    yield json.dumps({**verl_row("a_0_0", 1.0), "uid": "a" * MANY})
    for value in (list(names), names, "x" * MANY, "\u202e" * MANY, {"x" * MANY: 1}):
        yield json.dumps({**verl_row("a_0_0", 1.0), "score": value})


def test_messages_about_a_long_line_are_short(tmp_path):
    path = tmp_path / "7.jsonl"
    for line in crowded_lines():
        path.write_text(line)
        for format in ("verl", "auto"):
            assert_short(refusal(path, format))


def test_messages_about_a_table_of_many_rows_are_short(dump):
    path = dump()
    whole = pq.read_table(path).slice(0, 1)
    many = pa.concat_tables([whole] * 1000).combine_chunks()
    many = pa.concat_tables([many] * (MANY // 1000))
    for name, values in {
        "row": np.zeros(MANY, np.int64),
        "step": np.arange(MANY),
        "group_id": np.full(MANY, -1),
        "reward": np.full(MANY, np.nan),
        "tokens": np.full(MANY, 2**40),
    }.items():
        table = many.set_column(many.column_names.index("row"), "row", pa.array(np.arange(MANY)))
        pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(values)), path)
        assert_short(refusal(path))
    pq.write_table(pa.table({f"{'x' * 1000}{i}": [0] for i in range(3000)}), path)
    assert_short(refusal(path))


# -- ids of several parts ----------------------------------------------------------------------------


def test_ids_with_different_parts_are_different(tmp_path):
    parts = (("a", "b/c"), ("a/b", "c"))
    rows = [verifiers_row(0, 1.0, task=task, example_id=example) for task, example in parts]
    [(_, batch)] = read(write_lines(tmp_path / "results.jsonl", rows))
    assert in_order(batch["group_id"]) == [0, 1]
    assert len(set(batch["group_label"])) == 2
    rows = [verifiers_row(0, 1.0, example_id=example) for example in (1, "1")]
    [(_, batch)] = read(write_lines(tmp_path / "results.jsonl", rows))
    assert in_order(batch["group_id"]) == [0, 1]


def test_different_prompts_with_equal_texts_are_two_groups(tmp_path):
    messages = [
        [{"role": "user", "content": "a\nassistant: b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ]
    [(_, batch)] = read(trl_dump(tmp_path / "c.parquet", prompt=messages), **PROMPT)
    assert len(set(batch["prompt_text"])) == 1
    assert in_order(batch["group_id"]) == [0, 1]


def test_a_group_id_that_equals_the_label_of_a_prompt_is_another_group(tmp_path):
    rows = [{**scored_episode(name, 1.0), "group": None} for name in "ab"]
    [(_, batch)] = read(write_lines(tmp_path / "traces.jsonl", rows), **PROMPT)
    assert in_order(batch["group_id"]) == [0, 0]
    rows[1]["group"] = {"id": batch["group_label"][0]}
    [(_, batch)] = read(write_lines(tmp_path / "traces.jsonl", rows), **PROMPT)
    assert in_order(batch["group_id"]) == [0, 1]


# -- values at their bounds --------------------------------------------------------------------------

LARGEST, WHOLE = torch.finfo(torch.float32).max, 2**63 - 1
ABOVE = float(np.nextafter(LARGEST, math.inf))
TENSOR = torch.tensor


@pytest.mark.parametrize(
    ("read_as", "taken", "refused"),
    [
        (
            "number",
            {LARGEST: LARGEST, -LARGEST: -LARGEST, 3: 3.0, 0: 0.0},
            [ABOVE, -ABOVE, math.nan, math.inf, True, "1", [1], 10**400],
        ),
        ("whole", {0: 0, WHOLE: WHOLE}, [-1, WHOLE + 1, 1.0, True, "1"]),
        ("label", {0: 0, WHOLE: WHOLE, "": "", "a": "a"}, [-1, WHOLE + 1, 1.0, True, "\ud800", ["a"]]),
        ("text", {"": "", "a\n": "a\n"}, ["\ud800", 1, True, ["a"]]),
    ],
)
def test_single_values_are_read_up_to_their_bounds(read_as, taken, refused):
    for given, found in taken.items():
        value = getattr(Record({"x": given}, "a:1"), read_as)("x")
        assert (value, type(value)) == (found, type(found))
    for given in refused:
        with pytest.raises(SourceError, match=r"^a:1: 'x' must be .*; found"):
            getattr(Record({"x": given}, "a:1"), read_as)("x")


@pytest.mark.parametrize(
    ("read_as", "taken", "refused"),
    [
        (
            "wholes",
            [
                ([], []),
                ([0, WHOLE], [0, WHOLE]),
                (TENSOR([3, 0]), [3, 0]),
                (TENSOR([], dtype=torch.int64), []),
            ],
            [[-1], [1, WHOLE + 1], [1.0], [True], [[1]], 1, (1,), TENSOR(1), TENSOR([[1]]), TENSOR([1.0])],
        ),
        (
            "numbers",
            [([], []), ([1, -LARGEST, LARGEST], [1.0, -LARGEST, LARGEST]), (TENSOR([0.5, 1.0]), [0.5, 1.0])],
            [[1.0, ABOVE], [-ABOVE], [math.nan], [True], ["1"], 1.0, TENSOR(1.0), TENSOR([math.inf])],
        ),
        (
            "bits",
            [([], []), ([0, 1, True, False, 1.0], [0, 1, 1, 0, 1]), (TENSOR([True, False]), [1, 0])],
            [[2], [-1], [0.5], ["1"], [None], 1, TENSOR([2])],
        ),
    ],
)
def test_lists_are_read_up_to_the_bounds_of_their_values(read_as, taken, refused):
    for given, found in taken:
        values = getattr(Record({"x": given}, "a:1"), read_as)("x")
        assert (values, [type(each) for each in values]) == (found, [type(each) for each in found])
    for given in refused:
        with pytest.raises(SourceError, match=r"^a:1: 'x' must be .*; found"):
            getattr(Record({"x": given}, "a:1"), read_as)("x")


def test_optional_values_may_be_null_and_others_must_be_set():
    for read_as in ("text", "number", "whole", "label", "wholes", "numbers", "bits", "record"):
        for data in ({}, {"x": None}):
            assert getattr(Record(data, "a:1"), read_as)("x", optional=True) is None
        with pytest.raises(SourceError, match=r"^a:1: 'x' must be set; found None$"):
            getattr(Record({"x": None}, "a:1"), read_as)("x")
    record = Record({"x": None, "no": False, "yes": True}, "a:1")
    assert [record.flag(name, default=True) for name in ("x", "y", "no", "yes")] == [True, True, False, True]
    assert [record.flag(name, default=False) for name in ("x", "y", "no", "yes")] == [
        False,
        False,
        False,
        True,
    ]
    assert record.records("x", optional=True) == record.records("y", optional=True) == []
    with pytest.raises(SourceError, match=r"^a:1: 'x' must be set; found None$"):
        record.flag("x")
    with pytest.raises(SourceError, match=r"^a:1: 'x' must be true or false; found 1$"):
        Record({"x": 1}, "a:1").flag("x", default=True)


def test_other_columns_are_texts_numbers_and_booleans_that_were_not_read():
    data = {
        "long": "x" * 1001,
        "fits": "x" * 1000,
        "most": LARGEST,
        "least": -LARGEST,
        "whole": 2**70,
        "yes": True,
    }
    data |= {
        "read": 1,
        7: "seven",
        "nan": math.nan,
        "inf": math.inf,
        "above": ABOVE,
        "list": [1],
        "null": None,
    }
    record = Record(data, "a:1")
    record.number("read")
    kept = {"long": "x" * 1000 + "…", "fits": "x" * 1000, "most": LARGEST, "least": -LARGEST, "whole": 2**70}
    assert json.loads(record.other_columns()) == kept | {"yes": True}
    record.read |= set(data)
    assert record.other_columns() == ""


def test_a_message_of_2000_characters_is_whole_and_a_longer_one_lacks_its_middle():
    text = "".join(chr(ord("a") + at % 26) for at in range(2001))
    assert str(SourceError(text[:2000])) == text[:2000]
    assert str(SourceError(text)) == f"{text[:998]} … {text[-998:]}"
    assert str(SourceError("\a" * 1000)) == "\\x07" * 249 + "\\x" + " … " + "07" + "\\x07" * 249


def test_a_message_of_another_package_is_its_first_line():
    assert first_line(ValueError("\x1b[1m\n" + "x" * 201 + "\nsecond")) == "x" * 200
    assert first_line(KeyError()) == "KeyError"


# -- rewards and statuses ----------------------------------------------------------------------------


def test_each_of_several_rewards_in_a_line_is_checked(dump):
    path = dump(format="jsonl")
    lines = path.read_text().splitlines()
    for values in ("[1, 1e999]", f"[1, {10**400}]", "[1, true]", "[1]", "[null, null]", '["1", 2]'):
        path.write_text("\n".join(line[:-1] + f', "rewards": {values}}}' for line in lines))
        assert_refused(r"jsonl: .*reward", path)
