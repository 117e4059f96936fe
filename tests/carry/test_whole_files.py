"""A file has its whole new content or its whole old content, wherever the writer fails."""

import os

import pytest

from headrace.transforms.carry import write_whole


class FullDiskError(OSError):
    """There is no space left."""


def test_an_error_leaves_the_file_and_the_folder_unchanged(tmp_path, monkeypatch):
    """The error may come while the file is written, flushed or renamed."""
    path = tmp_path / "a.txt"
    path.write_text("before")

    def fails(*_):
        raise FullDiskError

    def half(file):
        file.write_text("aft")
        raise FullDiskError

    with pytest.raises(FullDiskError):
        write_whole(path, half)
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fails)
            with pytest.raises(FullDiskError):
                write_whole(path, lambda file: file.write_text("after"), durable=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "before"


def test_a_durable_file_is_flushed_before_it_is_renamed_and_its_folder_after(tmp_path, monkeypatch):
    """Without the flush, the new name could reach the disk before the bytes."""
    path, done = tmp_path / "a.txt", []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append(os.path.realpath(f"/proc/self/fd/{file}")), sync(file))
    )
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), replace(old, new)))
    write_whole(path, lambda file: file.write_text("after"), durable=True)
    (flushed, renamed, folder) = done
    assert flushed.endswith(".tmp")
    assert renamed == "renamed"
    assert folder == os.path.realpath(tmp_path)
    done.clear()
    write_whole(path, lambda file: file.write_text("quick"))
    assert done == ["renamed"]
