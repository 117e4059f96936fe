"""In a browser, the page draws its panels, sorts groups, and opens them."""

from __future__ import annotations

import re

import pages
import pytest
from browser import CONTRAST
from busy import busy_batch, stages

from headrace.pipeline import Pipeline, make_report, page_data
from headrace.transforms import LossWeight, ShuffleSplit

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PANELS = ("funnel", "strip", "compare", "tree", "tape", "lengths", "lag", "numbers")


@pytest.mark.parametrize("name", [*pages.RUNS, "hostile"])
def test_every_panel_with_content_is_shown_and_the_console_is_empty(look, name):
    page = look(pages.hostile_run() if name == "hostile" else pages.RUNS[name]())
    for scheme in ("light", "dark"):
        page.show_as(scheme)
        for panel in PANELS:
            assert bool(page.seen(f"#{panel} .body")) == bool(page.seen(f"#{panel}")), panel
        assert page.seen("#summary").startswith("Step ")


@pytest.mark.parametrize("name", ["fan-out", "incomplete", "filtered"])
def test_the_strip_has_a_dot_per_rollout_and_a_legend_of_every_mark(look, name):
    run = pages.RUNS[name]()
    rows = run["steps"][-1]["rows"]
    page = look(run)
    dots = page.values("#strip .scroll .dot", "data-rollout")
    assert sorted(map(int, " ".join(dots).split())) == sorted(set(rows["rollout"]))
    several = [f"{len(ids)} ×" for ids in map(str.split, dots) if len(ids) > 1]
    assert [text for text in page.texts("#strip .scroll .times") if text] == several
    assert sorted(page.values("#strip .line", "data-group")) == [str(g) for g in sorted(set(rows["group"]))]
    kinds = set(page.values("#strip [data-legend]", "data-legend"))
    drawn = {"scaled": "advantage", "flat": "flat", "none": "none", "gone": "gone"}
    for mark, entry in drawn.items():
        assert bool(page.all(f"#strip .scroll .dot.{mark}")) == (entry in kinds), mark
    assert bool(page.all("#strip .scroll rect.incomplete")) == ("incomplete" in kinds)
    actions = {word for mark in page.values("#funnel table .left", "class") for word in mark.split()} - {
        "left"
    }
    assert actions == set(page.values("#funnel [data-legend]", "data-legend"))


def test_the_funnel_shows_which_rows_left_and_why(look):
    page = look(pages.incomplete_run())
    said = page.one("#funnel").text
    for words in ("incomplete, dropped", "failed, dropped", "truncated, excluded", "remainder, carried"):
        assert words in said
    # Group 5 left for two reasons, and is counted under the reason of its first row.
    gone = page.texts("#funnel tr.out:nth-child(3) td .number")
    assert gone == ["−4", "−4", "−1", "parts of 1", "−393"]
    assert page.texts("#funnel tr.out .parts .unit") == [" group", " rollout", " group", " group"]
    assert not re.search("without a minus", said)
    assert page.texts("#funnel tr.stage th") == ["collected", "gate", "filter", "split"]
    assert page.seen("#funnel .idle-stages") == "collapse and advantage took nothing out."
    assert page.texts("#funnel tr.stage td[data-unit=rows] .number") == ["20", "15", "14", "13"]


def test_groups_are_sorted_in_the_strip_and_in_the_tree(look):
    page = look(pages.incomplete_run())
    for order, groups in (
        ("id", "12458"),
        ("mean", "85214"),  # 0.125, 0.25, 1/3, 0.5, 0.75
        ("std", "14825"),  # 0.5, 0.433, 0.217; then 0.471 without a rollout in the loss, and 0
        ("lag", "25814"),  # 2, 2, 2, 1, 1
    ):
        page.choose("sort", order)
        assert page.values("#strip .line", "data-group") == [*groups]
        assert page.values("#tree details.group", "data-group") == [*groups]


LONG = "What is the sum of all numbers from one to ninety-nine, without the odd ones?"


