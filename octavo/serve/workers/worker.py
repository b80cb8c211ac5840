"""The main program of a worker process, which runs one job at a time with limited memory.

The front process starts it and may kill it at any time. Between jobs it waits on its socket, and it
ends when the front process closes the socket. It does not import torch, so that it starts quickly.
It never writes to the log, because a log line could contain the input of a client.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.errors import InvalidRequest
from octavo.parent_process import die_with_parent
from octavo.serve.api.api_errors import ApiError, api_error
from octavo.serve.channel.jobs import (
    Detokenize,
    JobDone,
    JobFailed,
    JobRefused,
    Parse,
    ParseMessage,
    Reply,
    decode_job,
    decode_setup,
    encode,
)
from octavo.serve.channel.sockets import LENGTH, frame
from octavo.serve.workers.handlers import HANDLERS, Context

RETAINED = 64 * 2**20  # Between jobs a process may use this many bytes more than at its start.
PAGE = resource.getpagesize()


# ---- one job -------------------------------------------------------------------------------------


def run_job(context: Context, encoded_job: bytes, payload: bytes) -> Reply:
    """Run a job and return the reply. Every exception becomes a reply too."""
    try:
        job = decode_job(encoded_job)
        if isinstance(job, Parse | ParseMessage | Detokenize):
            job.data = payload
        return JobDone(msgspec.Raw(encode(HANDLERS[type(job)](context, job))))
    except MemoryError:
        return JobRefused(
            400,
            f"the input needs more than {context.limits.text_memory} bytes of memory to process: "
            "shorten or simplify it",
            "text_memory_exceeded",
            retire=True,
        )
    except (ApiError, InvalidRequest) as error:
        refusal = api_error(error)
        return JobRefused(refusal.status, refusal.message, refusal.code, refusal.param)
    except BaseException as error:  # A panic in native code is not an Exception.
        return JobFailed(describe_error(error))


def describe_error(error: BaseException) -> str:
    """Return the type of an error and where it was raised. Its message may quote the client."""
    places = traceback.extract_tb(error.__traceback__)
    lines = [f"{Path(place.filename).name}:{place.lineno} in {place.name}" for place in places]
    return "\n".join([*lines, type(error).__name__])


# ---- memory --------------------------------------------------------------------------------------


@dataclass
class Memory:
    """Limits the address space of this process, and detects that it keeps too much memory."""

    base: int  # The resident bytes at the start.

    @classmethod
    def limited(cls, allowance: int) -> Memory:
        """Limit this process to its present size plus `allowance` bytes."""
        size, resident = memory_used()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if size:
            with suppress(ValueError, OSError):  # The system has set a lower limit.
                resource.setrlimit(resource.RLIMIT_AS, (size + allowance, hard))
        return cls(resident)

    def exceeded(self) -> bool:
        """Return whether the process uses far more memory than at its start, even after a trim."""
        if memory_used()[1] - self.base < RETAINED:
            return False
        gc.collect()
        with suppress(AttributeError, OSError):  # Only glibc has this function.
            ctypes.CDLL(None).malloc_trim(0)
        return memory_used()[1] - self.base >= RETAINED


def memory_used() -> tuple[int, int]:
    """Return the bytes of address space and the resident bytes. Both are 0 if this is not Linux."""
    try:
        size, resident = Path("/proc/self/statm").read_text().split()[:2]
    except OSError:
        return 0, 0
    return int(size) * PAGE, int(resident) * PAGE


# ---- the process ---------------------------------------------------------------------------------


def receive(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """Return the next job and its payload, or None if the front has closed the socket."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    job = stream.read(LENGTH.unpack(head)[0])
    (size,) = LENGTH.unpack(stream.read(LENGTH.size))
    return job, stream.read(size)


def main(number: int) -> int:
    """Run jobs from the socket with the descriptor `number`."""
    die_with_parent()
    os.set_inheritable(number, False)
    with socket.socket(fileno=number) as end, end.makefile("rb") as stream:
        job_and_payload = receive(stream)
        if job_and_payload is None:
            return 0
        context = Context.read(decode_setup(job_and_payload[0]))
        with suppress(InvalidRequest):  # A trial raises the error again.
            _ = context.vocabulary
        gc.collect()
        gc.disable()  # A job may create millions of objects, but no reference cycles.
        memory = Memory.limited(context.limits.text_memory)
        end.sendall(frame(encode(JobDone(msgspec.Raw(encode(None))))))
        while (job_and_payload := receive(stream)) is not None:
            reply = run_job(context, *job_and_payload)
            del job_and_payload
            reply.retire = reply.retire or memory.exceeded()
            end.sendall(frame(encode(reply)))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
