"""What the tiers below the device are worth: the time to the first token of a prompt that was computed, evicted by other
traffic and asked for again, from host memory, and after a restart from disk, against computing it.

Every prompt is asked for cold first, so that each ratio is of one prompt, and then from the device's own cache: that computes
exactly what the others do, so theirs must be the same tokens. (In 16 bits a prompt in one piece may round otherwise than in two.)
Loading is forced: what the engine would have chosen by itself is told beside it. The limit of a load is the link's bandwidth. The limit of
the disk is the rate of threads that only read. The bench measures both limits and where the time of each first token went.
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

from octavo.bench.measure_batching import spread
from octavo.core.blocks import chain_hash
from octavo.core.offload_costs import OffloadCosts
from octavo.errors import OctavoError
from octavo.events import Event, EventLog, StepLanded, StepPlanned
from octavo.llm import LLM
from octavo.ops.huge_pages import area
from octavo.params import SamplingParams
from octavo.runner.disk import Disk
from octavo.types import Plan, StepResult

OUTPUT = 8  # tokens, compared
SETTLE = 0.5  # seconds without a new record, after which all are written


class Eager(OffloadCosts):
    """Loads whatever can be loaded."""

    def loading_pays(self, disk: bool = False) -> bool:
        return True


class Parts(NamedTuple):
    """Where the time to a first token went: seconds, one part after the other. Blocks that were loaded
    while others were read count as read."""

    ask: float  # until the step was planned that asks the disk, or else the one that computes
    read: float  # until the last answer of the disk arrived: records and checksums
    wait: float  # until the step was planned that computes
    load: float  # what that step still had to load
    compute: float
    rest: float  # launching, sampling and delivering


class FirstTokenTimer:
    """Measures where the time to a first token goes. It listens to the engine's steps."""

    def __init__(self, events: EventLog):
        self.load_seconds = 0.0  # of all prompts
        self.loaded_blocks = 0
        self.begin()
        events.subscribe(self.on_event, StepPlanned, StepLanded)

    def begin(self) -> None:
        """Start to measure one prompt."""
        self.started_at = time.perf_counter()
        self.asked_at = self.started_at
        self.answered_at = self.started_at
        self.computing_at = 0.0
        self.load = 0.0
        self.compute = 0.0
        self.promoted = 0  # blocks loaded before the step that computes

    def on_event(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, StepPlanned):
            if event.plan.items and not self.computing_at:
                self.computing_at = now
            if event.plan.fetches:
                self.asked_at = now
        elif isinstance(event, StepLanded):
            self._add_step(event.plan, event.result, now)

    def _add_step(self, plan: Plan, result: StepResult, now: float) -> None:
        if plan.loads:
            self.load_seconds += result.load_seconds
            self.loaded_blocks += len(plan.loads)
        if plan.items:
            self.load += result.load_seconds
            self.compute += result.compute_seconds
        else:
            self.promoted += len(plan.loads)
        if any(disk_event.fetch_id for disk_event in result.disk_events):
            self.answered_at = now

    def parts(self) -> Parts:
        """Return the parts of the time until now. Call it when the first token has arrived."""
        now = time.perf_counter()
        asked_at = self.computing_at
        answered_at = self.computing_at
        if self.answered_at > self.asked_at > self.started_at:
            asked_at = self.asked_at
            answered_at = self.answered_at
        return Parts(
            ask=asked_at - self.started_at,
            read=answered_at - asked_at,
            wait=self.computing_at - answered_at,
            load=self.load,
            compute=self.compute,
            rest=now - self.computing_at - self.load - self.compute,
        )


class Answer(NamedTuple):
    seconds: float  # to the first token
    tokens: list[int]
    cached: int  # tokens of the prompt
    parts: Parts | None  # if it was timed
    promoted: int = 0  # blocks