@pytest.mark.parametrize(
    ("group", "label", "strip", "tree"),
    [
        (7, None, "group 7", "group 7"),
        (7, "2 + 2?", "2 + 2? · group 7", "2 + 2? | group 7 · 4 of 4"),
        ("2 + 2?", "2 + 2?", "2 + 2?", "2 + 2? | 4 of 4"),  # the id is the prompt
        ("2 + 2? #495213163c6d03ba", "2 + 2?", "2 + 2?", "2 + 2? | 4 of 4"),  # the prompt and a hash
        ("2 + 2?", None, "2 + 2?", "2 + 2? | 4 of 4"),
        ("math/7", "2 + 2?", "2 + 2? · group math/7", "2 + 2? | group math/7 · 4 of 4"),
        (7, LONG, "What is the sum of al… · group 7", f"{LONG} | group 7 · 4 of 4"),
    ],
)
def test_a_group_is_named_by_its_prompt_and_its_id_once_each(look, group, label, strip, tree):
    rows = pages.rollouts_of(0, [0, 0, 1, 1])
    for row in rows:
        row["group"] = group
    page = look(pages.run_of(pages.step_of(rows, labels=lambda _: label)))
    assert page.texts("#strip text.name")[0] == strip
    name, facts = page.texts("#tree details.group > summary span")
    assert f"{name} | {facts}".startswith(tree)
    assert page.count("#tree p.prompt") == 0  # the whole prompt is in the line above


def test_without_ranks_and_micro_batches_there_is_no_panel_about_them(look):
    rows = pages.rollouts_of(0, [0, 0, 1, 1])
    for ranks, micro, shown in ((1, 1, False), (2, 1, True), (1, 2, True)):
        pages.split(rows, minibatches=2, ranks=ranks, micro=micro)
        assert bool(look(pages.run_of(pages.step_of(rows))).seen("#tape")) == shown


def test_text_ids_are_distinct_and_in_order(look):
    rows = pages.rollouts_of(0, [0, 1]) + pages.rollouts_of(1, [0, 1])
    for row, group in zip(rows, ["math_10/0", "math_10/0", 'math_9"]', 'math_9"]'], strict=True):
        row["group"], row["rollout"] = group, f"{group}_{row['rollout']}"
    page = look(pages.run_of(pages.step_of(rows, size=2)))
    assert page.values("#strip .line", "data-group") == ['math_9"]', "math_10/0"]
    assert page.count("#strip .scroll .dot") == 4


def test_the_page_counts_the_rows_that_counting_by_rows_would_change(look):
    """Group 3 has equal rewards and group 6 has no fan-out, so neither changes."""
    run = pages.fan_out_run(1)
    rows = run["steps"][0]["rows"]
    pairs = list(zip(rows["advantage"], rows["advantage_by_row"], rows["group"], strict=True))
    differ = [(a, b) for a, b, group in pairs if group not in (3, 6)]
    flips = sum(a * b < 0 for a, b in differ)
    page = look(run)
    assert f"would change {len(differ)} of {len(pairs)} rows" in page.one(".sentence").text
    assert f"flip the sign of {flips}." in page.one(".sentence").text
    drawn = [page.count(f".scatter .point.{kind}") for kind in ("same", "differs", "flips")]
    assert drawn == [len(pairs) - len(differ), len(differ) - flips, flips]
    assert page.all(".scatter .diagonal")


def test_an_opened_group_is_drawn_with_the_reason_of_each_row(look):
    run = pages.incomplete_run()
    page = look(run)
    assert page.texts("#tree article h3") == [f"rollout {rollout}" for rollout in (100, 101, 102, 103)]
    page.open("#tree details.group")
    assert not page.all("#tree table")
    page.open("#tree details.rows")
    rows = run["steps"][0]["rows"]
    cells = page.texts("#tree tbody td:nth-child(7)")
    assert len(cells) == len(rows["row"])
    expected = [f"no: {reason}" if reason else "yes" for reason in rows["reason"]]
    assert sorted(cells) == sorted(expected)
    assert "partly in the loss; not in the loss: filter/truncated" in page.one("#tree").text


