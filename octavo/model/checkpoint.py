"""Checkpoints as the loader reads them, and directories in the Hugging Face layout.

The header of a safetensors file is checked in full before any of its data is mapped. A damaged or
malicious file raises a CheckpointError; it never causes a crash or a tensor over the wrong bytes.
Nothing is unpickled. This module depends on no model.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model_files import check_directory
from octavo.ops.weight import QuantWeight, WeightFormat

MAX_HEADER = 100_000_000  # bytes; the format defines this limit
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 8
MAX_LISTED = 20  # the number of names that one error prints
LENGTH_BYTES = 8  # the length of the header, at the start of a safetensors file

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
    """One tensor of a checkpoint, which has not been read yet."""

    shape: tuple[int, ...]
    nbytes: int  # in the file
    read: Callable[[], Tensor]
    # Set if the tensor is quantised in a supported format; `codes` then reads it without rounding.
    format: WeightFormat | None = None
    codes: Callable[[], QuantWeight] | None = None
    rearranged: bool = False  # the transform of its weight target has already been applied


@dataclass
class Checkpoint:
    """A model's config and weights. Tensors have their Hugging Face names and layouts."""

    source: str  # the name used in messages
    config: dict[str, Any]  # config.json, with the eos_token_id of generation_config.json added
    tensors: dict[str, StoredTensor] = field(default_factory=dict)  # in file order
    directory: Path | None = None  # the directory of the tokenizer files
    gguf_metadata: dict[str, Any] | None = None  # a GGUF file's metadata, with its tokenizer
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor. It may be a view of the mapped file, which is unmapped with it."""
        return self.tensors[name].read()


def listed(names: list[str], limit: int = MAX_LISTED) -> str:
    remainder = f", ... and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + remainder


def map_bytes(path: Path, begin: int, end: int) -> Tensor:
    """Map the bytes begin..end of a file as uint8 [end - begin].

    Every call makes a separate mapping, so that dropping the tensor frees its pages. The mapping
    is private and writable, because torch warns about read-only buffers.
    """
    if begin == end:
        return torch.empty(0, dtype=torch.uint8)
    mapping_start = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        with open(path, "rb") as file:
            mapping = mmap.mmap(
                file.fileno(), end - mapping_start, access=mmap.ACCESS_COPY, offset=mapping_start
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot read bytes {begin} to {end}: {error}. Was the file replaced meanwhile?"
        ) from error
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=begin - mapping_start)


def aligned_view(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers. Bytes that are not aligned in the file are copied first."""
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)


# ---- one safetensors file ------------------------------------------------------------------------


