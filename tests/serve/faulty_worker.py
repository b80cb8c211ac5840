"""A worker process whose tokenizer has faults: what happens depends on how the text begins.

HANG: never ends. CRASH: a segmentation fault. MEMORY: takes 100 GiB. KEEP: keeps 200 MiB. PANIC:
raises no Exception. REFUSE: an error of the client's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from octavo.serve.api.api_errors import invalid_field
from octavo.serve.workers import worker
from octavo.text.tokenizer import Tokenizer

kept: list[bytes] = []
encode = Tokenizer.encode


class Panic(BaseException):
    """Native code raises such exceptions."""


def faulty_encode(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
    if text.startswith("HANG"):
        time.sleep(3600)
    if text.startswith("CRASH"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if text.startswith("MEMORY"):
        kept.append(b"x" * (100 * 2**30))
    if text.startswith("KEEP"):
        kept.append(os.urandom(2**20) * 200)
    if text.startswith("PANIC"):
        raise Panic("a secret: /etc/passwd")
    if text.startswith("REFUSE"):
        raise invalid_field("prompt", "this text is refused", "refused")
    return encode(self, text, *args, **options)


if __name__ == "__main__":
    Tokenizer.encode = faulty_encode  # type: ignore[method-assign]
    sys.exit(worker.main(int(sys.argv[1])))
