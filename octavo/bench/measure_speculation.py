"""Compares decoding with and without speculation: tokens per second, acceptance, and equal tokens.

    chat    ordinary questions
    copy    tasks that repeat or edit a text, so that looking back finds the next tokens

One side decodes without drafts, and each method is another side. All sides share the weights and
take turns in each round, so that slow drift of the machine affects them equally. Only decoding is
timed: the time of a batch begins when each of its requests has its first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from octavo.bench.interleave import MAX_VARIATION, spread
from octavo.bench.measure_batching import encode
from octavo.bench.picture import Panel, bars
from octavo.bench.synthetic_drafts import (
    METHOD,
    SyntheticDrafter,
    make_repeating,
    parse_synthetic,
)
from octavo.config import SpeculativeConfig
from octavo.core import draft_methods
from octavo.core.drafters import SuffixDrafter
from octavo.core.speculation import DraftCounters
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.types import Output, Request

MIN_PROMPTS = 4  # The prompts that a single stream computes one after another.

# The points of --grid: the model or shape, and the exit layers of early_exit. None is the embedded
# model.
GRID: dict[str | None, tuple[int, ...]] = {"tinyllama-1.1b": (8, 18), None: (8, 24)}
GRID_DRAFTS = (2, 4)

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of Portugal, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Give me three ideas for a birthday present for my sister.",
    "What is the difference between weather and climate?",
    "How do I boil an egg?",
    "Write a short poem about the sea.",
    "What does a compiler do?",
    "Who wrote Don Quixote, and when?",
    "How can I fall asleep more quickly?",
    "What are the planets of the solar system?",
    "Why do cats purr?",
    "Describe a day in the life of a baker.",
    "What is a prime number?",
    "Name some vegetables that grow in winter.",
    "How does a refrigerator work?",
)
TEXTS = (
    "The lighthouse stood at the end of a narrow spit of land. Every evening the keeper "
    "climbed the stairs, lit the lamp and wrote the weather into a book. Ships that came from "
    "the north saw the light first, and turned west before they reached the rocks. In winter "
    "the spit was often under water, and the keeper stayed in the tower for days.",
    "def average(values):\n"
    "    total = 0\n"
    "    for value in values:\n"
    "        total = total + value\n"
    "    return total / len(values)\n"
    "\n"
    "\n"
    "def largest(values):\n"
    "    found = values[0]\n"
    "    for value in values:\n"
    "        if value > found:\n"
    "            found = value\n"
    "    return found\n",
    "Our meeting on Tuesday begins at nine. Anna reports on the budget, Omar on the new "
    "building and Lena on the survey. After lunch we visit the old building, and the "
    "architect shows us the plans. Please send your questions to Omar before Monday. The "
    "meeting ends at four, and the bus to the station leaves at half past four.",
    "Bread needs flour, water, salt and yeast. Mix the flour with the water and let it rest "
    "for half an hour. Add the salt and the yeast, knead the dough for ten minutes and let it "
    "rise for two hours. Shape a loaf, let it rise again and bake it for forty minutes. The "
    "loaf is done when it sounds hollow.",
)
TASKS = (
    "Repeat this text word for word:",
    "Repeat this text, and put a number before each sentence or line:",
    "Repeat this text without its last sentence or line:",
    "Repeat this text in capital letters, then once more as it is:",
)
WORKLOADS: dict[str, tuple[str, ...]] = {
    "chat": QUESTIONS,
    "copy": tuple(f"{task}\n\n{text}" for task, text in product(TASKS, TEXTS)),
}


class Method(NamedTuple):
    """The drafting method of one side."""

    config: SpeculativeConfig
    acceptance: float | None = None  # for synthetic drafts (octavo/bench/synthetic_drafts.py)


def parse_method(name: str, text: str) -> Method:
    """Return the method of `text`, the value of the option `name`."""
    if text.partition(",")[0].strip() == METHOD:
        return Method(*parse_synthetic(name, text))
    return Method(draft_methods.parse_method(name, text))


class Case(NamedTuple):
    """The requests that all sides compute."""

    workload: str
    streams: int  # requests at once
    temperature: float


@dataclass
class Decoding:
    """The work of one side for a case: the steps after the first token of each request."""

    seconds: float = 0.0
    tokens: int = 0
    sequence_steps: int = 0  # Each step counts once for each sequence that it gave tokens to.
    drafted: int = 0
    accepted: int = 0
    replies: list[list[int]] = field(default_factory=list)  # all tokens of each request

    @property
    def tokens_per_second(self) -> float:
        if not self.tokens:
            raise OctavoError(
                "every reply ended with its first token, so there was nothing to decode: "
                "raise --max-tokens or use another model"
            )
        return self.tokens / self.seconds


def measure(
    llm: LLM,
    methods: Mapping[str, Method],
    cases: Sequence[Case],
    max_tokens: int,
    repeat: int,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one record for each case and method. The first round of each case is a warm-up.

    `llm` decodes without speculation. `advance` is called after each of the
    len(cases) * (1 + repeat) rounds.
    """
    if any(method.acceptance is not None for method in methods.values()):
        make_repeating(llm.model)
    llm.warm_up()
    sides = {"": llm}
    for name, (config, acceptance) in methods.items():
        drafter = None if acceptance is None else SyntheticDrafter(acceptance)
        sides[name] = llm.with_options(drafter, speculative_config=config)
        if config.adaptive:  # Warm-up measures the steps that decide how many drafts pay.
            sides[name].warm_up()
    results = []
    for case in cases:
        prompts = encode_prompts(llm, case)
        rounds: list[dict[str, Decoding]] = []
        for round_index in range(1 + repeat):
            names = list(sides)
            first = round_index % len(names)
            rounds.append(
                {
                    name: decode(sides[name], prompts, case, max_tokens)
                    for name in names[first:] + names[:first]
                }
            )
            advance()
        for name, method in methods.items():
            record = {"method": name, **case._asdict(), **compare(rounds, name)}
            record["predicted_ratio"] = None
            if method.acceptance is None:
                config = method.config
                record["predicted_ratio"] = predict_ratio(config, llm.config.num_layers, record)
            results.append(record)
    return results


