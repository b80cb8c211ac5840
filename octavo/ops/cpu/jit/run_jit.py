"""The functions that Python calls: they run a job on the threads of the pool."""

from __future__ import annotations

from numba import types

from octavo.ops.cpu.jit import (
    attention_jit,
    decoder_jit,
    draft_jit,
    matmul_jit,
    step_jit,
    thread_barrier,
)
from octavo.ops.cpu.jit.decoder_jit import (
    ACTIVATE,
    ATTENTION,
    ATTENTION_WINDOW,
    BATCH,
    CHOOSE,
    DECODER,
    DRAFT,
    DRAFT_EXTEND,
    EMBED,
    INPUT,
    JOB_KIND,
    NUM_ROWS,
    OUTPUT,
    PRODUCT,
    SHIFT,
    STEP,
    WEIGHT,
    activate,
    attend,
    choose,
    decode,
    embed,
    multiply,
    quantize_rows,
    shift,
)
from octavo.ops.cpu.jit.draft_jit import draft, draft_extend
from octavo.ops.cpu.jit.llvm_intrinsics import field, inner, kernel
from octavo.ops.cpu.jit.step_jit import run_step

__all__ = ["decoder_jit", "draft_jit", "run_thread", "step_jit"]

INT = types.int64
NOTHING = types.void


@inner
def run_job(state: int, number: int) -> None:
    """Do one thread's part of the job."""
    worker = thread_barrier.init_worker(state, number)
    job = field(state, thread_barrier.JOB)
    job_kind = field(job, JOB_KIND)
    weight = field(job, WEIGHT)
    num_rows = field(job, NUM_ROWS)
    if job_kind == PRODUCT:
        quantize_rows(worker, job, field(job, INPUT), num_rows, weight)
        multiply(
            worker,
            job,
            weight,
            num_rows,
            field(job, OUTPUT),
            field(weight, matmul_jit.NUM_OUTPUTS),
            0,
        )
    elif job_kind == ATTENTION:
        batch = field(job, BATCH)
        kv_cache = field(batch, attention_jit.KV_CACHE)
        scales = field(batch, attention_jit.SCALES)
        attend(worker, batch, kv_cache, scales, field(job, ATTENTION_WINDOW))
    elif job_kind == DECODER:
        decode(worker, job)
    elif job_kind == EMBED:
        embed(worker, job)
    elif job_kind == CHOOSE:
        choose(worker, job)
    elif job_kind == SHIFT:
        shift(worker, job)
    elif job_kind == ACTIVATE:
        activate(worker, job)
    elif job_kind == DRAFT_EXTEND:
        draft_extend(worker, job)
    elif job_kind == DRAFT:
        draft(worker, job)
    elif job_kind == STEP:
        run_step(worker, job)


@kernel(NOTHING(INT, INT))
def run_thread(state: int, number: int) -> None:
    """Run jobs in one thread of the pool.

    Thread 0 starts a job, does its part, and returns when all threads have left the job. The others
    run jobs until the pool stops. This is one kernel, because every kernel with run_job() would be
    compiled with all of its code.
    """
    last_job = 0
    while True:
        if number == 0:
            thread_barrier.open_job(state)
        else:
            last_job = thread_barrier.wait_for_job(state, last_job)
            if field(state, thread_barrier.STOP) != 0:
                return
        if number == 0 or thread_barrier.enter(state, last_job):
            run_job(state, number)
        if number == 0:
            thread_barrier.close_job(state)
            return
        thread_barrier.leave(state)
