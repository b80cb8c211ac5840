"""GGUF files: a checkpoint and its tokenizer in one file, as llama.cpp writes them.

The reader checks every count, length and offset of the header against the file before using it. It
turns the metadata into a config.json and gives each tensor its Hugging Face name and layout.
dequant.py unpacks quantised blocks. The tokenizer's metadata is passed on unchanged. This module
depends on no model.

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

MAX_HEADER = 128 << 20  # bytes; the largest vocabularies take a tenth of it
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


# ---- the file ------------------------------------------------------------------------------------


class TensorInfo(NamedTuple):
    """The shape, format and position of one tensor."""

    shape: tuple[int, ...]  # the slowest dimension first, as in torch
    format_id: int  # a key of FORMATS
    begin: int  # its position in the file
    end: int


class _Cursor:
    """Reads the header value by value. It raises an error instead of reading past the end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.position = 0
        self.end = min(len(data), MAX_HEADER)

    def invalid_file(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not a valid GGUF file: {reason}. Download or convert it again"
        )

    def skip(self, nbytes: int) -> int:
        """Advance by nbytes and return the position where they begin."""
        position = self.position
        if nbytes > self.end - position:
            raise self.invalid_file(
                f"a value of {nbytes} bytes begins at byte {position}, but only the first "
                f"{self.end} bytes can be read, so the file is probably cut off"
            )
        self.position += nbytes
        return position

    def number(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))[0]

    def count(self, layout: str, description: str, maximum: int) -> int:
        value: int = self.number(layout)
        if value > maximum:
            raise self.invalid_file(
                f"it has {value} {description}, but at most {maximum} are allowed"
            )
        return value

    def string(self) -> str:
        length = self.number("<Q")
        position = self.skip(length)
        try:
            return self.data[position : position + length].decode()
        except UnicodeDecodeError:
            raise self.invalid_file(f"the string at byte {position} is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """Do the same as `count` calls of string(), in a fifth of the time.

        Vocabularies have up to 300,000 strings.
        """
        data = self.data
        position = self.position
        header_end = self.end
        strings = []
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                next_position = position + 8 + length_at(data, position)[0]
                if next_position > header_end:
                    break
                strings.append(data[position + 8 : next_position].decode())
                position = next_position
        except (struct.error, UnicodeDecodeError):
            pass
        self.position = position
        if len(strings) < count:
            self.string()  # raises the error of the string that failed
            raise self.invalid_file(f"an array of {count} strings ends early")
        return strings

    def value(self, value_type: int, depth: int = 0) -> Any:
        if value_type in SCALARS:
            return self.number(SCALARS[value_type])
        if value_type == STRING:
            return self.string()
        if value_type != ARRAY:
            raise self.invalid_file(
                f"the value at byte {self.position} has type {value_type}, but the known types are "
                "0 to 12"
            )
        if depth == MAX_NESTING:
            raise self.invalid_file(f"arrays are nested more than {MAX_NESTING} levels deep")
        item_type = self.number("<I")
        count = self.count("<Q", "array items", MAX_ARRAY)
        if item_type == STRING:
            return self.strings(count)
        if item_type in SCALARS:
            layout = f"<{count}{SCALARS[item_type][1]}"
            return list(struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout))))
        return [self.value(item_type, depth + 1) for _ in range(count)]


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return the metadata and the tensors of a GGUF file. The tensors are in file order."""
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
    cursor.skip(4)
    if (version := cursor.number("<I")) not in (2, 3):
        raise cursor.invalid_file(
            f"its version is {version:#x}, but only versions 2 and 3, little-endian, are supported"
        )
    num_tensors = cursor.count("<Q", "tensors", MAX_ENTRIES)
    num_keys = cursor.count("<Q", "metadata keys", MAX_ENTRIES)

    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.invalid_file(f"key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.number("<I"))

    tensor_infos: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in tensor_infos:
            raise cursor.invalid_file(f"tensor {name!r} appears twice")
        tensor_infos[name] = _read_tensor_info(cursor, name)
    return metadata, _locate_tensors(cursor, metadata, tensor_infos)


def _read_tensor_info(cursor: _Cursor, name: str) -> TensorInfo:
    """Read one entry of the tensor list. Its positions are offsets into the data."""
    num_dimensions = cursor.count("<I", "dimensions", 4)
    shape = tuple(reversed([cursor.number("<Q") for _ in range(num_dimensions)]))
    format_id = cursor.number("<I")
    offset = cursor.number("<Q")
    if format_id not in FORMATS:
        known = ", ".join(block_format.name for block_format in FORMATS.values())
        raise cursor.invalid_file(
            f"tensor {name!r} has format number {format_id}, but the known formats are {known}"
        )
    if not shape or 0 in shape or math.prod(shape) >= 2**63:
        raise cursor.invalid_file(
            f"tensor {name!r} has shape {list(shape)}: no dimension may be 0, and the product of "
            "the dimensions must fit in 63 bits"
        )
    block_format = FORMATS[format_id]
    if shape[-1] % block_format.values:
        raise cursor.invalid_file(
            f"tensor {name!r} has rows of {shape[-1]} values, but format {block_format.name} "
            f"packs {block_format.values} at a time"
        )
    nbytes = math.prod(shape) // block_format.values * block_format.nbytes
    return TensorInfo(shape, format_id, offset, offset + nbytes)


def _locate_tensors(
    cursor: _Cursor, metadata: dict[str, Any], tensor_infos: dict[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return the tensors in file order, with positions in the file. The cursor is at the data."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.invalid_file(f"its alignment is {alignment!r}, but it must be a power of two")
    data_start = cursor.position + -cursor.position % alignment
    in_order = {}
    previous_end = 0
    for name, tensor_info in sorted(tensor_infos.items(), key=lambda item: item[1].begin):
        begin = data_start + tensor_info.begin
        end = data_start + tensor_info.end
        if tensor_info.begin % alignment or tensor_info.begin < previous_end:
            raise cursor.invalid_file(
                f"tensor {name!r} begins at offset {tensor_info.begin}, which is unaligned or "
                "inside the previous tensor"
            )
        previous_end = tensor_info.end
        if end > len(cursor.data):
            raise cursor.invalid_file(
                f"tensor {name!r} ends at byte {end}, but the file has {len(cursor.data)} bytes "
                "(truncated?)"
            )
        in_order[name] = tensor_info._replace(begin=begin, end=end)
    return in_order


# ---- as a checkpoint -----------------------------------------------------------------------------


def open_gguf(path: Path) -> Checkpoint:
    metadata, tensor_infos = read_header(path)
    if metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts: join them with llama-gguf-split "
            "--merge"
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds a model of type {architecture!r}, but the supported types are "
            f"{', '.join(ARCHITECTURES)}"
        )

    tensors: dict[str, StoredTensor] = {}
    config = _config(_Metadata(path, architecture, metadata), tensor_infos)
    for name, tensor_info in tensor_infos.items():
        if name == "rope_freqs.weight":
            config["rope_scaling"] = _rope_factors(path, tensor_info, config)
        else:
            layout = _layout(name, architecture, config)
            tensors[hf_name(name, architecture)] = _stored(
                path, name, tensor_info, layout, architecture != "gpt2"
            )
    return Checkpoint(str(path), config, tensors, gguf_metadata=metadata)


def _read(path: Path, tensor_info: TensorInfo) -> Tensor:
    data = map_bytes(path, tensor_info.begin, tensor_info.end)
    if (plain_dtype := FORMATS[tensor_info.format_id].plain) is not None:
        return aligned_view(data, plain_dtype).view(tensor_info.shape)
    return dequantize(data, tensor_info.format_id).view(tensor_info.shape)


def _read_codes(
    path: Path, tensor_info: TensorInfo, layout: Callable[[Tensor], Tensor] | None
) -> QuantWeight:
    """Read a matrix in the format in which it is stored.

    The layout only reorders rows, so it applies to the codes too.
    """
    weight = as_codes(
        map_bytes(path, tensor_info.begin, tensor_info.end),
        tensor_info.format_id,
        tensor_info.shape[-1],
    )
    if layout is None:
        return weight
    least = None if weight.least is None else layout(weight.least)
    return QuantWeight(
        weight.format, tensor_info.shape[-1], layout(weight.codes), layout(weight.scale), least
    )


def _stored(
    path: Path,
    name: str,
    tensor_info: TensorInfo,
    layout: Callable[[Tensor], Tensor] | None,
    reorders_rows: bool,
) -> StoredTensor:
    """Describe one tensor. `reorders_rows` means that the layout only reorders rows."""
    nbytes = tensor_info.end - tensor_info.begin
    weight_format = (
        CODED.get(tensor_info.format_id) if len(tensor_info.shape) == 2 and reorders_rows else None
    )
    read_codes = None if weight_format is None else lambda: _read_codes(path, tensor_info, layout)
    if layout is None:
        return StoredTensor(
            tensor_info.shape, nbytes, lambda: _read(path, tensor_info), weight_format, read_codes
        )
    try:
        shape = tuple(layout(torch.empty(tensor_info.shape, device="meta")).shape)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(tensor_info.shape)} does not fit its model: "
            f"{error}"
        ) from None
    return StoredTensor(
        shape, nbytes, lambda: layout(_read(path, tensor_info)), weight_format, read_codes
    )


# ---- names and layouts ---------------------------------------------------------------------------

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
    layers: str  # the prefix of a layer's number
    names: dict[str, str]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", "model.layers", DECODER_NAMES),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", "model.layers", DECODER_NAMES),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", "model.layers", DECODER_NAMES),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", "model.layers", GEMMA_NAMES),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", "transformer.h", GPT2_NAMES),
}


