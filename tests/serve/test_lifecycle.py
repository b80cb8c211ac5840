"""Start, death, hang and end: of the engine process, which may die, and of the server, which must
not."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from safetensors.torch import load_file, save_file

from octavo.serve.front.supervisor import Supervisor
from octavo.serve.serve_config import ServeConfig
from octavo.text.tokenizer import Tokenizer
from tests import tiny
from tests.model.test_registry import PLUGIN, install
from tests.serve.running import (
    ROOT,
    Running,
    alive,
    check_error,
    children,
    events,
    free_port,
    server,
)
from tests.serve.test_streams import settled

LONG = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}


def gone(pid: int, seconds: float = 5) -> bool:
    for _ in range(int(seconds * 50)):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


async def streams(running: Running, count: int, then: Any, max_tokens: int = 1000) -> list[str]:
    """The texts of so many streams; `then` is called once all have begun."""
    begun = asyncio.Semaphore(0)

    async def one(http: httpx.AsyncClient) -> str:
        text = ""
        async with http.stream(
            "POST", f"{running.url}/v1/completions", json={**LONG, "max_tokens": max_tokens}
        ) as reply:
            assert reply.status_code == 200
            async for part in reply.aiter_text():
                if not text:
                    begun.release()
                text += part
        return text

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=count)) as http:
        tasks = [asyncio.create_task(one(http)) for _ in range(count)]
        for _ in range(count):
            await begun.acquire()
        then()
        return list(await asyncio.gather(*tasks))


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose engine can be made to hang or fail, with a quick watchdog."""
    folder = tmp_path_factory.mktemp("mortal")
    with server(
        folder, program="tests.serve.hanging_engine", stall_dump=0.5, stall_kill=1.5, keep_alive=0.2
    ) as found:
        yield found


def test_the_engine_killed_under_32_streams(mortal: Running) -> None:
    """Each stream ends with a typed error, /livez never fails, the server is ready again soon, and
    nothing is left over."""
    (engine,) = mortal.engines()
    files = mortal.open_files()
    with alive(mortal):
        texts = asyncio.run(streams(mortal, 32, lambda: os.kill(engine, signal.SIGKILL)))
        died = time.monotonic()
        for text in texts:
            last = events(text)[-1]
            assert (
                last["error"]["code"] == "engine_restarting"
                and last["error"]["type"] == "overloaded_error"
            )
        check_error(mortal.post("/v1/completions", {"prompt": "x"}), 503, code="engine_restarting")
        state = mortal.get("/readyz")
        assert state.status_code == 503 and state.json()["state"] == "restarting"
        mortal.wait("/readyz", 20)
        assert time.monotonic() - died < 10
    assert mortal.complete()["usage"]["completion_tokens"] == 4
    assert gone(engine) and len(mortal.engines()) == 1 and mortal.engines() != [engine]
    time.sleep(0.2)
    assert abs(mortal.open_files() - files) <= 2, "the same but for a probe's connection"
    found = settled(mortal)
    assert (
        found["octavo:engine_starts_total"] == 2
        and 0 < found["octavo:engine_recovery_seconds"] < 10
    )


def test_a_failing_step_ends_its_requests_and_no_others(mortal: Running) -> None:
    engine = mortal.engines()
    reply = mortal.post("/v1/completions", {"prompt": [14] * 5})
    error = check_error(reply, 500, code="engine_error")
    assert (
        "passwd" not in reply.text
        and error["type"] == "server_error"
        and reply.headers["x-should-retry"] == "true"
    )
    assert mortal.complete()["usage"]["completion_tokens"] == 4 and mortal.engines() == engine


def test_a_request_that_the_device_has_no_memory_for_is_tried_smaller_and_ends_alone(
    mortal: Running,
) -> None:
    """503, and those that were in the same steps get their tokens."""
    other = {"prompt": [21] * 30, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    alone, engine = mortal.complete(**other)["choices"][0]["text"], mortal.engines()
    before = mortal.metrics()["octavo:engine_steps_shrunk_total"]

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=mortal.url, timeout=30) as http:
            bodies = [
                other,
                {"prompt": [16] * 50, "max_tokens": 5},
                other,
                {"prompt": [16] * 60, "max_tokens": 5},
            ]
            return list(
                await asyncio.gather(*(http.post("/v1/completions", json=b) for b in bodies))
            )

    replies = asyncio.run(together())
    for reply in replies[1::2]:
        error = check_error(reply, 503, code="out_of_memory")
        assert (
            error["type"] == "overloaded_error"
            and reply.headers["retry-after"]
            and "passwd" not in reply.text
        )
    assert [r.json()["choices"][0]["text"] for r in replies[::2]] == [
        alone,
        alone,
    ] and mortal.engines() == engine
    assert mortal.complete()["usage"]["completion_tokens"] == 4
    assert settled(mortal)["octavo:engine_steps_shrunk_total"] >= before + 2


