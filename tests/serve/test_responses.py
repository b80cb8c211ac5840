"""OpenAI's Responses API over HTTP: items, events, stored responses, fields."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.responses import response_create_params

from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.openai_responses import to_chat
from octavo.serve.api.protocol import ResponsesRequest
from octavo.serve.api.request_fields import RESPONSES
from octavo.serve.front.response_store import ResponseStore
from octavo.serve.limits import Limits
from tests.serve.api_fields import FieldChecks
from tests.serve.running import NAME, Running, check_error

PATH = "/v1/responses"
BASE = {"input": "hi", "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "f",
        "description": "d",
        "parameters": {"type": "object"},
        "strict": None,
    }
]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
LONG = "x" * 2000
FIELDS = FieldChecks(
    path=PATH,
    base=BASE,
    group=RESPONSES,
    shown={
        "input": ({"input": "another"}, {}),
        "instructions": ({"instructions": "be brief"}, {}),
        "store": ({"store": False}, {}),
        "max_output_tokens": ({"max_output_tokens": 3}, {}),
        "stream": ({"stream": True}, {}),
        "tools": ({"tools": TOOLS}, {}),
        "tool_choice": ({"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS}),
        "parallel_tool_calls": ({"parallel_tool_calls": False}, {}),
        "text": ({"text": {"format": {"type": "json_object"}}}, {}),
        "reasoning": ({"reasoning": {"effort": "low"}}, {}),
        "include": ({"include": ["message.output_text.logprobs"]}, {}),
        "top_logprobs": (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"include": ["message.output_text.logprobs"]},
        ),
        "truncation": ({"truncation": "auto"}, {}),
        "metadata": ({"metadata": {"a": "b"}}, {}),
        "chat_template_kwargs": ({"chat_template_kwargs": {"messages": []}}, {}),
        "background": ({"background": True}, {}),
        "enable_response_messages": ({"enable_response_messages": True}, {}),
    },
    asks={
        "conversation": "x",
        "prompt": {"id": "x"},
        "context_management": [{"type": "x"}],
        "moderation": {"model": "x"},
    },
    elsewhere={"previous_response_id"},
)


@pytest.fixture(scope="module")
def client(parrot: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_an_unused_variable_of_the_template_is_named(parrot: Running) -> None:
    reply = parrot.post(PATH, {**BASE, "chat_template_kwargs": {"unused": True}})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-params"] == "chat_template_kwargs.unused"


def read_events(text: str) -> list[dict[str, Any]]:
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        kind, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def test_a_response(running: Running) -> None:
    found = running.post(PATH, {**BASE, "model": NAME, "metadata": {"a": "b"}}).json()
    assert found["id"].startswith("resp_") and found["object"] == "response"
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"][0]["type"] == "output_text" and item["content"][0]["text"]
    assert found["usage"]["output_tokens"] == 12 and found["metadata"] == {"a": "b"}


@pytest.mark.parametrize("text", ["plain words", f"I call. {CALL} {CALL}", CALL])
def test_a_stream_has_the_items_of_the_whole_response(parrot: Running, text: str) -> None:
    body = {"input": text, "tools": TOOLS, "max_output_tokens": 200}
    whole = parrot.post(PATH, body).json()
    events = read_events(parrot.post(PATH, {**body, "stream": True}).text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed" and whole["status"] == "completed"
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    for index, item in enumerate(done):
        mine = [e for e in events if e.get("output_index") == index]
        deltas = "".join(e["delta"] for e in mine if e["type"].endswith(".delta"))
        if item["type"] == "message":
            assert deltas == item["content"][0]["text"]
        else:
            assert deltas == item["arguments"] == '{"a": "b"}'


def test_the_official_client_reads_streams_calls_and_formats(client: openai.OpenAI) -> None:
    with client.responses.stream(model=NAME, input=f"So: {CALL}", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert final.output_text == "So:" and final.output[1].name == "f"  # type: ignore[union-attr]
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    spec = {"type": "json_schema", "name": "x", "schema": schema}
    format: Any = {"format": {**spec, "strict": True}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format"):
        bad: Any = {"format": {**spec, "schema": None}}
        client.responses.create(model=NAME, input="x", text=bad)
    found = client.responses.create(model=NAME, input='{"a":1}', text=format)
    assert json.loads(found.output_text) == {"a": 1}


def test_a_response_is_continued_by_its_id(client: openai.OpenAI) -> None:
    first = client.responses.create(model=NAME, input=CALL, tools=TOOLS, instructions="be brief")
    result: Any = {
        "type": "function_call_output",
        "call_id": first.output[0].call_id,  # type: ignore[union-attr]
        "output": "42",
    }
    items: list[Any] = [result, {"role": "user", "content": "and?"}]
    second = client.responses.create(
        model=NAME, input=items, tools=TOOLS, previous_response_id=first.id
    )
    assert second.output_text.endswith("42\n</tool_response>\nand?")
    assert second.previous_response_id == first.id
    whole: list[Any] = [{"role": "user", "content": CALL}, *first.output, *items]
    alone = client.responses.create(model=NAME, input=whole, tools=TOOLS)
    assert second.usage is not None and alone.usage is not None
    assert second.usage.input_tokens == alone.usage.input_tokens, "the same conversation"
    assert client.responses.retrieve(second.id).output == second.output


def test_responses_that_are_not_stored_are_a_typed_404(parrot: Running) -> None:
    kept = parrot.post(PATH, {"input": "x"}).json()["id"]
    unkept = parrot.post(PATH, {"input": "x", "store": False}).json()["id"]
    assert parrot.get(f"{PATH}/{kept}").json()["id"] == kept
    assert parrot.http.delete(f"{PATH}/{kept}").json()["deleted"] is True
    for id in (kept, unkept, "resp_none"):
        check_error(parrot.get(f"{PATH}/{id}"), 404, None, "response_not_found")
        check_error(parrot.http.delete(f"{PATH}/{id}"), 404, None, "response_not_found")
        body = {"input": "x", "previous_response_id": id}
        check_error(parrot.post(PATH, body), 404, "previous_response_id", "response_not_found")
    done = parrot.post(PATH, {"input": "x"}).json()["id"]
    check_error(parrot.post(f"{PATH}/{done}/cancel", {}), 400, "id")


def test_a_response_is_cancelled_while_it_is_generated(running: Running) -> None:
    body = {"input": "hi", "stream": True, "ignore_eos": True}
    with running.http.stream("POST", PATH, json=body) as reply:
        lines = reply.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        id = json.loads(first.removeprefix("data: "))["response"]["id"]
        assert running.get(f"{PATH}/{id}").json()["status"] == "in_progress"
        found = running.post(f"{PATH}/{id}/cancel", {})
        assert found.status_code == 200 and found.json()["status"] == "cancelled"
        last = [line for line in lines if line.startswith("data: ")][-1]
    response = json.loads(last.removeprefix("data: "))["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "cancelled"


def wait_for(running: Running, id: str, *unfinished: str) -> dict[str, Any]:
    """Return a response as soon as its status is none of these."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        found: dict[str, Any] = running.get(f"{PATH}/{id}").json()
        if found["status"] not in unfinished:
            return found
        time.sleep(0.02)
    raise AssertionError(f"the response is still {found['status']}")


