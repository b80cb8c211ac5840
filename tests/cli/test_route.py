"""`octavo route` finds an installed router and starts it with settings for Octavo's servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from octavo.cli import route_command

Octavo = Callable[..., Result]
WORKERS = ("--worker", "http://127.0.0.1:8001", "--worker", "http://127.0.0.1:8002/")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The command lines of the routers that the command would become. None is installed."""
    found: list[list[str]] = []
    monkeypatch.setattr(route_command.os, "execv", lambda program, line: found.append(line))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return found


def install(folder: Path, *programs: str) -> None:
    for program in programs:
        path = folder / program
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)


def value_of(line: list[str], option: str) -> str:
    return line[line.index(option) + 1]


def test_the_router_gets_the_workers_and_the_options(
    octavo: Octavo, started: list[list[str]], tmp_path: Path
) -> None:
    install(tmp_path, "vllm-router", "sglang-router")
    result = octavo(
        "route", *WORKERS, "--port", "9000", "--policy", "random", "--", "--queue-size", "7"
    )
    assert result.exit_code == 0, result.stderr
    assert "http://127.0.0.1:9000/v1" in result.stdout
    (line,) = started
    assert os.path.basename(line[0]) == "vllm-router"
    assert line[1:4] == ["--worker-urls", "http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    assert value_of(line, "--port") == "9000" and value_of(line, "--policy") == "random"
    assert value_of(line, "--health-check-interval-secs") == "1"
    assert "--disable-circuit-breaker" in line
    assert line[-2:] == ["--queue-size", "7"]


@pytest.mark.parametrize(
    ("installed", "wanted", "program", "level"),
    [
        (["sglang-router"], "auto", "sglang-router", "warn"),
        (["vllm-router", "sglang-router"], "sglang", "sglang-router", "warn"),
        (["vllm-router", "sglang-router"], "vllm", "vllm-router", "warning"),
    ],
)
def test_a_router_is_chosen(
    octavo: Octavo,
    started: list[list[str]],
    tmp_path: Path,
    installed: list[str],
    wanted: str,
    program: str,
    level: str,
) -> None:
    install(tmp_path, *installed)
    assert octavo("route", *WORKERS, "--router", wanted).exit_code == 0
    (line,) = started
    assert os.path.basename(line[0]) == program and value_of(line, "--log-level") == level


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--worker is missing: give the address of each server"),
        (("--worker", "localhost:8000"), "--worker must be an address such as http://"),
        ((*WORKERS, "--policy", "best"), "--policy must be one of cache_aware, round_robin"),
        ((*WORKERS, "--router", "nginx"), "--router must be one of auto, vllm, sglang"),
        (WORKERS, "vllm-router or sglang-router is not installed: pip install vllm-router"),
        ((*WORKERS, "--router", "sglang"), "sglang-router is not installed: pip install sglang-"),
    ],
)
def test_what_cannot_start_is_explained(
    octavo: Octavo, started: list[list[str]], arguments: tuple[str, ...], message: str
) -> None:
    result = octavo("route", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert started == []


def test_the_two_routers_accept_the_settings() -> None:
    """The settings are options of both routers, so that one table serves both."""
    for package in ("vllm_router", "sglang_router"):
        arguments = pytest.importorskip(f"{package}.router_args").RouterArgs
        for option in [*route_command.SETTINGS, *route_command.FLAGS]:
            assert hasattr(arguments, option.removeprefix("--").replace("-", "_")), option
