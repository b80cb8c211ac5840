"""Describes tools to a model in words, if its chat template does not show them.

The input and the output are messages. Calls are written in the hermes form.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.text.tool_formats import HERMES

RESULT_ROLES = ("tool", "function")  # roles of messages with the result of a call
_INTRODUCTION = """\
You can call functions. These are the ones there are, as JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these tags, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>"""


def mentions_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
    """Return whether there are tools, or tool calls or their results in the conversation."""
    return bool(tools) or any(
        message["role"] in RESULT_ROLES or "tool_calls" in message for message in messages
    )


def spell_out(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, takes_system: bool = True
) -> list[dict[str, Any]]:
    """Return a conversation with tools for a template that does not support tools. Calls and
    results are written in the hermes format. The tools are described in the system message, or in
    the first user message if the template takes no system message."""
    spelled: list[dict[str, Any]] = []
    previous_role = ""  # the role of the message before
    for message in messages:
        role = message["role"]
        if role == "assistant" and "tool_calls" in message:
            calls = HERMES.between.join(map(_written, message["tool_calls"]))
            content = "\n".join(filter(None, (message["content"], calls)))
            spelled.append({"role": "assistant", "content": content})
        elif role in RESULT_ROLES:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            _add_user_text(spelled, text, joined=previous_role in RESULT_ROLES)
        elif role == "user" and previous_role in RESULT_ROLES:
            # Templates may require that user and assistant alternate. A result is a user's turn.
            _add_user_text(spelled, message["content"], joined=True)
        else:
            spelled.append(message)
        previous_role = role
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
    text = _INTRODUCTION.format(tools=lines)
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
    call_object = {"name": function.get("name"), "arguments": function.get("arguments")}
    return HERMES.call.replace("{json}", json.dumps(call_object, ensure_ascii=False))
