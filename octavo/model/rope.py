"""Rotary position embedding: the table of cosines and sines that ops.rope_and_cache reads.

An angle is position * frequency, and frequencies fall geometrically over the dimensions. Scaling
lowers the frequencies, so that a model reaches further than its trained length:

    linear      divides all frequencies by one factor
    llama3      divides low frequencies by the factor, keeps high ones, and interpolates between
    yarn        as llama3, with bounds in rotations over the trained length; scales cos and sin too
    dynamic     lowers the frequencies at positions beyond the trained length only
    custom      divides each frequency by its own factor, as GGUF files list them
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo.config import RopeConfig
from octavo.errors import ModelError
from octavo.model.fields import LARGEST_REAL, SMALLEST_REAL, Fields, shortened

MAX_POSITIONS = 2**31 - 1
CHUNK = 1 << 16  # positions of the table that are computed at a time
ORIGINAL_LENGTH = "original_max_position_embeddings"
REQUIRED = {
    "default": (),
    "custom": (),
    "linear": ("factor",),
    "dynamic": ("factor", ORIGINAL_LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH),
    "yarn": ("factor", ORIGINAL_LENGTH),
}
OPTIONAL = {"yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")}


def rope_config(fields: Fields, parameters: dict[str, Any], theta: float) -> RopeConfig:
    """Read a RopeConfig from `parameters`, which may be empty.

    They are the `rope_parameters` of transformers 5 or the older `rope_scaling`, which names the
    type rope_type or type. `theta` is the default base.
    """
    scaling = {
        name: value
        for name, value in parameters.items()
        if value is not None and name not in ("type", "rope_theta")
    }
    rope_type = scaling["rope_type"] = (
        parameters.get("rope_type") or parameters.get("type") or "default"
    )
    if not isinstance(rope_type, str) or rope_type not in REQUIRED:
        raise ModelError(
            f"config.json: rope type {rope_type!r} is not supported: use one of "
            f"{', '.join(sorted(REQUIRED))}"
        )
    # The trained length is filled in here, so that the table depends on `scaling` alone.
    if rope_type == "dynamic":
        scaling[ORIGINAL_LENGTH] = fields.positive_int("max_position_embeddings")
    elif ORIGINAL_LENGTH in REQUIRED[rope_type]:
        configured = fields[ORIGINAL_LENGTH] or scaling.get(ORIGINAL_LENGTH)
        scaling[ORIGINAL_LENGTH] = configured or fields.positive_int("max_position_embeddings")
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    checked = Fields(scaling)
    for name in REQUIRED[rope_type]:
        try:
            scaling[name] = checked.positive_float(name)
        except ModelError:
            raise ModelError(
                f"config.json: rope type {rope_type!r} needs {name} as a number from "
                f"{SMALLEST_REAL:g} "
                f"to {LARGEST_REAL:g}, got {shortened(scaling.get(name))}"
            ) from None
    for name in OPTIONAL.get(rope_type, ()):
        if name in scaling and (scaling[name] != 0 or name == "attention_factor"):
            scaling[name] = checked.positive_float(name)
    if rope_type == "llama3" and scaling["low_freq_factor"] == scaling["high_freq_factor"]:
        raise ModelError("config.json: low_freq_factor and high_freq_factor of llama3 must differ")
    theta_value = Fields(parameters).positive_float("rope_theta", theta)
    if rope_type == "yarn" and theta_value == 1:
        raise ModelError("config.json: rope type 'yarn' needs a rope_theta other than 1")
    if rope_type == "custom":
        check_factors(scaling.get("factors"))
    return RopeConfig(theta=theta_value, scaling=scaling)


def check_factors(factors: Any) -> None:
    if not isinstance(factors, list) or not all(
        type(factor) in (int, float) and SMALLEST_REAL <= factor <= LARGEST_REAL
        for factor in factors
    ):
        raise ModelError(
            "config.json: rope type 'custom' needs factors, a list of numbers from "
            f"{SMALLEST_REAL:g} to {LARGEST_REAL:g}"
        )


def context_length(rope: RopeConfig, max_position: int) -> int:
    """Return the number of positions that a model with this max_position_embeddings reaches.

    As in vLLM, linear, dynamic and yarn multiply the trained length. llama3 and custom leave it,
    because their configs state the length after scaling.
    """
    scaling = rope.scaling
    rope_type = scaling.get("rope_type", "default")
    if rope_type not in ("linear", "dynamic", "yarn"):
        return max_position
    original_length = (
        scaling["original_max_position_embeddings"] if rope_type == "yarn" else max_position
    )
    scaled = original_length * scaling["factor"]
    if scaled > MAX_POSITIONS:
        raise ModelError(
            f"config.json: a rope factor of {scaling['factor']:g} for {original_length:g} "
            f"positions makes more than {MAX_POSITIONS} positions"
        )
    return max(max_position, int(scaled))


def rope_table(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """Return cos and sin of every angle, [max_position, 2, head_dim / 2], in float32."""
    device = torch.get_default_device()
    table = torch.empty(max_position, 2, head_dim // 2, dtype=torch.float32, device=device)
    if device.type == "meta":
        return table
    frequencies, scale = inverse_frequencies(rope, head_dim)
    # The table is computed in chunks, so that temporaries stay small.
    for first_position in range(0, max_position, CHUNK):
        end_position = min(first_position + CHUNK, max_position)
        positions = torch.arange(first_position, end_position, dtype=torch.float32, device="cpu")[
            :, None
        ]
        if rope.scaling.get("rope_type") == "dynamic":
            frequencies = dynamic_frequencies(rope, head_dim, positions)
        angles = positions * frequencies
        table[first_position:end_position, 0] = angles.cos().mul_(scale)
        table[first_position:end_position, 1] = angles.sin().mul_(scale)
    return table


def dynamic_frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Return the frequencies of each position, [positions, head_dim / 2].

    They are those of a sequence that ends at the position, as in transformers when it generates
    token by token. So they do not depend on how a prompt is divided into chunks.
    """
    if head_dim <= 2:
        raise ModelError(
            f"config.json: rope type 'dynamic' needs heads of more than {head_dim} dimensions"
        )
    original_length = rope.scaling["original_max_position_embeddings"]
    factor = rope.scaling["factor"]
    length = (positions.double() + 1).clamp(min=original_length)
    growth = factor * length / original_length - (factor - 1)
    base = (rope.theta * growth ** (head_dim / (head_dim - 2))).float()
    dims = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / base ** (dims / head_dim)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies [head_dim / 2] and the factor that scales cos and sin.

    They are computed on the CPU, so that all devices have the same values.
    """
    scaling = rope.scaling
    rope_type = rope.scaling.get("rope_type", "default")
    frequencies = 1.0 / (
        rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    )
    if rope_type == "linear":
        return frequencies / scaling["factor"], 1.0
    if rope_type == "custom":
        if len(scaling["factors"]) != len(frequencies):
            raise ModelError(
                f"config.json: rope type 'custom' needs {len(frequencies)} factors for heads of "
                f"{head_dim} dimensions, "
                f"got {len(scaling['factors'])}"
            )
        return frequencies / torch.tensor(
            scaling["factors"], dtype=torch.float32, device="cpu"
        ), 1.0
    if rope_type == "llama3":
        # These are the rotations over the trained length.
        rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        unscaled_share = (rotations - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        return blend(frequencies, scaling["factor"], unscaled_share.clamp(0, 1)), 1.0
    if rope_type == "yarn":
        low = correction_dim(
            scaling.get("beta_fast") or 32,
            rope.theta,
            head_dim,
            scaling["original_max_position_embeddings"],
        )
        high = correction_dim(
            scaling.get("beta_slow") or 1,
            rope.theta,
            head_dim,
            scaling["original_max_position_embeddings"],
        )
        if scaling.get("truncate", True):
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, head_dim - 1)
        if low == high:
            high += 0.001
        dims = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        unscaled_share = 1 - ((dims - low) / (high - low)).clamp(0, 1)
        return blend(frequencies, scaling["factor"], unscaled_share), yarn_scale(scaling)
    return frequencies, 1.0


def blend(frequencies: Tensor, factor: float, unscaled_share: Tensor) -> Tensor:
    """Interpolate between unchanged frequencies (unscaled_share 1) and frequencies divided by the
    factor (unscaled_share 0)."""
    return frequencies * unscaled_share + frequencies / factor * (1 - unscaled_share)


def correction_dim(rotations: float, theta: float, head_dim: int, length: int) -> float:
    """Return the (fractional) dimension that rotates this often over `length` positions."""
    return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def yarn_scale(scaling: dict[str, Any]) -> float:
    """Return YaRN's attention temperature, which scales cos and sin of queries and keys."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
