"""Lessons about KV blocks: paging, copy-on-write, preemption."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.lessons.facts import RunFacts
from octavo.lessons.lesson import Lesson, Moment, Reveal
from octavo.lessons.scenario import Arrival, Scenario

# ---- paging --------------------------------------------------------------------------------------

_MANY = tuple(
    Arrival(topic, prompt=24, reply=232, stops_after=20)
    for topic in ("harbour", "bread", "printer", "garden", "storm", "market")
)


def _reveal_paging(runs: Sequence[RunFacts]) -> Reveal:
    contiguous, paged = runs
    text = (
        f"With contiguous KV, {contiguous.most_running} requests ran at once; with paging, "
        f"{paged.most_running}. A contiguous request reserves room for its prompt and its longest "
        "possible reply when it starts: 24 + 232 tokens, which are 16 blocks. It then uses three "
        "of them. Paging takes a block when it is needed, so the six requests together held at "
        f"most {paged.most_used} blocks. The whole work took {contiguous.steps} steps without "
        f"paging and {paged.steps} with it. Paging wastes only the free positions in the last "
        "block of each request."
    )
    moments = [
        Moment(0, contiguous.step_of("admitted", "B"), "B", "A and B have reserved all blocks"),
        Moment(0, contiguous.step_of("admitted", "C"), "C", "C starts when A has ended"),
        Moment(1, paged.step_of("admitted", "F"), "F", "all six run, with few blocks each"),
    ]
    is_right = contiguous.most_running == 2 and paged.most_running == 6
    return Reveal(text, moments, is_right)


PAGING = Lesson(
    name="paging",
    title="Paging: memory is taken when it is needed",
    intro="Six requests arrive, each with a prompt of 24 tokens. Each may generate up to 232 "
    "tokens, but stops after 20: most replies are shorter than their limit. The pool has 32 blocks "
    "of 16 tokens. The engine does not know how long a reply will be. In the first run a request "
    "reserves a contiguous piece of memory for its longest reply. In the second run it takes "
    "blocks as it grows.",
    runs=(
        Scenario(
            "contiguous",
            _MANY,
            {"num_gpu_blocks_override": 32, "kv_allocation": "contiguous"},
        ),
        Scenario("paged", _MANY, {"num_gpu_blocks_override": 32}),
    ),
    question="How many of the six requests run at once, without paging and with it?",
    choices=("2 and 2", "2 and 6", "4 and 6", "6 and 6"),
    answer=1,
    reveal=_reveal_paging,
    code=("octavo/core/tables.py:reserve", "octavo/core/scheduler.py:Scheduler"),
    test="tests/core/test_equivalence.py::"
    "test_workloads_with_mechanisms_switched_off_equal_the_oracle",
    page="docs/memory.md",
    exercise="exercises/paging.py",
)

# ---- copy-on-write -------------------------------------------------------------------------------


def _reveal_copies(runs: Sequence[RunFacts]) -> Reveal:
    (run,) = runs
    copies = run.all("copied")
    text = (
        f"The three replies share block {run.all('allocated')[0]['blocks'][0]}, which is "
        "full and is never written again. The second block holds only 4 of 16 tokens, and each "
        "reply writes its own tokens behind them. A shared block must not be written to: the first "
        f"two replies that write copy it first ({len(copies)} copies), and the last one has it for "
        "itself. So the replies hold one block together, and each of them has a second block of "
        "its own. Without sharing, three prompts would have taken 6 blocks."
    )
    moments = [
        Moment(0, run.step_of("admitted"), "A", "the prompt is computed once, in two blocks"),
        Moment(
            0, copies[0]["step"], "A", "three replies share a block, and two have copied the other"
        ),
    ]
    peak = run.all("planned")[1]["step"]
    used = _blocks_used_at(run, peak)
    return Reveal(text, moments, len(copies) == 2 and used == 4)


def _blocks_used_at(run: RunFacts, step: int) -> int:
    """Return how many blocks are in use when a step is launched."""
    references: dict[int, int] = {}
    for event in run.events:
        if event["step"] > step:
            break
        if event["kind"] in ("allocated", "shared"):
            for block in event["blocks"]:
                references[block] = references.get(block, 0) + 1
        elif event["kind"] == "copied":
            references[event["target"]] = 1
            references[event["source"]] -= 1
        elif event["kind"] == "released":
            for block in event["blocks"]:
                references[block] -= 1
    return sum(count > 0 for count in references.values())


COPY_ON_WRITE = Lesson(
    name="copy-on-write",
    title="Copy-on-write: several replies to one prompt",
    intro="A client asks for three replies to one prompt (n = 3). The prompt has 20 tokens, and a "
    "block holds 16. The prompt is computed once, and its blocks are shared. Then each reply "
    "continues in its own way.",
    runs=(Scenario("n = 3", (Arrival("harbour", prompt=20, reply=10, n=3),)),),
    question="How many blocks do the three replies hold together after their first token?",
    choices=("2", "3", "4", "6"),
    answer=2,
    reveal=_reveal_copies,
    code=("octavo/core/tables.py:reserve", "octavo/core/forks.py:SequenceGroups"),
    test="tests/core/test_scheduler.py::"
    "test_forks_compute_the_prompt_once_and_copy_one_block_each_but_the_last",
    page="docs/sequences.md",
    exercise="exercises/copy_on_write.py",
)

# ---- preemption ----------------------------------------------------------------------------------

_GROWING = (
    Arrival("harbour", prompt=60, reply=110),
    Arrival("bread", prompt=60, reply=110),
    Arrival("printer", prompt=52, reply=110),
)


def _reveal_preemption(runs: Sequence[RunFacts]) -> Reveal:
    (run,) = runs
    victim = run.of("C")
    preempted = run.all("preempted")
    text = (
        "Under the policy fcfs (first come, first served), a request takes blocks only "
        f"from requests behind it, so A is never preempted. C lost {preempted[0]['positions']} "
        "computed positions. Its full blocks stayed in the prefix cache, but A and B needed that "
        f"memory soon. When C was admitted again, {victim.recomputed} tokens had to be computed "
        f"again. Preemptions: A {run.of('A').preemptions}, B {run.of('B').preemptions}, "
        f"C {victim.preemptions}."
    )
    moments = [
        Moment(0, preempted[0]["step"] - 1, "", "the last step with enough blocks"),
        Moment(0, preempted[0]["step"], "C", "C is preempted: click it and read the cost"),
        Moment(0, run.step_of("admitted", "C", 1), "C", "C is admitted again"),
    ]
    is_right = run.of("A").preemptions == 0 and victim.preemptions > 0 and victim.recomputed > 0
    return Reveal(text, moments, is_right)


PREEMPTION = Lesson(
    name="preemption",
    title="Preemption: what happens when blocks run out",
    intro="Three requests start with prompts of about 60 tokens. Each of them will grow to about "
    "170 tokens, which takes 11 blocks. The pool has 19 blocks, so three cannot finish together. "
    "No request is refused: the scheduler starts all of them, because most replies end early.",
    runs=(
        Scenario(
            "recompute", _GROWING, {"num_gpu_blocks_override": 19, "max_num_batched_tokens": 192}
        ),
    ),
    question="The blocks run out. Which request loses its blocks?",
    choices=(
        "A, because it has the most tokens",
        "B, because it is in the middle",
        "C, because it came last",
        "All of them wait",
    ),
    answer=2,
    reveal=_reveal_preemption,
    code=(
        "octavo/core/scheduler.py:Scheduler",
        "octavo/core/policy.py:Policy",
    ),
    test="tests/core/test_policy.py::test_recomputed_tokens_are_counted",
    page="docs/core.md",
    exercise="exercises/preemption.py",
)


def _reveal_swap(runs: Sequence[RunFacts]) -> Reveal:
    recompute, swap = runs
    loaded = [event for event in swap.all("loaded") if event["tier"] == "host"]
    text = (
        f"Without a host tier, {recompute.recomputed} tokens were computed again; with it, "
        f"{swap.recomputed}. Blocks that leave the device are copied to host memory, and "
        f"{len(loaded)} of them were loaded when a preempted request continued. Only full blocks "
        "are stored, so the tokens of the last, incomplete block are computed again in any case. "
        "There is no separate swap state: a preempted request is admitted like any other, and "
        "finds its blocks in a lower tier."
    )
    moments = [
        Moment(1, swap.step_of("preempted"), "C", "C is preempted"),
        Moment(1, loaded[0]["step"], "C", "its blocks come back from host memory"),
    ]
    is_right = bool(loaded) and 0 < swap.recomputed < recompute.recomputed
    return Reveal(text, moments, is_right)


SWAP = Lesson(
    name="swap",
    title="Swap: preempted blocks in host memory",
    intro="Three requests grow to about 170 tokens each, which takes 11 blocks, but the pool has "
    "only 19. The blocks run out, and C, which came last, is preempted. The same requests run "
    "twice. In the second run there is host memory for blocks that leave the device.",
    runs=(
        Scenario(
            "recompute", _GROWING, {"num_gpu_blocks_override": 19, "max_num_batched_tokens": 192}
        ),
        Scenario(
            "swap",
            _GROWING,
            {"num_gpu_blocks_override": 19, "max_num_batched_tokens": 192, "swap_space": 0.05},
        ),
    ),
    question="How many tokens are computed again in the second run, compared with the first?",
    choices=("none", "fewer, but not none", "as many", "more"),
    answer=1,
    reveal=_reveal_swap,
    code=("octavo/core/tier_index.py:TierIndex", "octavo/core/prefix.py:PrefixCache"),
    test="tests/core/test_tier_index.py::test_a_resumed_sequence_loads_its_blocks",
    page="docs/memory.md",
    exercise="exercises/swap.py",
)

LESSONS = (PAGING, COPY_ON_WRITE, PREEMPTION, SWAP)
