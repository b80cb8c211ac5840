"""Anthropic's Messages API over HTTP: events, tools, errors, fields, and a prompt that a changing
header line does not move out of the prefix cache."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.serve.api.anthropic_messages import to_chat
from octavo.serve.api.protocol import MessagesRequest
from octavo.serve.api.request_fields import MESSAGES
from octavo.serve.limits import Limits
from tests.serve.api_fields import FieldChecks
from tests.serve.running import NAME, Running

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BASE = {"messages": HI, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
TOOLS = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
ONE = {"allowed_token_ids": [65]}
# The fields of Anthropic's clients, stable and beta.
ANTHROPIC = """
cache_control container diagnostics inference_geo max_tokens messages metadata model output_config service_tier speed
stop_sequences system thinking tool_choice tools user_profile_id workspace_id betas compaction context_management
fallback_credit_token fallbacks mcp_servers thread stream temperature top_k top_p
"""
FIELDS = FieldChecks(
    path=PATH,
    base=BASE,
    group=MESSAGES,
    shown={
        "messages": ({"messages": [{"role": "user", "content": "another"}]}, {}),
        "system": ({"system": "be brief"}, {}),
        "max_tokens": ({"max_tokens": 3}, {}),
        "stop_sequences": ({**ONE, "stop_sequences": ["bb"]}, ONE),
        "stream": ({"stream": True}, {}),
        "tools": ({"tools": TOOLS}, {}),
        "tool_choice": ({"tools": TOOLS, "tool_choice": {"type": "any"}}, {"tools": TOOLS}),
        "thinking": ({"thinking": {"type": "disabled"}}, {}),
        "output_config": (
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": 1}}}},
            {},
        ),
    },
    asks={
        "container": "x",
        "mcp_servers": [{"url": "x"}],
        "compaction": {"type": "x"},
        "thread": "x",
        "fallbacks": ["x"],
    },
)


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize("name", ["tool_choice", "thinking"])
@pytest.mark.parametrize("kind", [[], {}, 1, None])
def test_a_type_that_is_no_string_is_refused(
    parrot: Running, path: str, name: str, kind: Any
) -> None:
    reply = parrot.post(path, {**BASE, "tools": TOOLS, name: {"type": kind}})
    assert reply.status_code == 400, reply.text
    assert f"{name}.type must be" in reply.json()["error"]["message"]


def read_events(text: str) -> list[dict[str, Any]]:
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        kind, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, as a whole reply has them."""
    blocks: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = {k: v for k, v in event["delta"].items() if k != "type"}
            texts[event["index"]] = texts.get(event["index"], "") + "".join(delta.values())
    for index, block in enumerate(blocks):
        if block["type"] == "tool_use":
            block["input"] = json.loads(texts[index] or "{}")
        else:
            block[block["type"]] = texts[index]
    return blocks


def test_a_message(running: Running) -> None:
    reply = running.post(PATH, {**BASE, "model": NAME})
    found = reply.json()
    assert reply.status_code == 200 and found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", NAME)
    assert [block["type"] for block in found["content"]] == ["text"]
    assert found["stop_reason"] == "max_tokens" and found["stop_sequence"] is None
    assert set(found["usage"]) == {
        "input_tokens",
        "output_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    }
    assert found["usage"]["output_tokens"] == 12
    stopped = running.post(PATH, {**BASE, **ONE, "stop_sequences": ["bb"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "bb")


def test_other_apis_have_the_text_of_a_chat(running: Running) -> None:
    """The same conversation has the same prompt, and so the same text."""
    conversation = [{"role": "system", "content": "be brief"}, *HI]
    shared = {"temperature": 0, "ignore_eos": True}
    chat = {"messages": conversation, "max_tokens": 12, **shared}
    wanted = running.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    message = running.post(PATH, {**BASE, "system": "be brief"}).json()
    assert message["content"] == [{"type": "text", "text": wanted}]
    response = {"input": "hi", "instructions": "be brief", "max_output_tokens": 12, **shared}
    (item,) = running.post("/v1/responses", response).json()["output"]
    assert item["content"][0]["text"] == wanted
    lines = {"messages": conversation, "stream": False, "options": {"num_predict": 12}, **shared}
    assert running.post("/api/chat", lines).json()["message"]["content"] == wanted


def test_a_stream_has_the_parts_of_the_whole_reply(parrot: Running) -> None:
    for text in ("plain words", f"I call. {CALL} {CALL}", CALL):
        body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "max_tokens": 200}
        whole = parrot.post(PATH, body).json()
        events = read_events(parrot.post(PATH, {**body, "stream": True}).text)
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop")
        assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]
        blocks = joined(events)
        for block in [*blocks, *whole["content"]]:
            block.pop("id", None)
        assert blocks == whole["content"]
        assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
        assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        assert whole["stop_reason"] == ("tool_use" if CALL in text else "end_turn")


def test_tools_and_their_results_reach_the_template() -> None:
    body = MessagesRequest(
        system=[{"type": "text", "text": "x-anthropic-billing-header: a=1;\nBe brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one "}]},
            {"role": "user", "content": "two"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "42"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
            {"role": "assistant", "content": "It is"},
        ],
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    )
    found = to_chat(body, Limits())
    chat = found.chat
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "42", "is_error": None, "name": "f"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat.parallel_tool_calls is False
    assert chat.continue_final_message is True and chat.add_generation_prompt is False
    assert found.fields.message_paths[3] == "messages.3.content.0"


