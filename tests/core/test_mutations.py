"""Plants bugs in the core, one at a time, and demands that the random workloads notice each.

A bug counts as noticed when tokens differ, an invariant fails, a request is lost, or nothing moves
any more.
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
    batching,
    beam_search,
    blocks,
    bounded_kv,
    chunk_costs,
    forks,
    prefix,
    prompt_results,
    queues,
    request_checks,
    sampled_tokens,
    scheduler,
    slot_fills,
    speculation,
    step_budget,
    step_limiter,
    step_limits,
    tables,
    tier_index,
    urgent_preemption,
)
from tests import workloads

BUGS = {
    "results are not matched by epoch": ("scheduler", "if seq is None or item.epoch != seq.epoch:", "if seq is None:"),
    "preemption keeps the epoch": ("scheduler", "        seq.epoch += 1\n        seq.preemptions += 1\n", "        seq.preemptions += 1\n"),
    "shared blocks are written without a copy": ("tables", "        if pool.ref_counts[table[index]] > 1\n", "        if False\n"),
    "the fast path ignores sharing": ("scheduler", "if block >= len(seq.block_table) or ref_counts[seq.block_table[block]] > 1:", "if block >= len(seq.block_table):"),
    "the copy is never issued": ("tables", "        plan.copies.append((source, table[index]))\n        plan.table_updates", "        plan.table_updates"),
    "a copied block is missing from the table updates": (
        "tables",
        "        plan.table_updates.append((seq.slot, index, table[index]))\n        pool.release(source)\n",
        "        pool.release(source)\n",
    ),
    "blocks are published when planned": ("prefix", "num_full = seq.computed // self.block_size", "num_full = min(seq.planned, len(seq.tokens)) // self.block_size"),
    "the published count survives preemption": ("prefix", "        seq.published_blocks = match.host_hits[0][0] if match.host_hits else len(match.blocks)\n", ""),
    "the whole prompt is matched": ("prefix", "num_full = (len(seq.tokens) - 1) // self.block_size", "num_full = len(seq.tokens) // self.block_size"),
    "matched blocks are not pinned": ("prefix", "[self.pool.acquire(block) if block else 0 for block in match.blocks]", "list(match.blocks)"),
    "matched blocks are counted as free": ("chunk_costs", "sum(self.pool.ref_counts[block] > 0 for block in match.blocks if block)", "sum(block > 0 for block in match.blocks)"),
    "a hash does not cover the blocks before": ("prefix", "hashes.append(chain_hash(parent, ", "hashes.append(chain_hash(b'', "),
    "the salt is ignored": ("blocks", "if salt else b", "if False else b"),
    "the limit ignores steps in flight": ("scheduler", "if position + 1 >= seq.token_limit or", "if len(seq.tokens) >= seq.token_limit or"),
    "children fork a position early": ("forks", "and seq.computed == len(seq.tokens) - 1\n", "and seq.computed >= len(seq.tokens) - 2\n"),
    "children fork while steps are in flight": ("forks", "if seq.pending_forks and not seq.steps_in_flight and seq.computed", "if seq.pending_forks and seq.planned"),
    "children share a seed": ("forks", "seed=child_seed(seq.seed, index)", "seed=seq.seed"),
    "children are lost when no slot is free": ("forks", "            self.queues.requeue(child)\n", "            pass\n"),
    "a child holds no references": ("forks", "[self.pool.acquire(block) for block in seq.block_table]", "list(seq.block_table)"),
    "a victim may already be in the plan": ("scheduler", "candidates = self.decoding[next_index:]", "candidates = self.decoding[: next_index - 1]"),
    "a prompt preempts sequences in the plan": ("scheduler", "candidates = self.prefilling[self.prefilling.index(seq) + 1 :]", "candidates = [other for other in self.running if other is not seq]"),
    "a lower rank is preempted for a higher one": ("scheduler", "[other for other in self.prefilling if other.rank > seq.rank]", "[other for other in self.prefilling if other.rank < seq.rank]"),
    "decoding sequences are not in rank order": ("queues", "        self.prefilling.remove(seq)\n        insort(self.decoding, seq, key=by_rank)\n", "        self.prefilling.remove(seq)\n        self.decoding.append(seq)\n"),
    "an urgent request preempts more urgent ones": ("urgent_preemption", "                if other.rank > seq.rank\n                and self.policy.preempts(seq, other)\n", "                if other.rank < seq.rank\n"),
    "a victim starts again in the plan that preempted it": ("scheduler", "if seq.rank >= builder.limits.first_rank_not_admitted:", "if False:"),
    "sequences pause for ever": ("urgent_preemption", "            for seq in step.urgent_prompts\n            for other_id in", "            for seq in step.urgent_prompts or ([self.last_urgent] if self.last_urgent else [])\n            for other_id in"),
    "a prompt that pauses counts as computed": ("scheduler", "            elif seq.id not in builder.limits.paused and", "            elif seq.id in builder.limits.paused:\n                seq.planned += 1\n            elif"),
    "a sequence that pauses is planned but not computed": ("scheduler", "if position + 1 >= seq.token_limit or (skip and seq.id in skip):", "seq.planned += seq.id in skip\n            if position + 1 >= seq.token_limit or seq.id in skip:"),
    "a sequence that skips a step is planned but not computed": ("urgent_preemption", "        self.same_class_skipped = bool(skipping)\n", "        self.same_class_skipped = bool(skipping)\n        for other in self.queues.decoding:\n            other.planned += other.id in skipping\n"),
    "a batch forms while another runs": ("batching", "if not running or fits_beside:", "if True:"),
    "requests start without a batch": ("batching", "return self.choose_size is None or seq.request.id in self.admissible", "return True"),
    "the slot is not freed": ("queues", "        self.free_slots.append(seq.slot)\n", ""),
    "blocks are not freed": ("scheduler", "            self.pool.release(block)\n", "            pass\n"),
    "an aborted request keeps waiting": ("scheduler", "            self.waiting.remove(seq)\n", "            pass\n"),
    "prompt logprobs are taken from the cache": ("prefix", "return self.enabled and not seq.needs_all_positions", "return self.enabled"),
    "sequences wait for a preempted one": ("prefix", "                del self.computing[content_hash]\n", "                pass\n"),
    "a guided sequence is planned before its token is known": ("scheduler", "seq.guide is not None or seq.beam is not None or waits_to_draft", "seq.beam is not None or waits_to_draft"),
    "a stop token is taken for a usual one": ("sampled_tokens", "token not in seq.stop_ids", "True"),
    "the last token is taken for a usual one": ("sampled_tokens", "len(seq.tokens) + 1 < seq.token_limit", "True"),
    "a guided token is taken for a usual one": ("sampled_tokens", "        and seq.guide is None\n", ""),
    "a guide does not advance": ("sampled_tokens", "        guide.accept(token)\n", "        pass\n"),
    "a guide advances when a step is planned": ("scheduler", "plan.token_masks[len(items)] = [seq.guide.mask]", "plan.token_masks[len(items)] = [seq.guide.mask]; seq.guide.accept(seq.tokens[-1])"),
    "completions share a guide": ("forks", "else seq.guide.copy()", "else seq.guide"),
    "requests share a guide": ("request_checks", "else request.guide.copy()", "else request.guide"),
    "the first token is not guided": ("scheduler", "if is_last and seq.guide is not None:", "if False:"),
    "masks go to the wrong item": ("scheduler", "plan.token_masks[len(items)] =", "plan.token_masks[max(len(items) - 1, 0)] ="),
    "ignore_eos applies to a guided sequence": ("request_checks", "params.ignore_eos and request.guide is None", "params.ignore_eos"),
    "a beam is planned before its token is known": ("scheduler", "seq.guide is not None or seq.beam is not None or waits_to_draft", "seq.guide is not None or waits_to_draft"),
    "the token of a beam is not sent to the device": ("forks", "elif not continuation.on_device:", "elif False:"),
    "a fork's slot is not filled": ("forks", "        self.stale_slots[child.id] = child\n", ""),
    "a preempted fork gets a slot": ("forks", "        for seq in self.stale_slots.values():\n            if seq.status is Status.RUNNING:", "        for seq in self.stale_slots.values():\n            if True:"),
    "the first beam to report decides": ("forks", "if not all(map(has_reported, group)):", "if False:"),
    "beams that have reported are never preempted": ("forks", "        return blocking\n", "        return []\n"),
    "beams that have reported keep siblings from advancing": ("forks", "seq.status is Status.WAITING or seq in self.queues.prefilling", "False"),
    "a beam that has reported starts before its siblings have": ("step_limiter", "            and not has_reported(seq)\n", ""),
    "forks begin after their parent's step": ("forks", "for continuation in reversed(chosen):\n", "for continuation in chosen:\n"),
    "beams that lost stay": ("forks", "            if member.id not in best:\n", "            if not chosen:\n"),
    "two beams have one rank": ("forks", "self.fork(seq, free_indices.pop())", "self.fork(seq, seq.index)"),
    "beams are lost": ("forks", "            beams.append(seq)\n", "            beams.append(seq) if not beams else None\n"),
    "too few candidates": ("beam_search", "return seq.params.width + len(seq.stop_ids)", "return seq.params.width"),
    "an end beyond the best counts": ("beam_search", "if position < self.width and (stopped", "if (stopped"),
    "scores are not summed": ("beam_search", "score=seq.beam.score + logprob,", "score=logprob,"),
    "a text's length does not count its last token": ("beam_search", "length = candidates[0].seq.num_generated + 1", "length = candidates[0].seq.num_generated"),
    "the worst texts are kept": ("beam_search", "key=lambda hypothesis: -hypothesis.score", "key=lambda hypothesis: hypothesis.score"),
    "a search never ends early": ("beam_search", "if length == self.max_length or self._is_over(continuing[0].score, length):", "if length == self.max_length:"),
    "a search ends before it has found enough": ("beam_search", "if len(self.finished) < self.width:", "if not self.finished:"),
    "early_stopping never ignores the longest text": ("beam_search", "            length = self.max_length  # the penalty", "            pass  # the penalty"),
    "min_tokens does not apply to beams": ("beam_search", "if not (too_short and token in self.root.stop_ids)", "if True"),
    "evicted content stays in the index": ("blocks", "            del self.hash_index[content_hash]\n", ""),
    "a shared block stays available": ("blocks", "            del self.available_blocks[block]\n", "            pass\n"),
    "a block is freed while it is in use": ("blocks", "        if self.ref_counts[block] == 0:\n            self.available_blocks[block]", "        if True:\n            self.available_blocks[block]"),
    "a published block is published twice": ("blocks", "if full_block.hash not in self.hash_index and self.hashes[block] is None:", "if True:"),
    "padding is allocated": ("blocks", "OrderedDict[int, None].fromkeys(range(1, num_blocks + 1))", "OrderedDict[int, None].fromkeys(range(0, num_blocks + 1))"),
    "a shared block still counts for its tenant": ("blocks", "                self.quota.remove(self.tenants[block], block)\n", "                pass\n"),
    "an evicted block still counts for its tenant": ("blocks", "        self.quota.remove(tenant, evicted)\n", ""),
    "a cached block does not count for its tenant": ("blocks", "            elif self.tenants[block]:\n                self.quota.add(self.tenants[block], block)\n", ""),
    "blocks to load into are not counted": ("chunk_costs", "sum(self.pool.ref_counts[block] > 0 for block in match.blocks if block)", "sum(block == 0 or self.pool.ref_counts[block] > 0 for block in match.blocks)"),
    "content is not loaded": ("tier_index", "        plan.loads.append((host_block, block))\n", ""),
    "a failed step's stores count": ("tier_index", "self._end_step(plan, False)", "self._end_step(plan, True)"),
    "a failed step's fetches are awaited": ("tier_index", "            if self.fetching.pop(fetch.fetch_id, None):\n", "            if False:\n"),
    "an evicted content is not stored": ("tier_index", "        plan.stores.append((full_block.block, host_block))\n", ""),
    "a host block that a step reads is reused": ("tier_index", "            if not self.pin_counts[host_block]:\n                del self.ready[content_hash]", "            if True:\n                del self.ready[content_hash]"),
    "the pin of a load stays": ("tier_index", "            self.pin_counts[host_block] -= 1\n            self._free", "            self._free"),
    "a store counts before its step is committed": ("tier_index", "        self.filling[content_hash] = host_block\n", "        self.ready[content_hash] = host_block\n        self.filling[content_hash] = host_block\n"),
    "a missed fetch counts as arrived": ("tier_index", 'arrived = event.kind == "fetched"', "arrived = True"),
    "a missed fetch keeps its host block": ("tier_index", "        self._finish_filling(fetch.host_block, arrived)\n", "        if arrived:\n            self._finish_filling(fetch.host_block, arrived)\n"),
    "disk events are not collected while nothing runs": ("prefix", "            plan.awaits_disk = bool(self.tiers.fetching or self.tiers.promoting)\n", ""),
    "an ended transfer does not wake a sequence that waits for the disk": ("tier_index", "        self.pin_counts[host_block] -= 1\n        self.transfers_ended += 1\n", "        self.pin_counts[host_block] -= 1\n"),
    "a content is in two host blocks": ("tier_index", "elif removed.hash not in self.filling and self._store", "elif self._store"),
    "cleared content comes back": ("tier_index", "        self.filling.clear()\n", ""),
    "a promoted block stays in use": ("tier_index", "            self.pool.release(full_block.block)\n", ""),
    "corrupt content is cached": ("tier_index", "if not failed and host_block not in corrupt:", "if not failed:"),
    "corrupt content is loaded again": ("tier_index", "                    self._discard(host_block)\n", "                    pass\n"),
    "content from disk is read unverified": ("tier_index", "self.unverified.add(fetch.host_block)", "pass"),
    "promoted content gets another hash": ("tier_index", "self.promoting[hashes[index]] = block", "self.promoting[hashes[0]] = block"),
    "a fetch evicts the sequence's own blocks": ("tier_index", "del missing[max(self._num_available() - num_present, 0) :]", "pass"),
}  # fmt: skip


# Noticed by workloads with bounded KV.
BOUNDED_KV_BUGS = {
    "shifted blocks are published": ("tables", "    seq.published_blocks = NEVER_PUBLISH", "    # never"),
    "shared blocks are shifted in place": ("tables", "        if pool.ref_counts[source] > 1:", "        if pool.ref_counts[source] > 99:"),
    "a shifted block can still be found": ("tables", "        pool.unpublish(table[index])\n", ""),
    "keys are not shifted": ("tables", "        plan.shifts.append((table[index], pool.block_size))\n", ""),
    "the device keeps the old block table": ("scheduler", "        plan.slot_fills.append(build_slot_fill(seq))\n        return True\n\n    def _schedule", "        return True\n\n    def _schedule"),
    "a block is dropped while steps are in flight": ("scheduler", "if position >= max_positions and seq.steps_in_flight:", "if False:"),
    "the new block is not counted": ("tables", "if num_shared + 1 > pool.num_available +", "if num_shared > pool.num_available +"),
    "the copies are not counted": ("tables", "if num_shared + 1 > pool.num_available +", "if 1 > pool.num_available +"),
    "a dropped block is not freed": ("tables", "    pool.release(dropped_block)\n", ""),
    "a preempted sequence keeps more than its budget": ("scheduler", "if len(seq.tokens) > self.max_kv_positions:  #", "if False:  #"),
    "sampling noise repeats": ("slot_fills", "        dropped_tokens=seq.dropped_tokens,\n", "        dropped_tokens=0,\n"),
    "the limit does not follow dropped tokens": ("bounded_kv", "    seq.token_limit -= block_size\n", ""),
    "sinks are dropped": ("bounded_kv", "        return sinks\n", "        return 0\n"),
}  # fmt: skip

# Noticed by workloads with speculative decoding.
SPECULATION_BUGS = {
    "rejected drafts count as computed": ("scheduler", "        seq.computed += num_accepted\n", "        seq.computed += num_drafts\n"),
    "accepted drafts do not count as computed": ("scheduler", "        seq.computed += num_accepted\n", ""),
    "positions of rejected drafts stay planned": ("scheduler", "        seq.planned -= num_drafts - num_accepted\n", ""),
    "drafts stay in flight": ("scheduler", "        seq.drafts_in_flight -= num_drafts\n", ""),
    "a preempted sequence keeps its drafts in flight": ("scheduler", "        seq.drafts_in_flight = 0\n", ""),
    "blocks of steps in flight are given back": ("scheduler", "num_blocks = -(-seq.planned // self.pool.block_size)", "num_blocks = -(-seq.computed // self.pool.block_size)"),
    "blocks of rejected drafts leave the table and stay in use": ("scheduler", "            self._release_blocks(seq, num_blocks)\n", "            del seq.block_table[num_blocks:]\n"),
    "drafts have no blocks": ("scheduler", "if count and not reserve(self.pool, seq, 1 + count, plan):", "if False:"),
    "one block too few is reserved": ("scheduler", "if count and not reserve(self.pool, seq, 1 + count, plan):", "if count and not reserve(self.pool, seq, count, plan):"),
    "drafts may exceed the limit of the sequence": ("scheduler", "room = seq.token_limit - seq.planned - 2", "room = seq.token_limit - seq.planned"),
    "drafts are verified before the host knows the text": ("scheduler", "or seq.beam is not None or waits_to_draft", "or seq.beam is not None"),
    "text is looked up before the host knows its end": ("speculation", "knows_tokens = self.waits_for_tokens or seq.planned < len(seq.tokens)", "knows_tokens = True"),
    "all sampled positions have the first mask": ("speculation", "        masks.append(follower.mask)\n", "        masks.append(masks[0])\n"),
    "a draft that the guide forbids is verified": ("speculation", "        if not mask[token >> 3] >> (token & 7) & 1:\n            return drafts[:count], masks\n", ""),
    "the guide itself follows the drafts": ("speculation", "    follower = guide.copy()\n", "    follower = guide\n"),
    "tokens behind a stop token are kept": ("scheduler", "            if reason is not None:\n                break\n        if reason is not None and num_kept", "        if reason is not None and num_kept"),
    "a guide skips accepted drafts": ("scheduler", "                    advance_guide(seq.guide, token, ended=reason is not None)", "                    token is tokens[-1] and advance_guide(seq.guide, token, ended=reason is not None)"),
}  # fmt: skip

# Noticed by workloads with requests for hidden states.
POOLING_BUGS = {
    "states of the time before a preemption are kept": ("prompt_results", '    if not item.start or item.pooling == "last":\n', '    if not seq.pooled or item.pooling == "last":\n'),
    "a prompt ends before its last chunk": ("scheduler", "        if seq.computed < len(seq.tokens):\n            return []\n", ""),
    "a token is sampled too": ("scheduler", "sample=is_last and seq.request.pooling is None", "sample=is_last"),
    "only the last chunk is added up": ("prompt_results", 'map(operator.add, seq.pooled, states)', "states"),
    "states of cached positions are missing": ("prefix", "not seq.needs_all_positions", "not seq.lacks_prompt_logprobs"),
    "a prompt that fills the context is refused": ("request_checks", "        room += 1  # no token is generated\n", "        pass\n"),
}  # fmt: skip

CORE = [
    batching,
    blocks,
    bounded_kv,
    chunk_costs,
    forks,
    beam_search,
    request_checks,
    prompt_results,
    prefix,
    queues,
    sampled_tokens,
    scheduler,
    slot_fills,
    speculation,
    step_budget,
    step_limiter,
    step_limits,
    tables,
    tier_index,
    urgent_preemption,
]


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    source = Path(module.__file__ or "").read_text()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
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
def planted(module_name: str, old: str, new: str) -> Iterator[None]:
    """Let every module of the core use a mutated copy of one module."""
    module = next(m for m in CORE if m.__name__ == f"octavo.core.{module_name}")
    copy = mutated(module, old, new)
    with pytest.MonkeyPatch.context() as patch:
        for user in (*CORE, workloads):
            for name, value in list(vars(user).items()):
                if user is not module and getattr(value, "__module__", "") == module.__name__:
                    patch.setattr(user, name, getattr(copy, name))
        yield


@pytest.mark.parametrize("name", [*BUGS, *BOUNDED_KV_BUGS, *SPECULATION_BUGS, *POOLING_BUGS])
def test_a_planted_bug_is_noticed(name: str) -> None:
    with planted(*(BUGS | BOUNDED_KV_BUGS | SPECULATION_BUGS | POOLING_BUGS)[name]):
        for seed in range(600):
            try:
                if name in SPECULATION_BUGS:
                    workloads.trial(seed, guided=seed % 2 == 0, drafts=True)
                elif name in POOLING_BUGS:
                    workloads.trial(seed, drafts=seed % 3 == 0, pooling=True)
                elif name in BOUNDED_KV_BUGS:
                    workloads.trial(seed // 2, guided=seed % 2 == 1, evict=True)
                else:
                    workloads.trial(seed // 3, guided=seed % 3 == 1, beams=seed % 3 == 2)
            except Exception:
                return
    pytest.fail("no workload noticed")
