"""The options of an engine. Each option is declared once: name, type, default, check and help
(octavo/option_declaration.py).

    LLM(model, **options)   turns its keyword arguments into an EngineOptions (from_keywords)
    the command line        shows every field with a help text as an option (octavo/cli/options.py)
    the server              sends the object to its engine process (octavo/serve/channel)
    octavo plan, LLM        resolve the defaults that depend on the model and the device
                            (octavo/assemble.py)

Names are vLLM's where vLLM has the option. An EngineOptions is always valid: a value that is out of
range, or has no effect beside the others, raises InvalidRequest. This module must not import torch
or typer.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypedDict

from octavo import vllm_options
from octavo.config import (
    AUTO,
    DTYPE_BYTES,
    KV_CODES,
    PoolerConfig,
    ProfilerConfig,
    SpeculativeConfig,
)
from octavo.core.batching import check_batching
from octavo.core.bounded_kv import KV_EVICTIONS
from octavo.core.draft_methods import parse_speculative
from octavo.core.policy import find_policy
from octavo.errors import InvalidRequest, did_you_mean
from octavo.extensions import ATTENTION_BACKENDS, extension_names, is_path
from octavo.option_declaration import (
    Option,
    check_options,
    integer_range,
    one_of,
    option_declarations,
    path,
    real,
)
from octavo.params import check_integer

log = logging.getLogger(__name__)

# ---- checks ------------------------------------------------------------------------------------


def kv_dtype(name: str, value: Any) -> str:
    """Return the data type of the KV cache, or "auto"."""
    names = (*DTYPE_BYTES, *KV_CODES)
    if value == "fp8_e4m3":
        return "fp8"
    if value not in ("auto", *names):
        raise InvalidRequest(
            f"{name} must be one of auto, {', '.join(names)} (which is e4m3), got {value!r}", name
        )
    return str(value)


def policy(name: str, value: Any) -> Any:
    """Check the name of a built-in policy. The engine loads package.module:Class."""
    if ":" not in value:
        find_policy(value)
    return value


def attention_name(name: str, value: Any) -> str:
    """Check the name of an attention backend. The engine loads package.module:Class."""
    if isinstance(value, str) and value.isupper():
        return (
            "auto"  # a backend of vLLM's, such as FLASH_ATTN: the choice among them has no effect
        )
    names = ("auto", *ATTENTION_NAMES, *extension_names(ATTENTION_BACKENDS))
    if not isinstance(value, str) or (value not in names and not is_path(value)):
        raise InvalidRequest(
            f"{name} must be one of {', '.join(names)}, or package.module:Class, got {value!r:.60}",
            name,
        )
    return value


def dotted_path(name: str, value: Any) -> str:
    """Check a name for octavo/extensions.py. The engine loads it."""
    if not isinstance(value, str) or not is_path(value):
        raise InvalidRequest(f"{name} must be package.module:Class, got {value!r:.60}", name)
    return value


# The backends of octavo/ops/backends.py, which imports torch.
ATTENTION_NAMES = ("reference", "cpu", "triton")
# vLLM's names of ways to read a checkpoint, which is recognised by its content too.
READ_FORMATS = ("safetensors", "hf", "mistral", "gguf", "fastsafetensors")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def weight_format(name: str, value: Any) -> str:
    """Return the name of a weight format. The loader checks it (octavo/model/load.py)."""
    return "auto" if value is None else value


def load_format(name: str, value: Any) -> str:
    if value not in ("auto", "dummy", *READ_FORMATS):
        raise InvalidRequest(
            f"{name} must be auto, which reads safetensors and GGUF, or dummy, got {value!r:.60}",
            name,
        )
    return "dummy" if value == "dummy" else "auto"


def compute_dtype(name: str, value: Any) -> str:
    """Return the name of a data type. The types of PyTorch are accepted too."""
    dtype = str(value).removeprefix("torch.")
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype not in ("auto", *DTYPE_BYTES):
        raise InvalidRequest(
            f"{name} must be one of auto, half, {', '.join(DTYPE_BYTES)}, got {value!r:.60}", name
        )
    return dtype


def context_length(name: str, value: Any) -> int | None:
    """Check max_model_len. The value -1 means as much as fits, as in vLLM."""
    return None if value == -1 else check_integer(name, value, 2)


def json_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a dictionary of fields, got {value!r:.60}", name)
    return value


def class_list(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name} must be a list of classes, got {value!r:.60}", name)
    return tuple(value)


def profiler_settings(name: str, value: Any) -> ProfilerConfig:
    """Return the settings. Of a dictionary, vLLM's other fields have no effect."""
    if isinstance(value, ProfilerConfig):
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a dictionary, got {value!r:.60}", name)
    names = {field.name for field in fields(ProfilerConfig)}
    return ProfilerConfig(**{name: value[name] for name in names & value.keys()})