def test_a_reply_continues_the_last_message(parrot: Running) -> None:
    continued = [*HI, {"role": "assistant", "content": "so"}]
    found = parrot.post("/v1/messages/count_tokens", {"messages": continued}).json()
    # <|user|>hi<|end|><|assistant|>so
    assert found == {"input_tokens": 1 + 2 + 1 + 1 + 2}


def test_counted_tokens_are_those_of_the_reply(running: Running) -> None:
    body = {"messages": HI, "system": "be brief", "tools": TOOLS}
    counted = running.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    usage = running.post(PATH, {**body, "max_tokens": 1}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


WRONG: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": []}, 400, "invalid_request_error", "messages must have at least one message"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     400, "invalid_request_error", "messages.0.content.0 must be a block of text, got 'image'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages.0.role must be"),
    ({"model": "another"}, 404, "not_found_error", "does not serve the model"),
    ({"stop_sequences": ["x"] * 99}, 400, "invalid_request_error", "stop_sequences can have at most"),
    ({"tools": [{"name": "f f", "input_schema": {"type": "object"}}]},
     400, "invalid_request_error", "tools.0.name must have"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
     400, "invalid_request_error", "tools.0.input_schema must be"),
    ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools.0.input_schema is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]},
     400, "invalid_request_error", "messages.0.content.0 must be a block of text, got 'image'"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}},
     400, "invalid_request_error", "thinking.budget_tokens must be an integer"),
    ({"thinking": {"type": "enabled", "budget_tokens": -2}},
     400, "invalid_request_error", "thinking.budget_tokens must be at least -1"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "no built-in tools"),
    ({"n": 2}, 400, "invalid_request_error", "n is not supported: this API does not have it"),
    ({"max_new_tokens": 2}, 400, "invalid_request_error", "max_new_tokens is not supported: use max_tokens"),
    ({"max_tokens": "many"}, 400, "invalid_request_error", "expected integer"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "status", "kind", "message"), WRONG)
def test_errors_have_anthropics_shape(
    running: Running, asked: dict[str, Any], status: int, kind: str, message: str
) -> None:
    reply = running.post(PATH, {**BASE, **asked})
    found = reply.json()
    assert reply.status_code == status, reply.text
    assert set(found) == {"type", "error", "request_id"} and found["type"] == "error"
    assert found["error"]["type"] == kind and message in found["error"]["message"]
    assert found["request_id"] == reply.headers["x-request-id"]


def test_members_without_effect_are_named(running: Running) -> None:
    tool = {**TOOLS[0], "input_examples": [], "wat": 1}
    asked = {"output_config": {"effort": None, "task_budget": {}, "wat": 1}, "tools": [tool]}
    reply = running.post(PATH, {**BASE, **asked, "thinking": {"type": "disabled", "a b": 1}})
    named = "tools.input_examples, output_config.task_budget, output_config.wat, tools.wat"
    ignored = reply.headers["x-ignored-params"].split(", ")
    assert set(named.split(", ")) <= set(ignored) and "thinking.a b" not in ignored


def test_counted_tokens_need_a_request_that_can_run(running: Running) -> None:
    asked = {"messages": HI, "allowed_token_ids": [300]}
    reply = running.post(f"{PATH}/count_tokens", asked)
    assert reply.status_code == 400 and "allowed_token_ids" in reply.json()["error"]["message"]


def test_hidden_reasoning_alone_is_a_turn(running: Running) -> None:
    hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    asked = {**BASE, "messages": [hidden, *HI]}
    assert running.post(PATH, asked).status_code == 200


def test_every_field_of_the_api_is_handled(running: Running) -> None:
    FIELDS.check_honoured(running)
    FIELDS.check_others(running)
    known = {field.name for field in MESSAGES} | set(MessagesRequest.__struct_fields__)
    assert set(ANTHROPIC.split()) - known == set()


def test_a_changing_header_line_leaves_the_prefix_cached(parrot: Running) -> None:
    """Ten turns of an agent, as Claude Code sends them: the first block changes each time."""
    messages: list[dict[str, Any]] = []
    before = 0
    for turn in range(10):
        nonce = f"x-anthropic-billing-header: cc_version=2.1.37.{turn:03x}; cch={turn * 7919:05x};"
        system = [
            {"type": "text", "text": nonce},
            {
                "type": "text",
                "text": "You are an agent. " * 20,
                "cache_control": {"type": "ephemeral"},
            },
        ]
        messages.append({"role": "user", "content": [{"type": "text", "text": f"turn {turn}"}]})
        body = {"system": system, "messages": messages, "max_tokens": 8}
        reply = parrot.post(PATH, body).json()
        assert reply["content"] == [{"type": "text", "text": f"turn {turn}"}]
        cached = reply["usage"]["cache_read_input_tokens"]
        assert cached >= 0.95 * before, (turn, cached, before)
        before = cached + reply["usage"]["input_tokens"]
        messages.append({"role": "assistant", "content": reply["content"]})
