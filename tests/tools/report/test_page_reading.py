"""A reader of the page opens groups, reads responses, searches, and follows links."""

from __future__ import annotations

import re

import pages
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]
RIGHT, SLASH = "\ue014", "/"


def opened(page) -> list[str]:
    return page.values("#tree details.group[open]", "data-group")


def found(page) -> list[str]:
    return page.values("#tree details.group", "data-group")


def search(page, text: str) -> None:
    script = "const e = document.getElementById('search'); e.value = arguments[0]; "
    page.driver.execute_script(script + "e.dispatchEvent(new Event('input'))", text)


def focus(page, selector: str) -> None:
    """Focus the last element of a selector after the page has moved to it, because scrolling hides a tip."""
    script = "const all = document.querySelectorAll(arguments[0]); all[all.length - 1].scrollIntoView(); "
    page.driver.execute_async_script(script + "setTimeout(arguments[1], 100)", selector)
    page.driver.execute_script(
        "[...document.querySelectorAll(arguments[0])].at(-1).focus({preventScroll: true})", selector
    )


def hash_of(page) -> str:
    return page.driver.execute_script("return location.hash")


def card(page, rollout: int):
    return page.one(f"#tree article[aria-label='rollout {rollout}']")


def test_the_page_opens_the_group_with_the_largest_spread(look):
    """Groups 2, 4, 3 and 1 have spreads of 0.5, 0.25, 0.1 and 0."""
    page = look(pages.reading_run())
    assert found(page) == page.values("#strip .line", "data-group") == ["2", "4", "3", "1"]
    assert opened(page) == ["2"]
    assert page.texts("#tree article h3") == ["rollout 200", "rollout 201"]
    assert "No idea." in card(page, 200).text
    facts = page.texts("#tree article .facts")[0]
    assert re.fullmatch(r"reward 0 · advantage −0\.7071 · \d+ tokens · completed", facts)
    assert hash_of(page) == "", "the address has only what a reader chose"
    page.choose("sort", "mean")
    assert opened(page) == found(page)[:1]


def test_groups_come_in_the_order_of_the_range_of_their_rewards(look):
    """The ranges of the groups 2, 4 and 3 are 1, 0.5 and 0.2. No row of group 1 is in the loss."""
    assert found(look(pages.reading_run())) == ["2", "4", "3", "1"]


def test_ground_truth_and_other_columns_are_beside_the_response(look):
    run = pages.reading_run()
    rows = run["steps"][-1]["rows"]
    beside = {"ground truth": "4", "acc": False, "<b>": 0.25, "none": None}
    rows["beside"][rows["rollout"].index(200)] = beside
    page = look(run)
    lines = "#tree article[aria-label='rollout 200'] dl.columns"
    assert page.texts(f"{lines} dt") == ["ground truth", "acc", "<b>", "none"]
    assert page.texts(f"{lines} dd") == ["4", "false", "0.25", "–"]
    assert not page.all("article[aria-label='rollout 201'] dl.columns")
    search(page, "0.25")
    assert found(page) == ["2"]


def test_a_prompt_shows_its_last_turn_and_the_others_on_request(look):
    page = look(pages.reading_run())
    assert page.texts("p.prompt") == ["What is 2 + 2?"]
    button = page.one("p.prompt + button")
    button.click()
    assert page.texts("p.prompt")[0].startswith("<|im_start|>system\nBe brief.")
    assert button.get_attribute("aria-expanded") == "true"
    button.click()
    assert page.texts("p.prompt") == ["What is 2 + 2?"]


def test_a_long_response_is_folded_and_a_cut_response_shows_how_much_is_missing(look):
    page = look(pages.reading_run())
    folded = page.one("p.text.folded")
    before = folded.size["height"]
    page.one("p.text.folded + button").click()
    assert page.one("article p.text + button").text == "show less"
    assert folded.size["height"] > before
    page.open("details.group")
    assert "It begins … 1,234 characters left out … and ends." in card(page, 101).text
    assert "not in the loss: filter/zero_variance" in card(page, 100).text


def test_tokens_are_coloured_by_the_number_in_their_tip(look):
    """A token is orange below zero and blue above. A masked token has no colour."""
    page = look(pages.reading_run(), address="#group=3", motion="reduce")
    tokens = "article[aria-label='rollout 300'] .token"
    assert page.texts(tokens) == ["low", " out", " <b>high"]
    colours = page.css(tokens, "backgroundColor")
    red, _, blue = (float(part) for part in re.findall(r"[\d.]+", colours[0])[:3])
    assert red > blue
    red, _, blue = (float(part) for part in re.findall(r"[\d.]+", colours[2])[:3])
    assert red < blue
    assert colours[1] == "rgba(0, 0, 0, 0)"
    focus(page, f"{tokens}:first-child")
    assert page.one("#tip").text == 'token 0: "low"\nadvantage −1\nimportance weight 0.5'
    page.driver.switch_to.active_element.send_keys(RIGHT + RIGHT)
    assert page.one("#tip").text.endswith("advantage 1\nimportance weight 2")


