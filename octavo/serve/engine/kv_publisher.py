"""Publishes the changes of the prefix cache over ZeroMQ, in the format of vLLM's KV events.

The publisher listens to the engine's events (octavo/events.py). The engine loop calls `flush` after
each step, which sends the changes of the step as one batch. A batch is a message of three frames:
the topic, a sequence number of eight bytes (big-endian) and the msgpack of [time, events, 0]. A
thread answers subscribers that ask for batches again. docs/routing.md describes the format.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from octavo.errors import OctavoError
from octavo.events import BlockEvicted, BlockPublished, CacheCleared, Event, EventBus
from octavo.serve.kv_events_config import KVEventsConfig

log = logging.getLogger(__name__)
MEDIUM = "GPU"  # vLLM's name for the memory of the device, also if that is a CPU.
RANK = 0  # There is one engine, so there is one data-parallel rank.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
POLL_MILLISECONDS = 200  # The interval at which the thread checks whether the publisher is closed.
CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


class KVPublisher:
    def __init__(self, config: KVEventsConfig, events: EventBus):
        """Open the sockets and subscribe to the events. Raises OctavoError."""
        self.config = config
        self.events = events
        self.topic = config.topic.encode()
        self.sequence = 0
        self._encode = msgspec.msgpack.Encoder().encode
        # A router may know the blocks of an earlier engine process, which are lost.
        self._unsent_changes: list[dict[str, Any]] = [CLEARED]
        self._sent_batches: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()  # It guards `_sent_batches`, which the replay thread reads.
        self._closed = threading.Event()
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None
        try:
            self._publish_socket = self._open_publish_socket()
            if config.replay_endpoint is not None:
                replay_socket = self._context.socket(zmq.ROUTER)
                # ZeroMQ must not drop a part of a replay. `buffer_steps` limits its size.
                replay_socket.set_hwm(0)
                self._attach(replay_socket, config.replay_endpoint, binds=True)
                self._thread = threading.Thread(
                    target=self._answer_replays, args=(replay_socket,), daemon=True, name="replay"
                )
                self._thread.start()
        except OctavoError:
            self._context.destroy(linger=0)
            raise
        events.subscribe(self.on_event, BlockPublished, BlockEvicted, CacheCleared)

    def _open_publish_socket(self) -> zmq.Socket[bytes]:
        endpoint = self.config.endpoint
        publish_socket = self._context.socket(zmq.PUB)
        publish_socket.set_hwm(self.config.hwm)
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        self._attach(publish_socket, endpoint, binds)
        return publish_socket

    def _attach(self, zmq_socket: zmq.Socket[bytes], endpoint: str, binds: bool) -> None:
        """Bind a socket to an endpoint, or connect it. Raises OctavoError if that fails."""
        zmq_socket.linger = 0
        try:
            if binds:
                zmq_socket.bind(endpoint)
            else:
                zmq_socket.connect(endpoint)
        except zmq.ZMQError as error:
            verb = "bind" if binds else "connect"
            raise OctavoError(
                f"cannot {verb} the ZeroMQ socket of --kv-events-config to {endpoint} "
                f"({error.strerror}): use another endpoint"
            ) from None

    # ---- the engine's thread ---------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        if isinstance(event, BlockPublished):
            self._add_stored(event)
        elif isinstance(event, BlockEvicted):
            self._add_removed(event)
        elif isinstance(event, CacheCleared):
            self._unsent_changes.append(CLEARED)

    def _add_stored(self, event: BlockPublished) -> None:
        """Add a block. Consecutive blocks of one prompt become one change, as in vLLM."""
        content_hash = short_hash(event.content_hash)
        parent = short_hash(event.parent_hash) if event.parent_hash else None
        previous = self._unsent_changes[-1] if self._unsent_changes else CLEARED
        if previous["type"] == "BlockStored" and previous["block_hashes"][-1] == parent:
            previous["block_hashes"].append(content_hash)
            previous["token_ids"] += event.tokens
            return
        self._unsent_changes.append(
            {
                "type": "BlockStored",
                "block_hashes": [content_hash],
                "parent_block_hash": parent,
                "token_ids": list(event.tokens),
                "block_size": len(event.tokens),
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
            }
        )

    def _add_removed(self, event: BlockEvicted) -> None:
        content_hash = short_hash(event.content_hash)
        previous = self._unsent_changes[-1] if self._unsent_changes else CLEARED
        if previous["type"] == "BlockRemoved":
            previous["block_hashes"].append(content_hash)
            return
        self._unsent_changes.append(
            {"type": "BlockRemoved", "block_hashes": [content_hash], "medium": MEDIUM}
        )

    def flush(self) -> None:
        """Send the changes since the last call as one batch. This never waits."""
        if not self._unsent_changes:
            return
        changes: list[Any] = self._unsent_changes
        self._unsent_changes = []
        if self.config.encoding == "array":
            changes = [list(change.values()) for change in changes]
        payload = self._encode([time.time(), changes, RANK])
        number = self.sequence.to_bytes(8, "big")
        self.sequence += 1
        with self._lock:
            self._sent_batches.append((number, payload))
        self._publish_socket.send_multipart((self.topic, number, payload))

    def close(self) -> None:
        self.events.unsubscribe(self.on_event)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    # ---- the replay thread -----------------------------------------------------------------------

    def _answer_replays(self, replay_socket: zmq.Socket[bytes]) -> None:
        while not self._closed.is_set():
            if replay_socket.poll(POLL_MILLISECONDS):
                self._answer_replay(replay_socket)

    def _answer_replay(self, replay_socket: zmq.Socket[bytes]) -> None:
        """Send the batches from the requested number on, then an empty batch with the number -1."""
        frames = replay_socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning(
                "a replay request for KV events is not valid: it must be an empty frame and a "
                "sequence number of eight bytes"
            )
            return
        client, _, first_number = frames
        with self._lock:
            batches = list(self._sent_batches)
        for number, payload in batches:
            if number >= first_number:
                replay_socket.send_multipart((client, b"", self.topic, number, payload))
        replay_socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def short_hash(content_hash: bytes) -> int:
    """Return the lower 64 bits of a hash, as vLLM does by default."""
    return int.from_bytes(content_hash[-8:], "big")
