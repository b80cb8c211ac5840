"""Applies an event stream line by line and checks that each event is possible in the state before
it: a cause comes before its effect."""

from __future__ import annotations

from collections import Counter
from typing import Any

from octavo.core.event_stream import FIELDS


def fields_of(line: list[Any]) -> dict[str, Any]:
    kind, number, step, time, *values = line
    fields = FIELDS[kind]
    assert len(values) == len(fields), f"{kind} has {len(values)} values for {fields}"
    return dict(zip(fields, values, strict=True), kind=kind, number=number, step=step, time=time)


class StreamMirror:
    """The holders and contents of blocks and the states of sequences, from the stream alone."""

    def __init__(self, snapshot: list[Any]):
        start = fields_of(snapshot)
        self.about = start["about"]
        state = start["state"]
        self.number = start["number"]
        self.step = start["step"]
        self.time = start["time"]
        self.states = {
            seq["seq"]: "waiting" if seq["state"] == "waiting" else "running"
            for seq in state["sequences"]
        }
        self.tables = {seq["seq"]: list(seq["table"]) for seq in state["sequences"]}
        self.contents = {block: content for block, content, _ in state["contents"]}
        self.references = Counter(block for table in self.tables.values() for block in table)
        self.references.update(state["promoted"] + state["withheld"])
        self.planned: dict[int, list[int]] = {  # steps in flight
            plan["step"]: [item[0] for item in plan["items"]] for plan in state["in_flight"]
        }
        self.landed: set[int] = set()  # steps that are not committed yet
        self.decode: list[int] = []
        self.kinds: Counter[str] = Counter()

    @property
    def running(self) -> int:
        return sum(state == "running" for state in self.states.values())

    def apply(self, line: list[Any]) -> None:
        event = fields_of(line)
        assert event["number"] > self.number, "events are out of order"
        assert event["step"] >= self.step and event["time"] >= self.time, "time runs backwards"
        self.number = event["number"]
        self.step = event["step"]
        self.time = event["time"]
        self.kinds[event["kind"]] += 1
        handle = getattr(self, f"on_{event['kind']}", None)
        if handle is not None:
            handle(event)

    # ---- sequences -------------------------------------------------------------------------------

    def on_arrived(self, event: dict[str, Any]) -> None:
        assert event["seq"] not in self.states
        self.states[event["seq"]] = "waiting"
        self.tables[event["seq"]] = []

    def on_forked(self, event: dict[str, Any]) -> None:
        assert event["parent"] in self.states, "the parent of a fork has not arrived"
        self.on_arrived(event)

    def on_waiting(self, event: dict[str, Any]) -> None:
        assert self.states[event["seq"]] == "waiting", "a running sequence is reported as waiting"
        if event["needed"]:
            available = self.about["num_blocks"] - sum(n > 0 for n in self.references.values())
            assert event["needed"] > available, "there were enough blocks"

    def on_admitted(self, event: dict[str, Any]) -> None:
        assert self.states[event["seq"]] == "waiting", "a sequence is admitted twice"
        assert self.running < self.about["max_num_seqs"], "no slot was free yet"
        self.states[event["seq"]] = "running"

    def on_preempted(self, event: dict[str, Any]) -> None:
        assert self.states[event["seq"]] == "running", "a waiting sequence is preempted"
        assert event["beneficiary"] == 0 or event["beneficiary"] in self.states
        self.states[event["seq"]] = "waiting"

    def on_finished(self, event: dict[str, Any]) -> None:
        del self.states[event["seq"]]

    on_failed = on_finished

    # ---- steps -----------------------------------------------------------------------------------

    def on_planned(self, event: dict[str, Any]) -> None:
        if event["decode"] is not None:
            self.decode = event["decode"]
        sequences = self.decode + [chunk[0] for chunk in event["chunks"]]
        for seq in sequences:
            assert self.states[seq] == "running", "a plan has a sequence that does not run"
        prefill = sum(chunk[2] for chunk in event["chunks"])
        room = max(event["budget"] - len(self.decode), 0)  # Decoding is not limited.
        assert prefill <= room, "a plan exceeds its budget"
        self.planned[event["step"]] = sequences

    def on_landed(self, event: dict[str, Any]) -> None:
        del self.planned[event["of"]]
        self.landed.add(event["of"])

    def on_committed(self, event: dict[str, Any]) -> None:
        self.landed.remove(event["of"])
        times = [event[name] for name in FIELDS["committed"][1:7]]
        assert times == sorted(times), "the times of a step are out of order"

    def on_stepfailed(self, event: dict[str, Any]) -> None:
        self.planned.pop(event["of"], None)

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, block: int) -> None:
        assert self.references[block] == 0, f"block {block} is allocated before it is released"
        assert block not in self.contents, f"block {block} is allocated before it is evicted"
        self.references[block] = 1

    def on_allocated(self, event: dict[str, Any]) -> None:
        table = self.tables.get(event["seq"])
        for index, block in enumerate(event["blocks"], event["first"]):
            self.allocate(block)
            if table is not None:
                table += [0] * (index + 1 - len(table))
                assert table[index] == 0, "an entry of a block table is filled twice"
                table[index] = block

    def on_shared(self, event: dict[str, Any]) -> None:
        for block in filter(None, event["blocks"]):
            assert self.references[block] or block in self.contents, "a free block is shared"
            self.references[block] += 1
        self.tables[event["seq"]] = list(event["blocks"])
        self.states[event["seq"]] = "running"  # A fork starts at once.
        assert self.running <= self.about["max_num_seqs"]

    def on_copied(self, event: dict[str, Any]) -> None:
        table = self.tables[event["seq"]]
        assert self.references[event["source"]] > 1, "an exclusive block is copied"
        self.allocate(event["target"])
        self.references[event["source"]] -= 1
        table[table.index(event["source"])] = event["target"]

    def on_dropped(self, event: dict[str, Any]) -> None:
        self.tables[event["seq"]].remove(event["block"])
        self.references[event["block"]] -= 1

    def on_released(self, event: dict[str, Any]) -> None:
        for block in event["blocks"]:
            assert self.references[block] > 0, f"block {block} is released twice"
            self.references[block] -= 1
            if event["seq"]:
                self.tables[event["seq"]].remove(block)

    def on_published(self, event: dict[str, Any]) -> None:
        assert self.references[event["block"]] > 0, "a block that no sequence holds is published"
        assert event["block"] not in self.contents, "a content is replaced before it is evicted"
        self.contents[event["block"]] = event["content"]

    def on_evicted(self, event: dict[str, Any]) -> None:
        assert self.contents.pop(event["block"]) == event["content"]

    def on_cleared(self, event: dict[str, Any]) -> None:
        self.contents.clear()
