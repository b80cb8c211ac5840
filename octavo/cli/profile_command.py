"""`octavo profile`: observes a running server, and names what limits it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli.options import command, fail, flag, option
from octavo.cli.terminal import in_bytes, note, say, table

if TYPE_CHECKING:
    from octavo.bench.server_profile import ServerProfile


@command
def profile(
    pid: Annotated[int, option("PID of the server, or of any other process.", None, "N", "--pid")],
    duration: Annotated[
        float, option("Seconds to observe.", None, "SECONDS", show_default=True, min=1)
    ] = 60.0,
    flame: Annotated[
        Path | None,
        option(
            "Directory for flame graphs of the front and the engine process, as SVG files.",
            None,
            "DIRECTORY",
        ),
    ] = None,
    csv: Annotated[
        bool, flag("--csv", "Print every sample as CSV with a header, instead of tables.")
    ] = False,
    api_key: Annotated[
        str | None,
        option("API key for /metrics. Default: the variable OCTAVO_API_KEY.", None, "KEY"),
    ] = None,
) -> None:
    """Observe a running server: CPU, memory, steps, stacks and the bottleneck."""
    from octavo.bench.server_profile import ProfileSession
    from octavo.cli.progress import Steps

    if flame is not None and not flame.is_dir():
        fail(f"--flame {flame} is not a directory: create it first")
    key = api_key or os.environ.get("OCTAVO_API_KEY")
    session = ProfileSession(pid, duration, key, with_stacks=flame is not None or not csv)
    with Steps() as progress:
        task = progress.add_task("observing", total=duration)
        observed = session.run(
            lambda seconds: progress.update(task, completed=min(seconds, duration))
        )
    if csv:
        show_csv(observed)
    else:
        show_profile(observed)
    if flame is not None:
        write_flames(observed, flame)


def show_csv(profile: ServerProfile) -> None:
    from octavo.bench.server_profile import csv_rows

    rows = csv_rows(profile)
    print(",".join(rows[0]))
    for row in rows:
        print(",".join(str(row.get(name, "")) for name in rows[0]))
    for problem in profile.problems:
        note(problem)


def show_profile(profile: ServerProfile) -> None:
    from octavo.bench.bottleneck import find_bound, find_starvation
    from octavo.bench.server_profile import activity_of

    show_processes(profile)
    show_gpu(profile)
    activity = activity_of(profile)
    if activity is not None:
        show_steps(activity)
    show_functions(profile)
    for problem in profile.problems:
        note(problem)
    if activity is not None:
        if (remark := find_starvation(activity)) is not None:
            say(f"[yellow]{remark}[/yellow]")
        bound = find_bound(activity)
        say(f"[bold]{bound.text()}[/bold]")
        if bound.process is not None:
            show_hottest(profile, bound.process)


def show_hottest(profile: ServerProfile, role: str) -> None:
    """Name the function in which a process spends most of its time."""
    from octavo.bench.flame_graph import hottest_functions

    for process in profile.processes:
        if process.role == role and profile.stacks.get(process.pid):
            name, share = hottest_functions(profile.stacks[process.pid])[0]
            say(f"[bold]Most of its time: {name}, {share:.0%} of the samples[/bold]")


def show_processes(profile: ServerProfile) -> None:
    columns = (
        *("process", "pid", "CPU", "kernel", "memory", "peak", "faults/s", "from disk"),
        *("switches/s", "forced/s", "threads", "IPC", "cache misses"),
    )
    rows = []
    seconds = max(profile.seconds, 1e-9)
    for process in profile.processes:
        last = profile.last(process.pid)
        if last is None:
            continue
        counters = profile.counters.get(process.pid, {})
        rows.append(
            (
                process.role,
                str(process.pid),
                f"{profile.growth(process.pid, 'cpu_seconds') / seconds:.0%}",
                f"{profile.growth(process.pid, 'system_seconds') / seconds:.0%}",
                in_bytes(last.rss_bytes),
                in_bytes(last.peak_rss_bytes),
                f"{profile.growth(process.pid, 'minor_faults') / seconds:,.0f}",
                f"{profile.growth(process.pid, 'major_faults'):,.0f}",
                f"{profile.growth(process.pid, 'voluntary_switches') / seconds:,.0f}",
                f"{profile.growth(process.pid, 'involuntary_switches') / seconds:,.0f}",
                str(last.threads),
                *perf_cells(counters),
            )
        )
    say(f"[dim]{profile.seconds:.0f} seconds; CPU: 100% is one core[/dim]")
    table(None, columns, rows)


def perf_cells(counters: dict[str, int]) -> tuple[str, str]:
    if not counters.get("cycles"):
        return "", ""
    misses = counters["cache_misses"] / max(counters["cache_references"], 1)
    return f"{counters['instructions'] / counters['cycles']:.2f}", f"{misses:.0%}"


def show_gpu(profile: ServerProfile) -> None:
    samples = [sample.gpu for sample in profile.samples if sample.gpu]
    if not samples:
        return
    busy = sum(sample["gpu_utilisation"] for sample in samples) / len(samples)
    peak_bytes = max(sample["gpu_used_bytes"] for sample in samples)
    say(
        f"GPU: {busy:.0%} busy, {in_bytes(peak_bytes)} of {in_bytes(samples[0]['gpu_total_bytes'])}"
    )


def show_steps(activity: Any) -> None:
    total = max(activity.seconds, 1e-9)
    phases = ("plan", "launch", "wait", "commit")
    shares = {phase: getattr(activity, f"{phase}_seconds") / total for phase in phases}
    rows = [(f"engine: {phase}", f"{share:.1%}") for phase, share in shares.items()]
    rows.append(("engine: idle", f"{max(1 - sum(shares.values()), 0):.1%}"))
    rows.append(("steps with prompts", f"{activity.prefill_seconds / total:.1%}"))
    rows.append(("steps without prompts", f"{activity.decode_seconds / total:.1%}"))
    table(None, ("where the time went", "share"), rows)
    say(
        f"[dim]{activity.steps:,} steps, {activity.prefill_tokens:,} prompt tokens and "
        f"{activity.decode_tokens:,} tokens decoded; {activity.waiting:.1f} requests waited, KV "
        f"{activity.kv_usage:.0%} used, {activity.preemptions} preemptions; the event loop was "
        f"late by {1e3 * activity.loop_lag_seconds:.0f} ms[/dim]"
    )


def show_functions(profile: ServerProfile) -> None:
    from octavo.bench.flame_graph import hottest_functions

    rows = []
    for process in profile.processes:
        if process.pid in profile.stacks:
            for name, share in hottest_functions(profile.stacks[process.pid]):
                rows.append((process.role, name, f"{share:.0%}"))
    if rows:
        table(None, ("process", "function", "share of samples"), rows, left=(0, 1))


def write_flames(profile: ServerProfile, directory: Path) -> None:
    from octavo.bench.flame_graph import flame_svg

    roles = {process.pid: process.role for process in profile.processes}
    for pid, stacks in profile.stacks.items():
        if not stacks:
            note(f"{roles[pid]} {pid}: no stack was seen, because it did not run Python code")
            continue
        path = directory / f"{roles[pid]}.svg"
        path.write_text(flame_svg(f"{roles[pid]} {pid}", stacks), encoding="utf-8")
        note(f"wrote {path}")