def test_hidden_items_are_shown_by_a_button(look):
    """A button shows 25 more groups and focuses the first of them. Another shows all metrics beyond 12."""
    rows = [row for group in range(60) for row in pages.rollouts_of(group, [0, 1])]
    curves = {"curve_steps": [0, 1], "curves": {f"metric {k}": [0.0, 1.0] for k in range(20)}}
    page = look(pages.run_of(pages.step_of(rows, size=2), **curves))
    assert page.texts("button.more") == ["show 25 more of 35", "show all 20 metrics"]
    page.one("#tree button.more").click()
    assert page.count("#tree details.group") == 50
    focus = "return document.activeElement.parentElement.dataset.group"
    assert page.driver.execute_script(focus) == "25"
    assert page.count("#curves figure") == 12
    page.one("#curves button.more").click()
    assert page.count("#curves figure") == 20
    assert page.texts("button.more") == ["show 10 more of 10"]


def test_the_strip_is_usable_by_keyboard(look):
    page = look(pages.fan_out_run(1), motion="reduce")
    page.choose("sort", "id")
    assert page.values("#strip .scroll .dot[tabindex='0']", "data-rollout") == ["0"]
    page.driver.execute_script("document.querySelector('.dot[tabindex=\"0\"]').focus()")
    page.driver.switch_to.active_element.send_keys("\ue014\ue014")  # right, right
    assert page.driver.switch_to.active_element.get_attribute("data-rollout") == "2"
    assert page.one("#tip").text.startswith("group 0, rollout 2\nreward ")
    page.driver.switch_to.active_element.send_keys("\ue015")  # down
    assert page.driver.switch_to.active_element.get_attribute("data-group") == "1"
    page.driver.switch_to.active_element.send_keys("\ue00c")  # escape
    assert not page.one("#tip").is_displayed()
    page.driver.switch_to.active_element.send_keys("\ue007")  # enter
    assert page.values("#tree details[open]", "data-group") == ["0", "1"]


def test_every_drawing_and_control_has_a_name(look):
    page = look(pages.fan_out_run(1))
    script = """
    const part = (e) => e.parentElement.closest("[role=img], [aria-hidden]");  // the drawing has the name
    const named = (e) => e.getAttribute("aria-label") || e.getAttribute("aria-hidden") || e.textContent.trim()
      || (e.labels && e.labels.length) || part(e);
    return [...document.querySelectorAll("svg, button, input, select, summary, section, [role=img]")]
      .filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 120));
    """
    assert page.driver.execute_script(script) == []


def test_tapes_show_each_rank_and_its_tokens(look):
    run = pages.fan_out_run(1)
    rows = run["steps"][0]["rows"]
    totals: dict[tuple[int, int], int] = {}
    for minibatch, rank, tokens in zip(rows["minibatch"], rows["rank"], rows["tokens"], strict=True):
        if minibatch is not None:
            totals[minibatch, rank] = totals.get((minibatch, rank), 0) + tokens
    page = look(run)
    assert page.texts("#tape .rank .size") == [f"{totals[key]:,} tokens" for key in sorted(totals)]
    first = [totals[0, 0], totals[0, 1]]
    ratio = max(first) / (sum(first) / 2)
    assert f"max / mean: {ratio:.2f} over 2 ranks" in page.texts("#tape h3")[0]
    assert page.count("#tape .piece") == 12


