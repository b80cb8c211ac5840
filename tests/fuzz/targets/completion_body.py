"""Bodies of POST /v1/completions."""

from __future__ import annotations

from tests.fuzz.json_routes import WORDS, check, seeds

__all__ = ["SEEDS", "WORDS", "one_input"]

SEEDS = seeds(
    {"prompt": "hello", "max_tokens": 4, "model": "tiny"},
    {"prompt": ["a", "b"], "n": 2, "best_of": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    {"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": [[1, 2], [3]], "stream": True, "seed": -1, "ignore_eos": True, "min_tokens": 2},
    {"prompt": "a", "use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": True},
    {"prompt": "a", "structured_outputs": {"regex": "a+"}, "prompt_logprobs": 1, "cache_salt": "x"},
    {"prompt": "a", "guided_choice": ["a", "b"], "request_id": "one", "priority": -3},
    {"prompt": "a", "guided_grammar": 'start: "a"', "allowed_token_ids": [1, 2], "stop_token_ids": [3]},
    {"prompt": "a", "guided_json": {"type": "object"}, "truncate_prompt_tokens": 5, "logit_bias": {"1": 1}},
    {"prompt": "a", "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2, "user": "me"},
)  # fmt: skip


def one_input(data: bytes) -> object:
    return check("/v1/completions", data)
