"""Random workloads for the core: a seeded trial that drives the engine and compares every token
with the oracle."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.core.simulate import VirtualClock as Clock
from octavo.params import SamplingParams
from octavo.types import Output, Request, Sequence
from tests import oracle
from tests.fake_runner import FakeDisk, FakeRanks, FakeRunner
from tests.toy_guide import ToyGuide

MAX_LEN = 60
POLICIES = ["fcfs"] * 4 + ["priority"] * 3 + ["shortest", "deadline", "fair", "prefix"]
BATCHING = ["continuous"] * 6 + ["adaptive", "window", "static", "none"]


@dataclass
class Trial:
    """Counts of what one workload did."""

    sequences: int = 0
    guided: int = 0
    beams: int = 0
    pooled: int = 0
    preemptions: int = 0
    copies: int = 0
    cached: int = 0
    recomputed: int = 0
    paused: int = 0  # steps for which running sequences were paused for more urgent ones
    host_tokens: int = 0
    disk_tokens: int = 0
    misses: int = 0
    dropped: int = 0  # blocks that left full caches
    drafted: int = 0
    accepted: int = 0
    settings: dict[str, object] = field(default_factory=dict)


def make_engine(
    num_blocks: int,
    block_size: int,
    slots: int,
    budget: int,
    depth: int,
    caching: bool = True,
    max_len: int = MAX_LEN,
    clock: Clock | None = None,
    host: int = 0,
    disk: FakeDisk | None = None,
    seed: int = 0,
    keep: tuple[int, int] | None = None,
    rank_disks: list[FakeDisk | None] | None = None,
    keeps_kv: bool = True,
    contiguous: bool = False,
    **options: Any,
) -> Engine:
    """Return an engine with the oracle's runner. `options` are ScheduleConfig's; `keep` is how many
    blocks of sinks and how many blocks in all a bounded cache keeps; `rank_disks` are the disks of
    further ranks of tensor parallelism. Only whoever has the clock lets time pass."""
    cache = CacheConfig(block_size, num_blocks, caching, host, disk is not None, block_bytes=2**20)
    cache = replace(cache, keeps_kv=keeps_kv, contiguous=contiguous)
    if keep is not None:
        cache = replace(
            cache, kv_eviction="sinks", kv_sinks=keep[0], kv_budget=keep[1] * block_size
        )
    schedule, clock = ScheduleConfig(slots, budget, max_len, depth, **options), clock or Clock()
    scheduler = Scheduler(cache, schedule, oracle.VOCAB, (oracle.EOS,), clock=clock)
    if scheduler.tiers is not None and disk is not None:
        records = [rank_disk.records for rank_disk in rank_disks or [] if rank_disk is not None]
        scheduler.tiers.on_disk = set(disk.records).intersection(*records)
    runner: Any = FakeRunner(num_blocks, block_size, host, disk, seed)
    if rank_disks:
        from octavo.runner.ranks import RankedRunner  # imports torch, which few tests need

        others = [
            FakeRunner(num_blocks, block_size, host, rank_disk, seed + 1000 * rank)
            for rank, rank_disk in enumerate(rank_disks, 1)
        ]
        runner = RankedRunner(runner, FakeRanks(others, depth), disk is not None)  # type: ignore[arg-type]
    return Engine(scheduler, runner, clock.sleep)


class OracleDrafter:
    """Proposes tokens of which about two thirds are right."""

    def __init__(self, seed: int):
        self.dice = random.Random(f"drafts {seed}")

    def propose(self, seq: Sequence, count: int) -> array[int]:
        text = list(seq.tokens)
        guide = seq.guide.copy() if seq.guide is not None else None
        while len(text) < len(seq.tokens) + count:
            mask = guide.mask if guide is not None else None
            token = oracle.model(((t, p) for p, t in enumerate(text)), seq.seed, mask)
            if token in seq.stop_ids or self.dice.random() < 0.3:
                token = self.dice.randrange(oracle.VOCAB)
                guide = None
            elif guide is not None:
                guide.accept(token)
            text.append(token)
        return array("i", text[len(seq.tokens) :])

    def finished(self, seq: Sequence) -> None:
        pass


def random_speculation(seed: int) -> SpeculativeConfig:
    g = random.Random(f"speculation {seed}")
    method = g.choice(["ngram", "suffix", "device"])
    return SpeculativeConfig(
        method=method,
        num_tokens=g.randrange(1, 9),
        adaptive=g.random() < 0.2,
        ngram_min=1,
        ngram_max=g.randrange(1, 4),
        lookup=method == "device" and g.random() < 0.5,
    )


def random_switches(seed: int) -> dict[str, Any]:
    """Return options of make_engine that switch mechanisms off at random."""
    g = random.Random(f"switches {seed}")
    return dict(
        keeps_kv=g.random() < 0.5, contiguous=g.random() < 0.4, chunked_prefill=g.random() < 0.5
    )


def random_tiers(g: random.Random) -> tuple[int, FakeDisk | None]:
    """Return the number of blocks of host memory, and the disk behind them."""
    host = g.choice([0, g.randrange(1, 5), g.randrange(5, 20), 100])
    if not host or g.random() < 0.3:
        return host, None
    sound = g.random() < 0.5
    rate = 0.0 if sound else g.choice([0.25, 0.5])
    return host, FakeDisk(
        {}, g.choice([1, 2, 8]), g.choice([rate, 2 * rate]), rate, rate, rate, g.choice([0.1, 1.0])
    )


def random_request(
    g: random.Random, i: int, bases: list[list[int]], earlier: list[Request], guides: list[ToyGuide]
) -> Request:
    prompt = g.choice(bases)[: g.randrange(0, 30)] + [
        g.randrange(1, oracle.VOCAB) for _ in range(g.randrange(1, 10))
    ]
    if earlier and g.random() < 0.25:  # exact repeats: the whole prompt is in the cache
        prompt = list(g.choice(earlier).prompt)
    params = SamplingParams(
        n=g.choice([1, 1, 1, 3]),
        seed=1000 * i,
        max_tokens=g.choice([1, 2, g.randrange(1, 18), g.randrange(1, 18), None]),
        ignore_eos=g.random() < 0.5,
        stop_token_ids=[7] if g.random() < 0.2 else [],
        min_tokens=0,
        prompt_logprobs=0 if g.random() < 0.1 else None,
    )
    guide = g.choice(guides) if guides and g.random() < 0.6 else None
    return Request(
        f"r{i}",
        prompt,
        params,
        cache_salt=g.choice(["", "", "", "other"]),
        priority=g.choice([-2, 0, 0, 0, 1, 5]),
        deadline=g.choice([None, g.uniform(0, 5)]),
        tenant=g.choice(["", "a", "b"]),
        guide=guide,
    )


def random_beams(g: random.Random) -> SamplingParams:
    """Return the parameters of a beam search; some are wider than an engine has slots."""
    return SamplingParams(
        n=g.choice([1, 2]),
        best_of=g.choice([2, 3, 5, 8]),
        use_beam_search=True,
        length_penalty=g.choice([1.0, 1.0, 0.5, 2.0, -1.0, 0.0]),
        early_stopping=g.choice([False, False, True, "never"]),
        max_tokens=g.choice([1, 2, g.randrange(1, 18), g.randrange(1, 18), None]),
        ignore_eos=g.random() < 0.3,
        stop_token_ids=[7] if g.random() < 0.2 else [],
        min_tokens=g.choice([0, 0, 1]),
        prompt_logprobs=0 if g.random() < 0.1 else None,
    )


def check_beams(r: Request, outputs: list[Output]) -> None:
    want = oracle.beam_search(r.prompt, r.params, MAX_LEN)
    assert [out.index for out in outputs] == list(range(r.params.n)), (
        f"{r.id}: {len(outputs)} outputs"
    )
    for out, (score, tokens) in zip(outputs, want, strict=True):
        assert out.tokens == tokens, f"{out.tokens} instead of {tokens}"
        assert out.logprobs is not None and [entry.token for entry in out.logprobs] == tokens
        assert (
            abs(
                sum(entry.logprob for entry in out.logprobs)
                / len(tokens) ** r.params.length_penalty
                - score
            )
            < 1e-9
        )
        stopped = tokens[-1] in (r.params.stop_token_ids or []) or (
            tokens[-1] == oracle.EOS and not r.params.ignore_eos
        )
        assert out.finish_reason == ("stop" if stopped else "length")


def trial(
    seed: int,
    policy: str | None = None,
    batching: str | None = None,
    guided: bool = False,
    beams: bool = False,
    evict: bool = False,
    drafts: bool = False,
    ranks: int = 1,
    switches: bool = False,
    pooling: bool = False,
) -> Trial:
    """Run one random workload, compare its outputs with the oracle's and return its counts. The
    policy and the batching mode are drawn too, unless they are given.
    `guided`: some of the requests follow guides, several of them the same. `beams`: some are beam
    searches. `evict`: caches are bounded, and generation goes on beyond the context. `drafts`:
    decoding is speculative, with drafts of the host or the device, about two thirds of which are
    right. `ranks`: this many runners execute every plan, each with a disk of its own.
    `switches`: the KV cache, paging or chunked prefill may be off. `pooling`: some requests get
    hidden states of their prompt instead of text."""
    g = random.Random(seed)
    size = g.choice([2, 4, 8])
    least = -(-(MAX_LEN - 1) // size)  # one sequence's worth
    blocks = g.choice([least, least + 3, 60, 200])
    slots = g.choice([2, 4, 16])
    budget = max(slots, g.choice([2, 7, 16, 64]))
    depth, caching = g.choice([1, 2, 3]), g.random() < 0.8
    drawn, clock = (g.choice(POLICIES), g.choice(BATCHING)), Clock()
    policy, batching = policy or drawn[0], batching or drawn[1]
    modes = dict(
        policy=policy,
        batching=batching,
        max_batch=g.choice([1, 2, 5]),
        batch_window=g.choice([0.0, 0.05]),
    )
    modes["short_prompt_share"] = random.Random(f"short {seed}").choice([0.0, 0.25, 0.25, 0.9])
    riders = random.Random(f"ride {seed}")
    modes["piggyback_tokens"], offline = (
        riders.choice([0, 0, 1, 8, 16]),
        riders.choice([1.0, 1.0, 0.5]),
    )
    if drafts:
        modes["speculative"] = random_speculation(seed)
    # of their own: what else a seed draws does not change with them
    dice = random.Random(f"tiers {seed}")
    host, disk = random_tiers(dice)
    if ranks > 1 and disk is not None:
        disk.corrupt = 0.0  # a block that one rank reads changes what all ranks sample
    off: dict[str, Any] = {}
    if switches:
        off = random_switches(seed)
        depth = depth if off["keeps_kv"] else 1
        if not off["keeps_kv"] or off["contiguous"]:
            caching = False
            host = 0
            disk = None
    rank_disks = [replace(disk, records={}) if disk else None for _ in range(1, ranks)]
    bases = [[g.randrange(1, oracle.VOCAB) for _ in range(30)] for _ in range(3)]
    todo: list[Request] = []
    guides = [ToyGuide(g.randrange(1000)) for _ in range(2)] if guided else []
    for i in range(g.randrange(3, 14)):
        todo.append(random_request(g, i, bases, todo, guides))
    keep: tuple[int, int] | None = None
    if evict:
        own = random.Random(f"evict {seed}")
        sinks = own.choice([0, 1, 1, 2])
        keep = sinks, own.randrange(sinks + 2, max(sinks + 3, 40 // size))
        blocks = own.choice([keep[1], keep[1] + 2, blocks])
        for r in todo:
            r.prompt = r.prompt[: own.choice([4, keep[1] * size, keep[1] * size])]
            r.params = replace(
                r.params, max_tokens=own.choice([None, own.randrange(1, 90), own.randrange(1, 90)])
            )
    for r in todo if beams else ():
        if r.guide is None and g.random() < 0.4:
            r.params = random_beams(g)
    for r in todo if pooling else ():
        if r.guide is None and g.random() < 0.5:
            r.params = SamplingParams(max_tokens=1, temperature=0)
            r.pooling = g.choice(["last", "last", "mean", "all"])
            if g.random() < 0.1:  # a prompt that fills the context
                r.prompt = (r.prompt * MAX_LEN)[:MAX_LEN]
    requests = {r.id: r for r in todo}
    for r in todo:
        r.offline = riders.random() < offline
    if disk is not None and dice.random() < 0.5:  # what an earlier engine left on disk
        earlier = make_engine(
            blocks,
            size,
            slots,
            budget,
            depth,
            caching,
            host=host,
            disk=disk,
            seed=seed,
            keep=keep,
            rank_disks=rank_disks,
        )
        for r in todo:
            earlier.add(r)
        run_dry(earlier)
    tiered = dict(host=host, disk=disk, seed=seed + 1, keep=keep, rank_disks=rank_disks)
    engine = make_engine(
        blocks, size, slots, budget, depth, caching, clock=clock, **tiered, **modes, **off
    )  # type: ignore[arg-type]
    scheduler, runner = engine.scheduler, engine.runner
    first: Any = runner if ranks == 1 else runner.runner  # type: ignore[attr-defined]
    if scheduler.speculation is not None and scheduler.speculation.drafter and seed % 4:
        scheduler.speculation.drafter = OracleDrafter(seed)
    assert isinstance(first, FakeRunner)
    fails = dice.random() < 0.3  # few, like the aborts
    if fails and ranks == 1:  # with several ranks a failure ends the engine
        first.failing, first.failures = 0.1, 2
    memory = random.Random(f"memory {seed}")
    if memory.random() < 0.15 and ranks == 1:
        first.memory = memory.randrange(1, 20)
    got: dict[tuple[str, int], list[int]] = {}
    ended: dict[tuple[str, int], str] = {}
    logprobs: dict[str, list] = {}
    searched: dict[str, list[Output]] = {}
    pooled: dict[str, array[float]] = {}
    aborted: set[str] = set()
    result = Trial(
        settings=dict(
            size=size,
            blocks=blocks,
            slots=slots,
            budget=budget,
            depth=depth,
            caching=caching,
            **modes,
        )
    )
    result.settings |= off
    result.settings |= dict(keep=keep, host=host, disk=disk and f"{disk.slowest}/{disk.missing}")

    def collect(outputs: list[Output]) -> None:
        for out in outputs:
            key = (out.request_id, out.index)
            assert key not in ended, f"output after the end: {key}"
            got.setdefault(key, []).extend(out.tokens)
            if out.pooled is not None:
                pooled[out.request_id] = array("f", out.pooled)
            if out.prompt_logprobs is not None:
                logprobs[out.request_id] = out.prompt_logprobs
            if out.finish_reason is not None:
                ended[key] = out.finish_reason
                assert out.finish_reason != "error" or (out.error or "").startswith("Planted"), (
                    out.error
                )
            if requests[out.request_id].params.use_beam_search:
                searched.setdefault(out.request_id, []).append(out)

    steps = 0
    while todo or not engine.idle:
        if todo and g.random() < 0.5:
            request = todo.pop()
            request.arrival = clock.now
            engine.add(request)
        # few: aborts would hide hangs
        if len(aborted) < 2 and g.random() < 0.03 and scheduler.sequences_by_request:
            aborted.add(victim := g.choice(list(scheduler.sequences_by_request)))
            collect(engine.abort(victim))
        epochs = {seq.id: seq.epoch for seq in scheduler.running}
        if dice.random() < 0.005:
            scheduler.clear_cache()
        collect(engine.step())
        scheduler.check()
        for seq in scheduler.running:
            assert epochs.get(seq.id, seq.epoch) == seq.epoch, (
                "a victim was admitted again by the plan that preempted it"
            )
        if scheduler.limiter.batches.choose_size is not None:
            started = {
                seq.request.id
                for seq in scheduler.live.values()
                if seq.slot >= 0 or seq.preemptions or seq.index
            }
            limit = {"none": 1, "window": max(slots, scheduler.schedule.max_batch)}.get(
                batching, scheduler.schedule.max_batch
            )
            assert len(started) <= limit, "more requests have started than a batch may have"
        salts: dict[int, str] = {}
        for seq in scheduler.running:
            for block in seq.block_table:
                assert salts.setdefault(block, seq.request.cache_salt) == seq.request.cache_salt, (
                    "requests with different salts share a block"
                )
        clock.sleep(g.choice([0.001, 0.01, 0.1]))
        steps += 1
        assert steps < 20_000, "no progress"
    run_dry(engine)
    others = runner.ranks.runners if ranks > 1 else []  # type: ignore[attr-defined]
    assert all(other.sampled == first.sampled for other in others), (
        f"trial {seed} {result.settings}: the ranks sampled different tokens"
    )
    scheduler.pool.check([])
    assert (
        len(scheduler.queues.free_slots) == slots
        and not scheduler.live
        and not scheduler.sequences_by_request
    )

    for r in requests.values():
        if (
            r.params.prompt_logprobs is not None
            and r.id not in aborted
            and ended[r.id, 0] != "error"
        ):
            have = [(x.token, x.logprob) for x in logprobs[r.id][1:]]
            assert logprobs[r.id][0] is None and have == [
                (t, -float(p)) for p, t in enumerate(r.prompt[1:])
            ]
        if r.pooling is not None:
            assert (r.id, 0) in ended, f"{r.id} never ended"
            if r.id not in aborted and ended[r.id, 0] != "error":
                want = oracle.pooled(r.prompt, r.pooling)
                assert pooled[r.id].tolist() == want and not got[r.id, 0], (
                    f"trial {seed} {r.id} {result.settings}: {pooled[r.id]} instead of {want}"
                )
            result.pooled += 1
            continue
        if r.params.use_beam_search:
            try:
                assert len(searched[r.id]) == r.params.n, f"{r.id} never ended"
                if r.id not in aborted and ended[r.id, 0] != "error":
                    check_beams(r, searched[r.id])
            except AssertionError as error:
                raise AssertionError(
                    f"trial {seed} {r.id} {result.settings} {r.params}: {error}"
                ) from None
            result.beams += 1
            continue
        for index in range(r.params.n):
            key = (r.id, index)
            kept = None if keep is None else (keep[0] * size, keep[1] * size, size)
            want = oracle.generate(
                r.prompt, r.params, 1000 * int(r.id[1:]), index, MAX_LEN, r.guide, kept
            )
            assert key in ended, f"{key} never ended"
            if r.id in aborted or ended[key] == "error":
                have = got.get(key, [])
                assert have == want[: len(have)], (
                    f"trial {seed} {key} {result.settings}: {have} is no prefix of {want}"
                )
            else:
                assert got[key] == want, (
                    f"trial {seed} {key} {result.settings}: {got[key]} instead of {want}"
                )
                longest = MAX_LEN - len(r.prompt)
                if r.params.max_tokens is not None:
                    longest = r.params.max_tokens if evict else min(longest, r.params.max_tokens)
                length = len(want) == longest
                ends = not r.params.ignore_eos or r.guide is not None
                stopped = want[-1] in (r.params.stop_token_ids or []) or (
                    want[-1] == oracle.EOS and ends
                )
                assert ended[key] == ("stop" if stopped else "length") and (stopped or length)
            result.sequences += 1
            result.guided += r.guide is not None
    count = scheduler.counters
    result.preemptions, result.copies, result.cached = (
        count.preemptions,
        count.copies,
        count.cached_tokens,
    )
    result.recomputed, result.dropped, result.paused = (
        count.recomputed_tokens,
        count.dropped_blocks,
        count.paused,
    )
    if scheduler.speculation is not None:
        result.drafted = scheduler.speculation.counters.drafted
        result.accepted = scheduler.speculation.counters.accepted
    tiers = count.tiers
    result.host_tokens, result.disk_tokens, result.misses = (
        tiers.host_tokens,
        tiers.disk_tokens,
        sum(tiers.misses.values()),
    )
    return result


def run_dry(engine: Engine) -> None:
    """Step until no request waits and the disk has answered every fetch."""
    tiers = engine.scheduler.tiers
    for _ in range(20_000):
        if engine.idle and not (tiers and tiers.fetching):
            break
        engine.step()
    else:
        raise AssertionError("no progress")
    if tiers is not None:
        tiers.check()
        assert not any(tiers.pin_counts), (
            "a block of host memory is pinned though nothing is transferred"
        )
        assert len(tiers.ready) + len(tiers.free_blocks) == tiers.num_host_blocks
