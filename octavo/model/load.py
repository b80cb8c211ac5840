"""Finds a checkpoint by the model's name and loads its weights into a model.

A checkpoint is a directory, a GGUF file, a model on the hub or the embedded model. Its tensors are
compared with those that the model needs and loaded one at a time, so peak memory is the model and
one tensor. This module uses models only as CausalLM; checkpoint.py and gguf.py read the file
formats.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from octavo.config import DTYPE_BYTES, EMBEDDED, ModelConfig
from octavo.errors import ModelError, ModelNotFound, did_you_mean
from octavo.model import embedded, prequantized, prequantized_fp8, quant, quantized
from octavo.model.base import CausalLM, Formats, build
from octavo.model.checkpoint import Checkpoint, open_directory
from octavo.model.gguf import open_gguf
from octavo.model.tensor_matching import match_tensors
from octavo.model.tensor_parallel import divide_all
from octavo.model.tied_weights import parse_checkpoint
from octavo.model_files import CHOICES, find_model_files
from octavo.ops import Ops
from octavo.ops.cpu.cpu_features import instruction_set
from octavo.ops.weight import QuantWeight, WeightFormat

log = logging.getLogger(__name__)

HUB_WEIGHTS = ["*.safetensors"]
HUB_TEXTS = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
# Subfolders and duplicates are not needed. Pickles are never read.
HUB_SKIP = ["*/*", "consolidated*", "*.bin", "*.pt", "*.pth"]
HUB_TIMEOUT = 3.0  # seconds


# ---- finding a checkpoint ------------------------------------------------------------------------


def open_checkpoint(
    model: str | Path | None, revision: str | None = None, weights: bool = True
) -> Checkpoint:
    """Open a local directory, a .gguf file, a model on the hub, or the embedded model.

    The embedded model is opened by its name or by None. Without `weights`, a directory needs only
    its config.json.
    """
    if model is None:
        return open_gguf(embedded.embedded_path())
    path = find_model_files(model, weights)
    if path is not None:
        return _open_directory(path, weights) if path.is_dir() else open_gguf(path)
    name = str(model)
    if name == EMBEDDED:
        return open_gguf(embedded.embedded_path())
    return _open_directory(_from_hub(name, revision, weights), weights)


def _open_directory(path: Path, weights: bool) -> Checkpoint:
    checkpoint = open_directory(path, weights)
    if weights:
        quantization_config = checkpoint.config.get("quantization_config")
        is_ours = (
            isinstance(quantization_config, dict)
            and quantization_config.get("quant_method") == quantized.METHOD
        )
        join = quantized.joined if is_ours else prequantized.joined
        checkpoint.tensors = join(checkpoint.tensors, checkpoint.config, checkpoint.source)
    return checkpoint


def _from_hub(name: str, revision: str | None, weights: bool) -> Path:
    """Return the directory of the snapshot.

    Missing files are downloaded. If the hub does not answer, only the cache is used.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ModelNotFound(
            f"there is no directory {name}, and looking it up on the hub needs: pip install "
            f"huggingface_hub. {CHOICES}"
        ) from None
    # The library's errors differ by version and transport, so all of them are caught and quoted.
    hub_error: Exception | None = None
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except Exception as error:
        hub_error = error
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=HUB_TEXTS + HUB_WEIGHTS * weights,
            ignore_patterns=HUB_SKIP,
            local_files_only=hub_error is not None,
        )
    except Exception as error:
        reason = " ".join(str(hub_error or error).split())[:300]
        raise ModelNotFound(
            f"no model {name}: it is not a local directory, the cache of the Hugging Face hub "
            "(HF_HOME) does not have all its files, and the download from the hub failed "
            f"({type(hub_error or error).__name__}: {reason}). {did_you_mean(name, [EMBEDDED])}"
            f"{CHOICES}"
        ) from error
    return Path(folder)


# ---- filling a model -----------------------------------------------------------------------------


@torch.no_grad()
def load_weights(
    model: CausalLM, checkpoint: Checkpoint, progress: bool | Callable[[float], None] = True
) -> None:
    """Load all tensors of the checkpoint into the model, after comparing names and shapes.

    `progress` is True for a progress bar on stderr, or a function that receives the fraction that
    is done.
    """
    target_by_name = match_tensors(model, checkpoint)
    progress_bar = _progress_bar(checkpoint.nbytes) if progress is True else None
    bytes_total = checkpoint.nbytes
    bytes_done = 0
    for name, tensor in checkpoint.tensors.items():
        if name in target_by_name:
            target_by_name[name].load(tensor)
        bytes_done += tensor.nbytes
        if callable(progress):
            progress(bytes_done / max(bytes_total, 1))
        if progress_bar is not None:
            progress_bar.update(tensor.nbytes)
    if progress_bar is not None:
        progress_bar.close()
    target_by_name.clear()  # so that packing frees the weights that it replaces
    model.finish_loading()
    _release_free_memory()


