"""Servers for the tests of clients: one with the embedded model, and one whose model repeats what it
was told, for replies that the embedded model is too small to give, such as a call that it chooses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.running import NAME, Running, server

# As the reply of a model that calls a tool, in the form that the server reads by default.
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
# As a reply that must follow a schema. It has no spaces between tokens.
OBJECT = '{"city":"Paris"}'
PARROT = NAME


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = {"max_model_len": 2048, "num_gpu_blocks_override": 512, "max_num_seqs": 16}
    with server(
        tmp_path_factory.mktemp("embedded"),
        model=None,
        served_model_name=["smollm2"],
        engine=engine,
    ) as found:
        yield found


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The model says the text of the last user's message. Results of tools are a part of it."""
    folder = tmp_path_factory.mktemp("parrot")
    with server(folder, program="tests.serve.parrot_engine") as found:
        yield found
