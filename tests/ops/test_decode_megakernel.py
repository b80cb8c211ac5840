"""A decode step of a few rows in one kernel, against the same layers op by op: on a GPU, and
emulated without one. That it compiles, and the arithmetic about its memory."""

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

SHARED = 227 * 1024  # bytes a block may have on an H200
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
EMULATED = [  # decoder, multiprocessors, lengths: few kernels, since compiling one takes seconds
    ("four heads share a key", 5, [LENGTHS["four"]]),
    pytest.param("eight heads share a key", 7, [[1030, 257], [70, 200]], marks=pytest.mark.slow),
    # Some multiprocessors have no unit of a product.
    pytest.param("each has its own, and biases", 36, [[9]], marks=pytest.mark.slow),
    pytest.param("more units than blocks", 6, [[129, 1, 65]], marks=pytest.mark.slow),
    pytest.param("qwen2", 9, [LENGTHS["eight"]], marks=pytest.mark.slow),
    ("qwen3", 4, [[300, 1, 700], [129, 1, 65]]),  # and logits in several rounds
    pytest.param("mistral", 6, [[9, 90, 40, 2, 700]], marks=pytest.mark.slow),
]
SIZES = {  # hidden, inter, heads, key heads, dimensions
    "tinyllama-1.1b": (2048, 5632, 32, 4, 64),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128),
    "llama-8b": (4096, 14336, 32, 8, 128),
}


class FewOps(ReferenceOps):
    def fuse(self, decoder: DecoderSpec) -> Any:
        return decode_megakernel.fuse(decoder)


