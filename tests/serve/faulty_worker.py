"""A worker process with faults: what happens depends on how the text begins.

HANG: never ends. CRASH: a segmentation fault. MEMORY: takes 100 GiB. KEEP: keeps 200 MiB. PANIC: raises no Exception.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from octavo.serve import worker
from octavo.serve.errors import bad
from octavo.serve.jobs import Encode

kept: list[bytes] = []


class Panic(BaseException):
    """Native code raises such exceptions."""


def encode_text(context: worker.Context, job: Encode) -> list[int]:
    if job.text.startswith("HANG"):
        time.sleep(3600)
    if job.text.startswith("CRASH"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if job.text.startswith("MEMORY"):
        kept.append(b"x" * (100 * 2**30))
    if job.text.startswith("KEEP"):
        kept.append(os.urandom(2**20) * 200)
    if job.text.startswith("PANIC"):
        raise Panic("a secret: /etc/passwd")
    if job.text.startswith("REFUSE"):
        raise bad("prompt", "this text is refused", "refused")
    return worker.encode_text(context, job)


if __name__ == "__main__":
    worker.HANDLERS[Encode] = encode_text
    sys.exit(worker.main(int(sys.argv[1])))
