"""From options to an engine: load the model, resolve the options, build what runs.

    load           options -> a model on its device
    resolve        options, facts of the model, facts of the device -> every size and every default
    build_runner   a model, what was resolved -> KV store, tiers, runner
    EngineFactory  a runner -> scheduler and engine

`resolve` is arithmetic: it allocates nothing and touches no device. LLM calls it for the model that
it has loaded, and `octavo plan` for a model without weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.config import (
    KV_CODES,
    CacheConfig,
    ModelConfig,
    ScheduleConfig,
    SpeculativeConfig,
    VllmConfig,
)
from octavo.core.bounded_kv import check_kv_eviction
from octavo.core.engine import Engine
from octavo.core.policy import find_policy
from octavo.core.scheduler import Scheduler
from octavo.core.trace import Recorder
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest, ModelError, NotEnoughMemory
from octavo.memory import (
    BLOCK_SIZE,
    KV_BUDGET,
    STAGING,
    MemoryPlan,
    activation_bytes,
    available_memory,
    default_piggyback_tokens,
    graph_bytes,
    kv_share,
    parameter_count,
    size_pool,
    size_tiers,
    step_tokens,
    weight_bytes,
)
from octavo.model import embedded
from octavo.model.base import CausalLM
from octavo.model.checkpoint import Checkpoint
from octavo.model.draft_head import DraftHead, load_draft_head
from octavo.model.fingerprint import fingerprint
from octavo.model.load import LoadOptions, load_model
from octavo.ops.backends import OperatorChoice, select
from octavo.ops.collectives import Collectives, SingleRank
from octavo.ops.kv import CODES, dtype_name
from octavo.runner.canary import Canary
from octavo.runner.disk import Disk
from octavo.runner.drafter import Drafter, DraftModel, EarlyExit
from octavo.runner.graph_shapes import RunnerLimits, held_logits
from octavo.runner.head_drafter import HeadDrafter
from octavo.runner.kvstore import KVStore
from octavo.runner.logits_processors import LogitsPipeline, load_processors
from octavo.runner.ranks import RankedRunner, Ranks
from octavo.runner.runner import Runner
from octavo.runner.tier_store import TierStore
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
# The vocabulary of a model is often padded to a round number: by 2% in Phi's, less in others'.
PADDED_VOCABULARY = 0.8
ModelSource = str | Path | dict[str, Any] | None  # a path or name, a config, or the embedded model
Progress = bool | Callable[[float], None]  # show a bar, or call with the fraction that is loaded


# ---- facts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftFacts:
    """The facts about a draft head or a draft model that `resolve` needs."""

    max_position: int
    weights: int  # bytes
    kv_per_token: int  # bytes

    @classmethod
    def of(cls, drafter: CausalLM) -> DraftFacts:
        """Return the facts of a drafter, which may be on the meta device."""
        return cls(
            max_position=drafter.config.max_position,
            weights=weight_bytes(drafter),
            kv_per_token=drafter.config.kv_bytes_per_token(dtype_name(drafter.kv_dtype)),
        )


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that `resolve` needs."""

    config: ModelConfig
    parameters: int
    weights: int  # bytes
    dtype: str  # type of activations
    kv_dtype: str  # type of the KV cache with kv_cache_dtype "auto"
    kv_dtypes: tuple[str, ...]  # those that the device's kernels read
    moves_keys: bool  # a cached key can be moved to another position
    draft: DraftFacts | None = None  # facts about a model that drafts for it

    @classmethod
    def of(cls, model: CausalLM, drafter: CausalLM | None = None) -> ModelFacts:
        """Return the facts of a model, which may be on the meta device."""
        return cls(
            config=model.config,
            parameters=parameter_count(model),
            weights=weight_bytes(model),
            dtype=dtype_name(model.dtype),
            kv_dtype=dtype_name(model.kv_dtype),
            kv_dtypes=tuple(dtype_name(dtype) for dtype in model.ops.kv_dtypes(model.dtype)),
            moves_keys=model.rope_table_for_shift(0) is not None,
            draft=None if drafter is None else DraftFacts.of(drafter),
        )

    @property
    def all_weights(self) -> int:
        """Bytes of the model and of what drafts for it."""
        return self.weights + (0 if self.draft is None else self.draft.weights)


