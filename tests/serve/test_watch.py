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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from octavo.core.event_recorder import read_recording
from octavo.serve.api.api_errors import ApiError
from octavo.serve.channel.messages import WatchEvents
from octavo.serve.endpoints import live_controls, live_feed
from octavo.serve.endpoints.live_feed import WatchEndpoint
from octavo.serve.endpoints.live_page import PAGE
from octavo.serve.engine.server_sources import DECIDED_IN
from octavo.serve.front import event_buffer
from octavo.serve.front.event_buffer import EventBuffer, EventReader
from octavo.serve.front.front import Caller, Front
from octavo.serve.limits import Limits
from octavo.serve.serve_config import ServeConfig
from octavo.web_page import FOLDER
from tests.core.stream_mirror import StreamMirror
from tests.serve.running import ROOT, Running, check_error, http_request, raw, server

KEY = "alice-0123456789abcdef"
USER = "user-0123456789abcdef"
LONG = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True}


def watch(running: Running, **options: Any) -> ClientConnection:
    return connect(
        f"ws://127.0.0.1:{running.port}/ws/watch", open_timeout=5, max_size=2**22, **options
    )


def messages(socket: ClientConnection, seconds: float = 20) -> Iterator[Any]:
    """The messages of a feed: a state of the server, or a list of lines of the event stream."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        text = socket.recv(timeout=left)
        yield json.loads(text) if text[0] == "{" else list(map(json.loads, text.splitlines()))
    raise AssertionError("what was waited for never came")


def lines(socket: ClientConnection, seconds: float = 20) -> Iterator[list[Any]]:
    for message in messages(socket, seconds):
        if isinstance(message, list):
            yield from message


def states(socket: ClientConnection, seconds: float = 20) -> Iterator[dict[str, Any]]:
    return (message for message in messages(socket, seconds) if isinstance(message, dict))


def caught_up(socket: ClientConnection) -> list[list[Any]]:
    """What an idle server has kept for pages that are opened late."""
    seen: list[list[Any]] = []
    with contextlib.suppress(TimeoutError):
        while True:
            text = socket.recv(timeout=0.4 if seen else 20)
            seen += map(json.loads, text.splitlines() if text[0] == "[" else ())
    return seen


def until(found: Iterator[list[Any]], kind: str, count: int = 1) -> list[list[Any]]:
    """Lines up to the `count`-th one of a kind."""
    seen = []
    for line in found:
        seen.append(line)
        count -= line[0] == kind
        if not count:
            return seen
    raise AssertionError


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
    name = "index.html" if path == "/" else path.removeprefix("/web/")
    if name != "single-file.html":  # It is made of the others.
        assert reply.content == (FOLDER / name).read_bytes()


def test_the_page_needs_nothing_from_elsewhere_and_has_nothing_inline() -> None:
    html, scripts = PAGE["/"][0].decode(), [file.read_text() for file in FOLDER.glob("*.js")]
    for text in (html, *scripts, (FOLDER / "page.css").read_text()):
        assert not re.search(r"https?://|@import|\burl\(", text)
        for name in re.findall(r"[\"']\./(?:web/)?([\w-]+\.(?:js|css))[\"']", text):
            assert f"/web/{name}" in PAGE
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html), (
        "the policy would block it"
    )
    assert not any(
        "innerHTML" in text or "eval(" in text or 'setAttribute("style' in text for text in scripts
    )


def test_scripts_name_only_what_the_page_has() -> None:
    ids = set(re.findall(r'\sid="([\w-]+)"', PAGE["/"][0].decode()))
    scripts = "".join(file.read_text() for file in FOLDER.glob("*.js"))
    named = set(re.findall(r'(?:byId|\$)\("([\w-]+)"\)', scripts))
    optional = {"recording-0", "lesson-text"}  # A page with a recording inside has them.
    assert len(named) > 20 and named <= ids | optional


def test_the_package_contains_the_page() -> None:
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["octavo"]
    packed = {file for pattern in data for file in (ROOT / "octavo").glob(pattern)}
    assert set(FOLDER.iterdir()) <= packed and len(PAGE) == 1 + len(list(FOLDER.iterdir()))


# ---- the feed ------------------------------------------------------------------------------------


def test_a_feed_begins_with_the_whole_state(running: Running) -> None:
    with generating(running, 2, n=2, max_tokens=200), watch(running) as socket:
        state = next(states(socket))
        assert set(state) == {"server", "model", "watchers", "has_kept_lines"}
        assert state["server"]["state"] == "ready" and state["server"]["name"] == "tiny"
        found = lines(socket)
        mirror = StreamMirror(next(line for line in found if line[0] == "snapshot"))
        assert mirror.about["num_blocks"] == state["model"]["num_blocks"]
        for line in found:
            if line[0] != "snapshot":
                mirror.apply(line)
            if mirror.kinds["finished"] and not mirror.states:
                break


def test_every_event_of_a_request_is_sent_once_and_in_order(running: Running) -> None:
    with watch(running) as socket:
        caught_up(socket)
        with generating(running, 2, max_tokens=20):
            seen = until(lines(socket), "finished", count=2)
    arrived = [line[6] for line in seen if line[0] == "arrived"]
    assert len(arrived) == 2 and all(request.startswith("req_") for request in arrived)
    sequences = [line[4] for line in seen if line[0] == "arrived"]
    for kind in ("admitted", "finished"):
        assert sorted(line[4] for line in seen if line[0] == kind) == sorted(sequences)
    numbers = [line[1] for line in seen if line[0] != "snapshot"]
    assert numbers == sorted(set(numbers))
    chunks = [chunk for line in seen if line[0] == "planned" for chunk in line[5]]
    assert sum(chunk[2] for chunk in chunks) == 10, "two prompts of five tokens"


def test_a_late_viewer_gets_what_an_early_one_got(running: Running) -> None:
    with watch(running) as early:
        first = caught_up(early)
        with generating(running, 2, max_tokens=20):
            pass
        first += caught_up(early)
        with watch(running) as late:
            seen = caught_up(late)
    assert seen == first and sum(line[0] == "finished" for line in seen) >= 2


def test_a_refusal_is_shown_without_what_was_refused(running: Running) -> None:
    with watch(running) as socket:
        caught_up(socket)
        secret = {"prompt": "xyzzy", "max_tokens": 4, "temperature": "xyzzy-plugh"}
        reply = running.post("/v1/completions", secret)
        assert reply.status_code == 400
        refused = until(lines(socket), "refused")[-1]
    assert refused[4] == reply.headers["x-octavo-request-id"]
    assert refused[5].startswith("400 ") and "xyzzy" not in refused[5]


def test_the_numbers_of_a_refusal_and_its_source_are_shown(running: Running) -> None:
    with watch(running) as socket:
        about = caught_up(socket)[0][4]
        running.post("/v1/completions", {"prompt": "xyzzy " * 3000, "max_tokens": 4})
        refused = until(lines(socket), "refused")[-1]
    context = f"the context holds {about['max_model_len']}"
    assert refused[5].startswith("400 context_length_exceeded: ") and context in refused[5]
    assert "xyzzy" not in refused[5]
    assert set(about["server_sources"]) == set(DECIDED_IN), "each statement is found in the source"
    for key, source in about["server_sources"].items():
        line = (ROOT / source["path"]).read_text().splitlines()[source["line"] - 1]
        assert DECIDED_IN[key][1] in line and line.strip() in source["code"]


def test_no_text_and_no_token_goes_out(running: Running) -> None:
    secret = "xyzzy-plugh-" * 4
    ids = running.post("/tokenize", {"prompt": secret}).json()["tokens"]
    tokens = ",".join(map(str, ids[4:8]))
    with watch(running) as socket:
        caught_up(socket)
        with generating(running, prompt=secret, cache_salt="hush-hush", max_tokens=40):
            seen = until(lines(socket), "finished")
    text = json.dumps(seen)
    assert f", {len(ids)}, " in text, "it was seen"
    assert "xyzzy" not in text and "hush" not in text and tokens not in text.replace(" ", "")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that shows text, records its events, and has controls."""
    folder = tmp_path_factory.mktemp("shown")
    engine = {"show_text": True, "record_events": str(folder / "events.jsonl"), "depth": 1}
    with server(folder, engine=engine, live_controls=True) as found:
        yield found


