"""A task prints the paths of its files."""

from __future__ import annotations

import io

from rich.console import Console

from headrace.pipeline.tools.dumps import print_files


def test_the_address_of_the_page_is_printed_if_the_folder_has_a_page(tmp_path):
    def said() -> list[str]:
        text = io.StringIO()
        print_files(Console(file=text, width=20), tmp_path, "and more")
        return text.getvalue().splitlines()

    assert said() == [f"written to {tmp_path}", "and more"]
    (tmp_path / "report.html").write_text("<html>")
    assert said() == [f"written to {tmp_path}", f"the page: {tmp_path.as_uri()}/report.html", "and more"]
