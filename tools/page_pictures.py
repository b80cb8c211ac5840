"""Takes the pictures of the live page in docs/pictures, and writes the pages in docs/runs: `make
pictures`.

    pictures/watching.webp                moves: a burst, a shared prefix, preemptions
    pictures/watching-{1440,1024,390}-{light,dark}.png
    runs/{preemption,...}.html            lessons, each as one file

The program starts `octavo demo`, presses its buttons in Debian's Chromium, and takes screenshots.
It needs requirements-browser.lock.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.web.browser import chromium

DOCS = Path(__file__).parent.parent / "docs"
FOLDER = DOCS / "pictures"
RUNS = ("preemption", "chunked-prefill", "prefix-cache")  # lessons
SIZES = {1440: 900, 1024: 768, 390: 844}
MOVING_WIDTH = 960  # pixels of the moving picture; the page is 1440 pixels wide
FRAME_MS = 200
LAST_FRAME_MS = 2500
WAITING = "#rows tr:has(.state.waiting)"
PREEMPTED = "#rows tr:has(.state.preempted), #rows tr:has(.state small:not([hidden]))"


@contextlib.contextmanager
def demo() -> Iterator[str]:
    """Run `octavo demo`, and give its address."""
    command = [sys.executable, "-m", "octavo", "demo", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            match = re.search(r"http://127\.0\.0\.1:\d+/", line)
            if match:
                break
        else:
            raise SystemExit("octavo demo ended without an address")
        yield match[0]
    finally:
        process.terminate()
        process.wait()


def open_page(browser: Browser, address: str, width: int, scheme: Any) -> Page:
    size = {"width": width, "height": SIZES[width]}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()  # type: ignore[arg-type]
    page.goto(address)
    page.wait_for_selector("#status[data-state=ready]", timeout=120_000)
    page.wait_for_selector(".guide")
    return page


class Film:
    """Screenshots of a page that become a moving picture."""

    def __init__(self, page: Page):
        self.page = page
        self.frames: list[Image.Image] = []

    def take(self, count: int = 1) -> None:
        for _ in range(count):
            picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
            height = round(picture.height * MOVING_WIDTH / picture.width)
            self.frames.append(picture.resize((MOVING_WIDTH, height), Image.Resampling.LANCZOS))

    def take_until(self, selector: str, max_frames: int = 60) -> None:
        """Take frames until the page has an element that the selector matches."""
        for _ in range(max_frames):
            self.take()
            if self.page.locator(selector).count():
                return
        raise SystemExit(f"the page never showed {selector}")

    def save(self, path: Path) -> None:
        durations = [FRAME_MS] * (len(self.frames) - 1) + [LAST_FRAME_MS]
        first, *others = self.frames
        options = {"save_all": True, "append_images": others, "duration": durations, "loop": 0}
        first.save(path, quality=45, method=4, minimize_size=False, **options)  # type: ignore[arg-type]
        print(f"{path}: {len(self.frames)} frames, {path.stat().st_size / 2**20:.2f} MiB")


def press(page: Page, name: str) -> None:
    page.click(f".guide button:has-text('{name}')")


def take_moving_picture(browser: Browser, address: str) -> None:
    page = open_page(browser, address, 1440, "light")
    film = Film(page)
    page.wait_for_selector("#rows tr")
    film.take(3)
    press(page, "burst")
    film.take_until(WAITING)
    film.take(2)
    page.locator(WAITING).last.click()
    film.take(8)
    page.keyboard.press("Escape")
    press(page, "shared prefix")
    film.take(14)
    press(page, "long replies")
    film.take_until(PREEMPTED)
    page.locator(PREEMPTED).first.click()
    film.take(10)
    film.save(FOLDER / "watching.webp")
    page.context.close()


def take_still_pictures(browser: Browser, address: str) -> None:
    for width in SIZES:
        for scheme in ("light", "dark"):
            page = open_page(browser, address, width, scheme)
            press(page, "shared prefix")
            press(page, "long replies")
            page.wait_for_selector(PREEMPTED, timeout=60_000)
            page.wait_for_timeout(600)
            page.click("#pause")
            page.locator(PREEMPTED).first.click()
            page.mouse.move(0, 0)
            page.wait_for_timeout(1200)  # The flash of moved blocks is over.
            page.evaluate("scrollTo(0, 0)")
            picture = Image.open(io.BytesIO(page.screenshot(full_page=width < 1440)))
            path = FOLDER / f"watching-{width}-{scheme}.png"
            picture.convert("RGB").quantize(200).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
            page.context.close()


def write_runs() -> None:
    """Run lessons and write each into one HTML file."""
    for name in RUNS:
        path = DOCS / "runs" / f"{name}.html"
        command = [sys.executable, "-m", "octavo", "lesson", name, "--export", str(path)]
        subprocess.run(command, check=True)
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    write_runs()
    with demo() as address, chromium() as browser:
        take_moving_picture(browser, address)
        take_still_pictures(browser, address)


if __name__ == "__main__":
    main()
