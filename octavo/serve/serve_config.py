"""The options of a server, each declared once.

A declaration has the name, type, default, check and help text (octavo/option_declaration.py).
`octavo serve` shows every field with a help text as an option.

Limits on what a client may send are in limits.py. This module must not import torch, typer or the
server.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions, json_object
from octavo.errors import InvalidRequest
from octavo.option_declaration import (
    Option,
    check_options,
    integer_range,
    one_of,
    path,
    real,
    texts,
)
from octavo.serve.kv_events_config import KVEventsConfig, kv_events_config
from octavo.serve.limits import Limits

MAX_SECONDS = 10**9  # The largest value of every timeout and interval.
# The number 0 would choose a free port, but nothing reports which one, so these ports may not be 0.
port_number = integer_range(1, 65535)


def check_log_level(name: str, value: Any) -> Any:
    return one_of("debug", "info", "warning", "error")(name, str(value).lower())


def check_root_path(name: str, value: Any) -> str:
    """Return a path that begins with a slash, without slashes at its end."""
    if value and not str(value).startswith("/"):
        raise InvalidRequest(f"{name} must begin with a slash, got {value!r:.60}", name)
    return str(value).rstrip("/")


def check_tool_parser(name: str, value: Any) -> Any:
    """Return the name of a format of tool calls. vLLM's names are accepted too."""
    if value in ("auto", "none"):
        return value
    # This import would slow `octavo --help` down.
    from octavo.text.tool_formats import FORMATS, VLLM_FORMATS, find_format, is_extension

    if isinstance(value, str) and is_extension(value):
        find_format(value)  # A format that cannot be loaded is reported at once.
        return value
    return one_of("auto", "none", *FORMATS)(name, VLLM_FORMATS.get(value, value))


