"""The strict and the fast parser of JSON accept the same texts and return the same values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.serve.api import parse
from octavo.serve.api.api_errors import ApiError


class Pairs(list):  # type: ignore[type-arg]
    """An object in which a name may occur twice."""


TEXTS = st.text(st.sampled_from('ab:"\\,{}[]\n é'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(st.tuples(TEXTS, inner), max_size=3).map(Pairs)
    ),
    max_leaves=8,
)


def write(value: Any) -> str:
    if isinstance(value, Pairs):
        return (
            "{" + " , ".join(f"{json.dumps(name)} :{write(inner)}" for name, inner in value) + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value)


def parse_strict(data: bytes) -> Any:
    """Return the value that the strict parser reads, or the code of its error."""
    try:
        return parse._parse_strict(data)
    except ApiError as error:
        return error.code


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TEXTS, VALUES), max_size=4).map(Pairs))
def test_both_parsers_return_the_same(value: Pairs) -> None:
    data = write(value).encode()
    try:
        result: Any = parse.parse(data)
    except ApiError as error:
        result = error.code
    assert repr(result) == repr(parse_strict(data))


@pytest.mark.parametrize(
    "data",
    [b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}', b'{"a":[{"b":1,"b":1}]}', b'{"a":1,"\\u0061":2}', b'{"a":1,"a":2,"b":"\\u003a"}', b'{"a":":","a":1}',
     b'{"a":99999999999999999999}', b'{"a":-9223372036854775809}', b'{"a":NaN}', b'{"a":"\\ud800"}', b'[1]', b'{"a":1} x'],
)  # fmt: skip
def test_json_that_breaks_a_rule_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse.parse(data)
    assert refused.value.code == "invalid_json"


def test_simple_json_is_read_by_the_fast_parser() -> None:
    assert (
        parse._parse_fast(
            b'{"prompt": "a b", "stream_options": {"include_usage": true}, "stop": ["x"], "n": 2}'
        )
        is not None
    )
    assert parse._parse_fast(b'{"messages": [{"role": "user", "content": "hi: you"}]}') is not None
