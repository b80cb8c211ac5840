"""KV events: an independent reader knows at any time what the prefix cache holds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="pyzmq is not installed: run `make setup`")

from octavo.core.engine import Engine
from octavo.errors import InvalidRequest, OctavoError
from octavo.params import SamplingParams
from octavo.serve import server as serve_module
from octavo.serve.engine.kv_publisher import KVPublisher
from octavo.serve.kv_events_config import KVEventsConfig, kv_events_config
from octavo.serve.serve_config import ServeConfig
from octavo.types import Request
from tests.serve.kv_event_reader import Reader
from tests.serve.running import server
from tests.workloads import make_engine

BLOCK = 4


@contextmanager
def publishing(
    engine: Engine, folder: Path, **options: Any
) -> Iterator[tuple[KVPublisher, Reader]]:
    endpoints = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1], **options
    )
    publisher = KVPublisher(config, engine.events)
    reader = Reader(*endpoints, topic=config.topic)
    try:
        deadline = time.monotonic() + 30
        while not reader.subscriber.poll(20):  # ZeroMQ connects in the background.
            assert time.monotonic() < deadline, "the subscriber is not connected"
            engine.scheduler.clear_cache()
            publisher.flush()
        yield publisher, reader
    finally:
        reader.close()
        publisher.close()


def run(engine: Engine, publisher: KVPublisher, name: str, prompt: list[int], new: int) -> None:
    params = SamplingParams(max_tokens=new, ignore_eos=True, seed=1)
    engine.add(Request(name, prompt, params))
    while not engine.idle:
        engine.step()
        publisher.flush()


def known_hashes(engine: Engine) -> set[int]:
    return {int.from_bytes(full[-8:], "big") for full in engine.scheduler.pool.hash_index}


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_reader_knows_every_block_of_the_cache(tmp_path: Path, encoding: str) -> None:
    dice = random.Random(encoding)
    engine = make_engine(24, BLOCK, slots=4, budget=32, depth=2, max_len=80)
    with publishing(engine, tmp_path, encoding=encoding, topic="kv@pod@model") as (
        publisher,
        reader,
    ):
        prompts: list[list[int]] = []
        for number in range(30):
            prompt = [dice.randrange(1, 40) for _ in range(dice.randrange(5, 40))]
            if prompts and dice.random() < 0.5:
                prompt = (prompts[-1][: dice.randrange(1, 30)] + prompt)[:60]
            prompts.append(prompt)
            run(engine, publisher, str(number), prompt, dice.randrange(1, 9))
        reader.read()
        assert set(reader.blocks) == known_hashes(engine)
        assert reader.removed > 0
        pool = engine.scheduler.pool
        for block_hash, stored in reader.blocks.items():
            full = next(h for h in pool.hash_index if int.from_bytes(h[-8:], "big") == block_hash)
            assert list(stored.tokens) == list(pool.block_tokens[pool.hash_index[full]] or [])
        whole = prompts[-1]
        assert reader.longest_prefix(whole) >= (len(whole) - 1) // BLOCK * BLOCK > 0


def test_missing_batches_are_replayed(tmp_path: Path) -> None:
    engine = make_engine(24, BLOCK, slots=4, budget=32, depth=1, max_len=80)
    with publishing(engine, tmp_path) as (publisher, reader):
        run(engine, publisher, "a", list(range(1, 20)), 4)
        reader.read()
        run(engine, publisher, "b", list(range(20, 39)), 4)
        reader.subscriber.recv_multipart()  # This batch is lost.
        run(engine, publisher, "c", list(range(5, 15)), 4)
        replayed_before = reader.num_replayed
        reader.read()
        assert reader.num_replayed > replayed_before
        assert reader.next_number == publisher.sequence
        assert set(reader.blocks) == known_hashes(engine)


def test_a_cleared_cache_and_invalid_blocks_are_removed(tmp_path: Path) -> None:
    engine = make_engine(24, BLOCK, slots=4, budget=32, depth=1, max_len=80)
    with publishing(engine, tmp_path) as (publisher, reader):
        run(engine, publisher, "a", list(range(1, 20)), 4)
        reader.read_replay()
        assert len(reader.blocks) >= 4
        some_block = next(iter(engine.scheduler.pool.hash_index.values()))
        engine.scheduler.pool.invalidate(some_block)
        publisher.flush()
        reader.read_replay()
        assert set(reader.blocks) == known_hashes(engine) and reader.removed == 1
        engine.scheduler.clear_cache()
        publisher.flush()
        reader.read_replay()
        assert reader.blocks == {}


def test_an_engine_without_a_publisher_builds_no_events(tmp_path: Path) -> None:
    engine = make_engine(24, BLOCK, slots=4, budget=32, depth=1, max_len=80)
    kinds = set(engine.events.listeners)
    with publishing(engine, tmp_path):
        assert {kind.__name__ for kind in set(engine.events.listeners) - kinds} == {
            "BlockPublished",
            "BlockEvicted",
            "CacheCleared",
        }
    assert set(engine.events.listeners) == kinds


def test_an_endpoint_that_cannot_be_bound_is_named() -> None:
    engine = make_engine(24, BLOCK, slots=4, budget=32, depth=1, max_len=80)
    config = KVEventsConfig(endpoint="ipc:///no/such/folder/events")
    with pytest.raises(OctavoError, match="cannot bind .* ipc:///no/such/folder/events"):
        KVPublisher(config, engine.events)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "--x must be a JSON object"),
        ({"end_point": "a"}, "--x has the unknown key 'end_point': use enable_kv_cache_events"),
        ({"enable_kv_cache_events": 1}, "--x: enable_kv_cache_events must be true or false"),
        ({"hwm": 0}, "--x: hwm must be an integer of at least 1"),
        ({"publisher": "kafka"}, "--x: publisher must be one of zmq, null"),
        ({"encoding": "json"}, "--x: encoding must be one of map, array"),
        ({"topic": None}, "--x: topic must be a string"),
    ],
)
def test_a_configuration_that_is_not_valid_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kv_events_config("--x", value)
    assert message in str(caught.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module.importlib.util, "find_spec", lambda name: None)
    config = ServeConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
    with pytest.raises(serve_module.ServeError, match=r"pip install 'octavo\[kv-events\]'"):
        serve_module.check_kv_events(config)
    serve_module.check_kv_events(ServeConfig(kv_events_config=KVEventsConfig()))


def test_a_server_publishes_the_prompts_that_it_caches(tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    options = {
        "enable_kv_cache_events": True,
        "endpoint": endpoints[0],
        "replay_endpoint": endpoints[1],
    }
    with server(tmp_path, kv_events_config=options) as running:
        reader = Reader(*endpoints)
        try:
            prompt = list(range(100))
            running.complete(prompt=prompt)
            reader.read_replay()
            assert reader.longest_prefix(prompt) == 96
            # The idle engine publishes this at once and not with its next step.
            running.http.post("/flush_cache")
            deadline = time.monotonic() + 60
            while reader.longest_prefix(prompt):
                assert time.monotonic() < deadline
                reader.read_replay()
        finally:
            reader.close()