@dataclass(frozen=True)
class DeviceFacts:
    """The facts about a device that `resolve` needs. Sizes are in bytes."""

    kind: str  # "cuda" or "cpu"
    free: int  # free bytes after the weights are loaded
    total: int
    host_free: int  # host memory; on a CPU the same as `free`
    graphs: bool = False  # steps can be captured as CUDA graphs

    @classmethod
    def of(cls, device: torch.device, capturable: bool) -> DeviceFacts:
        """Measure a device. Call this after the weights are loaded."""
        free, total = available_memory(device)
        return cls(
            kind=device.type,
            free=free,
            total=total,
            host_free=available_memory(torch.device("cpu"))[0],
            graphs=device.type == "cuda" and capturable,
        )


# ---- resolve -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requirements:
    """The memory that the options need before the KV pool is sized. Sizes are in bytes."""

    schedule: ScheduleConfig  # max_model_len is not decided yet
    block_size: int
    kv_dtype: str
    kv_per_token: int
    draft_kv_per_token: int  # bytes for a drafter with its own KV cache
    weights: int
    activations: int
    staging: int  # device memory for copies between the device and the host
    graphs: bool


@dataclass(frozen=True)
class Resolved:
    """The options with every default filled in."""

    cache: CacheConfig
    schedule: ScheduleConfig
    memory: MemoryPlan
    requirements: Requirements

    def without_tiers(self) -> Resolved:
        return replace(
            self,
            cache=replace(self.cache, host_blocks=0, has_disk=False),
            memory=replace(self.memory, host_blocks=0, disk=0),
        )


def resolve(options: EngineOptions, model: ModelFacts, device: DeviceFacts) -> Resolved:
    """Fill in every default. Raises NotEnoughMemory, or InvalidRequest if the model or the device
    cannot honour an option."""
    return resolve_tiers(options, resolve_pool(options, model, device), device)


def require(options: EngineOptions, model: ModelFacts, device: DeviceFacts) -> Requirements:
    """Do the part of `resolve` that does not depend on how much memory the device has."""
    schedule = resolve_schedule(options, model, device.kind)
    activations = activation_bytes(model.config, schedule, model.dtype)
    graphs = device.graphs and not options.enforce_eager and not options.kv_canary
    if graphs:
        rows = held_logits(runner_limits(schedule))
        activations += graph_bytes(model.config, rows, model.dtype)
    kv_dtype = resolve_kv_dtype(options, model)
    return Requirements(
        schedule=schedule,
        block_size=options.block_size or BLOCK_SIZE[device.kind],
        kv_dtype=kv_dtype,
        kv_per_token=model.config.kv_bytes_per_token(kv_dtype),
        draft_kv_per_token=0 if model.draft is None else model.draft.kv_per_token,
        weights=model.all_weights,
        activations=activations,
        staging=STAGING[device.kind] if options.offloads else 0,
        graphs=graphs,
    )


def runner_limits(schedule: ScheduleConfig) -> RunnerLimits:
    speculative = schedule.speculative
    return RunnerLimits(
        max_slots=schedule.max_num_seqs,
        max_len=schedule.max_model_len,
        max_tokens=schedule.max_num_batched_tokens,
        max_drafts=0 if speculative is None else speculative.num_tokens,
        drafts_on_device=speculative is not None and speculative.drafts_on_device,
    )


def resolve_dtype(requested: str, kind: str) -> str:
    """On a CPU "auto" is float32, which is exact, and as fast on CPUs without 16-bit instructions
    (docs/models.md). On a GPU the checkpoint decides, and "auto" stays "auto"."""
    return "float32" if requested == "auto" and kind == "cpu" else requested


def resolve_kv_dtype(options: EngineOptions, model: ModelFacts) -> str:
    requested = options.kv_cache_dtype
    if requested == "auto":
        return model.kv_dtype
    if requested not in model.kv_dtypes:
        raise InvalidRequest(
            f"kv_cache_dtype {requested} is not supported: with {model.dtype} activations, the "
            f"kernels of this device read {', '.join(model.kv_dtypes)}. Use one of these types, or "
            "auto",
            "kv_cache_dtype",
        )
    # Otherwise the scales would not be aligned.
    if requested in KV_CODES and model.config.head_dim % 4:
        raise InvalidRequest(
            "kv_cache_dtype int8 or fp8 needs a head_dim that is a multiple of 4, but this model "
            f"has head_dim {model.config.head_dim}: use auto",
            "kv_cache_dtype",
        )
    return requested


