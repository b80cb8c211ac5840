"""Changes one engine option at a time, and measures which figures move and by how much.

One workload stands for a server under load. Its clients send one request after another: chats with
one system message, questions about a few documents, and long texts. Each variation runs in turn
with the default, on the same requests. A ratio is the figure with the changed option divided by the
figure of the default in the same round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from octavo.assemble import pick_device
from octavo.bench.ablation import bound_kv_pool, drafts_by_default, fitting, release_memory
from octavo.bench.drive import DriveReport, Job, drive
from octavo.bench.interleave import interleave, is_noisy, ratios, spread
from octavo.bench.measure_speculation import QUESTIONS, TEXTS
from octavo.bench.model_shapes import load_shape
from octavo.bench.picture import Panel, bars
from octavo.bench.result_file import BenchRun
from octavo.bench.views import Result, ResultTable, ResultView, spread_text
from octavo.core.simulate import percentile
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest, NotEnoughMemory
from octavo.events import Event, StepLanded
from octavo.llm import LLM
from octavo.option_declaration import flag_of

CLEAR = 1.05  # A ratio is clear if it differs from 1 by this factor in every round.
MIN_MILLISECONDS = 1e-3  # Tokens of one step arrive together, and a ratio needs more than zero.


# ---- workload ------------------------------------------------------------------------------------


class Mix(NamedTuple):
    """The size of the workload, in requests and tokens."""

    clients: int
    chats: int
    questions: int  # about one of two documents
    long_texts: int
    system: int  # tokens of the system message, with which every chat begins
    message: int  # tokens of a chat or a question
    document: int
    long_text: int
    reply: int  # tokens of the longest reply
    kv_tokens: int  # tokens whose KV fits into the pool of each engine
    small_pool: int  # the same in a variation with a small pool


MIXES = {
    "cpu": Mix(
        clients=24,
        chats=36,
        questions=8,
        long_texts=3,
        system=128,
        message=32,
        document=640,
        long_text=1000,
        reply=64,
        kv_tokens=16 * 1024,
        small_pool=2560,
    ),
    "cuda": Mix(
        clients=128,
        chats=192,
        questions=24,
        long_texts=12,
        system=1024,
        message=128,
        document=8000,
        long_text=8000,
        reply=256,
        kv_tokens=192 * 1024,
        small_pool=48 * 1024,
    ),
}


class TokenSource:
    """Passages of a text, or random tokens without a tokenizer."""

    def __init__(self, llm: LLM):
        self.generator = random.Random(1)
        if llm.tokenizer is not None:
            self.tokens = llm.tokenizer.encode("\n".join([*QUESTIONS, *TEXTS]))
        else:
            vocabulary = llm.config.vocab_size // 2
            self.tokens = [self.generator.randrange(vocabulary) for _ in range(1000)]

    def passage(self, count: int) -> list[int]:
        start = self.generator.randrange(len(self.tokens))
        return [self.tokens[(start + index) % len(self.tokens)] for index in range(count)]


def mixed_jobs(llm: LLM, mix: Mix) -> list[Job]:
    """Return the requests in the order in which the clients send them."""
    source = TokenSource(llm)
    generator = source.generator

    def prefix(tokens: int) -> list[int]:
        """Return a passage that leaves room in the context for a message and a reply."""
        return source.passage(fitting(llm, tokens + mix.message, mix.reply) - mix.message)

    system = prefix(mix.system)
    documents = [prefix(mix.document) for _ in range(2)]
    chats = [
        Job(system + source.passage(mix.message), generator.randint(mix.reply // 4, mix.reply))
        for _ in range(mix.chats)
    ]
    questions = [
        Job(documents[index % 2] + source.passage(mix.message), mix.reply // 2)
        for index in range(mix.questions)
    ]
    length = fitting(llm, mix.long_text, mix.reply)
    long_texts = [Job(source.passage(length), mix.reply // 4) for _ in range(mix.long_texts)]
    jobs = [*chats, *questions, *long_texts]
    generator.shuffle(jobs)
    return jobs


# ---- variations ----------------------------------------------------------------------------------

ONE_THREAD = "one-thread"
VARIATION_VALUES = {
    "cpu": {"budgets": (256, 8192), "slots": (4, 16), "target_ms": 50, "host_gib": 0.25},
    "cuda": {"budgets": (2048, 32768), "slots": (16, 64), "target_ms": 20, "host_gib": 16},
}


def variations(kind: str, block_size: int) -> dict[str, dict[str, Any]]:
    """Return the options that each variation changes, on a "cuda" or "cpu" device."""
    values: dict[str, Any] = VARIATION_VALUES[kind]
    small_budget, large_budget = values["budgets"]
    few_slots, more_slots = values["slots"]
    small_pool = {"num_gpu_blocks_override": MIXES[kind].small_pool // block_size}
    changes: dict[str, dict[str, Any]] = {
        "small-steps": {"max_num_batched_tokens": small_budget},
        "large-steps": {"max_num_batched_tokens": large_budget},
        "adaptive": {"batching": "adaptive", "target_ms": values["target_ms"]},
        "no-chunked-prefill": {"enable_chunked_prefill": False},
        "shortest-first": {"scheduling_policy": "shortest"},
        "few-slots": {"max_num_seqs": few_slots},
        "more-slots": {"max_num_seqs": more_slots},
        "no-prefix-cache": {"enable_prefix_caching": False},
        "int8-kv": {"kv_cache_dtype": "int8"},
        "fp8-kv": {"kv_cache_dtype": "fp8"},
        "small-pool": small_pool,
        "small-pool-few-slots": {**small_pool, "max_num_seqs": few_slots},
        "small-pool-prefix-policy": {**small_pool, "scheduling_policy": "prefix"},
        "small-pool-host-tier": {**small_pool, "swap_space": values["host_gib"]},
        "drafts": {"speculative_config": "auto"},
        "depth": {"depth": 2 if kind == "cpu" else 1},
        "eager": {"enforce_eager": True},
    }
    if kind == "cpu":
        changes[ONE_THREAD] = {}
    return changes


NAMES = tuple(variations("cpu", 16))


def switch_of(name: str, changes: dict[str, Any]) -> str:
    """Return the changed options as they are written on the command line."""
    if name == ONE_THREAD:
        return "OMP_NUM_THREADS=1"
    words = []
    for option, value in changes.items():
        flag = flag_of(EngineOptions, option)
        words.append(flag if isinstance(value, bool) else f"{flag} {value}")
    return " ".join(words)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


# ---- measurement ---------------------------------------------------------------------------------

# The figures that are compared, with their titles.
FIGURES = {
    "tok_s": "tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
}
COUNTS = ("preemptions", "kv_blocks", "kv_mib")


class OptionsBench:
    """Measures variations of one engine. `load` makes an LLM with some options changed."""

    def __init__(self, load: Callable[[dict[str, Any]], LLM], run: BenchRun, rounds: int):
        self.load = load
        self.run = run
        self.rounds = rounds
        self.base = load({})
        self.mix = MIXES[self.base.device.type]
        self.jobs = mixed_jobs(self.base, self.mix)
        self._warm_up(self.base)

    def measure(self, name: str, changes: dict[str, Any]) -> None:
        """Add the row of a variation."""
        threads = 1 if name == ONE_THREAD else torch.get_num_threads()
        with torch_threads(threads):
            # The kernels keep the threads with which they were loaded.
            changed = self.load({}) if name == ONE_THREAD else self.base.with_options(**changes)
            self._warm_up(changed)

        def run_changed() -> dict[str, float]:
            with torch_threads(threads):
                return self._figures(changed)

        sides = {"default": lambda: self._figures(self.base), "changed": run_changed}
        figures = interleave(sides, self.rounds)
        columns = {
            side: {figure: [run[figure] for run in runs] for figure in (*FIGURES, *COUNTS)}
            for side, runs in figures.items()
        }
        self.run.add_row(
            variation=name,
            switch=switch_of(name, changes),
            **{
                side: {figure: spread(values) for figure, values in column.items()}
                for side, column in columns.items()
            },
            ratio={
                figure: ratios(columns["changed"][figure], columns["default"][figure])
                for figure in FIGURES
            },
        )

    def _warm_up(self, llm: LLM) -> None:
        llm.warm_up()
        drive(llm.engine, self.jobs[:4])

    def _figures(self, llm: LLM) -> dict[str, float]:
        """Run the workload with an empty prefix cache."""
        llm.reset_prefix_cache()
        scheduler = llm.engine.scheduler
        preemptions_before = scheduler.counters.preemptions
        used_blocks = []

        def sample(event: Event) -> None:
            used_blocks.append(scheduler.pool.num_blocks - scheduler.pool.num_available)

        llm.engine.events.subscribe(sample, StepLanded)
        try:
            report = drive(llm.engine, self.jobs, self.mix.clients)
        finally:
            llm.engine.events.unsubscribe(sample)
        return {
            **latencies(report),
            "tok_s": report.tokens_per_second,
            "preemptions": scheduler.counters.preemptions - preemptions_before,
            "kv_blocks": max(used_blocks),
            "kv_mib": max(used_blocks) * llm.memory.block_bytes / 2**20,
        }


def latencies(report: DriveReport) -> dict[str, float]:
    return {
        f"{name}_p{quantile}_ms": max(1e3 * percentile(seconds, quantile), MIN_MILLISECONDS)
        for name, seconds in (("ttft", report.first_tokens()), ("itl", report.gaps()))
        for quantile in (50, 99)
    }


def run_options(
    run: BenchRun,
    model: str | None,
    options: EngineOptions,
    names: Sequence[str] = NAMES,
    rounds: int = 3,
    advance: Callable[[str], None] = lambda name: None,
) -> None:
    """Measure variations on a model, or on random weights if `model` names a shape."""
    kind = pick_device(options.device).type
    options = bound_kv_pool(options, {kind: MIXES[kind].kv_tokens})

    def load(changes: dict[str, Any]) -> LLM:
        return load_shape(replace(options, **changes), model)

    bench = OptionsBench(load, run, rounds)
    changes = variations(kind, bench.base.memory.block_size)
    left_out: dict[str, str] = {}
    run.set_fact(device=kind, workload=bench.mix._asdict(), rounds=rounds, left_out=left_out)
    for name in names:
        advance(name)
        if name not in changes:
            left_out[name] = "it needs a CPU"
        elif name == "drafts" and not drafts_by_default(bench.base):
            left_out[name] = "this model does not use drafts by default on this device"
        else:
            try:
                bench.measure(name, changes[name])
            except (InvalidRequest, NotEnoughMemory) as error:  # such as an unsupported KV format
                left_out[name] = str(error)
            release_memory()


# ---- view ----------------------------------------------------------------------------------------


def cell(ratio: dict[str, float], rounds: int) -> str:
    if rounds == 1:
        return f"{ratio['median']:.2f}"
    text = f"{ratio['median']:.2f} [{spread_text(ratio, 2)}]"
    is_clear = ratio["min"] > CLEAR or ratio["max"] < 1 / CLEAR
    return f"**{text}**" if is_clear else text


def default_row(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the figures of the default, over all rounds beside all variations."""

    def over_rows(figure: str) -> dict[str, float]:
        spreads = [row["default"][figure] for row in rows]
        return spread([values[name] for values in spreads for name in ("min", "median", "max")])

    cells = []
    for figure in FIGURES:
        unit, decimals = ("tok/s", 0) if figure == "tok_s" else ("ms", int("itl" in figure))
        values = over_rows(figure)
        text = f"{values['median']:,.{decimals}f} {unit}"
        cells.append(f"{text} [{spread_text(values, decimals)}]")
    return ("the default", *cells, *(f"{over_rows(name)['median']:,.0f}" for name in COUNTS))


