"""A real Chromium for tests of the page, and what its views show, as plain data."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# What the views show at the moment that is chosen. The page's module is the one that runs.
READ_VIEWS = """async () => {
  const { page } = await import(document.body.dataset.module ?? "./web/page.js");
  const text = (node) => node.textContent.trim();
  const visible = (selector) => [...document.querySelectorAll(selector)];
  const rows = visible("#rows tr").map((row) => ({
    name: text(row.querySelector(".chip")),
    state: text(row.querySelector(".state span")),
    why: text(row.querySelector(".note")),
    cells: [...row.children].filter((cell) => !cell.hidden).map(text),
  }));
  return {
    number: page.history.line(page.index)[1],
    step: page.state.step,
    clock: text(document.getElementById("clock")),
    counts: visible("#counts li:not([hidden])").map(text),
    legend: visible("#wall-legend li").map(text),
    sum: text(document.getElementById("sum")),
    checks: page.history.checks.map(({ step, differences }) => ({ step, differences })),
    checked: text(document.getElementById("checked")),
    steps: page.spans.steps.filter((step) => step.at <= page.index).slice(-40)
      .map(({ number, prefill, decode }) => [number, prefill, decode]),
    timeline: document.getElementById("timeline").ariaLabel,
    explains: !document.getElementById("why").hidden,
    title: visible("#why .title").map(text),
    shared: visible("#why .shared-blocks li").map((item) => ({
      owners: [...item.querySelectorAll(".chip")].map(text),
      blocks: [...item.querySelectorAll(".block-numbers button")].map((node) => Number(text(node))),
    })),
    rows,
    log: visible("#log li").map((item) => text(item)),
  };
}"""
# What a page that stands still shows: all texts but those of the controls of time, and the pictures.
READ_ALL = """() => {
  const words = (selector) => document.querySelector(selector).innerText;
  const picture = (id) => document.getElementById(id).toDataURL();
  return {
    tiles: words("#tiles"), requests: words("#requests-panel"), wall: words("#wall-panel"),
    side: words("#side-panel"), clock: words("#clock"), sum: words("#sum"),
    pictures: ["wall", "wall-frames", "timeline"].map(picture),
    charts: [...document.querySelectorAll(".tile canvas")].map((node) => node.toDataURL()),
  };
}"""
# Reads the tip of every block that the wall shows, as the pointer shows it.
READ_TIPS = """async () => {
  const wall = document.getElementById("wall");
  const tip = document.getElementById("tip");
  const box = wall.getBoundingClientRect();
  const found = {};
  for (let y = 20; y < box.height; y += 16)
    for (let x = 8; x < box.width; x += 16) {
      const at = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
      wall.dispatchEvent(new PointerEvent("pointermove", at));
      if (tip.hidden) continue;
      const [first, ...rest] = tip.textContent.split("\\n");
      found[first.split(":")[0]] = first.slice(first.indexOf(":") + 2);
    }
  wall.dispatchEvent(new PointerEvent("pointerleave"));
  return found;
}"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page in the browser, its errors, and the addresses that it has asked for."""

    def __init__(self, browser: Browser, address: str, **options: Any):
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_message)
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.goto(address)

    def _on_message(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def views(self) -> dict[str, Any]:
        self.page.wait_for_timeout(250)  # Panels are drawn at most ten times a second.
        found: dict[str, Any] = self.page.evaluate(READ_VIEWS)
        return found

    def tips(self) -> dict[str, str]:
        found: dict[str, str] = self.page.evaluate(READ_TIPS)
        return found

    def go_to(self, step: int) -> None:
        """Go to the end of a step, as a link does."""
        self.page.evaluate(f"location.hash = 'step={step}'")
        self.page.wait_for_function(
            "step => document.getElementById('clock').textContent.startsWith(`step ${step} `)",
            arg=f"{step:,}",
        )

    def time_processor(self) -> Callable[[], float]:
        """Return a function that returns the processor time of the main thread from now on, or from
        the next page on."""
        session = self.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def seconds() -> float:
            metrics = session.send("Performance.getMetrics")["metrics"]
            return float(next(each["value"] for each in metrics if each["name"] == "ThreadTime"))

        return seconds

    def close(self) -> None:
        self.context.close()
