"""From a model's name to a model with its weights in place.

Finds the checkpoint (a directory, a GGUF file, the hub, the embedded model), compares its tensors with what the model
wants, and streams them in one at a time: peak memory is the model and one tensor. Knows models only as CausalLM; file
formats are checkpoint.py's and gguf.py's.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.config import DTYPE_BYTES, ModelConfig
from octavo.errors import CheckpointError, ModelError, ModelNotFound, NotEnoughMemory
from octavo.model import embedded, foreign, quant, quantized
from octavo.model.base import CausalLM, Formats, build
from octavo.model.checkpoint import Checkpoint, open_directory
from octavo.model.gguf import open_gguf
from octavo.model.match import match_tensors
from octavo.model.tied import parse_checkpoint
from octavo.ops import Ops
from octavo.ops.cpu.cpu_features import instruction_set
from octavo.ops.weight import Format, QuantWeight

log = logging.getLogger(__name__)

HUB_WEIGHTS = ["*.safetensors"]
HUB_TEXTS = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
# subfolders and doubles; pickles are never read
HUB_SKIP = ["*/*", "consolidated*", "*.bin", "*.pt", "*.pth"]
HUB_TIMEOUT = 3.0  # seconds


# ---- find ---------------------------------------------------------------------------------------------


def open_checkpoint(
    model: str | Path | None, revision: str | None = None, weights: bool = True
) -> Checkpoint:
    """A local directory, a .gguf file, a name on the hub, or the embedded model (its name, or None).
    Without `weights` a directory needs only its config.json."""
    if model is None:
        return open_gguf(embedded.embedded_path())
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is not a .gguf file; for safetensors give the directory that holds config.json too"
            )
        return open_gguf(path)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not any(path.glob("*.safetensors")):
            if len(ggufs) > 1:
                raise CheckpointError(
                    f"{path} holds {len(ggufs)} .gguf files, give one: {', '.join(p.name for p in ggufs)}"
                )
            return open_gguf(ggufs[0])
        return _open_directory(path, weights)
    name = str(model)
    if name == embedded.NAME:
        return open_gguf(embedded.embedded_path())
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII) or name.endswith(".gguf"):
        raise ModelNotFound(f"no such directory or file: {name}. {WAYS_ON}")
    return _open_directory(_from_hub(name, revision, weights), weights)


def _open_directory(path: Path, weights: bool) -> Checkpoint:
    checkpoint = open_directory(path, weights)
    if weights:
        about = checkpoint.config.get("quantization_config")
        ours = isinstance(about, dict) and about.get("quant_method") == quantized.METHOD
        join = quantized.joined if ours else foreign.joined
        checkpoint.tensors = join(checkpoint.tensors, checkpoint.config, checkpoint.source)
    return checkpoint


WAYS_ON = (
    "Ways to go on: a local directory with config.json and *.safetensors; a .gguf file; a name org/name on huggingface.co; "
    "a snapshot already in the cache (HF_HOME says where, HF_HUB_OFFLINE=1 uses it alone); the embedded model "
    f'({embedded.NAME!r}, {embedded.INSTALL}); or load_format="dummy" (--load-format dummy) with a directory that holds only '
    "config.json"
)


def _from_hub(name: str, revision: str | None, weights: bool) -> Path:
    """The snapshot's directory: downloaded where needed, from the cache alone if the hub gives no answer."""
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ModelNotFound(
            f"there is no directory {name}, and looking it up on the hub needs: pip install huggingface_hub. {WAYS_ON}"
        ) from None
    # The library's errors differ by version and transport; whatever went wrong is told with its own words.
    refusal: Exception | None = None
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except Exception as error:
        refusal = error
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=HUB_TEXTS + HUB_WEIGHTS * weights,
            ignore_patterns=HUB_SKIP,
            local_files_only=refusal is not None,
        )
    except Exception as error:
        why = " ".join(str(refusal or error).split())[:300]
        raise ModelNotFound(
            f"there is no directory {name}, no complete snapshot of it in the hub's cache, and the hub did not give it "
            f"({type(refusal or error).__name__}: {why}). {WAYS_ON}"
        ) from error
    return Path(folder)


# ---- fill ---------------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(
    model: CausalLM, checkpoint: Checkpoint, progress: bool | Callable[[float], None] = True
) -> None:
    """Put all tensors of the checkpoint into the model, after one comparison of names and shapes (match_tensors).
    `progress`: True for a bar on stderr, or a function that is given the fraction that is done."""
    places = match_tensors(model, checkpoint)
    bar = _bar(checkpoint.nbytes) if progress is True else None
    total = checkpoint.nbytes
    done = 0
    for name, tensor in checkpoint.tensors.items():
        if name in places:
            places[name].load(tensor)
        done += tensor.nbytes
        if callable(progress):
            progress(done / max(total, 1))
        if bar is not None:
            bar.update(tensor.nbytes)
    if bar is not None:
        bar.close()
    places.clear()  # nobody holds what packing replaces
    model.finish_loading()
    _give_memory_back()


