"""How the scheduler counts drafts."""

from __future__ import annotations

from octavo.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.params import SamplingParams
from octavo.types import Request
from tests import oracle
from tests.fake_runner import FakeRunner
from tests.workloads import make_engine


def test_an_output_counts_as_accepted_the_drafts_that_became_tokens() -> None:
    """With the last output of a sequence that a stop token ends, all of its tokens may be drafts."""
    schedule = ScheduleConfig(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=100,
        speculative=SpeculativeConfig("early_exit", num_tokens=8, adaptive=False, exit_layer=1),
    )
    cache = CacheConfig(block_size=4, num_blocks=60)
    engine = Engine(Scheduler(cache, schedule, oracle.VOCAB), FakeRunner(60, 4))
    stop_ids = list(range(0, oracle.VOCAB, 4))
    for number in range(40):
        params = SamplingParams(max_tokens=60, stop_token_ids=stop_ids, seed=number)
        engine.add(Request(str(number), [number + 1] * 5, params))
    counted: dict[str, int] = {}
    all_accepted = 0
    while not engine.idle:
        for output in engine.step():
            assert output.drafts is not None
            accepted = output.drafts.accepted - counted.get(output.request_id, 0)
            counted[output.request_id] = output.drafts.accepted
            if accepted == len(output.tokens):
                assert output.finish_reason == "stop"
                all_accepted += 1
            else:
                assert accepted == len(output.tokens) - 1
    assert all_accepted > 3
    speculation = engine.scheduler.speculation
    assert speculation is not None
    totals = speculation.counters
    assert totals.accepted == sum(totals.accepted_at) == sum(counted.values())


def test_a_fork_of_a_sequence_for_which_the_device_cannot_draft_cannot_draft_either() -> None:
    engine = make_engine(40, 4, slots=4, budget=64, depth=1)
    engine.add(Request("a", [1, 2, 3], SamplingParams(n=2, max_tokens=5, ignore_eos=True)))
    engine.step()
    (parent,) = engine.scheduler.live.values()
    parent.drafter_has_kv = False
    engine.step()
    assert [seq.drafter_has_kv for seq in engine.scheduler.live.values()] == [False, False]


def test_drafts_that_were_not_verified_do_not_count_as_recomputed() -> None:
    """A step with drafts fails for lack of memory: only the known tokens are computed again."""
    schedule = ScheduleConfig(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=100,
        speculative=SpeculativeConfig("early_exit", num_tokens=8, adaptive=False, exit_layer=1),
    )
    cache = CacheConfig(block_size=4, num_blocks=60, prefix_caching=False)
    scheduler = Scheduler(cache, schedule, oracle.VOCAB)
    runner = FakeRunner(60, 4)
    scheduler.add(Request("A", [1] * 5, SamplingParams(max_tokens=60, ignore_eos=True)))
    plan = scheduler.plan()
    scheduler.commit(plan, runner.launch(plan).wait())
    plan = scheduler.plan()
    assert plan.num_drafts == 8
    scheduler.retry_smaller(plan, "out of memory", "out_of_memory")
    scheduler.plan()
    assert scheduler.counters.recomputed_tokens == 6
