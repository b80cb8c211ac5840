"""The CPU kernels compute what the reference defines: products in every format and shape, paged
attention, whole decoders, sampling."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config import ModelConfig
from octavo.model import build, quant, registry
from octavo.model.embedded import INSTALL, PACKAGE
from octavo.ops import ForwardBatch, SamplingColumns, Watched
from octavo.ops.cpu import CpuOps, paged_attention
from octavo.ops.cpu.cpu_features import (
    INSTRUCTION_SETS,
    cpu_flags,
    instruction_set,
)
from octavo.ops.cpu.thread_pool import (
    ThreadPool,
    kernels,
    thread_pool,
    writable,
)
from octavo.ops.cpu.weight_layout import CpuWeight
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight
from octavo.runner.batch import last_tokens
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.ops.test_reference import BATCHES, definition, draw, filled

needs_kernels = pytest.mark.skipif(
    isinstance(instruction_set(), str), reason=str(instruction_set())
)
# The formats that the kernels support.
FORMATS = sorted(
    name for name, weight_format in quant.FORMATS.items() if not weight_format.is_float
)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    thread_pool_of_size = thread_pool()
    assert thread_pool_of_size is not None and thread_pool_of_size.threads == request.param
    yield thread_pool_of_size
    torch.set_num_threads(previous_threads)


def quantized_weight(name: str, outputs: int, inputs: int, seed: int = 0) -> QuantWeight:
    weight = QuantWeight.empty(quant.FORMATS[name], outputs, inputs)
    quant.fill(weight, draw(outputs, inputs, seed=seed))
    return weight


def rounded(x: Tensor, group: int = 32) -> Tensor:
    """Round x as the kernels do: to int8, with a scale for each row and 32 inputs."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).view(len(x), -1, group)
    scale = padded.abs().amax(2, keepdim=True) / 127
    codes = (padded * torch.where(scale > 0, 1 / scale, 0.0)).round()
    return (codes.double() * scale.double()).flatten(1)[:, : x.shape[1]]


# ---- products ------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 5), (7, 32), (33, 45), (100, 200), (50, 130), (16, 257)]
)
def test_products_are_those_of_the_dequantised_weight(
    name: str, outputs: int, inputs: int, pool: ThreadPool
) -> None:
    ops, weight = CpuOps(), quantized_weight(name, outputs, inputs)
    packed, bias = ops.pack(weight), draw(outputs, seed=9)
    assert isinstance(packed, CpuWeight)
    for rows in (1, 2, 3, 5, 8, 9, 17, 70):
        x = draw(rows, inputs, seed=rows) * torch.logspace(-3, 3, rows)[:, None]
        got = ops.linear(x, packed, bias)
        exact = rounded(x) @ weight.dequantize().double().t() + bias
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4 * float(x.abs().max()))
        plain = x.double() @ weight.dequantize().double().t() + bias
        assert (got - plain).norm() < 0.03 * plain.norm()


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_a_rows_product_does_not_depend_on_the_rows_beside_it(name: str, pool: ThreadPool) -> None:
    ops = CpuOps()
    packed, x = ops.pack(quantized_weight(name, 70, 96)), draw(37, 96)
    all_rows = ops.linear(x, packed)
    for rows in ([0], [5, 6], [36], range(9), range(11, 30)):
        assert torch.equal(ops.linear(x[list(rows)], packed), all_rows[list(rows)])


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_quantised_embedding_are_exact(name: str, pool: ThreadPool) -> None:
    ops, weight = CpuOps(), quantized_weight(name, 50, 75)
    ids = torch.tensor([3, 49, 0, 3, 16, 15])
    assert torch.equal(ops.embedding(ids, ops.pack(weight), 2.0), weight.dequantize()[ids] * 2)


@needs_kernels
def test_products_of_zeros_and_extremes(pool: ThreadPool) -> None:
    ops = CpuOps()
    for name in FORMATS:
        weight = QuantWeight.empty(quant.FORMATS[name], 20, 64)
        values = torch.zeros(20, 64)
        values[1], values[2, 0], values[3, ::2], values[3, 1::2] = 1.0, -1.0, 1.0, -1.0
        quant.fill(weight, values)
        x = torch.stack((torch.zeros(64), torch.full((64,), -3.0), torch.full((64,), 3.0)))
        expected = x.double() @ weight.dequantize().double().t()
        torch.testing.assert_close(
            ops.linear(x, ops.pack(weight)).double(), expected, rtol=1e-5, atol=1e-5
        )


