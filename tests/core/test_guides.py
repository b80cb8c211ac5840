"""What a guide does to plans and results: masks ride with the items, and a text that cannot go on
ends alone."""

from __future__ import annotations

import pytest

from octavo.errors import GuideError, InvalidRequest
from octavo.params import SamplingParams, StructuredOutputs
from octavo.types import Output, Request
from tests import oracle
from tests.toy_guide import ToyGuide, pack
from tests.workloads import make_engine


class Fixed(ToyGuide):
    """Allows the same at every place, and gives up after so many tokens."""

    def __init__(self, allowed: list[int], left: int = 1000):
        self.allowed, self.left, self.mask = allowed, left, pack(allowed)

    def accept(self, token: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise GuideError("too complex")

    def copy(self) -> Fixed:
        return Fixed(self.allowed, self.left)


def request(name: str, guide: ToyGuide | None = None, **options: object) -> Request:
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 1, **options})  # type: ignore[arg-type]
    return Request(name, [ord(c) % oracle.VOCAB for c in name] + [3, 4, 5], params, guide=guide)


def run(depth: int, *requests: Request) -> dict[tuple[str, int], list[Output]]:
    engine = make_engine(50, 4, rows=8, budget=16, depth=depth)
    for one in requests:
        engine.add(one)
    found: dict[tuple[str, int], list[Output]] = {}
    while not engine.idle:
        for out in engine.step():
            found.setdefault((out.request_id, out.index), []).append(out)
        engine.scheduler.check()
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_a_guide_that_fails_ends_its_request_alone(depth: int, n: int) -> None:
    neighbour = request("other", ToyGuide(1), max_tokens=20)
    found = run(depth, neighbour, request("bad", Fixed(list(range(1, 50)), left=3), n=n))
    for index in range(n):
        *_, last = found["bad", index]
        assert (last.finish_reason, last.error, last.code) == (
            "error",
            "too complex",
            "structured_output_failed",
        )
        assert [out.finish_reason for out in found["bad", index]].count("error") == 1
    told = [t for out in found["other", 0] for t in out.tokens]
    assert told == oracle.generate(
        neighbour.prompt, neighbour.params, 1, max_model_len=60, guide=neighbour.guide
    )


def test_a_token_that_was_not_allowed_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = oracle.model
    # hears of no mask
    monkeypatch.setattr(oracle, "model", lambda entries, seed, *_: model(entries, seed) % 40 + 5)
    (out,) = run(1, request("bad", Fixed([1])))["bad", 0]
    assert out.finish_reason == "error" and out.tokens == [] and "not allow" in (out.error or "")


@pytest.mark.parametrize("depth", [2, 3])
def test_a_guided_sequence_sits_out_while_its_token_is_in_flight(depth: int) -> None:
    engine = make_engine(50, 4, rows=8, budget=16, depth=depth)
    engine.add(request("free"))
    engine.add(request("led", ToyGuide(1)))
    scheduler = engine.scheduler
    first, second = scheduler.plan(), scheduler.plan()
    assert [len(p.items) for p in (first, second)] == [2, 1], "the other one goes on"
    assert first.token_masks == {1: [ToyGuide(1).mask]} and second.token_masks == {}
    (seq,) = scheduler.sequences_by_request["led"]
    scheduler.commit(first, engine.runner.launch(first).wait())
    third = scheduler.plan()
    assert (
        len(third.items) == 2
        and seq.guide is not None
        and third.token_masks == {1: [seq.guide.mask]}
    )


def test_a_guide_that_has_led_to_the_end_ends_the_text_even_early() -> None:
    (out,) = run(1, request("done", Fixed([oracle.EOS]), min_tokens=5, ignore_eos=True))["done", 0]
    assert out.tokens == [oracle.EOS] and out.finish_reason == "stop"


def test_what_was_not_compiled_is_refused() -> None:
    engine = make_engine(50, 4, rows=8, budget=16, depth=1)
    with pytest.raises(InvalidRequest, match="compile"):
        engine.add(request("x", structured_outputs=StructuredOutputs(regex="a")))