@torch.no_grad()
def made(name: str, device: str = "cuda", **changes: Any) -> Any:
    hf = {**DECODERS[name], **changes}
    if device == "cuda":
        from octavo.ops.triton import TritonOps as Backend
    else:
        Backend = FewOps
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
def stepped(
    model: Any, lengths: list[int], block: int, fused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and logits of a decode step of sequences that are so long with it, and KV after
    it."""
    tables, device = scattered_tables(lengths, block), next(model.parameters()).device.type
    kv = empty_kv(model.config, tables, block, device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(2)
    # all but the last position, which stays NaN until it is written
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
    """Of the kernel with the ops."""
    want, wanted, kept = stepped(model, lengths, block, None)
    (got, logits, written), (again, repeated, _) = (
        stepped(model, lengths, block, fused) for _ in range(2)
    )
    assert fused.kernels[len(lengths), block] is not None
    assert (fused.vocab == 0) == (model.config.vocab_size % 8 != 0)
    assert torch.equal(got, again) and torch.equal(logits, repeated), (
        f"{lengths}: another result the second time"
    )
    for a, b in ((got, want), (logits, wanted)):
        error = ((a - b).float().norm(dim=1) / b.float().norm(dim=1)).max()
        assert error < 0.02, f"{lengths}: {error:.3f}"
    assert torch.equal(kept.isnan(), written.isnan()), (
        f"{lengths}: written where nothing belongs, or not written"
    )
    torch.testing.assert_close(written.nan_to_num(), kept.nan_to_num(), atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", DECODERS)
def test_all_layers_in_one_kernel_equal_layers_op_by_op(name: str, block: int) -> None:
    model = made(name)
    fused = model.fused
    assert isinstance(fused, decode_megakernel.DecodeMegakernel)
    for lengths in LENGTHS.values():
        compare(model, fused, lengths, block)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (16, 2), (4, 4)])
def test_every_position_of_a_long_context_counts(heads: tuple[int, int]) -> None:
    """One layer; of all values only one is not zero, wherever it stands: what is left out of a part
    shows."""
    model = made(
        "four heads share a key",
        num_hidden_layers=1,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )
    length = 700
    tables = scattered_tables([length], 16)
    kv = empty_kv(model.config, tables, 16, "cuda", torch.bfloat16).nan_to_num()
    batch = make_batch([([3], length - 1)], tables, 16, "cuda")
    fused, none = model.fused, None
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
            for model.fused in (none, fused):
                results.append(model(batch, kv.clone()).float())
            kv[tables[0][p // 16], :, 1, :, p % 16] = 0
            assert (results[0] - results[1]).norm() < 0.02 * results[0].norm(), p
        model.fused = fused
        everywhere = model(batch, kv.clone()).float()
        assert (everywhere - results[1]).norm() > 0.1 * everywhere.norm()  # one position matters


@pytest.mark.gpu
def test_replayed_from_a_graph() -> None:
    """Meetings are counted from zero each time."""
    model, lengths = made("qwen3"), [300, 1, 64, 9]
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
def test_short_sequences_get_the_same_alone_and_in_company() -> None:
    """Bit by bit: a row's arithmetic does not depend on how many rows there are."""
    model, lengths = made("four heads share a key"), LENGTHS["eight"]
    tables = scattered_tables(lengths, 64)
    kv = empty_kv(model.config, tables, 64, "cuda", torch.bfloat16).normal_()
    chunks = [([7 * i + 3], length - 1) for i, length in enumerate(lengths)]
    with torch.inference_mode():
        batch = make_batch(chunks, tables, 64, "cuda")
        everybody, logits = model.forward_with_logits(batch, kv.clone())
        for i, chunk in enumerate(chunks):
            single = make_batch([chunk], [tables[i]], 64, "cuda")
            alone, alone_logits = model.forward_with_logits(single, kv.clone())
            assert torch.equal(alone[0], everybody[i])
            assert torch.equal(alone_logits[0], logits[i])


@pytest.mark.gpu
def test_it_leaves_alone_what_it_cannot_compute() -> None:
    """A prompt beside decoding rows, more than eight rows, compressed KV: op by op, and right."""
    model = made("qwen3")
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
    """A GPU of so many multiprocessors. `edits`: changes to the kernel's text; `parts`: of x,
    whatever memory there is."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        folder: Path,
        blocks: int,
        *edits: tuple[str, str],
        parts: int = 1,
    ):
        self.kernels: list[EmulatedKernel] = []
        source = decode_megakernel.SOURCE
        if edits:
            text, source = decode_megakernel.SOURCE.read_text(), folder / "edited.cu"
            for before, after in edits:
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
        room = decode_megakernel.shared_memory_layout
        patch.setattr(
            decode_megakernel,
            "shared_memory_layout",
            lambda *arguments: (*room(*arguments)[:2], parts),
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
    """Whatever the order in which threads come to go on."""
    emulation = Emulation(monkeypatch, tmp_path, blocks)
    model = made(name, "cpu", num_hidden_layers=2)
    fused = model.fused
    for each in lengths:
        for seed in (1, 2):  # copies come soon; a warp lags far behind
            for kernel in emulation.kernels:
                kernel.seed = seed
            compare(model, fused, each, 16)


@pytest.mark.slow
def test_in_one_part_or_two_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row alone may have x whole where several have it in parts."""
    results = []
    for parts in (1, 2):
        Emulation(monkeypatch, tmp_path, 5, parts=parts)
        model = made("each has its own, and biases", "cpu", num_hidden_layers=2)
        compare(model, model.fused, [70, 9], 16)
        results.append(stepped(model, [70, 9], 16, model.fused))
        monkeypatch.undo()
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())


