"""What the targets for JSON bodies have in common: a body is sent to a route, and the reply must be
a proper one."""

from __future__ import annotations

import json
from functools import cache

from tests.fuzz.front import ACCEPTED, FakeServer

WORDS = [
    b'"model"', b'"prompt"', b'"messages"', b'"role"', b'"content"', b'"user"', b'"system"', b'"assistant"', b'"tool"',
    b'"type"', b'"text"', b'"tools"', b'"function"', b'"name"', b'"parameters"', b'"arguments"', b'"tool_calls"',
    b'"tool_choice"', b'"auto"', b'"required"', b'"max_tokens"', b'"max_completion_tokens"', b'"temperature"', b'"top_p"',
    b'"top_k"', b'"min_p"', b'"n"', b'"best_of"', b'"stop"', b'"stop_token_ids"', b'"seed"', b'"logprobs"',
    b'"top_logprobs"', b'"prompt_logprobs"', b'"echo"', b'"stream"', b'"stream_options"', b'"include_usage"',
    b'"logit_bias"', b'"bad_words"', b'"allowed_token_ids"', b'"response_format"', b'"json_schema"', b'"schema"',
    b'"json_object"', b'"structured_outputs"', b'"guided_json"', b'"guided_regex"', b'"guided_choice"',
    b'"guided_grammar"', b'"priority"', b'"request_id"', b'"cache_salt"', b'"timeout"', b'"chat_template"',
    b'"chat_template_kwargs"', b'"enable_thinking"', b'"add_generation_prompt"', b'"continue_final_message"',
    b'"truncate_prompt_tokens"', b'"use_beam_search"', b'"repetition_penalty"', b'"presence_penalty"',
    b'"ignore_eos"', b'"min_tokens"', b'"tokens"', b'"add_special_tokens"', b'"return_token_strs"', b'"max_new_tokens"',
    b"true", b"false", b"null", b"NaN", b"Infinity", b"-0", b"1e400", b"18446744073709551616", b"\\ud800", b"\\u0000",
    b"<|eos|>", b"<|user|>", b"<|end|>", b"\xef\xb7\x90", b"{{", b"}}", b"{%",
]  # fmt: skip


@cache
def server() -> FakeServer:
    return FakeServer()


def check(path: str, data: bytes) -> tuple[int, str | None]:
    """Send a body. The reply is one that works, or an error of the client's in the shape of every
    error."""
    reply = server().post(path, data)
    if reply.status == 200:
        json.loads(reply.body)
        return 200, None
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"] and error["type"], error
    assert reply.status < 500 or error["code"] == ACCEPTED, (reply.status, error)
    assert reply.headers["x-request-id"].startswith("req_")
    assert b"Traceback" not in reply.body
    return reply.status, error["code"]


def seeds(*bodies: object) -> list[bytes]:
    return [json.dumps(body).encode() for body in bodies]
