"""What the front lets through where caches are bounded."""

from __future__ import annotations

import pytest

from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.validate import fit
from octavo.serve.channel.messages import Loaded

MODEL = Loaded(
    300, 100, 4, 64, 8, 20, True, "float32", "cpu", "Llama", {}, None, None, kv_budget=48
)


def test_a_reply_may_go_on_beyond_the_context() -> None:
    headers: dict[str, str] = {}
    assert fit([1] * 40, 5000, MODEL, "prompt", headers) == 5000 and not headers
    assert fit([1] * 40, None, MODEL, "prompt", headers) == 60, (
        "unless nobody says how far: then the context bounds it"
    )


def test_a_prompt_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ApiError, match="keeps 48"):
        fit([1] * 49, 1, MODEL, "prompt", {})