BLOCK_BARRIER = "block_barrier();"
MISTAKES = {  # what the kernel's text says, and what it says then
    "x is read before all of it is there": (
        f"= values[row];\n    }}\n    {BLOCK_BARRIER}",
        "= values[row];\n    }",
    ),
    "what follows of x comes too early": (
        "        block_barrier();  // the previous contents are no longer needed\n",
        "",
    ),
    "the rest of x stays in registers": (
        "if (tid + j * THREADS < (END - BEGIN) * 8)\n",
        "if (false)\n",
    ),
    "blocks do not wait for each other": ("            grid_wait(barrier_count, expected);\n", ""),
    "weights are read before they came": (
        "            mbarrier_wait(ring.full + ring.at * 8, ring.parity);\n",
        "",
    ),
    "weights are overwritten": (
        "        mbarrier_wait(ring.empty + ring.at * 8, ring.parity ^ 1);\n",
        "",
    ),
    "weights are never given back": (
        "if (lane == 0) mbarrier_arrive(ring.empty + ring.at * 8);",
        "",
    ),
    "a unit too many is copied": ("unit >= units_of(phase)) {", "unit > units_of(phase)) {"),
    "scores are weighed too early": (
        f"running_max[query] = new_max;\n            }}\n        }}\n        {BLOCK_BARRIER}",
        "running_max[query] = new_max;\n            }\n        }",
    ),
}


@pytest.mark.parametrize("mistake", slow_after(2, MISTAKES))
def test_the_emulation_finds_mistakes(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation = Emulation(monkeypatch, tmp_path, 3, MISTAKES[mistake], parts=2)
    model = made("four heads share a key", "cpu", num_hidden_layers=1, intermediate_size=2880)
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
    slots, shared, parts = decode_megakernel.shared_memory_layout(decoder, rows, 132, SHARED)
    if slots < decode_megakernel.MIN_STAGES:
        assert (name, rows) == ("llama-8b", 8)
        return
    assert shared <= SHARED
    constants = decode_megakernel.constants_of(decoder, rows, 64, slots, shared, parts, 132)
    options = [
        "--gpu-architecture=sm_90",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{k}={v}" for k, v in constants.items()),
    ]
    code, said = driver.translate(driver.with_header(decode_megakernel.SOURCE), options)
    assert code[:4] == b"\x7fELF"
    registers, spilled = (
        int(found[0])
        for found in (re.findall(p, said) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    )
    assert registers <= 168  # nine warps on four schedulers
    # what was spilled comes back slowly between two meetings
    assert spilled <= (0 if name == "tinyllama-1.1b" else 200)


def test_a_mistake_in_a_kernel_is_shown() -> None:
    try:
        driver._nvrtc()
    except driver.CudaError as error:
        pytest.skip(str(error))
    with pytest.raises(driver.CudaError, match="undefined_thing"):
        driver.translate("__global__ void f() { undefined_thing(); }", ["--gpu-architecture=sm_90"])


def test_other_decoders_are_computed_op_by_op() -> None:
    good = spec("qwen3-0.6b")
    assert decode_megakernel.supports(good)
    assert decode_megakernel.fuse(good) is None  # on no GPU
    layer = good.layers[0]
    assert not decode_megakernel.supports(
        spec("qwen3-0.6b", torch.float16)
    ) and not decode_megakernel.supports(spec("qwen3-0.6b", torch.float32))
    assert not decode_megakernel.supports(spec("qwen3-0.6b", head_dim=96))
    assert not decode_megakernel.supports(
        spec("qwen3-0.6b", num_heads=22, num_kv_heads=2)
    )  # eleven share a key
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
    for major, fits in ((8, False), (9, True), (10, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        assert decode_megakernel.available(torch.device("cuda")) is fits
    assert not decode_megakernel.available(torch.device("cpu"))
    monkeypatch.setenv("OCTAVO_MEGAKERNEL", "none")
    assert not decode_megakernel.available(torch.device("cuda"))


def test_a_kernel_that_does_not_compile_is_done_without(
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


def test_compiled_code_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(
        driver, "translate", lambda source, options: (calls.append(options), (b"code", ""))[1]
    )
    for constants in ({"A": 1}, {"A": 1}, {"A": 2}):
        assert driver.compile_source("x", constants, "sm_90") == b"code"
    assert len(calls) == 2 and "-DA=2" in calls[1]
    assert sorted(p.suffix for p in (tmp_path / "cuda").iterdir()) == [".cubin", ".cubin"]