def hf_name(name: str, architecture: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight

    An unknown name is returned as it is. The loader reports it.
    """
    names = ARCHITECTURES[architecture]
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names.names:
        return name
    layer = "" if match[1] is None else f"{names.layers}.{match[1]}."
    return f"{layer}{names.names[match[2]]}.{match[3]}"


def _layout(
    name: str, architecture: str, config: dict[str, Any]
) -> Callable[[Tensor], Tensor] | None:
    """Return the function that undoes the converter's rearrangement of this tensor."""
    if architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
        num_heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        return lambda rows: _half_split(rows, num_heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        # GGUF stores the factor of the norm; Hugging Face stores the factor - 1.
        return lambda weight: weight.float() - 1
    if architecture == "gpt2" and re.search(
        r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$", name
    ):
        return lambda weight: weight.t()  # [out, in] -> [in, out]
    return None


def _half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder rows [heads * dim, ...] from ggml's rotary order to that of Hugging Face.

    ggml stores the rows of each pair side by side; Hugging Face stores the first halves of all
    pairs, then the second halves.
    """
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


# ---- config --------------------------------------------------------------------------------------


class _Metadata:
    """Typed access to the metadata keys of one architecture."""

    def __init__(self, path: Path, architecture: str, values: dict[str, Any]):
        self.path = path
        self.architecture = architecture
        self.values = values

    def positive_int(self, key: str, default: int | None = None) -> int:
        return self._get(
            key,
            default,
            lambda value: type(value) is int and 0 < value < 2**31,
            "a positive whole number",
        )

    def positive_float(self, key: str, default: float | None = None) -> float:
        return self._get(
            key,
            default,
            lambda value: type(value) in (int, float) and math.isfinite(value) and value > 0,
            "a positive number",
        )

    def _get(self, key: str, default: Any, accept: Callable[[Any], bool], requirement: str) -> Any:
        full_key = f"{self.architecture}.{key}"
        value = self.values.get(full_key, default)
        if value is None or not accept(value):
            raise CheckpointError(
                f"{self.path}: metadata {full_key!r} must be {requirement}, got {str(value)[:80]}"
            )
        return value


# Keys that change the result in a way that is not implemented, with their neutral values.
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


def _refuse_keys(metadata: _Metadata) -> None:
    for key, neutral in NEUTRAL.items():
        full_key = f"{metadata.architecture}.{key}"
        if full_key in metadata.values and metadata.values[full_key] not in neutral:
            raise CheckpointError(
                f"{metadata.path}: metadata {full_key!r} is "
                f"{str(metadata.values[full_key])[:80]}, but only "
                f"{' or '.join(map(str, neutral))} is supported"
            )


def _config(metadata: _Metadata, tensor_infos: dict[str, TensorInfo]) -> dict[str, Any]:
    """Return the config.json that corresponds to this file."""
    _refuse_keys(metadata)
    if "token_embd.weight" not in tensor_infos:
        raise CheckpointError(
            f"{metadata.path} has no tensor token_embd.weight: it is not a language model, or only "
            "a part of one"
        )
    config = _common_config(metadata, tensor_infos)
    if metadata.architecture == "gpt2":
        return config | _gpt2_config(metadata)
    config |= _decoder_config(metadata, tensor_infos)
    if metadata.architecture == "gemma3":
        config |= _gemma_config(metadata, config)
    return config


def _common_config(metadata: _Metadata, tensor_infos: dict[str, TensorInfo]) -> dict[str, Any]:
    architecture = ARCHITECTURES[metadata.architecture]
    vocab_size = tensor_infos["token_embd.weight"].shape[0]
    formats = {FORMATS[tensor_info.format_id].name for tensor_info in tensor_infos.values()}
    if formats == {"F32"}:
        dtype = "float32"
    else:
        dtype = "bfloat16" if "BF16" in formats else "float16"
    token_ids = {}
    for token in ("bos", "eos", "eot", "eom"):
        token_id = metadata.values.get(f"tokenizer.ggml.{token}_token_id")
        if type(token_id) is int and 0 <= token_id < vocab_size:
            token_ids[token] = token_id
    bos_id = token_ids.pop("bos", None)
    return {
        "architectures": [architecture.hf],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensor_infos,
        "torch_dtype": dtype,
        "bos_token_id": bos_id,
        "eos_token_id": list(dict.fromkeys(token_ids.values())),
    }


def _gpt2_config(metadata: _Metadata) -> dict[str, Any]:
    hidden = metadata.positive_int("embedding_length")
    return {
        "n_embd": hidden,
        "n_layer": metadata.positive_int("block_count"),
        "n_head": metadata.positive_int("attention.head_count"),
        "n_positions": metadata.positive_int("context_length"),
        "n_inner": metadata.positive_int("feed_forward_length", 4 * hidden),
        "layer_norm_epsilon": metadata.positive_float("attention.layer_norm_epsilon", 1e-5),
        "activation_function": "gelu_new",
    }


def _decoder_config(metadata: _Metadata, tensor_infos: dict[str, TensorInfo]) -> dict[str, Any]:
    hidden = metadata.positive_int("embedding_length")
    num_heads = metadata.positive_int("attention.head_count")
    key_length = metadata.positive_int("attention.key_length", hidden // num_heads)
    rotated = metadata.positive_int("rope.dimension_count", key_length)
    head_dim = metadata.positive_int("attention.key_length", rotated)
    if rotated != head_dim:
        raise CheckpointError(
            f"{metadata.path} rotates {rotated} of {head_dim} dimensions of a head; "
            "only whole heads are supported"
        )
    return {
        "hidden_size": hidden,
        "num_hidden_layers": metadata.positive_int("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.positive_int("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.positive_int("feed_forward_length", 4 * hidden),
        "max_position_embeddings": metadata.positive_int("context_length"),
        "rms_norm_eps": metadata.positive_float("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive_float("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "attention_bias": "blk.0.attn_output.bias" in tensor_infos,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_infos,
        "hidden_act": "silu",
    }


def _gemma_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    # The file does not contain query_pre_attn_scalar. It equals head_dim in all models except 27B,
    # which is the only model with 62 layers.
    is_27b = config["num_hidden_layers"] == 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.positive_int("attention.sliding_window"),
        "sliding_window_pattern": metadata.positive_int("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": metadata.positive_float("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
    }


def _rope_factors(path: Path, tensor_info: TensorInfo, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope scaling of Llama 3. The converter stores a factor for each frequency."""
    if config.get("rope_scaling") is not None or tensor_info.shape != (
        config.get("head_dim", 0) // 2,
    ):
        raise CheckpointError(
            f"{path}: rope_freqs.weight of shape {list(tensor_info.shape)} needs a model without "
            "other rope scaling and heads of twice "
            f"that size; this one has {config.get('rope_scaling')} and heads of "
            f"{config.get('head_dim')}"
        )
    return {"rope_type": "custom", "factors": _read(path, tensor_info).tolist()}


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    """Return the rope scaling. As in llama.cpp, a factor without a type is linear.

    Old files name the factor rope.scale_linear.
    """
    prefix = f"{metadata.architecture}.rope"
    factor_key = (
        "rope.scaling.factor"
        if f"{prefix}.scaling.factor" in metadata.values
        else "rope.scale_linear"
    )
    factor = metadata.values.get(f"{metadata.architecture}.{factor_key}", 0)
    rope_type = metadata.values.get(
        f"{prefix}.scaling.type", "none" if factor in (0, 1) else "linear"
    )
    if rope_type == "none":
        return None
    if rope_type not in ("linear", "yarn"):
        raise CheckpointError(
            f"{metadata.path}: rope scaling {rope_type!r} is not supported: only none, linear and "
            "yarn are supported"
        )
    scaling: dict[str, Any] = {
        "rope_type": rope_type,
        "factor": metadata.positive_float(factor_key),
    }
    if rope_type == "yarn":
        scaling["original_max_position_embeddings"] = metadata.positive_int(
            "rope.scaling.original_context_length"
        )
        for beta_name in ("beta_fast", "beta_slow"):
            if f"{prefix}.scaling.yarn_{beta_name}" in metadata.values:
                scaling[beta_name] = metadata.positive_float(f"rope.scaling.yarn_{beta_name}")
    return scaling
