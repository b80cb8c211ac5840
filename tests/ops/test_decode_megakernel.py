"""The decode megakernel equals the same layers op by op, on a GPU and emulated without one. It compiles,
and its memory fits a multiprocessor."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.model import build, registry
from octavo.model.quant import FORMATS
from octavo.ops.cuda import decode_megakernel, driver
from octavo.ops.fused_spec import DecoderLayer, DecoderSpec
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.emulated import EmulatedKernel, emulated_map
from tests.marks import slow_after

SHARED = 227 * 1024  # the bytes of shared memory that a block may use on an H200
BASE = dict(vocab_size=96, num_hidden_layers=3, max_position_embeddings=2048)
LLAMA = dict(BASE, architectures=["LlamaForCausalLM"], hidden_size=256, intermediate_size=704)
DECODERS: dict[str, dict[str, Any]] = {
    "four heads share a key": dict(LLAMA, num_attention_heads=8, num_key_value_heads=2, head_dim=64),
    "eight heads share a key": dict(LLAMA, num_attention_heads=16, num_key_value_heads=2, head_dim=64),
    "each has its own, and biases": dict(LLAMA, num_attention_heads=4, num_key_value_heads=4, head_dim=64, attention_bias=True,
                                         mlp_bias=True, intermediate_size=2880),
    "more units than blocks": dict(LLAMA, num_attention_heads=32, num_key_value_heads=32, head_dim=64),
    "qwen2": dict(BASE, architectures=["Qwen2ForCausalLM"], hidden_size=448, intermediate_size=1088, num_attention_heads=7,
                  num_key_value_heads=1, head_dim=64),
    "qwen3": dict(BASE, architectures=["Qwen3ForCausalLM"], hidden_size=320, intermediate_size=192, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=128, vocab_size=3000),
    "wide, a share of it uneven": dict(LLAMA, hidden_size=2112, num_attention_heads=16, num_key_value_heads=4, head_dim=128),
    "a window of several parts": dict(BASE, architectures=["MistralForCausalLM"], hidden_size=256, intermediate_size=1024,
                                      num_attention_heads=4, num_key_value_heads=1, head_dim=64, sliding_window=600),
    "mistral": dict(BASE, architectures=["MistralForCausalLM"], hidden_size=256, intermediate_size=256, num_attention_heads=8,
                    num_key_value_heads=2, head_dim=64, sliding_window=100, vocab_size=97),
}  # fmt: skip
LENGTHS = {
    "one": [5], "two": [70, 200], "four": [1, 40, 129, 256], "a block's end": [64], "a tile": [129, 1, 65],
    "eight": [1, 2, 63, 64, 65, 128, 200, 256], "long": [300, 1, 700], "two long": [1030, 257], "five": [9, 90, 40, 2, 700],
    "eight long": [1000, 3, 257, 640, 64, 900, 128, 1],
}  # fmt: skip
# Decoder, multiprocessors, lengths. There are few kernels, because compiling one takes seconds.
EMULATED = [
    ("four heads share a key", 5, [LENGTHS["four"]]),
    pytest.param("eight heads share a key", 7, [[1030, 257], [70, 200]], marks=pytest.mark.slow),
    # Some multiprocessors have no unit of a product.
    pytest.param("each has its own, and biases", 36, [[9]], marks=pytest.mark.slow),
    pytest.param("more units than blocks", 6, [[129, 1, 65]], marks=pytest.mark.slow),
    pytest.param("qwen2", 9, [LENGTHS["eight"]], marks=pytest.mark.slow),
    ("qwen3", 4, [[300, 1, 700], [129, 1, 65]]),  # with logits in several rounds
    pytest.param("mistral", 6, [[9, 90, 40, 2, 700]], marks=pytest.mark.slow),
]
SIZES = {  # hidden, inter, heads, key heads, dimensions
    "tinyllama-1.1b": (2048, 5632, 32, 4, 64),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128),
    "llama-8b": (4096, 14336, 32, 8, 128),
}


class MegakernelOps(ReferenceOps):
    def fuse(self, decoder: DecoderSpec) -> Any:
        return decode_megakernel.fuse(decoder)


@torch.no_grad()
def build_model(name: str, device: str = "cuda", **changes: Any) -> Any:
    hf = {**DECODERS[name], **changes}
    if device == "cuda":
        from octavo.ops.triton import TritonOps as Backend
    else:
        Backend = MegakernelOps
    model = build(registry.parse(hf), registry.find(hf), Backend(), torch.bfloat16, device)
    generator = torch.Generator(device).manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(
            0, 0.5 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.1, generator=generator
        )
        if parameter.ndim == 1:
            parameter.add_(1)
    model.finish_loading()
    return model


@torch.inference_mode()
def run_step(
    model: Any, lengths: list[int], block: int, fused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a decode step, after which the sequences have these lengths. Return its hidden states and
    logits, and the KV."""
    tables, device = scattered_tables(lengths, block), next(model.parameters()).device.type
    kv = empty_kv(model.config, tables, block, device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(2)
    # The last position stays NaN until the step writes it.
    for length, table in zip(lengths, tables, strict=True):
        past = torch.randn(
            len(table) * block, *kv.shape[1:4], kv.shape[5], generator=generator, device=device
        )
        for p in range(length - 1):
            kv[table[p // block], :, :, :, p % block] = past[p].to(kv.dtype)
    batch = make_batch(
        [([7 * i + 3], length - 1) for i, length in enumerate(lengths)],
        tables,
        block,
        device,
        slack=9,
    )
    model.fused = fused
    hidden, logits = model.forward_with_logits(batch, kv)
    return hidden, logits, kv


def compare(model: Any, fused: Any, lengths: list[int], block: int) -> None:
    """Compare the kernel with the layers op by op."""
    want, want_logits, want_kv = run_step(model, lengths, block, None)
    (got, logits, got_kv), (again, again_logits, _) = (
        run_step(model, lengths, block, fused) for _ in range(2)
    )
    assert fused.kernels[len(lengths), block] is not None
    assert (fused.vocab == 0) == (model.config.vocab_size % 8 != 0)
    assert torch.equal(got, again) and torch.equal(logits, again_logits), (
        f"{lengths}: the second run has another result"
    )
    for a, b in ((got, want), (logits, want_logits)):
        error = ((a - b).float().norm(dim=1) / b.float().norm(dim=1)).max()
        assert error < 0.02, f"{lengths}: {error:.3f}"
    assert torch.equal(want_kv.isnan(), got_kv.isnan()), (
        f"{lengths}: KV was written at a wrong position, or not written"
    )
    torch.testing.assert_close(got_kv.nan_to_num(), want_kv.nan_to_num(), atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", DECODERS)
def test_all_layers_in_one_kernel_equal_layers_op_by_op(name: str, block: int) -> None:
    model = build_model(name)
    fused = model.fused
    assert isinstance(fused, decode_megakernel.DecodeMegakernel)
    for lengths in LENGTHS.values():
        compare(model, fused, lengths, block)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (16, 2), (4, 4)])
def test_every_position_of_a_long_context_counts(heads: tuple[int, int]) -> None:
    """Of all values in the one layer only one is not zero, at one position after another. A kernel that
    skips the position gives another result."""
    model = build_model(
        "four heads share a key",
        num_hidden_layers=1,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )
    length = 700
    tables = scattered_tables([length], 16)
    kv = empty_kv(model.config, tables, 16, "cuda", torch.bfloat16).nan_to_num()
    batch = make_batch([([3], length - 1)], tables, 16, "cuda")
    fused = model.fused
    with torch.inference_mode():
        for p in [
            0,
            1,
            15,
            16,
            *range(80, length - 1, 37),
            *range(126, 131),
            *range(254, 259),
            length - 2,
        ]:
            kv[tables[0][p // 16], :, 1, :, p % 16] = 300
            results = []
            for model.fused in (None, fused):
                results.append(model(batch, kv.clone()).float())
            kv[tables[0][p // 16], :, 1, :, p % 16] = 0
            assert (results[0] - results[1]).norm() < 0.02 * results[0].norm(), p
        model.fused = fused
        everywhere = model(batch, kv.clone()).float()
        assert (everywhere - results[1]).norm() > 0.1 * everywhere.norm()  # one position matters


@pytest.mark.gpu
def test_replayed_from_a_graph() -> None:
    """Each replay counts the arrivals at the grid barrier from zero."""
    model, lengths = build_model("qwen3"), [300, 1, 64, 9]
    tables = scattered_tables(lengths, 16)
    kv = empty_kv(model.config, tables, 16, "cuda", torch.bfloat16).normal_()
    batch = make_batch(
        [([5 + i], length - 1) for i, length in enumerate(lengths)], tables, 16, "cuda"
    )
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        want, want_logits = (tensor.clone() for tensor in model.forward_with_logits(batch, kv))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got, got_logits = model.forward_with_logits(batch, kv)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(got, want) and torch.equal(got_logits, want_logits)
            got.zero_()
            got_logits.zero_()


@pytest.mark.gpu
def test_short_sequences_have_the_same_bits_alone_and_in_a_batch() -> None:
    """The arithmetic of a row does not depend on the number of rows."""
    model, lengths = build_model("four heads share a key"), LENGTHS["eight"]
    tables = scattered_tables(lengths, 64)
    kv = empty_kv(model.config, tables, 64, "cuda", torch.bfloat16).normal_()
    chunks = [([7 * i + 3], length - 1) for i, length in enumerate(lengths)]
    with torch.inference_mode():
        batch = make_batch(chunks, tables, 64, "cuda")
        together, logits = model.forward_with_logits(batch, kv.clone())
        for i, chunk in enumerate(chunks):
            single = make_batch([chunk], [tables[i]], 64, "cuda")
            alone, alone_logits = model.forward_with_logits(single, kv.clone())
            assert torch.equal(alone[0], together[i])
            assert torch.equal(alone_logits[0], logits[i])


@pytest.mark.gpu
def test_batches_that_it_does_not_support_are_computed_op_by_op() -> None:
    """These are a prompt beside decoding rows, more than eight rows, and compressed KV."""
    model = build_model("qwen3")
    tables = scattered_tables([40] * 9, 16)
    kv = empty_kv(model.config, tables, 16, "cuda", torch.bfloat16).nan_to_num()
    hidden = torch.zeros(9, 320, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        many = make_batch([([1], 7)] * 9, tables, 16, "cuda")
        assert model.fused(hidden, many, kv) is None
        assert (
            model.fused(
                hidden[:5], make_batch([([1], 7), ([1] * 4, 7)], tables[:2], 16, "cuda"), kv
            )
            is None
        )
        small = empty_kv(model.config, tables, 16, "cuda", torch.int8)
        assert (
            model.fused(hidden[:1], make_batch([([1], 7)], tables[:1], 16, "cuda"), small) is None
        )
        assert model(many, kv).isfinite().all()


# ---- emulated ------------------------------------------------------------------------------------


class Emulation:
    """A GPU with `blocks` multiprocessors. `source_edits` are changes to the source of the kernel, and
    `parts` is the number of parts in which the activations of W_down are loaded."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        folder: Path,
        blocks: int,
        *source_edits: tuple[str, str],
        parts: int = 1,
    ):
        self.kernels: list[EmulatedKernel] = []
        source = decode_megakernel.SOURCE
        if source_edits:
            text, source = decode_megakernel.SOURCE.read_text(), folder / "edited.cu"
            for before, after in source_edits:
                assert before in text, before
                text = text.replace(before, after, 1)
            source.write_text(text)

        def kernel(
            _: str, constants: dict[str, int], arch: str, name: str, shared: int
        ) -> EmulatedKernel:
            self.kernels.append(EmulatedKernel(source, constants, name, shared, folder))
            return self.kernels[-1]

        gpu = SimpleNamespace(
            multi_processor_count=blocks, shared_memory_per_block_optin=SHARED, major=9, minor=0
        )
        patch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
        patch.setattr(decode_megakernel, "available", lambda _: True)
        patch.setattr(decode_megakernel, "tensor_map", emulated_map)
        layout = decode_megakernel.shared_memory_layout
        patch.setattr(
            decode_megakernel,
            "shared_memory_layout",
            lambda *arguments: (*layout(*arguments)[:2], parts),
        )
        patch.setattr(decode_megakernel, "Kernel", SimpleNamespace(load=kernel))


@pytest.mark.parametrize("name, blocks, lengths", EMULATED)
def test_emulated_it_equals_layers_op_by_op(
    name: str,
    blocks: int,
    lengths: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order in which threads run is random."""
    emulation = Emulation(monkeypatch, tmp_path, blocks)
    model = build_model(name, "cpu", num_hidden_layers=2)
    fused = model.fused
    for step_lengths in lengths:
        for seed in (1, 2):  # With 1, copies arrive soon; with 2, a warp lags far behind.
            for kernel in emulation.kernels:
                kernel.seed = seed
            compare(model, fused, step_lengths, 16)


@pytest.mark.slow
def test_in_one_part_or_two_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activations of one row may be loaded in one part, and those of several rows in two."""
    results = []
    for parts in (1, 2):
        Emulation(monkeypatch, tmp_path, 5, parts=parts)
        model = build_model("each has its own, and biases", "cpu", num_hidden_layers=2)
        compare(model, model.fused, [70, 9], 16)
        results.append(run_step(model, [70, 9], 16, model.fused))
        monkeypatch.undo()
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())


BLOCK_BARRIER = "block_barrier();"
BUGS = {  # the source of the kernel, and its replacement
    "activations are read before all of them are loaded": (
        f"= values[row];\n    }}\n    {BLOCK_BARRIER}",
        "= values[row];\n    }",
    ),
    "the second part of the activations is stored too early": (
        "        block_barrier();  // the previous contents are no longer needed\n",
        "",
    ),
    "the second part of the activations is not stored": (
        "if (tid + j * THREADS < (END - BEGIN) * 8)\n",
        "if (false)\n",
    ),
    "blocks do not wait for each other": ("            grid_wait(barrier_count, expected);\n", ""),
    "weights are read before they have arrived": (
        "            mbarrier_wait(ring.full + ring.stage * 8, ring.parity);\n",
        "",
    ),
    "weights are overwritten": (
        "        mbarrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);\n",
        "",
    ),
    "stages of the ring are never released": (
        "if (lane == 0) mbarrier_arrive(ring.empty + ring.stage * 8);",
        "",
    ),
    "one unit too many is copied": ("unit >= units_of(phase)) {", "unit > units_of(phase)) {"),
    "probabilities are read too early": (
        f"running_max[query] = new_max;\n            }}\n        }}\n        {BLOCK_BARRIER}",
        "running_max[query] = new_max;\n            }\n        }",
    ),
}


@pytest.mark.parametrize("bug", slow_after(2, BUGS))
def test_the_emulation_finds_mistakes(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation = Emulation(monkeypatch, tmp_path, 3, BUGS[bug], parts=2)
    model = build_model(
        "four heads share a key", "cpu", num_hidden_layers=1, intermediate_size=2880
    )
    fused = model.fused
    with pytest.raises((AssertionError, driver.CudaError)):
        for seed in range(8):
            compare(model, fused, [70, 200], 16)
            emulation.kernels[0].seed = seed


# ---- without a GPU -------------------------------------------------------------------------------


def spec(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> DecoderSpec:
    hidden, inter, heads, kv_heads, dim = SIZES[name]

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.empty(outputs, inputs, dtype=dtype, device="meta")

    one = torch.empty(hidden, device="meta")
    layer = DecoderLayer(
        qkv=matrix((heads + 2 * kv_heads) * dim, hidden), out=matrix(hidden, heads * dim), gate_up=matrix(2 * inter, hidden),
        down=matrix(hidden, inter), biases=(None,) * 4, attn_norm=one, mlp_norm=one, q_norm=None, k_norm=None,
        post_attn_norm=None, post_mlp_norm=None, cos_sin=one, window=0,
    )  # fmt: skip
    return DecoderSpec(
        **{
            **dict(
                head=matrix(32000, hidden),
                layers=[layer],
                norm=one,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                norm_eps=1e-5,
                scale=1.0,
                gelu=False,
                dtype=dtype,
            ),
            **changes,
        }
    )


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("name", SIZES)
def test_it_compiles_and_fits(name: str, rows: int) -> None:
    try:
        driver._nvrtc()
    except driver.CudaError as error:
        pytest.skip(str(error))
    decoder = spec(name)
    stages, shared, parts = decode_megakernel.shared_memory_layout(decoder, rows, 132, SHARED)
    if stages < decode_megakernel.MIN_STAGES:
        assert (name, rows) == ("llama-8b", 8)
        return
    assert shared <= SHARED
    constants = decode_megakernel.constants_of(decoder, rows, 64, stages, shared, parts, 132)
    options = [
        "--gpu-architecture=sm_90",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{k}={v}" for k, v in constants.items()),
    ]
    code, log = driver.translate(driver.with_header(decode_megakernel.SOURCE), options)
    assert code[:4] == b"\x7fELF"
    registers, spilled = (
        int(found[0])
        for found in (re.findall(p, log) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    )
    assert registers <= 168  # nine warps on four schedulers
    # Reading spilled registers back takes time between two grid barriers.
    assert spilled <= (0 if name == "tinyllama-1.1b" else 200)


def test_the_compiler_log_names_an_error_in_a_kernel() -> None:
    try:
        driver._nvrtc()
    except driver.CudaError as error:
        pytest.skip(str(error))
    with pytest.raises(driver.CudaError, match="undefined_thing"):
        driver.translate("__global__ void f() { undefined_thing(); }", ["--gpu-architecture=sm_90"])


def test_other_decoders_are_computed_op_by_op() -> None:
    good = spec("qwen3-0.6b")
    assert decode_megakernel.supports(good)
    assert decode_megakernel.fuse(good) is None  # There is no GPU.
    layer = good.layers[0]
    assert not decode_megakernel.supports(
        spec("qwen3-0.6b", torch.float16)
    ) and not decode_megakernel.supports(spec("qwen3-0.6b", torch.float32))
    assert not decode_megakernel.supports(spec("qwen3-0.6b", head_dim=96))
    assert not decode_megakernel.supports(
        spec("qwen3-0.6b", num_heads=22, num_kv_heads=2)
    )  # Eleven query heads share a key head.
    for changes in (
        dict(out=QuantWeight.empty(FORMATS["int8"], 1024, 2048)),
        dict(post_mlp_norm=layer.mlp_norm),
        dict(down=layer.down[:, :3000]),
        dict(down=layer.down[:, :3000].contiguous()),
    ):
        assert not decode_megakernel.supports(
            spec("qwen3-0.6b", layers=[replace(layer, **changes)])
        ), changes.keys()
    assert not decode_megakernel.supports(
        spec("qwen3-0.6b", layers=[layer, replace(layer, q_norm=layer.attn_norm)])
    )
    assert ReferenceOps().fuse(good) is None


def test_it_is_for_hopper_and_later_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for major, is_available in ((8, False), (9, True), (10, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        assert decode_megakernel.available(torch.device("cuda")) is is_available
    assert not decode_megakernel.available(torch.device("cpu"))
    monkeypatch.setenv("OCTAVO_MEGAKERNEL", "none")
    assert not decode_megakernel.available(torch.device("cuda"))


def test_without_a_compiler_layers_are_computed_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> bytes:
        raise driver.CudaError("no compiler")

    kernels = object.__new__(decode_megakernel.DecodeMegakernel)
    kernels.spec, kernels.kernels, kernels.blocks, kernels.shared, kernels.arch = (
        spec("qwen3-0.6b"),
        {},
        132,
        SHARED,
        "sm_90",
    )
    monkeypatch.setattr(driver, "compile_source", fails)
    assert kernels.kernel(2, 64) is None and kernels.kernel(2, 64) is None
    assert caplog.text.count("so they decode more slowly: no compiler") == 1


def test_compiled_code_is_cached(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(
        driver, "translate", lambda source, options: (calls.append(options), (b"code", ""))[1]
    )
    for constants in ({"A": 1}, {"A": 1}, {"A": 2}):
        assert driver.compile_source("x", constants, "sm_90") == b"code"
    assert len(calls) == 2 and "-DA=2" in calls[1]
    assert sorted(p.suffix for p in (tmp_path / "cuda").iterdir()) == [".cubin", ".cubin"]
