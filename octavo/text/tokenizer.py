"""Text to tokens and back, from a model directory or a GGUF file's metadata.

Special tokens such as <|im_start|> are a model's control tokens. `encode` recognises them in a text, as transformers does, or
takes them for characters (`parse_special=False`). `encode_marked` is for a text in which some special tokens are meant and
others are a user's words: a chat message must never become control tokens.
Knows nothing of requests or weights.
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
from octavo.text.detokenize import BYTE_OF, Detokenizer, Pieces
from octavo.text.gguf_tokenizer import (
    PRE_TOKENIZERS,
    byte_level,
    chat_templates,
    from_gguf,
    set_bos_eos,
)

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}


class _Plain(NamedTuple):
    """A tokenizer that knows no special token by its text, only by a stand-in that nobody can guess."""

    backend: tokenizers.Tokenizer
    ids: dict[int, int]  # its ids of added tokens -> the real ones
    stand_in: dict[str, str]  # special token -> stand-in


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer. Its entries are attributes too, as in transformers."""

    @classmethod
    def of(cls, ids: list[Any]) -> Encoding:
        """`ids`: of one text, or a list for each of several."""
        several = bool(ids) and isinstance(ids[0], list)
        mask = [[1] * len(one) for one in ids] if several else [1] * len(ids)
        return cls(input_ids=ids, attention_mask=mask)

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


# Options of transformers' tokenizers that this one has only at the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "padding": (False, None, "do_not_pad"),
    "truncation": (False, None, "do_not_truncate"),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_attention_mask": (True, None),
    "return_token_type_ids": (False, None),
}


