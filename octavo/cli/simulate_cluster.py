"""`octavo simulate-cluster`: compares routing policies on many replicas, with a cost model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import Output, command, engine_option, option, size
from octavo.cli.simulate_command import read_costs
from octavo.cli.terminal import print_result, say, table
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.bench.cluster import ClusterOptions
    from octavo.bench.cluster_replica import ClusterRequest
    from octavo.bench.picture import Panel

ROUTING = ("round_robin", "least_loaded", "power_of_two", "prefix_affinity")
COLUMNS = (
    ("hits", "cache_hits"),
    ("busiest", "busiest"),
    ("TTFT p50", "ttft_p50_ms"),
    ("p99 ms", "ttft_p99_ms"),
    ("ITL p50", "itl_p50_ms"),
    ("p99 ms", "itl_p99_ms"),
    ("tok/s", "tok_s"),
    ("goodput", "goodput"),
    ("failed", "failed"),
    ("retried", "retried"),
)
PERCENT = ("cache_hits", "goodput")
GIGABIT = 1e9 / 8  # bytes
EMBEDDED_KV_BYTES = 23_040  # per token: 30 layers, 3 heads of 64 keys and values in bfloat16


@command
def simulate_cluster(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file of --record-trace, or a trace such as poisson:rate=600,n=1e6,"
            "prompt=16-256,output=16-128,shared=1024,groups=8000,skew=0.6.",
            show_default=False,
        ),
    ],
    replicas: Annotated[
        int, option("Number of replicas.", None, "N", show_default=True, min=1)
    ] = 1000,
    routing: Annotated[
        list[str] | None,
        option(
            f"Routing policy to compare: {', '.join(ROUTING)}. May be given several times. "
            "Default: all.",
            None,
            "NAME",
        ),
    ] = None,
    mtbf: Annotated[
        float | None,
        option(
            "Also simulate crashes: seconds between two crashes of a replica, on average.",
            None,
            "SECONDS",
            min=1e-3,
        ),
    ] = None,
    restart: Annotated[
        float,
        option(
            "Seconds until a crashed replica serves again.",
            None,
            "SECONDS",
            show_default=True,
            min=0.0,
        ),
    ] = 60.0,
    prefill_replicas: Annotated[
        int,
        option(
            "Also simulate disaggregated prefill: this many replicas compute only prompts.",
            None,
            "N",
            min=0,
        ),
    ] = 0,
    link: Annotated[
        list[float] | None,
        option(
            "Network bandwidth of a prefill replica in Gbit/s. May be given several times. "
            "Default: 10.",
            None,
            "GBIT",
        ),
    ] = None,
    kv_bytes: Annotated[
        int,
        option(
            "Bytes of KV per token. Default: 23040, the size of the embedded model.",
            None,
            "N",
            parser=size,
        ),
    ] = EMBEDDED_KV_BYTES,
    kv_tokens: Annotated[
        int,
        option(
            "KV cache of a replica in tokens.",
            None,
            "N",
            parser=size,
            show_default=True,
        ),
    ] = 32_768,
    max_num_seqs: Annotated[int, engine_option("max_num_seqs")] = 16,
    max_num_batched_tokens: Annotated[
        int, option("Maximum tokens per step.", None, "N", parser=size, show_default=True)
    ] = 2048,
    ttft_limit: Annotated[
        float,
        option(
            "Goodput limit: time to first token in milliseconds.", None, "MS", show_default=True
        ),
    ] = 2000.0,
    itl_limit: Annotated[
        float,
        option(
            "Goodput limit: mean time between the tokens of a reply in milliseconds.",
            None,
            "MS",
            show_default=True,
        ),
    ] = 100.0,
    costs: Annotated[
        Path | None,
        option(
            "File with step costs, written by octavo simulate --calibrate. Default: the embedded "
            "model on a CPU.",
            None,
            "FILE",
        ),
    ] = None,
    picture: Annotated[
        Path | None, option("Draw the comparison in this SVG file.", None, "FILE")
    ] = None,
    output: Output = None,
) -> None:
    """Compare routing policies on many replicas, without a model."""
    from octavo.bench.cluster import ClusterOptions
    from octavo.bench.cluster_replica import ReplicaOptions
    from octavo.core.simulate import EMBEDDED_CPU

    base = ClusterOptions(
        replica=ReplicaOptions(
            costs=EMBEDDED_CPU if costs is None else read_costs(costs),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_tokens=kv_tokens,
        ),
        replicas=replicas,
        restart_seconds=restart,
        kv_bytes_per_token=kv_bytes,
        ttft_limit=ttft_limit / 1e3,
        itl_limit=itl_limit / 1e3,
    )
    requests = _read_requests(trace, kv_tokens)
    cases = _cases(base, routing or list(ROUTING), mtbf, prefill_replicas, link or [10.0])
    results = [_simulate(name, options, requests) for name, options in cases]
    _print_table(results)
    if picture is not None:
        from octavo.bench.picture import draw

        draw(picture, *_panels(results))
    _finish({"simulate_cluster": trace, "replicas": replicas, "results": results}, output)


def _read_requests(trace: str, kv_tokens: int) -> Callable[[], Iterable[ClusterRequest]]:
    """Return a function that makes new requests for each simulation."""
    from octavo.bench.cluster import requests_of_entries, synthetic_requests
    from octavo.core.trace import SyntheticTrace, read

    if trace.startswith("poisson:"):
        synthetic = SyntheticTrace.parse(trace)
        longest = synthetic.shared + synthetic.prompt[1] + synthetic.output[1]
        source: Callable[[], Iterable[ClusterRequest]] = partial(synthetic_requests, synthetic)
    else:
        entries = read(trace)
        longest = max(entry.prompt + entry.output for entry in entries)
        source = partial(requests_of_entries, entries)
    if longest > kv_tokens:
        raise InvalidRequest(
            f"a request of {longest} tokens does not fit into the KV cache of a replica: use "
            f"--kv-tokens {longest} or more",
            "kv_tokens",
        )
    return source


def _cases(
    base: ClusterOptions,
    routing: list[str],
    mtbf: float | None,
    prefill_replicas: int,
    links: list[float],
) -> list[tuple[str, ClusterOptions]]:
    """Return the cases to simulate: the name in the second column, and the options."""
    for name in routing:
        if name not in ROUTING:
            raise InvalidRequest(
                f"--routing must be one of {', '.join(ROUTING)}, got {name!r}", "routing"
            )
    if prefill_replicas >= base.replicas:
        raise InvalidRequest(
            "--prefill-replicas must be less than --replicas: the others decode",
            "prefill_replicas",
        )
    if min(links) <= 0:
        raise InvalidRequest("--link must be a number of Gbit/s above 0", "link")
    cases = []
    for name in routing:
        options = replace(base, routing=name)
        cases.append(("", options))
        if mtbf is not None:
            cases.append(("crashes", replace(options, mean_time_between_failures=mtbf)))
        if prefill_replicas:
            disaggregated = replace(options, prefill_replicas=prefill_replicas)
            for gigabits in links:
                linked = replace(disaggregated, link_bytes_per_second=gigabits * GIGABIT)
                cases.append((f"{prefill_replicas} prefill, {gigabits:g} Gbit/s", linked))
    return cases


def _simulate(
    name: str, options: ClusterOptions, requests: Callable[[], Iterable[ClusterRequest]]
) -> dict[str, Any]:
    from octavo.bench.cluster import Cluster

    start = time.process_time()
    summary = Cluster(options).run(requests())
    settings = asdict(options)
    if math.isinf(options.mean_time_between_failures):
        settings["mean_time_between_failures"] = None
    if math.isinf(options.link_bytes_per_second):
        settings["link_bytes_per_second"] = None
    return {
        "routing": options.routing,
        "case": name,
        **summary,
        "simulated_in_cpu_s": time.process_time() - start,
        "options": settings,
    }


def _print_table(results: list[dict[str, Any]]) -> None:
    rows = []
    for result in results:
        cells = []
        for _, key in COLUMNS:
            value = result[key]
            if key in PERCENT:
                cells.append(f"{value:.0%}")
            elif key == "busiest":
                cells.append(f"{value:.2f}")
            else:
                cells.append(f"{value:,.{1 if 0 < value < 100 and value % 1 else 0}f}")
        rows.append((result["routing"], result["case"], *cells))
    table(None, ("routing", "case", *(name for name, _ in COLUMNS)), rows, left=(0, 1))
    say("[dim]busiest: compute time of the busiest replica, divided by the mean[/dim]")


def _panels(results: list[dict[str, Any]]) -> list[Panel]:
    from octavo.bench.picture import bars

    names = list(dict.fromkeys(result["routing"] for result in results))
    cases = list(dict.fromkeys(result["case"] for result in results))
    result_by_key = {(result["routing"], result["case"]): result for result in results}
    panels = []
    for title, key, scale, unit in (
        ("Time to the first token, 99th percentile", "ttft_p99_ms", 1.0, "ms"),
        ("Prompt tokens found in the prefix cache", "cache_hits", 100.0, "%"),
        ("Requests within the latency limits", "goodput", 100.0, "%"),
    ):
        series = {
            case or "as it is": [scale * result_by_key[name, case][key] for name in names]
            for case in cases
        }
        panels.append(bars(title, names, series, unit))
    return panels


def _finish(result: dict[str, Any], output: Path | None) -> None:
    result_line = json.dumps(result)
    print_result(result_line)
    if output is not None:
        output.write_text(result_line + "\n")
