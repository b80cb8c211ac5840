"""What a captured decode step computes, run here without a graph: the same as the general path,
padding and all."""

from __future__ import annotations

from array import array
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from octavo.config import CacheConfig
from octavo.model import build, registry
from octavo.model.base import CausalLM
from octavo.model.draft_head import load_draft_head
from octavo.model.load import dummy_weights
from octavo.params import SamplingParams
from octavo.runner.batch import ForwardResult
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.drafter import Drafter, DraftModel, EarlyExit
from octavo.runner.head_drafter import HeadDrafter
from octavo.runner.kvstore import KVStore
from octavo.runner.runner import Runner
from octavo.runner.tier_store import TierStore
from octavo.types import Item, Plan, SlotFill
from tests import tiny
from tests.conftest import DEVICE
from tests.marks import slow_after
from tests.model.test_draft_head import random_tensors, write_head

pytest.importorskip("triton")
from octavo.ops.triton import TritonOps
from octavo.ops.triton.invariant_triton import InvariantTritonOps
from octavo.runner import graph_shapes
from octavo.runner.graph_shapes import GraphShape, RunnerLimits, decode_sizes, held_logits
from octavo.runner.graphs import StepGraph, StepGraphs

pytestmark = pytest.mark.parity
BLOCK = 4
LIMITS = RunnerLimits(max_slots=4, max_len=64, max_tokens=64, max_drafts=3)
LARGE_LIMITS = RunnerLimits(max_slots=100, max_len=4096, max_tokens=8192)


def make_runner(
    use_graphs: bool,
    kv_dtype: torch.dtype = torch.float32,
    drafter: str | None = None,
    ops: TritonOps | None = None,
) -> Runner:
    hf = tiny.hf_model("qwen3").config.to_dict()
    hf["architectures"] = ["Qwen3ForCausalLM"]
    config = registry.parse(hf)
    model = build(config, registry.find(hf), ops or TritonOps(), torch.float32, DEVICE)
    dummy_weights(model, seed=1)
    kv = KVStore(config, CacheConfig(BLOCK, 40), kv_dtype, torch.device(DEVICE))
    kv.tensor.zero_()
    limits = LIMITS._replace(drafts_on_device=drafter is not None)
    return Runner(
        model, kv, limits, use_graphs=use_graphs, drafter=make_drafter(drafter, model, kv)
    )


def make_drafter(name: str | None, model: CausalLM, kv: KVStore) -> Drafter | None:
    if name is None:
        return None
    if name == "early_exit":
        return EarlyExit(model.first_layers(1), kv)
    if name == "draft_model":  # the model itself, so that all drafts are right
        own_kv = KVStore(model.config, CacheConfig(BLOCK, 40), kv.tensor.dtype, kv.tensor.device)
        return DraftModel(model, own_kv)
    head = load_draft_head(head_dir(), model)
    own_kv = KVStore(head.config, CacheConfig(BLOCK, 40), kv.tensor.dtype, kv.tensor.device)
    own_kv.tensor.zero_()
    return HeadDrafter(head, own_kv, LIMITS.max_slots)


@cache
def head_dir() -> Path:
    shared = {"shares_target_head": True, "eagle_config": {"use_aux_hidden_state": False}}
    return write_head(Path(mkdtemp(prefix="octavo-head-")), random_tensors(0, False), **shared)


