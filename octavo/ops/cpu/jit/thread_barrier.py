"""Threads that share one job: every thread runs the same nopython function and takes pieces of each phase as it is ready.

    piece = take(me, pieces)                  0, 1, 2 ... to whoever asks first, then -1
    while piece >= 0:
        ...
        piece = take(me, pieces)
    finish(me, pieces)                        wait until all pieces are done: the next phase may read what this one wrote

Every phase has two counters, of pieces taken and done. A phase waits for pieces, never for threads: one that lost its core
to another process, or is still waking up, holds nobody up unless it holds a piece, and walks through the phases that were
finished without it. The wait spins, since a layer has ten phases and takes a tenth of a millisecond; whoever waits for long
gives its core away. A job ends when nobody is inside it; between jobs the others spin for a moment and then sleep.
"""

from __future__ import annotations

from octavo.ops.cpu.jit.llvm_intrinsics import (
    atomic_add,
    atomic_load,
    atomic_store,
    inner,
    load_i64,
    pause,
    sleep_while,
    store_i64,
    wake,
    yield_core,
)

# The team's state: int64, what is written often on cache lines of its own.
GENERATION, OPEN, INSIDE, SLEEPERS, STOP, JOB, COUNTERS, PHASES = range(0, 64, 8)
THREADS = 64
# where the threads' own records begin, and their distance
MEMBER = 72
MEMBER_SIZE = 32
STATE, NUMBER, PHASE, MINE = range(4)  # of such a record
COUNTER = 64  # bytes of a phase's counters: pieces taken, pieces done

SPINS = 20_000  # before sleeping: about as long as the host needs between two steps
PATIENCE = 4_000  # spins before a waiting thread offers its core to others


@inner
def member(state: int, number: int) -> int:
    me = state + 8 * (MEMBER + MEMBER_SIZE * number)
    store_i64(me + 8 * STATE, state)
    store_i64(me + 8 * NUMBER, number)
    store_i64(me + 8 * PHASE, load_i64(state + 8 * COUNTERS))
    store_i64(me + 8 * MINE, 0)
    return me


@inner
def threads(me: int) -> int:
    return load_i64(load_i64(me + 8 * STATE) + 8 * THREADS)


@inner
def take(me: int, pieces: int) -> int:
    """A piece of the phase, or -1."""
    piece = atomic_add(load_i64(me + 8 * PHASE), 1)
    if piece >= pieces:
        return -1
    store_i64(me + 8 * MINE, load_i64(me + 8 * MINE) + 1)
    return piece


@inner
def wait(address: int, value: int) -> None:
    """Until the counter there is `value`."""
    spins = 0
    while atomic_load(address) != value:
        spins += 1
        if spins > PATIENCE:
            yield_core()
        else:
            pause()


@inner
def finish(me: int, pieces: int) -> None:
    phase = load_i64(me + 8 * PHASE)
    atomic_add(phase + 8, load_i64(me + 8 * MINE))
    store_i64(me + 8 * MINE, 0)
    store_i64(me + 8 * PHASE, phase + COUNTER)
    wait(phase + 8, pieces)


@inner
def open_job(state: int) -> None:
    """Set the team to work on the job that stands in its state."""
    counters = load_i64(state + 8 * COUNTERS)
    for i in range(load_i64(state + 8 * PHASES)):
        store_i64(counters + COUNTER * i, 0)
        store_i64(counters + COUNTER * i + 8, 0)
    number = load_i64(state + 8 * GENERATION) + 1
    atomic_store(state + 8 * OPEN, number)
    atomic_store(state + 8 * GENERATION, number)
    if atomic_load(state + 8 * SLEEPERS) > 0:
        wake(state + 8 * GENERATION)


@inner
def close_job(state: int) -> None:
    """Let nobody in any more, and wait for those inside to leave."""
    atomic_store(state + 8 * OPEN, 0)
    wait(state + 8 * INSIDE, 0)


@inner
def enter(state: int, number: int) -> bool:
    """Whether job `number` is still going on. In any case leave() must follow."""
    atomic_add(state + 8 * INSIDE, 1)
    return atomic_load(state + 8 * OPEN) == number


@inner
def leave(state: int) -> None:
    atomic_add(state + 8 * INSIDE, -1)


@inner
def wait_for_call(state: int, seen: int) -> int:
    """The number of the next job after `seen`, once it is there."""
    for _ in range(SPINS):
        if atomic_load(state + 8 * GENERATION) != seen:
            return atomic_load(state + 8 * GENERATION)
        pause()
    atomic_add(state + 8 * SLEEPERS, 1)
    while atomic_load(state + 8 * GENERATION) == seen:
        sleep_while(state + 8 * GENERATION, seen)
    atomic_add(state + 8 * SLEEPERS, -1)
    return atomic_load(state + 8 * GENERATION)
