"""From tokens to text, a few at a time: whole characters only, stop strings cut exactly, in time linear in the length.

Knows tokens, bytes and characters; knows nothing of requests, sampling or transport.

    Detokenizer   ids -> text, holding back the bytes of an unfinished character
    StopChecker   text -> text up to a stop string, holding back what may become one
    TextStream    both, for one sequence
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


BYTE_OF = _byte_alphabet()
MAX_SEARCHED = 10_000  # ids, for a token that is a word
_Utf8 = codecs.getincrementaldecoder("utf-8")
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Pieces(dict[int, bytes]):
    """Token id -> the bytes it stands for, worked out when first asked. How, is read off the tokenizer's own decoder:

    bytes    ByteLevel: each character of a token is one byte
    meta     a meta symbol is a space, <0xXX> is a byte; `strip` leading spaces of the whole text are dropped, or with
             `bare_first` all those of the first token
    other    tokens have no bytes of their own (WordPiece, ...): the Detokenizer asks the library, window by window
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        super().__init__()
        self.backend = backend
        self.added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
        self.kind = "other"
        self.meta = ""
        self.fallback = False
        self.strip = 0
        self.bare_first = False
        state = b'{"type": ""}' if backend.decoder is None else backend.decoder.__getstate__()
        decoder: dict[str, Any] = json.loads(state)
        steps: list[dict[str, Any]] = (
            decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        )
        types = [step["type"] for step in steps]
        if types == ["ByteLevel"]:
            self.kind = "bytes"
        elif types == ["Metaspace"]:
            self.kind = "meta"
            self.meta = steps[0]["replacement"]
            self.bare_first = steps[0].get("prepend_scheme", "always") != "never"
        elif types in (
            ["Replace", "ByteFallback", "Fuse"],
            ["Replace", "ByteFallback", "Fuse", "Strip"],
        ):
            replace = steps[0]
            strip: dict[str, Any] = (
                steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
            )
            if (
                "String" in replace["pattern"]
                and replace["content"] == " "
                and strip["content"] == " "
                and strip["stop"] == 0
            ):
                self.kind = "meta"
                self.meta = replace["pattern"]["String"]
                self.fallback = True
                self.strip = strip["start"]

    def __missing__(self, id: int) -> bytes:
        token = self.backend.id_to_token(id)
        # a model's vocabulary may be padded past the tokenizer's: such ids have no text
        if token is None:
            piece = b""
        elif self.kind == "bytes":
            known = id not in self.added and all(c in BYTE_OF for c in token)
            piece = bytes(BYTE_OF[c] for c in token) if known else token.encode()
        elif self.fallback and (name := _BYTE_NAME.match(token)):
            piece = bytes([int(name[1], 16)])
        else:
            piece = token.replace(self.meta, " ").encode() if self.meta else token.encode()
        self[id] = piece
        return piece

    @cached_property
    def some_word(self) -> int | None:
        """A token that is a word by itself, if there is one."""
        for id in range(min(self.backend.get_vocab_size(), MAX_SEARCHED)):
            token = self.backend.id_to_token(id)
            if id not in self.added and token is not None and token.isalpha() and token.isascii():
                return id
        return None

    def first(self, id: int) -> bytes:
        """The piece of the token that opens a text."""
        return (
            (self.backend.id_to_token(id) or "").replace(self.meta, "").encode()
            if self.bare_first
            else self[id]
        )


