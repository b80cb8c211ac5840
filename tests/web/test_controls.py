"""The controls of the page in a real browser: steps, keys, traffic, and settings of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page

from tests.serve.running import Running, server
from tests.web.browser import CHROMIUM, Watched, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]
NUM_BLOCKS = 64
LIMIT = 40
# Goes one step back and one step forward from within steps. Returns where each move should lead and
# where it leads.
MOVE_FROM_WITHIN_STEPS = """async () => {
  const { page } = await import("./web/page.js");
  const { history } = page;
  const found = { expected: [], reached: [] };
  for (let place = 1; place + 1 < history.steps.length && place < 40; place += 1) {
    const [first, end] = [history.steps[place], history.endOfStep(place)];
    if (first === end) continue;
    found.expected.push(first - 1, end);
    for (const direction of [-1, 1]) {
      page.moveTo(first);
      page.moveSteps(direction);
      found.reached.push(page.index);
    }
  }
  return found;
}"""
CHOOSE_BLOCK_LIMIT = """(limit) => {
  const input = document.querySelectorAll("#knobs input[type=range]")[2];
  input.value = limit;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  input.dispatchEvent(new Event("change", { bubbles: true }));
}"""

# Moves the slider many times before the engine can reply, as a key does that is held down.
LOWER_BLOCK_LIMIT = """(times) => {
  const input = document.querySelectorAll("#knobs input[type=range]")[2];
  for (let done = 0; done < times; done += 1) {
    input.stepDown();
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }
}"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = {
        "max_model_len": 600,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 96,
    }
    folder: Path = tmp_path_factory.mktemp("controlled")
    with server(folder, engine=engine, live_controls=True) as found:
        yield found


@pytest.fixture
def watched(running: Running) -> Iterator[Watched]:
    """A page that sends requests itself, because its server has live controls."""
    with chromium() as browser:
        yield opened(browser, running)


def opened(browser: Browser, running: Running) -> Watched:
    watched = Watched(browser, running.url)
    watched.page.wait_for_selector("#status[data-state=ready]")
    watched.page.wait_for_selector("#rows .state.done", timeout=60_000)
    return watched


def test_a_step_back_leads_to_an_earlier_moment_from_within_a_step(watched: Watched) -> None:
    watched.page.click("#pause")
    found = watched.page.evaluate(MOVE_FROM_WITHIN_STEPS)
    assert len(found["reached"]) > 10 and found["reached"] == found["expected"]
    assert watched.errors == []


def test_keys_work_while_a_tab_has_the_focus(watched: Watched) -> None:
    page = watched.page
    page.click("#tab-events")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-try", "aria-selected") == "true"
    assert not is_paused(page), "the arrow keys of a tab choose the next tab"


# The place of the selected row in the table: above the first visible line, inside, or below.
IS_SELECTED_IN_SIGHT = """() => {
  const row = document.querySelector("#rows tr.selected").getBoundingClientRect();
  const box = document.getElementById("requests-box").getBoundingClientRect();
  const head = document.querySelector("#requests thead th").getBoundingClientRect();
  return row.top >= head.bottom - 1 && row.bottom <= box.bottom + 1;
}"""


def test_the_keys_reach_every_request_and_show_it(watched: Watched) -> None:
    page = watched.page
    page.click("#tab-try")
    page.click("#traffic button:has-text('burst')")
    page.wait_for_selector("#rows tr:nth-child(14)")
    page.click("#pause")
    page.wait_for_timeout(250)
    assert page.locator("#rows tr[tabindex='0']").count() == 1, "Tab stops once"
    selected: list[str] = []
    for key in "jjjjjjjjjjjjkkkkkkkkkkkj":
        page.keyboard.press(key)
        page.wait_for_timeout(60)
        assert page.evaluate(IS_SELECTED_IN_SIGHT), selected
        selected.append(page.inner_text("#rows tr.selected .chip"))
    listed = page.locator("#rows tr .chip").all_inner_texts()
    assert selected[:12] == listed[:12], "the order is that of the table"
    assert selected[-2:] == listed[:2]
    page.locator("#rows tr[tabindex='0']").focus()
    for _ in range(9):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_timeout(250)
    assert page.inner_text("#rows tr.selected .chip") == listed[9]
    assert page.evaluate(IS_SELECTED_IN_SIGHT)
    page.keyboard.press("Tab")
    assert page.evaluate("!document.activeElement.closest('#rows')"), "Tab leaves the table"
    assert watched.errors == []


def test_requests_of_a_button_are_seen_although_the_page_was_paused(watched: Watched) -> None:
    page = watched.page
    page.click("#tab-try")
    page.click("#pause")
    assert is_paused(page)
    page.click("#traffic button:has-text('burst')")
    page.wait_for_selector("body:not(.paused)")
    assert page.inner_text("#traffic + .facts").startswith("Sent: twelve short prompts")


def test_blocks_that_were_shared_are_found_afterwards(watched: Watched) -> None:
    page = watched.page
    page.click("#tab-try")
    page.click("#traffic button:has-text('steady traffic')")  # It is switched off.
    page.click("#traffic button:has-text('shared prefix')")
    page.wait_for_selector("#rows .state.decode")
    page.wait_for_selector("#rows:not(:has(.state.decode, .state.prefill, .state.waiting))")
    page.click("#tab-why")
    page.click("#why button:has-text('Show when a request shared blocks last')")
    page.wait_for_selector("#why .shared-blocks li")
    assert is_paused(page)
    shared = int(page.locator("#wall-legend li:has-text('shared')").inner_text().split()[0])
    listed = page.locator("#why .shared-blocks .block-numbers button").count()
    assert shared == listed > 0
    assert watched.errors == []


def test_blocks_that_the_limit_withholds_are_named(watched: Watched) -> None:
    page = watched.page
    legend = page.locator("#wall-legend li:has-text('withheld')")
    assert not legend.is_visible()
    page.click("#tab-try")
    page.evaluate(CHOOSE_BLOCK_LIMIT, LIMIT)
    page.wait_for_selector("#wall-legend li:has-text('withheld')")
    page.click("#traffic button:has-text('long replies')")
    page.locator("#rows tr:has(.state.waiting)").first.click(timeout=60_000)
    page.click("#pause")
    # The limit grows to its value as blocks become free.
    withheld = int(legend.inner_text().split()[0])
    assert 0 < withheld <= NUM_BLOCKS - LIMIT
    tips = list(watched.tips().values())
    assert tips.count("withheld by the block limit") == withheld
    if page.locator("#why .holders").count():
        assert f"{withheld} blocks withheld by" in page.inner_text("#why .holders")
    assert watched.errors == []


def test_a_slider_is_moved_with_keys_faster_than_the_engine_replies(watched: Watched) -> None:
    page = watched.page
    page.click("#tab-try")
    slider = page.locator("#knobs input[type=range]").nth(2)
    slider.focus()
    limit = int(slider.input_value()) - 12
    page.evaluate(LOWER_BLOCK_LIMIT, 12)
    page.wait_for_function(
        "async limit => (await import('./web/page.js')).page.state.settings.block_limit === limit",
        arg=limit,
    )
    assert int(slider.input_value()) == limit
    page.keyboard.press("ArrowRight")
    assert int(slider.input_value()) == limit + 1, "the slider still has the focus"
    assert not is_paused(page)
    assert watched.errors == []


def is_paused(page: Page) -> bool:
    return "paused" in (page.get_attribute("body", "class") or "")