def test_a_hanging_step_is_logged_and_then_ended(mortal: Running) -> None:
    with httpx.Client(base_url=mortal.url, timeout=30) as http:
        begun = time.monotonic()
        done: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: done.append(http.post("/v1/completions", json={"prompt": [13] * 5}))
        )
        thread.start()
        while mortal.get("/readyz").status_code == 200:
            assert time.monotonic() - begun < 5
            time.sleep(0.02)
        assert (
            mortal.get("/readyz").json()["state"] == "stalled"
            and mortal.get("/livez").status_code == 200
        )
        thread.join()
    check_error(done[0], 503, code="engine_restarting")
    assert 1 < time.monotonic() - begun < 6
    dump = next(
        json.loads(line)
        for line in mortal.log.read_text().splitlines()
        if line.startswith('{"event"')
    )
    assert dump["event"] == "engine_stalled" and any(
        "hanging_engine.py" in line for line in dump["stacks"]
    )
    assert "5 prompt tokens, waiting" in dump["requests"][0]
    mortal.wait()
    assert mortal.complete()["usage"]["completion_tokens"] == 4


def test_a_step_that_may_take_long_is_waited_for(tmp_path: Path) -> None:
    """Four seconds, of which the engine has told: nobody takes it for hung, nor the request for
    waiting."""
    limits = dict(stall_dump=0.5, stall_kill=1.5, queue_timeout=2.0)
    with server(tmp_path, program="tests.serve.slow_engine", **limits) as slow:
        (engine,) = slow.engines()
        begun = time.monotonic()
        assert slow.complete(prompt=[18] * 5)["usage"]["completion_tokens"] == 4
        assert time.monotonic() - begun > 4 and slow.engines() == [engine]
        assert "engine_stalled" not in slow.log.read_text()


def test_a_server_that_was_stopped_keeps_its_engine(tmp_path: Path) -> None:
    """`docker pause` and SIGSTOP stop all processes of a server. The engine is not hung."""
    with server(tmp_path, stall_dump=0.5, stall_kill=1.0) as paused:
        (engine,) = paused.engines()
        done: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: done.append(paused.complete(max_tokens=900)))
        thread.start()
        time.sleep(0.2)
        for number, seconds in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0.0)):
            os.kill(paused.process.pid, number)
            os.kill(engine, number)
            time.sleep(seconds)
        thread.join()
        assert done[0]["usage"]["completion_tokens"] == 900
        assert paused.engines() == [engine]
        assert "engine_stalled" not in paused.log.read_text()


def test_a_silent_stream_sends_keep_alive_comments(mortal: Running) -> None:
    reply = mortal.post("/v1/completions", {"prompt": [13] * 6, "stream": True})
    assert reply.text.count(": keep-alive\n\n") >= 3
    assert events(reply.text)[-1]["error"]["code"] == "engine_restarting"
    mortal.wait()


def test_a_failing_step_in_a_stream_ends_it_with_a_typed_error(mortal: Running) -> None:
    reply = mortal.post("/v1/completions", {"prompt": [14] * 6, "stream": True})
    assert reply.status_code in (200, 500)  # it may fail before the stream has begun
    error = events(reply.text)[-1]["error"] if reply.status_code == 200 else reply.json()["error"]
    assert error["code"] == "engine_error"


def test_a_request_that_fails_again_and_again_is_refused_and_others_are_not(
    mortal: Running,
) -> None:
    bad = {"prompt": [14] * 7, "max_tokens": 1}
    assert mortal.post("/v1/completions", bad).headers["x-should-retry"] == "true"
    for _ in range(3):
        reply = mortal.post("/v1/completions", bad)
        check_error(reply, 500, code="poison_request")
        assert reply.headers["x-should-retry"] == "false"
    assert mortal.complete()["usage"]["completion_tokens"] == 4
    check_error(
        mortal.post("/v1/completions", {**bad, "prompt": [14] * 8}), 500, code="engine_error"
    )


