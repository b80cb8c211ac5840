"""Checks the tools of a request.

This module decides which calls the model may or must make, and how the server finds them in the
reply.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.params import SamplingParams, StructuredOutputs
from octavo.serve.api import structured_output
from octavo.serve.api.api_errors import invalid_field, unsupported
from octavo.serve.api.prompt import check_template
from octavo.serve.api.protocol import ChatRequest
from octavo.serve.api.validate import ignore
from octavo.serve.limits import Limits
from octavo.text.chat import select_template
from octavo.text.detokenize import EndCheck
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls import ToolParser
from octavo.text.tool_detect import detect_format, guess_format
from octavo.text.tool_formats import HERMES, NO_FORMAT, ToolFormat, find_format
from octavo.text.tool_grammar import allows_free_text, call_grammar, has_grammar
from octavo.text.tool_patterns import make_parser

if TYPE_CHECKING:
    from octavo.serve.front.front import Front

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
ALLOWED = (
    '{"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}]}'
)


class Choice(NamedTuple):
    """The meaning of a tool_choice."""

    mode: str  # "none", "auto" or "required"
    names: tuple[str, ...] = ()  # The only tools that may be called. Empty: all of them.
    is_single: bool = False  # Exactly one call.


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request that the model may call or must call."""

    tools: list[dict[str, Any]]  # The chat template renders these.
    format: ToolFormat
    parallel: bool
    grammar: str | None  # The grammar of the whole reply.
    keeps_special_tokens: bool  # The text must contain the special tokens that the format uses.
    ignored: tuple[str, ...] = ()  # The fields without effect.

    def sampling(self, params: SamplingParams) -> SamplingParams:
        if self.keeps_special_tokens:
            params = replace(params, skip_special_tokens=False)
        if self.grammar is not None:
            if params.use_beam_search:
                raise unsupported(
                    "tools",
                    "forced tool calls need structured output, which beam search does not support",
                )
            params = replace(params, structured_outputs=StructuredOutputs(grammar=self.grammar))
        return params

    def note(self, headers: dict[str, str]) -> None:
        """Add headers with the fields that have no effect, and about calls that are not parsed."""
        ignore(headers, *self.ignored)
        if self.format is NO_FORMAT:
            headers["x-tool-calls"] = "not-parsed"

    def parser(self) -> ToolParser:
        functions = [tool["function"] for tool in self.tools]
        schemas = {function["name"]: function.get("parameters") for function in functions}
        return make_parser(self.format, schemas, self.parallel)

    def make_end_check(self) -> EndCheck:
        """Return an end check that ends the text when a call is complete."""
        parser = self.parser()

        def is_complete(text: str) -> bool:
            parser.push(text)
            return parser.is_done

        return is_complete


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """Return a complete call of a tool, as an entry of `tool_calls`."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def read_tools(
    front: Front, body: ChatRequest, answer_format: StructuredOutputs | None = None
) -> ToolUse | None:
    """Return the tools of a request, or None if the model may not call any.

    `answer_format` is the structure of a reply without calls.
    """
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise invalid_field(
                "tool_choice", "tool_choice needs tools: set tools too, or remove tool_choice"
            )
        return None
    tools = check_tools(body.tools, front.config.limits)
    choice = check_choice(body.tool_choice, [tool["function"]["name"] for tool in tools])
    if choice.mode == "none":
        return None
    check_template(front, body)
    format = choose_format(front, body)
    parallel = body.parallel_tool_calls is not False
    forced = choice.mode == "required" or answer_format is not None
    if forced and not has_grammar(format):
        format = HERMES  # A grammar can force calls in any format.
    allowed = tools
    if choice.names:
        allowed = [tool for tool in tools if tool["function"]["name"] in choice.names]
    specials = special_tags(front.tokenizer, format)
    grammar = None
    ignored: tuple[str, ...] = ()
    is_strict = any(tool["function"].get("strict") for tool in allowed)
    if choice.mode == "required":
        grammar = call_grammar(format, allowed, parallel and not choice.is_single, specials)
    elif answer_format is not None:
        schema = answer_schema(body, answer_format)
        grammar = call_grammar(format, allowed, parallel, specials, schema)
    elif (is_strict or choice.names) and allows_free_text(format):
        grammar = call_grammar(format, allowed, parallel, specials, free=True)
    elif choice.names:
        tools = allowed  # The prompt contains only the allowed tools.
    if is_strict and grammar is None:
        ignored = ("tools.function.strict",)
    return ToolUse(tools, format, parallel, grammar, bool(specials), ignored)


def replace_functions(body: ChatRequest) -> bool:
    """Replace functions and function_call by tools and tool_choice. Returns whether it did."""
    if body.functions is None:
        if body.function_call not in (None, "none", "auto"):
            raise invalid_field("function_call", "function_call needs functions: set functions too")
        return False
    if body.tools is not None or body.tool_choice is not None:
        raise invalid_field(
            "functions", "functions is the old form of tools: send either functions or tools"
        )
    body.tools = [{"type": "function", "function": function} for function in body.functions]
    call = body.function_call
    if isinstance(call, str) and call not in ("none", "auto"):
        raise invalid_field("function_call", 'function_call must be none, auto or {"name": ...}')
    body.tool_choice = {"type": "function", "function": call} if isinstance(call, dict) else call
    body.parallel_tool_calls = False
    return True


def choose_format(front: Front, body: ChatRequest) -> ToolFormat:
    """Return the format of the model's calls, without rendering a template of the request."""
    setting = front.config.tool_parser
    if setting == "none":
        return NO_FORMAT
    if setting != "auto":
        return find_format(setting)
    if body.chat_template is not None:
        return guess_format(body.chat_template)
    return detect_format(select_template(front.tokenizer, tools=True), front.tokenizer)