def test_a_response_in_the_background_is_read_when_it_is_complete(running: Running) -> None:
    direct = running.post(PATH, BASE).json()
    begun = running.post(PATH, {**BASE, "background": True}).json()
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    found = wait_for(running, begun["id"], "queued", "in_progress")
    assert found["status"] == "incomplete" and found["background"] is True
    assert without_ids(found["output"]) == without_ids(direct["output"])
    check_error(running.post(f"{PATH}/{direct['id']}/cancel", {}), 400, "id")
    assert running.post(f"{PATH}/{begun['id']}/cancel", {}).json() == found, "it is complete"
    continued = running.post(PATH, {**BASE, "previous_response_id": begun["id"]})
    assert continued.status_code == 200, continued.text


def test_a_response_in_the_background_is_cancelled(running: Running) -> None:
    body = {"input": "hi", "ignore_eos": True, "background": True}
    id = running.post(PATH, body).json()["id"]
    assert wait_for(running, id, "queued")["status"] == "in_progress"
    early = {"input": "x", "previous_response_id": id}
    check_error(running.post(PATH, early), 400, "previous_response_id", "response_in_progress")
    check_error(running.http.delete(f"{PATH}/{id}"), 400, "id", "response_in_progress")
    assert running.post(f"{PATH}/{id}/cancel", {}).json()["status"] == "cancelled"
    found = running.get(f"{PATH}/{id}").json()
    assert (found["status"], found["error"], found["output"]) == ("cancelled", None, [])
    check_error(running.post(PATH, early), 400, "previous_response_id", "response_failed")
    assert running.http.delete(f"{PATH}/{id}").json()["deleted"] is True


