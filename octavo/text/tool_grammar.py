"""The grammar of a reply that must call tools, or that must call them properly if it does.

Grammars are in llguidance's dialect of Lark, and follow the patterns of octavo.text.tool_formats.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from octavo.text.literals import parameters_of, string_alone
from octavo.text.tool_formats import PatternStep, ToolFormat, steps_of

# keywords by which a schema names an object's properties
DESCRIBING = ("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


def has_grammar(format: ToolFormat) -> bool:
    """Whether calls in this format can be forced. Those that cannot are forced in another."""
    return bool(format.call) and "{gemma}" not in format.call


def may_be_free(format: ToolFormat) -> bool:
    """Whether such calls can be told from other text as soon as they begin, and so be held to a
    grammar amid free text."""
    return has_grammar(format) and bool(format.start_mark if format.start else format.opening)


def call_grammar(
    format: ToolFormat,
    tools: list[dict[str, Any]],
    parallel: bool,
    special_ids: dict[str, int],
    answer: str | None = None,
    free: bool = False,
) -> str:
    """A grammar for calls of these tools: one, or with `parallel` one or more. Instead of calls
    there may be an `answer` that matches a JSON schema; or, with `free`, any text around them, and
    perhaps no call at all: then only tools that are `strict` are held to their parameters.

    `special_ids`: the special tokens in the format's texts, which must be named by id. Each tool's
    parameters stand as a schema of their own, so that references within them (#/$defs/...) mean
    what they meant.
    """
    return _Grammar(format, tools, special_ids, free).text(parallel, answer)


@dataclass
class _Grammar:
    format: ToolFormat
    tools: list[dict[str, Any]]
    special_ids: dict[str, int]
    free: bool
    rules: list[str] = field(default_factory=list)
    needs_text: bool = False  # the rule TEXT is used

    def text(self, parallel: bool, answer: str | None) -> str:
        format = self.format
        call = steps_of(format.call)
        opener, rest = self._split_opener(call)
        self._add("call", f"{opener} rest" if opener else "rest")
        self._add_choices("rest", rest)
        first = "call"
        head = ""
        if format.start:
            self._add_choices("first", steps_of(format.start))
            first = "first"
        elif format.before:
            head, before = self._split_opener(steps_of(format.before))
            first = " ".join(filter(None, (self._sequence(before), "call")))
        more = f"({self._sequence(steps_of(format.between))} call)*" if parallel else ""
        after = self._sequence(steps_of(format.after))
        calls = " ".join(filter(None, (first, more, after)))
        self._add("calls", f"{head} inner" if head else calls)
        if head:
            self._add("inner", calls)
        if answer is not None:
            self._add("start", "calls | answer")
            self._add("answer", f"%json {_as_literal(json.loads(answer))}")
        elif not self.free:
            self._add("start", "calls")
        elif format.start:
            self._add("start", "calls | text")
            self._add("text", "OTHER?")
            self._add("OTHER", rf"/[^{re.escape(format.start_mark)}](.|\n)*/")
        else:
            self._add("start", "called* text")
            self._add("called", f"opening {'inner' if head else 'rest'}")
            self._add_lazy("opening", head or opener)
            self._add("text", "TEXT")
            self.needs_text = True
        if self.needs_text:
            self._add("TEXT", r"/(.|\n)*/")
        return "\n".join(self.rules)

    def _add(self, name: str, body: str) -> None:
        self.rules.append(f"{name}: {body}")

    def _add_lazy(self, name: str, end: str) -> None:
        """A rule for any text up to this end, which is the first there is. A special token is no
        text, and so ends it anyway."""
        lazy = "" if "<[" in end else "[lazy]"
        self._add(name + lazy, f"TEXT {end}")

    def _add_choices(self, name: str, steps: tuple[PatternStep, ...]) -> None:
        """A rule with a choice for each tool."""
        names = [f"{name}{i}" for i in range(len(self.tools))]
        self._add(name, " | ".join(names))
        for own_name, tool in zip(names, self.tools, strict=True):
            terms = [self._term(step, own_name, tool["function"]) for step in steps]
            self._add(own_name, " ".join(filter(None, terms)))

    # ---- the parts of a pattern -------------------------------------------------------------------

    def _split_opener(self, steps: tuple[PatternStep, ...]) -> tuple[str, tuple[PatternStep, ...]]:
        """The text that a pattern begins with, and the rest of the pattern."""
        if not steps or steps[0].kind != "text":
            return "", steps
        return self._literal(steps[0].text), steps[1:]

    def _sequence(self, steps: tuple[PatternStep, ...]) -> str:
        """Texts one by one: of two texts none may begin with the other where both may come."""
        return " ".join(self._literal(step.text) for step in steps)

    def _literal(self, text: str) -> str:
        """A text as a sequence of strings and special tokens."""
        if not text:
            return ""
        special = "|".join(map(re.escape, sorted(self.special_ids, key=len, reverse=True)))
        parts = re.split(f"({special})", text) if special else [text]
        return " ".join(
            f"<[{self.special_ids[part]}]>" if part in self.special_ids else json.dumps(part)
            for part in parts
            if part
        )

    def _term(self, step: PatternStep, rule: str, function: dict[str, Any]) -> str:
        schema = function.get("parameters")
        if self.free and not function.get("strict"):
            schema = {"additionalProperties": True}
        if step.kind in ("text", "space"):
            return self._literal(step.text)
        if step.kind == "name":
            return self._literal(function["name"])
        if step.kind == "id":
            return r"/[0-9]{1,4}/"
        if step.kind == "json":
            name, arguments = self.format.members
            head = f'{{"{name}": {json.dumps(function["name"])}, "{arguments}": '
            if self.format.keyed:
                head = f"{{{json.dumps(function['name'])}: "
            return f'{json.dumps(head)} {_json(_closed(schema))} "}}"'
        if step.kind == "arguments":
            return _json(_closed(schema))
        if step.kind == "parameters":
            return self._parameters(rule, schema)
        if step.kind == "python":
            return self._keywords(rule, schema)
        return ""  # {skip}

    # ---- arguments one by one ---------------------------------------------------------------------

    def _parameters(self, rule: str, schema: Any) -> str:
        """Every parameter that the schema names, in its order."""
        if self._is_loose(schema):
            self._add_parameter(f"{rule}_any", None, {})
            return f"{rule}_any*"
        terms = []
        for i, (key, own, needed) in enumerate(_described(schema)):
            self._add_parameter(f"{rule}_{i}", key, own)
            terms.append(f"{rule}_{i}" if needed else f"{rule}_{i}?")
        return " ".join(terms)

    def _add_parameter(self, rule: str, key: str | None, schema: Any) -> None:
        """A rule for one parameter; without a key for any parameter."""
        pattern = self.format.parameter
        head, _, tail = pattern.partition("{value}")
        is_text = key is None or string_alone(schema)
        head = head.replace("{kind}", "true" if is_text else "false")
        before, _, after = head.partition("{key}")
        name = self._literal(key) if key is not None else '/[^<>"]+/'
        end = self._literal(tail)
        values = schema.get("enum") if isinstance(schema, dict) else None
        if is_text and values:
            value = " | ".join(self._literal(value) for value in values)
            self._add(f"{rule}_value", value)
            body = f"{rule}_value {end}"
        elif is_text:
            self._add_lazy(f"{rule}_value", end)
            self.needs_text = True
            body = f"{rule}_value"
        else:
            body = f"{_json(schema)} {end}"
        self._add(rule, f"{self._literal(before)} {name} {self._literal(after)} {body}")

    def _keywords(self, rule: str, schema: Any) -> str:
        """Keyword arguments: those that are needed, in their order, then others."""
        if self._is_loose(schema):
            self._add(f"{rule}_any", f'/[a-zA-Z_]\\w*/ "=" {_json({})}')
            return f'({rule}_any (", " {rule}_any)*)?'
        needed: list[str] = []
        others: list[str] = []
        for i, (key, own, must) in enumerate(_described(schema)):
            value = _json(own)
            if string_alone(own) and "enum" not in own:  # models use either quotation mark
                value = f"({value} | /'[^'\\\\]*'/)"
            self._add(f"{rule}_{i}", f"{self._literal(f'{key}=')} {value}")
            (needed if must else others).append(f"{rule}_{i}")
        if others:
            self._add(f"{rule}_other", " | ".join(others))
        terms = ' ", " '.join(needed)
        if needed and others:
            return f'{terms} (", " {rule}_other)*'
        if others:
            return f'({rule}_other (", " {rule}_other)*)?'
        return terms

    def _is_loose(self, schema: Any) -> bool:
        """Whether the schema does not list the parameters."""
        if not isinstance(schema, dict) or isinstance(schema.get("properties"), dict):
            return False
        return any(key in schema for key in (*DESCRIBING, "additionalProperties"))


def _described(schema: Any) -> list[tuple[str, Any, bool]]:
    """The parameters: the name, the schema, and whether it is needed."""
    if not isinstance(schema, dict):
        return []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    needed = schema.get("required") or []
    return [
        (key, {**own, **shared} if isinstance(own, dict) else own, key in needed)
        for key, own in parameters_of(schema).items()
    ]


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": STYLE}
    return f"%json {_as_literal(schema)}"


def _as_literal(schema: Any) -> str:
    """JSON in which there is no %json but the grammar's own."""
    return json.dumps(schema, ensure_ascii=False).replace("%", "\\u0025")


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments. A tool that describes no parameters has none. Objects whose
    properties it names are closed when the schema is compiled (octavo/text/schema.py)."""
    schema = {"type": "object", **(parameters or {})}
    if not any(key in schema for key in DESCRIBING):
        schema.setdefault("additionalProperties", False)
    return schema
