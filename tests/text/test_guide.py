"""Guides by llguidance: they allow what matches and nothing else, and what cannot be followed is
said to be so."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("llguidance")

import tokenizers

from octavo.errors import GuideError, InvalidRequest
from octavo.params import StructuredOutputs
from octavo.text import Tokenizer, spec_trial
from octavo.text import guide as module
from octavo.text.detokenize import BYTE_OF_CHARACTER
from octavo.text.guide import Guides
from octavo.text.structural_tags import grammar_of_tags
from octavo.text.vocabulary import make_vocabulary
from tests import schemas
from tests.text.builders import KINDS
from tests.text.guided import accepts, allowed, make, may_follow, walk


@pytest.fixture(scope="module")
def guides(embedded: Tokenizer) -> Guides:
    return make(embedded)


# ---- what is allowed -----------------------------------------------------------------------------


def test_json_is_what_the_schema_says_and_compact(guides: Guides, embedded: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    for text in ('{"a":1}', '{"a":-20,"b":["x","<|im_end|>"]}'):
        assert accepts(guides, embedded, text, json=schema) and accepts(
            guides, embedded, text, json=json.dumps(schema)
        )
    for text in (
        '{"a":1.5}',
        '{"b":[]}',
        '{"a":1,"c":2}',
        "[]",
        '{"a": 1}',
        '{"a":1} ',
        '\n{"a":1}',
        '{"a":1',
        "",
    ):
        assert not accepts(guides, embedded, text, json=schema), text


def test_whitespace_cannot_be_had_by_the_schema_either(guides: Guides, embedded: Tokenizer) -> None:
    asking = {
        "type": "array",
        "items": {"type": "null"},
        "x-guidance": {"whitespace_flexible": True},
    }
    assert not accepts(guides, embedded, "[null, null]", json=asking) and accepts(
        guides, embedded, "[null,null]", json=asking
    )


def test_json_object_is_any_object(guides: Guides, embedded: Tokenizer) -> None:
    assert accepts(guides, embedded, '{"a":{"b":[1,2.5e3,null,"x"]}}', json_object=True)
    assert not accepts(guides, embedded, "[1]", json_object=True)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object"}}}


def test_objects_have_only_the_properties_that_the_schema_names(
    guides: Guides, embedded: Tokenizer
) -> None:
    grammar = f"start: %json {json.dumps(OBJECT)}"
    for spec in (dict(json=OBJECT), dict(grammar=grammar)):
        assert accepts(guides, embedded, '{"a":1,"b":{"free":[]}}', **spec), "b names none"
        assert not accepts(guides, embedded, '{"c":1}', **spec)
        assert accepts(guides, embedded, '{"c":1}', **spec, disable_additional_properties=False)
    opened = {**OBJECT, "additionalProperties": {"type": "null"}}
    assert accepts(guides, embedded, '{"a":1,"c":null}', json=opened)
    untyped = {"properties": {"result": {"type": "integer"}}}
    assert accepts(guides, embedded, '{"result":1}', json=untyped)
    assert not accepts(guides, embedded, '"text"', json=untyped)


COMPOSED: dict[str, tuple[dict[str, Any], str]] = {
    "allOf": ({"allOf": [OBJECT, {"properties": {"c": {"type": "null"}}, "required": ["a", "c"]}]}, '{"a":1,"c":null}'),
    "a base by reference": ({"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"c": {"type": "null"}}}],
                             "required": ["a", "c"], "$defs": {"base": OBJECT}}, '{"a":1,"c":null}'),
    "properties and anyOf": ({**OBJECT, "anyOf": [{"properties": {"c": {"type": "null"}}, "required": ["c"]}]}, '{"a":1,"c":null}'),
    "one of several required": ({**OBJECT, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b":{}}'),
    "itself": ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}}}, '{"next":{"next":null}}'),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "text"), COMPOSED.values(), ids=COMPOSED.keys())
def test_closing_objects_leaves_composed_schemas_satisfiable(
    guides: Guides, embedded: Tokenizer, schema: dict[str, Any], text: str
) -> None:
    assert accepts(guides, embedded, text, json=schema)


def test_a_property_cannot_be_written_twice_in_another_spelling(
    guides: Guides, embedded: Tokenizer
) -> None:
    opened = {**OBJECT, "additionalProperties": True}
    assert accepts(guides, embedded, '{"a":1,"c":"\\n"}', json=opened)
    assert not accepts(guides, embedded, '{"a":1,"\\u0061":"x"}', json=opened)


def test_a_client_may_ask_for_whitespace(guides: Guides, embedded: Tokenizer) -> None:
    asked = dict(json=OBJECT, whitespace_pattern="[ ]{0,2}")
    assert accepts(guides, embedded, '{ "a":  1}', **asked)
    assert not accepts(guides, embedded, '{    "a":1}', **asked)
    assert accepts(guides, embedded, '{ "x": 1}', json_object=True, whitespace_pattern=" ?")


NUMBERS = dict(json={"type": "array", "items": {"type": "number"}})


@pytest.mark.parametrize(
    ("spec", "text", "fits"),
    [
        (NUMBERS, "[-12345678901234567890.12345678901234567890e-123,0]", True),
        (NUMBERS, "[123456789012345678901]", False),
        (NUMBERS, "[1.123456789012345678901]", False),
        (NUMBERS, "[1e1234]", False),
        (dict(json_object=True), '{"a":123456789012345678901}', False),
        (dict(json_object=True), '{"a":"123456789012345678901"}', True),
        (dict(json_object=True), '{"a":"\\"123456789012345678901"}', True),
        (dict(json={"enum": [10**30]}), f"{10**30}", True),
        (dict(json={"type": "integer", "minimum": 10**17}), "123456789012345678901", False),
        (dict(grammar='start: "f(" %json {"type": "array"} ")"'), "f([123456789012345678901])", False),
        (dict(grammar='start: /[^{]*/ %json {"type": "object"}'), "1:123456789012345678901{}", True),
        (dict(regex="[0-9]+"), "123456789012345678901", True),
        (dict(grammar="start: /[0-9,]+/"), "1,123456789012345678901", True),
    ],
)  # fmt: skip
def test_numbers_have_a_bounded_length(
    guides: Guides, embedded: Tokenizer, spec: dict[str, Any], text: str, fits: bool
) -> None:
    assert accepts(guides, embedded, text, **spec) is fits


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {}], ids=str)
def test_a_model_that_writes_nothing_but_digits_comes_to_an_end(
    guides: Guides, embedded: Tokenizer, schema: dict[str, Any]
) -> None:
    (seven,) = embedded.encode("7", add_special_tokens=False)
    guide = guides.compile(StructuredOutputs(json=schema)).copy()
    count = 0
    while may_follow(guide, seven):
        guide.accept(seven)
        count += 1
    assert count == 20 and not embedded.end_ids.isdisjoint(allowed(guide))


@pytest.mark.parametrize(
    ("regex", "yes", "no"),
    [
        (r"\d{3}-\d{4}", "555-1234", "555-123"),
        (r"^abc$", "abc", "^abc$"),
        (r"\d+", "12", "١٢"),
        (r"(?i)yes|no", "YES", "maybe"),
        (r"a/b\\\"", 'a/b\\"', "a/b"),
        ("line\nline", "line\nline", "line line"),
    ],
)
def test_regex_matches_the_whole_text(
    guides: Guides, embedded: Tokenizer, regex: str, yes: str, no: str
) -> None:
    assert accepts(guides, embedded, yes, regex=regex) and not accepts(
        guides, embedded, no, regex=regex
    )


def test_choice(guides: Guides, embedded: Tokenizer) -> None:
    choice = ["yes", "yes please", 'a "b"\n\\c', "café 👍", "/x/i", "\x7f", "%json {}"]
    assert all(accepts(guides, embedded, text, choice=choice) for text in choice)
    assert not any(
        accepts(guides, embedded, text, choice=choice)
        for text in ("y", "yes pleas", "YES", "x", "")
    )
    thousands = [f"choice number {i}" for i in range(5000)]
    assert accepts(guides, embedded, thousands[4321], choice=thousands)


def test_grammar_with_schemas_in_it(guides: Guides, embedded: Tokenizer) -> None:
    schema = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'
    grammar = f'start: "call " NAME %json {schema}\nNAME: /[a-z]+/'
    assert accepts(guides, embedded, 'call f{"x":1}', grammar=grammar)
    assert not accepts(guides, embedded, 'call f{ "x" : 1}', grammar=grammar), (
        "whitespace is bounded in there too"
    )
    own = grammar.replace('"required"', '"x-guidance": {"key_separator": ": "}, "required"')
    assert accepts(guides, embedded, 'call f{"x": 1}', grammar=own), (
        "who says how it is to be is heard"
    )


def test_text_is_free_around_structural_tags(guides: Guides, embedded: Tokenizer) -> None:
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tags = [
        {"begin": "<f=one>", "schema": number, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "boolean"}, "end": ""},
    ]
    grammar = grammar_of_tags(tags, ["<f="])
    for text in (
        "only words",
        '<f=one>{"n":1}</f>',
        'first <f=two>true then <f=one>{"n":1}</f> and words',
    ):
        assert accepts(guides, embedded, text, grammar=grammar), text
    for text in ("a <f=three>", '<f=one>{"m":1}</f>', '<f=one>{"n":1} </f>', "<f=two>1"):
        assert not accepts(guides, embedded, text, grammar=grammar), text


@pytest.mark.parametrize(
    ("structures", "triggers", "says"),
    [
        ([{"begin": "<f>", "schema": {}, "end": ""}], ["<g>"], "begin must start with"),
        ([{"begin": "<f>", "end": ""}], ["<f>"], "structures.0 must have"),
        ([], ["<f>"], "structures must be"),
        ([{"begin": "<f>", "schema": {}, "end": ""}], [""], "triggers must be"),
    ],
)
def test_tags_that_cannot_work_are_refused(
    structures: list[Any], triggers: list[str], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        grammar_of_tags(structures, triggers)


def test_control_tokens_are_allowed_where_a_grammar_names_them(
    guides: Guides, embedded: Tokenizer
) -> None:
    (start,) = embedded.encode("<|im_start|>", add_special_tokens=False)
    assert allowed(guides.compile(StructuredOutputs(grammar='start: <|im_start|> "x"'))) == [start]
    assert start not in allowed(
        guides.compile(StructuredOutputs(grammar='start: "<|im_start|>" "x"'))
    )


def test_every_end_token_ends(embedded: Tokenizer) -> None:
    guide = Guides(embedded, embedded.vocab_size, (0, 2)).compile(StructuredOutputs(choice=["a"]))
    guide.accept(embedded.encode("a", add_special_tokens=False)[0])
    assert allowed(guide) == [0, 2]


def single_bytes() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(sorted(BYTE_OF_CHARACTER))}, [])
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(["<|im_end|>"])
    return found


def normalising() -> tokenizers.Tokenizer:
    """As Qwen's: e and an accent become one character."""
    found = KINDS["byte-level"]()
    found.normalizer = tokenizers.normalizers.NFC()
    return found


