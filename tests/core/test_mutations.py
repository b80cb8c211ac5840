"""Plants bugs in the core, one at a time, and demands that the random workloads notice each.

A bug counts as noticed when tokens differ, an invariant fails, a request is lost, or nothing moves any more.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from octavo.core import (
    admission,
    batching,
    beam_search,
    blocks,
    bounded_kv,
    forks,
    preemption,
    prefix,
    queues,
    scheduler,
    tables,
    tier_index,
)
from tests import workloads

BUGS = {
    "results are not matched by epoch": ("scheduler", "if seq is None or item.epoch != seq.epoch:", "if seq is None:"),
    "preemption keeps the epoch": ("scheduler", "= seq.epoch + 1, seq.preemptions", "= seq.epoch, seq.preemptions"),
    "shared blocks are written without a copy": ("tables", "if pool.refs[table[j]] > 1]", "if False]"),
    "the fast path ignores sharing": ("scheduler", "if j >= len(seq.block_table) or refs[seq.block_table[j]] > 1:", "if j >= len(seq.block_table):"),
    "the copy is never issued": ("tables", "        plan.copies.append((old, table[j]))\n", ""),
    "the device is not told of a copied block": (
        "tables",
        "        plan.copies.append((old, table[j]))\n        plan.block_appends.append((seq.slot, j, table[j]))\n",
        "        plan.copies.append((old, table[j]))\n",
    ),
    "blocks are published when planned": ("prefix", "full = seq.computed // size", "full = min(seq.planned, len(seq.tokens)) // size"),
    "the published count survives preemption": ("prefix", "        seq.published_blocks = found.loads[0][0] if found.loads else len(found.hits)", "        pass"),
    "the whole prompt is matched": ("prefix", "full = (len(seq.tokens) - 1) // self.size", "full = len(seq.tokens) // self.size"),
    "hits are not pinned": ("prefix", "[self.pool.share(b) if b else 0 for b in found.hits]", "list(found.hits)"),
    "hits are counted as free": ("tables", "sum(pool.refs[b] > 0 for b in hits if b)", "sum(b > 0 for b in hits)"),
    "the hash forgets what came before": ("prefix", "hashes.append(chain(parent, ", "hashes.append(chain(b'', "),
    "the salt is ignored": ("blocks", "if salt else b", "if False else b"),
    "the limit ignores steps in flight": ("scheduler", "if at + 1 >= seq.position_limit or", "if len(seq.tokens) >= seq.position_limit or"),
    "children fork a position early": ("forks", "q.computed == len(q.tokens) - 1\n", "q.computed >= len(q.tokens) - 2\n"),
    "children fork while steps are in flight": ("forks", "if q.pending_forks and not q.steps_in_flight and q.computed", "if q.pending_forks and q.planned"),
    "children share a seed": ("forks", "seed = child_seed(seq.seed, index)", "seed = seq.seed"),
    "children of a full device are forgotten": ("forks", "            self.queues.come_back(child)\n", "            pass\n"),
    "a child is not counted as a holder": ("forks", "[self.pool.share(b) for b in seq.block_table]", "list(seq.block_table)"),
    "the victim may already be in the plan": ("scheduler", "weaker = self.decoding[i:] +", "weaker = self.decoding[: i - 1] +"),
    "who is planned gives way to who prefills": ("scheduler", "weaker = self.prefilling[self.prefilling.index(seq) + 1 :]", "weaker = [s for s in self.running if s is not seq]"),
    "a better rank gives way to a worse one": ("scheduler", "[s for s in self.prefilling if s.rank > seq.rank]", "[s for s in self.prefilling if s.rank < seq.rank]"),
    "who decodes is not kept in order": ("queues", "        self.prefilling.remove(seq)\n        insort(self.decoding, seq, key=by_rank)\n", "        self.prefilling.remove(seq)\n        self.decoding.append(seq)\n"),
    "work is paused for who ranks after it": ("preemption", "if s.rank > seq.rank and policy.pauses(seq, s)]", "if s.rank < seq.rank]"),
    "what was paused comes straight back, in the plan that paused it": ("scheduler", "            if seq.rank >= before:\n                break\n            if not self._may_begin", "            if not self._may_begin"),
    "who stands aside does so for ever": ("preemption", "for a in room.ahead for s in", "for a in room.ahead or ([self.latest] if self.latest else []) for s in"),
    "a prompt that stands aside counts as computed": ("scheduler", "if num <= 0 or seq.status is not Status.RUNNING or seq.id in aside:", "seq.planned += max(num, 0) if seq.id in aside else 0\n            if num <= 0 or seq.status is not Status.RUNNING or seq.id in aside:"),
    "who stands aside is planned all the same, and told nothing": ("scheduler", "if at + 1 >= seq.position_limit or seq.id in aside:", "seq.planned += seq.id in aside\n            if at + 1 >= seq.position_limit or seq.id in aside:"),
    "who sits out is planned all the same, and told nothing": ("preemption", "        self.sat_out = bool(equals)\n", "        self.sat_out = bool(equals)\n        for s in self.queues.decoding:\n            s.planned += s.id in equals\n"),
    "a batch forms while one runs": ("batching", "if not running or beside:", "if True:"),
    "a batch forms of nobody": ("batching", "return self.form is None or seq.request.id in self.latest", "return True"),
    "the row is not given back": ("queues", "        self.rows.append(seq.slot)\n", ""),
    "blocks are not given back": ("scheduler", "            self.pool.drop(b)\n", "            pass\n"),
    "an aborted request keeps waiting": ("scheduler", "            self.waiting.remove(seq)\n", "            pass\n"),
    "prompt logprobs are taken from the cache": ("prefix", "return self.on and not seq.owes_prompt_logprobs", "return self.on"),
    "a preempted sequence still holds others up": ("prefix", "                del self.computing[h]\n", "                pass\n"),
    "a guided sequence is planned before its token is known": ("scheduler", "(seq.guide is not None or seq.beam is not None)", "seq.beam is not None"),
    "a guide does not move on": ("scheduler", "        guide.accept(token)\n", "        pass\n"),
    "a guide moves on when a step is planned": ("scheduler", "plan.token_masks[len(items)] = seq.guide.mask", "plan.token_masks[len(items)] = seq.guide.mask; seq.guide.accept(seq.tokens[-1])"),
    "completions share a guide": ("forks", "else seq.guide.copy()", "else seq.guide"),
    "requests share a guide": ("admission", "else request.guide.copy()", "else request.guide"),
    "the first token is not guided": ("scheduler", "if sample and seq.guide is not None:", "if False:"),
    "masks go to the wrong item": ("scheduler", "plan.token_masks[len(items)] =", "plan.token_masks[max(len(items) - 1, 0)] ="),
    "ignore_eos holds for what a guide has ended": ("admission", "params.ignore_eos and request.guide is None", "params.ignore_eos"),
    "a beam is planned before its token is known": ("scheduler", "(seq.guide is not None or seq.beam is not None)", "seq.guide is not None"),
    "the device is not told which token was chosen": ("forks", "elif not step.entered:", "elif False:"),
    "a fork's row is not written": ("forks", "        self.rewritten[child.id] = child\n", ""),
    "who was preempted gets a row": ("forks", "        for seq in self.rewritten.values():\n            if seq.status is Status.RUNNING:", "        for seq in self.rewritten.values():\n            if True:"),
    "the first beam to report decides": ("forks", "if not all(map(reported, family)):", "if False:"),
    "beams that have reported never give way": ("forks", "        return found\n", "        return []\n"),
    "beams that have reported keep siblings from going on": ("forks", "s.status is Status.WAITING or s in self.queues.prefilling", "False"),
    "a beam that has reported comes back before its siblings have": ("scheduler", "self.batches.formed(seq) and not reported(seq) and", "self.batches.formed(seq) and"),
    "forks begin after their parent's step": ("forks", "for step in reversed(steps):", "for step in steps:"),
    "beams that lost stay": ("forks", "            if seq.id not in best:\n", "            if not steps:\n"),
    "two beams have one place in the queue": ("forks", "self.fork(seq, free.pop())", "self.fork(seq, seq.index)"),
    "beams are forgotten": ("forks", "            beams.append(seq)\n", "            beams.append(seq) if not beams else None\n"),
    "too few candidates": ("beam_search", "return seq.params.width + len(seq.stop_ids)", "return seq.params.width"),
    "an end beyond the best counts": ("beam_search", "if rank < self.width and (stopped", "if (stopped"),
    "scores are not summed": ("beam_search", "Step(seq, score + logprob,", "Step(seq, logprob,"),
    "a text's length does not count its last token": ("beam_search", "len(order[0].seq.tokens) + 1 -", "len(order[0].seq.tokens) -"),
    "the worst texts are kept": ("beam_search", "key=lambda h: -h.score", "key=lambda h: h.score"),
    "a search goes on for ever": ("beam_search", "if length == self.longest or self._over(on[0].score, length)", "if length == self.longest"),
    "a search ends before it has found enough": ("beam_search", "if len(self.ended) < self.width:", "if not self.ended:"),
    "never is not long": ("beam_search", "            length = self.longest  # the longest", "            pass  # the longest"),
    "min_tokens do not hold for beams": ("beam_search", "if not (early and token in self.root.stop_ids)", "if True"),
    "evicted content stays in the index": ("blocks", "            del self.index[h]\n", ""),
    "a shared block stays in the free list": ("blocks", "            del self.free[block]\n", "            pass\n"),
    "a block is freed while somebody holds it": ("blocks", "        if self.refs[block] == 0:\n            self.free[block]", "        if True:\n            self.free[block]"),
    "a published block is published twice": ("blocks", "if h not in self.index and self.hash[block] is None:", "if True:"),
    "padding is handed out": ("blocks", "range(1, num_blocks + 1))\n        self.index", "range(0, num_blocks + 1))\n        self.index"),
    "a shared block stays among its owner's": ("blocks", "                self.shares.remove(self.owner[block], block)\n", "                pass\n"),
    "a block that gives way stays among its owner's": ("blocks", "        self.shares.remove(owner, block)\n", ""),
    "a cached block is not its owner's": ("blocks", "            elif self.owner[block]:\n                self.shares.add(self.owner[block], block)\n", ""),
    "blocks to load into are not counted": ("tables", "sum(pool.refs[b] > 0 for b in hits if b)", "sum(b == 0 or pool.refs[b] > 0 for b in hits)"),
    "content is not loaded": ("tier_index", "        plan.loads.append((slot, block))\n", ""),
    "a failed step's stores count": ("tier_index", "self._end(plan, False)", "self._end(plan, True)"),
    "a failed step's fetches are awaited": ("tier_index", "            if self.fetching.pop(fetch.fetch_id, None):\n", "            if False:\n"),
    "an evicted content is not stored": ("tier_index", "        plan.stores.append((block, slot))\n", ""),
    "a slot that a step reads is given away": ("tier_index", "            if not self.pins[slot]:\n                del self.ready[h]", "            if True:\n                del self.ready[h]"),
    "the pin of a load stays": ("tier_index", "            self.pins[slot] -= 1\n            self._free", "            self._free"),
    "a store counts before its step is committed": ("tier_index", "        self.filling[h] = slot\n", "        self.ready[h] = slot\n        self.filling[h] = slot\n"),
    "a missed fetch counts as arrived": ("tier_index", 'arrived = news.kind == "fetched"', "arrived = True"),
    "a missed fetch keeps its slot": ("tier_index", "            self._settle(fetch.host_block, arrived)\n", "            if arrived:\n                self._settle(fetch.host_block, arrived)\n"),
    "nobody hears of the disk while nothing runs": ("prefix", "            plan.awaits_disk = bool(self.tiers.fetching or self.tiers.rising)\n", ""),
    "who waits for the disk never looks again": ("tier_index", "        self.pins[slot] -= 1\n        self.settled += 1\n", "        self.pins[slot] -= 1\n"),
    "a content is in two slots": ("tier_index", "elif content.hash not in self.filling and self._store", "elif self._store"),
    "what was forgotten comes back": ("tier_index", "        self.filling.clear()\n", ""),
    "what was lifted stays in use": ("tier_index", "            pool.drop(block)\n            self.settled += 1\n", "            self.settled += 1\n"),
    "what is spoilt is cached": ("tier_index", "if loaded and slot not in spoilt:", "if loaded:"),
    "what is spoilt is loaded again": ("tier_index", "                    self._discard(slot)\n", "                    pass\n"),
    "what came from disk is read unchecked": ("tier_index", "self.fetched.add(fetch.host_block)", "pass"),
    "lifted content is another's": ("tier_index", "self.rising[h] = block", "self.rising[seq.block_hashes[0]] = block"),
    "asking for more costs what is there": ("tier_index", "del wanted[max(self._room() - here, 0) :]", "pass"),
}  # fmt: skip


# In workloads whose caches are bounded.
EVICTION_BUGS = {
    "what was moved is published": ("tables", "    seq.published_blocks = NEVER  # until", "    # until"),
    "shared blocks are moved in place": ("tables", "        if pool.refs[old := table[k]] > 1:", "        if pool.refs[old := table[k]] > 99:"),
    "what is moved can still be found": ("tables", "        pool.withdraw(table[k])\n", ""),
    "keys are not moved": ("tables", "        plan.shifts.append((table[k], size))\n", ""),
    "the device keeps the old table": ("scheduler", "        plan.new_slots.append(new_slot(seq))\n        return True\n\n    def _schedule", "        return True\n\n    def _schedule"),
    "a block leaves while steps are in flight": ("scheduler", "if at >= self.most and seq.steps_in_flight:", "if False:"),
    "the fresh block is not counted": ("tables", "if shared + 1 > len(pool.free) +", "if shared > len(pool.free) +"),
    "the copies are not counted": ("tables", "if shared + 1 > len(pool.free) +", "if 1 > len(pool.free) +"),
    "a block that leaves is not given back": ("tables", "pool.drop(table.pop(j))", "table.pop(j)"),
    "a preempted sequence keeps more than its budget": ("scheduler", "if len(seq.tokens) > self.most:  #", "if False:  #"),
    "noise repeats": ("queues", "        seq.dropped_tokens, said,\n", "        0, said,\n"),
    "the limit stays the text's": ("bounded_kv", "    seq.position_limit -= size\n", ""),
    "sinks leave": ("bounded_kv", "        return sinks\n", "        return 0\n"),
}  # fmt: skip

CORE = [
    batching,
    blocks,
    bounded_kv,
    forks,
    beam_search,
    admission,
    prefix,
    queues,
    scheduler,
    tables,
    tier_index,
    preemption,
]


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    source = Path(module.__file__ or "").read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__], saved = copy, sys.modules[module.__name__]
    try:
        exec(
            compile(source.replace(old, new), f"<{module.__name__}, mutated>", "exec"),
            copy.__dict__,
        )
    finally:
        sys.modules[module.__name__] = saved
    return copy


@contextmanager
def planted(where: str, old: str, new: str) -> Iterator[None]:
    """Whoever imported something of this file of the core has a mutated file's instead."""
    module = next(m for m in CORE if m.__name__ == f"octavo.core.{where}")
    copy = mutated(module, old, new)
    with pytest.MonkeyPatch.context() as patch:
        for user in (*CORE, workloads):
            for name, value in list(vars(user).items()):
                if user is not module and getattr(value, "__module__", "") == module.__name__:
                    patch.setattr(user, name, getattr(copy, name))
        yield


@pytest.mark.parametrize("name", [*BUGS, *EVICTION_BUGS])
def test_a_planted_bug_is_noticed(name: str) -> None:
    with planted(*(BUGS | EVICTION_BUGS)[name]):
        for seed in range(600):
            try:
                if name in EVICTION_BUGS:
                    workloads.trial(seed // 2, guided=seed % 2 == 1, evict=True)
                else:
                    workloads.trial(seed // 3, guided=seed % 3 == 1, beams=seed % 3 == 2)
            except Exception:
                return
    pytest.fail("no workload noticed")
