"""In a browser, ``headrace view`` shows the rows and prompts of one or two runs."""

from __future__ import annotations

import dataclasses
import time

import pages
import pyarrow.parquet as pq
import pytest
import torch
from browser import CONTRAST, Page
from busy import stages
from stored_runs import report_of_step, served, step_batch, write_run

from headrace.pipeline import Pipeline, ReportFolder, make_report, write_dump
from headrace.pipeline.tools.view.stored_run import key_of
from headrace.transforms import LossWeight

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LARGE = "</script><script>window.ran=1</script>" + "Zażółć 🐢 <b>gęślą</b>\n" * 50_000  # above 1 MB
ENTER = "\ue007"
OUT_OF_LINE = """
return [...document.querySelectorAll("main table")].filter((e) => e.checkVisibility()).flatMap((table) => {
  const [head, cells] = ["thead tr", "tbody tr"].map((row) => [...table.querySelector(row).children]);
  const left = (e) => e.getBoundingClientRect().left;
  return table.tHead.checkVisibility() ? cells.filter((e, i) => Math.abs(left(e) - left(head[i])) > 1) : [];
}).map((e) => e.className);
"""
TOPS = """
return [...document.querySelectorAll(".controls label")].filter((e) => e.checkVisibility()).map(
  (e) => e.getBoundingClientRect().top,
);
"""
UNNAMED = """
return [...document.querySelectorAll("input, select, button")].filter(
  (e) => e.checkVisibility() && !e.labels?.length && !e.ariaLabel && !e.textContent.trim(),
).length;
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs. The second lacks the last step, and step 0 of the first has hostile texts."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = write_run(folder / "first"), write_run(folder / f"second{pages.HOSTILE[:1]}b>", 3, 0.25)
    responses = [LARGE, pages.HOSTILE, "\u202eturned", "", *[pages.HOSTILE] * 5]
    others = [f'{{"{"<img src=x onerror=window.ran=1>"}": "<i>{each}</i>"}}' for each in range(9)]
    hostile = report_of_step(0, response_text=responses, ground_truth=[pages.HOSTILE] * 9)
    hostile.texts["other_columns"] = others
    write_dump(hostile, first / "rollouts")
    return first, second


@pytest.fixture(scope="module")
def client(folders):
    with served(*folders) as client:
        yield client


@pytest.fixture
def open_view(driver, client):
    """A function that opens the viewer of both runs. At the end of the test the console must be empty."""

    def opened(address="", *, width=1280):
        page = Page(driver)
        page.show_as("light", "reduce")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get("about:blank")
        driver.get(client.address + address)
        settle(page)
        return page

    yield opened
    assert driver.execute_script("return window.ran ?? null") is None
    assert driver.get_log("browser") == []


def settle(page, selector="tr.line, table.prompts tr, details.one-step, p.empty"):
    """Wait until answers are drawn."""
    for _ in range(500):
        if page.count(f"main:not([hidden]) section:not([hidden]) :is({selector})") and not page.count(
            "[aria-busy]"
        ):
            return
        time.sleep(0.01)
    raise AssertionError(f"no {selector}")


def until(found, wanted):
    """Wait until the function `found` returns the wanted value."""
    for _ in range(500):
        if (last := found()) == wanted:
            return
        time.sleep(0.01)
    assert last == wanted


def type_into(page, control, text):
    script = "const e = document.getElementById(arguments[0]); e.value = arguments[1]; "
    page.driver.execute_script(script + "e.dispatchEvent(new Event('input'))", control, text)


def rows_shown(page, panel=0):
    return page.values(f".panel:nth-child({panel + 1}) tr.line", "data-row")


def test_both_runs_show_the_rows_of_their_files(open_view, folders):
    page = open_view("#view=steps&step=2")
    assert page.texts("#rows .panel h3") == ["first", folders[1].name]
    for panel, folder in enumerate(folders):
        rows = pq.read_table(folder / "rollouts" / "step_00000002.parquet").to_pylist()
        rows.sort(key=lambda row: (row["rollout_reward"], row["row"]))
        assert rows_shown(page, panel) == [str(row["row"]) for row in rows]
        shown = page.values(f".panel:nth-child({panel + 1}) td.rollout_reward", "title")
        assert [float(text) for text in shown] == [row["rollout_reward"] for row in rows]
        groups = page.texts(f".panel:nth-child({panel + 1}) td.group_id")
        assert groups == [str(row["group_id"]) for row in rows]
        assert page.texts(f".panel:nth-child({panel + 1}) td.response div") == [
            " ".join(row["response"].split()) for row in rows
        ]
    assert page.texts("#steps tbody th") == ["0", "1", "2", "3"]
    assert page.texts("#steps tr[data-step='3'] td.of-run1") == ["not in this run"] * 3
    assert page.values("#steps tr.chosen", "data-step") == ["2"]
    page = open_view("#view=steps&step=3")
    assert page.texts("#rows .panel .empty") == [f"{folders[1].name} has no step 3."]


def test_a_row_shows_its_group_its_loss_weight_and_its_reason(driver, tmp_path):
    """The label of a group without an id is its prompt and a hash. A row shows half of the hash."""
    labels = [f"What? #{each // 3:08x}{7:08x}" for each in range(9)]
    batch = step_batch(0)
    report = make_report(Pipeline(stages(weight=LossWeight())).run(batch), step=0, batch=batch)
    report = dataclasses.replace(report, texts={**report.texts, "group_label": labels})
    with ReportFolder(tmp_path, every=None) as folder:
        folder.add(report)
    with served(tmp_path) as client:
        page = Page(driver)
        page.driver.get(client.address + "#order=row+ascending")
        settle(page)
        rows = pq.read_table(tmp_path / "rollouts" / "step_00000000.parquet").to_pylist()
        assert page.texts("td.group_id") == [f"#{label[-16:-8]}" for label in labels]
        weights = page.values("td.loss_weight", "title")
        assert [weight and float(weight) for weight in weights] == [row["loss_weight"] for row in rows]
        reasons = [row["reason"].replace("/", ": ").replace("_", " ") for row in rows]
        assert page.texts("td.reason") == reasons
        assert {*reasons} > {"trained", "filter: zero variance"}
        type_into(page, "group", page.texts("td.group_id")[4])
        until(lambda: rows_shown(page), ["3", "4", "5"])


def test_on_a_narrow_screen_a_button_leads_to_the_rows_of_the_other_run(open_view, folders):
    page = open_view("#view=steps&step=2", width=390)
    names = [f"the rows of {folders[1].name} are below", "the rows of first are above"]
    assert page.texts("#rows .jump") == names
    page.one("#rows .panel:first-child .jump").click()
    top = "return document.querySelector('#rows .panel + .panel').getBoundingClientRect().top"
    assert abs(page.driver.execute_script(top)) < 2
    page = open_view("#view=steps&step=2", width=1280)
    assert page.seen("#rows .panel:first-child .jump") == ""


@pytest.mark.parametrize("width", [390, 1280])
def test_a_shadow_below_the_head_of_the_steps_shows_that_there_are_steps_above(open_view, width):
    page = open_view("#view=steps&step=2", width=width)
    box = "const box = document.querySelector('#steps .scroll'); box.style.maxHeight = '80px'; "
    shadow = "return getComputedStyle(box.querySelector('thead th'), '::after').backgroundImage"
    for top, shown in ((20, True), (0, False)):
        page.driver.execute_script(f"{box} box.scrollTop = {top}")
        until(lambda: "gradient" in page.driver.execute_script(box + shadow), shown)


def test_malicious_and_long_texts_are_shown_as_text(open_view, folders):
    page = open_view("#view=steps&step=0&order=row+ascending")
    rows = pq.read_table(folders[0] / "rollouts" / "step_00000000.parquet").to_pylist()
    page.driver.execute_script(
        "for (const e of document.querySelectorAll('.panel:first-child button.open')) e.click()"
    )
    opened = ".panel:first-child tr.detail:nth-child({}) .whole p"
    until(lambda: page.count(".panel:first-child tr.detail .whole") >= 24, True)  # also of empty texts
    assert page.texts(opened.format(4))[1] == pages.HOSTILE.replace("\u2028", r"\u2028")
    assert page.texts(opened.format(6))[1] == r"\u202eturned"
    assert page.texts(opened.format(8))[1] == "(empty)"
    assert page.texts(".panel:first-child dl.others")[0] == "<img src=x onerror=window.ran=1><i>0</i>"
    button = page.one(".panel:first-child tr.detail button.more")
    assert button.text == f"show all {len(LARGE):,} characters"
    button.click()
    until(lambda: page.texts(opened.format(2))[1] == LARGE == rows[0]["response"], True)
    assert page.count("main img, main script, main b b, .panel b, .panel i") == 0
    assert page.one("#title").text == f"first and {folders[1].name}"


def test_rows_are_filtered_and_the_url_has_the_filter(open_view, client):
    page = open_view("#view=steps&step=1")
    type_into(page, "text", "answer 7 of step 1")
    until(lambda: rows_shown(page), ["7"])
    assert "text=answer+7" in page.driver.current_url
    type_into(page, "text", "")
    until(lambda: len(rows_shown(page)), 9)
    page.choose("reason", "filter/zero_variance")
    until(lambda: rows_shown(page), ["3", "4", "5"])
    assert page.seen(".panel:first-child .pager output") == "1–3 of 3 rows, out of 9 in the step"
    page = open_view(page.driver.current_url.removeprefix(client.address))
    assert rows_shown(page) == ["3", "4", "5"]
    page.choose("order", "row descending")
    until(lambda: rows_shown(page), ["5", "4", "3"])
    type_into(page, "group", "nothing")
    until(lambda: page.texts(".panel .empty"), ["No row of this step matches."] * 2)
    page.all("#clear-group")[0].click()
    until(lambda: len(rows_shown(page)), 3)


def test_a_missing_step_is_named_with_the_nearest_one(open_view):
    page = open_view("#view=steps&step=999")
    assert page.seen("#no-step") == "There is no step 999: step 3 is the nearest."
    page.all("#previous")[0].click()
    until(lambda: page.seen("#rows-title"), "Rows of step 2")
    assert page.seen("#no-step") == ""


def test_a_control_of_the_rows_shows_its_whole_value_on_a_narrow_screen(open_view):
    page = open_view("#view=steps", width=390)
    wide = "const e = document.getElementById('order'); const [a, c] = [e.clientWidth, e.cloneNode(true)]; "
    wide += (
        "c.style.width = 'auto'; document.body.append(c); const b = c.clientWidth; c.remove(); return a - b"
    )
    assert page.driver.execute_script(wide) >= 0


def test_the_chart_shows_the_chosen_metric(open_view):
    page = open_view()
    until(lambda: page.seen("#rows-title"), "Rows of step 2")  # the last step that both runs have
    page = open_view("#view=steps&step=3")
    until(lambda: page.seen("#rows-title"), "Rows of step 3")
    until(lambda: page.texts("#steps .legend li")[0], "mean reward, first")
    page.choose("metric", "reward/all/max")
    until(lambda: page.texts("#steps .legend li")[0], "greatest reward, first")
    label = page.one("#steps svg.rewards").get_attribute("aria-label")
    assert label.startswith("Greatest reward by step: first from 2")
    assert page.seen("#tells") == "Of all rollouts with a reward. reward/all/max"
    page.choose("metric", "frac_reward_zero_std")
    until(lambda: page.texts("#steps .legend li")[0], "groups with equal rewards (%), first")
    label = page.one("#steps svg.rewards").get_attribute("aria-label")
    assert "first from 33.33 at step 0 to 33.33 at step 3" in label  # one group of three


def test_an_axis_has_a_single_label_if_the_reward_never_changes(driver, tmp_path):
    reward = torch.zeros(9)
    with ReportFolder(tmp_path / "run", every=None) as folder:
        for step in range(3):
            batch = step_batch(step).set(("next", "reward"), reward)
            folder.add(make_report(Pipeline(stages()).run(batch), step=step, batch=batch))
    with served(tmp_path / "run") as client:
        page = Page(driver)
        driver.get(client.address)
        until(lambda: page.texts("#steps svg.rewards text.end"), ["0"])


def test_open_steps_stay_open_if_the_width_changes(open_view):
    page = open_view(f"#view=prompt&prompt={key_of('What is 1 + 1?')}")
    until(lambda: page.count("details.one-step"), 4)
    page.open("details.one-step[data-step='2']")
    until(lambda: page.count("details.one-step[open] tr.line"), 6)
    size = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    until(lambda: int(page.values("#prompt svg.rewards", "width")[0]) < 700, True)
    assert page.count("details.one-step[open] tr.line") == 6


def test_a_row_opens_its_prompt_in_all_steps_of_both_runs(open_view):
    page = open_view("#view=steps&step=2")
    button = page.all(".panel:first-child tr.line[data-row='0'] button.open")[0]
    button.send_keys(ENTER)
    until(lambda: button.get_attribute("aria-expanded"), "true")
    link = page.one(".panel:first-child tr.detail:not([hidden]) .links a:last-child")
    assert link.text == "this prompt in all steps"
    link.send_keys(ENTER)
    until(lambda: page.values("details.one-step", "data-step"), ["0", "1", "2", "3"])
    assert page.seen("#prompt .text") == "What is 1 + 1?"
    means = page.texts("details.one-step[data-step='3'] summary span")
    assert means[1:] == [
        "first: mean reward 0.5333, advantages −0.2333 to 0.4667, 3 rollouts in 1 group",
        f"{means[2].split(':')[0]}: not drawn",
    ]
    page.open("details.one-step[data-step='2']")
    until(lambda: page.count("details.one-step[open] tr.line"), 6)
    assert page.count("#prompt svg.rewards polyline") == 2
    assert page.texts("#prompt svg.rewards text.title") == ["step", "reward"]
    assert page.count("#prompt svg.rewards circle.dot") == 3 * (4 + 3)  # rollouts times steps of both runs
    fills = {dot.value_of_css_property("fill") for dot in page.all("#prompt svg.rewards circle.dot")}
    assert len(fills) > 2  # dots are coloured by their advantages


def test_prompts_are_listed_by_reward_and_can_be_searched(open_view):
    page = open_view("#view=prompts")
    until(lambda: page.count("table.prompts tbody tr"), 4)
    assert page.texts("table.prompts tbody th a")[0] == "Żółw?"
    type_into(page, "search", "1 · 7")
    until(lambda: page.texts("table.prompts tbody th a"), ["What is 1 · 7?"])
    page.all("table.prompts tbody th a")[0].send_keys(ENTER)
    until(lambda: page.values("details.one-step", "data-step"), ["1", "3"])


@pytest.mark.parametrize(
    "address", ["#view=steps&step=2", "#view=prompts", f"#view=prompt&prompt={key_of('What is 1 + 1?')}"]
)
def test_the_viewer_is_readable_on_narrow_and_wide_screens_in_light_and_dark(open_view, address):
    for width in (390, 1280):
        page = open_view(address, width=width)
        page.driver.execute_script("document.querySelector('button.open, details.one-step summary')?.click()")
        settle(page)
        assert page.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), width
        for scheme in ("light", "dark"):
            page.show_as(scheme, "reduce")
            low = [pair for pair in page.driver.execute_script(CONTRAST) if pair[0] < 4.5]
            assert not low, (width, scheme)
        tops = page.driver.execute_script(TOPS)
        assert width == 1280 or "steps" not in address or len({*tops}) < len(tops), (
            "each control has a line of its own"
        )
        assert page.driver.execute_script(UNNAMED) == 0
        assert width == 390 or page.driver.execute_script(OUT_OF_LINE) == []


def scrolled(page):
    """The labels of elements that must be scrolled sideways."""
    script = "return [...document.querySelectorAll('.across, .scroll')].filter((e) => e.checkVisibility() "
    return page.driver.execute_script(script + "&& e.scrollWidth > e.clientWidth).map((e) => e.ariaLabel)")


@pytest.mark.parametrize(("width", "others"), [(390, 0), (390, 1), (1280, 1)])
def test_a_run_of_long_prompts_names_and_errors_needs_no_scrolling_sideways(driver, tmp_path, width, others):
    folder = ReportFolder(tmp_path / ("run_" * 20), every=None)
    for step, text in ((10**6, "Think about it. " * 40), (10**6 + 1, "x" * 400)):
        folder.add(report_of_step(step, response_text=[text] * 9, prompt_text=[text] * 9))
    folder.fail(10**6 + 2, f"stage 'gate': group {'0a2543b4' * 8} has 7 of 8. " * 3)
    folder.close()
    page = Page(driver)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    with served(folder.folder, *[write_run(tmp_path / ("other_" * 12))] * others) as client:
        for step in (10**6, 10**6 + 1):
            driver.get("about:blank")
            driver.get(f"{client.address}#view=steps&step={step}&order=row+ascending")
            until(lambda: page.count("td.response") > 0, True)
            assert scrolled(page) == []
            seen = "const e = document.querySelector('td.response').getBoundingClientRect(); "
            left, right = driver.execute_script(seen + "return [e.left, e.right]")
            assert 0 <= left < right - 150 < width


def test_a_refused_step_says_why_and_shows_its_rows(driver, tmp_path):
    folder = ReportFolder(tmp_path / "run", every=None)
    folder.add(report_of_step(0))
    folder.fail(1, "collapse: NaN", report_of_step(1))
    folder.close()
    with served(tmp_path / "run") as client:
        page = Page(driver)
        page.driver.get(client.address)
        until(lambda: page.seen("#rows-title"), "Rows of step 1")
        until(lambda: page.count("#rows tr.line"), 9)
        assert page.seen("tr[data-step='1'] td.failed") == "failed: collapse: NaN"
        assert ": 1 steps (1 more failed)" in page.seen("#summary")
