"""RemoteOpenAIServer and the other names that vLLM's tests import from tests.utils.

One server for each set of arguments is started and kept until the end of the run, because a start
takes seconds.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from octavo.compat.environment import get_open_port

ROCM_EXTRA_ARGS: list[str] = []
# These flags choose weights or hardware that the embedded model does not have.
DROPPED = {
    "--dtype": 1,
    "--tokenizer": 1,
    "--tensor-parallel-size": 1,
    "--gpu-memory-utilization": 1,
    "--load-format": 1,
    "--model-loader-extra-config": 1,
    "--speculative-config": 1,
    "--attention-backend": 1,
    "--runner": 1,
    "--hf-overrides": 1,
    "--max-num-batched-tokens": 1,
    "--enable-lora": 0,
    "--lora-modules": 1,
    "--max-lora-rank": 1,
    "--max-cpu-loras": 1,
    "--max-loras": 1,
    "--trust-remote-code": 0,
}
# Some tests generate until the context is full, which takes long on a CPU.
LONGEST = int(os.environ.get("OCTAVO_SUITE_LONGEST", "1024"))
# A template that opens a reasoning, for models that reason.
THINKING = Path(__file__).with_name("thinking.jinja")
_servers: dict[tuple[str, ...], RemoteOpenAIServer] = {}


def translated(model: str, given: list[str]) -> list[str]:
    """The command line of `octavo serve` for one of `vllm serve`."""
    args: list[str] = []
    words = [str(word) for word in given]
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in DROPPED:
            if not equals:
                del words[: DROPPED[name]]
            continue
        args.append(word)
        if name == "--max-model-len" and words:
            args.append(str(min(int(words.pop(0)), LONGEST)))
    if not any(word.startswith("--served-model-name") for word in args):
        args += ["--served-model-name", model]
    if (
        any(word.startswith("--reasoning-parser") for word in args)
        and "--chat-template" not in args
    ):
        # The embedded model does not reason, so its reasoning is closed after a few tokens.
        args += ["--chat-template", str(THINKING), "--thinking-token-budget", "24"]
    return args


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __new__(cls, model: str, vllm_serve_args: Any = (), **options: Any) -> RemoteOpenAIServer:
        key = (
            model,
            *map(str, vllm_serve_args),
            str(sorted((options.get("env_dict") or {}).items())),
        )
        if key not in _servers:
            server = super().__new__(cls)
            server._begin(model, list(vllm_serve_args), options)
            _servers[key] = server
        return _servers[key]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _begin(self, model: str, args: list[str], options: dict[str, Any]) -> None:
        self.uds = args[args.index("--uds") + 1] if "--uds" in args else None
        self.show_hidden_metrics = any("show-hidden-metrics" in word for word in args)
        self.host = "localhost"
        self.port = get_open_port()
        if "--port" in args:
            self.port = int(args[args.index("--port") + 1])
        command = [sys.executable, "-m", "octavo", "serve", "--model", "smollm2"]
        command += translated(model, args)
        if "--port" not in args and self.uds is None:
            command += ["--port", str(self.port)]
        if not any(word.startswith("--metrics-prefix") for word in command):
            command += ["--metrics-prefix", "vllm"]
        environment = {**os.environ, **(options.get("env_dict") or {})}
        self.folder = Path(tempfile.mkdtemp(prefix="octavo-vllm-server-"))
        self.log = (self.folder / "log").open("wb")
        self.proc = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT
        )
        atexit.register(self.stop)
        root = args[args.index("--root-path") + 1] if "--root-path" in args else ""
        self._wait(root)

    def _wait(self, root: str) -> None:
        limit = time.monotonic() + 300
        while time.monotonic() < limit:
            if self.proc.poll() is not None:
                break
            try:
                if self._is_ready():
                    return
            except Exception:  # The server is not there yet.
                pass
            time.sleep(0.3)
        text = (self.folder / "log").read_text()[-2000:]
        pytest.fail(f"the server did not start: {text}", pytrace=False)

    def _is_ready(self) -> bool:
        if self.uds is not None:
            import httpx

            with httpx.Client(transport=httpx.HTTPTransport(uds=self.uds)) as client:
                return client.get("http://localhost/health").status_code == 200
        return requests.get(self.url_for("health"), timeout=5).status_code == 200

    def stop(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts if part)

    def get_client(self, **options: Any) -> openai.OpenAI:
        options.setdefault("timeout", 600)
        return openai.OpenAI(
            base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options
        )

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        options.setdefault("timeout", 600)
        return openai.AsyncOpenAI(
            base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options
        )

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options
        )

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options
        )


RemoteVLLMServer = RemoteOpenAIServer
RemoteLaunchRenderServer = RemoteOpenAIServer


def _mark(*_: Any, **__: Any) -> Any:
    return lambda function: function


multi_gpu_test = large_gpu_test = create_new_process_for_each_test = _mark


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return pytest.mark.skip(reason=f"{name} of vLLM's tests.utils is about its own hardware")
