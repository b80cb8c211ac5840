"""The in-process API on real (tiny, random) models: the same tokens as transformers, whatever the
engine does inside."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.collect import Collector
from octavo.errors import ContextLengthExceeded, InvalidRequest, KVCapacityExceeded, NotEnoughMemory
from octavo.memory import size_pool
from tests import tiny

GREEDY = dict(temperature=0.0, ignore_eos=True)


def make(architecture: str = "llama", **options: Any) -> LLM:
    options = {
        "max_model_len": 200,
        "max_num_seqs": 8,
        "progress": False,
        "num_gpu_blocks_override": 200,
        **options,
    }
    return LLM(tiny.model_dir(architecture), **options)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    g = random.Random(seed)
    shared = [g.randrange(250) for _ in range(40)]
    return [
        shared[: g.randrange(40)] + [g.randrange(250) for _ in range(g.randrange(1, longest - 39))]
        for _ in range(count)
    ]


def ids_of(outputs: list) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def blocks_in_use(llm: LLM) -> int:
    return sum(r > 0 for r in llm.engine.scheduler.pool.ref_counts)


# ---- the same tokens, whatever happens inside ----------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_batch_equals_the_naive_loop(architecture: str) -> None:
    """Chunked prompts, a pool too small for all of them, shared prefixes, steps in flight: token
    for token."""
    many = prompts(7)
    want = [tiny.hf_greedy(architecture, p, 12) for p in many]
    params = SamplingParams(max_tokens=12, **GREEDY)
    for options in (
        dict(),
        dict(max_num_batched_tokens=9, depth=2),
        dict(num_gpu_blocks_override=6, block_size=16, depth=3, max_num_batched_tokens=16),
        dict(num_gpu_blocks_override=19, block_size=4, enable_prefix_caching=False, depth=2),
    ):
        llm = make(architecture, **options)
        assert ids_of(llm.generate(many, params)) == want, options
        assert ids_of(llm.generate(many, params)) == want, ("again, from the prefix cache", options)
        llm.engine.scheduler.check()
        assert blocks_in_use(llm) == 0


def sampled(llm: LLM, many: list[list[int]]) -> list[list[list[int]]]:
    each = [
        SamplingParams(max_tokens=10, seed=i, n=1 + 2 * (i % 2), ignore_eos=True, temperature=0.5 + 0.1 * i, top_p=0.9,
                       repetition_penalty=1.2 if i % 3 == 0 else 1.0, top_k=20 if i % 2 else 0)
        for i in range(len(many))
    ]  # fmt: skip
    return [[c.token_ids for c in o.outputs] for o in llm.generate(many, each)]


@pytest.mark.parity
def test_sampled_tokens_depend_on_the_seed_and_not_on_the_schedule() -> None:
    many = prompts(6, seed=1)
    want = sampled(make(), many)
    assert len({tuple(t) for c in want for t in c}) > 6
    for seed in range(8):
        g = random.Random(seed)
        options = dict(
            block_size=g.choice([4, 16]),
            num_gpu_blocks_override=g.choice([20, 40, 300]),
            max_num_seqs=g.choice([3, 8]),
            max_num_batched_tokens=g.choice([8, 17, 512]),
            depth=g.choice([1, 2, 3]),
            enable_prefix_caching=g.random() < 0.5,
        )
        llm = make(**options)
        assert sampled(llm, many) == want, options
        alone = [sampled(llm, many[: i + 1])[i] for i in (0, 3)]
        assert alone == [want[0], want[3]], options


@pytest.mark.parity
def test_the_same_work_gives_the_same_tokens_in_bf16() -> None:
    """With coarse rounding, the same requests to an engine in the same state give the same tokens.
    With prefix hits, or alone, the steps have other shapes and may round differently: most tokens
    stay the same."""
    many = prompts(8, seed=3)
    first = make("qwen3", dtype="bfloat16", depth=2)
    want = sampled(first, many)
    assert sampled(make("qwen3", dtype="bfloat16", depth=2), many) == want
    warm = sampled(first, many)
    assert sum(
        len(set(map(tuple, a)) & set(map(tuple, b))) for a, b in zip(warm, want, strict=True)
    ) >= 0.8 * sum(map(len, want))


def test_six_blocks_are_enough() -> None:
    """Four requests of 32 tokens in a pool of 6 blocks: the same tokens; one of 7 blocks is refused
    by name."""
    four = [p[:20] for p in prompts(4, seed=2)]
    params = SamplingParams(max_tokens=32, **GREEDY)
    want = ids_of(make(num_gpu_blocks_override=1000).generate(four, params))
    llm = make(num_gpu_blocks_override=6)
    streams = [llm.stream(p, params) for p in four]
    got: list[list[int]] = [next(s).token_ids for s in streams]
    with pytest.raises(KVCapacityExceeded, match=r"needs 7 KV blocks of 16 .* the pool has 6"):
        llm.generate([list(range(66))], SamplingParams(max_tokens=32))
    for tokens, stream in zip(got, streams, strict=True):
        for piece in stream:
            tokens += piece.token_ids
    assert got == want
    assert llm.engine.scheduler.counters.preemptions > 0, "the pool was meant to be too small"


def test_the_same_prompt_again_reuses_its_blocks(llm: LLM) -> None:
    llm = make(max_model_len=600, num_gpu_blocks_override=100)
    prompt = [i * 7 % 251 for i in range(512)]
    params = SamplingParams(max_tokens=4, **GREEDY)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 31 * 16, "31 of 32 blocks: the last token must be computed"
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_requests_of_one_call_do_not_depend_on_each_other(llm: LLM) -> None:
    many = prompts(5, seed=3)
    params = SamplingParams(max_tokens=6, **GREEDY)
    assert ids_of(llm.generate(many, params)) == [
        ids_of(llm.generate([p], params))[0] for p in many
    ]


# ---- outputs -------------------------------------------------------------------------------------


def test_prompts_in_every_form(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, **GREEDY)
    ids = llm.get_tokenizer().encode("hello")
    want = ids_of(llm.generate("hello", params))
    assert want == ids_of(llm.generate(["hello"], params))
    assert want == ids_of(llm.generate(ids, params)) == ids_of(llm.generate([ids], params))
    assert (
        want
        == ids_of(llm.generate({"prompt_token_ids": ids}, params))
        == ids_of(llm.generate([{"prompt": "hello"}], params))
    )
    assert want == ids_of(llm.generate(prompt_token_ids=[ids], sampling_params=params))
    out = llm.generate(["hello", ids], [params, params])
    assert [o.prompt for o in out] == ["hello", None] and [o.prompt_token_ids for o in out] == [
        ids,
        ids,
    ]


def test_logprobs_equal_transformers(llm: LLM) -> None:
    prompt = prompts(1, seed=4)[0]
    out = llm.generate(
        [prompt],
        SamplingParams(max_tokens=5, seed=3, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    )[0]
    done = out.outputs[0]
    want = tiny.hf_logits("llama", prompt + done.token_ids).log_softmax(-1)
    assert done.logprobs is not None and out.prompt_logprobs is not None
    total = 0.0
    for k, (token, at) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
        row = want[len(prompt) + k - 1]
        assert at[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert at[token].rank == 1 + int((row > row[token]).sum())
        assert set(row.topk(3).indices.tolist()) <= set(at) and 3 <= len(at) <= 4
        total += at[token].logprob
    assert done.cumulative_logprob == pytest.approx(total)
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(prompt)
    for p in range(1, len(prompt)):
        at = out.prompt_logprobs[p] or {}
        assert at[prompt[p]].logprob == pytest.approx(float(want[p - 1, prompt[p]]), abs=1e-4)
        assert set(want[p - 1].topk(2).indices.tolist()) <= set(at)


def test_prompt_logprobs_are_whole_when_the_prompt_is_chunked_or_cached() -> None:
    prompt = prompts(1, seed=5)[0][:50]
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, n=2, **GREEDY)
    want = make().generate([prompt], params)[0].prompt_logprobs
    llm = make(max_num_batched_tokens=8, depth=2)
    for _ in range(2):
        got = llm.generate([prompt], params)[0].prompt_logprobs
        assert got is not None and want is not None and got[0] is None
        for a, b, token in zip(got[1:], want[1:], prompt[1:], strict=True):
            assert (
                a is not None
                and b is not None
                and a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)
            )


def test_n_completions_share_the_prompt_and_differ(llm: LLM) -> None:
    out = llm.generate(
        [prompts(1, seed=6)[0]],
        SamplingParams(n=4, seed=1, temperature=1.5, max_tokens=8, ignore_eos=True),
    )[0]
    assert [c.index for c in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in out.outputs}) == 4


def test_one_token_is_prompt_enough_for_several_completions(llm: LLM) -> None:
    out = llm.generate(
        [[7]], SamplingParams(n=3, max_tokens=4, seed=2, temperature=1.5, ignore_eos=True)
    )[0]
    assert out.error is None and [len(c.token_ids) for c in out.outputs] == [4, 4, 4]


def test_end_of_text_stops_and_is_not_shown(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={tiny.EOS: 100}, min_tokens=3)
    done = llm.generate(["hi"], params)[0].outputs[0]
    assert (
        done.token_ids[-1] == tiny.EOS and len(done.token_ids) == 4 and done.finish_reason == "stop"
    )
    assert done.stop_reason is None and "eos" not in done.text
    ignored = llm.generate(
        ["hi"],
        SamplingParams(temperature=0, max_tokens=5, logit_bias={tiny.EOS: 100}, ignore_eos=True),
    )
    assert ids_of(ignored) == [[tiny.EOS] * 5] and ignored[0].outputs[0].finish_reason == "length"


def test_a_stop_token_is_reported(llm: LLM) -> None:
    token = llm.generate(["hi"], SamplingParams(max_tokens=4, **GREEDY))[0].outputs[0].token_ids[2]
    done = llm.generate(["hi"], SamplingParams(max_tokens=9, stop_token_ids=[token], **GREEDY))[
        0
    ].outputs[0]
    assert (
        done.finish_reason == "stop" and done.stop_reason == token and done.token_ids[-1] == token
    )


def letters(llm: LLM, text: str) -> dict[int, float]:
    """Return a logit bias that allows only these letters."""
    return {t: 50.0 for t in llm.get_tokenizer().encode(text)}


def test_stop_strings_cut_exactly_and_end_the_request(llm: LLM) -> None:
    free = SamplingParams(max_tokens=60, seed=5, logit_bias=letters(llm, "abc"), ignore_eos=True)
    whole = llm.generate(["x"], free)[0].outputs[0]
    assert set(whole.text) == set("abc") and len(whole.text) == 60
    stop = whole.text[20:23]
    at = whole.text.index(stop)
    for include, depth in ((False, 1), (True, 3)):
        llm2 = llm if depth == 1 else make(depth=depth)
        params = SamplingParams(
            max_tokens=60,
            seed=5,
            logit_bias=letters(llm, "abc"),
            ignore_eos=True,
            stop=[stop],
            include_stop_str_in_output=include,
        )
        done = llm2.generate(["x"], params)[0].outputs[0]
        assert done.text == whole.text[: at + 3 * include] and (
            done.finish_reason,
            done.stop_reason,
        ) == ("stop", stop)
        assert done.token_ids == whole.token_ids[: at + 3]
        assert "".join(p.text for p in llm2.stream("x", params)) == done.text
        assert (blocks_in_use(llm2) == 0 and llm2.engine.idle) or llm2.step() == []


def test_chat_is_the_template_and_a_completion(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, **GREEDY)
    messages = [{"role": "user", "content": "hi <|end|>"}]
    ids = llm.encode_chat(messages)
    special = {"<|user|>": 259, "<|end|>": 258, "<|assistant|>": 260}
    assert ids[0] == special["<|user|>"] and ids[-2:] == [
        special["<|end|>"],
        special["<|assistant|>"],
    ]
    assert ids.count(special["<|end|>"]) == 1, "a user cannot end the turn"
    assert ids_of(llm.chat(messages, params)) == ids_of(llm.generate([ids], params))
    assert ids_of(llm.chat([messages, messages], params)) == 2 * ids_of(llm.generate([ids], params))


def test_a_rendered_prompt_has_the_tokens_of_the_conversation(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    ids = llm.encode_chat(messages)
    text = llm.get_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    params = SamplingParams(max_tokens=2, **GREEDY)
    assert llm.generate([text], params)[0].prompt_token_ids == ids
    assert llm.generate({"prompt": text}, params)[0].prompt_token_ids == ids
    stream = llm.stream(text, params)
    assert stream._collector.request.prompt == ids
    stream.close()


def test_control_tokens_in_a_text_are_characters_where_that_is_asked_for(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, **GREEDY)
    text = "hi<|end|>"
    plain = llm.generate({"prompt": text, "parse_special": False}, params)[0]
    assert plain.prompt_token_ids == llm.get_tokenizer().encode(text, parse_special=False)
    assert len(plain.prompt_token_ids) == len(text) and plain.prompt == text
    careful = make(parse_special=False)
    assert careful.generate(text, params)[0].prompt_token_ids == plain.prompt_token_ids
    meant = careful.generate({"prompt": text, "parse_special": True}, params)[0]
    assert meant.prompt_token_ids == llm.generate(text, params)[0].prompt_token_ids


# ---- streams -------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=2, n=2, logprobs=0)
    whole = llm.generate(["héllo"], params)[0]
    pieces = list(llm.stream("héllo", params))
    for completion in whole.outputs:
        own_pieces = [p for p in pieces if p.index == completion.index]
        assert [t for p in own_pieces for t in p.token_ids] == completion.token_ids
        assert "".join(p.text for p in own_pieces) == completion.text
        assert own_pieces[-1].finish_reason == completion.finish_reason and all(
            p.finish_reason is None for p in own_pieces[:-1]
        )
        assert math.fsum(p.cumulative_logprob or 0 for p in own_pieces) == pytest.approx(
            completion.cumulative_logprob
        )


def test_two_streams_at_once_and_one_is_abandoned(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, **GREEDY)
    want = llm.generate(["one"], params)[0].outputs[0].token_ids
    a, b = llm.stream("one", params), llm.stream("two", params)
    got = list(next(a).token_ids)
    next(b)
    b.close()
    for piece in a:
        got += piece.token_ids
    assert got == want and blocks_in_use(llm) == 0 and not llm.engine.scheduler.live


def test_an_unread_stream_ends_when_it_is_dropped(llm: LLM) -> None:
    stream = llm.stream("one", SamplingParams(max_tokens=30))
    assert llm.engine.scheduler.live
    del stream
    llm.step()
    assert not llm.engine.scheduler.live and blocks_in_use(llm) == 0


def test_parameters_of_another_kind_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams, got dict"):
        llm.generate(["a"], {"max_tokens": 3})  # type: ignore[arg-type]


def test_the_empty_text_is_the_token_that_begins_one(llm: LLM) -> None:
    (reply,) = llm.generate([""], SamplingParams(max_tokens=2, **GREEDY))
    assert reply.prompt_token_ids == [257] and len(reply.outputs[0].token_ids) == 2


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt,params,error,message",
    [
        ([1] * 200, {}, ContextLengthExceeded, "200 tokens, but the context holds 200"),
        ([5, 300], {}, InvalidRequest, r"token id 300.*0\.\.299"),
        ([5, -1], {}, InvalidRequest, "token id -1"),
        ([], {}, InvalidRequest, "empty"),
        ([1.5], {}, InvalidRequest, "text or a list of token ids"),
        ([1], dict(stop_token_ids=[300]), InvalidRequest, "stop_token_ids names token 300"),
        ([1], dict(logit_bias={999: 1.0}), InvalidRequest, "logit_bias names token 999"),
    ],
)
def test_a_bad_request_is_refused_and_harms_nobody(
    llm: LLM, prompt: Any, params: Any, error: type, message: str
) -> None:
    good = SamplingParams(max_tokens=8, **GREEDY)
    want = ids_of(llm.generate(["good"], good))
    other = llm.stream("good", good)
    got = list(next(other).token_ids)
    with pytest.raises(error, match=message):
        llm.generate([[1, 2, 3], prompt], SamplingParams(max_tokens=4, **params))
    for piece in other:
        got += piece.token_ids
    assert [got] == want == ids_of(llm.generate(["good"], good))
    assert blocks_in_use(llm) == 0 and llm.engine.idle


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=float("nan")), dict(temperature=-1), dict(temperature=float("inf")), dict(top_p=0), dict(top_p=1.1),
        dict(top_k=-2), dict(top_k=1.5), dict(min_p=-0.1), dict(n=0), dict(n=1000), dict(max_tokens=0), dict(max_tokens=True),
        dict(min_tokens=5, max_tokens=4), dict(repetition_penalty=0), dict(presence_penalty=3), dict(seed=1.5),
        dict(frequency_penalty=float("nan")),
        dict(stop=""), dict(stop=["a", ""]), dict(stop=3), dict(stop=b"a"),
        dict(stop=["a"], detokenize=False), dict(logprobs=21), dict(logprobs=-1),
        dict(prompt_logprobs="x"), dict(logit_bias={1: float("nan")}), dict(logit_bias={"x": 1}), dict(logit_bias=3),
        dict(allowed_token_ids=[]), dict(stop_token_ids=[-1]), dict(stop_token_ids=[np.float32(1)]), dict(seed=2**63),
        dict(seed=-(2**63) - 1), dict(temperature=np.bool_(True)), dict(max_tokens=np.float64(2)), dict(n=np.array([1])),
        dict(logit_bias={"٣": 1}), dict(logit_bias={"-1": 1}), dict(logit_bias={"1e2": 1}), dict(logit_bias={1.0: 1}),
        dict(logit_bias={"5": 1, "05": 1}), dict(logit_bias={5: 1, "5": 2}),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**params)
    assert error.value.param in params


@pytest.fixture
def wise(tmp_path: Path) -> Path:
    """A model that recommends how to sample."""
    path = tmp_path / "wise"
    shutil.copytree(tiny.model_dir(), path)
    advice = {"temperature": 0.6, "top_k": 1, "max_new_tokens": 5, "do_sample": True, "top_p": None}
    (path / "generation_config.json").write_text(json.dumps(advice))
    return path


def test_calls_without_parameters_sample_as_the_model_recommends(wise: Path) -> None:
    options = dict(progress=False, max_num_seqs=4, max_model_len=200, num_gpu_blocks_override=60)
    llm = LLM(wise, **options)
    want = SamplingParams(temperature=0.6, top_k=1, max_tokens=5)
    assert llm.get_default_sampling_params() == want
    whole = [ids_of(llm.generate(["hello"]))[0] for _ in range(3)]
    assert whole == [whole[0]] * 3 and len(whole[0]) == 5
    assert [t for piece in llm.stream("hello") for t in piece.token_ids] == whole[0]
    chats = [ids_of(llm.chat([{"role": "user", "content": "hi"}]))[0] for _ in range(3)]
    assert chats == [chats[0]] * 3
    given = {tuple(ids_of(llm.generate(["hello"], SamplingParams()))[0]) for _ in range(3)}
    assert len(given) == 3, "parameters that were given stay as they are"
    plain = LLM(wise, generation_config="vllm", **options)
    assert plain.get_default_sampling_params() == SamplingParams()
    elsewhere = LLM(tiny.model_dir(), generation_config=wise, **options)
    assert elsewhere.get_default_sampling_params() == want
    changed = LLM(wise, override_generation_config={"top_k": 7}, **options)
    assert changed.get_default_sampling_params() == replace(want, top_k=7)


def test_a_recommendation_that_cannot_be_used_is_refused(wise: Path, tmp_path: Path) -> None:
    (wise / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(
        InvalidRequest, match="temperature must be a number.*generation_config=vllm"
    ):
        LLM(wise, progress=False)
    with pytest.raises(InvalidRequest, match="generation_config must be auto, vllm or a directory"):
        LLM("there/is/no/such-model", generation_config=tmp_path / "nothing")


def test_logprobs_of_the_tokens_that_a_request_names(llm: LLM) -> None:
    """The batch also has requests for the likeliest tokens, for other tokens and for none."""
    prompt = prompts(1, seed=4)[0]
    params = [
        SamplingParams(max_tokens=4, seed=3, ignore_eos=True, **fields)
        for fields in (
            dict(logprobs=20),
            dict(logprobs=3, logprob_token_ids=[7, 290, 7]),
            dict(),
            dict(logprob_token_ids=np.array([5])),
            dict(logprobs=2),
        )
    ]
    top, named, none, one, two = (o.outputs[0] for o in llm.generate([prompt] * 5, params))
    assert top.token_ids == named.token_ids == none.token_ids == one.token_ids
    full = tiny.hf_logits("llama", prompt + top.token_ids).log_softmax(1)[len(prompt) - 1 :]
    for step in range(4):
        chosen = top.token_ids[step]
        assert list(named.logprobs[step]) == list(dict.fromkeys([chosen, 7, 290]))
        assert list(one.logprobs[step]) == list(dict.fromkeys([chosen, 5]))
        for completion in (named, one):
            for token, logprob in completion.logprobs[step].items():
                assert logprob.logprob == pytest.approx(float(full[step, token]), abs=1e-4)
                assert logprob.rank is None or token == chosen
        assert {t: p.rank for t, p in two.logprobs[step].items() if p.rank <= 2} == {
            t: p.rank for t, p in top.logprobs[step].items() if p.rank <= 2
        }
    assert none.logprobs is None


def test_the_error_of_a_logit_bias_names_the_key() -> None:
    with pytest.raises(InvalidRequest, match="keys that are not token ids: 'hello'"):
        SamplingParams(logit_bias={"1": 1, "hello": 2})
    with pytest.raises(InvalidRequest, match="two keys for token 5, one of them '05'"):
        SamplingParams(logit_bias={"5": 1, "05": 2})


def test_banning_every_allowed_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no token is left"):
        SamplingParams(allowed_token_ids=[5, 6], logit_bias={5: -100, 6: -100})
    SamplingParams(allowed_token_ids=[5, 6], logit_bias={5: -100, 6: -99})


def test_numbers_of_numpy_and_torch_become_python_numbers() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5), top_p=torch.tensor(0.5), max_tokens=np.int64(7), seed=np.int32(3), top_k=np.uint8(4),
        min_p=np.float16(0.25), n=torch.tensor(2), stop_token_ids=np.array([3, 4]), logit_bias={np.int64(5): np.float32(1)},
        allowed_token_ids=torch.tensor([1, 2]), repetition_penalty=np.float64(1.5), logprobs=np.int8(2),
    )  # fmt: skip
    want = SamplingParams(
        temperature=0.5, top_p=0.5, max_tokens=7, seed=3, top_k=4, min_p=0.25, n=2, stop_token_ids=[3, 4],
        logit_bias={5: 1.0}, allowed_token_ids=[1, 2], repetition_penalty=1.5, logprobs=2,
    )  # fmt: skip
    assert given == want
    assert {type(getattr(given, f.name)) for f in fields(given)} == {
        type(getattr(want, f.name)) for f in fields(want)
    }


def test_a_seed_of_minus_one_is_no_seed(llm: LLM) -> None:
    params = SamplingParams(seed=-1, max_tokens=8, ignore_eos=True)
    assert params.seed is None
    assert len({tuple(ids_of(llm.generate(["x"], params))[0]) for _ in range(4)}) > 1


def test_prompts_of_numpy_and_torch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, **GREEDY)
    want = ids_of(llm.generate([[1, 2, 3], [4, 5, 6]], params))
    rows = np.array([[1, 2, 3], [4, 5, 6]])
    for prompts in (rows, torch.from_numpy(rows), list(rows), [torch.tensor([1, 2, 3]), [4, 5, 6]]):
        assert ids_of(llm.generate(prompts, params)) == want
    for one in (rows[0], torch.tensor([1, 2, 3]), list(rows[0]), {"prompt_token_ids": rows[0]}):
        assert ids_of(llm.generate(one, params)) == want[:1]


@pytest.mark.parametrize(
    "options",
    [
        dict(block_size=0), dict(block_size=-1), dict(max_num_seqs=0), dict(max_model_len=0), dict(max_model_len=-4),
        dict(gpu_memory_utilization=5.0), dict(num_gpu_blocks_override=0), dict(max_num_batched_tokens=-1),
        dict(depth=0),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name_before_anything_is_loaded(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        LLM("there/is/no/such-model", **options)
    assert error.value.param in options


def test_values_beyond_32_bits_do_not_affect_other_requests(llm: LLM) -> None:
    good = llm.stream("good", SamplingParams(max_tokens=4, **GREEDY))
    next(good)
    huge = llm.generate(
        ["x"],
        SamplingParams(top_k=2**40, max_tokens=2, min_tokens=2, ignore_eos=True, seed=2**63 - 1),
    )
    assert huge[0].error is None and len(huge[0].outputs[0].token_ids) == 2
    assert (
        llm.generate(["x"], SamplingParams(max_tokens=None, min_tokens=2**40, **GREEDY))[0].error
        is None
    )
    assert all(piece.error is None for piece in good)


def test_nothing_left_to_say_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="all stop tokens"):
        llm.generate(["x"], SamplingParams(allowed_token_ids=[tiny.EOS], min_tokens=1))


def test_what_is_no_prompt_is_refused_by_its_name(llm: LLM) -> None:
    with pytest.raises(
        InvalidRequest, match="give prompts: text, token ids, or a list of either, got 3"
    ):
        llm.generate(3)


def test_salted_prompts_do_not_share_blocks_and_unknown_keys_are_refused(llm: LLM) -> None:
    prompt = [i % 200 for i in range(100)]
    params = SamplingParams(max_tokens=1)
    cached = [
        llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, params)[0].num_cached_tokens
        for salt in "abb"
    ]
    assert cached == [0, 0, 96]
    with pytest.raises(InvalidRequest, match="multi_modal_data"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, params)


def test_an_interrupt_ends_what_was_in_the_step_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, **GREEDY)
    want = ids_of(llm.generate(["good"], params))
    stream = llm.stream("good", params)
    next(stream)
    run_layers: Any = llm.model._run_layers

    def interrupted(*_: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.model, "_run_layers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.setattr(llm.model, "_run_layers", run_layers)
    assert [piece.finish_reason for piece in stream] == ["error"]
    assert ids_of(llm.generate(["good"], params)) == want and blocks_in_use(llm) == 0


def test_warm_up_needs_an_engine_without_open_requests(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, **GREEDY)
    want = ids_of(llm.generate(["good"], params))[0]
    stream = llm.stream("good", params)
    pieces = [next(stream)]
    with pytest.raises(InvalidRequest, match=r"busy with open requests \(1\): finish or close"):
        llm.warm_up()
    pieces += stream
    assert [token for piece in pieces for token in piece.token_ids] == want
    llm.warm_up()
    assert llm.engine.idle and ids_of(llm.generate(["good"], params))[0] == want


def test_parameters_changed_after_construction_are_checked_again(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = float("nan")
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate(["x"], params)


def test_options_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="quantization"):
        make(quantization="int99")
    with pytest.raises(InvalidRequest, match="tensor_parallel_size"):
        make(tensor_parallel_size=0)
    with pytest.raises(InvalidRequest, match="pipeline_parallel_size"):
        make(pipeline_parallel_size=2)
    with pytest.raises(InvalidRequest, match="depth"):
        make(depth=4)
    with pytest.raises(InvalidRequest, match="longer than the model's context of 1024"):
        make(max_model_len=1025)


def test_a_context_that_does_not_fit_names_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, dim, bytes
    monkeypatch.setattr("octavo.assemble.kv_share", lambda *_: 100 * 16 * per_token)
    with pytest.raises(
        NotEnoughMemory, match="1700 needs .* memory holds 100: max_model_len=1600 would work"
    ) as _:
        size_pool(
            replace(make().config, max_position=2000),
            16,
            per_token,
            100 * 16 * per_token,
            8,
            1700,
            None,
        )
    assert make(max_model_len=None, num_gpu_blocks_override=None).schedule.max_model_len == 1024
    monkeypatch.setattr("octavo.assemble.kv_share", lambda *_: 10 * 16 * per_token)
    assert make(max_model_len=None, num_gpu_blocks_override=None).schedule.max_model_len == 161
    monkeypatch.setattr("octavo.assemble.kv_share", lambda *_: 0)
    with pytest.raises(NotEnoughMemory, match="does not fit"):
        make(num_gpu_blocks_override=None)


def test_a_step_that_fails_ends_its_requests_and_no_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=5, **GREEDY)
    want = ids_of(llm.generate(["good"], params))
    run_layers: Any = llm.model._run_layers

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(llm.model, "_run_layers", broken)
    failed = llm.generate(["bad", "worse"], params)
    assert all(
        o.outputs[0].finish_reason == "error" and "on fire" in (o.error or "") for o in failed
    )
    monkeypatch.setattr(llm.model, "_run_layers", run_layers)
    assert ids_of(llm.generate(["good"], params)) == want
    llm.engine.scheduler.check()
    assert blocks_in_use(llm) == 0


def test_out_of_memory_is_tried_again_smaller_and_then_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=5, **GREEDY)
    prompts = [[k] * 60 for k in range(1, 5)]
    want = ids_of(llm.generate(prompts, params))
    run_layers: Any = llm.model._run_layers
    max_step_tokens = 100

    def tight(batch: Any, kv: Any) -> Any:
        if len(batch.ids) > max_step_tokens:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20 MiB at 0xdeadbeef"
            )
        return run_layers(batch, kv)

    monkeypatch.setattr(llm.model, "_run_layers", tight)
    scheduler = llm.engine.scheduler
    scheduler.clear_cache()
    assert ids_of(llm.generate(prompts, params)) == want and scheduler.counters.oom_steps > 0
    max_step_tokens = 0
    scheduler.clear_cache()
    failed = llm.generate(prompts, params)
    assert all(
        o.outputs[0].finish_reason == "error" and "no memory for a step" in (o.error or "")
        for o in failed
    )
    max_step_tokens = 10**6
    assert ids_of(llm.generate(prompts, params)) == want
    scheduler.check()
    assert blocks_in_use(llm) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_anywhere_leaves_an_engine_that_can_be_used(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C at lines drawn from all that the engine's bookkeeping executes."""
    llm = make(depth=depth, swap_space=1 / 1024)
    many, params = prompts(4), SamplingParams(max_tokens=5, **GREEDY)
    want = ids_of(llm.generate(many, params))
    files = ("llm.py", "request_loop.py", "collect.py")
    places = ("/octavo/core/", *(f"/octavo/{name}" for name in files))
    g = random.Random(depth)

    class Interrupt:
        def __init__(self, at: int):
            self.at, self.lines = at, 0

        def __call__(self, frame: Any, event: str, arg: Any) -> Any:
            return self.line if any(place in frame.f_code.co_filename for place in places) else None

        def line(self, frame: Any, event: str, arg: Any) -> Any:
            self.lines += event == "line"
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return self.line

    def interrupted(at: int) -> int:
        watch, before = Interrupt(at), sys.gettrace()
        sys.settrace(watch)
        try:
            llm.reset_prefix_cache()
            llm.generate(many, params, use_tqdm=False)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return watch.lines

    total = interrupted(10**9)
    for at in g.sample(range(1, total), 20):
        stream = llm.stream(many[0], params)
        next(stream)
        interrupted(at)
        pieces = list(stream)
        assert pieces[-1].finish_reason in ("length", "error")
        assert ids_of(llm.generate(many, params)) == want, f"after an interrupt at line {at}"
        assert blocks_in_use(llm) == 0 and llm.engine.idle
        llm.engine.scheduler.check()
    assert "a new engine" in caplog.text