def resolve_schedule(options: EngineOptions, model: ModelFacts, kind: str) -> ScheduleConfig:
    tokens = options.max_num_batched_tokens
    if tokens is None:
        tokens = step_tokens(kind, model.parameters, options.max_num_seqs)
    depth = options.depth
    if depth is None:
        # An urgent request waits for all steps in flight.
        preempts_for_waiting = find_policy(options.scheduling_policy).preempts_for_waiting
        overlaps = kind == "cuda" and not preempts_for_waiting and options.kv_cache
        depth = 2 if overlaps else 1
    piggyback = options.piggyback_tokens
    if piggyback is None:
        piggyback = default_piggyback_tokens(kind, model.parameters, model.weights)
    check_exit_layer(options.speculative_config, model.config)
    return ScheduleConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=tokens,
        depth=depth,
        policy=options.scheduling_policy,
        batching=options.batching,
        max_batch=options.max_batch,
        batch_window=options.window_ms / 1e3,
        latency_target=options.target_ms / 1e3,
        short_prompt_share=options.short_prompt_share,
        chunked_prefill=options.enable_chunked_prefill,
        piggyback_tokens=piggyback,
        speculative=options.speculative_config if options.speculation_is_requested else None,
    )


def check_exit_layer(speculative: SpeculativeConfig | None, config: ModelConfig) -> None:
    if speculative is not None and speculative.exit_layer >= config.num_layers:
        raise InvalidRequest(
            f"early_exit,layer={speculative.exit_layer} is too large: the model has "
            f"{config.num_layers} layers, and the drafter needs fewer. Give a smaller number",
            "speculative_config",
        )


def check_draft_positions(draft: DraftFacts | None, max_model_len: int) -> None:
    if draft is not None and draft.max_position < max_model_len:
        raise InvalidRequest(
            f"the draft model has {draft.max_position} positions, but max_model_len is "
            f"{max_model_len}: lower max_model_len to {draft.max_position}, or use another draft "
            "model",
            "max_model_len",
        )


def resolve_pool(options: EngineOptions, model: ModelFacts, device: DeviceFacts) -> Resolved:
    """Resolve everything but the tiers below the device."""
    needs = require(options, model, device)
    budget = kv_share(
        device.kind,
        device.free,
        device.total,
        options.gpu_memory_utilization,
        needs.activations + needs.staging,
    )
    cache, max_model_len = size_pool(
        model.config,
        needs.block_size,
        needs.kv_per_token + needs.draft_kv_per_token,
        budget,
        options.max_num_seqs,
        options.max_model_len,
        options.num_gpu_blocks_override,
    )
    check_draft_positions(model.draft, max_model_len)
    cache = replace(
        cache,
        prefix_caching=options.reuses_prefixes,
        keeps_kv=options.kv_cache,
        contiguous=options.kv_allocation == "contiguous",
        block_bytes=needs.block_size * needs.kv_per_token,
        kv_eviction=options.kv_eviction,
        kv_sinks=options.kv_sinks,
        kv_budget=options.kv_budget
        or min(KV_BUDGET, max_model_len) // cache.block_size * cache.block_size,
    )
    check_kv_eviction(cache, max_model_len)
    check_moves_keys(options, model, needs.kv_dtype)
    memory = MemoryPlan(
        weights=needs.weights,
        activations=needs.activations,
        kv_per_token=needs.kv_per_token,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        draft_kv_per_token=needs.draft_kv_per_token,
    )
    schedule = replace(needs.schedule, max_model_len=max_model_len)
    return Resolved(cache, schedule, memory, needs)


def check_moves_keys(options: EngineOptions, model: ModelFacts, kv_dtype: str) -> None:
    """Eviction moves keys to other positions. Raise InvalidRequest if that cannot be done."""
    eviction = options.kv_eviction
    if eviction == "none":
        return
    if not model.moves_keys:
        raise InvalidRequest(
            f"kv_eviction {eviction} moves keys to other positions, which this "
            f"{model.config.architecture} does not allow: its positions are learned, or its rope "
            "scaling is dynamic. Use kv_eviction none",
            "kv_eviction",
        )
    if kv_dtype in KV_CODES:
        raise InvalidRequest(
            f"kv_eviction {eviction} moves keys to other positions, and compressed keys would lose "
            "precision each time: use kv_cache_dtype auto",
            "kv_eviction",
        )


