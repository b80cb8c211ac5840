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
from octavo.core.engine import Handle, Runner
from octavo.core.offload_costs import OffloadCosts
from octavo.errors import OctavoError
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
    """Where the time to a first token went, in seconds, one after the other. What was read while it was loaded counts as read."""

    ask: float  # until the disk was asked, or else the step that computes was launched
    # until all that the disk brings was heard of: records, checksums, and the engine's ears
    read: float
    wait: float  # until the step that computes was launched
    load: float  # of that step: what was left to load
    compute: float
    rest: float  # launching, sampling, telling


class ObservedRunner:
    """A runner that notes when its plans came and how long they took."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.seconds = 0.0
        self.blocks = 0
        self.begin()

    def begin(self) -> None:
        """Of one prompt."""
        self.start = self.asked = self.heard = time.perf_counter()
        self.launched = self.load = self.compute = 0.0
        self.lifted = 0  # blocks loaded before the step that computes

    def launch(self, plan: Plan) -> Handle:
        if plan.items and not self.launched:
            self.launched = time.perf_counter()
        handle = WatchedHandle(self, plan, self.runner.launch(plan))
        if plan.fetches:
            self.asked = time.perf_counter()
        return handle

    def over(self, plan: Plan, result: StepResult) -> None:
        if plan.loads:
            self.seconds += result.load_seconds
            self.blocks += len(plan.loads)
        if plan.items:
            self.load += result.load_seconds
            self.compute += result.compute_seconds
        else:
            self.lifted += len(plan.loads)
        if any(news.fetch_id for news in result.disk_events):
            self.heard = time.perf_counter()

    def parts(self) -> Parts:
        """Called when the first token is there."""
        now = time.perf_counter()
        read = self.heard > self.asked > self.start
        asked, heard = (self.asked, self.heard) if read else (self.launched, self.launched)
        rest = now - self.launched - self.load - self.compute
        return Parts(
            asked - self.start, heard - asked, self.launched - heard, self.load, self.compute, rest
        )


class WatchedHandle(NamedTuple):
    watched: ObservedRunner
    plan: Plan
    handle: Handle

    def wait(self) -> StepResult:
        result = self.handle.wait()
        self.watched.over(self.plan, result)
        return result


class Answer(NamedTuple):
    seconds: float  # to the first token
    tokens: list[int]
    cached: int  # tokens of the prompt
    parts: Parts | None  # if somebody watched
    lifted: int = 0  # blocks


def ask(llm: LLM, prompt: list[int]) -> Answer:
    before = llm.engine.scheduler.counters.cached_tokens
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    params.detokenize = False
    watched = llm.engine.runner if isinstance(llm.engine.runner, ObservedRunner) else None
    if watched is not None:
        watched.begin()
    start = time.perf_counter()
    stream = llm.stream(prompt, params)
    first = next(stream)
    seconds = time.perf_counter() - start
    parts, lifted = (watched.parts(), watched.lifted) if watched is not None else (None, 0)
    tokens = [*first.token_ids, *(t for piece in stream for t in piece.token_ids)]
    if len(tokens) != OUTPUT:
        raise OctavoError(f"{len(tokens)} of {OUTPUT} tokens arrived: not counted")
    return Answer(
        seconds, tokens, llm.engine.scheduler.counters.cached_tokens - before, parts, lifted
    )


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
    watched = ObservedRunner(llm.engine.runner)
    llm.engine.runner = watched
    prompts = [prompt() for _ in range(repeat)]
    cold = list[Answer]()
    device = list[Answer]()
    host = list[Answer]()
    for p in prompts:
        cold.append(ask(llm, p))
        device.append(ask(llm, p))
        done()
        ask(llm, prompt())  # other traffic: it takes all of the pool
        host.append(ask(llm, p))
        done()
        settle(directory)
    link = copy_rate(llm.device, llm.memory.block_bytes)
    rate = watched.blocks * llm.memory.block_bytes / watched.seconds if watched.seconds else 0.0
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
        "load_bytes": watched.blocks * llm.memory.block_bytes,
        "load_bytes_s": rate,
        "link_bytes_s": link,
        "of_link": rate / link,
        "chooses_host": OffloadCosts.loading_pays(costs),
        "stores": tiers.stores,
    }
    llm.close()
    watched.runner = None  # type: ignore[assignment]
    del llm, watched
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
    llm.engine.runner = ObservedRunner(llm.engine.runner)
    runner = llm.runner.tiers
    if runner is None or runner.disk is None:
        raise OctavoError("this engine has no disk")
    passes: list[list[Answer]] = []
    readers: list[float] = []
    for _ in range(2):  # the second time the system has the records in memory
        passes.append([])
        busy = runner.read_seconds
        for p in prompts:
            passes[-1].append(ask(llm, p))
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
            "disk": min(a.lifted for a in disk),
            "paged": min(a.lifted for a in paged),
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