def test_text_goes_out_if_the_server_was_asked_to_show_it(shown: Running) -> None:
    with watch(shown) as socket:
        found = lines(socket)
        until(found, "snapshot")
        shown.complete(prompt="xyzzy plugh", max_tokens=4)
        seen = until(found, "finished")
    arrived = next(line for line in seen if line[0] == "arrived")
    assert arrived[-1] == "xyzzy plugh"
    assert any(line[-1] for line in seen if line[0] == "landed"), "the reply"
    recorded = [
        json.loads(line) for line in read_recording(shown.log.parent / "events.jsonl").splitlines()
    ]
    assert [line for line in recorded if line[0] != "snapshot"][: len(seen)] == [
        line for line in seen if line[0] != "snapshot"
    ], "a recording has the same lines"


def test_settings_of_the_running_engine_can_be_changed(shown: Running, running: Running) -> None:
    with watch(shown) as socket:
        caught_up(socket)
        changes = {"policy": "shortest", "block_limit": 400}
        assert shown.post("/live/settings", changes).json() == {"changed": changes}
        assert until(lines(socket), "settings")[-1][4]["policy"] == "shortest"
    check_error(shown.post("/live/settings", {"policy": "lifo"}), 400, code="invalid_setting")
    check_error(shown.post("/live/settings", {"seed": 1}), 400, param="seed")
    foreign = {"Origin": "https://evil.example"}
    check_error(shown.post("/live/settings", changes, headers=foreign), 403, code="wrong_origin")
    for path in ("/live/settings", "/live/crash", "/live/what-if"):
        check_error(running.post(path, {}), 403, code="no_live_controls")


