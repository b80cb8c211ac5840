"""Compares strategies for choosing tokens: their speed, and the quality of the texts.

    speed      tokens per second for one request and for 16 at once
    likely     mean log-probability of a token under the model without filters: higher is likelier
    repeats    share of 4-grams that occurred before in the same text
    distinct   share of 2-grams of all texts that are different: higher is more varied
    facts      short facts that the text states, out of FACTS

Greedy decoding repeats itself, and sampling without filters makes mistakes. The table shows the
price of each strategy. All strategies share one engine and are measured in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from octavo.bench.interleave import interleave, spread
from octavo.bench.measure_speculation import QUESTIONS
from octavo.bench.picture import Axis, Panel, Series, bars, points
from octavo.bench.result_file import BenchRun
from octavo.bench.views import Result, ResultTable, ResultView, spread_text
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.params import SamplingParams

MAX_TOKENS = 64
STREAMS = 16
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "beam 4": dict(temperature=0.0, use_beam_search=True, best_of=4),
    "temperature 1": dict(temperature=1.0),
    "temperature 0.7": dict(temperature=0.7),
    "top-k 50": dict(temperature=1.0, top_k=50),
    "top-p 0.9": dict(temperature=1.0, top_p=0.9),
    "min-p 0.1": dict(temperature=1.0, min_p=0.1),
    "repetition penalty 1.1": dict(temperature=0.0, repetition_penalty=1.1),
}
# The beginning of a sentence, and the words that are correct continuations.
FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The capital of France is", ("Paris",)),
    ("The capital of Italy is", ("Rome",)),
    ("The capital of Japan is", ("Tokyo",)),
    ("The largest ocean on Earth is the", ("Pacific",)),
    ("The chemical symbol for water is", ("H2O", "H₂O")),
    ("The Earth orbits around the", ("Sun", "sun")),
    ("The opposite of hot is", ("cold",)),
    ("Two plus two equals", ("four", "4")),
    ("A triangle has three", ("sides", "angles")),
    ("The first president of the United States was", ("Washington",)),
    ("Romeo and Juliet was written by", ("Shakespeare",)),
    ("The planet closest to the Sun is", ("Mercury",)),
    ("Ice is frozen", ("water",)),
    ("The days of the week are Monday, Tuesday,", ("Wednesday",)),
    ("The color of the sky on a clear day is", ("blue",)),
    ("A baby dog is called a", ("puppy",)),
)


class DecodingBench:
    def __init__(
        self,
        llm: LLM,
        run: BenchRun,
        rounds: int,
        advance: Callable[[], None] = lambda: None,
    ):
        self.llm = llm
        self.run = run
        self.rounds = rounds
        self.advance = advance
        self.prompts = [self._chat(question) for question in QUESTIONS[:STREAMS]]

    def _chat(self, question: str) -> list[int]:
        try:
            return self.llm.encode_chat([{"role": "user", "content": question}])
        except OctavoError:  # the model has no chat template
            return self.llm.get_tokenizer().encode(question)

    def measure(self, names: list[str]) -> None:
        speeds = {
            streams: interleave(
                {name: self._timed(name, streams) for name in names}, self.rounds, self.advance
            )
            for streams in (1, STREAMS)
        }
        for name in names:
            row = {"strategy": name, "parameters": STRATEGIES[name]}
            row["single_tok_s"] = spread(speeds[1][name])
            row["batch_tok_s"] = spread(speeds[STREAMS][name])
            self.run.add_row(**row, **self._quality(name))
            self.advance()

    def _params(self, name: str, max_tokens: int, **changes: Any) -> SamplingParams:
        return SamplingParams(**STRATEGIES[name], max_tokens=max_tokens, seed=1, **changes)

    def _timed(self, name: str, streams: int) -> Callable[[], float]:
        params = self._params(name, MAX_TOKENS, ignore_eos=True, detokenize=False)

        def run() -> float:
            self.llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = self.llm.generate(self.prompts[:streams], params, use_tqdm=False)
            seconds = time.perf_counter() - start
            return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

        return run

    def _quality(self, name: str) -> dict[str, float]:
        outputs = self.llm.generate(self.prompts, self._params(name, MAX_TOKENS), use_tqdm=False)
        replies = [list(output.outputs[0].token_ids) for output in outputs]
        num_right = 0
        facts = self.llm.generate(
            [beginning for beginning, _ in FACTS], self._params(name, 12), use_tqdm=False
        )
        for output, (_, expected_words) in zip(facts, FACTS, strict=True):
            num_right += any(word in output.outputs[0].text for word in expected_words)
        return {
            "mean_logprob": self._mean_logprob(replies),
            "repeats": statistics.mean(repeated_share(reply) for reply in replies),
            "distinct": distinct_share(replies),
            "facts": num_right / len(FACTS),
        }

    def _mean_logprob(self, replies: list[list[int]]) -> float:
        """Return the mean log-probability of the replies' tokens under the model."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        non_empty = [
            (prompt, reply) for prompt, reply in zip(self.prompts, replies, strict=True) if reply
        ]
        outputs = self.llm.generate(
            [prompt + reply for prompt, reply in non_empty], params, use_tqdm=False
        )
        logprobs: list[float] = []
        for output, (prompt, reply) in zip(outputs, non_empty, strict=True):
            prompt_logprobs = output.prompt_logprobs or []
            for token, entry in zip(reply, prompt_logprobs[len(prompt) :], strict=True):
                assert entry is not None
                logprobs.append(entry[token].logprob)
        return statistics.mean(logprobs)


def repeated_share(tokens: list[int], length: int = 4) -> float:
    """Return the share of n-grams that occurred before in the same text."""
    grams = [tuple(tokens[index : index + length]) for index in range(len(tokens) - length + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_share(replies: list[list[int]]) -> float:
    """Return the share of 2-grams of all texts that are different."""
    grams = [pair for reply in replies for pair in pairwise(reply)]
    return len(set(grams)) / max(len(grams), 1)


# ---- view ----------------------------------------------------------------------------------------


def tables(result: Result) -> list[ResultTable]:
    columns = (
        *("strategy", "tok/s", "min - max", f"{STREAMS} at once, tok/s", "mean logprob"),
        *("repeated 4-grams", "distinct 2-grams", "facts"),
    )
    rows = [
        (
            row["strategy"],
            f"{row['single_tok_s']['median']:,.0f}",
            spread_text(row["single_tok_s"]),
            f"{row['batch_tok_s']['median']:,.0f}",
            f"{row['mean_logprob']:.2f}",
            f"{row['repeats']:.0%}",
            f"{row['distinct']:.0%}",
            f"{row['facts']:.0%}",
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows)]


def panels(result: Result) -> list[Panel]:
    rows = result["rows"]
    names = [row["strategy"] for row in rows]
    return [
        bars(
            "Speed of decoding strategies",
            names,
            {
                "one request": [row["single_tok_s"]["median"] for row in rows],
                f"{STREAMS} at once": [row["batch_tok_s"]["median"] for row in rows],
            },
            "tok/s",
        ),
        points(
            "Likely texts and repetition",
            [Series("", [(row["mean_logprob"], 100 * row["repeats"]) for row in rows], names)],
            Axis("mean log-probability of a token"),
            Axis("repeated 4-grams, %", starts_at_zero=True),
        ),
    ]


VIEW = ResultView(tables, panels)
