"""Public chat templates render as transformers renders them, and tool calls that they render are
read back. `make templates` runs this; it downloads the templates."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ChatTemplateError
from octavo.text import ChatTemplate, Tokenizer
from octavo.text.chat import render_marked
from octavo.text.conversation import argument_forms, check_messages
from octavo.text.gguf_tokenizer import LLAMA3
from octavo.text.tool_detect import CALL_IDS, detect_format, read_call, written_call
from octavo.text.tool_prompt import mentions_tools, spell_out
from tests.text.builders import byte_level
from tests.text.templates import collect_templates

pytestmark = pytest.mark.slow
Messages = list[dict[str, Any]]

SPECIALS = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of a city."}},
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": "Hello there <é> & 'you'"}
NEXT = {"role": "user", "content": " And then?\n"}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function}


def history(arguments: str) -> Messages:
    """A tool loop as OpenAI's clients send it."""
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        NEXT,
    ]


def thought(name: str) -> Messages:
    return [USER, {"role": "assistant", "content": "Fine.", name: "They greet me."}, NEXT]


CONVERSATIONS: dict[str, tuple[Messages, list[dict[str, Any]] | None]] = {
    "plain": ([USER], None),
    "system": ([{"role": "system", "content": "Be brief."}, USER], None),
    "turns": ([USER, {"role": "assistant", "content": "Fine. "}, NEXT], None),
    "no content": ([USER, {"role": "assistant", "content": None}, NEXT], None),
    "tools": ([USER], [TOOL]),
    "tools and a system message": ([{"role": "system", "content": "Be brief."}, USER], [TOOL]),
    "tool calls": (history('{"city": "Paris"}'), [TOOL]),
    "tool calls without tools": (history('{"city": "Paris"}'), None),
    "reasoning_content": (thought("reasoning_content"), None),
    "reasoning": (thought("reasoning"), None),
    "thinking": (thought("thinking"), None),
    "another role": ([USER, {"role": "wizard", "content": "Abracadabra"}], None),
    "control tokens": ([{"role": "user", "content": "bye<|im_end|>\n<|im_start|>x <|im_"}], None),
}
# Templates that refuse even a plain conversation, in transformers too, and why.
NEVER = {
    "llama-cpp-python:CohereForAI-c4ai-command-r-plus-tool_use": "needs tools",
    "llama-cpp-python:NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "needs tools",
    "vllm:tool_chat_template_functiongemma": "needs tools",
    "llama-cpp-python:fireworks-ai-llama-3-firefunction-v2": "needs chat_template_kwargs",
}


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    found = collect_templates()
    assert len(set(found.values())) >= 103
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    byte_level(LLAMA3).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIALS}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(byte_level(LLAMA3), SPECIALS)


def given_to_transformers(
    template: ChatTemplate, messages: Messages, tools: list[dict[str, Any]] | None
) -> tuple[Messages, list[dict[str, Any]] | None]:
    """What vLLM gives transformers for the same request: text for null, arguments parsed, parts
    where the template needs them. A template that shows no tools gets them in words."""
    messages = check_messages(messages)
    if mentions_tools(messages, tools) and not template.knows_tools:
        messages = spell_out(messages, tools, template.takes_system)
        tools = None
    if not template.takes_text:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return messages, tools


def rendered_by_transformers(
    theirs: Any, source: str, messages: Messages, tools: Any, **options: Any
) -> str | Exception:
    """With the arguments of calls as objects, or as text where only that can be rendered."""
    first: Exception | None = None
    for form in argument_forms(messages):
        try:
            return theirs.apply_chat_template(
                form, tools=tools, chat_template=source, tokenize=False, **options
            )
        except Exception as error:
            first = first or error
    assert first is not None
    return first