def test_a_second_change_of_settings_at_the_same_time_is_refused() -> None:
    busy = SimpleNamespace(model="a", settings_reply=object())
    front: Any = SimpleNamespace(engine_client=busy)
    with pytest.raises(ApiError, match="other settings are being changed") as refused:
        asyncio.run(live_controls.change_settings(front, {"chunk": 1}))
    assert (refused.value.status, refused.value.code) == (409, "settings_busy")


def test_what_the_page_has_seen_can_be_simulated_otherwise(shown: Running) -> None:
    with watch(shown) as socket:
        caught_up(socket)
        with generating(shown, 4, max_tokens=30):
            pass
        caught_up(socket)
        result = shown.post("/live/what-if", {"policy": "priority"}).json()
        assert "finished" in result["changed"] and result["changes"] == {"policy": "priority"}
        assert "message" in shown.post("/live/what-if", {"policy": "lifo"}).json()


def test_a_crash_on_request_is_survived(shown: Running) -> None:
    before = shown.engines()
    assert shown.post("/live/crash", {}).json() == {"crashed": True}
    end = time.monotonic() + 60
    while shown.engines() in ([], before) and time.monotonic() < end:
        time.sleep(0.05)
    shown.wait()
    assert shown.complete(max_tokens=2)["choices"]


