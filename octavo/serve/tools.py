"""What a request says of tools, judged: which there are, whether one must be called, and how calls are found in the reply."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.params import SamplingParams, StructuredOutputs
from octavo.serve import structure
from octavo.serve.errors import bad, unsupported
from octavo.serve.limits import Limits
from octavo.serve.protocol import ChatRequest
from octavo.serve.validate import check_template
from octavo.text.chat import select_template
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import call_grammar
from octavo.text.tools import FORMATS, CallDelta, Format, ToolParser, choose_format

if TYPE_CHECKING:
    from octavo.serve.front import Front

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model may call, or must."""

    tools: list[dict[str, Any]]  # what the chat template is told
    format: Format
    parallel: bool
    grammar: str | None  # what the reply must match
    shown: bool  # the format's tags are special tokens, and must be seen

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

    def parser(self) -> ToolParser:
        return ToolParser(
            self.format, {tool["function"]["name"] for tool in self.tools}, self.parallel
        )

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
    """None: there are no tools, or the model is not to call any. `answer`: what a reply that calls none must match."""
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise bad("tool_choice", "tool_choice is for requests with tools")
        return None
    tools = check_tools(body.tools, front.config.limits)
    choice = check_choice(body.tool_choice, [tool["function"]["name"] for tool in tools])
    if choice == "none":
        return None
    check_template(front, body)
    if body.chat_template is not None:
        source = body.chat_template
        knows_tools = front.text.knows_tools(source)
    else:
        template = select_template(front.tokenizer, tools=True)
        source = template.source
        knows_tools = template.knows_tools
    format = choose_format(front.config.tool_parser, source, knows_tools)
    if format is None:
        what = f"one of {', '.join(FORMATS)}"
        raise unsupported(
            "tools", f"this server does not read calls from this model; --tool-parser can be {what}"
        )
    specials = special_tags(front.tokenizer, format)
    parallel = body.parallel_tool_calls is not False
    grammar = None
    if isinstance(choice, tuple):
        named = [tool for tool in tools if tool["function"]["name"] == choice[1]]
        grammar = call_grammar(format, named, False, specials)
    elif choice == "required":
        grammar = call_grammar(format, tools, parallel, specials)
    elif answer is not None:
        schema = (
            answer.json
            if answer.json is not None
            else '{"type": "object"}'
            if answer.json_object
            else None
        )
        if schema is None:
            raise bad(
                structure.field(body),
                "with tools, an answer can be held to JSON only: use response_format",
            )
        grammar = call_grammar(format, tools, parallel, specials, str(schema))
    elif any(tool["function"].get("strict") for tool in tools):
        grammar = call_grammar(format, tools, parallel, specials, free=True)
    return ToolUse(tools, format, parallel, grammar, bool(specials))


def special_tags(tokenizer: Tokenizer, format: Format) -> dict[str, int]:
    ids = {tag: tokenizer.backend.token_to_id(tag) for tag in (format.open, format.close) if tag}
    return {tag: id for tag, id in ids.items() if id in tokenizer.special_ids}


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
