"""Reasoning in the replies of the APIs that separate it from the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.serve.api.reply_writer import Part, ReasoningDelta, ReplyParser, whole_parts
from octavo.text.reasoning import ReasoningFilter
from tests.serve.running import Running

TEXT = "<think>two and two</think>\n\nfour"
ASKED = [{"role": "user", "content": TEXT}]


def parts(text: str, size: int, in_reasoning: bool = False) -> list[tuple[str, str]]:
    """The joined parts of a reply that arrives in pieces."""
    parser = ReplyParser(None, ReasoningFilter(in_reasoning))
    found: list[tuple[str, str]] = []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for i, piece in enumerate(pieces):
        for delta in parser.push(piece, is_last=i == len(pieces) - 1):
            assert isinstance(delta, str | ReasoningDelta)
            kind, new = ("text", delta) if isinstance(delta, str) else ("reasoning", delta.text)
            if found and found[-1][0] == kind:
                found[-1] = kind, found[-1][1] + new
            else:
                found.append((kind, new))
    return found


@pytest.mark.parametrize("size", [1, 3, 100])
def test_pieces_have_the_parts_of_the_whole_text(size: int) -> None:
    assert parts(TEXT, size) == [("reasoning", "two and two"), ("text", "four")]
    assert parts("so</think> four", size, in_reasoning=True) == [
        ("reasoning", "so"),
        ("text", "four"),
    ]
    assert parts("<think>cut", size) == [("reasoning", "cut")]
    whole = whole_parts(ReplyParser(None, ReasoningFilter()), TEXT)
    assert whole == [Part("reasoning", "two and two"), Part("text", "four")]


def test_messages_have_a_block_of_thinking(parrot: Running) -> None:
    def content(**thinking: Any) -> list[dict[str, Any]]:
        body = {"messages": ASKED, "max_tokens": 100, "thinking": {"type": "adaptive", **thinking}}
        blocks: list[dict[str, Any]] = parrot.post("/v1/messages", body).json()["content"]
        return blocks

    answer = {"type": "text", "text": "four"}
    thought = {"type": "thinking", "thinking": "two and two", "signature": ""}
    assert content() == [thought, answer]
    assert content(display="omitted") == [{**thought, "thinking": ""}, answer]
    body = {"messages": ASKED, "max_tokens": 100, "stream": True}
    text = parrot.post("/v1/messages", body).text
    assert '"type":"thinking_delta"' in text and "<think>" not in text


def test_responses_have_an_item_of_reasoning(parrot: Running) -> None:
    body = {"input": ASKED, "max_output_tokens": 100}
    found = parrot.post("/v1/responses", body).json()
    reasoning, message = found["output"]
    assert reasoning["type"] == "reasoning" and message["content"][0]["text"] == "four"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "two and two"}]
    text = parrot.post("/v1/responses", {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds
    continued = {"input": "again", "previous_response_id": found["id"]}
    assert parrot.post("/v1/responses", continued).status_code == 200


def test_ollama_has_thinking(parrot: Running) -> None:
    reply = parrot.post("/api/chat", {"messages": ASKED, "stream": False}).json()["message"]
    assert reply == {"role": "assistant", "content": "four", "thinking": "two and two"}
    lines = parrot.post("/api/generate", {"prompt": TEXT}).text.splitlines()
    found = [json.loads(line) for line in lines]
    assert "".join(line.get("thinking", "") for line in found) == "two and two"
    assert "".join(line["response"] for line in found) == "four"
    shown = parrot.post("/api/show", {}).json()
    assert "thinking" in shown["capabilities"]


def test_a_reply_with_a_structure_has_no_reasoning(parrot: Running) -> None:
    body = {
        "messages": ASKED,
        "max_tokens": 100,
        "structured_outputs": {"regex": "<think>(.|\\n)+"},
    }
    (block,) = parrot.post("/v1/messages", body).json()["content"]
    assert block["type"] == "text" and block["text"].startswith("<think>")