def _release_free_memory() -> None:
    """Return the memory that packing freed to the system.

    Without this, 60 MB stayed allocated after loading the embedded model, which has 98 MB. Only
    glibc and torch on a GPU need it.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    malloc_trim = (
        getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    )
    if malloc_trim is not None:
        malloc_trim(0)


def _progress_bar(nbytes: int) -> Any:
    """Return a progress bar on stderr, which appears only if loading takes a while."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    return tqdm(
        total=nbytes, desc="loading weights", unit="B", unit_scale=True, delay=0.5, leave=False
    )


@torch.no_grad()
def dummy_weights(model: CausalLM, seed: int = 0) -> None:
    """Fill a model with small random weights, which depend on the seed only.

    They allow speed and memory to be measured without a checkpoint.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    if model.config.part is not None:
        fill_parts(model, generator)
        return
    for module in model.modules():
        if isinstance(module, QuantWeight):
            values = torch.empty(module.shape, device=module.codes.device)
            quant.fill(module, values.normal_(0.0, 0.02, generator=generator))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    model.finish_loading()
    _release_free_memory()


def fill_parts(model: CausalLM, generator: torch.Generator) -> None:
    """Fill one rank's part of a model with random weights. Weights that several ranks hold are
    equal on all of them."""
    for name, target in model.weight_map().items():
        values = torch.empty(target.shape, device=generator.device)
        if values.dim() == 1:
            values.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            values.normal_(0.0, 0.02, generator=generator)
        target.fill(values, rearranged=True)
    model.finish_loading()
    _release_free_memory()


# ---- choosing formats ----------------------------------------------------------------------------


def choose_formats(
    requested_format: WeightFormat | str, checkpoint: Checkpoint, backend: str
) -> Formats | None:
    """Return the formats of weights for build(), or None if all weights are plain numbers.

    With "auto", a weight has the format that the checkpoint stores, if it is supported. The "cpu"
    backend supports fewer formats, and none if the CPU kernels cannot run on this machine.
    """
    if isinstance(requested_format, WeightFormat):
        if requested_format.is_float and backend == "cpu":
            _warn_of_slow_products(requested_format)
        return quant.choose(requested_format)
    has_kernels = backend != "cpu" or not isinstance(instruction_set(), str)
    stored_formats = [
        tensor.format
        for tensor in checkpoint.tensors.values()
        if tensor.format is not None and (has_kernels or tensor.format.is_float)
    ]
    if requested_format == "none" or not (stored_formats or (backend == "cpu" and has_kernels)):
        return None
    if backend == "cpu" and any(stored_format.is_float for stored_format in stored_formats):
        _warn_of_slow_products(stored_formats[0])

    def stored(tensor_names: Mapping[str, str]) -> WeightFormat | list[WeightFormat] | None:
        # A file may omit the first part of its names.
        tensors = [
            tensor
            for name in tensor_names.values()
            for stored_name, tensor in checkpoint.tensors.items()
            if f".{name}".endswith(f".{stored_name}")
        ]
        formats = [
            quant.for_cpu(tensor.format) if backend == "cpu" else tensor.format
            for tensor in tensors
            if tensor.format is not None and (has_kernels or tensor.format.is_float)
        ]
        if len(formats) == len(tensor_names) and len(set(formats)) == 1:
            return formats[0]
        if backend != "cpu":
            return formats if len(formats) == len(tensor_names) else None
        # The parts have several formats. An 8-bit format can hold all of them after one more
        # rounding, and the CPU kernels for it are much faster than those for plain weights.
        bits = max(
            (8 * tensor.nbytes / math.prod(tensor.shape) for tensor in tensors), default=16.0
        )
        return quant.EDGE_FORMAT if bits < 9 else None

    return stored


def _warn_of_slow_products(weight_format: WeightFormat) -> None:
    log.warning(
        "%s has no CPU kernels: every product converts the whole weight, which is slow. "
        "Use --quant int8, which is as small and fast",
        weight_format,
    )


# ---- loading a model -----------------------------------------------------------------------------


def outline(
    config: ModelConfig,
    model_class: type[CausalLM],
    ops: Ops,
    dtype: torch.dtype,
    formats: Formats | None,
) -> CausalLM:
    """Return the model without memory for its weights: their names, shapes and sizes."""
    try:
        return build(config, model_class, ops, dtype, "meta", formats)
    except (RuntimeError, TypeError) as error:  # sizes that torch cannot count
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"config.json describes weights that cannot be allocated: {reason}"
        ) from None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of loading a model."""

    dtype: str = "auto"  # the dtype of activations and plain weights; "auto" takes config.json's
    device: str = "cpu"
    load_format: str = "auto"  # "dummy" fills the weights with random numbers
    # The name of a format, "none", or "auto" for the checkpoint's own format if the device
    # computes well with it.
    quantization: str | None = "none"
    revision: str | None = None  # the revision of a model on the hub
    seed: int = 0  # the seed of dummy weights
    rank: int = 0  # the tensor-parallel rank whose part of the model is loaded
    num_ranks: int = 1
    hf_overrides: dict[str, Any] | None = None  # replace fields of config.json
    model_class: str | None = None  # package.module:Class; None: found from config.json


