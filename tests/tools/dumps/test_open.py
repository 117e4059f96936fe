"""A dump is found by its path, its format by the first record, and its steps in the order of its files."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dumps import slime_dump, slime_sample, tinker_row, trl_dump, verl_row, write_lines

from headrace.pipeline.tools.dumps import missing_path
from headrace.pipeline.tools.dumps.readers import READERS, Reading, SourceError, open_dump
from headrace.pipeline.tools.dumps.readers.file_kinds import read_rows


def refusal(path, format="auto", **options):
    """The message with which a dump is refused."""
    with pytest.raises(SourceError) as raised:
        list(open_dump(path, format, **options))
    return str(raised.value)


def test_a_wrong_path_is_named_with_the_nearest_name_or_the_suffixes_of_its_folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "d.pt", "c.parquet", "zebra.txt", "deep/f.md"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).touch()
    none, pattern, folder = (
        "there is no such file or folder",
        "no file matches this pattern",
        f"{tmp_path}/runs",
    )
    for path, said in {
        "rums": f"{none} (did you mean 'runs'?)",
        "runs/d.ptt": f"{none} (did you mean 'd.pt'?)",
        "no/such/one": none,
        "runs/*.csv": f"{pattern}; {folder} has *.jsonl, *.parquet, *.pt",
        "runs/deep/*.csv": f"{pattern}; {folder}/deep has *.md",
        "rums/*.csv": f"{pattern} (did you mean 'runs'?)",
        "*.csv": pattern,
    }.items():
        assert missing_path(f"{tmp_path}/{path}") == f"{tmp_path}/{path}: {said}"
    for path in ("runs", "runs/a.jsonl", "runs/*.jsonl", "**/f.md"):
        assert missing_path(tmp_path / path) == ""
    for format in ("verl", "auto"):
        assert refusal(tmp_path / "no" / "such", format) == f"{tmp_path}/no/such: {none}"


def test_a_wrong_name_is_compared_with_the_first_1000_names_of_its_folder(tmp_path):
    for number in range(1001):
        (tmp_path / f"{number:04}aaaaaaaaaaaa").touch()
    said = "there is no such file or folder"
    for number, near in ((999, " (did you mean '0999aaaaaaaaaaaa'"), (1000, "")):
        path = f"{tmp_path}/{number:04}aaaaaaaaaaab"
        assert missing_path(path).startswith(f"{path}: {said}{near}")
        assert (f"{number:04}aaaaaaaaaaaa" in missing_path(path)) == bool(near)


CLEAR = "the format must be clear from the suffix and the first record; found"
SET = f"Set format to one of {', '.join(READERS)}"
OWN = ". For a file of your own, add options with the names of its columns, such as:\ncolumns="


def test_an_unclear_format_is_named_with_what_was_found(tmp_path):
    """The nearest format lacks the smallest part of its keys."""
    none = "no file of JSON Lines (.jsonl, .jsonl.gz), Parquet (.parquet) or torch.save (.pt)"
    assert refusal(tmp_path) == f"{tmp_path}: {CLEAR} {none}. {SET}"
    both = write_lines(tmp_path / "both.jsonl", [{**verl_row("a_0_0", 1.0), **tinker_row(0, 0, 1.0)}])
    assert refusal(both) == f"{both}: {CLEAR} tinker and verl. {SET}"
    row = {"reward": 1.0, "completion": "4", "uid": 3, "x": 0}
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    keys = f"{path} with 'completion', 'reward', 'uid', 'x'"
    near = "The nearest format is verifiers, which has the keys 'example_id|id', 'prompt', too."
    own = "{'group': 'uid', 'reward': 'reward', 'response': 'completion'}, group_size=ROLLOUTS"
    assert refusal(path) == f"{path}: {CLEAR} {keys}. {near} {SET}{OWN}{own}"
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"strange": [1]}), path)
    own = "{'group': ID, 'reward': NUMBER, 'response': TEXT}, group_size=ROLLOUTS"
    assert refusal(path) == f"{path}: {CLEAR} {path} with 'strange'. {SET}{OWN}{own}"


def test_files_come_by_the_numbers_in_their_paths(tmp_path):
    """Numbers of any length are compared as numbers, and texts as texts. A file counts once."""
    names = ["b10/2", "a9/10", "b9/10", "b9/9", "b9/x", f"b{10**40}/1", "1/1", "c/d/1"]
    for name in names:
        write_lines(tmp_path / f"{name}.jsonl", [verl_row("a_0_0", 1.0)])
    (tmp_path / "b9" / "7.jsonl").mkdir()  # a folder is not a file of the dump
    expected = ["1/1", "a9/10", "b9/9", "b9/10", "b9/x", "b10/2", f"b{10**40}/1", "c/d/1"]
    source = open_dump(f"{tmp_path}/**/*.jsonl", "verl")
    assert [str(file.relative_to(tmp_path))[: -len(".jsonl")] for file in source.files] == expected
    assert repr(source) == f"Source(verl: {tmp_path}/1/1.jsonl and 7 more)"
    assert repr(open_dump(tmp_path / "1", "verl")) == f"Source(verl: {tmp_path}/1/1.jsonl)"
    pair = open_dump(f"{tmp_path}/b9/[9x].jsonl", "verl")
    assert repr(pair) == f"Source(verl: {tmp_path}/b9/9.jsonl and 1 more)"
    assert source.total_bytes == sum(file.stat().st_size for file in source.files)
    (tmp_path / "none").mkdir()
    required = "a file, or a folder with {}, is required; found none"
    for format, patterns in {
        "verl": "*.jsonl",
        "slime": "*.pt or rollout_data/*.pt",
        "headrace": "step_*.parquet or step_*.jsonl or rollouts/step_*.parquet or rollouts/step_*.jsonl",
    }.items():
        assert refusal(tmp_path / "none", format) == f"{tmp_path}/none: {required.format(patterns)}"
    assert refusal(f"{tmp_path}/*.x", "verl") == f"{tmp_path}/*.x: {required.format(f'{tmp_path}/*.x')}"


def test_the_first_pattern_with_a_file_that_is_not_ignored_is_used(tmp_path):
    (tmp_path / "rollout_data").mkdir()
    slime_dump(tmp_path / "eval_3.pt")
    slime_dump(tmp_path / "rollout_data" / "4.pt")
    assert open_dump(tmp_path).files == [tmp_path / "rollout_data" / "4.pt"]
    slime_dump(tmp_path / "upheaval_3.pt")
    assert open_dump(tmp_path).files == [tmp_path / "upheaval_3.pt"]


def test_pointers_of_git_lfs_are_counted(tmp_path):
    for name, size in (("1", 60), ("2", 1024), ("3", 1025)):  # a pointer has at most 1,024 bytes
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
        (tmp_path / f"{name}.jsonl").write_text(text.ljust(size))
    said = (
        "a dump is required; found a pointer of Git LFS, whose file was not fetched. Pointers: 2 of 3 files. "
    )
    said += "Run git lfs pull, or download the files"
    assert refusal(tmp_path, "verl") == f"{tmp_path}/1.jsonl: {said}"


AGAIN = "Was the training resumed, or are files of two trainings mixed? Read them one at a time"


def test_steps_ascend_over_all_files(tmp_path):
    def steps(name, *numbers):
        rows = [verl_row(f"{name}{at}_0_0", 1.0, step) for at, step in enumerate(numbers)]
        return write_lines(tmp_path / f"{name}.jsonl", rows)

    one = steps("1", 3, 3, 5)
    assert [(step, len(batch)) for step, batch in open_dump(one, "verl")] == [(3, 2), (5, 1)]
    two = steps("2", 4)
    said = "steps ascend and stay together; found step {} after step {}, in {}. {}"
    assert refusal(tmp_path, "verl") == f"{two}: {said.format(4, 5, one, AGAIN)}"
    steps("2", 5)
    assert refusal(tmp_path, "verl") == f"{two}: a step is in one file; found step 5 in {one}, too"
    steps("2", 6, 7, 6)
    assert refusal(tmp_path, "verl") == f"{two}: {said.format(6, 7, two, AGAIN)}"


def test_a_step_has_at_most_the_rows_of_the_limit(tmp_path, monkeypatch):
    path = trl_dump(tmp_path / "c.parquet")
    monkeypatch.setattr("headrace.pipeline.tools.dumps.readers.open.MAX_ROWS", 2)
    ((_, batch),) = open_dump(path, group_by="prompt")
    assert len(batch) == 2
    monkeypatch.setattr("headrace.pipeline.tools.dumps.readers.open.MAX_ROWS", 1)
    assert "a step has at most 1 rows; step 4 has more" in refusal(path, group_by="prompt")


def test_a_dump_without_a_record_is_refused_with_the_records_that_were_skipped(tmp_path):
    path = write_lines(tmp_path / "7.jsonl", [{"a": 1}, {"b": 1}])
    first = f"{path}:1: the key 'input' is required; found the keys 'a'"
    none = "a dump has at least one record; found none"
    assert refusal(path, "verl", skip_bad=True) == f"{path}: {none} (2 were skipped: {first})"
    other = write_lines(tmp_path / "8.jsonl", [{"a": 1}])
    assert refusal(tmp_path, "verl", skip_bad=True) == f"{tmp_path}: {none} (3 were skipped: {first})"
    assert refusal(other, "verl").startswith(f"{other}:1: the key 'input' is required")


@pytest.mark.parametrize(
    ("rollouts", "steps", "said"),
    [(128, 1, ""), (129, 1, ""), (129, 2, " So does 1 other step."), (129, 3, " So do 2 other steps.")],
)
def test_a_large_group_of_one_prompt_is_noted_from_129_rollouts_on(rollouts, steps, said, tmp_path):
    for step in range(steps):
        rows = [verl_row(None, float(at % 3), step, "What is this?") for at in range(rollouts)]
        write_lines(tmp_path / f"{step}.jsonl", rows)
    source, by_order = (open_dump(tmp_path, group_by=how, group_size=rollouts) for how in ("prompt", "order"))
    list(source)
    list(by_order)
    notice = (
        f"In step 0, all 129 rollouts have one prompt text, and are one group.{said} This is suspicious: "
        f"were "
        "images, or another part of the prompts, not dumped? If the rollouts of each prompt are next to "
        "one another, "
        "set source.group_by=order, and source.group_size to the rollouts of one prompt."
    )
    assert source.notices == by_order.notices[1:] == [notice] * (rollouts > 128)


def test_a_large_step_of_two_prompts_is_not_suspicious(tmp_path):
    rows = [verl_row(None, float(at % 3), 7, f"{at // 129}?") for at in range(130)]
    source = open_dump(write_lines(tmp_path / "7.jsonl", rows), group_by="prompt")
    list(source)
    assert source.notices == []


def test_the_options_that_the_first_step_lacks(tmp_path):
    """The values fit the first step. A group's size is the number of its rollouts, not of its rows."""
    samples = [
        slime_sample(at // 3, at, {"a": 1.0, "b": 0.0}, rollout_id=at // 3 * 5 + at % 2) for at in range(6)
    ]
    path = slime_dump(tmp_path / "5.pt", 5, samples)
    assert open_dump(path).lacking() == {"group_size": 2, "reward_key": ["a", "b"]}
    assert open_dump(path, group_size=2, reward_key="a").lacking() == {}
    rows = [verl_row(None, 1.0, 7, "q")] * 3 + [verl_row(None, 1.0, 8, "q")] * 5
    path = write_lines(tmp_path / "7.jsonl", rows)
    assert open_dump(path).lacking() == {"group_by": "prompt", "group_size": 3}
    write_lines(path, [*rows[:2], {"input": "q"}, *rows])
    assert open_dump(path, group_by="prompt", skip_bad=True).lacking() == {}


# -- malformed records and their steps -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noted", "last", "following", "taken"),
    [
        ([], 3, 4, []),
        ([4, 4, 5], 3, 4, [(4, "0"), (5, "2")]),  # the first error of each step
        ([None], 3, 4, [(3, "0"), (4, "0")]),  # the record may belong to the step before or after it
        ([None], 3, 3, [(3, "0")]),
        ([None], 3, None, [(3, "0")]),
        ([None], None, 4, [(4, "0")]),
        ([None], None, None, [(None, "0")]),
        ([4, None], 3, 5, [(3, "1"), (4, "0"), (5, "1")]),
    ],
)
def test_the_error_of_a_record_without_a_step_is_of_the_steps_around_it(noted, last, following, taken):
    reading = Reading()
    for number, step in enumerate(noted):
        reading.note(SourceError(str(number)), step)
    assert [(step, str(error)) for step, error in reading.take(last, following)] == taken
    assert reading.take(last, following) == []
    assert reading.skipped == len(noted)