WRITING = {
    **{k: v for k, v in KINDS.items() if k not in ("wordpiece", "metaspace")},
    "normalising": normalising,
    "bytes": single_bytes,
}


@pytest.mark.parametrize("kind", WRITING)
def test_whatever_is_allowed_makes_valid_json_with_every_kind_of_tokenizer(kind: str) -> None:
    backend = WRITING[kind]()
    tokenizer = Tokenizer(
        backend, {"eos_token": "</s>" if backend.token_to_id("</s>") is not None else "<|im_end|>"}
    )
    guides, g, ended = make(tokenizer), random.Random(kind), 0
    for _ in range(25):
        schema = schemas.random_schema(g)
        text = walk(guides.compile(StructuredOutputs(json=schema)), tokenizer, g)
        ended += text is not None
        assert text is None or schemas.valid(schema, json.loads(text)), (schema, text)
    assert ended > 20


def test_copies_go_their_own_ways(guides: Guides, embedded: Tokenizer) -> None:
    a, b = (embedded.encode(c, add_special_tokens=False)[0] for c in "ab")
    one = guides.compile(StructuredOutputs(regex="a{2}|b{3}")).copy()
    other = one.copy()
    one.accept(a)
    assert b not in allowed(one) and {a, b} <= set(allowed(other))
    other.accept(b)
    assert a not in allowed(other) and other.mask != one.mask
    with pytest.raises(GuideError):
        other.accept(a)


