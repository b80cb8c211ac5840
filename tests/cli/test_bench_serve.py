"""`octavo bench serve` counts what replies say of themselves, and nothing that is not a good
reply."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo.bench.http_load import Load, measure
from octavo.bench.measure_serve import added_latency, percentiles
from octavo.bench.model_shapes import GPT2_124M, write_directory
from octavo.bench.openai_endpoint import OpenAIEndpoint
from octavo.bench.reply_checks import CheckedReply, check_reply
from octavo.errors import OctavoError
from octavo.text.tokenizer import Tokenizer

Octavo = Callable[..., Result]
LOAD = Load(port=0, clients=1, requests=1, tokens=3, prompt="Hello", exact=True)
HEAD = b"HTTP/1.1 200 OK\r\nx-request-id: req_1\r\n"


def whole(
    text: str = "abc", reason: str = "length", tokens: int = 3, status: bytes = b"200 OK"
) -> bytes:
    reply = {
        "choices": [{"text": text, "finish_reason": reason}],
        "usage": {"completion_tokens": tokens},
    }
    body = json.dumps(reply).encode()
    return HEAD.replace(b"200 OK", status) + b"content-length: %d\r\n\r\n" % len(body) + body


def streamed(*texts: str, tokens: int = 3, end: bytes = b"data: [DONE]\n\n") -> bytes:
    events: list[Any] = [{"choices": [{"text": t, "finish_reason": None}]} for t in texts]
    events[-1]["choices"][0]["finish_reason"] = "length"
    events.append({"choices": [], "usage": {"completion_tokens": tokens}})
    parts = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [end] * bool(
        end
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def problem_of(data: bytes, **changes: Any) -> str:
    return check_reply(LOAD.expected._replace(**changes), data).problem or ""


def test_a_good_reply_counts_by_its_own_usage() -> None:
    def counts(found: CheckedReply) -> bool:
        return (found.status, found.request_id, found.tokens, found.problem) == (
            *(200, "req_1", 3),
            None,
        )

    expected = LOAD.expected
    assert counts(check_reply(expected, whole()))
    assert counts(check_reply(expected._replace(stream=True), streamed("a", "b", "c")))
    loose = expected._replace(stream=True, exact=False)
    assert counts(check_reply(loose, streamed("two words"))), "texts tell only where exact"


@pytest.mark.parametrize(
    "data, why",
    [
        (whole(status=b"500 No"), "status 500"),
        (whole(status=b"429 Wait"), "status 429"),
        (whole(tokens=2), "usage says 2 tokens, not 3"),
        (whole(reason="stop"), "ended with 'stop'"),
        (whole(text="ab"), "a text of 2 characters"),
        (whole()[:-1], "not a reply: JSONDecodeError"),
        (whole() + whole(), "not a reply: JSONDecodeError Extra data"),
        (HEAD + b"\r\n{}", "not a reply: KeyError"),
        (HEAD + b'\r\n{"error": "overloaded"}', "an error with status 200: overloaded"),
        (HEAD + b'\r\n{"choices": [{}, {}]}', "too many values to unpack"),
        (b"", "no HTTP reply"),
    ],
)
def test_anything_else_does_not(data: bytes, why: str) -> None:
    assert why in problem_of(data)


def test_a_reply_may_stop_early_where_the_server_knows_no_ignore_eos() -> None:
    assert not problem_of(whole(tokens=2, reason="stop"), may_stop=True, exact=False)
    assert "usage says 4" in problem_of(whole(tokens=4, reason="stop"), may_stop=True, exact=False)
    assert "usage says 2" in problem_of(whole(tokens=2), may_stop=True, exact=False)


@pytest.mark.parametrize(
    "data, why",
    [
        (streamed("a", "b", "c", end=b""), "the stream does not end with [DONE]"),
        (streamed("a", "b", "c").replace(b"\r\n0\r\n", b"\r\n1\r\n"), "not a reply"),
        (streamed("a", "b"), "a text of 2 characters"),
        (streamed("a", "b", "c", tokens=2), "usage says 2"),
        (streamed("a", "b", "b", "c"), "a text of 4 characters"),
        (
            streamed("a", "b", "c").replace(b'"finish_reason": null', b'"finish_reason": true', 1),
            "the stream continues after its finish_reason",
        ),
    ],
)
def test_a_stream_has_to_be_whole(data: bytes, why: str) -> None:
    assert why in problem_of(data, stream=True)


def test_a_piece_that_was_sent_twice_shows() -> None:
    assert "4 pieces of text for 3 tokens" in problem_of(
        streamed("one", " two", " two", " three"), stream=True, exact=False
    )


def test_chats_are_read_too() -> None:
    pieces = [{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "abc"}}]
    events: list[Any] = [
        {"id": "x", "choices": [{**piece, "index": 0, "finish_reason": None}]} for piece in pieces
    ]
    events[-1]["choices"][0]["finish_reason"] = "length"
    events.append({"id": "x", "choices": [], "usage": {"completion_tokens": 3}})
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    body += b"data: [DONE]\n\n"
    assert not problem_of(HEAD + b"\r\n" + body, stream=True, chat=True)
    mixed = body.replace(b'"id": "x"', b'"id": "y"', 1)
    assert "different ids" in problem_of(HEAD + b"\r\n" + mixed, stream=True, chat=True)


@contextmanager
def answering(
    data: bytes | Callable[[int], bytes], hang_up: bool = False, last: int | None = None
) -> Iterator[int]:
    """A server that says this to whatever is asked; nothing: it hangs up. A function gets the
    number of the request. `hang_up`: it closes the connection after each reply. `last`: the number
    of the request after which it ends."""
    numbers = itertools.count()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk(connection: socket.socket) -> None:
            with connection:
                while connection.recv(65536):
                    number = next(numbers)
                    reply = data if isinstance(data, bytes) else data(number)
                    connection.sendall(reply)
                    if number == last:
                        listening.shutdown(socket.SHUT_RDWR)
                    if hang_up or not reply or number == last:
                        return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        if last is None:
            listening.shutdown(socket.SHUT_RDWR)


def test_the_client_asks_each_once_and_counts_the_good_ones() -> None:
    with answering(whole()) as port:
        found = measure(replace(LOAD, port=port, clients=3, requests=10, timeout=20))
    assert (
        len(found["good"]) == 10
        and found["tokens"] == 30
        and not found["wrong"]
        and found["statuses"] == {"200": 10}
    )
    assert (
        all(sent <= first <= end for _, sent, first, end in found["good"]) and found["seconds"] > 0
    )


def test_replies_in_bursts_and_in_pieces() -> None:
    with answering(streamed("a", "b", "c")) as port:
        found = measure(
            replace(
                LOAD,
                port=port,
                clients=3,
                requests=9,
                stream=True,
                burst=True,
                timeout=20,
            )
        )
    assert len(found["good"]) == 9
    times = sorted(found["good"], key=lambda reply: reply[1])
    assert max(end for *_, end in times[:3]) <= min(sent for _, sent, *_ in times[3:6]), (
        "a round begins when all have ended"
    )


@pytest.mark.parametrize(
    "data, why", [(whole(status=b"500 No"), "status 500"), (b"", "no HTTP reply")]
)
def test_a_server_that_only_fails_answers_nothing_at_all(data: bytes, why: str) -> None:
    with answering(data) as port:
        found = measure(replace(LOAD, port=port, clients=2, requests=4, exact=False, timeout=5))
    assert found["good"] == [] and found["tokens"] == 0
    assert why in found["wrong"] and sum(found["wrong"].values()) == 4


STALLED = whole()[:-5]


@pytest.mark.parametrize(
    "reply, why",
    [
        (STALLED, "it was not complete after 0.2 s"),
        (streamed("a", "b", "c")[:-20], "it was not complete after 0.2 s"),
    ],
)
def test_a_server_that_stalls_costs_its_own_replies(reply: bytes, why: str) -> None:
    def sometimes(number: int) -> bytes:
        good = streamed("a", "b", "c") if b"chunked" in reply else whole()
        return reply if number % 3 == 2 else good

    load = replace(LOAD, clients=2, requests=9, timeout=20, reply_timeout=0.2)
    with answering(sometimes) as port:
        found = measure(replace(load, port=port, stream=b"chunked" in reply))
    assert len(found["good"]) == 6 and found["wrong"] == {why: 3}


def test_a_server_that_closes_connections_is_asked_again() -> None:
    closing = whole().replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    with answering(closing, hang_up=True) as port:
        found = measure(replace(LOAD, port=port, clients=2, requests=7, timeout=20))
    assert len(found["good"]) == 7 and not found["wrong"]


def test_a_server_that_truncates_its_replies_is_found_out() -> None:
    with answering(whole()[:-5], hang_up=True) as port:
        found = measure(replace(LOAD, port=port, clients=2, requests=4, timeout=20))
    assert not found["good"] and sum(found["wrong"].values()) == 4
    assert "not a reply: JSONDecodeError" in next(iter(found["wrong"]))


def with_id(identity: str) -> bytes:
    body = whole().partition(b"\r\n\r\n")[2]
    body = b'{"id": "%b", ' % identity.encode() + body[1:]
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def test_a_server_that_sends_replies_twice_is_found_out() -> None:
    with answering(lambda number: with_id(f"reply-{number // 2}")) as port:
        found = measure(replace(LOAD, port=port, clients=2, requests=6, timeout=20))
    assert len(found["good"]) == 3
    assert found["wrong"] == {"the reply to another request was sent again": 3}


def test_keys_and_models_are_sent_and_kept_out_of_results() -> None:
    load = replace(LOAD, model="m", headers={"Authorization": "Bearer secret"}, chat=True)
    request = replace(load, path="/base/v1/chat/completions").request(0)
    assert request.startswith(b"POST /base/v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in request
    body = json.loads(request.partition(b"\r\n\r\n")[2])
    assert body["model"] == "m" and body["messages"][0]["content"] == "Hello"
    with answering(whole()) as port:
        found = measure(replace(load, chat=False, port=port, timeout=20))
    assert "secret" not in json.dumps(found)


def test_the_command_fails_where_replies_are_wrong(octavo: Octavo) -> None:
    def reply(number: int) -> bytes:
        body = b'{"data": [{"id": "m"}]}'
        models = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        return whole(tokens=2) if number else models

    with answering(reply) as port:
        result = octavo(
            "bench",
            "serve",
            "--url",
            f"http://127.0.0.1:{port}",
            "--requests",
            4,
            "--clients",
            2,
            "--repeat",
            1,
        )
    assert result.exit_code == 1
    assert "4 replies are wrong and do not count: usage says 2 tokens, not 30" in " ".join(
        result.stdout.split()
    )
    (case,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert case["good"] == 0 and case["tok_s"] == 0


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (b"401 No", b"{}", "refuses the API key .status 401.: give --api-key"),
        (b"200 OK", b'{"data": [{"id": "a"}, {"id": "b"}]}', "has 2 models .a, b.: name the one"),
        (b"200 OK", b"hello", "does not answer with a list of models"),
        (b"503 Busy", b"", "answers with status 503"),
    ],
)
def test_an_endpoint_that_cannot_be_measured_says_why(
    status: bytes, body: bytes, says: str
) -> None:
    head = HEAD.replace(b"200 OK", status) + b"content-length: %d\r\n\r\n" % len(body)
    with answering(head + body) as port:
        endpoint = OpenAIEndpoint.parse(f"http://127.0.0.1:{port}")
        with pytest.raises(OctavoError, match=says):
            endpoint.with_model()


def test_an_endpoint_is_read_from_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "from-environment")
    endpoint = OpenAIEndpoint.parse("https://example.com/api/v1/", model="m", chat=True)
    load = endpoint.applied_to(LOAD)
    assert (load.host, load.port, load.tls) == ("example.com", 443, True)
    assert load.path == "/api/v1/chat/completions" and load.model == "m"
    assert load.headers == {"Authorization": "Bearer from-environment"}
    assert (
        OpenAIEndpoint.parse("http://h:9", api_key="given").headers["Authorization"]
        == "Bearer given"
    )
    assert OpenAIEndpoint.parse("http://h:9").applied_to(LOAD).path == "/v1/completions"


def test_a_server_that_ends_leaves_a_partial_result(octavo: Octavo, tmp_path: Path) -> None:
    body = b'{"data": [{"id": "m"}]}'
    models = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    good = streamed("a", "b", "c")

    # The list of models, two replies to warm up and ten that count. Then the server is gone.
    with answering(lambda number: good if number else models, last=12) as port:
        result = octavo(
            *("bench", "serve", "--url", f"http://127.0.0.1:{port}", "--cases", "stream,one"),
            *("--clients", 1, "--requests", 1, "--tokens", 3, "--repeat", 1),
            *("--json", tmp_path / "r.json"),
        )
    assert result.exit_code == 2, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["partial"] is True and "the client ended with 1" in found["stopped"]
    assert [row["case"] for row in found["rows"]] == ["stream"]


def test_a_model_that_cannot_be_served_is_one_message(octavo: Octavo, tmp_path: Path) -> None:
    write_directory(GPT2_124M, tmp_path)
    result = octavo("bench", "serve", tmp_path)
    assert result.exit_code == 2 and "the server did not start: " in result.stderr
    assert "holds no *.safetensors file" in result.stderr and "Traceback" not in result.stderr


def test_bad_arguments(octavo: Octavo) -> None:
    result = octavo("bench", "serve", "--cases", "same,other")
    assert result.exit_code == 2 and "unknown case other: use same, long" in result.output
    result = octavo("bench", "serve", "--url", "ftp://x")
    assert result.exit_code == 2 and "give http://HOST:PORT" in result.output
    result = octavo("bench", "serve", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 2 and "no server answers at 127.0.0.1:1/v1/models" in result.output


def test_a_shapes_text_tells_how_many_tokens_it_has(tmp_path: Path) -> None:
    write_directory(GPT2_124M, tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.vocab_size == GPT2_124M["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("The secret is ~")) == "The secret is ~"
    every = list(range(tokenizer.vocab_size))
    assert len(tokenizer.decode(every)) == len(set(tokenizer.decode(every))) == len(every)


def test_what_the_server_adds_is_the_way_in_and_the_way_out(tmp_path: Path) -> None:
    line = {"id": "req_1-0", "submitted": 1.001, "queued": 1.003, "first_token": 1.010}
    (tmp_path / "trace").write_text(json.dumps(line) + "\n")
    found = added_latency([("req_1", 1.0, 1.012, 1.5)], tmp_path / "trace")
    middle = {name: round(times["p50"], 6) for name, times in found.items()}
    assert middle == {
        "in_ms": 1.0,
        "engine_ms": 9.0,
        "picked_up_ms": 2.0,
        "out_ms": 2.0,
        "added_ms": 3.0,
    }
    with pytest.raises(OctavoError, match="no entry for request req_2"):
        added_latency([("req_2", 1.0, 1.012, 1.5)], tmp_path / "trace")


def test_percentiles() -> None:
    assert percentiles([k / 1000 for k in range(100)]) == pytest.approx(
        {"p50": 50, "p95": 95, "p99": 99}
    )
    assert percentiles([]) == {}


def test_a_model_is_served_and_asked(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    args = [
        "--requests",
        6,
        "--clients",
        3,
        "--tokens",
        5,
        "--repeat",
        1,
        "--num-blocks",
        200,
        "--json",
        tmp_path / "r.json",
    ]
    result = octavo("bench", "serve", tiny, "--cases", "same,distinct,one,burst", *args)
    assert result.exit_code == 0, result.output
    r = json.loads(result.stdout.splitlines()[-1])
    assert r == json.loads((tmp_path / "r.json").read_text())
    same, distinct, one, burst = r["rows"]
    assert (same["good"], distinct["good"], one["good"], burst["good"]) == (6, 60, 1, 320)
    assert (
        same["of_in_process"] > 0
        and distinct["in_process_tok_s"] > 0
        and same["tok_s"] == pytest.approx(5 * same["requests_s"])
    )
    for case in (one, burst):
        parts = [case[f"{name}_ms"]["p50"] for name in ("in", "engine", "out", "added")]
        assert min(parts) > 0 and case["ttft_ms"]["p50"] > case["engine_ms"]["p50"] * 0.5
    assert "added by the server" in result.stdout
