"""Records a trace of PyTorch's operators while LLM computes. `LLM.start_profile` starts it.

The trace is a file of JSON that chrome://tracing and Perfetto show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.config import ProfilerConfig
from octavo.errors import InvalidRequest


class StepProfiler:
    def __init__(self, config: ProfilerConfig | None):
        self.config = config
        self._running: Any = None

    def start(self, prefix: str | None = None) -> None:
        config = self.config
        if config is None or not config.torch_profiler_dir:
            raise InvalidRequest(
                "profiling needs a directory for its traces: make the LLM with "
                'profiler_config={"torch_profiler_dir": DIRECTORY}',
                "profiler_config",
            )
        if self._running is not None:
            raise InvalidRequest("the profiler is running already: call stop_profile first")
        schedule = None
        if config.max_iterations:
            schedule = torch.profiler.schedule(
                wait=config.delay_iterations,
                warmup=0,
                active=config.max_iterations,
                repeat=1,
            )
        directory = str(Path(config.torch_profiler_dir).expanduser())
        self._running = torch.profiler.profile(
            schedule=schedule,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(directory, prefix),
        )
        self._running.start()

    def step(self) -> None:
        """Count a step of the engine."""
        if self._running is not None:
            self._running.step()

    def stop(self) -> None:
        """Write the trace. Without a running profiler there is nothing to do."""
        if self._running is not None:
            self._running.stop()
            self._running = None