def test_nothing_is_asked_of_the_engine_while_nobody_watches(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps() -> float:
        return running.metrics()["octavo:engine_steps_total"]

    with watch(running) as socket:
        until(lines(socket), "snapshot")
        before = steps()
        time.sleep(0.5)
        assert steps() == before, "watching makes no step of its own"


def test_a_buffer_is_bounded_and_a_slow_reader_continues_at_a_snapshot() -> None:
    async def run() -> tuple[list[bytes], list[bytes], int]:
        buffer = EventBuffer(max_bytes=100)
        slow, late = EventReader(buffer), EventReader(buffer)
        buffer.add(b"lost\n", is_start=False)
        for number in range(20):
            buffer.add(b"snapshot %d\n" % number, is_start=number % 4 == 0)
            if number == 1:
                first = await slow.read()
        return [first, await slow.read()], [await late.read()], buffer.size

    slow, late, size = asyncio.run(run())
    assert slow[0] == b"snapshot 0\nsnapshot 1\n"
    assert size <= 100 and slow[1] == late[0] and late[0].startswith(b"snapshot 12\n")


def test_a_late_reader_gets_all_kept_lines_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page gets the lines in parts, whose ends are in the middle of segments."""
    monkeypatch.setattr(event_buffer, "MAX_READ_BYTES", 100)

    async def run() -> tuple[list[bytes], list[bool], bytes]:
        buffer = EventBuffer(max_bytes=2000)
        for number in range(400):
            buffer.add(b"line %d\n" % number, is_start=number % 30 == 0)
        kept = buffer.lines()
        late = EventReader(buffer)
        parts, has_all = [], [late.has_all]
        while not late.has_all:
            parts.append(await late.read())
            has_all.append(late.has_all)
            if len(parts) == 3:
                buffer.add(b"line 400\n", is_start=False)
        return parts, has_all, kept + b"line 400\n"

    parts, has_all, kept = asyncio.run(run())
    assert b"".join(parts) == kept
    assert len(kept) > 1500, "the buffer keeps as many of the latest lines as it may"
    assert len(parts) > 10 and max(map(len, parts)) < 120
    assert has_all == [False] * len(parts) + [True]


def test_a_watcher_that_reads_nothing_delays_no_other_and_is_disconnected() -> None:
    """Its connection is full: what is sent to it never goes out."""

    async def run() -> tuple[int, float, int]:
        endpoint = WatchEndpoint(Front(ServeConfig(limits=Limits(send_seconds=0.7))))
        received = 0

        async def connection(full: bool) -> None:
            queue = iter([{"type": "websocket.connect"}])

            async def receive() -> Any:
                return next(queue, None) or await asyncio.Event().wait()

            async def send(message: Any) -> None:
                nonlocal received
                if message["type"] == "websocket.send":
                    if full:
                        await asyncio.Event().wait()
                    received += 1

            await endpoint(
                {"type": "websocket", "subprotocols": [], "octavo.caller": Caller()}, receive, send
            )

        begun = time.monotonic()
        reading = asyncio.create_task(connection(full=False))
        await asyncio.sleep(0)

        async def produce() -> None:
            for number in range(100):
                endpoint.buffer.add(b"[%d]\n" % number, is_start=number == 0)
                await asyncio.sleep(0.01)

        producing = asyncio.create_task(produce())
        await connection(full=True)
        left, watching = time.monotonic() - begun, len(endpoint.watchers)
        await producing
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not endpoint.watchers
        return received, left, watching

    received, seconds, watching = asyncio.run(run())
    assert received >= 20 and 0.6 < seconds < 3 and watching == 1


def test_a_page_opened_as_the_grace_time_ends_keeps_its_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_feed, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(live_feed, "INTERVAL", 0.2)

    async def run() -> None:
        endpoint = WatchEndpoint(Front(ServeConfig()))
        sent: list[Any] = []
        monkeypatch.setattr(endpoint.front.engine_client.supervisor, "send", sent.append)
        task = asyncio.create_task(endpoint._watch_engine())
        await asyncio.sleep(0.1)  # The grace time is over, and the task sleeps.
        page: Any = object()
        endpoint.watchers.add(page)
        await asyncio.sleep(0.3)
        assert not task.done() and not sent
        endpoint.watchers.remove(page)
        await asyncio.wait_for(task, timeout=5)
        assert sent == [WatchEvents(False)]

    asyncio.run(run())


def test_a_page_gets_a_new_state_before_lines_that_follow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_feed, "INTERVAL", 60.0)
    sent: list[str] = []

    class Page:
        async def send_text(self, text: str) -> None:
            await asyncio.sleep(0.01)  # The other task may run in between.
            sent.append(text)

    async def run() -> None:
        endpoint = WatchEndpoint(Front(ServeConfig()))
        page: Any = Page()
        sender = live_feed.Sender(endpoint, page)
        tasks = [
            asyncio.create_task(sender.send_states()),
            asyncio.create_task(sender.send_lines()),
        ]
        await asyncio.sleep(0.1)
        endpoint.front.engine_client.supervisor.phase = "ready"
        endpoint.buffer.add(b"[1]\n", is_start=True)
        await asyncio.sleep(0.1)
        endpoint.buffer.add(b"[2]\n", is_start=False)
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert [text[0] for text in sent] == ["{", "{", "[", "{", "["]
    states = [json.loads(text) for text in sent if text[0] == "{"]
    assert [state["server"]["phase"] for state in states] == ["starting", "ready", "ready"]
    assert [state["has_kept_lines"] for state in states] == [False, False, True]


def test_watchers_are_bounded(running: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(watch(running))
        with pytest.raises(InvalidStatus) as refused, watch(running):
            pass
        assert refused.value.response.status_code == 429
    time.sleep(0.2)
    with watch(running) as socket:
        assert next(states(socket))["watchers"] == 1


# ---- who may watch -------------------------------------------------------------------------------


def test_a_page_of_another_origin_may_not_watch(running: Running) -> None:
    with pytest.raises(InvalidStatus) as refused, watch(running, origin="https://evil.com"):  # type: ignore[arg-type]
        pass
    assert refused.value.response.status_code == 403
    with watch(running, origin=f"http://127.0.0.1:{running.port}") as socket:  # type: ignore[arg-type]
        assert next(states(socket))["server"]["state"] == "ready"
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
        assert next(states(socket))["server"]["state"] == "ready"
    with watch(locked, additional_headers={"authorization": f"Bearer {KEY}"}) as socket:
        assert next(states(socket))["server"]["state"] == "ready"
    assert KEY not in locked.log.read_text() and offer(KEY)[1] not in locked.log.read_text()


# ---- an engine that comes and goes ---------------------------------------------------------------


def test_watching_goes_on_while_the_engine_starts_and_dies_and_starts_again(tmp_path: Path) -> None:
    with server(tmp_path, ready=False) as one, watch(one) as socket:
        found = messages(socket, 120)
        phases = []
        for message in found:
            if isinstance(message, list):
                break
            phases.append(message["server"]["phase"])
            assert message["server"]["state"] in ("starting", "ready")
        assert phases[0] != "ready" and phases[-1] == "ready"
        first = message[0][4]["stream"]
        os.kill(one.engines()[0], signal.SIGKILL)
        seen = []
        for message in found:
            if isinstance(message, list) and message[0][0] == "snapshot":
                break
            seen.append(message["server"]["state"] if isinstance(message, dict) else "lines")
        assert "restarting" in seen and message[0][4]["stream"] != first
        begun = time.monotonic()
        assert one.stop() == 0 and time.monotonic() - begun < 5, "who watches holds up no shutdown"


def test_how_many_may_watch_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from octavo.cli import app

    configs: list[ServeConfig] = []
    monkeypatch.setattr("octavo.serve.server.run", lambda config, *_: configs.append(config))
    for arguments in ([], ["--max-watchers", "2"]):
        assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    assert [config.limits.watchers for config in configs] == [8, 2]
    assert CliRunner().invoke(app, ["serve", "--max-watchers", "-1"]).exit_code == 2
