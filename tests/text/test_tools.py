"""Calls are found whatever pieces the text comes in, their arguments come as they are written, and nothing is lost."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.params import StructuredOutputs
from octavo.text.guide import compile_source
from octavo.text.tool_prompt import call_grammar, spell_out
from octavo.text.tools import (
    FORMATS,
    HERMES,
    LLAMA_JSON,
    CallDelta,
    Format,
    ToolParser,
    choose_format,
)

NAMES = ("f", "get_weather")
Found = tuple[str, list[tuple[str, str]]]


def read(*pieces: str, format: Format = HERMES, parallel: bool = True) -> Found:
    """The content and the calls (name, arguments)."""
    parser = ToolParser(format, NAMES, parallel)
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
    assert read(f"Well.{HERMES.open}{call('f')}\n", HERMES.close[:most]) == ("Well.", [("f", "{}")])


def test_what_looks_like_the_start_of_a_tag_after_words_is_content() -> None:
    assert read(f"{HERMES.open}{call('f')} is it a <") == ("is it a <", [("f", "{}")])


def tagged(name: str, arguments: str = "{}") -> str:
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


# ---- what is a call -----------------------------------------------------------------------------------


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


def test_without_parallel_calls_the_first_ends_the_reply() -> None:
    text = f"well {tagged('f', '[1]')} and {tagged('g', '[2]')} end"
    assert read(text, parallel=False) == read(*text, parallel=False) == ("well", [("f", "[1]")])
    cut = '<tool_call>{"name": "f", "arguments": {"a": </tool_call> and more'
    assert read(cut, parallel=False) == read(*cut, parallel=False) == ("", [("f", '{"a": ')])
    bare = '{"name": "f", "parameters": [1]}; {"name": "f"}'
    assert read(bare, format=LLAMA_JSON, parallel=False) == ("", [("f", "[1]")])


def test_when_the_reply_is_over() -> None:
    text, parser = tagged("f", '{"a": {}}'), ToolParser(HERMES, NAMES, parallel=False)
    heard = 0
    while not parser.over:
        parser.push(text[heard])
        heard += 1
    assert text[:heard].endswith("{}}}") and heard == text.rindex("}") + 1, (
        "with the call, without waiting for the tag"
    )
    both = ToolParser(HERMES, NAMES)
    both.push(text)
    assert not both.over and not ToolParser(HERMES, NAMES, parallel=False).over


# ---- pieces ---------------------------------------------------------------------------------------------

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "</", "<", "{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n",
    '"name"', '"arguments"', '"parameters"', '"type"', '"f"', '"function"', "null", "5", "words", "é", "\u2003",
    '{"name": "f", "arguments": ', '{"name": "get_weather"', '{"a": "b\\n"}', tagged("f", '{"a": [1, "}"]}'), call("f"),
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
formats = st.sampled_from(list(FORMATS.values()))


@settings(max_examples=1500)
@given(texts, formats, st.booleans(), st.data())
def test_pieces_join_to_what_the_whole_gives(
    text: str, format: Format, parallel: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = read(text, format=format, parallel=parallel)
    assert read(*pieces, format=format, parallel=parallel) == whole
    assert read(*text, format=format, parallel=parallel) == whole


@given(texts, formats)
def test_a_reply_without_calls_is_what_the_model_wrote(text: str, format: Format) -> None:
    content, calls = read(text, format=format)
    assert calls or content == text


@given(texts, formats)
def test_every_word_of_a_reply_is_somewhere(text: str, format: Format) -> None:
    """Nothing goes but tags, names of members and punctuation around them."""
    content, calls = read(text, format=format)
    kept = content + "".join(name + arguments for name, arguments in calls)
    for word in ("words", "é", "5", "null"):
        assert kept.count(word) == text.count(word), (content, calls)


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(), inner), max_leaves=8)  # fmt: skip


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), values), st.booleans()),
        min_size=1,
    ),
    formats,
)
def test_calls_come_back_as_they_were_made(
    made: list[tuple[str, dict[str, Any], bool]], format: Format
) -> None:
    texts = [json.dumps(arguments, ensure_ascii=ascii) for _, arguments, ascii in made]
    calls = [
        call(name, text, format.arguments) for (name, *_), text in zip(made, texts, strict=True)
    ]
    text = format.between.join(
        f"{format.open}{c}{format.close}" if format.close else c for c in calls
    )
    found = read(*text, format=format)
    assert found == ("", [(name, text) for (name, *_), text in zip(made, texts, strict=True)])


def test_arguments_come_as_they_are_written_and_no_sooner_than_the_name() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.push('Sure.\n<tool_call>\n{"name": "get_wea') == ["Sure."]
    assert parser.push('ther", "arg') == [CallDelta(0, "get_weather", "")]
    assert parser.push('uments": {"ci') == [CallDelta(0, None, '{"ci')]
    assert parser.push('ty": "Par') == [CallDelta(0, None, 'ty": "Par')]
    assert parser.push('is"}}\n</tool_call>') == [CallDelta(0, None, 'is"}')]
    assert parser.finish() == []


# ---- time -----------------------------------------------------------------------------------------------

SIZE = 1_000_000
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


def seconds(text: str, step: int) -> float:
    parser = ToolParser(HERMES, NAMES)
    begun = time.process_time()
    for at in range(0, len(text), step):
        parser.push(text[at : at + step])
    parser.finish()
    return time.process_time() - begun


@pytest.mark.parametrize("case", PATHOLOGICAL.values(), ids=PATHOLOGICAL.keys())
def test_time_is_linear(case: str | tuple[str, str]) -> None:
    """A megabyte in pieces of five characters takes about a second, eight times as long as an eighth of it: an algorithm that
    looked back at what it has would take hours."""
    head, repeated = ("", case) if isinstance(case, str) else case
    text = (head + repeated * (SIZE // len(repeated)))[:SIZE]
    eighth = min(seconds(text[: SIZE // 8], 5) for _ in range(2))
    assert eighth < 1
    assert seconds(text, 5) < 3 * 8 * max(eighth, 0.02)


# ---- what the model is told and held to -----------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("template", "knows_tools", "want"),
    [
        ("{% if tools %}<tool_call>{% endif %}", True, HERMES),
        ('{% if tools %}{"name": function name, "parameters": {}}{% endif %}', True, LLAMA_JSON),
        ("{% if tools %}<|python_tag|>{% endif %}", True, LLAMA_JSON),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", True, None),
        ("{{ messages }}", False, HERMES),
    ],
)
def test_the_format_is_the_templates(template: str, knows_tools: bool, want: Format | None) -> None:
    assert choose_format("auto", template, knows_tools) is want
    assert choose_format("llama_json", template, knows_tools) is LLAMA_JSON
    assert choose_format("none", template, knows_tools) is None


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
    assert 'call: <[7]> "\\n" function "\\n" "</tool_call>"' in grammar


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
