"""The tokenizer of a model, read from a model directory or from the metadata of a GGUF file.

Special tokens such as <|im_start|> are a model's control tokens. `encode` recognises them in a
text, as transformers does, or takes them for characters (`parse_special=False`). `encode_marked` is
for a text in which some special tokens are meant and others are a user's words: a chat message must
never become control tokens. This module depends on no requests or weights.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, processors

from octavo.errors import InvalidRequest, ModelError
from octavo.model_files import check_tokenizer
from octavo.text.detokenize import BYTE_OF_CHARACTER, Detokenizer, TokenBytes
from octavo.text.gguf_tokenizer import (
    PRE_TOKENIZERS,
    byte_level_bpe,
    chat_templates,
    from_gguf,
    set_bos_eos,
)

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
CACHED_WORDS = 1024  # tokenized words that the library keeps
_CHARACTER_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHARACTER.items()}


class _PlainTokenizer(NamedTuple):
    """A tokenizer that recognizes special tokens by random stand-ins instead of their text."""

    backend: tokenizers.Tokenizer
    real_ids: dict[int, int]  # added token in this tokenizer -> id in the model
    stand_ins: dict[str, str]  # special token -> stand-in


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer. Its entries are attributes too, as in transformers."""

    @classmethod
    def from_ids(cls, token_ids: list[Any]) -> Encoding:
        """`token_ids` are those of one text, or one list for each of several texts."""
        is_batch = bool(token_ids) and isinstance(token_ids[0], list)
        attention_mask: list[Any] = [1] * len(token_ids)
        if is_batch:
            attention_mask = [[1] * len(sequence) for sequence in token_ids]
        return cls(input_ids=token_ids, attention_mask=attention_mask)

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


# Options of the tokenizers in transformers, with the values that have no effect. This tokenizer
# accepts only those values.
NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "padding": (False, None, "do_not_pad"),
    "truncation": (False, None, "do_not_truncate"),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_attention_mask": (True, None),
    "return_token_type_ids": (False, None),
}


