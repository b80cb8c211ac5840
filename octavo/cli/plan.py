"""`octavo plan`: what a model takes and how much KV fits beside it, from its config alone. The same arithmetic as LLM's.

Builds the model on the meta device: shapes without memory. When it does not fit, looks for options that would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import (
    EMBEDDED,
    Model,
    SizeOptions,
    command,
    fail,
    flag,
    option,
    size,
    sizes,
)
from octavo.cli.terminal import in_bytes, short, tokens
from octavo.config import DTYPE_BYTES, ScheduleConfig
from octavo.errors import CheckpointError, ModelError, NotEnoughMemory

if TYPE_CHECKING:
    from octavo.memory import MemoryPlan


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
    options: SizeOptions,
) -> None:
    """Show what a model needs: weights, activations, KV cache, and how many sequences fit. Loads no weights."""
    wanted = sizes(lengths) if lengths else None
    shape = ModelDimensions(model, options.revision)
    case = PlannedCase.of(shape, options, device_memory)
    try:
        found: tuple[MemoryPlan, int] | None = case.solve(shape)
        ways: list[str] = []
    except NotEnoughMemory:
        found = None
        ways = list(ways_to_fit(shape, case))
    if found is not None:
        found = with_tiers(found[0], case, options, on_this_machine=device_memory is None), found[1]
    report = describe(model or EMBEDDED, shape, case, found, ways, wanted)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if found is None:
        raise typer.Exit(1)


# ---- the arithmetic ---------------------------------------------------------------------------------------


class ModelDimensions:
    """A model without its weights."""

    def __init__(self, model: str | None, revision: str | None):
        from octavo.model.load import open_checkpoint
        from octavo.model.tied import parse_checkpoint

        stored = model is not None and any(Path(model).expanduser().glob("*.safetensors"))
        try:  # how weights are stored is said where they are
            self.checkpoint = open_checkpoint(model, revision, weights=stored)
        except CheckpointError:
            self.checkpoint = open_checkpoint(model, revision, weights=False)
        self.cls, self.config = parse_checkpoint(self.checkpoint)
        self._measured: dict[tuple[str, str, str], tuple[int, int, str]] = {}

    def measure(self, dtype: str, quantization: str, kind: str) -> tuple[int, int, str]:
        """(parameters, bytes, dtype of KV where nobody says otherwise)"""
        import torch

        from octavo.memory import weight_bytes
        from octavo.model import quant
        from octavo.model.base import build, quantize
        from octavo.model.load import choose_formats
        from octavo.ops.reference import ReferenceOps

        key = dtype, quantization, kind
        if key not in self._measured:
            model = build(self.config, self.cls, ReferenceOps(), getattr(torch, dtype), "meta")
            parameters = sum(p.numel() for p in model.parameters())
            formats = choose_formats(quant.parse(quantization), self.checkpoint, kind)
            if formats is not None:
                quantize(model, formats, "meta")
            self._measured[key] = (
                parameters,
                weight_bytes(model),
                self._kv_dtype(dtype, kind, formats is not None),
            )
        return self._measured[key]

    def _kv_dtype(self, dtype: str, kind: str, quantized: bool) -> str:
        """Kernels that compute whole quantised layers on a CPU keep half precision."""
        if (
            kind != "cpu"
            or dtype != "float32"
            or not quantized
            or not self.config.architecture.endswith("ForCausalLM")
        ):
            return dtype
        from octavo.ops.cpu.thread_pool import workers

        c = self.config
        team = workers()
        whole = team is not None and all(
            n % team.step.LANES == 0 for n in (c.head_dim, c.hidden_size, c.intermediate_size)
        )
        return "float16" if whole else dtype


@dataclass(frozen=True)
class PlannedCase:
    """A device and the options on it, defaults filled in as LLM does."""

    kind: str  # "cuda" or "cpu"
    free: int  # before the weights are loaded
    total: int
    dtype: str
    quantization: str
    kv_cache_dtype: str
    utilization: float
    block_size: int
    num_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    staging: int = 0  # bytes that a second tier of KV takes of the device

    @classmethod
    def of(
        cls, shape: ModelDimensions, options: SizeOptions, device_memory: int | None
    ) -> PlannedCase:
        import torch

        from octavo.memory import BLOCK_SIZE, STAGING, available_memory, step_tokens

        if options.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
            fail(f"unknown device {options.device!r}: use auto, cpu or cuda")
        if device_memory is not None:
            kind = "cpu" if options.device == "cpu" else "cuda"
            free = total = device_memory
        else:
            has_gpu = torch.cuda.is_available()
            kind = (
                ("cuda" if has_gpu else "cpu")
                if options.device == "auto"
                else options.device.partition(":")[0]
            )
            if kind == "cuda" and not has_gpu:
                fail(
                    "this machine has no usable NVIDIA GPU: say how large a one to plan for, such as --device-memory 80G"
                )
            free, total = available_memory(
                torch.device(options.device if ":" in options.device else kind)
            )
        dtype = options.dtype
        if dtype == "auto":
            dtype = shape.config.dtype if kind == "cuda" else "float32"
        if dtype not in DTYPE_BYTES:
            raise ModelError(f"dtype is auto, {', '.join(DTYPE_BYTES)}, not {dtype!r}")
        parameters = shape.measure(dtype, options.quantization, kind)[0]
        budget = options.max_num_batched_tokens or step_tokens(
            kind, parameters, options.max_num_seqs
        )
        return cls(
            kind, free, total, dtype, options.quantization, options.kv_cache_dtype, options.gpu_memory_utilization,
            options.block_size or BLOCK_SIZE[kind], options.num_blocks, options.max_num_seqs, budget, options.max_model_len,
            STAGING[kind] if options.kv_host_gib or options.kv_disk is not None else 0,
        )  # fmt: skip

    def weights(self, shape: ModelDimensions) -> int:
        return shape.measure(self.dtype, self.quantization, self.kind)[1]

    def kv_dtype(self, shape: ModelDimensions) -> str:
        from octavo.memory import parse_kv_dtype

        return (
            parse_kv_dtype(self.kv_cache_dtype)
            or shape.measure(self.dtype, self.quantization, self.kind)[2]
        )

    def kv_per_token(self, shape: ModelDimensions) -> int:
        return shape.config.kv_bytes_per_token(self.kv_dtype(shape))

    def activations(self, shape: ModelDimensions) -> int:
        from octavo.memory import activation_bytes, graph_bytes
        from octavo.runner.shapes import held_logits

        step = activation_bytes(
            shape.config, ScheduleConfig(self.max_num_seqs, self.max_num_batched_tokens), self.dtype
        )
        graphs = (
            held_logits(self.max_num_seqs, self.max_num_batched_tokens)
            if self.kind == "cuda"
            else 0
        )
        return step + graph_bytes(shape.config, graphs, self.dtype)

    def solve(self, shape: ModelDimensions) -> tuple[MemoryPlan, int]:
        """The plan and the context length, or NotEnoughMemory."""
        from octavo.memory import MemoryPlan, kv_share, size_pool

        weights = self.weights(shape)
        activations = self.activations(shape)
        budget = kv_share(
            self.kind, self.free - weights, self.total, self.utilization, activations + self.staging
        )
        cache, length = size_pool(
            shape.config,
            self.block_size,
            self.kv_dtype(shape),
            budget,
            self.max_num_seqs,
            self.max_model_len,
            self.num_blocks,
        )
        return MemoryPlan(
            weights, activations, self.kv_per_token(shape), cache.block_size, cache.num_blocks
        ), length

    def least_memory(self, shape: ModelDimensions) -> int:
        """Free bytes that a device would need for this."""
        from octavo.memory import CPU_KV_SHARE

        blocks = max(1, -(-((self.max_model_len or 1) - 1) // self.block_size))
        kv = blocks * self.block_size * self.kv_per_token(shape)
        fixed = self.weights(shape) + self.activations(shape) + self.staging
        if self.kind == "cpu":
            return fixed + int(kv / CPU_KV_SHARE) + 1
        return int((fixed + kv + self.total - self.free) / self.utilization) + 1


def with_tiers(
    memory: MemoryPlan, case: PlannedCase, options: SizeOptions, on_this_machine: bool
) -> MemoryPlan:
    """The plan with what was asked of host memory and disk, or NotEnoughMemory. Another machine's host memory is not known."""
    import torch

    from octavo.memory import available_memory, check_disk, size_tiers

    spare = available_memory(torch.device("cpu"))[0] if on_this_machine else 2**62
    if case.kind == "cpu":
        spare = min(spare, case.free) - memory.weights - memory.kv
    check_disk(options.kv_disk, options.kv_disk_gib)
    host, disk = size_tiers(
        options.kv_host_gib, options.kv_disk, options.kv_disk_gib, memory.block_bytes, spare
    )
    return replace(memory, host_blocks=host, disk=disk)


