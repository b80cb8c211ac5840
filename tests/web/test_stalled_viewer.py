"""A viewer that stops reading for a minute changes nothing: replies, other viewers, memory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.core.stream_mirror import StreamMirror
from tests.serve.running import Running, server

SECONDS = 60
ROUND = 8  # requests at once
# The processor time of a token may be so much larger: the system's share of it varies that much.
MOST_COST = 1.2
MOST_GROWTH = 48  # MiB: the buffer for late pages holds 16 MiB, and lines are copied on their way
HANDSHAKE = (
    "GET /ws/watch HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    "Sec-WebSocket-Version: 13\r\n\r\n"
)


class Reader(threading.Thread):
    """A viewer that reads everything."""

    def __init__(self, running: Running):
        super().__init__()
        self.address = f"ws://127.0.0.1:{running.port}/ws/watch"
        self.lines: list[Any] = []
        self.has_kept_lines = False  # The lines that the server had kept were read.
        self.is_over = False

    def run(self) -> None:
        with connect(self.address, max_size=2**24) as connection:
            while not self.is_over:
                with contextlib.suppress(TimeoutError):
                    text = str(connection.recv(timeout=0.5))
                    if text[0] == "[":
                        self.lines += map(json.loads, text.splitlines())
                    else:
                        self.has_kept_lines = json.loads(text)["has_kept_lines"]

    def begin(self) -> None:
        self.start()
        while not self.lines:
            time.sleep(0.05)

    def stop(self) -> None:
        self.is_over = True
        self.join()


def stalled_viewer(port: int) -> socket.socket:
    """Return a connection that has asked for the stream and reads none of it."""
    viewer = socket.socket()
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    viewer.connect(("127.0.0.1", port))
    viewer.sendall(HANDSHAKE.format(port=port).encode())
    assert viewer.recv(12) == b"HTTP/1.1 101"
    return viewer


def processor_seconds(running: Running) -> float:
    """Return what the server and its engine process have computed, whatever else runs meanwhile."""
    ticks = 0
    for pid in (running.process.pid, *running.engines()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in user mode and in the system
    return ticks / os.sysconf("SC_CLK_TCK")


def serve_round(running: Running) -> tuple[list[str], float]:
    """Serve some requests at once. Returns their replies and the tokens per second of processor
    time."""

    def complete(number: int) -> str:
        body = {"prompt": f"prompt {number}", "max_tokens": 200, "ignore_eos": True}
        text: str = running.complete(**body, temperature=0)["choices"][0]["text"]
        return text

    begun = processor_seconds(running)
    with ThreadPoolExecutor(ROUND) as pool:
        replies = list(pool.map(complete, range(ROUND)))
    return replies, 200 * ROUND / (processor_seconds(running) - begun)


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kib) / 1024


@pytest.mark.slow
def test_a_viewer_that_stops_reading_for_a_minute_changes_nothing(tmp_path: Path) -> None:
    with server(tmp_path, engine={"show_text": True}) as running:
        expected, _ = serve_round(running)
        reader = Reader(running)
        reader.begin()
        before = [serve_round(running) for _ in range(8)]
        viewer = stalled_viewer(running.port)
        memory = resident_mib(running.process.pid)
        end = time.monotonic() + SECONDS
        meanwhile = []
        while time.monotonic() < end:
            meanwhile.append(serve_round(running))
        growth = resident_mib(running.process.pid) - memory
        time.sleep(0.5)
        reader.stop()
        viewer.settimeout(5)
        received = 0
        while part := viewer.recv(2**20):
            received += len(part)
        viewer.close()
        late = Reader(running)
        late.begin()
        end = time.monotonic() + 60
        while not late.has_kept_lines and time.monotonic() < end:
            time.sleep(0.1)
        late.stop()
    assert all(replies == expected for replies, _ in before + meanwhile)
    check_stream(reader.lines, len(before) + len(meanwhile))
    sent = sum(len(json.dumps(line)) for line in reader.lines)
    assert received < 0.8 * sent, "the connection of the stalled viewer was never full"
    assert growth < MOST_GROWTH
    kept, seen = ([line for line in each.lines if line[0] != "snapshot"] for each in (late, reader))
    assert len(kept) > 50_000 and kept == seen[-len(kept) :], "one part, up to the end"
    rates = [statistics.median(rate for _, rate in rounds) for rounds in (before, meanwhile)]
    print(
        f"with a viewer that reads, {rates[0]:.0f} tokens per second of processor time; "
        f"{rates[1]:.0f} while another does not; the server grew by {growth:.1f} MiB; "
        f"{received} of {sent} bytes were received"
    )
    assert rates[0] < MOST_COST * rates[1]


def check_stream(lines: list[Any], rounds: int) -> None:
    """The viewer that reads has seen every request, and each event where it is possible."""
    mirror = StreamMirror(lines[0])
    for line in lines[1:]:
        if line[0] != "snapshot":
            mirror.apply(line)
    assert mirror.kinds["finished"] == rounds * ROUND and not mirror.states