def ask(llm: LLM, prompt: list[int], timer: FirstTokenTimer | None = None) -> Answer:
    before = llm.engine.scheduler.counters.cached_tokens
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    params.detokenize = False
    if timer is not None:
        timer.begin()
    start = time.perf_counter()
    stream = llm.stream(prompt, params)
    first = next(stream)
    seconds = time.perf_counter() - start
    parts = timer.parts() if timer is not None else None
    promoted = timer.promoted if timer is not None else 0
    tokens = [*first.token_ids, *(token for piece in stream for token in piece.token_ids)]
    if len(tokens) != OUTPUT:
        raise OctavoError(f"{len(tokens)} of {OUTPUT} tokens arrived: not counted")
    cached = llm.engine.scheduler.counters.cached_tokens - before
    return Answer(seconds, tokens, cached, parts, promoted)


def eager(llm: LLM) -> OffloadCosts:
    """Make it load whatever it can. The costs it goes on measuring."""
    tiers = llm.engine.scheduler.tiers
    if tiers is None:
        raise OctavoError(
            "this engine has no second tier: page-locked memory was refused, or no room was given"
        )
    old = tiers.costs
    tiers.costs = Eager(
        old.block_size, old.load_seconds, old.fetch_seconds, old.prefill_tokens, old.prefill_seconds
    )
    return tiers.costs


