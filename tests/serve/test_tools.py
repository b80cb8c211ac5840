"""Tools over HTTP: what is asked for, what the model is told, how calls come back, whole and in
pieces."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from tests import tiny
from tests.marks import slow_after
from tests.serve.running import NAME, Running, check_error, events, server

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def said(text: str, *names: str, **more: Any) -> dict[str, Any]:
    """A request that is answered with this text."""
    tools = [tool(name) for name in names or ("f", "g")]
    return {
        "messages": [{"role": "user", "content": text}],
        "tools": tools,
        "max_tokens": 400,
        **more,
    }


@pytest.fixture(scope="module")
def client(parrot: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n"}}\n</tool_call>'
TEXTS = {
    "no call": "Just  words \n",
    "a call": CALL,
    "words and calls": f"I look.\n\n{CALL}\n{CALL.replace('f', 'g')}\nDone.",
    "a call that is none": '<tool_call>{"nome": 1}</tool_call>',
    "a call cut short": CALL[:-20],
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_stream_says_what_the_whole_reply_says(
    parrot: Running, client: openai.OpenAI, text: str
) -> None:
    whole = client.chat.completions.create(model=NAME, **said(text)).choices[0]
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(model=NAME, **said(text), stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for new in choice.delta.tool_calls or []:
            assert new.function is not None
            if new.id is not None:
                assert (
                    new.index == len(calls)
                    and new.type == "function"
                    and new.function.arguments == ""
                )
                calls.append((new.id, new.function.name, ""))
            else:
                id, name, arguments = calls[new.index]
                calls[new.index] = id, name, arguments + (new.function.arguments or "")
        reason = choice.finish_reason or reason
    found = [c.function for c in whole.message.tool_calls or []]  # type: ignore[union-attr]
    assert (content or None if calls else content) == whole.message.content
    assert [call[1:] for call in calls] == [(f.name, f.arguments) for f in found]
    assert reason == whole.finish_reason == ("tool_calls" if calls else "stop")


def test_content_and_calls_are_told_apart(parrot: Running) -> None:
    choice = parrot.post(CHAT, said(TEXTS["words and calls"])).json()["choices"][0]
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["message"]["content"] == "I look.\n\n\n\nDone."
    )
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [
        {"name": "f", "arguments": '{"a": "é\\n"}'},
        {"name": "g", "arguments": '{"a": "é\\n"}'},
    ]
    bare = parrot.post(CHAT, said(CALL)).json()["choices"][0]["message"]
    assert bare["content"] is None and bare["role"] == "assistant"


def test_arguments_are_streamed_and_not_kept_back(parrot: Running) -> None:
    """This model's tokens are bytes: as many pieces come as the arguments have characters."""
    text = parrot.post(CHAT, said(CALL.replace("é", "long"), stream=True)).text
    deltas = [e["choices"][0]["delta"] for e in events(text)]
    pieces = [
        c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", []) if "id" not in c
    ]
    assert "".join(pieces) == '{"a": "long\\n"}' and len(pieces) >= len('{"a": "long\\n"}') - 2
    assert all(
        set(c) == {"index", "function"}
        for d in deltas
        for c in d.get("tool_calls", [])
        if "id" not in c
    )


def test_ids_are_unique(parrot: Running) -> None:
    ids = [
        call["id"]
        for _ in range(3)
        for choice in parrot.post(CHAT, said(f"{CALL}{CALL}", n=3)).json()["choices"]
        for call in choice["message"]["tool_calls"]
    ]
    assert len(ids) == len(set(ids)) == 18 and all(id.startswith("call_") for id in ids)


def test_each_choice_has_calls_of_its_own(parrot: Running) -> None:
    text = parrot.post(CHAT, said(CALL, n=3, stream=True)).text
    names, ends = [], []
    for event in events(text):
        for choice in event["choices"]:
            names += [
                (choice["index"], c["function"]["name"])
                for c in choice["delta"].get("tool_calls", [])
                if "id" in c
            ]
            ends += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
    assert sorted(names) == [(i, "f") for i in range(3)]
    assert sorted(ends) == [(i, "tool_calls") for i in range(3)]


