"""`octavo complete`: continues prompts. A single text is streamed."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli.options import Model, SamplingOptions, command, fail, flag, load_llm, option
from octavo.cli.terminal import Writer, note, speed_line
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
    prompts = prompt or [read_stdin(model)]
    extra_params = dict(n=n, min_tokens=min_tokens, ignore_eos=ignore_eos, logprobs=logprobs)
    sampling.params(**extra_params)  # reports an invalid value before the model is loaded
    llm = load_llm(model, engine)
    params = sampling.with_defaults(llm.default_sampling).params(**extra_params)
    if len(prompts) == 1 and n == 1 and not as_json:
        stream_completion(llm, prompts[0], params)
        return
    results = llm.generate(list(prompts), params, use_tqdm=sys.stderr.isatty())
    for prompt_number, result in enumerate(results, 1):
        for completion in result.outputs:
            if as_json:
                print(json.dumps(completion_record(result, completion), ensure_ascii=False))
            else:
                label = f"{prompt_number}.{completion.index + 1}" if n > 1 else f"{prompt_number}"
                print(f"==> {label}: {' '.join((result.prompt or '').split())[:60]} <==")
                writer = Writer()
                writer.write(completion.text)
                writer.end()
                show_logprobs(completion)
    truncated = [
        len(completion.token_ids)
        for result in results
        for completion in result.outputs
        if is_truncated(completion.finish_reason, len(completion.token_ids), params)
    ]
    if truncated:
        report_truncation(min(truncated), params)
    errors = [
        result.error
        for result in results
        if any(completion.finish_reason == "error" for completion in result.outputs)
    ]
    if errors:
        fail(f"{len(errors)} of {len(results)} prompts failed: {errors[0]}", code=1)


def read_stdin(model: str | None) -> str:
    if sys.stdin.isatty():
        fail('give a prompt: octavo complete -p "Once upon a time", or pipe one in')
    # `echo` adds a newline, which the model would read as the end of a paragraph.
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        message = 'the standard input is empty: pipe a prompt in, or give one with -p "TEXT"'
        if model is not None:
            message += f". {model!r:.60} was read as the name of the model"
        fail(message)
    return text


def stream_completion(llm: LLM, prompt: str, params: SamplingParams) -> None:
    writer = Writer()
    collected: CompletionOutput | None = None
    token_count = 0
    first_token_at: float | None = None
    try:
        for output in llm.stream(prompt, params):
            writer.write(output.text)
            token_count += len(output.token_ids)
            first_token_at = first_token_at or time.monotonic()
            if collected is None:
                collected = output
            else:
                collected.logprobs = (collected.logprobs or []) + (output.logprobs or [])
                collected.finish_reason = output.finish_reason
    finally:
        writer.end()
    if collected is not None:
        show_logprobs(collected)
        if collected.finish_reason == "error":
            fail("the computation failed before the text was complete", code=1)
        if is_truncated(collected.finish_reason, token_count, params):
            report_truncation(token_count, params)
        if sys.stderr.isatty() and first_token_at is not None:
            seconds = time.monotonic() - first_token_at
            rate = (token_count - 1) / seconds if token_count > 1 and seconds > 0 else None
            note(speed_line(token_count, rate))


def is_truncated(finish_reason: str | None, token_count: int, params: SamplingParams) -> bool:
    """Return whether the context was full before max_tokens were generated."""
    if finish_reason != "length" or params.max_tokens is None:
        return False
    return token_count < params.max_tokens


def report_truncation(token_count: int, params: SamplingParams) -> None:
    note(
        f"the context was full after {token_count} of {params.max_tokens} tokens: raise "
        "--max-model-len or --num-blocks"
    )


def show_logprobs(completion: CompletionOutput) -> None:
    if not completion.logprobs:
        return
    for candidates in completion.logprobs:
        chosen, *alternatives = (
            f"{candidate.decoded_token!r} {candidate.logprob:.3f}"
            for candidate in candidates.values()
        )
        print(f"  {chosen:<24} {'  '.join(alternatives)}".rstrip())


def completion_record(result: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    first_token_seconds = result.metrics.time_to_first_token
    total_seconds = result.metrics.latency
    token_count = len(completion.token_ids)
    fields: dict[str, Any] = {
        "prompt": result.prompt,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "time_to_first_token_s": first_token_seconds,
        "latency_s": total_seconds,
        "tokens_per_s": None,
    }
    if first_token_seconds is not None and total_seconds is not None:
        decode_seconds = total_seconds - first_token_seconds
        if decode_seconds > 0:
            fields["tokens_per_s"] = (token_count - 1) / decode_seconds
    if result.error is not None:
        fields["error"] = result.error
    if completion.logprobs is not None:
        fields["logprobs"] = [
            [
                {
                    "token": token_id,
                    "text": candidate.decoded_token,
                    "logprob": candidate.logprob,
                    "rank": candidate.rank,
                }
                for token_id, candidate in candidates.items()
            ]
            for candidates in completion.logprobs
        ]
    return fields