def pooler_settings(name: str, value: Any) -> PoolerConfig:
    """Return the settings of a dictionary or of an object with the same fields. vLLM's other fields
    have no effect."""
    settings = (
        value if isinstance(value, dict) else getattr(value, "__dict__", {"pooling_type": value})
    )
    pooling = settings.get("pooling_type") or settings.get("seq_pooling_type") or "LAST"
    activation = settings.get("use_activation")
    if activation is None:
        activation = settings.get("normalize", True)
    if str(pooling).upper() not in ("LAST", "MEAN") or activation not in (True, False):
        raise InvalidRequest(
            f'{name} must be a dictionary such as {{"pooling_type": "MEAN", "use_activation": '
            f"true}}, with the pooling_type LAST or MEAN, got {value!r:.80}",
            name,
        )
    return PoolerConfig(str(pooling).upper(), activation)


# ---- the options -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options that an engine is made with, besides the model."""

    dtype: Annotated[
        str,
        Option(
            "Data type of weights and activations: auto, float32, bfloat16 or float16.",
            "Model",
            metavar="NAME",
            show_default=True,
            check=compute_dtype,
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        Option(
            "Weight format: none, int8, int4-g64, ...; auto keeps the checkpoint's format.",
            "Model",
            metavar="FORMAT",
            flag="--quant",
            aliases=("--quantization",),
            show_default=True,
            check=weight_format,
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option("Device to run on: auto, cpu or cuda.", "Model", metavar="NAME", show_default=True),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Option(
            "Number of ranks (processes) that divide the model, each on a GPU or part of the CPU.",
            "Model",
            metavar="N",
            show_default=True,
            check=integer_range(1, 64),
        ),
    ] = 1
    revision: Annotated[
        str | None,
        Option("Branch, tag or commit of the model on huggingface.co.", "Model", metavar="NAME"),
    ] = None
    generation_config: Annotated[
        str,
        Option(
            "Sampling defaults: auto (the model's generation_config.json), vllm (none), or a "
            "directory with such a file.",
            "Model",
            metavar="NAME",
            show_default=True,
            check=path,
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None,
        Option(
            "JSON object whose fields replace fields of generation_config.json.",
            "Model",
            metavar="JSON",
            reads="json",
            check=json_object,
        ),
    ] = None
    load_format: Annotated[
        str,
        Option(
            "auto reads the checkpoint; dummy makes random weights from config.json alone.",
            "Model",
            metavar="NAME",
            check=load_format,
        ),
    ] = "auto"
    hf_overrides: Annotated[
        dict[str, Any] | None,
        Option(
            "JSON object whose fields replace fields of config.json.",
            "Model",
            metavar="JSON",
            reads="json",
            check=json_object,
        ),
    ] = None
    model_class: Annotated[
        str | None,
        Option(
            "Class that computes the model, as package.module:Class, for an architecture that "
            "Octavo does not have. Default: found from config.json.",
            "Model",
            metavar="NAME",
            check=dotted_path,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            "Directory to read the tokenizer from. Default: the model.",
            "Model",
            metavar="DIRECTORY",
            check=path,
        ),
    ] = None
    skip_tokenizer_init: Annotated[bool, Option()] = (
        False  # prompts are token ids, and so are replies
    )
    # seed of requests without a seed of their own, and of dummy weights
    seed: Annotated[int, Option(check=integer_range(-(2**63), 2**63 - 1))] = 0

    kv_cache_dtype: Annotated[
        str,
        Option(
            "Data type of the KV cache: auto, int8, fp8, float16, ...; "
            "int8 and fp8 use about half the memory of 16-bit KV.",
            "Memory",
            metavar="NAME",
            show_default=True,
            check=kv_dtype,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Option(
            "Maximum length of prompt plus reply in tokens, such as 32K; auto takes what fits.",
            "Memory",
            metavar="N|auto",
            reads="size or auto",
            check=context_length,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "Fraction of the GPU's memory to use.",
            "Memory",
            metavar="0..1",
            show_default=True,
            check=real(0, 1, open_low=True),
        ),
    ] = 0.9
    block_size: Annotated[
        int | None,
        Option(
            "Tokens per KV block. Default: 16 on a CPU, 64 on a GPU.",
            "Memory",
            metavar="N",
            reads="size",
            check=integer_range(1),
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None,
        Option(
            "Number of KV blocks. Default: as many as fit in memory.",
            "Memory",
            metavar="N",
            flag="--num-blocks",
            aliases=("--num-gpu-blocks-override",),
            reads="size",
            check=integer_range(1),
        ),
    ] = None
    swap_space: Annotated[
        float | None,
        Option(
            "Host memory for KV blocks offloaded from the device.",
            "Memory",
            metavar="GiB",
            flag="--kv-host-gib",
            aliases=("--swap-space",),
            check=real(0, 2**20),
        ),
    ] = None
    kv_disk_path: Annotated[
        str | None,
        Option(
            "Offload KV blocks to this directory; they survive a restart.",
            "Memory",
            metavar="DIRECTORY",
            flag="--kv-disk",
            check=path,
        ),
    ] = None
    kv_disk_gib: Annotated[
        float,
        Option(
            "Disk space that --kv-disk may use.",
            "Memory",
            metavar="GiB",
            show_default=True,
            check=real(0, 2**30, open_low=True),
        ),
    ] = 16.0
    kv_canary: Annotated[
        bool,
        Option("Verify every KV block that is read. For debugging only: it is slow.", "Memory"),
    ] = False
    kv_eviction: Annotated[
        str,
        Option(
            "The KV block that a sequence drops at its --kv-budget: none, sinks or heavy.",
            "Memory",
            metavar="NAME",
            check=one_of(*KV_EVICTIONS),
        ),
    ] = "none"
    kv_budget: Annotated[
        int | None,
        Option(
            "Maximum tokens of KV per sequence with --kv-eviction. Default: 1K.",
            "Memory",
            metavar="N",
            reads="size",
            check=integer_range(1),
        ),
    ] = None
    kv_sinks: Annotated[
        int,
        Option(
            "Number of first KV blocks of a sequence that --kv-eviction never drops.",
            "Memory",
            metavar="N",
            show_default=True,
            check=integer_range(0),
        ),
    ] = 1
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "Disable the prefix cache.",
            "Memory",
            flag="--no-prefix-caching",
            aliases=("--no-enable-prefix-caching",),
        ),
    ] = True
    kv_allocation: Annotated[
        str,
        Option(
            "paged takes KV blocks as a sequence grows. contiguous reserves prompt plus max_tokens "
            "at its start and disables the prefix cache; it is for comparison.",
            "Memory",
            metavar="NAME",
            show_default=True,
            check=one_of("paged", "contiguous"),
        ),
    ] = "paged"
    kv_cache: Annotated[
        bool,
        Option(
            "Recompute the whole sequence for every token, without reusing KV. For comparison "
            "only: it is slow.",
            "Memory",
            flag="--no-kv-cache",
        ),
    ] = True

    max_num_seqs: Annotated[
        int,
        Option(
            "Batch slots: the maximum number of sequences that run at once.",
            "Scheduling",
            metavar="N",
            reads="size",
            show_default=True,
            check=integer_range(1),
        ),
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "Token budget of a step. Default: 2K on a CPU; 2K to 16K on a GPU, by the model's "
            "size; at least --max-num-seqs.",
            "Scheduling",
            metavar="N",
            reads="size",
            check=integer_range(1),
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool,
        Option(
            "Compute each prompt in a single step; only a prompt longer than the token budget is "
            "split.",
            "Scheduling",
            flag="--no-chunked-prefill",
            aliases=("--no-enable-chunked-prefill",),
        ),
    ] = True
    depth: Annotated[
        int | None,
        Option(
            "Steps in flight. Default: 1 on a CPU; 2 on a GPU unless the policy preempts.",
            "Scheduling",
            metavar="N",
            check=integer_range(1, 3),
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        Option(
            "Launch the kernels of a step one by one, and not as a CUDA graph or CPU job.",
            "Kernels",
        ),
    ] = False
    attention_backend: Annotated[
        str,
        Option(
            "Attention kernel: auto, reference, cpu, triton, or package.module:Class. All but auto "
            "disable the fused decoder.",
            "Kernels",
            metavar="NAME",
            flag="--attention",
            aliases=("--attention-backend",),
            show_default=True,
            check=attention_name,
        ),
    ] = "auto"
    fused_decoder: Annotated[
        bool,
        Option(
            "Compute a decoder operator by operator: without the megakernel of a GPU or the fused "
            "decoder of a CPU.",
            "Kernels",
            flag="--no-fused-decoder",
        ),
    ] = True
    fused_kernels: Annotated[
        bool,
        Option(
            "Compute norms, rotary embedding and activations in plain PyTorch. Disables the fused "
            "decoder too.",
            "Kernels",
            flag="--no-fused-kernels",
        ),
    ] = True
    deterministic: Annotated[
        bool,
        Option(
            "Use batch-invariant kernels, which compute the same bits for a request alone and in "
            "every batch. They are slower on a GPU (docs/determinism.md).",
            "Kernels",
        ),
    ] = False
    cascade_attention: Annotated[
        bool,
        Option(
            "Read a prefix that decoding sequences share once per step (docs/gpu.md). This needs a "
            "GPU, and no GPU has measured it yet.",
            "Kernels",
            aliases=("--no-disable-cascade-attn",),
        ),
    ] = False
    scheduling_policy: Annotated[
        str,
        Option(
            "Scheduling policy: fcfs, priority, shortest, deadline, fair, prefix, or "
            "package.module:Class.",
            "Scheduling",
            metavar="NAME",
            flag="--policy",
            aliases=("--scheduling-policy",),
            check=policy,
        ),
    ] = "fcfs"
    batching: Annotated[
        str,
        Option(
            "Batching mode: continuous, adaptive, window, static or none.",
            "Scheduling",
            metavar="NAME",
        ),
    ] = "continuous"
    max_batch: Annotated[
        int,
        Option(
            "Maximum requests per batch in the batching modes window and static.",
            "Scheduling",
            metavar="N",
            show_default=True,
        ),
    ] = 8
    window_ms: Annotated[
        float,
        Option(
            "Milliseconds to wait for a batch to fill in the batching mode window.",
            "Scheduling",
            metavar="X",
            show_default=True,
        ),
    ] = 20.0
    target_ms: Annotated[
        float,
        Option(
            "Target inter-token latency in milliseconds in the batching mode adaptive.",
            "Scheduling",
            metavar="X",
            show_default=True,
        ),
    ] = 50.0
    short_prompt_share: Annotated[
        float,
        Option(
            "Fraction of a step's token budget reserved for short prompts behind a long prompt.",
            "Scheduling",
            metavar="0..1",
            show_default=True,
            check=real(0, 1),
        ),
    ] = 0.25
    piggyback_tokens: Annotated[
        int | None,
        Option(
            "Tokens per step up to which offline prompts join steps that decode; 0 turns it off. "
            "Default: 320 for large models on a GPU, else 0.",
            "Scheduling",
            metavar="N",
            reads="size or zero",
            check=integer_range(0),
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        Option(
            "Speculative decoding: auto, off, or METHOD[,k=N...] with the method ngram, suffix, "
            "early_exit, head or draft_model. Replies stay the same. Default: auto.",
            "Scheduling",
            metavar="METHOD",
            flag="--speculative",
            aliases=("--speculative-config",),
            reads="speculative",
            check=parse_speculative,
        ),
    ] = AUTO
    record_trace: Annotated[
        str | None,
        Option(
            "Record requests and steps in this file, for octavo simulate and octavo timeline.",
            "Scheduling",
            metavar="FILE",
            check=path,
        ),
    ] = None
    record_events: Annotated[
        str | None,
        Option(
            "Record every event of the engine in this file, for octavo replay.",
            "Scheduling",
            metavar="FILE",
            check=path,
        ),
    ] = None
    show_text: Annotated[
        bool,
        Option(
            "Show prompts and replies on the live page and in recordings of events.",
            "Safety",
        ),
    ] = False

    pooler_config: Annotated[
        PoolerConfig | None,
        Option(
            'JSON object with the pooling of embeddings, such as {"pooling_type": "MEAN"}. '
            "Default: the pooling that the model's files name, else LAST.",
            "Model",
            metavar="JSON",
            reads="json",
            check=pooler_settings,
        ),
    ] = None
    # Classes, or their names as package.module:Class (octavo/runner/logits_processors.py).
    logits_processors: Annotated[
        tuple[Any, ...],
        Option(
            "Class that changes the logits of every request, as package.module:Class. May be "
            "given several times.",
            "Kernels",
            metavar="NAME",
            check=class_list,
        ),
    ] = ()
    profiler_config: Annotated[ProfilerConfig | None, Option(check=profiler_settings)] = None

    # Control tokens such as <|im_start|> in a text prompt are tokens. False: they are characters.
    parse_special: Annotated[
        bool,
        Option(
            "Read control tokens in text prompts as plain characters.",
            "Safety",
            flag="--no-parse-special",
        ),
    ] = True

    def __post_init__(self) -> None:
        check_options(self)
        check_batching([self.batching], self.max_batch, self.window_ms, self.target_ms)
        self._check_offload()
        self._check_eviction()
        if self.speculation_is_requested and self.kv_eviction != "none":
            raise InvalidRequest(
                "speculative_config needs KV that is kept whole: leave out kv_eviction",
                "speculative_config",
            )
        self._check_switches()
        if self.deterministic:
            self._check_deterministic()
        if self.logits_processors:
            self.check_logits_processors()
        if self.piggyback_tokens and (self.batching, self.scheduling_policy) != (
            "continuous",
            "fcfs",
        ):
            raise InvalidRequest(
                "piggyback_tokens has no effect here: it needs batching continuous and "
                "scheduling_policy fcfs. Leave it out",
                "piggyback_tokens",
            )

    def check_logits_processors(self) -> None:
        """Raise InvalidRequest if logits processors cannot work with the other options."""
        conflicts = {
            "speculative_config": self.speculation_is_requested,
            "kv_eviction": self.kv_eviction != "none",
            "tensor_parallel_size": self.tensor_parallel_size > 1,
        }
        for name in (name for name, is_given in conflicts.items() if is_given):
            raise InvalidRequest(
                f"logits_processors do not work with {name}: leave out one of them",
                "logits_processors",
            )

    @property
    def speculation_is_requested(self) -> bool:
        """Whether a method of speculative decoding is given. "auto" is a choice and no demand."""
        return self.speculative_config is not None and not self.speculative_config.is_auto

    @property
    def offloads(self) -> bool:
        """Whether KV blocks are offloaded to host memory or disk."""
        return bool(self.swap_space) or self.kv_disk_path is not None

    @property
    def reuses_prefixes(self) -> bool:
        """Whether there is a prefix cache. It needs KV that is kept, in blocks that are shared."""
        return self.enable_prefix_caching and self.kv_cache and self.kv_allocation == "paged"

    def _check_switches(self) -> None:
        """Raise InvalidRequest if an option needs a mechanism that another one turns off."""
        needs_paged_kv = {
            "swap_space": bool(self.swap_space),
            "kv_disk_path": self.kv_disk_path is not None,
            "kv_eviction": self.kv_eviction != "none",
            "speculative_config": self.speculation_is_requested,
        }
        off = "kv_cache=False" if not self.kv_cache else f"kv_allocation {self.kv_allocation}"
        if not self.kv_cache or self.kv_allocation != "paged":
            for name in (name for name, is_given in needs_paged_kv.items() if is_given):
                raise InvalidRequest(
                    f"{name} does not work with {off}: leave out one of them", name
                )
        if self.cascade_attention and self.attention_backend not in ("auto", "triton"):
            raise InvalidRequest(
                f"cascade_attention does not work with attention_backend {self.attention_backend}: "
                "leave out one of them",
                "cascade_attention",
            )
        if not self.kv_cache and (self.depth or 1) > 1:
            raise InvalidRequest(
                "depth must be 1 with kv_cache=False: each step needs all tokens of its sequences",
                "depth",
            )

    def _check_deterministic(self) -> None:
        """Raise InvalidRequest if another option makes results depend on the batch."""
        reasons = {
            "attention_backend": (self.attention_backend != "auto", "has one kernel of its own"),
            "fused_kernels": (not self.fused_kernels, "needs the fused kernels"),
            "cascade_attention": (
                self.cascade_attention,
                "adds the keys of a prefix in one order, whether or not other sequences share it",
            ),
            "kv_eviction": (self.kv_eviction != "none", "needs KV that is kept whole"),
            "tensor_parallel_size": (
                self.tensor_parallel_size > 1,
                "runs on one rank: the order of sums among ranks depends on the batch",
            ),
        }
        for name, (is_given, reason) in reasons.items():
            if is_given:
                raise InvalidRequest(
                    f"deterministic does not work with {name} {getattr(self, name)}: it {reason}. "
                    "Leave out one of them",
                    "deterministic",
                )

    def _check_offload(self) -> None:
        if self.kv_disk_path is None and self.kv_disk_gib != EngineOptions.kv_disk_gib:
            raise InvalidRequest(
                "kv_disk_gib has no effect without a directory: give kv_disk_path (--kv-disk)",
                "kv_disk_gib",
            )
        if self.offloads and not self.enable_prefix_caching:
            raise InvalidRequest(
                "swap_space and kv_disk_path need the prefix cache: leave it enabled",
                "swap_space",
            )
        if self.kv_canary and (self.offloads or self.kv_eviction != "none"):
            raise InvalidRequest(
                "kv_canary does not support KV that is offloaded or evicted: leave out swap_space, "
                "kv_disk_path and kv_eviction",
                "kv_canary",
            )

    def _check_eviction(self) -> None:
        if self.kv_eviction != "none":
            return
        if self.kv_budget is not None:
            raise InvalidRequest(
                "kv_budget has no effect with kv_eviction none: use kv_eviction sinks or heavy",
                "kv_budget",
            )
        if self.kv_sinks != EngineOptions.kv_sinks:
            raise InvalidRequest(
                "kv_sinks has no effect with kv_eviction none: use kv_eviction sinks or heavy",
                "kv_sinks",
            )


# Options that decide how weights are loaded or computed with.
LOADING_OPTIONS = frozenset(
    {
        "dtype",
        "quantization",
        "device",
        "tensor_parallel_size",
        "revision",
        "load_format",
        "hf_overrides",
        "model_class",
        "seed",
        "attention_backend",
        "fused_decoder",
        "fused_kernels",
        "deterministic",
        "cascade_attention",
    }
)


# ---- keyword arguments of LLM ------------------------------------------------------------------


class EngineKeywords(TypedDict, total=False):
    """The keyword arguments of LLM for editors and type checkers: the fields of EngineOptions.

    Paths may also be Path objects. A test compares the names with EngineOptions. LLM also accepts
    the options of octavo/vllm_options.py."""

    dtype: str
    quantization: str | None
    device: str
    tensor_parallel_size: int
    revision: str | None
    generation_config: str | os.PathLike[str]
    override_generation_config: dict[str, Any] | None
    load_format: str
    hf_overrides: dict[str, Any] | None
    model_class: str | None
    tokenizer: str | os.PathLike[str] | None
    skip_tokenizer_init: bool
    parse_special: bool
    seed: int
    kv_cache_dtype: str
    max_model_len: int | None
    gpu_memory_utilization: float
    block_size: int | None
    num_gpu_blocks_override: int | None
    swap_space: float | None
    kv_disk_path: str | os.PathLike[str] | None
    kv_disk_gib: float
    kv_canary: bool
    kv_eviction: str
    kv_budget: int | None
    kv_sinks: int
    enable_prefix_caching: bool
    kv_allocation: str
    kv_cache: bool
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    depth: int | None
    enforce_eager: bool
    attention_backend: str
    fused_decoder: bool
    fused_kernels: bool
    deterministic: bool
    cascade_attention: bool
    scheduling_policy: str
    batching: str
    max_batch: int
    window_ms: float
    target_ms: float
    short_prompt_share: float
    piggyback_tokens: int | None
    speculative_config: SpeculativeConfig | dict[str, Any] | str | None
    record_trace: str | os.PathLike[str] | None
    pooler_config: PoolerConfig | dict[str, Any] | None
    record_events: str | os.PathLike[str] | None
    show_text: bool
    logits_processors: tuple[Any, ...] | list[Any]
    profiler_config: ProfilerConfig | dict[str, Any] | None


def from_keywords(keywords: dict[str, Any]) -> EngineOptions:
    """Return the options among the keyword arguments of LLM. The others must be vLLM's options
    with values that turn on an option of Octavo's, or that have no effect here. None stands for the
    default."""
    declared = option_declarations(EngineOptions)
    options: dict[str, Any] = {}
    turned_on: dict[str, bool] = {}
    unused: list[str] = []
    unknown: list[str] = []
    for name, value in keywords.items():
        if name in declared:
            options[name] = value
        elif vllm_options.turns_on(name, value):
            turned_on[vllm_options.OTHER_NAMES[name].option] = True
        elif name in vllm_options.DEFAULTS:
            vllm_options.check_vllm_option(name, value)
            unused.append(name)
        else:
            unknown.append(name)
    if unknown:
        hint = did_you_mean(unknown[0], declared)
        raise InvalidRequest(
            f"LLM does not support these options: {', '.join(unknown)}. {hint}Remove them",
            unknown[0],
        )
    if unused:
        log.debug("options without effect here: %s", ", ".join(sorted(unused)))
    options |= turned_on
    return EngineOptions(**{name: value for name, value in options.items() if value is not None})