@pytest.mark.parametrize(
    "spec",
    [
        dict(choice=["The quick brown fox, naïvely. " * 50]),
        dict(regex="a{1500}"),
        dict(choice=["=" * 1500]),
    ],
    ids=["choice", "regex", "long tokens"],
)
def test_a_long_text_without_a_choice_is_cut_into_tokens_as_the_tokenizer_cuts_it(
    guides: Guides, embedded: Tokenizer, spec: dict[str, Any]
) -> None:
    text = spec.get("choice", ["a" * 1500])[0]
    guide = guides.compile(StructuredOutputs(**spec)).copy()
    for token in embedded.encode(text, add_special_tokens=False):
        assert allowed(guide) == [token]
        guide.accept(token)


def test_of_a_long_text_without_a_choice_only_a_part_is_tokenised(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tokenise all that is left at every token would hold up the engine."""
    vocabulary = guides._get_vocabulary()
    encode = vocabulary._encode
    asked: list[int] = []

    def counted(text: str, **options: bool) -> list[int]:
        asked.append(len(text))
        return encode(text, **options)

    guide = guides.compile(StructuredOutputs(choice=["ab" * 10_000])).copy()
    monkeypatch.setattr(vocabulary, "_encode", counted)
    for _ in range(20):
        guide.accept(allowed(guide)[0])
    assert asked and max(asked) < 1000


def test_what_no_token_can_write_fails_when_it_comes_to_it(
    guides: Guides, embedded: Tokenizer
) -> None:
    assert b"\x04" not in {embedded.token_bytes(id) for id in range(embedded.vocab_size)}
    with pytest.raises((GuideError, InvalidRequest)):
        walk(guides.compile(StructuredOutputs(choice=["a\x04b"])), embedded, random.Random(1))


# ---- what is refused -----------------------------------------------------------------------------


def chained(length: int) -> dict[str, Any]:
    """A schema that overflows an ordinary stack when it is compiled."""
    definitions = {
        f"r{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/r{i + 1}"}}}
        for i in range(length)
    }
    return {"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{length}": {"type": "integer"}}}


def rules(count: int, name: str = "r", groups: int = 0) -> str:
    """A grammar that does."""
    each = [f'{name}{i}: {"(" * groups}"a" {name}{i + 1} | "b"{")" * groups}' for i in range(count)]
    return "\n".join([f"start: {name}0", *each, f'{name}{count}: "z"'])


NESTED = {
    "type": "object",
    "properties": {"not": {"type": "array", "items": {"not": {"type": "null"}}}},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": (dict(json=NESTED), r'not supported: \["not"\] \(at #/properties/not/items/not\)'),
    "keyword in a choice": (dict(json={"anyOf": [{}, {"uniqueItems": True}]}), r"\(at #/anyOf/1/uniqueItems\)"),
    "oneOf that overlaps": (dict(json={"oneOf": [{"type": "object"}, {"type": "object"}]}), "use anyOf"),
    "type": (dict(json={"properties": {"a/b": {"type": "strin"}}}), r"strin \(at #/properties/a~1b/type\)"),
    "format": (dict(json={"items": {"type": "string", "format": "zip"}}), r"zip \(at #/items/format\)"),
    "pattern": (dict(json={"items": {"type": "string", "pattern": "(?=x)"}}), r"look-ahead.*\(at #/items/pattern\)"),
    "missing reference": (dict(json={"items": {"$ref": "#/$defs/x"}}), r"does not exist \(at #/items/\$ref\)"),
    "foreign reference": (dict(json={"$ref": "http://example.org/x.json"}), "does not fetch"),
    "never": (dict(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "not JSON": (dict(json="{x"), "line 1 column 2"),
    "not an object": (dict(json="[]"), "a schema must be an object"),
    "too deep": (dict(json='{"items":' * 500 + "{}" + "}" * 500), r"more than 100 levels.*\(at #/items/items.*\)"),
    "too long a chain": (dict(json=chained(1000)), r"300\d levels deep.*\(at #/\$defs/r0\)"),
    "too many rules": (dict(grammar=rules(3000)), "3002 levels deep"),
    "too many terminals": (dict(grammar=rules(5000, "T")), "5002 levels deep"),
    "groups in many rules": (dict(grammar=rules(100, groups=25)), "2602 levels deep"),
    "a chain within a grammar": (dict(grammar=f"start: %json {json.dumps(chained(1000))}"), "levels deep"),
    "group": (dict(regex="a("), "unclosed group"),
    "look-around": (dict(regex="(?<=a)b"), "look-around"),
    "back-reference": (dict(regex=r"(a)\1"), "backreferences"),
    "empty language": (dict(regex=r"[^\s\S]"), "nothing can match"),
    "surrogates": (dict(choice=["\ud800"]), "surrogates"),
    "rule": (dict(grammar="start: foo"), 'unknown name: "foo"'),
    "EBNF": (dict(grammar='root ::= "a" ('), "expected \\), at the end"),
    "schema in a grammar": (dict(grammar='start: %json {"not": {}}'), 'not supported: \\["not"\\]'),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "says"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_followed_is_refused_with_the_reason_and_the_place(
    guides: Guides, spec: Any, says: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        guides.compile(StructuredOutputs(**spec))
    assert re.search(says, str(caught.value), re.DOTALL), str(caught.value)
    assert (caught.value.param, caught.value.code) == (
        "structured_outputs",
        "invalid_structured_output",
    )
    assert len(str(caught.value)) < 1000 and time.monotonic() - begun < 1


@pytest.mark.parametrize(
    "spec",
    [dict(), dict(regex="a", choice=["a"]), dict(json_object=False), dict(regex=""), dict(choice=[]), dict(choice="ab"),
     dict(choice=["a", ""]), dict(json=[1]), dict(json={"a": {1, 2}}), dict(json_object="yes"), dict(grammar=5)],
    ids=str,
)  # fmt: skip
def test_a_spec_is_of_one_kind_and_well_formed(spec: Any) -> None:
    with pytest.raises(InvalidRequest):
        StructuredOutputs(**spec)


@pytest.mark.parametrize("kind", ["embedded", "bytes"])
def test_grammars_that_can_be_read_in_very_many_ways_end_before_they_hold_anybody_up(
    embedded: Tokenizer, kind: str
) -> None:
    """With the library's own limits a token takes up to two seconds."""
    tokenizer = (
        embedded if kind == "embedded" else Tokenizer(single_bytes(), {"eos_token": "<|im_end|>"})
    )
    grammar = f"start: x\nx: {' | '.join('x ' * k for k in range(2, 12))} | /[a-z]/"
    (token,), slowest = tokenizer.encode("a", add_special_tokens=False), 0.0
    with pytest.raises((GuideError, InvalidRequest), match="Too many items|too long"):
        guide = make(tokenizer).compile(StructuredOutputs(grammar=grammar)).copy()
        for _ in range(400):
            begun = time.thread_time()
            guide.accept(token)
            slowest = max(slowest, time.thread_time() - begun)
    assert slowest < 0.2


def test_a_tokenizer_that_cannot_write_everything_is_refused(embedded: Tokenizer) -> None:
    for guides, why in (
        (
            make(Tokenizer(KINDS["wordpiece"](), {"eos_token": "[SEP]"})),
            "depends on their neighbours",
        ),
        (make(Tokenizer(KINDS["metaspace"](), {"eos_token": "</s>"})), "cannot spell"),
        (Guides(None, 100, (0,)), "runs without one"),
        (Guides(embedded, embedded.vocab_size, ()), "no token that ends"),
    ):
        with pytest.raises(InvalidRequest, match=why) as caught:
            guides.compile(StructuredOutputs(choice=["a"]))
        assert caught.value.code == "unsupported_parameter"


def test_without_llguidance_it_says_what_to_install(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match="pip install llguidance"):
        make(embedded).compile(StructuredOutputs(choice=["a"]))


# ---- compiling -----------------------------------------------------------------------------------


def test_the_same_is_compiled_once(embedded: Tokenizer) -> None:
    guides = make(embedded)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}
    work = [guides.start(StructuredOutputs(json=schema)) for _ in range(5)]
    assert len(set(work)) == 1
    guides.compile(StructuredOutputs(json=json.dumps(schema)))
    assert (guides.compiled, guides.hits) == (1, 5) and guides.seconds > 0
    other = {**schema, "properties": dict(reversed(schema["properties"].items()))}
    guides.compile(StructuredOutputs(json=other))
    assert guides.compiled == 2, "the order of properties is the order in which they are written"