def resolve_tiers(options: EngineOptions, resolved: Resolved, device: DeviceFacts) -> Resolved:
    """Add the host tier and the disk tier of the KV cache. All ranks together have the sizes of the
    options, and `device` is the share of one rank."""
    memory = resolved.memory
    on_host = memory.kv if device.kind == "cpu" else 0
    if on_host > device.host_free:
        raise NotEnoughMemory(
            f"a KV pool of {memory.num_blocks} blocks takes {on_host / 2**30:.3g} GiB, but "
            f"{device.host_free / 2**30:.3g} GiB of memory are left: lower "
            "num_gpu_blocks_override (--num-blocks)"
        )
    host_blocks, disk = size_tiers(
        options.swap_space,
        options.kv_disk_path,
        options.kv_disk_gib,
        memory.block_bytes * options.tensor_parallel_size,
        (device.host_free - on_host) * options.tensor_parallel_size,
    )
    return replace(
        resolved,
        cache=replace(resolved.cache, host_blocks=host_blocks, has_disk=disk > 0),
        memory=replace(memory, host_blocks=host_blocks, disk=disk),
    )


# ---- build -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOnDevice:
    model: CausalLM
    checkpoint: Checkpoint
    device: torch.device
    drafter: CausalLM | None = None  # a draft head or a draft model
    custom_drafter: Drafter | None = None  # drafts in place of everything else, for measurements


def load(
    source: ModelSource,
    options: EngineOptions,
    progress: Progress,
    ranks: Collectives | None = None,
    check: Callable[[CausalLM, Checkpoint], None] = lambda planned, checkpoint: None,
) -> ModelOnDevice:
    """Load a model, or the part of it that one of the `ranks` holds. `check` may refuse it before
    its weights are read."""
    device = pick_device(options.device)
    ranks = ranks or SingleRank()
    ops = select(device.type, operator_choice(options))
    ops.ranks = ranks
    # A policy that cannot be loaded is reported before the weights are read.
    find_policy(options.scheduling_policy)
    model, checkpoint = load_model(
        source,
        replace(load_options(options, device), rank=ranks.rank, num_ranks=ranks.size),
        ops=ops,
        progress=progress,
        check=check,
    )
    return with_drafter(ModelOnDevice(model, checkpoint, device), options)


def operator_choice(options: EngineOptions) -> OperatorChoice:
    return OperatorChoice(
        attention=options.attention_backend,
        fused_kernels=options.fused_kernels,
        fused_decoder=options.fused_decoder,
        deterministic=options.deterministic,
        cascade_attention=options.cascade_attention,
    )


def load_options(options: EngineOptions, device: torch.device) -> LoadOptions:
    return LoadOptions(
        dtype=resolve_dtype(options.dtype, device.type),
        device=str(device),
        load_format=options.load_format,
        quantization=options.quantization,
        revision=options.revision,
        seed=options.seed,
        hf_overrides=options.hf_overrides,
        model_class=options.model_class,
    )


# What "auto" stands for if the model has a draft head.
AUTO_HEAD = SpeculativeConfig("head", num_tokens=6, ngram_min=3, lookup=True)


def settle_speculation(
    options: EngineOptions, checkpoint: Checkpoint, kind: str
) -> SpeculativeConfig | None:
    """Return how a model drafts on a device of this kind, without "auto".

    "auto" drafts with the head of the embedded model where measurements show that it pays
    (docs/speculation.md): on a CPU with the fused kernels that this model has by default, and with
    no option that drafts do not work with. On a GPU it has not been measured yet whether that
    slows other workloads down."""
    speculative = options.speculative_config
    if speculative is None or not speculative.is_auto:
        return speculative
    has_head = Path(checkpoint.source).name == embedded.FILE and embedded.has_draft_head()
    default = EngineOptions()
    uses_default_kernels = all(
        getattr(options, name) == getattr(default, name)
        for name in (
            "dtype",
            "quantization",
            "attention_backend",
            "fused_kernels",
            "fused_decoder",
            "enforce_eager",
        )
    )
    keeps_kv = options.kv_cache and options.kv_allocation == "paged" and not options.kv_canary
    is_compatible = (
        keeps_kv
        and options.kv_eviction == "none"
        and options.tensor_parallel_size == 1
        and not options.logits_processors
        and options.batching == "continuous"
    )
    return (
        AUTO_HEAD if kind == "cpu" and has_head and uses_default_kernels and is_compatible else None
    )


