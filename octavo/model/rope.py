"""Rotary position embedding: the table of cosines and sines that ops.rope_and_cache reads, for each kind of scaling.

Angles are position * frequency, and frequencies fall geometrically over the dimensions. The scalings lower the frequencies
so that a model reaches further than it was trained for:

    linear      all of them by one factor
    llama3      the slow ones by the factor, the fast ones not at all, smoothly between
    yarn        likewise, with bounds given in rotations over the trained length, and cos and sin themselves scaled
    dynamic     only at positions beyond the trained length, the more the further the position is
    custom      each by its own factor, as GGUF files list them
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo.config import RopeConfig
from octavo.errors import ModelError
from octavo.model.fields import LARGEST_REAL, SMALLEST_REAL, Fields, shortened

LONGEST = 2**31 - 1  # positions
CHUNK = 1 << 16  # positions of the table that are computed at a time
TRAINED = "original_max_position_embeddings"
NEEDED = {
    "default": (),
    "custom": (),
    "linear": ("factor",),
    "dynamic": ("factor", TRAINED),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
    "yarn": ("factor", TRAINED),
}
OPTIONAL = {"yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")}


def rope_config(fields: Fields, given: dict[str, Any], theta: float) -> RopeConfig:
    """A rotation from `given`: transformers 5's `rope_parameters` or the older `rope_scaling`, in which the type is called
    rope_type or type, and which may be empty. `theta` is the base where `given` names none."""
    scaling = {
        name: value
        for name, value in given.items()
        if value is not None and name not in ("type", "rope_theta")
    }
    kind = scaling["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in NEEDED:
        raise ModelError(
            f"config.json: rope type {kind!r} is not supported; supported: {', '.join(sorted(NEEDED))}"
        )
    # The trained length is filled in here, so that the table depends on `scaling` alone.
    if kind == "dynamic":
        scaling[TRAINED] = fields.whole("max_position_embeddings")
    elif TRAINED in NEEDED[kind]:
        named = fields[TRAINED] or scaling.get(TRAINED)
        scaling[TRAINED] = named or fields.whole("max_position_embeddings")
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    checked = Fields(scaling)
    for name in NEEDED[kind]:
        try:
            scaling[name] = checked.real(name)
        except ModelError:
            raise ModelError(
                f"config.json: rope type {kind!r} needs {name} as a number from {SMALLEST_REAL:g} "
                f"to {LARGEST_REAL:g}, got {shortened(scaling.get(name))}"
            ) from None
    for name in OPTIONAL.get(kind, ()):
        if name in scaling and (scaling[name] != 0 or name == "attention_factor"):
            scaling[name] = checked.real(name)
    if kind == "llama3" and scaling["low_freq_factor"] == scaling["high_freq_factor"]:
        raise ModelError("config.json: low_freq_factor and high_freq_factor of llama3 must differ")
    base = Fields(given).real("rope_theta", theta)
    if kind == "yarn" and base == 1:
        raise ModelError("config.json: rope type 'yarn' needs a rope_theta other than 1")
    if kind == "custom":
        check_factors(scaling.get("factors"))
    return RopeConfig(theta=base, scaling=scaling)


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
    """How many positions a model reaches whose config.json says max_position_embeddings. As in vLLM: linear, dynamic and yarn
    multiply the trained length; llama3 and custom leave it, because their configs state the length after scaling."""
    scaling = rope.scaling
    kind = scaling.get("rope_type", "default")
    if kind not in ("linear", "dynamic", "yarn"):
        return max_position
    trained = scaling["original_max_position_embeddings"] if kind == "yarn" else max_position
    scaled = trained * scaling["factor"]
    if scaled > LONGEST:
        raise ModelError(
            f"config.json: a rope factor of {scaling['factor']:g} for {trained:g} positions makes more than {LONGEST} positions"
        )
    return max(max_position, int(scaled))


def rope_table(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """cos and sin of every angle, [max_position, 2, head_dim / 2], float32, on the default device."""
    device = torch.get_default_device()
    table = torch.empty(max_position, 2, head_dim // 2, dtype=torch.float32, device=device)
    if device.type == "meta":
        return table
    frequencies, scale = inverse_frequencies(rope, head_dim)
    for first in range(
        0, max_position, CHUNK
    ):  # a context of a million positions needs no second table meanwhile
        last = min(first + CHUNK, max_position)
        positions = torch.arange(first, last, dtype=torch.float32, device="cpu")[:, None]
        if rope.scaling.get("rope_type") == "dynamic":
            frequencies = dynamic_frequencies(rope, head_dim, positions)
        angles = positions * frequencies
        table[first:last, 0] = angles.cos().mul_(scale)
        table[first:last, 1] = angles.sin().mul_(scale)
    return table


def dynamic_frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """[positions, head_dim / 2]: each position's frequencies are those of a sequence that ends there, as in transformers when
    it generates token by token. So they depend on the position alone, whatever the chunks of a prompt are."""
    if head_dim <= 2:
        raise ModelError(
            f"config.json: rope type 'dynamic' needs heads of more than {head_dim} dimensions"
        )
    trained = rope.scaling["original_max_position_embeddings"]
    factor = rope.scaling["factor"]
    length = (positions.double() + 1).clamp(min=trained)
    growth = factor * length / trained - (factor - 1)
    base = (rope.theta * growth ** (head_dim / (head_dim - 2))).float()
    dims = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / base ** (dims / head_dim)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """[head_dim / 2] angles a position, computed on the CPU so that all devices agree, and the factor on cos and sin."""
    s = rope.scaling
    kind = rope.scaling.get("rope_type", "default")
    plain = 1.0 / (
        rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    )
    if kind == "linear":
        return plain / s["factor"], 1.0
    if kind == "custom":
        if len(s["factors"]) != len(plain):
            raise ModelError(
                f"config.json: rope type 'custom' needs {len(plain)} factors for heads of {head_dim} dimensions, "
                f"got {len(s['factors'])}"
            )
        return plain / torch.tensor(s["factors"], dtype=torch.float32, device="cpu"), 1.0
    if kind == "llama3":
        # rotations over the trained length
        turns = s["original_max_position_embeddings"] * plain / (2 * math.pi)
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        return blend(plain, s["factor"], keep.clamp(0, 1)), 1.0
    if kind == "yarn":
        low = turning_dim(
            s.get("beta_fast") or 32, rope.theta, head_dim, s["original_max_position_embeddings"]
        )
        high = turning_dim(
            s.get("beta_slow") or 1, rope.theta, head_dim, s["original_max_position_embeddings"]
        )
        if s.get("truncate", True):
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, head_dim - 1)
        if low == high:
            high += 0.001
        dims = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        keep = 1 - ((dims - low) / (high - low)).clamp(0, 1)
        return blend(plain, s["factor"], keep), yarn_scale(s)
    return plain, 1.0


def blend(plain: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Frequencies as they are where keep is 1, divided by the factor where it is 0."""
    return plain * keep + plain / factor * (1 - keep)


def turning_dim(rotations: float, theta: float, head_dim: int, length: int) -> float:
    """The (fractional) dimension that turns this often over `length` positions."""
    return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def yarn_scale(s: dict[str, Any]) -> float:
    """YaRN's temperature on attention, applied to cos and sin of q and k alike."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s["factor"]) + 1.0 if s["factor"] > 1 else 1.0

    if s.get("attention_factor") is not None:
        return float(s["attention_factor"])
    if s.get("mscale") and s.get("mscale_all_dim"):
        return mscale(s["mscale"]) / mscale(s["mscale_all_dim"])
    return mscale(1.0)
