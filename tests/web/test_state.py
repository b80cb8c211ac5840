"""The page's own code derives the state of the engine from the event stream, whatever happens. Node
runs it, where there is one; tests/web/test_browser.py runs it in a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.bench.what_if import RecordedRun, simulated_lines
from octavo.core.simulate import EMBEDDED_CPU
from tests.web.streams import NODE, run_node, stream_of_trial

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")


def reduced(seeds: range, **options: Any) -> dict[str, Any]:
    streams = [b"\n".join(stream_of_trial(seed, **options)) for seed in seeds]
    found: dict[str, Any] = run_node("reduce.mjs", b"\n\n".join(streams))
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"beams": True}, {"evict": True}, {"drafts": True, "guided": True}, {"switches": True}],
    ids=str,
)
def test_the_state_of_the_page_is_that_of_the_engine(options: dict[str, bool]) -> None:
    found = reduced(range(500, 508), **options)
    assert found["differences"] == []
    assert found["events"] > 1000 and found["snapshots"] > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"beams": True}, {"evict": True}, {"drafts": True}, {"switches": True}, {"pooling": True}],
    ids=str,
)
def test_the_state_of_the_page_is_that_of_the_engine_in_many_workloads(
    options: dict[str, bool],
) -> None:
    for first in range(1000, 1400, 50):
        assert reduced(range(first, first + 50), **options)["differences"] == []


def test_the_history_is_the_same_from_both_directions() -> None:
    """Any place of a recording is reached by stepping to it, and by jumping to it."""
    for seed in (511, 516):
        lines = b"\n".join(stream_of_trial(seed, snapshots=0.1, evict=True))
        found = run_node("seek.mjs", lines)
        assert found["differences"] == [] and found["places"] > 50
        assert found["text"], "the lines are written as they were read"
        assert found["kept"] and found["once"]
        since = found["since"]
        assert since["early"] == 0 < since["first"] == since["late"]


def test_renamed_requests_have_the_same_names_in_events_and_in_snapshots() -> None:
    """The simulation of the tab "What if" gives its requests the names of the recorded ones."""
    lines = b"\n".join(stream_of_trial(511))
    assert run_node("rename.mjs", lines, "0")["differences"] == []
    renamed = run_node("rename.mjs", lines, "2")
    assert renamed["differences"] == [] and renamed["checks"] > 3
    plain_names = run_node("rename.mjs", lines, "0")["names"]
    assert renamed["names"] == [name + 2 for name in plain_names] and len(plain_names) > 3


def test_a_check_belongs_to_the_run_and_the_step_that_are_viewed() -> None:
    lines = b"\n".join(stream_of_trial(511))
    found = run_node("checks.mjs", lines)
    assert found["before"] is None, "no check is shown before the first one"
    assert found["middle"]["index"] <= found["viewed"] < found["last"]["index"]
    assert found["restarted"] is None, "a new engine has not been checked yet"
    assert found["earlier"] == found["last"], "the checks of the earlier engine are kept"
    assert found["failed"]["differences"], "a failed check is shown at every step of its run"


def test_a_block_names_who_had_computed_it_at_the_viewed_step() -> None:
    """A content that was computed again later is not ascribed to the later request."""
    found = run_node("origins.mjs", b"\n".join(stream_of_trial(511, evict=True)))
    assert found["differences"] == []
    assert found["compared"] > 100 and found["changed"] > 0


@pytest.mark.parametrize("options", [{"evict": True}, {"beams": True}, {"drafts": True}], ids=str)
def test_the_views_show_nothing_that_comes_after_the_cursor(options: dict[str, bool]) -> None:
    """At any place, the views show the same, whether the page knows what follows or not: a page that
    is paused holds, and a recording shows what the live page showed."""
    streams = [b"\n".join(stream_of_trial(seed, **options)) for seed in (511, 516, 523)]
    found = run_node("cursor.mjs", b"\n\n".join(streams))
    assert found["differences"] == [], found["number"]
    assert found["compared"] > 200


def test_letters_continue_after_an_engine_crash_and_nothing_stays_live_that_has_ended() -> None:
    streams = [b"\n".join(stream_of_trial(seed, snapshots=0.1)) for seed in (511, 516)]
    found = run_node("restart.mjs", b"\n\n".join(streams))
    before, after, whole = found["names"]
    assert found["wrong"] == [] and found["againWrong"] == [] and found["reused"] == []
    assert whole == before + [max(before) + name for name in after] and before and after
    assert found["again"] == whole, "a saved page has the same letters"
    assert found["lost"] > 0
    steps = found["steps"]
    assert steps["restarts"] == 1 and steps["marks"] == [steps["last"]]
    assert steps["words"] == (
        f"the engine process ended after step {steps['before']:,}, and {found['lost']} "
        "requests failed; a new one starts with an empty cache"
    )
    number = steps["number"]
    assert steps["numbers"] == [number, number] and steps["order"] and steps["latest"]
    assert steps["names"] == [f"step {number}", f"step {number} of engine 2"] and steps["ends"]
    assert found["stepsAgain"] == steps, "a saved page tells the engine processes apart as well"
    for kind in ("gap", "reopened"):
        assert found[kind]["wrong"] == [] and found[kind]["opening"] == kind
        assert found[kind]["missed"] == found[kind]["expected"] > 0
        assert found[kind]["unseen"] > 0


def test_settings_that_change_no_decision_are_recognized() -> None:
    """The tab "What if" says so, instead of two tables that look alike."""
    run = RecordedRun(stream_of_trial(511))

    def is_same(**changes: Any) -> bool:
        recorded, changed = (simulated_lines(run, EMBEDDED_CPU, each) for each in ({}, changes))
        result = {"events": recorded, "recorded": recorded, "changed": changed}
        found: bool = run_node("whatif.mjs", json.dumps(result).encode())["isSame"]
        return found

    assert is_same() and not is_same(max_num_seqs=1)
    assert is_same(policy=run.settings["policy"])


@pytest.mark.parametrize("costs", [(1, 1, 1, 1), (3, 9, 2, 2, 3)], ids=str)
def test_all_panels_of_a_round_show_the_same_moment(costs: tuple[int, ...]) -> None:
    """Panels that take long are drawn in several frames. The page moves only between two rounds."""
    found = run_node("rounds.mjs", b"", *map(str, costs))
    frames = found["frames"]
    moments = [set(frame["shown"]) for frame in frames]
    agreeing = [len(each) == 1 for each in moments]
    assert all(agrees for agrees, frame in zip(agreeing, frames, strict=True) if frame["isWhole"])
    assert all(len(each) <= 2 for each in moments), "a round has one moment, as the one before it"
    assert sum(agreeing) > len(frames) / 2
    assert len({max(each) for each in moments}) > 15, "the page moves on"
    assert set(found["urgent"]["shown"]) == {61}, "an urgent change is shown in its own frame"
    assert set(frames[-1]["shown"]) == {120} and not frames[-1]["isMore"], (
        "the last moment is shown"
    )
    usual = [frame["took"] for frame in frames if frame is not found["urgent"]]
    assert max(usual[:60]) <= 4 + max(costs)


@pytest.mark.parametrize("options", [{}, {"evict": True}, {"beams": True}], ids=str)
def test_the_page_tells_the_cost_of_a_preemption_as_the_engine_paid_it(
    options: dict[str, Any],
) -> None:
    """A shortage is explained with the blocks at the time of the plan, a preemption with what could
    still be reused, and a loaded block with the request that had computed it."""
    streams = [
        b"\n".join(stream_of_trial(seed, snapshots=0, **options)) for seed in range(600, 640)
    ]
    found = run_node("costs.mjs", b"\n\n".join(streams))
    assert found["found"] == []
    counted = found["counted"]
    assert counted["used"] > 1000 and counted["shortages"] > 20, counted
    assert counted["resumed"] > 20 and counted["reused"] > 5 and counted["fromHost"] > 2, counted
    assert counted["loaded"] > 20 and counted["byAnother"] > 2, counted
    assert found["words"] == [
        "Of its 161 positions, 160 came back from host memory (10 blocks), and 1 was computed again.",
        "Of its 161 positions, 160 were still cached on the device, and 1 was computed again.",
        "Of its 40 positions, 16 came back from host memory (1 block), 16 were still cached on the "
        "device, and 8 were computed again.",
        "Of its 40 positions, 40 were computed again.",
        "Of its 32 positions, 32 came back from host memory (2 blocks).",
    ]
