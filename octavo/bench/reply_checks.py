"""The rules by which a reply of an OpenAI-compatible server counts.

    status       200, and a body that is complete
    choices      exactly one, which ended by its length
    usage        exactly the requested number of tokens
    text         not empty; with `exact`, one character for each token
    stream       ends with [DONE], has one id, nothing after its finish_reason, and no more pieces
                 of text than tokens, which detects a piece that was sent twice

This module handles HTTP/1.1 and JSON. It imports nothing else of octavo, and no torch.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

REQUEST_ID = re.compile(rb"\r\nx-request-id: *([\w-]+)", re.IGNORECASE)


class ExpectedReply(NamedTuple):
    """The properties of a correct reply."""

    tokens: int
    stream: bool = False
    chat: bool = False  # a reply of /v1/chat/completions
    exact: bool = False  # every token is one character
    # The server may not support ignore_eos, so a reply may stop before it has all tokens.
    may_stop: bool = False


class ReplyContent(NamedTuple):
    """The content of a reply."""

    id: str
    text: str
    finish_reason: str | None
    tokens: int
    prompt_tokens: int
    pieces: int  # chunks of a stream that have text


class CheckedReply(NamedTuple):
    status: int  # 0: there is no status line
    request_id: str
    content: ReplyContent | None = None
    problem: str | None = None  # None: the reply counts

    @property
    def tokens(self) -> int:
        return 0 if self.content is None else self.content.tokens


def check_reply(expected: ExpectedReply, data: bytes) -> CheckedReply:
    """Check the bytes of a reply. `problem` is None only for a reply that counts."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not (status_match := re.match(rb"HTTP/1\.[01] (\d\d\d)\b", head)):
        return CheckedReply(0, "", problem="no HTTP reply")
    status = int(status_match[1])
    id_match = REQUEST_ID.search(head)
    request_id = id_match[1].decode() if id_match else ""
    if status != 200:
        return CheckedReply(status, request_id, problem=f"status {status}")
    try:
        if re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE):
            body = dechunk(body)
        read = read_stream if expected.stream else read_whole
        content = read(body, expected.chat)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        problem = f"not a reply: {type(error).__name__} {error}"
        return CheckedReply(status, request_id, problem=problem)
    return CheckedReply(status, request_id, content, find_problem(expected, content))


def find_problem(expected: ExpectedReply, content: ReplyContent) -> str | None:
    """Return the problem of a reply that could be parsed, or None."""
    stopped_early = expected.may_stop and content.finish_reason == "stop"
    if content.tokens != expected.tokens and not (
        stopped_early and 0 < content.tokens < expected.tokens
    ):
        return f"usage says {content.tokens} tokens, not {expected.tokens}"
    if content.finish_reason != "length" and not stopped_early:
        return f"it ended with {content.finish_reason!r}, not 'length'"
    if expected.exact and len(content.text) != expected.tokens:
        return f"a text of {len(content.text)} characters"
    if not content.text:
        return "a text of 0 characters"
    if content.pieces > content.tokens:
        return f"{content.pieces} pieces of text for {content.tokens} tokens"
    return None


def read_whole(body: bytes, chat: bool) -> ReplyContent:
    reply = json.loads(body)
    if "error" in reply:
        raise ValueError(f"an error with status 200: {str(reply['error'])[:100]}")
    (choice,) = reply["choices"]
    usage = reply["usage"]
    return ReplyContent(
        id=str(reply.get("id", "")),
        text=choice["message"]["content"] if chat else choice["text"],
        finish_reason=choice["finish_reason"],
        tokens=usage["completion_tokens"],
        prompt_tokens=usage.get("prompt_tokens", 0),
        pieces=1,
    )


def read_stream(body: bytes, chat: bool) -> ReplyContent:
    *events_text, last_event, remainder = body.replace(b"\r\n", b"\n").split(b"\n\n")
    if (last_event, remainder) != (b"data: [DONE]", b""):
        raise ValueError("the stream does not end with [DONE]")
    events: list[dict[str, Any]] = [
        json.loads(event_text.removeprefix(b"data: "))
        for event_text in events_text
        if not event_text.startswith(b":")
    ]
    for event in events:
        if "error" in event:
            raise ValueError(f"an error in the stream: {str(event['error'])[:100]}")
    choices = [choice for event in events for choice in event["choices"]]
    if any(choice["finish_reason"] for choice in choices[:-1]):
        raise ValueError("the stream continues after its finish_reason")
    if any(choice.get("index", 0) != 0 for choice in choices):
        raise ValueError("the stream has more than one choice")
    ids = {str(event.get("id", "")) for event in events}
    if len(ids) != 1:
        raise ValueError("the stream mixes several replies: its chunks have different ids")
    texts = [
        (choice["delta"].get("content") or "") if chat else choice["text"] for choice in choices
    ]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return ReplyContent(
        id=ids.pop(),
        text="".join(texts),
        finish_reason=choices[-1]["finish_reason"],
        tokens=usage["completion_tokens"],
        prompt_tokens=usage.get("prompt_tokens", 0),
        pieces=sum(bool(text) for text in texts),
    )


def dechunk(body: bytes) -> bytes:
    """Return the content of a chunked HTTP body."""
    chunks: list[bytes] = []
    position = 0
    while True:
        line_end = body.index(b"\r\n", position)
        chunk_size = int(body[position:line_end], 16)
        if chunk_size == 0:
            if body[line_end:] != b"\r\n\r\n":
                raise ValueError("bytes after the last chunk")
            return b"".join(chunks)
        position = line_end + 2 + chunk_size
        if body[position : position + 2] != b"\r\n":
            raise ValueError("a chunk is longer or shorter than its declared size")
        chunks.append(body[line_end + 2 : position])
        position += 2