def _check_neutral(options: dict[str, Any]) -> None:
    """Reject an option of transformers that this tokenizer does not implement."""
    for name, allowed in NEUTRAL_OPTIONS.items():
        if name in options and options[name] not in allowed:
            raise InvalidRequest(
                f"this tokenizer does not support {name}: use transformers.AutoTokenizer", name
            )


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        specials: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        end_ids: frozenset[int] | None = None,
    ):
        """`specials` maps names that chat templates use to tokens ("bos_token": "<s>")."""
        # A tokenizer.json may contain truncation and padding settings of the training run.
        backend.no_truncation()
        backend.no_padding()
        _bound_word_cache(backend)
        self.backend = backend
        # The class in transformers that can load any of these tokenizers.
        self.tokenizer_class = "PreTrainedTokenizerFast"
        self.specials = specials or {}
        self.chat_templates = chat_templates or {}
        self.bos_token = self.specials.get("bos_token")
        self.eos_token = self.specials.get("eos_token")
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        # Each of these ids ends a generation.
        self.end_ids = end_ids or frozenset([] if self.eos_id is None else [self.eos_id])
        added_tokens = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(
            token_id for token_id, token in added_tokens.items() if token.special
        )
        self.vocab_size = max(
            [backend.get_vocab_size(), *(token_id + 1 for token_id in added_tokens)]
        )
        self.bytes_by_id = TokenBytes(backend)
        # Longest first: of several special tokens at one position, the longest one matches.
        special_texts = sorted(
            (added_tokens[token_id].content for token_id in self.special_ids), key=len, reverse=True
        )
        self._special_pattern = "|".join(map(re.escape, special_texts)) or r"(?!)"
        self._special_prefixes = {
            special_text[:prefix_length]
            for special_text in special_texts
            for prefix_length in range(1, len(special_text))
            if not special_text[0].isalnum()
        }
        self._longest_special = len(special_texts[0]) if special_texts else 0
        self._plain_tokenizer = _without_specials(backend)
        self._unknown_ids = _unknown_ids(backend) | {self._special_id("unk_token")}
        self._surrounding_ids = _surrounding_ids(backend, self.special_ids)

    def _special_id(self, special_name: str) -> int | None:
        return (
            self.backend.token_to_id(self.specials[special_name])
            if special_name in self.specials
            else None
        )

    @cached_property
    def longest_token(self) -> int:
        """Return the length of the longest token in characters. The search takes 50 ms."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    # ---- ids to text -----------------------------------------------------------------------------

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, which may be a list, an array or one id."""
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push([ids] if isinstance(ids, int) else ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes_by_id[token_id]

    def token_str(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it, or "" for an id without a token."""
        return self.backend.id_to_token(token_id) or ""

    # ---- text to ids -----------------------------------------------------------------------------

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of a text.

        `add_special_tokens` adds BOS and EOS if the model uses them. With `parse_special`, special
        tokens in the text, such as <|im_start|>, become those tokens. Otherwise they are
        characters.
        """
        token_ids = self._encode_ids(self.backend, text)
        return self._finish_encoding(text, token_ids, add_special_tokens, parse_special)

    def encode_many(self, requests: list[tuple[str, bool, bool]]) -> list[list[int]]:
        """Encode each (text, add_special_tokens, parse_special) in one call of the library."""
        encodings = self.backend.encode_batch_fast(
            [text for text, _, _ in requests], add_special_tokens=False
        )
        return [
            self._finish_encoding(text, encoding.ids, add_special_tokens, parse_special)
            for (text, add_special_tokens, parse_special), encoding in zip(
                requests, encodings, strict=True
            )
        ]

    def _finish_encoding(
        self, text: str, token_ids: list[int], add_special_tokens: bool, parse_special: bool
    ) -> list[int]:
        if not parse_special and not self.special_ids.isdisjoint(token_ids):
            token_ids = self._plain_ids(text)
        return self.with_special_tokens(token_ids) if add_special_tokens else token_ids

    def with_special_tokens(self, token_ids: list[int]) -> list[int]:
        """Return the ids with BOS before and EOS after them, if the model uses these tokens."""
        leading_ids, trailing_ids = self._surrounding_ids
        return [*leading_ids, *token_ids, *trailing_ids]

    def as_prompt(self, token_ids: list[int]) -> list[int]:
        """Return the ids, or BOS if there are none: a prompt must have at least one token."""
        if token_ids:
            return token_ids
        if self.bos_id is None:
            raise InvalidRequest(
                "the prompt is empty, and this model has no BOS token to start from: "
                "send some text",
                "prompt",
            )
        return [self.bos_id]

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Return the ids of a text in which the character `mark` precedes some special tokens.

        A marked special token is encoded as characters. Marks are removed.
        """
        replacements = {mark: "", **self._plain_tokenizer.stand_ins}
        return self._plain_ids(
            re.sub(
                f"{mark}|(?<!{mark})(?:{self._special_pattern})",
                lambda special_match: replacements[special_match[0]],
                text,
            )
        )

    def protect(self, text: str, mark: str) -> str:
        """Put `mark` before every special token in the text.

        The end of the text may be the beginning of a special token that later text completes. The
        mark is put there too.
        """
        starts: set[int] = set()
        if re.search(self._special_pattern, text):
            starts.update(
                special_match.start()
                for special_match in re.finditer(f"(?={self._special_pattern})", text)
            )
        for position in range(max(0, len(text) - self._longest_special + 1), len(text)):
            if text[position:] in self._special_prefixes:
                starts.add(position)
        boundaries = [0, *sorted(starts), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(boundaries)) if starts else text

    def _encode_ids(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Encode a text without special tokens around it.

        The library releases the GIL only in its calls for batches, so a batch of one is encoded.
        """
        try:
            if not isinstance(text, str):
                raise TypeError  # The library would accept a pair of texts.
            encodings = backend.encode_batch_fast([text], add_special_tokens=False)
            token_ids: list[int] = encodings[0].ids
            return token_ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest(
                "the text must be a string of valid Unicode, without lone surrogates", "prompt"
            ) from None

    def _plain_ids(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for token_id in self._encode_ids(self._plain_tokenizer.backend, text):
            if token_id in self._plain_tokenizer.real_ids:
                token_ids.append(self._plain_tokenizer.real_ids[token_id])
            elif token_id in self.special_ids and token_id not in self._unknown_ids:
                # The merges of this vocabulary can produce a special token.
                token_ids += self._spell_bytes(token_id)
            else:
                token_ids.append(token_id)
        return token_ids

    def _spell_bytes(self, token_id: int) -> list[int]:
        """Return the text of a special token as one token for each byte."""
        byte_ids: list[int] = []
        for byte in self.token_str(token_id).encode():
            for spelling in (f"<0x{byte:02X}>", _CHARACTER_OF_BYTE[byte]):
                byte_id = self.backend.token_to_id(spelling)
                if byte_id is not None and self.bytes_by_id[byte_id] == bytes([byte]):
                    byte_ids.append(byte_id)
                    break
        return byte_ids

    # ---- the interface of transformers, for scripts that use LLM.get_tokenizer ----------------

    @property
    def bos_token_id(self) -> int | None:
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_id

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    @property
    def pad_token(self) -> str | None:
        return self.specials.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.specials.get("unk_token")

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self.token_str(token_id) for token_id in self.all_special_ids]

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token by its text, including added tokens."""
        return self.backend.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Return the id of every added token by its text."""
        added_tokens = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in sorted(added_tokens.items())}

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text as they are written in the vocabulary."""
        tokens: list[str] = self.convert_ids_to_tokens(self.encode(text, False))
        return tokens

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """Return the id of a token, or the ids of several.

        A token that is not in the vocabulary gets the id of the unknown token.
        """
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        """Return the text of a token in the vocabulary, or the texts of several."""
        if isinstance(ids, int):
            return self.token_str(ids)
        return [self.token_str(token_id) for token_id in ids]

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(
        self,
        text: str | list[str],
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        **options: Any,
    ) -> Encoding:
        """Return input_ids and attention_mask of one text or several, as lists.

        Padding, truncation and tensors are not supported.
        """
        _check_neutral(options)
        parse_special = not split_special_tokens
        texts = [text] if isinstance(text, str) else text
        token_ids = [
            self.encode(single_text, add_special_tokens, parse_special) for single_text in texts
        ]
        return Encoding.from_ids(token_ids[0] if isinstance(text, str) else token_ids)

    def apply_chat_template(
        self,
        conversation: list[Any],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """Render a conversation, or a list of them, as text, as ids or as an Encoding.

        `options` are continue_final_message and further variables for the template. In ids, a
        control token that a message spells is encoded as characters. In text it looks like a
        control token of the template.
        """
        from octavo.text.chat import encode_chat, select_template

        _check_neutral(options)
        options = {
            option_name: value
            for option_name, value in options.items()
            if option_name not in NEUTRAL_OPTIONS
        }
        template = select_template(self, chat_template, bool(tools))
        options["add_generation_prompt"] = add_generation_prompt
        is_batch = bool(conversation) and isinstance(conversation[0], list)
        rendered: list[Any] = []
        for messages in conversation if is_batch else [conversation]:
            if tokenize:
                rendered.append(encode_chat(self, template, messages, tools=tools, **options))
            else:
                rendered.append(template.render(messages, tools, **options))
        result = rendered if is_batch else rendered[0]
        return Encoding.from_ids(result) if tokenize and return_dict else result

    # ---- constructors ----------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> Tokenizer:
        backend, specials, end_ids = from_gguf(metadata)
        return cls(backend, specials, chat_templates(metadata), end_ids)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face model directory.

        The directory has tokenizer.json, or vocab.json and merges.txt.
        """
        path = Path(path)
        config = _read_json(path / "tokenizer_config.json")
        declared_specials = {**_read_json(path / "special_tokens_map.json"), **config}
        backend = _read_backend(path, config, declared_specials)
        try:
            _add_missing(backend, config, declared_specials)
            specials = {
                special_name: _token_text(declared_specials[special_name])
                for special_name in _SPECIAL_TOKEN_NAMES
                if declared_specials.get(special_name)
            }
            extra_tokens = declared_specials.get("extra_special_tokens")
            if isinstance(extra_tokens, dict):
                for special_name, token in extra_tokens.items():
                    specials[special_name] = _token_text(token)
            templates = directory_templates(path, config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{path / 'tokenizer_config.json'} is not a valid tokenizer configuration: "
                f"{error!r}"
            ) from error
        if isinstance(backend.post_processor, processors.ByteLevel | None):
            # These post-processors do not determine BOS and EOS. All others do, even if they add
            # no token, so they are not changed.
            set_bos_eos(
                backend,
                specials.get("bos_token") if config.get("add_bos_token") else None,
                specials.get("eos_token") if config.get("add_eos_token") else None,
            )
        tokenizer = cls(backend, specials, templates)
        if config.get("tokenizer_class"):
            tokenizer.tokenizer_class = str(config["tokenizer_class"])
        return tokenizer


def _read_backend(
    path: Path, config: dict[str, Any], specials: dict[str, Any]
) -> tokenizers.Tokenizer:
    """Read the tokenizer of a model directory.

    `specials` are the special tokens by name. If the files name no eos_token, the special token of
    GPT-2 is added to `specials`.
    """
    if (path / "tokenizer.json").is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    check_tokenizer(path)
    lines = (path / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    is_qwen = str(config.get("tokenizer_class", "")).startswith("Qwen")
    pre_tokenizer = PRE_TOKENIZERS["qwen2" if is_qwen else "gpt-2"]
    backend = byte_level_bpe(
        _read_json(path / "vocab.json"),
        merges,
        pre_tokenizer,
        bool(config.get("add_prefix_space", False)),
    )
    if "eos_token" not in specials and backend.token_to_id("<|endoftext|>") is not None:
        specials.update(
            bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
        )
    return backend


def _bound_word_cache(backend: tokenizers.Tokenizer) -> None:
    """Make the library's cache of tokenized words smaller.

    The library keeps the first words that it sees and never drops one. By default it keeps 10,000,
    which take 6 MiB if they are numbers and 65 MiB if they have 200 letters. With CACHED_WORDS
    words the memory of a server stops growing soon after its start, and encoding takes up to a
    tenth longer.
    """
    resize_cache = getattr(backend.model, "_resize_cache", None)  # BPE and Unigram have a cache
    if resize_cache is not None:
        resize_cache(CACHED_WORDS)


def _surrounding_ids(
    backend: tokenizers.Tokenizer, special_ids: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor puts before and after a text."""
    special_text = backend.id_to_token(min(special_ids)) if special_ids else None
    if special_text is None:
        return [], []
    encoding = backend.encode(special_text, add_special_tokens=True)
    text_positions = [
        position for position, is_added in enumerate(encoding.special_tokens_mask) if not is_added
    ]
    return encoding.ids[: text_positions[0]], encoding.ids[text_positions[-1] + 1 :]


def _unknown_ids(backend: tokenizers.Tokenizer) -> set[int | None]:
    """Return the ids for a character that is not in the vocabulary.

    This is the unknown token, which not all tokenizers name.
    """
    try:
        return {token.id for token in backend.model.tokenize("\U0010fffe")}
    except Exception:  # There is no unknown token. The library raises nothing more specific.
        return set()


def _without_specials(backend: tokenizers.Tokenizer) -> _PlainTokenizer:
    # Both backends share the vocabulary. Only the added tokens differ.
    plain_backend = tokenizers.Tokenizer(backend.model)
    for component in ("normalizer", "pre_tokenizer"):
        if (value := getattr(backend, component)) is not None:
            setattr(plain_backend, component, value)
    random_text = secrets.token_hex(8)
    added_tokens = sorted(backend.get_added_tokens_decoder().items())
    stand_ins = {
        token.content: f"\ufdd0{random_text}{token_id}\ufdd1"
        for token_id, token in added_tokens
        if token.special
    }
    tokens_by_name = {
        stand_ins.get(token.content, token.content): (token_id, token)
        for token_id, token in added_tokens
    }
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    plain_backend.add_tokens(
        [
            AddedToken(plain_name, **{flag: getattr(added_token, flag) for flag in flags})
            for plain_name, (_, added_token) in tokens_by_name.items()
        ]
    )
    real_ids = {
        plain_backend.token_to_id(plain_name): token_id
        for plain_name, (token_id, _) in tokens_by_name.items()
    }
    return _PlainTokenizer(
        plain_backend,
        {plain_id: real_id for plain_id, real_id in real_ids.items() if plain_id is not None},
        stand_ins,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. A missing file is an empty object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _token_text(token: Any) -> str:
    """Return the text of a token that is written as a string or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _add_missing(
    backend: tokenizers.Tokenizer, config: dict[str, Any], specials: dict[str, Any]
) -> None:
    """Add tokens that only the files beside tokenizer.json declare, or declare as special."""
    known_tokens = {
        token.content: token.special for token in backend.get_added_tokens_decoder().values()
    }
    for _, token in sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
    ):
        is_special = bool(token.get("special"))
        if known_tokens.get(token["content"]) != is_special:
            flags = {
                flag: bool(token.get(flag))
                for flag in ("single_word", "lstrip", "rstrip", "normalized")
            }
            add = backend.add_special_tokens if is_special else backend.add_tokens
            add([AddedToken(token["content"], special=is_special, **flags)])
            known_tokens[token["content"]] = is_special
    extra_tokens = (
        specials.get("additional_special_tokens") or specials.get("extra_special_tokens") or []
    )
    if isinstance(extra_tokens, dict):
        extra_tokens = extra_tokens.values()
    declared_tokens = [
        specials[special_name]
        for special_name in _SPECIAL_TOKEN_NAMES
        if specials.get(special_name)
    ]
    declared_tokens += extra_tokens
    missing = [
        token_text
        for token_text in dict.fromkeys(map(_token_text, declared_tokens))
        if not known_tokens.get(token_text)
    ]
    backend.add_special_tokens(
        [AddedToken(token_text, normalized=False, special=True) for token_text in missing]
    )


def read_directory_templates(path: Path) -> dict[str, str]:
    """Return the chat templates in a directory by name, without its tokenizer."""
    config_file = path / "tokenizer_config.json"
    try:
        return directory_templates(path, _read_json(config_file))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{config_file} is not a valid tokenizer configuration: {error!r}"
        ) from error


def directory_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name.

    "default" is the template for ordinary chats. A model may have another one for chats with tools,
    which is named "tool_use".
    """
    declared = config.get("chat_template") or []
    if isinstance(declared, str):
        templates = {"default": declared}
    else:
        templates = {entry["name"]: entry["template"] for entry in declared}
    default_file = path / "chat_template.jinja"
    if default_file.is_file():
        templates["default"] = default_file.read_text(encoding="utf-8")
    for template_file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        if template_file.is_file():
            templates[template_file.stem] = template_file.read_text(encoding="utf-8")
    return templates
