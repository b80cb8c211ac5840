"""A `tokenizers.Tokenizer` out of a GGUF file's metadata. Knows llama.cpp's key names; knows nothing of files or models.

Two kinds of vocabulary are in use:

    "gpt2"   byte-level BPE: tokens are spelled in the byte alphabet, merges are listed, and `tokenizer.ggml.pre` names
             the rule that cuts text into words before any merge
    "llama"  SentencePiece BPE: a space is spelled as the meta symbol, unknown characters fall back to bytes, and merges
             are mostly not listed: they follow from the vocabulary and its scores
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

META = "\u2581"  # how SentencePiece spells a space
# tokenizer.ggml.token_type
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

# How text is cut into words, by the vocabulary's family. None: GPT-2's rule, which `tokenizers` has built in.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*@"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORDS.replace("@", "") + r"|\p{N}" + _REST
GPT4O = _WORDS.replace("@", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST


class Pre(NamedTuple):
    """What `tokenizer.ggml.pre` stands for."""

    split: str | None = None  # None: GPT-2's rule
    digits: bool = False  # every digit is a word of its own
    nfc: bool = False
    # a word that is in the vocabulary is taken as it is, whatever the merges say
    whole_words: bool = False
    add_bos: bool = False  # unless the file says


_GPT2 = Pre()
_DIGITS = Pre(digits=True)
_LLAMA3 = Pre(LLAMA3, whole_words=True, add_bos=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS),
    "command-r": Pre(digits=True, nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Pre(LLAMA3)),
    "qwen2": Pre(QWEN2, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), Pre(QWEN2)),
    "tekken": Pre(TEKKEN, whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Pre(GPT4O)),
}


def from_gguf(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, str], frozenset[int]]:
    """The tokenizer, its named special tokens ("bos_token": "<s>", ...) and the ids that end a turn or a text."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = _listed(metadata, "tokens", str) or []
    if not tokens:
        raise ModelError(
            "the GGUF file holds no vocabulary (tokenizer.ggml.tokens): use a file made with its tokenizer"
        )
    types: list[int] = _listed(metadata, "token_type", int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(
            f"the GGUF file is damaged: {len(tokens)} tokens but {len(types)} token types"
        )
    if kind == "gpt2":
        pre = _pre(metadata.get("tokenizer.ggml.pre", "default"))
        merges: list[str] | None = _listed(metadata, "merges", str)
        if merges is None:
            raise ModelError(
                "the GGUF file's byte-level vocabulary has no merges (tokenizer.ggml.merges): convert it again"
            )
        backend = byte_level(dict(zip(tokens, range(len(tokens)), strict=True)), merges, pre)
        add_bos = pre.add_bos
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, types)
        add_bos = True
    else:
        raise ModelError(
            f'unsupported tokenizer.ggml.model {kind!r}: "gpt2" and "llama" are supported; use the safetensors'
        )

    def token(key: str) -> str | None:
        index = _token_id(metadata, key, len(tokens))
        return None if index is None else tokens[index]

    named = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
    }
    names = {name: text for name, text in named.items() if text is not None}
    ends = [text for text in (token("eos"), token("eot"), token("eom")) if text is not None]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    special = dict.fromkeys([*control, *names.values(), *ends])  # in order, each once
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    backend.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED and t not in special and backend.token_to_id(t) is not None
        ]
    )
    set_bos_eos(
        backend,
        names.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        names.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return backend, names, frozenset(tokens.index(t) for t in ends)


def chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """The templates of a GGUF file by name; the one for ordinary chats is "default"."""
    key = "tokenizer.chat_template"
    return {
        name[len(key) + 1 :] or "default": template
        for name, template in metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(template, str)
    }


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Write a GGUF file's tokenizer as tokenizer.json and tokenizer_config.json, which Octavo and transformers read."""
    backend, names, _ = from_gguf(metadata)
    backend.save(str(directory / "tokenizer.json"))
    templates = chat_templates(metadata)
    config: dict[str, Any] = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _listed(metadata: dict[str, Any], key: str, kind: type) -> list[Any] | None:
    """A list of the tokenizer's, all of one type; None where the file has none."""
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if not isinstance(values, list) or not set(map(type, values)) <= {kind}:
        raise ModelError(
            f"the GGUF file is damaged: tokenizer.ggml.{key} must be a list of values of type {kind.__name__}"
        )
    return values


def _token_id(metadata: dict[str, Any], key: str, count: int) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < count:
        raise ModelError(
            f"the GGUF file is damaged: {key}_token_id is {index!r}, the vocabulary has {count} tokens"
        )
    return index


def _pre(name: Any) -> Pre:
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"unknown tokenizer.ggml.pre {name!r} in the GGUF file: text would be cut into other words than the model learned. "
            f"Known: {', '.join(sorted(PRE_TOKENIZERS))}. Use the model's safetensors with its tokenizer.json instead"
        )
    return PRE_TOKENIZERS[name]


def byte_level(
    vocab: dict[str, int], merges: Iterable[str], pre: Pre, prefix_space: bool = False
) -> Tokenizer:
    """Byte-level BPE from a vocabulary and merges spelled "left right"."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.whole_words))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"the tokenizer's merges do not fit its vocabulary: {error}") from error
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pre.split is None)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    # Some files spell tokens made of spaces alone with real spaces.
    tokens = [META * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    listed = _listed(metadata, "merges", str)
    if listed is not None:
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in listed)]
    else:
        # Gemma's scores do not follow the order its merges were learned in; its ids do.
        by_id = str(metadata.get("general.architecture", "")).startswith("gemma")
        scores = None if by_id else _listed(metadata, "scores", float)
        if scores is not None and len(scores) != len(tokens):
            raise ModelError(
                f"the GGUF file is damaged: {len(tokens)} tokens but {len(scores)} scores"
            )
        pairs = derive_merges(tokens, types, scores or [-float(i) for i in range(len(tokens))])
    unknown = _token_id(metadata, "unknown", len(tokens))
    try:
        model = models.BPE(
            vocab,
            pairs,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:
        raise ModelError(f"the GGUF file's merges do not fit its vocabulary: {error}") from error
    backend = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        META, prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[Any] = [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def derive_merges(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: what SentencePiece does without a list of merges.

    Only text takes part: plain characters must never merge into a control token or into the name of a byte.
    """
    text = {t for t, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in text:
            for i in range(1, len(token)):
                left = token[:i]
                right = token[i:]
                if left in text and right in text:
                    found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def set_bos_eos(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make the tokenizer put these special tokens, and no others, around every text."""
    around = {text: backend.token_to_id(text) for text in (bos, eos) if text is not None}
    single = [bos, "$A", eos]
    pair = [bos, "$A", eos, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in single if part is not None],
        pair=[part for part in pair if part is not None],
        special_tokens=list(around.items()),
    )
