"""Limits the memory of input that is not parsed yet: HTTP bodies, WebSocket and gRPC messages.

with memory.reserve(address) as reservation:
    refusal = reservation.resize(size)  # Call this for every part, and refuse if it is not None.
    ...                                 # Receive and parse the input.
"""

from __future__ import annotations

from collections import Counter

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.keys import network
from octavo.serve.limits import Limits

SMALL = 64 * 2**10  # Input of at most this many bytes is not counted.


class BodyMemory:
    """Counts the bytes of input from arrival until they are parsed, in total and by client address.

    Input of at most SMALL bytes is not counted, so that large input cannot cause its refusal.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.total = 0
        self.by_address: Counter[str] = Counter()

    def reserve(self, address: str) -> BodyReservation:
        return BodyReservation(self, network(address))


class BodyReservation:
    """The bytes of one body or message.

    They are counted until the `with` block ends or this object is freed.
    """

    def __init__(self, memory: BodyMemory, address: str):
        self.memory = memory
        self.address = address
        self.size = 0

    def __enter__(self) -> BodyReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    def resize(self, size: int) -> ApiError | None:
        """Set the number of bytes.

        Returns an error if all input, or the input of this address, would use too much memory.
        """
        if size <= SMALL:
            return None
        memory = self.memory
        limits = memory.limits
        added = size - self.size
        if memory.by_address[self.address] + added > limits.body_memory_per_address:
            return out_of_memory("from this address")
        if memory.total + added > limits.body_memory:
            return out_of_memory("of all clients")
        memory.by_address[self.address] += added
        memory.total += added
        self.size = size
        return None

    def release(self) -> None:
        if self.size == 0:
            return
        memory = self.memory
        memory.total -= self.size
        memory.by_address[self.address] -= self.size
        if not memory.by_address[self.address]:
            del memory.by_address[self.address]
        self.size = 0


def out_of_memory(senders: str) -> ApiError:
    return ApiError(
        503,
        f"the incomplete requests {senders} use too much memory: send fewer large requests at a "
        "time",
        "body_memory_exceeded",
        retry_after=1.0,
    )
