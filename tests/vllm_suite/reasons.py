"""Why tests of vLLM's suite do not pass, for the table in docs/from-vllm.md.

A reason was found by reading the test and the reply. A test that fails and has no reason here is
"not explained" in the table.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

ALWAYS = "Octavo always sends the header of a request id; vLLM needs a flag"
CACHED = "Octavo always reports cached tokens; vLLM needs a flag"
CLIENT = "the test is written for another version of a client or of a test library"
CONTEXT = "the embedded model's context is too short for the test"
COHERE = "Octavo does not serve Cohere's /v2/embed"
DOWNLOAD = "the test downloads a model or an adapter"
EMBEDDER = "the embedded model's embeddings have another size, and its tokenizer other tokens"
FORM = "Octavo's value has OpenAI's form, where vLLM has a form of its own"
INPUT = "the test sends an image or a recording"
INTERNAL = "the test reads or calls a part that only vLLM has"
MASKS = "Octavo does not report masks of tokens"
MODEL = "the embedded model writes another text or other tokens than the test expects"
MORE = "Octavo serves what the test expects to be refused"
SLOW = "the embedded model's reply does not end within the 120 s of a test"
REFUSED = "Octavo refuses a value that vLLM accepts"
TRANSFER = "KV is moved between servers, which Octavo does not do"
WORDS = "the error is the same, its words or its type are not"
UNEXPLAINED = "not explained"

# A file and a pattern of the names of its tests.
REASONS: dict[str, str] = {
    "anthropic/test_messages.py::test_anthropic_streaming": CACHED,
    "anthropic/test_messages.py::test_anthropic_streaming_cache_usage": CLIENT,
    "anthropic/test_messages.py::test_anthropic_tool_call": MODEL,
    "openai/chat_completion/test_chat.py::test_complex_message_content": MODEL,
    "openai/chat_completion/test_chat.py::test_long_seed": WORDS,
    "openai/chat_completion/test_chat.py::test_more_than_one_prompt_logprobs_chat*": MODEL,
    "openai/chat_completion/test_chat.py::test_response_format_json_object": MODEL,
    "openai/chat_completion/test_chat.py::test_single_chat_session*": MODEL,
    "openai/chat_completion/test_chat.py::test_structured_outputs_json_chat": MODEL,
    "openai/chat_completion/test_chat_completion.py::test_kv_transfer_*": TRANSFER,
    "openai/chat_completion/test_chat_echo.py::test_prompt_logprobs": REFUSED,
    "openai/chat_completion/test_chat_echo.py::test_top_logprobs": REFUSED,
    "openai/chat_completion/test_completion_with_function_calling.py::"
    "test_function_tool_use[True-auto-False*": SLOW,
    "openai/chat_completion/test_completion_with_function_calling.py::"
    "test_function_tool_use[*auto*": MODEL,
    "openai/chat_completion/test_completion_with_function_calling.py::"
    "test_function_tool_use[*required*": SLOW,
    "openai/chat_completion/test_completion_with_function_calling.py::test_named_tool_use": FORM,
    "openai/chat_completion/test_extra_content_fields.py::test_translategemma_extra_*": MODEL,
    "openai/chat_completion/test_include_reasoning.py::test_include_reasoning_*": MODEL,
    "openai/chat_completion/test_extra_content_fields.py::test_translategemma_image_*": INPUT,
    "openai/completion/test_completion.py::test_completion_streaming*": MODEL,
    "openai/completion/test_completion.py::test_single_completion*": MODEL,
    "openai/completion/test_prompt_validation.py::test_empty_prompt": WORDS,
    "openai/completion/test_token_in_token_out.py::*": DOWNLOAD,
    "openai/models/test_models.py::test_check_models": DOWNLOAD,
    "openai/responses/test_basic.py::test_*": MODEL,
    "openai/responses/test_function_call.py::test_function_tool_use[auto*": MODEL,
    "openai/responses/test_function_call.py::test_function_calling_with_streaming_*": MODEL,
    "openai/responses/test_function_call.py::test_named_tool_use": MODEL,
    "openai/responses/test_simple.py::test_reasoning_item*": MODEL,
    "openai/responses/test_simple.py::test_streaming_logprobs*": MODEL,
    "openai/responses/test_stateful.py::test_cancel_completed": MODEL,
    "openai/responses/test_stateful.py::test_previous_response_id": MODEL,
    "openai/responses/test_stateful.py::test_two_responses_with_same_prev_id": MODEL,
    "openai/responses/test_structured_output.py::test_structured_output*": MODEL,
    "openai/test_openai_schema.py::test_openapi_stateless": CLIENT,
    "openai/test_return_token_ids.py::test_chat_completion_with_tool_use": MODEL,
    "openai/test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs": MODEL,
    "openai/test_run_batch.py::test_completions": FORM,
    "openai/test_run_batch.py::test_embeddings": FORM,
    "openai/test_run_batch.py::test_download_bytes_*": INTERNAL,
    "openai/test_run_batch.py::test_reasoning_parser": SLOW,
    "openai/test_run_batch.py::test_transcription*": INPUT,
    "openai/test_run_batch.py::test_translation": INPUT,
    "pooling/basic/test_truncation.py::test_bigger_truncation_size": WORDS,
    "pooling/embed/test_online.py::test_basic*": EMBEDDER,
    "pooling/embed/test_online.py::test_chat_request*": EMBEDDER,
    "pooling/embed/test_online.py::test_params_not_supported*": WORDS,
    "pooling/embed/test_online.py::test_pooling_embed*": EMBEDDER,
    "pooling/embed/test_online.py::test_pooling_not_supported[token_embed*": MORE,
    "pooling/embed/test_online.py::test_pooling_not_supported*": WORDS,
    "pooling/embed/test_online.py::test_truncate_prompt_tokens*": EMBEDDER,
    "pooling/scoring/test_bi_encoder_online.py::test_*_max_model_len": WORDS,
    "pooling/scoring/test_bi_encoder_online.py::test_pooling_embed": EMBEDDER,
    "pooling/scoring/test_bi_encoder_online.py::test_pooling_not_supported*": WORDS,
    "pooling/scoring/test_bi_encoder_online.py::test_score_api_*": DOWNLOAD,
    "scale_out/render/test_render.py::*_assistant_tokens_mask_with_generation_tags": MASKS,
    "scale_out/token_in_token_out/test_serving_tokens.py::test_generate_sampling_mask*": MASKS,
    "scale_out/token_in_token_out/test_serving_tokens.py::test_stop_string_workflow": MODEL,
    "serve/instrumentator/test_basic.py::test_request_cancellation*": CONTEXT,
    "serve/instrumentator/test_basic.py::test_show_version": INTERNAL,
    "serve/instrumentator/test_metrics.py::test_metrics_exist[*multimodal*": INPUT,
    "serve/instrumentator/test_metrics.py::test_metrics_exist_run_batch": INTERNAL,
    "serve/instrumentator/test_orca_metrics.py::test_single_completion*": MODEL,
    "serve/instrumentator/test_uds.py::test_show_version": INTERNAL,
    "serve/middleware/test_optional_middleware.py::test_no_request_id_header": ALWAYS,
    "serve/middleware/test_optional_middleware.py::test_v2_endpoint_accepts_*": COHERE,
    "tool_parsers/test_hermes_tool_parser.py::*llama*": DOWNLOAD,
    "tool_parsers/test_hermes_tool_parser.py::*granite4*": MODEL,
}


def reason_of(file: str, test: str) -> str:
    """Return why a test does not pass."""
    for pattern, reason in REASONS.items():
        known_file, _, known_test = pattern.partition("::")
        # A parameter in brackets is no pattern of fnmatch.
        found, wanted = test.replace("[", "("), known_test.replace("[", "(")
        if file == known_file and fnmatchcase(found, wanted):
            return reason
    return UNEXPLAINED
