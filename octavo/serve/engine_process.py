"""The engine process: builds the model, then steps for ever. The front starts it; it serves one front and ends with it.

    main thread    takes messages in, steps, sends news out; sleeps in the socket while there is nothing to do
    guide threads  compile what structured output asks for (octavo/text/guide.py); the request is held meanwhile
    pulse thread   tells the front every quarter of a second that the process lives and where it stands, and sends what the
                   socket had no room for

The socket's own queue is the inbox, and sending never waits (link.py).
Knows tokens and no text but what the tokenizer's place is. Installs no signal handlers but for dumping stacks.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.core.engine import Engine, Handle, Runner
from octavo.core.tier_index import TierIndex
from octavo.errors import InvalidRequest, OctavoError
from octavo.params import SamplingParams
from octavo.serve.link import EngineLink
from octavo.serve.messages import (
    Abort,
    Add,
    Beat,
    Failed,
    Loaded,
    Look,
    News,
    Phase,
    Ready,
    Refused,
    Shutdown,
    Start,
    Stop,
    Taken,
    ToEngine,
)
from octavo.serve.process import die_with_parent
from octavo.serve.view import Viewer
from octavo.types import Guide, Output, Plan, Request, Sequence

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.text.guide import Compilation, Guides

log = logging.getLogger(__name__)
PULSE = 0.25  # seconds
LONG = 5.0  # seconds: a step that may take longer is told of before it begins
# operations a second, of a core and of a GPU, that the slowest reach
SLOWEST = {"cpu": 5e9, "cuda": 5e13}
# seconds between two looks at what is being compiled, while there is nothing else to do
TICK = 0.002
HOST_TIMES = ("plan", "launch", "wait", "commit")


class Observed:
    """A runner that takes note of the plans that pass: which requests begin, how many tokens of which kind."""

    def __init__(self, runner: Runner, live: Mapping[int, Sequence]):
        self.runner = runner
        self.live = live
        self.begun: list[tuple[str, float]] = []  # requests, and when
        self.steps: list[int] = []  # tokens of each
        self.prefill = self.decode = 0
        self.viewer: Viewer | None = None  # while somebody watches
        self.slowest = 0.0  # seconds that a token may take
        # steps of which it was told, and the seconds that each may take
        self.long: dict[int, float] = {}
        # a step that may take so long is about to begin
        self.tell: Callable[[float], None] = lambda seconds: None

    def launch(self, plan: Plan) -> Handle:
        now = time.monotonic()
        self.begun += [
            (seq.request.id, now)
            for row in plan.new_slots
            if (seq := self.live[row.seq_id]).preemptions == 0
        ]
        count = plan.num_tokens
        if plan.items:
            self.steps.append(count)
        for item in plan.items:
            if item.start is None:
                self.decode += item.num_tokens
            else:
                self.prefill += item.num_tokens
        if self.viewer is not None:
            self.viewer.planned(plan)
        if (seconds := count * self.slowest) > LONG:
            self.long[plan.step] = seconds
            self.tell(seconds)
        return self.runner.launch(plan)


class DeviceLost(OctavoError):
    """After an illegal access or a failed assertion on the device nothing more can be computed in this process."""


class EngineLoop:
    # whether the device still computes: asked when a step has failed
    alive: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(
        self,
        engine: Engine,
        link: EngineLink,
        guides: Guides | None = None,
        check_interval: float = 0.0,
        slowest: float = 0.0,  # seconds that a token may take
    ):
        self.engine = engine
        self.link = link
        self.guides = guides
        self.check_interval = check_interval
        self.checked = time.monotonic()
        self.checks = self.check_failures = 0
        self.held: dict[str, tuple[Add, Compilation]] = {}  # requests whose guide is being compiled
        # requests that nobody follows: what each sequence said, but its first
        self.whole: dict[str, dict[int, list[int]]] = {}
        self.observed = engine.runner = Observed(engine.runner, engine.scheduler.live)
        self.observed.slowest = slowest
        self.observed.tell = self._begin_long
        # as last told
        self.patience = 0.0
        self.full = False
        self.beat = Beat()
        self._snapshot()

    def run(self) -> None:
        """Until the front says Shutdown."""
        engine = self.engine
        told = 0.0
        while True:
            rested = False
            while (
                message := self.link.receive(
                    0.0 if not engine.idle else TICK if self.held else None
                )
            ) is not None:
                rested = rested or engine.idle
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            self._release()
            outputs = engine.step()
            if (
                any(out.finish_reason == "error" and out.code is None for out in outputs)
                and not self.alive()
            ):
                raise DeviceLost("the device computes no more")
            self.send(outputs)
            now = time.monotonic()
            resting = engine.idle and not self.held
            if self.check_interval and now - self.checked > self.check_interval:
                self.checked = now
                self._check()
            if rested or resting or now - told > PULSE:
                told = now
                self._snapshot()
                if rested or resting:
                    self.link.send(self.beat)

    def _take(self, message: ToEngine) -> None:
        engine = self.engine
        if isinstance(message, Add):
            spec = message.params.structured_outputs
            if spec is None or self.guides is None:
                self._add(message)
            else:
                self.held[message.id] = message, self.guides.start(spec)
        elif isinstance(message, Abort):
            untold = 0
            for id in message.ids:
                self.held.pop(id, None)
                untold += sum(map(len, self.whole.pop(id, {}).values()))
                self._ended(engine.abort(id))
            rests = engine.idle and not self.held
            was = self.full
            self.full = self.full and not rests
            if untold or was != self.full:
                self.link.send(News([], [], [], untold, self.patience, self.full))
            if rests:
                self._snapshot()
                self.link.send(self.beat)
        elif isinstance(message, Look):
            self._look()
        elif isinstance(message, Stop):
            if message.id in engine.scheduler.requests:
                self._ended([Output(message.id, message.index, [], finish_reason="stop")])
            engine.stop(message.id, message.index)

    def _add(self, m: Add, guide: Guide | None = None) -> bool:
        try:
            request = Request(
                m.id,
                m.prompt,
                m.params,
                m.arrival,
                m.salt,
                m.priority,
                m.deadline,
                m.key,
                guide,
                m.submitted,
            )
            self.engine.add(request)
        except InvalidRequest as error:
            self.link.send(Refused(m.id, str(error), error.param, error.code))
            return False
        if m.whole:
            self.whole[m.id] = {}
        return True

    def _release(self) -> None:
        """Queue the held requests whose guide is there, and refuse those that will have none."""
        for id, (message, work) in list(self.held.items()):
            try:
                guide = work.poll()
            except InvalidRequest as error:
                self.link.send(Refused(id, str(error), error.param, error.code))
            else:
                if guide is None:
                    continue
                if self._add(message, guide):
                    self.link.send(Taken(id))
            del self.held[id]

    def send(self, outputs: list[Output]) -> None:
        begun = self._begun()
        self._ended(outputs)
        if self.whole:
            outputs = [out for out in outputs if self._tells(out)]
        before = self.patience, self.full
        self.patience = self._patience()
        self.full = self.engine.scheduler.saturated
        # of steps for those who left: nothing else would bring it
        last = bool(self.observed.steps) and self.engine.idle
        if outputs or begun or last or (self.patience, self.full) != before:
            steps = self.observed.steps
            self.observed.steps = []
            self.link.send(News(outputs, begun, steps, patience=self.patience, full=self.full))

    def _patience(self) -> float:
        """What the longest step under way may take."""
        if not self.observed.long:
            return 0.0
        under_way = {plan.step for plan, _, _ in self.engine.in_flight}
        self.observed.long = {
            step: seconds for step, seconds in self.observed.long.items() if step in under_way
        }
        return max(self.observed.long.values(), default=0.0)

    def _begun(self) -> list[tuple[str, float]]:
        """Requests that have begun since this was asked last."""
        begun = self.observed.begun
        self.observed.begun = []
        return begun

    def _begin_long(self, seconds: float) -> None:
        """Nobody shall take the engine for hung, nor what it begins now for waiting."""
        self.patience = max(seconds, self.patience)
        self.link.send(News([], self._begun(), [], patience=self.patience, full=self.full))

    def _look(self) -> None:
        """Somebody watches, until nobody has asked for a while."""
        self._ended([])
        viewer = self.observed.viewer = self.observed.viewer or Viewer(self.engine, self.held)
        begun = time.perf_counter()
        self._snapshot()
        view = viewer.view()
        view.seconds = time.perf_counter() - begun
        self.link.send(self.beat)
        self.link.send(view)

    def _ended(self, outputs: list[Output]) -> None:
        viewer = self.observed.viewer
        if viewer is not None and viewer.forgotten:
            viewer.close()
            self.observed.viewer = None
        elif viewer is not None:
            viewer.ended(outputs)

    def _tells(self, out: Output) -> bool:
        """Whether the front is to hear of it now. What a request that nobody follows said is told with its end: a message for
        each of its tokens is most of what such a request costs."""
        said = self.whole.get(out.request_id)
        if said is None:
            return True
        if out.finish_reason is None:
            if out.index in said:
                said[out.index] += out.tokens
                return False
            said[out.index] = []
            return True
        out.tokens = said.pop(out.index, []) + out.tokens
        if not said and out.request_id not in self.engine.scheduler.requests:
            del self.whole[out.request_id]
        return True

    def _check(self) -> None:
        """Do the books agree? If not it is written down and counted, and the engine goes on: whoever reads it decides."""
        scheduler = self.engine.scheduler
        self.checks += 1
        try:
            scheduler.check()
        except Exception as error:
            self.check_failures += 1
            self._snapshot()
            dump = {
                "event": "invariant_broken",
                "error": f"{type(error).__name__}: {error}",
                "scheduler": {name: getattr(self.beat, name) for name in Beat.__struct_fields__},
                "sequences": [
                    dict(request=s.request.id, index=s.index, status=s.status.value, computed=s.computed, planned=s.planned,
                         inflight=s.steps_in_flight, epoch=s.epoch, row=s.slot, published=s.published_blocks, table=s.block_table[:64])
                    for s in list(scheduler.live.values())[:64]
                ],
            }  # fmt: skip
            log.error("%s", json.dumps(dump))

    def _snapshot(self) -> None:
        scheduler = self.engine.scheduler
        pool = self.engine.scheduler.pool
        count = scheduler.counters
        used = pool.num_blocks - len(pool.free_blocks)
        held = {
            b for seq in scheduler.running for b in seq.block_table if pool.hashes[b] is not None
        }
        # what pool.num_cached counts one by one, 2 ms at 32K blocks
        cached = len(pool.hash_index) - len(held)
        self.beat = Beat(
            count.steps,
            len(scheduler.decoding) + len(scheduler.prefilling),
            len(scheduler.waiting),
            used,
            cached,
            len(pool.free_blocks) - cached,
            count.queried_tokens,
            count.cached_tokens,
            count.computed_tokens,
            count.generated_tokens,
            count.preemptions,
            count.copies,
            self.observed.prefill,
            self.observed.decode,
            {name: getattr(self.engine.host_time, name) for name in HOST_TIMES},
            count.recomputed_tokens,
            tier_state(scheduler.tiers) if scheduler.tiers is not None else {},
            dict(count.tiers.misses),
            *(
                (self.guides.compiled, self.guides.hits, self.guides.seconds)
                if self.guides is not None
                else (0, 0, 0.0)
            ),
            self.checks,
            self.check_failures,
            count.oom_steps,
        )


def tier_state(tiers: TierIndex) -> dict[str, float]:
    """Counters, and how many slots of host memory are in which state."""
    state: dict[str, float] = {
        name: value for name, value in asdict(tiers.counters).items() if name != "misses"
    }
    cached = len(tiers.ready)
    free = len(tiers.free_blocks)
    return state | {
        **{
            f"{move}_bytes": state[f"{move}s"] * tiers.block_bytes
            for move in ("store", "load", "save")
        },
        "fetch_bytes": tiers.counters.fetches * tiers.block_bytes,
        "slots_cached": cached,
        "slots_free": free,
        "slots_busy": tiers.num_host_blocks - cached - free,
    }


class Pulse(threading.Thread):
    """Sends the latest beat while the main thread computes, loads or hangs."""

    def __init__(self, link: EngineLink):
        super().__init__(daemon=True, name="pulse")
        self.link = link
        self.loop: EngineLoop | None = None

    def run(self) -> None:
        while True:
            due = time.monotonic() + PULSE
            while (left := due - time.monotonic()) > 0:
                if self.link.stuck.wait(left):
                    self.link.push(due - time.monotonic())
            self.link.send(self.loop.beat if self.loop else Beat())


def build(start: Start, link: EngineLink) -> LLM:
    link.send(Phase("importing"))
    from octavo.llm import LLM

    last = 0.0

    def progress(fraction: float) -> None:
        nonlocal last
        if fraction >= 1:
            link.send(Phase("allocating"))
        elif fraction - last >= 0.01:
            last = fraction
            link.send(Phase("loading", fraction))

    link.send(Phase("loading", 0.0))
    llm = LLM.from_options(start.model, start.options, progress)
    link.send(describe(llm, start.options.tokenizer))
    return llm


def describe(llm: LLM, tokenizer: str | None) -> Loaded:
    metadata = llm.checkpoint.gguf_metadata if tokenizer is None else None
    gguf = (
        None
        if metadata is None
        else {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
    )
    memory = llm.memory
    return Loaded(
        llm.config.vocab_size,
        llm.schedule.max_model_len,
        llm.schedule.max_num_seqs,
        llm.schedule.max_num_batched_tokens,
        llm.cache.block_size,
        llm.cache.num_blocks,
        llm.cache.prefix_caching,
        str(llm.model_dtype).removeprefix("torch."),
        str(llm.device),
        llm.config.architecture,
        {
            "weights": memory.weights,
            "activations": memory.activations,
            "kv": memory.kv,
            "kv_tokens": memory.kv_tokens,
            "kv_host": memory.host,
            "kv_disk": memory.disk,
        },
        str(tokenizer or llm.checkpoint.directory) if gguf is None else None,
        gguf,
        str(llm.runner.kv.view.dtype).removeprefix("torch."),
        0 if llm.cache.kv_eviction == "none" else llm.cache.kv_budget,
        sampling=llm.default_sampling,
    )


def canary(engine: Engine) -> None:
    """Run one small request through the engine. An engine that cannot do this is not ready."""
    with engine.rehearsal():
        engine.add(Request("canary", [0] * 4, SamplingParams(max_tokens=4, ignore_eos=True)))
        while not engine.idle:
            for output in engine.step():
                if output.finish_reason == "error":
                    raise OctavoError(f"the model loads but does not run: {output.error}")


def slowest_token(llm: LLM) -> float:
    """Seconds that a token of a prompt takes on the slowest machine that is of any use."""
    import torch

    from octavo.memory import parameter_count

    cores = torch.get_num_threads() if llm.device.type == "cpu" else 1
    return 4 * parameter_count(llm.model) / (SLOWEST[llm.device.type] * cores)


def device_alive(llm: LLM) -> bool:
    """An error on a GPU stays, and every later call reports it: then only a new process helps."""
    if llm.device.type != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize(llm.device)
    except RuntimeError:
        return False
    return True


def main(end: str, stacks: int) -> int:
    """`end`: the descriptor of our end of the link. `stacks`: that of a file, where SIGUSR1 writes all threads' stacks."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="engine: %(levelname)s %(message)s")
    os.set_inheritable(int(end), False)
    link = EngineLink(socket.socket(fileno=int(end)))
    pulse = Pulse(link)
    link.send(Phase("starting"))
    start = link.receive(None)
    if not isinstance(start, Start):
        return 1
    pulse.start()
    try:
        llm = build(start, link)
        link.send(Phase("warming"))
        canary(llm.engine)
        llm.warm_up()
    except OctavoError as error:
        link.send(Failed(str(error)))
        link.close()
        return 2
    pulse.loop = EngineLoop(llm.engine, link, llm.guides, start.check_interval, slowest_token(llm))
    gc.collect()
    gc.freeze()  # what is here stays: walking it takes 50 ms and more, in the middle of a step
    link.send(Ready())
    pulse.loop.alive = lambda: device_alive(llm)
    try:
        pulse.loop.run()
    except DeviceLost as error:
        log.critical("%s: this process ends, and another is started", error)
        os._exit(3)  # nothing that touches the device would come to an end
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