def check_reasoning_parser(name: str, value: Any) -> Any:
    """Return the name of a style of reasoning. vLLM's names are accepted too."""
    if value in ("auto", "none"):
        return value
    from octavo.text.reasoning import STYLES, VLLM_STYLES, VLLM_THINK_NAMES

    style = "think" if value in VLLM_THINK_NAMES else VLLM_STYLES.get(value, value)
    return one_of("auto", "none", *STYLES)(name, style)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The configuration of a server. `model`, `engine` and `limits` are not options themselves."""

    model: str | None = None  # None stands for the embedded model.
    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)

    host: Annotated[str, Option("Address to listen on.", metavar="ADDRESS", show_default=True)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        Option(
            "Port to listen on; 0 takes any free port.",
            metavar="0..65535",
            show_default=True,
            check=integer_range(0, 65535),
        ),
    ] = 8000
    uds: Annotated[
        str | None,
        Option(
            "Listen on this Unix domain socket instead of an address and a port.",
            metavar="FILE",
            check=path,
        ),
    ] = None
    root_path: Annotated[
        str,
        Option(
            "Path at which a proxy offers the server, such as /llm. Routes work with and without "
            "the path.",
            metavar="PATH",
            check=check_root_path,
        ),
    ] = ""
    ssl_certfile: Annotated[
        str | None,
        Option(
            "File with the TLS certificate. The server then speaks HTTPS.",
            metavar="FILE",
            check=path,
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Option(
            "File with the private key of the TLS certificate. Default: the certificate's file.",
            metavar="FILE",
            check=path,
        ),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Option(
            "File with the certificate authorities of clients, for --ssl-cert-reqs.",
            metavar="FILE",
            check=path,
        ),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Option(
            "0 ignores the certificates of clients, 1 checks a certificate that a client sends, "
            "and 2 also refuses clients that send none.",
            metavar="0..2",
            check=integer_range(0, 2),
        ),
    ] = 0
    ssl_ciphers: Annotated[
        str | None,
        Option(
            "Ciphers of TLS 1.2 and earlier, in the notation of OpenSSL.",
            metavar="LIST",
        ),
    ] = None
    grpc_port: Annotated[
        int | None,
        Option("Also serve gRPC on this port.", metavar="1..65535", check=port_number),
    ] = None
    health_port: Annotated[
        int | None,
        Option(
            "Also serve /livez on this port, in separate threads.",
            metavar="1..65535",
            check=port_number,
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Option(
            "Name of the model for clients. May be given several times; replies contain the first "
            "name.",
            metavar="NAME",
            check=texts,
        ),
    ] = ()
    # The content of the file. It replaces the model's own template.
    chat_template: Annotated[
        str | None,
        Option(
            "File with a Jinja chat template. Default: the model's own template.",
            metavar="FILE",
            reads="chat template",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Option(
            "JSON object with default values for the variables of the chat template.",
            metavar="JSON",
            reads="json",
            check=json_object,
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, Option("Write tokens in logprobs as token_id:N unless a request says otherwise.")
    ] = False
    enable_force_include_usage: Annotated[
        bool, Option("Send the usage at the end of every stream, even if not requested.")
    ] = False
    tool_parser: Annotated[
        str,
        Option(
            "Format of the model's tool calls: auto (detected from the chat template), none, a "
            "name that docs/serving.md lists, or package.module:NAME for a ToolFormat of your own.",
            metavar="NAME",
            aliases=("--tool-call-parser",),
            show_default=True,
            check=check_tool_parser,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Option(
            "How the model marks its reasoning: auto (detected from the chat template), none "
            "(reasoning stays in the reply), or a name that docs/serving.md lists.",
            metavar="NAME",
            show_default=True,
            check=check_reasoning_parser,
        ),
    ] = "auto"
    thinking_token_budget: Annotated[
        int | None,
        Option(
            "Maximum number of reasoning tokens of requests that set no thinking_token_budget.",
            metavar="N",
            check=integer_range(0),
        ),
    ] = None
    files_dir: Annotated[
        str | None,
        Option(
            "Directory for uploaded files and batches, which a restarted server continues. "
            "Default: a temporary directory.",
            metavar="DIRECTORY",
            check=path,
        ),
    ] = None
    batch_concurrency: Annotated[
        int,
        Option(
            "Requests of batches (/v1/batches) that run at the same time.",
            "Load",
            metavar="N",
            show_default=True,
            check=integer_range(1, 4096),
        ),
    ] = 32
    log_level: Annotated[
        str,
        Option(
            "Log level: debug, info, warning or error.",
            metavar="NAME",
            show_default=True,
            check=check_log_level,
        ),
    ] = "warning"

    keys_file: Annotated[
        str | None,
        Option(
            "TOML file with API keys; docs/serving.md describes it.",
            "Safety",
            metavar="FILE",
            flag="--api-keys",
            check=path,
        ),
    ] = None
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            "API key that clients may send. May be given several times. Other users of this "
            "machine can see it; with a file of --api-keys they cannot.",
            "Safety",
            metavar="KEY",
            flag="--api-key",
            check=texts,
        ),
    ] = ()
    allow_unauthenticated: Annotated[
        bool, Option("Allow a public address without API keys.", "Safety")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Accept requests for this host name too. May be given several times.",
            "Safety",
            metavar="NAME",
            flag="--allowed-host",
            check=texts,
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Allow web pages from this origin. May be given several times.",
            "Safety",
            metavar="URL",
            flag="--allowed-origin",
            check=texts,
        ),
    ] = ()
    # Proxies at a loopback address are always trusted.
    trusted_proxies: Annotated[
        tuple[str, ...],
        Option(
            "Take client addresses from this proxy's X-Forwarded-For. May be given several times.",
            "Safety",
            metavar="ADDRESS",
            flag="--trusted-proxy",
            check=texts,
        ),
    ] = ()
    strict_params: Annotated[
        bool, Option("Refuse requests that contain unknown fields.", "Safety")
    ] = False
    request_templates: Annotated[
        bool,
        Option(
            "Accept a chat template in a request.", "Safety", flag="--trust-request-chat-template"
        ),
    ] = False

    live_controls: Annotated[
        bool,
        Option(
            "Let the live page change settings of the running engine and crash it, for "
            "demonstrations.",
            "Safety",
        ),
    ] = False

    max_queue_memory: Annotated[
        int,
        Option(
            "Maximum memory of the requests in the queue, in bytes, as docs/serving.md estimates "
            "it.",
            "Load",
            metavar="N",
            reads="size",
            show_default=True,
            check=integer_range(1),
        ),
    ] = 512 * 2**20
    max_queue: Annotated[
        int | None,
        Option(
            "Maximum number of requests in the queue. Default: no limit besides their memory and "
            "the expected waiting time.",
            "Load",
            metavar="N",
            reads="size",
            check=integer_range(1),
        ),
    ] = None
    max_queue_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of prompt tokens in the queue. Default: no limit besides their memory.",
            "Load",
            metavar="N",
            reads="size",
            check=integer_range(1),
        ),
    ] = None
    text_workers: Annotated[
        int,
        Option(
            "Number of worker processes that parse and tokenise long inputs.",
            "Load",
            metavar="N",
            show_default=True,
            check=integer_range(1),
        ),
    ] = 2
    queue_timeout: Annotated[
        float,
        Option(
            "Seconds that a request may spend in the queue. A request that would probably wait "
            "longer is refused at once.",
            "Load",
            metavar="X",
            show_default=True,
            check=real(0.001, MAX_SECONDS),
        ),
    ] = 60.0
    # A request may set a shorter time.
    request_timeout: Annotated[
        float,
        Option(
            "Seconds that a request may take from arrival to its last token.",
            "Load",
            metavar="X",
            show_default=True,
            check=real(0.001, MAX_SECONDS),
        ),
    ] = 600.0
    drain_timeout: Annotated[
        float,
        Option(
            "Grace period on shutdown: seconds that open requests have to finish after SIGTERM.",
            "Load",
            metavar="X",
            show_default=True,
            check=real(0, MAX_SECONDS),
        ),
    ] = 30.0
    keep_alive: Annotated[
        float,
        Option(
            "Seconds without output after which a stream sends a comment to stay open.",
            "Load",
            metavar="X",
            show_default=True,
            check=real(0.1, MAX_SECONDS),
        ),
    ] = 10.0
    stall_dump: Annotated[
        float,
        Option(
            "Seconds without a step after which the state of a busy engine is logged.",
            "Load",
            metavar="X",
            show_default=True,
            check=real(0.1, MAX_SECONDS),
        ),
    ] = 10.0
    stall_kill: Annotated[
        float,
        Option(
            "Seconds without a step after which a busy engine is restarted.",
            "Load",
            metavar="X",
            show_default=True,
            check=real(0.1, MAX_SECONDS),
        ),
    ] = 60.0
    check_interval: Annotated[
        float,
        Option(
            "Seconds between consistency checks of the scheduler state; 0 disables the checks.",
            "Load",
            metavar="X",
            show_default=True,
            check=real(0, MAX_SECONDS),
        ),
    ] = 60.0
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            "Send OpenTelemetry spans to this collector, such as http://127.0.0.1:4317.",
            "Load",
            metavar="URL",
        ),
    ] = None
    metrics_prefix: Annotated[
        str,
        Option(
            "Prefix of metric names: octavo or vllm.",
            "Load",
            metavar="NAME",
            show_default=True,
            check=one_of("octavo", "vllm"),
        ),
    ] = "octavo"
    kv_events_config: Annotated[
        KVEventsConfig | None,
        Option(
            "Publish the changes of the prefix cache over ZeroMQ, configured by a JSON object as "
            "in vLLM; docs/routing.md describes it.",
            "Load",
            metavar="JSON",
            reads="json",
            check=kv_events_config,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.stall_kill < self.stall_dump:
            raise InvalidRequest(
                "--stall-kill must be at least --stall-dump: the state is logged before the "
                "restart",
                "stall_kill",
            )

    @property
    def needs_key(self) -> bool:
        return self.keys_file is not None or bool(self.api_keys)

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the model in requests. They contain no path of this machine by default."""
        return self.served_model_name or (public_name(self.model),)

    @property
    def name(self) -> str:
        """The name of the model that replies contain."""
        return self.names[0]


def public_name(model: str | None) -> str:
    """Return the name of a model file or directory, without the path to it."""
    if model is None:
        return EMBEDDED
    model_path = Path(model).expanduser()
    if model_path.exists() or os.path.isabs(model):
        return model_path.resolve().name.removesuffix(".gguf")
    return model