def test_a_call_cut_by_the_length_says_so(parrot: Running) -> None:
    choice = parrot.post(CHAT, said(CALL, max_tokens=45)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": '}
    short = parrot.post(CHAT, said(CALL, max_tokens=20)).json()["choices"][0]
    assert short["finish_reason"] == "length" and short["message"]["content"] == CALL[:20]


def test_parallel_calls_can_be_declined(parrot: Running) -> None:
    for parallel, calls in ((None, 2), (True, 2), (False, 1)):
        message = parrot.post(CHAT, said(f"{CALL}{CALL}", parallel_tool_calls=parallel)).json()[
            "choices"
        ][0]["message"]
        assert len(message["tool_calls"]) == calls


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_generated_after_the_one_call_that_was_wanted(
    parrot: Running, stream: bool
) -> None:
    """This model's tokens are bytes."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    time.sleep(0.05)
    before = parrot.metrics()["octavo:generation_tokens_total"]
    reply = parrot.post(
        CHAT, said(f"Well.{CALL}{' and words' * 30}{CALL}", parallel_tool_calls=False, n=2, **more)
    )
    if stream:
        chunks = events(reply.text)
        usage, ends = (
            chunks[-1]["usage"],
            [c["finish_reason"] for e in chunks for c in e["choices"] if c["finish_reason"]],
        )
        said_here = "".join(c["delta"].get("content") or "" for e in chunks for c in e["choices"])
    else:
        usage, ends = reply.json()["usage"], [c["finish_reason"] for c in reply.json()["choices"]]
        said_here = "".join(c["message"]["content"] for c in reply.json()["choices"])
        assert [len(c["message"]["tool_calls"]) for c in reply.json()["choices"]] == [1, 1]
    used = len(f"Well.{CALL}".encode()) - len("\n</tool_call>")
    assert (
        usage["completion_tokens"] == 2 * used
        and ends == ["tool_calls"] * 2
        and sorted(said_here) == sorted("Well.Well.")
    )
    time.sleep(0.1)
    assert parrot.metrics()["octavo:generation_tokens_total"] - before <= 2 * (used + 100), (
        "the engine was told"
    )


def test_usage_and_logprobs_come_with_calls(parrot: Running) -> None:
    whole = parrot.post(CHAT, said(CALL, logprobs=True)).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        parrot.post(CHAT, said(CALL, logprobs=True, stream=True, stream_options=options)).text
    )
    told = [
        at
        for e in chunks
        for c in e["choices"]
        for at in (c["logprobs"] or {"content": []})["content"]
    ]
    assert (
        len(told)
        == len(whole["choices"][0]["logprobs"]["content"])
        == whole["usage"]["completion_tokens"]
    )
    assert chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }


def test_calls_are_content_where_none_were_asked_for(parrot: Running) -> None:
    for body in (said(CALL, tool_choice="none"), {**said(CALL), "tools": None}):
        choice = parrot.post(CHAT, body).json()["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        assert message == {"role": "assistant", "content": CALL}
        assert choice["finish_reason"] == "stop"


# ---- what the model is told ----------------------------------------------------------------------


def test_tools_are_told_to_a_template_that_knows_none(running: Running) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42 <|end|>"},
    ]  # fmt: skip
    body = {"messages": messages, "tools": [tool(description="<|end|>")]}
    found = running.post(CHAT + "/render", body).json()
    assert (
        "<|system|>You can call functions." in found["prompt"] and '"name": "f"' in found["prompt"]
    )
    assert (
        '<|assistant|><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|end|>'
        in found["prompt"]
    )
    assert "<tool_response>\n42 <|end|>\n</tool_response>" in found["prompt"]
    assert found["token_ids"].count(258) == 4, "one end a message: what others wrote is characters"
    assert running.post("/tokenize", body).json()["tokens"] == found["token_ids"]
    without = running.post(
        CHAT + "/render", {"messages": HI, "tools": [tool()], "tool_choice": "none"}
    ).json()
    assert without["prompt"] == "<|user|>hi<|end|><|assistant|>"


SHOWN = "{{ tools | tojson }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"


def test_calls_in_a_form_that_is_not_known_are_content(tmp_path: Path) -> None:
    """The request is answered, and a header says that nobody looked for calls."""
    with server(tmp_path, program="tests.serve.parrot_engine", request_templates=True) as auto:
        body = said(CALL, chat_template=SHOWN)
        reply = auto.post(CHAT, body)
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == CALL and not message.get("tool_calls")
        assert reply.headers["x-tool-calls"] == "not-parsed"
        strict = auto.post(CHAT, {**body, "tools": [tool(strict=True)]})
        assert strict.headers["x-ignored-params"] == "tools.function.strict"
        known = auto.post(CHAT, said(CALL, chat_template=SHOWN + "{# <tool_call> </tool_call> #}"))
        assert known.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert "x-tool-calls" not in known.headers
        rendered = auto.post(CHAT + "/render", body)
        assert rendered.json()["prompt"].startswith('[{"type": "function"')
        assert rendered.headers["x-tool-calls"] == "not-parsed"


FORMS = {
    "llama_json": '{"name": "f", "parameters": {"a": "1"}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "1"}',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "pythonic": "[f(a='1')]",
}


@pytest.mark.parametrize("name", slow_after(1, FORMS))
def test_the_operator_may_say_how_calls_are_written(tmp_path: Path, name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [tool(parameters=schema)]
    with server(tmp_path, tool_parser=name, program="tests.serve.parrot_engine") as other:
        message = other.post(CHAT, said(FORMS[name], tools=tools)).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "1"}'}
        assert message["content"] is None
        strict = [tool(parameters=schema, strict=True)]
        reply = other.post(CHAT, said(FORMS[name], tools=strict)).json()["choices"][0]
        assert reply["finish_reason"] == "tool_calls"


def test_calls_can_be_forced_without_a_parser(tmp_path: Path) -> None:
    with server(tmp_path, tool_parser="none") as other:
        body = {"messages": HI, "tools": [SWITCH], "seed": 1, "parallel_tool_calls": False}
        for choice in ("required", NAMED):
            reply = other.post(CHAT, {**body, "tool_choice": choice})
            (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["lamp"] in ("left", "right")
            assert "x-tool-calls" not in reply.headers
        free = other.post(CHAT, {**body, "max_tokens": 4})
        assert free.status_code == 200 and free.headers["x-tool-calls"] == "not-parsed"


# ---- what is refused -----------------------------------------------------------------------------

deep: dict[str, Any] = {"type": "object"}
for _ in range(200):
    deep = {"type": "object", "properties": {"a": deep}}

BAD: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "no tools in it": ({"tools": []}, "tools", "param_out_of_range"),
    "1,000 tools": ({"tools": [tool(f"f{i}") for i in range(1000)]}, "tools", "param_out_of_range"),
    "tools of a megabyte": ({"tools": [tool(description="x" * 2**20)]}, "tools", "param_out_of_range"),
    "tools as an object": ({"tools": tool()}, "tools", None),
    "a tool as a text": ({"tools": ["f"]}, "tools.0", None),
    "a tool of another type": ({"tools": [tool(), {"type": "web_search"}]}, "tools.1.type", None),
    "a tool without a type": ({"tools": [{"function": {"name": "f"}}]}, "tools.0.type", None),
    "a tool without a function": ({"tools": [{"type": "function"}]}, "tools.0.function", None),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", None),
    "a name with a space": ({"tools": [tool("a b")]}, "tools.0.function.name", None),
    "a name with a quote": ({"tools": [tool('a"b')]}, "tools.0.function.name", None),
    "a name with a line's end": ({"tools": [tool("a\n")]}, "tools.0.function.name", None),
    "a name of 65 characters": ({"tools": [tool("x" * 65)]}, "tools.0.function.name", None),
    "a name as a number": ({"tools": [tool(5)]}, "tools.0.function.name", None),  # type: ignore[arg-type]
    "two of a name": ({"tools": [tool(), tool()]}, "tools.1.function.name", None),
    "a description as a number": ({"tools": [tool(description=5)]}, "tools.0.function.description", None),
    "parameters as a text": ({"tools": [tool(parameters="{}")]}, "tools.0.function.parameters", None),
    "parameters of another type": ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters", None),
    "properties as a list": ({"tools": [tool(parameters={"properties": []})]}, "tools.0.function.parameters.properties", None),
    "a property as a text": ({"tools": [tool(parameters={"properties": {"a": "b"}})]}, "tools.0.function.parameters.properties",
                             None),
    "required as a text": ({"tools": [tool(parameters={"required": "a"})]}, "tools.0.function.parameters.required", None),
    "parameters 400 levels deep": ({"tools": [tool(parameters=deep)]}, "tools", None),
    "a choice without tools": ({"tool_choice": "auto"}, "tool_choice", None),
    "a forced choice without tools": ({"tool_choice": "required"}, "tool_choice", None),
    "another word as choice": ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", None),
    "a choice as a number": ({"tools": [tool()], "tool_choice": 5}, "tool_choice", None),
    "a choice of another type": ({"tools": [tool()], "tool_choice": {"type": "file"}}, "tool_choice", None),
    "a choice without a function": ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice", None),
    "a choice that is not there": ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "h"}}},
                                   "tool_choice.function.name", None),
    "a choice as a list": ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": ["f"]}}},
                           "tool_choice.function.name", None),
    "strict as a text": ({"tools": [tool(strict="yes")]}, "tools.0.function.strict", None),
    "parallel calls as a text": ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls", None),
}  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), BAD.values(), ids=BAD.keys())
def test_refused(running: Running, body: dict[str, Any], param: str, code: str | None) -> None:
    begun = time.monotonic()
    error = check_error(running.post(CHAT, {"messages": HI, **body}), 400, param)
    assert time.monotonic() - begun < 1
    assert error["code"] == code


def test_an_unknown_tool_is_told_which_there_are(running: Running) -> None:
    choice = {"type": "function", "function": {"name": "h"}}
    error = check_error(running.post(CHAT, said("x", "f", "g", tool_choice=choice)), 400)
    assert "f, g" in error["message"]


@pytest.mark.parametrize("message", [
    {"role": "assistant", "tool_calls": [{}]},
    {"role": "assistant", "tool_calls": [{"function": "f"}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": None, "arguments": None}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]},
    {"role": "assistant", "tool_calls": [5]},
    {"role": "assistant", "tool_calls": {"a": 1}, "content": None},
    {"role": "tool", "tool_calls": [{}]},
    {"role": "tool", "content": None},
    {"role": "system", "tool_calls": [{}]},
])  # fmt: skip
def test_odd_calls_in_a_conversation_never_break_the_server(
    running: Running, message: dict[str, Any]
) -> None:
    for body in ({"messages": [message]}, {"messages": [message, *HI], "tools": [tool()]}):
        reply = running.post(CHAT, {**body, "max_tokens": 1})
        assert reply.status_code in (200, 400), reply.text


def test_tools_are_for_chats(running: Running) -> None:
    check_error(
        running.post("/v1/completions", {"prompt": "x", "tools": [tool()]}),
        400,
        "tools",
        "unsupported_parameter",
    )


# ---- calls that must be made ---------------------------------------------------------------------

SWITCH = tool("switch", parameters={"type": "object", "properties": {"lamp": {"$ref": "#/$defs/Lamp"}, "on": {"type": "boolean"}},
              "required": ["lamp", "on"], "$defs": {"Lamp": {"enum": ["left", "right"]}}})  # fmt: skip
NAMED = {"type": "function", "function": {"name": "switch"}}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_made_whatever_the_model_would_say(
    running: Running, choice: Any, seed: int
) -> None:
    """This model has never seen a letter: all that it says is the grammar's doing."""
    body = {
        "messages": HI,
        "tools": [SWITCH, tool("wait")],
        "tool_choice": choice,
        "seed": seed,
        "parallel_tool_calls": False,
    }
    whole = running.post(CHAT, body).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    (function,) = [call["function"] for call in whole["message"]["tool_calls"]]
    arguments = json.loads(function["arguments"])
    if function["name"] == "switch":
        assert arguments["lamp"] in ("left", "right") and type(arguments["on"]) is bool
    else:
        assert (function["name"], arguments, choice) == ("wait", {}, "required")
    chunks = events(running.post(CHAT, {**body, "stream": True}).text)
    deltas = [
        call["function"] for e in chunks for call in e["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert (
        deltas[0]["name"] == function["name"]
        and "".join(d["arguments"] for d in deltas) == function["arguments"]
    )


def test_an_answer_in_a_format_may_come_instead_of_a_call(running: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    seen = set()
    for seed in range(20):
        body = {
            "messages": HI,
            "tools": [SWITCH],
            "response_format": format,
            "seed": seed,
            "parallel_tool_calls": False,
        }
        message = running.post(CHAT, body).json()["choices"][0]["message"]
        if "tool_calls" in message:
            assert message["content"] is None
            seen.add("call")
        else:
            assert json.loads(message["content"])["a"] in (1, 2)
            seen.add("answer")
    assert seen == {"call", "answer"}
    check_error(running.post(CHAT, {"messages": HI, "tools": [SWITCH], "structured_outputs": {"regex": "a"}}), 400,
                "structured_outputs")  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_refused(running: Running, stream: bool) -> None:
    bad = tool(parameters={"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}})
    reply = running.post(
        CHAT, {"messages": HI, "tools": [bad], "tool_choice": "required", "stream": stream}
    )
    assert "/$defs/none" in check_error(reply, 400, "tools", "invalid_structured_output")["message"]


def test_strict_tools_may_be_called_and_then_properly(parrot: Running) -> None:
    """This model would break the rules: it says what it likes, and is stopped when that is against
    the grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [tool(parameters=schema, strict=True)]
    for text in ("Just words", CALL, f"I look.\n{CALL}"):
        reply = parrot.post(CHAT, said(text, tools=tools)).json()
        choice = reply["choices"][0]
        assert choice["finish_reason"] == ("tool_calls" if "<" in text else "stop")
    wrong = CALL.replace('"é\\n"', "5")
    assert (
        parrot.post(CHAT, said(wrong, tools=[tool(parameters=schema)])).json()["choices"][0][
            "finish_reason"
        ]
        == "tool_calls"
    )
    check_error(
        parrot.post(CHAT, said(wrong, tools=tools)), 400, "tools", "structured_output_failed"
    )


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    """A forced call begins with the token itself, not with its characters, and is found although
    such tokens are hidden."""
    model = tmp_path / "model"
    shutil.copytree(tiny.model_dir(), model)
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_special_tokens(
        [tokenizers.AddedToken(tag, special=True) for tag in ("<tool_call>", "</tool_call>")]
    )
    backend.save(str(model / "tokenizer.json"))
    with server(tmp_path, model=str(model)) as other:
        body = {"messages": HI, "tools": [SWITCH], "tool_choice": NAMED, "seed": 1}
        found = other.post(CHAT, {**body, "logprobs": True}).json()["choices"][0]
        assert (
            found["finish_reason"] == "tool_calls"
            and found["message"]["tool_calls"][0]["function"]["name"] == "switch"
        )
        tokens = [at["token"] for at in found["logprobs"]["content"]]
        assert tokens[0] == "<tool_call>" and "</tool_call>" in tokens
        strict = {"type": "function", "function": {**SWITCH["function"], "strict": True}}
        free = other.post(
            CHAT, {**body, "tools": [strict], "tool_choice": "auto", "max_tokens": 10}
        ).json()["choices"][0]
        assert free["message"]["content"]
