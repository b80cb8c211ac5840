"""Computes embeddings from the hidden states that the engine returns for a prompt.

    hidden states of the prompt  ->  the last one, or their mean  ->  fewer dimensions  ->  length 1
    (octavo/core, octavo/runner)     (Request.pooling)                (PoolingParams)

LLM.embed and the routes of the server call the same functions. This module must not
import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.config import PoolerConfig
from octavo.errors import InvalidRequest, OctavoError
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams, accepts_vllm_fields, check_integer

Vector = NDArray[np.float32]


@accepts_vllm_fields(
    {
        "task": "",
        "requires_token_ids": "",
        "skip_reading_prefix_cache": "",
        "extra_kwargs": "",
        "output_kind": "",
        "step_tag_id": "Octavo has no reward models",
        "returned_token_ids": "Octavo has no reward models",
        "late_interaction_params": "Octavo has no models for late interaction",
    }
)
@dataclass(slots=True)
class PoolingParams:
    """The pooling parameters of a request. The names are those of the same class in vLLM."""

    dimensions: int | None = None  # keep this many leading values
    # Whether the embedding has length 1. None: as the model says.
    use_activation: bool | None = None
    normalize: bool | None = None  # vLLM's older name of use_activation

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            self.dimensions = check_integer("dimensions", self.dimensions, 1)
        for name in ("use_activation", "normalize"):
            if getattr(self, name) not in (None, True, False):
                raise InvalidRequest(
                    f"{name} must be true or false, got {getattr(self, name)!r:.100}", name
                )
        if self.use_activation is None:
            self.use_activation = self.normalize

    def clone(self) -> PoolingParams:
        return PoolingParams(self.dimensions, self.use_activation)

    def check_size(self, hidden_size: int) -> None:
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidRequest(
                f"dimensions must be at most {hidden_size}, the size of the model's embeddings, "
                f"got {self.dimensions}",
                "dimensions",
                "param_out_of_range",
            )


def pooling_sampling() -> SamplingParams:
    """Return the sampling parameters of a request that generates nothing."""
    return SamplingParams(temperature=0, max_tokens=1, detokenize=False)


# ---- from hidden states to embeddings ----------------------------------------------------------


def pooled_vector(
    output: RequestOutput, pooling: str, pooler: PoolerConfig, params: PoolingParams
) -> Vector:
    """Return the embedding of a prompt [hidden], or all of its states [tokens, hidden]."""
    if output.pooled is None:
        raise OctavoError(f"request {output.request_id} ended with an error: {output.error}")
    return embedding(output.pooled, len(output.prompt_token_ids), pooling, pooler, params)


def embedding(
    pooled: bytes, length: int, pooling: str, pooler: PoolerConfig, params: PoolingParams
) -> Vector:
    """Make an embedding of the hidden states that the engine returns for `length` tokens."""
    states = np.frombuffer(pooled, np.float32)
    if pooling == "all":
        states = states.reshape(length, -1)
    if pooling == "mean":
        states = states / np.float32(length)
    return shorten(states, pooler, params)


def shorten(vectors: Vector, pooler: PoolerConfig, params: PoolingParams) -> Vector:
    """Keep the leading dimensions of vectors, [..., hidden], and give them length 1."""
    vectors = vectors[..., : params.dimensions]
    is_normal = pooler.use_activation if params.use_activation is None else params.use_activation
    if not is_normal:
        return vectors
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, np.float32(1e-12))


def cosine(left: Vector, right: Vector) -> float:
    """Return the cosine of the angle between two vectors."""
    product = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(left @ right) / max(product, 1e-12)
