"""Prints plans step by step for the examples in docs/: what each step computes and returns."""

from __future__ import annotations

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.scheduler import Scheduler
from octavo.types import Plan
from tests.fake_runner import FakeRunner


def make(
    num_blocks: int,
    budget: int,
    slots: int = 3,
    depth: int = 1,
    host_blocks: int = 0,
    block_size: int = 4,
) -> tuple[Scheduler, FakeRunner]:
    """Make a scheduler and a runner without tensors for it."""
    cache = CacheConfig(block_size, num_blocks, host_blocks=host_blocks, block_bytes=1000)
    schedule = ScheduleConfig(
        max_num_seqs=slots, max_num_batched_tokens=budget, max_model_len=64, depth=depth
    )
    runner = FakeRunner(num_blocks, block_size, host_blocks=host_blocks)
    return Scheduler(cache, schedule, vocab_size=50), runner


def show(plan: Plan, scheduler: Scheduler) -> None:
    """Print what a plan does, in the order in which the runner does it."""
    plural = "" if plan.num_tokens == 1 else "s"
    print(f"step {plan.step}, {plan.num_tokens} token{plural}")
    names = {seq.id: f"{seq.request.id}{seq.index or ''}" for seq in scheduler.running}
    for block, host_block in plan.stores:
        print(f"   store block {block} in host block {host_block}")
    for source, target in plan.copies:
        print(f"   copy block {source} to block {target}")
    for host_block, block in plan.loads:
        print(f"   load host block {host_block} into block {block}")
    for fill in plan.slot_fills:
        known = f"{fill.computed} positions computed, block table {fill.block_table}"
        print(f"   slot {fill.slot} holds {names[fill.seq_id]}: {known}")
    for slot, logical_block, block in plan.table_updates:
        print(f"   slot {slot}: block_table[{logical_block}] = {block}")
    for item in plan.items:
        start = "the next position" if item.start is None else f"position {item.start}"
        sample = ", then sample" if item.sample else ""
        print(f"   {names[item.seq_id]}: compute {item.num_tokens} at {start}{sample}")


def run(scheduler: Scheduler, runner: FakeRunner) -> None:
    """Plan, launch and commit until every request has ended, and print each step."""
    while scheduler.live:
        plan = scheduler.plan()
        show(plan, scheduler)
        result = runner.launch(plan).wait()
        for output in scheduler.commit(plan, result):
            name = f"{output.request_id}{output.index or ''}"
            print(f"   => {name} {output.tokens} {output.finish_reason or ''}".rstrip())
        scheduler.check()  # raises AssertionError unless every invariant holds
