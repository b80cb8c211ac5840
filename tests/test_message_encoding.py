"""Messages between ranks arrive as they were sent, and a message of another shape is refused.

tests/core/test_equivalence.py sends the plans of random workloads too (FakeRanks)."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest

from octavo.assemble import DeviceFacts, RankJob, Requirements, Resolved, TierFacts
from octavo.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from octavo.engine_options import EngineOptions
from octavo.errors import MessageError
from octavo.memory import MemoryPlan
from octavo.message_encoding import ARRAY_HINTS, decode, encode
from octavo.params import (
    ReasoningMarks,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputs,
)
from octavo.runner.ranks import RankFailed, RankReport, RankStart, RankStarted
from octavo.types import DiskEvent, Fetch, Item, Plan, Save, SlotFill

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0, seed=-5, max_tokens=None, stop=["a", "\ud800 é"], logprobs=0),
    SamplingParams(logit_bias={3: -1.5, 4: 2}, allowed_token_ids=[3, 4], stop_token_ids=[9]),
    SamplingParams(
        structured_outputs=StructuredOutputs(json={"type": "object"}),
        repetition_detection=RepetitionDetectionParams(4, 1, 3),
        reasoning=ReasoningMarks("<think>", "</think>", True),
        output_kind=RequestOutputKind.DELTA,
        extra_args={"weights": [1, 2.5, None], "name": {"a": True}},
    ),
    SamplingParams(use_beam_search=True, n=2, early_stopping="never", length_penalty=2),
    SamplingParams(trace_decode_token_ids=[1, 2, 3]),
]
OPTIONS = [
    EngineOptions(),
    EngineOptions(
        hf_overrides={"rope": {"factor": 2.0}, "layers": [1, 2]},
        speculative_config=SpeculativeConfig("ngram", ngram_max=3),
        swap_space=1,
        seed=-(2**63),
        tensor_parallel_size=2,
    ),
    EngineOptions(speculative_config=None, pooler_config={"pooling_type": "MEAN"}),
]


def random_value(dice: random.Random, hint: Any) -> Any:
    """A value of a declared type."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    simple: dict[Any, Callable[[], Any]] = {
        type(None): lambda: None,
        bool: lambda: dice.random() < 0.5,
        int: lambda: dice.choice([0, -1, dice.randrange(1000), 2**64 - 1, -(2**63)]),
        float: lambda: dice.choice([0.0, -1.5, 3, 1e300, float("inf"), dice.random()]),
        str: lambda: dice.choice(["", "fetched", "é 字 \n", "\ud800"]),
        bytes: lambda: dice.randbytes(dice.choice([0, 1, 32])),
        array: lambda: dice.choice([array("i", [-7, 5, 2**31 - 1]), array("f", [0.5]), array("q")]),
        SamplingParams: lambda: dice.choice(PARAMS),
        EngineOptions: lambda: dice.choice(OPTIONS),
        Path: lambda: Path("/models/é"),
        Any: lambda: dice.choice([None, 1, "text", [1, 2.5], {"a": {"b": [True]}}]),
    }
    if kind in simple:
        return simple[kind]()
    count = dice.choice([0, 1, 3])
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = get_type_hints(kind, localns=ARRAY_HINTS)
        return kind(**{name: random_value(dice, own) for name, own in hints.items()})
    if kind is dict:
        return {
            random_value(dice, arguments[0]): random_value(dice, arguments[1]) for _ in range(count)
        }
    if kind is tuple and arguments[1:] != (...,):
        return tuple(random_value(dice, own) for own in arguments)
    if kind in (list, set, frozenset, tuple):
        return kind(random_value(dice, arguments[0]) for _ in range(count))
    return random_value(dice, dice.choice(arguments))  # a union


MESSAGES = [
    RankStart, RankStarted, RankFailed, RankReport, RankJob, DeviceFacts, TierFacts, Resolved, Plan,
]  # fmt: skip


@pytest.mark.parametrize("message_class", MESSAGES)
def test_a_message_arrives_as_it_was_sent(message_class: type) -> None:
    dice = random.Random(message_class.__name__)
    for _ in range(100):
        message = random_value(dice, message_class)
        received = decode(encode(message), message_class)
        assert received == message
        assert type(received) is type(message)