def test_tokens_without_texts_are_a_strip_of_cells(look):
    page = look(pages.reading_run(), address="#group=3", motion="reduce")
    cells = "article[aria-label='rollout 301'] .cells .token"
    assert page.texts(cells) == ["", "", ""]
    assert len({*page.css(cells, "backgroundColor")}) == 3
    assert page.texts("article .cells .gap") == [" … 70 tokens left out … "]
    focus(page, cells)
    assert page.one("#tip").text == "token 72\nadvantage 0.5"


def test_a_search_finds_groups_by_id_text_and_reason(look):
    page = look(pages.reading_run())
    for words, groups in (
        ("question 4", "4"),  # the prompt, in lower or upper case
        ("NO IDEA", "2"),  # a response
        ("is brief", ""),
        ("be brief", "2"),  # the whole prompt
        ("zero variance", "1"),  # a reason, in words or as stored
        ("filter/zero_variance", "1"),
        ("301", "3"),  # an id
        ("low out <b>high", "3"),  # a text of several tokens
        ("  ", "2431"),
    ):
        search(page, words)
        if not groups:
            assert page.texts("#tree .empty") == [f"No group has “{words}” in its ids, texts or reasons."]
        assert found(page) == page.values("#strip .line", "data-group") == [*groups]
        said = f"{len(groups)} of 4 groups {'matches' if len(groups) == 1 else 'match'}"
        assert page.one("#found").text == (said if words.strip() else "")
        assert opened(page) == [*groups][:1]


def test_a_search_is_typed_and_cleared_by_keyboard(look):
    page = look(pages.reading_run())
    page.one("body").send_keys(SLASH)
    page.driver.switch_to.active_element.send_keys("Question 4")
    assert found(page) == ["4"]
    assert hash_of(page) == "#step=20&search=Question+4"
    for _ in range(10):
        page.driver.switch_to.active_element.send_keys("\ue003")  # backspace
    assert found(page) == ["2", "4", "3", "1"]
    assert hash_of(page) == "#step=20"


def test_a_url_opens_its_step_group_and_search(look):
    page = look(pages.reading_run(), address="#step=10&group=3&search=question")
    assert page.one("#summary").text.startswith("Step 10:")
    assert opened(page) == ["3"]
    assert page.one("#search").get_attribute("value") == "question"
    assert not page.one("#elsewhere").is_displayed()


def test_the_url_has_what_the_reader_chose(look):
    page = look(pages.reading_run(), motion="reduce")
    page.one("#previous").click()
    assert hash_of(page) == "#step=10"
    page.one("details[data-group='3'] > summary").click()
    assert hash_of(page) == "#step=10&group=3"
    page.one("details[data-group='3'] > summary").click()
    assert hash_of(page) == "#step=10"
    page.driver.execute_script(
        "document.querySelector('.dot[data-group=\"4\"]').dispatchEvent(new Event('click', {bubbles: true}))"
    )
    assert hash_of(page) == "#step=10&group=4"
    page.one("#next").click()
    assert hash_of(page) == "#step=20", "the group is not in the address of another step"


def test_back_and_forward_follow_the_url(look):
    page = look(pages.reading_run())
    for words, step, groups in (("step=10", "Step 10:", ["2"]), ("step=20&group=4", "Step 20:", ["4"])):
        page.driver.execute_script("location.hash = arguments[0]", words)
        page.driver.execute_async_script("setTimeout(arguments[0], 50)")
        assert page.one("#summary").text.startswith(step)
        assert opened(page) == groups
    page.driver.back()
    page.driver.execute_async_script("setTimeout(arguments[0], 50)")
    assert page.one("#summary").text.startswith("Step 10:")


def test_a_url_of_a_missing_step_or_group_says_so(look):
    for address, words in (
        ("#step=13", "Step 13 is not on this page: 2 steps, 10 to 20. This is step 20."),
        ("#group=7", "There is no group 7 to show at step 20."),
        ("#step=%3Cimg%3E", "Step <img> is not on this page: 2 steps, 10 to 20. This is step 20."),
        ("#nothing", ""),
    ):
        page = look(pages.reading_run(), address=address)
        assert page.one("#summary").text.startswith("Step 20:")
        assert page.one("#elsewhere").text == words
        assert opened(page) == ["2"]


def test_malicious_responses_and_tokens_are_shown_as_text(look):
    run = pages.reading_run()
    rows = run["steps"][-1]["rows"]
    rows["response"][2] = pages.excerpt(pages.HOSTILE, 3, pages.HOSTILE)
    rows["by_token"][4] = pages.by_token([1.0], [pages.HOSTILE])
    run["steps"][-1]["groups"]["prompt"][1] = pages.excerpt(pages.HOSTILE)
    page = look(run)
    page.one("p.prompt + button").click()
    page.open("details.group")
    assert page.texts("p.prompt")[0] == pages.HOSTILE
    assert pages.HOSTILE in page.texts(".token")
    search(page, pages.HOSTILE)
    assert found(page) == ["2", "3"]
    assert page.driver.execute_script("return window.ran") is None
    assert page.count("script") == 2
    assert not page.all("img")
