"""Lessons about the batch of a step: continuous batching, chunked prefill, speculation."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.lessons.facts import RunFacts
from octavo.lessons.lesson import Lesson, Moment, Reveal
from octavo.lessons.scenario import Arrival, Scenario

# ---- continuous batching -------------------------------------------------------------------------

_LENGTHS = (48, 8, 16, 8, 40, 8, 16, 8)
_MIXED = tuple(
    Arrival(topic, prompt=16, reply=reply)
    for topic, reply in zip(
        ("harbour", "bread", "printer", "garden", "storm", "market", "harbour", "bread"),
        _LENGTHS,
        strict=True,
    )
)
_FOUR_SLOTS = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


def _reveal_batching(runs: Sequence[RunFacts]) -> Reveal:
    static, continuous = runs
    text = (
        f"Static batching took {static.steps} steps, continuous batching {continuous.steps}. A "
        "static batch runs until its longest reply ends: B and D were done after 8 tokens, and "
        "their batch slots stayed empty for 40 more steps. Continuous batching gives a slot to "
        f"the next request as soon as it is free: E started in step "
        f"{continuous.step_of('admitted', 'E')} instead of step "
        f"{static.step_of('admitted', 'E')}, and its first token came after "
        f"{continuous.of('E').ttft:.0f} ms instead of {static.of('E').ttft:.0f} ms. The sum of all "
        f"replies, {sum(_LENGTHS)} tokens in 4 slots, cannot take fewer than "
        f"{sum(_LENGTHS) // 4} steps. A alone takes {_LENGTHS[0]}, so no order of the requests "
        "takes fewer."
    )
    moments = [
        Moment(0, static.of("B").last_step + 2, "A", "the slots of B and D are empty"),
        Moment(
            0, static.step_of("admitted", "E"), "E", "the second batch starts, when A has ended"
        ),
        Moment(1, continuous.step_of("admitted", "E"), "E", "E takes a slot in the next step"),
    ]
    is_right = 80 <= static.steps <= 100 and 45 <= continuous.steps <= 60
    return Reveal(text, moments, is_right)


BATCHING = Lesson(
    name="batching",
    title="Continuous batching: no slot waits for the longest reply",
    intro="Eight requests arrive at once. Their replies have 48, 8, 16, 8, 40, 8, 16 and 8 tokens, "
    "152 tokens together. The engine has four batch slots, so a step generates at most four "
    "tokens. In the first run, batching is static: four requests run until all of them have "
    "ended, then the next four. In the second run it is continuous.",
    runs=(
        Scenario("static", _MIXED, {**_FOUR_SLOTS, "batching": "static", "max_batch": 4}),
        Scenario("continuous", _MIXED, _FOUR_SLOTS),
    ),
    question="How many steps do the eight requests take, static and continuous?",
    choices=("about 90 and 40", "about 90 and 50", "about 50 and 50", "about 150 and 40"),
    answer=1,
    reveal=_reveal_batching,
    code=("octavo/core/batching.py:Batches", "octavo/core/scheduler.py:Scheduler"),
    test="tests/core/test_batching.py::test_a_static_batch_waits_to_be_full_but_not_for_ever",
    page="docs/scheduling.md",
    exercise="exercises/batching.py",
)

# ---- chunked prefill -----------------------------------------------------------------------------

_LONG_PROMPT = (
    Arrival("harbour", prompt=16, reply=40),
    Arrival("bread", prompt=400, reply=4, at=10),
)


def _longest_step(run: RunFacts) -> tuple[int, int]:
    """Return the largest number of prompt tokens in a step, and the step."""
    sizes = [
        (sum(chunk[2] for chunk in event["chunks"]), event["step"]) for event in run.all("planned")
    ]
    return max(sizes, key=lambda size: size[0])


def _reveal_chunks(runs: Sequence[RunFacts]) -> Reveal:
    unchunked, chunked = runs
    (largest_unchunked, unchunked_step), (largest_chunked, chunked_step) = map(_longest_step, runs)
    text = (
        f"Without chunks, one step computed {largest_unchunked} prompt tokens and A's next token, "
        f"and A waited {unchunked.of('A').longest_gap:.1f} ms for its token. With chunks, no step "
        f"computed more than {largest_chunked} prompt tokens, so A's longest wait was "
        f"{chunked.of('A').longest_gap:.1f} ms. Chunks also have a price: B's first token came "
        f"after {unchunked.of('B').ttft:.1f} ms without chunks and after "
        f"{chunked.of('B').ttft:.1f} ms with them, because its prompt took seven steps. The token "
        "budget (--max-num-batched-tokens) sets this trade-off."
    )
    moments = [
        Moment(0, unchunked_step, "A", "the whole prompt in one step: A waits for its token"),
        Moment(1, chunked_step, "A", "a chunk of the prompt beside A's token"),
        Moment(1, chunked.of("B").last_step - 3, "B", "the last chunk gives B's first token"),
    ]
    return Reveal(text, moments, largest_unchunked == 400 and largest_chunked == 63)


CHUNKED_PREFILL = Lesson(
    name="chunked-prefill",
    title="Chunked prefill: a long prompt does not stop the others",
    intro="A decodes: each step gives it one token. After ten steps, B arrives with a prompt of "
    "400 tokens. In the first run a prompt is computed in one step. In the second run, a step "
    "computes at most 64 tokens, and long prompts are divided into chunks.",
    runs=(
        Scenario(
            "whole prompts",
            _LONG_PROMPT,
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        ),
        Scenario("chunks", _LONG_PROMPT, {"max_num_batched_tokens": 64}),
    ),
    question="What do chunks change?",
    choices=(
        "A waits less for its next token, and B gets its first token later or at the same time",
        "Both A and B get their tokens earlier",
        "A waits longer, and B gets its first token earlier",
        "Nothing: the same tokens are computed in any case",
    ),
    answer=0,
    reveal=_reveal_chunks,
    code=("octavo/core/step_budget.py:PromptBudget", "octavo/core/scheduler.py:Scheduler"),
    test="tests/core/test_scheduler.py::"
    "test_decoding_comes_first_and_a_long_prompt_gets_the_remaining_budget",
    page="docs/scheduling.md",
    exercise="exercises/chunked_prefill.py",
)

# ---- speculation ---------------------------------------------------------------------------------

_REPEATS = (Arrival("harbour", prompt=35, reply=60),)
_SPECULATIVE = {"speculative_config": {"method": "ngram", "k": 3, "adaptive": False}}


def _reveal_speculation(runs: Sequence[RunFacts]) -> Reveal:
    plain, speculative = runs
    drafted, accepted = speculative.drafts
    text = (
        f"The replies are equal, token by token. Without drafts, 60 tokens took {plain.steps} "
        f"steps; with drafts, {speculative.steps}. Of {drafted} drafted tokens, {accepted} were "
        "accepted. The model computes all drafted positions in one step and samples its own token "
        "at each of them. Drafts count up to the first that differs from the model's own token, "
        "and that token replaces it. A wrong draft costs time, and never changes the text. "
        f"One step gives at most 1 + 3 tokens, so {-(-60 // 4)} steps are the least for 60 tokens."
    )
    moments = [
        Moment(0, plain.of("A").last_step // 2, "A", "one token per step"),
        Moment(1, speculative.best_draft_step, "A", "several tokens in one step"),
    ]
    is_right = (
        plain.text_of("A") == speculative.text_of("A")
        and plain.drafts[0] == 0
        and speculative.steps <= plain.steps
    )
    return Reveal(text, moments, is_right)


SPECULATION = Lesson(
    name="speculation",
    title="Speculative decoding: guess cheaply, verify together",
    intro="A reply often repeats phrases of the text before it. In the second run, a drafter "
    "guesses up to three tokens of the reply: it looks for the last tokens earlier in the text, "
    "and proposes what followed there. With the embedded model about half of these drafts are "
    "wrong. The model verifies them.",
    runs=(
        Scenario("without drafts", _REPEATS),
        Scenario("drafts", _REPEATS, _SPECULATIVE),
    ),
    question="Some drafts are wrong. What do they change in the reply?",
    choices=(
        "Some words are wrong",
        "Nothing: the reply is the same, and only the time differs",
        "The reply is shorter",
        "The words are right, but their order differs",
    ),
    answer=1,
    reveal=_reveal_speculation,
    code=("octavo/core/speculation.py:Speculation", "octavo/core/drafters.py:NgramDrafter"),
    test="tests/test_speculation.py::test_every_architecture_gives_the_same_tokens",
    page="docs/speculation.md",
    exercise="exercises/speculation.py",
)

LESSONS = (BATCHING, CHUNKED_PREFILL, SPECULATION)
