"""The interface of a model. A new architecture is one file that subclasses CausalLM.

A model turns its config.json into a ModelConfig, builds its parameters, maps each checkpoint tensor
to a weight target, and computes hidden states for a ForwardBatch. It does not depend on requests,
scheduling or devices: `ops` does the arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import islice, takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig, Share
from octavo.errors import InvalidRequest, ModelError, UnknownArchitecture
from octavo.extensions import ARCHITECTURES, find_extension
from octavo.model import quant
from octavo.model.checkpoint import StoredTensor
from octavo.ops import ForwardBatch, Ops
from octavo.ops.fused_spec import FusedStep
from octavo.ops.kv import KV
from octavo.ops.weight import JoinedWeight, QuantWeight, WeightFormat

HEAD = "lm_head.weight"  # the name of the output head in a checkpoint
HEAD_CHUNK = 64  # rows of the identity matrix that are multiplied at a time


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a checkpoint tensor that a rank of tensor parallelism holds."""

    rows: Share
    columns: Share | None = None  # None: the tensor has one dimension

    @property
    def shape(self) -> torch.Size:
        """The shape of the undivided tensor."""
        columns = () if self.columns is None else (self.columns.total,)
        return torch.Size((self.rows.total, *columns))

    def take_rows(self, value: Tensor | QuantWeight) -> Any:
        ranges = self.rows.ranges
        if len(ranges) == 1:
            return value[ranges[0].start : ranges[0].stop]
        return value[torch.cat([torch.arange(part.start, part.stop) for part in ranges])]

    def take_columns(self, value: Tensor | QuantWeight) -> Any:
        if self.columns is None or not self.columns.is_part:
            return value
        (columns,) = self.columns.ranges
        if isinstance(value, QuantWeight):
            return value.columns(columns.start, columns.stop)
        return value[:, columns.start : columns.stop]


@dataclass(slots=True)
class WeightTarget:
    """The destination of one checkpoint tensor: a view of a weight.

    The view has the shape that the tensor has after `transform`, or the shape of its `part`.
    """

    dest: Tensor | QuantWeight
    transform: Callable[[Tensor], Tensor] | None = None
    matrix: Matrix | None = None  # the module whose weight `dest` is a part of
    part: TensorPart | None = None  # None: this rank holds the complete tensor

    @property
    def shape(self) -> torch.Size:
        """The shape that the undivided tensor has after `transform`."""
        return self.dest.shape if self.part is None else self.part.shape

    def fill(self, value: Tensor | QuantWeight, rearranged: bool = False) -> None:
        """Copy a value into the weight, and quantise it where the destination is quantised.

        `rearranged` means that the transform has already been applied. A QuantWeight may be
        passed only where takes() is true.
        """
        if self.transform is not None and not rearranged:
            assert isinstance(value, Tensor)
            value = self.transform(value)
        if self.part is not None:
            value = self.part.take_rows(value)
            if isinstance(self.dest, QuantWeight) and isinstance(value, Tensor):
                # A row may have a single scale, so rows are quantised before they are divided.
                value = quant.quantized(value, self.dest)
            value = self.part.take_columns(value)
        if isinstance(self.dest, QuantWeight):
            quant.fill(self.dest, value)
        else:
            assert isinstance(value, Tensor)
            self.dest.copy_(value)

    def load(self, tensor: StoredTensor) -> None:
        """Fill the weight from a checkpoint. Codes are copied where both formats are the same."""
        if tensor.codes is not None and self.takes(tensor):
            self.fill(tensor.codes(), tensor.rearranged)
        else:
            self.fill(tensor.read(), tensor.rearranged)

    def takes(self, tensor: StoredTensor) -> bool:
        """Return whether the tensor's codes can be copied. Its scales may be rounded to float16."""
        if tensor.format is None or not isinstance(self.dest, QuantWeight):
            return False
        if self.transform is not None and not tensor.rearranged:
            return False
        return self.dest.format in (tensor.format, tensor.format._replace(float32_scales=False))


