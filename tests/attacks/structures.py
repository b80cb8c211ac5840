"""Schemas, grammars and regexes that are small and cost much: to compile, to follow, or in native
stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.attacks import replies
from tests.attacks.target import CHAT, COMPLETIONS, HELLO, Target

Fields = dict[str, Any]


def references(count: int, tag: str = "r") -> Fields:
    """A schema of objects, each of which refers to the next."""
    chain: Fields = {
        f"{tag}{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/{tag}{i + 1}"}},
        }
        for i in range(count)
    }
    return {"$ref": f"#/$defs/{tag}0", "$defs": {**chain, f"{tag}{count}": {"type": "integer"}}}


def bare_references(count: int) -> Fields:
    chain: Fields = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/r0", "$defs": {**chain, f"r{count}": {"type": "integer"}}}


def references_in_all_of(count: int) -> Fields:
    chain: Fields = {
        f"r{i}": {"allOf": [{"$ref": f"#/$defs/r{i + 1}"}, {"type": "object"}]}
        for i in range(count)
    }
    return {"$ref": "#/$defs/r0", "$defs": {**chain, f"r{count}": {"type": "object"}}}


def rules(count: int, name: str = "r") -> str:
    """A grammar of rules, each of which refers to the next. Names in capitals are terminals."""
    lines = [f'{name}{i}: "a" {name}{i + 1} | "b"' for i in range(count)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{count}: "z"'])


def tool(parameters: Fields) -> Fields:
    function = {"name": "f", "parameters": parameters}
    return {
        "messages": HELLO,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": function}],
    }


def worst() -> dict[str, Fields]:
    return {
        "1,000 references": {"guided_json": references(1000)},
        "3,000 rules": {"guided_grammar": rules(3000)},
    }


def all_cases() -> dict[str, Fields]:
    tool_parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/r0"}},
        "$defs": references(2000)["$defs"],
    }
    found: dict[str, Fields] = {}
    for count in (500, 1000, 2000, 3000, 5000):
        found[f"{count} rules"] = {"guided_grammar": rules(count)}
    for count in (100, 1000, 5000, 50000):
        found[f"{count} parentheses"] = {"guided_grammar": f'start: {"(" * count}"a"{")" * count}'}
    for count in (1000, 5000):
        found[f"{count} terminals"] = {"guided_grammar": rules(count, "T")}
    for count in (200, 1000, 2500):
        found[f"{count} references"] = {"guided_json": references(count)}
    for count in (1000, 5000):
        found[f"{count} bare references"] = {"guided_json": bare_references(count)}
    for count in (500, 2500):
        found[f"{count} references in allOf"] = {"guided_json": references_in_all_of(count)}
    found["2,000 references in a tool"] = tool(tool_parameters)
    found["a deep schema as text"] = {"guided_json": '{"items":' * 20000 + "{}" + "}" * 20000}
    found["a deep enum"] = {"guided_json": '{"enum":' + "[" * 50000 + "]" * 50000 + "}"}
    found["nested alternatives"] = {"guided_regex": "(a|" * 240 + "b" + ")" * 240}
    found["nested stars"] = {"guided_regex": "(?:" * 200 + "a" + ")*" * 200}
    words = [f"{'abcdefgh'[i % 8]}{i}" for i in range(40000)]
    found["40,000 alternatives"] = {"guided_regex": "|".join(words)}
    return found


def send(target: Target, cases: Iterable[tuple[str, Fields]], prompt: str = "x") -> None:
    """Each is either followed or refused."""
    for name, fields in cases:
        path = CHAT if "messages" in fields else COMPLETIONS
        body = {"max_tokens": 5, **({} if "messages" in fields else {"prompt": prompt}), **fields}
        try:
            replies.check(target.post(path, body))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def send_repeatedly(target: Target, rounds: int) -> None:
    """The same schema under other prompts, and other schemas under the same prompt."""
    for i in range(rounds):
        send(target, [("the same schema", {"guided_json": references(1000)})], prompt=f"x{i}")
        send(target, [("another schema", {"guided_json": references(1000, f"v{i}_")})])
