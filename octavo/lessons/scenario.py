"""Scenarios of lessons: requests that arrive at given steps of an engine.

Steps and lengths are fixed, so a scenario takes the same decisions with every model and on every
machine. Only the times differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.types import Request

# Texts of prompts. Prompts with the same topic begin with the same tokens.
TOPICS = {
    "harbour": "The harbour wakes before the sun. Ropes creak, gulls quarrel over the first catch, "
    "and a clerk writes the names of the ships into a long book. ",
    "bread": "To bake a loaf of bread you need flour, water, salt and patience. Mix them, let the "
    "dough rest, fold it, and wait again until it has doubled. ",
    "printer": "A printer folds a large sheet three times to make eight leaves. Such a book is "
    "called an octavo, and it fits into the pocket of a coat. ",
    "garden": "In the garden behind the library grow quinces and old roses. Each spring somebody "
    "cuts them back, and each summer they climb over the wall. ",
    "storm": "The storm came from the west at noon. Sails were reefed, hatches were closed, and "
    "the log has no entry for the next eleven hours. ",
    "market": "On market days the square smells of leather and plums. People bargain loudly, and "
    "a boy sells yesterday's newspaper for half its price. ",
}
BASE_OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 512,
    "depth": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
    "show_text": True,
    "speculative_config": None,  # A model with a draft head would otherwise use it.
}
MAX_STEPS = 2000  # No scenario takes as many.


@dataclass(frozen=True)
class Arrival:
    """A request of a scenario."""

    topic: str
    prompt: int  # tokens
    reply: int  # tokens that it may generate
    at: int = 0  # It arrives after this many steps.
    stops_after: int | None = None  # It ends by itself after this many tokens.
    priority: int = 0
    tenant: str = ""
    n: int = 1
    tail: str = ""  # topic of the last tokens of the prompt, behind those of `topic`
    tail_tokens: int = 0


@dataclass(frozen=True)
class Scenario:
    """Requests, and the options of the engine that serves them."""

    name: str
    arrivals: tuple[Arrival, ...]
    options: dict[str, Any] = field(default_factory=dict)


def prompt_tokens(llm: LLM, topic: str, length: int) -> list[int]:
    """Return the first tokens of a text about a topic."""
    tokenizer = llm.get_tokenizer()
    text = TOPICS[topic]
    tokens: list[int] = tokenizer.encode(text)
    while len(tokens) < length:
        text += TOPICS[topic]
        tokens = tokenizer.encode(text)
    return tokens[:length]


def run_scenario(llm: LLM, scenario: Scenario) -> bytes:
    """Run a scenario on a model that is warmed up, and return the recording of its events."""
    engine_llm = llm.with_options(**(BASE_OPTIONS | scenario.options))
    try:
        return _record(engine_llm, scenario)
    finally:
        engine_llm.close()


def _record(llm: LLM, scenario: Scenario) -> bytes:
    engine = llm.engine
    recorded_lines: list[bytes] = []
    stream = llm.streams.stream_of(engine)
    stream.about["model"] = f"run: {scenario.name}"
    stream.open(lambda lines, is_start: recorded_lines.append(lines))
    pending = sorted(enumerate(scenario.arrivals), key=lambda entry: entry[1].at)
    stops = {_id(index): arrival.stops_after for index, arrival in enumerate(scenario.arrivals)}
    generated: dict[tuple[str, int], int] = {}
    for step in range(MAX_STEPS):
        while pending and pending[0][1].at <= step:
            index, arrival = pending.pop(0)
            engine.add(_request(llm, index, arrival))
        if not pending and engine.idle:
            break
        for output in engine.step():
            key = output.request_id, output.index
            generated[key] = generated.get(key, 0) + len(output.tokens)
            if generated[key] == stops[output.request_id] and output.finish_reason is None:
                engine.stop(output.request_id, output.index)
    stream.flush()
    return b"".join(recorded_lines)


def _prompt(llm: LLM, arrival: Arrival) -> list[int]:
    head = prompt_tokens(llm, arrival.topic, arrival.prompt - arrival.tail_tokens)
    return head + prompt_tokens(llm, arrival.tail or arrival.topic, arrival.tail_tokens)


def _id(index: int) -> str:
    return f"lesson-{index}"


def _request(llm: LLM, index: int, arrival: Arrival) -> Request:
    params = SamplingParams(
        n=arrival.n,
        temperature=0.0 if arrival.n == 1 else 1.0,
        seed=index,
        max_tokens=arrival.reply,
        ignore_eos=True,
        detokenize=False,
    )
    clock = llm.engine.scheduler.clock
    return Request(
        id=_id(index),
        prompt=_prompt(llm, arrival),
        params=params,
        arrival=clock(),
        priority=arrival.priority,
        tenant=arrival.tenant,
    )
