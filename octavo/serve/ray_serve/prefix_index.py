"""Records which replica has computed which prompts, and ranks the replicas for a new prompt.

The index works on the bytes of a request and not on tokens, so it needs no tokenizer. The prompt is
cut into blocks of BLOCK_BYTES. The hash of a block covers all blocks before it, so two prompts
share a hash only if they are equal up to the end of that block. A replica that has computed a
prompt has its KV in the prefix cache until the cache evicts it. The index does not see evictions.
Three bounds limit how long it uses outdated entries:

    max_age     an entry counts for this many seconds after its last use
    capacity    a replica has at most as many entries as its KV cache holds; the oldest are removed
    generation  a replica whose engine was restarted has lost its cache, and loses its entries

This module must not import Ray.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

BLOCK_BYTES = 256
MAX_BLOCKS = 512  # The index covers this many blocks of a prompt, 128 KiB of text.
HASH_BYTES = 8
BYTES_PER_TOKEN = 4  # The usual number of bytes in a token of text.


class PromptFields(msgspec.Struct):
    """The fields of a request that decide which cached KV it can use, as they were sent."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompts: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(PromptFields).decode


def block_hashes(body: bytes | bytearray, salt: str) -> list[bytes]:
    """Return the hashes of the blocks of a prompt. `salt` is the cache salt of the API key.

    A body that is not valid has no hashes: the replica that gets it replies with the error.
    """
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    # The tools and the system message come first in the prompt of nearly every chat template.
    early_fields = (fields.tools, fields.system, fields.instructions)
    ordered_fields = (*early_fields, fields.messages, fields.input, fields.prompt, fields.prompts)
    prompt = b"".join(bytes(field) for field in ordered_fields)
    parent = hashlib.sha256(salt.encode() + b"\0" + bytes(fields.cache_salt)).digest()
    hashes: list[bytes] = []
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        if len(hashes) == MAX_BLOCKS:
            break
        block = prompt[start : start + BLOCK_BYTES]
        parent = hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """The blocks of prompts that each replica has computed."""

    def __init__(self, max_age: float, clock: Callable[[], float] = time.monotonic):
        self.max_age = max_age
        self.clock = clock
        # replica -> hash of a block -> time of its last use, the oldest first
        self._blocks: dict[str, OrderedDict[bytes, float]] = {}
        self._capacity: dict[str, int] = {}
        self._generation: dict[str, int] = {}
        self._last_use: dict[str, float] = {}

    def update(self, replica: str, kv_tokens: int, generation: int) -> None:
        """Record the size of a replica's KV cache, and how often its engine was started."""
        self._capacity[replica] = max(kv_tokens * BYTES_PER_TOKEN // BLOCK_BYTES, 1)
        if self._generation.setdefault(replica, generation) != generation:
            self._generation[replica] = generation
            self._blocks.pop(replica, None)

    def keep(self, replicas: Iterable[str]) -> None:
        """Remove all replicas except these."""
        kept_replicas = set(replicas)
        for replica in self._generation.keys() - kept_replicas:
            del self._generation[replica]
            del self._capacity[replica]
        for replica in self._blocks.keys() - kept_replicas:
            del self._blocks[replica]
        for replica in self._last_use.keys() - kept_replicas:
            del self._last_use[replica]

    def add(self, replica: str, hashes: Sequence[bytes]) -> None:
        """Record that a replica computes a prompt with these blocks."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        now = self.clock()
        self._last_use[replica] = now
        # The first block is recorded as used last, so a prefix stays longer than the text after it.
        for block in reversed(hashes):
            blocks[block] = now
            blocks.move_to_end(block)
        while len(blocks) > self._capacity.get(replica, MAX_BLOCKS):
            blocks.popitem(last=False)

    def matched(self, replica: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt the replica should have in its cache."""
        blocks: Mapping[bytes, float] = self._blocks.get(replica, {})
        oldest = self.clock() - self.max_age
        count = 0
        for block in hashes:
            if blocks.get(block, oldest) <= oldest:
                break
            count += 1
        return count

    def last_use(self, replica: str) -> float:
        """Return the time of the latest request of the replica, or 0 if it has had none."""
        return self._last_use.get(replica, 0.0)


def rank_replicas(
    index: PrefixIndex,
    hashes: Sequence[bytes],
    loads: dict[str, int],
    failed: Iterable[str],
    slack: int,
) -> list[list[str]]:
    """Return groups of replicas, the best group first. A group may be empty.

    `loads` has the number of open requests of every replica. The first group has the replicas with
    the longest match, unless they have more than `slack` open requests above the least loaded
    replica. The second group has the others, the least loaded first. Among equally loaded replicas,
    the one whose latest request is the oldest comes first. Replicas that have `failed` this request
    come last.
    """
    failed_replicas = [replica for replica in loads if replica in set(failed)]
    usable = [replica for replica in loads if replica not in failed_replicas]
    matches = {replica: index.matched(replica, hashes) for replica in usable}
    longest = max(matches.values(), default=0)
    least_loaded = min((loads[replica] for replica in usable), default=0)
    preferred = [
        replica
        for replica in usable
        if longest > 0 and matches[replica] == longest and loads[replica] <= least_loaded + slack
    ]
    other_replicas = [replica for replica in usable if replica not in preferred]
    other_replicas.sort(key=lambda replica: (loads[replica], index.last_use(replica)))
    return [preferred, other_replicas, failed_replicas]
