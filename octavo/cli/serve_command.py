"""`octavo serve`: serves the OpenAI API over HTTP, WebSocket and gRPC until a signal."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import EMBEDDED, Model, command, fail, flag, option, size
from octavo.cli.terminal import in_bytes
from octavo.engine_options import EngineOptions
from octavo.errors import ChatTemplateError, InvalidRequest

if TYPE_CHECKING:
    from octavo.serve.front.front import Front

KeysFile = Annotated[
    Path | None, option("TOML file with API keys; docs/serving.md describes it.", "Safety", "FILE")
]
Names = Annotated[
    list[str] | None,
    option("Accept requests for this host name too. May be given several times.", "Safety", "NAME"),
]
Origins = Annotated[
    list[str] | None,
    option("Allow web pages from this origin. May be given several times.", "Safety", "URL"),
]
Proxies = Annotated[
    list[str] | None,
    option(
        "Take client addresses from this proxy's X-Forwarded-For. May be given several times.",
        "Safety",
        "ADDRESS",
    ),
]
MaxConnections = Annotated[
    int,
    option("Maximum number of open connections.", "Load", "N", parser=size, show_default="4K"),
]
MaxAddressConnections = Annotated[
    int,
    option(
        "Maximum number of open connections from one address, such as a reverse proxy.",
        "Load",
        "N",
        parser=size,
        show_default="1K",
    ),
]
TIERS = {"kv_host": "in host memory", "kv_disk": "on disk"}


@command
def serve(
    model: Model = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            help="Port to listen on; 0 takes any free port.", metavar="N", min=0, max=65535
        ),
    ] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            help="Also serve gRPC on this port.", metavar="N", min=1, max=65535, show_default=False
        ),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            help="Also answer /livez on this port, from a thread of its own.",
            metavar="N",
            min=1,
            max=65535,
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model for clients. May be repeated: replies have the first name.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    engine: EngineOptions,
    api_keys: KeysFile = None,
    allow_unauthenticated: Annotated[
        bool, flag("--allow-unauthenticated", "Allow a public address without API keys.", "Safety")
    ] = False,
    allowed_host: Names = None,
    allowed_origin: Origins = None,
    trusted_proxy: Proxies = None,
    strict_params: Annotated[
        bool, flag("--strict-params", "Refuse requests that contain unknown fields.", "Safety")
    ] = False,
    no_parse_special: Annotated[
        bool,
        flag(
            "--no-parse-special",
            "Read control tokens in text prompts as plain characters.",
            "Safety",
        ),
    ] = False,
    trust_request_chat_template: Annotated[
        bool,
        flag("--trust-request-chat-template", "Accept a chat template in a request.", "Safety"),
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File with a Jinja chat template. Default: the model's own template.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            "--tool-parser",
            "--tool-call-parser",
            help="Format of the model's tool calls: auto (found from the chat template), none, or a "
            "name that docs/serving.md lists.",
            metavar="NAME",
        ),
    ] = "auto",
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice",
            help="Accepted for vLLM's command lines. Tools are always enabled.",
            hidden=True,
        ),
    ] = False,
    max_queue: Annotated[
        int,
        option(
            "Maximum number of requests in the queue.", "Load", "N", parser=size, show_default=True
        ),
    ] = 256,
    max_queue_tokens: Annotated[
        int,
        option(
            "Maximum number of prompt tokens in the queue.",
            "Load",
            "N",
            parser=size,
            show_default="256K",
        ),
    ] = 262_144,
    max_connections: MaxConnections = 4096,
    max_connections_per_address: MaxAddressConnections = 1024,
    max_watchers: Annotated[
        int,
        option(
            "Maximum number of open live pages; 0 disables the live page.",
            "Load",
            "N",
            min=0,
            show_default=True,
        ),
    ] = 8,
    text_workers: Annotated[
        int,
        option(
            "Number of worker processes that parse and tokenise long inputs.",
            "Load",
            "N",
            min=1,
            show_default=True,
        ),
    ] = 2,
    queue_timeout: Annotated[
        float,
        option(
            "Seconds that a request may spend in the queue.",
            "Load",
            "X",
            min=0.001,
            show_default=True,
        ),
    ] = 60.0,
    request_timeout: Annotated[
        float,
        option(
            "Seconds that a request may take from arrival to its last token.",
            "Load",
            "X",
            min=0.001,
            show_default=True,
        ),
    ] = 600.0,
    drain_timeout: Annotated[
        float,
        option(
            "Grace period on shutdown: seconds that open requests have to finish after SIGTERM.",
            "Load",
            "X",
            min=0,
            show_default=True,
        ),
    ] = 30.0,
    keep_alive: Annotated[
        float,
        option(
            "Seconds without output after which a stream sends a comment to stay open.",
            "Load",
            "X",
            min=0.1,
            show_default=True,
        ),
    ] = 10.0,
    stall_dump: Annotated[
        float,
        option(
            "Seconds without a step after which the state of a busy engine is logged.",
            "Load",
            "X",
            min=0.1,
            show_default=True,
        ),
    ] = 10.0,
    stall_kill: Annotated[
        float,
        option(
            "Seconds without a step after which a busy engine is restarted.",
            "Load",
            "X",
            min=0.1,
            show_default=True,
        ),
    ] = 60.0,
    check_interval: Annotated[
        float,
        option(
            "Seconds between consistency checks of the scheduler state; 0 disables the checks.",
            "Load",
            "X",
            min=0,
            show_default=True,
        ),
    ] = 60.0,
    metrics_prefix: Annotated[
        str, option("Prefix of metric names: octavo or vllm.", "Load", "NAME")
    ] = "octavo",
    log_level: Annotated[
        str, typer.Option(help="Log level: debug, info, warning or error.", metavar="NAME")
    ] = "warning",
) -> None:
    """Serve a model over HTTP: [bold]octavo serve[/bold], then POST to /v1/chat/completions"""
    try:
        from octavo.serve.limits import Limits
        from octavo.serve.serve_config import LOOPBACK, ServeConfig
        from octavo.serve.server import run
        from octavo.text.tool_formats import FORMATS
    except ImportError as error:
        fail(
            f"the server needs more packages than the engine ({error.name} is missing): "
            "pip install 'octavo[serve]'"
        )
    if metrics_prefix not in ("octavo", "vllm"):
        fail("--metrics-prefix is octavo or vllm")
    if log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        fail("--log-level is debug, info, warning or error")
    if stall_kill < stall_dump:
        fail("--stall-kill must be at least --stall-dump: the state is logged before the restart")
    if tool_parser not in ("auto", "none", *FORMATS):
        fail(f"--tool-parser must be auto, none or a format: {', '.join(FORMATS)}")
    logging.getLogger().setLevel(log_level.upper())
    names = served_model_name or [public_name(model)]
    config = ServeConfig(
        model=model,
        engine=engine,
        name=names[0],
        other_names=tuple(names[1:]),
        host=host,
        port=port,
        grpc_port=grpc_port,
        health_port=health_port,
        keys_file=None if api_keys is None else str(api_keys),
        allow_unauthenticated=allow_unauthenticated,
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        trusted_proxies=(*LOOPBACK, *(trusted_proxy or ())),
        strict_params=strict_params,
        parse_special=not no_parse_special,
        chat_template=None if chat_template is None else read_template(chat_template),
        request_templates=trust_request_chat_template,
        tool_parser=tool_parser,
        metrics_prefix=metrics_prefix,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        limits=Limits(
            connections=max_connections,
            connections_per_address=max_connections_per_address,
            watchers=max_watchers,
        ),
        text_workers=text_workers,
        queue_timeout=queue_timeout,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        keep_alive=keep_alive,
        stall_dump=stall_dump,
        stall_kill=stall_kill,
        check_interval=check_interval,
    )
    run(config, announce)


def public_name(model: str | None) -> str:
    """Return the name that clients see. It is never a path of this machine."""
    if model is None:
        return EMBEDDED
    path = Path(model).expanduser()
    if path.exists() or os.path.isabs(model):
        return path.resolve().name.removesuffix(".gguf")
    return model


def read_template(path: Path) -> str:
    """Read a template and compile it, so that an error is found now and not by the first client."""
    from octavo.text.chat import ChatTemplate

    try:
        return ChatTemplate(path.read_text(encoding="utf-8")).source
    except (OSError, UnicodeDecodeError, ChatTemplateError) as error:
        raise InvalidRequest(f"--chat-template {path}: {error}", "chat_template") from None


def announce(front: Front, port: int) -> None:
    """Print what fits in memory, the addresses and an example, once the server is ready."""
    loaded = front.client.model_info()
    config = front.config
    assert loaded is not None
    memory = loaded.memory
    address = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
    lower = "".join(f", {in_bytes(memory[k])} {name}" for k, name in TIERS.items() if memory.get(k))
    key = ' -H "Authorization: Bearer $KEY"' if config.keys_file else ""
    grpc = (
        f"gRPC:    {address.removeprefix('http://').rpartition(':')[0]}:{config.grpc_port}\n"
        if config.grpc_port
        else ""
    )
    defaults = {"temperature": 1, **loaded.sampling}
    source = "generation_config.json" if loaded.sampling else "no generation_config.json"
    print(
        f"{config.name}: {loaded.architecture}, {loaded.dtype} on {loaded.device}\n"
        f"memory:  weights {in_bytes(memory['weights'])}, activations {in_bytes(memory['activations'])}, "
        f"KV {in_bytes(memory['kv'])}{lower}\n"
        f"KV:      {memory['kv_tokens']:,} tokens in {loaded.num_blocks:,} blocks of {loaded.block_size}; "
        f"{memory['kv_tokens'] // max(loaded.longest - 1, 1)} requests of {loaded.longest:,} tokens at once\n"
        f"sample:  {', '.join(f'{name} {value:g}' for name, value in defaults.items())} by default ({source})\n"
        f"ready:   {address}/v1\n{grpc}"
        f"watch:   {address}/\n"
        f"try:     curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"""-d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64}}'""",
        flush=True,
    )
    sys.stdout.flush()
