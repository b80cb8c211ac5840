"""The page draws a wall of 10,000 blocks fast enough for 60 frames per second."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

pytest.importorskip("playwright")

from octavo.core.event_stream import EventStream
from octavo.core.simulate import VirtualClock
from octavo.params import SamplingParams
from octavo.types import Request
from tests.web.browser import CHROMIUM, Watched, chromium
from tests.web.test_browser import replayed
from tests.workloads import make_engine

NUM_BLOCKS = 10_000
FRAME_MS = 1000 / 60
FRAMES = 240
STEP_SECONDS = 0.025
# Wraps the callbacks of frames: how long each runs, and when each begins.
WATCH_FRAMES = """
  window.frameTimes = { begun: [], took: [] };
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (callback) => request((time) => {
    const begun = performance.now();
    callback(time);
    const frames = window.frameTimes;
    if (frames.begun.at(-1) === time) frames.took[frames.took.length - 1] += performance.now() - begun;
    else { frames.begun.push(time); frames.took.push(performance.now() - begun); }
  });
"""


def record_a_full_pool() -> bytes:
    """Return the recording of an engine without a model that uses nearly all of its blocks."""
    clock = VirtualClock()
    engine = make_engine(NUM_BLOCKS, 4, rows=64, budget=2048, depth=1, max_len=1000, clock=clock)
    parts: list[bytes] = []
    stream = EventStream(engine)
    stream.open(lambda lines, is_start: parts.append(lines))
    dice = random.Random(1)
    shared = [dice.randrange(1, 30) for _ in range(80)]
    for number in range(96):
        prompt = shared + [dice.randrange(1, 30) for _ in range(dice.randint(300, 500))]
        params = SamplingParams(max_tokens=dice.randint(50, 150), ignore_eos=True)
        engine.add(Request(f"request {number}", prompt, params))
    while not engine.idle:
        clock.sleep(STEP_SECONDS)
        engine.step()
    stream.flush()
    return b"".join(parts)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_wall_of_ten_thousand_blocks_is_drawn_sixty_times_per_second() -> None:
    recording = record_a_full_pool()
    with chromium() as browser, replayed([recording]) as address:
        watched = Watched(browser, "about:blank", viewport={"width": 1440, "height": 900})
        page = watched.page
        page.add_init_script(WATCH_FRAMES)
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        page.evaluate("location.hash = 'step=60'")
        page.click("#zoom")  # shows the whole pool
        page.click("#pause")  # plays the recording
        page.wait_for_function("count => window.frameTimes.took.length > count", arg=FRAMES)
        frames: dict[str, list[float]] = page.evaluate("() => window.frameTimes")
        cells: int = page.evaluate("async () => (await import('./web/wall.js')).countCells()")
        assert watched.errors == []
        watched.close()
    report(frames, cells)
    assert cells == NUM_BLOCKS
    assert statistics.median(frames["took"]) < FRAME_MS


def report(frames: dict[str, Any], cells: int) -> None:
    took = sorted(frames["took"])
    between = [b - a for a, b in zip(frames["begun"], frames["begun"][1:], strict=False)]
    print(
        f"{cells} blocks: a frame takes {statistics.median(took):.1f} ms of script "
        f"(95th percentile {took[len(took) * 95 // 100]:.1f} ms); "
        f"{1000 / statistics.mean(between):.1f} frames per second"
    )
