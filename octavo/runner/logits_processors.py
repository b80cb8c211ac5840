"""Runs user code that changes logits before a token is chosen. The classes are those of vLLM.

    LogitsProcessor          changes the logits of all sequences of a step; LLM(logits_processors=)
    AdapterLogitsProcessor   makes a LogitsProcessor of functions for single sequences
    LogitsPipeline           calls processors, and functions in SamplingParams(logits_processors=)

A row of the logits is a batch slot, so the row of a sequence stays the same while it runs. The
tokens of a sequence are read from the device. This read waits for the step before, so a step with
processors is slow.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.config import VllmConfig
from octavo.errors import InvalidRequest
from octavo.extensions import LOGITS_PROCESSORS, extension_names, find_extension, is_path
from octavo.params import SamplingParams
from octavo.runner.batch import ForwardResult
from octavo.runner.batch_slots import BatchSlots
from octavo.types import SlotFill

State = TypeVar("State")
# (output tokens, logits) -> logits, or (prompt tokens, output tokens, logits) -> logits. [V]
RequestLogitsProcessor = Callable[..., Tensor]
# The row, the parameters, the prompt tokens and the output tokens. The last list grows with the
# sequence.
AddedRequest = tuple[int, SamplingParams, list[int], list[int]]


class MoveDirectionality(Enum):
    """The direction in which a sequence moves to another row. Rows of Octavo never move."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """The sequences that have started.

    The end of a sequence is not reported. A later sequence takes its row.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that the processor cannot use."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool): ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether greedy decoding gives the same tokens without the processor."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Receive the sequences that have started since the last call."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the changed logits [rows, V]. They may be changed in place."""


def process_dict_updates(
    entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int], list[int]], State | None],
) -> bool:
    """Update the entries of rows in which a sequence has started. Returns whether anything changed.

    `new_state` returns the entry of a sequence, or None if the sequence needs no entry.
    """
    if batch_update is None:
        return False
    previous = dict(entries)
    for row, params, prompt, output in batch_update.added:
        state = new_state(params, prompt, output)
        entries.pop(row, None)
        if state is not None:
            entries[row] = state
    return entries != previous


class AdapterLogitsProcessor(LogitsProcessor):
    """Calls a separate function for each sequence that has one."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.calls: dict[int, tuple[RequestLogitsProcessor, list[int], list[int]]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a sequence, or None."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new_call(
            params: SamplingParams, prompt: list[int], output: list[int]
        ) -> tuple[RequestLogitsProcessor, list[int], list[int]] | None:
            function = self.new_req_logits_processor(params)
            return None if function is None else (function, prompt, output)

        process_dict_updates(self.calls, batch_update, new_call)

    def apply(self, logits: Tensor) -> Tensor:
        for row, (function, prompt, output) in self.calls.items():
            if row < len(logits):
                logits[row] = call_processor(function, prompt, output, logits[row])
        return logits


def call_processor(
    function: RequestLogitsProcessor, prompt: list[int], output: list[int], logits: Tensor
) -> Tensor:
    """Call a function with the tokens that it takes."""
    if len(inspect.signature(function).parameters) == 3:
        return function(prompt, output, logits)
    return function(output, logits)


def load_processors(
    classes: Sequence[Any], config: VllmConfig, device: torch.device
) -> list[LogitsProcessor]:
    """Create a processor of each class. A class may be named as package.module:Class."""
    processors: list[LogitsProcessor] = []
    for name_or_class in classes:
        processor_class = name_or_class
        if isinstance(name_or_class, str):
            processor_class = find_processor(name_or_class)
        if not (isinstance(processor_class, type) and issubclass(processor_class, LogitsProcessor)):
            raise InvalidRequest(
                f"{name_or_class!r} is not a subclass of LogitsProcessor", "logits_processors"
            )
        processors.append(processor_class(config, device, device.type == "cuda"))
    return processors


def find_processor(name: str) -> Any:
    """Return a class by its name. vLLM also allows package.module.Class."""
    if not is_path(name) and name not in extension_names(LOGITS_PROCESSORS):
        name = ":".join(name.rsplit(".", 1))
    return find_extension(LOGITS_PROCESSORS, name, "logits_processors")


class LogitsPipeline:
    """The processors of one runner, and the tokens of the sequences in its batch slots."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()):
        self.processors = processors
        self._added: list[AddedRequest] = []
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}  # slot -> prompt and output

    def add(self, slot_fills: list[SlotFill]) -> None:
        """Add sequences that start, or that resume after a preemption."""
        for fill in slot_fills:
            if self.processors or fill.params.logits_processors:
                tokens = fill.tokens.tolist()
                prompt = tokens[: fill.prompt_len]
                output = tokens[fill.prompt_len :]
                self._tokens[fill.slot] = (prompt, output)
                self._added.append((fill.slot, fill.params, prompt, output))
            else:
                self._tokens.pop(fill.slot, None)

    def validate(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for parameters that a processor cannot use."""
        for processor in self.processors:
            try:
                processor.validate_params(params)
            except ValueError as error:
                raise InvalidRequest(str(error), "extra_args") from error

    def applies_to(self, slots: list[int]) -> bool:
        return bool(self.processors) or any(slot in self._tokens for slot in slots)

    def apply(self, forward: ForwardResult, slots: list[int], batch_slots: BatchSlots) -> Tensor:
        """Return the logits of sampled items after all processors.

        `slots` are the batch slots of the items.
        """
        self._read_tokens(forward, slots, batch_slots)
        logits = forward.logits
        if self.processors:
            logits = self._run_processors(logits, slots)
        for row, slot in enumerate(slots):
            for function in batch_slots.fill_of(slot).params.logits_processors or []:
                logits[row] = call_processor(function, *self._tokens[slot], logits[row])
        return logits

    def _read_tokens(
        self, forward: ForwardResult, slots: list[int], batch_slots: BatchSlots
    ) -> None:
        for slot, length in zip(slots, forward.lengths.tolist(), strict=True):
            if slot in self._tokens:
                prompt, output = self._tokens[slot]
                num_known = len(prompt) + len(output)
                output += batch_slots.tokens[slot, num_known:length].tolist()

    def _run_processors(self, logits: Tensor, slots: list[int]) -> Tensor:
        update = None
        num_rows = max(slots) + 1
        if self._added:
            update = BatchUpdate(num_rows, [], self._added, [])
            self._added = []
        rows = torch.tensor(slots, device=logits.device)
        by_slot = logits.new_zeros(max(num_rows, self._min_rows()), logits.shape[1])
        by_slot[rows] = logits
        for processor in self.processors:
            processor.update_state(update)
            by_slot = processor.apply(by_slot)
        return by_slot[rows]

    def _min_rows(self) -> int:
        """Return the least number of rows with a row for every sequence that a processor knows."""
        return max(self._tokens, default=0) + 1