def test_the_step_is_chosen_and_marked_on_the_curves(look):
    page = look(pages.fan_out_run())
    assert page.one("#number").get_attribute("value") == "40"
    assert not page.one("#next").is_enabled()
    page.one("#previous").click()
    assert page.one("#summary").text.startswith("Step 30:")
    page.choose("number", "10")
    assert page.one("#summary").text.startswith("Step 10:")
    (first,) = page.texts("#curves figure:first-child")
    said = "Of all rollouts with a reward. It rises if the policy learns."
    # 1 − 0.9^11, from 1 − 0.9 to 1 − 0.9^41
    assert first == "".join(["mean reward", "0.6862", said, "0.1 to 0.9867", "reward/all/mean"])
    assert page.count("#curves .multiples .now") == 4  # all but the curve without a number
    assert "no number at any step" in page.one("#curves").text


def test_a_run_without_steps_is_reported_as_such(look):
    page = look(pages.run_of())
    assert page.one("#summary").text == "No step was recorded."
    assert not page.one("main").is_displayed()


def test_a_page_of_certificates_shows_only_them(look):
    def judged(ratio, **numbers):
        return {"ratio": ratio, "relative_bias": 0.099, "cosine": 0.9952, "variance": 0.0733} | numbers

    where = {"task": "stop_or_continue", "group_size": 4, "outcomes": 256, "refused": ""}
    nothing = dict.fromkeys(("relative_bias", "cosine", "variance", "scale")) | {"ratio": []}
    held = where | {"recipe": "grpo", "advantage": judged([1.0225, -0.5], scale=0.98), "loss": nothing}
    lost = where | {"recipe": "<b>gigpo", "refused": "needs <i>'state_id'", "outcomes": 0}
    lost |= {"advantage": nothing, "loss": nothing}
    page = look(pages.run_of() | {"certificates": [held, lost]})
    assert page.one("#certificates h3").text == "stop_or_continue, groups of 4, 256 outcomes"
    cells = [cell.text for cell in page.all("#certificates tbody tr:first-child td")]
    assert cells[:6] == ["grpo", "1.0225 −0.5000", "9.9 %", "0.9952", "0.0733", "0.98"]
    assert cells[6:] == ["grpo", "", "–", "–", "–", "–"]
    assert "without <b>gigpo: needs <i>'state_id'" in page.one("#certificates").text
    assert [
        section.get_attribute("id") for section in page.all("main section") if section.is_displayed()
    ] == ["certificates"]
    assert not look(pages.incomplete_run()).one("#certificates").is_displayed()


@pytest.mark.parametrize("rewards", [[1e9, 1e9 * (1 + 1e-9)], [-0.0, 0.0], [-1e300, 1e300]])
def test_rewards_of_any_size_are_drawn(look, rewards):
    rows = pages.rollouts_of(0, rewards)
    for row in rows:
        row["advantage"] = row["advantage_by_row"] = row["reward"]
    page = look(pages.run_of(pages.step_of(rows, size=2)))
    assert all(0 < float(x) < 1200 for x in page.values("#strip .scroll .dot", "cx"))
    assert 1 <= page.count("#strip .grid") < 20
    assert "−0" not in page.texts("#strip .axis text")


def test_the_page_of_an_empty_batch_says_so(look):
    page = look(pages.empty_run())
    for panel in ("funnel", "strip", "tree"):
        assert re.search("no rows|no groups", page.one(f"#{panel} .empty").text, re.I), panel


def test_a_batch_without_kept_rows_is_reported_as_such(look):
    page = look(pages.filtered_run())
    assert "0 of 12 rows (0 %) are in the loss" in page.one("#summary").text
    assert "nothing trains at this step" in page.one("#funnel .empty").text
    assert [page.seen(f"#{panel}") for panel in ("compare", "tape", "lag")] == [""] * 3  # nothing to show
    page.choose("filter", "trained")
    assert "No rollout of this step is in the loss" in page.one("#strip .empty").text


