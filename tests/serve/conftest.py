"""Servers for all tests that do not change them: starting one takes three seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")

from tests.serve.running import Running, server
from tests.tiny_tokenizer import TEMPLATE

# The comment tells the server that the model may write reasoning.
REASONING_TEMPLATE = TEMPLATE + "{# <think> </think> #}"


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server(tmp_path_factory.mktemp("serve")) as found:
        yield found


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The model says the text of the last user's message."""
    folder = tmp_path_factory.mktemp("parrot")
    program = "tests.serve.parrot_engine"
    with server(folder, program=program, chat_template=REASONING_TEMPLATE) as found:
        yield found
