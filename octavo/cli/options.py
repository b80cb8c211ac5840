"""Options that several commands share, declared once: a command asks for a whole group of them as one parameter.

    @command
    def complete(model: Model = None, *, prompt: str = "", engine: EngineOptions) -> None: ...

`command` shows typer each field of the group as an option of its own and hands the function the group filled in. Defaults are
the group's own, or those of the instance that is the parameter's default. Octavo's errors become one line and exit code 2.

Must not import torch: `octavo --help` has to be quick.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from octavo.errors import OctavoError
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
EMBEDDED = "smollm2"  # octavo.model.embedded.NAME, which would import torch; a test compares them


# ---- values --------------------------------------------------------------------------------------------


def size(text: str) -> int:
    """32K is 32,768; 1.5G is 1,610,612,736."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    value = float(found[1]) * UNITS[found[2].upper()] if found else 0.5
    if value != int(value) or value < 1:
        raise typer.BadParameter(
            f"{text!r} is not a size: give a whole number like 4096, or 32K, 1.5M, 80G (K is 1,024)"
        )
    return int(value)


def size_or_none(text: str) -> int:
    return 0 if str(text).strip() == "0" else size(text)


def size_or_auto(text: str) -> int | None:
    return None if str(text).lower() == "auto" else size(text)


def sizes(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]


# ---- groups --------------------------------------------------------------------------------------------


def option(
    help: str, panel: str | None, metavar: str | None = None, *names: str, **more: Any
) -> Any:
    """An option of a group. The default is worth showing unless it means that nothing is done."""
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, **{"show_default": False} | more
    )


def flag(name: str, help: str, panel: str | None = None) -> Any:
    return option(help, panel, "", name)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A directory, a .gguf file or a name on huggingface.co. Without it: the embedded model, {EMBEDDED}.",
        show_default=False,
    ),
]


