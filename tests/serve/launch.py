"""Runs a server with what the command line does not offer: tight limits, few file descriptors,
quick watchdogs, another engine program, a loop that a SIGUSR2 blocks, worker processes with faults
(faulty_worker.py, unlimited_worker.py), a tokenizer that is slow, and one that panics over a text that begins with
PANIC and over the fourth token after a prompt that begins with the token 17 twice.

python -m tests.serve.launch PORT '{"limits": {"header_seconds": 0.3}, "stall_dump": 0.5}'
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
import time
from typing import Any

from octavo.collect import Collector
from octavo.engine_options import EngineOptions
from octavo.serve.limits import Limits
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import Server
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output


class Panic(BaseException):
    """As native code raises it: no Exception."""


def spoil(encode: Any) -> Any:
    def faulty(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        if text.startswith("PANIC"):
            raise Panic("a secret: /etc/passwd")
        found: list[int] = encode(self, text, *args, **options)
        return found

    return faulty


def spoil_many(encode_many: Any) -> Any:
    def faulty(self: Tokenizer, asked: list[tuple[str, bool, bool]]) -> list[list[int]]:
        if any(text.startswith("PANIC") for text, _, _ in asked):
            raise Panic("a secret: /etc/passwd")
        found: list[list[int]] = encode_many(self, asked)
        return found

    return faulty


def spoil_text(add: Any) -> Any:
    def faulty(self: Collector, out: Output) -> bool:
        had = len(self.completions[0].token_ids)
        if self.request.prompt[:2] == [17, 17] and had <= 3 < had + len(out.tokens):
            raise Panic("a secret: /etc/passwd")
        found: bool = add(self, out)
        return found

    return faulty


def burn(encode: Any, seconds: float) -> Any:
    """A tokenizer that computes for this long before it encodes."""

    def slow_encode(*args: Any, **options: Any) -> Any:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return encode(*args, **options)

    return slow_encode


def main(port: str, text: str) -> None:
    options: dict[str, Any] = json.loads(text)
    program = options.pop("program", None)
    worker_program = options.pop("worker_program", None)
    faulty = False
    if options.pop("faulty_text", False):
        Tokenizer.encode = spoil(Tokenizer.encode)  # type: ignore[method-assign]
        Tokenizer.encode_many = spoil_many(Tokenizer.encode_many)  # type: ignore[method-assign]
        Collector.add = spoil_text(Collector.add)  # type: ignore[method-assign]
        faulty = True
    slow_seconds = options.pop("slow_tokenizer", None)
    if slow_seconds is not None:
        Tokenizer.encode_many = burn(Tokenizer.encode_many, slow_seconds)  # type: ignore[method-assign]
        Tokenizer.encode = burn(Tokenizer.encode, slow_seconds)  # type: ignore[method-assign]
    memory_mib = options.pop("memory_limit_mib", None)
    if memory_mib is not None:  # the engine and the workers inherit the limit
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * 2**20, memory_mib * 2**20))
    log_level = options.pop("log_level", None)
    if log_level is not None:
        logging.basicConfig(level=log_level)
    descriptors = options.pop("descriptors", None)
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    limits = Limits(**options.pop("limits", {}))
    engine = EngineOptions(**options.pop("engine", {}))
    found = Server(ServeConfig(port=int(port), limits=limits, engine=engine, **options))
    if faulty:
        worker_program = "tests.serve.faulty_worker"
    if worker_program is not None:
        found.front.pool.command = (sys.executable, "-m", worker_program)
    if program is not None:
        found.front.engine_client.supervisor.command = (sys.executable, "-m", program)
    # in the loop's thread: it stands still
    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(2.5))
    found.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
