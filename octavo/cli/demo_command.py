"""`octavo demo`: a server with few KV blocks and a page with traffic, to see how serving works."""

from __future__ import annotations

import webbrowser
from typing import TYPE_CHECKING

from octavo.cli.options import Model, command, fail
from octavo.cli.replay_command import NoBrowser, Port
from octavo.cli.terminal import note, say
from octavo.engine_options import EngineOptions
from octavo.serve.serve_config import ServeConfig

if TYPE_CHECKING:
    from octavo.serve.front.front import Front

# With so few blocks, slots and tokens, a handful of requests compete for resources.
DEMO_OPTIONS = EngineOptions(
    max_model_len=768,
    num_gpu_blocks_override=64,
    max_num_seqs=6,
    max_num_batched_tokens=96,
    swap_space=0.03,
    scheduling_policy="priority",
    show_text=True,
    speculative_config=None,  # A step gives each request one token, which is easier to follow.
)


@command
def demo(model: Model = None, port: Port = 0, no_browser: NoBrowser = False) -> None:
    """Watch a small server at work: [bold]octavo demo[/bold], then look at its page"""
    try:
        from octavo.serve.server import run
    except ImportError as error:
        fail(
            f"the demo needs more packages than the engine ({error.name} is missing): "
            "pip install 'octavo[serve]'"
        )

    def announce(front: Front, port: int) -> None:
        address = f"http://127.0.0.1:{port}/"
        say(f"open:    {address} in a browser; its buttons send traffic   (Ctrl-C ends the demo)")
        say("lessons: octavo lesson lists experiments with explanations")
        if not no_browser:
            webbrowser.open(address)

    config = ServeConfig(model=model, engine=DEMO_OPTIONS, port=port, live_controls=True)
    run(config, announce)
    note("stopped")
