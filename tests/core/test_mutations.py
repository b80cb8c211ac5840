"""Plants bugs in the scheduler, the block pool, the tiers' index and beam search, one at a time, and demands that the random
workloads notice each.

A bug counts as noticed when tokens differ, an invariant fails, a request is lost, or nothing moves any more.
"""

# ruff: noqa: E501  (lines of source are quoted whole)
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from octavo.core import blocks, eviction, groups, scheduler, tiers
from tests import workloads

BUGS = {
    "results are not matched by epoch": ("scheduler", "if seq is None or item.epoch != seq.epoch:", "if seq is None:"),
    "preemption keeps the epoch": ("scheduler", "= Status.WAITING, seq.epoch + 1, seq", "= Status.WAITING, seq.epoch, seq"),
    "shared blocks are written without a copy": ("scheduler", "if pool.refs[table[j]] > 1]", "if False]"),
    "the fast path ignores sharing": ("scheduler", "if j >= len(seq.table) or refs[seq.table[j]] > 1:", "if j >= len(seq.table):"),
    "the copy is never issued": ("scheduler", "            plan.copies.append((old, table[j]))\n", ""),
    "the device is not told of a copied block": (
        "scheduler",
        "            plan.copies.append((old, table[j]))\n            plan.appends.append((seq.row, j, table[j]))\n",
        "            plan.copies.append((old, table[j]))\n",
    ),
    "blocks are published when planned": ("scheduler", "full = seq.computed // size", "full = min(seq.planned, len(seq.tokens)) // size"),
    "the published count survives preemption": ("scheduler", "        seq.published = loads[0][0] if loads else len(hits)", "        pass"),
    "the whole prompt is matched": ("scheduler", "full = (len(seq.tokens) - 1) // size", "full = len(seq.tokens) // size"),
    "hits are not pinned": ("scheduler", "[pool.share(b) if b else 0 for b in hits]", "list(hits)"),
    "hits are counted as free": ("scheduler", "len(pool.free) - sum(pool.refs[b] == 0 for b in hits if b)", "len(pool.free)"),
    "the hash forgets what came before": ("scheduler", "hashes.append(chain(parent, ", "hashes.append(chain(b'', "),
    "the salt is ignored": ("blocks", "if salt else b", "if False else b"),
    "the limit ignores steps in flight": ("scheduler", "if at + 1 >= seq.limit or", "if len(seq.tokens) >= seq.limit or"),
    "children fork a position early": ("scheduler", "q.computed == len(q.tokens) - 1]", "q.computed >= len(q.tokens) - 2]"),
    "children fork while steps are in flight": ("scheduler", "if q.forks and not q.inflight and q.computed", "if q.forks and q.planned"),
    "children share a seed": ("scheduler", "seed = child_seed(seq.seed, index)", "seed = seq.seed"),
    "children of a full device are forgotten": ("scheduler", "            self._return(child)\n", "            pass\n"),
    "a child is not counted as a holder": ("scheduler", "[self.pool.share(b) for b in seq.table]", "list(seq.table)"),
    "the victim may already be in the plan": ("scheduler", "weaker = self.decoding[i:] +", "weaker = self.decoding[: i - 1] +"),
    "who is planned gives way to who prefills": ("scheduler", "weaker = self.prefilling[self.prefilling.index(seq) + 1 :]", "weaker = [s for s in self.running if s is not seq]"),
    "a better rank gives way to a worse one": ("scheduler", "[s for s in self.prefilling if s.rank > seq.rank]", "[s for s in self.prefilling if s.rank < seq.rank]"),
    "who decodes is not kept in order": ("scheduler", "            self.prefilling.remove(seq)\n            insort(self.decoding, seq, key=by_rank)\n\n    def _rank_waiting", "            self.prefilling.remove(seq)\n            self.decoding.append(seq)\n\n    def _rank_waiting"),
    "work is paused for who ranks after it": ("scheduler", "if s.rank > seq.rank and self.policy.pauses(seq, s)]", "if s.rank < seq.rank]"),
    "what was paused comes straight back, in the plan that paused it": ("scheduler", "            if seq.rank >= before:\n                break\n            if not self._may_begin", "            if not self._may_begin"),
    "who stands aside does so for ever": ("scheduler", "for a in ahead for s in self.running", "for a in ahead or ([self.urgent] if self.urgent else []) for s in self.running"),
    "a prompt that stands aside counts as computed": ("scheduler", "if num <= 0 or seq.status is not Status.RUNNING or seq.id in aside:", "seq.planned += max(num, 0) if seq.id in aside else 0\n            if num <= 0 or seq.status is not Status.RUNNING or seq.id in aside:"),
    "who stands aside is planned all the same, and told nothing": ("scheduler", "if at + 1 >= seq.limit or seq.id in aside:", "seq.planned += seq.id in aside\n            if at + 1 >= seq.limit or seq.id in aside:"),
    "who sits out is planned all the same, and told nothing": ("scheduler", "        self.sat_out = bool(equals)\n", "        self.sat_out = bool(equals)\n        for s in self.decoding:\n            s.planned += s.id in equals\n"),
    "a batch forms while one runs": ("scheduler", "if not running or beside:", "if True:"),
    "a batch forms of nobody": ("scheduler", "formed = self.form is None or seq.request.id in self.batch", "formed = self.form is None"),
    "the row is not given back": ("scheduler", "        self.rows.append(seq.row)\n", ""),
    "blocks are not given back": ("scheduler", "            self.pool.drop(b)\n", "            pass\n"),
    "an aborted request keeps waiting": ("scheduler", "            self.waiting.remove(seq)\n", "            pass\n"),
    "prompt logprobs are taken from the cache": ("scheduler", "return self.caching and not self._missing_prompt_logprobs(seq)", "return self.caching"),
    "a preempted sequence still holds others up": ("scheduler", "                del self.computing[h]\n", "                pass\n"),
    "a guided sequence is planned before its token is known": ("scheduler", "(seq.guide is not None or seq.beam is not None)", "seq.beam is not None"),
    "a guide does not move on": ("scheduler", "        guide.accept(token)\n", "        pass\n"),
    "a guide moves on when a step is planned": ("scheduler", "plan.masks[len(items)] = seq.guide.mask", "plan.masks[len(items)] = seq.guide.mask; seq.guide.accept(seq.tokens[-1])"),
    "completions share a guide": ("scheduler", "else seq.guide.copy()", "else seq.guide"),
    "requests share a guide": ("scheduler", "else request.guide.copy()", "else request.guide"),
    "the first token is not guided": ("scheduler", "if sample and seq.guide is not None:", "if False:"),
    "masks go to the wrong item": ("scheduler", "plan.masks[len(items)] =", "plan.masks[max(len(items) - 1, 0)] ="),
    "ignore_eos holds for what a guide has ended": ("scheduler", "params.ignore_eos and guide is None", "params.ignore_eos"),
    "a beam is planned before its token is known": ("scheduler", "(seq.guide is not None or seq.beam is not None)", "seq.guide is not None"),
    "the device is not told which token was chosen": ("scheduler", "elif not step.entered:", "elif False:"),
    "a fork's row is not written": ("scheduler", "        self.rewritten[child.id] = child\n", ""),
    "who was preempted gets a row": ("scheduler", "        for seq in self.rewritten.values():\n            if seq.status is Status.RUNNING:", "        for seq in self.rewritten.values():\n            if True:"),
    "the first beam to report decides": ("scheduler", "if all(map(reported, self.requests[seq.request.id])):", "if True:"),
    "beams that have reported never give way": ("scheduler", "                        self._preempt(seq, ", "                        str("),
    "beams that have reported keep siblings from going on": ("scheduler", "s.status is Status.WAITING or s in self.prefilling", "False"),
    "a beam that has reported comes back before its siblings have": ("scheduler", "formed and not reported(seq) and", "formed and"),
    "forks begin after their parent's step": ("scheduler", "in reversed(steps):  # a parent", "in steps:  # a parent"),
    "beams that lost stay": ("scheduler", "            if seq.id not in best:\n", "            if not steps:\n"),
    "two beams have one place in the queue": ("scheduler", "self._child(seq, free.pop())", "self._child(seq, seq.index)"),
    "beams are forgotten": ("scheduler", "            beams.append(seq)\n", "            beams.append(seq) if not beams else None\n"),
    "too few candidates": ("groups", "return self.width + len(self.root.stop_ids)", "return self.width"),
    "an end beyond the best counts": ("groups", "if rank < self.width and (stopped", "if (stopped"),
    "scores are not summed": ("groups", "Step(seq, score + logprob,", "Step(seq, logprob,"),
    "a text's length does not count its last token": ("groups", "len(order[0].seq.tokens) + 1 -", "len(order[0].seq.tokens) -"),
    "the worst texts are kept": ("groups", "key=lambda h: -h.score", "key=lambda h: h.score"),
    "a search goes on for ever": ("groups", "if length == self.longest or self._over(on[0].score, length)", "if length == self.longest"),
    "a search ends before it has found enough": ("groups", "if len(self.ended) < self.width:", "if not self.ended:"),
    "never is not long": ("groups", "            length = self.longest  # the longest", "            pass  # the longest"),
    "min_tokens do not hold for beams": ("groups", "if not (early and token in self.root.stop_ids)", "if True"),
    "evicted content stays in the index": ("blocks", "            del self.index[h]\n", ""),
    "a shared block stays in the free list": ("blocks", "            del self.free[block]\n", "            pass\n"),
    "a block is freed while somebody holds it": ("blocks", "        if self.refs[block] == 0:\n            self.free[block]", "        if True:\n            self.free[block]"),
    "a published block is published twice": ("blocks", "if h not in self.index and self.hash[block] is None:", "if True:"),
    "padding is handed out": ("blocks", "range(1, num_blocks + 1))\n        self.index", "range(0, num_blocks + 1))\n        self.index"),
    "a shared block stays among its owner's": ("blocks", "                self.shares.remove(self.owner[block], block)\n", "                pass\n"),
    "a block that gives way stays among its owner's": ("blocks", "        self.shares.remove(owner, block)\n", ""),
    "a cached block is not its owner's": ("blocks", "            elif self.owner[block]:\n                self.shares.add(self.owner[block], block)\n", ""),
    "blocks to load into are not counted": ("scheduler", "if need + len(loads) > len(pool.free)", "if need > len(pool.free)"),
    "content is not loaded": ("tiers", "        plan.loads.append((slot, block))\n", ""),
    "a failed step's stores count": ("tiers", "self._end(plan, False)", "self._end(plan, True)"),
    "a failed step's fetches are awaited": ("tiers", "            if self.fetching.pop(fetch.ticket, None):\n", "            if False:\n"),
    "an evicted content is not stored": ("tiers", "        plan.stores.append((block, slot))\n", ""),
    "a slot that a step reads is given away": ("tiers", "            if not self.pins[slot]:\n                del self.ready[h]", "            if True:\n                del self.ready[h]"),
    "the pin of a load stays": ("tiers", "            self.pins[slot] -= 1\n            self._free", "            self._free"),
    "a store counts before its step is committed": ("tiers", "        self.filling[h] = slot\n", "        self.ready[h] = slot\n        self.filling[h] = slot\n"),
    "a missed fetch counts as arrived": ("tiers", 'arrived = news.kind == "fetched"', "arrived = True"),
    "a missed fetch keeps its slot": ("tiers", "            self._settle(fetch.slot, arrived)\n", "            if arrived:\n                self._settle(fetch.slot, arrived)\n"),
    "nobody hears of the disk while nothing runs": ("scheduler", "            plan.waits = bool(self.tiers.fetching or self.tiers.rising)\n", ""),
    "who waits for the disk never looks again": ("tiers", "        self.pins[slot] -= 1\n        self.news += 1\n", "        self.pins[slot] -= 1\n"),
    "a content is in two slots": ("tiers", "elif content.hash not in self.filling and self._store", "elif self._store"),
    "what was forgotten comes back": ("tiers", "        self.filling.clear()\n", ""),
    "what was lifted stays in use": ("tiers", "            pool.drop(block)\n            self.news += 1\n", "            self.news += 1\n"),
    "lifted content is another's": ("tiers", "self.rising[seq.hashes[j]] = block", "self.rising[seq.hashes[0]] = block"),
    "asking for more costs what is there": ("tiers", "del wanted[max(self._room() - here, 0) :]", "pass"),
}  # fmt: skip


