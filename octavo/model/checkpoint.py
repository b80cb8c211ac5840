"""What a checkpoint is to the loader, and the Hugging Face directory as one: config.json and safetensors files.

The header of a safetensors file is checked in full before a byte of its data is mapped: a damaged or malicious file
ends in a CheckpointError, never in a crash or a tensor over the wrong bytes. Nothing is unpickled. Knows no model.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.ops.weight import Format, QuantWeight

MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_TENSORS = 1_000_000
MAX_LISTED = 20  # names printed in one error

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint, not in memory yet."""

    shape: tuple[int, ...]
    nbytes: int  # in the file
    read: Callable[[], Tensor]
    form: Format | None = None  # it is quantised in a way that is one of ours,
    codes: Callable[[], QuantWeight] | None = None  # and can be read as it is
    # The tensor is stored as the model holds it: the slot's transform has been applied already.
    rearranged: bool = False


@dataclass
class Checkpoint:
    """A model's config and weights. Tensors go by their Hugging Face names and layouts, whatever the file calls them."""

    source: str  # for messages
    config: dict[str, Any]  # shaped as config.json; eos_token_id includes generation_config's
    tensors: dict[str, StoredTensor] = field(default_factory=dict)  # in file order
    directory: Path | None = None  # where tokenizer files are
    gguf_metadata: dict[str, Any] | None = None  # or what a GGUF file says of its tokenizer
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """One tensor. What comes back may be a view of the mapped file: it is unmapped when the tensor is dropped."""
        return self.tensors[name].read()


def listed(names: list[str], most: int = MAX_LISTED) -> str:
    more = f", ... and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def map_bytes(path: Path, begin: int, end: int) -> Tensor:
    """Bytes begin..end of a file, as uint8 [end - begin]. A mapping of its own for every call, so that dropping the
    tensor gives the pages back; private and writable, because torch warns of read-only buffers."""
    if begin == end:
        return torch.empty(0, dtype=torch.uint8)
    start = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_COPY, offset=start)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot read bytes {begin} to {end}: {error}. Was the file replaced meanwhile?"
        ) from error
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=begin - start)


def aligned_view(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied first where the file did not align them."""
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)


# ---- one safetensors file --------------------------------------------------------------------------


class Extent(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Extent]:
    """The tensors of a safetensors file, in file order. The file is
    [8 bytes: header length n][n bytes: JSON name -> dtype, shape, data_offsets][data, indexed without gap or overlap]."""

    def bad(why: str) -> CheckpointError:
        return CheckpointError(
            f"{path} is not a sound safetensors file: {why}. Download or convert it again"
        )

    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                raise bad(
                    f"it has {size} bytes, its header alone would take {8 + length} (truncated?)"
                )
            if length > MAX_HEADER:
                raise bad(f"its header claims {length} bytes, more than {MAX_HEADER}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error

    try:
        header = json.loads(raw.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise bad(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise bad(f"it names {len(header)} tensors, more than {MAX_TENSORS}")

    found = {}
    for name, entry in header.items():
        try:
            kind = entry["dtype"]
            shape = entry["shape"]
            offsets = entry["data_offsets"]
        except (TypeError, KeyError):
            raise bad(f"tensor {name!r} lacks dtype, shape or data_offsets") from None
        if not isinstance(kind, str) or kind not in DTYPES:
            raise bad(f"tensor {name!r} has dtype {kind!r}; known are {', '.join(DTYPES)}")
        if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise bad(
                f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}: not lists of whole numbers"
            )
        begin, end = offsets
        if (
            math.prod(shape) * DTYPES[kind].itemsize != end - begin
            or math.prod(dim or 1 for dim in shape) >= 2**63
        ):
            raise bad(
                f"tensor {name!r} of dtype {kind} and shape {shape} does not take the {end - begin} bytes it is given"
            )
        found[name] = Extent(DTYPES[kind], tuple(shape), 8 + length + begin, 8 + length + end)

    in_order = sorted(found.items(), key=lambda item: item[1][2:])
    at = 8 + length
    for name, extent in in_order:
        if extent.begin != at:
            raise bad(
                f"tensor {name!r} begins at byte {extent.begin}, not at {at} where the one before it ends"
            )
        at = extent.end
    if at != size:
        raise bad(f"its tensors end at byte {at}, the file at {size}")
    return dict(in_order)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in found if names.count(n) > 1)!r} is there twice")
    return found


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(v) is int and 0 <= v < 2**63 for v in value)
    )


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    def stored(extent: Extent) -> StoredTensor:
        def read() -> Tensor:
            return aligned_view(map_bytes(path, extent.begin, extent.end), extent.dtype).view(
                extent.shape
            )

        return StoredTensor(extent.shape, extent.end - extent.begin, read)

    return {name: stored(extent) for name, extent in read_header(path).items()}


# ---- a directory ------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def open_directory(directory: Path, weights: bool = True) -> Checkpoint:
    """A directory as the hub has them: config.json, *.safetensors, maybe generation_config.json."""
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has no config.json: give a directory in Hugging Face's layout, or a .gguf file"
        )
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    if eos := _ids(config.get("eos_token_id")) | _ids(generation_config.get("eos_token_id")):
        config["eos_token_id"] = list(eos)
    tensors = _open_shards(directory) if weights else {}
    return Checkpoint(
        str(directory), config, tensors, directory, generation_config=generation_config
    )


def _ids(value: Any) -> dict[int, None]:
    """Token ids, given as one, several or none, in order."""
    return dict.fromkeys(
        v for v in (value if isinstance(value, list) else [value]) if type(v) is int
    )


def _open_shards(directory: Path) -> dict[str, StoredTensor]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _open_index(directory, index)
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)
        )
        if pickled:
            raise CheckpointError(
                f"{directory} holds its weights as pickles ({listed(pickled, 3)}), which can run any code when opened and "
                "are never read here. Convert them to safetensors: load the model in transformers and call "
                "save_pretrained(..., safe_serialization=True)"
            )
        raise CheckpointError(
            f'{directory} holds no *.safetensors file (load_format="dummy", or --load-format dummy, needs none)'
        )
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        shard = open_safetensors(path)
        if twice := [name for name in shard if name in tensors]:
            raise CheckpointError(
                f"{path} repeats tensors of other files in {directory}: {listed(twice)}"
            )
        tensors |= shard
    return tensors


def _is_file(path: Path) -> bool:
    """Path.is_file, which raises for a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def _open_index(directory: Path, index: Path) -> dict[str, StoredTensor]:
    where = read_json(index).get("weight_map")
    if (
        not isinstance(where, dict)
        or not where
        or not all(isinstance(shard, str) for shard in where.values())
    ):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    shards = sorted(set(where.values()))
    # A shard is a plain file name: an index must not lead out of its directory.
    if absent := [
        shard for shard in shards if Path(shard).name != shard or not _is_file(directory / shard)
    ]:
        raise CheckpointError(
            f"{directory} lacks {len(absent)} of {len(shards)} shards: {listed(absent)}. Download it again"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        found = open_safetensors(directory / shard)
        tensors |= {
            name: tensor for name, tensor in found.items() if where.get(name, shard) == shard
        }
        if lost := [name for name, at in where.items() if at == shard and name not in found]:
            raise CheckpointError(
                f"{directory / shard} lacks tensors that {index.name} says it holds: {listed(lost)}"
            )
    return tensors
