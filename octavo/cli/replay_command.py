"""`octavo replay`: opens the live page on a recording, or writes both into one HTML file."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import command, fail, flag, option
from octavo.cli.terminal import say
from octavo.errors import InvalidRequest

Port = Annotated[int, option("Port to serve the page on; 0 takes any free port.", None, "0..65535")]
NoBrowser = Annotated[bool, flag("--no-browser", "Do not open the page in a browser.")]


@command
def replay(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File that --record-events has written.", show_default=False
        ),
    ],
    export: Annotated[
        Path | None,
        option(
            "Write the page with the recording into this HTML file, and start no server.",
            None,
            "FILE",
        ),
    ] = None,
    port: Port = 0,
    no_browser: NoBrowser = False,
) -> None:
    """Replay a recording in a browser: [bold]octavo replay events.jsonl[/bold]"""
    from octavo.core.event_recorder import read_recording
    from octavo.web_page import single_file

    lines = read_recording(recording)
    if export is not None:
        export.write_text(single_file([lines], f"Octavo, {recording.name}"), encoding="utf-8")
        num_events = lines.count(b"\n")
        say(f"{export} shows {num_events:,} events: open it in a browser")
        return
    serve_recording([lines], port, opens_browser=not no_browser)


def serve_recording(
    recordings: list[bytes], port: int, opens_browser: bool, lesson: str = ""
) -> None:
    """Serve the page with a recording until Ctrl-C. A lesson may have several recordings."""
    from octavo.replay_server import ReplayServer

    def simulate(body: bytes) -> bytes:
        from octavo.bench.what_if import what_if

        try:
            return json.dumps(what_if(recordings[0], json.loads(body))).encode()
        except (InvalidRequest, ValueError) as error:
            return json.dumps({"message": str(error)}).encode()

    try:
        server = ReplayServer(recordings, port, lesson, {"/live/what-if": simulate})
    except OSError as error:
        fail(f"port {port} cannot be used ({error.strerror}): choose another one with --port")
    say(f"replay:  {server.url}   (Ctrl-C ends it)")
    if opens_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
