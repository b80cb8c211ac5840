"""Checks how much memory a model takes before any weights are read, and finds options that fit.

    ModelOutline    a model without its weights
    TargetDevice    the device that is to run it, before the weights are loaded
    Planner         both: does the model fit, and what would fit if it does not
    check_memory    refuses a model that does not fit, before it is loaded

The sizes are those that an engine with the same options has: both come from `resolve`
(octavo/assemble.py). The model is built on the meta device, which has shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from octavo.assemble import (
    DeviceFacts,
    DraftFacts,
    ModelFacts,
    Requirements,
    find_draft_head,
    require,
    resolve_dtype,
    resolve_pool,
    settle_speculation,
)
from octavo.config import DTYPE_BYTES, KV_CODES, SpeculativeConfig
from octavo.engine_options import EngineOptions
from octavo.errors import CheckpointError, InvalidRequest, NotEnoughMemory
from octavo.memory import CPU_KV_SHARE, available_memory
from octavo.model import quant
from octavo.model.base import CausalLM
from octavo.model.checkpoint import Checkpoint
from octavo.model.decoder import Decoder
from octavo.model.draft_head import outline_draft_head
from octavo.model.load import (
    check_divisible,
    check_stored,
    choose_dtype,
    choose_formats,
    largest_group,
    open_checkpoint,
    outline,
)
from octavo.model.tensor_parallel import divide_all
from octavo.model.tied_weights import parse_checkpoint
from octavo.model.weight_summary import summarize_weights
from octavo.ops.backends import select
from octavo.ops.cpu.cpu_decoder import are_whole_vectors
from octavo.ops.cpu.thread_pool import thread_pool
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight
from octavo.option_declaration import flag_of

UNKNOWN_HOST_MEMORY = 2**62  # bytes: the host memory of another machine is not checked


# ---- facts ---------------------------------------------------------------------------------------


class ModelOutline:
    """A model without its weights."""

    def __init__(self, checkpoint: Checkpoint, class_name: str | None = None):
        self.checkpoint = checkpoint
        self.model_class, self.config = parse_checkpoint(checkpoint, class_name)
        self.weights_summary = ""
        self._facts: dict[tuple[Any, ...], ModelFacts] = {}

    @classmethod
    def read(cls, model: str | None, options: EngineOptions) -> ModelOutline:
        """Read what is needed of a model's files."""
        stored = model is not None and any(Path(model).expanduser().glob("*.safetensors"))
        try:  # The files of weights say in which format they are stored.
            checkpoint = open_checkpoint(model, options.revision, weights=stored)
        except CheckpointError:
            checkpoint = open_checkpoint(model, options.revision, weights=False)
        checkpoint.config = checkpoint.config | (options.hf_overrides or {})
        return cls(checkpoint, options.model_class)

    def facts(self, options: EngineOptions, kind: str) -> ModelFacts:
        """Return the facts of the model, or of the largest part that a rank holds."""
        speculative = settle_speculation(options, self.checkpoint, kind)
        key = (options.dtype, options.quantization, kind, options.tensor_parallel_size, speculative)
        if key not in self._facts:
            draft = self._measure_draft(speculative, options, kind)
            self._facts[key] = replace(self._measure(options, kind), draft=draft)
        return self._facts[key]

    def _measure_draft(
        self, speculative: SpeculativeConfig | None, options: EngineOptions, kind: str
    ) -> DraftFacts | None:
        """Measure a draft head or a draft model."""
        if speculative is None or speculative.method not in ("head", "draft_model"):
            return None
        if speculative.method == "draft_model":
            whole = replace(options, tensor_parallel_size=1)  # every rank has all of it
            model = ModelOutline.read(speculative.model, EngineOptions())._measure(whole, kind)
            kv_per_token = model.config.kv_bytes_per_token(model.kv_dtype)
            return DraftFacts(model.config.max_position, model.weights, kv_per_token)
        checkpoint = open_checkpoint(find_draft_head(self.checkpoint, speculative))
        ops = select("cpu") if kind == "cpu" else ReferenceOps()
        dtype = getattr(torch, self._measure(options, kind).dtype)
        head = outline_draft_head(checkpoint, self.config, ops, dtype)
        return DraftFacts.of(head)

    def _measure(self, options: EngineOptions, kind: str) -> ModelFacts:
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
        kind = options.device.partition(":")[0]
        if kind not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(
                f"unknown device {options.device!r}: use auto, cpu or cuda", "device"
            )
        if device_memory is not None:
            kind = "cpu" if kind == "cpu" else "cuda"
            return cls(kind, device_memory, device_memory, UNKNOWN_HOST_MEMORY)
        has_gpu = torch.cuda.is_available()
        if kind == "auto":
            kind = "cuda" if has_gpu else "cpu"
        if kind == "cuda" and not has_gpu:
            raise InvalidRequest(
                "this machine has no usable NVIDIA GPU: give the memory of the GPU to plan for, as "
                "in --device-memory 80G",
                "device",
            )
        device = torch.device(options.device if ":" in options.device else kind)
        free, total = available_memory(device)
        return cls(kind, free, total, available_memory(torch.device("cpu"))[0])

    def after_loading(self, weights: int) -> DeviceFacts:
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
        return require(options, *self.facts(options))

    def max_model_len(self, options: EngineOptions) -> int | None:
        """Return the context length, or None if the model does not fit."""
        try:
            return resolve_pool(options, *self.facts(options)).schedule.max_model_len
        except NotEnoughMemory:
            return None

    def fits(self, options: EngineOptions) -> bool:
        return pool_fits(options, *self.facts(options))

    def least_memory(self, options: EngineOptions) -> int:
        """Return the free bytes that a device would need."""
        needs = self.requirements(options)
        target = self.target
        blocks = options.num_gpu_blocks_override
        if blocks is None:
            blocks = max(1, -(-((options.max_model_len or 1) - 1) // needs.block_size))
        kv = blocks * needs.block_size * (needs.kv_per_token + needs.draft_kv_per_token)
        fixed = needs.weights + needs.activations + needs.staging
        if target.kind == "cpu":
            return fixed + int(kv / CPU_KV_SHARE) + 1
        used = target.total - target.free
        return int((fixed + kv + used) / options.gpu_memory_utilization) + 1

    def changes_to_fit(self, options: EngineOptions) -> list[dict[str, Any]]:
        """Return changes of options that would each make the model fit. If none does alone, the
        only change is all of them together, if that fits."""
        changes = [*self.single_changes(options), self.smaller_steps(options)]
        alone = [change for change in changes if self.fits(replace(options, **change))]
        if not alone:
            together: dict[str, Any] = {}
            for change in changes:
                together |= change
            if self.fits(replace(options, **together)):
                alone = [together]
        return alone

    def refusal(self, options: EngineOptions) -> str:
        """Return a message: what the model needs, what there is, and which options would fit."""
        needs = self.requirements(options)
        kv = "one KV block"
        if options.num_gpu_blocks_override is not None:
            kv = f"{options.num_gpu_blocks_override:,} KV blocks (--num-blocks)"
        elif options.max_model_len is not None:
            kv = f"KV for {options.max_model_len:,} tokens"
        problem = (
            f"{self.outline.checkpoint.source} does not fit: it needs "
            f"{gibibytes(self.least_memory(options))} of {self.target.kind} memory (weights "
            f"{gibibytes(needs.weights)}, activations {gibibytes(needs.activations)}, and {kv}), "
            f"and {gibibytes(self.target.free)} are free"
        )
        suggestions = [
            f"{', '.join(f'{name}={value!r}' for name, value in change.items())} "
            f"({flags_of(change)})"
            for change in self.changes_to_fit(options)
        ]
        if not suggestions:
            return f"{problem}. No option makes it fit: use a smaller model, or free memory"
        return f"{problem}. It would fit with {', or with '.join(suggestions)}"

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
        if options.num_gpu_blocks_override is not None:
            room = max_blocks(options, *self.facts(options))
            if room > 0:
                yield {"num_gpu_blocks_override": room}
        elif options.max_model_len is not None:
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


def pool_fits(options: EngineOptions, model: ModelFacts, device: DeviceFacts) -> bool:
    """Return whether a step and the KV pool fit beside the weights."""
    try:
        resolve_pool(options, model, device)
    except NotEnoughMemory:
        return False
    # resolve_pool() does not compare a given number of blocks with the memory.
    num_blocks = options.num_gpu_blocks_override
    return num_blocks is None or num_blocks <= max_blocks(options, model, device)


def max_blocks(options: EngineOptions, model: ModelFacts, device: DeviceFacts) -> int:
    """Return how many KV blocks fit beside the weights and a step."""
    needs = require(options, model, device)
    per_token = needs.kv_per_token + needs.draft_kv_per_token
    room = device.free - needs.activations - needs.staging
    return room // (needs.block_size * per_token)


def flags_of(change: dict[str, Any]) -> str:
    """Return changed options as a user writes them."""
    return " ".join(f"{flag_of(EngineOptions, name)} {value}" for name, value in change.items())


def gibibytes(count: int) -> str:
    return f"{max(count, 0) / 2**30:,.1f} GiB"


# ---- check before loading ------------------------------------------------------------------------


def check_memory(options: EngineOptions) -> Callable[[CausalLM, Checkpoint], None]:
    """Return a function for load_model(), which calls it before it reads weights.

    The function raises NotEnoughMemory if the model, a step and the smallest useful KV pool do not
    fit. An outline of the model is there already, and is enough in most cases."""

    def check(planned: CausalLM, checkpoint: Checkpoint) -> None:
        target = TargetDevice.of(options, None)
        if fits_as_planned(planned, options, target):
            return
        planner = Planner(ModelOutline(checkpoint, options.model_class), target)
        if not planner.fits(options):
            raise NotEnoughMemory(planner.refusal(options))

    return check


def fits_as_planned(planned: CausalLM, options: EngineOptions, target: TargetDevice) -> bool:
    """Return whether an outline fits. False may also mean that more has to be known: about a
    drafter, about other ranks, or that the KV of a fused decoder is smaller."""
    speculative = options.speculative_config
    if speculative is not None and speculative.method in ("head", "draft_model"):
        return False
    if options.tensor_parallel_size > 1:
        return False
    model = ModelFacts.of(planned)
    return pool_fits(options, model, target.after_loading(model.weights))
