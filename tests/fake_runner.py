"""A runner without tensors. Its 'attention' reads every earlier position through the block table, as a real one would,
so any mistake in blocks, copies, rows or order changes the tokens. Its results are computed at launch and read later."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.types import NewRow, Plan, StepResult, TokenLogprobs
from tests import oracle


@dataclass
class Handle:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass
class Row:
    tokens: list[int]
    computed: int
    table: list[int]
    seed: int
    logprobs: int | None


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int):
        self.kv: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        self.size = block_size
        self.rows: dict[int, Row] = {}

    def launch(self, plan: Plan) -> Handle:
        self._apply(plan)
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs]] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        seen: set[int] = set()
        for i, item in enumerate(plan.items):
            assert item.row not in seen, "a row twice in one plan"
            seen.add(item.row)
            row = self.rows[item.row]
            start = row.computed
            assert item.start in (None, start), f"host says {item.start}, device says {start}"
            assert start + item.num <= item.end, "the host's bound is too low"
            for p in range(start, start + item.num):
                self.kv[row.table[p // self.size]][p % self.size] = (row.tokens[p], p)
            row.computed = start + item.num
            new, found = [], []
            if item.sample:
                assert row.computed == len(row.tokens), "sampled before the last known token"
                entries = [self.kv[row.table[p // self.size]][p % self.size] for p in range(row.computed)]
                if row.logprobs is None:
                    new = [oracle.model(entries, row.seed, plan.masks.get(i))]  # type: ignore[arg-type]
                else:
                    found = [ranked(oracle.logprobs(entries), row.logprobs)]  # type: ignore[arg-type]
                    new = [found[0].token]
                row.tokens += new
            tokens.append(new)
            logprobs.append(found)
            if item.prompt_logprobs is not None:  # a number that tells the position and the token
                after = [*row.tokens[start + 1 : start + item.num + 1], -1][: item.num]
                prompt_logprobs[i] = [TokenLogprobs(t, -float(start + k), 1, []) for k, t in enumerate(after)]
        return Handle(StepResult(tokens, logprobs, prompt_logprobs))

    def _apply(self, plan: Plan) -> None:
        sources = [list(self.kv[a]) for a, _ in plan.copies]  # all are read before any is written
        assert len({b for _, b in plan.copies}) == len(plan.copies), "two copies to one block"
        for (_, b), entries in zip(plan.copies, sources, strict=True):
            self.kv[b] = entries
        assert len({r.row for r in plan.rows}) == len(plan.rows), "a row given out twice"
        for r in plan.rows:
            self.rows[r.row] = self._row(r)
        for row, j, block in plan.appends:
            table = self.rows[row].table
            assert j <= len(table), "a hole in a table"
            table[j : j + 1] = [block]

    def _row(self, r: NewRow) -> Row:
        return Row(list(r.tokens), r.computed, list(r.table), r.seed, r.logprobs)


def ranked(logprobs: list[float], count: int) -> TokenLogprobs:
    """The likeliest token, which a greedy row takes, and so many of the likeliest."""
    top = sorted(enumerate(logprobs), key=lambda at: -at[1])
    return TokenLogprobs(top[0][0], top[0][1], 1, top[:count])
