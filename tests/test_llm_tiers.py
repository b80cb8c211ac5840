"""KV in host memory and on disk, end to end on tiny real models: the same tokens, without computing
them again."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.engine import Engine, Handle
from octavo.errors import InvalidRequest, NotEnoughMemory
from octavo.runner.disk import Record
from octavo.runner.runner import Runner, StepHandle
from octavo.runner.staging import StepTimer
from octavo.runner.tier_store import TierStore
from octavo.types import Plan, Request
from octavo.warm_up import WARM_UP_TOKENS
from tests import tiny

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SPACE = 1 / 1024  # GiB: some hundred blocks of these models


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load blocks whenever that is possible: on a busy machine these small models compute faster."""
    monkeypatch.setattr(
        "octavo.core.offload_costs.OffloadCosts.loading_pays", lambda self, disk=False: True
    )


def make(architecture: str = "llama", **options: Any) -> LLM:
    # of a GPU too
    options = dict(block_size=16, num_gpu_blocks_override=16, swap_space=SPACE) | options
    options = dict(max_model_len=200, max_num_seqs=8, progress=False) | options
    return LLM(tiny.model_dir(architecture), **options)


def prompts(count: int, length: int = 100, seed: int = 0) -> list[list[int]]:
    g = random.Random(seed)
    return [[g.randrange(250) for _ in range(length)] for _ in range(count)]