def tables(result: Result) -> list[ResultTable]:
    if not result["rows"]:
        return []
    columns = ("option", *FIGURES.values(), "preemptions", "KV blocks at most", "KV at most, MiB")
    rows = [
        (
            f"`{row['switch']}`",
            *(cell(row["ratio"][figure], result["rounds"]) for figure in FIGURES),
            *(f"{row['changed'][name]['median']:,.0f}" for name in COUNTS),
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, [default_row(result["rows"]), *rows])]


def panels(result: Result) -> list[Panel]:
    rows = result["rows"]
    if not rows:
        return []
    return [
        bars(
            "What each option changes",
            [row["switch"] for row in rows],
            {
                FIGURES[figure]: [row["ratio"][figure]["median"] for row in rows]
                for figure in ("tok_s", "ttft_p50_ms", "itl_p99_ms")
            },
            "relative to the default",
            width=900,
        )
    ]


def notes(result: Result) -> list[str]:
    if not result["rows"]:
        return []
    lines = [
        "The first row has the figures of the default. The others have ratios to the default in "
        "the same rounds, with the smallest and the largest; counts and MiB are their own. A ratio "
        f"in bold differs from 1 by more than {CLEAR - 1:.0%} in every round."
    ]
    noisy = [row["switch"] for row in result["rows"] if is_noisy(row["ratio"]["tok_s"])]
    if noisy:
        lines.append(
            "The throughput of these rows differs by more than 25% between rounds, so the machine "
            f"was busy or the figure is unstable: {', '.join(f'`{switch}`' for switch in noisy)}."
        )
    if result["rounds"] < 3:
        lines.append("The run has fewer than three rounds, which are too few to show the spread.")
    mix = Mix(**result["workload"])
    lines.append(
        f"The workload: {mix.clients} clients send {mix.chats + mix.questions + mix.long_texts} "
        f"requests, of which {mix.chats} are chats with one system message of {mix.system:,} "
        f"tokens, {mix.questions} are questions about two documents of {mix.document:,} tokens, "
        f"and {mix.long_texts} are texts of {mix.long_text:,} tokens. Replies have up to "
        f"{mix.reply} tokens."
    )
    origin = result["provenance"]
    load = origin["load_average"][0]
    if load > origin["machine"]["cores"] / 2:
        lines.append(
            f"Other programs used the machine: the load average was {load:.1f} at the start, on "
            f"{origin['machine']['cores']} cores. Do not rely on these figures."
        )
    left_out = result["left_out"].items()
    return [*lines, *(f"{name} was not measured: {reason}." for name, reason in left_out)]


VIEW = ResultView(tables, panels, notes)
