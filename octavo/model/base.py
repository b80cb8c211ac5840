"""What a model is to the rest of Octavo. A new architecture is one file that subclasses CausalLM and registers itself.

A model turns its config.json into a ModelConfig, builds its parameters, says where each checkpoint tensor goes, and
computes hidden states for a ForwardBatch. It knows nothing of requests, scheduling or devices: `ops` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig
from octavo.errors import ModelError, UnknownArchitecture
from octavo.model import quant
from octavo.model.checkpoint import StoredTensor
from octavo.ops import ForwardBatch, Ops
from octavo.ops.kv import KV
from octavo.ops.weight import Format, JoinedWeight, QuantWeight

HEAD = "lm_head.weight"  # the head's name in a checkpoint


@dataclass(slots=True)
class Slot:
    """Where one checkpoint tensor goes: a view of a weight, of the shape the tensor has after `transform`."""

    dest: Tensor | QuantWeight
    transform: Callable[[Tensor], Tensor] | None = None
    matrix: Matrix | None = None  # whose weight it is a part of

    def fill(self, value: Tensor | QuantWeight, rearranged: bool = False) -> None:
        """Copy a value in, quantised or not, and quantise it where the destination is quantised. `rearranged`: the transform
        has been applied to it already. A QuantWeight comes only where takes() allows it."""
        if self.transform is not None and not rearranged:
            assert isinstance(value, Tensor)
            value = self.transform(value)
        if isinstance(self.dest, QuantWeight):
            quant.fill(self.dest, value)
        else:
            assert isinstance(value, Tensor)
            self.dest.copy_(value)

    def load(self, tensor: StoredTensor) -> None:
        """Fill the slot from a checkpoint: with the tensor's own codes where both formats are the same."""
        if tensor.codes is not None and self.takes(tensor):
            self.fill(tensor.codes(), tensor.rearranged)
        else:
            self.fill(tensor.read(), tensor.rearranged)

    def takes(self, tensor: StoredTensor) -> bool:
        """Whether the tensor goes in code by code; at most its scales are rounded to float16."""
        if tensor.form is None or not isinstance(self.dest, QuantWeight):
            return False
        if self.transform is not None and not tensor.rearranged:
            return False
        return self.dest.form in (tensor.form, tensor.form._replace(wide=False))


class Matrix(nn.Module):
    """A module around one large weight [out, in], which may be quantised. `parts`: what checkpoints call the tensors in it, in
    order, with the outputs of each."""

    def __init__(self, ops: Ops, inputs: int, parts: Mapping[str, int]):
        super().__init__()
        self.ops = ops
        self.parts = dict(parts)
        self.weight: Any = nn.Parameter(
            torch.empty(sum(parts.values()), inputs), requires_grad=False
        )

    def quantize(self, form: Format | list[Format], device: str) -> None:
        """Before loading: hold the weight in this format, or each part in one of its own."""
        with torch.device(device):
            outputs, inputs = self.weight.shape
            del self.weight
            if isinstance(form, Format):
                self.weight = QuantWeight.empty(form, outputs, inputs)
            else:
                self.weight = JoinedWeight(
                    QuantWeight.empty(f, n, inputs)
                    for f, n in zip(form, self.parts.values(), strict=True)
                )


class CausalLM(nn.Module):
    """`model(batch, kv) -> hidden [T, hidden]`, then `model.logits(hidden[rows]) -> [R, vocab]`."""

    # The embedding's name in a checkpoint, where config.tied makes it the head (HEAD) too.
    tied_weight: str | None = None
    dtype: torch.dtype  # of activations; set by build()
    # of the KV cache where nobody says otherwise; the same, unless finish_loading() knows better
    kv_dtype: torch.dtype

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.config = config
        self.ops = ops

    @classmethod
    def parse_config(cls, hf: dict[str, Any]) -> ModelConfig:
        """A ModelConfig from a config.json."""
        raise NotImplementedError

    def weight_map(self) -> dict[str, Slot]:
        """Checkpoint tensor name -> where it goes. Exactly the tensors the model needs: the loader reports the rest."""
        raise NotImplementedError

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """A checkpoint's tensor name as weight_map() and ignored_weights() spell it, where checkpoints spell it in several
        ways. The loader passes every name through it."""
        return name

    def ignored_weights(self) -> Collection[str]:
        """Names of checkpoint tensors that are known and not needed, such as saved buffers."""
        return ()

    def forward(self, batch: ForwardBatch, kv: KV) -> Tensor:
        """kv [N, layers, 2, Hk, B, D]: all of it, plain or compressed. Returns hidden states after the last norm, [T, hidden];
        with batch.last only those of batch.logit_rows."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab]"""
        raise NotImplementedError

    def angles(self, layer: int) -> Tensor | None:
        """By what this layer's keys are rotated in the cache: cos_sin [max_position, 2, D / 2]. None: keys hold no position, or
        hold it in a way that cannot be changed."""
        return None

    def finish_loading(self) -> None:
        """Called once after all weights are in place."""