def test_a_request_that_ends_the_engine_twice_is_refused_from_then_on(mortal: Running) -> None:
    engine, bad = mortal.engines(), {"prompt": [15] * 5, "max_tokens": 1}
    check_error(mortal.post("/v1/completions", bad), 503, code="engine_restarting")
    mortal.wait()
    check_error(mortal.post("/v1/completions", bad), 500, code="poison_request")
    mortal.wait()
    starts = mortal.metrics()["octavo:engine_starts_total"]
    check_error(mortal.post("/v1/completions", bad), 500, code="poison_request")
    assert mortal.complete()["usage"]["completion_tokens"] == 4
    assert mortal.metrics()["octavo:engine_starts_total"] == starts and mortal.engines() != engine


def test_an_engine_that_is_stopped_is_replaced(mortal: Running) -> None:
    (engine,) = mortal.engines()
    os.kill(engine, signal.SIGSTOP)
    assert gone(engine, 8)
    mortal.wait()
    assert mortal.complete()["usage"]["completion_tokens"] == 4


def test_the_engine_dies_with_a_front_that_is_killed(tmp_path: Path) -> None:
    with server(tmp_path) as front:
        processes = [*front.engines(), *front.workers()]
        assert len(processes) == 3
        front.process.kill()
        assert all(gone(process, 2) for process in processes)
        assert not front.left_behind()


# ---- the end -------------------------------------------------------------------------------------


def test_the_first_signal_drains_and_the_second_cuts_off(tmp_path: Path) -> None:
    with server(tmp_path, drain_timeout=20) as front:
        processes = [*front.engines(), *front.workers()]

        def stop() -> None:
            front.process.send_signal(signal.SIGTERM)
            for _ in range(100):
                if front.get("/readyz").status_code == 503:
                    break
                time.sleep(0.01)
            assert (
                front.get("/readyz").json()["state"] == "draining"
                and front.get("/livez").status_code == 200
            )
            check_error(front.post("/v1/completions", {"prompt": "x"}), 503, code="draining")
            time.sleep(0.1)
            assert front.process.poll() is None, "somebody is still being served"
            front.process.send_signal(signal.SIGTERM)

        texts = asyncio.run(streams(front, 16, stop))
        for text in texts:
            assert events(text)[-1]["error"]["code"] == "draining"
        assert front.process.wait(10) == 0
        assert all(gone(process) for process in processes)


def test_draining_lets_requests_finish(tmp_path: Path) -> None:
    with server(tmp_path) as front:
        texts = asyncio.run(
            streams(front, 4, lambda: front.process.send_signal(signal.SIGTERM), 300)
        )
        assert all(events(text)[-1]["choices"][0]["finish_reason"] == "length" for text in texts)
        assert front.process.wait(10) == 0


def test_a_signal_while_the_model_loads(tmp_path: Path) -> None:
    with server(tmp_path, ready=False) as front:
        state = front.get("/startupz")
        assert state.status_code == 503 and state.json()["state"] == "starting"
        assert {"state", "phase", "elapsed_s"} <= set(state.json())
        check_error(front.post("/v1/completions", {"prompt": "x"}), 503, code="engine_starting")
        engines = front.engines()
        assert front.stop() == 0
        assert all(gone(engine) for engine in engines)


# ---- what cannot start ---------------------------------------------------------------------------


def octavo(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )


def failed_start(argv: tuple[str, ...]) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """Seconds until a server has said why it cannot start: by the clock, and of the CPU: the same
    where it has a core."""
    used, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = octavo("serve", *argv)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.monotonic() - begun,
        now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        done,
    )