def test_a_pass_keeps_eight_messages_and_the_errors_of_4096_steps():
    for skips in (False, True):
        reading = Reading(skip_bad=skips, group_size=4)
        for step in range(4100):
            reading.note(SourceError(f"no {step}"), step)
        assert (reading.skipped, reading.messages) == (4100, [f"no {step}" for step in range(8)])
        assert [step for step, _ in reading.restarted().take(None, None)] == []
        assert [step for step, _ in reading.take(None, None)] == ([] if skips else [*range(4096)])
        again = reading.restarted()
        assert (again.group_size, again.skip_bad, again.skipped, again.messages) == (4, skips, 0, [])


def test_the_step_of_a_file_without_records_is_in_its_name(tmp_path):
    """Only a number above the last step names a step. A name with other letters does not."""
    names = {"1": [1], "3": [], "5": [5], "4": None, "007": [], "x9": [], "9" * 19: []}
    for name, steps in names.items():
        if steps is not None:
            rows = [verl_row("a_0_0", 1.0, step) for step in steps]
            write_lines(tmp_path / f"{name}.jsonl", rows)
    found = [(step, isinstance(each, SourceError)) for step, each in open_dump(tmp_path, "verl").outcomes()]
    assert found == [(1, False), (3, True), (5, False), (7, True), (None, True)]
    write_lines(tmp_path / "b" / "5.jsonl", [verl_row("a_0_0", 1.0, 6)])
    write_lines(tmp_path / "b" / "6.jsonl", [])
    assert [step for step, _ in open_dump(tmp_path / "b", "verl").outcomes()] == [6, None]


