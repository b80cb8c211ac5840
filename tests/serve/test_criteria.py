"""What passing means for every fault of docs/faults.md, held against all bad inputs of these tests
at once: no process ends, /livez answers in 100 ms, requests beside them get the same tokens,
nothing is left over, and no error tells a secret."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import octavo
from octavo.serve.endpoints.application import GET
from tests.serve import test_requests, test_tools, test_transport
from tests.serve.running import Running, alive, check_error, http_request
from tests.serve.test_streams import leave, settled

STAYING = {"prompt": "hello there", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


@contextlib.contextmanager
def unharmed(running: Running) -> Iterator[None]:
    """Whatever happens in here, the criteria hold."""
    alone = text_of(running.post(TEXT, STAYING))
    settled(running)
    time.sleep(0.1)
    engine, files = running.engines(), running.open_files()
    with alive(running):
        yield
    assert running.process.poll() is None and running.engines() == engine, "a process ended"
    found = settled(running)
    assert (
        found["octavo:num_requests_waiting"]
        == found["octavo:open_streams"]
        == found["octavo:num_tokens_waiting"]
        == 0
    )
    for _ in range(50):
        # the client's own connection may have been opened anew
        if running.open_files() <= files + 1:
            break
        time.sleep(0.05)
    assert running.open_files() <= files + 1, "descriptors are left over"
    assert text_of(running.post(TEXT, STAYING)) == alone


def bad_requests() -> list[tuple[str, bytes]]:
    """Every body that some test of these knows to be refused."""
    found = [(TEXT, body) for body in test_transport.NOT_JSON.values()]
    hi = {"messages": test_requests.HI, "prompt": "hi"}
    for path, body, param, _ in test_requests.BAD.values():
        needed = "messages" if path == CHAT else "prompt"
        given = {} if param == needed else {needed: hi[needed]}
        with contextlib.suppress(ValueError):  # infinity is no JSON
            found.append((path, json.dumps({**given, **body}, allow_nan=False).encode()))
    for body, *_ in test_tools.BAD.values():
        found.append((CHAT, json.dumps({"messages": test_requests.HI, **body}).encode()))
    return [(path, body) for path, body in found if len(body) < 2**20]


def test_all_bad_requests_beside_good_ones(running: Running) -> None:
    bad = bad_requests()
    random.Random(0).shuffle(bad)
    alone = text_of(running.post(TEXT, STAYING))
    took: list[float] = []

    async def run() -> None:
        over, room = False, asyncio.Semaphore(4)
        async with httpx.AsyncClient(base_url=running.url, timeout=30) as http:

            async def stay() -> None:
                while not over:
                    assert text_of(await http.post(TEXT, json=STAYING)) == alone

            async def be_refused(path: str, body: bytes) -> None:
                async with room:
                    begun = time.monotonic()
                    reply = await http.post(
                        path, content=body, headers={"content-type": "application/json"}
                    )
                    took.append(time.monotonic() - begun)
                check_error(reply, reply.status_code)
                assert 400 <= reply.status_code < 500, (path, body[:200], reply.text)

            staying = [asyncio.create_task(stay()) for _ in range(3)]
            try:
                await asyncio.gather(*(be_refused(*one) for one in bad))
            finally:
                over = True
                await asyncio.gather(*staying)

    with unharmed(running):
        asyncio.run(run())
    *_, second, slowest = sorted(took)  # one may have waited for a core
    assert len(took) > 150 and second < 1 and slowest < 3


def test_clients_that_disconnect_and_bytes_that_are_not_requests(running: Running) -> None:
    g = random.Random(1)
    noise = [bytes(g.randrange(256) for _ in range(g.randrange(1, 3000))) for _ in range(40)]
    good = http_request(TEXT, json.dumps(STAYING).encode())
    cut = [good[: g.randrange(1, len(good))] for _ in range(40)]
    spoiled = []
    for _ in range(40):
        data = bytearray(good)
        for _ in range(g.randrange(1, 4)):
            data[g.randrange(len(data))] = g.randrange(256)
        spoiled.append(bytes(data))

    async def send(data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            reply = await asyncio.wait_for(reader.read(300), g.choice([0.01, 0.1]))
            assert not reply or reply.startswith(b"HTTP/1.1 "), reply
        writer.transport.abort()

    async def run() -> None:
        body = {**STAYING, "stream": True, "max_tokens": 900}
        leaving = (
            leave(running.port, body, g.random() * 0.1, g.choice([None, 1, 2000]))
            for _ in range(30)
        )
        await asyncio.gather(*map(send, noise + cut + spoiled), *leaving)

    with unharmed(running):
        asyncio.run(run())


# ---- secrets -------------------------------------------------------------------------------------

SECRET = re.compile(
    r"Traceback|File \"|\.py\b|0x[0-9a-fA-F]{6,}|(?<![\w.])/(?:tmp|work|home|root|usr|etc|proc|var|opt|dev)/|site-packages|"
    r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b|private words"
)


@pytest.mark.parametrize("path", sorted(p for p in GET if "{" not in p))
def test_no_route_reveals_a_path_an_address_or_a_prompt(running: Running, path: str) -> None:
    running.complete(prompt="private words", max_tokens=1)
    reply = running.get(path)
    text = (
        reply.text
        if path != "/version"
        else json.dumps({k: v for k, v in reply.json().items() if "version" not in k})
    )
    assert not SECRET.search(text), SECRET.search(text)


def test_no_error_reveals_a_path_an_address_or_a_prompt(running: Running) -> None:
    for path, body in bad_requests()[::2]:
        body = body.replace(b'"hi"', b'"private words"')
        reply = running.http.post(path, content=body, headers={"content-type": "application/json"})
        assert not SECRET.search(reply.text), reply.text
        assert not SECRET.search(str(dict(reply.headers)))
    for path in (
        "/nothing",
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e%2fetc%2fpasswd",
        "/v1/models/private words",
    ):
        reply = running.get(path)
        assert reply.status_code == 404 and not SECRET.search(
            reply.text.replace("private words", "")
        ), reply.text


# ---- code that runs what it reads ----------------------------------------------------------------

CALLS = {"eval", "exec", "__import__", "execfile"}
ATTRIBUTES = {("torch", "load"), ("torch", "hub"), ("os", "system"), ("os", "popen"), ("yaml", "load"), ("yaml", "unsafe_load"),
              ("jit", "load"), ("np", "load"), ("numpy", "load"), ("builtins", "compile")}  # fmt: skip
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "code",
    "runpy",
}
KEYWORDS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def runs_what_it_reads(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in ATTRIBUTES
        ):
            found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                found.append(node.func.id)
            for word in node.keywords:
                if (
                    word.arg in KEYWORDS
                    and isinstance(word.value, ast.Constant)
                    and word.value.value is KEYWORDS[word.arg]
                ):
                    found.append(f"{word.arg}={word.value.value}")
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in ("recv_pyobj", "send_pyobj", "loads") and "json" not in ast.unparse(
                node.func
            ):
                found.append(ast.unparse(node.func))
    return found


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    root = Path(octavo.__file__).parent
    files = list(root.rglob("*.py"))
    found = {
        str(f.relative_to(root)): what for f in files if (what := runs_what_it_reads(f.read_text()))
    }
    allowed = {
        "serve/front/keys.py": ["tomllib.loads"],  # data only
    }
    assert {name: what for name, what in found.items() if what != allowed.get(name)} == {} and len(
        files
    ) > 50


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "torch.load(x)", "eval(x)", "exec('1')", "f(x, shell=True)", "os.system(x)",
     "socket.recv_pyobj()", "p.loads(x)", "np.load(x, allow_pickle=True)", "import torch\nload = torch.load"],
)  # fmt: skip
def test_and_would_be_found(source: str) -> None:
    assert runs_what_it_reads(source)


def test_a_body_of_the_largest_size_is_refused_as_quickly(running: Running) -> None:
    body: dict[str, Any] = {"prompt": "x", "metadata": {"a": "b" * (7 * 2**20)}, "temperature": -1}
    begun = time.monotonic()
    check_error(running.post(TEXT, body), 400)
    assert time.monotonic() - begun < 1
