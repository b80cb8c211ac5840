"""Reasoning in the replies of the APIs that separate it from the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.serve.api.reply_writer import Part, ReasoningDelta, ReplyParser, complete_parts
from octavo.serve.serve_config import ServeConfig
from octavo.text.reasoning import STYLES, ReasoningFilter, detect_style
from tests.serve.conftest import REASONING_TEMPLATE
from tests.serve.running import Running, server
from tests.tiny_tokenizer import TEMPLATE

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
    whole = complete_parts(ReplyParser(None, ReasoningFilter()), TEXT)
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


# ---- chats ---------------------------------------------------------------------------------------


def streamed(running: Running, **asked: Any) -> dict[str, str]:
    """The deltas of a stream, joined by their names."""
    body = {"messages": ASKED, "stream": True, **asked}
    text = running.post("/v1/chat/completions", body).text
    joined: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            for name, value in json.loads(line[6:])["choices"][0]["delta"].items():
                joined[name] = joined.get(name, "") + (value or "")
    return joined


def message(running: Running, **asked: Any) -> dict[str, Any]:
    body = {"messages": ASKED, **asked}
    found: dict[str, Any] = running.post("/v1/chat/completions", body).json()
    return found["choices"][0]["message"]  # type: ignore[no-any-return]


def test_a_chat_has_reasoning_under_both_names(parrot: Running) -> None:
    found = message(parrot)
    assert found["reasoning"] == found["reasoning_content"] == "two and two"
    assert found["content"] == "four"
    assert streamed(parrot) == {
        "role": "assistant",
        "content": "four",
        "reasoning": "two and two",
        "reasoning_content": "two and two",
    }


def test_reasoning_can_be_left_out_or_left_in(parrot: Running) -> None:
    found = message(parrot, include_reasoning=False)
    assert found["reasoning"] is None and found["content"] == "four"
    assert "reasoning" not in streamed(parrot, include_reasoning=False)
    found = message(parrot, separate_reasoning=False)
    assert found["reasoning"] is None and found["content"] == TEXT
    assert streamed(parrot, separate_reasoning=False)["content"] == TEXT


def test_a_reply_of_reasoning_alone_has_no_content(parrot: Running) -> None:
    found = message(parrot, messages=[{"role": "user", "content": "<think>cut"}])
    assert found["content"] is None and found["reasoning"] == "cut"


def test_tools_are_read_after_the_reasoning(parrot: Running) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    asked = [{"role": "user", "content": f"<think>so</think>{call}"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = message(parrot, messages=asked, tools=tools)
    assert found["reasoning"] == "so" and found["content"] is None
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    functions = [{"name": "f"}]
    legacy = message(parrot, messages=asked, functions=functions)
    assert legacy["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "tool_calls" not in legacy
    body = {"messages": asked, "functions": functions}
    reply = parrot.post("/v1/chat/completions", body).json()
    assert reply["choices"][0]["finish_reason"] == "function_call"
    chunks = parrot.post("/v1/chat/completions", {**body, "stream": True}).text
    assert '"function_call":{"name":"f","arguments":""}' in chunks


# ---- styles --------------------------------------------------------------------------------------

STYLED = {
    "think": "<think>why</think>so",
    "harmony": "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    "<|channel|>final<|message|>so<|return|>",
    "mistral": "[THINK]why[/THINK]so",
    "seed_oss": "<seed:think>why</seed:think>so",
    "command_r": "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>so<|END_RESPONSE|>",
    "gemma4": "<|channel>thought\nwhy<channel|>so",
    "granite": "Here is my thought process:why Here is my response:so",
}


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_style_is_read_however_it_is_split(name: str, size: int) -> None:
    text = STYLED[name]
    found = {True: "", False: ""}
    reasoning_filter = ReasoningFilter(style=STYLES[name])
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for is_reasoning, part in [
        *(pair for piece in pieces for pair in reasoning_filter.push(piece)),
        *reasoning_filter.finish(),
    ]:
        found[is_reasoning] += part
    assert found[True].strip() == "why" and found[False] == "so"
    style = detect_style([f"{{# {text} #}}"])
    assert style is not None and style.name == name


def test_a_template_without_reasoning_has_no_style() -> None:
    assert detect_style(["{{ messages }}"]) is None


@pytest.mark.slow
def test_a_server_without_a_parser_leaves_reasoning_in_the_reply(tmp_path: Path) -> None:
    options = {"program": "tests.serve.parrot_engine", "chat_template": REASONING_TEMPLATE}
    with server(tmp_path, reasoning_parser="none", **options) as plain:
        assert message(plain)["content"] == TEXT
        blocks = plain.post("/v1/messages", {"messages": ASKED, "max_tokens": 100}).json()
        assert blocks["content"] == [{"type": "text", "text": TEXT}]


@pytest.mark.parametrize(
    ("given", "name"),
    [("qwen3", "think"), ("deepseek_r1", "think"), ("openai_gptoss", "harmony"), ("auto", "auto")],
)
def test_the_names_of_vllm_are_accepted(given: str, name: str) -> None:
    assert ServeConfig(reasoning_parser=given).reasoning_parser == name
    with pytest.raises(InvalidRequest, match="must be one of auto, none, think"):
        ServeConfig(reasoning_parser="other")


# ---- structures and budgets ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A random model whose prompt opens the reasoning, unless enable_thinking is false."""
    template = (
        TEMPLATE
        + "{% if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}{# </think> #}"
    )
    with server(tmp_path_factory.mktemp("thinker"), chat_template=template) as found:
        yield found


def asked_of(running: Running, **asked: Any) -> dict[str, Any]:
    fields = {"temperature": 1, "seed": 3, "max_tokens": 200, **asked}
    return message(running, messages=[{"role": "user", "content": "hi"}], **fields)


def test_a_budget_closes_the_reasoning(thinker: Running) -> None:
    for budget in (0, 5, 20):
        body = {"thinking_token_budget": budget, "return_token_ids": True, "ignore_eos": True}
        fields = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 60,
            "seed": 3,
            **body,
        }
        choice = thinker.post("/v1/chat/completions", fields).json()["choices"][0]
        assert len(choice["token_ids"]) == 60
        found = choice["message"]
        assert bool(found["reasoning"]) == bool(budget) and found["content"]
    unlimited = asked_of(thinker, thinking_token_budget=-1)
    assert unlimited["reasoning"]


def test_a_structure_is_that_of_the_answer(thinker: Running) -> None:
    asked = {"structured_outputs": {"choice": ["yes", "no"]}, "thinking_token_budget": 8}
    found = asked_of(thinker, **asked)
    assert found["reasoning"] and found["content"] in ("yes", "no")
    assert "reasoning" in streamed(thinker, messages=[{"role": "user", "content": "hi"}], **asked)
    off = asked_of(thinker, **asked, chat_template_kwargs={"enable_thinking": False})
    assert off["content"] in ("yes", "no")


def test_forced_calls_may_follow_the_reasoning(thinker: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = asked_of(thinker, tools=tools, tool_choice="required", thinking_token_budget=4)
    assert found["reasoning"] and found["tool_calls"][0]["function"]["name"] == "f"


def test_anthropics_budget_is_one_too(thinker: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 40,
        "thinking": {"type": "enabled", "budget_tokens": 6},
    }
    blocks = thinker.post("/v1/messages", body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]


def test_a_model_without_reasoning_ignores_a_budget(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 5}
    reply = running.post("/v1/chat/completions", {**body, "max_tokens": 4})
    assert reply.headers["x-ignored-params"] == "thinking_token_budget"