def with_drafter(loaded: ModelOnDevice, options: EngineOptions) -> ModelOnDevice:
    """Load what drafts for a model, if that has weights of its own."""
    speculative = settle_speculation(options, loaded.checkpoint, loaded.device.type)
    if speculative is not None and speculative.method == "draft_model":
        draft_options = load_options(options, loaded.device)
        return replace(loaded, drafter=load_draft_model(loaded, speculative, draft_options))
    if speculative is not None and speculative.method == "head":
        head_path = find_draft_head(loaded.checkpoint, speculative)
        return replace(loaded, drafter=load_draft_head(head_path, loaded.model))
    return loaded


def find_draft_head(target: Checkpoint, speculative: SpeculativeConfig) -> str | Path:
    """Return where the draft head for a model is."""
    if speculative.model is not None:
        return speculative.model
    if Path(target.source).name == embedded.FILE:
        return embedded.draft_head_path()
    raise InvalidRequest(
        "speculative_config: the method head needs a draft head for this model, as in "
        "head,model=DIRECTORY. octavo train-draft trains one",
        "speculative_config",
    )


def load_draft_model(
    target: ModelOnDevice, speculative: SpeculativeConfig, options: LoadOptions
) -> CausalLM:
    """Load a draft model with the options of the target. Raises InvalidRequest if it has other
    tokens than the target."""
    draft_options = replace(
        options, revision=None, load_format="auto", hf_overrides=None, model_class=None
    )
    draft_model, checkpoint = load_model(
        speculative.model,
        draft_options,
        ops=target.model.ops,
        progress=False,
    )
    problem = ""
    vocab_size = draft_model.config.vocab_size
    if vocab_size != target.model.config.vocab_size:
        problem = f"{vocab_size} tokens, and the model {target.model.config.vocab_size}"
    elif not same_tokens(target.checkpoint, checkpoint):
        problem = "another tokenizer than the model"
    if problem:
        raise InvalidRequest(
            f"the draft model {speculative.model} has {problem}. A draft model needs the same "
            "vocabulary: use a smaller model of the same family",
            "speculative_config",
        )
    return draft_model


def same_tokens(first: Checkpoint, second: Checkpoint) -> bool:
    """Return whether two tokenizers give each token the same id, as far as both exist. The names of
    special tokens may differ: models of one family rename reserved ones."""
    vocabularies = []
    for checkpoint in (first, second):
        try:
            tokenizer = read_tokenizer(checkpoint)
        except ModelError:
            return True
        if tokenizer is None:
            return True
        vocabularies.append(tokenizer.backend.get_vocab(with_added_tokens=False))
    return vocabularies[0] == vocabularies[1]


