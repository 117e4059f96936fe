"""The first screen of the page has the verdict, and a live page follows its run."""

from __future__ import annotations

import time

import pages
import pytest
from browser import CONTRAST

from headrace.pipeline.tools.report import symptoms, write_page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

STEPS = list(range(60))
CURVES = {
    "reward/all/mean": [0.07 + 0.89 * step / 59 for step in STEPS],
    "groups/informative": [1 - step / 80 for step in STEPS],
    "response_length/mean": [400.0 + step for step in STEPS],
    "rollouts/truncated": [0.3 for _ in STEPS],
    "correction/ess_token": [0.9 - step / 100 for step in STEPS],
    "staleness/mean": [None if step % 7 == 4 else 1.5 for step in STEPS],
}
FIRED = ("rollouts-truncated", "advantage-all-zero", "off-policy", "stale", "gradient-spikes", "stalled")


def long_run(**run):
    """Sixty steps with every tile and six advisories, on a page of five steps."""
    steps = []
    for step, at in zip(pages.fan_out_run(5)["steps"], (0, 15, 30, 45, 59), strict=True):
        numbers = {name: values[at] for name, values in CURVES.items() if values[at] is not None}
        since = "at 44 of 60 steps, first at 3 and last at 59, for which there is a word or two to say."
        said = [
            {"name": name, "text": f"Step {at} has `{name}`, and it has been so {since}"} for name in FIRED
        ]
        verdict = f"The reward rose to step {at}."
        steps.append(step | {"step": at, "numbers": numbers, "verdict": verdict, "advisories": said})
    known = [
        {key: value for key, value in symptoms()[name]._asdict().items() if key != "needs"}
        | {"remedies": [each._asdict() for each in symptoms()[name].remedies]}
        for name in FIRED
    ]
    made = {"curve_steps": STEPS, "curves": CURVES, "symptoms": known}
    return pages.run_of(*steps, title="sixty steps", **made) | ({"run": about(**run)} if run else {})


def about(**changes):
    facts = {
        "began": "2026-11-22T04:19:11+00:00",
        "written": now(),
        "live": None,
        "restarts": [],
        "overrides": ["pipeline=rloo"],
    }
    return facts | {"versions": {"headrace": "0.5", "torch": "2.9"}, "config": "a: <i>1</i>\n"} | changes


def now(ago=0.0):
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - ago))


def test_the_first_screen_has_the_verdict(look):
    page = look(long_run(live=None), width=1280)
    bottom = "return Math.max(...[...document.querySelectorAll('#verdict, #answer .tile, #advisories > li')]"
    assert page.driver.execute_script(f"{bottom}.map((e) => e.getBoundingClientRect().bottom))") <= 800
    assert page.seen("#verdict") == "The reward rose to step 59."
    assert page.texts("#answer .big") == [
        "0.96 over all rollouts",
        "26.3 % rewards differ",
        "459 tokens per rollout",
        "30 % of all rollouts",
        "31 % of the tokens",
        "1.5 policy versions behind",
    ]
    assert page.count("#answer svg .curve") == 6
    assert page.texts("#answer .range")[0] == "curve: steps 0 to 59"
    assert not page.one("#recipe").is_displayed()
    page.choose("number", "0")
    assert page.texts("#answer .big")[0] == "0.07 over all rollouts"
    assert page.seen("#verdict") == "The reward rose to step 0."
    assert page.texts("#advisories summary")[0].startswith("Step 0 has")


REASONS = ["step 3: one.", "step 4: two."]


def test_failed_steps_are_above_the_verdict_and_notes_below_the_advisories(look):
    failed = "2 of 60 steps failed, and are in no number here: step 3, step 4."
    page = look(
        long_run(live=None) | {"failed": {"said": failed, "reasons": REASONS}, "notices": ["A note."]}
    )
    assert page.seen("#notices summary") == f"{failed} why"
    assert page.texts("#notices details p") == REASONS
    assert page.texts("#notes li") == ["A note."]
    tops = "['notices', 'verdict', 'advisories', 'notes'].map((id) => document.getElementById(id).offsetTop)"
    assert page.driver.execute_script(f"const y = {tops}; return y.every((at, i) => !i || at > y[i - 1])")


