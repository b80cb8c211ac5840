"""What a model is told of tools, and what it is held to where it must call one. What it writes is
read by tools.py.

Knows text alone: messages in, messages out; tools in, a grammar out.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.text.tools import HERMES, Format

# keywords by which a schema names an object's properties
DESCRIBING = ("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
RESULT_ROLES = ("tool", "function")  # of messages that hold the result of a call
_INTRODUCTION = """\
You can call functions. These are the ones there are, as JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these tags, once for each call:
{open}
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
{close}"""


def mentions_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
    """Whether there are tools, or calls of tools or their results in the conversation."""
    return bool(tools) or any(
        message["role"] in RESULT_ROLES or "tool_calls" in message for message in messages
    )


def spell_out(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, takes_system: bool = True
) -> list[dict[str, Any]]:
    """A conversation with tools for a template that knows nothing of them. Calls and results are
    written as models of the hermes kind write them. The tools are described in the system message,
    or in the first user message where the template takes no system message."""
    spelled: list[dict[str, Any]] = []
    before = ""  # the role of the message before
    for message in messages:
        role = message["role"]
        if role == "assistant" and "tool_calls" in message:
            calls = HERMES.between.join(map(_written, message["tool_calls"]))
            content = "\n".join(filter(None, (message["content"], calls)))
            spelled.append({"role": "assistant", "content": content})
        elif role in RESULT_ROLES:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            _add_user_text(spelled, text, joined=before in RESULT_ROLES)
        elif role == "user" and before in RESULT_ROLES:
            # templates may insist that user and assistant take turns, and a result is a user's turn
            _add_user_text(spelled, message["content"], joined=True)
        else:
            spelled.append(message)
        before = role
    if tools:
        _introduce(spelled, tools, takes_system)
    return spelled


def _add_user_text(messages: list[dict[str, Any]], text: str, joined: bool) -> None:
    if joined:
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def _introduce(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], takes_system: bool
) -> None:
    """Describe the tools at the start of the conversation."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines, open=HERMES.open, close=HERMES.close)
    first = messages[0]
    if first["role"] in ("system", "developer"):
        content = "\n\n".join(filter(None, (first["content"], text)))
        messages[0] = {**first, "content": content}
    elif takes_system:
        messages.insert(0, {"role": "system", "content": text})
    elif first["role"] == "user":
        messages[0] = {**first, "content": f"{text}\n\n{first['content']}"}
    else:
        messages.insert(0, {"role": "user", "content": text})


def _written(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    said = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{HERMES.open}\n{json.dumps(said, ensure_ascii=False)}\n{HERMES.close}"


def call_grammar(
    format: Format,
    tools: list[dict[str, Any]],
    parallel: bool,
    special_ids: dict[str, int],
    answer: str | None = None,
    free: bool = False,
) -> str:
    """A grammar in llguidance's dialect of Lark for calls of these tools: one, or with `parallel`
    one or more. Instead of calls there may be an `answer` that matches a JSON schema; or, with
    `free`, any text around them, and perhaps no call at all: then only tools that are `strict` are
    held to their parameters.

    `special_ids`: which of the format's tags are special tokens, and so must be named by id. Each
    tool's parameters stand as a schema of their own, so that references within them (#/$defs/...)
    mean what they meant.
    """

    def tag(text: str) -> str:
        return f"<[{special_ids[text]}]>" if text in special_ids else json.dumps(text)

    rest = f'"\\n" function "\\n" {tag(format.close)}'
    call = f"{tag(format.open)} {rest}" if format.close else "function"
    rules = [
        f"calls: call ({json.dumps(format.between)} call)*" if parallel else "calls: call",
        f"call: {call}",
        "function: " + " | ".join(f"f{i}" for i in range(len(tools))),
    ]
    if answer is not None:
        rules += ["start: calls | answer", f"answer: %json {_literal(json.loads(answer))}"]
    elif not free:
        rules += ["start: calls"]
    elif format.close:  # lazy: the first tag ends the text before it
        lazy = "" if format.open in special_ids else "[lazy]"
        rules += [
            "start: called* text",
            f"called: opening {rest}",
            f"opening{lazy}: TEXT {tag(format.open)}",
        ]
        rules += ["text: TEXT", r"TEXT: /(.|\n)*/"]
    else:
        rules += ["start: calls | text", "text: TEXT?", r"TEXT: /[^{](.|\n)*/"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"])}, "{format.arguments}": '
        loose = free and not function.get("strict")
        schema = _literal(
            _schema({"additionalProperties": True} if loose else function.get("parameters"))
        )
        rules.append(f'f{i}: {json.dumps(head)} %json {schema} "}}"')
    return "\n".join(rules)


def _literal(schema: Any) -> str:
    """As JSON in which no %json can be found but the grammar's own."""
    return json.dumps(schema, ensure_ascii=False).replace("%", "\\u0025")


def _schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments, with one way to set whitespace. A tool that describes no
    parameters has none. Objects whose properties it names are closed when the schema is compiled
    (octavo/text/schema.py)."""
    style = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    schema = {"type": "object", **(parameters or {}), "x-guidance": style}
    if not any(key in schema for key in DESCRIBING):
        schema.setdefault("additionalProperties", False)
    return schema
