"""The live page in a real browser, where there is one: Debian's chromium, driven over its DevTools
protocol."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.serve.running import server
from tests.serve.test_watch import generating

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


class Tab:
    def __init__(self, socket: ClientConnection):
        self.socket, self.calls = socket, 0
        self.errors: list[Any] = []  # exceptions, and what the policy blocked
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self.calls += 1
        self.socket.send(json.dumps({"id": self.calls, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=20))
            if message.get("id") == self.calls:
                return message["result"]
            if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(message["params"])

    def ask(self, code: str) -> Any:
        return self.call("Runtime.evaluate", expression=code, returnByValue=True)["result"].get(
            "value"
        )

    def wait(self, code: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.ask(code):
            assert time.monotonic() < end, (code, self.ask("document.body.innerText"), self.errors)
            time.sleep(0.05)


@contextlib.contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    assert CHROMIUM is not None
    argv = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
    ]
    browser = subprocess.Popen(
        [*argv, "about:blank"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert browser.stderr is not None
        port = (
            next(line for line in browser.stderr if "DevTools listening" in line)
            .split(":")[2]
            .split("/")[0]
        )
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        with connect(
            next(p for p in pages if p["type"] == "page")["webSocketDebuggerUrl"], max_size=None
        ) as socket:
            yield Tab(socket)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


def status(words: str) -> str:
    return f"document.getElementById('status-text').textContent.includes({words!r})"


def type_in(id: str, text: str) -> str:
    return f"document.getElementById({id!r}).value = {text!r}"


def test_a_prompt_is_watched_and_the_page_comes_back_after_the_engine(tmp_path: Path) -> None:
    with server(tmp_path) as running, tab(tmp_path / "browser") as page:
        page.call("Page.navigate", url=running.url)
        page.wait(status("ready"))
        page.ask(f"{type_in('prompt', 'hello there')}; document.getElementById('send').click()")
        page.wait("document.querySelectorAll('#rows tr.mine').length")
        page.wait("document.getElementById('log').innerText.includes('admitted')")
        page.wait("document.getElementById('reply').textContent.length > 0")
        with generating(running):
            page.wait("document.querySelectorAll('#rows .state.decode').length")
            page.wait("/[1-9][0-9]* blocks used/.test(document.getElementById('pool').ariaLabel)")
            os.kill(running.engines()[0], signal.SIGKILL)
            page.wait(status("engine restarting"))
            page.wait("document.querySelectorAll('#rows .state.failed').length")
        page.wait(status("ready"))
        assert page.errors == []


def test_the_page_asks_for_a_key_and_sends_it_with_everything(tmp_path: Path) -> None:
    keys = '[[keys]]\nname = "alice"\nkey = "alice-0123456789abcdef"\nadmin = true\n'
    keys += '[[keys]]\nname = "bob"\nkey = "bob-0123456789abcdef"\n'
    (tmp_path / "keys.toml").write_text(keys)
    with (
        server(tmp_path, keys_file=str(tmp_path / "keys.toml")) as running,
        tab(tmp_path / "browser") as page,
    ):
        page.call("Page.navigate", url=running.url)
        asks = "document.getElementById('ask-why').textContent.includes({!r})".format
        for key, then in (
            ("wrong-0123456789abcdef", asks("does not accept this key")),
            ("bob-0123456789abcdef", asks("requires an administrator")),
            ("alice-0123456789abcdef", status("ready")),
        ):
            page.wait("document.getElementById('ask').open")
            page.ask(f"{type_in('key', key)}; document.querySelector('#ask button').click()")
            page.wait(then)
        page.ask(f"{type_in('max-tokens', '5')}; document.getElementById('send').click()")
        page.wait("document.getElementById('facts').textContent.includes('finish reason: ')")
        assert all("401" in str(error) for error in page.errors), (
            "but for the two refusals there is nothing"
        )
        assert "alice-0123456789abcdef" not in running.log.read_text()