def test_every_type_inside_a_message_arrives() -> None:
    fill = SlotFill(1, 0, 2, array("i", [5, 6]), 0, [3], 2, 2**64 - 1, frozenset([7]), PARAMS[1])
    plan = Plan(
        step=3,
        slot_fills=[fill, fill._replace(params=PARAMS[3], seed=-1)],
        items=[Item(1, 0, 2, None, 1, True, 3), Item(1, 0, 2, 0, 2, False, 2, pooling="mean")],
        drafts={0: array("i", [1, 2]), 1: array("i")},
        token_masks={1: [b"\xff\x00", b""]},
        saves=[Save(1, b"hash", array("i", [4]))],
        fetches=[Fetch(1, 2, b"", array("i"))],
    )
    received = decode(encode(plan), Plan)
    assert received == plan
    assert type(received.items[0]) is Item
    assert type(received.slot_fills[0].stop_ids) is frozenset
    assert received.slot_fills[1].params.output_kind is RequestOutputKind.DELTA
    assert received.slot_fills[0].tokens.typecode == "i"
    report = RankReport([DiskEvent("missed", b"\x00", 3, "fault", 0.5)], {1, 2})
    assert decode(encode(report), RankReport, RankFailed) == report
    assert decode(encode(RankFailed("é")), RankReport, RankFailed) == RankFailed("é")


def test_resolved_options_arrive() -> None:
    memory = MemoryPlan(1, 2, 3, 4, 5)
    schedule = ScheduleConfig(speculative=SpeculativeConfig("head", model="directory"))
    needs = Requirements(schedule, 16, "int8", 1, 2, 3, 4, 5, False)
    resolved = Resolved(CacheConfig(num_blocks=7), schedule, memory, needs)
    assert decode(encode(resolved), Resolved) == resolved


# ---- another shape -------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """A type that no message may contain."""

    value: complex


ITEM = Item(1, 0, 2, None, 1, True, 3)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Plan(step="1"), "Plan.step cannot be of the type str"),  # type: ignore[arg-type]
        (Plan(step=True), "Plan.step cannot be of the type bool"),
        (Plan(1, items=[ITEM, ITEM._replace(start=0.5)]), "Plan.items.start cannot be of the type float"),  # type: ignore[arg-type]
        (Plan(1, items=[(1, 2)]), "Plan.items cannot be of the type tuple"),  # type: ignore[list-item]
        (Plan(1, items=None), "Plan.items cannot be of the type NoneType"),  # type: ignore[arg-type]
        (Plan(1, stores=[(1, 2, 3)]), "Plan.stores cannot be encoded: a tuple does not have 2 values"),  # type: ignore[list-item]
        (Plan(1, drafts={0: [1]}), "Plan.drafts cannot be of the type list"),  # type: ignore[dict-item]
        (RankReport([], [1]), "RankReport.corrupt_host_blocks cannot be of the type list"),  # type: ignore[arg-type]
        (RankJob("m", dataclasses.replace(OPTIONS[0], hf_overrides={"a": {1}})), "RankJob.options.hf_overrides cannot be encoded"),
        (RankJob(1, OPTIONS[0]), "RankJob.source cannot be of the type int"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_not_sent(message: Any, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        encode(message)


def test_a_function_is_not_sent() -> None:
    params = SamplingParams(logits_processors=[lambda tokens, logits: logits])
    fill = SlotFill(1, 0, 2, array("i"), 0, [], 0, 0, frozenset(), params)
    with pytest.raises(MessageError, match=r"Plan\.slot_fills\.params\.logits_processors"):
        encode(Plan(1, slot_fills=[fill]))


def test_a_type_that_is_not_listed_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.value is declared as <class 'complex'>"):
        encode(Wrong(1j))


def test_a_message_of_another_class_is_refused() -> None:
    with pytest.raises(MessageError, match="Plan or RankFailed was expected, not 'RankStarted'"):
        decode(encode(RankStarted(1)), Plan, RankFailed)


def changed(message: Any, old: str, new: str) -> bytes:
    """The encoded message with another text in its JSON."""
    data = encode(message)
    end = 4 + int.from_bytes(data[:4], "little")
    content = data[4:end].decode()
    assert content.count(old) == 1
    content = content.replace(old, new)
    return len(content).to_bytes(4, "little") + content.encode() + data[end:]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[987]", '["987"]', r"Plan\.items\.num_tokens cannot be of the type str"),
        ("[987]", "[1, 987]", r"Plan\.items cannot be decoded"),
        ("[987]", "987", r"Plan\.items\.num_tokens cannot be decoded"),
        ("[987], ", "", r"Plan\.items\.num_tokens cannot be of the type bool"),
    ],
)
def test_a_message_of_another_shape_is_refused(old: str, new: str, problem: str) -> None:
    plan = Plan(111, items=[ITEM._replace(num_tokens=987)])
    with pytest.raises(MessageError, match=problem):
        decode(changed(plan, old, new), Plan)


def test_a_message_that_is_not_complete_is_refused() -> None:
    data = encode(Plan(111, token_masks={50: [b"12345678"]}))
    for size in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:size], Plan)


def test_damaged_messages_raise_no_other_error() -> None:
    dice = random.Random(1)
    data = encode(random_value(dice, Plan))
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(dice.randrange(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        with contextlib.suppress(MessageError):
            decode(bytes(damaged), Plan)
