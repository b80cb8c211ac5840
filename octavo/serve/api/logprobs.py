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
    token_ids: list[int] | None = None  # These tokens are reported instead of the likeliest.
    as_ids: bool = False  # Tokens are written as token_id:N.

    def _text(self, tokenizer: Tokenizer, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else token_text(tokenizer, token_id)

    def _reported(self, position: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        """Return the tokens to report at a position, which may include the chosen token."""
        if self.token_ids is not None:
            chosen = next(iter(position))
            token_ids = dict.fromkeys((chosen, *self.token_ids))
            return [(token_id, position[token_id]) for token_id in token_ids]
        by_rank = sorted(position.items(), key=lambda item: item[1].rank or 0)
        return by_rank[: self.top]

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
            top = [entry(token_id, logprob) for token_id, logprob in self._reported(position)]
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
        chosen_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for position in positions:
            if position is None:
                chosen_logprobs.append(None)
                top_logprobs.append(None)
                continue
            (chosen_id, chosen), *_ = position.items()
            chosen_logprobs.append(_finite(chosen.logprob))
            # The chosen token comes first, as in vLLM. The other tokens follow by rank.
            by_text = {self._text(tokenizer, chosen_id): _finite(chosen.logprob)}
            for token_id, logprob in self._reported(position):
                # If two tokens have the same text, the entry belongs to the first of them.
                by_text.setdefault(self._text(tokenizer, token_id), _finite(logprob.logprob))
            top_logprobs.append(by_text)
        return {
            "tokens": [self._text(tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": chosen_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


class Offsets:
    """Computes the offset of each token in the text.

    A token that is part of a character has the offset of the character. A token without text has
    the offset of the next token with text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        continuing: bool = True,
        position: int = 0,
    ):
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens, continuing)
        self.position = position  # The offset of the next token.
        self.sent = position  # The end of the text that the client has received.

    def push(self, token_ids: list[int], characters: int, is_last: bool = True) -> list[int]:
        """Return the offsets of these tokens. `characters` counts the new characters of the reply.

        Text that may become a stop string is held back, and a complete stop string is never sent.
        Whether the tokens belong to a stop string is known at the last call, which therefore limits
        the offsets to the text that was sent. Tokens of a stop string that were reported earlier
        keep the offsets that they would have without the stop string.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self.position)
            self.position += len(self.detokenizer.push([token_id]))
        self.sent += characters
        if not is_last:
            return offsets
        return [min(offset, self.sent) for offset in offsets]


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
