"""Sampling defaults that a model recommends in its generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequest
from octavo.model.checkpoint import read_json
from octavo.params import recommended_sampling

log = logging.getLogger(__name__)


def read_generation_config(source: str) -> dict[str, Any] | None:
    """Read the file that the option generation_config names. "vllm" means no file, a directory
    holds the file, and "auto" means the model's own file: None."""
    if source == "auto":
        return None
    if source == "vllm":
        return {}
    file = Path(source).expanduser() / "generation_config.json"
    if not file.is_file():
        raise InvalidRequest(
            "generation_config must be auto, vllm or a directory with a generation_config.json, "
            f"got {source!r}",
            "generation_config",
        )
    return read_json(file)


def default_sampling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of requests that leave them out."""
    try:
        sampling = recommended_sampling(config)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"generation_config.json recommends a value that cannot be used: {error}. Use "
            "generation_config=vllm (--generation-config vllm), which leaves the file out",
            "generation_config",
        ) from None
    if sampling:
        shown = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        log.info("sampling defaults of the model and of the options: %s", shown)
    return sampling
