"""Measures the tiers below the device: the TTFT of an evicted prompt, loaded and computed.

A prompt is computed, evicted by other traffic and requested again. It is then loaded from host
memory, and after a restart of the engine from disk.

Every prompt is first requested cold, so that each ratio compares one prompt with itself. The next
request finds it in the cache of the device. That request computes exactly what the later ones do,
so all of them must return the same tokens. (In 16 bits a prompt in one chunk may be rounded
differently from a prompt in two chunks.) Loading is forced, and the result also reports what the
engine would have chosen. The limit of a load is the bandwidth of the link. The limit of the disk is
the rate of threads that only read. The bench measures both limits, and where the time to each first
token went.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.bench.interleave import spread
from octavo.core.blocks import chain_hash
from octavo.core.offload_costs import OffloadCosts
from octavo.errors import OctavoError
from octavo.events import Event, EventBus, StepLanded, StepPlanned
from octavo.llm import LLM
from octavo.ops.huge_pages import allocate_huge
from octavo.params import SamplingParams
from octavo.runner.disk import Disk
from octavo.types import Plan, StepResult

OUTPUT = 8  # tokens of a reply; replies are compared
SETTLE_SECONDS = 0.5  # If no new record appears on disk in this time, all records are written.


class AlwaysLoad(OffloadCosts):
    """Loads every block that can be loaded."""

    def loading_pays(self, disk: bool = False) -> bool:
        return True


class FirstTokenParts(NamedTuple):
    """The parts of a TTFT in seconds, one after the other.

    The part `read` includes the loading of blocks while other blocks were still read.
    """

    ask: float  # until the first step was planned, which reads from the disk or computes
    read: float  # from there until the last disk event arrived: records and checksums
    wait: float  # from there until a step was planned that computes
    load: float  # loading of the remaining blocks in the step that computes
    compute: float
    rest: float  # launching, sampling, output


class FirstTokenTimer:
    """Measures the parts of the time to a first token. It listens to the steps of the engine."""

    def __init__(self, events: EventBus):
        self.load_seconds = 0.0  # sum over all prompts
        self.loaded_blocks = 0
        self.begin()
        events.subscribe(self.on_event, StepPlanned, StepLanded)

    def begin(self) -> None:
        """Start to measure one prompt."""
        self.started_at = time.perf_counter()
        self.requested_at = self.started_at
        self.answered_at = self.started_at
        self.computing_at = 0.0
        self.step_load_seconds = 0.0
        self.step_compute_seconds = 0.0
        self.promoted_blocks = 0  # loaded before the step that computes

    def on_event(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, StepPlanned):
            if event.plan.items and not self.computing_at:
                self.computing_at = now
            if event.plan.fetches:
                self.requested_at = now
        elif isinstance(event, StepLanded):
            self._add_step(event.plan, event.result, now)

    def _add_step(self, plan: Plan, result: StepResult, now: float) -> None:
        if plan.loads:
            self.load_seconds += result.load_seconds
            self.loaded_blocks += len(plan.loads)
        if plan.items:
            self.step_load_seconds += result.load_seconds
            self.step_compute_seconds += result.compute_seconds
        else:
            self.promoted_blocks += len(plan.loads)
        if any(disk_event.fetch_id for disk_event in result.disk_events):
            self.answered_at = now

    def parts(self) -> FirstTokenParts:
        """Return the parts of the TTFT. Call this when the first token has arrived."""
        now = time.perf_counter()
        requested_at = self.computing_at
        answered_at = self.computing_at
        if self.answered_at > self.requested_at > self.started_at:
            requested_at = self.requested_at
            answered_at = self.answered_at
        step_seconds = self.step_load_seconds + self.step_compute_seconds
        return FirstTokenParts(
            ask=requested_at - self.started_at,
            read=answered_at - requested_at,
            wait=self.computing_at - answered_at,
            load=self.step_load_seconds,
            compute=self.step_compute_seconds,
            rest=now - self.computing_at - step_seconds,
        )


class Answer(NamedTuple):
    seconds: float  # time to the first token
    tokens: list[int]
    cached: int  # tokens of the prompt that were cached
    parts: FirstTokenParts | None  # None without a timer
    promoted_blocks: int = 0


def ask(llm: LLM, prompt: list[int], timer: FirstTokenTimer | None = None) -> Answer:
    counters = llm.engine.scheduler.counters
    cached_before = counters.cached_tokens
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    params.detokenize = False
    if timer is not None:
        timer.begin()
    start = time.perf_counter()
    stream = llm.stream(prompt, params)
    tokens = list(next(stream).token_ids)
    seconds = time.perf_counter() - start
    parts = None if timer is None else timer.parts()
    promoted_blocks = 0 if timer is None else timer.promoted_blocks
    for output in stream:
        tokens += output.token_ids
    if len(tokens) != OUTPUT:
        raise OctavoError(f"{len(tokens)} of {OUTPUT} tokens arrived, so the run does not count")
    cached = counters.cached_tokens - cached_before
    return Answer(seconds, tokens, cached, parts, promoted_blocks)


def force_loading(llm: LLM) -> OffloadCosts:
    """Make the engine load every block that it can. It continues to measure the costs."""
    tiers = llm.engine.scheduler.tiers
    if tiers is None:
        raise OctavoError(
            "this engine has no host tier: page-locked memory was refused, or swap_space is 0"
        )
    costs = tiers.costs
    tiers.costs = AlwaysLoad(
        costs.block_size,
        costs.load_seconds,
        costs.fetch_seconds,
        costs.prefill_tokens,
        costs.prefill_seconds,
    )
    return tiers.costs


# ---- the bench -----------------------------------------------------------------------------------


class TextPrompts:
    """Makes random prompts of one length."""

    def __init__(self, vocab_size: int, tokens: int):
        self.generator = random.Random(0)
        self.vocab_size = min(vocab_size, 10000)
        self.tokens = tokens

    def new_prompt(self) -> list[int]:
        return [self.generator.randrange(self.vocab_size) for _ in range(self.tokens)]


class HostAnswers(NamedTuple):
    """The answers to the same prompts in the first run of the engine."""

    prompts: list[list[int]]
    cold: list[Answer]
    device: list[Answer]
    host: list[Answer]


def measure(
    make_engine: Callable[[], LLM],
    directory: Path,
    tokens: int = 4000,
    repeat: int = 3,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure all tiers. `advance` is called 4 * repeat times.

    `make_engine` returns an engine with a disk tier at `directory`, host memory, and a block pool
    for only one prompt.
    """
    llm = make_engine()
    source = TextPrompts(llm.config.vocab_size, tokens)
    answers, result = measure_host(llm, source, directory, repeat, advance)
    llm.close()
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    records = settle(directory)
    forget_pages(directory)
    llm = make_engine()
    result["disk_records"] = records
    result |= measure_disk(llm, source, answers, advance)
    llm.close()
    return result


