"""`octavo plan`: what a model takes and how much KV fits beside it, from its config alone.

The sizes are those that an engine with the same options has: both come from `resolve`
(octavo/assemble.py). The model is built on the meta device, which has shapes and no memory. If the
model does not fit, the command looks for options with which it would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import Model, command, fail, flag, option, size, sizes
from octavo.cli.terminal import in_bytes, say, short, table, tokens
from octavo.config import DTYPE_BYTES, EMBEDDED, KV_CODES
from octavo.core.draft_methods import describe as describe_speculative
from octavo.engine_options import EngineOptions
from octavo.errors import CheckpointError, NotEnoughMemory
from octavo.option_declaration import flag_of

if TYPE_CHECKING:
    from octavo.assemble import DeviceFacts, DraftFacts, ModelFacts, Requirements, Resolved
    from octavo.config import SpeculativeConfig
    from octavo.model.base import CausalLM

UNKNOWN_HOST_MEMORY = 2**62  # bytes: the host memory of another machine is not checked


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
    from octavo.assemble import resolve, resolve_pool

    wanted = sizes(lengths) if lengths else None
    planner = Planner(
        ModelOutline(model, options.revision, options.hf_overrides),
        TargetDevice.of(options, device_memory),
    )
    try:
        resolve_pool(options, *planner.facts(options))
    except NotEnoughMemory:
        report = planner.describe(options, model or EMBEDDED)
        report |= planner.describe_lack(options)
    else:
        found = resolve(options, *planner.facts(options))
        report = planner.describe(options, model or EMBEDDED)
        report |= describe_fit(found, wanted)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if not report["fits"]:
        raise typer.Exit(1)


# ---- facts ---------------------------------------------------------------------------------------


class ModelOutline:
    """A model without its weights."""

    def __init__(
        self,
        model: str | None,
        revision: str | None,
        hf_overrides: dict[str, Any] | None = None,
    ):
        from octavo.model.load import open_checkpoint
        from octavo.model.tied import parse_checkpoint

        stored = model is not None and any(Path(model).expanduser().glob("*.safetensors"))
        try:  # The files of weights say in which format they are stored.
            self.checkpoint = open_checkpoint(model, revision, weights=stored)
        except CheckpointError:
            self.checkpoint = open_checkpoint(model, revision, weights=False)
        self.checkpoint.config = self.checkpoint.config | (hf_overrides or {})
        self.model_class, self.config = parse_checkpoint(self.checkpoint)
        self._facts: dict[tuple[str, str, str, int], ModelFacts] = {}

    def facts(self, options: EngineOptions, kind: str) -> ModelFacts:
        """Return the facts of the model, or of the largest part that a rank holds."""
        key = (options.dtype, options.quantization, kind, options.tensor_parallel_size)
        if key not in self._facts:
            draft = self._measure_draft(options.speculative_config, options, kind)
            self._facts[key] = replace(self._measure(options, kind), draft=draft)
        return self._facts[key]

    def _measure_draft(
        self, speculative: SpeculativeConfig | None, options: EngineOptions, kind: str
    ) -> DraftFacts | None:
        """Measure a draft head or a draft model."""
        import torch

        from octavo.assemble import DraftFacts, find_draft_head
        from octavo.model.draft_head import outline_draft_head
        from octavo.model.load import open_checkpoint
        from octavo.ops.backends import select
        from octavo.ops.reference import ReferenceOps

        if speculative is None or speculative.method not in ("head", "draft_model"):
            return None
        if speculative.method == "draft_model":
            whole = replace(options, tensor_parallel_size=1)  # every rank has all of it
            model = ModelOutline(speculative.model, None)._measure(whole, kind)
            kv_per_token = model.config.kv_bytes_per_token(model.kv_dtype)
            return DraftFacts(model.config.max_position, model.weights, kv_per_token)
        checkpoint = open_checkpoint(find_draft_head(self.checkpoint, speculative))
        ops = select("cpu") if kind == "cpu" else ReferenceOps()
        dtype = getattr(torch, self._measure(options, kind).dtype)
        head = outline_draft_head(checkpoint, self.config, ops, dtype)
        return DraftFacts.of(head)

    def _measure(self, options: EngineOptions, kind: str) -> ModelFacts:
        import torch

        from octavo.assemble import ModelFacts, resolve_dtype
        from octavo.model import quant
        from octavo.model.load import (
            check_divisible,
            check_stored,
            choose_dtype,
            choose_formats,
            largest_group,
            outline,
        )
        from octavo.model.tensor_parallel import divide_all
        from octavo.model.weight_summary import summarize_weights
        from octavo.ops.backends import select
        from octavo.ops.reference import ReferenceOps

        dtype = choose_dtype(resolve_dtype(options.dtype, kind), self.config)
        formats = choose_formats(
            quant.parse(check_stored(options.quantization, self.checkpoint)), self.checkpoint, kind
        )
        # The kernels for a GPU cannot be imported on every machine.
        ops = select("cpu") if kind == "cpu" else ReferenceOps()
        num_ranks = options.tensor_parallel_size
        if num_ranks > 1:
            check_divisible(self.model_class, self.config)
        group_size = largest_group(
            quant.parse(check_stored(options.quantization, self.checkpoint)), self.checkpoint
        )
        models = [
            outline(config, self.model_class, ops, getattr(torch, dtype), formats)
            for config in divide_all(self.config, num_ranks, group_size)
        ]
        self.weights_summary = summarize_weights(models[0], self.checkpoint)
        parts = [ModelFacts.of(model) for model in models]
        # Rank 0 has the most KV heads. Another rank may have more weights.
        facts = replace(parts[0], weights=max(part.weights for part in parts))
        if kind == "cuda":
            # The kernels read plain KV only in the data type of the activations.
            return replace(facts, kv_dtypes=(dtype, *KV_CODES))
        is_fused = num_ranks == 1 and self._computes_whole_layers(models[0])
        if dtype == "float32" and is_fused:
            return replace(facts, kv_dtype="float16")
        return facts

    def _computes_whole_layers(self, model: CausalLM) -> bool:
        """Whether the CPU kernels compute whole quantised layers, and then keep KV in float16."""
        from octavo.model.decoder import Decoder
        from octavo.ops.cpu.cpu_decoder import are_whole_vectors
        from octavo.ops.cpu.thread_pool import thread_pool
        from octavo.ops.weight import QuantWeight

        config = self.config
        pool = thread_pool()
        if pool is None or not isinstance(model, Decoder):
            return False
        if not any(isinstance(module, QuantWeight) for module in model.layers.modules()):
            return False
        widths = (config.head_dim, config.hidden_size, config.intermediate_size)
        return are_whole_vectors(pool.kernels.LANES, widths)


@dataclass(frozen=True)
class TargetDevice:
    """The device to plan for, before any weights are loaded. Sizes are in bytes, for one rank."""

    kind: str  # "cuda" or "cpu"
    free: int
    total: int
    host_free: int
    num_ranks: int = 1

    @classmethod
    def of(cls, options: EngineOptions, device_memory: int | None) -> TargetDevice:
        """Every rank has a GPU of its own, and the ranks share the memory of a CPU."""
        whole = cls.measure(options, device_memory)
        num_ranks = options.tensor_parallel_size
        sharing = num_ranks if whole.kind == "cpu" else 1
        return cls(
            kind=whole.kind,
            free=whole.free // sharing,
            total=whole.total // sharing,
            host_free=whole.host_free // num_ranks,
            num_ranks=num_ranks,
        )

    @classmethod
    def measure(cls, options: EngineOptions, device_memory: int | None) -> TargetDevice:
        import torch

        from octavo.memory import available_memory

        kind = options.device.partition(":")[0]
        if kind not in ("auto", "cpu", "cuda"):
            fail(f"unknown device {options.device!r}: use auto, cpu or cuda")
        if device_memory is not None:
            kind = "cpu" if kind == "cpu" else "cuda"
            return cls(kind, device_memory, device_memory, UNKNOWN_HOST_MEMORY)
        has_gpu = torch.cuda.is_available()
        if kind == "auto":
            kind = "cuda" if has_gpu else "cpu"
        if kind == "cuda" and not has_gpu:
            fail(
                "this machine has no usable NVIDIA GPU: say how large a one to plan for, such as "
                "--device-memory 80G"
            )
        device = torch.device(options.device if ":" in options.device else kind)
        free, total = available_memory(device)
        return cls(kind, free, total, available_memory(torch.device("cpu"))[0])

    def after_loading(self, weights: int) -> DeviceFacts:
        from octavo.assemble import DeviceFacts

        free = self.free - weights
        return DeviceFacts(
            kind=self.kind,
            free=free,
            total=self.total,
            host_free=free if self.kind == "cpu" else self.host_free,
            graphs=self.kind == "cuda" and self.num_ranks == 1,
        )


# ---- what would fit ------------------------------------------------------------------------------


class Planner:
    """A model and the device that is to run it."""

    def __init__(self, outline: ModelOutline, target: TargetDevice):
        self.outline = outline
        self.target = target

    def facts(self, options: EngineOptions) -> tuple[ModelFacts, DeviceFacts]:
        model = self.outline.facts(options, self.target.kind)
        return model, self.target.after_loading(model.all_weights)

    def requirements(self, options: EngineOptions) -> Requirements:
        from octavo.assemble import require

        return require(options, *self.facts(options))

    def max_model_len(self, options: EngineOptions) -> int | None:
        """Return the context length, or None if the model does not fit."""
        from octavo.assemble import resolve_pool

        try:
            return resolve_pool(options, *self.facts(options)).schedule.max_model_len
        except NotEnoughMemory:
            return None

    def fits(self, options: EngineOptions) -> bool:
        return self.max_model_len(options) is not None

    def least_memory(self, options: EngineOptions) -> int:
        """Return the free bytes that a device would need."""
        from octavo.memory import CPU_KV_SHARE

        needs = self.requirements(options)
        target = self.target
        blocks = max(1, -(-((options.max_model_len or 1) - 1) // needs.block_size))
        kv = blocks * needs.block_size * (needs.kv_per_token + needs.draft_kv_per_token)
        fixed = needs.weights + needs.activations + needs.staging
        if target.kind == "cpu":
            return fixed + int(kv / CPU_KV_SHARE) + 1
        used = target.total - target.free
        return int((fixed + kv + used) / options.gpu_memory_utilization) + 1

    def ways_to_fit(self, options: EngineOptions) -> Iterator[str]:
        """Yield options that would each make the model fit. If none does alone, yield all of them
        together. The last line is the device that needs none of them."""
        changes = [*self.single_changes(options), self.smaller_steps(options)]
        alone = [change for change in changes if self.fits(replace(options, **change))]
        if not alone:
            together: dict[str, Any] = {}
            for change in changes:
                together |= change
            if self.fits(replace(options, **together)):
                alone = [together]
        for change in alone:
            yield " ".join(
                f"{flag_of(EngineOptions, name)} {value}" for name, value in change.items()
            )
        needed = self.least_memory(options)
        yield f"a device with {in_bytes(needed)}: --device-memory {-(-needed // 2**30)}G"

    def single_changes(self, options: EngineOptions) -> Iterator[dict[str, Any]]:
        config = self.outline.config
        if self.target.kind == "cuda" and options.gpu_memory_utilization < 0.95:
            yield {"gpu_memory_utilization": 0.95}
        if DTYPE_BYTES[self.facts(options)[0].dtype] > 2:
            yield {"dtype": "bfloat16"}
        if options.quantization in ("auto", "none"):
            yield {"quantization": "int8"}
            yield {"quantization": "int4-g128"}
        if options.kv_cache_dtype == "auto" and config.head_dim % 4 == 0:
            yield {"kv_cache_dtype": "int8"}
        if options.max_model_len is not None:
            longest = self.max_model_len(replace(options, max_model_len=None))
            yield {"max_model_len": longest or min(options.max_model_len, 2048)}

    def smaller_steps(self, options: EngineOptions) -> dict[str, Any]:
        """Return the largest steps that fit, or the smallest steps that make sense."""
        tokens = self.requirements(options).schedule.max_num_batched_tokens
        slots = options.max_num_seqs
        change: dict[str, Any] = {}
        while tokens > 256:
            tokens //= 2
            slots = min(slots, tokens // 8)
            change = {"max_num_batched_tokens": tokens, "max_num_seqs": slots}
            if self.fits(replace(options, **change)):
                break
        return change

    # ---- the report ------------------------------------------------------------------------------

    def describe(self, options: EngineOptions, name: str) -> dict[str, Any]:
        """Describe the model, the device and what the options ask for."""
        model = self.outline.facts(options, self.target.kind)
        whole = self.outline.facts(replace(options, tensor_parallel_size=1), self.target.kind)
        needs = self.requirements(options)
        on_gpu = self.target.kind == "cuda"
        speculative = needs.schedule.speculative
        return {
            "model": name,
            "architecture": model.config.architecture,
            "parameters": whole.parameters,
            "tensor_parallel_size": options.tensor_parallel_size,
            "dtype": model.dtype,
            "weight_format": self.outline.weights_summary,
            "quantization": options.quantization,
            "device": self.target.kind,
            "device_memory": self.target.total,
            "device_memory_free": self.target.free,
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

    def describe_lack(self, options: EngineOptions) -> dict[str, Any]:
        return {
            "fits": False,
            "short_by": self.least_memory(options) - self.target.free,
            "ways_to_fit": list(self.ways_to_fit(options)),
        }


def describe_fit(found: Resolved, lengths: list[int] | None) -> dict[str, Any]:
    memory = found.memory
    context = found.schedule.max_model_len
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
        say(f"[bold red]It does not fit[/bold red]: {missing} are missing. What would do:")
        for way in report["ways_to_fit"]:
            say(f"  {way}")
        return
    rows = []
    for length, count in report["concurrency"].items():
        why = ""
        if int(length) > report["max_model_len"]:
            why = "longer than the longest sequence"
        if count > report["max_num_seqs"]:
            why = f"{report['max_num_seqs']:,} of them computed at once: --max-num-seqs"
        rows.append((f"{tokens(int(length))} tokens", f"{count:,}", why))
    table(None, ("sequences of", "fit at once", ""), rows, left=(0, 2), dim=(2,))


def memory_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield name, amount and remark of each part of the memory."""
    per_token = report["kv_bytes_per_token"]
    used = "on the CPU"
    if report["device"] == "cuda":
        used = f"{report['gpu_memory_utilization']:.0%} of the GPU may be used"
    yield "memory free", in_bytes(report["device_memory_free"]), used
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