class Detokenizer:
    """Ids in, text out; concatenated, the texts are `Tokenizer.decode` of all the ids however they were split.

    A tokenizer that puts a space before every text drops it when decoding. `continuing` says that the ids go on from
    others, as a completion does from its prompt: then the first space is part of the text and stays.
    """

    # tokens; where the library decodes: after so many, an unfinished character is shown as U+FFFD
    LONGEST_WAIT = 16

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continuing: bool = False
    ):
        self._pieces = tokenizer.pieces
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _Utf8("replace")
        self._strip = 0 if continuing else self._pieces.strip
        self._first = self._pieces.bare_first and not continuing
        # "other" only: ids that new text may depend on, and how many of them have been shown. A text that goes on from
        # another gets its first space from a word in front of it, which is not shown.
        before = self._pieces.some_word if continuing and self._pieces.kind == "other" else None
        self._window: list[int] = [] if before is None else [before]
        self._shown = len(self._window)

    def push(self, ids: list[int]) -> str:
        """The text that these ids make certain."""
        ids = [id for id in ids if id not in self._hidden]
        if self._pieces.kind == "other":
            return "".join([self._push_window(id) for id in ids])
        if self._first and ids:
            self._first = False
            return self._utf8.decode(self._pieces.first(ids[0])) + self.push(ids[1:])
        data = b"".join([self._pieces[id] for id in ids])
        while self._strip and data:
            self._strip = self._strip - 1 if data[:1] == b" " else 0
            data = data.removeprefix(b" ") if data[:1] == b" " else data
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What was held back, as U+FFFD where a character stayed unfinished. Ends the text."""
        if self._pieces.kind == "other":
            return self._new_text()
        return self._utf8.decode(b"", final=True)

    def _new_text(self) -> str:
        decode = self._pieces.backend.decode
        before = decode(self._window[: self._shown], skip_special_tokens=False)
        return decode(self._window, skip_special_tokens=False)[len(before) :]

    def _push_window(self, id: int) -> str:
        """The library decodes the last shown tokens with and without the new ones: the difference is the new text."""
        self._window.append(id)
        text = self._new_text()
        if not text or (
            text.endswith("\ufffd") and len(self._window) - self._shown < self.LONGEST_WAIT
        ):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text


class StopChecker:
    """Cuts a text at the first stop string to be completed in it (of several completed by one character, the first listed).

    Holds back only what may be the beginning of one: for each stop string, how much of it the text now ends with is kept
    as in Knuth-Morris-Pratt's search, so that each character is looked at once, however long the stop strings are.
    """

    def __init__(self, stop: list[str], include: bool = False):
        self._stop = stop
        self._include = include
        self._borders = [_borders(s) for s in stop]
        self._have = [0] * len(stop)  # characters of each stop string that the text ends with
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string, once there is one. After that, nothing is shown."""
        if self.matched is not None:
            return "", self.matched
        if not self._stop:
            return text, None
        for position, char in enumerate(text):
            for k, s in enumerate(self._stop):
                n = self._have[k]
                while n and s[n] != char:
                    n = self._borders[k][n - 1]
                self._have[k] = n = n + 1 if s[n] == char else 0
                if n == len(s):
                    self.matched = s
                    break
            if self.matched is not None:
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._include else whole[: -len(self.matched)]), self.matched
        whole = self._held + text
        keep = len(whole) - (0 if self._include else max(self._have))
        self._held = whole[keep:]
        return whole[:keep], None

    def finish(self) -> str:
        """Nothing more comes: what was held back is text after all."""
        held = self._held
        self._held = ""
        return held


def _borders(s: str) -> list[int]:
    """For each prefix of s, the length of the longest shorter prefix that it ends with."""
    borders = [0] * len(s)
    n = 0
    for i in range(1, len(s)):
        while n and s[n] != s[i]:
            n = borders[n - 1]
        n = n + 1 if s[n] == s[i] else 0
        borders[i] = n
    return borders


class TextStream:
    """The text of one generated sequence, from its tokens as they come. Without a tokenizer the text stays empty."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        until: Callable[[str], bool] | None = None,
    ):
        """`until`: is told what is new, and says whether the text is over."""
        self._ids: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._ids = Detokenizer(tokenizer, params.skip_special_tokens, continuing=True)
        self._stops = StopChecker(list(params.stop or []), params.include_stop_str_in_output)
        self._until = until
        self._searching = bool(params.stop) or until is not None
        self._min_tokens = params.min_tokens
        self._parts: list[str] = []
        self.over = False  # by a stop string, or `until` said so
        self.tokens_used = 0  # ids pushed, up to and including the one with which it was over

    @property
    def text(self) -> str:
        """All text so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def push(self, ids: list[int], finished: bool = False) -> tuple[str, str | None]:
        """The new text, and the stop string if one was completed. Once the text is over, later ids are ignored."""
        new: list[str] = []
        # One id at a time only where it matters which of them ends the text.
        for some in ([id] for id in ids) if self._searching else [ids]:
            if not self.over:
                self.tokens_used += len(some)
                new.append(self._search(self._ids.push(some) if self._ids else ""))
        if finished and not self.over:
            new.append(self._search(self._ids.finish() if self._ids else ""))
            new.append(self._stops.finish())
        delta = "".join(new)
        self._parts.append(delta)
        return delta, self._stops.matched

    def _search(self, text: str) -> str:
        """What may be shown of new text. That of the first `min_tokens` tokens is not searched: they may not end anything."""
        may_end = self.tokens_used > self._min_tokens
        if may_end:
            text, stop = self._stops.push(text)
            self.over = stop is not None
        if self._until is not None and self._until(text) and may_end:
            self.over = True
        return text
