"""Every field of the table in octavo/serve/api/request_fields.py, sent with a value that matters:
it has its effect, it is refused by name, or the header x-ignored-params names it. And the table has
every field of OpenAI's and vLLM's APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from octavo.serve.api import request_fields
from octavo.serve.api.protocol import (
    BatchGenerateRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
)
from octavo.serve.api.request_fields import FIELDS, HONOURED, IGNORED, LABEL, REFUSED, Field
from tests.serve.running import NAME, Running, check_error, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
FUNCTIONS = [{"name": "f"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BASE = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
BEAMS = {
    "use_beam_search": True,
    "n": 3,
    "ignore_eos": False,
    "stop_token_ids": list(range(0, 256, 2)),
}
LOUD = {"temperature": 1.5, "seed": 3}  # so that a filter shows

# vLLM 0.11's CompletionRequest and ChatCompletionRequest, as far as OpenAI's do not have them.
VLLM = """
use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval reasoning_effort include_reasoning echo
add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
return_prompt_text return_assistant_tokens_mask guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern best_of early_stopping
"""

# For each honoured field: what is sent with it and what is sent without it. The replies must
# differ.
SHOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 1.9, "seed": 1}, {"temperature": 0}),
    "top_p": ({**LOUD, "top_p": 0}, LOUD),
    "top_k": ({**LOUD, "top_k": 1}, LOUD),
    "min_p": ({**LOUD, "min_p": 1}, LOUD),
    "seed": ({**LOUD, "seed": 4}, LOUD),
    "repetition_penalty": ({"repetition_penalty": 50}, {}),
    "presence_penalty": ({"presence_penalty": 2, "allowed_token_ids": [65, 66]}, {"allowed_token_ids": [65, 66]}),
    "frequency_penalty": ({"frequency_penalty": 2, "allowed_token_ids": [65, 66]}, {"allowed_token_ids": [65, 66]}),
    "logit_bias": ({"logit_bias": {"65": 100}}, {}),
    "allowed_token_ids": ({"allowed_token_ids": [65]}, {}),
    "n": ({**LOUD, "n": 2}, LOUD),
    "best_of": ({**LOUD, "best_of": 4}, LOUD),
    "use_beam_search": ({"use_beam_search": True, "n": 2}, {**LOUD, "n": 2}),
    "length_penalty": ({**BEAMS, "length_penalty": -9}, {**BEAMS, "length_penalty": 9}),
    "early_stopping": ({**BEAMS, "early_stopping": True}, {**BEAMS, "early_stopping": "never"}),
    "max_tokens": ({"max_tokens": 3}, {}),
    "max_completion_tokens": ({"max_completion_tokens": 3}, {}),
    "max_new_tokens": ({"max_new_tokens": 3}, {}),
    "min_tokens": ({"stop_token_ids": list(range(256)), "min_tokens": 5}, {"stop_token_ids": list(range(256))}),
    "stop": ({"allowed_token_ids": [65], "stop": "bb"}, {"allowed_token_ids": [65]}),
    "stop_token_ids": ({"allowed_token_ids": [65], "stop_token_ids": [65]}, {"allowed_token_ids": [65]}),
    "include_stop_str_in_output": (
        {"allowed_token_ids": [65], "stop": "bb", "include_stop_str_in_output": True},
        {"allowed_token_ids": [65], "stop": "bb"},
    ),
    "ignore_eos": ({"logit_bias": {"256": 100}, "ignore_eos": False}, {"logit_bias": {"256": 100}}),
    "repetition_detection": (
        {"allowed_token_ids": [65], "repetition_detection": {"max_pattern_size": 1, "min_count": 3}},
        {"allowed_token_ids": [65]},
    ),
    "response_format": ({"response_format": {"type": "json_object"}}, {}),
    "structured_outputs": ({"structured_outputs": {"regex": "[xyz]{3}"}}, {}),
    "guided_json": ({"guided_json": {"enum": ["a"]}}, {}),
    "guided_regex": ({"guided_regex": "[xyz]{3}"}, {}),
    "guided_choice": ({"guided_choice": ["yes"]}, {}),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, {}),
    "guided_whitespace_pattern": (
        {"guided_json": {"const": [1, 2]}, "guided_whitespace_pattern": " {3}"},
        {"guided_json": {"const": [1, 2]}},
    ),
    "json_schema": ({"json_schema": {"enum": ["a"]}}, {}),
    "regex": ({"regex": "[xyz]{3}"}, {}),
    "ebnf": ({"ebnf": 'root ::= "a"'}, {}),
    "grammar": ({"grammar": 'start: "a"'}, {}),
    "stream": ({"stream": True}, {}),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True}),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
    "prompt_logprobs": ({"prompt_logprobs": 1}, {}),
    "skip_special_tokens": (
        {"allowed_token_ids": [258], "skip_special_tokens": False},
        {"allowed_token_ids": [258]},
    ),
    "return_token_ids": ({"return_token_ids": True}, {}),
    "return_prompt_text": ({"return_prompt_text": True}, {}),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 1}, {}),
    "truncation_side": (
        {"truncate_prompt_tokens": 1, "truncation_side": "right"},
        {"truncate_prompt_tokens": 1},
    ),
    "model": ({"model": "another"}, {"model": NAME}),
    "timeout": ({"timeout": 1e-9}, {}),
}  # fmt: skip
# The same for fields that mean something else in a chat and in a completion, or that only one of
# them has.
IN_A_CHAT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({"messages": [{"role": "user", "content": "another"}]}, {}),
    "tools": ({"tools": TOOLS, "tool_choice": "required"}, {}),
    "tool_choice": ({"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS}),
    "functions": ({"functions": FUNCTIONS, "function_call": {"name": "f"}}, {}),
    "function_call": ({"functions": FUNCTIONS, "function_call": {"name": "f"}}, {"functions": FUNCTIONS}),
    "chat_template": ({"chat_template": "x"}, {}),
    "chat_template_kwargs": ({"chat_template_kwargs": {"messages": []}}, {}),
    "documents": ({"documents": [{"text": "x"}]}, {}),
    "reasoning_effort": ({"reasoning_effort": "low"}, {}),
    "add_generation_prompt": ({"add_generation_prompt": False}, {}),
    "continue_final_message": (
        {"messages": [*HI, {"role": "assistant", "content": "so"}], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [*HI, {"role": "assistant", "content": "so"}]},
    ),
    "logprobs": ({"logprobs": True}, {}),
    "logprob_token_ids": ({"logprobs": True, "logprob_token_ids": [5]}, {"logprobs": True}),
    "return_tokens_as_token_ids": ({"logprobs": True, "return_tokens_as_token_ids": True}, {"logprobs": True}),
    "echo": (
        {"messages": [*HI, {"role": "assistant", "content": "so"}], "echo": True},
        {"messages": [*HI, {"role": "assistant", "content": "so"}]},
    ),
}  # fmt: skip
IN_A_COMPLETION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt": ({"prompt": "another"}, {}),
    "parse_special": ({"prompt": "a<|end|>", "parse_special": False}, {"prompt": "a<|end|>"}),
    "logprobs": ({"logprobs": 1}, {}),
    "logprob_token_ids": ({"logprobs": 1, "logprob_token_ids": [5]}, {"logprobs": 1}),
    "return_tokens_as_token_ids": ({"logprobs": 1, "return_tokens_as_token_ids": True}, {"logprobs": 1}),
    "echo": ({"echo": True}, {}),
}  # fmt: skip
# Tested where their effect can be seen: the tiny tokenizer adds no BOS, caching and order do not
# show in a reply, and a random model calls no two tools.
ELSEWHERE = {"add_special_tokens", "cache_salt", "priority", "parallel_tool_calls"}
ELSEWHERE |= {
    "include_reasoning",
    "separate_reasoning",
    "thinking_token_budget",
}  # tests/serve/test_reasoning.py

STATUS = {"model": 404, "timeout": 504, "chat_template": 403, "chat_template_kwargs": 400}

# For each refused field, a value that asks for something.
ASKS: dict[str, Any] = {
    "messages": HI, "prompt": "x", "prompts": ["x"], "parse_special": True, "prompt_embeds": "eA==", "suffix": "end",
    "media_io_kwargs": {"image": {}}, "mm_processor_kwargs": {"a": 1}, "bad_words": ["x"], "vllm_xargs": {"a": 1},
    "repeat_penalty": 1.1, "repeat_last_n": 64, "typical_p": 0.9, "typ_p": 0.9, "top_a": 0.1, "tfs_z": 0.9, "mirostat": 2,
    "dynatemp_range": 0.5, "dry_multiplier": 0.8, "xtc_probability": 0.5, "samplers": ["top_k"], "do_sample": False,
    "options": {"num_predict": 5}, "thinking_token_budget": 5, "n_predict": 5, "num_predict": 5, "max_length": 5,
    "min_length": 5, "stop_sequences": ["x"], "structural_tag": "x", "include_reasoning": False, "separate_reasoning": False, "return_token_offsets": True,
    "no_stop_trim": True, "return_hidden_states": True,
    "return_assistant_tokens_mask": True, "audio": {"voice": "x", "format": "wav"}, "modalities": ["audio"],
    "functions": [{"name": "f"}], "function_call": "auto", "web_search_options": {}, "moderation": {"model": "x"}, "n_probs": 5,
    "top_n_tokens": 5, "return_full_text": True, "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1},
    "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "chat_template": "x",
    "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False, "continue_final_message": True, "documents": [{"text": "x"}],
    "reasoning_effort": "low", "top_logprobs": 2, "return_prompt_text": True,
}  # fmt: skip


def base(path: str) -> dict[str, Any]:
    return {**BASE, **({"messages": HI} if path == CHAT else {"prompt": "hello"})}


def seen(running: Running, path: str, asked: dict[str, Any]) -> str:
    """A reply without what changes from one to the next."""
    reply = running.post(path, {**base(path), **asked})
    if reply.headers["content-type"].startswith("text/event-stream"):
        found: Any = events(reply.text)
    else:
        found = reply.json()
    for part in found if isinstance(found, list) else [found]:
        for name in ("id", "created"):
            part.pop(name, None)
    headers = [reply.headers.get(n) for n in ("x-truncated-tokens", "x-ignored-params")]
    return json.dumps([reply.status_code, found, headers])


def by_status(path: str, status: str) -> list[str]:
    return [f.name for f in FIELDS.values() if (f.chat if path == CHAT else f.completion) == status]


def cases(status: str) -> list[Any]:
    return [
        pytest.param(path, name, id=f"{path.split('/')[2]} {name}")
        for path in (CHAT, TEXT)
        for name in by_status(path, status)
        if not (status == HONOURED and name in ELSEWHERE)
    ]


@pytest.mark.parametrize(("path", "name"), cases(HONOURED))
def test_an_honoured_field_changes_the_reply(running: Running, path: str, name: str) -> None:
    special = IN_A_CHAT if path == CHAT else IN_A_COMPLETION
    with_it, without = special[name] if name in special else SHOWN[name]
    assert seen(running, path, without) == seen(running, path, without), "nothing else changes it"
    found = seen(running, path, with_it)
    assert found != seen(running, path, without)
    assert json.loads(found)[0] == STATUS.get(name, 200)


@pytest.mark.parametrize(("path", "name"), cases(REFUSED))
def test_a_refused_field_is_named(running: Running, path: str, name: str) -> None:
    asked = {**base(path), name: ASKS[name]}
    error = check_error(running.post(path, asked), 400, name, "unsupported_parameter")
    assert FIELDS[name].note in error["message"]


@pytest.mark.parametrize(("path", "name"), cases(IGNORED))
def test_an_ignored_field_is_named_in_a_header(running: Running, path: str, name: str) -> None:
    reply = running.post(path, {**base(path), name: "x"})
    assert reply.status_code == 200
    assert reply.headers["x-ignored-params"] == name


@pytest.mark.parametrize(("path", "name"), cases(LABEL))
def test_a_label_is_accepted(running: Running, path: str, name: str) -> None:
    reply = running.post(path, {**base(path), name: {"a": "b"} if name == "metadata" else "x"})
    assert reply.status_code == 200 and "x-ignored-params" not in reply.headers


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_values_that_ask_for_nothing_are_accepted(running: Running, path: str) -> None:
    asked = {
        f.name: f.neutral[0]
        for f in FIELDS.values()
        if f.neutral and (f.chat if path == CHAT else f.completion) == REFUSED
    }
    reply = running.post(path, {**base(path), **asked})
    assert reply.status_code == 200, reply.text
    assert "x-ignored-params" not in reply.headers


def test_a_field_that_a_smaller_route_lacks_is_refused(running: Running) -> None:
    """Unless it asks for nothing there."""
    for name in CompletionRequest.__struct_fields__:
        field = FIELDS[name]
        if name in GenerateRequest.__struct_fields__ or field.completion == LABEL:
            continue
        asks = ASKS | {
            "echo": True,
            "logprobs": 1,
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = {"prompt": "x", "max_new_tokens": 1, name: asks.get(name, 3)}
        check_error(running.post("/generate", asked), 400, name, "unsupported_parameter")
        if field.neutral:
            quiet = running.post("/generate", {**asked, name: field.neutral[0]})
            assert quiet.status_code == 200 and "x-ignored-params" not in quiet.headers


def test_an_unknown_field_is_named_in_a_header(running: Running) -> None:
    reply = running.post(TEXT, {**base(TEXT), "frobnicate": 1, "store": True})
    assert reply.headers["x-ignored-params"] == "frobnicate, store"


# ---- the table -----------------------------------------------------------------------------------


def test_the_table_has_every_field_of_the_other_apis() -> None:
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chat

    known = {*VLLM.split(), "stream"}
    known |= set(get_type_hints(chat.CompletionCreateParamsBase))
    known |= set(get_type_hints(completion.CompletionCreateParamsBase))
    assert known - set(FIELDS) == set()


def test_the_table_says_of_every_field_of_a_route_that_it_is_honoured() -> None:
    def names(field: str) -> set[str]:
        return {f.name for f in FIELDS.values() if getattr(f, field) in (HONOURED, LABEL)}

    assert names("chat") == set(ChatRequest.__struct_fields__)
    assert names("completion") == set(CompletionRequest.__struct_fields__)
    smaller = set(GenerateRequest.__struct_fields__) | set(BatchGenerateRequest.__struct_fields__)
    assert smaller - {"prompts"} <= set(FIELDS)


def test_every_field_is_tested() -> None:
    honoured = {f.name for f in FIELDS.values() if HONOURED in (f.chat, f.completion)}
    assert honoured - ELSEWHERE == {*SHOWN, *IN_A_CHAT, *IN_A_COMPLETION}
    refused = {f.name for f in FIELDS.values() if REFUSED in (f.chat, f.completion)}
    assert refused - set(ASKS) == set()


def test_the_table_is_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fields.md").read_text()
    assert page.endswith(request_fields.markdown()), (
        "docs/fields.md: replace its tables by octavo.serve.api.request_fields.markdown()"
    )


def test_no_field_has_two_rows() -> None:
    rows: list[Field] = [field for group in request_fields.GROUPS.values() for field in group]
    assert len(rows) == len(FIELDS)