class Registry:
    """Architecture name, as in config.json's `architectures`, to class. An installed package adds architectures of its own by
    entry points of the group PLUGINS: each is an architecture's name and the module that registers it."""

    def __init__(self) -> None:
        self._classes: dict[str, type[CausalLM]] = {}

    def add(self, *names: str) -> Callable[[type[CausalLM]], type[CausalLM]]:
        def register(cls: type[CausalLM]) -> type[CausalLM]:
            for name in names:
                self._classes[name] = cls
            return cls

        return register

    def find(self, hf: dict[str, Any]) -> type[CausalLM]:
        """The class for a config.json."""
        names = hf.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"config.json: architectures must be a list of names, got {names!r}")
        for name in names:
            if name not in self._classes:
                import_plugins(name)
            if name in self._classes:
                return self._classes[name]
        asked = ", ".join(names) or f"none (model_type {hf.get('model_type')!r})"
        raise UnknownArchitecture(
            f"unknown architecture: {asked}. Supported: {', '.join(sorted(self._classes))}. "
            "A new one is one file that subclasses octavo.model.base.CausalLM: see docs/models.md"
        )

    def parse(self, hf: dict[str, Any]) -> ModelConfig:
        return self.find(hf).parse_config(hf)


PLUGINS = "octavo.architectures"


def import_plugins(architecture: str) -> None:
    """Import what installed packages declare for an architecture."""
    for plugin in entry_points(group=PLUGINS, name=architecture):
        try:
            plugin.load()
        except Exception as error:  # a stranger's module may raise anything
            raise ModelError(
                f"{architecture}: its plugin {plugin.value} cannot be imported: {type(error).__name__}: {error}"
            ) from error


registry = Registry()


# The format of a weight, or of each of its parts, given what the parts are called (see Matrix) and the tensors that fill them;
# None: plain numbers.
Formats = Callable[[Mapping[str, str]], "Format | list[Format] | None"]


def quantize(model: CausalLM, formats: Formats, device: str) -> None:
    """Before loading: hold every matrix as `formats` says."""
    names: dict[Matrix, list[str]] = {}
    for name, slot in model.weight_map().items():
        if slot.matrix is not None:
            names.setdefault(slot.matrix, []).append(name)
    for matrix in [module for module in model.modules() if isinstance(module, Matrix)]:
        if len(names.get(matrix, [])) != len(matrix.parts):
            parts = ", ".join(matrix.parts)
            raise ModelError(
                f"{type(model).__name__}.weight_map() does not say where {parts} comes from: use slot() or slots()"
            )
        if (form := formats(dict(zip(matrix.parts, names[matrix], strict=True)))) is not None:
            matrix.quantize(form, device)
        else:
            matrix.weight = nn.Parameter(
                torch.empty_like(matrix.weight, device=device), requires_grad=False
            )


def build(
    config: ModelConfig,
    cls: type[CausalLM],
    ops: Ops,
    dtype: torch.dtype,
    device: str,
    formats: Formats | None = None,
) -> CausalLM:
    """A model with its weights allocated and not yet filled: plain ones of this dtype, or in formats."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    # Memory that a CPU allocates and does not touch costs nothing: what is replaced by something smaller never exists.
    first_device = device if formats is None or device == "meta" else "cpu"
    try:
        with torch.device(first_device), torch.no_grad():
            model = cls(config, ops)
    finally:
        torch.set_default_dtype(previous)
    model.dtype = model.kv_dtype = dtype
    if formats is not None:
        quantize(model, formats, device)
        model.to(device)
    return model.eval().requires_grad_(False)
