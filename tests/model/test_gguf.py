"""GGUF files read as the Hugging Face checkpoints they were made from, and damaged ones are
refused."""

from __future__ import annotations

import builtins
import dataclasses
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError, OctavoError
from octavo.model.dequant import CHUNK, FORMATS, dequantize
from octavo.model.gguf import NEUTRAL, hf_name, open_gguf, read_header
from octavo.model.load import LoadOptions, load_model, open_checkpoint
from octavo.ops.reference import ReferenceOps

gguf = pytest.importorskip("gguf")

Metadata = dict[str, Any]


def write(path: Path, architecture: str, metadata: Metadata, tensors: dict[str, Tensor]) -> Path:
    """By the library that belongs to llama.cpp."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- block formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_block_sizes_are_the_librarys(kind: int) -> None:
    form = FORMATS[kind]
    library = gguf.GGMLQuantizationType(kind)
    assert (library.name, gguf.GGML_QUANT_SIZES[library]) == (form.name, (form.values, form.nbytes))


BY_LIBRARY = [
    kind
    for kind, form in FORMATS.items()
    if form.plain in (None, torch.float32, torch.float16, torch.bfloat16)
]


def test_every_format_the_library_unpacks_is_known() -> None:
    from gguf.quants import _type_traits

    assert {int(kind) for kind in _type_traits} | {0, 1} == set(BY_LIBRARY)


@pytest.mark.parametrize("kind", BY_LIBRARY, ids=lambda kind: FORMATS[kind].name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the library's, on random scales
def test_random_blocks_unpack_to_the_librarys_bits(kind: int) -> None:
    form = FORMATS[kind]
    rng = np.random.default_rng(kind)
    for count in (1, 3, 2 * CHUNK // form.values + 5):  # the last one unpacks in three chunks
        blocks = rng.integers(0, 256, (count, form.nbytes), dtype=np.uint8)
        want = (
            gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
            .astype(np.float32)
            .ravel()
        )
        got = dequantize(torch.from_numpy(blocks).flatten(), kind).float().numpy()
        nan = np.isnan(want)
        assert np.array_equal(np.isnan(got), nan)
        assert np.array_equal(got.view(np.int32)[~nan], want.view(np.int32)[~nan])


def test_rare_formats_without_the_library_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def no_gguf(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("gguf"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_gguf)
    with pytest.raises(CheckpointError, match="IQ4_NL.*pip install gguf"):
        dequantize(torch.zeros(18, dtype=torch.uint8), 20)
    # the common ones do without
    assert dequantize(torch.zeros(18, dtype=torch.uint8), 2).tolist() == [0] * 32


# ---- each architecture, against the model it was made from ---------------------------------------


def interleave(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of q and k rows: row i and row i + dim/2 of a head become neighbours."""
    dim = weight.shape[0] // heads
    order = [
        head * dim + half * dim // 2 + i
        for head in range(heads)
        for i in range(dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


ATTENTION = {
    "hidden_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = ATTENTION | {
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
COMMON = {
    "embedding_length": 32,
    "block_count": 7,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "feed_forward_length": 48,
    "context_length": 128,
    "attention.layer_norm_rms_epsilon": 2.0**-16,
    "rope.freq_base": 50000.0,
}
EPS_THETA = {"rms_norm_eps": 2.0**-16, "rope_theta": 50000.0}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def to_gguf(name: str, tensor: Tensor, architecture: str) -> tuple[str, Tensor]:
    """One tensor as llama.cpp's converter writes it."""
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        new = f"{TOP[stem]}.{kind}"
    else:
        _, _, number, rest = stem.split(".", 3)
        new = f"blk.{number}.{(GEMMA_LAYER if architecture == 'gemma3' else LAYER)[rest]}.{kind}"
    if architecture == "llama" and "q_proj" in name:
        tensor = interleave(tensor, 4)
    if architecture == "llama" and "k_proj" in name:
        tensor = interleave(tensor, 2)
    if architecture == "gemma3" and "norm" in name:
        tensor = tensor + 1
    if architecture == "gpt2" and tensor.dim() == 2 and "transformer.h." in name:
        tensor = tensor.t()
    return new, tensor


def family(architecture: str, tied: bool) -> tuple[Any, Metadata]:
    """A tiny transformers config of the architecture, and what a GGUF file would say of it."""
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | EPS_THETA | TOKENS | {"tie_word_embeddings": tied}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    if architecture == "llama":
        return transformers.LlamaConfig(**sizes, **rope), COMMON | {"rope.dimension_count": 16}
    if architecture == "qwen2":
        small = sizes | {"head_dim": 8}  # the config has no such field: always hidden / heads
        return transformers.Qwen2Config(**small, **rope), {
            k: v for k, v in COMMON.items() if k != "attention.key_length"
        }
    if architecture == "qwen3":
        return transformers.Qwen3Config(**sizes, **rope), COMMON
    if architecture == "gemma3":
        more = {"sliding_window": 8, "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000.0}
        return transformers.Gemma3TextConfig(**sizes, **more), COMMON | {
            "attention.sliding_window": 8
        }
    sizes = {"n_embd": 32, "n_layer": 7, "n_head": 4, "n_positions": 128, "vocab_size": 64}
    sizes |= {"n_inner": 128, "layer_norm_epsilon": 2.0**-16}
    metadata = {
        key: COMMON[key]
        for key in ("embedding_length", "block_count", "attention.head_count", "context_length")
    }
    metadata |= {"feed_forward_length": 128, "attention.layer_norm_epsilon": 2.0**-16}
    return transformers.GPT2Config(**sizes, **TOKENS, tie_word_embeddings=tied), metadata


def make(architecture: str, path: Path, tied: bool = True) -> tuple[Any, Path]:
    """A random tiny model, and itself as a GGUF file."""
    import transformers

    config, metadata = family(architecture, tied)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    # values that survive + 1 - 1; every bias and norm distinct
    for parameter in model.parameters():
        parameter.data = torch.randint(-64, 64, parameter.shape).float() / 256
    tensors = dict(
        to_gguf(name, t, architecture)
        for name, t in model.state_dict().items()
        if not (tied and "lm_head" in name)
    )
    keyed = {f"{architecture}.{key}": value for key, value in metadata.items()}
    tokens = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }
    return model, write(path / f"{architecture}.gguf", architecture, keyed | tokens, tensors)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_tensors_come_back_as_transformers_has_them(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    model, path = make(architecture, tmp_path, tied)
    found = open_checkpoint(str(path))
    want = {
        name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    assert found.shapes == {name: tuple(t.shape) for name, t in want.items()}
    for name, tensor in want.items():
        assert torch.equal(found.read(name), tensor), name
    assert found.config["tie_word_embeddings"] is tied
    assert found.config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_config_is_that_of_the_original(architecture: str, tmp_path: Path) -> None:
    model, path = make(architecture, tmp_path)
    config = open_gguf(path).config
    # end of turn ends generation too
    assert config["eos_token_id"] == [2, 5] and config["bos_token_id"] == 1
    original = model.config.to_dict()
    shared = {key for key in config if key in original} - {
        "eos_token_id",
        "architectures",
        "torch_dtype",
    }
    assert len(shared) >= 8
    assert {key: config[key] for key in shared} == {key: original[key] for key in shared}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_a_model_is_the_same_from_gguf_and_from_safetensors(
    architecture: str, tmp_path: Path
) -> None:
    original, path = make(architecture, tmp_path)
    original.save_pretrained(tmp_path / "saved")
    ours, _ = load_model(path, LoadOptions(dtype="float32"), ops=ReferenceOps(), progress=False)
    theirs, _ = load_model(
        tmp_path / "saved", LoadOptions(dtype="float32"), ops=ReferenceOps(), progress=False
    )
    same = dataclasses.replace(
        ours.config, eos_ids=theirs.config.eos_ids, dtype=theirs.config.dtype
    )
    assert same == theirs.config
    want = dict(theirs.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == set(want)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, want[name]), name


def test_head_size_falls_back_to_rotary_size_then_to_the_quotient(tmp_path: Path) -> None:
    keys = {f"llama.{key}": value for key, value in COMMON.items() if key != "attention.key_length"}
    tensors = {"token_embd.weight": torch.zeros(64, 32)}
    assert open_gguf(write(tmp_path / "a.gguf", "llama", keys, tensors)).config["head_dim"] == 8
    keys["llama.rope.dimension_count"] = 16
    assert open_gguf(write(tmp_path / "b.gguf", "llama", keys, tensors)).config["head_dim"] == 16
    keys["llama.attention.key_length"] = 32
    with pytest.raises(CheckpointError, match="rotates 16 of 32"):
        open_gguf(write(tmp_path / "c.gguf", "llama", keys, tensors))


def llama_with(tmp_path: Path, more: Metadata, tensors: dict[str, Tensor] | None = None) -> Path:
    keys = {f"llama.{key}": value for key, value in COMMON.items()} | more
    return write(
        tmp_path / "x.gguf",
        "llama",
        keys,
        {"token_embd.weight": torch.zeros(64, 32)} | (tensors or {}),
    )


def test_rope_factors_reach_the_config(tmp_path: Path) -> None:
    path = llama_with(tmp_path, {}, {"rope_freqs.weight": torch.arange(1.0, 9.0)})
    found = open_gguf(path)
    assert found.config["rope_scaling"] == {
        "rope_type": "custom",
        "factors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    }
    assert "rope_freqs.weight" not in found.tensors


def test_rope_factors_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight of shape \[7\]"):
        open_gguf(llama_with(tmp_path, {}, {"rope_freqs.weight": torch.ones(7)}))


def test_rope_scaling_is_translated(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert open_gguf(llama_with(tmp_path, linear)).config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = linear | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.original_context_length": 32,
    }
    want = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert open_gguf(llama_with(tmp_path, yarn)).config["rope_scaling"] == want
    betas = yarn | {"llama.rope.scaling.yarn_beta_fast": 8.0}
    assert open_gguf(llama_with(tmp_path, betas)).config["rope_scaling"]["beta_fast"] == 8.0
    for untyped in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        found = open_gguf(llama_with(tmp_path, {untyped: 4.0})).config["rope_scaling"]
        assert found == {"rope_type": "linear", "factor": 4.0}
        assert open_gguf(llama_with(tmp_path, {untyped: 1.0})).config["rope_scaling"] is None
    with pytest.raises(CheckpointError, match="longrope"):
        open_gguf(llama_with(tmp_path, {"llama.rope.scaling.type": "longrope"}))


@pytest.mark.parametrize("key", NEUTRAL)
def test_keys_that_would_change_the_result_are_refused_unless_neutral(
    tmp_path: Path, key: str
) -> None:
    for value in NEUTRAL[key]:
        given = value if isinstance(value, bool) else float(value)
        open_gguf(llama_with(tmp_path, {f"llama.{key}": given}))
    other = not NEUTRAL[key][0] if isinstance(NEUTRAL[key][0], bool) else 3.5
    with pytest.raises(
        CheckpointError, match=f"metadata 'llama.{key}' is .* but only .* is supported"
    ):
        open_gguf(llama_with(tmp_path, {f"llama.{key}": other}))


def test_unknown_tensors_keep_their_names_for_the_loader_to_report() -> None:
    assert hf_name("blk.3.attn_q.weight", "llama") == "model.layers.3.self_attn.q_proj.weight"
    for name in ("blk.0.ffn_gate_exps.weight", "v.patch_embd.weight", "strange"):
        assert hf_name(name, "llama") == name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.block_count": "many"}, "llama.block_count"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.embedding_length": 0}, "llama.embedding_length"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_metadata_that_makes_no_model_is_refused_by_key(
    tmp_path: Path, more: Metadata, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(llama_with(tmp_path, more))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'mamba'.*llama, qwen2, qwen3, gemma3, gpt2"):
        open_gguf(write(tmp_path / "x.gguf", "mamba", {}, {}))


def test_an_architecture_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model of type \['llama'\]"):
        open_gguf(
            raw_file(
                tmp_path / "x.gguf", [array("general.architecture", 8, 1, string("llama"))], []
            )
        )


def test_a_directory_that_holds_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    llama_with(tmp_path, {})
    assert open_checkpoint(str(tmp_path)).gguf_metadata is not None


# ---- the file format -----------------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def number(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_file(
    path: Path,
    keys: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    version: int = 3,
    **counts: int,
) -> Path:
    """A GGUF file of any pieces whatever."""
    head = b"GGUF" + struct.pack(
        "<IQQ", version, counts.get("num_tensors", len(infos)), counts.get("num_keys", len(keys))
    )
    head += b"".join(keys) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def array(key: str, kind: int, count: int, items: bytes = b"") -> bytes:
    return string(key) + struct.pack("<IIQ", 9, kind, count) + items


def test_every_type_of_value_is_read(tmp_path: Path) -> None:
    values = {
        0: ("<B", 200),
        1: ("<b", -5),
        2: ("<H", 60000),
        3: ("<h", -5),
        4: ("<I", 2**31),
        5: ("<i", -5),
        6: ("<f", 0.5),
    }
    values |= {7: ("<?", True), 10: ("<Q", 2**63), 11: ("<q", -5), 12: ("<d", 0.1)}
    keys = [
        string(str(kind)) + struct.pack("<I", kind) + struct.pack(*value)
        for kind, value in values.items()
    ]
    keys += [
        array(f"list {kind}", kind, 2, struct.pack(layout, value) * 2)
        for kind, (layout, value) in values.items()
    ]
    keys.append(array("strings", 8, 3, string("a") + string("") + string("ü")))
    keys.append(
        array(
            "nested",
            9,
            2,
            struct.pack("<IQBB", 0, 2, 1, 2) + struct.pack("<IQ", 8, 1) + string("x"),
        )
    )
    metadata, _ = read_header(raw_file(tmp_path / "x.gguf", keys, [], version=2))
    for kind, (_, value) in values.items():
        assert metadata[str(kind)] == value and metadata[f"list {kind}"] == [value, value]
    assert metadata["strings"] == ["a", "", "ü"] and metadata["nested"] == [[1, 2], ["x"]]


BAD: dict[str, Callable[[Path], Path]] = {
    "version 1": lambda p: raw_file(p, [], [], version=1),
    "big-endian": lambda p: raw_file(p, [], [], version=3 << 24),
    "more keys than there are": lambda p: raw_file(p, [], [], num_keys=3),
    "keys without end": lambda p: raw_file(p, [], [], num_keys=2**63),
    "tensors without end": lambda p: raw_file(p, [], [], num_tensors=2**63),
    "key twice": lambda p: raw_file(p, [number("a", 1), number("a", 1)], []),
    "key that is not UTF-8": lambda p: raw_file(
        p, [string(b"\xff") + struct.pack("<II", 4, 1)], []
    ),
    "string longer than the file": lambda p: raw_file(p, [struct.pack("<Q", 2**64 - 1)], []),
    "unknown value type": lambda p: raw_file(p, [string("a") + struct.pack("<I", 13)], []),
    "array longer than the file": lambda p: raw_file(p, [array("a", 4, 2**24)], []),
    "array without end": lambda p: raw_file(p, [array("a", 0, 2**62)], []),
    "array of unknown type": lambda p: raw_file(p, [array("a", 99, 1)], []),
    "strings that end early": lambda p: raw_file(p, [array("a", 8, 9, string("x"))], []),
    "strings that are not UTF-8": lambda p: raw_file(
        p, [array("a", 8, 2, string("x") + string(b"\xff"))], []
    ),
    "deep nesting": lambda p: raw_file(p, [array("a", 9, 1, struct.pack("<IQ", 9, 1) * 1000)], []),
    "alignment 0": lambda p: raw_file(p, [number("general.alignment", 0)], []),
    "alignment 24": lambda p: raw_file(p, [number("general.alignment", 24)], []),
    "alignment as text": lambda p: raw_file(
        p, [string("general.alignment") + struct.pack("<I", 8) + string("32")], []
    ),
    "tensor twice": lambda p: raw_file(p, [], [info("t", [8]), info("t", [8])], bytes(64)),
    "no dimensions": lambda p: raw_file(p, [], [info("t", [])], bytes(64)),
    "five dimensions": lambda p: raw_file(p, [], [info("t", [1] * 5)], bytes(64)),
    "dimension 0": lambda p: raw_file(p, [], [info("t", [0, 4])], bytes(64)),
    "shape larger than the file": lambda p: raw_file(p, [], [info("t", [2**40])], bytes(64)),
    "offset past the end": lambda p: raw_file(p, [], [info("t", [8], offset=64)], bytes(64)),
    "offset near 2**64": lambda p: raw_file(p, [], [info("t", [8], offset=2**64 - 32)], bytes(64)),
    "offset unaligned": lambda p: raw_file(p, [], [info("t", [2], offset=4)], bytes(64)),
    "overlap": lambda p: raw_file(p, [], [info("t", [16]), info("u", [8], offset=32)], bytes(96)),
    "unknown format": lambda p: raw_file(p, [], [info("t", [8], kind=99)], bytes(64)),
    "rows that are no whole blocks": lambda p: raw_file(
        p, [], [info("t", [33, 32], kind=2)], bytes(6400)
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_headers_are_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(CheckpointError, match=r"bad\.gguf is not a valid GGUF file"):
        read_header(BAD[case](tmp_path / "bad.gguf"))


@pytest.mark.parametrize("dims", [[2**32, 2**32], [2**63 + 4, 2]], ids=["to 0", "to 8"])
def test_a_shape_that_overflows_is_refused_for_that(tmp_path: Path, dims: list[int]) -> None:
    with pytest.raises(CheckpointError, match="must fit in 63 bits"):
        read_header(raw_file(tmp_path / "bad.gguf", [], [info("t", dims)], bytes(64)))


@pytest.mark.parametrize("raw", [b"", b"GG", b"GGML1234567890123456789012345"])
def test_other_files_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_gguf(tmp_path / "other.gguf")


def small_file(tmp_path: Path) -> bytes:
    more = {
        "tokenizer.ggml.tokens": ["a", "bc", "def"],
        "tokenizer.ggml.scores": [0.5, 1.5],
        "general.name": "small",
    }
    tensors = {
        "blk.0.attn_q.weight": torch.zeros(64, 32),
        "blk.0.ffn_up.weight": torch.ones(48, 32),
    }
    tensors["rope_freqs.weight"] = torch.ones(8)
    return llama_with(tmp_path, more, tensors).read_bytes()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = small_file(tmp_path)
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1500, 11), len(whole) // 2, len(whole) - 100]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_gguf(cut)


def test_random_damage_ends_in_an_error_or_in_tensors(tmp_path: Path) -> None:
    whole = small_file(tmp_path)
    header = whole.index(b"rope_freqs.weight") + 60
    rng = random.Random(0)
    refused = 0
    for _ in range(700):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(header)] = rng.choice([0, 1, 255, rng.randrange(256)])
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            for tensor in open_gguf(tmp_path / "damaged.gguf").tensors.values():
                assert tensor.read().shape == tensor.shape
        except OctavoError:
            refused += 1
    assert refused > 300