# ---- activations ---------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("width", [1, 16, 45, 100, 3072])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "gelu"])
def test_activations_beside_packed_weights_are_the_references_row_by_row(
    name: str, width: int, pool: ThreadPool
) -> None:
    ops = CpuOps()
    ops.pack(quantized_weight("int8", 16, 32))
    x = draw(37, width if name == "gelu" else 2 * width) * 4
    all_rows = getattr(ops, name)(x)
    torch.testing.assert_close(all_rows, getattr(ReferenceOps(), name)(x), rtol=1e-5, atol=1e-5)
    for rows in ([0], [5, 6], [36], range(9), range(11, 30)):
        assert torch.equal(getattr(ops, name)(x[list(rows)]), all_rows[list(rows)])
    half = getattr(ops, name)(x.bfloat16())
    assert half.dtype == torch.bfloat16


# ---- attention -----------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_beside_packed_weights_takes_heads_of_any_size(
    dtype: torch.dtype, window: int, pool: ThreadPool
) -> None:
    ops = CpuOps()
    ops.pack(quantized_weight("int8", 16, 32))
    batch, kv = filled([(37, 0), (1, 100), (20, 150)], 2, 12, "cpu", 3)
    q = draw(len(batch.ids), 6, 12)
    got = ops.attention(q.to(dtype), kv.to(dtype), batch, 0.3, window)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    expected = definition(q, kv, batch, 0.3, window)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "slack"),
    [(2, 2, 16, 0), (6, 2, 32, 19), (9, 3, 64, 0), (4, 1, 128, 3)],
)
@pytest.mark.parametrize("name", [*BATCHES, "long"])
def test_attention_reads_the_cache_in_place(
    name: str, heads: int, kv_heads: int, dim: int, slack: int, window: int, pool: ThreadPool
) -> None:
    """Positions after the end of a sequence hold NaN, and the lengths that the host knows are `slack`
    too large. Neither changes the result."""
    items = BATCHES.get(name, [(37, 0), (1, 100), (20, 150), (70, 3)])
    batch, kv = filled(items, kv_heads, dim, "cpu", slack)
    q = draw(len(batch.ids), heads, dim)
    expected = definition(q, kv, batch, 0.3, window)
    got = paged_attention(pool, q, kv, batch, 0.3, window)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    halves = kv.half()
    got = paged_attention(pool, q, halves, batch, 0.3, window)
    torch.testing.assert_close(
        got.double(), definition(q, halves.float(), batch, 0.3, window), atol=1e-5, rtol=0
    )


@needs_kernels
@pytest.mark.parametrize("window", [0, 300])
def test_a_tokens_attention_is_the_same_to_the_last_bit_alone_beside_others_and_in_a_prompt(
    window: int, pool: ThreadPool
) -> None:
    """A single token's context is split among the threads, that of one of many tokens is not, and a
    token of a prompt is one of several rows of a task."""
    batch, kv = filled([(40, 700 + 5 * i) for i in range(12)], 3, 32, "cpu")
    q = draw(len(batch.ids), 9, 32)
    batch.logit_indices = batch.query_start[1:].long() - 1
    expected = paged_attention(pool, q, kv, batch, 0.3, window)[batch.logit_indices]
    last = last_tokens(batch, torch.arange(12), batch.spans)
    assert torch.equal(
        paged_attention(pool, q[batch.logit_indices], kv, last, 0.3, window), expected
    )
    for i in range(0, 12, 5):
        batch.logit_indices = batch.query_start[i + 1 : i + 2].long() - 1
        alone = last_tokens(batch, torch.tensor([i]), batch.spans[i : i + 1])
        assert torch.equal(
            paged_attention(pool, q[batch.logit_indices], kv, alone, 0.3, window),
            expected[i : i + 1],
        )


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_keys_are_shifted_as_by_the_reference(dtype: torch.dtype, pool: ThreadPool) -> None:
    kv, angles = torch.randn(9, 4, 2, 3, 8, 64).to(dtype), torch.randn(20, 2, 32)
    expected, blocks = kv.clone(), torch.tensor([5, 2, 7])
    ReferenceOps().shift(expected[:, 1:3], blocks, 8, angles)
    CpuOps().shift(kv[:, 1:3], blocks, 8, angles)
    torch.testing.assert_close(kv, expected, atol=1e-6, rtol=2**-10)
    assert not torch.equal(kv[5, 1, 0], kv[5, 3, 0])


# ---- whole decoders ------------------------------------------------------------------------------

