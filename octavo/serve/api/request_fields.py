"""What the server does with every request field of OpenAI's and vLLM's APIs, and with common fields
of other servers.

honoured   the field has its effect label      the field is accepted for the client's own records
and has no effect ignored    the field cannot change the text of the reply: the header
x-ignored-params names it refused    the field would change the reply: 400 unsupported_parameter,
unless its value asks for nothing

The table is the one source of this: validate.py reads it, docs/fields.md shows it, and
tests/serve/test_fields.py sends every field. A field that is in no row is unknown. It is ignored,
or refused with --strict-params.
"""

from __future__ import annotations

from typing import Any, NamedTuple

HONOURED = "honoured"
LABEL = "label"
IGNORED = "ignored"
REFUSED = "refused"


class Field(NamedTuple):
    name: str
    chat: str  # on /v1/chat/completions
    completion: str  # on /v1/completions, and where a smaller route has no such field
    note: str  # what it means, or why it is not honoured
    neutral: tuple[Any, ...] = ()  # values that ask for nothing


def _in_both_apis(status: str, name: str, note: str, *neutral: Any) -> Field:
    return Field(name, status, status, note, neutral)


def _chat(name: str, note: str, *neutral: Any) -> Field:
    """Honoured in a chat alone."""
    return Field(name, HONOURED, REFUSED, note, neutral)


def _completion(name: str, note: str, *neutral: Any) -> Field:
    """Honoured in a completion alone."""
    return Field(name, REFUSED, HONOURED, note, neutral)


PROMPT = (
    _chat("messages", "the conversation; only /v1/chat/completions has messages"),
    _completion("prompt", "a text, texts, token ids or lists of them; /v1/completions has a prompt, /v1/chat/completions messages"),
    _in_both_apis(HONOURED, "model", "one of the server's names for its model"),
    _chat("tools", "functions that the model may call; only a chat has them", []),
    _chat("tool_choice", "whether a tool must be called; only a chat has tools", "none"),
    _chat("parallel_tool_calls", "false: at most one call; only a chat has tools", True),
    _chat("chat_template", "with --trust-request-chat-template; only a chat has a template"),
    _chat("chat_template_kwargs", "variables of the chat template; those that it does not use are named in x-ignored-params", {}),
    _chat("add_generation_prompt", "false: the assistant's turn is not opened; only a chat has turns", True),
    _chat("continue_final_message", "the model continues the last message; only a chat has messages", False),
    _chat("documents", "a variable of the chat template; if the template does not use it, x-ignored-params names it; only a chat has "
          "a template", []),
    _chat("reasoning_effort", "a variable of the chat template, and enable_thinking is true unless it is none; if the template uses "
          "neither, x-ignored-params names it; only a chat has a template"),
    _in_both_apis(HONOURED, "add_special_tokens", "whether BOS and EOS are put around the prompt: by default yes, in a chat no"),
    _completion("parse_special", "false: control tokens in a text prompt are characters; in messages they always are", False),
    _in_both_apis(HONOURED, "truncate_prompt_tokens", "keep this many tokens of the prompt; -1: as many as fit. x-truncated-tokens counts the rest"),
    _in_both_apis(HONOURED, "truncation_side", "left (the default) keeps the last tokens of the prompt, right the first"),
    _in_both_apis(REFUSED, "prompt_embeds", "a prompt is text or token ids", []),
    _in_both_apis(REFUSED, "suffix", "these models are not trained to fill in the middle", ""),
    _in_both_apis(REFUSED, "media_io_kwargs", "input is text", {}),
    _in_both_apis(REFUSED, "mm_processor_kwargs", "input is text", {}),
)  # fmt: skip

