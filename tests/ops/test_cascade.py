"""Cascade attention: prefixes that decoding rows share are found in their block tables, and reading
them once changes no result. On a machine without a GPU the kernels run interpreted."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.config import CacheConfig, ModelConfig
from octavo.model import build, registry
from octavo.model.load import dummy_weights
from octavo.ops import ForwardBatch, Span
from octavo.ops.kv import LARGEST, QuantKV, compress
from octavo.ops.reference import ReferenceOps
from octavo.params import SamplingParams
from octavo.runner.kvstore import KVStore
from octavo.types import Item, Plan, SlotFill
from tests import tiny
from tests.batch import empty_kv, make_batch
from tests.conftest import DEVICE
from tests.ops.test_reference import draw

pytest.importorskip("triton")
from octavo.ops.triton import TritonOps, attention_kernels, shared_prefixes
from octavo.ops.triton.shared_prefixes import PrefixTiles
from octavo.runner.graph_shapes import GraphShape, RunnerLimits
from octavo.runner.runner import Runner
from tests.runner.test_graphs import WithoutCapture

pytestmark = pytest.mark.parity
REFERENCE = ReferenceOps()
PLAIN = TritonOps()
CASCADE = TritonOps(cascade_attention=True)
PREFIX_BYTES = attention_kernels.PREFIX_BYTES
KEYS = 64  # positions of a tile of prefix_kernel for the float32 heads of these tests


@pytest.fixture(autouse=True)
def search_short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "PREFIX_BYTES", 0)


class Row(NamedTuple):
    """A decoding row: the group that its first blocks belong to, how many, and its length."""

    group: int
    shared_blocks: int
    length: int


def tables_of(rows: Sequence[Row], block: int) -> list[list[int]]:
    """Return block tables in which the rows of a group share their first blocks."""
    names: dict[tuple[int, int, int], int] = {}
    tables = []
    for index, row in enumerate(rows):
        table = []
        for column in range(-(-row.length // block)):
            is_shared = column < row.shared_blocks
            name = (row.group if is_shared else -1, -1 if is_shared else index, column)
            table.append(names.setdefault(name, len(names)))
        tables.append(table)
    return tables


def with_random_blocks(tables: list[list[int]]) -> list[list[int]]:
    """Return the same tables over blocks 1, 2, ... in random order."""
    blocks = sorted({block for table in tables for block in table})
    random.Random(0).shuffle(blocks)
    numbers = {block: number for number, block in enumerate(blocks, 1)}
    return [[numbers[block] for block in table] for table in tables]


class Problem(NamedTuple):
    query: Tensor
    kv: Tensor | QuantKV
    batch: ForwardBatch


def make_problem(
    rows: Sequence[Row],
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 16,
    block: int = 64,
    prompts: Sequence[tuple[int, int]] = (),
    kv_dtype: torch.dtype = torch.float32,
) -> Problem:
    """Make queries, one layer of KV, and a batch of decoding rows followed by prompts (tokens,
    positions before them). A position that no row may read holds NaN."""
    items = [(1, row.length - 1) for row in rows] + list(prompts)
    tables = tables_of([*rows, *(Row(-1, 0, num + start) for num, start in prompts)], block)
    tables = with_random_blocks(tables)
    config = ModelConfig("", 1, 1, 1, kv_heads, kv_heads, dim, 1, 1)
    kv = empty_kv(config, tables, block, DEVICE)[:, 0]
    for (num, start), table in zip(items, tables, strict=True):
        for index, number in enumerate(table):
            used = min(block, start + num - index * block)
            values = draw(2, kv_heads, block, dim, seed=number).to(DEVICE)
            kv[number, :, :, :used] = values[:, :, :used]
    batch = make_batch([([0] * num, start) for num, start in items], tables, block, DEVICE)
    query = draw(len(batch.ids), heads, dim, seed=1).to(DEVICE)
    if kv_dtype in LARGEST:
        return Problem(query, QuantKV(*compress(kv, kv_dtype)), batch)
    return Problem(query.to(kv_dtype), kv.to(kv_dtype), batch)


def prefix_lengths(batch: ForwardBatch) -> list[int]:
    """Return the lengths that cascade attention has found, or [] if it has not searched."""
    results = [value for key, value in batch.scratch.items() if key[0] == "shared prefixes"]
    return results[0].lengths.tolist() if results else []


def compare_with_reference(problem: Problem) -> list[int]:
    """Compare with the reference, and return the lengths of the prefixes."""
    got = CASCADE.attention(*problem, 0.3)
    want = REFERENCE.attention(*problem, 0.3)
    tolerance = 1e-5 if problem.query.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)
    return prefix_lengths(problem.batch)


def rows_of_group(count: int, shared: int, lengths: Sequence[int], number: int = 0) -> list[Row]:
    return [Row(number, shared, lengths[index % len(lengths)]) for index in range(count)]


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [
        (6, 2, 32, 16),
        (4, 1, 24, 64),
        (16, 1, 16, 128),
        pytest.param(9, 3, 64, 64, marks=pytest.mark.slow),
        pytest.param(2, 2, 16, 8, marks=pytest.mark.slow),
    ],
)
def test_rows_that_share_a_prefix(heads: int, kv_heads: int, dim: int, block: int) -> None:
    """One token or a few blocks follow the prefix. If a tile is larger than a block, the length of the
    prefix is not a multiple of a tile."""
    shared = -(-150 // block)
    lengths = [shared * block + extra for extra in (1, 2, block, block + 1, 3 * block - 1)]
    lengths = compare_with_reference(
        make_problem(rows_of_group(11, shared, lengths), heads, kv_heads, dim, block)
    )
    assert lengths == [shared * block // KEYS * KEYS] * 11


def test_groups_with_unrelated_rows_and_padding() -> None:
    """The rows of two groups and rows that share nothing are mixed. Padding rows have block 0."""
    rows = rows_of_group(40, 2, [129, 200, 130], 0) + rows_of_group(30, 3, [193, 300, 250], 1)
    rows += [Row(-1, 0, length) for length in (1, 64, 65, 400, 129)]
    random.Random(1).shuffle(rows)
    query, kv, batch = make_problem(rows)
    batch.block_table[:4] = 0
    batch.seq_lens[:4] = 1
    for index in range(4):
        batch.positions[index] = 0
    lengths = compare_with_reference(Problem(query, kv, batch))
    assert lengths[:4] == [0] * 4
    # Tiles of 32 rows: one holds 32 rows of the first group, one the middle of both.
    assert set(lengths) == {0, 128, 192}
    for row, length in zip(rows[4:], lengths[4:], strict=True):
        assert length in (0, row.shared_blocks * 64)
    assert sum(length > 0 for length in lengths) > 40


def test_a_row_with_a_shorter_prefix_reads_its_own_keys() -> None:
    """Of nine rows, some share four blocks, some two, and one sequence ends inside the prefix."""
    rows = [*rows_of_group(6, 4, [257, 300]), *rows_of_group(2, 2, [300]), Row(0, 4, 256)]
    lengths = compare_with_reference(make_problem(rows))
    assert lengths == [256] * 6 + [0] * 3, "256 * 5 positions are saved, and not 128 * 8"


def test_each_row_of_drafts_sees_the_positions_before_it() -> None:
    """The rows belong to one sequence, as in verification, at positions on both sides of a block's
    end. The leader of the tile is one of them."""
    query, kv, batch = make_problem([Row(0, 3, 200) for _ in range(12)])
    batch.slots[:] = batch.slots[0]
    lengths = torch.arange(188, 200, dtype=torch.int32, device=DEVICE)
    batch.seq_lens.copy_(lengths)
    batch.positions.copy_(lengths - 1)
    tables = batch.block_table[:1].expand(12, -1).contiguous()
    want = REFERENCE.attention(
        query,
        kv,
        replace(
            batch,
            slots=torch.arange(12, dtype=torch.int32, device=DEVICE),
            block_table=tables,
            scratch={},
        ),
        0.3,
    )
    got = CASCADE.attention(query, kv, batch, 0.3)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    # Lengths up to 192 have two full blocks before the one of their last position.
    assert prefix_lengths(batch) == [128] * 12


@pytest.mark.parametrize("kv_dtype", list(LARGEST), ids=str)
@pytest.mark.parametrize(("dim", "block"), [(64, 64), (16, 16)], ids=["words", "bytes"])
def test_compressed_kv(kv_dtype: torch.dtype, dim: int, block: int) -> None:
    shared = 128 // block
    lengths = [129, 190, 140]
    problem = make_problem(
        rows_of_group(9, shared, lengths),
        heads=4,
        kv_heads=2,
        dim=dim,
        block=block,
        kv_dtype=kv_dtype,
    )
    assert compare_with_reference(problem) == [128] * 9


def test_rows_beside_prompts() -> None:
    """Prompts are computed in the same step, one of them behind a prefix of its own."""
    rows = rows_of_group(attention_kernels.OVERLAP_MIN_SEQUENCES + 3, 2, [129, 150, 193])
    lengths = compare_with_reference(make_problem(rows, prompts=[(70, 130), (1, 40), (9, 0)]))
    assert lengths == [128] * len(rows)


def test_a_long_prefix_is_split_and_some_splits_are_empty() -> None:
    """129 tiles in 32 splits of five tiles leave the last six splits empty. A long rest of a sequence
    after the prefix is split too."""
    prefix = 129 * 64
    rows = [
        *rows_of_group(7, 129, [prefix + 1, prefix + 64, prefix + 70]),
        Row(0, 129, prefix + 700),
    ]
    assert compare_with_reference(make_problem(rows)) == [prefix] * 8


def test_a_row_with_nan_affects_no_other() -> None:
    problem = make_problem(rows_of_group(10, 2, [150]))
    want = CASCADE.attention(*problem, 0.3)
    problem.query[3] = float("nan")
    got = CASCADE.attention(*problem, 0.3)
    others = [index for index in range(10) if index != 3]
    assert torch.equal(got[others], want[others])
    assert got[3].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, *LARGEST], ids=str)
def test_heads_of_models(kv_dtype: torch.dtype) -> None:
    """The heads of Llama-8B, in the formats that a GPU multiplies."""
    rows = rows_of_group(40, 20, [1281, 1500, 1400]) + rows_of_group(30, 9, [700, 577], 1)
    query, kv, batch = make_problem(rows, heads=32, kv_heads=8, dim=128)
    layer: Tensor | QuantKV = kv.to(torch.bfloat16) if isinstance(kv, Tensor) else kv
    if kv_dtype in LARGEST and isinstance(kv, Tensor):
        layer = QuantKV(*compress(kv, kv_dtype))
    lengths = compare_with_reference(Problem(query.to(torch.bfloat16), layer, batch))
    assert set(lengths) == {0, 20 * 64, 9 * 64}


# ---- when it is used -----------------------------------------------------------------------------


def test_rows_that_share_nothing_have_the_same_result_as_without_it() -> None:
    problem = make_problem(
        [Row(-1, 0, length) for length in (1, 64, 65, 300, 129, 700, 2, 128, 500)]
    )
    got, want = CASCADE.attention(*problem, 0.3), PLAIN.attention(*problem, 0.3)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert prefix_lengths(problem.batch) == [0] * 9


def test_layers_with_a_window_and_few_rows_do_not_use_it() -> None:
    problem = make_problem(rows_of_group(9, 2, [150]))
    windowed = CASCADE.attention(*problem, 0.3, window=40)
    assert torch.equal(windowed, PLAIN.attention(*problem, 0.3, window=40))
    assert prefix_lengths(problem.batch) == []
    few = make_problem(rows_of_group(attention_kernels.PREFIX_SEQUENCES - 1, 2, [150]))
    assert torch.equal(CASCADE.attention(*few, 0.3), PLAIN.attention(*few, 0.3))
    assert prefix_lengths(few.batch) == []


def test_prefixes_that_save_little_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "PREFIX_BYTES", PREFIX_BYTES)
    problem = make_problem(rows_of_group(9, 2, [150]))
    assert torch.equal(CASCADE.attention(*problem, 0.3), PLAIN.attention(*problem, 0.3))
    assert prefix_lengths(problem.batch) == []


def test_without_the_option_nothing_is_searched() -> None:
    problem = make_problem(rows_of_group(9, 2, [150]))
    PLAIN.attention(*problem, 0.3)
    assert prefix_lengths(problem.batch) == []


def test_the_layers_of_a_step_search_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = 0
    kernel = shared_prefixes.measure_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            nonlocal searches
            searches += 1
            return kernel[grid]

    monkeypatch.setattr(shared_prefixes, "measure_kernel", Counted())
    problem = make_problem(rows_of_group(9, 2, [150]))
    for _ in range(3):
        CASCADE.attention(*problem, 0.3)
    assert searches == 1
    CASCADE.attention(problem.query, problem.kv, replace(problem.batch, scratch={}), 0.3)
    assert searches == 2


def test_results_do_not_depend_on_the_lengths_that_the_host_knows() -> None:
    """A graph is replayed with other lengths, block tables and slots, but with the same spans."""
    first = make_problem(rows_of_group(9, 2, [129, 150, 400]))
    second = make_problem(
        [*rows_of_group(5, 3, [193, 200]), *(Row(-1, 0, n) for n in (1, 70, 3, 400))]
    )
    buffers = replace(
        first.batch,
        spans=[Span(index, 1, 10**6) for index in range(9)],
        block_table=first.batch.block_table.clone(),
        seq_lens=first.batch.seq_lens.clone(),
        slots=first.batch.slots.clone(),
    )
    for query, kv, batch in (first, second, first):
        slots = torch.randperm(9, generator=torch.Generator().manual_seed(5)).int().to(DEVICE)
        buffers.slots.copy_(slots)
        width = batch.block_table.shape[1]
        buffers.block_table.zero_()
        buffers.block_table[slots.long(), :width] = batch.block_table
        buffers.seq_lens.copy_(batch.seq_lens)
        buffers.scratch.clear()  # as in a replay, everything is computed again
        got = CASCADE.attention(query, kv, buffers, 0.3)
        torch.testing.assert_close(
            got, REFERENCE.attention(query, kv, batch, 0.3), atol=1e-5, rtol=1e-5
        )
    assert prefix_lengths(buffers) == [128] * 9


@pytest.mark.gpu
def test_a_replayed_graph_finds_other_prefixes() -> None:
    """Two layers in one CUDA graph, captured with padding and replayed with several batches."""
    problems = [
        make_problem(rows_of_group(40, 4, [257, 300, 400], number)) for number in range(2)
    ] + [make_problem([Row(-1, 0, 10 * n + 1) for n in range(40)])]
    query, kv, batch = problems[0]
    width = max(problem.batch.block_table.shape[1] for problem in problems)
    num_blocks = max(problem.kv.shape[0] for problem in problems)
    assert isinstance(kv, Tensor)
    static_kv = kv.new_zeros(num_blocks, *kv.shape[1:])
    buffers = replace(
        batch,
        block_table=torch.zeros(40, width, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.ones(40, dtype=torch.int32, device=DEVICE),
        scratch={},
    )
    static_query = query.clone()
    CASCADE.attention(static_query, static_kv, replace(buffers, scratch={}), 0.3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [CASCADE.attention(static_query, static_kv, buffers, 0.3) for _ in range(2)]
    for problem in [*problems, problems[0]]:
        static_query.copy_(problem.query)
        static_kv.zero_()
        assert isinstance(problem.kv, Tensor)
        static_kv[: problem.kv.shape[0]] = problem.kv
        buffers.block_table.zero_()
        buffers.block_table[:, : problem.batch.block_table.shape[1]] = problem.batch.block_table
        buffers.seq_lens.copy_(problem.batch.seq_lens)
        graph.replay()
        want = REFERENCE.attention(problem.query, problem.kv, problem.batch, 0.3)
        for output in outputs:
            torch.testing.assert_close(output, want, atol=1e-4, rtol=1e-4)


# ---- the search ----------------------------------------------------------------------------------


def expected_prefixes(
    tables: list[list[int]], lengths: list[int], tiles: PrefixTiles, block: int
) -> tuple[list[int], list[int]]:
    """Compute the order of rows and their prefixes in plain Python."""
    full = [(length - 1) // block for length in lengths]
    last = 2**31 - 1
    rows = range(len(tables))
    order = sorted(rows, key=lambda row: tables[row][0] if full[row] else last)
    prefixes = [0] * len(tables)
    for begin in range(0, len(order), tiles.rows):
        tile = order[begin : begin + tiles.rows]
        leader = tile[len(tile) // 2]
        shared = {}
        for row in tile:
            count = 0
            while (
                count < min(full[row], full[leader]) and tables[row][count] == tables[leader][count]
            ):
                count += 1
            shared[row] = count * block // tiles.keys * tiles.keys
        saved = {
            length: length * (sum(other >= length for other in shared.values()) - 1)
            for length in shared.values()
        }
        most = max(saved.values())
        if most < tiles.min_saved:
            continue
        prefix = max(length for length, positions in saved.items() if positions == most)
        for row in tile:
            prefixes[row] = prefix if shared[row] >= prefix else 0
    return order, prefixes


def random_rows(seed: int) -> Iterator[tuple[list[int], int]]:
    """Yield block tables that share beginnings of several lengths, and their lengths in tokens."""
    choice = random.Random(seed)
    prefixes = [[choice.randrange(1, 5) for _ in range(140)] for _ in range(3)]
    for _ in range(choice.choice((1, 5, 32, 33, 70))):
        num_shared = choice.choice((0, 1, 2, 3, 63, 64, 65, 128, 130))
        table = choice.choice(prefixes)[:num_shared] + [choice.randrange(1, 5) for _ in range(4)]
        yield table, choice.randrange(1, 8 * len(table) + 1)


@pytest.mark.parametrize("min_saved", [1, 300])
def test_the_prefixes_are_those_that_save_the_most(min_saved: int) -> None:
    for seed in range(12):
        rows = list(random_rows(seed))
        tables = [table for table, _ in rows]
        lengths = [length for _, length in rows]
        slots = list(range(len(rows)))
        random.Random(seed).shuffle(slots)
        batch = make_batch([([0], 0)] * len(rows), tables, 8, DEVICE)
        batch.block_table = batch.block_table[slots]
        batch.slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE).argsort().int()
        batch.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        tiles = PrefixTiles(rows=32, keys=16, min_saved=min_saved)
        shared = shared_prefixes.find(batch, len(rows), tiles, 8)
        order, prefixes = expected_prefixes(tables, lengths, tiles, 8)
        assert shared.order.tolist() == order, seed
        assert shared.lengths.tolist() == prefixes, seed
        for prefix, length in zip(prefixes, lengths, strict=True):
            assert prefix < length


# ---- whole steps ---------------------------------------------------------------------------------

BLOCK = 16
LIMITS = RunnerLimits(max_slots=4, max_len=160, max_tokens=160, max_drafts=3)


def make_runner(ops: ReferenceOps) -> Runner:
    hf = tiny.hf_model("qwen3").config.to_dict()
    hf["architectures"] = ["Qwen3ForCausalLM"]
    config = registry.parse(hf)
    model = build(config, registry.find(hf), ops, torch.float32, DEVICE)
    dummy_weights(model, seed=1)
    kv = KVStore(config, CacheConfig(BLOCK, 40), torch.float32, torch.device(DEVICE))
    kv.tensor.zero_()
    return Runner(model, kv, LIMITS, use_graphs=False)


def plans() -> list[Plan]:
    """Return steps of a prompt of 70 tokens, then of two prompts that begin with the same 64 tokens and
    share their blocks. All decode, in a graph with a padding row, and the first verifies drafts."""
    params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)
    common = [(7 * index) % 90 for index in range(64)]
    prompts = [[*common, 5, 6, 7, 8, 9, 1], [*common, 11, 12], [*common, 21, 22, 23]]
    shared = [3, 1, 4, 2]
    fills = [
        SlotFill(
            slot, 0, slot, array("i", prompt), 64 if slot else 0, [*shared, 10 + slot],
            len(prompt), 11 + slot, frozenset(), params,
        )
        for slot, prompt in enumerate(prompts)
    ]  # fmt: skip
    first = Plan(1, slot_fills=fills[:1], items=[Item(0, 0, 0, 0, 70, True, 70)])
    second = Plan(2, slot_fills=fills[1:], items=[Item(0, 0, 0, None, 1, True, 71)])
    for slot in (1, 2):
        size = len(prompts[slot])
        second.items.append(Item(slot, 0, slot, 64, size - 64, True, size))
    steps = [first, second]
    decoding = [Item(slot, 0, slot, None, 1, True, 80) for slot in range(3)]
    steps.append(Plan(3, items=decoding))
    verifying = Plan(4, drafts={0: array("i", [1, 2])}, num_drafts=2)
    verifying.items = [Item(0, 0, 0, None, 3, True, 80, num_drafts=2)]
    verifying.items += decoding[1:]
    return [*steps, verifying]


@pytest.mark.slow  # `make test-gpu` runs it too.
def test_steps_with_shared_prefixes_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare eager steps of the reference with steps that graphs compute with the option."""
    monkeypatch.setattr(attention_kernels, "PREFIX_SEQUENCES", 2)
    if DEVICE == "cpu":  # pinned memory is CUDA's
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))
    recorded: list[list[int]] = []
    find = shared_prefixes.find

    def spy(*arguments: object) -> shared_prefixes.SharedPrefixes:
        prefixes = find(*arguments)  # type: ignore[arg-type]
        recorded.append(prefixes.lengths.tolist())
        return prefixes

    monkeypatch.setattr(shared_prefixes, "find", spy)
    eager, graphs = make_runner(REFERENCE), make_runner(CASCADE)
    for plan in plans():
        if plan.step == 2:  # The first step, a prompt, has too few decoding rows.
            graphs.graphs = WithoutCapture(graphs.model, graphs.kv, graphs.batch_slots, LIMITS)
        want = eager.launch(plan).wait().tokens
        assert graphs.launch(plan).wait().tokens == want, plan.step
    assert isinstance(graphs.graphs, WithoutCapture)
    assert {GraphShape(4, 4), GraphShape(8, 8, verifies=True)} <= graphs.graphs.graphs.keys()
    assert [64, 64, 64, 0] in recorded, "three sequences and the padding of a decode step"
    assert [64, 64, 64, 64, 64, 0, 0, 0] in recorded, "two of the five rows are drafts"
