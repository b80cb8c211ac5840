"""Runs vLLM's examples with Octavo: python -m tests.vllm_suite.examples --source CLONE [NAME ...].

Each example is copied. In the copy, `vllm` in import statements becomes `octavo`, names of models
become a directory with the embedded model, and port 8000 becomes a free port. Nothing else changes.
Each copy runs as it is, in a process of its own, against a server of its own if it is a client.
`--json FILE` writes the result of every example, which tools/tables.py shows in the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.bench.provenance import provenance, run_git
from octavo.compat.environment import get_open_port
from tests.vllm_suite.example_list import OFFLINE, ONLINE, Example, unlisted

ROOT = Path(__file__).parents[2]
THINKING = Path(__file__).parent / "shims" / "thinking.jinja"
IMPORT = re.compile(r"^(\s*(?:from|import)\s+)vllm\b", re.MULTILINE)
# A quoted name of a model: an owner, a slash and a name.
MODEL = re.compile(
    r"""(["'])(?:facebook|Qwen|meta-llama|lmsys|ibm-ai-platform|mistralai)/[\w.-]+\1"""
)
LONGEST = 2048  # tokens: some examples generate until the context is full
Row = dict[str, Any]


def prepare_model(folder: Path) -> Path:
    """Write the embedded model as a directory, which transformers' tokenizers can read too."""
    model = folder / "model"
    command = [sys.executable, "-m", "octavo", "quantize", "smollm2", str(model), "--no-measure"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = LONGEST
    (model / "config.json").write_text(json.dumps(config))
    return model


def rewrite(source: str, model: Path, port: int) -> str:
    """Return an example with the import, the models and the port replaced."""
    text = IMPORT.sub(r"\1octavo", source)
    text = MODEL.sub(lambda found: f"{found[1]}{model}{found[1]}", text)
    return re.sub(r"(:|default=)8000\b", rf"\g<1>{port}", text)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OCTAVO_HUB_OFFLINE": "1"}


@contextmanager
def server_for(example: Example, folder: Path, model: Path, port: int) -> Iterator[None]:
    """Run the server of an online example."""
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(port)]
    command += ["--served-model-name", str(model), *example.flags]
    if "--reasoning-parser" in example.flags:
        # The embedded model does not reason, so its reasoning is closed after a few tokens.
        command += ["--chat-template", str(THINKING)]
        command += ["--thinking-token-budget", "24"]
    if example.server:
        script = folder / Path(example.server).name
        command = [sys.executable, str(script), "--model", str(model), "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until_ready(server, port, folder / "server.log")
        yield
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    limit = time.monotonic() + 200
    while time.monotonic() < limit and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"the server did not start: {last_line(log.read_text())}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def run_script(script: Path, example: Example, seconds: int) -> tuple[bool, str, str]:
    """Return whether a script ran to its end, its last line of errors, and its output."""
    command = [sys.executable, str(script), *example.arguments]
    output = script.with_suffix(".out")
    with output.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=script.parent,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=example.lasts or seconds)
        except subprocess.TimeoutExpired:
            if not example.lasts:
                os.killpg(process.pid, signal.SIGKILL)
                return False, f"did not end within {seconds} s", output.read_text()
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return False, "did not end within 30 s after Ctrl-C", output.read_text()
    text = output.read_text(errors="replace")
    return process.returncode == 0, last_line(text), text


def feed(model: Path, port: int) -> None:
    """Send a completion, so that an example that only watches the server has something to see."""
    body = json.dumps({"model": str(model), "prompt": "One, two, " * 40, "max_tokens": 4}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, data=body, headers=headers)
    time.sleep(5)
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()


def run_example(source: Path, name: str, folder: Path, model: Path, seconds: int) -> Row:
    kind = "offline" if name in OFFLINE else "online"
    example = OFFLINE[name] if name in OFFLINE else ONLINE[name]
    port = get_open_port()
    for path in filter(None, (name, example.server)):
        text = (source / "examples" / path).read_text()
        (folder / Path(path).name).write_text(rewrite(text, model, port))
    began = time.monotonic()
    script = folder / Path(name).name
    try:
        if kind == "offline":
            runs, why, text = run_script(script, example, seconds)
        else:
            with server_for(example, folder, model, port):
                if example.lasts:
                    threading.Thread(target=feed, args=(model, port)).start()
                runs, why, text = run_script(script, example, seconds)
    except RuntimeError as error:
        runs, why, text = False, str(error), ""
    row = {"example": name, "kind": kind, "runs": runs}
    row["seconds"] = round(time.monotonic() - began, 1)
    row["why"] = "" if runs else (example.reason or why.replace(str(folder), ""))
    row["last_line"] = "" if runs else why.replace(str(folder), "")
    if not runs:
        print("\n".join(text.splitlines()[-8:]), flush=True)
    return row


def write_result(path: Path, source: Path, rows: list[Row]) -> None:
    """Write rows, and those that the file has of other examples. `partial` tells of such rows."""
    origin = provenance()
    origin["command"] = "python -m tests.vllm_suite.examples --source CLONE"
    commit = run_git(source, "rev-parse", "--short=10", "HEAD")
    replaced = {row["example"] for row in rows}
    partial = not {*OFFLINE, *ONLINE} <= replaced
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [*(row for row in kept if row["example"] not in replaced), *rows]
    rows.sort(key=lambda row: (row["kind"], row["example"]))
    result = {"provenance": origin, "vllm_commit": commit, "partial": partial, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a clone of vLLM")
    parser.add_argument("--json", type=Path, help="a file for the result of every example")
    parser.add_argument("--seconds", type=int, default=240, help="time limit of one example")
    parser.add_argument("--kind", choices=("offline", "online"), help="only these examples")
    parser.add_argument("--work", type=Path, help="an empty folder to keep; default: temporary")
    parser.add_argument("names", nargs="*", help="parts of names; default: every chosen example")
    given = parser.parse_args()
    # A shell starts background jobs with SIGINT ignored, and the examples would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    new = unlisted(given.source / "examples")
    if new:
        print(f"in neither table of example_list.py: {', '.join(new)}")
    chosen = {"offline": [*OFFLINE], "online": [*ONLINE]}
    names = chosen[given.kind] if given.kind else [*OFFLINE, *ONLINE]
    if given.names:
        names = [name for name in names if any(part in name for part in given.names)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="octavo-vllm-examples-") as made:
        folder = given.work or Path(made)
        model = folder / "model" if (folder / "model").exists() else prepare_model(folder)
        for name in names:
            row = run_example(given.source, name, folder, model, given.seconds)
            rows.append(row)
            word = "runs" if row["runs"] else f"fails: {row['why']} ({row['last_line']})"
            print(f"{name} ({row['seconds']} s): {word}", flush=True)
            if given.json:
                write_result(given.json, given.source, rows)
    for kind in ("offline", "online"):
        of_kind = [row for row in rows if row["kind"] == kind]
        print(f"{kind}: {sum(row['runs'] for row in of_kind)} of {len(of_kind)} run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