def test_a_malicious_run_is_shown_as_text_and_runs_nothing(look):
    page = look(pages.hostile_run())
    page.open("details.group")
    page.open("details.rows")
    page.driver.execute_script("document.querySelector('.dot').focus()")
    page.driver.execute_script("for (const e of document.querySelectorAll('details')) e.open = true")
    assert page.driver.execute_script("return window.ran") is None
    assert not page.all("img")
    assert page.count("script") == 2
    assert page.texts("h1") == [pages.HOSTILE]
    assert page.texts("summary .prompt") == [pages.HOSTILE.replace("\u2028", " ")]
    assert f"no: gate/{pages.HOSTILE}" in page.texts("#tree td")
    assert pages.HOSTILE.replace("_", " ") in page.texts("#funnel .why")
    assert pages.HOSTILE in page.texts("#curves .name")


@pytest.mark.parametrize("name", ["fan-out", "incomplete"])
def test_all_text_has_a_contrast_of_at_least_4_5(look, name):
    page = look(pages.RUNS[name]())
    page.open("details.group")
    page.driver.execute_script("const d = document.querySelector('.dot'); if (d) d.focus()")
    for scheme in ("light", "dark"):
        page.show_as(scheme)
        found = page.driver.execute_script(CONTRAST)
        assert len(found) > 20
        assert [entry for entry in found if entry[0] < 4.5] == []


CUT_OFF = """
// Find texts that are clipped, and texts of one drawing that cover one another.
const found = [];
// The bounding box of a nested drawing is that of its contents, and not the box that clips them.
const place = (e) => {
  const box = e.getBoundingClientRect(), outer = e.ownerSVGElement;
  if (!(e instanceof SVGSVGElement) || !outer) return box;
  const at = outer.getBoundingClientRect();
  return new DOMRect(
    at.left + e.x.baseVal.value, at.top + e.y.baseVal.value, e.width.baseVal.value, e.height.baseVal.value);
};
for (const panel of document.querySelectorAll("main section, header"))
  if (panel.scrollWidth > panel.clientWidth + 1) found.push(["wide", panel.id, panel.scrollWidth]);
const boxes = new Map();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, at = node.parentElement;
  if (!node.textContent.trim() || !at.checkVisibility()) continue;
  if (at.closest("script, style, #tip, option, summary .prompt")) continue;  // a prompt has an ellipsis
  const range = document.createRange();
  range.selectNodeContents(node);
  const box = range.getBoundingClientRect();
  if (!box.width) continue;
  const text = node.textContent.slice(0, 40);
  for (let e = at; e !== document.body; e = e.parentElement) {
    const style = getComputedStyle(e), size = place(e);
    const clips = e instanceof SVGSVGElement ? style.overflow !== "visible" : style.overflowX === "hidden";
    if (style.overflowX === "auto" && !(e instanceof SVGElement)) break;  // scrolls by itself
    if (clips && (box.left < size.left - 1 || box.right > size.right + 1)) found.push(["cut", text]);
    if (clips && (box.top < size.top - 2 || box.bottom > size.bottom + 2)) found.push(["cut", text]);
  }
  const svg = at.ownerSVGElement;
  if (svg && !at.closest(".piece")) {
    for (const [other, word] of boxes.get(svg) || []) {
      const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
      if (across > 1 && down > 3) found.push(["over", text, word]);
    }
    boxes.set(svg, [...(boxes.get(svg) || []), [box, text]]);
  }
}
return found;
"""


def full_run():
    """A run of two recipes with curves, and long ids, prompts, reasons, numbers and responses."""
    rows = pages.rollouts_of(0, [0.123456, 1, 0.5, 0.5], [1, 2, 1, 9]) + pages.rollouts_of(1, [1.0, 2.0])
    for k, row in enumerate(rows):
        row |= {"group": 2**61 + row["group"], "rollout": 2**61 + row["rollout"], "tokens": 12_345 + 997 * k}
        row |= {"staleness": k % 9, "share": 1 / (k + 2), "other_share": 0.05 * k, "status": "truncated"}
    pages.advantages(rows)
    reason = "filter/the_reward_of_the_judge_is_below_the_least_that_was_asked_for"
    rows[2]["reason"] = rows[5]["reason"] = reason
    pages.split(rows)
    words = "Write 314159 backwards, then check the result. " * 3
    made = pages.step_of(rows, step=1_234_567, actions={reason: "excluded"}, labels=lambda _: words)
    made["numbers"] |= {"out/" + reason: 2.0, "time/filter": 0.0123456, "frac_reward_zero_std": 0.123456}
    curves = {"out/" + reason: [1.0, 2.0], "time/advantage": [0.001, 12.0], "reward": [-1.5, 0.25]}
    more = {"curve_steps": [0, 1_234_567], "curves": curves, "versus": ["grpo", "as/prime_rl"]}
    return pages.run_of(pages.step_of(rows[:2]), made, title="a run of everything", **more)


