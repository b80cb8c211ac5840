"""`octavo route`: starts an installed router, vLLM's or SGLang's, in front of servers.

Octavo has no router of its own. This command finds the program of a router's wheel, gives it
settings that suit Octavo's servers, and becomes that program. docs/routing.md compares the routers.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from octavo.cli.options import command, fail
from octavo.errors import InvalidRequest
from octavo.option_declaration import Option, check_options, integer_range, one_of, texts

# The routers by preference. vLLM's router comes first, because it passes on unknown request fields
# and routes.
PROGRAMS = {"vllm": "vllm-router", "sglang": "sglang-router"}
SUBCOMMANDS: dict[str, list[str]] = {"vllm": [], "sglang": ["launch"]}
LOG_LEVELS = {"vllm": "warning", "sglang": "warn"}
# A dead worker gets no more requests after one failed health check, so after one second. Requests
# that it has lost are retried for 2.5 seconds. With the defaults of the routers, both take minutes.
SETTINGS = {
    "--worker-startup-check-interval": 1,
    "--health-check-interval-secs": 1,
    "--health-check-timeout-secs": 3,
    "--health-failure-threshold": 1,
    "--health-success-threshold": 1,
    "--retry-max-retries": 8,
    # A request is routed to the worker with its prefix, unless this worker has this many more
    # requests than another. With the default of 64, one of two workers is idle.
    "--balance-abs-threshold": 4,
    "--cache-threshold": 0.5,
}
# The circuit breaker of SGLang's router counts invalid requests as failures of the worker, so one
# client with a few invalid requests would stop all workers.
FLAGS = ["--disable-circuit-breaker"]


def worker_urls(name: str, value: Any) -> tuple[str, ...]:
    urls = texts(name, value)
    if not urls:
        raise InvalidRequest(
            f"{name} is missing: give the address of each server, as in {name} "
            "http://127.0.0.1:8000",
            name,
        )
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(
                f"{name} must be an address such as http://127.0.0.1:8000, got {url!r:.100}", name
            )
    return tuple(url.rstrip("/") for url in urls)


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """The options of `octavo route`."""

    workers: Annotated[
        tuple[str, ...],
        Option(
            "Address of a server, such as http://127.0.0.1:8000. May be given several times.",
            metavar="URL",
            flag="--worker",
        ),
    ] = ()
    router: Annotated[
        str,
        Option(
            "Router to start: vllm, sglang, or auto (the first of these that is installed).",
            metavar="NAME",
            show_default=True,
            check=one_of("auto", *PROGRAMS),
        ),
    ] = "auto"
    policy: Annotated[
        str,
        Option(
            "How a server is chosen: cache_aware, round_robin, power_of_two or random.",
            metavar="NAME",
            show_default=True,
            check=one_of("cache_aware", "round_robin", "power_of_two", "random"),
        ),
    ] = "cache_aware"
    host: Annotated[str, Option("Address to listen on.", metavar="ADDRESS", show_default=True)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        Option(
            "Port to listen on.",
            metavar="1..65535",
            show_default=True,
            check=integer_range(1, 65535),
        ),
    ] = 8080
    metrics_port: Annotated[
        int,
        Option(
            "Port of the router's own metrics.",
            metavar="1..65535",
            show_default=True,
            check=integer_range(1, 65535),
        ),
    ] = 29000

    def __post_init__(self) -> None:
        check_options(self)


@command
def route(
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="ROUTER_OPTION", help="Further options of the router, after --."),
    ] = None,
    *,
    options: RouteOptions,
) -> None:
    """Start a router in front of servers: [bold]octavo route --worker URL --worker URL[/bold]"""
    workers = worker_urls("--worker", options.workers)
    router, program = find_router(options.router)
    print(f"{router}: http://{options.host}:{options.port}/v1 for {', '.join(workers)}", flush=True)
    arguments = router_arguments(router, options, workers)
    os.execv(program, [program, *arguments, *(more or [])])


def find_router(router: str) -> tuple[str, str]:
    """Return the name of a router and the path of its program."""
    folders = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    names = list(PROGRAMS) if router == "auto" else [router]
    for name in names:
        if program := shutil.which(PROGRAMS[name], path=folders):
            return name, program
    package = PROGRAMS[names[0]]
    fail(f"{' or '.join(PROGRAMS[name] for name in names)} is not installed: pip install {package}")


def router_arguments(router: str, options: RouteOptions, workers: tuple[str, ...]) -> list[str]:
    """Return the arguments of a router. Both routers have the same options."""
    settings: dict[str, object] = {
        "--host": options.host,
        "--port": options.port,
        "--policy": options.policy,
        "--prometheus-port": options.metrics_port,
        "--log-level": LOG_LEVELS[router],
        **SETTINGS,
    }
    pairs = [str(part) for pair in settings.items() for part in pair]
    return [*SUBCOMMANDS[router], "--worker-urls", *workers, *pairs, *FLAGS]
