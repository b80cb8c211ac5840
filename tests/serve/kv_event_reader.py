"""A reader of vLLM's KV events, written from vLLM's documents and not from Octavo's code.

A publisher sends messages of three frames: a topic, a sequence number (eight bytes, big-endian) and
the msgpack of an event batch, which is the array [ts, events, data_parallel_rank]. An event is a map
with its class name under "type" or, before vLLM 0.24, an array that begins with the class name. A
subscriber that misses a number sends it to the replay socket after an empty frame, and receives the
batches from that number on. A batch with an empty payload ends the replay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import zmq

# The fields of an event, in the order of the arrays.
FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class Stored(NamedTuple):
    parent: int | None
    tokens: tuple[int, ...]


class Reader:
    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = ""):
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.subscribe(topic.encode())
        self.subscriber.connect(endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay_endpoint)
        self.topic = topic.encode()
        self.next_number = 0
        self.num_replayed = 0
        self.blocks: dict[int, Stored] = {}
        self.removed = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def read(self, seconds: float = 0.5) -> None:
        """Apply all batches, until none arrives for this time."""
        while self.subscriber.poll(int(seconds * 1000)):
            topic, number, payload = self.subscriber.recv_multipart()
            assert topic == self.topic and len(number) == 8
            self.receive(int.from_bytes(number, "big"), payload)

    def receive(self, number: int, payload: bytes) -> None:
        if number > self.next_number:
            self.read_replay()
        if number == self.next_number:
            self.apply(payload)

    def read_replay(self) -> None:
        """Ask for the missing batches, and apply them."""
        self.replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while self.replay.poll(5000):
            empty, topic, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            assert topic == self.topic
            if int.from_bytes(number, "big") == self.next_number:
                self.num_replayed += 1
                self.apply(payload)
        raise AssertionError("the replay did not end")

    def apply(self, payload: bytes) -> None:
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(timestamp, float) and rank == 0 and events
        self.next_number += 1
        for event in events:
            self.apply_event(event)

    def apply_event(self, event: Any) -> None:
        if isinstance(event, list):
            event = {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=True))}
        assert set(event) == {"type", *FIELDS[event["type"]]}
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        assert event["medium"] == "GPU"
        if event["type"] == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                del self.blocks[block_hash]
                self.removed += 1
            return
        size = event["block_size"]
        tokens = event["token_ids"]
        hashes = event["block_hashes"]
        assert len(tokens) == size * len(hashes)
        parent = event["parent_block_hash"]
        for index, block_hash in enumerate(hashes):
            start = index * size
            self.blocks[block_hash] = Stored(parent, tuple(tokens[start : start + size]))
            parent = block_hash

    def prefix_of(self, block_hash: int) -> list[int]:
        """Return the tokens of a block and of all blocks before it that are known."""
        tokens: list[int] = []
        found: int | None = block_hash
        while found is not None and found in self.blocks:
            stored = self.blocks[found]
            tokens = [*stored.tokens, *tokens]
            found = stored.parent
        return tokens

    def longest_prefix(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt the publisher has cached."""
        lengths = [0]
        for block_hash in self.blocks:
            tokens = self.prefix_of(block_hash)
            if tokens == prompt[: len(tokens)]:
                lengths.append(len(tokens))
        return max(lengths)