def answer_schema(body: ChatRequest, answer_format: StructuredOutputs) -> str:
    """Return the JSON schema of an answer that may replace calls."""
    if answer_format.json is not None:
        schema = str(answer_format.json)
        try:
            json.loads(schema)
        except ValueError as error:
            raise invalid_field(
                structured_output.field(body), f"the JSON schema is not valid JSON: {error}"
            ) from None
        return schema
    if answer_format.json_object:
        return '{"type": "object"}'
    raise invalid_field(
        structured_output.field(body),
        "with tools, the structure of an answer can only be JSON: use response_format",
    )


@lru_cache(maxsize=16)
def special_tags(tokenizer: Tokenizer, format: ToolFormat) -> dict[str, int]:
    """Return the special tokens in the format's literal texts, with their ids."""
    tokens = {tokenizer.token_str(id): id for id in tokenizer.special_ids}
    return {
        token: id for token, id in tokens.items() if any(token in text for text in format.texts)
    }


def check_tools(tools: list[dict[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    if not 1 <= len(tools) <= limits.tools:
        raise invalid_field(
            "tools",
            f"tools must have 1 to {limits.tools} items, got {len(tools)}",
            "param_out_of_range",
        )
    try:
        size = len(json.dumps(tools, ensure_ascii=False))
    except RecursionError:
        raise invalid_field("tools", "tools are nested too deeply") from None
    if size > limits.tool_chars:
        raise invalid_field(
            "tools",
            f"tools can have at most {limits.tool_chars} characters as JSON, got {size}",
            "param_out_of_range",
        )
    names: set[str] = set()
    for i, tool in enumerate(tools):
        path = f"tools.{i}"
        if tool.get("type") != "function":
            raise invalid_field(
                f"{path}.type",
                f"{path}.type must be function: this server runs no tools itself",
            )
        function = tool.get("function")
        path = f"{path}.function"
        if not isinstance(function, dict):
            raise invalid_field(
                path, f"{path} must be an object with name, description and parameters"
            )
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise invalid_field(
                f"{path}.name", f"{path}.name must have 1 to 64 characters of A-Z a-z 0-9 _ -"
            )
        if name in names:
            raise invalid_field(f"{path}.name", f"two tools have the name {name}: rename one")
        names.add(name)
        if not isinstance(function.get("description"), str | None):
            raise invalid_field(f"{path}.description", f"{path}.description must be a string")
        if not isinstance(function.get("strict"), bool | None):
            raise invalid_field(f"{path}.strict", f"{path}.strict must be true or false")
        check_parameters(function.get("parameters"), f"{path}.parameters")
    return tools


def check_parameters(schema: Any, path: str) -> None:
    """Check the outer level of a schema.

    The other levels are checked when the schema becomes a grammar, which only forced calls need.
    """
    if schema is None:
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise invalid_field(
            path,
            f"{path} must be a JSON schema of an object: "
            '{"type": "object", "properties": {...}}',
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(
        isinstance(value, dict | bool) for value in properties.values()
    ):
        raise invalid_field(
            f"{path}.properties", f"{path}.properties must be an object of JSON schemas, by name"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid_field(f"{path}.required", f"{path}.required must be a list of names")


def check_choice(choice: str | dict[str, Any] | None, names: list[str]) -> Choice:
    """Return the meaning of tool_choice. `names` are the names of the tools."""
    if choice is None:
        return Choice("auto")
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        return Choice(choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "allowed_tools":
        return check_allowed(choice.get("allowed_tools", choice), names)
    function = choice.get("function") if isinstance(choice, dict) else None
    # huggingface_hub omits the type of a function.
    if kind not in ("function", None) or not isinstance(function, dict):
        raise invalid_field("tool_choice", f"tool_choice must be {CHOICES}")
    name = check_name(function.get("name"), names, "tool_choice.function.name")
    return Choice("required", (name,), is_single=True)


def check_allowed(allowed: Any, names: list[str]) -> Choice:
    """Return the choice of some of the tools. OpenAI has two forms of it."""
    path = "tool_choice.allowed_tools"
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid_field(path, f"{path} must be {ALLOWED}")
    allowed_names = []
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        name = function.get("name") if isinstance(function, dict) else None
        allowed_names.append(check_name(name, names, f"{path}.tools.{i}.function.name"))
    return Choice(mode, tuple(allowed_names))


def check_name(name: Any, names: list[str], param: str) -> str:
    if not isinstance(name, str) or name not in names:
        known_names = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise invalid_field(param, f"the request has no tool with this name, only: {known_names}")
    return name
