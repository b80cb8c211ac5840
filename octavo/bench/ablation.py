"""Turns off one mechanism at a time, and measures what it contributes.

Each mechanism is measured on a workload that it exists for: with it and without it, in turn. The
contribution is the ratio of the two: 2 means that the mechanism doubles the throughput, or halves
the time if the workload's figure is a time. Tokens are compared too.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from octavo.assemble import pick_device, settle_speculation
from octavo.bench.drive import DriveReport, Job, drive
from octavo.bench.interleave import interleave, is_noisy, ratios, spread
from octavo.bench.measure_speculation import WORKLOADS as TEXT_WORKLOADS
from octavo.bench.model_shapes import load_shape
from octavo.bench.picture import Panel, bars
from octavo.bench.result_file import BenchRun
from octavo.bench.views import Result, ResultTable, ResultView, spread_text
from octavo.engine_options import LOADING_OPTIONS, EngineOptions
from octavo.llm import LLM
from octavo.memory import BLOCK_SIZE
from octavo.model.base import Matrix

MAX_ATTEMPTS = 3  # attempts at a measurement that other programs disturb


class Scale(NamedTuple):
    """The size of the workloads, in tokens and requests."""

    streams: int  # requests at once
    prompt: int
    reply: int
    context: int  # tokens of a long prompt
    document: int  # tokens of a prompt that takes several steps
    shared: int  # tokens of a prefix that requests share


SCALES = {
    "cpu": Scale(streams=16, prompt=32, reply=64, context=1000, document=4000, shared=384),
    "cuda": Scale(streams=128, prompt=64, reply=256, context=8000, document=32000, shared=2048),
}


# ---- workloads -----------------------------------------------------------------------------------


class Figure(NamedTuple):
    """The quantity that is measured on a workload."""

    name: str
    unit: str
    of: Callable[[DriveReport], float]
    higher_is_better: bool = True


THROUGHPUT = Figure("throughput", "tok/s", lambda report: report.tokens_per_second)
LONGEST_GAP = Figure(
    "longest pause of a stream", "ms", lambda report: 1e3 * report.longest_gap("stream"), False
)
SHORT_TTFT = Figure(
    "TTFT of short prompts", "ms", lambda report: 1e3 * report.median_first_token("short"), False
)
SPARSE_TTFT = Figure("TTFT", "ms", lambda report: 1e3 * report.median_first_token("sparse"), False)
AGAIN_TTFT = Figure(
    "TTFT of prompts seen before",
    "ms",
    lambda report: 1e3 * report.median_first_token("again"),
    False,
)


@dataclass(frozen=True)
class AblationWorkload:
    description: str
    jobs: Callable[[LLM, Scale], list[Job]]
    figure: Figure = THROUGHPUT
    clients: Callable[[Scale], int | None] = lambda scale: None  # None: all jobs are sent at once
    options: Callable[[Scale, int], dict[str, Any]] = lambda scale, block_size: {}


def random_tokens(generator: random.Random, llm: LLM, count: int) -> list[int]:
    return [generator.randrange(llm.config.vocab_size // 2) for _ in range(count)]


def fitting(llm: LLM, tokens: int, reply: int) -> int:
    """Return how many of the tokens fit into the model's context, before a reply."""
    return min(tokens, llm.schedule.max_model_len - reply - 1)


def single_jobs(llm: LLM, scale: Scale) -> list[Job]:
    generator = random.Random(1)
    return [Job(random_tokens(generator, llm, scale.prompt), 2 * scale.reply)]


def ragged_jobs(llm: LLM, scale: Scale) -> list[Job]:
    generator = random.Random(2)
    return [
        Job(random_tokens(generator, llm, scale.prompt), generator.randint(4, 2 * scale.reply))
        for _ in range(2 * scale.streams)
    ]


def sparse_jobs(llm: LLM, scale: Scale) -> list[Job]:
    generator = random.Random(8)
    return [
        Job(random_tokens(generator, llm, scale.prompt), 4, group="sparse")
        for _ in range(scale.streams)
    ]


