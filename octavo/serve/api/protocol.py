"""The fields of requests and their types, as clients of OpenAI and vLLM send them.

validate.py checks the values. Types are strict: "0.7" is not a number, and 1.5 is not an integer
(but 5.0 is one, see parse.py). Every field defaults to None, so null means the same as a missing
field. request_fields.py lists these fields and those of other servers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class RepetitionDetection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None


class Common(msgspec.Struct, kw_only=True):
    """The fields that all requests for generation have."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # Older clients of vLLM use these five fields.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # Clients of llama.cpp, SGLang and TGI use these four fields.
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | dict[str, Any] | None = None
    repetition_detection: RepetitionDetection | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None  # The most seconds that the request may take.
    request_id: str | None = None  # A label, which has no effect.
    user: str | None = None


class OpenAI(Common, kw_only=True):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    metadata: dict[str, Any] | None = None


class ChatRequest(OpenAI, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None  # The form of tools before 2023.
    function_call: str | dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    separate_reasoning: bool | None = None  # The name of SGLang's.
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    return_prompt_text: bool | None = None


class BatchChatRequest(ChatRequest, kw_only=True):
    """A request of vLLM's /v1/chat/completions/batch, which has several conversations."""

    messages: list[list[dict[str, Any]]] | None = None  # type: ignore[assignment]


class MessagesRequest(Common, kw_only=True):
    """A request of Anthropic's Messages API."""

    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class ResponsesRequest(Common, kw_only=True):
    """A request of OpenAI's Responses API."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    enable_response_messages: bool | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The options of Ollama that have an effect."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaRequest(Common, kw_only=True):
    """The fields that /api/chat and /api/generate of Ollama have in common."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedFields(msgspec.Struct, kw_only=True):
    """The fields that /api/embed and /api/embeddings of Ollama have in common."""

    model: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None


class OllamaEmbedRequest(OllamaEmbedFields, kw_only=True):
    input: str | list[str] | None = None


class OllamaEmbeddingRequest(OllamaEmbedFields, kw_only=True):
    prompt: str | None = None


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all requests for embeddings and scores have."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    normalize: bool | None = None  # An older name of use_activation.
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    user: str | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    input: str | list[Any] | None = None  # One or several texts or lists of token ids.
    messages: list[dict[str, Any]] | None = None  # A conversation instead of the input.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["little", "big", "native"] | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    task: Literal["embed", "token_embed"] | None = None


class RerankRequest(PoolingFields, kw_only=True):
    query: str | dict[str, Any] | None = None
    documents: list[str | dict[str, Any]] | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """One text or several on each side. The names of a pair are those of different clients."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class BatchRequest(msgspec.Struct, kw_only=True):
    """A request of /v1/batches."""

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None  # The name of the field in older clients.


class CompletionRequest(OpenAI, kw_only=True):
    prompt: str | list[Any] | None = None  # One or several texts or lists of token ids.
    logprobs: int | bool | None = None  # False asks for none, as in a chat.
    parse_special: bool | None = None  # False makes control tokens in a text plain characters.


class TokensRequest(msgspec.Struct, kw_only=True):
    """A request of vLLM's /inference/v1/generate."""

    token_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None


class GenerateRequest(Common, kw_only=True):
    prompt: str | None = None
    max_new_tokens: int | None = None
    parse_special: bool | None = None


class BatchGenerateRequest(Common, kw_only=True):
    prompts: list[str] | None = None
    max_new_tokens: int | None = None
    parse_special: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None
