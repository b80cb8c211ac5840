"""Incremental detokenization and stop strings, in time linear in the length of the text.

    Detokenizer   turns ids into text and holds back the bytes of an incomplete character
    StopChecker   cuts text at a stop string and holds back text that may begin one
    TextStream    combines both for one sequence

This module works on tokens, bytes and characters, not on requests, sampling or transport.
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
    """Return the byte of each character in the alphabet of byte-level BPE.

    A printable Latin-1 byte is spelled as itself. The other bytes are spelled from U+0100 on.
    """
    printable_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    return {
        **{chr(byte): byte for byte in printable_bytes},
        **{chr(0x100 + offset): byte for offset, byte in enumerate(other_bytes)},
    }


BYTE_OF_CHARACTER = _byte_alphabet()
MAX_SEARCHED_IDS = 10_000  # limits the search for a token that is a word
_Utf8 = codecs.getincrementaldecoder("utf-8")
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenBytes(dict[int, bytes]):
    """Maps a token id to the bytes of the token. An entry is computed when it is first used.

    `decoding` follows from the decoder of the tokenizer:

    bytes    The decoder is ByteLevel: each character of a token is one byte.
    meta     The meta symbol is a space, and <0xXX> is a byte. Decoding removes `leading_spaces`
             spaces from the start of the text, or with `strips_first_token` all spaces from the
             first token.
    other    A token has no bytes of its own (WordPiece, for example). The Detokenizer decodes
             windows of tokens with the library.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        super().__init__()
        self.backend = backend
        self.added_tokens = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self.decoding = "other"
        self.meta_symbol = ""
        self.byte_fallback = False
        self.leading_spaces = 0
        self.strips_first_token = False
        self._read_decoder(_decoder_steps(backend))

    def _read_decoder(self, decoder_steps: list[dict[str, Any]]) -> None:
        step_types = [decoder_step["type"] for decoder_step in decoder_steps]
        if step_types == ["ByteLevel"]:
            self.decoding = "bytes"
        elif step_types == ["Metaspace"]:
            self.decoding = "meta"
            self.meta_symbol = decoder_steps[0]["replacement"]
            self.strips_first_token = decoder_steps[0].get("prepend_scheme", "always") != "never"
        elif step_types in (
            ["Replace", "ByteFallback", "Fuse"],
            ["Replace", "ByteFallback", "Fuse", "Strip"],
        ):
            replace_step = decoder_steps[0]
            strip_step: dict[str, Any] = (
                decoder_steps[3]
                if len(decoder_steps) == 4
                else {"content": " ", "start": 0, "stop": 0}
            )
            if (
                "String" in replace_step["pattern"]
                and replace_step["content"] == " "
                and strip_step["content"] == " "
                and strip_step["stop"] == 0
            ):
                self.decoding = "meta"
                self.meta_symbol = replace_step["pattern"]["String"]
                self.byte_fallback = True
                self.leading_spaces = strip_step["start"]

    def __missing__(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:  # The vocabulary of the model is padded beyond that of the tokenizer.
            token_bytes = b""
        elif self.decoding == "bytes":
            if token_id in self.added_tokens or not BYTE_OF_CHARACTER.keys() >= set(token):
                token_bytes = token.encode()
            else:
                token_bytes = bytes(BYTE_OF_CHARACTER[character] for character in token)
        elif self.byte_fallback and (byte_name := _BYTE_NAME.match(token)):
            token_bytes = bytes([int(byte_name[1], 16)])
        elif self.meta_symbol:
            token_bytes = token.replace(self.meta_symbol, " ").encode()
        else:
            token_bytes = token.encode()
        self[token_id] = token_bytes
        return token_bytes

    @cached_property
    def word_token_id(self) -> int | None:
        """Return a token that is a word by itself, or None if there is none."""
        for token_id in range(min(self.backend.get_vocab_size(), MAX_SEARCHED_IDS)):
            token = self.backend.id_to_token(token_id)
            if token is None or token_id in self.added_tokens:
                continue
            if token.isalpha() and token.isascii():
                return token_id
        return None

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        if not self.strips_first_token:
            return self[token_id]
        token = self.backend.id_to_token(token_id) or ""
        return token.replace(self.meta_symbol, "").encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the steps of the tokenizer's decoder, as tokenizer.json describes them."""
    if backend.decoder is None:
        return [{"type": ""}]
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    return steps


class Detokenizer:
    """Turns the ids of one text into text, a few at a time.

    The concatenated output equals `Tokenizer.decode` of all ids, however they were split. A
    tokenizer that puts a space before every text removes the space when it decodes. `continuing`
    says that the ids continue other ids, as a completion continues its prompt: then the first space
    is part of the text and stays.
    """

    # Where the library decodes, an incomplete character becomes U+FFFD after this many tokens.
    LONGEST_WAIT = 16

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continuing: bool = False
    ):
        self._bytes_by_id = tokenizer.bytes_by_id
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _Utf8("replace")
        self._leading_spaces = 0 if continuing else self._bytes_by_id.leading_spaces
        self._at_first_token = self._bytes_by_id.strips_first_token and not continuing
        # The window is used where the library decodes. It contains the ids that new text may depend
        # on. The text of the first `_shown_tokens` ids was returned already. A text that continues
        # another one gets its first space from a word in front of it, which is never returned.
        self._window: list[int] = []
        if continuing and self._bytes_by_id.decoding == "other":
            leading_word = self._bytes_by_id.word_token_id
            self._window = [] if leading_word is None else [leading_word]
        self._shown_tokens = len(self._window)

    def push(self, token_ids: list[int]) -> str:
        """Return the text that is complete after these ids."""
        token_ids = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        if self._bytes_by_id.decoding == "other":
            return "".join([self._push_window(token_id) for token_id in token_ids])
        if self._at_first_token and token_ids:
            self._at_first_token = False
            first_bytes = self._bytes_by_id.first_token_bytes(token_ids[0])
            return self._utf8.decode(first_bytes) + self.push(token_ids[1:])
        new_bytes = b"".join([self._bytes_by_id[token_id] for token_id in token_ids])
        while self._leading_spaces and new_bytes:
            if new_bytes.startswith(b" "):
                new_bytes = new_bytes[1:]
                self._leading_spaces -= 1
            else:
                self._leading_spaces = 0
        return self._utf8.decode(new_bytes)

    def finish(self) -> str:
        """End the text and return what was held back. An incomplete character becomes U+FFFD."""
        if self._bytes_by_id.decoding == "other":
            return self._new_text()
        return self._utf8.decode(b"", final=True)

    def _new_text(self) -> str:
        decode = self._bytes_by_id.backend.decode
        shown_text = decode(self._window[: self._shown_tokens], skip_special_tokens=False)
        return decode(self._window, skip_special_tokens=False)[len(shown_text) :]

    def _push_window(self, token_id: int) -> str:
        """Add a token and return the new text.

        The library decodes the tokens that were shown last, with and without the new ones. The
        difference is the new text.
        """
        self._window.append(token_id)
        new_text = self._new_text()
        waiting_tokens = len(self._window) - self._shown_tokens
        if not new_text or (new_text.endswith("\ufffd") and waiting_tokens < self.LONGEST_WAIT):
            return ""
        del self._window[: self._shown_tokens]
        self._shown_tokens = len(self._window)
        return new_text


