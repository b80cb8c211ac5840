"""How a server is run, as frozen values. Limits on what a client may ask for are in limits.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine_options import EngineOptions
from octavo.serve.limits import Limits

LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeConfig:
    model: str | None = None  # None: the embedded one
    engine: EngineOptions = field(default_factory=EngineOptions)
    name: str = "smollm2"  # what clients call the model, and replies
    other_names: tuple[str, ...] = ()  # under which clients may ask for it too
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: no gRPC
    health_port: int | None = None  # None: /livez is answered by the event loop alone
    keys_file: str | None = None
    allow_unauthenticated: bool = False  # on an address that others can reach
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted besides those of the loopback
    trusted_proxies: tuple[str, ...] = LOOPBACK  # their X-Forwarded-For is believed
    allowed_origins: tuple[str, ...] = ()  # web pages that may use the server from a browser
    strict_params: bool = False  # refuse fields that are not known
    # control tokens such as <|im_start|> in a text prompt are tokens; False: always characters
    parse_special: bool = True
    chat_template: str | None = None  # in place of the model's own
    request_templates: bool = False  # let a request bring its own chat template
    # how the model writes calls of tools: a name in octavo.text.tool_formats.FORMATS, auto or none
    tool_parser: str = "auto"
    metrics_prefix: str = "octavo"
    limits: Limits = field(default_factory=Limits)
    max_queue: int = 256  # requests that wait for their first step
    max_queue_tokens: int = 262_144  # and the tokens of their prompts
    queue_timeout: float = 60.0  # seconds to the first step
    request_timeout: float = 600.0  # seconds in all, unless the request says less
    drain_timeout: float = 30.0
    keep_alive: float = 10.0  # seconds of silence in a stream after which a comment goes out
    # seconds without a step, though there is work: write down where the engine stands
    stall_dump: float = 10.0
    stall_kill: float = 60.0  # and then: start it anew
    check_interval: float = 60.0  # seconds between two checks of the engine's invariants; 0: none
    text_workers: int = 2  # processes that parse, tokenise and render what is long or untrusted

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)
