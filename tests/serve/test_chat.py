"""Chats over HTTP: what clients of OpenAI and vLLM send is taken, and what a template rejects is
the client's to know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import Running, check_error, server

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("strict")
    with server(folder, request_templates=True, strict_params=True) as found:
        yield found


def rendered(running: Running, messages: list[dict[str, Any]], **more: Any) -> str:
    reply = running.post(CHAT + "/render", {"messages": messages, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["prompt"]


def test_template_options_without_effect_are_named_in_a_header(running: Running) -> None:
    options = {"enable_thinking": False, "tokenizer": 1, "bad name": 2}
    body = {"messages": HI, "chat_template_kwargs": options, "max_tokens": 1}
    for path in (CHAT, CHAT + "/render", "/tokenize"):
        reply = running.post(
            path, {k: v for k, v in body.items() if path == CHAT or k != "max_tokens"}
        )
        assert reply.status_code == 200, reply.text
        named = "chat_template_kwargs.enable_thinking, chat_template_kwargs.tokenizer"
        assert reply.headers["x-ignored-params"] == named
    assert rendered(running, HI, chat_template_kwargs=options) == rendered(running, HI)


def test_template_options_without_effect_are_refused_by_a_strict_server(strict: Running) -> None:
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    name = "chat_template_kwargs.enable_thinking"
    check_error(strict.post(CHAT, body), 400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "output_config": {"wat": 1}}),
        ("/v1/messages/count_tokens", {"messages": HI, "output_config": {"wat": 1}}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "text": {"wat": 1}}),
    ],
)
def test_unknown_members_are_refused_by_a_strict_server(
    strict: Running, path: str, body: dict[str, Any]
) -> None:
    reply = strict.post(path, body)
    assert reply.status_code == 400 and ".wat is not supported" in reply.json()["error"]["message"]


def test_documents_and_reasoning_effort_are_variables_of_the_template(strict: Running) -> None:
    template = "{{ documents[0].text }} {{ reasoning_effort }} {{ enable_thinking }}"
    asked = {"documents": [{"text": "<|end|>"}], "reasoning_effort": "low"}
    same = {"chat_template": template, **asked}
    assert rendered(strict, HI, **same) == "<|end|> low True"
    assert rendered(strict, HI, **{**same, "reasoning_effort": "none"}) == "<|end|> none False"
    own = {"chat_template_kwargs": {"enable_thinking": 5}}
    assert rendered(strict, HI, **same, **own) == "<|end|> low 5"
    reply = strict.post(CHAT, {"messages": HI, "max_tokens": 1, **asked})
    assert reply.status_code == 200
    assert reply.headers["x-ignored-params"] == "documents, reasoning_effort"


def test_a_tool_loop_as_openais_clients_send_it(running: Running) -> None:
    """Without content beside the calls, and with arguments that were cut in an earlier reply."""
    for arguments in ('{"city": "Paris"}', '{"city": "Par', ""):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            *HI,
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "the arguments are malformed"},
        ]
        reply = running.post(CHAT, {"messages": messages, "max_tokens": 1})
        assert reply.status_code == 200, reply.text
        assert "malformed" in rendered(running, messages)


def test_an_assistant_message_may_have_no_content(running: Running) -> None:
    messages = [*HI, {"role": "assistant", "content": None}, *HI]
    text = rendered(running, messages)
    assert text == rendered(running, [*HI, {"role": "assistant", "content": ""}, *HI])


def test_the_template_decides_which_roles_it_accepts(running: Running, strict: Running) -> None:
    wizard = [*HI, {"role": "wizard", "content": "Abracadabra"}]
    assert "wizard" in rendered(running, wizard)
    template = "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards here') }}{% endif %}{% endfor %}"
    error = check_error(strict.post(CHAT, {"messages": wizard, "chat_template": template}), 400)
    assert "no wizards here" in error["message"] and error["code"] == "chat_template_error"
    check_error(
        running.post(CHAT, {"messages": [{"role": "<x>", "content": ""}]}), 400, "messages.0.role"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages + 1 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ messages | tojson(indent=10**8) }}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    ],
)
def test_a_template_that_fails_is_the_clients_error(strict: Running, template: str) -> None:
    body = {"messages": HI, "chat_template": template}
    check_error(strict.post(CHAT, body), 400, code="chat_template_error")
    with_tools = {**body, "tools": [{"type": "function", "function": {"name": "f"}}]}
    check_error(strict.post(CHAT, with_tools), 400, code="chat_template_error")
