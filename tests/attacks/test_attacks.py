"""Attacks on a real server, each beside normal traffic. `withstands` in tests/attacks/target.py
checks what must be true during and after each of them.

The full forms are marked slow. The worst attacks run with the other tests too, in a small form.
docs/testing.md has a table of the defects that these tests keep away.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from tests.attacks import bodies, connections, keys, streams, structures, templates, websockets
from tests.attacks.target import Target, target_server, withstands
from tests.serve.running import free_port

RPC_PORT = free_port()
HEADER_SECONDS = 0.2
WORKERS_MIB = 150  # memory that worker processes may keep for their next job


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server with so few connections that the attacks with connections exceed them."""
    limits = {"connections": 4096, "connections_per_address": 1024, "connections_per_key": 1024}
    folder = tmp_path_factory.mktemp("target")
    with target_server(folder, grpc_port=RPC_PORT, limits=limits) as found:
        yield found


@pytest.fixture
def quick_target(tmp_path: Path) -> Iterator[Target]:
    """A server whose time limit for headers is shorter than every stream."""
    with target_server(tmp_path, limits={"header_seconds": HEADER_SECONDS}) as found:
        yield found


# ---- structured output ---------------------------------------------------------------------------


def test_a_schema_of_chained_references(target: Target) -> None:
    with withstands(target, left_mib=150):
        structures.send(target, structures.worst().items())


@pytest.mark.slow
def test_structures_that_cost_much(target: Target) -> None:
    with withstands(target, left_mib=300):
        structures.send(target, structures.all_cases().items())


@pytest.mark.slow
def test_structures_that_cost_much_again_and_again(target: Target) -> None:
    with withstands(target, left_mib=300):
        structures.send_repeatedly(target, rounds=8)


# ---- WebSockets ----------------------------------------------------------------------------------


def test_a_flood_of_tiny_frames(target: Target) -> None:
    with withstands(target):
        websockets.flood(target, "pongs", seconds=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", websockets.FLOODS)
def test_a_long_flood_of_tiny_frames(target: Target, kind: str) -> None:
    with withstands(target):
        websockets.flood(target, kind, seconds=20)


# ---- connections ---------------------------------------------------------------------------------


def test_idle_connections(target: Target) -> None:
    with withstands(target):
        connections.hold_idle(target, 1200, addresses=1, seconds=1)


@pytest.mark.slow
def test_idle_connections_that_come_back(target: Target) -> None:
    with withstands(target):
        connections.hold_idle(target, 5200, addresses=5, seconds=30)


@pytest.mark.slow
def test_idle_connections_that_have_made_a_request(target: Target) -> None:
    with withstands(target):
        connections.keep_alive(target, 5000)


# ---- keys ----------------------------------------------------------------------------------------


def test_wrong_keys_do_not_lock_out_right_ones(target: Target) -> None:
    with withstands(target):
        keys.guess(target, count=25, seconds=1)
        keys.guess_by_rpc(target, RPC_PORT, count=5)


@pytest.mark.slow
def test_wrong_keys_for_long(target: Target) -> None:
    with withstands(target):
        keys.guess(target, count=100, seconds=30)
        keys.guess_by_rpc(target, RPC_PORT, count=50)


def test_right_keys_open_only_what_is_theirs(target: Target) -> None:
    keys.misuse(target)


# ---- bodies --------------------------------------------------------------------------------------


def test_a_large_json_body(target: Target) -> None:
    with withstands(target, peak_mib=150, left_mib=WORKERS_MIB):
        bodies.send(target, ["many names"])


@pytest.mark.slow
@pytest.mark.parametrize("name", bodies.LARGE)
def test_large_json_bodies(target: Target, name: str) -> None:
    with withstands(target, peak_mib=150, left_mib=WORKERS_MIB):
        bodies.send(target, [name])


@pytest.mark.slow
def test_large_json_bodies_at_once(target: Target) -> None:
    with withstands(target, peak_mib=400, left_mib=WORKERS_MIB):
        for _ in range(3):
            bodies.send(target, ["objects", "token ids"], at_once=8)


@pytest.mark.slow
def test_bodies_that_never_end(target: Target) -> None:
    with withstands(target, peak_mib=300):
        bodies.unfinished(target, 100, seconds=33)


# ---- HTTP ----------------------------------------------------------------------------------------


def test_bytes_on_the_connection_of_a_running_stream(target: Target) -> None:
    with withstands(target):
        for late in ("garbage", "40 requests", "half the headers"):
            streams.interrupt(target, streams.LATE[late], seconds=0, tokens=100)


@pytest.mark.slow
def test_late_bytes_in_a_stream_that_outlasts_the_header_timer(quick_target: Target) -> None:
    with withstands(quick_target):
        for late in streams.LATE.values():
            streams.interrupt(quick_target, late, seconds=2 * HEADER_SECONDS, tokens=300)


@pytest.mark.slow
def test_requests_that_are_two_or_none(target: Target) -> None:
    with withstands(target):
        streams.send_ambiguous(target)
        streams.half_close(target)
        streams.pipelined(target, 1000)


# ---- templates -----------------------------------------------------------------------------------


def test_templates_without_end(target: Target) -> None:
    with withstands(target):
        templates.send(target, templates.WORST)


@pytest.mark.slow
def test_templates_of_every_kind(target: Target) -> None:
    with withstands(target, left_mib=100):
        templates.send(target, templates.ALL)