def test_the_records_of_a_file_are_read_after_a_malformed_one(tmp_path, monkeypatch):
    """A line of exactly the limit is read, and of a longer line nothing is."""
    rows = [json.dumps(verl_row(f"a_{at}_0", float(at))) for at in range(3)]
    longest = max(map(len, rows)) + 1
    monkeypatch.setattr("headrace.pipeline.tools.dumps.readers.file_kinds.MAX_LINE", longest)
    lines = [
        rows[0],
        " " * longest,
        "x" * (3 * longest + 5),
        rows[1],
        "  ",
        rows[2] + " " * 5 * longest,
        rows[2],
    ]
    path = tmp_path / "7.jsonl"
    path.write_text("\n".join(lines))
    source = open_dump(path, "verl", skip_bad=True)
    ((_, batch),) = source
    assert list(batch["rollout_label"]) == ["a_0", "a_1", "a_2"]
    said = f"a line has at most {longest} bytes; found a longer one"
    assert source.messages == [f"{path}:{line}: {said}" for line in (3, 6)]


def test_parquet_files_are_read_a_part_at_a_time(tmp_path):
    """The number of bytes that were read grows with the rows, in parts of 256 rows."""
    count = 300
    columns = {name: [value] * count for name, value in {"step": 4, "prompt": "q", "completion": "4"}.items()}
    columns |= {"accuracy": [1.0] * count, "advantage": [0.5] * count}
    path = trl_dump(tmp_path / "c.parquet", **columns)
    reading, size = Reading(), path.stat().st_size
    places = [reading.position for _ in read_rows(path, reading)]
    assert places == [0] * 256 + [size * 256 // count] * 44
    source = open_dump(path, group_by="prompt")
    list(source)
    assert source.read_bytes == source.total_bytes == size