def load_tokenizer(
    checkpoint: Checkpoint, vocab_size: int, options: EngineOptions
) -> Tokenizer | None:
    """Return the tokenizer of a model with this many tokens, or None with skip_tokenizer_init."""
    if options.skip_tokenizer_init:
        return None
    tokenizer = (
        read_tokenizer(checkpoint)
        if options.tokenizer is None
        else Tokenizer.from_directory(options.tokenizer)
    )
    if tokenizer is None:
        raise ModelError(
            f"{checkpoint.source} has no tokenizer: give tokenizer=DIRECTORY (--tokenizer). In "
            "Python, skip_tokenizer_init=True takes token ids instead of texts"
        )
    if tokenizer.vocab_size < PADDED_VOCABULARY * vocab_size:
        log.warning(
            "the tokenizer has %s tokens, but the model has %s: the other tokens have no text. "
            "Check that the tokenizer belongs to this model",
            f"{tokenizer.vocab_size:,}",
            f"{vocab_size:,}",
        )
    return tokenizer


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer that is stored beside the weights, if there is one."""
    if checkpoint.gguf_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.gguf_metadata)
    if checkpoint.directory is not None:
        return Tokenizer.from_directory(checkpoint.directory)
    return None


def pick_device(requested: str) -> torch.device:
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise InvalidRequest(
            f"unknown device {requested!r}: use auto, cpu or cuda", "device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(
            "device is cuda, but this machine has no usable NVIDIA GPU: use device='cpu' "
            "(--device cpu), or leave the option out. octavo doctor checks the GPU",
            "device",
        )
    return device


def build_runner(
    loaded: ModelOnDevice, options: EngineOptions, resolved: Resolved
) -> tuple[Runner, Resolved]:
    """Allocate the KV cache and build what executes plans. The engine does without tiers if their
    memory cannot be had, and the second value then says so."""
    model = loaded.model
    cache = resolved.cache
    schedule = resolved.schedule
    kv_dtype = torch_dtype(resolved.requirements.kv_dtype)
    kv = KVStore(model.config, cache, kv_dtype, loaded.device)
    tiers = None
    if cache.host_blocks:
        tiers = open_tiers(loaded, options, resolved, kv)
    if tiers is None:
        resolved = resolved.without_tiers()
    canary = None
    if options.kv_canary:
        canary = Canary(cache.num_blocks, cache.block_size, schedule.max_model_len, loaded.device)
    is_cpu = loaded.device.type == "cpu"
    runs_cpu_steps = is_cpu and not options.enforce_eager and not options.kv_canary
    runner = Runner(
        model=model,
        kv=kv,
        limits=runner_limits(schedule)._replace(is_bounded=cache.kv_eviction != "none"),
        use_graphs=resolved.requirements.graphs or runs_cpu_steps,
        tier_store=tiers,
        canary=canary,
        drafter=build_drafter(loaded, resolved, kv),
    )
    if options.logits_processors:
        config = VllmConfig(model.config, schedule, resolved.cache)
        runner.logits_pipeline = LogitsPipeline(
            load_processors(options.logits_processors, config, loaded.device)
        )
    return runner, resolved


def build_drafter(loaded: ModelOnDevice, resolved: Resolved, kv: KVStore) -> Drafter | None:
    """Return what drafts on the device, or None if the scheduler drafts. `kv` is the target's."""
    speculative = resolved.schedule.speculative
    if loaded.custom_drafter is not None:
        return loaded.custom_drafter
    if speculative is not None and speculative.exit_layer:
        return EarlyExit(loaded.model.first_layers(speculative.exit_layer), kv)
    drafter = loaded.drafter
    if drafter is None:
        return None
    drafter_kv = KVStore(drafter.config, resolved.cache, drafter.kv_dtype, loaded.device)
    if isinstance(drafter, DraftHead):
        return HeadDrafter(drafter, drafter_kv, resolved.schedule.max_num_seqs)
    return DraftModel(drafter, drafter_kv)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name. octavo.ops.kv.dtype_name does the opposite."""
    dtype = CODES[name] if name in CODES else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def open_tiers(
    loaded: ModelOnDevice, options: EngineOptions, resolved: Resolved, kv: KVStore
) -> TierStore | None:
    disk = None
    if options.kv_disk_path is not None:
        directory = Path(options.kv_disk_path).expanduser()
        disk = open_disk(loaded, directory, resolved, kv)
    try:
        return TierStore(kv, resolved.cache.host_blocks, disk, resolved.requirements.staging)
    except (NotEnoughMemory, RuntimeError) as error:
        log.warning("KV is not offloaded to host memory or disk: %s", error)
        return None


def open_disk(loaded: ModelOnDevice, directory: Path, resolved: Resolved, kv: KVStore) -> Disk:
    """KV on disk belongs to this model if the weights, the kernels and the layout of KV are the
    same."""
    model = loaded.model
    layout = f"{resolved.requirements.kv_dtype} {'x'.join(map(str, kv.tensor.shape[1:]))}"
    kernels = model.ops.name + model.ops.variant
    name = fingerprint(model, model.config, model.dtype, layout, loaded.device.type, kernels)
    return Disk(
        directory=directory,
        max_bytes=resolved.memory.disk,
        fingerprint=name,
        block_format=layout,
        block_bytes=kv.tensor[0].nbytes,
    )


class RankJob(NamedTuple):
    """The message that says what a rank of tensor parallelism loads."""

    source: ModelSource
    options: EngineOptions


def start_ranks(source: ModelSource, options: EngineOptions) -> Ranks | None:
    """Start the other ranks of tensor parallelism, which load their parts meanwhile."""
    size = options.tensor_parallel_size
    if size == 1:
        return None
    device = pick_device(options.device)
    gpus = visible_gpus(device, size) if device.type == "cuda" else []
    return Ranks(size, device.type, RankJob(source, options), gpus)


def visible_gpus(device: torch.device, size: int) -> list[str]:
    """Return the name of each rank's GPU. Rank 0 has the first one."""
    if device.index:
        raise InvalidRequest(
            f"tensor_parallel_size {size} uses the first {size} GPUs, so device cannot be "
            f"{device}: use device cuda, and choose GPUs with CUDA_VISIBLE_DEVICES",
            "device",
        )
    available = torch.cuda.device_count()
    if available < size:
        raise InvalidRequest(
            f"tensor_parallel_size {size} needs {size} GPUs, and this process sees {available}: "
            f"use at most {available}",
            "tensor_parallel_size",
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(index) for index in range(available)]
    return [name.strip() for name in names[:size]]


