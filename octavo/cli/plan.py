"""`octavo plan`: shows how much memory a model needs and how much KV fits beside it.

octavo/memory_planner.py computes the sizes from the config of the model. If the model does not fit,
the planner searches for options with which it fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import status
from octavo.cli.options import Model, command, flag, option, size, sizes
from octavo.cli.terminal import in_bytes, say, short, table, tokens
from octavo.config import EMBEDDED
from octavo.core.draft_methods import describe as describe_speculative
from octavo.engine_options import EngineOptions

if TYPE_CHECKING:
    from octavo.assemble import Resolved
    from octavo.memory_planner import Planner


@command
def plan(
    model: Model = None,
    *,
    device_memory: Annotated[
        int | None,
        option(
            "Plan for a GPU of this size (a CPU, with --device cpu), not this machine.",
            None,
            "80G",
            parser=size,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        option(
            "Sequence lengths for which the plan says how many sequences fit.", None, "1K,4K,..."
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the plan as a JSON object.")] = False,
    options: EngineOptions,
) -> None:
    """Show what a model needs: weights, activations, KV cache, and how many sequences fit. Loads no
    weights."""
    status.show("importing PyTorch")
    from octavo.assemble import resolve, settle_speculation
    from octavo.memory_planner import ModelOutline, Planner, TargetDevice

    status.show("reading the shape of the model")
    sequence_lengths = sizes(lengths) if lengths else None
    target = TargetDevice.of(options, device_memory)
    planner = Planner(ModelOutline.read(model, options), target)
    speculative = settle_speculation(options, planner.outline.checkpoint, target.kind)
    options = replace(options, speculative_config=speculative)
    if planner.fits(options):
        resolved = resolve(options, *planner.facts(options))
        report = describe(planner, options, model or EMBEDDED) | describe_fit(
            resolved, sequence_lengths
        )
    else:
        report = describe(planner, options, model or EMBEDDED)
        report |= describe_lack(planner, options)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if not report["fits"]:
        raise typer.Exit(1)


# ---- the report ----------------------------------------------------------------------------------


def describe(planner: Planner, options: EngineOptions, name: str) -> dict[str, Any]:
    """Describe the model, the device and the memory that the options need."""
    target = planner.target
    model = planner.outline.facts(options, target.kind)
    undivided = planner.outline.facts(replace(options, tensor_parallel_size=1), target.kind)
    needs = planner.requirements(options)
    on_gpu = target.kind == "cuda"
    speculative = needs.schedule.speculative
    return {
        "model": name,
        "architecture": model.config.architecture,
        "parameters": undivided.parameters,
        "tensor_parallel_size": options.tensor_parallel_size,
        "dtype": model.dtype,
        "weight_format": planner.outline.weights_summary,
        "quantization": options.quantization,
        "device": target.kind,
        "device_memory": target.total,
        "device_memory_free": target.free,
        "gpu_memory_utilization": options.gpu_memory_utilization if on_gpu else None,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": needs.schedule.max_num_batched_tokens,
        "weights": needs.weights,
        "activations": needs.activations,
        "kv_dtype": needs.kv_dtype,
        "kv_bytes_per_token": needs.kv_per_token,
        "draft_kv_bytes_per_token": needs.draft_kv_per_token,
        "block_size": needs.block_size,
        "model_context": model.config.max_position,
        "speculative": None if speculative is None else describe_speculative(speculative),
    }


def describe_lack(planner: Planner, options: EngineOptions) -> dict[str, Any]:
    from octavo.memory_planner import flags_of

    needed = planner.least_memory(options)
    alternatives = [flags_of(change) for change in planner.changes_to_fit(options)]
    alternatives.append(f"a device with {in_bytes(needed)}: --device-memory {-(-needed // 2**30)}G")
    return {"fits": False, "short_by": needed - planner.target.free, "ways_to_fit": alternatives}


def describe_fit(resolved: Resolved, lengths: list[int] | None) -> dict[str, Any]:
    memory = resolved.memory
    context = resolved.schedule.max_model_len
    lengths = lengths or [n for n in (2**10, 2**12, 2**14, 2**16) if n < context] + [context]
    return {
        "fits": True,
        "num_blocks": memory.num_blocks,
        "kv_pool": memory.kv,
        "kv_tokens": memory.kv_tokens,
        "kv_host": memory.host,
        "kv_disk": memory.disk,
        "max_model_len": context,
        "concurrency": {str(n): memory.concurrency(n) if n <= context else 0 for n in lengths},
    }


def show(report: dict[str, Any]) -> None:
    say(
        f"[bold]{report['model']}[/bold]: {short(report['parameters'])} parameters, "
        f"{report['architecture']}, {report['weight_format']}, computed in {report['dtype']}"
    )
    if report["tensor_parallel_size"] > 1:
        say(f"tensor parallelism: {report['tensor_parallel_size']} ranks. Each of them has:")
    if report["speculative"]:
        say(f"speculative decoding: {report['speculative']}")
    table(None, ("", "", ""), memory_rows(report), left=(0, 2), dim=(2,))
    if not report["fits"]:
        missing = in_bytes(report["short_by"])
        say(f"[bold red]It does not fit[/bold red]: {missing} are missing. It would fit with:")
        for way in report["ways_to_fit"]:
            say(f"  {way}")
        return
    rows = []
    for length, count in report["concurrency"].items():
        remark = ""
        if int(length) > report["max_model_len"]:
            remark = "longer than the longest sequence"
        if count > report["max_num_seqs"]:
            remark = f"but at most {report['max_num_seqs']:,} run at once: --max-num-seqs"
        rows.append((f"{tokens(int(length))} tokens", f"{count:,}", remark))
    table(None, ("sequences of", "fit at once", ""), rows, left=(0, 2), dim=(2,))


def memory_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield name, amount and remark of each part of the memory."""
    from octavo.memory import CPU_KV_SHARE

    per_token = report["kv_bytes_per_token"]
    remark = f"on the CPU; KV takes {CPU_KV_SHARE:.0%} of what is left, or --num-blocks"
    if report["device"] == "cuda":
        remark = f"{report['gpu_memory_utilization']:.0%} of the GPU may be used"
    yield "memory free", in_bytes(report["device_memory_free"]), remark
    yield "weights", in_bytes(report["weights"]), ""
    step = (
        f"a step of {report['max_num_batched_tokens']:,} tokens, "
        f"{report['max_num_seqs']:,} sequences"
    )
    yield "activations", in_bytes(report["activations"]), step
    yield "KV of a token", in_bytes(per_token), report["kv_dtype"]
    if report["draft_kv_bytes_per_token"]:
        yield "KV of the drafter", in_bytes(report["draft_kv_bytes_per_token"]), "for each token"
    if not report["fits"]:
        return
    blocks = f"{report['num_blocks']:,} blocks of {report['block_size']} tokens"
    yield "KV pool", in_bytes(report["kv_pool"]), blocks
    yield "tokens in the pool", f"{report['kv_tokens']:,}", ""
    for tier, name in (("kv_host", "KV in host memory"), ("kv_disk", "KV on disk")):
        if report[tier]:
            yield name, in_bytes(report[tier]), f"{report[tier] // per_token:,} tokens"
    limit = f"the model's own limit is {report['model_context']:,}"
    yield "longest sequence", f"{report['max_model_len']:,}", limit
