"""The table of request fields: all fields of the OpenAI and vLLM APIs, and common fields of others.

Each field has a status:

honoured   The field has its effect.
label      The client may use the field for its own records. It has no effect.
ignored    The field cannot change the text of the reply. The header x-ignored-params names it.
refused    The field would change the reply, and the server does not support that. The reply is an
           error with the code unsupported_parameter, unless the value is neutral.

validate.py reads the table, docs/fields.md shows it, and tests/serve/test_fields.py sends every
field. A field that is not in the table is unknown: it is ignored, or refused with --strict-params.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

HONOURED = "honoured"
LABEL = "label"
IGNORED = "ignored"
REFUSED = "refused"


# The routes to which the statuses of a field belong.
OPENAI_ROUTES = ("/v1/chat/completions", "/v1/completions")
OLLAMA_ROUTES = ("/api/chat", "/api/generate")


class Field(NamedTuple):
    name: str
    chat: str  # The status on /v1/chat/completions.
    completion: str  # The status on /v1/completions, and on other routes that lack the field.
    note: str  # The meaning of the field, or the reason why it is not honoured.
    neutral: tuple[Any, ...] = ()  # The values that do not change the reply.
    routes: tuple[str, str] = OPENAI_ROUTES  # The routes of the two statuses.


def _both(status: str, name: str, note: str, *neutral: Any) -> Field:
    """Return a field that has the same status in chats and completions."""
    return Field(name, status, status, note, neutral)


def _chat(name: str, note: str, *neutral: Any) -> Field:
    """Return a field that only a chat honours."""
    return Field(name, HONOURED, REFUSED, note, neutral)


def _completion(name: str, note: str, *neutral: Any) -> Field:
    """Return a field that only a completion honours."""
    return Field(name, REFUSED, HONOURED, note, neutral)


PROMPT = (
    _chat("messages", "the conversation"),
    _completion("prompt", "a text, several texts, token ids or several lists of token ids"),
    _both(HONOURED, "model", "one of the names of the model that the server serves"),
    _chat("tools", "the functions that the model may call", []),
    _chat("tool_choice", "whether the model may or must call a tool", "none"),
    _chat("functions", "the deprecated form of tools; the reply then has function_call"),
    _chat("function_call", "the deprecated form of tool_choice", "none"),
    _chat("parallel_tool_calls", "false limits the reply to one call of a tool", True),
    _chat("chat_template",
          "a template for this chat, which the server accepts if it runs with "
          "--trust-request-chat-template"),
    _chat("chat_template_kwargs",
          "variables of the chat template; x-ignored-params names those that the template "
          "does not use", {}),
    _chat("add_generation_prompt", "false leaves out the start of the assistant's turn", True),
    _chat("continue_final_message", "true makes the model continue the last message", False),
    _chat("documents",
          "a variable of the chat template; x-ignored-params names it if the template does "
          "not use it", []),
    _chat("reasoning_effort",
          "a variable of the chat template, which also sets enable_thinking unless it is none; "
          "x-ignored-params names it if the template uses neither"),
    _both(HONOURED, "add_special_tokens",
          "whether BOS and EOS are put around the prompt; the default is true, and false in a "
          "chat"),
    _completion("parse_special",
                "false makes control tokens in a text prompt plain characters, as they "
                "always are in messages", False),
    _both(HONOURED, "truncate_prompt_tokens",
          "truncates the prompt to this many tokens, or to as many as fit (-1); "
          "x-truncated-tokens counts the others"),
    _both(HONOURED, "truncation_side",
          "left (the default) keeps the last tokens of the prompt, and right keeps the first"),
    _both(REFUSED, "prompt_embeds", "a prompt must be text or token ids", []),
    _both(REFUSED, "suffix", "the model is not trained to fill in the middle of a text", ""),
    _both(REFUSED, "media_io_kwargs", "the input must be text", {}),
    _both(REFUSED, "mm_processor_kwargs", "the input must be text", {}),
)  # fmt: skip

SAMPLING = (
    _both(HONOURED, "temperature", "0 to 2; the default is the model's recommendation, or 1"),
    _both(HONOURED, "top_p",
          "0 to 1, where 0 keeps only the likeliest token; the default is the model's "
          "recommendation, or 1"),
    _both(HONOURED, "top_k",
          "keeps this many tokens, and 0, -1 or the size of the vocabulary keeps all; the default "
          "is the model's recommendation, or 0"),
    _both(HONOURED, "min_p", "0 to 1; the default is the model's recommendation, or 0"),
    _both(HONOURED, "repetition_penalty",
          "more than 0 and at most 100; the default is the model's recommendation, or 1"),
    _both(HONOURED, "presence_penalty", "-2 to 2"),
    _both(HONOURED, "frequency_penalty", "-2 to 2"),
    _both(HONOURED, "logit_bias", "-100 to 100 for each token id"),
    _both(HONOURED, "allowed_token_ids", "the only tokens that may be generated"),
    _both(HONOURED, "seed", "a signed 64-bit integer, where -1 stands for no seed"),
    _both(HONOURED, "n", "the number of choices for each prompt", 1),
    _both(HONOURED, "best_of",
          "computes this many completions, and the reply has the n likeliest", 0, 1),
    _both(HONOURED, "use_beam_search",
          "searches for the likeliest texts instead of sampling", False),
    _both(HONOURED, "length_penalty", "a parameter of beam search", 1),
    _both(HONOURED, "early_stopping", "a parameter of beam search", False),
    _both(REFUSED, "bad_words",
          "a word can be tokenised in many ways, and a list of words forbids only some of "
          "them: use logit_bias for tokens, or a regex for texts", []),
    _both(REFUSED, "vllm_xargs", "this server has no custom extensions", {}),
    _both(REFUSED, "repeat_penalty", "this is a name of llama.cpp: use repetition_penalty", 1),
    _both(REFUSED, "repeat_last_n",
          "this is a field of llama.cpp: repetition_penalty covers the whole prompt and reply", -1),
    _both(REFUSED, "typical_p", "this is a field of llama.cpp: use top_p or min_p", 1),
    _both(REFUSED, "typ_p", "this is a field of llama.cpp: use top_p or min_p", 1),
    _both(REFUSED, "top_a", "this server has no such filter: use min_p", 0),
    _both(REFUSED, "tfs_z", "this is a field of llama.cpp: use top_p or min_p", 1),
    _both(REFUSED, "mirostat", "this is a field of llama.cpp: use temperature and top_p", 0),
    _both(REFUSED, "dynatemp_range", "this is a field of llama.cpp: use temperature", 0),
    _both(REFUSED, "dry_multiplier", "this is a field of llama.cpp: use repetition_penalty", 0),
    _both(REFUSED, "xtc_probability", "this is a field of llama.cpp: use temperature", 0),
    _both(REFUSED, "samplers", "this is a field of llama.cpp: the order of filters is fixed here"),
    _both(REFUSED, "do_sample",
          "this is a field of transformers and TGI: use temperature 0 for greedy decoding", True),
    _both(REFUSED, "options",
          "this is a field of Ollama: send its entries as fields of the request", {}),
)  # fmt: skip

ENDING = (
    _both(HONOURED, "max_tokens",
          "the largest number of tokens in the reply, where -1 stands for as many as fit; the "
          "default is 16, and in a chat the model's recommendation or as many as fit"),
    _both(HONOURED, "max_completion_tokens",
          "another name of max_tokens; the smallest value applies if several are given"),
    _both(HONOURED, "max_new_tokens", "another name of max_tokens"),
    _both(HONOURED, "min_tokens", "the smallest number of tokens in the reply"),
    _both(HONOURED, "stop", "up to 64 strings that end the reply"),
    _both(HONOURED, "stop_token_ids", "tokens that end the reply"),
    _both(HONOURED, "include_stop_str_in_output",
          "true makes the string or token that ended the reply part of it"),
    _both(HONOURED, "ignore_eos", "true makes the reply continue after the end-of-text token"),
    _both(HONOURED, "timeout", "the most seconds that the request may take"),
    _chat("thinking_token_budget",
          "the largest number of tokens of the reasoning, which is then closed", -1),
    _both(HONOURED, "repetition_detection", "ends a reply that repeats itself"),
    _both(REFUSED, "n_predict", "this is a name of llama.cpp: use max_tokens", -1),
    _both(REFUSED, "num_predict", "this is a name of Ollama: use max_tokens", -1),
    _both(REFUSED, "max_length",
          "this name is not known here: use max_tokens, which counts only the reply"),
    _both(REFUSED, "min_length", "this name is not known here: use min_tokens", 0),
    _both(REFUSED, "stop_sequences", "this name is not known here: use stop", []),
)  # fmt: skip

STRUCTURE = (
    _both(HONOURED, "response_format",
          "the form of OpenAI, and the forms of llama.cpp, Together and TGI", {"type": "text"}),
    _both(HONOURED, "structured_outputs",
          "an object with json, regex, choice, grammar or json_object"),
    _both(HONOURED, "guided_json", "the same as structured_outputs.json"),
    _both(HONOURED, "guided_regex", "the same as structured_outputs.regex"),
    _both(HONOURED, "guided_choice", "the same as structured_outputs.choice"),
    _both(HONOURED, "guided_grammar", "the same as structured_outputs.grammar"),
    _both(IGNORED, "guided_decoding_backend", "this server has only one backend"),
    _both(HONOURED, "guided_whitespace_pattern",
          "a regex for white space between the parts of JSON"),
    _both(HONOURED, "json_schema",
          "the same as structured_outputs.json, as in llama.cpp and SGLang"),
    _both(HONOURED, "regex", "the same as structured_outputs.regex, as in SGLang"),
    _both(HONOURED, "ebnf", "the same as structured_outputs.grammar, as in SGLang"),
    _both(HONOURED, "grammar", "the same as structured_outputs.grammar, as in llama.cpp and TGI"),
    _both(REFUSED, "structural_tag", "send structural tags as response_format"),
)  # fmt: skip

REPLY = (
    _both(HONOURED, "stream", "true makes the reply a stream of events", False),
    _both(HONOURED, "stream_options",
          "an object with include_usage and continuous_usage_stats", {}),
    _both(HONOURED, "logprobs",
          "true or false in a chat; in a completion, the number of likeliest tokens, or false",
          False, 0),
    _chat("top_logprobs", "the number of likeliest tokens; a completion sets it with logprobs", 0),
    _both(HONOURED, "logprob_token_ids",
          "with logprobs, the tokens to report instead of the likeliest", []),
    _both(HONOURED, "prompt_logprobs",
          "logprobs of each prompt token, and of this many of the likeliest tokens"),
    _both(HONOURED, "echo",
          "true makes the reply begin with the prompt, or in a chat with the last message "
          "if the assistant wrote it", False),
    _both(HONOURED, "skip_special_tokens", "false makes special tokens part of the text", True),
    _both(HONOURED, "return_token_ids",
          "true adds token_ids and prompt_token_ids to the reply", False),
    _both(HONOURED, "return_tokens_as_token_ids",
          "true writes tokens in logprobs as token_id:N", False),
    _chat("return_prompt_text", "true adds prompt_text, the rendered prompt, to the reply", False),
    _both(IGNORED, "spaces_between_special_tokens",
          "this server puts no spaces between tokens", True),
    _both(IGNORED, "stream_interval", "this server sends the tokens of every step"),
    _chat("include_reasoning", "false leaves the reasoning out of the reply", True),
    _chat("separate_reasoning", "false leaves the reasoning in the content, as in SGLang", True),
    _both(IGNORED, "stream_reasoning",
          "this is a field of SGLang: a stream always contains the reasoning", True),
    _both(REFUSED, "no_stop_trim",
          "this is a name of SGLang: use include_stop_str_in_output", False),
    _both(REFUSED, "return_hidden_states", "no route returns hidden states", False),
    _both(REFUSED, "return_token_offsets", "only the render routes return token offsets", False),
    _both(REFUSED, "return_assistant_tokens_mask", "no route returns this mask", False),
    _both(REFUSED, "audio", "the output is always text"),
    _both(REFUSED, "modalities", "the output is always text", ["text"]),
    _both(REFUSED, "web_search_options", "this server has no web search"),
    _both(REFUSED, "moderation", "this server has no moderation"),
    _both(REFUSED, "n_probs", "this is a field of llama.cpp: use logprobs", 0),
    _both(REFUSED, "top_n_tokens", "this is a field of TGI: use logprobs", 0),
    _both(REFUSED, "return_full_text", "this is a field of TGI: use echo", False),
)  # fmt: skip

SERVING = (
    _both(HONOURED, "priority",
          "with --policy priority, lower numbers are served first; x-ignored-params names it "
          "under a policy without priorities"),
    _both(HONOURED, "cache_salt", "only requests with the same salt share cached prompts"),
    _both(LABEL, "request_id", "a name for the request; the id of the server is in x-request-id"),
    _both(LABEL, "user", "a name for the user of the client"),
    _both(LABEL, "metadata", "any data of the client"),
    _both(IGNORED, "session_id", "chats and completions belong to no session"),
    _both(IGNORED, "store", "only the Responses API stores replies"),
    _both(IGNORED, "service_tier", "this server has only one tier"),
    _both(IGNORED, "prompt_cache_key", "prompts are cached by content"),
    _both(IGNORED, "prompt_cache_options", "prompts are cached by content"),
    _both(IGNORED, "prompt_cache_retention", "prompts stay in the cache while there is room"),
    _both(IGNORED, "cache_prompt",
          "this is a field of llama.cpp: prompts are always cached by content"),
    _both(IGNORED, "safety_identifier", "a name for the user of the client"),
    _both(IGNORED, "prediction", "this is a hint that could only save time"),
    _both(IGNORED, "verbosity", "this is a hint for models of OpenAI"),
    _both(IGNORED, "keep_alive", "this is a field of Ollama: the model always stays loaded"),
    _both(IGNORED, "routed_experts_prompt_start",
          "this server does not return the routing of experts"),
    _both(REFUSED, "kv_transfer_params", "this server does not move KV to other servers", {}),
    _both(REFUSED, "ec_transfer_params", "the input must be text", {}),
)  # fmt: skip

GROUPS: dict[str, tuple[Field, ...]] = {
    "The prompt": PROMPT,
    "Sampling": SAMPLING,
    "Where a reply ends": ENDING,
    "Structured output": STRUCTURE,
    "The contents of the reply": REPLY,
    "Scheduling, caching and labels": SERVING,
}
FIELDS = {field.name: field for group in GROUPS.values() for field in group}
# The names that clients of any API use for the length of the reply.
LENGTHS = (
    "max_tokens", "max_completion_tokens", "max_new_tokens", "max_length", "n_predict",
    "num_predict",
)  # fmt: skip


def _named(replacements: Mapping[str, str]) -> dict[str, Field]:
    """Return fields that a route refuses, because it has them under other names."""
    return {
        name: _both(REFUSED, name, f"use {route_name}", *FIELDS[name].neutral)
        for name, route_name in replacements.items()
    }


# The fields of /generate, /batch_generate and the WebSocket.
PLAIN_TABLE = FIELDS | _named(
    {name: "max_new_tokens" for name in LENGTHS if name != "max_new_tokens"}
)

# ---- the fields of other APIs --------------------------------------------------------------------

# The routes of other APIs also accept the fields that all requests for generation have
# (protocol.Common), such as temperature, seed and structured_outputs.
MESSAGES = (
    _both(HONOURED, "messages",
          "the conversation; blocks of the types text, tool_use, tool_result and thinking"),
    _both(HONOURED, "system",
          "the system prompt, a text or blocks of text; lines x-anthropic-...: at the start of "
          "a block are left out"),
    _both(HONOURED, "max_tokens", "the largest number of tokens in the reply; it may be missing"),
    _both(HONOURED, "stop_sequences", "up to 64 strings that end the reply"),
    _both(HONOURED, "stream", "true makes the reply a stream of events", False),
    _both(HONOURED, "tools",
          "the functions that the model may call; only the type custom, because the server has "
          "no built-in tools", []),
    _both(HONOURED, "tool_choice", "whether the model may or must call a tool"),
    _both(HONOURED, "thinking",
          "turns the reasoning of the chat template on or off, and budget_tokens limits it; "
          "x-ignored-params names it if the template has none"),
    _both(HONOURED, "output_config",
          "format is a JSON schema of the reply, and effort a variable of the chat template"),
    _both(LABEL, "metadata", "any data of the client"),
    _both(IGNORED, "cache_control", "prompts are cached by content"),
    _both(IGNORED, "service_tier", "this server has only one tier"),
    _both(IGNORED, "inference_geo", "this server is in one place"),
    _both(IGNORED, "speed", "this server has only one speed"),
    _both(IGNORED, "diagnostics", "this server has no such diagnostics"),
    _both(IGNORED, "user_profile_id", "a name for the user of the client"),
    _both(IGNORED, "workspace_id", "a label of Anthropic's servers"),
    _both(IGNORED, "betas", "Anthropic's clients send it as a header"),
    _both(IGNORED, "fallback_credit_token", "this server has no credits"),
    _both(REFUSED, "container", "this server runs no code"),
    _both(REFUSED, "mcp_servers", "this server connects to no other server", []),
    _both(IGNORED, "context_management", "the whole conversation stays in the prompt"),
    _both(REFUSED, "compaction", "this server does not edit conversations", {}),
    _both(REFUSED, "thread", "this server stores no conversations"),
    _both(REFUSED, "fallbacks", "this server serves one model", []),
)  # fmt: skip
RESPONSES = (
    _both(HONOURED, "input",
          "a text, or items of the types message, function_call, function_call_output and "
          "reasoning"),
    _both(HONOURED, "instructions", "the system prompt"),
    _both(HONOURED, "previous_response_id",
          "continues a stored response; its instructions are not repeated"),
    _both(HONOURED, "store", "false keeps nothing, so that no request can continue the response"),
    _both(HONOURED, "background",
          "true replies at once: read the response with GET /v1/responses/ID until its status is "
          "neither queued nor in_progress", False),
    _both(HONOURED, "enable_response_messages",
          "true adds input_messages and output_messages, the texts and token ids of the prompt and "
          "of the reply", False),
    _both(HONOURED, "max_output_tokens", "the largest number of tokens in the reply"),
    _both(HONOURED, "stream", "true makes the reply a stream of events", False),
    _both(HONOURED, "tools",
          "the functions that the model may call; x-ignored-params names tools that clients offer "
          "and this server does not have, such as web_search", []),
    _both(HONOURED, "tool_choice", "whether the model may or must call a tool"),
    _both(HONOURED, "parallel_tool_calls", "false limits the reply to one call of a tool", True),
    _both(HONOURED, "text",
          "format is the structure of the reply; x-ignored-params names verbosity"),
    _both(HONOURED, "reasoning",
          "effort is a variable of the chat template; x-ignored-params names other members"),
    _both(HONOURED, "include",
          "message.output_text.logprobs adds logprobs; x-ignored-params names other values", []),
    _both(HONOURED, "top_logprobs", "the number of likeliest tokens; it adds logprobs"),
    _both(HONOURED, "truncation", "auto removes the start of a prompt that does not fit"),
    _both(HONOURED, "metadata", "up to 16 pairs of texts, which the response repeats"),
    _both(HONOURED, "chat_template_kwargs",
          "variables of the chat template, such as enable_thinking; x-ignored-params names those "
          "that the template does not use", {}),
    _both(IGNORED, "stream_options", "this server adds no obfuscation", {}),
    _both(IGNORED, "max_tool_calls", "it limits built-in tools, which this server does not have"),
    _both(IGNORED, "safety_identifier", "a name for the user of the client"),
    _both(IGNORED, "service_tier", "this server has only one tier"),
    _both(IGNORED, "prompt_cache_key", "prompts are cached by content"),
    _both(IGNORED, "prompt_cache_options", "prompts are cached by content"),
    _both(IGNORED, "prompt_cache_retention", "prompts stay in the cache while there is room"),
    _both(IGNORED, "access_programs", "this is a setting of OpenAI's servers"),
    _both(IGNORED, "image", "the input must be text"),
    _both(REFUSED, "conversation", "this server stores responses: use previous_response_id"),
    _both(REFUSED, "prompt", "this server stores no prompts: use instructions"),
    _both(REFUSED, "context_management", "this server does not edit conversations", []),
    _both(REFUSED, "moderation", "this server has no moderation"),
)  # fmt: skip
OLLAMA = (
    _chat("messages", "the conversation; /api/generate has prompt instead"),
    _chat("tools", "the functions that the model may call", []),
    _completion("prompt", "a text; without one, the reply only says that the model is loaded"),
    _completion("system", "the system prompt", ""),
    _completion("raw", "true passes the prompt to the model without a chat template", False),
    _both(HONOURED, "stream", "false makes the reply one object; the default is true", True),
    _both(HONOURED, "format", "json, or a JSON schema of the reply", ""),
    _both(HONOURED, "options",
          "temperature, top_k, top_p, min_p, seed, stop, num_predict, repeat_penalty, "
          "presence_penalty and frequency_penalty; x-ignored-params names options of the "
          "machine such as num_ctx, and other samplers are refused", {}),
    _both(HONOURED, "think",
          "turns the reasoning of the chat template on or off, or sets its effort; "
          "x-ignored-params names it if the template has none"),
    _both(HONOURED, "logprobs", "true adds logprobs", False),
    _both(HONOURED, "top_logprobs", "the number of likeliest tokens; it needs logprobs", 0),
    _both(IGNORED, "keep_alive", "the model always stays loaded"),
    _both(IGNORED, "width", "the output is always text"),
    _both(IGNORED, "height", "the output is always text"),
    _both(IGNORED, "steps", "the output is always text"),
    _both(REFUSED, "suffix", "the model is not trained to fill in the middle of a text", ""),
    _both(REFUSED, "images", "the input must be text", []),
    _both(REFUSED, "template", "the server uses the chat template of the model", ""),
    _both(REFUSED, "context", "this server returns no context: use /api/chat", []),
)  # fmt: skip
EMBEDDINGS = (
    _both(HONOURED, "input",
          "a text, several texts, token ids or several lists of token ids; /pooling has it too"),
    _both(HONOURED, "messages", "a conversation instead of the input"),
    _both(HONOURED, "chat_template_kwargs", "variables of the chat template for messages", {}),
    _both(HONOURED, "add_generation_prompt",
          "true opens a turn of the assistant after the messages", False),
    _both(HONOURED, "continue_final_message", "true leaves the last message open", False),
    _both(HONOURED, "dimensions", "keeps this many leading values of an embedding"),
    _both(HONOURED, "encoding_format",
          "float; base64 for the bytes of each embedding; bytes for a binary reply whose header "
          "metadata says where each embedding is; bytes_only for a binary reply without it",
          "float"),
    _both(HONOURED, "embed_dtype",
          "the type of binary values: float32 (the default), float16, bfloat16, fp8_e4m3 or "
          "fp8_e5m2", "float32"),
    _both(HONOURED, "endianness",
          "the order of the bytes of a binary value: little, big or native; the default is little",
          "little"),
    _both(HONOURED, "task",
          "of /pooling: embed, or token_embed for the hidden state of every token", "embed"),
    _both(HONOURED, "query", "of /rerank: a text"),
    _both(HONOURED, "documents", "of /rerank: texts; of /score: one side of the comparison"),
    _both(HONOURED, "top_n", "of /rerank: the number of documents in the reply"),
    _both(HONOURED, "return_documents", "of /rerank: false leaves out the texts", True),
    _both(HONOURED, "queries", "of /score: one side of the comparison"),
    _both(HONOURED, "items", "of /score: another name of documents"),
    _both(HONOURED, "text_1", "of /score: another name of queries"),
    _both(HONOURED, "text_2", "of /score: another name of documents"),
    _both(HONOURED, "data_1", "of /score: another name of queries"),
    _both(HONOURED, "data_2", "of /score: another name of documents"),
    _both(HONOURED, "use_activation",
          "whether an embedding has the length 1; the default is the model's, or true"),
    _both(HONOURED, "normalize", "another name of use_activation"),
    _both(HONOURED, "truncate_prompt_tokens",
          "truncates a text to this many tokens, or to as many as fit (-1)"),
    _both(HONOURED, "truncation_side",
          "left (the default) keeps the last tokens of a text, and right keeps the first"),
    _both(HONOURED, "add_special_tokens", "whether BOS and EOS are put around a text"),
    _both(IGNORED, "input_type", "this is a field of Cohere: write the instruction into the text"),
    _both(REFUSED, "max_tokens_per_doc", "use truncate_prompt_tokens, for every text", 0),
    _both(REFUSED, "max_tokens_per_query", "use truncate_prompt_tokens, for every text", 0),
    _both(REFUSED, "instruction", "write the instruction into the query"),
    _both(REFUSED, "embedding_types", "use encoding_format", []),
    _both(REFUSED, "mm_processor_kwargs", "the input must be text", {}),
)  # fmt: skip


class Members(NamedTuple):
    """The members of an object in a request. The header x-ignored-params names all others."""

    honoured: tuple[str, ...]  # members that have an effect, and labels
    ignored: tuple[str, ...] = ()  # members without effect, which --strict-params accepts


MESSAGES_MEMBERS = {
    "output_config": Members(("effort", "format"), ("task_budget",)),
    "thinking": Members(("type", "budget_tokens", "display")),
    "tool_choice": Members(("type", "name", "disable_parallel_tool_use")),
    "tools": Members(
        ("type", "name", "description", "input_schema", "strict", "cache_control",
         "eager_input_streaming"),
        ("allowed_callers", "defer_loading", "input_examples"),
    ),
}  # fmt: skip
RESPONSES_MEMBERS = {
    "reasoning": Members(("effort",), ("summary", "generate_summary", "context", "mode")),
    "text": Members(("format",), ("verbosity",)),
    "tool_choice": Members(("type", "name", "mode", "tools")),
    "tools": Members(
        ("type", "name", "description", "parameters", "strict"),
        ("allowed_callers", "defer_loading", "output_schema"),
    ),
}
APIS: dict[str, tuple[Field, ...]] = {
    "Anthropic's Messages": MESSAGES,
    "OpenAI's Responses": RESPONSES,
    "Ollama": OLLAMA,
    "Embeddings and scores": EMBEDDINGS,
}


def api_table(
    group: tuple[Field, ...],
    replacements: Mapping[str, str],
    routes: tuple[str, str] = OPENAI_ROUTES,
) -> dict[str, Field]:
    """Return the fields of an API, and those of the chat API, which its routes refuse.

    `replacements` maps fields of the chat API to the fields of this API that have their effect.
    """
    refused = {
        name: _both(REFUSED, name, "this API does not have it", *field.neutral)
        for name, field in FIELDS.items()
        if HONOURED in (field.chat, field.completion)
    }
    own = {field.name: field._replace(routes=routes) for field in group}
    return FIELDS | refused | _named(replacements) | own


MESSAGES_TABLE = api_table(MESSAGES, {**dict.fromkeys(LENGTHS, "max_tokens"), "prompt": "messages"})
RESPONSES_TABLE = api_table(
    RESPONSES, {**dict.fromkeys(LENGTHS, "max_output_tokens"), "messages": "input"}
)
OLLAMA_TABLE = api_table(OLLAMA, dict.fromkeys(LENGTHS, "options.num_predict"), OLLAMA_ROUTES)
OLLAMA_EMBED_TABLE = api_table(OLLAMA, {}, OLLAMA_ROUTES)
EMBEDDINGS_TABLE = api_table(EMBEDDINGS, {"prompt": "input"})


def _status(field: Field) -> str:
    """Return the status of a field of another API, and the route if only one route has it."""
    if field.chat == field.completion:
        return field.chat
    chat_route, generate_route = OLLAMA_ROUTES
    route = chat_route if field.chat == HONOURED else generate_route
    return f"{HONOURED} by {route}"


def markdown() -> str:
    """Return the tables of docs/fields.md."""
    parts: list[str] = []
    for title, group in GROUPS.items():
        rows = [f"| `{f.name}` | {f.chat} | {f.completion} | {f.note} |" for f in group]
        head = ["| field | chat | completion | |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows]))
    for title, group in APIS.items():
        rows = [f"| `{f.name}` | {_status(f)} | {f.note} |" for f in group]
        head = ["| field | status | |", "|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows]))
    return "\n\n".join(parts) + "\n"