SMALL = dict(
    vocab_size=90, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=1024, head_dim=16,
)  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "llama": dict(SMALL, architectures=["LlamaForCausalLM"], tie_word_embeddings=True),
    "llama with biases": dict(
        SMALL, architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True
    ),
    "mistral": dict(SMALL, architectures=["MistralForCausalLM"], sliding_window=20),
    "qwen2": dict(SMALL, architectures=["Qwen2ForCausalLM"]),
    "qwen3": dict(SMALL, architectures=["Qwen3ForCausalLM"]),
    "gemma3": dict(SMALL, architectures=["Gemma3ForCausalLM"], sliding_window=20),
}
CHUNKS = [
    [(40, 0), (7, 0)],
    [(1, 40), (9, 7), (30, 0)],
    [(1, 41), (1, 16), (1, 30)],
    [(5, 42), (1, 17), (3, 31)],
]


@torch.no_grad()
def build_model(name: str, format_name: str, ops: ReferenceOps) -> Any:
    hf = DECODERS[name]
    model = build(
        registry.parse(hf),
        registry.find(hf),
        ops,
        torch.float32,
        "cpu",
        lambda names: quant.FORMATS[format_name],
    )
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, QuantWeight):
            quant.fill(module, torch.randn(module.shape, generator=generator) * 0.2)
    for parameter in model.parameters():  # norms and biases
        parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    model.finish_loading()
    return model