# In workloads whose caches are bounded.
EVICTION_BUGS = {
    "what was moved is published": ("scheduler", "        seq.published = NEVER  # until", "        # until"),
    "shared blocks are moved in place": ("scheduler", "            if pool.refs[old := table[k]] > 1:", "            if pool.refs[old := table[k]] > 99:"),
    "what is moved can still be found": ("scheduler", "            pool.withdraw(table[k])\n", ""),
    "keys are not moved": ("scheduler", "            plan.shifts.append((table[k], size))\n", ""),
    "the device keeps the old table": ("scheduler", "        plan.rows.append(self._new_row(seq))\n        return True\n\n    def _schedule", "        return True\n\n    def _schedule"),
    "a block leaves while steps are in flight": ("scheduler", "if at >= self.most and seq.inflight:", "if False:"),
    "the fresh block is not counted": ("scheduler", "if shared + 1 > len(pool.free) +", "if shared > len(pool.free) +"),
    "the copies are not counted": ("scheduler", "if shared + 1 > len(pool.free) +", "if 1 > len(pool.free) +"),
    "a block that leaves is not given back": ("scheduler", "pool.drop(table.pop(j))", "table.pop(j)"),
    "a preempted sequence keeps more than its budget": ("scheduler", "if len(seq.tokens) > self.most:  #", "if False:  #"),
    "noise repeats": ("scheduler", "            seq.dropped, said,\n", "            0, said,\n"),
    "the limit stays the text's": ("eviction", "seq.limit, seq.prompt_len = seq.limit - size, seq.prompt_len - size", "seq.prompt_len -= size"),
    "sinks leave": ("eviction", "        return sinks\n", "        return 0\n"),
}  # fmt: skip