def measure_host(
    llm: LLM, source: TextPrompts, directory: Path, repeat: int, advance: Callable[[], None]
) -> tuple[HostAnswers, dict[str, Any]]:
    """Measure prompts that are computed, in the cache of the device, and in host memory."""
    llm.warm_up()
    ask(llm, source.new_prompt())
    costs = force_loading(llm)
    timer = FirstTokenTimer(llm.engine.events)
    prompts = [source.new_prompt() for _ in range(repeat)]
    answers = HostAnswers(prompts, [], [], [])
    for prompt in prompts:
        answers.cold.append(ask(llm, prompt, timer))
        answers.device.append(ask(llm, prompt, timer))
        advance()
        ask(llm, source.new_prompt())  # Other traffic takes the whole block pool.
        answers.host.append(ask(llm, prompt, timer))
        advance()
        settle(directory)
    link_rate = copy_rate(llm.device, llm.memory.block_bytes)
    load_bytes = timer.loaded_blocks * llm.memory.block_bytes
    load_rate = load_bytes / timer.load_seconds if timer.load_seconds else 0.0
    result: dict[str, Any] = {
        "bench": "tiers",
        "device": llm.device.type,
        "dtype": str(llm.model_dtype).removeprefix("torch."),
        "tokens": source.tokens,
        "block_size": llm.cache.block_size,
        "block_bytes": llm.memory.block_bytes,
        "pool_blocks": llm.cache.num_blocks,
        "host_blocks": llm.cache.host_blocks,
        "cold_ttft_s": spread_seconds(answers.cold),
        "device_ttft_s": spread_seconds(answers.device),
        "host_ttft_s": spread_seconds(answers.host),
        "host_ratio": spread_ratio(answers.cold, answers.host),
        "host_cached_tokens": min(answer.cached for answer in answers.host),
        "load_bytes": load_bytes,
        "load_bytes_s": load_rate,
        "link_bytes_s": link_rate,
        "of_link": load_rate / link_rate,
        "chooses_host": OffloadCosts.loading_pays(costs),
        "stores": llm.engine.scheduler.counters.tiers.stores,
    }
    return answers, result


