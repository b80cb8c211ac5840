"""KV is what its sequence wrote, and when it is not somebody says so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest
from octavo.types import Output, Request
from tests import tiny

GREEDY = dict(temperature=0.0, ignore_eos=True)
PROMPTS = [[5] * 40, [5] * 40 + [7] * 9, list(range(50)), [9, 8, 7]]


def make(**options: Any) -> LLM:
    options = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "progress": False,
        "num_gpu_blocks_override": 100,
        **options,
    }
    # on a GPU too: without graphs, as the canary needs
    options |= {"block_size": 16, "enforce_eager": True}
    return LLM(tiny.model_dir(), **options)


@pytest.mark.parity
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [100, 9], ids=["room", "preemptions"])
def test_it_stays_silent_and_changes_nothing(blocks: int, depth: int) -> None:
    several = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=30, ignore_eos=True)
    texts = []
    for canary in (False, True):
        llm = make(
            num_gpu_blocks_override=blocks, depth=depth, max_num_batched_tokens=24, kv_canary=canary
        )
        first = llm.generate(PROMPTS, SamplingParams(max_tokens=40, **GREEDY))
        second = llm.generate([*PROMPTS, [3] * 33], several)
        beams = llm.generate(PROMPTS[1:3], SamplingParams(n=3, use_beam_search=True, max_tokens=30))
        texts.append([[o.token_ids for o in out.outputs] for out in first + second + beams])
        count = llm.engine.scheduler.counters
        assert (
            count.cached_tokens > 0
            and count.copies > 0
            and (count.preemptions > 0) == (blocks == 9)
        )
    assert texts[0] == texts[1]


def test_a_block_given_away_too_early_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(kv_canary=True, enable_prefix_caching=False)
    engine, pool = llm.engine, llm.engine.scheduler.pool
    engine.add(Request("victim", list(range(40)), SamplingParams(max_tokens=50, **GREEDY)))
    outputs: list[Output] = engine.step() + engine.step()
    (victim,) = engine.scheduler.live.values()
    stolen, take = victim.block_table[1], pool.allocate
    # the planted bug: what somebody still holds is handed out
    monkeypatch.setattr(pool, "allocate", lambda: stolen)
    engine.add(Request("thief", [3] * 10, SamplingParams(max_tokens=3, **GREEDY)))
    outputs += engine.step()
    monkeypatch.setattr(pool, "allocate", take)
    thief = next(s.id for s in engine.scheduler.live.values() if s is not victim)
    for _ in range(3):
        outputs += engine.step()
    (end,) = (out for out in outputs if out.request_id == "victim" and out.finish_reason)
    assert end.finish_reason == "error" and end.error is not None
    found = re.search(
        r"KVCorrupted: sequence (\d+) .* position (\d+) from block (\d+).* sequence (\d+) wrote",
        end.error,
    )
    assert found is not None and [int(x) for x in found.groups()] == [victim.id, 16, stolen, thief]


def test_it_follows_the_device_alone() -> None:
    with pytest.raises(InvalidRequest, match="swap_space"):
        make(kv_canary=True, swap_space=0.1)
