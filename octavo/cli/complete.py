"""`octavo complete`: prompts in, text out, streamed where there is one text to stream."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli.options import Model, SamplingOptions, command, fail, flag, load_llm, option
from octavo.cli.terminal import Writer, note
from octavo.engine_options import EngineOptions

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.params import SamplingParams


@command
def complete(
    model: Model = None,
    *,
    prompt: Annotated[
        list[str] | None,
        option(
            "Text to continue. May be given several times. Default: standard input.",
            None,
            "TEXT",
            "--prompt",
            "-p",
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print each completion as a line of JSON.")] = False,
    sampling: SamplingOptions,
    n: Annotated[int, option("Number of completions per prompt.", "Sampling", "N")] = 1,
    min_tokens: Annotated[
        int, option("Minimum number of tokens to generate.", "Sampling", "N")
    ] = 0,
    ignore_eos: Annotated[
        bool, flag("--ignore-eos", "Continue past the end-of-text token.", "Sampling")
    ] = False,
    logprobs: Annotated[
        int | None,
        option("Show log-probabilities of the tokens and of N alternatives.", "Sampling", "N"),
    ] = None,
    engine: EngineOptions,
) -> None:
    """Continue text: [bold]octavo complete -p "Once upon a time"[/bold]"""
    prompts = prompt or [read_stdin()]
    more = dict(n=n, min_tokens=min_tokens, ignore_eos=ignore_eos, logprobs=logprobs)
    sampling.params(**more)  # a bad value is reported before the model is loaded
    llm = load_llm(model, engine)
    params = sampling.with_defaults(llm.default_sampling).params(**more)
    if len(prompts) == 1 and n == 1 and not as_json:
        stream(llm, prompts[0], params)
        return
    results = llm.generate(list(prompts), params, use_tqdm=sys.stderr.isatty())
    for i, result in enumerate(results, 1):
        for completion in result.outputs:
            if as_json:
                print(json.dumps(record(result, completion), ensure_ascii=False))
            else:
                place = f"{i}.{completion.index + 1}" if n > 1 else f"{i}"
                print(f"==> {place}: {' '.join((result.prompt or '').split())[:60]} <==")
                writer = Writer()
                writer.write(completion.text)
                writer.end()
                show_logprobs(completion)
    cut = [
        len(c.token_ids)
        for result in results
        for c in result.outputs
        if ends_early(c.finish_reason, len(c.token_ids), params)
    ]
    if cut:
        report_cut(min(cut), params)
    failed = [
        result.error
        for result in results
        if any(c.finish_reason == "error" for c in result.outputs)
    ]
    if failed:
        fail(f"{len(failed)} of {len(results)} prompts failed: {failed[0]}", code=1)


def read_stdin() -> str:
    if sys.stdin.isatty():
        fail('give a prompt: octavo complete -p "Once upon a time", or pipe one in')
    # which `echo` added and the model would take for a paragraph's end
    return sys.stdin.read().removesuffix("\n")


def stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    writer = Writer()
    whole: CompletionOutput | None = None
    count = 0
    try:
        for piece in llm.stream(prompt, params):
            writer.write(piece.text)
            count += len(piece.token_ids)
            if whole is None:
                whole = piece
            else:
                whole.logprobs = (whole.logprobs or []) + (piece.logprobs or [])
                whole.finish_reason = piece.finish_reason
    finally:
        writer.end()
    if whole is not None:
        show_logprobs(whole)
        if whole.finish_reason == "error":
            fail("the model's computation failed half-way", code=1)
        if ends_early(whole.finish_reason, count, params):
            report_cut(count, params)


def ends_early(reason: str | None, count: int, params: SamplingParams) -> bool:
    """There was no room for more tokens, though more were asked for."""
    return reason == "length" and params.max_tokens is not None and count < params.max_tokens


def report_cut(count: int, params: SamplingParams) -> None:
    note(
        f"{count} of {params.max_tokens} tokens: then the context was full (--max-model-len, --num-blocks)"
    )


def show_logprobs(completion: CompletionOutput) -> None:
    if not completion.logprobs:
        return
    for found in completion.logprobs:
        chosen, *others = (f"{p.decoded_token!r} {p.logprob:.3f}" for p in found.values())
        print(f"  {chosen:<24} {'  '.join(others)}".rstrip())


def record(result: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    first = result.metrics.time_to_first_token
    total = result.metrics.latency
    count = len(completion.token_ids)
    found: dict[str, Any] = {
        "prompt": result.prompt,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "time_to_first_token_s": first,
        "latency_s": total,
        "tokens_per_s": (count - 1) / (total - first)
        if first is not None and total is not None and total > first
        else None,
    }
    if result.error is not None:
        found["error"] = result.error
    if completion.logprobs is not None:
        found["logprobs"] = [
            [
                {"token": t, "text": p.decoded_token, "logprob": p.logprob, "rank": p.rank}
                for t, p in at.items()
            ]
            for at in completion.logprobs
        ]
    return found