def test_a_server_that_cannot_start_says_why_in_one_line(running: Running, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "keys.toml").write_text("")
    model = tiny.model_dir()
    for name in ("lacking", "cut"):
        shutil.copytree(model, tmp_path / name)
    weights = load_file(Path(model) / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights | {"model.strange.weight": weights["model.embed_tokens.weight"][:2].clone()},
              tmp_path / "lacking" / "model.safetensors")  # fmt: skip
    whole = (Path(model) / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for argv, says in {
        ("--port", str(running.port), model): "in use",
        ("--host", "no.such.host.invalid", model): "not an address",
        ("--host", "0.0.0.0", model): "--allow-unauthenticated",
        (str(tmp_path / "nowhere"),): "no such directory",
        (str(tmp_path / "empty"),): "config.json",
        ("--api-keys", str(tmp_path / "keys.toml"), model): "no [[keys]]",
        ("--max-model-len", "99999", "--port", str(free_port()), model): "99999",
        ("--port", str(free_port()), "--health-port", str(running.port), model): "--health-port",
        (
            "--port",
            str(free_port()),
            "--kv-host-gib",
            "0.001",
            "--kv-disk",
            str(tmp_path / "keys.toml" / "x"),
            model,
        ): "written to",
        ("--port", str(free_port()), str(tmp_path / "lacking")): "model.norm.weight",
        ("--port", str(free_port()), str(tmp_path / "cut")): "model.safetensors",
    }.items():
        took, cpu, done = failed_start(argv)
        assert done.returncode not in (0, None), argv
        # The phases of the start have a time before them.
        lines = done.stderr.strip().splitlines()
        line, *more = [line for line in lines if not re.match(r" *\d+\.\d s  ", line)]
        assert line.startswith("error: ") and says in done.stderr, done.stderr
        assert not more or ("lacking" in argv[-1] and "Traceback" not in done.stderr), (
            "one line, or a list of tensors"
        )
        # longer only where others have the cores
        assert took < 5 or (cpu < 8 and took < 30), (argv, took, cpu)


def test_the_command_says_where_it_is_and_how_to_try_it(tmp_path: Path) -> None:
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "octavo",
        "serve",
        tiny.model_dir(),
        "--port",
        str(port),
        "--max-model-len",
        "256",
    ]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(8)]
            assert (
                "weights" in lines[1]
                and "tokens in" in lines[2]
                and lines[3].startswith("sample:")
                and lines[4].startswith("drafts:")
                and f"http://127.0.0.1:{port}/v1" in lines[5]
            )
            assert lines[6] == f"watch:   http://127.0.0.1:{port}/\n", "the live page"
            line = lines[7].partition("curl ")[2]
            reply = subprocess.run(
                f"curl -s {line}", shell=True, capture_output=True, text=True, timeout=20
            ).stdout
            assert json.loads(reply)["choices"][0]["message"]["role"] == "assistant"
            processes = children(process.pid)
            assert len(processes) == 3, "the engine and two worker processes"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0 and all(gone(pid) for pid in processes)


def test_an_engine_that_cannot_be_started_again_just_now_is_tried_once_more() -> None:
    """No descriptor, no memory: the server waits, and keeps nothing of the attempt."""

    async def run() -> None:
        dies = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
        supervisor = Supervisor(ServeConfig(), lambda message: None, lambda: None, dict, dies)
        running = asyncio.create_task(supervisor.run())
        while supervisor.starts < 2:
            await asyncio.sleep(0.01)
        supervisor.command = ("/nowhere/engine",)
        before = len(os.listdir("/proc/self/fd"))
        while supervisor.starts < 4:
            await asyncio.sleep(0.01)
            assert not running.done()
        assert (
            supervisor.phase in ("down", "starting")
            and len(os.listdir("/proc/self/fd")) <= before + 1
        )
        supervisor.command = dies
        while supervisor.starts < 5:
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(run())


def test_results_that_are_not_finite_end_only_their_own_requests(tmp_path: Path) -> None:
    """A row of the embedding is damaged: whoever says "z" computes NaN."""
    folder = shutil.copytree(tiny.model_dir("qwen2"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (z,) = Tokenizer.from_directory(folder).encode("z", add_special_tokens=False)
    weights["model.embed_tokens.weight"][z] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with server(tmp_path, model=str(folder)) as running:
        want = running.complete(temperature=0)
        for more in (
            {},
            {"logprobs": 1, "temperature": 0},
            {"use_beam_search": True, "best_of": 2, "temperature": 0},
        ):
            reply = running.post("/v1/completions", {"prompt": "zebra", "max_tokens": 4, **more})
            assert "no finite logit" in check_error(reply, 500, code="not_a_number")["message"]
        reply = running.post("/v1/completions", {"prompt": "zebra", "stream": True})
        assert '"code":"not_a_number"' in reply.text, (
            "in the stream, or in its place if that had not begun"
        )
        assert running.complete(temperature=0)["choices"] == want["choices"]


def test_a_model_that_computes_no_numbers_is_not_served(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.model_dir(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    says = "was loaded, but cannot run: the model produced no finite logit"
    with pytest.raises(AssertionError, match=says), server(tmp_path, model=str(folder)):
        pass


# ---- architectures of other packages -------------------------------------------------------------


@pytest.mark.slow
def test_an_architecture_of_an_installed_package_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    install(packages, PLUGIN)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    shutil.copytree(tiny.model_dir(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["architectures"] = ["PluginForCausalLM"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with server(tmp_path, model=str(tmp_path / "model")) as running:
        assert running.complete()["usage"]["completion_tokens"] == 4
