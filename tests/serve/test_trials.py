"""Specs of structured output are tried in worker processes: what is remembered of a trial, and what
a crash costs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

from octavo.params import StructuredOutputs
from octavo.serve.api.api_errors import ApiError
from octavo.serve.channel.jobs import Compile
from octavo.serve.front import trials as module
from octavo.serve.front.trials import QUARANTINE_SECONDS, Trials
from tests.attacks import structures
from tests.serve.running import Running, check_error, events, server

GOOD = StructuredOutputs(regex="good")
CRASH = StructuredOutputs(regex="crash")


class Pool:
    """Fails by the text of a spec."""

    errors = {
        "crash": ApiError(400, "gone", "text_worker_crashed"),
        "memory": ApiError(400, "full", "text_memory_exceeded"),
        "late": ApiError(408, "late", "text_timeout"),
        "busy": ApiError(503, "busy", "text_workers_busy", retry_after=1.0),
        "bad": ApiError(400, "the regex is bad", "invalid_structured_output", "structured_outputs"),
        "broken": RuntimeError("a secret"),
    }

    def __init__(self) -> None:
        self.jobs: list[tuple[str, bool, float]] = []

    async def run(self, job: Compile, kind: Any, *, heavy: bool, seconds: float) -> None:
        self.jobs.append((str(job.spec.regex), heavy, seconds))
        await asyncio.sleep(0.01)
        if (error := self.errors.get(str(job.spec.regex))) is not None:
            raise error


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def with_trials(test: Callable[[Trials, Pool, Clock], Awaitable[None]]) -> None:
    async def run() -> None:
        pool, clock = Pool(), Clock()
        await test(Trials(pool, 2.5, clock), pool, clock)  # type: ignore[arg-type]

    asyncio.run(run())


async def refusal(trials: Trials, text: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await trials.run(StructuredOutputs(regex=text), "guided_regex")
    return caught.value


def test_a_spec_that_passed_is_not_tried_again() -> None:
    async def test(trials: Trials, pool: Pool, clock: Clock) -> None:
        assert not trials.passed(GOOD, None)
        await asyncio.gather(*(trials.run(GOOD, None) for _ in range(5)))
        assert pool.jobs == [("good", False, 2.5)], "those that came at once shared a trial"
        clock.now = 10 * QUARANTINE_SECONDS
        assert trials.passed(StructuredOutputs(regex="good"), None)
        assert not trials.passed(StructuredOutputs(grammar="good"), None), "of another kind"

    with_trials(test)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (
            "crash",
            "invalid_structured_output",
            "the regex cannot be used, because compiling it crashed",
        ),
        ("memory", "invalid_structured_output", "too much memory"),
        ("late", "structured_output_timeout", "not compiled within 2.5 s"),
        ("bad", "invalid_structured_output", "the regex is bad"),
    ],
)
def test_a_spec_that_failed_is_quarantined(text: str, code: str, says: str) -> None:
    async def test(trials: Trials, pool: Pool, clock: Clock) -> None:
        error = await refusal(trials, text)
        assert (error.status, error.code, error.param) == (400, code, "guided_regex")
        assert says in error.message
        clock.now = QUARANTINE_SECONDS - 1
        with pytest.raises(ApiError, match=says) as caught:
            trials.passed(StructuredOutputs(regex=text), "another field")
        assert caught.value.param == "another field" and len(pool.jobs) == 1
        clock.now = QUARANTINE_SECONDS
        assert not trials.passed(StructuredOutputs(regex=text), None), "it may be tried again"

    with_trials(test)


def test_the_verdict_on_a_spec_does_not_keep_the_spec() -> None:
    async def test(trials: Trials, pool: Pool, clock: Clock) -> None:
        await refusal(trials, "bad")
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is StructuredOutputs]
        assert "bad" not in [spec.regex for spec in kept]

    with_trials(test)


def test_what_is_not_the_fault_of_the_spec_is_not_remembered() -> None:
    async def test(trials: Trials, pool: Pool, clock: Clock) -> None:
        busy = await refusal(trials, "busy")
        assert (busy.status, busy.retry_after) == (503, 1.0)
        broken = await refusal(trials, "broken")
        assert broken.status == 500 and "secret" not in broken.message
        for text in ("busy", "broken"):
            assert not trials.passed(StructuredOutputs(regex=text), None)

    with_trials(test)


def test_who_leaves_does_not_end_the_trial_of_others() -> None:
    async def test(trials: Trials, pool: Pool, clock: Clock) -> None:
        first = asyncio.create_task(trials.run(GOOD, None))
        second = asyncio.create_task(trials.run(GOOD, None))
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert len(pool.jobs) == 1 and trials.passed(GOOD, None)

    with_trials(test)


def test_long_specs_are_heavy_jobs_and_few_verdicts_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_VERDICTS", 2)

    async def test(trials: Trials, pool: Pool, clock: Clock) -> None:
        specs = [StructuredOutputs(regex=text) for text in ("a", "b", "x" * 20_000)]
        for spec in specs:
            await trials.run(spec, None)
            trials.passed(specs[0], None)
        assert [heavy for _, heavy, _ in pool.jobs] == [False, False, True]
        assert [trials.passed(spec, None) for spec in specs] == [True, False, True]

    with_trials(test)


# ---- through the server --------------------------------------------------------------------------


class Neighbour(threading.Thread):
    """A stream beside others. `arrived` has the time of each token."""

    def __init__(self, running: Running):
        super().__init__()
        self.running = running
        self.arrived: list[float] = []
        self.text = ""

    def run(self) -> None:
        body = {
            "prompt": "hello",
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        with self.running.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                self.text += line + "\n"
                self.arrived.append(time.monotonic())

    def __enter__(self) -> Neighbour:
        self.start()
        while len(self.arrived) < 10:
            time.sleep(0.005)
        return self

    def __exit__(self, *_: Any) -> None:
        self.join()
        found = events(self.text)
        assert "error" not in found[-1] and len(found) == 500


def starts(running: Running) -> float:
    return running.metrics()["octavo:engine_starts_total"]


def test_deep_specs_are_refused_and_affect_no_other_request(running: Running) -> None:
    """Each of them once overflowed the stack of the engine, or was meant to."""
    before = starts(running)
    codes: dict[str, str | None] = {}
    with Neighbour(running):
        for name, fields in structures.all_cases().items():
            if "messages" not in fields:  # the tiny model's context is too short for the tools
                reply = running.post("/v1/completions", {"prompt": "x", "max_tokens": 2, **fields})
                ok = reply.status_code == 200
                codes[name] = None if ok else check_error(reply, 400)["code"]
    assert starts(running) == before
    assert codes["500 rules"] is None and codes["200 references"] is None
    refused = {name for name, code in codes.items() if code == "invalid_structured_output"}
    assert refused > {"1000 references", "3000 rules", "5000 terminals", "5000 bare references",
                      "2500 references in allOf", "50000 parentheses", "nested alternatives"}  # fmt: skip


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("unlimited")
    program = "tests.serve.unlimited_worker"
    with server(folder, worker_program=program, limits={"structure_seconds": 1.0}) as found:
        yield found


def test_a_spec_that_crashes_its_trial_is_quarantined_under_any_prompt(unlimited: Running) -> None:
    before = starts(unlimited)
    with Neighbour(unlimited):
        for field, fields in (
            ("guided_json", {"guided_json": structures.references(800)}),
            ("guided_grammar", {"guided_grammar": structures.rules(3000)}),
        ):
            for prompt in ("one", "another", "a third"):
                begun = time.monotonic()
                reply = unlimited.post("/v1/completions", {"prompt": prompt, **fields})
                error = check_error(reply, 400, field, "invalid_structured_output")
                assert "crashed" in error["message"]
                assert prompt == "one" or time.monotonic() - begun < 0.5
    assert starts(unlimited) == before
    log = unlimited.log.read_text()
    assert log.count("a worker process ended during a job") == 2, "one for each spec"
    small = unlimited.post("/v1/completions", {"prompt": "hi", "guided_choice": ["fine"]})
    assert small.json()["choices"][0]["text"] == "fine"


# Takes some seconds to compile, in 0.2 MB.
MONSTER = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(5000)},
}


def test_a_spec_that_takes_too_long_is_refused_and_delays_no_other(unlimited: Running) -> None:
    with Neighbour(unlimited) as neighbour:
        begun = time.monotonic()
        reply = unlimited.post(
            "/v1/completions", {"prompt": "hi", "structured_outputs": {"json": MONSTER}}
        )
        refused = time.monotonic()
        error = check_error(reply, 400, "structured_outputs")
        # a slow machine reaches the time limit first, a fast one the memory limit
        assert error["code"] in ("structured_output_timeout", "invalid_structured_output")
        small = unlimited.post(
            "/v1/completions", {"prompt": "hi", "guided_choice": ["fine", "too"]}
        )
        assert small.json()["choices"][0]["text"] in ("fine", "too"), (
            "another worker process tries it"
        )
    assert refused - begun < 5
    assert sum(begun < t < refused for t in neighbour.arrived) > 10, "its stream went on meanwhile"


def test_an_abandoned_trial_leaves_nothing_behind(unlimited: Running) -> None:
    other = {**MONSTER, "title": "another one"}
    body = {"prompt": "hi", "structured_outputs": {"json": other}, "timeout": 0.1}
    check_error(unlimited.post("/v1/completions", body), 504)
    assert unlimited.complete()["usage"]["completion_tokens"] == 4
    assert unlimited.metrics()["octavo:num_requests_open"] == 0
