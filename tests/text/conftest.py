from __future__ import annotations

from typing import Any

import pytest

from octavo.model.embedded import embedded_path
from octavo.model.gguf import read_header
from octavo.text import Tokenizer


@pytest.fixture(scope="session")
def metadata() -> dict[str, Any]:
    """The embedded model's GGUF metadata."""
    return read_header(embedded_path())[0]


@pytest.fixture(scope="session")
def embedded(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)