def complete(llm: LLM, prompt: Any) -> tuple[list[int], int]:
    (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.engine.scheduler.check()
    return out.outputs[0].token_ids, out.num_cached_tokens or 0


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_an_evicted_prompt_is_served_from_host_memory(architecture: str) -> None:
    llm, many = make(architecture), prompts(4)
    want = [tiny.hf_greedy(architecture, p, 8) for p in many]
    assert [complete(llm, p) for p in many] == [(w, 0) for w in want]
    assert [complete(llm, p) for p in many] == [(w, 96) for w in want], (
        "6 of 7 blocks: the last token must be computed"
    )
    count = llm.engine.scheduler.counters.tiers
    assert count.host_tokens == count.loads * 16 > 0 and count.disk_tokens == 0


@pytest.mark.parity
def test_a_prompt_is_served_from_disk_after_a_restart(tmp_path: Path) -> None:
    many = prompts(4)
    first = make(kv_disk_path=tmp_path)
    want = [complete(first, p)[0] for p in many]
    first.close()
    again = make(kv_disk_path=tmp_path)
    assert [complete(again, p) for p in many] == [(w, 96) for w in want]
    assert again.engine.scheduler.counters.tiers.disk_tokens == 4 * 96
    again.close()


def test_waiting_for_the_disk_makes_no_device_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only loads of fetched blocks call the device: each call would hold the GIL that readers need."""
    (prompt,) = prompts(1)
    first = make(kv_disk_path=tmp_path)
    want = complete(first, prompt)[0]
    first.close()
    launch_step = Runner._launch_step
    launched: list[Plan] = []

    def observed(self: Runner, plan: Plan, timer: StepTimer | None = None) -> StepHandle:
        launched.append(plan)
        return launch_step(self, plan, timer)

    monkeypatch.setattr(Runner, "_launch_step", observed)
    again = make(kv_disk_path=tmp_path)
    assert complete(again, prompt) == (want, 96)
    assert launched and all(plan.items for plan in launched)
    again.close()


def test_what_was_never_evicted_goes_to_disk_when_the_engine_is_closed(tmp_path: Path) -> None:
    (prompt,) = prompts(1)
    for cached in (0, 96):
        llm = make(kv_disk_path=tmp_path, num_gpu_blocks_override=100)
        assert complete(llm, prompt)[1] == cached
        llm.close()
        llm.close()


def test_other_weights_other_dtypes_and_other_layouts_find_nothing(tmp_path: Path) -> None:
    config = dict(tiny.hf_model("llama").config.to_dict(), architectures=["LlamaForCausalLM"])

    def dummy(**options: Any) -> LLM:
        options = (
            dict(
                load_format="dummy",
                skip_tokenizer_init=True,
                progress=False,
                num_gpu_blocks_override=40,
            )
            | options
        )
        return LLM(config, swap_space=SPACE, kv_disk_path=tmp_path, **options)

    (prompt,) = prompts(1)

    def cached(**options: Any) -> int:
        llm = dummy(**options)
        num_cached = complete(llm, prompt)[1]
        llm.close()
        return num_cached

    assert cached() == 0 and cached() == 96
    assert cached(seed=1) == 0 and cached(dtype="bfloat16") == 0 and cached(block_size=32) == 0
    assert cached() == 96 and cached(seed=1) == 96


def test_a_salted_prompt_is_found_only_with_its_salt(tmp_path: Path) -> None:
    (prompt,) = prompts(1)
    salted = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    first = make(kv_disk_path=tmp_path)
    want = complete(first, salted)[0]
    first.close()
    again = make(kv_disk_path=tmp_path)
    assert complete(again, prompt) == (want, 0)
    assert complete(again, salted | {"cache_salt": "theirs"}) == (want, 0)
    assert complete(again, salted) == (want, 96)
    again.close()


@pytest.mark.parity
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "swap"])
def test_damaged_records_cost_time_and_never_a_token(
    tmp_path: Path, damage: str, sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums are computed by the reader threads or by the device."""
    monkeypatch.setattr("octavo.assemble.TierStore", partial(TierStore, verify_on_load=sealed))
    many, g = prompts(3), random.Random(1)
    first = make(kv_disk_path=tmp_path)
    want = [complete(first, p)[0] for p in many]
    first.close()
    records = sorted(tmp_path.glob("kv-*/*.kv"))
    assert len(records) > 10
    contents = [r.read_bytes() for r in records]
    for i, (record, data) in enumerate(zip(records, contents, strict=True)):
        if damage == "flip":
            at = g.randrange(len(data))
            record.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        elif damage == "cut":
            record.write_bytes(data[: g.randrange(len(data))])
        elif damage == "remove":
            record.unlink()
        else:
            record.write_bytes(contents[i - 1])
    again = make(kv_disk_path=tmp_path)
    assert (
        again.runner.tier_store is not None
        and (again.runner.tier_store.checksums is not None) == sealed
    )
    assert [complete(again, p)[0] for p in many] == want
    assert again.engine.scheduler.counters.tiers.disk_tokens == 0
    assert damage == "remove" or sum(again.engine.scheduler.counters.tiers.misses.values()) > 0
    again.close()


def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    many = prompts(6)
    want = [tiny.hf_greedy("llama", p, 8) for p in many]
    one, two = (
        make(kv_disk_path=tmp_path, kv_disk_gib=0.0005, num_gpu_blocks_override=20)
        for _ in range(2)
    )
    for _ in range(2):
        for p, w in zip(many, want, strict=True):
            for llm in (one, two):
                assert complete(llm, p)[0] == w
    for llm in (one, two):
        llm.close()
    assert sum(r.stat().st_size for r in tmp_path.glob("kv-*/*.kv")) <= 0.0006 * 2**30


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_too_large_for_the_pool_gives_the_same_tokens(seed: int, tmp_path: Path) -> None:
    """Preemption, forks, steps in flight, all tiers, a second engine on the same directory."""
    g = random.Random(seed)
    shared = prompts(1, 40, seed)[0]
    many = [
        shared[: g.randrange(40)] + prompts(1, g.randrange(1, 60), seed + i)[0] for i in range(8)
    ]
    each = [
        SamplingParams(max_tokens=12, seed=i, n=1 + 2 * (i % 2), ignore_eos=True, temperature=0.7)
        for i in range(8)
    ]

    def tokens(llm: LLM) -> list[list[list[int]]]:
        return [[c.token_ids for c in o.outputs] for o in llm.generate(many, each, use_tqdm=False)]

    want = tokens(make(num_gpu_blocks_override=300, swap_space=0))
    block = g.choice([4, 16])
    options = dict(
        block_size=block,
        num_gpu_blocks_override=-(-120 // block) + g.choice([0, 5]),
        max_num_batched_tokens=g.choice([16, 64]),
        depth=g.choice([1, 2, 3]),
        swap_space=g.choice([SPACE, SPACE / 30]),
        kv_disk_path=tmp_path,
        max_model_len=120,
    )
    for _ in range(2):
        llm = make(**options)
        assert tokens(llm) == want and tokens(llm) == want, options
        llm.engine.scheduler.check()
        llm.close()


class Disconnecting:
    """A runner whose client disconnects when the first matching plan is in flight."""

    def __init__(self, engine: Engine, when: Callable[[Plan], Any]):
        self.engine, self.runner, self.when, self.disconnected = engine, engine.runner, when, False

    def launch(self, plan: Plan) -> Handle:
        handle = self.runner.launch(plan)
        if self.when(plan) and not self.disconnected:
            self.disconnected = True
            self.engine.abort("leaving")
        return handle


@pytest.mark.parity
@pytest.mark.parametrize(
    "during", ["a load from host memory", "a slow read", "a load while others are read"]
)
def test_a_disconnect_while_blocks_are_loaded_leaves_nothing(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, many = make(kv_disk_path=tmp_path), prompts(3)
    want = [complete(llm, p)[0] for p in many]
    if during != "a load from host memory":
        llm.close()
        real, turns = Record.read, itertools.count()
        monkeypatch.setattr(
            Record, "read", lambda *a: (time.sleep(0.02 * next(turns)), real(*a))[1]
        )
        llm = make(kv_disk_path=tmp_path)
    engine = llm.engine
    tiers, runner = engine.scheduler.tiers, engine.runner
    assert tiers is not None
    leaving = Disconnecting(
        engine, lambda plan: plan.fetches if during == "a slow read" else plan.loads
    )
    engine.runner = leaving
    engine.add(Request("leaving", many[0], GREEDY))
    while not engine.idle or tiers.fetching:
        engine.step()
        engine.scheduler.check()
    assert leaving.disconnected and (during == "a load from host memory") == (
        tiers.counters.fetches == 0
    )
    assert (
        not any(engine.scheduler.pool.ref_counts)
        and not any(tiers.pin_counts)
        and not tiers.filling
        and not tiers.promotions
    )
    engine.runner = runner
    assert [complete(llm, p)[0] for p in many] == want
    llm.close()


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NotEnoughMemory,
        match=r"swap_space .100000 GiB.* is more than the .* GiB of memory that are left",
    ):
        make(swap_space=100_000)
    with pytest.raises(InvalidRequest, match="less than one KV block"):
        make(swap_space=1e-7)
    with pytest.raises(InvalidRequest, match="passes through"):
        make(swap_space=0, kv_disk_path=tmp_path)
    with pytest.raises(InvalidRequest, match="kv_disk_gib .* is less than two KV blocks"):
        make(kv_disk_path=tmp_path, kv_disk_gib=1e-7)
    with pytest.raises(InvalidRequest, match="leave it enabled"):
        make(enable_prefix_caching=False)
    with pytest.raises(InvalidRequest, match="swap_space must be a number"):
        make(swap_space=-1)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="name a directory that can be written to"):
        make(kv_disk_path=tmp_path / "file")


def test_off_means_off(tmp_path: Path) -> None:
    llm = make(swap_space=0)
    assert (
        llm.engine.scheduler.tiers is None
        and llm.runner.tier_store is None
        and llm.memory.host == llm.memory.disk == 0
    )
    llm.close()


def test_without_page_locked_memory_the_engine_runs_without_tiers(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def refused(*_: Any) -> None:
        raise NotEnoughMemory("cannot be page-locked")

    monkeypatch.setattr(TierStore, "__init__", refused)
    llm = make()
    assert "KV is not offloaded to host memory or disk: cannot be page-locked" in caplog.text
    assert llm.engine.scheduler.tiers is None and llm.memory.host == 0
    complete(llm, prompts(1)[0])


def test_emptying_the_cache_leaves_the_disk(tmp_path: Path) -> None:
    llm, many = make(kv_disk_path=tmp_path), prompts(3)
    for p in many:
        complete(llm, p)
    tiers = llm.engine.scheduler.tiers
    assert tiers is not None and tiers.ready
    on_disk = set(tiers.on_disk)
    llm.reset_prefix_cache()
    assert (
        not tiers.ready and tiers.on_disk == on_disk and llm.engine.scheduler.pool.num_cached == 0
    )
    llm.close()


@pytest.mark.parametrize(
    "options", [{}, {"kv_eviction": "sinks", "kv_budget": 96, "swap_space": 0}]
)
def test_warming_up_fits_any_cache_and_teaches_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of the warm-up compile: their times do not tell the time that a prompt takes."""
    monkeypatch.setitem(WARM_UP_TOKENS, "cpu", (64, sys.maxsize))
    llm = make(scheduling_policy="priority", **options)
    listeners = dict(llm.engine.events.listeners)
    assert listeners
    llm.warm_up()
    assert llm.engine.events.listeners == listeners
    assert llm.engine.scheduler.pool.num_cached == 0
    step_times = llm.engine.scheduler.limiter.step_times
    assert step_times is not None and not step_times.num_steps
    assert llm.engine.scheduler.tiers is None or not llm.engine.scheduler.tiers.costs.prefill_tokens


def test_a_new_engine_draws_fetch_ids_from_the_runners_store(tmp_path: Path) -> None:
    """An answer to a fetch of the earlier engine must not match a fetch of the new engine."""
    llm = make(kv_disk_path=tmp_path)
    tiers = llm.new_engine(llm.schedule).scheduler.tiers
    assert tiers is not None and llm.runner.tier_store is not None
    assert tiers.fetch_ids is llm.runner.tier_store.fetch_ids
    llm.close()
