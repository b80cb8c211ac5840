"""GGUF files: a checkpoint and its tokenizer in one file, as llama.cpp writes them.

Reads the header (every count, length and offset is checked against the file before it is used), turns the metadata into
a config.json and each tensor back into Hugging Face's name and layout. Unpacking quantised blocks is dequant.py's; the
tokenizer's metadata is passed on untouched. Knows no model.

    magic "GGUF", version, tensor count, metadata count
    metadata:  key, type, value
    tensors:   name, dimensions (fastest first), format, offset into the data
    data, each tensor aligned
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model.checkpoint import Checkpoint, StoredTensor, aligned_view, map_bytes
from octavo.model.dequant import CODED, FORMATS, as_codes, dequantize
from octavo.ops.weight import QuantWeight

MAX_HEADER = 128 << 20  # bytes: the largest vocabularies take a tenth
MAX_ENTRIES = 1 << 20  # tensors, or metadata keys
MAX_ARRAY = 1 << 24
MAX_NESTING = 4

STRING = 8
ARRAY = 9
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


# ---- the file ---------------------------------------------------------------------------------------


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]  # slowest first, as torch has it
    kind: int  # key of FORMATS
    begin: int  # in the file
    end: int


class _Cursor:
    """Walks the header; refuses to read past its end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.at = 0
        self.end = min(len(data), MAX_HEADER)

    def bad(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not a sound GGUF file: {why}. Download or convert it again"
        )

    def skip(self, nbytes: int) -> int:
        """Go on by nbytes; returns where they begin."""
        at = self.at
        if nbytes > self.end - at:
            raise self.bad(
                f"something of {nbytes} bytes at byte {at} runs past byte {self.end} (truncated?)"
            )
        self.at += nbytes
        return at

    def number(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))[0]

    def count(self, layout: str, what: str, most: int) -> int:
        value: int = self.number(layout)
        if value > most:
            raise self.bad(f"{value} {what}, more than {most}")
        return value

    def string(self) -> str:
        length = self.number("<Q")
        at = self.skip(length)
        try:
            return self.data[at : at + length].decode()
        except UnicodeDecodeError:
            raise self.bad(f"the string at byte {at} is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """As `count` calls of string(), at a fifth of the time: vocabularies have 300,000."""
        data = self.data
        at = self.at
        end = self.end
        found = []
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                after = at + 8 + length_at(data, at)[0]
                if after > end:
                    break
                found.append(data[at + 8 : after].decode())
                at = after
        except (struct.error, UnicodeDecodeError):
            pass
        self.at = at
        if len(found) < count:
            self.string()  # says what is wrong with the one that failed
            raise self.bad(f"an array of {count} strings ends early")
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.bad(f"value type {kind} at byte {self.at}; known are 0 to 12")
        if depth == MAX_NESTING:
            raise self.bad(f"arrays nested deeper than {MAX_NESTING}")
        item = self.number("<I")
        count = self.count("<Q", "array items", MAX_ARRAY)
        if item == STRING:
            return self.strings(count)
        if item in SCALARS:
            layout = f"<{count}{SCALARS[item][1]}"
            return list(struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout))))
        return [self.value(item, depth + 1) for _ in range(count)]


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors of a GGUF file, tensors in file order."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    with data:
        return _read_header(_Cursor(data, path))


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    bad = cursor.bad
    cursor.skip(4)
    if (version := cursor.number("<I")) not in (2, 3):
        raise bad(f"version {version:#x}; versions 2 and 3, little-endian, are read")
    num_tensors = cursor.count("<Q", "tensors", MAX_ENTRIES)
    num_keys = cursor.count("<Q", "metadata keys", MAX_ENTRIES)

    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise bad(f"key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.number("<I"))

    infos: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in infos:
            raise bad(f"tensor {name!r} is there twice")
        shape = tuple(
            reversed([cursor.number("<Q") for _ in range(cursor.count("<I", "dimensions", 4))])
        )
        kind = cursor.number("<I")
        offset = cursor.number("<Q")
        if kind not in FORMATS:
            known = ", ".join(form.name for form in FORMATS.values())
            raise bad(f"tensor {name!r} has format number {kind}; known are {known}")
        if not shape or 0 in shape or math.prod(shape) >= 2**63:
            raise bad(
                f"tensor {name!r} has shape {list(shape)}: no dimension may be 0, their product must fit 63 bits"
            )
        form = FORMATS[kind]
        if shape[-1] % form.values:
            raise bad(
                f"tensor {name!r} has rows of {shape[-1]} values, but format {form.name} packs {form.values} at a time"
            )
        infos[name] = TensorInfo(
            shape, kind, offset, offset + math.prod(shape) // form.values * form.nbytes
        )

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise bad(f"its alignment is {alignment!r}, not a power of two")
    base = cursor.at + -cursor.at % alignment
    in_order = {}
    last = 0
    for name, info in sorted(infos.items(), key=lambda item: item[1].begin):
        if info.begin % alignment or info.begin < last:
            raise bad(
                f"tensor {name!r} begins at offset {info.begin}: unaligned, or within the one before it"
            )
        last = info.end
        if base + last > len(cursor.data):
            raise bad(
                f"tensor {name!r} ends at byte {base + last}, the file at {len(cursor.data)} (truncated?)"
            )
        in_order[name] = info._replace(begin=base + info.begin, end=base + info.end)
    return metadata, in_order


# ---- as a checkpoint ----------------------------------------------------------------------------------


def open_gguf(path: Path) -> Checkpoint:
    metadata, infos = read_header(path)
    if metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts: join them with llama-gguf-split --merge"
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds a model of type {architecture!r}; read are {', '.join(ARCHITECTURES)}"
        )

    tensors: dict[str, StoredTensor] = {}
    config = _config(_Metadata(path, architecture, metadata), infos)
    for name, info in infos.items():
        if name == "rope_freqs.weight":
            config["rope_scaling"] = _rope_factors(path, info, config)
        else:
            layout = _layout(name, architecture, config)
            tensors[hf_name(name, architecture)] = _stored(
                path, name, info, layout, architecture != "gpt2"
            )
    return Checkpoint(str(path), config, tensors, gguf_metadata=metadata)


def _read(path: Path, info: TensorInfo) -> Tensor:
    data = map_bytes(path, info.begin, info.end)
    if (plain := FORMATS[info.kind].plain) is not None:
        return aligned_view(data, plain).view(info.shape)
    return dequantize(data, info.kind).view(info.shape)


def _read_codes(
    path: Path, info: TensorInfo, layout: Callable[[Tensor], Tensor] | None
) -> QuantWeight:
    """A matrix in the format it is stored in. A layout that only reorders rows reorders those of the codes as well."""
    weight = as_codes(map_bytes(path, info.begin, info.end), info.kind, info.shape[-1])
    if layout is None:
        return weight
    least = None if weight.least is None else layout(weight.least)
    return QuantWeight(
        weight.form, info.shape[-1], layout(weight.codes), layout(weight.scale), least
    )


def _stored(
    path: Path, name: str, info: TensorInfo, layout: Callable[[Tensor], Tensor] | None, by_row: bool
) -> StoredTensor:
    """by_row: the layout only reorders rows, if there is one."""
    nbytes = info.end - info.begin
    form = CODED.get(info.kind) if len(info.shape) == 2 and by_row else None
    codes = None if form is None else lambda: _read_codes(path, info, layout)
    if layout is None:
        return StoredTensor(info.shape, nbytes, lambda: _read(path, info), form, codes)
    try:
        shape = tuple(layout(torch.empty(info.shape, device="meta")).shape)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(info.shape)} does not fit its model: {error}"
        ) from None
    return StoredTensor(shape, nbytes, lambda: layout(_read(path, info)), form, codes)


# ---- names and layouts ----------------------------------------------------------------------------------

DECODER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = DECODER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output": "lm_head",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


class Architecture(NamedTuple):
    hf: str
    model_type: str
    layers: str  # what stands before a layer's number
    names: dict[str, str]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", "model.layers", DECODER_NAMES),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", "model.layers", DECODER_NAMES),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", "model.layers", DECODER_NAMES),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", "model.layers", GEMMA_NAMES),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", "transformer.h", GPT2_NAMES),
}


def hf_name(name: str, architecture: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. An unknown name stays: the loader will report it."""
    arch = ARCHITECTURES[architecture]
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in arch.names:
        return name
    layer = "" if match[1] is None else f"{arch.layers}.{match[1]}."
    return f"{layer}{arch.names[match[2]]}.{match[3]}"


def _layout(
    name: str, architecture: str, config: dict[str, Any]
) -> Callable[[Tensor], Tensor] | None:
    """What undoes the converter's rearrangement of this tensor."""
    if architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
        heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        return lambda rows: _half_split(rows, heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        # stored as the factor that multiplies; Hugging Face stores what is added to 1
        return lambda weight: weight.float() - 1
    if architecture == "gpt2" and re.search(
        r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$", name
    ):
        return lambda weight: weight.t()  # [out, in] -> [in, out]
    return None


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * dim, ...] in ggml's rotary order (each pair side by side) -> Hugging Face's (first halves, second halves)"""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


# ---- config -----------------------------------------------------------------------------------------------


class _Metadata:
    """Typed access to one architecture's keys."""

    def __init__(self, path: Path, architecture: str, values: dict[str, Any]):
        self.path = path
        self.architecture = architecture
        self.values = values

    def whole(self, key: str, default: int | None = None) -> int:
        return self._get(
            key, default, lambda v: type(v) is int and 0 < v < 2**31, "a positive whole number"
        )

    def real(self, key: str, default: float | None = None) -> float:
        return self._get(
            key,
            default,
            lambda v: type(v) in (int, float) and math.isfinite(v) and v > 0,
            "a positive number",
        )

    def _get(self, key: str, default: Any, accept: Callable[[Any], bool], what: str) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.values.get(full, default)
        if value is None or not accept(value):
            raise CheckpointError(
                f"{self.path}: metadata {full!r} must be {what}, it is {str(value)[:80]}"
            )
        return value


# Keys that would change the result in a way that is not implemented, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def _refuse_keys(get: _Metadata) -> None:
    for key, neutral in NEUTRAL.items():
        full = f"{get.architecture}.{key}"
        if full in get.values and get.values[full] not in neutral:
            raise CheckpointError(
                f"{get.path}: metadata {full!r} is {str(get.values[full])[:80]}, which is not supported; "
                f"{' or '.join(map(str, neutral))} is"
            )


def _config(get: _Metadata, infos: dict[str, TensorInfo]) -> dict[str, Any]:
    """The config.json that corresponds to this file."""
    name = get.architecture
    metadata = get.values
    _refuse_keys(get)
    if "token_embd.weight" not in infos:
        raise CheckpointError(
            f"{get.path} has no tensor token_embd.weight: not a language model, or only a part of one"
        )
    formats = {FORMATS[info.kind].name for info in infos.values()}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name].hf],
        "model_type": ARCHITECTURES[name].model_type,
        "vocab_size": infos["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in infos,
        "torch_dtype": "float32"
        if formats == {"F32"}
        else "bfloat16"
        if "BF16" in formats
        else "float16",
    }
    tokens = {
        kind: metadata.get(f"tokenizer.ggml.{kind}_token_id")
        for kind in ("bos", "eos", "eot", "eom")
    }
    ids = {
        kind: token
        for kind, token in tokens.items()
        if type(token) is int and 0 <= token < config["vocab_size"]
    }
    config["bos_token_id"] = ids.pop("bos", None)
    config["eos_token_id"] = list(dict.fromkeys(ids.values()))

    hidden = get.whole("embedding_length")
    layers = get.whole("block_count")
    heads = get.whole("attention.head_count")
    context = get.whole("context_length")
    inner = get.whole("feed_forward_length", 4 * hidden)
    if name == "gpt2":
        eps = get.real("attention.layer_norm_epsilon", 1e-5)
        shape = {
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": context,
            "n_inner": inner,
        }
        return config | shape | {"layer_norm_epsilon": eps, "activation_function": "gelu_new"}

    rotated = get.whole("rope.dimension_count", get.whole("attention.key_length", hidden // heads))
    head_dim = get.whole("attention.key_length", rotated)
    if rotated != head_dim:
        raise CheckpointError(
            f"{get.path} rotates {rotated} of {head_dim} dimensions of a head; only whole heads are supported"
        )
    config |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": inner,
        "max_position_embeddings": context,
        "rms_norm_eps": get.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": get.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get),
        "attention_bias": "blk.0.attn_output.bias" in infos,
        "mlp_bias": "blk.0.ffn_gate.bias" in infos,
        "hidden_act": "silu",
    }
    if name == "gemma3":
        config |= {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": get.whole("attention.sliding_window"),
            "sliding_window_pattern": get.whole("attention.sliding_window_pattern", 6),
            "rope_local_base_freq": get.real("rope.freq_base_swa", 10000.0),
            # The file does not say; the 27B model alone, known by its 62 layers, scales by something else than head_dim.
            "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
        }
    return config


def _rope_factors(path: Path, info: TensorInfo, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, worked out by the converter: what each rotary frequency is divided by."""
    if config.get("rope_scaling") is not None or info.shape != (config.get("head_dim", 0) // 2,):
        raise CheckpointError(
            f"{path}: rope_freqs.weight of shape {list(info.shape)} needs a model without other rope scaling and heads of twice "
            f"that size; this one has {config.get('rope_scaling')} and heads of {config.get('head_dim')}"
        )
    return {"rope_type": "custom", "factors": _read(path, info).tolist()}


def _rope_scaling(get: _Metadata) -> dict[str, Any] | None:
    """As in llama.cpp, a factor without a type is linear, and old files call it rope.scale_linear."""
    prefix = f"{get.architecture}.rope"
    key = "rope.scaling.factor" if f"{prefix}.scaling.factor" in get.values else "rope.scale_linear"
    factor = get.values.get(f"{get.architecture}.{key}", 0)
    kind = get.values.get(f"{prefix}.scaling.type", "none" if factor in (0, 1) else "linear")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{get.path}: rope scaling {kind!r} is not supported; none, linear and yarn are"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": get.real(key)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = get.whole(
            "rope.scaling.original_context_length"
        )
        for beta in ("beta_fast", "beta_slow"):
            if f"{prefix}.scaling.yarn_{beta}" in get.values:
                scaling[beta] = get.real(f"rope.scaling.yarn_{beta}")
    return scaling