def _give_memory_back() -> None:
    """What packing freed goes back to the system: of the embedded model's 98 MB it left 60 MB behind. Only glibc needs it, and
    torch on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _bar(nbytes: int) -> Any:
    """A progress bar on stderr that shows itself only when loading takes a while."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    return tqdm(
        total=nbytes, desc="loading weights", unit="B", unit_scale=True, delay=0.5, leave=False
    )


@torch.no_grad()
def dummy_weights(model: CausalLM, seed: int = 0) -> None:
    """Small random weights, the same for the same seed: for measuring speed and memory without a checkpoint."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
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
    _give_memory_back()


# ---- which format -------------------------------------------------------------------------------------


def choose_formats(wanted: Format | str, checkpoint: Checkpoint, backend: str) -> Formats | None:
    """The formats of weights, for build(); None: all are plain. In "auto" a weight has the format that the checkpoint has it in,
    where that is one of ours; so does none where the CPU kernels cannot run. The "cpu" backend reads fewer formats."""
    if isinstance(wanted, Format):
        if wanted.float and backend == "cpu":
            log.warning(
                "%s is dequantised for every product on a CPU, which is slow: int8 is as small and fast",
                wanted,
            )
        return quant.choose(wanted)
    plain = all(tensor.form is None for tensor in checkpoint.tensors.values())
    if wanted == "none" or (isinstance(instruction_set(), str) if backend == "cpu" else plain):
        return None

    def stored(names: Mapping[str, str]) -> Format | list[Format] | None:
        # A file may leave the first part of its names away.
        found = [
            tensor
            for name in names.values()
            for end, tensor in checkpoint.tensors.items()
            if f".{name}".endswith(f".{end}")
        ]
        forms = [
            quant.for_cpu(tensor.form) if backend == "cpu" else tensor.form
            for tensor in found
            if tensor.form is not None
        ]
        if len(forms) == len(names) and len(set(forms)) == 1:
            return forms[0]
        if backend != "cpu":
            return forms if len(forms) == len(names) else None
        # Blocks of several kinds: eight bits hold them all but for a last rounding, which a CPU's speed is worth.
        bits = max((8 * tensor.nbytes / math.prod(tensor.shape) for tensor in found), default=16.0)
        return quant.EDGE if bits < 9 else None

    return stored


# ---- both ---------------------------------------------------------------------------------------------


def outline(
    config: ModelConfig, cls: type[CausalLM], ops: Ops, dtype: torch.dtype, formats: Formats | None
) -> CausalLM:
    """The model without memory for its weights: their names, shapes and sizes."""
    try:
        return build(config, cls, ops, dtype, "meta", formats)
    except (RuntimeError, TypeError) as error:  # sizes that torch cannot count
        why = str(error).partition("\n")[0]
        raise ModelError(f"config.json describes weights that cannot be allocated: {why}") from None


def check_memory(model: CausalLM, source: str, device: str, available: int) -> None:
    """Raise NotEnoughMemory where the weights alone take more than is available."""
    needed = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    if needed > available:
        raise NotEnoughMemory(
            f"the weights of {source} take {needed / 2**30:.1f} GiB as they would be loaded, but {available / 2**30:.1f} GiB of "
            f"{device} memory are available. Quantise them (--quant int8 or int4-g32-asym), use a smaller dtype or model, or "
            "free memory; `octavo plan MODEL` shows what fits"
        )


def load_model(
    model: str | Path | dict[str, Any] | None,
    *,
    ops: Ops,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    quantization: str | None = "none",
    revision: str | None = None,
    progress: bool | Callable[[float], None] = True,
    seed: int = 0,
    available: int | None = None,
) -> tuple[CausalLM, Checkpoint]:
    """A model ready to run, and the checkpoint that it came from. For load_format="dummy", `model` may be a config.json's
    content. `quantization`: a format's name, "none", or "auto" for what the checkpoint has and the device computes well.
    `available`: bytes of device memory; weights that take more are refused before any of them is read."""
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"load_format is 'auto' or 'dummy', not {load_format!r}")
    if isinstance(model, dict):
        if load_format != "dummy":
            raise ModelError("a config given directly has no weights: use load_format='dummy'")
        checkpoint = Checkpoint("a config given directly", model)
    else:
        checkpoint = open_checkpoint(model, revision, weights=load_format == "auto")
    cls, config = parse_checkpoint(checkpoint)
    if (dtype := config.dtype if dtype == "auto" else dtype) not in DTYPE_BYTES:
        raise ModelError(f"dtype is auto, {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    formats = choose_formats(quant.parse(quantization), checkpoint, ops.name)
    planned = outline(config, cls, ops, getattr(torch, dtype), formats)
    if load_format == "auto":
        match_tensors(planned, checkpoint)
    if available is not None:
        check_memory(planned, checkpoint.source, device, available)
    built = build(config, cls, ops, getattr(torch, dtype), device, formats)
    if load_format == "dummy":
        dummy_weights(built, seed)
    else:
        load_weights(built, checkpoint, progress)
    return built, checkpoint