def measure_disk(
    llm: LLM, source: TextPrompts, answers: HostAnswers, advance: Callable[[], None]
) -> dict[str, Any]:
    """Measure prompts that a new engine reads from disk, and again from the page cache."""
    llm.warm_up()
    ask(llm, source.new_prompt())
    costs = force_loading(llm)
    timer = FirstTokenTimer(llm.engine.events)
    store = llm.runner.tier_store
    if store is None or store.disk is None:
        raise OctavoError("this engine has no disk tier: set --kv-disk to a directory")
    passes: dict[str, list[Answer]] = {}
    busy_readers: dict[str, float] = {}
    for name in ("disk", "paged"):  # In the second pass the records are in the page cache.
        reading_before = store.read_seconds
        passes[name] = []
        for prompt in answers.prompts:
            passes[name].append(ask(llm, prompt, timer))
            advance()
        reading = store.read_seconds - reading_before
        waited = sum(answer.parts.read for answer in passes[name] if answer.parts is not None)
        busy_readers[name] = reading / waited if waited else 0.0
        llm.reset_prefix_cache()
    full_blocks = len(answers.prompts) * (source.tokens - 1) // llm.cache.block_size
    record_bytes = full_blocks * llm.memory.block_bytes
    result: dict[str, Any] = {}
    for name, loaded in passes.items():
        result |= {
            f"{name}_ttft_s": spread_seconds(loaded),
            f"{name}_ratio": spread_ratio(answers.cold, loaded),
            f"{name}_cached_tokens": min(answer.cached for answer in loaded),
            f"{name}_bytes_s": record_bytes / sum(answer.seconds for answer in loaded),
        }
    all_answers = {"device": answers.device, "host": answers.host, **passes}
    return result | {
        "parts_s": {name: median_parts(tier_answers) for name, tier_answers in all_answers.items()},
        "busy_readers": busy_readers,
        "loaded_while_reading": {
            name: min(answer.promoted_blocks for answer in loaded)
            for name, loaded in passes.items()
        },
        "read_alone_bytes_s": read_rates(store.disk, answers.prompts[0], llm.cache.block_size),
        "disk_misses": dict(llm.engine.scheduler.counters.tiers.misses),
        "chooses_disk": OffloadCosts.loading_pays(costs, disk=True),
        "same_tokens": have_same_tokens(*all_answers.values()),
        "same_as_computed": have_same_tokens(answers.cold, answers.device),
    }


def spread_seconds(answers: list[Answer]) -> dict[str, float]:
    return spread([answer.seconds for answer in answers])


def spread_ratio(cold: list[Answer], loaded: list[Answer]) -> dict[str, float]:
    """Return how many times faster a loaded prompt is than a computed one."""
    pairs = zip(cold, loaded, strict=True)
    return spread([computed.seconds / other.seconds for computed, other in pairs])


def have_same_tokens(*runs: list[Answer]) -> bool:
    """Return whether all runs gave the same tokens for each prompt."""
    for answers in zip(*runs, strict=True):
        if any(answer.tokens != answers[0].tokens for answer in answers):
            return False
    return True


def median_parts(answers: list[Answer]) -> dict[str, float]:
    timings = [answer.parts for answer in answers if answer.parts is not None]
    return {
        field: statistics.median(getattr(timing, field) for timing in timings)
        for field in FirstTokenParts._fields
    }


# ---- limits --------------------------------------------------------------------------------------


def read_rates(disk: Disk, prompt: list[int], block_size: int, rounds: int = 3) -> dict[str, float]:
    """Return the bytes per second of threads that only read and check the records of a prompt.

    The records are in the page cache. The keys are numbers of threads.
    """
    block_hash = b""
    records: list[tuple[bytes, array[int]]] = []
    for block in range((len(prompt) - 1) // block_size):
        tokens = array("i", prompt[block * block_size : (block + 1) * block_size])
        block_hash = chain_hash(block_hash, tokens)
        records.append((block_hash, tokens))
    memory = (
        allocate_huge(len(records) * disk.block_bytes).fill_(0).view(-1, disk.block_bytes).numpy()
    )

    def read_record(index: int) -> None:
        disk.read(*records[index], memory[index].data)

    rates = dict[str, float]()
    threads = 1
    while threads <= (os.cpu_count() or 1):
        best_seconds = float("inf")
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(rounds):
                start = time.perf_counter()
                list(pool.map(read_record, range(len(records))))
                best_seconds = min(best_seconds, time.perf_counter() - start)
        rates[str(threads)] = memory.nbytes / best_seconds
        threads *= 2
    return rates


def settle(directory: Path, timeout: float = 60.0) -> int:
    """Wait until no more records are written, and return their number."""
    record_count = -1
    stable_since = 0.0
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        current_count = sum(1 for _ in directory.glob("kv-*/*.kv"))
        if current_count != record_count:
            record_count = current_count
            stable_since = time.monotonic()
        elif time.monotonic() - stable_since > SETTLE_SECONDS:
            break
        time.sleep(SETTLE_SECONDS / 10)
    return record_count


def forget_pages(directory: Path) -> None:
    """Ask the system to drop the records from its page cache, so that they come from the disk."""
    for path in directory.glob("kv-*/*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def copy_rate(
    device: torch.device, block_bytes: int, total_bytes: int = 2**28, rounds: int = 5
) -> float:
    """Return the bytes per second from host memory to the device, in copies of a block."""
    is_cuda = device.type == "cuda"
    count = max(total_bytes // block_bytes, 1)
    source = torch.ones(count, block_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty(count, block_bytes, dtype=torch.uint8, device=device)
    best_seconds = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for index in range(count):
            target[index].copy_(source[index], non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return count * block_bytes / best_seconds
