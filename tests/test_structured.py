"""Structured output through the in-process API: valid whatever the model would rather say, and the
same at every depth."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

pytest.importorskip("llguidance")

from octavo import LLM, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.model import embedded
from octavo.outputs import RequestOutput
from tests import schemas, tiny


def make(**options: Any) -> LLM:
    return LLM(
        tiny.model_dir(),
        **{
            "max_model_len": 600,
            "max_num_seqs": 8,
            "progress": False,
            "num_gpu_blocks_override": 300,
            **options,
        },
    )


def params(seed: int, **spec: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.5,
        seed=seed,
        max_tokens=150,
        structured_outputs=StructuredOutputsParams(**spec),
    )


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    assert all(o.error is None for o in outputs)
    return [[c.text for c in o.outputs] for o in outputs]


def workload() -> tuple[list[str], list[SamplingParams], list[dict[str, Any] | None]]:
    """Return prompts, their parameters and their schemas, or None for free text. Some have n=3."""
    g = random.Random(1)
    prompts, all_params, all_schemas = [], [], []
    for i in range(36):
        schema = schemas.random_schema(g) if i % 3 else None
        p = (
            params(i, json=schema)
            if schema
            else SamplingParams(temperature=1.5, seed=i, max_tokens=40, ignore_eos=True)
        )
        p.n = g.choice([1, 1, 3])
        prompts.append("the same beginning of every prompt, " * g.randrange(2) + str(i))
        all_params.append(p)
        all_schemas.append(schema)
    return prompts, all_params, all_schemas


def test_json_is_valid_at_any_temperature_and_the_same_however_it_is_computed() -> None:
    prompts, all_params, all_schemas = workload()
    first = make().generate(prompts, all_params, use_tqdm=False)
    stopped = 0
    for output, schema in zip(first, all_schemas, strict=True):
        for completion in output.outputs:
            if schema is not None and completion.finish_reason == "stop":
                stopped += 1
                assert schemas.valid(schema, json.loads(completion.text)), (schema, completion.text)
            else:
                assert completion.finish_reason == "length"
    guided = sum(p.n for p, schema in zip(all_params, all_schemas, strict=True) if schema)
    assert stopped > 0.9 * guided, "the others ended at max_tokens"
    for options in (
        dict(depth=3, num_gpu_blocks_override=15, block_size=16, max_num_batched_tokens=16),
        dict(
            depth=2,
            num_gpu_blocks_override=58,
            block_size=4,
            enable_prefix_caching=False,
            max_num_seqs=5,
        ),
    ):
        llm = make(**options)
        assert texts(llm.generate(prompts, all_params, use_tqdm=False)) == texts(first), options
        assert all(r == 0 for r in llm.engine.scheduler.pool.ref_counts[1:])
        if "num_gpu_blocks_override" in options:
            assert llm.engine.scheduler.counters.preemptions > 0


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make(depth=2)


def complete(llm: LLM, **options: Any) -> Any:
    (output,) = llm.generate(
        ["hello"],
        SamplingParams(**{"temperature": 1.5, "max_tokens": 60, "seed": 3, **options}),
        use_tqdm=False,
    )
    return output.outputs[0]


def test_every_kind(llm: LLM) -> None:
    completion = complete(
        llm, structured_outputs=StructuredOutputsParams(regex=r"\d{3}-[a-f]{2,4}")
    )
    assert re.fullmatch(r"\d{3}-[a-f]{2,4}", completion.text) and completion.finish_reason == "stop"
    assert complete(
        llm, structured_outputs=StructuredOutputsParams(choice=["red", "green"])
    ).text in (
        "red",
        "green",
    )
    assert (
        complete(
            llm, structured_outputs=StructuredOutputsParams(grammar='start: "<" /[0-9]{4}/ ">"')
        ).text[0::5]
        == "<>"
    )
    schema = '{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": false}'
    assert complete(llm, structured_outputs=StructuredOutputsParams(json=schema)).text == '{"x":1}'
    assert (
        complete(
            llm, structured_outputs=StructuredOutputsParams(json_object=True), max_tokens=3
        ).text[0]
        == "{"
    )


def test_max_tokens_ends_a_guided_text(llm: LLM) -> None:
    completion = complete(
        llm, structured_outputs=StructuredOutputsParams(regex="a{100}"), max_tokens=7
    )
    assert (completion.text, completion.finish_reason) == ("a" * 7, "length")


STUCK = dict(temperature=0, logit_bias={65: 100}, max_tokens=250)  # writes b for ever


def test_a_text_that_repeats_itself_is_ended_and_says_so(llm: LLM) -> None:
    spec = StructuredOutputsParams(regex="[ab]+")
    completion = complete(llm, structured_outputs=spec, **STUCK)
    assert (completion.text, completion.finish_reason) == ("b" * 70, "length")
    assert completion.stop_reason == "repetition_detected"
    whole = complete(
        llm, structured_outputs=spec, repetition_detection=RepetitionDetectionParams(), **STUCK
    )
    assert (len(whole.text), whole.finish_reason, whole.stop_reason) == (250, "length", None)
    assert len(complete(llm, structured_outputs=spec, min_tokens=120, **STUCK).text) == 120


def test_a_free_text_is_ended_where_it_was_asked_for(llm: LLM) -> None:
    assert len(complete(llm, **STUCK).text) == 250
    detection = RepetitionDetectionParams(max_pattern_size=3, min_count=7)
    completion = complete(llm, repetition_detection=detection, **STUCK)
    assert (completion.text, completion.stop_reason) == ("b" * 7, "repetition_detected")


def test_where_a_text_is_ended_does_not_depend_on_what_runs_beside_it() -> None:
    all_params = [
        SamplingParams(temperature=1.2, seed=i, max_tokens=60, ignore_eos=True, logit_bias={65: 7, 66: 7},
                       repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=4))
        for i in range(8)
    ]  # fmt: skip
    prompts = [f"prompt {i}" for i in range(8)]
    lonely = make(depth=1)
    alone = [
        lonely.generate([prompt], each, use_tqdm=False)[0]
        for prompt, each in zip(prompts, all_params, strict=True)
    ]
    ended = sum(o.outputs[0].stop_reason == "repetition_detected" for o in alone)
    assert ended >= 2
    for options in (
        dict(depth=3),
        dict(depth=2, num_gpu_blocks_override=15, block_size=16, max_num_batched_tokens=16),
    ):
        assert texts(make(**options).generate(prompts, all_params, use_tqdm=False)) == texts(alone)


def test_guides_work_with_other_parameters(llm: LLM) -> None:
    spec = StructuredOutputsParams(regex="[ab]{1,20}")
    free = complete(llm, structured_outputs=spec)
    assert (
        complete(llm, structured_outputs=spec, temperature=0, logit_bias={65: 100}).text == "b" * 20
    ), "65 is the token b"
    assert set(complete(llm, structured_outputs=spec, top_k=1, frequency_penalty=2).text) <= set(
        "ab"
    )
    assert len(complete(llm, structured_outputs=spec, min_tokens=15).text) >= 15
    short = complete(
        llm,
        structured_outputs=StructuredOutputsParams(choice=["no"]),
        min_tokens=15,
        ignore_eos=True,
    )
    assert (short.text, short.finish_reason) == ("no", "stop"), "a complete text ends"
    assert complete(llm, structured_outputs=spec, stop=["b"]).text == free.text.partition("b")[0]
    with_logprobs = complete(llm, structured_outputs=spec, logprobs=2)
    assert with_logprobs.text == free.text and any(
        next(iter(at.values())).rank > 3 for at in with_logprobs.logprobs
    )
    with pytest.raises(InvalidRequest, match="exclude each other"):
        complete(llm, structured_outputs=spec, allowed_token_ids=[5])


def test_specifications_that_cannot_be_compiled_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        llm.generate(
            ["a", "b"], [SamplingParams(max_tokens=5), params(1, json={"not": {}})], use_tqdm=False
        )
    assert llm.engine.idle


def test_without_a_tokenizer_it_is_refused() -> None:
    bare = make(skip_tokenizer_init=True)
    with pytest.raises(InvalidRequest, match="without one"):
        bare.generate([[1, 2]], params(1, json_object=True), use_tqdm=False)


def test_a_stream_is_guided_too(llm: LLM) -> None:
    pieces = [p.text for p in llm.stream("hello", params(3, choice=["one two three"]))]
    assert "".join(pieces) == "one two three" and len(pieces) > 3


@pytest.mark.skipif(embedded.find_spec(embedded.PACKAGE) is None, reason=embedded.INSTALL)
def test_the_embedded_model_fills_in_a_form() -> None:
    fields = {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain"]},
        "old": {"type": "boolean"},
    }
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    llm = LLM(max_model_len=512, progress=False)
    messages = [{"role": "user", "content": "Describe the capital of France as JSON."}]
    greedy, hot = (
        llm.chat(
            messages,
            SamplingParams(
                temperature=t,
                seed=1,
                max_tokens=120,
                structured_outputs=StructuredOutputsParams(json=schema),
            ),
        )
        for t in (0.0, 1.5)
    )
    for output in (greedy, hot):
        form = json.loads(output[0].outputs[0].text)
        assert list(form) == list(fields) and form["country"] in ("France", "Spain")
    assert json.loads(greedy[0].outputs[0].text)["city"].startswith("Paris")
