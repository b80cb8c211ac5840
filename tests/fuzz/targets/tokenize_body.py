"""Bodies of POST /tokenize, POST /detokenize and the route that renders a chat: the same body goes
to each."""

from __future__ import annotations

from tests.fuzz.json_routes import WORDS, check, seeds

__all__ = ["SEEDS", "WORDS", "one_input"]

USER = {"role": "user", "content": "hi <|eos|> é"}
SEEDS = seeds(
    {"prompt": "hello", "add_special_tokens": True},
    {"prompt": "<|user|>hello<|end|>", "return_token_strs": True, "add_special_tokens": False},
    {"messages": [USER], "add_generation_prompt": True},
    {"messages": [USER, {"role": "assistant", "content": "a"}], "continue_final_message": True},
    {"tokens": [1, 2, 3, 256, 257]},
    {"tokens": []},
)
ROUTES = ("/tokenize", "/detokenize", "/v1/chat/completions/render")


def one_input(data: bytes) -> object:
    return tuple(check(route, data) for route in ROUTES)
