"""Short texts that arrive in one turn are tokenised together, and each has its own answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.serve.channel.jobs import Encode
from octavo.serve.front.tokenize import INLINE_CHARACTERS, Texts
from octavo.text.tokenizer import Tokenizer
from tests import tiny
from tests.serve.test_workers import running


class Panic(BaseException):
    """As native code raises it: no Exception."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(tiny.model_dir())


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Any]:
    async def run() -> list[Any]:
        async with running() as pool:
            found = Texts(pool)
            tasks = (found.encode(tokenizer, Encode([text], context=4096)) for text in texts)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return [
                result if isinstance(result, BaseException) else result[0].ids for result in results
            ]

    return asyncio.run(run())


def test_together_or_alone_the_tokens_are_the_same(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    many = Tokenizer.encode_many
    monkeypatch.setattr(
        Tokenizer,
        "encode_many",
        lambda self, asked: (calls.append(len(asked)), many(self, asked))[1],
    )
    texts = ["hello", "a <|im_end|> b", "ünïcödé 漢字", "x" * (INLINE_CHARACTERS + 1), " "]
    assert encode(tokenizer, texts) == [tokenizer.encode(text) for text in texts]
    assert calls == [4], "all but the long one, at once"


def test_one_that_cannot_be_tokenised_is_the_only_one_to_hear_of_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, last = encode(tokenizer, ["hello", "half \ud800 a pair", "world"])
    assert (
        good == tokenizer.encode("hello")
        and last == tokenizer.encode("world")
        and isinstance(bad, InvalidRequest)
    )

    def panic(self: Tokenizer, *args: Any) -> Any:
        raise Panic("a secret")

    expected = tokenizer.encode("hello")
    monkeypatch.setattr(Tokenizer, "encode_many", panic)
    assert encode(tokenizer, ["hello"]) == [expected]
    monkeypatch.setattr(Tokenizer, "encode", panic)
    (error,) = encode(tokenizer, ["hello"])
    assert isinstance(error, RuntimeError), (
        "a panic is an error of this request, and no end of the loop"
    )


def test_who_leaves_before_the_turn_is_over_disturbs_nobody(tokenizer: Tokenizer) -> None:
    async def run() -> list[int]:
        async with running() as pool:
            found = Texts(pool)
            first, second = (
                asyncio.create_task(found.encode(tokenizer, Encode([text], context=4096)))
                for text in ("hello", "world")
            )
            await asyncio.sleep(0)
            first.cancel()
            return (await second)[0].ids

    assert asyncio.run(run()) == tokenizer.encode("world")


def test_others_go_on_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    text = "a b " * 200_000

    async def run() -> tuple[list[int], int]:
        async with running() as pool:
            job = Encode([text], context=10**9)
            task = asyncio.create_task(Texts(pool).encode(tokenizer, job))
            turns = 0
            while not task.done():
                await asyncio.sleep(0.001)
                turns += 1
            return (await task)[0].ids, turns

    ids, turns = asyncio.run(run())
    assert ids == tokenizer.encode(text) and turns > 20
