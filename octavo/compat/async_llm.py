"""vLLM's AsyncLLM: replies as asynchronous generators, computed together by one engine.

All calls of the engine run in one thread, one after the other. A task of the event loop calls step
after step while there are requests, and hands the outputs to the generators.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from octavo.compat.llm_engine import LLMEngine
from octavo.errors import InvalidRequest
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams
from octavo.prompt_reader import Prompt
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
T = TypeVar("T")
PAUSE_MODES = ("abort", "wait", "keep")
DELIVERY_SECONDS = 0.01  # The generators get their last outputs in this time.


class AsyncLLM:
    def __init__(self, llm: LLM):
        self.engine = LLMEngine(llm)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-engine")
        self._queues: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._paused = False
        self._closed = False

    @classmethod
    def from_engine_args(cls, engine_args: Any, **_: Any) -> AsyncLLM:
        """The other arguments name vLLM's loggers and usage reports, which do not exist here."""
        return cls(LLM.from_engine_args(engine_args))

    # ---- requests --------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request. Leaving the loop aborts the request."""
        if request_id in self._queues:
            raise InvalidRequest(f"request id {request_id!r} is already running", "request_id")
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._queues[request_id] = queue
        finished = False
        try:
            await self._call(
                self.engine.add_request,
                request_id,
                prompt,
                sampling_params,
                lora_request=lora_request,
                priority=priority,
                **others,
            )
            self._start()
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._queues.pop(request_id, None)
            if not finished and not self._closed:
                await self._call(self.engine.abort_request, request_id)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests. Their generators yield a last output with the finish_reason "abort"."""
        for each_id in [request_id] if isinstance(request_id, str) else list(request_id):
            open_request = self.engine.open_requests.get(each_id)
            await self._call(self.engine.abort_request, each_id)
            output = None if open_request is None else open_request.next_output()
            if output is not None and each_id in self._queues:
                self._queues[each_id].put_nowait(output)

    # ---- pause -----------------------------------------------------------------------------------

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Run no more steps. `mode` says what happens to open requests: "abort" ends them, "wait"
        lets them finish first, and "keep" continues them after resume_generation."""
        mode = "wait" if wait_for_inflight_requests else mode
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        if mode == "abort":
            await self.abort(list(self._queues))
        while mode == "wait" and self._queues:
            await asyncio.sleep(DELIVERY_SECONDS)
        self._paused = True
        await self._call(lambda: None)  # The step in progress has ended.
        await asyncio.sleep(DELIVERY_SECONDS)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        self._paused = False
        self._start()

    async def is_paused(self) -> bool:
        return self._paused

    # ---- the engine ------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return not self._closed

    @property
    def errored(self) -> bool:
        return False

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.get_tokenizer()

    async def check_health(self) -> None:
        """Raise if the engine cannot be used any more."""
        if self._closed:
            raise InvalidRequest("the engine was shut down: make a new AsyncLLM")

    async def do_log_stats(self) -> None:
        """Log every metric that has a single value."""
        for metric in self.engine.get_metrics():
            if hasattr(metric, "value"):
                log.info("%s %s", metric.name, metric.value)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return await self._call(self.engine.reset_prefix_cache)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        await self._call(self.engine.start_profile, profile_prefix)

    async def stop_profile(self) -> None:
        await self._call(self.engine.stop_profile)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread. Open requests are dropped."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.engine.llm.close()

    async def _call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(function, *args, **options))

    def _start(self) -> None:
        """Run steps in a task, if there is none."""
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._run_steps())

    async def _run_steps(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while self._queues and not self._paused and not self._closed:
                try:
                    outputs = await self._call(self.engine.step)
                except Exception as error:
                    for queue in self._queues.values():
                        queue.put_nowait(error)
                    return
                for output in outputs:
                    if output.request_id in self._queues:
                        self._queues[output.request_id].put_nowait(output)
