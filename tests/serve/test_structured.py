"""Structured output through the server, mostly as openai-python asks for it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytest.importorskip("llguidance")

from octavo.params import StructuredOutputs
from octavo.serve.api import structured_output
from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.protocol import CompletionRequest
from octavo.serve.limits import Limits
from octavo.text.structural_tags import grammar_of_tags
from tests import schemas, tiny
from tests.serve.running import NAME, Running, check_error, events

HI = [{"role": "user", "content": "hi"}]
TAGS = {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 0, "maxItems": 3}
PARTS = {"colour": {"enum": ["red", "green"]}, "tags": TAGS, "ok": {"type": "boolean"}}
SCHEMA = {
    "type": "object",
    "properties": PARTS,
    "required": list(PARTS),
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}

# ---- how it is said ------------------------------------------------------------------------------

OTHER = {"type": "object", "properties": {"b": {"type": "null"}}}
EBNF = 'root ::= "a" | "b"'
STRUCTURES: dict[str, Any] = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OpenAI": ({"response_format": FORMAT}, dict(json=SCHEMA)),
    "OpenAI's any object": ({"response_format": {"type": "json_object"}}, dict(json_object=True)),
    "llama.cpp and Together": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, dict(json=SCHEMA)),
    "huggingface_hub": ({"response_format": {"type": "json_object", "value": SCHEMA}}, dict(json=SCHEMA)),
    "no schema after all": ({"response_format": {"type": "json_object", "schema": None}}, dict(json_object=True)),
    "without the outer object": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, dict(json=SCHEMA)),
    "TGI": ({"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, dict(json=SCHEMA)),
    "TGI's json": ({"response_format": {"type": "json", "value": SCHEMA}}, dict(json=SCHEMA)),
    "TGI's regex": ({"response_format": {"type": "regex", "value": "a+"}}, dict(regex="a+")),
    "Fireworks' grammar": ({"response_format": {"type": "grammar", "grammar": EBNF}}, dict(grammar=EBNF)),
    "vLLM's structural tags": ({"response_format": {"type": "structural_tag", **STRUCTURES}},
                               dict(grammar=grammar_of_tags(**STRUCTURES))),
    "vLLM's options": ({"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": True,
                                               "disable_additional_properties": False, "whitespace_pattern": " ?"}},
                       dict(json=SCHEMA, disable_additional_properties=False, whitespace_pattern=" ?")),
    "older vLLM's whitespace": ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, dict(json=SCHEMA, whitespace_pattern=" ?")),
    "whitespace of nothing": ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, dict(regex="a")),
    "llama.cpp's schema": ({"json_schema": SCHEMA}, dict(json=SCHEMA)),
    "llama.cpp's any JSON": ({"json_schema": {}}, dict(json={})),
    "llama.cpp's grammar": ({"grammar": EBNF}, dict(grammar=EBNF)),
    "SGLang's schema": ({"json_schema": json.dumps(SCHEMA)}, dict(json=SCHEMA)),
    "SGLang's regex": ({"regex": "a+"}, dict(regex="a+")),
    "SGLang's grammar": ({"ebnf": EBNF}, dict(grammar=EBNF)),
    "TGI's grammar": ({"grammar": {"type": "regex", "value": "a+"}}, dict(regex="a+")),
    "the same twice": ({"guided_grammar": EBNF, "structured_outputs": {"grammar": EBNF}}, dict(grammar=EBNF)),
    "the same as text": ({"guided_json": json.dumps(SCHEMA, indent=1), "response_format": FORMAT}, dict(json=SCHEMA)),
    "text and a structure": ({"response_format": {"type": "text"}, "guided_regex": "a"}, dict(regex="a")),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), READ.values(), ids=READ.keys())
def test_what_clients_of_other_servers_say_is_understood(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = structured_output.read(CompletionRequest(**fields), Limits())
    assert found is not None and structured_output._is_same(found, StructuredOutputs(**expected))


UNREAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "two schemas": ({"guided_json": SCHEMA, "response_format": {"type": "json_object", "schema": OTHER}}, "guided_json", "different"),
    "another order": ({"guided_json": SCHEMA, "json_schema": dict(reversed(SCHEMA.items()))}, "json_schema", "different"),
    "two kinds": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_choice and guided_regex specify different"),
    "open and closed": ({"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
                        "guided_json", "different"),
    "no such type": ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object"),
    "no triggers": ({"response_format": {"type": "structural_tag", "structures": STRUCTURES["structures"]}}, "response_format", "triggers must be"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "an object"),
    "no regex": ({"response_format": {"type": "regex"}}, "response_format.regex", "needs regex or value"),
    "an unknown option": ({"structured_outputs": {"json": SCHEMA, "structural_tag": {}}}, "structured_outputs.structural_tag", "use one of"),
    "a wrong option": ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": "no"}}, "structured_outputs", "true or false"),
    "whitespace of a regex": ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "is for json"),
    "a large schema": ({"guided_json": {"enum": ["x" * 1000] * 300}}, "guided_json", "at most 262144 characters"),
    "a large text": ({"regex": "x" * 300_000}, "regex", "at most 262144 characters"),
    "many choices": ({"guided_choice": ["x"] * 300_000}, "guided_choice", "at most 262144 characters"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), UNREAD.values(), ids=UNREAD.keys())
def test_what_cannot_be_understood_is_refused(
    fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(ApiError) as caught:
        structured_output.read(CompletionRequest(**fields), Limits())
    assert (caught.value.status, caught.value.param) == (
        400,
        param,
    ) and says in caught.value.message


def test_large_values_are_not_counted_to_the_end() -> None:
    huge = {"enum": [["x"]] * 2_000_000}
    begun = time.process_time()
    assert structured_output.larger_than(huge, 1000)
    assert time.process_time() - begun < 0.05
    assert not structured_output.larger_than({"a": [1, None, True, "bc"]}, 100)


# ---- what is replied -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("seed", range(5))
def test_json_schema_whole_and_streamed(client: openai.OpenAI, seed: int) -> None:
    same: Any = dict(
        model=NAME, messages=HI, response_format=FORMAT, max_tokens=200, temperature=1.5, seed=seed
    )
    whole = client.chat.completions.create(**same).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.message.content is not None and schemas.valid(
        SCHEMA, json.loads(whole.message.content)
    )
    chunks = list(client.chat.completions.create(**same, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_reply_parses_into_a_model(client: openai.OpenAI) -> None:
    class Part(BaseModel):
        count: Annotated[int, Field(ge=0, le=99)]

    class Thing(BaseModel):
        colour: Literal["red", "green"]
        part: Part | None
        ok: bool

    reply = client.chat.completions.parse(
        model=NAME, messages=HI, response_format=Thing, max_tokens=100, temperature=1.5, seed=1
    )  # type: ignore[arg-type]
    assert isinstance(reply.choices[0].message.parsed, Thing)


def test_json_object_and_what_max_tokens_cuts(client: openai.OpenAI) -> None:
    same: Any = dict(
        model=NAME, messages=HI, response_format={"type": "json_object"}, temperature=1.5
    )
    for seed in range(3):
        choice = client.chat.completions.create(**same, max_tokens=60, seed=seed).choices[0]
        text = choice.message.content or ""
        assert text[0] == "{" and not re.match(r"\{\s", text)
        assert (
            isinstance(json.loads(text), dict)
            if choice.finish_reason == "stop"
            else choice.finish_reason == "length"
        )


def test_n_choices_are_guided_each(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=NAME, messages=HI, response_format=FORMAT, max_tokens=200, n=5, seed=3
    )  # type: ignore[call-overload]
    contents = [c.message.content for c in reply.choices]
    assert len(set(contents)) > 1 and all(schemas.valid(SCHEMA, json.loads(c)) for c in contents)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, None),
        (
            {
                "structured_outputs": {
                    "json": json.dumps(SCHEMA),
                    "regex": None,
                    "disable_any_whitespace": True,
                }
            },
            None,
        ),
        ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, r"\d{3}-\d{4}"),
        ({"structured_outputs": {"choice": ["yes", "no", 'quo"te']}}, 'yes|no|quo"te'),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{3}/ ">"'}}, "<[a-z]{3}>"),
        ({"guided_json": SCHEMA}, None),
        ({"guided_regex": "[ab]{5}"}, "[ab]{5}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        ({"response_format": FORMAT}, None),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, None),
        (
            {"ebnf": 'root ::= "<" [a-z]{3} ">"', "guided_grammar": 'root ::= "<" [a-z]{3} ">"'},
            "<[a-z]{3}>",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_ways_to_say_it(running: Running, body: dict[str, Any], pattern: str | None) -> None:
    fields = {"prompt": "hello", "temperature": 1.5, "seed": 1, "max_tokens": 200, **body}
    choice = running.post("/v1/completions", fields).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert (
        re.fullmatch(pattern, choice["text"])
        if pattern
        else schemas.valid(SCHEMA, json.loads(choice["text"]))
    )
    plain = running.post(
        "/generate",
        {"prompt": "hello", "temperature": 1.5, "seed": 1, "max_new_tokens": 200, **body},
    )
    assert plain.json() == {"generated_text": choice["text"]}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unsupported": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "properties": {"a": {"not": {}}}}}}}, "response_format", "#/properties/a/not"),
    "bad regex": ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
    "bad grammar": ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs", "foo"),
    "bad schema text": ({"structured_outputs": {"json": "{"}}, "structured_outputs", "cannot be used"),
    "matches nothing": ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs", "empty"),
}  # fmt: skip


def test_what_is_refused_is_not_counted_as_done(running: Running) -> None:
    def done() -> list[str]:
        lines = running.get("/metrics").text.splitlines()
        return [
            line
            for line in lines
            if line.startswith(("octavo:request_success_total", "inference_requests_total"))
        ]

    before = done()
    assert (
        running.post("/v1/chat/completions", {"messages": HI, "guided_regex": "a("}).status_code
        == 400
    )
    assert len(before) > 1 and done() == before


@pytest.mark.parametrize(("body", "param", "says"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_a_400(
    running: Running, body: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    begun = time.monotonic()
    reply = running.post("/v1/chat/completions", {"messages": HI, "stream": stream, **body})
    assert time.monotonic() - begun < 1
    error = check_error(reply, 400, param, "invalid_structured_output")
    assert error["type"] == "invalid_request_error" and says in error["message"]


def test_openai_raises_for_a_bad_schema_in_a_stream_too(client: openai.OpenAI) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="strin"):
        client.chat.completions.create(model=NAME, messages=HI, response_format=bad, stream=True)  # type: ignore[call-overload]


def test_a_grammar_that_becomes_too_complex_ends_alone(running: Running) -> None:
    grammar = f"start: x\nx: {' | '.join('x ' * k for k in range(2, 12))} | /[a-z]/"
    wild = {
        "prompt": "hello",
        "max_tokens": 500,
        "guided_grammar": grammar,
        "logit_bias": {str(tiny.EOS): -100},
    }
    error = check_error(
        running.post("/v1/completions", wild), 400, "guided_grammar", "structured_output_failed"
    )
    assert "too long" in error["message"]
    reply = running.http.post("/v1/completions", json={**wild, "stream": True})
    assert (
        reply.status_code == 200
        and events(reply.text)[-1]["error"]["code"] == "structured_output_failed"
    )
    assert running.complete()["usage"]["completion_tokens"] == 4


def test_a_text_that_repeats_itself_is_ended_and_the_reply_says_so(running: Running) -> None:
    fields = {
        "prompt": "hello",
        "guided_regex": "b+",
        "max_tokens": 150,
        "logit_bias": {str(tiny.EOS): -100},
    }
    choice = running.post("/v1/completions", fields).json()["choices"][0]
    assert choice["text"] == "b" * 70
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition_detected")
    last = events(running.http.post("/v1/completions", json={**fields, "stream": True}).text)[-1]
    ended = last["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("length", "repetition_detected")
    off = {**fields, "repetition_detection": {"max_pattern_size": 0}}
    assert len(running.post("/v1/completions", off).json()["choices"][0]["text"]) == 150
    own = {**fields, "repetition_detection": {"max_pattern_size": 2, "min_count": 5}}
    assert running.post("/v1/completions", own).json()["choices"][0]["text"] == "b" * 5
    wrong = {**fields, "repetition_detection": {"max_pattern_size": 2}}
    check_error(
        running.post("/v1/completions", wrong),
        400,
        "repetition_detection.min_count",
        "param_out_of_range",
    )


def test_compilations_are_counted_and_each_schema_is_compiled_once(running: Running) -> None:
    def counts() -> list[float]:
        names = ("compilations", "cache_hits", "compile_seconds")
        found = running.metrics()
        return [found[f"octavo:structured_output_{name}_total"] for name in names]

    fields = {"prompt": "hello", "structured_outputs": {"regex": "counted{3}"}, "max_tokens": 20}
    before = counts()
    for _ in range(3):
        assert running.post("/v1/completions", fields).json()["choices"][0]["text"] == "counteddd"
    time.sleep(0.6)  # two beats
    after = counts()
    assert after[0] - before[0] == 1 and after[1] - before[1] == 2 and after[2] > before[2]
