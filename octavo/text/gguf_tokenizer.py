"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file.

GGUF files have two kinds of vocabulary:

    "gpt2"   Byte-level BPE. Tokens are spelled in the byte alphabet, and merges are listed.
             `tokenizer.ggml.pre` names the rule that splits text into words before any merge.
    "llama"  SentencePiece BPE. A space is spelled as the meta symbol, and unknown characters fall
             back to bytes. Most files do not list merges: they follow from the vocabulary and its
             scores.

The key names are those of llama.cpp. This module depends on no files or models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from octavo.errors import ModelError

META_SYMBOL = "\u2581"  # how SentencePiece spells a space
# tokenizer.ggml.token_type
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

# Rules that split text into words, by family of vocabularies. The rule of GPT-2 is built into
# `tokenizers`.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*@"
)
_OTHER_PATTERN = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORD_PATTERN.replace("@", "") + r"|\p{N}" + _OTHER_PATTERN
GPT4O = (
    _WORD_PATTERN.replace("@", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _OTHER_PATTERN
)


class PreTokenizer(NamedTuple):
    """The steps before BPE that a value of `tokenizer.ggml.pre` names."""

    split_pattern: str | None = None  # None means the rule of GPT-2
    splits_digits: bool = False  # every digit is a word of its own
    normalizes_nfc: bool = False
    # A word in the vocabulary becomes one token, even if the merges do not produce it.
    whole_words: bool = False
    add_bos: bool = False  # used if the file does not set add_bos_token


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(splits_digits=True)
_LLAMA3 = PreTokenizer(LLAMA3, whole_words=True, add_bos=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS),
    "command-r": PreTokenizer(splits_digits=True, normalizes_nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(LLAMA3)),
    "qwen2": PreTokenizer(QWEN2, normalizes_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), PreTokenizer(QWEN2)),
    "tekken": PreTokenizer(TEKKEN, whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(GPT4O)),
}


def from_gguf(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, str], frozenset[int]]:
    """Return the tokenizer, its named special tokens and the ids that end a turn or a text.

    The special tokens have the names of transformers ("bos_token": "<s>").
    """
    tokens: list[str] = _metadata_list(metadata, "tokens", str) or []
    if not tokens:
        raise ModelError(
            "the GGUF file holds no vocabulary (tokenizer.ggml.tokens): use a file made with its "
            "tokenizer"
        )
    token_types: list[int] = _metadata_list(metadata, "token_type", int) or [NORMAL] * len(tokens)
    if len(token_types) != len(tokens):
        raise ModelError(
            f"the GGUF file is damaged: {len(tokens)} tokens but {len(token_types)} token types"
        )
    backend, add_bos = _backend(metadata, tokens, token_types)
    named_specials = {
        "bos_token": _role_token(metadata, tokens, "bos"),
        "eos_token": _role_token(metadata, tokens, "eos"),
        "unk_token": _role_token(metadata, tokens, "unknown"),
        "pad_token": _role_token(metadata, tokens, "padding"),
    }
    specials = {name: token for name, token in named_specials.items() if token is not None}
    role_tokens = [_role_token(metadata, tokens, role) for role in ("eos", "eot", "eom")]
    end_tokens = [token for token in role_tokens if token is not None]
    end_ids = frozenset(tokens.index(token) for token in end_tokens)
    _add_tokens(backend, tokens, token_types, [*specials.values(), *end_tokens])
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    set_bos_eos(
        backend,
        bos_token=specials.get("bos_token") if add_bos else None,
        eos_token=specials.get("eos_token") if add_eos else None,
    )
    return backend, specials, end_ids


