"""What a guide does to plans and results: each plan has the token masks of its items, and a request
whose guide fails ends alone."""

from __future__ import annotations

import pytest

from octavo.errors import GuideError, InvalidRequest
from octavo.params import SamplingParams, StructuredOutputs
from octavo.types import Output, Request
from tests import oracle
from tests.toy_guide import ToyGuide, pack
from tests.workloads import make_engine


class Fixed(ToyGuide):
    """Allows the same tokens at every position, and fails after `limit` tokens."""

    def __init__(self, allowed: list[int], limit: int = 1000):
        self.allowed, self.limit, self.mask = allowed, limit, pack(allowed)

    def accept(self, token: int) -> None:
        self.limit -= 1
        if self.limit == 0:
            raise GuideError("too complex")

    def copy(self) -> Fixed:
        return Fixed(self.allowed, self.limit)


def request(name: str, guide: ToyGuide | None = None, **options: object) -> Request:
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 1, **options})  # type: ignore[arg-type]
    return Request(name, [ord(c) % oracle.VOCAB for c in name] + [3, 4, 5], params, guide=guide)


def run(depth: int, *requests: Request) -> dict[tuple[str, int], list[Output]]:
    engine = make_engine(50, 4, slots=8, budget=16, depth=depth)
    for each in requests:
        engine.add(each)
    outputs: dict[tuple[str, int], list[Output]] = {}
    while not engine.idle:
        for out in engine.step():
            outputs.setdefault((out.request_id, out.index), []).append(out)
        engine.scheduler.check()
    return outputs


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_a_guide_that_fails_ends_its_request_alone(depth: int, n: int) -> None:
    neighbour = request("other", ToyGuide(1), max_tokens=20)
    outputs = run(depth, neighbour, request("bad", Fixed(list(range(1, 50)), limit=3), n=n))
    for index in range(n):
        *_, last = outputs["bad", index]
        assert (last.finish_reason, last.error, last.code) == (
            "error",
            "too complex",
            "structured_output_failed",
        )
        assert [out.finish_reason for out in outputs["bad", index]].count("error") == 1
    tokens = [token for out in outputs["other", 0] for token in out.tokens]
    assert tokens == oracle.generate(
        neighbour.prompt, neighbour.params, 1, max_model_len=60, guide=neighbour.guide
    )


def test_a_token_that_was_not_allowed_is_not_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    model = oracle.model
    # a model that ignores the mask
    monkeypatch.setattr(oracle, "model", lambda entries, seed, *_: model(entries, seed) % 40 + 5)
    (out,) = run(1, request("bad", Fixed([1])))["bad", 0]
    assert out.finish_reason == "error" and out.tokens == [] and "not allow" in (out.error or "")


@pytest.mark.parametrize("depth", [2, 3])
def test_a_guided_sequence_is_not_planned_while_its_token_is_in_flight(depth: int) -> None:
    engine = make_engine(50, 4, slots=8, budget=16, depth=depth)
    engine.add(request("free"))
    engine.add(request("guided", ToyGuide(1)))
    scheduler = engine.scheduler
    first, second = scheduler.plan(), scheduler.plan()
    assert [len(p.items) for p in (first, second)] == [2, 1], "the other sequence goes on"
    assert first.token_masks == {1: [ToyGuide(1).mask]} and second.token_masks == {}
    (seq,) = scheduler.sequences_by_request["guided"]
    scheduler.commit(first, engine.runner.launch(first).wait())
    third = scheduler.plan()
    assert (
        len(third.items) == 2
        and seq.guide is not None
        and third.token_masks == {1: [seq.guide.mask]}
    )


def test_a_finished_guide_ends_the_text_even_before_min_tokens() -> None:
    (out,) = run(1, request("done", Fixed([oracle.EOS]), min_tokens=5, ignore_eos=True))["done", 0]
    assert out.tokens == [oracle.EOS] and out.finish_reason == "stop"


def test_structured_outputs_without_a_compiled_guide_are_refused() -> None:
    engine = make_engine(50, 4, slots=8, budget=16, depth=1)
    with pytest.raises(InvalidRequest, match="compile"):
        engine.add(request("x", structured_outputs=StructuredOutputs(regex="a")))
