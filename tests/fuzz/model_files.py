"""Model files for fuzzing: small valid ones to begin with, and everything that is done with a file
before a model runs."""

from __future__ import annotations

import json
import re
import struct
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from octavo.errors import OctavoError
from octavo.model.base import import_plugins
from octavo.model.checkpoint import Checkpoint
from octavo.model.load import choose_formats, outline
from octavo.model.rope import rope_table
from octavo.model.tensor_matching import match_tensors
from octavo.model.tied_weights import parse_checkpoint
from octavo.ops.reference import ReferenceOps
from octavo.text.tokenizer import Tokenizer

# The first arithmetic on the meta device imports modules for more than a second.
_ = torch.empty(1, device="meta").float() - 1
import_plugins([])  # reads the metadata of every package on the machine

TEXTS = ["hello", "é <s>\U0001f600", "a  b\n<unk>"]


@cache
def folder() -> Path:
    """A directory in memory where there is one: every input is written to a file."""
    memory = Path("/dev/shm")
    return Path(mkdtemp(prefix="octavo-fuzz-", dir=memory if memory.is_dir() else None))


def outcome(error: OctavoError) -> str:
    """An error by the first words of its message, without what it quotes."""
    words = re.sub(r"'.*?'|/\S+", "", str(error)).split()
    return " ".join([word for word in words if word.isascii() and word.isalpha()][:6])


def prepare(checkpoint: Checkpoint) -> str:
    """What the loader does with a checkpoint, up to reading all tensors; the weights get no memory
    of their own."""
    try:
        cls, config = parse_checkpoint(checkpoint)
        formats = choose_formats("auto", checkpoint, "reference")
        model = outline(config, cls, ReferenceOps(), torch.float32, formats)
        if config.max_position * config.head_dim < 2**16:
            rope_table(config.rope, config.head_dim, config.max_position)
        match_tensors(model, checkpoint)
        matched = "matched"
    except OctavoError as error:
        matched = outcome(error)
    for tensor in checkpoint.tensors.values():
        try:
            assert tuple(tensor.read().shape) == tensor.shape
            if tensor.codes is not None:
                assert tuple(tensor.codes().shape) == tensor.shape
        except OctavoError as error:
            matched += outcome(error)
    return matched