def steps(model: Any, kv_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the logits of every token over a few steps with mixed batches."""
    config: ModelConfig = model.config
    tables = scattered_tables([64, 64, 64], 8)
    kv = empty_kv(config, tables, 8, "cpu", kv_dtype)
    out = []
    for step, items in enumerate(CHUNKS):
        chunks = [
            ([(7 * step + 3 * i + k) % 90 for k in range(num)], start)
            for i, (num, start) in enumerate(items)
        ]
        batch: ForwardBatch = make_batch(chunks, tables[: len(items)], 8, "cpu")
        out.append(model.logits(model(batch, kv)))
    return out


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("format_name", ["int8", "int4-g32-asym"])
def test_a_fused_decoder_equals_its_layers_op_by_op(
    name: str, format_name: str, pool: ThreadPool
) -> None:
    model = build_model(name, format_name, CpuOps())
    assert model.fused is not None and model.kv_dtype == torch.float16
    for dtype in (torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn):
        fused, fused_logits = model.fused, steps(model, dtype)
        model.fused = None
        got, expected = torch.cat(fused_logits), torch.cat(steps(model, dtype))
        error = (got - expected).norm(dim=1) / expected.norm(dim=1)
        # Where the last bit of an activation decides how it is rounded to int8, that row and those
        # after it differ by one of 127 steps; the others agree to the last bits.
        assert error.max() < 0.05 and (error < 1e-5).float().mean() > 0.5
        model.fused = fused


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("name", DECODERS)
def test_a_fused_decoder_measures_attention_mass_as_layers_op_by_op_do(
    name: str, pool: ThreadPool
) -> None:
    """A sequence that is longer than a segment is watched, alone and beside a prompt and a sequence
    that is not watched."""
    model, tables = build_model(name, "int8", CpuOps()), scattered_tables([640, 16, 24], 8)
    kv = empty_kv(model.config, tables, 8, "cpu", torch.float16)
    model(
        make_batch([(list(range(80)) * 7, 0), ([1, 2, 3], 0), ([5] * 9, 0)], tables, 8, "cpu"), kv
    )
    for items, watching in (([([4], 560), ([6, 7], 3), ([8], 9)], [0, 2]), ([([4], 560)], [0])):
        masses = []
        for fused in (model.fused, None):
            model.fused, before = fused, model.fused
            batch = make_batch(items, tables[: len(items)], 8, "cpu")
            watched_items = torch.tensor(watching)
            blocks = batch.block_table[watched_items, : 568 // 8].long()
            batch.watched = Watched(
                (batch.query_start[watched_items + 1] - 1).long(),
                batch.seq_lens[watched_items],
                blocks,
                torch.zeros(len(watched_items), 71),
            )
            model(batch, kv.clone())
            model.fused = before
            masses.append(batch.watched.mass)
        # The inputs of later layers are rounded differently, so the masses of the three layers differ.
        torch.testing.assert_close(masses[0], masses[1], atol=0.02, rtol=0)
        assert masses[0].sum(1).tolist() == pytest.approx([3.0] * len(watched_items), abs=1e-4)


@needs_kernels
@torch.inference_mode()
def test_quantised_decoders_are_near_the_dequantised_ones(pool: ThreadPool) -> None:
    for name in DECODERS:
        for got, expected in zip(
            *(steps(build_model(name, "int8-g32", ops)) for ops in (CpuOps(), ReferenceOps())),
            strict=True,
        ):
            assert (got - expected).norm() < 0.1 * expected.norm(), name


# ---- sampling ------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("vocabulary", [5, 300, 4099])
def test_sampled_tokens_are_those_of_the_reference(vocabulary: int, pool: ThreadPool) -> None:
    rows = torch.arange(24, dtype=torch.int32).flip(0)
    seeds = torch.randint(
        -(2**31), 2**31 - 1, (3, 24), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    logits = draw(24, vocabulary) * 4
    for temperature_value in (0.05, 0.7, 1.0, 20.0):
        temperature = torch.full((24,), temperature_value)
        temperature[::5] = 0
        off = torch.full((24,), 2**31 - 1, dtype=torch.int32)
        sampling = SamplingColumns(temperature, torch.ones(24), off, off, seeds[0], seeds[1])
        args = (logits, rows, seeds[2].abs(), sampling)
        assert torch.equal(CpuOps().choose(*args), ReferenceOps().choose(*args))


# ---- other machines ------------------------------------------------------------------------------


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@needs_kernels
@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=INSTALL)
def test_steps_do_not_wake_the_threads_of_torch() -> None:
    """A thread that torch wakes for a small copy spins for milliseconds on a core that the thread pool
    needs. Importing octavo prevents it only if torch is imported later."""
    process = run(
        "import os, threading, time, torch\nfrom octavo import LLM, SamplingParams\ntorch.set_num_threads(2)\n"
        "def runs():\n"
        "    ours = {t.native_id for t in threading.enumerate()}\n"
        "    others = [t for t in os.listdir('/proc/self/task') if int(t) not in ours]\n"
        "    return {t: open(f'/proc/self/task/{t}/schedstat').read().split()[2] for t in others}\n"
        "llm = LLM(num_gpu_blocks_override=64, max_num_seqs=16, max_model_len=256, progress=False)\n"
        "torch.ones(1 << 20).sum(), time.sleep(0.1), (before := runs())\n"
        "params = [SamplingParams(temperature=i % 2, max_tokens=4, ignore_eos=True) for i in range(16)]\n"
        "llm.generate([[1 + i] * (6 + i) for i in range(16)], params, use_tqdm=False)\n"
        "assert before, 'torch has no threads of its own'\n"
        "assert runs() == before, 'torch woke a thread'"
    )
    assert process.returncode == 0, process.stderr


def test_without_kernels_the_reference_computes_and_says_why() -> None:
    process = run(
        "import torch\nfrom octavo.ops.cpu import CpuOps\nfrom octavo.model import quant\n"
        "from octavo.ops.weight import QuantWeight\n"
        "w = QuantWeight.empty(quant.FORMATS['int8'], 3, 40); quant.fill(w, torch.ones(3, 40))\n"
        "o = CpuOps(); print(o.linear(torch.ones(2, 40), o.pack(w)).tolist()[0])",
        OCTAVO_CPU_ISA="none",
    )
    assert process.returncode == 0, process.stderr
    assert [round(float(v), 1) for v in process.stdout.strip("[]\n").split(",")] == [40.0] * 3
    assert "CPU kernels cannot be used (OCTAVO_CPU_ISA=none)" in process.stderr


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "mmx")
    assert "OCTAVO_CPU_ISA=mmx is none of avx512-vnni, avx-vnni, avx2, none" in str(
        instruction_set()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa", [isa.name for isa in INSTRUCTION_SETS if cpu_flags().issuperset(isa.flags)][1:]
)
def test_lesser_instruction_sets_compute_the_same(isa: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not triton", __file__,
         str(Path(__file__).with_name("test_kv.py"))],
        env={**os.environ, "OCTAVO_CPU_ISA": isa}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout


def test_writable_is_false_for_a_cache_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """The kernels are then compiled into a temporary directory, and the server starts."""
    assert writable(tmp_path / "new" / "place") and (tmp_path / "new" / "place").is_dir()
    (tmp_path / "file").write_text("")
    assert not writable(tmp_path / "file" / "place") and not writable(Path("/proc/no/such/place"))


@needs_kernels
def test_compilation_is_reported_only_if_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []

    @contextlib.contextmanager
    def report() -> Iterator[None]:
        reports.append("begins")
        yield
        reports.append("ends")

    kernels()  # This call compiles the kernels if needed, and later calls import nothing.
    module = importlib.import_module("octavo.ops.cpu.thread_pool")
    monkeypatch.setattr(module, "_compilation_report", report)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    kernels.__wrapped__()
    assert reports == ["begins", "ends"]
    kernels.__wrapped__()
    assert reports == ["begins", "ends"], "the kernels are marked as compiled"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_memory_does_not_grow_with_the_row_counts_of_products() -> None:
    ops = CpuOps()
    weight = ops.pack(torch.randn(96, 32))

    def resident_mib(counts: range) -> float:
        for count in counts:
            ops.linear(torch.randn(count, 32), weight)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    with_full_cache = resident_mib(range(1, 150))
    assert resident_mib(range(150, 400)) - with_full_cache < 30
