"""The sentences that explain what the scheduler decides, on the live page, in events and errors."""

from __future__ import annotations

# Why a sequence was preempted (Preempted.reason).
NO_BLOCK_AVAILABLE = "no block was available"
URGENT_REQUEST = "a more urgent request took its place"
SIBLING_BEAMS = "its sibling beams need the room"
OUT_OF_MEMORY = "the device ran out of memory"
# Why a sequence waits (NotAdmitted.reason).
NO_FREE_SLOT = "every batch slot is in use"
NOT_ENOUGH_BLOCKS = "too few blocks are available for it"
NO_ROOM_FOR_PROMPT = "this step has no room for its whole prompt"
BEHIND_ANOTHER = "a sequence before it did not fit into this step"
NO_TOKENS_LEFT = "the token budget of the step is used up"
AFTER_PREEMPTION = "a sequence was preempted in this step"
AFTER_URGENT = "a more urgent request goes first"
SHARED_PREFIX = "another sequence computes a prefix that it shares"
DISK_READ = "its prefix is being read from disk"
BATCH_FORMING = "its batch has not formed yet"
OTHER_BEAMS = "it waits for its sibling beams"
# Why a request failed.
NOT_A_NUMBER = (
    "the model produced no finite logit: its weights may be damaged, or its dtype too narrow"
)
# Why a running sequence computes nothing in a step (NotPlanned.reason).
PAUSED = "it pauses for a more urgent prompt"
SKIPS_STEP = "it skips a step for an equally urgent prompt"
CHUNK_LACKS_BLOCKS = "too few blocks are available for its next chunk"
# Why no more of a prompt was found in the prefix cache (Admitted.match_end).
ALL_FOUND = "every full block was found; the last token is always computed"
NOT_CACHED = "the next block is cached nowhere"
BEING_COMPUTED = "another sequence is computing the next block"
LOADING_SLOWER = "loading the next block from host memory seemed slower than computing it"
NO_BLOCK_TO_LOAD = "no block was available into which the next block could be loaded"
ALL_COMPUTED = "the request asks for results of every prompt position, so all are computed"
CACHING_OFF = "the prefix cache is disabled"