def test_an_interrupt_while_an_output_is_recorded_leaves_one_last_piece() -> None:
    """Ctrl-C at every line of Collector.add, for the last output of a stream."""
    llm = make()
    params = SamplingParams(max_tokens=2, **GREEDY)

    def interrupted(at: int) -> bool:
        """Interrupt the at-th line that records the last output. False: there are fewer lines."""
        collector = llm.submit(prompts(1)[0], params)
        llm.step()
        lines = 0

        def watch(frame: Any, event: str, arg: Any) -> Any:
            nonlocal lines
            if frame.f_code is not Collector.add.__code__:
                return watch
            lines += event == "line"
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return watch

        before = sys.gettrace()
        sys.settrace(watch)
        try:
            llm.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert collector.pieces is not None and collector.finished
        reasons = [piece.finish_reason for piece in collector.pieces]
        assert reasons[-1] and not any(reasons[:-1]), f"after an interrupt at line {at}: {reasons}"
        return lines >= at

    number = 1
    while interrupted(number):
        number += 1
    assert number > 10


def test_a_fault_in_the_scheduler_ends_what_runs_and_no_more(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, **GREEDY)
    want = ids_of(llm.generate(["good"], params))
    stream = llm.stream("good", params)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler.pool, "allocate", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(["x" * 40], params)
    assert [(piece.finish_reason, piece.error) for piece in stream] == [
        ("error", "the engine was interrupted")
    ]
    assert ids_of(llm.generate(["good"], params)) == want


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 2, "repetition_penalty": 1.2}]
)
def test_a_model_that_computes_no_numbers_says_so(more: dict[str, Any]) -> None:
    llm = make(depth=2)
    with torch.inference_mode():
        llm.model.norm.fill_(torch.nan)  # type: ignore[operator]
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=4, **more))
    assert output.outputs[0].finish_reason == "error" and "no finite logit" in (output.error or "")
    while not llm.engine.idle:  # the next step was in flight
        llm.step()
    llm.engine.scheduler.check()


@pytest.mark.parametrize(
    "options",
    [{"kv_disk_gib": 1.0}, {"target_ms": 10.0}, {"max_batch": 2}, {"window_ms": 3.0}, {"kv_sinks": 3},
     {"window_ms": 3.0, "batching": "static"}],
)  # fmt: skip
def test_options_without_an_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        make(**options)


def test_a_pool_beyond_memory_is_refused_by_its_own_name() -> None:
    with pytest.raises(NotEnoughMemory, match="--num-blocks"):
        make(num_gpu_blocks_override=10**10)


def test_a_fault_that_is_over_leaves_nothing_in_the_cache() -> None:
    llm, params, prompt = (
        make(block_size=4),
        SamplingParams(max_tokens=5, **GREEDY),
        "a system prompt of some length",
    )
    want = ids_of(llm.generate([prompt], params))
    llm.reset_prefix_cache()
    with torch.inference_mode():
        norm = llm.model.norm.clone()  # type: ignore[operator]
        llm.model.norm.fill_(torch.nan)  # type: ignore[operator]
        assert llm.generate([prompt], params)[0].error
        llm.model.norm.copy_(norm)  # type: ignore[operator]
    assert ids_of(llm.generate([prompt], params)) == want