def test_what_was_refused_stays_refused_and_is_not_tried_again(embedded: Tokenizer) -> None:
    guides = make(embedded)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="unclosed"):
            guides.compile(StructuredOutputs(regex="a("))
    assert guides.compiled == 1


def test_the_cache_is_bounded(embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "CACHE_BYTES", 3 * (module.GUIDE_BYTES + 10 * module.BYTES_PER_CHARACTER)
    )
    guides = make(embedded)
    for text in ("one", "two", "three", "one", "four"):
        guides.compile(StructuredOutputs(regex=text))
    assert [key[1] for key in guides._cached] == ["three", "one", "four"], (
        "the one not used for longest went"
    )
    guides.compile(StructuredOutputs(regex="x" * 100_000))
    assert len(guides._cached) == 1, "one alone may be larger"


def test_a_guide_that_has_led_many_texts_is_replaced(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_GUIDE_TOKENS", 20)
    guides, spec = make(embedded), StructuredOutputs(regex="[a-z]{1,12}")
    first = guides.compile(spec)
    while guides.compile(spec) is first:
        walk(first, embedded, random.Random(1))
    assert first.usage.tokens > 20 and guides.compiled == 2  # type: ignore[attr-defined]


def test_a_guide_that_is_full_is_replaced_and_not_the_end_of_its_grammar(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies share a lexer, and its states are limited: what one text leaves behind is lost to
    the next."""
    monkeypatch.setitem(module.PARSER_LIMITS, "max_lexer_states", 2000)
    guides, spec = make(embedded), StructuredOutputs(regex=r"(\p{L}{0,100}\w{0,200}\s){0,200}")
    first = guides.compile(spec)
    with pytest.raises(GuideError, match="too many states"):
        while True:
            walk(first, embedded, random.Random(1))
    with pytest.raises(GuideError):
        walk(first, embedded, random.Random(2), most=2)
    walk(guides.compile(spec), embedded, random.Random(2), most=2)


def test_the_deepest_specs_that_are_let_in_compile(embedded: Tokenizer) -> None:
    """They overflow the stack of an ordinary thread."""
    guides = make(embedded)
    assert guides.compile(StructuredOutputs(json=chained(660))) is not None
    assert guides.compile(StructuredOutputs(grammar=rules(1990))) is not None


@pytest.mark.parametrize("size", [chained(660), rules(1990)], ids=["schema", "grammar"])
def test_a_trial_has_stack_to_spare(
    embedded: Tokenizer, size: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of its stack, and a sixteenth of what guides are compiled with, is enough for
    everything that is let in."""
    assert spec_trial.STACK_BYTES * 4 <= module.STACK_BYTES
    monkeypatch.setattr(spec_trial, "STACK_BYTES", spec_trial.STACK_BYTES // 4)
    spec = (
        StructuredOutputs(grammar=size) if isinstance(size, str) else StructuredOutputs(json=size)
    )
    spec_trial.try_spec(make_vocabulary(embedded, embedded.vocab_size, (2,)), spec)


def test_a_trial_refuses_what_compiling_refuses(embedded: Tokenizer) -> None:
    vocabulary = make_vocabulary(embedded, embedded.vocab_size, (2,))
    spec_trial.try_spec(vocabulary, StructuredOutputs(json=OBJECT))
    with pytest.raises(InvalidRequest, match="unclosed group") as caught:
        spec_trial.try_spec(vocabulary, StructuredOutputs(regex="a("))
    assert caught.value.code == "invalid_structured_output"


def test_a_trial_follows_texts_and_lets_pass_what_may_fail_later(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[int] = []
    accept = module.LLGuide.accept
    monkeypatch.setattr(
        module.LLGuide,
        "accept",
        lambda self, token: (followed.append(token), accept(self, token))[1],
    )
    vocabulary = make_vocabulary(embedded, embedded.vocab_size, (2,))
    spec_trial.try_spec(vocabulary, StructuredOutputs(regex="[a-z]{500}"))
    assert len(followed) == spec_trial.WALKS_PER_SPEC * spec_trial.TOKENS_PER_WALK
    spec_trial.try_spec(vocabulary, StructuredOutputs(regex=r"(?:[\s\S]{0,50}[a-z]){0,200}"))


def test_what_takes_too_long_is_refused_and_others_are_compiled_meanwhile(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = module.build_guide

    def slow(vocabulary: Any, spec: StructuredOutputs) -> Any:
        time.sleep(1.0 if spec.regex == "slow" else 0)
        return build(vocabulary, spec)

    monkeypatch.setattr(module, "build_guide", slow)
    monkeypatch.setattr(module, "COMPILE_TIMEOUT", 0.2)
    guides = make(embedded)
    guides.compile(StructuredOutputs(regex="first"))
    late = guides.start(StructuredOutputs(regex="slow"))
    assert guides.compile(StructuredOutputs(regex="other")) is not None
    assert late.poll() is None, "not yet"
    with pytest.raises(InvalidRequest, match="not compiled within 0.2 s") as caught:
        guides.compile(StructuredOutputs(regex="slow"))
    assert caught.value.code == "structured_output_timeout"
    late.finished.wait()
    assert guides.compile(StructuredOutputs(regex="slow")) is not None, (
        "it was finished for whoever asks again"
    )


def test_waiting_for_a_thread_is_not_held_against_a_spec(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "build_guide", lambda *_: time.sleep(0.15))  # and makes nothing
    monkeypatch.setattr(module, "COMPILE_TIMEOUT", 0.4)
    guides = make(embedded)
    work = [guides.start(StructuredOutputs(regex=str(i))) for i in range(8)]
    while not all(one.finished.is_set() for one in work):
        assert all(one.poll() is None for one in work)  # raises if one is late
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["hangs", "panics"])
def test_threads_that_are_lost_are_replaced(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """More than there are threads, and nobody asks for them any more: what comes after them is
    compiled all the same."""

    class Panic(BaseException):
        """As native code raises it."""

    build, over = module.build_guide, threading.Event()

    def bad(vocabulary: Any, spec: StructuredOutputs) -> Any:
        if str(spec.regex).startswith("bad"):
            if how == "panics":
                raise Panic("index out of bounds")
            over.wait()
        return build(vocabulary, spec)

    monkeypatch.setattr(module, "build_guide", bad)
    monkeypatch.setattr(module, "COMPILE_TIMEOUT", 0.05)
    guides = make(embedded)
    lost = [guides.start(StructuredOutputs(regex=f"bad{k}")) for k in range(module.MAX_THREADS + 2)]
    monkeypatch.setattr(module, "COMPILE_TIMEOUT", 0.3)
    assert guides.compile(StructuredOutputs(regex="good")) is not None
    if how == "panics":
        assert lost[0].finished.wait(5)
        with pytest.raises(InvalidRequest, match="cannot be used"):
            lost[0].poll()
    over.set()
    for work in lost:
        work.finished.wait(5)
    assert guides.compile(StructuredOutputs(regex="better")) is not None
    assert (
        guides._abandoned_threads == 0
        and guides._thread_count <= module.MAX_THREADS
        and not guides._running
    )


def test_there_is_an_end_to_replacing_threads(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(module, "build_guide", lambda *_: over.wait())
    monkeypatch.setattr(module, "COMPILE_TIMEOUT", 0.01)
    guides = make(embedded)
    guides._get_vocabulary()
    works = [guides.start(StructuredOutputs(regex=str(k))) for k in range(50)]
    most = module.MAX_THREADS + module.MAX_ABANDONED_THREADS
    end = time.monotonic() + 20
    while len(guides._running) < most and time.monotonic() < end:
        with suppress(InvalidRequest):
            works[-1].poll()
        time.sleep(0.01)
    for _ in range(20):
        with suppress(InvalidRequest):
            works[-1].poll()
        time.sleep(0.01)
    assert len(guides._running) == most
    over.set()
