"""Settings may be changed while requests run: their tokens stay the same, and all of them end."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from octavo.core.engine import Engine
from octavo.core.event_stream import EventStream
from octavo.core.live_settings import change_settings, describe_settings
from octavo.core.policy import POLICIES
from octavo.errors import InvalidRequest
from octavo.params import SamplingParams
from octavo.types import Output, Request
from tests import workloads
from tests.workloads import make_engine

LONGEST = workloads.MAX_LEN - 1  # positions of a sequence


def random_change(dice: random.Random, engine: Engine) -> dict[str, Any]:
    scheduler = engine.scheduler
    schedule = scheduler.schedule
    pool = scheduler.pool
    least = -(-LONGEST // pool.block_size)  # Every request still fits.
    return dice.choice(
        [
            {"policy": dice.choice(list(POLICIES))},
            {"token_budget": dice.randint(schedule.max_num_seqs, schedule.max_num_batched_tokens)},
            {"chunk": dice.randint(1, 20)},
            {"block_limit": dice.randint(min(least, pool.num_blocks), pool.num_blocks)},
        ]
    )


@pytest.mark.parametrize("options", [{}, {"beams": True}, {"drafts": True}], ids=str)
def test_tokens_do_not_depend_on_settings_that_change(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """trial() compares every token with the oracle."""
    changed: Counter[str] = Counter()
    make_plain_engine = workloads.make_engine
    dice = random.Random(7)

    def make_changing_engine(*arguments: Any, **keywords: Any) -> Engine:
        engine = make_plain_engine(*arguments, **keywords)
        step = engine.step

        def change_and_step() -> list[Output]:
            if dice.random() < 0.2:
                change = random_change(dice, engine)
                try:
                    change_settings(engine.scheduler, change)
                    changed.update(change.keys())
                except InvalidRequest:
                    changed["refused"] += 1
                engine.scheduler.check()
            return step()

        engine.step = change_and_step  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(workloads, "make_engine", make_changing_engine)
    for seed in range(700, 715):
        workloads.trial(seed, **options)
    assert min(changed[name] for name in ("policy", "token_budget", "chunk", "block_limit")) > 5


def running_engine() -> Engine:
    engine = make_engine(20, 4, slots=3, budget=16, depth=1)
    for index in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add(Request(f"r{index}", list(range(1, 14)), params, priority=-index))
    engine.step()
    return engine


def test_each_setting_has_its_effect() -> None:
    engine = running_engine()
    lines: list[Any] = []
    EventStream(engine).open(lambda data, _: lines.extend(map(json.loads, data.splitlines())))
    change_settings(engine.scheduler, {"token_budget": 5, "chunk": 2, "block_limit": 12})
    change_settings(engine.scheduler, {"policy": "priority"})
    assert describe_settings(engine.scheduler) == {
        "policy": "priority",
        "token_budget": 5,
        "chunk": 2,
        "block_limit": 12,
    }
    assert [seq.request.id for seq in engine.scheduler.waiting] == ["r2", "r1"], "by priority"
    while not engine.idle:
        engine.step()
    chunks = [chunk for line in lines if line[0] == "planned" for chunk in line[5]]
    assert chunks and max(chunk[2] for chunk in chunks) <= 2
    budgets = {line[4] for line in lines if line[0] == "planned"}
    assert max(budgets) <= 5
    shown = [line[4] for line in lines if line[0] == "settings"]
    assert len(shown) == 2 and shown[-1] == describe_settings(engine.scheduler)
    change_settings(engine.scheduler, {"block_limit": 20})
    assert engine.scheduler.pool.num_available == 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "lifo"}, "unknown policy"),
        ({"policy": "os.path:join"}, "unknown policy"),
        ({"token_budget": 2}, "token_budget"),
        ({"token_budget": 17}, "token_budget"),
        ({"chunk": 0}, "chunk"),
        ({"block_limit": 3}, "a live request may need 8 blocks"),
        ({"block_limit": 21}, "block_limit"),
        ({"seed": 1}, "cannot be changed"),
    ],
)
def test_what_could_harm_is_refused(changes: dict[str, Any], words: str) -> None:
    engine = running_engine()
    before = describe_settings(engine.scheduler)
    with pytest.raises(InvalidRequest, match=words):
        change_settings(engine.scheduler, changes)
    assert describe_settings(engine.scheduler) == before


def test_a_request_that_exceeds_a_lowered_limit_is_refused_at_once() -> None:
    engine = make_engine(20, 4, slots=3, budget=16, depth=1)
    change_settings(engine.scheduler, {"block_limit": 4})
    with pytest.raises(InvalidRequest, match="pool has 4"):
        engine.add(Request("large", [1] * 30, SamplingParams(max_tokens=4)))


def test_a_policy_that_preempts_needs_one_step_in_flight() -> None:
    engine = make_engine(20, 4, slots=3, budget=16, depth=2)
    with pytest.raises(InvalidRequest, match="--depth 1"):
        change_settings(engine.scheduler, {"policy": "priority"})
