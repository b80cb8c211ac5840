"""The main program of a rank of tensor parallelism other than rank 0.

The process loads its part of the model, builds the same runner as rank 0, and executes the plans
that rank 0 sends. It handles neither requests nor text. It ends when rank 0 closes the pipe or
dies.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from multiprocessing.connection import Connection

from octavo.assemble import DeviceFacts, RankJob, Resolved, TierFacts, build_runner, load
from octavo.errors import OctavoError
from octavo.message_encoding import decode, encode
from octavo.ops.collectives import RankGroup
from octavo.parent_process import die_with_parent
from octavo.runner.ranks import (
    COLLECTIVE_TIMEOUT,
    RankFailed,
    RankReport,
    RankStart,
    RankStarted,
)
from octavo.runner.runner import Runner, StepHandle
from octavo.types import Plan


def prepare(start: RankStart, connection: Connection) -> tuple[Runner, Resolved]:
    """Load this rank's part of the model, and build a runner of the size that rank 0 decides."""
    job = decode(connection.recv_bytes(), RankJob)
    group = RankGroup(
        store_path=start.store_path,
        rank=start.rank,
        size=start.size,
        device=start.device,
        timeout=COLLECTIVE_TIMEOUT,
    )
    loaded = load(job.source, job.options, progress=False, ranks=group)
    facts = DeviceFacts.of(loaded.device, loaded.model.ops.capturable)
    connection.send_bytes(encode(facts))
    resolved = decode(connection.recv_bytes(), Resolved)
    runner, resolved = build_runner(loaded, job.options, resolved)
    connection.send_bytes(encode(TierFacts.of(runner)))
    return runner, resolved


def run_plans(runner: Runner, connection: Connection, depth: int) -> None:
    """Execute plans until rank 0 closes the pipe. Up to `depth` steps are in flight."""
    reports_disk = runner.tier_store is not None and runner.tier_store.disk is not None
    in_flight: deque[StepHandle] = deque()
    while True:
        while in_flight and (len(in_flight) >= depth or not connection.poll()):
            result = in_flight.popleft().wait()
            if reports_disk:
                events = [event for event in result.disk_events if event.kind != "listed"]
                report = RankReport(events, result.corrupt_host_blocks)
                connection.send_bytes(encode(report))
        plan = decode(connection.recv_bytes(), Plan)
        in_flight.append(runner.launch(plan))


def main(descriptor: int) -> int:
    """Run a rank. `descriptor` is its end of the pipe."""
    die_with_parent()
    connection = Connection(descriptor)
    try:
        start = decode(connection.recv_bytes(), RankStart)
        logging.basicConfig(
            level=logging.WARNING, format=f"rank {start.rank}: %(levelname)s %(message)s"
        )
        connection.send_bytes(encode(RankStarted(start.rank)))
        try:
            runner, resolved = prepare(start, connection)
        except OctavoError as error:
            connection.send_bytes(encode(RankFailed(str(error))))
            return 1
        try:
            run_plans(runner, connection, resolved.schedule.depth)
        finally:
            if runner.tier_store is not None:
                runner.tier_store.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