def plans() -> list[Plan]:
    """Two prompts and the beginning of a third, whose end comes with the others' first decode step;
    then all decode. Each slot crosses into a new block at another step."""
    prompts, tables = (
        {0: [5, 6, 7], 2: [9, 8, 7, 6, 5, 4], 1: [4, 3, 2, 9, 7]},
        {0: [3], 2: [7, 5], 1: [8, 9]},
    )
    params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)
    new = [
        SlotFill(r, 0, r, array("i", p), 0, tables[r], len(p), 11 + r, frozenset(), params)
        for r, p in prompts.items()
    ]
    whole = [Item(r, 0, r, 0, len(prompts[r]), True, len(prompts[r])) for r in (0, 2)]
    first = Plan(1, slot_fills=new, items=[*whole, Item(1, 0, 1, 0, 2, False, 2)])
    steps, length = [first], {r: len(p) for r, p in prompts.items()}
    blocks = iter(range(10, 40))
    for step in range(2, 9):
        plan = Plan(step)
        for row in prompts if step != 5 else (2,):
            if (row, step) == (1, 2):
                plan.items.append(Item(1, 0, 1, 2, 3, True, 5))
                continue
            if length[row] % BLOCK == 0:
                plan.table_updates.append((row, length[row] // BLOCK, next(blocks)))
            length[row] += 1
            plan.items.append(Item(row, 0, row, None, 1, True, length[row]))
        steps.append(plan)
    return steps


class WithoutCapture(StepGraphs):
    """Runs the steps that a graph would hold, directly."""

    def _capture(self, shape: GraphShape) -> StepGraph:
        nothing = ForwardResult(torch.zeros(0), torch.zeros(0), torch.zeros(0))
        captured = StepGraph(None, self.padding_inputs(shape), nothing)  # type: ignore[arg-type]

        class Replay:
            def replay(_) -> None:
                captured.result = self._run(captured.inputs, shape)

        captured.graph = Replay()  # type: ignore[assignment]
        return captured


@pytest.mark.parametrize(
    "kv_dtype",
    [torch.float32, pytest.param(torch.int8, marks=pytest.mark.slow)],
    ids=["plain KV", "compressed KV"],
)
@pytest.mark.parametrize(
    "decoding",
    slow_after(1, [[2], [], [1]]),
    ids=["all decode beside it", "any items", "one decodes beside it"],
)
def test_graphs_compute_the_same_as_eager_steps(
    decoding: list[int], kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_shapes, "PIGGYBACK_DECODING", decoding)
    monkeypatch.setattr(graph_shapes, "PIGGYBACK_SIZES", [7])
    if DEVICE == "cpu":  # pinned memory is CUDA's
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    general, special = make_runner(False, kv_dtype), make_runner(False, kv_dtype)
    special.graphs = WithoutCapture(special.model, special.kv, special.batch_slots, LIMITS)
    for plan in plans():
        want = general.launch(plan).wait().tokens
        got = special.launch(plan).wait().tokens
        assert got == want, plan.step
    captured = special.graphs.graphs
    mixed = {shape for shape in captured if shape.decoding < shape.tokens}
    assert mixed == {GraphShape(0, 16)} | {GraphShape(count, 7) for count in decoding}
    assert len(captured) > len(mixed)
    assert int(special.batch_slots.computed[special.batch_slots.padding_slot]) == 0
    for name in ("tokens", "block_table", "ints"):
        got_state = getattr(special.batch_slots, name)
        want_state = getattr(general.batch_slots, name)
        torch.testing.assert_close(got_state[:4], want_state[:4])


def test_padding_changes_no_bit_with_batch_invariant_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The KV of graphs and of eager steps is the same, bit for bit, and so are hidden states."""
    monkeypatch.setattr(graph_shapes, "PIGGYBACK_DECODING", [2])
    monkeypatch.setattr(graph_shapes, "PIGGYBACK_SIZES", [7])
    if DEVICE == "cpu":  # pinned memory is CUDA's
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    general, special = (make_runner(False, ops=InvariantTritonOps()) for _ in range(2))
    special.graphs = WithoutCapture(special.model, special.kv, special.batch_slots, LIMITS)
    for plan in plans()[:3]:
        want = general.launch(plan).wait().tokens
        assert special.launch(plan).wait().tokens == want
    padding_block = 1
    assert torch.equal(special.kv.tensor[padding_block:], general.kv.tensor[padding_block:])


@pytest.mark.parametrize("is_extended", slow_after(1, [False, True]))
def test_the_drafter_extends_its_kv_in_a_graph_only_if_the_plan_says_so(
    is_extended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    runner = make_runner(False, drafter="head")
    assert runner.drafter is not None
    observed: list[int] = []
    monkeypatch.setattr(
        runner.drafter, "observe", lambda seen, slots: observed.append(len(seen.batch.ids))
    )
    limits = LIMITS._replace(drafts_on_device=True)
    runner.graphs = WithoutCapture(
        runner.model, runner.kv, runner.batch_slots, limits, runner.drafter
    )
    for plan in plans()[:3]:
        plan.draft_extend = is_extended
        runner.launch(plan).wait()
    assert bool(observed) == is_extended
    assert all(shape.draft_extend == is_extended for shape in runner.graphs.graphs)


def draft_plan(step: int, state: BatchSlots, drafts: dict[int, list[int]]) -> Plan:
    """All three sequences decode, some with drafts behind their last token."""
    plan = Plan(step)
    for slot, proposal in drafts.items():
        end = int(state.computed[slot]) + 1 + len(proposal)
        # Blocks of their own for the positions of drafts.
        plan.table_updates += [
            (slot, block, 12 + 9 * slot + block) for block in range(-(-end // BLOCK))
        ]
        if proposal:
            plan.drafts[len(plan.items)] = array("i", proposal)
            plan.num_drafts += len(proposal)
        item = Item(slot, 0, slot, None, 1 + len(proposal), True, end, num_drafts=len(proposal))
        plan.items.append(item)
    return plan


def test_a_graph_verifies_drafts_as_an_eager_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    undrafted, general, special = make_runner(False), make_runner(False), make_runner(False)
    special.graphs = WithoutCapture(special.model, special.kv, special.batch_slots, LIMITS)
    first, second = plans()[:2]
    for table_updates in (first, second):
        for runner in (undrafted, general, special):
            runner.launch(table_updates).wait()
    # What the sequences say without drafts: the first three tokens of each.
    said: dict[int, list[int]] = {0: [], 2: [], 1: []}
    for step in range(3, 6):
        plan = draft_plan(step, undrafted.batch_slots, {slot: [] for slot in said})
        for item, tokens in zip(plan.items, undrafted.launch(plan).wait().tokens, strict=True):
            said[item.slot] += tokens
    wrong = (said[2][1] + 1) % 100
    drafts = {0: said[0][:2], 2: [said[2][0], wrong, 7], 1: []}
    for runner in (general, special):
        plan = draft_plan(3, runner.batch_slots, drafts)
        tokens = runner.launch(plan).wait().tokens
        assert tokens == [said[0], said[2][:2], said[1][:1]]
    assert GraphShape(8, 8, verifies=True) in special.graphs.graphs
    for name in ("tokens", "computed"):
        got_state = getattr(special.batch_slots, name)[:3]
        want_state = getattr(general.batch_slots, name)[:3]
        torch.testing.assert_close(got_state, want_state)
    assert int(special.batch_slots.computed[special.batch_slots.padding_slot]) == 0


@pytest.mark.slow  # `make test-gpu` runs it too.
@pytest.mark.parametrize("drafter", ["early_exit", "draft_model", "head"])
def test_a_graph_drafts_and_verifies_as_eager_steps_do(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with prompts, without drafts and with 1 to 3 drafts of each sequence."""
    if DEVICE == "cpu":
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    general, special = make_runner(False, drafter=drafter), make_runner(False, drafter=drafter)
    limits = LIMITS._replace(drafts_on_device=True)
    special.graphs = WithoutCapture(
        special.model, special.kv, special.batch_slots, limits, special.drafter
    )
    num_accepted = 0
    for plan in plans()[:3]:
        assert special.launch(plan).wait().tokens == general.launch(plan).wait().tokens
    for step, counts in enumerate([(1, 3, 2), (3, 3, 3), (2, 0, 1), (3, 1, 3)], 4):
        for runner in (general, special):
            drafts = {slot: [0] * count for slot, count in zip((0, 2, 1), counts, strict=True)}
            plan = draft_plan(step, runner.batch_slots, drafts)
            plan.drafts.clear()  # the device drafts
            tokens = runner.launch(plan).wait().tokens
            if runner is general:
                expected = tokens
        assert tokens == expected, step
        num_accepted += sum(len(kept) - 1 for kept in tokens)
    verifying = {shape for shape in special.graphs.graphs if shape.verifies}
    assert {shape.num_passes for shape in verifying} == {2, 3}
    if drafter == "draft_model":
        assert num_accepted == 25, "a model that drafts for itself is always right"
    for name in ("tokens", "computed"):
        got_state = getattr(special.batch_slots, name)[:3]
        torch.testing.assert_close(got_state, getattr(general.batch_slots, name)[:3])
    assert int(special.batch_slots.computed[special.batch_slots.padding_slot]) == 0


def test_stores_are_done_before_a_graph_overwrites_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu":
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    runners = [make_runner(False), make_runner(False)]
    runners[1].graphs = WithoutCapture(
        runners[1].model, runners[1].kv, runners[1].batch_slots, LIMITS
    )
    for runner in runners:
        runner.kv.tensor[10].fill_(7.0)  # a cached content, in the block that the second step takes
        runner.tier_store = TierStore(runner.kv, 2)
    first, second = plans()[:2]
    assert [block for _, _, block in plans()[2].table_updates] == [10]
    third = plans()[2]
    third.stores.append((10, 1))
    for plan in (first, second, third):
        results = [runner.launch(plan).wait() for runner in runners]
        assert results[0].tokens == results[1].tokens
    assert GraphShape(4, 4) in runners[1].graphs.graphs
    for runner in runners:
        assert runner.tier_store is not None
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert runner.tier_store.buffers[1].unique().tolist() == [7.0]
        assert not (runner.kv.tensor[10] == 7.0).all(), "the step was meant to write to it"
        runner.tier_store.close()


def test_a_step_that_loads_does_not_use_a_decode_graph() -> None:
    runner = make_runner(False)
    graphs = WithoutCapture(runner.model, runner.kv, runner.batch_slots, LIMITS)
    items = [Item(0, 0, 0, None, 1, True, 4)]
    assert graphs.is_decode(Plan(1, items=items))
    assert graphs.is_decode(Plan(1, items=items, stores=[(1, 1)]))
    assert not graphs.is_decode(Plan(1, items=items, loads=[(1, 1)]))


def test_a_step_takes_the_smallest_graph_with_the_most_decoding_items() -> None:
    made = make_runner(False)
    graphs = StepGraphs(made.model, made.kv, made.batch_slots, LARGE_LIMITS)

    def shape(decoding: int, *prompts: int) -> GraphShape | None:
        items = [Item(i, 0, i, None, 1, True, 9) for i in range(decoding)]
        return graphs.find_mixed_shape(
            items + [Item(200 + i, 0, 0, 0, num, True, num) for i, num in enumerate(prompts)]
        )

    assert (
        shape(3, 10) == GraphShape(0, 16)
        and shape(3, 13) == GraphShape(0, 16)
        and shape(3, 14) == GraphShape(0, 32)
    )
    # One of the 64 items is padding.
    assert shape(62, 50) == GraphShape(0, 128) and shape(63, 50) == GraphShape(32, 192)
    assert (
        shape(99, 50) == GraphShape(96, 192)
        and shape(99, 93) == GraphShape(96, 192)
        and shape(99, 94) == GraphShape(96, 320)
    )
    assert shape(31, 300, 300) is None
    assert shape(40, 600) == GraphShape(32, 640) and shape(40, 601) is None
    assert shape(96, *[2] * 63) == GraphShape(96, 320) and shape(96, *[2] * 64) is None
    assert all(s.items <= s.tokens and s.decoding <= 100 for s in graphs.mixed_shapes)
    no_mixed = StepGraphs(made.model, made.kv, made.batch_slots, RunnerLimits(4, 64, 8))
    assert no_mixed.find_mixed_shape([Item(0, 0, 0, 0, 2, True, 2)]) is None


def test_sizes_cover_every_count() -> None:
    for most in (1, 3, 16, 100, 256, 1000, 4096):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert all(b - a <= max(16, b // 8) for a, b in pairwise(sizes))


def test_the_logits_that_graphs_hold_are_counted() -> None:
    made = make_runner(False)
    graphs = StepGraphs(made.model, made.kv, made.batch_slots, LARGE_LIMITS)
    sizes = [GraphShape(n, n) for n in graphs.decode_sizes] + graphs.mixed_shapes
    assert (
        held_logits(LARGE_LIMITS)
        == sum(s.items for s in sizes)
        > held_logits(LARGE_LIMITS._replace(max_slots=8))
    )
    assert held_logits(LARGE_LIMITS._replace(drafts_on_device=True)) == 2 * held_logits(
        LARGE_LIMITS
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kv_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=["plain", "int8", "fp8"]
)
def test_captured_graphs_give_the_same_tokens(kv_dtype: torch.dtype) -> None:
    general, captured = make_runner(False, kv_dtype), make_runner(True, kv_dtype)
    captured.capture()
    for plan in plans():
        assert captured.launch(plan).wait().tokens == general.launch(plan).wait().tokens