class Matrix(nn.Module):
    """A module with one large weight [out, in], which may be quantised.

    `parts` lists the names of the checkpoint tensors that the weight consists of, in order, with
    the number of outputs of each. A Share instead of a number means that this rank holds only some
    of the inputs or outputs.
    """

    def __init__(self, ops: Ops, inputs: int | Share, parts: Mapping[str, int | Share]):
        super().__init__()
        self.ops = ops
        self.inputs = as_share(inputs)
        self.outputs = {name: as_share(outputs) for name, outputs in parts.items()}
        self.parts = {name: share.count for name, share in self.outputs.items()}
        self.weight: Any = nn.Parameter(
            torch.empty(sum(self.parts.values()), self.inputs.count), requires_grad=False
        )

    def part(self, name: str) -> TensorPart | None:
        """Return the part of a checkpoint tensor that this rank holds. None means all of it."""
        rows = self.outputs[name]
        is_part = rows.is_part or self.inputs.is_part
        return TensorPart(rows, self.inputs) if is_part else None

    def quantize(self, formats: WeightFormat | list[WeightFormat], device: str) -> None:
        """Replace the weight by an empty one before loading. `formats` is the format of the weight,
        or a list with the format of each part."""
        self._check_groups([formats] if isinstance(formats, WeightFormat) else formats)
        with torch.device(device):
            outputs, inputs = self.weight.shape
            del self.weight
            if isinstance(formats, WeightFormat):
                self.weight = QuantWeight.empty(formats, outputs, inputs)
            else:
                self.weight = JoinedWeight(
                    QuantWeight.empty(part_format, part_outputs, inputs)
                    for part_format, part_outputs in zip(formats, self.parts.values(), strict=True)
                )

    def _check_groups(self, formats: list[WeightFormat]) -> None:
        """Raise ModelError if the inputs of this rank begin or end inside a group."""
        for weight_format in formats:
            for inputs in self.inputs.ranges:
                is_last = inputs.stop == self.inputs.total
                ends = (inputs.start,) if is_last else (inputs.start, inputs.stop)
                group_size = weight_format.group_size or 1
                if any(end % group_size for end in ends):
                    raise ModelError(
                        f"{', '.join(self.parts)} cannot be divided in the format {weight_format}: "
                        f"a rank would hold the inputs {inputs.start} to {inputs.stop}, which are "
                        f"not whole groups of {group_size}. Use another tensor_parallel_size, or "
                        "another quantization such as int8 or none"
                    )


def as_share(size: int | Share) -> Share:
    return size if isinstance(size, Share) else Share.whole(size)


class CausalLM(nn.Module):
    """A model: `model(batch, kv) -> hidden [T, hidden]`, `model.logits(hidden) -> [T, vocab]`."""

    # The embedding's name in a checkpoint. If config.tied is set, it is the output head too.
    tied_weight: str | None = None
    dtype: torch.dtype  # the dtype of activations; build() sets it
    # The default dtype of the KV cache. It equals `dtype` unless finish_loading() changes it.
    kv_dtype: torch.dtype
    embed: Matrix  # token ids [T] -> [T, hidden], without positions
    # Whether the modules are built from config.shares, so that ranks can divide the model.
    supports_tensor_parallel = False
    # The layers whose input hidden states forward() stores in batch.aux_hidden_states; see
    # set_aux_hidden_state_layers().
    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.config = config
        self.ops = ops

    @classmethod
    def parse_config(cls, hf_config: dict[str, Any]) -> ModelConfig:
        """Read a ModelConfig from the content of a config.json."""
        raise NotImplementedError

    def weight_map(self) -> dict[str, WeightTarget]:
        """Map the name of each checkpoint tensor that the model needs to its weight target.

        The loader reports tensors that are missing from this map or from the checkpoint.
        """
        raise NotImplementedError

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Return a tensor name as weight_map() and ignored_weights() spell it.

        Checkpoints of one architecture may spell names in several ways. The loader passes every
        name through this method.
        """
        return name

    def ignored_weights(self) -> Collection[str]:
        """Return the names of checkpoint tensors that are not needed, such as saved buffers."""
        return ()

    def forward(self, batch: ForwardBatch, kv: KV) -> Tensor:
        """Compute the hidden states after the last norm, [T, hidden].

        kv [N, layers, 2, Hk, B, D] is the whole KV cache, plain or compressed. If batch.last is
        set, only the rows batch.logit_indices are returned.
        """
        raise NotImplementedError

    def forward_with_logits(self, batch: ForwardBatch, kv: KV) -> tuple[Tensor, Tensor]:
        """Compute the hidden states as forward() does, and the logits of all of them."""
        hidden = self(batch, kv)
        return hidden, self.logits(hidden)

    def fuse_step(self) -> FusedStep | None:
        """Return a function that computes steps that decode in one call, if the backend can."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab]"""
        raise NotImplementedError

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Return the rows of the output head for some tokens, [n, hidden].

        The rows are computed as the product of the head and the identity matrix, because a backend
        may store the head in any layout.
        """
        if self.config.tied and self.config.part is None:
            return self.ops.embedding(token_ids, self.embed.weight)
        identity = torch.eye(self.config.hidden_size, device=token_ids.device, dtype=self.dtype)
        columns = [self.logits(rows)[:, token_ids] for rows in identity.split(HEAD_CHUNK)]
        return torch.cat(columns).t().contiguous()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Let forward() store the hidden states before these layers in batch.aux_hidden_states.

        A draft head may need them (octavo.model.draft_head).
        """
        raise ModelError(
            f"{self.config.architecture} cannot return the hidden states between its layers, which "
            "this draft head needs. Use a draft head that reads the final hidden state only"
        )

    def first_layers(self, count: int) -> CausalLM:
        """Return a model of the first layers, whose weights and KV cache are those of this model.
        It is called after finish_loading()."""
        truncated = copy.copy(self)
        truncated._modules = dict(self._modules)
        truncated.layers = nn.ModuleList(islice(cast("nn.ModuleList", self.layers), count))
        return truncated

    def rope_table_for_shift(self, layer: int) -> Tensor | None:
        """Return the rope table that this layer's cached keys are rotated by.

        The table is cos_sin [max_position, 2, D / 2]. None means that the position of a cached key
        cannot be changed by a rotation.
        """
        return None

    def finish_loading(self) -> None:
        """Prepare the weights for computing. It is called once, after all weights are loaded."""


