"""What the pages tell a reader to type against a server works, as it stands there but for the
port."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.running import Running, free_port, server
from tests.test_docs import ADDRESS, ROOT, blocks

NAME = "smollm2"  # what the pages call the model
CURL = re.compile(r"^curl (?:.*\\\n)*.*$", re.MULTILINE)
OTHER_APIS = "docs/http-apis.md"
CURLS = [(page, found) for page in ("README.md", "docs/serving.md", OTHER_APIS)
         for b in blocks((ROOT / page).read_text()) for found in CURL.findall(b.body)]  # fmt: skip


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server(tmp_path_factory.mktemp("named"), served_model_name=[NAME]) as found:
        yield found


# A file that one block of the README asks about. It does not fit into the context of small models.
LONG_TEXT = "LICENSE"


def run(page: str, running: Running, rpc: int | None = None, long: bool = False) -> list[str]:
    """Return what each of the page's blocks of Python that need a server prints. `long` chooses the
    blocks with a long prompt."""
    said, namespace = [], {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text()):
        if (LONG_TEXT in block.body) is not long:
            continue
        if block.kind == "python" and (page != "README.md" or ADDRESS in block.body):
            code = block.body.replace(ADDRESS, f"127.0.0.1:{running.port}").replace(
                "127.0.0.1:50051", f"127.0.0.1:{rpc}"
            )
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, page, "exec"), namespace)
            said.append(out.getvalue())
    return said


def test_the_readmes_python(named: Running) -> None:
    (said,) = run("README.md", named)
    assert said


@pytest.mark.slow
def test_the_readmes_second_question_about_a_text_is_answered_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    engine = {"max_model_len": 4096, "num_gpu_blocks_override": 512, "max_num_seqs": 16}
    with server(tmp_path, model=None, served_model_name=[NAME], engine=engine) as running:
        (said,) = run("README.md", running, long=True)
    answer = re.compile(r"([\d.]+) s, ([\d,]+) of ([\d,]+) prompt tokens from the cache")
    (first, second) = (
        [float(number.replace(",", "")) for number in found] for found in answer.findall(said)
    )
    assert first[1] == 0 and second[1] > 0.95 * second[2]
    assert second[0] < first[0] / 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(
    ("page", "line"), CURLS, ids=[f"{page} {i}" for i, (page, _) in enumerate(CURLS)]
)
def test_curl_lines(named: Running, page: str, line: str) -> None:
    here = f"127.0.0.1:{named.port}"
    argv = shlex.split(
        line.replace("\\\n", " ").replace(ADDRESS, here).replace("localhost:8000", here)
    )
    done = subprocess.run(
        [*argv, "--silent", "--show-error", "--fail-with-body"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reply = json.loads(done.stdout)
    assert reply if page == OTHER_APIS else reply["choices"]


def test_there_are_curl_lines() -> None:
    assert {page for page, _ in CURLS} == {"README.md", "docs/serving.md", OTHER_APIS}


@pytest.mark.slow
def test_the_servers_page_with_the_embedded_model(tmp_path: Path) -> None:
    """Some of its blocks are about what a model that can speak says."""
    pytest.importorskip("grpc")
    port = free_port()
    engine = {"max_model_len": 2048, "num_gpu_blocks_override": 512, "max_num_seqs": 16}
    with server(
        tmp_path, model=None, served_model_name=[NAME], grpc_port=port, engine=engine
    ) as running:
        hello, person, tool, rpc = run("docs/serving.md", running, port)
    assert hello and rpc and "name=" in person and "age=" in person and "get_weather" in tool
