"""Threads that share one job: every thread runs the same nopython function and takes pieces of each phase as it is ready.

    ticket = take(me)                         pieces of a phase: 0, 1, 2 ... in order, to whoever asks first
    while ticket < pieces:
        ...
        ticket = take(me)
    finish(me, pieces)                        wait for the others: the next phase may read what this one wrote

A phase ends at a barrier that spins, since a layer has ten of them and takes a tenth of a millisecond; a thread that waits for
long gives its core away, and between jobs it sleeps. Two counters only ever grow: each thread that asks in vain takes exactly
one ticket beyond the end, so all know where the next phase's tickets begin.
"""

from __future__ import annotations

from numba import types

from octavo.ops.cpu.jit.emit import (
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

INT, VOID = types.int64, types.void

# The team's state: int64, what is written often on cache lines of its own.
GENERATION, ARRIVED, TICKET, SLEEPERS, STOP, JOB, THREADS = 0, 8, 16, 24, 32, 40, 48
MEMBER, MEMBER_SIZE = 64, 32  # where the threads' own records begin, and their distance
STATE, NUMBER, PHASE, FIRST = range(4)  # of such a record

SPINS = 20_000  # about half a millisecond: what lies between two steps of a generation
PATIENCE = 4_000  # spins before a waiting thread offers its core to others


@inner
def member(state: int, number: int) -> int:
    me = state + 8 * (MEMBER + MEMBER_SIZE * number)
    store_i64(me + 8 * STATE, state)
    store_i64(me + 8 * NUMBER, number)
    return me


@inner
def threads(me: int) -> int:
    return load_i64(load_i64(me + 8 * STATE) + 8 * THREADS)


@inner
def take(me: int) -> int:
    """The next piece of the phase."""
    return atomic_add(load_i64(me + 8 * STATE) + 8 * TICKET, 1) - load_i64(me + 8 * FIRST)


@inner
def finish(me: int, pieces: int) -> None:
    state, count = load_i64(me + 8 * STATE), threads(me)
    goal = load_i64(me + 8 * PHASE) + count
    store_i64(me + 8 * PHASE, goal)
    store_i64(me + 8 * FIRST, load_i64(me + 8 * FIRST) + pieces + count)
    atomic_add(state + 8 * ARRIVED, 1)
    spins = 0
    while atomic_load(state + 8 * ARRIVED) < goal:
        spins += 1
        if spins > PATIENCE:
            yield_core()
        else:
            pause()


@inner
def call(state: int) -> None:
    """Set the team to work on the job that stands in its state."""
    atomic_add(state + 8 * GENERATION, 1)
    if atomic_load(state + 8 * SLEEPERS) > 0:
        wake(state + 8 * GENERATION)


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


@inner
def dismiss(state: int) -> None:
    """Let the threads return from their loop."""
    atomic_store(state + 8 * STOP, 1)
    call(state)