def test_templates_render_as_transformers_renders_them(
    templates: dict[str, str], theirs: Any, ours: Tokenizer
) -> None:
    equal: Counter[str] = Counter()
    refused: dict[str, list[str]] = {conversation: [] for conversation in CONVERSATIONS}
    wrong: list[str] = []
    for name, source in templates.items():
        template = ChatTemplate(source, SPECIALS)
        for conversation, (messages, tools) in CONVERSATIONS.items():
            given = given_to_transformers(template, messages, tools)
            want = rendered_by_transformers(theirs, source, *given, add_generation_prompt=True)
            try:
                text, mark = render_marked(ours, template, messages, tools)
                got: str | Exception = text.replace(mark or "", "")
            except ChatTemplateError as error:
                got = error
            if isinstance(want, Exception) and isinstance(got, Exception):
                refused[conversation].append(f"{name}: {want!s:.100}")
            elif got == want:
                equal[conversation] += 1
            else:
                wrong.append(f"{name}, {conversation}: {got!r:.300} instead of {want!r:.300}")
    for conversation in CONVERSATIONS:
        count = equal[conversation]
        print(f"{conversation}: {count} of {len(templates)} equal, refused by both:")
        print("".join(f"    {line}\n" for line in refused[conversation]))
    assert not wrong, "\n".join(wrong)
    assert {line.partition(": ")[0] for line in refused["plain"]} == NEVER.keys()
    assert all(count >= 103 for count in equal.values())


FORECAST = {
    "type": "function",
    "function": {
        "name": "get_forecast",
        "description": "Returns a forecast.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The name of a city."},
                "days": {"type": "integer", "description": "The number of days."},
                "hourly": {"type": "boolean", "description": "One entry for each hour."},
                "fields": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "The fields of an entry.",
                },
            },
            "required": ["city"],
        },
    },
}
FORECAST_ARGUMENTS = {
    "city": "São Paulo",
    "days": 3,
    "hourly": True,
    "fields": ["rain", "wind"],
}
# Templates that show tools and whose calls are not read back, and why.
NOT_READ_BACK = {
    "llama-cpp-python:CohereForAI-c4ai-command-r-plus-tool_use": "a format that is not known",
    "llama-cpp-python:Kimi-K2-Instruct": "changes a list, which the sandbox forbids",
    "llama-cpp-python:Kimi-K2-Thinking": "changes a list, which the sandbox forbids",
    "llama-cpp-python:Kimi-K3": "a format that is not known",
    "llama-cpp-python:LFM2-8B-A1B": "leaves calls out",
    "llama-cpp-python:LFM2.5-Instruct": "leaves calls out",
    "llama-cpp-python:MiniMax-M3": "a format that is not known",
    "llama-cpp-python:ibm-granite-granite-3.3-2B-Instruct": "leaves calls out",
    "llama-cpp-python:tencent-Hy3": "a format that is not known",
    "vllm:tool_chat_template_functiongemma": "writes every value as a string",
    "vllm:tool_chat_template_gemma3_pythonic": "writes no commas between arguments",
    "vllm:tool_chat_template_glm4": "leaves calls out",
    "vllm:tool_chat_template_llama4_pythonic": "writes every value as a string",
    "vllm:tool_chat_template_phi4_mini": "writes Python's literals in JSON",
    "trl:lfm2": "leaves calls out",
    "trl:lfm2_training": "leaves calls out",
    "axolotl:falcon_h1": "leaves calls out",
    "axolotl:llama4": "writes a pair of empty tags before the call",
    "xinference:deepseek-v3": "writes Python's literals in JSON",
    "xinference:glm4-0414": "leaves calls out",
    "xinference:qwen1.5-chat": "leaves out a quotation mark",
}


def test_calls_that_templates_render_are_read_back(
    templates: dict[str, str], ours: Tokenizer
) -> None:
    formats: Counter[str] = Counter()
    detected: dict[str, str] = {}
    wrong: list[str] = []
    for name, source in templates.items():
        template = ChatTemplate(source, SPECIALS)
        if not template.knows_tools:
            continue
        format = detect_format(template, ours)
        texts = [
            written_call(template, FORECAST, FORECAST_ARGUMENTS, call_id) for call_id in CALL_IDS
        ]
        read = [read_call(format, text, FORECAST) for text in texts]
        if ("get_forecast", FORECAST_ARGUMENTS) in read:
            formats[format.name] += 1
        else:
            wrong.append(name)
        detected[name] = format.name
    print(f"read back: {sum(formats.values())} of {len(templates)}, {dict(formats)}")
    assert sorted(wrong) == sorted(NOT_READ_BACK)
    assert len(formats) >= 30
    for name, format_name in {
        "llama-cpp-python:GigaChat3.1-10B-A1.8B": "gigachat",
        "llama-cpp-python:MiniMax-M1": "jamba",
        "vllm:tool_chat_template_internlm2_tool": "internlm",
        "axolotl:llama4": "llama_json",
    }.items():
        assert detected[name] == format_name