def _check_neutral(options: dict[str, Any]) -> None:
    """Refuse an option of transformers that would have no effect here."""
    for name, allowed in NEUTRAL.items():
        if name in options and options[name] not in allowed:
            raise InvalidRequest(
                f"{name} is not offered by this tokenizer: use transformers.AutoTokenizer", name
            )


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        specials: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        end_ids: frozenset[int] | None = None,
    ):
        """`specials` names special tokens ("bos_token": "<s>"), as chat templates know them."""
        backend.no_truncation()  # a tokenizer.json may carry settings of its author's training run
        backend.no_padding()
        self.backend = backend
        self.tokenizer_class = "PreTrainedTokenizerFast"  # of transformers: can load any of these
        self.specials = specials or {}
        self.chat_templates = chat_templates or {}
        self.bos_token, self.eos_token = (
            self.specials.get("bos_token"),
            self.specials.get("eos_token"),
        )
        self.bos_id, self.eos_id = self._id("bos_token"), self._id("eos_token")
        # any of them ends a generation
        self.end_ids = end_ids or frozenset([] if self.eos_id is None else [self.eos_id])
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(), *(id + 1 for id in added)])
        self.pieces = Pieces(backend)
        # Longest first: where several special tokens begin at one place, the longest is meant.
        texts = sorted((added[id].content for id in self.special_ids), key=len, reverse=True)
        self._special = "|".join(map(re.escape, texts)) or r"(?!)"
        self._prefixes = {
            text[:n] for text in texts for n in range(1, len(text)) if not text[0].isalnum()
        }
        self._longest = len(texts[0]) if texts else 0
        self._plain = _without_specials(backend)
        self._unknown = _unknown_ids(backend) | {self._id("unk_token")}
        self._around = _around(backend, self.special_ids)

    def _id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.specials[name]) if name in self.specials else None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary. Looking for it takes 50 ms."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    # ---- ids to text ------------------------------------------------------------------------------

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of token ids: a list, an array, or one id."""
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        stream = Detokenizer(self, skip_special_tokens)
        return stream.push([ids] if isinstance(ids, int) else ids) + stream.finish()

    def token_bytes(self, id: int) -> bytes:
        return self.pieces[id]

    def token_str(self, id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that has none."""
        return self.backend.id_to_token(id) or ""

    # ---- text to ids ------------------------------------------------------------------------------

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of a text. `add_special_tokens` puts BOS and EOS around it where the model wants them. Special tokens that the
        text spells out, such as <|im_start|>, become those tokens; with `parse_special=False` they are plain characters."""
        return self._whole(text, self._ids(self.backend, text), add_special_tokens, parse_special)

    def encode_many(self, asked: list[tuple[str, bool, bool]]) -> list[list[int]]:
        """`encode` for each (text, add_special_tokens, parse_special), in one call of the library."""
        found = self.backend.encode_batch_fast(
            [text for text, _, _ in asked], add_special_tokens=False
        )
        return [
            self._whole(text, one.ids, add, parse)
            for (text, add, parse), one in zip(asked, found, strict=True)
        ]

    def _whole(
        self, text: str, ids: list[int], add_special_tokens: bool, parse_special: bool
    ) -> list[int]:
        if not parse_special and not self.special_ids.isdisjoint(ids):
            ids = self._plain_ids(text)
        return self.with_special_tokens(ids) if add_special_tokens else ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """The ids with BOS before and EOS after them, where the model wants them."""
        before, after = self._around
        return [*before, *ids, *after]

    def as_prompt(self, ids: list[int]) -> list[int]:
        """Of an empty text, the token that begins one: a model must be given something."""
        if ids:
            return ids
        if self.bos_id is None:
            raise InvalidRequest(
                "the prompt is empty, and this model has no token that begins a text: give some",
                "prompt",
            )
        return [self.bos_id]

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Special tokens count as such but where `mark`, one character, stands right before them. Marks are left out."""
        stand_in = {mark: "", **self._plain.stand_in}
        return self._plain_ids(
            re.sub(f"{mark}|(?<!{mark})(?:{self._special})", lambda found: stand_in[found[0]], text)
        )

    def protect(self, text: str, mark: str) -> str:
        """Put `mark` before every special token in the text, and before an unfinished one at its end, which what comes
        after might complete."""
        starts: set[int] = set()
        if re.search(self._special, text):
            starts.update(found.start() for found in re.finditer(f"(?={self._special})", text))
        for i in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[i:] in self._prefixes:
                starts.add(i)
        cuts = [0, *sorted(starts), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(cuts)) if starts else text

    def _ids(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Other threads go on meanwhile: of the library's calls only those for batches let go of the interpreter."""
        try:
            if not isinstance(text, str):
                raise TypeError  # a pair of texts would be taken too
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest(
                "the text must be a string of valid Unicode, without lone surrogates", "prompt"
            ) from None

    def _plain_ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for id in self._ids(self._plain.backend, text):
            if id in self._plain.ids:
                ids.append(self._plain.ids[id])
            elif id in self.special_ids and id not in self._unknown:
                ids += self._spelled(id)  # a vocabulary whose merges spell a special token
            else:
                ids.append(id)
        return ids

    def _spelled(self, id: int) -> list[int]:
        """A special token's text, byte by byte."""
        ids: list[int] = []
        for byte in self.token_str(id).encode():
            named = map(self.backend.token_to_id, (f"<0x{byte:02X}>", _CHAR_OF[byte]))
            ids += [i for i in named if i is not None and self.pieces[i] == bytes([byte])][:1]
        return ids

    # ---- transformers' names: scripts call them on what LLM.get_tokenizer returns ------------------

    @property
    def bos_token_id(self) -> int | None:
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_id

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id("unk_token")

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Every token by its text in the vocabulary, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id of a token, or the ids of several. A token that the vocabulary lacks has the unknown token's id."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        id = self.backend.token_to_id(tokens)
        return self.unk_token_id if id is None else id

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        """The text of a token in the vocabulary, or the texts of several."""
        return self.token_str(ids) if isinstance(ids, int) else [self.token_str(id) for id in ids]

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(
        self,
        text: str | list[str],
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        **options: Any,
    ) -> Encoding:
        """input_ids and attention_mask of one text or of several, as lists. Padding, truncation and tensors are not offered."""
        _check_neutral(options)
        parse = not split_special_tokens
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(one, add_special_tokens, parse) for one in texts]
        return Encoding.of(ids[0] if isinstance(text, str) else ids)

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
        """A conversation, or a list of them, as text, as ids or as an Encoding. `options` are continue_final_message and further
        variables for the template. In ids, control tokens that a message spells out are characters; in text nothing tells them
        from the template's own."""
        from octavo.text.chat import encode_chat, select_template

        _check_neutral(options)
        options = {name: value for name, value in options.items() if name not in NEUTRAL}
        template = select_template(self, chat_template, bool(tools))
        options["add_generation_prompt"] = add_generation_prompt
        many = bool(conversation) and isinstance(conversation[0], list)
        found: list[Any] = []
        for messages in conversation if many else [conversation]:
            if tokenize:
                found.append(encode_chat(self, template, messages, tools=tools, **options))
            else:
                found.append(template.render(messages, tools, **options))
        result = found if many else found[0]
        return Encoding.of(result) if tokenize and return_dict else result

    # ---- where tokenizers come from ---------------------------------------------------------------

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> Tokenizer:
        backend, specials, end_ids = from_gguf(metadata)
        return cls(backend, specials, chat_templates(metadata), end_ids)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face model directory: tokenizer.json, or vocab.json and merges.txt, and the files beside them."""
        path = Path(path)
        config = _read_json(path / "tokenizer_config.json")
        named = {**_read_json(path / "special_tokens_map.json"), **config}
        backend = _read_backend(path, config, named)
        try:
            _add_missing(backend, config, named)
            specials = {name: _text(named[name]) for name in _NAMED if named.get(name)}
            extra = named.get("extra_special_tokens")
            specials.update(
                {name: _text(token) for name, token in extra.items()}
                if isinstance(extra, dict)
                else {}
            )
            templates = _chat_templates(path, config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{path / 'tokenizer_config.json'} is not as it should be: {error!r}"
            ) from error
        if backend.post_processor is None or isinstance(
            backend.post_processor, processors.ByteLevel
        ):
            # the post-processor says nothing of them: others, if only that there are none, have
            # the last word
            set_bos_eos(
                backend,
                specials.get("bos_token") if config.get("add_bos_token") else None,
                specials.get("eos_token") if config.get("add_eos_token") else None,
            )
        found = cls(backend, specials, templates)
        if config.get("tokenizer_class"):
            found.tokenizer_class = str(config["tokenizer_class"])
        return found


def _read_backend(
    path: Path, config: dict[str, Any], named: dict[str, Any]
) -> tokenizers.Tokenizer:
    """The tokenizer of a model directory. `named`: the special tokens by name; GPT-2's are added where its files name none."""
    if (path / "tokenizer.json").is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        lines = (path / "merges.txt").read_text(encoding="utf-8").split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        pre = PRE_TOKENIZERS[
            "qwen2" if str(config.get("tokenizer_class", "")).startswith("Qwen") else "gpt-2"
        ]
        backend = byte_level(
            _read_json(path / "vocab.json"),
            merges,
            pre,
            bool(config.get("add_prefix_space", False)),
        )
        if "eos_token" not in named and backend.token_to_id("<|endoftext|>") is not None:
            named.update(
                bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
            )
        return backend
    if (path / "tokenizer.model").is_file():
        raise ModelError(
            f"{path} has only a SentencePiece tokenizer.model. Convert it once, in there: "
            f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('.').save_pretrained('.')\" "
            "(needs: pip install transformers sentencepiece protobuf), which writes tokenizer.json"
        )
    raise ModelError(
        f"{path} has no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt. Name a directory that has them "
        "with tokenizer=DIRECTORY (--tokenizer), or use token ids with skip_tokenizer_init=True"
    )