def test_a_page_of_two_recipes_shows_first_how_they_differ(look):
    run = long_run(live=None) | {"versus": ["grpo", "rloo"]}
    run["curves"] = CURVES | {"versus/gradient_moved": [step / 100 for step in STEPS]}
    run["curves"] |= {f"second/{name}": values for name, values in CURVES.items()}
    page = look(run | {"notices": ["A note."], "difference": "They differ."})
    assert (page.texts("#notices li"), page.texts("#notes li")) == (["They differ."], ["A note."])
    assert page.texts("#answer .tile h2")[0].startswith("gradient that moves")
    assert sorted(page.texts("#curves .range code")) == sorted({*CURVES, "versus/gradient_moved"})
    assert page.texts("#curves .name")[0] == "gradient that moves"
    assert page.seen("#curves [data-legend=second]") == "under rloo"


def test_an_advisory_opens_its_symptom(look):
    page = look(long_run(live=None))
    first = "#symptom-rollouts-truncated"
    assert "pipeline=dapo" not in page.seen(first)
    page.one(f"{first} summary").click()
    assert "pipeline=dapo" in page.seen(first)
    assert symptoms()["rollouts-truncated"].title in page.seen(first)


def test_the_optimiser_panel_shows_only_measured_numbers(look):
    """A run without numbers of the optimiser has no panel. A missing number has no tile."""
    run = long_run(live=None)
    assert look(run).seen("#optimiser") == ""
    measured = {"optimiser/lr": 0.0, "optimiser/grad_norm": 0.25}
    measured |= {"seconds/collect": 3.0, "seconds/optimise": 1.0}
    for step in run["steps"]:
        step["numbers"] |= measured
    run["curves"] = run["curves"] | {name: [value] * len(STEPS) for name, value in measured.items()}
    page = look(run)
    tiles = ["0 greatest of the parameter groups", "0.25 before clipping"]
    assert page.texts("#optimiser .tile .big") == tiles
    assert page.texts("#optimiser [data-legend]") == ["collect 3 s (75 %)", "optimise 1 s (25 %)"]
    assert page.seen("#optimiser-title") == "The optimiser step 59"


def test_each_number_names_its_steps(look):
    run = long_run(live=None) | {"recorded": 600, "totals": {"rows/in": 16000.0, "rows/trained": 11370.0}}
    page = look(run)
    assert page.texts("#answer h2 .of-step") == ["step 59"] * 6
    assert page.texts("#answer .range") == ["curve: 60 of 600 steps, steps 0 to 59"] * 6
    assert page.seen("#totals") == "All 600 steps, 0 to 59: 11,370 of 16,000 rows (71 %) were in the loss."
    assert page.seen("#of") == "5 of 600 steps are on this page"
    assert look(run, width=390).seen("#of") == "5 of 600 steps are on this page"
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390
    page.choose("number", "31")
    assert page.seen("#elsewhere").startswith("Step 31 is not on this page: 5 of 600 steps are on this page.")
    page.choose("number", "30")
    assert page.seen("#elsewhere") == ""
    assert page.texts("main section:not([hidden]) h2 .of-step")[0] == "step 30"
    assert "71 %" in page.seen("#totals")


def test_an_unchecked_symptom_names_its_missing_data(look):
    run = long_run(live=None)
    run["steps"][-1]["unchecked"] = ["The rollouts are stale: needs the policy version, in `policy_version`"]
    page = look(run)
    assert page.seen("#unchecked > summary") == "Not checked, for lack of data: 1 symptom"
    page.one("#unchecked > summary").click()
    assert page.texts("#unchecked code") == ["policy_version"]
    page.choose("number", "30")
    assert page.seen("#unchecked") == ""


def test_the_lengths_are_of_all_rollouts_even_if_only_some_are_drawn(look):
    run = long_run(live=None)
    run["steps"][-1]["numbers"]["response_length/max"] = 9000.0
    run["steps"][-1]["shown"] = {"groups": 7, "of": 900}
    page = look(run)
    assert page.texts("#lengths [data-legend=mean]") == ["mean 459 tokens"]
    assert page.texts("#lengths [data-legend=most]") == ["longest 9,000 tokens"]
    assert page.count("#lengths line.most") == page.count("#lengths .legend line.most")  # off the axis