def _backend(
    metadata: dict[str, Any], tokens: list[str], token_types: list[int]
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer without special tokens, and whether it adds BOS by default."""
    vocabulary_kind = metadata.get("tokenizer.ggml.model")
    if vocabulary_kind == "llama":
        return _sentencepiece(metadata, tokens, token_types), True
    if vocabulary_kind != "gpt2":
        raise ModelError(
            f'unsupported tokenizer.ggml.model {vocabulary_kind!r}: "gpt2" and "llama" are '
            "supported; use the safetensors files of the model"
        )
    pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    merges: list[str] | None = _metadata_list(metadata, "merges", str)
    if merges is None:
        raise ModelError(
            "the GGUF file's byte-level vocabulary has no merges (tokenizer.ggml.merges): "
            "convert it again"
        )
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    return byte_level_bpe(vocab, merges, pre_tokenizer), pre_tokenizer.add_bos


def _add_tokens(
    backend: Tokenizer, tokens: list[str], token_types: list[int], named_tokens: list[str]
) -> None:
    """Add user-defined tokens and the special tokens, which are control tokens and named ones."""
    typed_tokens = list(zip(tokens, token_types, strict=True))
    control_tokens = [token for token, token_type in typed_tokens if token_type == CONTROL]
    special_tokens = dict.fromkeys([*control_tokens, *named_tokens])  # in order, without duplicates
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special_tokens]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, token_type in typed_tokens
            if token_type == USER_DEFINED
            and token not in special_tokens
            and backend.token_to_id(token) is not None
        ]
    )


def chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. The one for ordinary chats is named "default"."""
    key = "tokenizer.chat_template"
    return {
        name[len(key) + 1 :] or "default": template
        for name, template in metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(template, str)
    }


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which Octavo and transformers read."""
    backend, named_specials, _ = from_gguf(metadata)
    backend.save(str(directory / "tokenizer.json"))
    templates = chat_templates(metadata)
    config: dict[str, Any] = {
        **named_specials,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    config_text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(config_text, encoding="utf-8")


def _metadata_list(metadata: dict[str, Any], field: str, element_type: type) -> list[Any] | None:
    """Return a list of `tokenizer.ggml` whose elements have one type, or None if it is absent."""
    values = metadata.get(f"tokenizer.ggml.{field}")
    if values is None:
        return None
    if not isinstance(values, list) or not set(map(type, values)) <= {element_type}:
        raise ModelError(
            f"the GGUF file is damaged: tokenizer.ggml.{field} must be a list of values of type "
            f"{element_type.__name__}"
        )
    return values


def _token_id(metadata: dict[str, Any], role: str, vocab_size: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ModelError(
            f"the GGUF file is damaged: {role}_token_id is {token_id!r}, but the vocabulary has "
            f"{vocab_size} tokens"
        )
    return token_id


def _role_token(metadata: dict[str, Any], tokens: list[str], role: str) -> str | None:
    """Return the token that the file names for a role, such as "bos"."""
    token_id = _token_id(metadata, role, len(tokens))
    return None if token_id is None else tokens[token_id]


def _pre_tokenizer(pre_tokenizer_name: Any) -> PreTokenizer:
    if not isinstance(pre_tokenizer_name, str) or pre_tokenizer_name not in PRE_TOKENIZERS:
        raise ModelError(
            f"unknown tokenizer.ggml.pre {pre_tokenizer_name!r} in the GGUF file: text would be "
            "split into other words than in training. Known values: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the model's safetensors with its "
            "tokenizer.json instead"
        )
    return PRE_TOKENIZERS[pre_tokenizer_name]


def _merge_pairs(merges: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def byte_level_bpe(
    vocab: dict[str, int],
    merges: Iterable[str],
    pre_tokenizer: PreTokenizer,
    prefix_space: bool = False,
) -> Tokenizer:
    """Build a byte-level BPE tokenizer. A merge is spelled "left right"."""
    merge_pairs = _merge_pairs(merges)
    try:
        backend = Tokenizer(models.BPE(vocab, merge_pairs, ignore_merges=pre_tokenizer.whole_words))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"the tokenizer's merges do not fit its vocabulary: {error}") from error
    if pre_tokenizer.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    pattern = pre_tokenizer.split_pattern
    steps: list[Any] = []
    if pre_tokenizer.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], token_types: list[int]
) -> Tokenizer:
    # Some files spell tokens that consist of spaces with real spaces.
    tokens = [
        META_SYMBOL * len(token) if token and not token.strip(" ") else token for token in tokens
    ]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    listed_merges = _metadata_list(metadata, "merges", str)
    if listed_merges is not None:
        merge_pairs = _merge_pairs(listed_merges)
    else:
        # In Gemma files the ids follow the order in which merges were learned. The scores do not.
        ordered_by_id = str(metadata.get("general.architecture", "")).startswith("gemma")
        scores = None if ordered_by_id else _metadata_list(metadata, "scores", float)
        if scores is not None and len(scores) != len(tokens):
            raise ModelError(
                f"the GGUF file is damaged: {len(tokens)} tokens but {len(scores)} scores"
            )
        if not scores:
            scores = [-float(token_id) for token_id in range(len(tokens))]
        merge_pairs = derive_merges(tokens, token_types, scores)
    unknown_id = _token_id(metadata, "unknown", len(tokens))
    try:
        model = models.BPE(
            vocab,
            merge_pairs,
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:
        raise ModelError(f"the GGUF file's merges do not fit its vocabulary: {error}") from error
    backend = Tokenizer(model)
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        META_SYMBOL, prepend_scheme="first" if adds_space else "never", split=False
    )
    decoder_steps: list[Any] = [
        decoders.Replace(META_SYMBOL, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if adds_space:
        decoder_steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoder_steps)
    return backend


def derive_merges(
    tokens: list[str], token_types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes another token, the best score first.

    SentencePiece does the same without a list of merges. Only text tokens take part: characters
    must never merge into a control token or into the name of a byte.
    """
    text_tokens = {
        token_text
        for token_text, token_type in zip(tokens, token_types, strict=True)
        if token_type in (NORMAL, USER_DEFINED)
    }
    ranked_merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in text_tokens:
            for split in range(1, len(token)):
                left = token[:split]
                right = token[split:]
                if left in text_tokens and right in text_tokens:
                    ranked_merges.append((-score, -len(left), -len(right), left, right))
    ranked_merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in ranked_merges]


def set_bos_eos(backend: Tokenizer, bos_token: str | None, eos_token: str | None) -> None:
    """Make the tokenizer put these special tokens, and no others, around every text."""
    special_tokens = {token for token in (bos_token, eos_token) if token is not None}
    before = [] if bos_token is None else [bos_token]
    after = [] if eos_token is None else [eos_token]
    first = [*before, "$A", *after]
    second = [f"{piece}:1" for piece in (*before, "$B", *after)]
    backend.post_processor = processors.TemplateProcessing(
        single=first,
        pair=[*first, *second],
        special_tokens=[(token, backend.token_to_id(token)) for token in sorted(special_tokens)],
    )
