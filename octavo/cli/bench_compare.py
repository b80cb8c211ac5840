"""`octavo bench compare`: compares engines and servers, which are measured in turn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from octavo.cli.bench import app
from octavo.cli.bench_session import Picture, Rounds, bench_session
from octavo.cli.options import Output, command, flag, option
from octavo.config import EMBEDDED
from octavo.errors import InvalidRequest

PEERS = Path(".venv-peers")


@app.command()
@command
def compare(
    engines: Annotated[
        str | None,
        option(
            "Engines to compare, separated by commas. Default: octavo and all peers that are "
            "installed; no engine if --endpoint is given.",
            None,
            "NAME,...",
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        option(
            "Server to compare, as NAME=URL or NAME=URL,MODEL. May be given several times.",
            None,
            "NAME=URL",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        option("API key for all endpoints. Default: the variable OCTAVO_API_KEY.", None, "KEY"),
    ] = None,
    chat: Annotated[
        bool, flag("--chat", "Send chats to endpoints instead of completions.")
    ] = False,
    no_ignore_eos: Annotated[
        bool,
        flag(
            "--no-ignore-eos",
            "The endpoints do not support ignore_eos, so their replies may end early.",
        ),
    ] = False,
    peers: Annotated[
        Path,
        option(
            "Virtual environment of the peers (make peers).", None, "DIRECTORY", show_default=True
        ),
    ] = PEERS,
    threads: Annotated[
        int | None, option("Threads of each engine. Default: all cores.", None, "N", min=1)
    ] = None,
    repeat: Rounds = 5,
    picture: Picture = None,
    output: Output = None,
) -> None:
    """Compare Octavo with other engines on the embedded model, or any servers with each other."""
    from octavo.bench.compare import Comparison, EndpointContender, EngineProcess, embedded_prompts
    from octavo.bench.openai_endpoint import OpenAIEndpoint
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    names = chosen_engines(engines, peers, bool(endpoint))
    threads = threads or len(os.sched_getaffinity(0))
    run = BenchRun("compare", output, model=EMBEDDED, threads=threads)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("starting", total=None)
        comparison = Comparison(run, repeat, lambda text: progress.update(task, description=text))
        try:
            prompts = embedded_prompts()
            for name in names:
                python = python_of(name, peers)
                comparison.add(
                    name,
                    lambda name=name, python=python: EngineProcess(  # type: ignore[misc]
                        name, python, peers / "models", threads, prompts
                    ),
                )
            for text in endpoint or []:
                label, address, model = read_endpoint(text)
                target = OpenAIEndpoint.parse(
                    address, model=model, api_key=api_key, chat=chat, may_stop=no_ignore_eos
                )
                comparison.add(
                    label,
                    lambda label=label, target=target: EndpointContender(  # type: ignore[misc]
                        label, target, reference_text()
                    ),
                )
            comparison.measure()
        finally:
            comparison.close()


def chosen_engines(requested: str | None, peers: Path, has_endpoints: bool) -> list[str]:
    from octavo.bench.compare import installed_engines
    from octavo.bench.peers.engines import ENGINES

    if requested is None:
        return [] if has_endpoints else ["octavo", *installed_engines(peers)]
    names = requested.split(",")
    if unknown := sorted(set(names) - set(ENGINES)):
        raise InvalidRequest(
            f"unknown engine {', '.join(unknown)}: use {', '.join(ENGINES)}", "engines"
        )
    return names


def python_of(name: str, peers: Path) -> str:
    """Return the Python that runs an engine: Octavo's own, or that of the peers."""
    from octavo.bench.compare import default_python

    return default_python(None if name == "octavo" else peers)


def read_endpoint(text: str) -> tuple[str, str, str | None]:
    """Read NAME=URL or NAME=URL,MODEL."""
    name, equals, address = text.partition("=")
    url, _, model = address.partition(",")
    if not (name and equals and url):
        raise InvalidRequest(
            f"--endpoint {text!r} must be NAME=URL, as in local=http://127.0.0.1:8000", "endpoint"
        )
    return name, url, model or None


def reference_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
