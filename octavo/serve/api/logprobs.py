"""How replies lay out logprobs: OpenAI's two forms, and vLLM's for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.collect import Collector
from octavo.outputs import Logprob
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """A token as text. A token that is part of a character is written by its bytes, so that
    different tokens stay different."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON has no infinity


@dataclass(frozen=True)
class Layout:
    """What a request wants to see of logprobs."""

    top: int  # how many of the likeliest tokens
    named: list[int] | None = None  # these tokens in place of the likeliest
    as_ids: bool = False  # tokens are written as token_id:N

    def _text(self, tokenizer: Tokenizer, id: int) -> str:
        return f"token_id:{id}" if self.as_ids else token_text(tokenizer, id)

    def _shown(self, at: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        """The tokens beside the chosen one, which may be among them."""
        if self.named is not None:
            return [(id, at[id]) for id in self.named]
        return sorted(at.items(), key=lambda item: item[1].rank or 0)[: self.top]

    def chat(self, tokenizer: Tokenizer, found: list[dict[int, Logprob]]) -> dict[str, Any]:
        def entry(id: int, logprob: Logprob) -> dict[str, Any]:
            return {
                "token": self._text(tokenizer, id),
                "logprob": _finite(logprob.logprob),
                "bytes": list(tokenizer.token_bytes(id)),
            }

        content = []
        for at in found:
            (id, chosen), *_ = at.items()
            top = [entry(id, logprob) for id, logprob in self._shown(at)]
            content.append({**entry(id, chosen), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(
        self,
        tokenizer: Tokenizer,
        ids: list[int],
        found: list[dict[int, Logprob] | None],
        offsets: list[int],
    ) -> dict[str, Any]:
        """`found` is None for the first token of a prompt, which nothing comes before."""
        each: list[dict[str, float] | None] = []
        for at in found:
            if at is None:
                each.append(None)
                continue
            (id, chosen), *_ = at.items()
            # of two tokens with the same text, the first one counts
            values = {
                self._text(tokenizer, id): _finite(logprob.logprob)
                for id, logprob in reversed(self._shown(at))
            }
            own = {self._text(tokenizer, id): _finite(chosen.logprob)}
            each.append({**dict(reversed(values.items())), **own})
        chosen_logprobs = [
            None if at is None else _finite(next(iter(at.values())).logprob) for at in found
        ]
        return {
            "tokens": [self._text(tokenizer, id) for id in ids],
            "token_logprobs": chosen_logprobs,
            "top_logprobs": each,
            "text_offset": offsets,
        }


class Offsets:
    """Where in a text each of its tokens begins. A token that is part of a character begins where
    the character does; a token that is not shown begins where the next shown one does."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, continuing: bool = True, at: int = 0
    ):
        self.ids = Detokenizer(tokenizer, skip_special_tokens, continuing)
        self.at = at
        self.shown = at

    def push(self, ids: list[int], shown: int, last: bool = True) -> list[int]:
        """`shown`: how many more characters the client sees. Text that is held back may turn out to
        be a stop string, which is never shown. That is known at the `last` call; tokens of a stop
        string that were reported before have the offsets that they would have had."""
        found = []
        for id in ids:
            found.append(self.at)
            self.at += len(self.ids.push([id]))
        self.shown += shown
        return [min(at, self.shown) for at in found] if last else found


def prompt_logprobs_of(collector: Collector) -> list[dict[str, Any] | None] | None:
    """As vLLM lays them out: by token id."""
    if collector.prompt_logprobs is None:
        return None
    return [
        None if at is None else {
            str(id): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token} for id, p in at.items()
        }
        for at in collector.prompt_logprobs
    ]  # fmt: skip