def measure(
    make: Callable[[], LLM],
    directory: Path,
    tokens: int = 4000,
    repeat: int = 3,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`make`: an engine whose pool holds one such prompt and little more, with host memory, and a disk at `directory`. Calls
    `done` 4 * repeat times."""
    rng = random.Random(0)
    llm = make()
    vocabulary = min(llm.config.vocab_size, 10000)

    def prompt() -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(tokens)]

    llm.warm_up()
    ask(llm, prompt())
    costs = eager(llm)
    tiers = llm.engine.scheduler.counters.tiers
    timer = FirstTokenTimer(llm.engine.events)
    prompts = [prompt() for _ in range(repeat)]
    cold = list[Answer]()
    device = list[Answer]()
    host = list[Answer]()
    for p in prompts:
        cold.append(ask(llm, p, timer))
        device.append(ask(llm, p, timer))
        done()
        ask(llm, prompt())  # other traffic: it takes all of the pool
        host.append(ask(llm, p, timer))
        done()
        settle(directory)
    link = copy_rate(llm.device, llm.memory.block_bytes)
    load_bytes = timer.loaded_blocks * llm.memory.block_bytes
    rate = load_bytes / timer.load_seconds if timer.load_seconds else 0.0
    result: dict[str, Any] = {
        "bench": "tiers",
        "device": llm.device.type,
        "dtype": str(llm.model_dtype).removeprefix("torch."),
        "tokens": tokens,
        "block_size": llm.cache.block_size,
        "block_bytes": llm.memory.block_bytes,
        "pool_blocks": llm.cache.num_blocks,
        "host_blocks": llm.cache.host_blocks,
        "cold_ttft_s": spread([a.seconds for a in cold]),
        "device_ttft_s": spread([a.seconds for a in device]),
        "host_ttft_s": spread([a.seconds for a in host]),
        "host_ratio": spread([c.seconds / h.seconds for c, h in zip(cold, host, strict=True)]),
        "host_cached_tokens": min(a.cached for a in host),
        "load_bytes": load_bytes,
        "load_bytes_s": rate,
        "link_bytes_s": link,
        "of_link": rate / link,
        "chooses_host": OffloadCosts.loading_pays(costs),
        "stores": tiers.stores,
    }
    llm.close()
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    records = settle(directory)
    forget_pages(directory)
    llm = make()
    llm.warm_up()
    ask(llm, prompt())
    costs = eager(llm)
    count = llm.engine.scheduler.counters.tiers
    timer = FirstTokenTimer(llm.engine.events)
    runner = llm.runner.tiers
    if runner is None or runner.disk is None:
        raise OctavoError("this engine has no disk")
    passes: list[list[Answer]] = []
    readers: list[float] = []
    for _ in range(2):  # the second time the system has the records in memory
        passes.append([])
        busy = runner.read_seconds
        for p in prompts:
            passes[-1].append(ask(llm, p, timer))
            done()
        waited = sum(a.parts.read for a in passes[-1] if a.parts is not None)
        readers.append((runner.read_seconds - busy) / waited if waited else 0.0)
        llm.reset_prefix_cache()
    disk, paged = passes
    record = len(prompts) * (tokens - 1) // llm.cache.block_size * llm.memory.block_bytes
    result |= {
        "disk_ttft_s": spread([a.seconds for a in disk]),
        "disk_ratio": spread([c.seconds / d.seconds for c, d in zip(cold, disk, strict=True)]),
        "disk_cached_tokens": min(a.cached for a in disk),
        "disk_bytes_s": record / sum(a.seconds for a in disk),
        "paged_ttft_s": spread([a.seconds for a in paged]),
        "paged_ratio": spread([c.seconds / d.seconds for c, d in zip(cold, paged, strict=True)]),
        "paged_cached_tokens": min(a.cached for a in paged),
        "paged_bytes_s": record / sum(a.seconds for a in paged),
        "parts_s": {
            name: medians([a.parts for a in each if a.parts is not None])
            for name, each in (("device", device), ("host", host), ("disk", disk), ("paged", paged))
        },
        "busy_readers": dict(zip(("disk", "paged"), readers, strict=True)),
        "loaded_while_reading": {
            "disk": min(a.promoted for a in disk),
            "paged": min(a.promoted for a in paged),
        },
        "read_alone_bytes_s": read_rates(runner.disk, prompts[0], llm.cache.block_size),
        "disk_records": records,
        "disk_misses": dict(count.misses),
        "chooses_disk": OffloadCosts.loading_pays(costs, disk=True),
        "same_tokens": all(
            len({tuple(a.tokens) for a in each}) == 1
            for each in zip(device, host, disk, paged, strict=True)
        ),
        "same_as_computed": all(c.tokens == d.tokens for c, d in zip(cold, device, strict=True)),
    }
    llm.close()
    return result


def medians(each: list[Parts]) -> dict[str, float]:
    return {
        name: statistics.median(getattr(parts, name) for parts in each) for name in Parts._fields
    }


def read_rates(disk: Disk, prompt: list[int], size: int, rounds: int = 3) -> dict[str, float]:
    """Bytes a second of the records of a prompt that the system has in memory, checked, by so many threads and nothing else."""
    parent = b""
    records: list[tuple[bytes, array[int]]] = []
    for j in range((len(prompt) - 1) // size):
        tokens = array("i", prompt[j * size : (j + 1) * size])
        records.append((parent := chain_hash(parent, tokens), tokens))
    memory = area(len(records) * disk.block_bytes).fill_(0).view(-1, disk.block_bytes).numpy()
    rates = dict[str, float]()
    threads = 1
    while threads <= (os.cpu_count() or 1):
        best = float("inf")
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(rounds):
                start = time.perf_counter()
                list(
                    pool.map(lambda k: disk.read(*records[k], memory[k].data), range(len(records)))
                )
                best = min(best, time.perf_counter() - start)
        rates[str(threads)] = memory.nbytes / best
        threads *= 2
    return rates


def settle(directory: Path, patience: float = 60.0) -> int:
    """Wait until no more records come. How many there are."""
    count = -1
    since = 0.0
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = sum(1 for _ in directory.glob("kv-*/*.kv"))
        if found != count:
            count = found
            since = time.monotonic()
        elif time.monotonic() - since > SETTLE:
            break
        time.sleep(SETTLE / 10)
    return count


def forget_pages(directory: Path) -> None:
    """The records are to come from the disk and not from the system's memory of it, as far as the system lets us say so."""
    for path in directory.glob("kv-*/*.kv"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def copy_rate(device: torch.device, size: int, total: int = 2**28, rounds: int = 5) -> float:
    """Bytes a second from host memory to the device, in pieces of this size, the fastest of some rounds."""
    cuda = device.type == "cuda"
    count = max(total // size, 1)
    source = torch.ones(count, size, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(count, size, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for i in range(count):
            target[i].copy_(source[i], non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return count * size / best
