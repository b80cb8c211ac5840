"""Combines the disk events of all ranks of tensor parallelism.

A record on disk holds the KV heads of one rank, and every rank reads and writes its own records. A
block is fetched or saved when every rank has done so, and missed or unsaved when any rank has not.
"""

from __future__ import annotations

from collections import defaultdict, deque

from octavo.types import DiskEvent


class DiskAgreement:
    def __init__(self, num_ranks: int):
        # fetch id -> the answers of the ranks
        self._fetches: dict[int, list[DiskEvent]] = defaultdict(list)
        # For each hash, the answers of each rank. One rank may have saved a hash again before
        # another rank has saved it once.
        self._saves: dict[bytes, list[deque[DiskEvent]]] = defaultdict(
            lambda: [deque() for _ in range(num_ranks)]
        )
        self.num_ranks = num_ranks

    def combine(self, events_by_rank: list[list[DiskEvent]]) -> list[DiskEvent]:
        """Return the events that all ranks have answered now."""
        combined: list[DiskEvent] = []
        for rank, events in enumerate(events_by_rank):
            for event in events:
                if event.fetch_id:
                    combined += self._add_fetch(event)
                elif event.kind == "listed":
                    # A record that another rank does not have is missed when it is fetched.
                    combined += [event] if rank == 0 else []
                else:
                    combined += self._add_save(rank, event)
        return combined

    def _add_fetch(self, event: DiskEvent) -> list[DiskEvent]:
        answers = self._fetches[event.fetch_id]
        answers.append(event)
        if len(answers) < self.num_ranks:
            return []
        del self._fetches[event.fetch_id]
        return [worst(answers, failure="missed")]

    def _add_save(self, rank: int, event: DiskEvent) -> list[DiskEvent]:
        by_rank = self._saves[event.hash]
        by_rank[rank].append(event)
        if not all(by_rank):
            return []
        answers = [answers.popleft() for answers in by_rank]
        if not any(by_rank):
            del self._saves[event.hash]
        return [worst(answers, failure="unsaved")]


def worst(answers: list[DiskEvent], failure: str) -> DiskEvent:
    """Return the first failure. If there is none, return the slowest success."""
    for answer in answers:
        if answer.kind == failure:
            return answer
    return max(answers, key=lambda answer: answer.seconds)
