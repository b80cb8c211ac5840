"""`octavo doctor`: one line a check, and the exit code says whether all is well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from octavo.cli import doctor
from octavo.errors import CheckpointError
from octavo.model import embedded
from octavo.process_usage import read_usage

Octavo = Callable[..., Result]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def lines(result: Result) -> dict[str, tuple[str, str]]:
    """subject -> (state, what was found)"""
    found = [
        re.fullmatch(r"(ok|warn|fail) +(\S+) +(.+)", line) for line in result.stdout.splitlines()
    ]
    assert all(found), result.stdout
    return {f[2]: (f[1], f[3]) for f in found if f}


def test_each_check_is_one_line(octavo: Octavo) -> None:
    result = octavo("doctor")
    found = lines(result)
    assert result.exit_code == 0 or "fail" in result.stdout
    assert {
        "octavo",
        "libraries",
        "triton",
        "numba",
        "cpu",
        "memory",
        "gpu",
        "ops",
        "model",
        "hub",
    } <= set(found)
    assert "torch 2." in found["libraries"][1] and "GiB available" in found["memory"][1]
    assert found["hub"] == ("ok", found["hub"][1]) and "HF_HUB_OFFLINE" in found["hub"][1]


def test_smoke_generates(octavo: Octavo) -> None:
    if embedded.find_spec(embedded.PACKAGE) is None:
        pytest.skip(embedded.INSTALL)
    state, what = lines(octavo("doctor", "--smoke"))["smoke"]
    assert state == "ok" and "5 tokens" in what


def test_a_missing_embedded_model_is_a_warning_with_the_command(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model is optional: a user may have models of their own."""
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    assert lines(octavo("doctor"))["model"] == (
        "warn",
        f"the embedded model 'smollm2' is not installed: {embedded.INSTALL}",
    )


def test_a_damaged_embedded_model_fails(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise CheckpointError("the file is damaged")

    monkeypatch.setattr(embedded, "embedded_path", damaged)
    result = octavo("doctor")
    assert result.exit_code == 1
    assert lines(result)["model"] == ("fail", "the file is damaged")


def test_a_missing_library_is_named(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed
    monkeypatch.setattr(
        doctor, "installed", lambda name: None if name in ("numba", "jinja2") else real(name)
    )
    result = octavo("doctor")
    found = lines(result)
    assert result.exit_code == 1 and found["libraries"] == ("fail", "missing: pip install jinja2")
    assert found["numba"][0] == "warn" and "pip install numba" in found["numba"][1]


def test_an_unreachable_hub_is_a_warning_within_its_patience(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    state, what = lines(octavo("doctor"))["hub"]
    assert state == "warn" and "refused" in what and "local directories" in what
    monkeypatch.setattr(doctor, "HUB_TIMEOUT", 0.2)
    answer = threading.Event()

    def silence(*args: object, **options: object) -> None:
        answer.wait(30)
        raise OSError("too late")

    monkeypatch.setattr("urllib.request.urlopen", silence)
    assert doctor.unreachable("http://example.invalid") == "no answer within 0.2 s"
    answer.set()


def test_why_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: None)
    assert doctor.gpu().state == "ok" and "the CPU is used" in doctor.gpu().found
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: "580.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.gpu() == doctor.DoctorCheck(
        "warn",
        "gpu",
        "driver 580.1 is loaded, but this torch is built for CPUs: install a build for CUDA",
    )


# ---- a process -----------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; x = bytearray(50_000_000); print(flush=True); time.sleep(60)"],
                            stdout=subprocess.PIPE)  # fmt: skip


def test_a_process_is_measured(octavo: Octavo, sleeper: subprocess.Popen[bytes]) -> None:
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    try:
        header, row = octavo("doctor", "--pid", sleeper.pid, "--csv").stdout.splitlines()
        found = dict(zip(header.split(","), row.split(","), strict=True))
        text = octavo("doctor", "--pid", sleeper.pid).stdout
    finally:
        sleeper.kill()
        sleeper.wait()
    assert (
        header
        == "seconds,role,pid,cpu_seconds,system_seconds,rss_bytes,peak_rss_bytes,minor_faults,"
        "major_faults,threads,voluntary_switches,involuntary_switches"
    )
    assert int(found["pid"]) == sleeper.pid and int(found["threads"]) == 1
    assert 50_000_000 < int(found["rss_bytes"]) <= int(found["peak_rss_bytes"]) < 200_000_000
    assert int(found["voluntary_switches"]) > 0
    assert re.search(r"rss \d+ MiB .*threads 1", text)


def test_switches_of_all_threads_are_counted() -> None:
    stop = threading.Event()
    threads = [
        threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(100)] and stop.wait())
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    found = read_usage(os.getpid())
    stop.set()
    for thread in threads:
        thread.join()
    own = int(
        re.search(
            r"^voluntary_ctxt_switches:\s*(\d+)", Path("/proc/self/status").read_text(), re.M
        )[1]
    )  # type: ignore[index]
    assert found is not None and found.voluntary_switches > own + 200


def test_watching_ends_with_the_process(octavo: Octavo, sleeper: subprocess.Popen[bytes]) -> None:
    killer = threading.Timer(0.6, sleeper.kill)
    killer.start()
    result = octavo("doctor", "--pid", sleeper.pid, "--csv", "--watch", 0.1)
    killer.join()
    sleeper.wait()
    assert result.exit_code == 0 and 3 <= len(result.stdout.splitlines()) <= 12


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--pid", 2**22 + 1), "no process"),
        (("--csv",), "need --pid"),
        (("--pid", 1, "--watch", 0), "positive number of seconds"),
    ],
)
def test_bad_questions_are_refused(octavo: Octavo, args: tuple[object, ...], message: str) -> None:
    result = octavo("doctor", *args)
    assert result.exit_code == 2 and message in result.stderr