class Registry:
    """Maps the name of an architecture, as in config.json's `architectures`, to its class.

    An installed package adds architectures by entry points of the group ARCHITECTURES
    (octavo/extensions.py). Each is the name of an architecture and the module that registers it.
    """

    def __init__(self) -> None:
        self._classes: dict[str, type[CausalLM]] = {}

    def add(self, *names: str) -> Callable[[type[CausalLM]], type[CausalLM]]:
        def register(model_class: type[CausalLM]) -> type[CausalLM]:
            for name in names:
                self._classes[name] = model_class
            return model_class

        return register

    def find(self, hf_config: dict[str, Any]) -> type[CausalLM]:
        """Return the model class for the content of a config.json."""
        architectures = hf_config.get("architectures") or []
        if not isinstance(architectures, list) or not all(
            isinstance(architecture, str) for architecture in architectures
        ):
            raise ModelError(
                f"config.json: architectures must be a list of names, got {architectures!r}"
            )
        unknown = list(takewhile(lambda name: name not in self._classes, architectures))
        if unknown:
            import_plugins(unknown)
        for architecture in architectures:
            if architecture in self._classes:
                return self._classes[architecture]
        requested = ", ".join(architectures) or f"none (model_type {hf_config.get('model_type')!r})"
        raise UnknownArchitecture(
            f"unknown architecture: {requested}. Supported: {', '.join(sorted(self._classes))}. "
            "A new one is one file that subclasses octavo.model.base.CausalLM: see docs/models.md"
        )

    def parse(self, hf_config: dict[str, Any]) -> ModelConfig:
        return self.find(hf_config).parse_config(hf_config)


def import_plugins(architectures: list[str]) -> None:
    """Import the modules that installed packages declare for these architectures."""
    for plugin in entry_points(group=ARCHITECTURES):
        if plugin.name not in architectures:
            continue
        try:
            plugin.load()
        except Exception as error:  # a plugin may raise any exception
            raise ModelError(
                f"{plugin.name}: its plugin {plugin.value} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error


def find_model_class(name: str) -> type[CausalLM]:
    """Return a model class that the user has written. Its name is package.module:Class."""
    model_class = find_extension(ARCHITECTURES, name, "model_class")
    if not (isinstance(model_class, type) and issubclass(model_class, CausalLM)):
        raise InvalidRequest(
            f"model_class {name!r} is not a subclass of octavo.model.CausalLM: docs/models.md "
            "shows how to write one",
            "model_class",
        )
    return model_class


registry = Registry()


# Returns the format of a weight, or one format for each of its parts, or None for plain numbers.
# The argument maps the name of each part (see Matrix) to the name of the tensor that fills it.
Formats = Callable[[Mapping[str, str]], "WeightFormat | list[WeightFormat] | None"]


def quantize(model: CausalLM, formats: Formats, device: str) -> None:
    """Give every matrix an empty weight in the format that `formats` returns, before loading."""
    tensor_names: dict[Matrix, list[str]] = {}
    for name, target in model.weight_map().items():
        if target.matrix is not None:
            tensor_names.setdefault(target.matrix, []).append(name)
    for matrix in [module for module in model.modules() if isinstance(module, Matrix)]:
        if len(tensor_names.get(matrix, [])) != len(matrix.parts):
            parts = ", ".join(matrix.parts)
            raise ModelError(
                f"{type(model).__name__}.weight_map() has no tensor for {parts}: "
                "use weight_target() or weight_targets()"
            )
        weight_format = formats(dict(zip(matrix.parts, tensor_names[matrix], strict=True)))
        if weight_format is not None:
            matrix.quantize(weight_format, device)
        else:
            matrix.weight = nn.Parameter(
                torch.empty_like(matrix.weight, device=device), requires_grad=False
            )


def build(
    config: ModelConfig,
    model_class: type[CausalLM],
    ops: Ops,
    dtype: torch.dtype,
    device: str,
    formats: Formats | None = None,
) -> CausalLM:
    """Build a model whose weights are allocated and not yet filled.

    Weights are plain numbers of this dtype, or have the formats that `formats` returns.
    """
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    # The system commits CPU memory when it is first written. So a plain weight that a quantised one
    # replaces uses no memory.
    first_device = device if formats is None or device == "meta" else "cpu"
    try:
        with torch.device(first_device), torch.no_grad():
            model = model_class(config, ops)
    finally:
        torch.set_default_dtype(previous_dtype)
    model.dtype = model.kv_dtype = dtype
    if formats is not None:
        quantize(model, formats, device)
        model.to(device)
    return model.eval().requires_grad_(False)
