"""Work sharing and barriers between the threads of a job.

Every thread runs the same nopython function and takes pieces of each phase:

    piece = take_piece(worker, pieces)        0, 1, 2 ... in the order of the calls, then -1
    while piece >= 0:
        ...
        piece = take_piece(worker, pieces)
    finish_phase(worker, pieces)              waits until all pieces are done, so that the next
                                              phase may read the results

Every phase has two counters, of pieces taken and of pieces done. If a phase has many pieces, a
thread takes several neighbours at once, because threads on distant cores need a quarter of a
microsecond to change a counter that both use.

A phase waits for pieces and not for threads. So a thread that was preempted or is still waking up
delays the others only if it holds pieces; otherwise it skips the phases that finished without it.
The wait spins, because a layer has ten phases and takes a tenth of a millisecond. A thread that
waits for long yields its core. A job ends when all threads have left it. Between jobs the threads
spin for a moment and then sleep.
"""

from __future__ import annotations

from octavo.ops.cpu.jit.llvm_intrinsics import (
    atomic_add,
    atomic_load,
    atomic_store,
    field,
    inner,
    pause,
    set_field,
    sleep_while,
    store_i64,
    wake,
    yield_core,
)

# The state of the pool: int64. Fields that are written often are on separate cache lines.
GENERATION, OPEN_JOB, INSIDE, SLEEPERS, STOP, JOB, COUNTERS, PHASES = range(0, 64, 8)
NUM_THREADS = 64
# The start of the records of the workers, and the size of a record.
WORKERS = 72
WORKER_SIZE = 32
# The fields of a worker's record. It holds the pieces from NEXT_PIECE to END_PIECE.
STATE, NUMBER, PHASE, PIECES_DONE, NEXT_PIECE, END_PIECE = range(6)
COUNTER_BYTES = 64  # bytes of the counters of a phase: pieces taken, pieces done

# A phase is divided into about this many parts per thread: more let the threads end together, fewer
# change the counters less often.
PARTS_PER_THREAD = 32
SPINS_BEFORE_SLEEP = 20_000  # about as long as the host needs between two steps
SPINS_BEFORE_YIELD = 4_000  # then a waiting thread yields its core to other threads


@inner
def init_worker(state: int, number: int) -> int:
    worker = state + 8 * (WORKERS + WORKER_SIZE * number)
    set_field(worker, STATE, state)
    set_field(worker, NUMBER, number)
    set_field(worker, PHASE, field(state, COUNTERS))
    set_field(worker, PIECES_DONE, 0)
    set_field(worker, NEXT_PIECE, 0)
    set_field(worker, END_PIECE, 0)
    return worker


@inner
def num_threads(worker: int) -> int:
    return field(field(worker, STATE), NUM_THREADS)


@inner
def take_piece(worker: int, pieces: int) -> int:
    """Return the number of a piece of the phase, or -1 if none is left."""
    piece = field(worker, NEXT_PIECE)
    if piece == field(worker, END_PIECE):
        count = max(1, pieces // (PARTS_PER_THREAD * num_threads(worker)))
        piece = atomic_add(field(worker, PHASE), count)
        if piece >= pieces:
            return -1
        end = min(piece + count, pieces)
        set_field(worker, END_PIECE, end)
        set_field(worker, PIECES_DONE, field(worker, PIECES_DONE) + end - piece)
    set_field(worker, NEXT_PIECE, piece + 1)
    return piece


@inner
def wait_for_value(address: int, value: int) -> None:
    """Wait until the counter at the address is `value`."""
    spins = 0
    while atomic_load(address) != value:
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_core()
        else:
            pause()


@inner
def finish_phase(worker: int, pieces: int) -> None:
    phase = field(worker, PHASE)
    atomic_add(phase + 8, field(worker, PIECES_DONE))
    set_field(worker, PIECES_DONE, 0)
    set_field(worker, PHASE, phase + COUNTER_BYTES)
    wait_for_value(phase + 8, pieces)


@inner
def open_job(state: int) -> None:
    """Start the job that the state of the pool describes."""
    counters = field(state, COUNTERS)
    for phase in range(field(state, PHASES)):
        store_i64(counters + COUNTER_BYTES * phase, 0)
        store_i64(counters + COUNTER_BYTES * phase + 8, 0)
    job_number = field(state, GENERATION) + 1
    atomic_store(state + 8 * OPEN_JOB, job_number)
    atomic_store(state + 8 * GENERATION, job_number)
    if atomic_load(state + 8 * SLEEPERS) > 0:
        wake(state + 8 * GENERATION)


@inner
def close_job(state: int) -> None:
    """Close the job to other workers, and wait until those inside have left it."""
    atomic_store(state + 8 * OPEN_JOB, 0)
    wait_for_value(state + 8 * INSIDE, 0)


@inner
def enter(state: int, job_number: int) -> bool:
    """Return whether this job is still open. The caller must call leave() in any case."""
    atomic_add(state + 8 * INSIDE, 1)
    return atomic_load(state + 8 * OPEN_JOB) == job_number


@inner
def leave(state: int) -> None:
    atomic_add(state + 8 * INSIDE, -1)


@inner
def wait_for_job(state: int, seen: int) -> int:
    """Wait for the next job after `seen` and return its number."""
    for _ in range(SPINS_BEFORE_SLEEP):
        if atomic_load(state + 8 * GENERATION) != seen:
            return atomic_load(state + 8 * GENERATION)
        pause()
    atomic_add(state + 8 * SLEEPERS, 1)
    while atomic_load(state + 8 * GENERATION) == seen:
        sleep_while(state + 8 * GENERATION, seen)
    atomic_add(state + 8 * SLEEPERS, -1)
    return atomic_load(state + 8 * GENERATION)
