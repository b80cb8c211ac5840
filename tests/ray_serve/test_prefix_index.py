"""Which replica a prompt goes to: block hashes, bounds on the age of what is known, fallback."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("msgspec")

from octavo.serve.ray_serve.prefix_index import (
    BLOCK_BYTES,
    BYTES_PER_TOKEN,
    MAX_BLOCKS,
    PrefixIndex,
    block_hashes,
    rank_replicas,
)

TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. " * 20


def chat(*contents: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": messages, **fields}).encode()


def shared(one: bytes, other: bytes, salts: tuple[str, str] = ("", "")) -> int:
    """The number of leading blocks that two requests have in common."""
    pairs = zip(block_hashes(one, salts[0]), block_hashes(other, salts[1]), strict=False)
    count = 0
    for first, second in pairs:
        if first != second:
            break
        count += 1
    return count


def test_the_next_turn_of_a_chat_has_the_blocks_of_the_turn_before() -> None:
    first = chat(TEXT)
    second = chat(TEXT, "a reply", "another question", seed=3)
    assert shared(first, second) == len(block_hashes(first, "")) == len(TEXT) // BLOCK_BYTES


def test_a_hash_covers_all_text_before_it() -> None:
    one = block_hashes(chat("a" + TEXT), "")
    other = block_hashes(chat("b" + TEXT), "")
    assert len(one) == len(other) > 3
    assert set(one).isdisjoint(other)


def test_only_fields_of_the_prompt_count_and_in_any_order() -> None:
    prompt = json.dumps(TEXT)
    one = f'{{"prompt": {prompt}, "max_tokens": 3, "stream": true}}'.encode()
    other = f'{{"seed": 7, "model": "a", "prompt": {prompt}}}'.encode()
    assert block_hashes(one, "") == block_hashes(other, "") != []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"tools": [{"name": "a"}]}, {"tools": [{"name": "b"}]}),
    ],
)
def test_prompts_that_cannot_share_kv_share_no_hash(
    one: dict[str, object], other: dict[str, object]
) -> None:
    assert shared(chat(TEXT, **one), chat(TEXT, **other)) == 0
    assert shared(chat(TEXT, **one), chat(TEXT, **one)) > 0


def test_two_api_keys_share_no_hash() -> None:
    assert shared(chat(TEXT), chat(TEXT), salts=("alice", "bob")) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"messages": "\xff"}', b"null"])
def test_an_invalid_body_has_no_hashes(body: bytes) -> None:
    assert block_hashes(body, "") == []


def test_a_long_prompt_has_a_bounded_number_of_hashes() -> None:
    assert len(block_hashes(chat("x" * (MAX_BLOCKS + 9) * BLOCK_BYTES), "")) == MAX_BLOCKS


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


HASHES = [bytes([n]) * 8 for n in range(20)]


def test_an_entry_expires_after_its_last_use() -> None:
    clock = Clock()
    index = PrefixIndex(max_age=60, clock=clock)
    index.add("a", HASHES[:4])
    clock.now += 40
    index.add("a", HASHES[:2])
    clock.now += 30
    assert index.matched("a", HASHES) == 2
    clock.now += 31
    assert index.matched("a", HASHES) == 0


def test_a_match_ends_at_the_first_block_that_is_missing() -> None:
    index = PrefixIndex(max_age=60)
    index.add("a", [HASHES[0], HASHES[2], HASHES[3]])
    assert index.matched("a", HASHES) == 1
    assert index.matched("b", HASHES) == 0


def test_a_restarted_engine_has_lost_its_cache() -> None:
    index = PrefixIndex(max_age=60)
    index.update("a", kv_tokens=4096, generation=1)
    index.add("a", HASHES[:4])
    index.update("a", kv_tokens=4096, generation=1)
    assert index.matched("a", HASHES) == 4
    index.update("a", kv_tokens=4096, generation=2)
    assert index.matched("a", HASHES) == 0


def test_a_replica_has_no_more_entries_than_its_kv_cache_holds() -> None:
    index = PrefixIndex(max_age=60)
    index.update("a", kv_tokens=6 * BLOCK_BYTES // BYTES_PER_TOKEN, generation=1)
    index.add("a", HASHES[:4])
    index.add("a", HASHES[10:14])
    assert index.matched("a", HASHES[10:]) == 4
    assert index.matched("a", HASHES) == 2  # The end of the older prompt is evicted first.


def test_replicas_that_are_gone_are_forgotten() -> None:
    index = PrefixIndex(max_age=60)
    for name in ("a", "b"):
        index.update(name, kv_tokens=4096, generation=1)
        index.add(name, HASHES[:4])
    index.keep(["b"])
    assert (index.matched("a", HASHES), index.matched("b", HASHES)) == (0, 4)


def ranked(loads: dict[str, int], failed: tuple[str, ...] = (), **matches: int) -> list[list[str]]:
    index = PrefixIndex(max_age=60)
    for name, count in matches.items():
        index.add(name, HASHES[:count])
    return rank_replicas(index, HASHES, loads, failed, slack=4)


def test_the_longest_match_is_preferred() -> None:
    assert ranked({"a": 0, "b": 0, "c": 0}, a=2, b=5) == [["b"], ["c", "a"], []]


def test_a_busy_match_falls_back_to_the_least_loaded() -> None:
    assert ranked({"a": 1, "b": 5, "c": 2}, b=5)[0] == ["b"]
    assert ranked({"a": 1, "b": 6, "c": 2}, b=5) == [[], ["a", "c", "b"], []]


def test_without_a_match_the_least_loaded_comes_first() -> None:
    assert ranked({"a": 3, "b": 1, "c": 2}) == [[], ["b", "c", "a"], []]


def test_new_prompts_are_spread_evenly_although_one_replica_is_new() -> None:
    clock = Clock()
    index = PrefixIndex(max_age=600, clock=clock)
    index.add("a", HASHES)
    placed: list[str] = []
    for number in range(10):
        clock.now += 1
        prompt = [bytes([100 + number]) * 8]
        placed.append(rank_replicas(index, prompt, {"a": 0, "b": 0}, (), slack=4)[1][0])
        index.add(placed[-1], prompt)
    assert placed == ["b", "a"] * 5


def test_a_replica_that_failed_the_request_comes_last() -> None:
    assert ranked({"a": 0, "b": 9}, failed=("a",), a=5) == [[], ["b"], ["a"]]
    assert ranked({"a": 0}, failed=("a",), a=5) == [[], [], ["a"]]