def uncertain_jobs(llm: LLM, scale: Scale) -> list[Job]:
    """Requests that ask for many tokens and end after few, as chats do."""
    return [
        Job(job.prompt, max(job.output // 2, 1), max_tokens=4 * scale.reply)
        for job in ragged_jobs(llm, scale)
    ]


def shared_prefix_jobs(llm: LLM, scale: Scale) -> list[Job]:
    generator = random.Random(3)
    shared = random_tokens(generator, llm, fitting(llm, scale.shared, scale.prompt + 16))
    return [
        Job(shared + random_tokens(generator, llm, scale.prompt // 2), 16)
        for _ in range(scale.streams)
    ]


def long_context_jobs(llm: LLM, scale: Scale) -> list[Job]:
    generator = random.Random(4)
    length = fitting(llm, scale.context, scale.reply)
    return [Job(random_tokens(generator, llm, length), scale.reply) for _ in range(4)]


def document_jobs(llm: LLM, scale: Scale) -> list[Job]:
    """Streams that decode, and a long prompt that arrives after a while."""
    generator = random.Random(5)
    streams = [
        Job(random_tokens(generator, llm, scale.prompt), scale.reply, group="stream")
        for _ in range(4)
    ]
    length = fitting(llm, scale.document, 4)
    return [*streams, Job(random_tokens(generator, llm, length), 4, after=4 * 8)]


def crowded_jobs(llm: LLM, scale: Scale) -> list[Job]:
    """Long prompts, and short ones that arrive behind them."""
    generator = random.Random(6)
    length = fitting(llm, scale.document, 4)
    long_jobs = [Job(random_tokens(generator, llm, length), 4) for _ in range(2)]
    short = [Job(random_tokens(generator, llm, scale.prompt), 4, group="short") for _ in range(8)]
    return [*long_jobs, *short]


def returning_jobs(llm: LLM, scale: Scale) -> list[Job]:
    """Prompts that come again after others have taken their blocks."""
    generator = random.Random(7)
    length = fitting(llm, scale.context, 8)
    prompts = [random_tokens(generator, llm, length) for _ in range(4)]
    first = [Job(prompt, 4) for prompt in prompts]
    return [*first, *(Job(prompt, 4, group="again") for prompt in prompts)]


def copying_jobs(llm: LLM, scale: Scale) -> list[Job]:
    """Tasks that repeat a text."""
    prompts = TEXT_WORKLOADS["copy"][:4]
    return [
        Job(llm.encode_chat([{"role": "user", "content": prompt}]), 2 * scale.reply)
        for prompt in prompts
    ]


WORKLOADS = {
    "single": AblationWorkload(
        "one request", single_jobs, options=lambda scale, block_size: {"max_num_seqs": 4}
    ),
    "ragged": AblationWorkload(
        "requests with replies of very different lengths; each client sends its next request when "
        "its last one has ended",
        ragged_jobs,
        clients=lambda scale: scale.streams,
        options=lambda scale, block_size: {"max_num_seqs": scale.streams},
    ),
    "sparse": AblationWorkload(
        "short requests of two clients, each of which sends its next request when its last one has "
        "ended",
        sparse_jobs,
        SPARSE_TTFT,
        clients=lambda scale: 2,
    ),
    "uncertain": AblationWorkload(
        "requests that ask for many tokens and end after few, in a small KV pool",
        uncertain_jobs,
        options=lambda scale, block_size: {
            "max_num_seqs": scale.streams,
            # as many tokens as a quarter of the streams may ask for
            "num_gpu_blocks_override": scale.streams
            * (scale.prompt + 4 * scale.reply)
            // (4 * block_size),
            "enable_prefix_caching": False,
        },
    ),
    "shared prefix": AblationWorkload(
        "requests whose prompts begin with the same tokens", shared_prefix_jobs
    ),
    "long context": AblationWorkload("requests with long prompts", long_context_jobs),
    "document": AblationWorkload(
        "streams that decode while a long prompt arrives", document_jobs, LONGEST_GAP
    ),
    "crowded": AblationWorkload(
        "short prompts that arrive behind long ones", crowded_jobs, SHORT_TTFT
    ),
    "returning": AblationWorkload(
        "prompts that return after their KV has left the device",
        returning_jobs,
        AGAIN_TTFT,
        clients=lambda scale: 1,
        options=lambda scale, block_size: {
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 2 * -(-(scale.context + 8) // block_size),
        },
    ),
    "copying": AblationWorkload(
        "requests to repeat a text, one at a time",
        copying_jobs,
        clients=lambda scale: 1,
        options=lambda scale, block_size: {"max_num_seqs": 4},
    ),
}


# ---- mechanisms ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mechanism:
    workload: str
    off: dict[str, Any]  # options that turn it off
    switch: str  # the same on the command line
    on: dict[str, Any] = field(default_factory=dict)  # options that turn it on
    is_default: bool = True  # whether it is on without options
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs_text: bool = False  # it needs a tokenizer and trained weights


GPU = ("cuda",)
MECHANISMS = {
    "kv-cache": Mechanism("single", dict(kv_cache=False), "--no-kv-cache"),
    "paging": Mechanism(
        "uncertain", dict(kv_allocation="contiguous"), "--kv-allocation contiguous"
    ),
    "prefix-cache": Mechanism(
        "shared prefix", dict(enable_prefix_caching=False), "--no-prefix-caching"
    ),
    "continuous-over-window": Mechanism("sparse", dict(batching="window"), "--batching window"),
    "continuous-over-static": Mechanism("ragged", dict(batching="static"), "--batching static"),
    "continuous-over-none": Mechanism("ragged", dict(batching="none"), "--batching none"),
    "chunked-prefill": Mechanism(
        "document", dict(enable_chunked_prefill=False), "--no-chunked-prefill"
    ),
    "short-prompts-first": Mechanism(
        "crowded", dict(short_prompt_share=0.0), "--short-prompt-share 0"
    ),
    "overlap": Mechanism("ragged", dict(depth=1), "--depth 1", devices=GPU),
    "cuda-graphs": Mechanism("single", dict(enforce_eager=True), "--enforce-eager", devices=GPU),
    "fused-decoder": Mechanism("single", dict(fused_decoder=False), "--no-fused-decoder"),
    "fused-kernels": Mechanism("ragged", dict(fused_kernels=False), "--no-fused-kernels"),
    "attention": Mechanism(
        "long context", dict(attention_backend="reference"), "--attention reference"
    ),
    "cascade-attention": Mechanism(
        "shared prefix",
        {},
        "without --cascade-attention",
        on=dict(cascade_attention=True),
        is_default=False,
        devices=GPU,
    ),
    "quantisation": Mechanism("ragged", dict(quantization="none"), "--quant none"),
    "speculation": Mechanism(
        "copying",
        dict(speculative_config=None),
        "--speculative off",
        on=dict(speculative_config="auto"),  # benches measure without drafts by default
        needs_text=True,
    ),
    "suffix-drafts": Mechanism(
        "copying",
        {},
        "without --speculative suffix",
        on=dict(speculative_config="suffix"),
        is_default=False,
        needs_text=True,
    ),
    "host-tier": Mechanism(
        "returning",
        {},
        "without --kv-host-gib 1",
        on=dict(swap_space=1.0),
        is_default=False,
    ),
}


def sides_of(mechanism: Mechanism, block_size: int, scale: Scale) -> dict[str, dict[str, Any]]:
    """Return the options of both sides, as changes to the base."""
    common = WORKLOADS[mechanism.workload].options(scale, block_size)
    on = common | mechanism.on
    off = common | mechanism.off
    if "enable_chunked_prefill" in off:
        # Engines without chunked prefill have a budget for the longest prompt.
        off["max_num_batched_tokens"] = 2 * scale.document
    return {"on": on, "off": off}


class Ablation:
    """Measures mechanisms on one model. `load` makes an LLM with some options changed."""

    def __init__(
        self,
        load: Callable[[dict[str, Any]], LLM],
        run: BenchRun,
        rounds: int,
    ):
        self.load = load
        self.run = run
        self.rounds = rounds
        self.base = load({})
        self.scale = SCALES[self.base.device.type]
        self.base.warm_up()

    def measure(self, name: str) -> None:
        """Add the row of a mechanism, or the reason why it cannot be measured."""
        mechanism = MECHANISMS[name]
        workload = WORKLOADS[mechanism.workload]
        changes = sides_of(mechanism, self.base.memory.block_size, self.scale)
        sides = {side: self._variant(options) for side, options in changes.items()}
        jobs = workload.jobs(self.base, self.scale)
        clients = workload.clients(self.scale)

        def runner(llm: LLM) -> Callable[[], DriveReport]:
            def run() -> DriveReport:
                llm.reset_prefix_cache()
                return drive(llm.engine, jobs, clients)

            return run

        runners = {side: runner(llm) for side, llm in sides.items()}
        reports = interleave(runners, self.rounds, attempts=MAX_ATTEMPTS)
        self._add_row(name, mechanism, workload, reports)
        del sides
        release_memory()

    def _variant(self, changes: Mapping[str, Any]) -> LLM:
        if LOADING_OPTIONS & changes.keys():
            llm = self.load(dict(changes))
        else:
            llm = self.base.with_options(**changes)
        llm.warm_up()
        return llm

    def _add_row(
        self,
        name: str,
        mechanism: Mechanism,
        workload: AblationWorkload,
        reports: dict[str, list[DriveReport]],
    ) -> None:
        figure = workload.figure
        on = [figure.of(report) for report in reports["on"]]
        off = [figure.of(report) for report in reports["off"]]
        contribution = ratios(on, off) if figure.higher_is_better else ratios(off, on)
        self.run.add_row(
            mechanism=name,
            switch=mechanism.switch,
            is_default=mechanism.is_default,
            workload=mechanism.workload,
            figure=figure.name,
            unit=figure.unit,
            on=spread(on),
            off=spread(off),
            contribution=contribution,
            most_running={
                side: side_reports[0].most_running for side, side_reports in reports.items()
            },
            same_tokens=reports["on"][0].replies == reports["off"][0].replies,
            verdict=verdict(contribution),
            noisy=is_noisy(contribution),
        )


KV_TOKENS = {"cpu": 32 * 1024, "cuda": 512 * 1024}  # the KV pool of each of the two engines


def bound_kv_pool(
    options: EngineOptions, kv_tokens: Mapping[str, int] = KV_TOKENS
) -> EngineOptions:
    """Bound the KV pool, because two engines share the memory."""
    kind = pick_device(options.device).type
    block_size = options.block_size or BLOCK_SIZE[kind]
    num_blocks = options.num_gpu_blocks_override or kv_tokens[kind] // block_size
    return replace(options, block_size=block_size, num_gpu_blocks_override=num_blocks)


def run_ablation(
    run: BenchRun,
    model: str | None,
    options: EngineOptions,
    names: Sequence[str] = tuple(MECHANISMS),
    rounds: int = 3,
    advance: Callable[[str], None] = lambda name: None,
) -> None:
    """Measure mechanisms on a model, or on random weights if `model` names a shape."""
    options = bound_kv_pool(options)

    def load(changes: dict[str, Any]) -> LLM:
        return load_shape(replace(options, **changes), model)

    bench = Ablation(load, run, rounds)
    reasons = {name: reason_to_skip(name, bench.base) for name in names}
    run.set_fact(
        device=bench.base.device.type,
        dtype=str(bench.base.model_dtype).removeprefix("torch."),
        left_out={name: reason for name, reason in reasons.items() if reason is not None},
    )
    for name in (name for name, reason in reasons.items() if reason is None):
        advance(name)
        bench.measure(name)


def verdict(contribution: dict[str, float]) -> str:
    """Return whether a mechanism makes a difference in every round."""
    if contribution["min"] > 1:
        return "helps"
    return "costs" if contribution["max"] < 1 else "unclear"


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_to_skip(name: str, llm: LLM) -> str | None:
    """Return why a mechanism cannot be measured on a model, or None."""
    mechanism = MECHANISMS[name]
    if llm.device.type not in mechanism.devices:
        return f"it needs a device of the kind {' or '.join(mechanism.devices)}"
    if mechanism.needs_text and (llm.tokenizer is None or llm.options.load_format == "dummy"):
        return "it needs a trained model with a tokenizer"
    if name == "quantisation" and not is_quantised(llm):
        return "the weights of this model are not quantised: give --quant"
    if name == "speculation" and not drafts_by_default(llm):
        return "this model does not use drafts by default on this device"
    return None


def drafts_by_default(llm: LLM) -> bool:
    options = replace(llm.options, speculative_config=EngineOptions().speculative_config)
    return settle_speculation(options, llm.checkpoint, llm.device.type) is not None


def is_quantised(llm: LLM) -> bool:
    weights = [module.weight for module in llm.model.modules() if isinstance(module, Matrix)]
    return any(not isinstance(weight, torch.Tensor) for weight in weights)


# ---- view ----------------------------------------------------------------------------------------


def tables(result: Result) -> list[ResultTable]:
    columns = (
        "mechanism",
        "off with",
        "workload",
        "figure",
        "on",
        "off",
        "contribution",
        "min - max",
        "same tokens",
    )
    rows = [
        (
            row["mechanism"] + ("" if row["is_default"] else " (not a default)"),
            f"`{row['switch']}`",
            row["workload"],
            f"{row['figure']}, {row['unit']}",
            f"{row['on']['median']:,.0f}",
            f"{row['off']['median']:,.0f}",
            f"{row['contribution']['median']:.2f}x",
            spread_text(row["contribution"], 2),
            "yes" if row["same_tokens"] else "no",
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows, left=(0, 1, 2, 3))]


def panels(result: Result) -> list[Panel]:
    rows = sorted(result["rows"], key=lambda row: -row["contribution"]["median"])
    return [
        bars(
            "Contribution of each mechanism",
            [f"{row['mechanism']} ({row['figure']})" for row in rows],
            {"with it / without it": [row["contribution"]["median"] for row in rows]},
            "times better than without it",
            width=900,
        )
    ]


def notes(result: Result) -> list[str]:
    lines = []
    for row in result["rows"]:
        if row["noisy"]:
            lines.append(
                f"{row['mechanism']}: the rounds differ by more than 25%, so the machine was busy "
                "or the figure is unstable."
            )
        if row["is_default"] and row["verdict"] != "helps":
            lines.append(f"{row['mechanism']} did not help in every round of this run.")
    return lines


VIEW = ResultView(tables, panels, notes)
