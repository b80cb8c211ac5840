"""`octavo serve` runs code of the user's in its processes: one extension of each kind in one
server, found by package.module:Name in the current directory or by an entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.serve.serve_config import ServeConfig
from octavo.text.tokenizer import Tokenizer
from tests import tiny
from tests.serve.running import Running, free_port

REPLY = '=> add {"a": 1, "b": 2} <='
# TOKENS are those of the reply, which the logits processor dictates.
EXTENSIONS = """
import torch

from octavo.core.policy import Policy
from octavo.model.decoder import Decoder
from octavo.ops.reference import ReferenceOps
from octavo.runner.logits_processors import AdapterLogitsProcessor
from octavo.text.tool_formats import ToolFormat

ARROWS = ToolFormat("arrows", "=> {name} {arguments} <=")


class Dictated(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return dictate


def dictate(output, logits):
    if len(output) < len(TOKENS):
        logits[:] = -torch.inf
        logits[TOKENS[len(output)]] = 0
    return logits


class LoudPolicy(Policy):
    def arrived(self, seq):
        print("the policy ranks a request", flush=True)


class LoudAttention:
    name = "loud"

    def __init__(self):
        self.operators = ReferenceOps()
        print("the attention backend is used", flush=True)

    def attention(self, query, kv_cache, batch, scale, window=0):
        return self.operators.attention(query, kv_cache, batch, scale, window)

    def kv_dtypes(self, dtype):
        return (dtype,)


class Renamed(Decoder):
    @classmethod
    def parse_config(cls, hf_config):
        return super().parse_config(hf_config | {"architectures": ["LlamaForCausalLM"]})
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def install_package(folder: Path) -> None:
    """Write what pip leaves behind of a package with one entry point."""
    about = folder / "loud-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[octavo.policies]\nloud = my_code:LoudPolicy\n")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose extensions lie in its current directory."""
    folder = tmp_path_factory.mktemp("extended")
    tokens = Tokenizer.from_directory(tiny.model_dir()).encode(REPLY, add_special_tokens=False)
    (folder / "my_code.py").write_text(f"TOKENS = {tokens}\n{EXTENSIONS}")
    install_package(folder / "installed")
    model = folder / "model"
    shutil.copytree(tiny.model_dir(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Renamed"]}))
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(port)]
    command += ["--model-class", "my_code:Renamed", "--tool-parser", "my_code:ARROWS"]
    command += ["--logits-processors", "my_code:Dictated", "--policy", "loud"]
    command += ["--attention", "my_code:LoudAttention", "--num-blocks", "256"]
    log = folder / "server.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder / "installed")},
        )
    running = Running(process, port, log, folder)
    try:
        running.wait(seconds=180)
        yield running
    finally:
        running.stop()


def test_the_server_runs_an_extension_of_each_kind(extended: Running) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "1 + 2"}], "max_tokens": 40}
    reply = extended.post("/v1/chat/completions", {**body, "tools": [TOOL]})
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    log = extended.log.read_text()
    assert "the policy ranks a request" in log and "the attention backend is used" in log


def test_a_logits_processor_changes_every_request(extended: Running) -> None:
    assert extended.complete(max_tokens=6)["choices"][0]["text"] == "=> add"


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool_parser 'json:loads' is not a ToolFormat"):
        ServeConfig(tool_parser="json:loads")
    with pytest.raises(InvalidRequest, match="'no_such:ARROWS' cannot be loaded: ModuleNotFound"):
        ServeConfig(tool_parser="no_such:ARROWS")
