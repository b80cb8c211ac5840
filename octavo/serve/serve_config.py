"""How a server is run, as frozen values. Limits on what a client may ask for are in limits.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine_options import EngineOptions
from octavo.serve.limits import Limits

LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeConfig:
    model: str | None = None  # None: the embedded model
    engine: EngineOptions = field(default_factory=EngineOptions)
    name: str = "smollm2"  # the model's name in requests and replies
    other_names: tuple[str, ...] = ()  # more names that requests may use
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: no gRPC
    health_port: int | None = None  # None: only the event loop answers /livez
    keys_file: str | None = None  # the TOML file with API keys
    allow_unauthenticated: bool = False  # a public address needs no API keys
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted besides those of the loopback
    trusted_proxies: tuple[str, ...] = LOOPBACK  # addresses whose X-Forwarded-For is believed
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may use the server
    strict_params: bool = False  # requests with unknown fields are refused
    # Control tokens such as <|im_start|> in a text prompt are tokens. False: they are characters.
    parse_special: bool = True
    chat_template: str | None = None  # replaces the model's own template
    request_templates: bool = False  # a request may contain its own chat template
    # how the model writes tool calls: a name in octavo.text.tool_formats.FORMATS, auto or none
    tool_parser: str = "auto"
    metrics_prefix: str = "octavo"
    limits: Limits = field(default_factory=Limits)
    max_queue: int = 256  # requests that wait for their first step
    max_queue_tokens: int = 262_144  # prompt tokens of the requests in the queue
    queue_timeout: float = 60.0  # seconds from arrival to the first step
    request_timeout: float = 600.0  # seconds from arrival to the end, unless the request says less
    drain_timeout: float = 30.0  # seconds that open requests have to finish on shutdown
    keep_alive: float = 10.0  # seconds without output after which a stream sends a comment
    stall_dump: float = 10.0  # seconds without a step after which a busy engine's state is logged
    stall_kill: float = 60.0  # seconds without a step after which a busy engine is restarted
    check_interval: float = 60.0  # seconds between consistency checks of the scheduler; 0: none
    text_workers: int = 2  # worker processes that parse and tokenise long or untrusted input

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)