SAMPLING = (
    _in_both_apis(HONOURED, "temperature", "0 to 2; default: the model's recommendation, else 1"),
    _in_both_apis(HONOURED, "top_p", "0 to 1, where 0 takes the likeliest token alone; default: the model's, else 1"),
    _in_both_apis(HONOURED, "top_k", "0, -1 or at least the size of the vocabulary keeps every token; default: the model's, else 0"),
    _in_both_apis(HONOURED, "min_p", "0 to 1; default: the model's, else 0"),
    _in_both_apis(HONOURED, "repetition_penalty", "above 0, at most 100; default: the model's, else 1"),
    _in_both_apis(HONOURED, "presence_penalty", "-2 to 2"),
    _in_both_apis(HONOURED, "frequency_penalty", "-2 to 2"),
    _in_both_apis(HONOURED, "logit_bias", "-100 to 100 by token id"),
    _in_both_apis(HONOURED, "allowed_token_ids", "the only tokens that may be generated"),
    _in_both_apis(HONOURED, "seed", "a signed 64-bit integer; -1: none"),
    _in_both_apis(HONOURED, "n", "the number of choices for each prompt", 1),
    _in_both_apis(HONOURED, "best_of", "compute this many completions and reply with the n likeliest", 0, 1),
    _in_both_apis(HONOURED, "use_beam_search", "search for the likeliest texts instead of sampling", False),
    _in_both_apis(HONOURED, "length_penalty", "for beam search", 1),
    _in_both_apis(HONOURED, "early_stopping", "for beam search", False),
    _in_both_apis(REFUSED, "bad_words", "a word is cut into tokens in many ways, and a list of words bans only some: use logit_bias for "
          "tokens or a regex for texts", []),
    _in_both_apis(REFUSED, "vllm_xargs", "there are no custom extensions", {}),
    _in_both_apis(REFUSED, "repeat_penalty", "llama.cpp's name: it is called repetition_penalty here", 1),
    _in_both_apis(REFUSED, "repeat_last_n", "llama.cpp's: repetition_penalty looks at the whole prompt and reply", -1),
    _in_both_apis(REFUSED, "typical_p", "llama.cpp's: use top_p or min_p", 1),
    _in_both_apis(REFUSED, "typ_p", "llama.cpp's: use top_p or min_p", 1),
    _in_both_apis(REFUSED, "top_a", "use min_p", 0),
    _in_both_apis(REFUSED, "tfs_z", "llama.cpp's: use top_p or min_p", 1),
    _in_both_apis(REFUSED, "mirostat", "llama.cpp's: use temperature and top_p", 0),
    _in_both_apis(REFUSED, "dynatemp_range", "llama.cpp's: use temperature", 0),
    _in_both_apis(REFUSED, "dry_multiplier", "llama.cpp's: use repetition_penalty", 0),
    _in_both_apis(REFUSED, "xtc_probability", "llama.cpp's: use temperature", 0),
    _in_both_apis(REFUSED, "samplers", "llama.cpp's: the order of filters is fixed"),
    _in_both_apis(REFUSED, "do_sample", "transformers' and TGI's: for greedy decoding use temperature 0", True),
    _in_both_apis(REFUSED, "options", "Ollama's: give its entries as fields of the request", {}),
)  # fmt: skip

ENDING = (
    _in_both_apis(HONOURED, "max_tokens", "the largest number of tokens in the reply; -1: as many as fit. Default: 16, in a chat the model's recommendation or as many "
          "as fit"),
    _chat("max_completion_tokens", "as max_tokens; if several are given, the smallest counts; the other routes call it max_tokens"),
    _in_both_apis(HONOURED, "max_new_tokens", "as max_tokens"),
    _in_both_apis(HONOURED, "min_tokens", "the reply has at least this many tokens"),
    _in_both_apis(HONOURED, "stop", "up to 64 strings that end the reply"),
    _in_both_apis(HONOURED, "stop_token_ids", "tokens that end the reply"),
    _in_both_apis(HONOURED, "include_stop_str_in_output", "the string or token that ended the reply is part of it"),
    _in_both_apis(HONOURED, "ignore_eos", "the end-of-text token does not end the reply"),
    _in_both_apis(HONOURED, "timeout", "seconds for the whole request"),
    _in_both_apis(REFUSED, "thinking_token_budget", "reasoning is not counted apart from the answer", -1),
    _in_both_apis(HONOURED, "repetition_detection", "ends a text that repeats itself"),
    _in_both_apis(REFUSED, "n_predict", "llama.cpp's name: it is called max_tokens here", -1),
    _in_both_apis(REFUSED, "num_predict", "Ollama's name: it is called max_tokens here", -1),
    _in_both_apis(REFUSED, "max_length", "it is called max_tokens here, and counts the reply alone"),
    _in_both_apis(REFUSED, "min_length", "it is called min_tokens here", 0),
    _in_both_apis(REFUSED, "stop_sequences", "it is called stop here", []),
)  # fmt: skip

STRUCTURE = (
    _in_both_apis(HONOURED, "response_format", "OpenAI's, and the forms of llama.cpp, Together and TGI", {"type": "text"}),
    _in_both_apis(HONOURED, "structured_outputs", "json, regex, choice, grammar or json_object"),
    _in_both_apis(HONOURED, "guided_json", "as structured_outputs.json"),
    _in_both_apis(HONOURED, "guided_regex", "as structured_outputs.regex"),
    _in_both_apis(HONOURED, "guided_choice", "as structured_outputs.choice"),
    _in_both_apis(HONOURED, "guided_grammar", "as structured_outputs.grammar"),
    _in_both_apis(IGNORED, "guided_decoding_backend", "there is one backend"),
    _in_both_apis(HONOURED, "guided_whitespace_pattern", "a regex for whitespace between the parts of JSON"),
    _in_both_apis(HONOURED, "json_schema", "as structured_outputs.json: llama.cpp's and SGLang's name"),
    _in_both_apis(HONOURED, "regex", "as structured_outputs.regex: SGLang's name"),
    _in_both_apis(HONOURED, "ebnf", "as structured_outputs.grammar: SGLang's name"),
    _in_both_apis(HONOURED, "grammar", "as structured_outputs.grammar: llama.cpp's and TGI's name"),
    _in_both_apis(REFUSED, "structural_tag", "use structured_outputs"),
)  # fmt: skip