def _around(
    backend: tokenizers.Tokenizer, special_ids: frozenset[int]
) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text: its mask tells."""
    text = backend.id_to_token(min(special_ids)) if special_ids else None
    if text is None:
        return [], []
    encoding = backend.encode(text, add_special_tokens=True)
    own = [i for i, added in enumerate(encoding.special_tokens_mask) if not added]
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def _unknown_ids(backend: tokenizers.Tokenizer) -> set[int | None]:
    """What the vocabulary's model gives for a character that it lacks: the unknown token, which not all models name."""
    try:
        return {token.id for token in backend.model.tokenize("\U0010fffe")}
    except (
        Exception
    ):  # some models have no unknown token and raise; the library raises nothing more specific
        return set()


def _without_specials(backend: tokenizers.Tokenizer) -> _Plain:
    # Shares the vocabulary with `backend`: only the handling of added tokens is its own.
    plain = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer"):
        if (value := getattr(backend, part)) is not None:
            setattr(plain, part, value)
    secret = secrets.token_hex(8)
    added = sorted(backend.get_added_tokens_decoder().items())
    stand_in = {token.content: f"\ufdd0{secret}{id}\ufdd1" for id, token in added if token.special}
    names = {stand_in.get(token.content, token.content): (id, token) for id, token in added}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    plain.add_tokens(
        [
            AddedToken(name, **{flag: getattr(t, flag) for flag in flags})
            for name, (_, t) in names.items()
        ]
    )
    ids = {plain.token_to_id(name): id for name, (id, _) in names.items()}
    return _Plain(plain, {here: real for here, real in ids.items() if here is not None}, stand_in)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _text(token: Any) -> str:
    """Special tokens are written as strings or as objects with their text in "content"."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _add_missing(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, Any]
) -> None:
    """Tokens that only the files beside tokenizer.json declare, or declare special."""
    have = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for _, token in sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
    ):
        special = bool(token.get("special"))
        if have.get(token["content"]) != special:
            flags = {
                name: bool(token.get(name))
                for name in ("single_word", "lstrip", "rstrip", "normalized")
            }
            add = backend.add_special_tokens if special else backend.add_tokens
            add([AddedToken(token["content"], special=special, **flags)])
            have[token["content"]] = special
    extra = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []
    wanted = [named[name] for name in _NAMED if named.get(name)] + list(
        extra.values() if isinstance(extra, dict) else extra
    )
    missing = [text for text in dict.fromkeys(map(_text, wanted)) if not have.get(text)]
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in missing]
    )


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name; "default" is the one for ordinary chats, "tool_use" the one for chats with tools where there are two."""
    listed = config.get("chat_template") or []
    templates = (
        {"default": listed}
        if isinstance(listed, str)
        else {entry["name"]: entry["template"] for entry in listed}
    )
    files = [
        path / "chat_template.jinja",
        *sorted((path / "additional_chat_templates").glob("*.jinja")),
    ]
    for file in files:
        if file.is_file():
            templates["default" if file == files[0] else file.stem] = file.read_text(
                encoding="utf-8"
            )
    return templates