def test_a_response_in_the_background_that_fails_keeps_its_error(running: Running) -> None:
    body = {"input": "hi", "ignore_eos": True, "background": True, "timeout": 0.05}
    id = running.post(PATH, body).json()["id"]
    found = wait_for(running, id, "queued", "in_progress")
    assert found["status"] == "failed" and found["error"]["code"] == "deadline_exceeded"


def test_a_request_in_the_background_that_is_invalid_is_refused_at_once(running: Running) -> None:
    wrong: list[dict[str, Any]] = [{"store": False}, {"stream": True}]
    for asked in wrong:
        check_error(running.post(PATH, {**BASE, "background": True, **asked}), 400, "background")
    bad = {**BASE, "background": True, "input": LONG}
    check_error(running.post(PATH, bad), 400, "input", "context_length_exceeded")


def test_the_messages_of_a_response_are_its_tokens(running: Running) -> None:
    found = running.post(PATH, {**BASE, "enable_response_messages": True}).json()
    (prompt,), (reply,) = found["input_messages"], found["output_messages"]
    assert prompt["type"] == reply["type"] == "raw_message_tokens"
    assert "hi" in prompt["message"]
    assert len(prompt["tokens"]) == found["usage"]["input_tokens"]
    for message in (prompt, reply):
        text = running.post("/detokenize", {"tokens": message["tokens"]}).json()["prompt"]
        assert text == message["message"]
    assert len(reply["tokens"]) == 12


def test_errors_name_the_fields_of_this_api(running: Running) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type"),
        ({"instructions": "x", "input": [{"role": "user", "content": 5}]}, "input.0.content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "mcp"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "f f"}]}, "tools.0.name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"truncation": "some"}, "truncation"),
    ]
    for asked, param in wrong:
        error = check_error(running.post(PATH, {**BASE, **asked}), 400, param)
        assert "messages" not in error["message"]


def test_an_error_keeps_a_name_that_the_client_sent(running: Running) -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"):
        error = check_error(running.post(PATH, {**BASE, name: 4}), 400, name)
        assert error["message"] == f"{name} is not supported: use max_output_tokens"
    error = check_error(running.post(PATH, {**BASE, "messages": []}), 400, "messages")
    assert error["message"] == "messages is not supported: use input"
    error = check_error(running.post(PATH, {**BASE, "min_tokens": 20}), 400, "min_tokens")
    assert error["message"] == "min_tokens (20) must not exceed max_output_tokens (12)"


def test_a_prompt_that_does_not_fit_is_truncated_if_the_client_says_so(running: Running) -> None:
    check_error(
        running.post(PATH, {**BASE, "input": LONG}), 400, "input", "context_length_exceeded"
    )
    cut = running.post(PATH, {**BASE, "input": LONG, "truncation": "auto"})
    assert cut.status_code == 200 and int(cut.headers["x-truncated-tokens"]) > 900


