"""The page is a complete file that loads no other file and runs no foreign code."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pages
import pytest

from headrace.pipeline.tools.report import plain_page, render_page, write_page

pytestmark = pytest.mark.slow


def data_of(page: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.S)[1]
    )


class Elements(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_loads_no_other_file():
    page = render_page(pages.reading_run())
    for tag, attributes in Elements(page).found:
        assert tag not in ("iframe", "object", "embed", "base", "img")
        for key in ("src", "href", "action", "data", "srcset"):
            assert attributes.get(key) in (None, "data:,"), (tag, attributes)
        assert not [key for key in attributes if key.startswith("on") or key == "style"]
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)
    # This is the name of a namespace, and is not loaded.
    assert set(re.findall(r"https?://[^\"'\s)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"@import|@font-face|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|import\(", page)
    # No text is parsed as markup.
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page
    )


def test_the_policy_of_a_page_allows_only_its_own_style_and_script():
    page = render_page(pages.fan_out_run())
    meta = next(a for _, a in Elements(page).found if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in meta["content"].split("; "))
    assert rules["default-src"] == "'none'"
    for key, tag in (("script-src", "script"), ("style-src", "style")):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[key] == f"'sha256-{digest}'"


@pytest.mark.parametrize("title", [pages.HOSTILE, "{{script}} {{policy}}", "漢字 \ud800 é \x00"])
def test_any_text_is_kept_and_is_not_markup(title, tmp_path):
    """The titles have markup, placeholders, and a lone surrogate, which UTF-8 cannot encode."""
    write_page(pages.run_of(title=title), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert data_of(page)["title"] == title
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "\u2028" not in page


def test_numbers_fit_a_javascript_double():
    """The integer 2^53 + 1 is not a double. The float32 number 0.1 is 0.100000001490116."""
    values = [2**53 + 1, 2**53, 0.10000000149011612, float("nan"), float("-inf"), True, None]
    curves = {"curve_steps": list(range(7)), "curves": {"x": values}}
    read = data_of(render_page(pages.run_of(**curves)))["curves"]["x"]
    assert read == ["9007199254740993", 2**53, 0.100000001, None, None, True, None]


def test_columns_of_different_length_are_refused():
    run = pages.fan_out_run(1)
    run["steps"][0]["rows"]["tokens"].pop()
    with pytest.raises(ValueError, match=r"equally long; found in rows of step 0: \{'row': 55.*'tokens': 54"):
        render_page(run)


def test_a_curve_has_a_value_for_each_of_its_steps():
    with pytest.raises(ValueError, match=r"found in curves: \{'curve_steps': 2, 'a': 2, 'b': 1\}; fill up"):
        render_page(pages.run_of(curve_steps=[0, 1], curves={"a": [1, 2], "b": [1]}))
    render_page(pages.run_of(curve_steps=[0, 1], curves={"a": [1, 2]}))


def test_a_plain_page_has_the_parts_that_it_is_given():
    assert plain_page("<t>\x1b", "p {}", "<b>x</b>", "default-src 'none'") == (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>&lt;t&gt;\\x1b</title><style>p {}</style></head><body><b>x</b></body></html>\n"
    )


def test_a_page_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "page.html"
    write_page(pages.empty_run(), path)
    before = path.read_text(encoding="utf-8")
    with pytest.raises(TypeError):
        write_page(pages.run_of(title=object()), path)  # JSON has no such value
    assert path.read_text(encoding="utf-8") == before
    write_page(pages.fan_out_run(), str(path))
    assert path.read_text(encoding="utf-8") == render_page(pages.fan_out_run())
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_thousand_rows_take_less_than_400_kilobytes():
    assert len(render_page(pages.large_run(1000))) - len(render_page(pages.empty_run())) < 400_000
