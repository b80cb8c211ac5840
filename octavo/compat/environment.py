"""Small functions that scripts for vLLM import."""

from __future__ import annotations

import gc
import logging
import random
import socket
import uuid

import numpy as np
import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of LLM objects that the script has deleted."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def destroy_model_parallel() -> None:
    """Do nothing: an LLM object ends the processes of its ranks itself, in LLM.close."""


def destroy_distributed_environment() -> None:
    """Do nothing, like destroy_model_parallel."""


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def random_uuid() -> str:
    return uuid.uuid4().hex


def get_open_port() -> int:
    """Return a port that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def set_random_seed(seed: int | None) -> None:
    """Seed the generators of Python, NumPy and PyTorch. Octavo itself draws from none of them."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def print_embeddings(embedding: list[float], indent: str = "") -> None:
    """Print the first values of an embedding, and how many it has."""
    shown = ", ".join(f"{value:.4f}" for value in embedding[:4])
    print(f"{indent}Embedding: [{shown}, ...] ({len(embedding)} values)")


class Platform:
    """The device that LLM uses by default."""

    @property
    def device_type(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False


current_platform = Platform()
