"""`octavo chat --url`: the same conversation with a server, and what is said when the server cannot
answer."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import Result

pytest.importorskip("starlette")

from octavo.cli.chat_command import Chat
from octavo.cli.options import SamplingOptions
from octavo.cli.remote_backend import RemoteBackend, ServerError
from tests.cli.test_chat import GREEDY, Terminal
from tests.serve.running import NAME, Running, free_port, server

Octavo = Callable[..., Result]


@pytest.fixture(scope="module")
def serving(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server(tmp_path_factory.mktemp("remote"), model=tiny) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with keys: one may ask once a minute."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.toml").write_text(
        '[[keys]]\nname = "a"\nkey = "open-sesame-open"\n'
        '[[keys]]\nname = "b"\nkey = "once-a-minute-key"\nrequests_per_minute = 1\n'
    )
    with server(folder, model=tiny, keys_file=str(folder / "keys.toml")) as found:
        yield found


def test_a_server_says_what_the_model_says_here(
    octavo: Octavo, tiny: str, serving: Running
) -> None:
    lines = "Hi\nMore\n/system Be brief.\nHi\n/history\n/reset\n/history\nHi\n"
    local, remote = (
        octavo("chat", tiny, *GREEDY, stdin=lines),
        octavo("chat", "--url", serving.url, *GREEDY, stdin=lines),
    )
    assert (remote.exit_code, remote.stdout) == (0, local.stdout)
    assert remote.stderr.startswith(
        f"{NAME} at {serving.url}, context 1K; type /help for help, or Ctrl-D to leave\n"
    )


@pytest.mark.parametrize("form", ["{}/v1", "{}/", "{}/v1/"])
def test_an_address_may_be_written_in_several_ways(
    octavo: Octavo, serving: Running, form: str
) -> None:
    assert octavo("chat", NAME, "--url", form.format(serving.url)).exit_code == 0
    assert octavo("chat", "--url", form.format(serving.url.removeprefix("http://"))).exit_code == 0


def test_seeds_are_heard(octavo: Octavo, serving: Running) -> None:
    def talk(seed: int) -> str:
        args = ("--temperature", 1, "--max-tokens", 20, "--seed", seed)
        return octavo("chat", "--url", serving.url, *args, stdin="Hi\n/reset\nHi\n").stdout

    assert talk(1) == talk(1) != talk(2)
    first, second = talk(1).splitlines()
    assert first != second


def test_stats(octavo: Octavo, serving: Running) -> None:
    said = "Hello there, my friend\n/reset\nHello there, my friend\n/stats\n"
    out = octavo("chat", "--url", serving.url, *GREEDY, "--seed", 7, stdin=said).stdout
    found = dict(
        re.findall(r"^(speed|last reply|prompt|KV blocks|sampling) +(.*)$", out, re.MULTILINE)
    )
    assert re.fullmatch(r"[\d.]+ tokens/s, first token after \d+ ms", found["speed"])
    assert found["last reply"].startswith("8 tokens in ") and found["prompt"].startswith(
        "41 tokens, 32 of them cached"
    )
    assert re.fullmatch(r"\d+ used, \d+ cached, \d+ free", found["KV blocks"])
    assert found["sampling"] == "temperature 0, top_p 0.9, seed 7"


def test_the_oldest_exchanges_go_when_the_context_is_full(octavo: Octavo, serving: Running) -> None:
    lines = [f"message number {i}, of some length: {'x' * 80}" for i in range(9)]
    result = octavo("chat", "--url", serving.url, *GREEDY, stdin="\n".join([*lines, "/history"]))
    assert result.exit_code == 0 and "error" not in result.stderr
    assert re.search(
        r"\(the context of 1,024 tokens is full: the oldest \d+ of \d+ exchanges were dropped\)",
        result.stderr,
    )
    too_long = octavo("chat", "--url", serving.url, *GREEDY, stdin=f"{'x' * 2000}\nHi\n")
    assert (
        "the server answers with status 400: the prompt has" in too_long.stderr
        or "with this message the prompt has" in too_long.stderr
    )
    assert too_long.exit_code == 0 and len(too_long.stdout.splitlines()) == 1, (
        "the next message is answered"
    )


# ---- when it cannot answer -----------------------------------------------------------------------


def test_no_server_answers(octavo: Octavo) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = octavo("chat", "--url", url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        result.stderr
        == f"error: no server answers at {url} (Connection refused): start one with `octavo serve`\n"
    )


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://127.0.0.1", "http://127.0.0.1:port", "http:///v1"]
)
def test_no_address(octavo: Octavo, url: str) -> None:
    result = octavo("chat", "--url", url)
    assert (
        result.exit_code == 2
        and "is not the address of a server: give one such as http://127.0.0.1:8000"
        in result.stderr
    )


def test_another_kind_of_server(octavo: Octavo) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        result = octavo("chat", "--url", f"127.0.0.1:{other.server_port}")
        other.shutdown()
    assert (
        result.exit_code == 2
        and "does not answer like an OpenAI-compatible server" in result.stderr
    )


def test_a_server_that_is_loading(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    with server(tmp_path, ready=False, model=tiny, program="tests.serve.late_engine") as starting:
        result = octavo("chat", "--url", starting.url)
        assert result.exit_code == 2
        assert re.fullmatch(
            r"error: the server is not ready: starting \(\w+.*\)\. Try again soon\n", result.stderr
        )


def test_keys(octavo: Octavo, guarded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    none = octavo("chat", "--url", guarded.url)
    assert (
        none.stderr
        == f"error: {guarded.url} needs an API key: give --api-key, or set OCTAVO_API_KEY\n"
    )
    wrong = octavo("chat", "--url", guarded.url, "--api-key", "guessed-at-random")
    assert wrong.stderr == f"error: {guarded.url} does not accept this API key\n"
    assert none.exit_code == wrong.exit_code == 2
    assert octavo(
        "chat", "--url", guarded.url, "--api-key", "open-sesame-open", *GREEDY, stdin="Hi\n"
    ).stdout
    monkeypatch.setenv("OCTAVO_API_KEY", "open-sesame-open")
    assert octavo("chat", "--url", guarded.url, *GREEDY, stdin="Hi\n").stdout


def test_a_busy_server_is_told_of_and_the_conversation_goes_on(
    octavo: Octavo, guarded: Running
) -> None:
    result = octavo(
        "chat",
        "--url",
        guarded.url,
        "--api-key",
        "once-a-minute-key",
        *GREEDY,
        stdin="Hi\nMore\n/history\n",
    )
    assert re.search(r"error: the server is busy, try again in \d+ s: ", result.stderr)
    assert re.fullmatch(r"(\w+)\nuser: Hi\nassistant: \1\n", result.stdout), (
        "the second message is taken back"
    )


def test_a_model_that_the_server_does_not_have(octavo: Octavo, serving: Running) -> None:
    result = octavo("chat", "other", "--url", serving.url)
    assert result.exit_code == 2 and f"has no model other: it has {NAME}" in result.stderr


def test_options_of_a_model_that_is_loaded_here(octavo: Octavo, serving: Running) -> None:
    result = octavo("chat", "--url", serving.url, "--max-model-len", "512")
    assert result.exit_code == 2 and "--max-model-len sets how a model is loaded" in result.stderr
    assert (
        "error: --quant sets how a model"
        in octavo("chat", "--url", serving.url, "--quant", "int8").stderr
    )


def test_a_server_that_dies_takes_the_message_back(tiny: str, tmp_path: Path) -> None:
    with server(tmp_path, model=tiny) as mortal:
        talk = Chat(
            RemoteBackend(mortal.url, None, None, 1), SamplingOptions(temperature=0, max_tokens=900)
        )
        prompt, _ = talk.make_room("Hi")
        with pytest.raises(ServerError, match="closed the connection|does not answer"):
            for _ in talk.reply("Hi", prompt):
                mortal.process.send_signal(signal.SIGKILL)
        assert talk.turns == []


# ---- stopping ------------------------------------------------------------------------------------


def settled(running: Running) -> None:
    deadline = time.monotonic() + 10
    while running.metrics()["octavo:num_requests_open"]:
        assert time.monotonic() < deadline, "the server still works on it"
        time.sleep(0.02)


def test_stopping_closes_the_stream_and_keeps_what_was_said(serving: Running) -> None:
    talk = Chat(
        RemoteBackend(serving.url, None, None, 1), SamplingOptions(temperature=0, max_tokens=900)
    )
    for _ in range(2):
        prompt, _ = talk.make_room("Hi")
        said = ""
        for _, text in talk.reply("Hi", prompt):
            said += text
            if len(said) >= 20:
                talk.stop()
        assert talk.turns[-1] == ("Hi", said.strip()) and 20 <= len(said) < 60
        settled(serving)


def test_ctrl_c_at_a_terminal(serving: Running) -> None:
    program = Terminal(
        sys.executable,
        "-m",
        "octavo",
        "chat",
        "--url",
        serving.url,
        "--max-tokens",
        "900",
        "--temperature",
        "0",
    )
    try:
        program.expect("> ")
        program.send("Hi\r")
        program.expect(r"[A-Za-z]{20}")
        program.send("\x03")
        program.expect(r"\(stopped\)")
        settled(serving)
        program.expect("> ")
        program.send("/history\r")
        program.expect(r"assistant: [A-Za-z]{20}")
        program.expect("> ")
        program.send("\x04")
        assert program.exit_code() == 0
    finally:
        program.close()