def share_device(facts: list[DeviceFacts]) -> DeviceFacts:
    """Return the memory of each rank. The ranks share host memory; each GPU has one rank."""
    size = len(facts)
    free = min(rank.free for rank in facts)
    total = min(rank.total for rank in facts)
    on_gpu = facts[0].kind == "cuda"
    return DeviceFacts(
        kind=facts[0].kind,
        free=free if on_gpu else free // size,
        total=total if on_gpu else total // size,
        host_free=min(rank.host_free for rank in facts) // size,
        graphs=False,
    )


@dataclass(frozen=True)
class TierFacts:
    """The values on which the ranks must agree before the first step."""

    host_blocks: int
    known_hashes: frozenset[bytes]  # on disk

    @classmethod
    def of(cls, runner: Runner) -> TierFacts:
        tiers = runner.tier_store
        if tiers is None:
            return cls(0, frozenset())
        known_hashes = frozenset() if tiers.disk is None else tiers.disk.known_hashes
        return cls(tiers.num_host_blocks, known_hashes)


def agree_on_tiers(ranks: Ranks, runner: Runner) -> None:
    """Wait until all ranks have built their runners, and keep the records that all of them have."""
    rank_0 = TierFacts.of(runner)
    others = ranks.receive(TierFacts)
    if any(other.host_blocks != rank_0.host_blocks for other in others):
        raise NotEnoughMemory(
            "not every rank has memory for the host tier of the KV cache: lower swap_space "
            "(--kv-host-gib)"
        )
    if runner.tier_store is not None and runner.tier_store.disk is not None:
        known_hashes = [other.known_hashes for other in others]
        runner.tier_store.disk.known_hashes = rank_0.known_hashes.intersection(*known_hashes)


@dataclass(frozen=True)
class EngineFactory:
    """Makes engines that share one runner. They share its batch slots and blocks too, so only one
    of them may run at a time."""

    runner: Runner
    cache: CacheConfig
    vocab_size: int
    eos_ids: tuple[int, ...]
    seed: int
    ranks: Ranks | None = None  # the other ranks of tensor parallelism

    def new_engine(self, schedule: ScheduleConfig, recorder: Recorder | None = None) -> Engine:
        """Return an engine with an empty prefix cache. It finds the KV that is on disk."""
        scheduler = Scheduler(self.cache, schedule, self.vocab_size, self.eos_ids, self.seed)
        store = self.runner.tier_store
        if scheduler.tiers is not None and store is not None and store.disk is not None:
            scheduler.tiers.attach_store(store.disk.known_hashes, store.fetch_ids)
        runner: Runner | RankedRunner = self.runner
        if self.ranks is not None:
            has_disk = store is not None and store.disk is not None
            runner = RankedRunner(self.runner, self.ranks, has_disk)
        engine = Engine(scheduler, runner)
        if recorder is not None:
            recorder.listen_to(engine.events, scheduler.clock, engine.host_time)
        return engine
