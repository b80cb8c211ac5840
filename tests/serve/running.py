"""A real server in a process of its own, on a free port of the loopback, with a tiny random
model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests import tiny

ROOT = Path(__file__).parents[2]
NAME = "tiny"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


ENGINE = {"max_model_len": 1024, "num_gpu_blocks_override": 512, "max_num_seqs": 64}


PROBE = """
import select, socket, sys, time
times = []
print("begun", flush=True)
end = time.monotonic() + 60
while (not select.select([sys.stdin], [], [], 0.005)[0] or len(times) < 20) and time.monotonic() < end:
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5) as c:
        c.sendall(b"GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
        assert c.recv(100).startswith(b"HTTP/1.1 200")
    times.append(time.monotonic() - begun)
print(*times)
"""


class Running:
    def __init__(self, process: subprocess.Popen[str], port: int, log: Path, temporary: Path):
        self.process, self.port, self.log, self.temporary = process, port, log, temporary
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **fields: Any) -> dict[str, Any]:
        reply = self.post(
            "/v1/completions", {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, **fields}
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    def left_behind(self) -> list[Path]:
        """What it put where temporary files go."""
        return list(self.temporary.glob("octavo-*"))

    def wait(self, path: str = "/readyz", seconds: float = 120) -> float:
        """Seconds until the probe says yes."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if self.get(path).status_code == 200:
                    return time.monotonic() - begun
            time.sleep(0.02)
        raise AssertionError(f"{path} never said yes:\n{self.log.read_text()[-3000:]}")

    def metrics(self) -> dict[str, float]:
        """Samples without labels but for histograms' and reasons'."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = (
                    re.sub(r'model_name="[^"]*",?|\{\}', "", name)
                    .replace(",}", "}")
                    .replace("{}", "")
                )
                found[name] = float(value)
        return found

    def engines(self) -> list[int]:
        """The engine process, if it runs."""
        return [pid for pid in children(self.process.pid) if not is_worker(pid)]

    def workers(self) -> list[int]:
        """The worker processes."""
        return [pid for pid in children(self.process.pid) if is_worker(pid)]

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(seconds)
        self.http.close()
        return code


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_worker(pid: int) -> bool:
    try:
        return b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def server(
    folder: Path,
    ready: bool = True,
    engine: dict[str, Any] | None = None,
    client: Callable[[int], httpx.Client] | None = None,
    **config: Any,
) -> Iterator[Running]:
    """`config`: ServeConfig's fields. `client` makes a client for a port, if plain HTTP does not
    reach the server."""
    port, log = free_port(), folder / "server.log"
    config = {
        "model": tiny.model_dir(),
        "served_model_name": [NAME],
        "engine": {**ENGINE, **(engine or {})},
        **config,
    }
    # a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="o", ignore_cleanup_errors=True) as temporary:
        with open(log, "w") as out:
            argv = [sys.executable, "-m", "tests.serve.launch", str(port), json.dumps(config)]
            env = {**os.environ, "TMPDIR": temporary}
            process = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=out, text=True, env=env)
        running = Running(process, port, log, Path(temporary))
        if client is not None:
            running.http = client(port)
        try:
            # the first start on a machine compiles the CPU kernels, which takes minutes if it is busy
            running.wait("/readyz" if ready else "/livez", seconds=400)
            yield running
        finally:
            try:
                running.stop()
            except subprocess.TimeoutExpired:
                process.kill()
                raise


# ---- clients -------------------------------------------------------------------------------------


def events(text: str) -> list[dict[str, Any]]:
    """The objects of an event stream, which must be well formed and closed."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], parts[-3:]
    lines = [p for p in parts[:-2] if not p.startswith(":")]
    assert all(line.startswith("data: {") for line in lines), lines
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def raw(port: int, data: bytes, seconds: float = 5) -> bytes:
    """What the server answers to these bytes, up to the connection's end or a time."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        found = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                found += part
        return found


def http_request(
    path: str, body: bytes, *headers: str, method: str = "POST", host: str = "localhost"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, f"Content-Length: {len(body)}"]
    if not any(h.lower().startswith("content-type") for h in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def check_error(
    reply: httpx.Response, status: int, param: str | None = ..., code: str | None = ...
) -> dict[str, Any]:  # type: ignore[assignment]
    """An error as every error must look."""
    assert reply.status_code == status, (reply.status_code, reply.text)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert reply.headers["x-request-id"].startswith("req_")
    assert (
        "Traceback" not in reply.text
        and "/octavo" not in reply.text
        and "0x" not in reply.text
        and "/tmp" not in reply.text
    )
    if param is not ...:
        assert error["param"] == param, error
    if code is not ...:
        assert error["code"] == code, error
    return error


@contextlib.contextmanager
def alive(running: Running) -> Iterator[None]:
    """While in here /livez is asked again and again, by a process of its own: every answer is yes,
    and comes within 100 ms. One may take longer, for the asking process too has to wait for a core
    now and then."""
    argv = [sys.executable, "-c", PROBE, str(running.port)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None and probe.stdin is not None
        probe.stdout.readline()
        yield
        probe.stdin.close()
        times = sorted(map(float, probe.stdout.readline().split()))
    assert len(times) >= 20 and times[-2] < 0.1 and times[-1] < 1, times[-5:]