def tokenize(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.encode(text, parse_special=False)
        assert isinstance(tokenizer.decode(ids), str)


# ---- safetensors ---------------------------------------------------------------------------------


def safetensors_file(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def header_of(shapes: dict[str, tuple[list[int], str, int]]) -> tuple[dict[str, Any], int]:
    """Tensors by name, as (shape, dtype, bytes of a number) -> a header, and the size of the
    data."""
    header = {}
    at = 0
    for name, (shape, dtype, size) in shapes.items():
        end = at + size * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header, at


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 12, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5, "torch_dtype": "float16", "tie_word_embeddings": True, "eos_token_id": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 12, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4,
    "max_position_embeddings": 32, "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 5.0}},
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
LAYER = "model.layers.0."
LLAMA_TENSORS: dict[str, tuple[list[int], str, int]] = {
    "model.embed_tokens.weight": ([12, 8], "F16", 2),
    "model.norm.weight": ([8], "F32", 4),
    f"{LAYER}input_layernorm.weight": ([8], "F32", 4),
    f"{LAYER}post_attention_layernorm.weight": ([8], "F32", 4),
    f"{LAYER}self_attn.q_proj.weight": ([8, 8], "BF16", 2),
    f"{LAYER}self_attn.k_proj.weight": ([4, 8], "F16", 2),
    f"{LAYER}self_attn.v_proj.weight": ([4, 8], "F16", 2),
    f"{LAYER}self_attn.o_proj.weight": ([8, 8], "F16", 2),
    f"{LAYER}mlp.gate_proj.weight": ([8, 8], "F16", 2),
    f"{LAYER}mlp.up_proj.weight": ([8, 8], "F64", 8),
    f"{LAYER}mlp.down_proj.weight": ([8, 8], "F16", 2),
}
# the same, with the MLP as codes of ours and the queries as GPTQ's
CODES = {"quant_method": "octavo", "weights": {f"{LAYER}mlp.up_proj.weight": ["int8", 8]}}
OCTAVO_TENSORS = {
    name: shape for name, shape in LLAMA_TENSORS.items() if not name.endswith("up_proj.weight")
} | {
    f"{LAYER}mlp.up_proj.weight.codes": ([8, 8], "U8", 1),
    f"{LAYER}mlp.up_proj.weight.scale": ([8, 1], "F16", 2),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
GPTQ_TENSORS: dict[str, tuple[list[int], str, int]] = {
    f"{LAYER}mlp.up_proj.qweight": ([4, 8], "I32", 4),
    f"{LAYER}mlp.up_proj.qzeros": ([1, 1], "I32", 4),
    f"{LAYER}mlp.up_proj.scales": ([1, 8], "F16", 2),
    f"{LAYER}mlp.up_proj.g_idx": ([32], "I32", 4),
}


# ---- GGUF ----------------------------------------------------------------------------------------

SCALARS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
           "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip


def _string(value: Any) -> bytes:
    raw = str(value).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _scalar(kind: str, value: Any) -> bytes:
    layout = SCALARS[kind][1]
    if layout in "fd":
        return struct.pack(f"<{layout}", min(max(float(value), -3e38), 3e38))
    if layout == "?":
        return struct.pack("<?", bool(value))
    size = struct.calcsize(layout)
    return (int(value) % 256**size).to_bytes(size, "little")


def _value(kind: str, value: Any) -> bytes:
    """A type's number and a value. `kind` is a scalar's name, "str", or either with "[]" behind it
    for an array."""
    if kind.endswith("[]"):
        inner = kind[:-2]
        items = list(value)
        number = 8 if inner == "str" else 9 if inner.endswith("[]") else SCALARS[inner][0]
        encoded = [_value(inner, item)[4:] for item in items]
        return struct.pack("<IIQ", 9, number, len(items)) + b"".join(encoded)
    if kind == "str":
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<I", SCALARS[kind][0]) + _scalar(kind, value)


def gguf_file(about: dict[str, Any]) -> bytes:
    """A file from a description: metadata {key: [kind, value]}, tensors [[name, dimensions, format,
    offset], ...] and the number of bytes of data. Raises whatever Python raises for a description
    that is none."""
    keys = [_string(key) + _value(*entry) for key, entry in about["metadata"].items()]
    infos = []
    for name, dims, kind, offset in about["tensors"]:
        packed = b"".join(_scalar("u64", dim) for dim in dims)
        infos.append(
            _string(name)
            + _scalar("u32", len(dims))
            + packed
            + _scalar("u32", kind)
            + _scalar("u64", offset)
        )
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys + infos)
    size = min(int(about["data"]), 1 << 14)
    return head + bytes(-len(head) % 32) + bytes(range(256)) * (size // 256 + 1)


def gguf_about(
    architecture: str,
    metadata: dict[str, tuple[str, Any]],
    tensors: dict[str, tuple[list[int], int, int]],
) -> dict[str, Any]:
    """Tensors by name, as (dimensions, format, bytes), one after the other."""
    infos = []
    at = 0
    for name, (dims, kind, size) in tensors.items():
        infos.append([name, dims, kind, at])
        at += -(-size // 32) * 32
    entries = {"general.architecture": ["str", architecture]}
    entries |= {key: list(entry) for key, entry in metadata.items()}
    return {"metadata": entries, "tensors": infos, "data": at}


VOCABULARY: dict[str, tuple[str, Any]] = {
    "tokenizer.ggml.model": ("str", "gpt2"),
    "tokenizer.ggml.pre": ("str", "llama-bpe"),
    "tokenizer.ggml.tokens": ("str[]", ["<s>", "</s>", "h", "e", "l", "o", "he", "ll", "Ġ", "a", "b", "hello"]),
    "tokenizer.ggml.token_type": ("i32[]", [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 4, 1]),
    "tokenizer.ggml.merges": ("str[]", ["h e", "l l"]),
    "tokenizer.ggml.bos_token_id": ("u32", 0),
    "tokenizer.ggml.eos_token_id": ("u32", 1),
    "tokenizer.chat_template": ("str", "{{ messages }}"),
}  # fmt: skip
PIECES: dict[str, tuple[str, Any]] = {
    "tokenizer.ggml.model": ("str", "llama"),
    "tokenizer.ggml.tokens": ("str[]", ["<unk>", "<s>", "</s>", "<0x0A>", "h", "e", "he", "▁he", "▁", "l", "ll", "o"]),
    "tokenizer.ggml.scores": ("f32[]", [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]),
    "tokenizer.ggml.token_type": ("i32[]", [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1]),
    "tokenizer.ggml.unknown_token_id": ("u32", 0),
    "tokenizer.ggml.bos_token_id": ("u32", 1),
    "tokenizer.ggml.add_bos_token": ("bool", True),
}  # fmt: skip


def _sizes(architecture: str, **more: tuple[str, Any]) -> dict[str, tuple[str, Any]]:
    sizes: dict[str, tuple[str, Any]] = {
        "embedding_length": ("u32", 32),
        "block_count": ("u32", 1),
        "context_length": ("u32", 64),
        "feed_forward_length": ("u32", 32),
        "attention.head_count": ("u32", 2),
        "attention.head_count_kv": ("u32", 1),
        "attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "rope.dimension_count": ("u32", 16),
        "rope.freq_base": ("f32", 1e4),
    }
    return {f"{architecture}.{key}": value for key, value in (sizes | more).items()}


# (dimensions, format, bytes): F32 is 0, F16 1, Q4_1 3, Q8_0 8, Q6_K 14
GGUF_TENSORS: dict[str, tuple[list[int], int, int]] = {
    "token_embd.weight": ([32, 12], 8, 408),
    "output_norm.weight": ([32], 0, 128),
    "blk.0.attn_norm.weight": ([32], 0, 128),
    "blk.0.ffn_norm.weight": ([32], 0, 128),
    "blk.0.attn_q.weight": ([32, 32], 3, 640),
    "blk.0.attn_k.weight": ([32, 16], 2, 288),
    "blk.0.attn_v.weight": ([32, 16], 1, 1024),
    "blk.0.attn_output.weight": ([32, 32], 8, 1088),
    "blk.0.ffn_gate.weight": ([32, 32], 6, 704),
    "blk.0.ffn_up.weight": ([32, 32], 7, 768),
    "blk.0.ffn_down.weight": ([32, 32], 0, 4096),
}
GEMMA_TENSORS = GGUF_TENSORS | {
    name: ([32], 0, 128)
    for name in ("blk.0.post_attention_norm.weight", "blk.0.post_ffw_norm.weight")
}
YARN = {
    "rope.scaling.type": ("str", "yarn"),
    "rope.scaling.factor": ("f32", 4.0),
    "rope.scaling.original_context_length": ("u32", 16),
}
GGUF_ABOUTS = [
    gguf_about("llama", _sizes("llama", **YARN) | VOCABULARY, GGUF_TENSORS),
    gguf_about("llama", _sizes("llama") | PIECES, GGUF_TENSORS | {"rope_freqs.weight": ([8], 0, 32)}),
    gguf_about(
        "gemma3",
        _sizes("gemma3", **{"attention.sliding_window": ("u32", 8), "attention.key_length": ("u32", 16)}) | PIECES,
        GEMMA_TENSORS,
    ),
    gguf_about("qwen3", _sizes("qwen3"), {"blk.0.attn_q_norm.weight": ([16], 0, 64)} | GGUF_TENSORS),
    gguf_about(
        "gpt2",
        _sizes("gpt2", **{"attention.layer_norm_epsilon": ("f32", 1e-5)}),
        {
            "token_embd.weight": ([32, 12], 0, 1536),
            "position_embd.weight": ([32, 64], 1, 4096),
            "blk.0.attn_qkv.weight": ([32, 96], 8, 3264),
        },
    ),
]  # fmt: skip
WORDS = [
    b"GGUF", b"general.architecture", b"llama", b"gpt2", b"gemma3", b"qwen3", b"blk.0.", b"blk.4294967295.", b".weight",
    b".bias", b"token_embd", b"output", b"attn_q", b"attn_k", b"rope_freqs.weight", b"general.alignment", b"split.count",
    b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.scores", b"tokenizer.ggml.token_type",
    b"tokenizer.ggml.pre", b"tokenizer.ggml.model", b"tokenizer.ggml.unknown_token_id", b"tokenizer.chat_template",
    b"tokenizer.ggml.add_space_prefix", b"rope.scaling.type", b"linear", b"yarn", b"attention.key_length", b"context_length",
    b"u8", b"i8", b"u32", b"i32", b"u64", b"i64", b"f32", b"f64", b"bool", b"str", b"str[]", b"u32[]", b"f32[]", b"str[][]",
    b"<0x41>", b"<0xZZ>", b"\xe2\x96\x81", b"\xc4\xa0", b"smollm", b"qwen2", b"tekken", b"default",
    b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\x00\x00\x00\x00\x00\x00\x00\x80",
    b"\x08\x00\x00\x00", b"\x09\x00\x00\x00", b"\x0c\x00\x00\x00", b"\x00\x00\x00\x00\x00\x00\xf0\x7f", b"\x00\x00\x80\x7f",
    b"dtype", b"shape", b"data_offsets", b"__metadata__", b"F32", b"F16", b"BF16", b"F64", b"F8_E4M3", b"I64", b"BOOL", b"U8",
]  # fmt: skip


def as_json(values: list[Any]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]
