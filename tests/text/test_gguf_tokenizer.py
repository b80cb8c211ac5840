"""A GGUF file's vocabulary becomes the tokenizer that the model was trained with."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.errors import ModelError
from octavo.model.embedded import embedded_path
from octavo.text import Tokenizer
from octavo.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    META_SYMBOL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    USER_DEFINED,
    derive_merges,
    write_tokenizer,
)
from tests.text.builders import TEXTS, byte_level, sentencepiece


def auto_tokenizer(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_state(tokenizer: Any) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())["model"]


def sentencepiece_metadata(architecture: str = "llama") -> dict[str, Any]:
    """As converters write it: merged pieces in the order they were learned, then single characters,
    no merges."""
    state = model_state(sentencepiece())
    names = [token for token in state["vocab"] if token.startswith("<")][: 3 + 256]
    merged = list(dict.fromkeys("".join(merge) for merge in state["merges"]))
    single = [token for token in state["vocab"] if len(token) == 1]
    tokens = [*names, *merged, *single]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(merged) + len(single))
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }


def byte_level_metadata(pre: str | None, **more: Any) -> dict[str, Any]:
    state = model_state(byte_level())
    tokens = list(state["vocab"])
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


# ---- the embedded model --------------------------------------------------------------------------


def test_the_embedded_tokenizer_knows_its_special_tokens(embedded: Tokenizer) -> None:
    assert embedded.vocab_size == 49152
    assert (embedded.bos_token, embedded.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (embedded.bos_id, embedded.eos_id, embedded.end_ids) == (1, 2, frozenset([2]))
    assert embedded.special_ids == frozenset(range(17))
    assert embedded.chat_template is not None and "<|im_start|>" in embedded.chat_template


def test_the_embedded_tokenizer_agrees_with_transformers(embedded: Tokenizer) -> None:
    theirs = auto_tokenizer(embedded_path())
    # Their conversion leaves out that this vocabulary's digits stand alone, which matters for white
    # space before numbers.
    assert embedded.encode("a\n\n 1") != theirs("a\n\n 1").input_ids
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in TEXTS:
        assert embedded.encode(text) == theirs(text).input_ids
        assert embedded.decode(embedded.encode(text)) == text


# ---- byte-level vocabularies ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "pre", ["default", "gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", None]
)
def test_byte_level_files_agree_with_transformers(pre: str | None, tmp_path: Path) -> None:
    metadata = byte_level_metadata(pre, add_bos_token=False)
    ours = Tokenizer.from_gguf(metadata)
    theirs = auto_tokenizer(write_gguf(tmp_path / "model.gguf", metadata)).backend_tokenizer
    if pre == "qwen2":
        # as in the models' own tokenizer.json; their conversion leaves it out
        theirs.normalizer = ours.backend.normalizer
    if pre in ("llama-bpe", "tekken"):
        model = theirs.model
        model.ignore_merges = True  # likewise
        theirs.model = model
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == (
            text if pre != "qwen2" else ours.backend.normalizer.normalize_str(text)
        )


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("qwen2", False)])
def test_a_word_of_the_vocabulary_is_one_token_where_its_family_has_it_so(
    pre: str, whole: bool
) -> None:
    metadata = byte_level_metadata(pre, add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("zyzzyva")  # no merges lead to it
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    t = Tokenizer.from_gguf(metadata)
    assert (t.encode("zyzzyva") == [t.vocab_size - 1]) == whole


def test_every_known_pre_tokenizer_can_be_built_and_keeps_the_text() -> None:
    text = "It's 12345 THINGS,  naïve\r\n\n x_1 (ok)!"
    for pre in PRE_TOKENIZERS:
        t = Tokenizer.from_gguf(byte_level_metadata(pre, add_bos_token=False))
        assert t.decode(t.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [("smollm", ["   ", "1", "2"]), ("gpt-2", ["  ", " 12"]), ("llama-bpe", ["  ", " ", "12"])],
)
def test_white_space_and_digits_are_cut_as_the_pre_tokenizer_says(
    pre: str, words: list[str]
) -> None:
    t = Tokenizer.from_gguf(byte_level_metadata(pre))
    assert [
        word.replace("Ġ", " ") for word, _ in t.backend.pre_tokenizer.pre_tokenize_str("   12")
    ] == words


@pytest.mark.parametrize(
    ("pre", "says", "around"),
    [
        ("gpt-2", {}, ([], [])),
        ("llama-bpe", {}, ([1], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
    ],
)
def test_bos_and_eos_are_added_as_the_file_or_its_family_says(
    pre: str, says: dict, around: tuple
) -> None:
    t = Tokenizer.from_gguf(byte_level_metadata(pre, **says))
    before, after = around
    assert t.encode("hi") == [*before, *t.encode("hi", add_special_tokens=False), *after]


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match=r"unknown tokenizer.ggml.pre 'martian'.*Known values: .*llama-bpe.*safetensors",
    ):
        Tokenizer.from_gguf(byte_level_metadata("martian"))


# ---- SentencePiece vocabularies ------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_files_agree_with_transformers(architecture: str, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(architecture)
    # as its converter writes it: runs of spaces are user-defined tokens made of real spaces
    if architecture == "gemma3":
        metadata["tokenizer.ggml.add_space_prefix"] = False
        metadata["tokenizer.ggml.tokens"][259:259] = ["  ", "   ", "\n\n"]
        metadata["tokenizer.ggml.token_type"][259:259] = [USER_DEFINED] * 3
        metadata["tokenizer.ggml.scores"] = [0.0] * len(metadata["tokenizer.ggml.tokens"])
    ours = Tokenizer.from_gguf(metadata)
    theirs = auto_tokenizer(write_gguf(tmp_path / "model.gguf", metadata)).backend_tokenizer
    for text in TEXTS:
        # theirs has this token of Gemma's even where the file does not
        text = text.replace("<pad>", "")
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, skip_special_tokens=False
        )
    assert ours.encode("hi")[0] == ours.bos_id


def reference_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's own definition: again and again, join the neighbours that make the best
    piece, the leftmost first."""
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list((" " + text.removeprefix(" ") if text else "").replace(" ", META_SYMBOL))
    while True:
        pairs = [
            (-scores[vocab[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocab
        ]
        if not pairs:
            break
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids: list[int] = []
    for part in parts:
        ids += (
            [vocab[part]] if part in vocab else [vocab[f"<0x{byte:02X}>"] for byte in part.encode()]
        )
    return ids


SENTENCEPIECE = sentencepiece_metadata()


@given(st.text(alphabet="the quickrown f.\n", max_size=40) | st.text(max_size=20))
def test_merges_derived_from_scores_do_what_sentencepiece_does(text: str) -> None:
    t = Tokenizer.from_gguf(SENTENCEPIECE)
    assert t.encode(text, add_special_tokens=False) == reference_sentencepiece(text, SENTENCEPIECE)


def test_plain_characters_never_merge_into_a_control_token() -> None:
    tokens = ["<s>", "<0x41>", "<", "s>", "<0", "x41>", "ab", "a", "b"]
    types = [CONTROL, BYTE, *[NORMAL] * 7]
    assert derive_merges(tokens, types, [0.0] * 9) == [("a", "b")]


def test_the_end_of_a_turn_ends_a_generation_too() -> None:
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.eot_token_id": 300}
    t = Tokenizer.from_gguf(metadata)
    assert t.end_ids == frozenset([2, 300]) and 300 in t.special_ids


# ---- as files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama-bpe", "smollm", "qwen2", "sentencepiece"])
def test_a_written_tokenizer_is_the_same_again(kind: str, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() if kind == "sentencepiece" else byte_level_metadata(kind)
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    write_tokenizer(metadata, tmp_path)
    before, after = Tokenizer.from_gguf(metadata), Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        for allow in (True, False):
            ids = before.encode(text, parse_special=allow)
            assert after.encode(text, parse_special=allow) == ids
            assert after.decode(ids) == before.decode(ids)
    assert (after.bos_id, after.eos_id) == (before.bos_id, before.eos_id)
    assert after.special_ids == before.special_ids
    assert after.chat_templates == before.chat_templates


def test_transformers_reads_a_written_tokenizer(tmp_path: Path) -> None:
    metadata = {**byte_level_metadata("llama-bpe"), "tokenizer.chat_template": "{{ messages }}"}
    write_tokenizer(metadata, tmp_path)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        assert theirs(text).input_ids == ours.encode(text, parse_special=True)
    assert theirs.chat_template == ours.chat_template


# ---- what cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "unsupported tokenizer.ggml.model 'bert'"),
        ({"tokenizer.ggml.tokens": None}, "holds no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "damaged: .* tokens but 1 token types"),
        ({"tokenizer.ggml.scores": [1.0]}, "damaged: .* tokens but 1 scores"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
    ],
)
def test_damaged_metadata_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf({**sentencepiece_metadata(), **change})
