"""`octavo bench eviction`: measures bounded KV with long replies and long texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from octavo.cli.bench import app, finish
from octavo.cli.options import (
    Model,
    Output,
    bench_options,
    command,
    load_llm,
    option,
    size,
    size_or_none,
)
from octavo.cli.terminal import in_bytes, say, table
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

EVICTION_OPTIONS = bench_options(max_num_seqs=1, enable_prefix_caching=False)


@app.command()
@command
def eviction(
    model: Model = None,
    tokens: Annotated[
        int,
        option(
            "Tokens of the reply; 0 skips this measurement.",
            None,
            "N",
            parser=size_or_none,
            show_default=True,
        ),
    ] = 4000,
    text: Annotated[
        int,
        option(
            "Tokens of text for the perplexity; 0 skips this measurement.",
            None,
            "N",
            parser=size_or_none,
            show_default=True,
        ),
    ] = 4096,
    budget: Annotated[
        int, option("KV budget per sequence in tokens.", None, "N", parser=size, show_default=True)
    ] = 1024,
    policies: Annotated[
        str,
        option(
            "Values of --kv-eviction to compare, separated by commas; the first is the baseline.",
            None,
            "NAME,...",
            show_default=True,
        ),
    ] = ("full,window,sinks,heavy"),
    picture: Annotated[
        Path | None, option("Draw the result in this SVG file.", None, "FILE")
    ] = None,
    output: Output = None,
    engine: EngineOptions = EVICTION_OPTIONS,
) -> None:
    """Measure bounded KV: blocks and speed of a long reply, perplexity of a long text."""
    from rich.progress import TextColumn

    from octavo.bench.eviction import POLICIES, measure, panels
    from octavo.bench.picture import draw
    from octavo.cli.progress import Steps

    chosen_policies = tuple(policies.split(","))
    if unknown := sorted(set(chosen_policies) - set(POLICIES)):
        raise InvalidRequest(
            f"unknown policy {', '.join(unknown)}: use {', '.join(POLICIES)}", "policies"
        )
    if not tokens and not text:
        raise InvalidRequest(
            "--tokens and --text are both 0, so there is nothing to measure: give one of them",
            "tokens",
        )
    if 0 < text <= budget:
        raise InvalidRequest(
            f"a text of {text} tokens fits the budget of {budget}, so nothing would be dropped: "
            "raise --text",
            "text",
        )

    def load(options: dict[str, Any]) -> Any:
        bounds = {"kv_budget": None, "kv_sinks": 1} | options
        return load_llm(model, engine, max_model_len=max(text, budget) + 1, **bounds)

    columns = *Steps.get_default_columns(), TextColumn("{task.fields[note]}")
    with Steps(*columns) as progress:
        task = progress.add_task("loading", total=None, note="")

        def advance(description: str, completed: int, total: int, note: str) -> None:
            progress.update(
                task, description=description, completed=completed, total=total, note=note
            )

        results = measure(load, budget, tokens, text, chosen_policies, advance)
    if picture is not None:
        draw(picture, *panels(results))
    show_results(results, bool(text))
    finish(
        {
            "bench": "eviction",
            "model": model or EMBEDDED,
            "budget": budget,
            "tokens": tokens,
            "text": text,
            "rows": results,
        },
        output,
    )


def show_results(results: list[dict[str, Any]], has_perplexity: bool) -> None:
    columns = (
        *("policy", "keeps", "perplexity", "ratio", "blocks"),
        *("KV", "tok/s, first", "last", "kept", "memory grew"),
    )
    rows = []
    for result in results:
        segments = result.get("parts", [])
        measurements = (
            [f"{result['perplexity']:.3f}", f"{result['ratio']:.4f}"]
            if has_perplexity
            else ["", ""]
        )
        if segments:
            measurements += [
                str(max(segment["blocks"] for segment in segments)),
                in_bytes(segments[-1]["kv_bytes"]),
                f"{result['first_tok_s']:.1f}",
            ]
            measurements += [
                f"{result['last_tok_s']:.1f}",
                f"{result['speed_kept']:.1%}",
                f"{result['rss_bytes_grown'] / 2**20:+.1f} MiB",
            ]
        rows.append((result["policy"], f"{result['kv_tokens']:,}", *measurements))
    table(None, columns, rows)
    for result in results:
        segment_speeds = " ".join(f"{segment['tok_s']:.0f}" for segment in result.get("parts", []))
        if segment_speeds:
            say(
                f"{result['policy']}, tok/s of each {result['parts'][0]['tokens']:,} tokens: "
                f"{segment_speeds}"
            )
