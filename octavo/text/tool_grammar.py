"""Writes grammars for replies that must call tools, or that may call tools with strict arguments.

Grammars are in llguidance's dialect of Lark. They follow the patterns of octavo.text.tool_formats.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.text.literals import is_string_schema, parameters_of
from octavo.text.tool_formats import PatternStep, ToolFormat, steps_of

# The keywords by which a schema names an object's properties.
DESCRIBING_KEYWORDS = ("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
ANY_TEXT = r"/(.|\n)*/"
SINGLE_QUOTED = r"/'[^'\\]*'/"


def has_grammar(format: ToolFormat) -> bool:
    """Return whether a grammar can force calls in this format. If not, the caller uses another
    format."""
    return bool(format.call) and "{gemma}" not in format.call


def allows_free_text(format: ToolFormat) -> bool:
    """Return whether the first characters of a call distinguish it from other text. Only then can a
    grammar constrain the calls and leave the text around them free."""
    return has_grammar(format) and bool(format.start_mark if format.start else format.opening)


def call_grammar(
    format: ToolFormat,
    tools: list[dict[str, Any]],
    parallel: bool,
    special_ids: dict[str, int],
    answer: str | None = None,
    free: bool = False,
) -> str:
    """Return a grammar for calls of these tools: one call, or with `parallel` one or more.

    `answer` is a JSON schema: the reply may match it instead of being calls. With `free`, the reply
    is any text with any number of calls in it, and only the arguments of `strict` tools must match
    their schema. `special_ids` maps the special tokens in the format's texts to their ids, because
    a grammar must name a special token by its id. Each tool's parameters are a schema of their own,
    so that references in them (#/$defs/...) keep their meaning.
    """
    return _GrammarWriter(format, tools, special_ids, free).write(parallel, answer)


class _Parameter(NamedTuple):
    """One parameter of a tool."""

    name: str
    schema: Any
    required: bool


@dataclass
class _GrammarWriter:
    format: ToolFormat
    tools: list[dict[str, Any]]
    special_ids: dict[str, int]
    free: bool
    rules: list[str] = field(default_factory=list)
    uses_text: bool = False  # a rule refers to TEXT

    def write(self, parallel: bool, answer: str | None) -> str:
        """Return the whole grammar."""
        call_opener, after_opener = self._split_opener(steps_of(self.format.call))
        self._add("call", _sequence_of(call_opener, "rest"))
        self._add_choices("rest", after_opener)
        section_opener = self._add_calls(parallel)
        if answer is not None:
            self._add("start", "calls | answer")
            self._add("answer", f"%json {_as_literal(json.loads(answer))}")
        elif not self.free:
            self._add("start", "calls")
        elif self.format.start:
            self._add("start", "calls | text")
            self._add("text", "OTHER?")
            self._add("OTHER", rf"/[^{re.escape(self.format.start_mark)}](.|\n)*/")
        else:
            self._add_free_text(section_opener, call_opener)
        if self.uses_text:
            self._add("TEXT", ANY_TEXT)
        return "\n".join(self.rules)

    def _add_calls(self, parallel: bool) -> str:
        """Add the rule `calls`. If the format has a text that opens a section of calls, return
        this text and add the rule `inner` for the text after it."""
        format = self.format
        first_call = "call"
        opener = ""
        if format.start:
            self._add_choices("first", steps_of(format.start))
            first_call = "first"
        elif format.before:
            opener, before = self._split_opener(steps_of(format.before))
            first_call = _sequence_of(self._literals(before), "call")
        more_calls = f"({self._literals(steps_of(format.between))} call)*" if parallel else ""
        calls = _sequence_of(first_call, more_calls, self._literals(steps_of(format.after)))
        if opener:
            self._add("calls", f"{opener} inner")
            self._add("inner", calls)
        else:
            self._add("calls", calls)
        return opener

    def _add_free_text(self, section_opener: str, call_opener: str) -> None:
        """Add the rules for a reply with calls in free text."""
        self._add("start", "called* text")
        self._add("called", "opening inner" if section_opener else "opening rest")
        self._add_text_up_to("opening", section_opener or call_opener)
        self._add("text", "TEXT")

    def _add(self, name: str, body: str) -> None:
        self.rules.append(f"{name}: {body}")

    def _add_text_up_to(self, name: str, end: str) -> None:
        """Add a rule for any text up to the first occurrence of `end`. Ordinary text contains no
        special token, so the rule needs no lazy match if `end` has a special token."""
        lazy = "" if "<[" in end else "[lazy]"
        self._add(name + lazy, f"TEXT {end}")
        self.uses_text = True

    def _add_choices(self, name: str, steps: tuple[PatternStep, ...]) -> None:
        """Add a rule with one choice for each tool."""
        choices = [f"{name}{index}" for index in range(len(self.tools))]
        self._add(name, " | ".join(choices))
        for choice, tool in zip(choices, self.tools, strict=True):
            terms = [self._term(step, choice, tool["function"]) for step in steps]
            self._add(choice, _sequence_of(*terms))

    # ---- the parts of a pattern ----

    def _split_opener(self, steps: tuple[PatternStep, ...]) -> tuple[str, tuple[PatternStep, ...]]:
        """Return the text that a pattern begins with, and the steps after it."""
        if not steps or steps[0].kind != "text":
            return "", steps
        return self._literal(steps[0].text), steps[1:]

    def _literals(self, steps: tuple[PatternStep, ...]) -> str:
        """Return one literal for each step. The steps are not joined, because of two literals that
        may follow at one position, neither may be the beginning of the other."""
        return " ".join(self._literal(step.text) for step in steps)

    def _literal(self, text: str) -> str:
        """Return a text as a sequence of strings and special tokens."""
        if not text:
            return ""
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        special = "|".join(map(re.escape, longest_first))
        parts = re.split(f"({special})", text) if special else [text]
        return " ".join(self._token_or_string(part) for part in parts if part)

    def _token_or_string(self, part: str) -> str:
        if part in self.special_ids:
            return f"<[{self.special_ids[part]}]>"
        return json.dumps(part)

    def _term(self, step: PatternStep, rule: str, function: dict[str, Any]) -> str:
        """Return the term of the grammar for one step of a pattern and one tool."""
        schema = function.get("parameters")
        if self.free and not function.get("strict"):
            schema = {"additionalProperties": True}
        match step.kind:
            case "text" | "space":
                return self._literal(step.text)
            case "name":
                return self._literal(function["name"])
            case "id":
                return r"/[0-9]{1,4}/"
            case "json":
                head = json.dumps(self._json_head(function["name"]))
                return f'{head} {_json_rule(_arguments_schema(schema))} "}}"'
            case "arguments":
                return _json_rule(_arguments_schema(schema))
            case "parameters":
                return self._parameters(rule, schema)
            case "python":
                return self._keywords(rule, schema)
        return ""  # The term of {skip} is empty.

    def _json_head(self, name: str) -> str:
        """Return the text of a call in JSON up to the arguments."""
        quoted = json.dumps(name)
        if self.format.keyed:
            return f"{{{quoted}: "
        name_key, arguments_key = self.format.members
        return f'{{"{name_key}": {quoted}, "{arguments_key}": '

    # ---- arguments one by one ----

    def _parameters(self, rule: str, schema: Any) -> str:
        """Return a sequence of the parameters that the schema lists, in the same order."""
        if _leaves_parameters_open(schema):
            self._add_parameter(f"{rule}_any", None, {})
            return f"{rule}_any*"
        terms: list[str] = []
        for index, parameter in enumerate(_listed_parameters(schema)):
            own_rule = f"{rule}_{index}"
            self._add_parameter(own_rule, parameter.name, parameter.schema)
            terms.append(own_rule if parameter.required else f"{own_rule}?")
        return " ".join(terms)

    def _add_parameter(self, rule: str, key: str | None, schema: Any) -> None:
        """Add a rule for one parameter in tags. Without a key, the rule allows any parameter."""
        is_text = key is None or is_string_schema(schema)
        head, _, tail = self.format.parameter.partition("{value}")
        head = head.replace("{kind}", "true" if is_text else "false")
        before_key, _, after_key = head.partition("{key}")
        name = '/[^<>"]+/' if key is None else self._literal(key)
        end = self._literal(tail)
        choices = schema.get("enum") if isinstance(schema, dict) else None
        if is_text and choices:
            self._add(f"{rule}_value", " | ".join(self._literal(choice) for choice in choices))
            value = f"{rule}_value {end}"
        elif is_text:
            self._add_text_up_to(f"{rule}_value", end)
            value = f"{rule}_value"
        else:
            value = f"{_json_rule(schema)} {end}"
        opening = _sequence_of(self._literal(before_key), name, self._literal(after_key))
        self._add(rule, f"{opening} {value}")

    def _keywords(self, rule: str, schema: Any) -> str:
        """Return Python's keyword arguments: the required ones in their order, then any others."""
        if _leaves_parameters_open(schema):
            self._add(f"{rule}_any", f'/[a-zA-Z_]\\w*/ "=" {_json_rule({})}')
            return f'({rule}_any (", " {rule}_any)*)?'
        required: list[str] = []
        optional: list[str] = []
        for index, parameter in enumerate(_listed_parameters(schema)):
            own_rule = f"{rule}_{index}"
            head = self._literal(f"{parameter.name}=")
            self._add(own_rule, f"{head} {_keyword_value(parameter.schema)}")
            group = required if parameter.required else optional
            group.append(own_rule)
        if optional:
            self._add(f"{rule}_other", " | ".join(optional))
        terms = ' ", " '.join(required)
        if required and optional:
            return f'{terms} (", " {rule}_other)*'
        if optional:
            return f'({rule}_other (", " {rule}_other)*)?'
        return terms


def _sequence_of(*terms: str) -> str:
    return " ".join(filter(None, terms))


def _leaves_parameters_open(schema: Any) -> bool:
    """Return whether the schema lists no parameters but allows some."""
    if not isinstance(schema, dict) or isinstance(schema.get("properties"), dict):
        return False
    return any(key in schema for key in (*DESCRIBING_KEYWORDS, "additionalProperties"))


def _listed_parameters(schema: Any) -> list[_Parameter]:
    """Return the parameters that a schema lists. The schema of each parameter gets the definitions
    of the full schema."""
    if not isinstance(schema, dict):
        return []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or []
    parameters: list[_Parameter] = []
    for name, own_schema in parameters_of(schema).items():
        if isinstance(own_schema, dict):
            own_schema = {**own_schema, **definitions}
        parameters.append(_Parameter(name, own_schema, name in required))
    return parameters


def _keyword_value(schema: Any) -> str:
    """Return the rule for the value of a keyword argument. Models put a string between either kind
    of quotation marks."""
    value = _json_rule(schema)
    if is_string_schema(schema) and "enum" not in schema:
        return f"({value} | {SINGLE_QUOTED})"
    return value


def _json_rule(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_STYLE}
    return f"%json {_as_literal(schema)}"


def _as_literal(schema: Any) -> str:
    """Return a schema as JSON without percent signs, which would begin a keyword of the grammar."""
    return json.dumps(schema, ensure_ascii=False).replace("%", "\\u0025")


def _arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments. A tool that describes no parameters has none.
    octavo/text/schema.py closes objects whose properties the schema names."""
    schema = {"type": "object", **(parameters or {})}
    if not any(key in schema for key in DESCRIBING_KEYWORDS):
        schema.setdefault("additionalProperties", False)
    return schema
