"""Why the scheduler did something, in the words that people read: the live page, events, errors."""

from __future__ import annotations

# Why a sequence was preempted (Preempted.reason).
NO_FREE_BLOCK = "no block was free"
URGENT_REQUEST = "a more urgent request took its place"
SIBLING_BEAMS = "its sibling beams need the room"
OUT_OF_MEMORY = "the device ran out of memory"
# Why a sequence waits (NotAdmitted.reason).
NO_FREE_SLOT = "every batch slot is in use"
NOT_ENOUGH_BLOCKS = "there are too few free blocks for it"
NO_TOKENS_LEFT = "the token budget of the step is used up"
AFTER_PREEMPTION = "a sequence was preempted in this step"
AFTER_URGENT = "a more urgent request goes first"
SHARED_PREFIX = "another sequence computes a prefix that it shares"
DISK_READ = "its prefix is being read from disk"
BATCH_FORMING = "its batch has not formed yet"
OTHER_BEAMS = "it waits for its sibling beams"
# Why a request failed.
NOT_A_NUMBER = (
    "the model's output holds no finite number, so it has no meaning: "
    "its weights are damaged, or its dtype is too narrow"
)
