"""`octavo bench sweep`, `memory`, `decoding` and `transports`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo.bench import ablation, decoding, sweep, transport_client
from octavo.bench.result_file import BenchRun
from octavo.bench.sweep import GoodputTarget, PointTimes, RequestTimes, Sweep
from octavo.errors import OctavoError
from octavo.process_usage import read_usage

Octavo = Callable[..., Result]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = ablation.Scale(streams=16, prompt=16, reply=8, context=100, document=400, shared=64)
    monkeypatch.setitem(ablation.SCALES, "cpu", scale)


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found["partial"] is False
    return found


# ---- sweep -------------------------------------------------------------------------------------


class Machine:
    """Serves up to four clients without delay: each further one slows all of them down."""

    def run(self, clients: int, requests: int) -> PointTimes:
        slowdown = max(clients / 4, 1)
        times = [RequestTimes(0.1 * slowdown, 0.01 * slowdown, 10) for _ in range(requests)]
        return PointTimes(times, requests / min(clients, 4))


def test_saturation_and_goodput_are_found() -> None:
    run = BenchRun("sweep", target={"ttft_ms": 250, "itl_ms": 50})
    Sweep(Machine(), run, GoodputTarget(ttft=0.25, itl=0.05)).measure(32)
    assert [row["clients"] for row in run.rows] == [1, 2, 3, 4, 6, 8, 16, 32]
    assert run.result["saturation"] == {"clients": 4, "tok_s": 40.0}
    assert run.result["goodput"] == {"clients": 4, "tok_s": 40.0}
    by_clients = {row["clients"]: row for row in run.rows}
    assert by_clients[8]["good"] == 1.0 and by_clients[16]["goodput_tok_s"] == 0
    assert "saturates at 4 clients with 40 tok/s" in sweep.notes(run.result)[0]


def test_an_engine_is_swept(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    found = last_line(
        octavo(
            *("bench", "sweep", tiny, "--clients", 2, "--prompt", 4, "--tokens", 3),
            *("--picture", tmp_path / "s.svg"),
        )
    )
    assert [row["clients"] for row in found["rows"]] == [1, 2]
    assert all(row["tok_s"] > 0 and row["ttft_p99_ms"] > 0 for row in found["rows"])
    assert "Throughput against concurrency" in (tmp_path / "s.svg").read_text()


def test_a_server_that_does_not_answer_cannot_be_swept(octavo: Octavo) -> None:
    result = octavo("bench", "sweep", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 2 and "no server answers at 127.0.0.1:1/v1/models" in result.stderr


# ---- memory ------------------------------------------------------------------------------------


def test_paging_wastes_less_than_contiguous_allocation(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    found = last_line(octavo("bench", "memory", tiny, "--picture", tmp_path / "m.svg"))
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["KV pool"]["measured_bytes"] >= rows["KV pool"]["planned_bytes"] > 0
    paged, contiguous = rows["paged"], rows["contiguous"]
    assert paged["waste"] < contiguous["waste"]
    assert paged["most_running"] > contiguous["most_running"]
    assert all(point["taken_positions"] >= point["used_positions"] for point in paged["over_time"])
    assert "Memory over time" in (tmp_path / "m.svg").read_text()


# ---- decoding ----------------------------------------------------------------------------------


def test_decoding_strategies_are_compared(octavo: Octavo, tiny: str) -> None:
    found = last_line(
        octavo("bench", "decoding", tiny, "--strategies", "greedy,temperature 1", "--repeat", 1)
    )
    rows = {row["strategy"]: row for row in found["rows"]}
    assert rows["greedy"]["mean_logprob"] > rows["temperature 1"]["mean_logprob"]
    assert all(
        0 <= row["facts"] <= 1 and row["single_tok_s"]["median"] > 0 for row in rows.values()
    )


def test_an_unknown_strategy_is_named(octavo: Octavo) -> None:
    result = octavo("bench", "decoding", "--strategies", "greedy,luck")
    assert result.exit_code == 2 and "unknown strategy luck: use greedy" in result.stderr


def test_texts_are_judged() -> None:
    assert decoding.repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)
    assert decoding.repeated_share([1, 2, 3, 4]) == 0 and decoding.repeated_share([1]) == 0
    assert decoding.distinct_share([[1, 2, 3], [1, 2]]) == pytest.approx(2 / 3)


# ---- transports --------------------------------------------------------------------------------


def test_messages_of_grpc_are_those_of_the_proto_file() -> None:
    pytest.importorskip("grpc")
    from octavo.serve.proto import octavo_pb2

    load = transport_client.TransportLoad("grpc", "h", 1, 2, 1, 1, 300, "Grüße " * 40)
    request = octavo_pb2.GenerateRequest.FromString(transport_client.grpc_request(load))
    assert (request.prompt, request.max_new_tokens, request.ignore_eos) == (load.prompt, 300, True)
    reply = octavo_pb2.GenerateResponse(
        generated_text="x" * 200, tokens_generated=300, latency_ms=1.5, finish_reason="length"
    )
    assert transport_client.tokens_generated(reply.SerializeToString()) == 300
    last = octavo_pb2.GenerateStreamResponse(text="y", tokens_generated=7, prompt_tokens=3)
    assert transport_client.tokens_generated(last.SerializeToString()) == 7
    with pytest.raises(ValueError, match="3 tokens instead of 300"):
        transport_client.check_tokens(3, load)


@pytest.mark.slow
def test_transports_are_compared(octavo: Octavo, tiny: str) -> None:
    found = last_line(
        octavo("bench", "transports", tiny, "--repeat", 1, "--requests", 5, "--num-blocks", 100)
    )
    assert [row["transport"] for row in found["rows"]] == [
        *("http", "http stream", "websocket", "grpc", "grpc stream")
    ]
    assert all(row["requests_s"]["median"] > 0 for row in found["rows"])


# ---- processes ---------------------------------------------------------------------------------


def test_a_process_is_read_from_proc() -> None:
    import os

    usage = read_usage(os.getpid())
    assert usage is not None
    assert usage.peak_rss_bytes >= usage.rss_bytes > 2**20 and usage.threads >= 1
    assert usage.cpu_seconds > usage.system_seconds >= 0 and usage.minor_faults > 0
    assert read_usage(2**22 + 1) is None


def test_a_point_with_wrong_replies_does_not_count() -> None:
    from octavo.bench.openai_endpoint import OpenAIEndpoint
    from tests.cli.test_bench_serve import HEAD, answering, whole

    def reply(number: int) -> bytes:
        body = b'{"data": [{"id": "m"}]}'
        models = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        return whole() if number else models

    with answering(reply) as port:
        target = sweep.OverHttp(OpenAIEndpoint.parse(f"http://127.0.0.1:{port}"), "Hello", 4)
        with pytest.raises(OctavoError, match="replies are wrong, so the point does not count"):
            target.run(1, 1)
