"""`octavo replay`: the page with a recording, from a small server or as one file."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.core.event_recorder import EventRecorder
from octavo.core.event_stream import EventStream
from octavo.params import SamplingParams
from octavo.replay_server import ReplayServer
from octavo.types import Request
from octavo.web_page import page_files, single_file
from tests.workloads import make_engine


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("replay") / "events.jsonl"
    engine = make_engine(20, 4, slots=3, budget=8, depth=1)
    EventStream(engine).open(EventRecorder(file))
    for index in range(4):
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        engine.add(Request(f"<r{index}>", list(range(1, 9)), params))
    while not engine.idle:
        engine.step()
    return file


@pytest.fixture
def served(recording: Path) -> Iterator[ReplayServer]:
    answers = {"/what-if": lambda body: json.dumps({"got": body.decode()}).encode()}
    server = ReplayServer([recording.read_bytes()], 0, answers=answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server: ReplayServer, path: str, method: str = "GET", **options: Any) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, **options)
    reply = connection.getresponse()
    policy = reply.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    return reply.status, reply.read()


def test_the_page_loads_the_recording(served: ReplayServer, recording: Path) -> None:
    status, page = ask(served, "/")
    assert status == 200 and b'data-source="recording"' in page
    assert ask(served, "/recording-0") == (200, recording.read_bytes())
    for path in page_files().keys() - {"/"}:
        assert ask(served, path)[0] == 200
    assert ask(served, "/../pyproject.toml")[0] == 404


def test_other_hosts_and_origins_are_refused(served: ReplayServer) -> None:
    assert ask(served, "/recording-0", headers={"Host": "evil.example"})[0] == 404
    body = b"{}"
    assert ask(served, "/what-if", "POST", body=body)[0] == 200
    foreign = {"Origin": "http://evil.example"}
    assert ask(served, "/what-if", "POST", body=body, headers=foreign)[0] == 404


def test_a_recording_becomes_one_file_that_loads_nothing(recording: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.html"
    done = CliRunner().invoke(app, ["replay", str(recording), "--export", str(target)])
    assert done.exit_code == 0, done.output
    page = target.read_text()
    packed = re.search(r'id="recording-0">([^<]*)</script>', page)
    assert packed is not None
    assert gzip.decompress(base64.b64decode(packed[1])) == recording.read_bytes()
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!data:)', page), "nothing is loaded"
    imports = json.loads(re.search(r'"importmap">(.*?)</script>', page, re.DOTALL)[1])["imports"]  # type: ignore[index]
    scripts = [base64.b64decode(address.partition(",")[2]).decode() for address in imports.values()]
    named = {name for script in scripts for name in re.findall(r'\bfrom "([^"]+)";', script)}
    assert named and named <= imports.keys() and len(imports) > 10


def test_a_lesson_cannot_end_its_script() -> None:
    page = single_file([b""], lesson='{"a": "</script><script>alert(1)"}')
    assert "<script>alert" not in page


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("nothing\n")
    for name in ("file", "missing"):
        done = CliRunner().invoke(app, ["replay", str(tmp_path / name)])
        assert done.exit_code == 2 and "--record-events" in done.output