@pytest.mark.parametrize(
    ("name", "width"),
    [*(("full", width) for width in (360, 800, 1280)), ("plain", 360), ("fan-out", 360), ("incomplete", 360)],
)
def test_no_text_is_clipped_or_covered(look, name, width):
    plain = pages.step_of(pages.rollouts_of(1250, [0.0, 1.0, None]), labels=lambda _: None)
    runs = {"full": full_run, "plain": lambda: pages.run_of(plain)}
    page = look((pages.RUNS | runs)[name](), width=width)
    page.open("#tree details.group")
    page.open("#tree details.rollout")
    page.driver.execute_script("for (const e of document.querySelectorAll('details')) e.open = true")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert page.driver.execute_script(CUT_OFF) == []


def test_five_thousand_rows_are_drawn(look):
    page = look(pages.large_run(5000))
    dots = page.values("#strip .scroll .dot", "data-rollout")
    assert len(" ".join(dots).split()) == 5000
    assert "all 1,234 groups" in page.one("#sampled").text
    assert "show 200 of them" in page.one("#sampled").text
    assert page.count("#tape .rank") == 32


def real_report(batch, step=0, **changes):
    """The report of a real pipeline over a real batch."""
    split = ShuffleSplit(minibatches=2, ranks=2, microbatches=2, balance="tokens", remainder="pad")
    pipeline = Pipeline(stages(split=split, weight=LossWeight(unit="rollout"), **changes))
    pipeline(batch)
    return make_report(pipeline, step=step)


def test_the_page_of_a_real_report_shows_its_rollouts_reasons_and_tapes(look, make_batch):
    report = real_report(busy_batch(make_batch))
    empty = Pipeline(stages())
    empty(busy_batch(make_batch)[:0])
    page = look(page_data([report, make_report(empty, step=1)], title="real"))
    assert page.one("#summary").text == "Step 1: no rows were collected."
    page.one("#previous").click()
    dots = page.values("#strip .scroll .dot", "data-rollout")
    assert sorted(map(int, " ".join(dots).split())) == sorted(set(report.columns["rollout_id"].tolist()))
    assert "incomplete" in page.one("#funnel").text
    assert "zero variance" in page.one("#funnel").text
    assert "rank 1" in page.one("#tape").text


def test_a_page_of_two_recipes_opens_at_the_step_with_the_largest_difference(look):
    steps = []
    for step, others in enumerate(([1.0, 1.0], [2.0, 3.0], [1.0, 4.0], [1.0, 1.0])):
        rows = pages.rollouts_of(0, [0.0]) + pages.rollouts_of(1, [1.0])
        for row, other in zip(rows, others, strict=True):
            row |= {"advantage": 1.0, "advantage_by_row": other}
        steps.append(pages.step_of(rows, size=1) | {"step": step})
    curves = {"curve_steps": [0, 1, 2, 3], "curves": {"reward": [0.0] * 4}}
    run = pages.run_of(*steps, **curves, versus=["grpo", "dr_grpo"])
    assert look(run).seen("#summary").startswith("Step 1 ")
    assert look(run, address="#step=3").seen("#summary").startswith("Step 3 ")


