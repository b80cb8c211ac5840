"""What a captured decode step computes, run here without a graph: the same as the general path, padding and all."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
import torch

from octavo.config import CacheConfig
from octavo.model import build, registry
from octavo.model.load import dummy_weights
from octavo.params import SamplingParams
from octavo.runner.kvstore import KVStore
from octavo.runner.runner import Runner
from octavo.runner.tier_store import TierStore
from octavo.types import Item, NewSlot, Plan
from tests import tiny
from tests.conftest import DEVICE

pytest.importorskip("triton")
from octavo.ops.triton import TritonOps
from octavo.runner import shapes
from octavo.runner.graphs import Captured, StepGraphs
from octavo.runner.shapes import GraphShape, decode_sizes, held_rows

pytestmark = pytest.mark.parity
BLOCK = 4


def make_runner(graphs: bool, kv_dtype: torch.dtype = torch.float32) -> Runner:
    hf = tiny.hf_model("qwen3").config.to_dict()
    hf["architectures"] = ["Qwen3ForCausalLM"]
    config = registry.parse(hf)
    model = build(config, registry.find(hf), TritonOps(), torch.float32, DEVICE)
    dummy_weights(model, seed=1)
    kv = KVStore(config, CacheConfig(BLOCK, 40), kv_dtype, torch.device(DEVICE))
    kv.tensor.zero_()
    return Runner(model, kv, 4, 64, 64, torch.device(DEVICE), graphs)


def plans() -> list[Plan]:
    """Two prompts and the beginning of a third, whose end comes with the others' first decoding; then all decode. Each row
    crosses into a new block at another step."""
    prompts, tables = (
        {0: [5, 6, 7], 2: [9, 8, 7, 6, 5, 4], 1: [4, 3, 2, 9, 7]},
        {0: [3], 2: [7, 5], 1: [8, 9]},
    )
    params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)
    new = [
        NewSlot(r, 0, r, array("i", p), 0, tables[r], len(p), 11 + r, frozenset(), params)
        for r, p in prompts.items()
    ]
    whole = [Item(r, 0, r, 0, len(prompts[r]), True, len(prompts[r])) for r in (0, 2)]
    first = Plan(1, new_slots=new, items=[*whole, Item(1, 0, 1, 0, 2, False, 2)])
    steps, length = [first], {r: len(p) for r, p in prompts.items()}
    blocks = iter(range(10, 40))
    for step in range(2, 9):
        plan = Plan(step)
        for row in prompts if step != 5 else (2,):
            if (row, step) == (1, 2):
                plan.items.append(Item(1, 0, 1, 2, 3, True, 5))
                continue
            if length[row] % BLOCK == 0:
                plan.block_appends.append((row, length[row] // BLOCK, next(blocks)))
            length[row] += 1
            plan.items.append(Item(row, 0, row, None, 1, True, length[row]))
        steps.append(plan)
    return steps


class WithoutCapture(StepGraphs):
    """Runs the steps that a graph would hold, directly."""

    def _capture(self, shape: GraphShape) -> Captured:
        captured = Captured(
            None, self.nobody(shape), torch.zeros(0), torch.zeros(0), torch.zeros(0)
        )  # type: ignore[arg-type]

        class Replay:
            def replay(_) -> None:
                captured.logits, captured.lengths, captured.tokens = self._step(
                    captured.inputs, shape
                )

        captured.graph = Replay()  # type: ignore[assignment]
        return captured


@pytest.mark.parametrize(
    "kv_dtype",
    [torch.float32, pytest.param(torch.int8, marks=pytest.mark.slow)],
    ids=["plain KV", "compressed KV"],
)
@pytest.mark.parametrize(
    "beside", [[], [2], [1]], ids=["any items", "all decode beside it", "one decodes beside it"]
)
def test_what_graphs_hold_equals_the_general_path(
    beside: list[int], kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "BESIDE_ROWS", beside)
    monkeypatch.setattr(shapes, "BESIDE_SIZES", [7])
    if DEVICE == "cpu":  # pinned memory is CUDA's
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    general, special = make_runner(False, kv_dtype), make_runner(False, kv_dtype)
    special.graphs = WithoutCapture(special.model, special.kv, special.batch_slots, 4, 64, 64)
    for plan in plans():
        want = general.launch(plan).wait().tokens
        got = special.launch(plan).wait().tokens
        assert got == want, plan.step
    mixed = {shape for shape in special.graphs.captured if shape.decoding < shape.tokens}
    assert mixed == ({GraphShape(0, 16)} | {GraphShape(rows, 7) for rows in beside}) and len(
        special.graphs.captured
    ) > len(mixed)
    assert int(special.batch_slots.computed[special.batch_slots.padding_slot]) == 0
    for name in ("tokens", "table", "ints"):
        torch.testing.assert_close(getattr(special.batch_slots, name)[:4], getattr(general.batch_slots, name)[:4])


def test_stores_are_done_before_a_graph_overwrites_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu":
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    runners = [make_runner(False), make_runner(False)]
    runners[1].graphs = WithoutCapture(runners[1].model, runners[1].kv, runners[1].batch_slots, 4, 64, 64)
    for runner in runners:
        runner.kv.tensor[10].fill_(7.0)  # a cached content, in the block that the second step takes
        runner.tiers = TierStore(runner.kv, 2)
    first, second = plans()[:2]
    assert [block for _, _, block in plans()[2].block_appends] == [10]
    third = plans()[2]
    third.stores.append((10, 1))
    for plan in (first, second, third):
        results = [runner.launch(plan).wait() for runner in runners]
        assert results[0].tokens == results[1].tokens
    assert GraphShape(4, 4) in runners[1].graphs.captured
    for runner in runners:
        assert runner.tiers is not None
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert runner.tiers.buffers[1].unique().tolist() == [7.0]
        assert not (runner.kv.tensor[10] == 7.0).all(), "the step was meant to write to it"
        runner.tiers.close()


def test_a_step_that_loads_is_no_decode_graph_s() -> None:
    runner = make_runner(False)
    graphs = WithoutCapture(runner.model, runner.kv, runner.batch_slots, 4, 64, 64)
    items = [Item(0, 0, 0, None, 1, True, 4)]
    assert graphs.decodes(Plan(1, items=items)) and graphs.decodes(
        Plan(1, items=items, stores=[(1, 1)])
    )
    assert not graphs.decodes(Plan(1, items=items, loads=[(1, 1)]))


def test_the_smallest_graph_is_taken_and_as_much_of_it_for_decoding_as_there_is() -> None:
    made = make_runner(False)
    graphs = StepGraphs(made.model, made.kv, made.batch_slots, 100, 4096, 8192)

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
    # of 64 items one is what is left over
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
    assert (
        StepGraphs(made.model, made.kv, made.batch_slots, 4, 64, 8).find_mixed_shape(
            [Item(0, 0, 0, 0, 2, True, 2)]
        )
        is None
    )


def test_sizes_cover_every_count() -> None:
    for most in (1, 3, 16, 100, 256, 1000, 4096):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert all(b - a <= max(16, b // 8) for a, b in pairwise(sizes))


def test_what_graphs_hold_is_counted() -> None:
    made = make_runner(False)
    graphs = StepGraphs(made.model, made.kv, made.batch_slots, 100, 4096, 8192)
    sizes = [GraphShape(n, n) for n in graphs.decode_sizes] + graphs.mixed_shapes
    assert held_rows(100, 8192) == sum(s.items for s in sizes) > held_rows(8, 8192)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kv_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=["plain", "int8", "fp8"]
)
def test_captured_graphs_give_the_same_tokens(kv_dtype: torch.dtype) -> None:
    general, captured = make_runner(False, kv_dtype), make_runner(True, kv_dtype)
    captured.capture()
    for plan in plans():
        assert captured.launch(plan).wait().tokens == general.launch(plan).wait().tokens
