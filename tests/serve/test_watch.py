"""The live page and its feed: what it shows, that it is bounded, and that watching costs nobody
anything."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from octavo.serve.endpoints.live_feed import WatchEndpoint, Watcher
from octavo.serve.endpoints.live_page import FOLDER, PAGE
from octavo.serve.front.front import Caller, Front
from octavo.serve.limits import Limits
from octavo.serve.serve_config import ServeConfig
from tests.serve.running import ROOT, Running, check_error, http_request, raw, server

KEY = "alice-0123456789abcdef"
USER = "user-0123456789abcdef"
LONG = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True}


def watch(running: Running, **options: Any) -> ClientConnection:
    return connect(
        f"ws://127.0.0.1:{running.port}/ws/watch", open_timeout=5, max_size=2**22, **options
    )


def frames(socket: ClientConnection, seconds: float = 10) -> Iterator[dict[str, Any]]:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        yield json.loads(socket.recv(timeout=left))
    raise AssertionError("what was waited for never came")


def views(socket: ClientConnection, seconds: float = 10) -> Iterator[dict[str, Any]]:
    return (frame["view"] for frame in frames(socket, seconds) if frame["view"])


@contextlib.contextmanager
def generating(running: Running, count: int = 1, **fields: Any) -> Iterator[list[threading.Thread]]:
    """Requests that run meanwhile, and are waited for."""
    threads = [
        threading.Thread(target=running.post, args=("/v1/completions", LONG | fields))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(60)


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGE)
def test_the_page_is_served_with_headers_that_keep_it_to_itself(
    running: Running, path: str
) -> None:
    reply = running.get(path)
    kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
    assert reply.status_code == 200 and reply.headers["content-type"] == f"{kind}; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
    )
    assert (
        policy["default-src"] == "'none'"
        and policy["script-src"] == "'self'"
        and policy["style-src"] == "'self'"
    )
    assert policy["frame-ancestors"] == "'none'"
    assert (
        reply.headers["cache-control"] == "no-cache"
        and reply.headers["x-content-type-options"] == "nosniff"
    )
    assert (
        reply.content
        == (FOLDER / ("index.html" if path == "/" else path.removeprefix("/web/"))).read_bytes()
    )


def test_the_page_needs_nothing_from_elsewhere_and_has_nothing_inline() -> None:
    html, scripts = PAGE["/"][0].decode(), [file.read_text() for file in FOLDER.glob("*.js")]
    for text in (html, *scripts, (FOLDER / "page.css").read_text()):
        assert not re.search(r"https?://|@import|\burl\(", text)
        named = re.findall(r"[\"'](/web/[\w.]+)[\"']", text)
        assert set(named) <= PAGE.keys()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html), (
        "the policy would block it"
    )
    assert not any(
        "innerHTML" in text or "eval(" in text or 'setAttribute("style' in text for text in scripts
    )


def test_scripts_name_only_what_the_page_has() -> None:
    ids = set(re.findall(r'\sid="([\w-]+)"', PAGE["/"][0].decode()))
    scripts = "".join(file.read_text() for file in FOLDER.glob("*.js"))
    named = set(re.findall(r'(?:getElementById|\$)\("([\w-]+)"\)', scripts))
    assert len(named) > 20 and named <= ids


def test_the_package_contains_the_page() -> None:
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["octavo"]
    packed = {file for pattern in data for file in (ROOT / "octavo").glob(pattern)}
    assert set(FOLDER.iterdir()) <= packed and len(PAGE) == len(list(FOLDER.iterdir()))


# ---- the feed ------------------------------------------------------------------------------------


def test_a_frame_is_a_whole_picture(running: Running) -> None:
    with watch(running) as socket, generating(running, 3, n=2):
        # until the picture and the metrics agree: a newer heartbeat may have come with an older
        # view
        for frame in frames(socket):
            view, heartbeat = frame["view"], frame["heartbeat"]
            if view and view["decoding"] >= 4:
                used, cached = sum(view["used"]), sum(view["cached"])
                if (used, cached) == (heartbeat["blocks_used"], heartbeat["blocks_cached"]):
                    break
        assert set(frame) == {"gap", "time", "server", "model", "numbers", "heartbeat", "view"}
        assert frame["server"]["state"] == "ready" and frame["server"]["name"] == "tiny"
        model = frame["model"]
        assert used + cached + heartbeat["blocks_free"] == model["num_blocks"]
        assert (
            len(view["used"])
            == len(view["owner"])
            == len(view["cached"])
            == -(-model["num_blocks"] // view["blocks"])
        )
        ids = {sequence[0] for sequence in view["sequences"]}
        assert all(
            owner in ids for cell, owner in zip(view["used"], view["owner"], strict=True) if cell
        )
        id, request, _, state, prompt, said, limit, computed, _, blocks, preemptions, why = view[
            "sequences"
        ][0]
        assert (
            id in ids
            and request.startswith("req_")
            and state == "decode"
            and prompt == 5
            and limit == 905
        )
        assert (
            computed in (prompt + said - 1, prompt + said)
            and 16 * blocks >= computed
            and preemptions == 0
            and why == ""
        )


def test_steps_events_and_ends_are_sent_once_each(running: Running) -> None:
    with watch(running) as socket:
        # What other requests did has been sent.
        next(view for view in views(socket) if not view["steps"] and not view["ended"])
        with generating(running, 2, max_tokens=20):
            events, ended, steps = [], [], []
            for view in views(socket):
                steps += view["steps"]
                events += view["events"]
                ended += [(entry[0], entry[2]) for entry in view["ended"]]
                if len(ended) == 2:
                    break
    requests = sorted(request for request, _ in ended)
    assert {reason for _, reason in ended} == {"length"}
    for kind in ("arrived", "admitted", "done"):
        assert sorted(event[3] for event in events if event[2] == kind) == requests
    assert [event[0] for event in events] == sorted({event[0] for event in events})
    numbers = [step[0] for step in steps]
    assert numbers == sorted(set(numbers)) and sum(step[2] for step in steps) == 10, (
        "two prompts of five tokens"
    )
    assert all(step[8] > 0 for step in steps[:-1])


def test_no_text_and_no_token_goes_out(running: Running) -> None:
    secret = "xyzzy-plugh-" * 4
    ids = running.post("/tokenize", {"prompt": secret}).json()["tokens"]
    tokens = ",".join(map(str, ids[4:8]))
    with watch(running) as socket, generating(running, prompt=secret, cache_salt="hush-hush"):
        texts = [socket.recv(timeout=5) for _ in range(6)]
    assert any(str(len(ids)) in text and "decode" in text for text in texts), "it was seen running"
    assert not any(
        "xyzzy" in text or "hush" in text or tokens in text.replace(" ", "") for text in texts
    )


def test_nothing_is_asked_of_the_engine_while_nobody_watches(running: Running) -> None:
    def steps() -> float:
        return running.metrics()["octavo:engine_steps_total"]

    with watch(running) as socket:
        for _, _ in zip(range(3), views(socket), strict=False):
            pass
        before = steps()
        for _, _ in zip(range(3), views(socket), strict=False):
            pass
        assert steps() == before, "looking makes no step of its own"


def test_frames_come_about_five_times_a_second(running: Running) -> None:
    with watch(running) as socket, generating(running, 2):
        socket.recv(timeout=5)
        begun, times = time.monotonic(), []
        while time.monotonic() - begun < 2:
            times.append(json.loads(socket.recv(timeout=5))["time"])
    assert 4 <= len(times) <= 11
    assert all(b - a >= 0.19 for a, b in pairwise(times))


def test_who_is_slow_gets_the_latest_and_how_many_it_missed() -> None:
    async def run() -> list[dict[str, Any]]:
        watcher = Watcher()
        for i in range(5):
            watcher.offer(b'{"n":%d}' % i)
        first = await watcher.take()
        watcher.offer(b'{"n":5}')
        return [json.loads(first), json.loads(await watcher.take())]

    assert asyncio.run(run()) == [{"gap": 4, "n": 4}, {"gap": 0, "n": 5}]


def test_a_watcher_that_reads_nothing_holds_up_nobody_and_is_left() -> None:
    """Its connection is full: what is sent to it never goes out."""

    async def run() -> tuple[list[int], float, int]:
        endpoint = WatchEndpoint(Front(ServeConfig(limits=Limits(send_seconds=0.7))))
        gaps: list[int] = []

        async def connection(full: bool) -> None:
            messages = iter([{"type": "websocket.connect"}])

            async def receive() -> Any:
                return next(messages, None) or await asyncio.Event().wait()

            async def send(message: Any) -> None:
                if message["type"] == "websocket.send":
                    if full:
                        await asyncio.Event().wait()
                    gaps.append(json.loads(message["text"])["gap"])

            await endpoint(
                {"type": "websocket", "subprotocols": [], "octavo.caller": Caller()}, receive, send
            )

        begun = time.monotonic()
        reading = asyncio.create_task(connection(full=False))
        await connection(full=True)
        left, watching = time.monotonic() - begun, len(endpoint.watchers)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not endpoint.watchers
        return gaps, left, watching

    gaps, seconds, watching = asyncio.run(run())
    assert gaps == [0] * len(gaps) and len(gaps) >= 3 and 0.6 < seconds < 3 and watching == 1


def test_watchers_are_bounded(running: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(watch(running))
        with pytest.raises(InvalidStatus) as refused, watch(running):
            pass
        assert refused.value.response.status_code == 429
    time.sleep(0.2)
    with watch(running) as socket:
        assert json.loads(socket.recv(timeout=5))["numbers"]["watchers"] == 1


# ---- who may watch -------------------------------------------------------------------------------


def test_a_page_of_another_origin_may_not_watch(running: Running) -> None:
    with pytest.raises(InvalidStatus) as refused, watch(running, origin="https://evil.com"):  # type: ignore[arg-type]
        pass
    assert refused.value.response.status_code == 403
    with watch(running, origin=f"http://127.0.0.1:{running.port}") as socket:  # type: ignore[arg-type]
        assert json.loads(socket.recv(timeout=5))["gap"] == 0
    upgrade = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {'A' * 22}==",
    ]
    reply = raw(
        running.port, http_request("/ws/watch", b"", *upgrade, method="GET", host="evil.com"), 2
    )
    assert reply.startswith(b"HTTP/1.1 421")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys.toml").write_text(
        f'[[keys]]\nname = "alice"\nkey = "{KEY}"\nadmin = true\n[[keys]]\nname = "bob"\nkey = "{USER}"\n'
    )
    with server(folder, keys_file=str(folder / "keys.toml")) as found:
        yield found


def offer(key: str) -> list[Any]:
    return [
        "octavo-watch",
        "octavo-key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("="),
    ]


def test_with_keys_the_page_is_open_and_shows_nothing(locked: Running) -> None:
    for path in PAGE:
        reply = locked.get(path)
        assert reply.status_code == 200 and "tiny" not in reply.text
    check_error(locked.get("/web/nothing.js"), 401)
    for options in ({}, {"subprotocols": ["octavo-watch"]}, {"subprotocols": offer("wrong-0123456789abcdef")},
                    {"subprotocols": ["octavo-watch", "octavo-key.%%%"]}):  # fmt: skip
        with pytest.raises((InvalidStatus, Exception)) as refused, watch(locked, **options):
            pass
        assert refused.value.response.status_code == 401  # type: ignore[union-attr]
    with (
        watch(locked, subprotocols=offer(USER)) as socket,
        pytest.raises(ConnectionClosed) as closed,
    ):
        socket.recv(timeout=5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 4403, (
        "others' requests are not for every key"
    )
    reply = raw(
        locked.port, http_request(f"/ws/watch?key={KEY}", b"", "Connection: close", method="GET")
    )
    assert reply.startswith(b"HTTP/1.1 401"), "a key in the URL opens nothing"


def test_a_browser_sends_its_key_as_a_subprotocol(locked: Running) -> None:
    with watch(locked, subprotocols=offer(KEY)) as socket:
        assert socket.subprotocol == "octavo-watch", "the key does not come back"
        assert json.loads(socket.recv(timeout=5))["server"]["state"] == "ready"
    with watch(locked, additional_headers={"authorization": f"Bearer {KEY}"}) as socket:
        assert json.loads(socket.recv(timeout=5))["server"]["state"] == "ready"
    assert KEY not in locked.log.read_text() and offer(KEY)[1] not in locked.log.read_text()


# ---- an engine that comes and goes ---------------------------------------------------------------


def test_watching_goes_on_while_the_engine_starts_and_dies_and_starts_again(tmp_path: Path) -> None:
    with server(tmp_path, ready=False) as one, watch(one) as socket:
        phases = []
        for frame in frames(socket, 60):
            phases.append(frame["server"]["phase"])
            if frame["view"]:
                break
            assert frame["server"]["state"] in ("starting", "ready")
        assert phases[0] != "ready" and phases[-1] == "ready"
        os.kill(one.engines()[0], signal.SIGKILL)
        states = []
        for frame in frames(socket, 60):
            states.append(frame["server"]["state"])
            if frame["view"] and frame["server"]["starts"] == 2:
                break
        assert "restarting" in states
        begun = time.monotonic()
        assert one.stop() == 0 and time.monotonic() - begun < 5, "who watches holds up no shutdown"


def test_how_many_may_watch_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from octavo.cli import app

    configs: list[ServeConfig] = []
    monkeypatch.setattr("octavo.serve.server.run", lambda config, say: configs.append(config))
    for arguments in ([], ["--max-watchers", "2"]):
        assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    assert [config.limits.watchers for config in configs] == [8, 2]
    assert CliRunner().invoke(app, ["serve", "--max-watchers", "-1"]).exit_code == 2