def encode_prompts(llm: LLM, case: Case) -> list[list[int]]:
    """Return the prompts of a case as token ids: with the chat template, if the model has one."""
    texts = WORKLOADS[case.workload]
    count = max(MIN_PROMPTS, case.streams)
    texts = tuple(texts[index % len(texts)] for index in range(count))
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        return encode(llm, texts)
    chats: list[list[Any]] = [[{"role": "user", "content": text}] for text in texts]
    return [llm.reader.read_chat(chat).token_ids for chat in chats]


def decode(llm: LLM, prompts: list[list[int]], case: Case, max_tokens: int) -> Decoding:
    """Compute all prompts, `case.streams` at a time."""
    speculation = llm.engine.scheduler.speculation
    if speculation is not None and isinstance(speculation.drafter, SuffixDrafter):
        speculation.drafter.histories.clear()  # They contain the replies of other rounds.
    decoding = Decoding()
    for first in range(0, len(prompts), case.streams):
        batch = prompts[first : first + case.streams]
        params = [
            SamplingParams(
                temperature=case.temperature,
                seed=first + index,
                max_tokens=max_tokens,
                detokenize=False,
            )
            for index in range(len(batch))
        ]
        decode_batch(llm, batch, params, decoding)
    return decoding


def decode_batch(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], decoding: Decoding
) -> None:
    """Compute prompts at once, and add the measurements to `done`."""
    engine = llm.engine
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(str(index), prompt, sampling))
    replies: list[list[int]] = [[] for _ in prompts]
    while not engine.idle and not all(replies):
        collect(engine.step(), replies)
    counters = draft_counters(llm)
    tokens_before = sum(map(len, replies))
    drafted_before = counters.drafted
    accepted_before = counters.accepted
    start = time.perf_counter()
    while not engine.idle:
        outputs = engine.step()
        collect(outputs, replies)
        decoding.sequence_steps += len(outputs)
    decoding.seconds += time.perf_counter() - start
    decoding.tokens += sum(map(len, replies)) - tokens_before
    decoding.drafted += counters.drafted - drafted_before
    decoding.accepted += counters.accepted - accepted_before
    decoding.replies += replies