MODULES = {"blocks": blocks, "eviction": eviction, "groups": groups, "tiers": tiers}
IMPORTED = {  # by the scheduler
    "blocks": ("BlockPool", "chain", "root"),
    "eviction": ("drop", "pick"),
    "groups": ("BeamSearch", "go_on"),
    "tiers": ("Tiers",),
}


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    source = Path(module.__file__ or "").read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__], saved = copy, sys.modules[module.__name__]
    try:
        exec(compile(source.replace(old, new), f"<{module.__name__}, mutated>", "exec"), copy.__dict__)
    finally:
        sys.modules[module.__name__] = saved
    return copy


@pytest.mark.parametrize("name", [*BUGS, *EVICTION_BUGS])
def test_a_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, old, new = (BUGS | EVICTION_BUGS)[name]
    if where == "scheduler":
        monkeypatch.setattr(workloads, "Scheduler", mutated(scheduler, old, new).Scheduler)
    else:
        copy = mutated(MODULES[where], old, new)
        for attribute in IMPORTED[where]:
            monkeypatch.setattr(scheduler, attribute, getattr(copy, attribute))
    for seed in range(600):
        try:
            if name in EVICTION_BUGS:
                workloads.trial(seed // 2, guided=seed % 2 == 1, evict=True)
            else:
                workloads.trial(seed // 3, guided=seed % 3 == 1, beams=seed % 3 == 2)
        except Exception:
            return
    pytest.fail("no workload noticed")