REPLY = (
    _in_both_apis(HONOURED, "stream", "the reply as a stream of events", False),
    _in_both_apis(HONOURED, "stream_options", "include_usage, continuous_usage_stats", {}),
    _in_both_apis(HONOURED, "logprobs", "in a chat true or false, in a completion how many of the likeliest", False, 0),
    _chat("top_logprobs", "how many of the likeliest; a completion has this in logprobs", 0),
    _in_both_apis(HONOURED, "logprob_token_ids", "with logprobs: report these tokens in place of the likeliest ones", []),
    _in_both_apis(HONOURED, "prompt_logprobs", "logprobs of each prompt token, and of this many of the likeliest tokens"),
    _in_both_apis(HONOURED, "echo", "the reply begins with the prompt; in a chat with the last message, if that is the assistant's", False),
    _in_both_apis(HONOURED, "skip_special_tokens", "false: special tokens are part of the text", True),
    _in_both_apis(HONOURED, "return_token_ids", "the reply has token_ids and prompt_token_ids", False),
    _in_both_apis(HONOURED, "return_tokens_as_token_ids", "in logprobs, tokens are written as token_id:N", False),
    _chat("return_prompt_text", "the reply has prompt_text, the rendered prompt; a completion has its prompt already", False),
    _in_both_apis(IGNORED, "spaces_between_special_tokens", "no spaces are put between tokens here", True),
    _in_both_apis(IGNORED, "stream_interval", "every step is sent"),
    _in_both_apis(REFUSED, "include_reasoning", "reasoning is part of the content", True),
    _in_both_apis(REFUSED, "return_token_offsets", "no route returns them", False),
    _in_both_apis(REFUSED, "return_assistant_tokens_mask", "no route returns it", False),
    _in_both_apis(REFUSED, "audio", "output is text"),
    _in_both_apis(REFUSED, "modalities", "output is text", ["text"]),
    _in_both_apis(REFUSED, "functions", "the deprecated form of tools: use tools", []),
    _in_both_apis(REFUSED, "function_call", "the deprecated form of tool_choice: use tool_choice", "none"),
    _in_both_apis(REFUSED, "web_search_options", "this server searches nothing"),
    _in_both_apis(REFUSED, "moderation", "this server moderates nothing"),
    _in_both_apis(REFUSED, "n_probs", "llama.cpp's: use logprobs", 0),
    _in_both_apis(REFUSED, "top_n_tokens", "TGI's: use logprobs", 0),
    _in_both_apis(REFUSED, "return_full_text", "TGI's: use echo", False),
)  # fmt: skip

SERVING = (
    _in_both_apis(HONOURED, "priority", "lower numbers come first with --policy priority; named in x-ignored-params with a policy that has no priorities"),
    _in_both_apis(HONOURED, "cache_salt", "only requests with the same salt share cached prompts"),
    _in_both_apis(LABEL, "request_id", "the server's own id is in x-request-id"),
    _in_both_apis(LABEL, "user", "whose request it is"),
    _in_both_apis(LABEL, "metadata", "the client's own"),
    _in_both_apis(IGNORED, "session_id", "no session is kept"),
    _in_both_apis(IGNORED, "store", "no reply is stored"),
    _in_both_apis(IGNORED, "service_tier", "there is one tier"),
    _in_both_apis(IGNORED, "prompt_cache_key", "prompts are cached by content"),
    _in_both_apis(IGNORED, "prompt_cache_options", "prompts are cached by content"),
    _in_both_apis(IGNORED, "prompt_cache_retention", "prompts are cached while there is room"),
    _in_both_apis(IGNORED, "cache_prompt", "llama.cpp's: prompts are cached by content"),
    _in_both_apis(IGNORED, "safety_identifier", "whose request it is"),
    _in_both_apis(IGNORED, "prediction", "a hint that would only save time"),
    _in_both_apis(IGNORED, "verbosity", "a hint to OpenAI's models"),
    _in_both_apis(IGNORED, "keep_alive", "Ollama's: the model stays loaded"),
    _in_both_apis(IGNORED, "routed_experts_prompt_start", "no routing of experts is returned"),
    _in_both_apis(REFUSED, "kv_transfer_params", "KV is not moved between servers", {}),
    _in_both_apis(REFUSED, "ec_transfer_params", "input is text", {}),
)  # fmt: skip

GROUPS: dict[str, tuple[Field, ...]] = {
    "The prompt": PROMPT,
    "Sampling": SAMPLING,
    "Where a reply ends": ENDING,
    "Structured output": STRUCTURE,
    "What the reply holds": REPLY,
    "Scheduling, caching and labels": SERVING,
}
FIELDS = {field.name: field for group in GROUPS.values() for field in group}


def markdown() -> str:
    """The tables of docs/fields.md."""
    parts: list[str] = []
    for title, group in GROUPS.items():
        rows = [f"| `{f.name}` | {f.chat} | {f.completion} | {f.note} |" for f in group]
        head = ["| field | chat | completion | |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows]))
    return "\n\n".join(parts) + "\n"