ROOM = """
const drawn = document.querySelector("#compare svg.scatter");
const right = (e) => e.getBoundingClientRect().right;
return right(drawn) - Math.max(...[...drawn.querySelectorAll("text")].map(right));
"""


def test_the_last_tick_of_the_scatter_has_room(look):
    rows = pages.rollouts_of(0, [1.0, 1.0])
    for row in rows:
        row |= {"advantage": 0.0, "advantage_by_row": 0.0}  # the axes go from −0.06 to 0.06
    page = look(pages.run_of(pages.step_of(rows, size=2), versus=["grpo", "dr_grpo"]))
    assert page.driver.execute_script(ROOM) >= 0


CROSSED = """
const all = (what) => [...document.querySelectorAll(`#strip .scroll ${what}`)];
const boxes = (what) => all(what).map((e) => e.getBoundingClientRect());
const bars = boxes("line.mean");
return boxes("text.times").filter((a) => a.width && bars.some((b) =>
  a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length;
"""


@pytest.mark.parametrize("width", [390, 1200])
def test_the_number_of_equal_rollouts_is_not_crossed_by_the_bar_of_the_baseline(look, width):
    groups = [pages.rollouts_of(at, [0.0] * (at + 1) + [1.0] * (7 - at)) for at in range(7)]
    groups.append(pages.rollouts_of(7, [0.0] * 7 + [0.9]))
    page = look(pages.run_of(pages.step_of([row for rows in groups for row in rows], size=8)), width=width)
    assert page.count("#strip .scroll line.mean") == 8
    assert page.driver.execute_script(CROSSED) == 0


def test_a_page_of_two_recipes_names_the_recipe_of_each_panel(look):
    """The shares of two rows are ½ and ½ under grpo, and ⅘ and ⅕ under dr_grpo. So 0.3 of them moves."""
    rows = pages.rollouts_of(0, [0.0]) + pages.rollouts_of(1, [1.0])
    rows[0] |= {"advantage": -1.0, "advantage_by_row": -2.0, "share": 0.5, "other_share": 0.8}
    rows[1] |= {"advantage": 1.0, "advantage_by_row": -0.5, "share": 0.5, "other_share": 0.2}
    curves = {"curve_steps": [0, 1], "curves": {"reward": [0.0, 1.0]}}
    made = pages.step_of(rows, size=1)
    made["numbers"] |= {"versus/gradient_moved": 0.3, "versus/gradient_cosine": 0.514496}
    page = look(pages.run_of(made, made | {"step": 1}, **curves, versus=["grpo", "dr_grpo"]))
    assert page.seen("#compare-title") == "grpo against dr_grpo"
    assert page.driver.execute_script("return document.querySelector('main > section').id") == "compare"
    panels = {*PANELS, "groups", "recipe"} - {"compare", "curves", "numbers", "strip", "tree"}
    panels = {panel for panel in panels if panel == "recipe" or page.seen(f"#{panel}")}
    titled = [page.seen(f"#{panel}-title") for panel in panels]
    assert all(title.endswith("under grpo") or title == "Recipe grpo" for title in titled)
    assert page.texts("#compare .sentence")[1].startswith("At this step 30.0 % of the gradient goes to other")
    assert page.texts("#compare .sentence")[1].endswith("the cosine of what rows weigh is 0.5145.")
    cells = [cell.replace("\u00a0", " ") for cell in page.texts("#compare .body > .across td")]
    assert cells[1::4] + cells[2::4] + cells[3::4] == [
        "50.0 %",
        "50.0 %",
        "80.0 %",
        "20.0 %",
        "+30.0",
        "−30.0",
    ]
    rows[0]["other_share"], rows[1]["other_share"] = 0.50004, 0.49996
    page = look(pages.run_of(pages.step_of(rows, size=1), versus=["grpo", "dr_grpo"]))
    assert page.texts("#compare .body > .across td") == []  # no line is "+0.0"
    assert "under grpo" not in look(pages.fan_out_run()).seen("main")
