"""Calls are found whatever pieces the text comes in. Their arguments come as they are written, and
no text is lost."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.params import StructuredOutputs
from octavo.text import ChatTemplate, Tokenizer
from octavo.text.guide import compile_source
from octavo.text.literals import keywords_as_json, members_as_json, text_as_json
from octavo.text.tool_calls import CallDelta
from octavo.text.tool_detect import detect_format, guess_format
from octavo.text.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA_JSON,
    NO_FORMAT,
    ToolFormat,
    steps_of,
)
from octavo.text.tool_grammar import allows_free_text, call_grammar, has_grammar
from octavo.text.tool_patterns import make_parser
from octavo.text.tool_prompt import spell_out
from tests.text.builders import byte_level

NAMES = {"f": None, "get_weather": None}
Found = tuple[str, list[tuple[str, str]]]


def read(
    *pieces: str, format: ToolFormat = HERMES, parallel: bool = True, tools: Any = NAMES
) -> Found:
    """The content and the calls (name, arguments)."""
    parser = make_parser(format, tools, parallel)
    news = [new for piece in pieces for new in parser.push(piece)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for new in news:
        if isinstance(new, CallDelta):
            if new.name is not None:
                calls.append((new.name, ""))
            assert new.call == len(calls) - 1, "calls come one after the other"
            calls[-1] = calls[-1][0], calls[-1][1] + new.arguments
    assert len(calls) == parser.calls
    return "".join(new for new in news if isinstance(new, str)), calls


def call(name: str, arguments: str = "{}", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


@pytest.mark.parametrize("most", range(1, len("</tool_call>")))
def test_a_cut_closing_tag_is_no_content(most: int) -> None:
    cut = "</tool_call>"[:most]
    assert read(f"Well.<tool_call>{call('f')}\n", cut) == ("Well.", [("f", "{}")])


def test_what_looks_like_the_start_of_a_tag_after_words_is_content() -> None:
    assert read(f"<tool_call>{call('f')} is it a <") == ("is it a <", [("f", "{}")])


def tagged(name: str, arguments: str = "{}") -> str:
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


def write(format: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """A reply with these calls, as a model of this format writes it."""
    written = [
        "".join(_written(format, step.kind, step.text, name, arguments) for step in steps)
        for (name, arguments), steps in zip(
            calls, [steps_of(format.call)] * len(calls), strict=True
        )
    ]
    if format.start and format.opening:
        written[0] = written[0].removeprefix(format.opening[-1])
    return format.before + format.between.join(written) + format.after


def _written(format: ToolFormat, kind: str, text: str, name: str, arguments: dict[str, Any]) -> str:
    as_json = json.dumps(arguments, ensure_ascii=False)
    if kind == "json":
        if format.keyed:
            return f"{{{json.dumps(name)}: {as_json}}}"
        return f'{{"{format.members[0]}": "{name}", "{format.members[1]}": {as_json}}}'
    if kind == "parameters":
        return "".join(
            format.parameter.replace("{key}", key)
            .replace("{kind}", str(isinstance(value, str)).lower())
            .replace("{value}", value if isinstance(value, str) else json.dumps(value))
            for key, value in arguments.items()
        )
    if kind == "python":
        return ", ".join(f"{key}={_in_python(value)}" for key, value in arguments.items())
    if kind == "gemma":
        members = [f"{key}:{_in_gemma(value, format.quote)}" for key, value in arguments.items()]
        return ",".join(members)
    return {"text": text, "space": text, "name": name, "id": "0", "arguments": as_json}.get(
        kind, ""
    )


def _in_python(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _in_gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_in_gemma(item, quote) for item in value)}]"
    return json.dumps(value)


# ---- what is a call ------------------------------------------------------------------------------


HERMES_TEXTS: dict[str, tuple[str, Found]] = {
    "one call": (tagged("f", '{"a": 1}'), ("", [("f", '{"a": 1}')])),
    "two calls": (f"{tagged('f')}\n{tagged('g')}", ("", [("f", "{}"), ("g", "{}")])),
    "two calls in a list": (f"<tool_call>[{call('f')}, {call('g')}]</tool_call>", ("", [("f", "{}"), ("g", "{}")])),
    "no white space": (f"<tool_call>{call('f')}</tool_call>", ("", [("f", "{}")])),
    "arguments first": ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', ("", [("f", '{"a": [1, {}]}')])),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", [("f", '{"a": 1}')])),
    "type and id": ('<tool_call>{"type": "function", "id": "1", "name": "f", "arguments": {}}</tool_call>', ("", [("f", "{}")])),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    "arguments of another type": (tagged("f", '"{\\"a\\": 1}"'), ("", [("f", '"{\\"a\\": 1}"')])),
    "null for arguments": (tagged("f", "null"), ("", [("f", "null")])),
    "brackets, quotes and tags in a string": (
        tagged("f", '{"a": "}]\\"</tool_call>{<tool_call>\\\\"}'),
        ("", [("f", '{"a": "}]\\"</tool_call>{<tool_call>\\\\"}')]),
    ),
    "words before it": (f"I look.\n\n{tagged('f')}", ("I look.", [("f", "{}")])),
    "words after it": (f"{tagged('f')}\nDone.", ("Done.", [("f", "{}")])),
    "words on both sides": (f"One \n{tagged('f')} two", ("One \n two", [("f", "{}")])),
    "white space alone around it": (f" \n{tagged('f')}\n\n", ("", [("f", "{}")])),
    "no call": (" a < b, <tool and </tool_call> \n", (" a < b, <tool and </tool_call> \n", [])),
    "nothing": ("", ("", [])),
    # what is wrong, before the name is known: content as it stands
    "no JSON": ("<tool_call>oops</tool_call>", ("<tool_call>oops</tool_call>", [])),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    "no name, and cut": ('<tool_call>{"arguments": {</tool_call>', ('<tool_call>{"arguments": {</tool_call>', [])),
    "a name that is no name": ('<tool_call>{"name": "a b"}</tool_call>', ('<tool_call>{"name": "a b"}</tool_call>', [])),
    "a name that is a number": ('<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    "a tag alone": ("x <tool_call>", ("x <tool_call>", [])),
    "cut in the name": ('<tool_call>{"name": "get_we', ('<tool_call>{"name": "get_we', [])),
    "another call after one that is none": (f"<tool_call>{tagged('f')}", ("<tool_call>", [("f", "{}")])),
    "half a tag at the end": ("x <tool_", ("x <tool_", [])),
    # afterwards: arguments as they are, the rest is content
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b\\', ("", [("f", '{"a": "b\\')])),
    "cut before the arguments": ('<tool_call>{"name": "f", "argu', ("", [("f", "")])),
    "a brace missing": ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', ("x", [("f", '{"a": 1}')])),
    "two braces missing": ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x', ("x", [("f", '{"a": 1')])),
    "a brace too many": (f"<tool_call>{call('f')}}}</tool_call>", ("}", [("f", "{}")])),
    "no closing tag": (f"<tool_call>{call('f')}{tagged('g')}", ("", [("f", "{}"), ("g", "{}")])),
    "words in a call": (f"<tool_call>{call('f')} so there </tool_call> x", ("so there  x", [("f", "{}")])),
    "Python instead of JSON": (tagged("f", "{'a': None}"), ("", [("f", "{'a': None}")])),
    "brackets that do not match": (tagged("f", '{"a": [1}'), ("", [("f", '{"a": [1}}')])),
    "a word instead of arguments": (tagged("f", "get(x)"), ("", [("f", "get(x)")])),
    "another member": ('<tool_call>{"name": "f", "why": 1}</tool_call>', (', "why": 1}', [("f", "")])),
}  # fmt: skip


@pytest.mark.parametrize(("text", "found"), HERMES_TEXTS.values(), ids=HERMES_TEXTS.keys())
def test_hermes(text: str, found: Found) -> None:
    assert read(text) == found
    assert read(*text) == found


LLAMA_TEXTS: dict[str, tuple[str, Found]] = {
    "the whole reply": (call("f", '{"a": 1}', "parameters"), ("", [("f", '{"a": 1}')])),
    "after white space": (f"\n {call('f')}", ("", [("f", "{}")])),
    "after the tag": (f"<|python_tag|>{call('f')}", ("", [("f", "{}")])),
    "after words and the tag": (
        f"Let me see: <|python_tag|>{call('f')}",
        ("Let me see:", [("f", "{}")]),
    ),
    "two": (f"{call('f')}; {call('get_weather')}", ("", [("f", "{}"), ("get_weather", "{}")])),
    "with a type": ('{"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
    "words after it": (f"{call('f')}\nDone", ("Done", [("f", "{}")])),
    "JSON of another kind": (' {"answer": 42}', (' {"answer": 42}', [])),
    "JSON with a name": (
        '{"name": "Bob", "parameters": {}}',
        ('{"name": "Bob", "parameters": {}}', []),
    ),
    "another kind of JSON after a call": (
        f'{call("f")}; {{"a": 1}}',
        ('; {"a": 1}', [("f", "{}")]),
    ),
    "JSON after words": (f"So: {call('f')}", (f"So: {call('f')}", [])),
    "a name that is none of the tools', with a tag": (
        f"<|python_tag|>{call('g')}",
        ("", [("g", "{}")]),
    ),
    "a program": ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    "a tag of another format": (tagged("f"), (tagged("f"), [])),
    "a closing tag in the arguments": (
        call("f", "[</tool_call>]"),
        ("", [("f", "[</tool_call>]")]),
    ),
}


@pytest.mark.parametrize(("text", "found"), LLAMA_TEXTS.values(), ids=LLAMA_TEXTS.keys())
def test_llama_json(text: str, found: Found) -> None:
    assert read(text, format=LLAMA_JSON) == found
    assert read(*text, format=LLAMA_JSON) == found


OTHER_TEXTS: dict[str, tuple[str, str, Found]] = {
    "mistral, two": (
        "mistral", 'Sure.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
        ("Sure.", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "mistral, the older form": ("mistral", "[TOOL_CALLS] [{}]", ("[TOOL_CALLS] [{}]", [])),
    "mistral, cut": ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', ("", [("f", '{"a": ')])),
    "mistral, cut in the name": ("mistral", "[TOOL_CALLS]f[AR", ("[TOOL_CALLS]f[AR", [])),
    "a list of calls and words": (
        "mistral_json", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}] Done.',
        ("Done.", [("f", "{}"), ("g", "{}")]),
    ),
    "deepseek without a fence": (
        "deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}",
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}", []),
    ),
    "deepseek, broken arguments": (
        "deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{oops<｜tool▁call▁end｜>",
        ("", [("f", "{oops")]),
    ),
    "kimi without its section": (
        "kimi_k2",
        "Well.<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ("Well.", [("f", "{}")]),
    ),
    "functionary, an answer": ("functionary_v3", "all\nHello", ("Hello", [])),
    "functionary, an answer and a call": (
        "functionary_v3", "all\nI look.>>>f\n{}", ("I look.", [("f", "{}")])
    ),
    "functionary, other words": ("functionary_v3", "Hello\n{", ("Hello\n{", [])),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        ("analysisHm.assistantcommentary", [("f", '{"a": 1}')]),
    ),
    "a parameter without a type": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n x \n</parameter>\n<parameter=b>\n[1, 2]\n"
        "</parameter>\n<parameter=c>\nTrue\n</parameter>\n</function>\n</tool_call>",
        ("", [("f", '{"a": " x ", "b": [1, 2], "c": true}')]),
    ),
    "a parameter that is cut": (
        "qwen3_coder", "<tool_call><function=f><parameter=a>\nline\n</param",
        ("", [("f", '{"a": "\\nline\\n</param')]),
    ),
    "no parameters": ("glm45", "<tool_call>f</tool_call>", ("", [("f", "{}")])),
    "words among parameters": (
        "glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value>oops</tool_call> x",
        ("oops x", [("f", '{"a": 1')]),
    ),
    "hermes where tags are expected": ("glm45", tagged("f"), (tagged("f"), [])),
    "strings by their own word": (
        "deepseek_v32",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter></｜DSML｜invoke>',
        ("", [("f", '{"a": "1", "b": 1}')]),
    ),
    "python": (
        "pythonic", "[f(a='it\\'s', b=[1, (2, None)], c={'d': True}), get_weather()]",
        ("", [("f", '{"a": "it\'s", "b": [1, [2, null]], "c": {"d": true}}'), ("get_weather", "{}")]),
    ),
    "python without quotation marks": (
        "pythonic", "[f(city=New York, days=3)]", ("", [("f", '{"city": "New York", "days": 3}')])
    ),
    "python without keywords": ("pythonic", "[f(1, 2)]", ("", [("f", "1, 2")])),
    "python, another function": ("pythonic", "[print('x')]", ("[print('x')]", [])),
    "python, a list": ("pythonic", "[1, 2] or so", ("[1, 2] or so", [])),
    "python, cut": ("pythonic", "[f(a='x", ("", [("f", "a='x")])),
    "python in tags, any name": (
        "lfm2", "Hm.<|tool_call_start|>[g(a=1)]<|tool_call_end|>", ("Hm.", [("g", '{"a": 1}')])
    ),
    "gemma": (
        "gemma4", '<|tool_call>call:f{a:<|"|>x}<|"|>,b:{c:[1,true]}}<tool_call|>',
        ("", [("f", '{"a": "x}", "b": {"c": [1, true]}}')]),
    ),
    "the name as a key": (
        "apertus", '<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "silent tags": (
        "command_r", "<|START_RESPONSE|>Hello<|END_RESPONSE|>", ("Hello", [])
    ),
    "calls that are not looked for": ("none", tagged("f"), (tagged("f"), [])),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "found"), OTHER_TEXTS.values(), ids=OTHER_TEXTS.keys())
def test_other_formats(name: str, text: str, found: Found) -> None:
    format = FORMATS.get(name, NO_FORMAT)
    assert read(text, format=format) == found
    assert read(*text, format=format) == found


@every_format
def test_without_parallel_calls_the_first_ends_the_reply_in_each_format(format: ToolFormat) -> None:
    text = write(format, [("f", {"a": "b"}), ("get_weather", {})]) + " and more"
    content, calls = read(*text, format=format, parallel=False)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"a": "b"})]
    assert not content


def test_without_parallel_calls_the_first_ends_the_reply() -> None:
    text = f"well {tagged('f', '[1]')} and {tagged('g', '[2]')} end"
    assert read(text, parallel=False) == read(*text, parallel=False) == ("well", [("f", "[1]")])
    cut = '<tool_call>{"name": "f", "arguments": {"a": </tool_call> and more'
    assert read(cut, parallel=False) == read(*cut, parallel=False) == ("", [("f", '{"a": ')])
    bare = '{"name": "f", "parameters": [1]}; {"name": "f"}'
    assert read(bare, format=LLAMA_JSON, parallel=False) == ("", [("f", "[1]")])


def test_when_the_reply_is_over() -> None:
    text, parser = tagged("f", '{"a": {}}'), make_parser(HERMES, NAMES, parallel=False)
    heard = 0
    while not parser.is_done:
        parser.push(text[heard])
        heard += 1
    assert text[:heard].endswith("{}}}") and heard == text.rindex("}") + 1, (
        "with the call, without waiting for the tag"
    )
    both = make_parser(HERMES, NAMES)
    both.push(text)
    assert not both.is_done and not make_parser(HERMES, NAMES, parallel=False).is_done


# ---- pieces --------------------------------------------------------------------------------------

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "</", "<", "{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n",
    '"name"', '"arguments"', '"parameters"', '"type"', '"f"', '"function"', "null", "5", "words", "é", "\u2003",
    '{"name": "f", "arguments": ', '{"name": "get_weather"', '{"a": "b\\n"}', tagged("f", '{"a": [1, "}"]}'), call("f"),
]  # fmt: skip


def fragments_of(format: ToolFormat) -> st.SearchStrategy[str]:
    """Texts made of what matters in this format, and of what does not."""
    whole = write(format, [("f", {"a": "words", "b": [5, "}"]}), ("get_weather", {})])
    own = [text for text in format.texts if text] + ["f", "get_weather", "a", whole, whole[:-3]]
    own += [whole[: len(whole) // 2], whole[len(whole) // 2 :], "'", "=", "(", ")", "all"]
    return st.lists(st.sampled_from(own + FRAGMENTS), max_size=14).map("".join)


def check_pieces(format: ToolFormat, data: st.DataObject) -> None:
    text = data.draw(fragments_of(format))
    parallel = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = read(text, format=format, parallel=parallel)
    assert read(*pieces, format=format, parallel=parallel) == whole
    assert read(*text, format=format, parallel=parallel) == whole


@every_format
@settings(max_examples=6)
@given(st.data())
def test_pieces_join_to_what_the_whole_gives(format: ToolFormat, data: st.DataObject) -> None:
    check_pieces(format, data)


@pytest.mark.slow
@every_format
@settings(max_examples=100)
@given(st.data())
def test_pieces_of_many_texts_join_to_what_the_whole_gives(
    format: ToolFormat, data: st.DataObject
) -> None:
    check_pieces(format, data)


def joined(deltas: list[str | CallDelta]) -> list[str | CallDelta]:
    """The deltas with neighbours that continue each other joined. A name stays alone."""
    found: list[str | CallDelta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(last, str) and isinstance(delta, str):
            found[-1] = last + delta
        elif (
            isinstance(last, CallDelta)
            and isinstance(delta, CallDelta)
            and last[:2] == (delta.call, delta.name)
        ):
            found[-1] = last._replace(arguments=last.arguments + delta.arguments)
        else:
            found.append(delta)
    return found


@every_format
def test_single_characters_give_the_deltas_of_the_whole_reply(format: ToolFormat) -> None:
    made = [("f", {"a": "x y", "b": [5, "}"]}), ("get_weather", {"city": "Paris"})]
    text = write(format, made)
    parser = make_parser(format, NAMES)
    single: list[str | CallDelta] = []
    for character in text:
        single += parser.push(character)
    single += parser.finish()
    whole = make_parser(format, NAMES)
    deltas = whole.push(text) + whole.finish()
    assert joined(single) == joined(deltas)
    named = [delta.name for delta in deltas if isinstance(delta, CallDelta) and delta.name]
    assert named == ["f", "get_weather"]


@every_format
@settings(max_examples=6)
@given(st.data())
def test_a_reply_without_calls_is_what_the_model_wrote(
    format: ToolFormat, data: st.DataObject
) -> None:
    text = data.draw(fragments_of(format))
    content, calls = read(text, format=format)
    for tag in format.silent:
        text = text.replace(tag, "")
    assert calls or content == text or (format.plain and content == text.lstrip()[4:])


@settings(max_examples=30)
@given(st.data(), st.sampled_from([format for format in FORMATS.values() if format.is_json]))
def test_every_word_of_a_reply_is_somewhere(data: st.DataObject, format: ToolFormat) -> None:
    """Nothing goes but tags, names of members and punctuation around them."""
    text = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
    content, calls = read(text, format=format)
    kept = content + "".join(name + arguments for name, arguments in calls)
    for word in ("words", "é", "5", "null"):
        assert kept.count(word) == text.count(word), (content, calls)


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(), inner), max_leaves=8)  # fmt: skip
plain_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text("abé \n'\"\\{[(,=:")
    | st.lists(st.integers() | st.text("abé \n'\"\\{[(,=:"), max_size=3)
)
TYPES = {str: "string", bool: "boolean", int: "integer", list: "array", type(None): "null"}


def schema_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}}


Made = list[tuple[str, dict[str, Any]]]
made_calls = st.lists(
    st.tuples(
        st.sampled_from(list(NAMES)),
        st.dictionaries(st.text("abc_", min_size=1), plain_values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def check_calls_come_back(format: ToolFormat, made: Made) -> None:
    if "{parameters}" not in format.call:
        tools: dict[str, Any] = NAMES
    else:  # a value's type is known from the tool alone, which has one set of parameters
        made = made[:1]
        tools = {name: schema_of(arguments) for name, arguments in made}
    text = write(format, made)
    for pieces in ([text], list(text)):
        content, calls = read(*pieces, format=format, tools=tools)
        assert content == "", text
        assert [(name, json.loads(arguments)) for name, arguments in calls] == made, text


@every_format
@settings(max_examples=5)
@given(made_calls)
def test_calls_come_back_as_they_were_made(format: ToolFormat, made: Made) -> None:
    check_calls_come_back(format, made)


@pytest.mark.slow
@every_format
@settings(max_examples=100)
@given(made_calls)
def test_many_calls_come_back_as_they_were_made(format: ToolFormat, made: Made) -> None:
    check_calls_come_back(format, made)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(NAMES)),
            st.dictionaries(st.text(), values, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([HERMES, LLAMA_JSON]),
)
def test_arguments_in_json_come_back_to_the_letter(
    made: list[tuple[str, dict[str, Any], bool]], format: ToolFormat
) -> None:
    texts = [json.dumps(arguments, ensure_ascii=ascii) for _, arguments, ascii in made]
    calls = [
        format.call.replace("{json}", call(name, text, format.members[1]))
        for (name, *_), text in zip(made, texts, strict=True)
    ]
    found = read(*format.between.join(calls), format=format)
    assert found == ("", [(name, text) for (name, *_), text in zip(made, texts, strict=True)])


def test_arguments_come_as_they_are_written_and_no_sooner_than_the_name() -> None:
    parser = make_parser(HERMES, NAMES)
    assert parser.push('Sure.\n<tool_call>\n{"name": "get_wea') == ["Sure."]
    assert parser.push('ther", "arg') == [CallDelta(0, "get_weather", "")]
    assert parser.push('uments": {"ci') == [CallDelta(0, None, '{"ci')]
    assert parser.push('ty": "Par') == [CallDelta(0, None, 'ty": "Par')]
    assert parser.push('is"}}\n</tool_call>') == [CallDelta(0, None, 'is"}')]
    assert parser.finish() == []


# ---- values that are not JSON ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "schema", "want"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", None, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("1.5", {"type": "number"}, 1.5),
        ("['a', None, (1, -2.5e3)]", {"type": "array"}, ["a", None, [1, -2500.0]]),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': 'it\\'s \\x41\\u00e9\\n'}", {"type": "object"}, {"a": "it's A\u00e9\n"}),
        ("'quoted'", None, "'quoted'"),
        ("NaN", None, "NaN"),
        ("x" * 3, {"type": "integer"}, "xxx"),
        ("[" * 5000, None, "[" * 5000),
        ("1" * 5000, None, "1" * 5000),
        ("", {"type": "string"}, ""),
        ('["\\ud83d\\ude00", "\\ud83d"]', None, ["\U0001f600", "\ufffd"]),
    ],
)
def test_a_parameters_text_becomes_json_of_its_type(text: str, schema: Any, want: Any) -> None:
    assert json.loads(text_as_json(text, schema)) == want


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)  # fmt: skip
def test_pythons_literals_become_json(value: Any) -> None:
    for written in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        found = keywords_as_json(f"a={written}")
        assert found is not None and json.loads(found) == {"a": value}


@pytest.mark.parametrize("text", ["1", "a=1 b=2", "a", "=1", "a=1,,b=2", "a=(1"])
def test_what_is_not_a_list_of_keywords(text: str) -> None:
    found = keywords_as_json(text)
    assert found is None or json.loads(found)["a"] in ("1 b=2", "(1")


def test_members_with_quotes_of_their_own() -> None:
    found = members_as_json('a:<|"|>x"y<|"|>,b:[1,<|"|><|"|>],c:{d:None}', '<|"|>')
    assert found is not None
    assert json.loads(found) == {"a": 'x"y', "b": [1, ""], "c": {"d": None}}
    assert members_as_json('a:<|"|>x', '<|"|>') is not None
    assert members_as_json("oops", '<|"|>') is None


# ---- time ----------------------------------------------------------------------------------------

SIZE = 100_000
LARGE_SIZE = 1_000_000
PATHOLOGICAL = {
    "beginnings of tags": "<",
    "tags": "<tool_call>",
    "calls that are none": "<tool_call>{",
    "white space": " \n",
    "calls": f"<tool_call>{call('f')}</tool_call>",
    "brackets": ('<tool_call>{"name": "f", "arguments": ', "["),
    "escapes": ('<tool_call>{"name": "f", "arguments": "', '\\"'),
    "strings": ('<tool_call>{"name": "f", "arguments": [', '"",'),
    "half closing tags": ('<tool_call>{"name": "f", "arguments": ', "</tool_cal"),
    "arguments without a name": ('<tool_call>{"arguments": [', '{"a": 1},'),
    "a member's name without end": ('<tool_call>{"', '\\"'),
}


def seconds(text: str, step: int, format: ToolFormat = HERMES) -> float:
    parser = make_parser(format, NAMES)
    begun = time.process_time()
    for at in range(0, len(text), step):
        parser.push(text[at : at + step])
    parser.finish()
    return time.process_time() - begun


def check_linear(head: str, repeated: str, size: int, format: ToolFormat) -> None:
    text = (head + repeated * (size // len(repeated)))[:size]
    eighth = min(seconds(text[: size // 8], 5, format) for _ in range(2))
    assert eighth < 1
    assert seconds(text, 5, format) < 3 * 8 * max(eighth, 0.02)


pathological = pytest.mark.parametrize("case", PATHOLOGICAL.values(), ids=PATHOLOGICAL.keys())


@pathological
def test_time_is_linear(case: str | tuple[str, str]) -> None:
    head, repeated = ("", case) if isinstance(case, str) else case
    check_linear(head, repeated, SIZE, HERMES)


@pytest.mark.slow
@pathological
def test_time_is_linear_in_a_megabyte(case: str | tuple[str, str]) -> None:
    """A megabyte in pieces of five characters takes about a second, eight times as long as an
    eighth of it. An algorithm that read all of the text again for each piece would take hours."""
    head, repeated = ("", case) if isinstance(case, str) else case
    check_linear(head, repeated, LARGE_SIZE, HERMES)


PATHOLOGICAL_PATTERNS = {
    "names": ("pythonic", "[", "f"),
    "brackets": ("pythonic", "[f(a=", "["),
    "quotes": ("pythonic", "[f(a='", "\\'"),
    "a text": ("pythonic", "[f(a='", "x"),
    "arguments": ("pythonic", "[f(a=1", ", a=1"),
    "a parameter": ("qwen3_coder", "<tool_call><function=f><parameter=a>", "x</para"),
    "parameters": ("glm45", "<tool_call>f", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    "a key": ("glm45", "<tool_call>f<arg_key>", "a"),
    "white space": ("glm45", "<tool_call>f", " "),
    "headers": ("mistral", "", "[TOOL_CALLS]f "),
    "calls": ("kimi_k2", "", write(FORMATS["kimi_k2"], [("f", {})])),
    "quoted": ("gemma4", '<|tool_call>call:f{a:<|"|>', '<|"'),
}


pathological_patterns = pytest.mark.parametrize(
    ("name", "head", "repeated"), PATHOLOGICAL_PATTERNS.values(), ids=PATHOLOGICAL_PATTERNS.keys()
)


@pathological_patterns
def test_time_is_linear_in_other_formats(name: str, head: str, repeated: str) -> None:
    check_linear(head, repeated, SIZE // 2, FORMATS[name])


@pytest.mark.slow
@pathological_patterns
def test_time_is_linear_in_other_formats_and_large_texts(
    name: str, head: str, repeated: str
) -> None:
    check_linear(head, repeated, LARGE_SIZE // 4, FORMATS[name])


# ---- what the model is told and held to ----------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
                       "$defs": {"City": {"type": "string"}}},
    },
}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "get-time"}}


# Templates that write calls each in its own way, or not at all.
OPENED = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
CLOSED = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}"
WRITERS = {
    "hermes": "<tool_call>{{ c.function | tojson }}</tool_call>",
    "llama_json": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "mistral_json": "[TOOL_CALLS] [{{ c.function | tojson }}]",
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    "kimi_k2": "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>",
    "pythonic": "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})]",
    "glm45": "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
             "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
    "functionary_v3": "{{ c.function.name }}\n{{ c.function.arguments | tojson }}",
    "jamba": "<tool_calls>[{{ c.function | tojson }}]</tool_calls>",
}  # fmt: skip


def template_of(text: str) -> str:
    return f"{OPENED}{EACH}{text}{{% endfor %}}{CLOSED}"


def detected(source: str, *tokens: str) -> str:
    backend = byte_level()
    backend.add_special_tokens(list(tokens))
    return detect_format(ChatTemplate(source), Tokenizer(backend, {})).name


@pytest.mark.parametrize("name", WRITERS)
def test_the_format_is_the_one_in_which_the_template_writes_calls(name: str) -> None:
    assert detected(template_of(WRITERS[name])) == name


def test_an_opening_tag_is_not_mistaken_for_a_tag_of_the_turn() -> None:
    """Without its tag, such a call is a call of llama_json."""
    plugin = "<|action_start|><|plugin|>\n{{ c.function | tojson }}<|action_end|>"
    assert detected(template_of(plugin)) == "internlm"
    assert detected(template_of("<|function_call|>{{ c.function | tojson }}")) == "gigachat"
    assert detected(template_of("<|other|>{{ c.function | tojson }}")) == "llama_json"


def test_the_format_of_a_template_that_leaves_calls_out() -> None:
    silent = OPENED + CLOSED
    assert detected(silent) == "none"
    assert detected(silent + "{# write functools[...] #}") == "phi4"
    asks = "{# <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call> #}"
    assert detected(silent + asks) == "glm45"
    assert detected(silent, "<|tool_call_start|>", "<|tool_call_end|>") == "lfm2"
    assert detected("{% for m in messages %}{{ m.content }}{% endfor %}") == "hermes"


def test_the_format_of_a_template_that_is_not_run() -> None:
    assert guess_format(template_of(WRITERS["hermes"])) is HERMES
    assert guess_format("{{ messages }}") is HERMES
    assert guess_format("{{ tools }}") is NO_FORMAT


def test_the_manual_names_every_format() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    table = manual.split("| name | models, for example | a call", maxsplit=1)[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(FORMATS)


def test_a_conversation_in_words() -> None:
    called = {
        "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
        "id": "1",
        "type": "function",
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called, called]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "assistant", "content": "Both."},
    ]
    system, user, assistant, results, last = spell_out(messages, [WEATHER])
    assert (
        system["role"] == "system"
        and json.dumps(WEATHER) in system["content"]
        and "<tool_call>" in system["content"]
    )
    assert user == messages[0] and last == messages[-1]
    assert read(assistant["content"]) == ("", [("get_weather", '{"city": "Paris"}')] * 2)
    assert results == {
        "role": "user",
        "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>",
    }
    (told, _) = spell_out([{"role": "system", "content": "Be brief."}, user], [WEATHER])
    assert told["content"].startswith("Be brief.\n\nYou can")
    assert spell_out(messages[:1], None) == messages[:1]


def accepts(grammar: str, text: str) -> bool:
    llguidance = pytest.importorskip("llguidance")
    source = compile_source(StructuredOutputs(grammar=grammar))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_a_grammar_lets_calls_of_the_tools_through_and_nothing_else() -> None:
    grammar = call_grammar(HERMES, [WEATHER, CLOCK], True, {})
    weather, clock = tagged("get_weather", '{"city": "Paris"}'), tagged("get-time")
    assert read(weather) == ("", [("get_weather", '{"city": "Paris"}')])
    for good in (weather, clock, f"{weather}\n{clock}\n{weather}"):
        assert accepts(grammar, good), good
    wrong = ["", "Hello", weather[:-1], f"{weather} {clock}", tagged("get_weather"), tagged("get_weather", '{"city": 5}'),
             tagged("get_weather", '{"city": "x", "y": 1}'), tagged("other"), tagged("get-time", '{"x": 1}')]  # fmt: skip
    for bad in wrong:
        assert not accepts(grammar, bad), bad
    one = call_grammar(HERMES, [WEATHER, CLOCK], False, {})
    assert accepts(one, clock) and not accepts(one, f"{weather}\n{clock}")


def test_a_grammar_in_llamas_words() -> None:
    grammar = call_grammar(LLAMA_JSON, [WEATHER, CLOCK], True, {})
    weather = call("get_weather", '{"city": "Paris"}', "parameters")
    assert accepts(grammar, weather) and accepts(
        grammar, f"{weather}; {call('get-time', key='parameters')}"
    )
    assert not accepts(grammar, f"<|python_tag|>{weather}")


def test_tags_that_are_special_tokens_are_named_by_id() -> None:
    grammar = call_grammar(HERMES, [CLOCK], False, {"<tool_call>": 7})
    assert "call: <[7]> rest" in grammar and '"\\n" "</tool_call>"' in grammar
    deepseek = FORMATS["deepseek_v31"]
    ids = {"<｜tool▁call▁begin｜>": 3, "<｜tool▁sep｜>": 4, "<｜tool▁calls▁end｜>": 5}
    grammar = call_grammar(deepseek, [CLOCK], False, ids)
    assert 'rest0: "get-time" <[4]> %json' in grammar and "call <[5]>" in grammar


FULL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["city"],
            "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}},
        },
    },
}
forcible = [format for format in FORMATS.values() if has_grammar(format)]


@pytest.mark.parametrize("format", forcible, ids=lambda format: format.name)
def test_calls_can_be_forced_in_each_format(format: ToolFormat) -> None:
    tools = {"get_weather": FULL["function"]["parameters"], "get-time": None}  # type: ignore[index]
    grammar = call_grammar(format, [FULL, CLOCK], True, {})
    full = ("get_weather", {"city": "New\nYork", "days": 3, "unit": "F"})
    for made in ([full], [("get_weather", {"city": "5"})], [("get-time", {}), full, full]):
        text = write(format, made)
        assert accepts(grammar, text), text
        content, calls = read(*text, format=format, tools=tools)
        found = [(name, json.loads(arguments)) for name, arguments in calls]
        assert (content, found) == ("", made)
    bad: list[dict[str, Any]] = [
        {},
        {"days": 3},
        {"city": "x", "days": "y"},
        {"city": "x", "unit": "K"},
    ]
    wrong = [write(format, [("get_weather", arguments)]) for arguments in bad]
    wrong += [write(format, [("other", {})]), write(format, [("get-time", {"x": 1})]), "", "Hello"]
    for text in wrong:
        assert not accepts(grammar, text), text
    one = call_grammar(format, [CLOCK], False, {})
    assert not accepts(one, write(format, [("get-time", {})] * 2))


@pytest.mark.parametrize(
    "format",
    [format for format in forcible if allows_free_text(format)],
    ids=lambda format: format.name,
)
def test_strict_tools_are_held_to_their_parameters_in_each_format(format: ToolFormat) -> None:
    grammar = call_grammar(format, [FULL, CLOCK], True, {}, free=True)
    good = write(format, [("get_weather", {"city": "x", "days": 3}), ("get-time", {"y": "z"})])
    text = good if format.start else f"I look.\n{good}"
    for allowed in ("", "Hello", text):
        assert accepts(grammar, allowed), allowed
    wrong = write(format, [("get_weather", {"days": "x"})])
    assert not accepts(grammar, wrong)


def test_an_answer_may_be_held_to_a_schema_beside_the_calls() -> None:
    grammar = call_grammar(
        HERMES, [CLOCK], True, {}, '{"type": "object", "properties": {"a": {"const": "%json {}"}}}'
    )
    assert (
        accepts(grammar, tagged("get-time"))
        and accepts(grammar, '{"a":"%json {}"}')
        and not accepts(grammar, "Hello")
    )


def test_strict_tools_are_held_to_their_parameters_amid_free_text() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = call_grammar(HERMES, [strict, CLOCK], True, {}, free=True)
    good, loose = tagged("get_weather", '{"city": "Paris"}'), tagged("get-time", '{"x": 1}')
    for text in ("", "Hello <tool_cal", good, f"I look.\n{good}\n{loose} and {good} done"):
        assert accepts(grammar, text), text
    for text in (
        "<tool_call>",
        "so <tool_call>oops",
        tagged("get_weather"),
        tagged("get_weather", '{"city": 5}'),
        tagged("other"),
    ):
        assert not accepts(grammar, text), text
    llama = call_grammar(LLAMA_JSON, [strict, CLOCK], True, {}, free=True)
    bare = call("get_weather", '{"city": "Paris"}', "parameters")
    assert (
        accepts(llama, "")
        and accepts(llama, "Hello {")
        and accepts(llama, bare)
        and not accepts(llama, '{"a": 1}')
    )
