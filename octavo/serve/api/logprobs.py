"""Formats logprobs for replies: in two forms of OpenAI, and in the form of vLLM for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.collect import Collector
from octavo.outputs import Logprob
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token as text.

    A token that is part of a character is written as bytes, so that different tokens have different
    texts.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON has no infinity.


@dataclass(frozen=True)
class Layout:
    """The logprobs that a request asks for."""

    top: int  # The number of likeliest tokens.
    named: list[int] | None = None  # These tokens are reported instead of the likeliest.
    as_ids: bool = False  # Tokens are written as token_id:N.

    def _text(self, tokenizer: Tokenizer, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else token_text(tokenizer, token_id)

    def _shown(self, position: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        """Return the tokens to report at a position, which may include the chosen token."""
        if self.named is not None:
            chosen = next(iter(position))
            listed = dict.fromkeys((chosen, *self.named))
            return [(token_id, position[token_id]) for token_id in listed]
        return sorted(position.items(), key=lambda item: item[1].rank or 0)[: self.top]

    def chat(self, tokenizer: Tokenizer, positions: list[dict[int, Logprob]]) -> dict[str, Any]:
        def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
            return {
                "token": self._text(tokenizer, token_id),
                "logprob": _finite(logprob.logprob),
                "bytes": list(tokenizer.token_bytes(token_id)),
            }

        content = []
        for position in positions:
            (token_id, chosen), *_ = position.items()
            top = [entry(token_id, logprob) for token_id, logprob in self._shown(position)]
            content.append({**entry(token_id, chosen), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(
        self,
        tokenizer: Tokenizer,
        token_ids: list[int],
        positions: list[dict[int, Logprob] | None],
        offsets: list[int],
    ) -> dict[str, Any]:
        """Return the logprobs of a completion.

        An entry of `positions` is None for the first token of a prompt, because no token precedes
        it.
        """
        each: list[dict[str, float] | None] = []
        for position in positions:
            if position is None:
                each.append(None)
                continue
            (token_id, chosen), *_ = position.items()
            # If two tokens have the same text, the first one is used.
            values = {
                self._text(tokenizer, token_id): _finite(logprob.logprob)
                for token_id, logprob in reversed(self._shown(position))
            }
            own = {self._text(tokenizer, token_id): _finite(chosen.logprob)}
            # The chosen token is the first, as in vLLM. The others follow by rank.
            each.append({**own, **dict(reversed(values.items())), **own})
        chosen_logprobs = [
            None if position is None else _finite(next(iter(position.values())).logprob)
            for position in positions
        ]
        return {
            "tokens": [self._text(tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": chosen_logprobs,
            "top_logprobs": each,
            "text_offset": offsets,
        }


class Offsets:
    """Computes the offset of each token in the text.

    A token that is part of a character has the offset of the character. A token that is not shown
    has the offset of the next shown token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        continuing: bool = True,
        position: int = 0,
    ):
        self.ids = Detokenizer(tokenizer, skip_special_tokens, continuing)
        self.at = position
        self.shown = position

    def push(self, token_ids: list[int], shown: int, last: bool = True) -> list[int]:
        """Return the offsets of these tokens. `shown` is the number of new characters in the reply.

        Text is held back while it may become a stop string, which is never shown. Only the `last`
        call knows. Tokens of a stop string that were reported earlier have the offsets of a text
        without that stop string.
        """
        positions = []
        for token_id in token_ids:
            positions.append(self.at)
            self.at += len(self.ids.push([token_id]))
        self.shown += shown
        return [min(position, self.shown) for position in positions] if last else positions


def prompt_logprobs_of(collector: Collector) -> list[dict[str, Any] | None] | None:
    """Return the logprobs of a prompt in the form of vLLM, by token id."""
    if collector.prompt_logprobs is None:
        return None
    entries: list[dict[str, Any] | None] = []
    for position in collector.prompt_logprobs:
        if position is None:
            entries.append(None)
            continue
        entry: dict[str, Any] = {}
        for token_id, logprob in position.items():
            entry[str(token_id)] = {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
        entries.append(entry)
    return entries
