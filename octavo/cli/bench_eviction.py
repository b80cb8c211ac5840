"""`octavo bench eviction`: bounded KV over long replies and long texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from octavo.cli.bench import Output, app, finish
from octavo.cli.options import Model, command, load_llm, option, size, size_or_none
from octavo.cli.terminal import in_bytes, say, table
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

ALONE = EngineOptions(max_num_seqs=1, enable_prefix_caching=False)


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
            "Eviction modes to compare, separated by commas; the first is the baseline.",
            None,
            "NAME,...",
            show_default=True,
        ),
    ] = ("full,window,sinks,heavy"),
    picture: Annotated[
        Path | None, option("Draw the result in this SVG file.", None, "FILE")
    ] = None,
    output: Output = None,
    engine: EngineOptions = ALONE,
) -> None:
    """Measure bounded KV: blocks and speed of a long reply, perplexity of a long text."""
    from rich.progress import TextColumn

    from octavo.bench.eviction import POLICIES, measure, panels
    from octavo.bench.picture import draw
    from octavo.cli.progress import Steps

    chosen = tuple(policies.split(","))
    if unknown := sorted(set(chosen) - set(POLICIES)):
        raise InvalidRequest(
            f"unknown policy {', '.join(unknown)}: use {', '.join(POLICIES)}", "policies"
        )
    if not tokens and not text:
        raise InvalidRequest("nothing to measure: give --tokens or --text", "tokens")
    if 0 < text <= budget:
        raise InvalidRequest(
            f"a text of {text} tokens fits the budget of {budget}: nothing would leave. Use a longer "
            "text",
            "text",
        )

    def load(options: dict[str, Any]) -> Any:
        bounds = {"kv_budget": None, "kv_sinks": 1} | options
        return load_llm(model, engine, max_model_len=max(text, budget) + 1, **bounds)

    columns = *Steps.get_default_columns(), TextColumn("{task.fields[note]}")
    with Steps(*columns) as progress:
        task = progress.add_task("loading", total=None, note="")

        def show_progress(what: str, count: int, total: int, note: str) -> None:
            progress.update(task, description=what, completed=count, total=total, note=note)

        rows = measure(load, budget, tokens, text, chosen, show_progress)
    if picture is not None:
        draw(picture, *panels(rows))
    show(rows, bool(text))
    finish(
        {
            "bench": "eviction",
            "model": model or "smollm2",
            "budget": budget,
            "tokens": tokens,
            "text": text,
            "rows": rows,
        },
        output,
    )


def show(rows: list[dict[str, Any]], has_perplexity: bool) -> None:
    columns = (
        *("policy", "keeps", "perplexity", "ratio", "blocks"),
        *("KV", "tok/s, first", "last", "kept", "memory grew"),
    )
    cells = []
    for r in rows:
        row = [r["policy"], f"{r['kv_tokens']:,}"]
        row += [f"{r['perplexity']:.3f}", f"{r['ratio']:.4f}"] if has_perplexity else ["", ""]
        if parts := r.get("parts"):
            row += [
                str(max(part["blocks"] for part in parts)),
                in_bytes(parts[-1]["kv_bytes"]),
                f"{r['first_tok_s']:.1f}",
                f"{r['last_tok_s']:.1f}",
                f"{r['speed_kept']:.1%}",
                f"{r['rss_bytes_grown'] / 2**20:+.1f} MiB",
            ]
        cells.append(row)
    table(None, columns, cells)
    for r in rows:
        if speeds := " ".join(f"{p['tok_s']:.0f}" for p in r.get("parts", [])):
            say(f"{r['policy']}, tok/s of each {r['parts'][0]['tokens']:,} tokens: {speeds}")