def test_the_first_open_group_is_in_the_loss(look):
    """Group 1 has the widest spread, but comes last because it is not in the loss."""
    left = pages.rollouts_of(1, [0.0, 1.0], reason="gate/incomplete")
    kept = pages.rollouts_of(2, [0.4, 0.6])
    pages.advantages(kept)
    rows = left + kept
    made = pages.step_of(rows, size=2, actions={"gate/incomplete": "dropped"})
    page = look(pages.run_of(made))
    assert page.values("details.group", "data-group") == ["2", "1"]
    assert page.values("details.group[open]", "data-group") == ["2"]
    assert page.count("#strip [data-legend=size]") == 0
    assert page.seen("#compare") == ""  # each rollout is one row, so nothing could differ


def wait_for(condition):
    for _ in range(80):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")


def test_a_live_page_updates_until_its_run_ends(look, tmp_path):
    run = long_run(live=1.0)
    some = run | {"steps": run["steps"][:3]}
    page = look(some)
    assert page.seen("#live").startswith("The run goes on: last written 20")
    page.choose("filter", "trained")
    page.click("#symptom-stale summary")
    page.driver.execute_script("window.scrollTo(0, 500)")
    write_page(run, tmp_path / "page.html")
    wait_for(lambda: page.texts("#verdict") == ["The reward rose to step 59."])
    assert page.driver.execute_script("return document.getElementById('filter').value") == "trained"
    assert page.driver.execute_script("return window.scrollY") == 500
    assert page.count("#symptom-stale[open]")
    page.choose("number", "15")
    write_page(run | {"run": about(live=None)}, tmp_path / "page.html")
    wait_for(lambda: page.seen("#live") == "")
    assert page.seen("#verdict") == "The reward rose to step 15."  # the chosen step
    page.driver.execute_script("window.same = true")
    time.sleep(1.5)
    assert page.driver.execute_script("return window.same")


def test_a_live_page_does_not_interrupt_typing_or_selection(look, tmp_path):
    run = long_run(live=1.0)
    page = look(run | {"steps": run["steps"][:3]})
    page.one("#search").send_keys("gro")
    write_page(run, tmp_path / "page.html")
    wait_for(lambda: page.texts("#verdict") == ["The reward rose to step 59."])
    page.driver.switch_to.active_element.send_keys("up")
    script = "return document.getElementById('search').value"
    assert page.driver.execute_script(script) == "group"
    page.driver.execute_script("getSelection().selectAllChildren(document.getElementById('summary'))")
    page.driver.execute_script("window.same = true")
    time.sleep(2.5)
    assert page.driver.execute_script("return window.same")
    page.driver.execute_script("getSelection().removeAllRanges()")
    wait_for(lambda: not page.driver.execute_script("return window.same"))


def test_a_live_page_keeps_the_chosen_group_and_can_pause(look, tmp_path):
    run = long_run(live=1.0)
    some = run | {"steps": run["steps"][:3]}
    page = look(some)
    page.click("details.group[data-group='4'] > summary")
    page.driver.execute_script("window.same = true")
    write_page(run, tmp_path / "page.html")
    wait_for(lambda: not page.driver.execute_script("return window.same"))
    assert page.seen("#verdict") == "The reward rose to step 30."
    page.click("#pause")
    page.driver.execute_script("window.same = true")
    time.sleep(2.5)
    assert page.driver.execute_script("return window.same")
    page.click("#pause")
    wait_for(lambda: not page.driver.execute_script("return window.same"))


def test_a_page_of_a_killed_run_shows_when_it_was_written(look):
    written = now(ago=3600.0)
    page = look(long_run(live=1.0, written=written))
    assert page.seen("#live") == f"The run is slow, or was stopped: last written {written}."
    page.driver.execute_script("window.same = true")
    time.sleep(1.5)
    assert page.driver.execute_script("return window.same")  # the page reloads after a tenth of its age


def test_the_footer_has_the_origin_of_the_run_and_text_has_a_contrast_of_4_5(look):
    page = look(long_run(live=1.0, written=now(ago=3600.0)))
    assert page.seen("#run") == "This run: began 2026-11-22T04:19:11+00:00"
    for fold in (*page.all("#advisories summary"), page.one("#run > summary")):
        fold.click()
    for words in ("headrace pipeline=rloo", "headrace 0.5, torch 2.9", "a: <i>1</i>"):
        assert words in page.seen("#run")
    for scheme in ("light", "dark"):
        page.show_as(scheme)
        assert [entry for entry in page.driver.execute_script(CONTRAST) if entry[0] < 4.5] == []