class StopChecker:
    """Cuts a text at the first stop string that is complete in it.

    If one character completes several stop strings, the one that is listed first counts. The
    checker holds back only text that may begin a stop string. For each stop string it keeps the
    length of the prefix that the text ends with (Knuth-Morris-Pratt), so each character is read
    once, however long the stop strings are.
    """

    def __init__(self, stop_strings: list[str], include_stop_string: bool = False):
        self._stop_strings = stop_strings
        self._include_stop_string = include_stop_string
        self._stop_borders = [_borders(stop_string) for stop_string in stop_strings]
        # The length of the prefix of each stop string that the text ends with.
        self._matched_lengths = [0] * len(stop_strings)
        self._held_text = ""
        self.matched_stop: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string once one is complete.

        Calls after a match return an empty text.
        """
        if self.matched_stop is not None:
            return "", self.matched_stop
        if not self._stop_strings:
            return text, None
        for position, character in enumerate(text):
            self.matched_stop = self._match(character)
            if self.matched_stop is not None:
                pending_text = self._held_text + text[: position + 1]
                self._held_text = ""
                if not self._include_stop_string:
                    pending_text = pending_text[: -len(self.matched_stop)]
                return pending_text, self.matched_stop
        pending_text = self._held_text + text
        held_length = 0 if self._include_stop_string else max(self._matched_lengths)
        shown_length = len(pending_text) - held_length
        self._held_text = pending_text[shown_length:]
        return pending_text[:shown_length], None

    def _match(self, character: str) -> str | None:
        """Return the stop string that this character completes, if there is one."""
        for index, stop_string in enumerate(self._stop_strings):
            matched_length = self._matched_lengths[index]
            while matched_length and stop_string[matched_length] != character:
                matched_length = self._stop_borders[index][matched_length - 1]
            if stop_string[matched_length] == character:
                matched_length += 1
            self._matched_lengths[index] = matched_length
            if matched_length == len(stop_string):
                return stop_string
        return None

    def finish(self) -> str:
        """Return the text that was held back. It cannot become a stop string any more."""
        held_text = self._held_text
        self._held_text = ""
        return held_text


def _borders(pattern: str) -> list[int]:
    """Return for each prefix of the pattern the longest shorter prefix that it ends with."""
    borders = [0] * len(pattern)
    border_length = 0
    for position in range(1, len(pattern)):
        while border_length and pattern[border_length] != pattern[position]:
            border_length = borders[border_length - 1]
        border_length = border_length + 1 if pattern[border_length] == pattern[position] else 0
        borders[position] = border_length
    return borders


# Gets each piece of new text, and returns whether the text ends there.
EndCheck = Callable[[str], bool]


class TextStream:
    """The text of one generated sequence. Without a tokenizer the text stays empty."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        end_check: EndCheck | None = None,
    ):
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, continuing=True)
        self._stop_checker = StopChecker(list(params.stop or []), params.include_stop_str_in_output)
        self._end_check = end_check
        self._searching = bool(params.stop) or end_check is not None
        self._min_tokens = params.min_tokens
        self._text_parts: list[str] = []
        self.ended = False  # True after a stop string, or if `end_check` has ended the text
        self.tokens_used = 0  # ids up to and including the one that ended the text

    @property
    def text(self) -> str:
        """Return all text so far."""
        self._text_parts = ["".join(self._text_parts)]
        return self._text_parts[0]

    def push(self, token_ids: list[int], finished: bool = False) -> tuple[str, str | None]:
        """Return the new text, and the stop string if one is complete.

        Ids after the end of the text are ignored.
        """
        new_parts: list[str] = []
        # The ids are pushed one at a time only if it matters which one ends the text.
        groups = [[token_id] for token_id in token_ids] if self._searching else [token_ids]
        for next_ids in groups:
            if not self.ended:
                self.tokens_used += len(next_ids)
                pushed = self._detokenizer.push(next_ids) if self._detokenizer else ""
                new_parts.append(self._search(pushed))
        if finished and not self.ended:
            remaining = self._detokenizer.finish() if self._detokenizer else ""
            new_parts.append(self._search(remaining))
            new_parts.append(self._stop_checker.finish())
        new_text = "".join(new_parts)
        self._text_parts.append(new_text)
        return new_text, self._stop_checker.matched_stop

    def _search(self, text: str) -> str:
        """Return the part of new text that may be shown, and set `ended`.

        The first `min_tokens` tokens are not searched, because they may not end the text.
        """
        may_finish = self.tokens_used > self._min_tokens
        if may_finish:
            text, stop_string = self._stop_checker.push(text)
            self.ended = stop_string is not None
        if self._end_check is not None and self._end_check(text) and may_finish:
            self.ended = True
        return text
