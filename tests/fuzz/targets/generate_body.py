"""Bodies of POST /generate and POST /batch_generate: the same body goes to both."""

from __future__ import annotations

from tests.fuzz.json_routes import WORDS, check, seeds

__all__ = ["SEEDS", "WORDS", "one_input"]

SEEDS = seeds(
    {"prompt": "hello", "max_new_tokens": 4},
    {"prompts": ["hello", "there"], "max_new_tokens": 4, "temperature": 0},
    {"prompt": "hello", "stop": "x", "seed": 3, "top_k": 4, "timeout": 1.5},
    {"prompts": ["a"], "structured_outputs": {"choice": ["a"]}, "repetition_penalty": 1.1},
)


def one_input(data: bytes) -> object:
    return check("/generate", data), check("/batch_generate", data)