DEFAULT_OPTIONS = LoadOptions()
# vLLM's name of a format that a checkpoint is stored in -> quant_method of such a checkpoint.
STORED_METHODS = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors",
    "gguf": "gguf",
}


def choose_dtype(requested: str, config: ModelConfig) -> str:
    """Return the name of the data type of activations; "auto" is the checkpoint's."""
    dtype = config.dtype if requested == "auto" else requested
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype must be one of auto, {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return dtype


def load_model(
    model: str | Path | dict[str, Any] | None,
    options: LoadOptions = DEFAULT_OPTIONS,
    *,
    ops: Ops,
    progress: bool | Callable[[float], None] = True,
    check: Callable[[CausalLM, Checkpoint], None] = lambda planned, checkpoint: None,
) -> tuple[CausalLM, Checkpoint]:
    """Return a model that is ready to run, and its checkpoint.

    For load_format="dummy", `model` may be the content of a config.json. `check` gets the model
    without memory for its weights, and may refuse it before any weight is read.
    """
    checkpoint = _find_checkpoint(model, options)
    checkpoint.config = checkpoint.config | (options.hf_overrides or {})
    options = replace(options, quantization=check_stored(options.quantization, checkpoint))
    model_class, config = parse_checkpoint(checkpoint, options.model_class)
    dtype: torch.dtype = getattr(torch, choose_dtype(options.dtype, config))
    formats = choose_formats(quant.parse(options.quantization), checkpoint, ops.name)
    if options.num_ranks > 1:
        check_divisible(model_class, config)
        group_size = largest_group(quant.parse(options.quantization), checkpoint)
        config = divide_all(config, options.num_ranks, group_size)[options.rank]
    planned = outline(config, model_class, ops, dtype, formats)
    if options.load_format == "auto":
        match_tensors(planned, checkpoint)
    check(planned, checkpoint)
    built = build(config, model_class, ops, dtype, options.device, formats)
    if options.load_format == "dummy":
        dummy_weights(built, options.seed)
    else:
        load_weights(built, checkpoint, progress)
    return built, checkpoint


def check_stored(requested: str | None, checkpoint: Checkpoint) -> str | None:
    """Return the format in which weights are loaded. If vLLM's name of a stored format is
    requested, the checkpoint must have this format."""
    config = checkpoint.config.get("quantization_config")
    if requested == "fp8" and isinstance(config, dict) and prequantized_fp8.is_fp8(config):
        return "auto"  # The codes and scales of the checkpoint are not rounded again.
    if requested not in STORED_METHODS:
        return requested
    stored_method = str(config.get("quant_method")) if isinstance(config, dict) else "none"
    if checkpoint.gguf_metadata is not None:
        stored_method = "gguf"
    if stored_method != STORED_METHODS[requested]:
        description = f"is quantised with {stored_method}"
        if stored_method == "none":
            description = "is not quantised"
        raise ModelError(
            f"quantization={requested!r} says how the checkpoint is stored, but "
            f"{checkpoint.source} {description}. Leave quantization out, or choose a format that "
            f"Octavo quantises to while loading: {', '.join(quant.FORMATS)}"
        )
    return "auto"


def check_divisible(model_class: type[CausalLM], config: ModelConfig) -> None:
    if not model_class.supports_tensor_parallel:
        raise ModelError(
            f"{config.architecture} does not support tensor_parallel_size above 1: its class "
            f"{model_class.__name__} is not built from config.shares. Use tensor_parallel_size 1"
        )


def largest_group(requested_format: WeightFormat | str, checkpoint: Checkpoint) -> int:
    """Return the largest number of inputs that may share a scale, or 1 for plain weights."""
    formats = [tensor.format for tensor in checkpoint.tensors.values() if tensor.format is not None]
    if isinstance(requested_format, WeightFormat):
        formats = [requested_format]
    if requested_format == "none" or not formats:
        return 1
    return max(
        quant.EDGE_FORMAT.group_size, *(weight_format.group_size for weight_format in formats)
    )


def _find_checkpoint(model: str | Path | dict[str, Any] | None, options: LoadOptions) -> Checkpoint:
    if options.load_format not in ("auto", "dummy"):
        raise ModelError(f"load_format must be auto or dummy, got {options.load_format!r}")
    if not isinstance(model, dict):
        return open_checkpoint(model, options.revision, weights=options.load_format == "auto")
    if options.load_format != "dummy":
        raise ModelError("a config given directly has no weights: use load_format='dummy'")
    return Checkpoint("a config given directly", model)
