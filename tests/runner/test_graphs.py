"""What a captured decode step computes, run here without a graph: the same as the general path, padding and all."""

from __future__ import annotations

from array import array

import pytest
import torch

from octavo.config import CacheConfig
from octavo.model import build, registry
from octavo.model.load import dummy_weights
from octavo.runner.kvstore import KVStore
from octavo.runner.runner import Runner
from octavo.types import Item, NewRow, Plan, SamplingParams
from tests import tiny
from tests.conftest import DEVICE

pytest.importorskip("triton")
from octavo.ops.triton import TritonOps
from octavo.runner.graphs import DecodeGraphs, graph_sizes

pytestmark = pytest.mark.parity
BLOCK = 4


def make_runner(graphs: bool) -> Runner:
    hf = tiny.hf_model("qwen3").config.to_dict()
    hf["architectures"] = ["Qwen3ForCausalLM"]
    config = registry.parse(hf)
    model = build(config, registry.find(hf), TritonOps(), torch.float32, DEVICE)
    dummy_weights(model, seed=1)
    kv = KVStore(config, CacheConfig(BLOCK, 40), torch.float32, torch.device(DEVICE))
    kv.tensor.zero_()
    return Runner(model, kv, 4, 64, torch.device(DEVICE), graphs)


def plans() -> list[Plan]:
    """Two prompts, then decoding; each row crosses into a new block at another step."""
    prompts, tables = {0: [5, 6, 7], 2: [9, 8, 7, 6, 5, 4]}, {0: [3], 2: [7, 5]}
    params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)
    new = [NewRow(r, 0, r, array("i", p), 0, tables[r], len(p), 11 + r, frozenset(), params) for r, p in prompts.items()]
    first = Plan(1, rows=new, items=[Item(r, 0, r, 0, len(p), True, len(p)) for r, p in prompts.items()])
    steps, length = [first], {r: len(p) for r, p in prompts.items()}
    blocks = iter(range(10, 40))
    for step in range(2, 9):
        plan = Plan(step)
        for row in prompts if step != 5 else (2,):
            if length[row] % BLOCK == 0:
                plan.appends.append((row, length[row] // BLOCK, next(blocks)))
            length[row] += 1
            plan.items.append(Item(row, 0, row, None, 1, True, length[row]))
        steps.append(plan)
    return steps


def test_a_decode_step_equals_the_general_path() -> None:
    general, special = make_runner(False), make_runner(False)
    graphs = DecodeGraphs(special.model, special.kv, special.rows, 4, 64)
    for plan in plans():
        want = general.launch(plan).wait().tokens
        if graphs.fits(plan):
            rows = [item.row for item in plan.items]
            fresh = {row: block for row, _, block in plan.appends}
            pad = 4 - len(rows)
            inputs = [rows + [special.rows.padding] * pad, [fresh.get(r, 0) for r in rows] + [0] * pad]
            with torch.inference_mode():
                on_device = torch.tensor(inputs, dtype=torch.int32, device=DEVICE)
                logits, lengths = graphs._step(on_device)
                n = len(rows)
                got = special._sample(plan.items, list(range(n)), on_device[0, :n], logits[:n], lengths[:n], []).wait().tokens
        else:
            got = special.launch(plan).wait().tokens
        assert got == want, plan.step
    assert int(special.rows.computed[special.rows.padding]) == 0
    for name in ("tokens", "table", "ints"):
        torch.testing.assert_close(getattr(special.rows, name), getattr(general.rows, name))


def test_sizes_cover_every_count() -> None:
    for most in (1, 3, 16, 100, 256, 1000, 4096):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert all(b - a <= max(16, b // 8) for a, b in zip(sizes, sizes[1:], strict=False))


@pytest.mark.gpu
def test_captured_graphs_give_the_same_tokens() -> None:
    general, captured = make_runner(False), make_runner(True)
    captured.capture()
    for plan in plans():
        assert captured.launch(plan).wait().tokens == general.launch(plan).wait().tokens
