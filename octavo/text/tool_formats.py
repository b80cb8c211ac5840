"""The table of the formats in which models write tool calls. Parsers and grammars follow it.

Patterns of text with places in braces describe a format:

    {name}        the tool's name
    {json}        a JSON object with the name and the arguments, in any order
    {arguments}   the arguments as a JSON object
    {parameters}  the arguments one after the other, each in the pattern `parameter`
    {python}      the arguments as Python's keyword arguments
    {gemma}       the arguments as members without quotation marks around their names
    {key}         in `parameter`: the name
    {value}       in `parameter`: the value as text
    {kind}        in `parameter`: "true" if the value is a string
    {id}          a word that is ignored
    {skip}        a short text that is ignored

White space in a pattern matches any white space, or none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from octavo.errors import InvalidRequest
from octavo.extensions import TOOL_PARSERS, extension_names, find_extension, is_path

_PLACE = re.compile(
    r"\{(name|json|arguments|parameters|python|gemma|key|value|kind|id|skip)\}|(\s+)"
)


class PatternStep(NamedTuple):
    """A part of a pattern. Its kind is "text", "space" or the name of a place."""

    kind: str
    text: str = ""


def steps_of(pattern: str) -> tuple[PatternStep, ...]:
    """Return the parts of a pattern, in order."""
    steps: list[PatternStep] = []
    position = 0
    for place in _PLACE.finditer(pattern):
        if place.start() > position:
            steps.append(PatternStep("text", pattern[position : place.start()]))
        steps.append(PatternStep("space", place[2]) if place[2] else PatternStep(place[1]))
        position = place.end()
    if position < len(pattern):
        steps.append(PatternStep("text", pattern[position:]))
    return tuple(steps)


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes calls."""

    name: str
    call: str = ""  # the pattern of one call
    before: str = ""  # the pattern before the first call
    between: str = ""  # the text between two calls
    after: str = ""  # the text after the last call
    parameter: str = ""  # the pattern of one parameter in {parameters}
    start: str = ""  # the pattern of a reply that begins with a call without an opening tag
    openers: tuple[str, ...] = ()  # further tags that may open a call
    closers: tuple[str, ...] = ()  # further tags that may close a call
    silent: tuple[str, ...] = ()  # tags that are removed from the content
    members: tuple[str, str] = ("name", "arguments")  # the keys of {json}
    keyed: bool = False  # {json} has one member: the key is the name, the value the arguments
    plain: str = ""  # a name that marks an answer instead of a call
    quote: str = ""  # the quotation mark of strings in {gemma}

    @cached_property
    def is_json(self) -> bool:
        return "{json}" in self.call

    @cached_property
    def start_mark(self) -> str:
        """The character that every call without an opening tag begins with, or an empty text."""
        if self.start == "{json}":
            return "{"
        return "[" if self.start.startswith("[") else ""

    @cached_property
    def opening(self) -> tuple[str, ...]:
        """The tags that open a call in a text."""
        tags = [*self.openers]
        if not self.start:
            tags.append(_first_tag(self.before))
        tags.append(_first_tag(self.call))
        return tuple(dict.fromkeys(filter(None, tags)))

    @cached_property
    def closing(self) -> tuple[str, ...]:
        """The tags that close calls."""
        last_steps = steps_of(self.call)[-1:]
        final_tags = [
            step.text for step in last_steps if step.kind == "text" and step.text[0] == "<"
        ]
        closing_tags = [*self.closers, self.after.strip(" \n]"), *final_tags]
        return tuple(dict.fromkeys(filter(None, closing_tags)))

    @cached_property
    def call_texts(self) -> tuple[str, ...]:
        """The literal texts of every call."""
        patterns = (self.before, self.call, self.after, self.parameter)
        steps = [step for pattern in patterns for step in steps_of(pattern)]
        return tuple(step.text for step in steps if step.kind == "text")

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The literal texts of a reply. The parser needs the special tokens in them."""
        return (*self.call_texts, self.between, *self.openers, *self.closers, *self.silent)


def _first_tag(pattern: str) -> str:
    """Return the text that a pattern begins with, without the bracket of a list."""
    steps = steps_of(pattern)
    return steps[0].text.rstrip("[") if steps and steps[0].kind == "text" else ""


NO_FORMAT = ToolFormat("none")  # the parser finds no calls
HERMES = ToolFormat("hermes", "<tool_call>\n{json}\n</tool_call>", between="\n")
LLAMA_JSON = ToolFormat(
    "llama_json",
    "{json}",
    between="; ",
    start="{json}",
    openers=("<|python_tag|>", "<|python_start|>"),
    closers=("<|python_end|>",),
    members=("name", "parameters"),
)
DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
DEEPSEEK_END = "<｜tool▁calls▁end｜>"
_DSML = "｜DSML｜"
_TABLE = (
    HERMES,
    LLAMA_JSON,
    # Calls that are JSON objects.
    ToolFormat("mistral_json", "{json}", "[TOOL_CALLS][", ", ", "]"),
    ToolFormat("granite", "{json}", "<|tool_call|>[", ", ", "]", openers=("<tool_call>",)),
    ToolFormat("granite_20b", "<function_call> {json}", between="\n"),
    ToolFormat("phi4", "{json}", "functools[", ", ", "]"),
    ToolFormat("phi4_tags", "{json}", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    ToolFormat("jamba", "{json}", "<tool_calls>[", ", ", "]</tool_calls>"),
    ToolFormat("nemotron", "{json}", "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    ToolFormat(
        "internlm",
        "<|action_start|><|plugin|>\n{json}<|action_end|>",
        members=("name", "parameters"),
    ),
    ToolFormat(
        "command_r",
        "{json}",
        "<|START_ACTION|>[",
        ", ",
        "]<|END_ACTION|>",
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        members=("tool_name", "parameters"),
    ),
    ToolFormat("gigachat", "<|function_call|>{json}", openers=("function call<|role_sep|>",)),
    ToolFormat("apertus", "{json}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>", keyed=True),
    ToolFormat("xlam", "{json}", "[", ", ", "]", start="[{json}"),
    # A name, then arguments in JSON.
    ToolFormat("mistral", "[TOOL_CALLS]{name}{skip}[ARGS]{arguments}"),
    ToolFormat(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
        "```json\n{arguments}\n```<｜tool▁call▁end｜>",
        DEEPSEEK_BEGIN,
        "\n",
        DEEPSEEK_END,
    ),
    ToolFormat(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        DEEPSEEK_BEGIN,
        "",
        DEEPSEEK_END,
    ),
    ToolFormat(
        "kimi_k2",
        "<|tool_call_begin|>functions.{name}:{id}"
        "<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    ToolFormat("functionary", "<function={name}>{arguments}</function>"),
    ToolFormat(
        "functionary_v3", ">>>{name}\n{arguments}", start="{name}\n{arguments}", plain="all"
    ),
    ToolFormat("glm4", "{name}\n{arguments}", between="\n", start="{name}\n{arguments}"),
    ToolFormat(
        "solar",
        "<|tool_call:begin|>{id}<|tool_call:name|>{name}"
        "<|tool_call:args|>{arguments}<|tool_call:end|>",
        "<|tool_calls|>",
    ),
    ToolFormat(
        "harmony",
        "to=functions.{name}{skip}<|message|>{arguments}<|call|>",
        silent=(
            "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>",
        ),
    ),
    # A name, then parameters in tags.
    ToolFormat(
        "qwen3_coder",
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        between="\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    ToolFormat(
        "seed_oss",
        "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        between="\n",
        parameter="<parameter={key}>{value}</parameter>\n",
    ),
    ToolFormat(
        "glm45",
        "<tool_call>{name}\n{parameters}</tool_call>",
        between="\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    ToolFormat(
        "minimax_m2",
        '<invoke name="{name}">\n{parameters}</invoke>',
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
        '<parameter name="{key}">{value}</parameter>\n',
    ),
    ToolFormat(
        "deepseek_v32",
        f'<{_DSML}invoke name="{{name}}">\n{{parameters}}</{_DSML}invoke>',
        f"<{_DSML}function_calls>\n",
        "\n",
        f"\n</{_DSML}function_calls>",
        f'<{_DSML}parameter name="{{key}}" string="{{kind}}">{{value}}</{_DSML}parameter>\n',
        openers=(f"<{_DSML}tool_calls>",),
        closers=(f"</{_DSML}tool_calls>",),
    ),
    ToolFormat(
        "muse",
        '<atem:invoke name="{name}">\n{parameters}</atem:invoke>',
        "<atem:function_calls>\n",
        "\n",
        "\n</atem:function_calls>",
        '<atem:parameter name="{key}">{value}</atem:parameter>\n',
    ),
    ToolFormat(
        "minicpm5",
        '<function name="{name}">{parameters}</function>',
        between="\n",
        parameter='<param name="{key}">{value}</param>',
    ),
    # Calls in the notation of Python or of Gemma.
    ToolFormat(
        "lfm2", "{name}({python})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"
    ),
    ToolFormat(
        "pythonic",
        "{name}({python})",
        "[",
        ", ",
        "]",
        start="[{name}({python})",
        openers=("<|python_start|>", "<|python_tag|>"),
        closers=("<|python_end|>",),
    ),
    ToolFormat("gemma4", "<|tool_call>call:{name}{{gemma}}<tool_call|>", quote='<|"|>'),
    ToolFormat(
        "functiongemma",
        "<start_function_call>call:{name}{{gemma}}<end_function_call>",
        quote="<escape>",
    ),
)  # fmt: skip
FORMATS = {format.name: format for format in _TABLE}
# The parsers that have another name in vLLM: vLLM's name -> Octavo's name.
VLLM_FORMATS = {
    "llama3_json": "llama_json",
    "llama4_json": "llama_json",
    "llama4_pythonic": "pythonic",
    "olmo3": "pythonic",
    "openai": "harmony",
    "qwen3_xml": "qwen3_coder",
    "granite-20b-fc": "granite_20b",
    "granite4": "hermes",
    "phi4_mini_json": "phi4",
    "deepseek_v4": "deepseek_v32",
    "glm47": "glm45",
    "cohere_command3": "command_r",
    "cohere_command4": "command_r",
    "gigachat3": "gigachat",
    "muse_glimmer": "muse",
    # The format of these models is detected from their chat templates.
    **dict.fromkeys(
        ("dots", "ernie45", "ling3", "poolside_v1", "hunyuan_a13b", "hy_v3", "kimi_k3", "longcat",
         "mimo", "minimax_m3", "step3", "step3p5", "inkling"),
        "auto",
    ),
}  # fmt: skip


def is_extension(name: str) -> bool:
    """Return whether a name is that of a format that the user has written
    (octavo/extensions.py)."""
    return is_path(name) or name in extension_names(TOOL_PARSERS)


@cache
def find_format(name: str) -> ToolFormat:
    """Return the format with this name, which the user may have written."""
    if name in FORMATS:
        return FORMATS[name]
    extension = find_extension(TOOL_PARSERS, name, "tool_parser")
    if not isinstance(extension, ToolFormat):
        raise InvalidRequest(
            f"tool_parser {name!r} is not a ToolFormat but {type(extension).__name__}: describe "
            "the format with octavo.text.tool_formats.ToolFormat, as docs/extending.md shows",
            "tool_parser",
        )
    return extension