@dataclass
class SizeOptions:
    """What decides how much memory is needed."""

    dtype: Annotated[
        str, option("auto, float32, bfloat16 or float16.", "Model", "NAME", show_default=True)
    ] = "auto"
    quantization: Annotated[
        str,
        option(
            "Weights as none, int8, int4-g64, ...; auto: as the checkpoint has them.",
            "Model",
            "FORMAT",
            "--quant",
            show_default=True,
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        option(
            "KV as auto, int8, fp8, float16, ...: int8 and fp8 halve it.",
            "Memory",
            "NAME",
            show_default=True,
        ),
    ] = "auto"
    device: Annotated[str, option("auto, cpu or cuda.", "Model", "NAME", show_default=True)] = (
        "auto"
    )
    revision: Annotated[
        str | None, option("Branch, tag or commit on the hub.", "Model", "NAME")
    ] = None
    max_model_len: Annotated[
        int | None,
        option(
            "Longest prompt and reply together, such as 32K; auto: what fits.",
            "Memory",
            "N|auto",
            parser=size_or_auto,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, option("Part of a GPU to use.", "Memory", "0..1", show_default=True)
    ] = 0.9
    block_size: Annotated[
        int | None,
        option("Tokens in a KV block: 16 on a CPU, 64 on a GPU.", "Memory", "N", parser=size),
    ] = None
    num_blocks: Annotated[
        int | None, option("KV blocks, instead of as many as fit.", "Memory", "N", parser=size)
    ] = None
    kv_host_gib: Annotated[
        float | None, option("Memory for KV that leaves the device.", "Memory", "GiB")
    ] = None
    kv_disk: Annotated[
        Path | None, option("Keep KV here too, over restarts.", "Memory", "DIRECTORY")
    ] = None
    kv_disk_gib: Annotated[float, option("How much of it.", "Memory", "GiB", show_default=True)] = (
        16.0
    )
    max_num_seqs: Annotated[
        int,
        option("Sequences computed at once.", "Scheduling", "N", parser=size, show_default=True),
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            "Tokens computed in a step: 2K on a CPU, 16K on a GPU.", "Scheduling", "N", parser=size
        ),
    ] = None


@dataclass
class EngineOptions(SizeOptions):
    """What an LLM is made with."""

    depth: Annotated[
        int | None,
        option("Steps in flight: 1; on a GPU 2, unless the policy pauses.", "Scheduling", "N"),
    ] = None
    enforce_eager: Annotated[bool, flag("--enforce-eager", "Use no CUDA graphs.", "Scheduling")] = (
        False
    )
    scheduling_policy: Annotated[
        str,
        option(
            "fcfs, priority, shortest, deadline, fair, prefix; or package.module:Class.",
            "Scheduling",
            "NAME",
            "--policy",
        ),
    ] = "fcfs"
    batching: Annotated[
        str, option("continuous, adaptive, window, static or none.", "Scheduling", "NAME")
    ] = "continuous"
    max_batch: Annotated[
        int,
        option(
            "Requests of a batch (--batching window, static).", "Scheduling", "N", show_default=True
        ),
    ] = 8
    window_ms: Annotated[
        float, option("Time a batch forms (window).", "Scheduling", "X", show_default=True)
    ] = 20.0
    target_ms: Annotated[
        float, option("Time from token to token (adaptive).", "Scheduling", "X", show_default=True)
    ] = 50.0
    short_share: Annotated[
        float,
        option(
            "Part of a step for short prompts that would wait for a long one.",
            "Scheduling",
            "0..1",
            show_default=True,
        ),
    ] = 0.25
    record_trace: Annotated[
        Path | None,
        option("Write arrivals and lengths here, for octavo simulate.", "Scheduling", "FILE"),
    ] = None
    kv_canary: Annotated[
        bool, flag("--kv-canary", "Check all KV that is read, slowly: for debugging.", "Memory")
    ] = False
    kv_eviction: Annotated[
        str,
        option(
            "none, sinks or heavy: what leaves the KV of a sequence that has grown to its budget.",
            "Memory",
            "NAME",
        ),
    ] = "none"
    kv_budget: Annotated[
        int | None, option("That many tokens, for endless replies; 1K.", "Memory", "N", parser=size)
    ] = None
    no_prefix_caching: Annotated[
        bool, flag("--no-prefix-caching", "Do not reuse an earlier prompt's KV.", "Memory")
    ] = False
    load_format: Annotated[
        str, option("auto; dummy: random weights, from config.json alone.", "Model", "NAME")
    ] = "auto"
    tokenizer: Annotated[
        Path | None, option("Take the tokenizer from here.", "Model", "DIRECTORY")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """LLM's, but for the model."""
        return dict(
            tokenizer=None if self.tokenizer is None else str(self.tokenizer),
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            load_format=self.load_format,
            revision=self.revision,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            block_size=self.block_size,
            num_gpu_blocks_override=self.num_blocks,
            enable_prefix_caching=not self.no_prefix_caching,
            swap_space=self.kv_host_gib,
            kv_disk_path=None if self.kv_disk is None else str(self.kv_disk),
            kv_disk_gib=self.kv_disk_gib,
            kv_eviction=self.kv_eviction,
            kv_budget=self.kv_budget,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            depth=self.depth,
            enforce_eager=self.enforce_eager,
            scheduling_policy=self.scheduling_policy,
            batching=self.batching,
            max_batch=self.max_batch,
            window_ms=self.window_ms,
            target_ms=self.target_ms,
            short_share=self.short_share,
            kv_canary=self.kv_canary,
            record_trace=None if self.record_trace is None else str(self.record_trace),
        )

    def load(self, model: str | dict[str, Any] | None, **more: Any) -> LLM:
        from octavo.llm import LLM

        return LLM(model, **self.arguments(), progress=sys.stderr.isatty(), **more)


@dataclass
class SamplingOptions:
    """How tokens are chosen and when a text ends."""

    temperature: Annotated[
        float, option("0: the likeliest token, always.", "Sampling", "X", show_default=True)
    ] = 1.0
    top_p: Annotated[
        float,
        option("Keep the likeliest, up to this probability.", "Sampling", "X", show_default=True),
    ] = 1.0
    top_k: Annotated[int, option("Keep this many of the likeliest; 0: all.", "Sampling", "N")] = 0
    min_p: Annotated[
        float, option("Drop those this much less likely than the first.", "Sampling", "X")
    ] = 0.0
    repetition_penalty: Annotated[
        float, option("Above 1: against tokens seen.", "Sampling", "X", show_default=True)
    ] = 1.0
    presence_penalty: Annotated[
        float, option("-2..2, against tokens generated.", "Sampling", "X")
    ] = 0.0
    frequency_penalty: Annotated[
        float, option("-2..2, the same for each time.", "Sampling", "X")
    ] = 0.0
    seed: Annotated[int | None, option("The same seed gives the same text.", "Sampling", "N")] = (
        None
    )
    max_tokens: Annotated[
        int, option("Longest reply.", "Sampling", "N", parser=size, show_default=True)
    ] = 128
    stop: Annotated[
        list[str] | None, option("End before this text. May be repeated.", "Sampling", "TEXT")
    ] = None

    def params(self, **more: Any) -> SamplingParams:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(**given | more)


def flag_of(name: str) -> str:
    """What the user calls a field of EngineOptions."""
    # typer takes the first name for a default
    said = get_type_hints(EngineOptions, include_extras=True)[name].__metadata__[0]
    names = (str(each) for each in (said.default, *said.param_decls))
    return next((each for each in names if each.startswith("--")), f"--{name.replace('_', '-')}")


# ---- commands ------------------------------------------------------------------------------------------


def command(function: Callable[..., None]) -> Callable[..., None]:
    """See the head of this file."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(hints[name]):
            shown.append(
                parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        groups[name] = hints[name]
        types = get_type_hints(hints[name], include_extras=True)
        for f in fields(hints[name]):
            default = (
                f.default
                if parameter.default is inspect.Parameter.empty
                else getattr(parameter.default, f.name)
            )
            shown.append(
                inspect.Parameter(
                    f.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=types[f.name],
                )
            )

    @functools.wraps(function)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        try:
            function(**given)
        except OctavoError as error:
            if os.environ.get("OCTAVO_DEBUG"):
                raise
            fail(str(error))
        except BrokenPipeError:  # `octavo complete ... | head` has read enough
            # or Python complains when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in shown}
    return run


def fail(message: str, code: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)
