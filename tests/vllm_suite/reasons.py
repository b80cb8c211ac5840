"""Why tests of vLLM's suite do not pass, for the table in docs/from-vllm.md.

A reason was found by reading the test and the reply. A test that fails and has no reason here is
"not explained" in the table.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

CACHED = "Octavo always reports cached tokens; vLLM needs a flag"
CLIENT = "the test calls an older version of the client"
MODEL = "the embedded model writes another text or other tokens than the test expects"
REFUSED = "Octavo refuses a value that vLLM accepts"
TRANSFER = "KV is moved between servers, which Octavo does not do"
WORDS = "the error is the same, its words are not"
DOWNLOAD = "the test downloads a model or an adapter"
IMAGES = "the test sends an image"
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
    "openai/chat_completion/test_extra_content_fields.py::test_translategemma_extra_*": MODEL,
    "openai/chat_completion/test_extra_content_fields.py::test_translategemma_image_*": IMAGES,
    "openai/completion/test_completion.py::test_completion_streaming*": MODEL,
    "openai/completion/test_completion.py::test_single_completion*": MODEL,
    "openai/completion/test_prompt_validation.py::test_empty_prompt": WORDS,
    "openai/completion/test_token_in_token_out.py::*": DOWNLOAD,
    "openai/models/test_models.py::test_check_models": DOWNLOAD,
}


def reason_of(file: str, test: str) -> str:
    """Return why a test does not pass."""
    for pattern, reason in REASONS.items():
        known_file, _, known_test = pattern.partition("::")
        # A parameter in brackets is no pattern of fnmatch.
        if file == known_file and fnmatchcase(test.replace("[", "("), known_test):
            return reason
    return UNEXPLAINED