class Extent(NamedTuple):
    """The position of a tensor in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Extent]:
    """Return the tensors of a safetensors file, in file order. The file consists of

    - 8 bytes: the length of the header
    - the header: JSON, name -> dtype, shape, data_offsets
    - the data, which the offsets cover without gap or overlap
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            encoded = _header_bytes(file, size, path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    data_start = LENGTH_BYTES + len(encoded)
    extents = {
        name: _extent(name, entry, data_start, path)
        for name, entry in _parse_header(encoded, path).items()
    }
    in_order = sorted(extents.items(), key=lambda item: item[1][2:])
    position = data_start
    for name, extent in in_order:
        if extent.begin != position:
            raise _invalid_file(
                path,
                f"tensor {name!r} begins at byte {extent.begin}, but the previous tensor ends at "
                f"byte {position}",
            )
        position = extent.end
    if position != size:
        raise _invalid_file(path, f"its tensors end at byte {position}, but it has {size} bytes")
    return dict(in_order)


def _invalid_file(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a valid safetensors file: {reason}. Download or convert it again"
    )


def _header_bytes(file: BinaryIO, size: int, path: Path) -> bytes:
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or LENGTH_BYTES + length > size:
        raise _invalid_file(
            path,
            f"it has {size} bytes, but its header alone needs {LENGTH_BYTES + length} (truncated?)",
        )
    if length > MAX_HEADER:
        raise _invalid_file(path, f"its header claims {length} bytes, more than {MAX_HEADER}")
    return file.read(length)


def _parse_header(encoded: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(encoded.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _invalid_file(path, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _invalid_file(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _invalid_file(path, f"it names {len(header)} tensors, more than {MAX_TENSORS}")
    return header


def _extent(name: str, entry: Any, data_start: int, path: Path) -> Extent:
    """Check one entry of the header."""
    try:
        dtype_name = entry["dtype"]
        shape = entry["shape"]
        offsets = entry["data_offsets"]
    except (TypeError, KeyError):
        raise _invalid_file(path, f"tensor {name!r} lacks dtype, shape or data_offsets") from None
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise _invalid_file(
            path,
            f"tensor {name!r} has dtype {dtype_name!r}, but the known types are "
            f"{', '.join(DTYPES)}",
        )
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _invalid_file(
            path,
            f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}, but both must be "
            "lists of whole numbers",
        )
    begin, end = offsets
    dtype = DTYPES[dtype_name]
    too_large = math.prod(dimension or 1 for dimension in shape) >= 2**63
    if too_large or math.prod(shape) * dtype.itemsize != end - begin:
        raise _invalid_file(
            path,
            f"tensor {name!r} of dtype {dtype_name} and shape {shape} does not take the "
            f"{end - begin} bytes between its offsets",
        )
    return Extent(dtype, tuple(shape), data_start + begin, data_start + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in unique if names.count(name) > 1)
        raise ValueError(f"key {repeated!r} appears twice")
    return unique


def _naturals(value: Any) -> bool:
    """Return whether a value is a short list of whole numbers that are not negative."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(number) is int and 0 <= number < 2**63 for number in value)
    )


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Open a safetensors file, whose tensors are read when they are needed."""

    def stored(extent: Extent) -> StoredTensor:
        def read() -> Tensor:
            return aligned_view(map_bytes(path, extent.begin, extent.end), extent.dtype).view(
                extent.shape
            )

        return StoredTensor(extent.shape, extent.end - extent.begin, read)

    return {name: stored(extent) for name, extent in read_header(path).items()}


# ---- a directory ---------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def open_directory(directory: Path, weights: bool = True) -> Checkpoint:
    """Open a directory with config.json, *.safetensors and perhaps generation_config.json."""
    check_directory(directory, weights)
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
    """Return the token ids of a field that holds one id, a list or nothing, in order."""
    return dict.fromkeys(
        token_id
        for token_id in (value if isinstance(value, list) else [value])
        if type(token_id) is int
    )


def _open_shards(directory: Path) -> dict[str, StoredTensor]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _open_index(directory, index)
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        shard = open_safetensors(path)
        if repeated := [name for name in shard if name in tensors]:
            raise CheckpointError(
                f"{path} repeats tensors of other files in {directory}: {listed(repeated)}"
            )
        tensors |= shard
    return tensors


def _is_file(path: Path) -> bool:
    """Path.is_file(), with False instead of an exception for a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def _open_index(directory: Path, index: Path) -> dict[str, StoredTensor]:
    shard_of_tensor = read_json(index).get("weight_map")
    if (
        not isinstance(shard_of_tensor, dict)
        or not shard_of_tensor
        or not all(isinstance(shard, str) for shard in shard_of_tensor.values())
    ):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    shards = sorted(set(shard_of_tensor.values()))
    # A shard must be a plain file name, so that an index cannot name files outside its directory.
    missing_shards = [
        shard for shard in shards if Path(shard).name != shard or not _is_file(directory / shard)
    ]
    if missing_shards:
        raise CheckpointError(
            f"{directory} lacks {len(missing_shards)} of {len(shards)} shards: "
            f"{listed(missing_shards)}. Download it again"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        stored = open_safetensors(directory / shard)
        tensors |= {
            name: tensor
            for name, tensor in stored.items()
            if shard_of_tensor.get(name, shard) == shard
        }
        missing_tensors = [
            name
            for name, stated_shard in shard_of_tensor.items()
            if stated_shard == shard and name not in stored
        ]
        if missing_tensors:
            raise CheckpointError(
                f"{directory / shard} lacks tensors that {index.name} assigns to it: "
                f"{listed(missing_tensors)}"
            )
    return tensors
