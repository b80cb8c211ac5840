"""`octavo bench eviction`: bounded KV over long replies and long texts."""

from __future__ import annotations

from typing import Annotated, Any

from octavo.cli.bench import Output, app, finish
from octavo.cli.options import EngineOptions, Model, command, option, size
from octavo.errors import InvalidRequest

ALONE = EngineOptions(max_num_seqs=1, no_prefix_caching=True)


@app.command()
@command
def eviction(
    model: Model = None,
    tokens: Annotated[int, option("Tokens of the reply; 0: none.", None, "N", parser=size, show_default=True)] = 4000,
    text: Annotated[int, option("Tokens of the text, for perplexity.", None, "N", parser=size, show_default=True)] = 4096,
    budget: Annotated[int, option("Tokens that are kept.", None, "N", parser=size, show_default=True)] = 1024,
    policies: Annotated[str, option("Which, the first to compare with.", None, "NAME,...", show_default=True)] = (
        "full,window,sinks,heavy"
    ),
    output: Output = None,
    engine: EngineOptions = ALONE,
) -> None:
    """Bounded KV: blocks in use and speed of a long reply, perplexity of a long text against a whole cache."""
    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from octavo.bench.eviction import POLICIES, measure

    chosen = tuple(policies.split(","))
    if unknown := sorted(set(chosen) - set(POLICIES)):
        raise InvalidRequest(f"unknown policy {', '.join(unknown)}: use {', '.join(POLICIES)}", "policies")
    if text <= budget:
        raise InvalidRequest(
            f"a text of {text} tokens fits the budget of {budget}: nothing would leave. Use a longer one", "text"
        )
    engine.max_model_len = text + 1

    def load(options: dict[str, Any]) -> Any:
        engine.kv_eviction, engine.kv_budget = options["kv_eviction"], options.get("kv_budget")
        return engine.load(model, kv_sinks=options.get("kv_sinks", 1))

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(chosen))
        rows = measure(load, budget, tokens, text, chosen, lambda: progress.advance(task))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("policy", "keeps", "perplexity", "ratio", "blocks", "tok/s, in each part of the reply"):
        table.add_column(column, justify="left" if column in ("policy",) else "right")
    for r in rows:
        parts = r.get("parts", [])
        speeds = " ".join(f"{p['tok_s']:.0f}" for p in parts)
        blocks = str(max(p["blocks"] for p in parts)) if parts else ""
        table.add_row(r["policy"], f"{r['kv_tokens']:,}", f"{r['perplexity']:.3f}", f"{r['ratio']:.4f}", blocks, speeds)
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    console.print(table)
    finish(
        {"bench": "eviction", "model": model or "smollm2", "budget": budget, "tokens": tokens, "text": text, "rows": rows}, output
    )