def test_tools_that_clients_offer_with_every_request_are_left_out(running: Running) -> None:
    offered = [
        {"type": "namespace", "name": "agents", "tools": [TOOLS[0]]},
        *TOOLS,
        {"type": "web_search", "external_web_access": False},
    ]
    body = {**BASE, "tools": offered, "tool_choice": "auto"}
    reply = running.post(PATH, body)
    assert reply.status_code == 200, reply.text
    ignored = reply.headers["x-ignored-params"].replace(" ", "").split(",")
    assert {"tools.namespace", "tools.web_search"} <= set(ignored)
    alone = running.post(PATH, {**BASE, "tools": [offered[0]], "tool_choice": "auto"})
    assert alone.status_code == 200, alone.text
    demanded = {**BASE, "tools": [offered[0]], "tool_choice": "required"}
    check_error(running.post(PATH, demanded), 400, "tool_choice")


def test_the_model_sees_the_functions_alone() -> None:
    offered = [{"type": "custom", "name": "apply_patch"}, *TOOLS]
    translation, _ = to_chat(ResponsesRequest(input="x", tools=offered), [], Limits())
    given = translation.chat.tools or []
    assert [one["function"]["name"] for one in given] == [one["name"] for one in TOOLS]


def test_an_error_names_the_place_of_a_tool_among_all_that_were_given(running: Running) -> None:
    wrong = {"type": "function", "name": "not a name"}
    tools = [{"type": "local_shell"}, *TOOLS, {"type": "custom", "name": "x"}, wrong]
    found = running.post(PATH, {**BASE, "tools": tools})
    check_error(found, 400, f"tools.{len(tools) - 1}.name")
    assert f"tools.{len(tools) - 1}.name" in found.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["mcp", "file_search", "code_interpreter", "nonsense"])
def test_tools_that_the_answer_depends_on_are_refused(running: Running, kind: str) -> None:
    tools = [{"type": "web_search"}, {"type": kind}]
    check_error(running.post(PATH, {**BASE, "tools": tools}), 400, "tools.1.type")


def test_allowed_tools_are_the_only_ones() -> None:
    tools = [*TOOLS, {**TOOLS[0], "name": "g"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "g"}]}
    body = ResponsesRequest(input="x", tools=tools, tool_choice=choice)
    translation, _ = to_chat(body, [], Limits())
    assert [one["function"]["name"] for one in translation.chat.tools or []] == ["g"]
    assert translation.chat.tool_choice == "required"


def test_every_field_of_the_api_is_handled(running: Running) -> None:
    FIELDS.check_honoured(running)
    FIELDS.check_others(running)
    known = {field.name for field in RESPONSES} | set(ResponsesRequest.__struct_fields__)
    assert set(get_type_hints(response_create_params.ResponseCreateParamsBase)) - known == set()


# ---- the store -----------------------------------------------------------------------------------


def response(id: str, size: int = 0) -> dict[str, Any]:
    return {"id": id, "output": ["x" * size]}


def test_the_store_keeps_the_newest_within_its_bytes() -> None:
    store = ResponseStore(Limits(response_bytes=10_000))
    for number in range(20):
        store.add("", response(f"r{number}", 1000), [{"role": "user", "content": "x" * 1000}])
        assert store.bytes <= 10_000
    assert 2 < len(store) < 10
    assert store.response("r19", "")["id"] == "r19"
    with pytest.raises(ApiError, match="not found"):
        store.response("r0", "")
    store.add("", response("huge", 20_000), [])
    assert len(store) == 0 and store.bytes == 0


def test_the_store_forgets_after_its_time_and_hides_from_other_keys() -> None:
    store = ResponseStore(Limits(response_seconds=0.05))
    store.add("alice", response("r"), [])
    assert store.conversation("r", "alice") == []
    with pytest.raises(ApiError) as caught:
        store.conversation("r", "bob")
    assert caught.value.status == 404
    time.sleep(0.06)
    with pytest.raises(ApiError, match="not found"):
        store.conversation("r", "alice")
