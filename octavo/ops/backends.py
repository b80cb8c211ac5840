"""Chooses the backend of a device, and exchanges some of its operators for those of another one.

    select                the operators for a device, as the options ask for them
    invariant_backend     the operators of the option `deterministic`
    find_attention        an attention backend by its name
    ComposedOps           the operators of one backend, some of them replaced by those of another
    AttentionBackend      the members that a user's own attention backend must have

The options exist to compare mechanisms. The defaults are the fastest choice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from octavo.errors import InvalidRequest
from octavo.extensions import ATTENTION_BACKENDS, find_extension
from octavo.ops import ForwardBatch, Ops
from octavo.ops.reference import ReferenceOps

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops.fused_spec import (
        DecoderSpec,
        DraftHeadSpec,
        Fused,
        FusedDraftHead,
        FusedStep,
        StepSpec,
    )
    from octavo.ops.kv import KV

log = logging.getLogger(__name__)
# Operators that a GPU backend fuses with their neighbours, and that fused_kernels=False computes
# one by one in plain PyTorch.
FUSED_OPERATORS = (
    "rms_norm",
    "layer_norm",
    "silu_mul",
    "gelu_mul",
    "gelu",
    "rope_and_cache",
)


class AttentionBackend(Protocol):
    """A user's own class that computes attention. It is made without arguments.

    It may also have `capturable = True`: its kernels can then be captured in CUDA graphs.
    """

    name: str

    def attention(
        self, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Compute attention as Ops.attention does."""
        ...

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of KV that it reads, as Ops.kv_dtypes does."""
        ...


class OperatorChoice(NamedTuple):
    """The choice of operators for a model. The defaults are the fastest ones of the device."""

    attention: str = "auto"  # "auto", a name of NAMES, an entry point or package.module:Class
    fused_kernels: bool = True
    fused_decoder: bool = True
    deterministic: bool = False  # the bits of a row do not depend on the other rows of its step
    cascade_attention: bool = False  # a prefix that decoding rows of a step share is read once


FASTEST = OperatorChoice()


def select(device: str, choice: OperatorChoice = FASTEST) -> Ops:
    """Return the operators for a device. Raises InvalidRequest for a backend that cannot run."""
    base = (
        invariant_backend(device)
        if choice.deterministic
        else device_backend(device, choice.cascade_attention)
    )
    attention = base if choice.attention == "auto" else find_attention(choice.attention, device)
    if attention.name == base.name:
        attention = base
    if attention is base and choice.fused_kernels and choice.fused_decoder:
        return base
    return cast("Ops", ComposedOps(base, attention, choice.fused_kernels))


def device_backend(device: str, cascade_attention: bool = False) -> Ops:
    """Return the fastest backend for a device, with cascade attention or without it."""
    if cascade_attention and device == "cpu":
        raise InvalidRequest(
            "cascade_attention needs an NVIDIA GPU, but the device is cpu: leave it out",
            "cascade_attention",
        )
    if device == "cpu":
        from octavo.ops.cpu import CpuOps

        return CpuOps()
    try:
        from octavo.ops.triton import TritonOps

        return TritonOps(cascade_attention)
    except ImportError as error:
        if cascade_attention:
            raise InvalidRequest(
                f"cascade_attention needs Triton, and it cannot be used here ({error}): install "
                "triton, or leave cascade_attention out",
                "cascade_attention",
            ) from None
        log.warning("Triton cannot be used (%s): plain PyTorch is several times slower", error)
        return ReferenceOps()


def invariant_backend(device: str) -> Ops:
    """Return the batch-invariant backend of a device (docs/determinism.md)."""
    if device == "cpu":
        from octavo.ops.cpu.invariant_cpu import InvariantCpuOps

        return InvariantCpuOps()
    try:
        from octavo.ops.triton.invariant_triton import InvariantTritonOps
    except ImportError as error:
        raise InvalidRequest(
            f"deterministic needs Triton on a GPU, and it cannot be used here ({error}): install "
            "triton, or leave deterministic out",
            "deterministic",
        ) from None
    return InvariantTritonOps()


# ---- attention -----------------------------------------------------------------------------------


def reference_attention(device: str) -> AttentionBackend:
    return ReferenceOps()


def cpu_attention(device: str) -> AttentionBackend:
    from octavo.ops.cpu import CpuOps
    from octavo.ops.cpu.cpu_features import instruction_set

    if device != "cpu":
        raise InvalidRequest(
            f"attention_backend cpu runs on a CPU, but the device is {device}: use triton or "
            "reference",
            "attention_backend",
        )
    instructions = instruction_set()
    if isinstance(instructions, str):
        raise InvalidRequest(
            f"attention_backend cpu cannot run here: {instructions}. Use reference",
            "attention_backend",
        )
    return CpuOps()


def triton_attention(device: str) -> AttentionBackend:
    if device != "cuda":
        raise InvalidRequest(
            f"attention_backend triton needs an NVIDIA GPU, but the device is {device}: use cpu "
            "or reference",
            "attention_backend",
        )
    try:
        from octavo.ops.triton import TritonOps
    except ImportError as error:
        raise InvalidRequest(
            f"attention_backend triton cannot run here ({error}): install triton, or use reference",
            "attention_backend",
        ) from None
    return TritonOps()


BUILT_IN = {
    "reference": reference_attention,
    "cpu": cpu_attention,
    "triton": triton_attention,
}
NAMES = ("auto", *BUILT_IN)


def find_attention(name: str, device: str) -> AttentionBackend:
    """Return an attention backend by its name. Raises InvalidRequest if it cannot run here."""
    if name in BUILT_IN:
        return BUILT_IN[name](device)
    extension = find_extension(ATTENTION_BACKENDS, name, "attention_backend")
    backend = extension() if isinstance(extension, type) else extension
    members = ("name", "attention", "kv_dtypes")
    missing = [member for member in members if not hasattr(backend, member)]
    if missing:
        raise InvalidRequest(
            f"attention_backend {name!r} has no {' and no '.join(missing)}: it must have the "
            "members of octavo.ops.backends.AttentionBackend",
            "attention_backend",
        )
    return cast("AttentionBackend", backend)


# ---- composition ---------------------------------------------------------------------------------


class ComposedOps:
    """The operators of a backend, with attention or the small operators of another one.

    The layers of a decoder are computed operator by operator, because a fused decoder contains
    operators that are to be exchanged."""

    def __init__(self, base: Ops, attention: Any, fused_kernels: bool):
        self.base = base
        self.attention_backend = attention
        self.name = base.name
        self.variant = f"{base.variant} attention {attention.name}, fused kernels {fused_kernels}"
        self.capturable = base.capturable and getattr(attention, "capturable", False)
        self.ranks = base.ranks
        self.attention = attention.attention
        self.exchanged: dict[str, Any] = {}
        if not fused_kernels:
            plain = ReferenceOps()
            self.exchanged = {name: getattr(plain, name) for name in FUSED_OPERATORS}

    def __getattr__(self, operator: str) -> Any:
        exchanged = self.__dict__.get("exchanged", {})
        return exchanged.get(operator) or getattr(self.base, operator)

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        return None

    def fuse_draft_head(self, head: DraftHeadSpec) -> FusedDraftHead | None:
        return None

    def fuse_step(self, model: StepSpec) -> FusedStep | None:
        return None

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        readable = self.attention_backend.kv_dtypes(dtype)
        return tuple(kv_dtype for kv_dtype in self.base.kv_dtypes(dtype) if kv_dtype in readable)
