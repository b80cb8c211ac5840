"""How replies look: OpenAI's objects, whole and in chunks. Bytes out, no I/O.

A stream sends the same few objects thousands of times a second with little changing in them, so a chunk is put together
from encoded parts: 2 us instead of 15 for a dictionary of dictionaries.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.collect import Collector
from octavo.outputs import CompletionOutput, Logprob
from octavo.serve.tools import ToolUse, whole_call
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import CallDelta, ToolParser

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass
class Shape:
    """What a reply should hold."""

    chat: bool
    n: int = 1  # choices a prompt
    top: int | None = None  # logprobs: this many of the likeliest
    echo: bool = False
    prompt_logprobs: bool = False  # as vLLM lays them out, besides those of an echo
    prompt_only: bool = False  # max_tokens 0: nothing but the prompt's logprobs is wanted
    usage: str | None = None  # in a stream: None, "end", or "all" for one in each chunk
    stream: bool = False
    tools: ToolUse | None = None  # calls are looked for in the text


def prompt_text(tokenizer: Tokenizer, collector: Collector) -> str:
    return (
        collector.prompt
        if collector.prompt is not None
        else tokenizer.decode(collector.request.prompt, False)
    )


def usage_of(collectors: list[Collector], generated: int | None = None) -> dict[str, Any]:
    prompt = sum(len(c.request.prompt) for c in collectors)
    if generated is None:
        generated = sum(len(o.token_ids) for c in collectors for o in c.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached for c in collectors)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


# ---- logprobs -------------------------------------------------------------------------------------------


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """A token as text; one that is part of a character by its bytes, so that different tokens stay different."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON knows no infinity