def collect(outputs: list[Output], replies: list[list[int]]) -> None:
    for output in outputs:
        if output.error:
            raise OctavoError(f"a reply ended with an error: {output.error}")
        replies[int(output.request_id)] += output.tokens


def draft_counters(llm: LLM) -> DraftCounters:
    speculation = llm.engine.scheduler.speculation
    return DraftCounters([]) if speculation is None else speculation.counters


# ---- comparison ----------------------------------------------------------------------------------


def compare(rounds: list[dict[str, Decoding]], name: str) -> dict[str, Any]:
    """Compare a method with plain decoding. The first round is compared by its tokens only."""
    measured = rounds[1:]
    plain_speeds = [measured_round[""].tokens_per_second for measured_round in measured]
    speeds = [measured_round[name].tokens_per_second for measured_round in measured]
    ratios = [speed / plain for speed, plain in zip(speeds, plain_speeds, strict=True)]
    drafted = sum(measured_round[name].drafted for measured_round in measured)
    accepted = sum(measured_round[name].accepted for measured_round in measured)
    tokens = sum(measured_round[name].tokens for measured_round in measured)
    sequence_steps = sum(measured_round[name].sequence_steps for measured_round in measured)
    return {
        "plain_tok_s": spread(plain_speeds),
        "tok_s": spread(speeds),
        "ratio": spread(ratios),
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "drafts_per_step": drafted / sequence_steps,
        "tokens_per_step": tokens / sequence_steps,
        "differences": find_differences(rounds, name),
        "noise": max(ratios) > MAX_VARIATION * min(ratios),
    }


def find_differences(rounds: list[dict[str, Decoding]], name: str) -> list[dict[str, int]]:
    """Return the prompts for which the method gave other tokens than plain decoding in the first
    round, and the position of the first different token."""
    differences: dict[int, dict[str, int]] = {}
    expected = rounds[0][""].replies
    for round_results in rounds:
        for prompt_index, (reply, expected_reply) in enumerate(
            zip(round_results[name].replies, expected, strict=True)
        ):
            if reply != expected_reply and prompt_index not in differences:
                pairs = zip(reply, expected_reply, strict=False)
                same = [token == expected_token for token, expected_token in pairs]
                position = same.index(False) if False in same else len(same)
                differences[prompt_index] = {"prompt": prompt_index, "token": position}
    return list(differences.values())


def predict_ratio(
    config: SpeculativeConfig, num_layers: int, record: dict[str, Any]
) -> float | None:
    """Predict the ratio of early exit from its acceptance, or return None for other methods.

    A step gives 1 + a * K tokens. It computes the first layers K times and all layers once.
    With adaptive drafts, K is the number of drafts that a step verified on average.
    """
    if config.method != "early_exit" or record["acceptance"] is None:
        return None
    drafts = record["drafts_per_step"] if config.adaptive else config.num_tokens
    tokens = 1 + record["acceptance"] * drafts
    cost = 1 + drafts * config.exit_layer / num_layers
    return float(tokens / cost)


def grid_methods(exit_layers: Sequence[int]) -> list[str]:
    return [
        f"early_exit,layer={layer},k={drafts},adaptive=no"
        for layer, drafts in product(exit_layers, GRID_DRAFTS)
    ]


def panels(results: list[dict[str, Any]]) -> list[Panel]:
    """Return a chart for each model: measured ratios, and those that early exit predicts."""
    charts = []
    for model in dict.fromkeys(record["model"] for record in results):
        records = [record for record in results if record["model"] == model]
        names = [
            f"{record['method']}: {record['workload']} x {record['streams']}, "
            f"temperature {record['temperature']:g}"
            for record in records
        ]
        series = {"measured": [record["ratio"]["median"] for record in records]}
        predicted = [record["predicted_ratio"] for record in records]
        if any(ratio is not None for ratio in predicted):
            series["predicted from the acceptance"] = predicted
        longest = max(map(len, names))
        width = 360 + 6.4 * longest
        charts.append(bars(model, names, series, "tokens per second, times plain", width=width))
    return charts
