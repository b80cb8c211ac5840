"""One server with the embedded model for the tests of clients of other APIs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.running import Running, server


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
