"""`octavo serve`: serves the OpenAI API over HTTP, WebSocket and gRPC until a signal."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli import status
from octavo.cli.options import Model, check_model_files, command, fail, option
from octavo.cli.terminal import in_bytes, note
from octavo.engine_options import EngineOptions
from octavo.params import recommended_sampling
from octavo.serve.limits import Limits
from octavo.serve.ray_serve.ray_options import RayOptions, check_server_options
from octavo.serve.serve_config import ServeConfig

if TYPE_CHECKING:
    from octavo.serve.front.front import Front

TIERS = {"kv_host": "in host memory", "kv_disk": "on disk"}


@command
def serve(
    model: Model = None,
    *,
    engine: EngineOptions,
    server: ServeConfig,
    limits: Limits,
    ray_options: RayOptions,
    seed: Annotated[
        int,
        option("Seed of requests that give no seed.", "Model", "N", show_default=True),
    ] = 0,
) -> None:
    """Serve a model over HTTP: [bold]octavo serve[/bold], then POST to /v1/chat/completions"""
    seeded = replace(engine, seed=seed)
    config = replace(server, model=model, engine=seeded, limits=limits)
    key = os.environ.get("VLLM_API_KEY")
    if key and not config.needs_key:
        config = replace(config, api_keys=(key,))
    check_model_files(model, engine)
    if ray_options.ray:
        return serve_on_ray(config, ray_options)
    try:
        from octavo.serve.server import run
    except ImportError as error:
        fail(
            f"the server needs more packages than the engine ({error.name} is missing): "
            "pip install 'octavo[serve]'"
        )
    run(config, announce, PhaseReport())
    note("stopped")


def serve_on_ray(config: ServeConfig, options: RayOptions) -> None:
    check_server_options(config)
    report = PhaseReport()
    report("importing Ray", None)
    try:
        from octavo.serve.ray_serve.deploy import run
    except ImportError as error:
        fail(
            f"--ray needs more packages than the server ({error.name} is missing): "
            "pip install 'octavo[ray]'"
        )

    def say(port: int) -> None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{config.scheme}://{host}:{port}"
        count = f"{options.replicas} replica" + ("" if options.replicas == 1 else "s")
        print(f"{config.name}: {count}\nready:   {address}/v1", flush=True)

    run(config, options, say, report)


def announce(front: Front, port: int) -> None:
    """Print what fits in memory, the addresses and an example, once the server is ready."""
    loaded = front.engine_client.model_info()
    config = front.config
    assert loaded is not None
    memory = loaded.memory
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{config.scheme}://{host}:{port}"
    suffix = "/v1"
    watch = f"watch:   {address}/\n"
    curl = f"curl {address}"
    if config.uds is not None:
        address = f"{config.uds} (a Unix domain socket)"
        suffix = ""
        watch = ""
        curl = f"curl --unix-socket {config.uds} {config.scheme}://localhost"
    lower_tiers = "".join(
        f", {in_bytes(memory[k])} {name}" for k, name in TIERS.items() if memory.get(k)
    )
    key = ' -H "Authorization: Bearer $KEY"' if config.needs_key else ""
    grpc = f"gRPC:    {host}:{config.grpc_port}\n" if config.grpc_port else ""
    defaults = {"temperature": 1, **loaded.sampling}
    sampling = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    concurrency = memory["kv_tokens"] // max(loaded.longest_sequence - 1, 1)
    kv = in_bytes(memory["kv"])
    if loaded.device == "cpu":
        kv = f"up to {kv}, allocated as it fills"
    requests = "1 request" if concurrency == 1 else f"{concurrency:,} requests"
    print(
        f"{config.name}: {loaded.architecture}, {loaded.weights}, computed in {loaded.dtype} on "
        f"{loaded.device}\n"
        f"memory:  weights {in_bytes(memory['weights'])}{draft_weights(loaded.speculative)}, "
        f"activations {in_bytes(memory['activations'])}, "
        f"KV {kv}{lower_tiers}\n"
        f"KV:      {memory['kv_tokens']:,} tokens in {loaded.num_blocks:,} blocks of "
        f"{loaded.block_size}; {requests} of {loaded.longest_sequence:,} tokens at once\n"
        f"sample:  {sampling} by default ({sampling_source(front)})\n"
        f"drafts:  {describe_drafts(loaded.speculative)}\n"
        f"ready:   {address}{suffix}\n{grpc}"
        f"{watch}"
        f"try:     {curl}{example(front)}{key}",
        flush=True,
    )
    sys.stdout.flush()


def sampling_source(front: Front) -> str:
    """Return where the sampling defaults come from."""
    loaded = front.engine_client.model_info()
    assert loaded is not None
    overrides = recommended_sampling(front.config.engine.override_generation_config or {})
    sources = []
    if loaded.sampling.keys() - overrides.keys():
        sources.append("generation_config.json")
    if overrides:
        sources.append("--override-generation-config")
    return " and ".join(sources) or "the model has no sampling defaults"


def draft_weights(settings: str) -> str:
    """Return a remark on the weights if those of a drafter are counted too."""
    method, _, _ = settings.partition(",")
    drafter = {"head": "head", "draft_model": "model"}.get(method)
    return f" with the draft {drafter}" if drafter else ""


def describe_drafts(settings: str) -> str:
    """Describe speculative decoding. `settings` are in the syntax of --speculative, or empty."""
    if not settings:
        return "off (--speculative turns them on)"
    longest = re.search(r"\bk=(\d+)", settings)
    count = f", up to {longest[1]} tokens per step" if longest else ""
    return f"on{count} (--speculative {settings}; off turns them off)"


def example(front: Front) -> str:
    """Return the path, the header and the body of a curl command that works for this model."""
    loaded = front.engine_client.model_info()
    assert loaded is not None
    path = "/v1/chat/completions"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
    if not front.tokenizer.chat_templates:
        path = "/v1/completions"
        body = {"prompt": "Once upon a time"}
    body["max_tokens"] = 64
    if "temperature" not in loaded.sampling:
        body["temperature"] = 0.4  # A small model rambles at the default of 1.
    return f"{path} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


class PhaseReport:
    """Shows the phases of the start: on a terminal in the status line, in a log as lines."""

    def __init__(self) -> None:
        self._phase = ""
        self._began = time.monotonic()

    def __call__(self, phase: str, fraction: float | None) -> None:
        description = status.PHASES.get(phase, phase)
        if status.is_shown():
            status.show(f"{description}, {fraction:.0%}" if fraction is not None else description)
        elif phase != self._phase:
            print(
                f"{time.monotonic() - self._began:5.1f} s  {description}",
                file=sys.stderr,
                flush=True,
            )
        self._phase = phase