def ways_to_fit(shape: ModelDimensions, case: PlannedCase) -> Iterator[str]:
    """Options that would each make it fit; where none does alone, all together; and the device that needs none of them."""
    changes = []
    if case.kind == "cuda" and case.utilization < 0.95:
        changes.append(replace(case, utilization=0.95))
    if DTYPE_BYTES[case.dtype] > 2:
        changes.append(replace(case, dtype="bfloat16"))
    if case.quantization in ("auto", "none"):
        changes += [replace(case, quantization="int8"), replace(case, quantization="int4-g128")]
    if case.kv_cache_dtype == "auto" and shape.config.head_dim % 4 == 0:
        changes.append(replace(case, kv_cache_dtype="int8"))
    if case.max_model_len is not None:
        try:
            changes.append(
                replace(case, max_model_len=replace(case, max_model_len=None).solve(shape)[1])
            )
        except NotEnoughMemory:
            changes.append(replace(case, max_model_len=min(case.max_model_len, 2048)))
    small = case
    while small.max_num_batched_tokens > 256:
        least = small.max_num_batched_tokens // 2
        small = replace(
            small, max_num_batched_tokens=least, max_num_seqs=min(small.max_num_seqs, least // 8)
        )
        if fits(small, shape):
            break
    changes.append(small)
    alone = [change for change in changes if fits(change, shape)]
    if not alone:
        together = asdict(case)
        for change in changes:
            together |= {
                name: value
                for name, value in asdict(change).items()
                if value != getattr(case, name)
            }
        alone = [change for change in (PlannedCase(**together),) if fits(change, shape)]
    for change in alone:
        yield spelled(case, change)
    yield f"a device with {in_bytes(case.least_memory(shape))}: --device-memory {-(-case.least_memory(shape) // 2**30)}G"


def fits(case: PlannedCase, shape: ModelDimensions) -> bool:
    try:
        case.solve(shape)
    except NotEnoughMemory:
        return False
    return True


def spelled(case: PlannedCase, change: PlannedCase) -> str:
    """The options in which two cases differ."""
    names = {"utilization": "gpu-memory-utilization", "quantization": "quant"}
    new = {name: value for name, value in asdict(change).items() if value != getattr(case, name)}
    return " ".join(
        f"--{names.get(name, name.replace('_', '-'))} {value}" for name, value in new.items()
    )


# ---- the report -------------------------------------------------------------------------------------------


def describe(
    name: str,
    shape: ModelDimensions,
    case: PlannedCase,
    found: tuple[MemoryPlan, int] | None,
    ways: list[str],
    lengths: list[int] | None,
) -> dict[str, Any]:
    parameters, weights, _ = shape.measure(case.dtype, case.quantization, case.kind)
    report: dict[str, Any] = {
        "model": name,
        "architecture": shape.config.architecture,
        "parameters": parameters,
        "dtype": case.dtype,
        "quantization": case.quantization,
        "device": case.kind,
        "device_memory": case.total,
        "device_memory_free": case.free,
        "gpu_memory_utilization": case.utilization if case.kind == "cuda" else None,
        "max_num_seqs": case.max_num_seqs,
        "max_num_batched_tokens": case.max_num_batched_tokens,
        "weights": weights,
        "activations": case.activations(shape),
        "kv_dtype": case.kv_dtype(shape),
        "kv_bytes_per_token": case.kv_per_token(shape),
        "block_size": case.block_size,
        "model_context": shape.config.max_position,
        "fits": found is not None,
    }
    if found is None:
        return report | {"short_by": case.least_memory(shape) - case.free, "ways_to_fit": ways}
    memory, context = found
    lengths = lengths or [n for n in (2**10, 2**12, 2**14, 2**16) if n < context] + [context]
    return report | {
        "num_blocks": memory.num_blocks,
        "kv_pool": memory.kv,
        "kv_tokens": memory.kv_tokens,
        "kv_host": memory.host,
        "kv_disk": memory.disk,
        "max_model_len": context,
        "concurrency": {str(n): memory.concurrency(n) if n <= context else 0 for n in lengths},
    }


def show(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    r = report
    console = Console(highlight=False)
    console.print(
        f"[bold]{r['model']}[/bold]: {short(r['parameters'])} parameters, {r['architecture']}, {r['dtype']}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    used = (
        f"{r['gpu_memory_utilization']:.0%} of the GPU may be used"
        if r["device"] == "cuda"
        else "on the CPU"
    )
    table.add_row("memory free", in_bytes(r["device_memory_free"]), used)
    table.add_row("weights", in_bytes(r["weights"]))
    step = f"a step of {r['max_num_batched_tokens']:,} tokens, {r['max_num_seqs']:,} sequences"
    table.add_row("activations", in_bytes(r["activations"]), step)
    table.add_row("KV of a token", in_bytes(r["kv_bytes_per_token"]), r["kv_dtype"])
    if r["fits"]:
        table.add_row(
            "KV pool",
            in_bytes(r["kv_pool"]),
            f"{r['num_blocks']:,} blocks of {r['block_size']} tokens",
        )
        table.add_row("tokens in the pool", f"{r['kv_tokens']:,}")
        for tier, name in (("kv_host", "KV in host memory"), ("kv_disk", "KV on disk")):
            if r[tier]:
                table.add_row(
                    name, in_bytes(r[tier]), f"{r[tier] // r['kv_bytes_per_token']:,} tokens"
                )
        table.add_row(
            "longest sequence",
            f"{r['max_model_len']:,}",
            f"the model's own limit is {r['model_context']:,}",
        )
    console.print(table)
    if not r["fits"]:
        console.print(
            f"[bold red]It does not fit[/bold red]: {in_bytes(r['short_by'])} are missing. What would do:"
        )
        for way in r["ways_to_fit"]:
            console.print(f"  {way}", soft_wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("sequences of")
    table.add_column("fit at once", justify="right")
    table.add_column("")
    for length, count in r["concurrency"].items():
        why = "longer than the longest sequence" if int(length) > r["max_model_len"] else ""
        if count > r["max_num_seqs"]:
            why = f"{r['max_num_seqs']:,} of them computed at once: --max-num-seqs"
        table.add_row(f"{tokens(int(length))} tokens", f"{count:,}", f"[dim]{why}[/dim]")
    console.print(table)
