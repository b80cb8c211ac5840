"""Lessons about reuse: the prefix cache, and tiers below the device."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.lessons.facts import RunFacts
from octavo.lessons.lesson import Lesson, Moment, Reveal
from octavo.lessons.scenario import Arrival, Scenario

# ---- prefix cache --------------------------------------------------------------------------------

_SYSTEM_PROMPT = tuple(
    Arrival("harbour", prompt=120, reply=12, at=at, tail=topic, tail_tokens=20)
    for topic, at in (("bread", 0), ("printer", 20), ("garden", 40))
)


def _reveal_prefix(runs: Sequence[RunFacts]) -> Reveal:
    (run,) = runs
    second = run.of("B")
    text = (
        f"The first {second.cached} tokens of B were found in the "
        "prefix cache. 100 tokens are equal, but only full blocks can be found: 100 tokens fill "
        "six blocks of 16, and the seventh block has 4 equal tokens and 12 others. A block is "
        "found by a hash that covers its tokens and all tokens before it, so B shares the very "
        "blocks that A has computed, and no KV is copied. The first token came after "
        f"{run.of('A').ttft:.1f} ms for A and after {second.ttft:.1f} ms for B."
    )
    moments = [
        Moment(0, run.step_of("finished", "A"), "", "A has ended, and its blocks stay cached"),
        Moment(0, run.step_of("admitted", "B"), "B", "B shares six of the cached blocks"),
        Moment(0, run.step_of("admitted", "C"), "C", "C shares the same six blocks"),
    ]
    return Reveal(text, moments, second.cached == 96 and run.of("C").cached == 96)


PREFIX_CACHE = Lesson(
    name="prefix-cache",
    title="Prefix cache: equal beginnings are computed once",
    intro="A, B and C arrive one after another. Each prompt has 120 tokens: the same 100 tokens, "
    "such as a system prompt, and then 20 tokens of its own. A block holds 16 tokens. The KV of a "
    "finished request stays in its blocks until the memory is needed.",
    runs=(Scenario("prefix cache", _SYSTEM_PROMPT),),
    question="How many of B's 120 prompt tokens must be computed?",
    choices=("120", "20", "24", "16"),
    answer=2,
    reveal=_reveal_prefix,
    code=("octavo/core/prefix.py:PrefixCache", "octavo/core/blocks.py:BlockPool"),
    test="tests/core/test_scheduler.py::test_a_finished_request_serves_the_next_one",
    page="docs/memory.md",
    exercise="exercises/prefix_cache.py",
)

# ---- tiers ---------------------------------------------------------------------------------------

_RETURNING = (
    Arrival("harbour", prompt=160, reply=8),
    Arrival("bread", prompt=160, reply=8, at=15),
    Arrival("printer", prompt=160, reply=8, at=30),
    Arrival("harbour", prompt=160, reply=8, at=45),
)
_SMALL_POOL = {"num_gpu_blocks_override": 21, "max_num_batched_tokens": 192}


def _reveal_tiers(runs: Sequence[RunFacts]) -> Reveal:
    device, tiers = runs
    loaded = [event for event in tiers.all("loaded") if event["tier"] == "host"]
    before, after = device.of("D"), tiers.of("D")
    text = (
        f"Without a host tier, {160 - before.cached} of D's 160 prompt tokens were computed; with "
        f"it, {160 - after.cached}. B and C needed memory, so A's cached blocks were evicted from "
        "the device, the least recently used first. With a host tier, an evicted block is copied "
        f"to host memory. D found {len(loaded)} blocks there, and they were copied back. The last "
        "token of a prompt is always computed, because its logits give the first token of the "
        "reply. Only whole blocks are reused, so the whole last block is computed: 16 tokens. D's "
        f"first token came after {before.ttft:.1f} ms without host memory and after "
        f"{after.ttft:.1f} ms with it."
    )
    moments = [
        Moment(0, device.step_of("evicted"), "", "cached blocks of A are evicted"),
        Moment(0, device.step_of("admitted", "D"), "D", "D finds nothing in the cache"),
        Moment(1, tiers.step_of("admitted", "D"), "D", "D's blocks come back from host memory"),
    ]
    is_right = before.cached == 0 and 160 - after.cached == 16 and len(loaded) > 0
    return Reveal(text, moments, is_right)


TIERS = Lesson(
    name="tiers",
    title="Tiers: an evicted block may survive in host memory",
    intro="The device has 21 blocks, and a conversation of 160 + 8 tokens fills 11. A, B and C are "
    "three conversations. Then D asks the same as A. In the first run, blocks that are evicted "
    "from the device are lost. In the second run there is host memory below the device.",
    runs=(
        Scenario("device only", _RETURNING, _SMALL_POOL),
        Scenario("host tier", _RETURNING, {**_SMALL_POOL, "swap_space": 0.05}),
    ),
    question="How many of D's 160 prompt tokens are computed, without and with host memory?",
    choices=("160 and 0", "160 and 16", "16 and 16", "1 and 1"),
    answer=1,
    reveal=_reveal_tiers,
    code=("octavo/core/tier_index.py:TierIndex", "octavo/core/offload_costs.py:OffloadCosts"),
    test="tests/test_llm_tiers.py::test_an_evicted_prompt_is_served_from_host_memory",
    page="docs/memory.md",
    exercise="exercises/tiers.py",
)

LESSONS = (PREFIX_CACHE, TIERS)