def chat_logprobs(
    tokenizer: Tokenizer, found: list[dict[int, Logprob]], top: int
) -> dict[str, Any]:
    def one(id: int, logprob: Logprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(id)
        return {
            "token": token_text(tokenizer, id),
            "logprob": _finite(logprob.logprob),
            "bytes": list(data),
        }

    content = []
    for at in found:
        (id, chosen), *_ = at.items()
        ranked = sorted(at.items(), key=lambda item: item[1].rank or 0)[:top]
        content.append({**one(id, chosen), "top_logprobs": [one(i, p) for i, p in ranked]})
    return {"content": content, "refusal": None}


class Offsets:
    """Where in a text each of its tokens begins: one that is part of a character where that does, one that is not shown where
    what follows it does."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, continuing: bool = True, at: int = 0
    ):
        self.ids = Detokenizer(tokenizer, skip_special_tokens, continuing)
        self.at = at
        self.shown = at

    def push(self, ids: list[int], shown: int, last: bool = True) -> list[int]:
        """`shown`: so many characters more are. What is held back may be a stop string, which never is: that is known at the
        `last`, and the tokens of one that were told of before then have the places where it would have stood."""
        found = []
        for id in ids:
            found.append(self.at)
            self.at += len(self.ids.push([id]))
        self.shown += shown
        return [min(at, self.shown) for at in found] if last else found


def completion_logprobs(
    tokenizer: Tokenizer,
    ids: list[int],
    found: list[dict[int, Logprob] | None],
    top: int,
    offsets: list[int],
) -> dict[str, Any]:
    """`found` is None where nothing came before: the first token of a prompt."""
    tokens = [token_text(tokenizer, id) for id in ids]
    each: list[dict[str, float] | None] = []
    for at in found:
        if at is None:
            each.append(None)
            continue
        (id, chosen), *_ = at.items()
        ranked = sorted(at.items(), key=lambda item: item[1].rank or 0)[:top]
        # of two the same, the likelier
        values = {token_text(tokenizer, i): _finite(p.logprob) for i, p in reversed(ranked)}
        each.append(
            {**dict(reversed(values.items())), token_text(tokenizer, id): _finite(chosen.logprob)}
        )
    values_of = [None if at is None else _finite(next(iter(at.values())).logprob) for at in found]
    return {
        "tokens": tokens,
        "token_logprobs": values_of,
        "top_logprobs": each,
        "text_offset": offsets,
    }


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


# ---- whole replies ------------------------------------------------------------------------------------


def whole(
    id: str, model: str, tokenizer: Tokenizer, collectors: list[Collector], shape: Shape
) -> dict[str, Any]:
    choices = []
    for which, collector in enumerate(collectors):
        for k, completion in enumerate(collector.best):
            index = which * shape.n + k
            choices.append(
                chat_choice(tokenizer, completion, index, shape)
                if shape.chat
                else text_choice(tokenizer, collector, completion, index, shape)
            )
    found: dict[str, Any] = {
        "id": id,
        "object": "chat.completion" if shape.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_of(collectors, 0 if shape.prompt_only else None),
    }
    if shape.chat and shape.prompt_logprobs:
        found["prompt_logprobs"] = prompt_logprobs_of(collectors[0])
    return found


def chat_choice(
    tokenizer: Tokenizer, completion: CompletionOutput, index: int, shape: Shape
) -> dict[str, Any]:
    logprobs = None
    if shape.top is not None:
        logprobs = chat_logprobs(tokenizer, completion.logprobs or [], shape.top)
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    calls = 0
    if shape.tools is not None:
        message["content"], found = shape.tools.read(completion.text)
        calls = len(found)
        if found:
            message["tool_calls"] = found
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(completion, calls),
        "stop_reason": completion.stop_reason,
    }


def finish_reason(completion: CompletionOutput, calls: int) -> str | None:
    return (
        "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
    )


def text_choice(
    tokenizer: Tokenizer,
    collector: Collector,
    completion: CompletionOutput,
    index: int,
    shape: Shape,
) -> dict[str, Any]:
    text = completion.text
    ids = completion.token_ids
    found: list[Any] = list(completion.logprobs or [])
    reason = completion.finish_reason
    said = ""
    if shape.prompt_only:
        text = ""
        ids = []
        found = []
        reason = "length"
    prompt = collector.request.prompt if shape.echo else []
    if shape.echo:
        said = prompt_text(tokenizer, collector)
        found = [*(collector.prompt_logprobs or [None] * len(prompt)), *found]
    choice: dict[str, Any] = {"index": index, "text": said + text, "logprobs": None, "finish_reason": reason,
                              "stop_reason": completion.stop_reason}  # fmt: skip
    if shape.top is not None:
        offsets = Offsets(tokenizer, collector.prompt is not None, continuing=False).push(
            prompt, len(said)
        )
        skip = collector.request.params.skip_special_tokens
        offsets += Offsets(tokenizer, skip, at=len(said)).push(ids, len(text))
        choice["logprobs"] = completion_logprobs(tokenizer, prompt + ids, found, shape.top, offsets)
    if shape.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs_of(collector)
    return choice


# ---- chunks ---------------------------------------------------------------------------------------------


class ChunkWriter:
    """The chunks of one streamed reply."""

    def __init__(
        self,
        id: str,
        kind: str,
        model: str,
        tokenizer: Tokenizer,
        top: int | None,
        usage: str | None,
        tools: ToolUse | None = None,
    ):
        """`kind`: chat.completion.chunk or text_completion. `usage`: None, "end", or "all" for one in each chunk."""
        self.chat = kind != "text_completion"
        self.tokenizer = tokenizer
        self.top = top
        self.usage = usage
        self.tools = tools
        self._parsers = dict[int, ToolParser]()
        head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b"]}\n\n" if usage is None else b'],"usage":null}\n\n'
        self._offsets: dict[int, Offsets] = {}  # of each choice

    def role(self, index: int) -> bytes:
        """What opens a choice of a chat."""
        first = (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % index
        )
        return self._head + first + self._tail

    def echo(self, index: int, collector: Collector) -> bytes:
        """What opens a choice that begins with its prompt."""
        echoed = CompletionOutput(
            index, prompt_text(self.tokenizer, collector), collector.request.prompt
        )
        if collector.prompt_logprobs is not None and self.top is not None:
            found: list[Any] = list(collector.prompt_logprobs)
            echoed.logprobs = found
        self._offsets[index] = Offsets(
            self.tokenizer, collector.prompt is not None, continuing=False
        )
        chunk = self.piece(index, echoed, [collector])
        self._offsets[index] = Offsets(
            self.tokenizer, collector.request.params.skip_special_tokens, at=len(echoed.text)
        )
        return chunk

    def piece(self, index: int, piece: CompletionOutput, collectors: list[Collector]) -> bytes:
        if self.tools is not None:
            return self._with_calls(index, piece, collectors, self.tools)
        if self.top is not None or self.usage == "all":
            return self._rich(
                index, piece, collectors, {"content": piece.text} if piece.text else {}
            )
        if self.chat:
            delta = b'"delta":{"content":%b}' % encode(piece.text) if piece.text else b'"delta":{}'
            body = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b' % (
                index,
                delta,
                encode(piece.finish_reason),
            )
        else:
            body = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b' % (
                index, encode(piece.text), encode(piece.finish_reason))  # fmt: skip
        if piece.stop_reason is not None:
            body += b',"stop_reason":' + encode(piece.stop_reason)
        return self._head + body + b"}" + self._tail

    def _with_calls(
        self, index: int, piece: CompletionOutput, collectors: list[Collector], tools: ToolUse
    ) -> bytes:
        """A chunk for each thing that is new, and one without news for what a piece brings besides text. Perhaps none."""
        if index not in self._parsers:
            self._parsers[index] = tools.parser()
        parser = self._parsers[index]
        news = parser.push(piece.text)
        if piece.finish_reason is not None:
            news += parser.finish()
        alone = CompletionOutput(index, "", [])
        chunks = [self._rich(index, alone, collectors, {"content": new} if isinstance(new, str) else _call_delta(new))
                  for new in news]  # fmt: skip
        if piece.finish_reason is not None or piece.logprobs is not None or self.usage == "all":
            last = replace(piece, finish_reason=finish_reason(piece, parser.calls))
            chunks.append(self._rich(index, last, collectors, {}))
        return b"".join(chunks)

    def _rich(
        self,
        index: int,
        piece: CompletionOutput,
        collectors: list[Collector],
        delta: dict[str, Any],
    ) -> bytes:
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            choice["delta"] = delta
            choice["logprobs"] = None
            if piece.logprobs is not None and self.top is not None:
                choice["logprobs"] = chat_logprobs(self.tokenizer, piece.logprobs, self.top)
        else:
            choice.update(text=piece.text, logprobs=None)
            if piece.logprobs is not None and self.top is not None:
                if index not in self._offsets:
                    self._offsets[index] = Offsets(
                        self.tokenizer, collectors[0].request.params.skip_special_tokens
                    )
                known = self._offsets[index]
                offsets = known.push(
                    piece.token_ids, len(piece.text), piece.finish_reason is not None
                )
                choice["logprobs"] = completion_logprobs(
                    self.tokenizer, piece.token_ids, list(piece.logprobs), self.top, offsets
                )
        choice["finish_reason"] = piece.finish_reason
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        tail = self._tail
        if self.usage == "all":
            tail = b'],"usage":' + encode(usage_of(collectors)) + b"}\n\n"
        return self._head + encode(choice) + tail

    def end(
        self, collectors: list[Collector], generated: int | None = None, error: bytes | None = None
    ) -> bytes:
        """The last events. Who asked for usage gets it before an error, too: clients read no further than that."""
        usage = b""
        if self.usage is not None:
            usage = self._head + b'],"usage":' + encode(usage_of(collectors, generated)) + b"}\n\n"
        return usage + (b"" if error is None else event(error)) + DONE


def _call_delta(new: CallDelta) -> dict[str, Any]:
    if new.name is None:
        return {"tool_calls": [{"index": new.call, "function": {"arguments": new.arguments}}]}
    return {"tool_calls": [{"index": new.call, **whole_call(new.name, new.arguments)}]}
