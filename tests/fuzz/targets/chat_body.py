"""Bodies of POST /v1/chat/completions."""

from __future__ import annotations

from tests.fuzz.json_routes import WORDS, check, seeds

__all__ = ["SEEDS", "WORDS", "one_input"]

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
SEEDS = seeds(
    {"messages": [USER], "model": "tiny"},
    {"messages": [{"role": "system", "content": "be brief"}, USER], "max_tokens": 5, "stream": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 2, "seed": 1},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        ],
        "tools": [TOOL],
    },
    {"messages": [USER], "response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2},
    {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}},
    },
    {"messages": [USER], "logit_bias": {"5": -100, "6": 3.5}, "stop": ["a", "b"], "temperature": 0.5},
    {"messages": [USER], "chat_template": "{{ messages[0].content }}", "chat_template_kwargs": {"x": 1}},
    {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}, "timeout": 5, "priority": 1},
)  # fmt: skip


def one_input(data: bytes) -> object:
    return check("/v1/chat/completions", data)
