"""The bytes of embeddings in other number formats are those of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.serve.api.number_formats import binary_values

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", TORCH)
def test_values_are_rounded_as_torch_rounds_them(dtype: str) -> None:
    generator = np.random.default_rng(1)
    sizes = 2.0 ** generator.uniform(low=-20, high=5, size=4096)
    values = (sizes * generator.choice([-1.0, 1.0], size=4096)).astype(np.float32)
    values = np.concatenate([values, np.float32([0.0, -0.0, 1.0625, 1.1875, 0.5, -1.0])])
    want = torch.from_numpy(values).to(TORCH[dtype]).view(torch.uint8).numpy()
    little = binary_values(values, dtype, order="little")
    assert little == want.tobytes()
    size = len(little) // len(values)
    swapped = np.frombuffer(little, dtype=np.uint8).reshape(-1, size)[:, ::-1]
    assert binary_values(values, dtype, order="big") == swapped.tobytes()
