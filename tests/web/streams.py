"""Event streams of random workloads, and the page's own code (octavo/web/state.js) run by Node."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.engine import Engine
from octavo.core.event_stream import EventStream
from octavo.types import Output
from tests import workloads

FOLDER = Path(__file__).parent
NODE = shutil.which("node")


def stream_of_trial(
    seed: int,
    after_step: Callable[[EventStream, Engine], None] | None = None,
    snapshots: float = 0.2,
    **options: Any,
) -> list[bytes]:
    """Run a random workload and return the lines of its event stream. A snapshot follows a step
    with a probability of `snapshots`. `after_step` is called after each step."""
    streams: list[list[bytes]] = []
    dice = random.Random(f"snapshots {seed}")

    def make_engine(*arguments: Any, **keywords: Any) -> Engine:
        engine = make_plain_engine(*arguments, **keywords)
        lines: list[bytes] = []
        streams.append(lines)
        stream = EventStream(engine)
        stream.open(lambda data, is_start: lines.extend(data.splitlines()))
        step = engine.step

        def step_and_check() -> list[Output]:
            outputs = step()
            if dice.random() < snapshots:
                stream.add_snapshot()
            stream.flush()
            if after_step is not None:
                after_step(stream, engine)
            return outputs

        engine.step = step_and_check  # type: ignore[method-assign]
        return engine

    make_plain_engine = workloads.make_engine
    workloads.make_engine = make_engine  # type: ignore[assignment]
    try:
        workloads.trial(seed, **options)
    finally:
        workloads.make_engine = make_plain_engine
    return streams[-1]  # An earlier one belongs to the engine that filled the disk.


def run_node(script: str, text: bytes, *arguments: str) -> Any:
    """Run a script of this folder with a text as its input. Returns the JSON that it prints."""
    assert NODE is not None
    command = [NODE, str(FOLDER / script), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)
