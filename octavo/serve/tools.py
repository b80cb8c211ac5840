"""What a request says of tools, judged: which there are, whether one must be called, and how calls are found in the reply."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.params import SamplingParams, StructuredOutputs
from octavo.serve import structure
from octavo.serve.errors import bad, unsupported
from octavo.serve.limits import Limits
from octavo.serve.prompt import check_template
from octavo.serve.protocol import ChatRequest
from octavo.serve.validate import ignore
from octavo.text.chat import select_template
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls import CallDelta, ToolParser
from octavo.text.tool_detect import detect_format, guess_format
from octavo.text.tool_formats import FORMATS, HERMES, NO_FORMAT, ToolFormat
from octavo.text.tool_grammar import call_grammar, has_grammar, may_be_free
from octavo.text.tool_patterns import make_parser

if TYPE_CHECKING:
    from octavo.serve.front import Front

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, which the model may call or must call."""

    tools: list[dict[str, Any]]  # for the chat template
    format: ToolFormat
    parallel: bool
    grammar: str | None  # the reply must match it
    shown: bool  # tags of the format are special tokens, which the parser must see
    ignored: tuple[str, ...] = ()  # fields without effect

    def sampling(self, params: SamplingParams) -> SamplingParams:
        if self.shown:
            params = replace(params, skip_special_tokens=False)
        if self.grammar is not None:
            if params.use_beam_search:
                raise unsupported(
                    "tools", "beam search follows no structure, and these calls have one"
                )
            params = replace(params, structured_outputs=StructuredOutputs(grammar=self.grammar))
        return params

    def note(self, headers: dict[str, str]) -> None:
        """Say in the reply's headers what the client cannot expect."""
        ignore(headers, *self.ignored)
        if self.format is NO_FORMAT:
            headers["x-tool-calls"] = "not-parsed"

    def parser(self) -> ToolParser:
        functions = [tool["function"] for tool in self.tools]
        schemas = {function["name"]: function.get("parameters") for function in functions}
        return make_parser(self.format, schemas, self.parallel)

    def first_call(self) -> Callable[[str], bool]:
        """Says of a text, as it comes, whether its first call is complete."""
        parser = self.parser()

        def over(text: str) -> bool:
            parser.push(text)
            return parser.over

        return over

    def read(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """The content of a whole reply, and its calls."""
        parser = self.parser()
        content: list[str] = []
        calls: list[tuple[str, list[str]]] = []
        for new in parser.push(text) + parser.finish():
            if not isinstance(new, CallDelta):
                content.append(new)
            elif new.name is not None:
                calls.append((new.name, []))
            else:
                calls[new.call][1].append(new.arguments)
        found = [whole_call(name, "".join(parts)) for name, parts in calls]
        return "".join(content) or (None if calls else ""), found


def whole_call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def read_tools(
    front: Front, body: ChatRequest, answer: StructuredOutputs | None = None
) -> ToolUse | None:
    """The tools of a request. None if there are none, or if the model is not to call any. `answer`
    is the structure of a reply without calls."""
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise bad("tool_choice", "tool_choice is for requests with tools")
        return None
    tools = check_tools(body.tools, front.config.limits)
    choice = check_choice(body.tool_choice, [tool["function"]["name"] for tool in tools])
    if choice == "none":
        return None
    check_template(front, body)
    format = choose_format(front, body)
    parallel = body.parallel_tool_calls is not False
    forced = choice != "auto" or answer is not None
    if forced and not has_grammar(format):
        format = HERMES  # any form does for calls that a grammar spells out
    specials = special_tags(front.tokenizer, format)
    grammar = None
    ignored: tuple[str, ...] = ()
    if isinstance(choice, tuple):
        named = [tool for tool in tools if tool["function"]["name"] == choice[1]]
        grammar = call_grammar(format, named, False, specials)
    elif choice == "required":
        grammar = call_grammar(format, tools, parallel, specials)
    elif answer is not None:
        schema = answer_schema(body, answer)
        grammar = call_grammar(format, tools, parallel, specials, schema)
    elif any(tool["function"].get("strict") for tool in tools):
        if may_be_free(format):
            grammar = call_grammar(format, tools, parallel, specials, free=True)
        else:
            ignored = ("tools.function.strict",)
    return ToolUse(tools, format, parallel, grammar, bool(specials), ignored)


def choose_format(front: Front, body: ChatRequest) -> ToolFormat:
    """How the model writes calls. A template that came with the request is not run here."""
    setting = front.config.tool_parser
    if setting != "auto":
        return FORMATS.get(setting, NO_FORMAT)
    if body.chat_template is not None:
        return guess_format(body.chat_template)
    return detect_format(select_template(front.tokenizer, tools=True), front.tokenizer)


def answer_schema(body: ChatRequest, answer: StructuredOutputs) -> str:
    """The JSON schema of an answer that may come instead of calls."""
    if answer.json is not None:
        return str(answer.json)
    if answer.json_object:
        return '{"type": "object"}'
    raise bad(
        structure.field(body),
        "with tools, an answer can be held to JSON only: use response_format",
    )


@lru_cache(maxsize=16)
def special_tags(tokenizer: Tokenizer, format: ToolFormat) -> dict[str, int]:
    """The special tokens in what the format says literally, with their ids."""
    tokens = {tokenizer.token_str(id): id for id in tokenizer.special_ids}
    return {
        token: id for token, id in tokens.items() if any(token in text for text in format.texts)
    }


def check_tools(tools: list[dict[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    if not 1 <= len(tools) <= limits.tools:
        raise bad(
            "tools",
            f"tools has 1 to {limits.tools} entries, got {len(tools)}",
            "param_out_of_range",
        )
    try:
        size = len(json.dumps(tools, ensure_ascii=False))
    except RecursionError:
        raise bad("tools", "tools are nested too deeply") from None
    if size > limits.tool_chars:
        raise bad(
            "tools",
            f"tools may have at most {limits.tool_chars} characters as JSON, got {size}",
            "param_out_of_range",
        )
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        if tool.get("type") != "function":
            raise bad(
                f"{where}.type",
                f"{where}.type must be function: this server has no tools of its own",
            )
        function = tool.get("function")
        where = f"{where}.function"
        if not isinstance(function, dict):
            raise bad(where, f"{where} must be an object with name, description and parameters")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise bad(f"{where}.name", f"{where}.name has 1 to 64 characters of A-Z a-z 0-9 _ -")
        if name in names:
            raise bad(f"{where}.name", f"there are two tools by the name of {name}")
        names.add(name)
        if not isinstance(function.get("description"), str | None):
            raise bad(f"{where}.description", f"{where}.description must be a text")
        if not isinstance(function.get("strict"), bool | None):
            raise bad(f"{where}.strict", f"{where}.strict must be true or false")
        check_parameters(function.get("parameters"), f"{where}.parameters")
    return tools


def check_parameters(schema: Any, where: str) -> None:
    """The outside of it: what a schema may say within is known when a grammar is made of it, which only forced calls need."""
    if schema is None:
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise bad(
            where,
            f'{where} must be a JSON schema of an object: {{"type": "object", "properties": {{...}}}}',
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(
        isinstance(value, dict | bool) for value in properties.values()
    ):
        raise bad(
            f"{where}.properties", f"{where}.properties must be an object of JSON schemas, by name"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad(f"{where}.required", f"{where}.required must be a list of names")


def check_choice(choice: str | dict[str, Any] | None, names: list[str]) -> str | tuple[str, str]:
    """ "none", "auto", "required", or ("named", the tool's name)."""
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        return choice
    function = choice.get("function") if isinstance(choice, dict) else None
    if (
        not isinstance(choice, dict)
        or choice.get("type") != "function"
        or not isinstance(function, dict)
    ):
        raise bad("tool_choice", f"tool_choice must be {CHOICES}")
    if function.get("name") not in names:
        some = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise bad(
            "tool_choice.function.name", f"there is no such tool among those of the request: {some}"
        )
    return "named", function["name"]
