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
from dataclasses import dataclass, fields, is_dataclass, replace
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
        str,
        option(
            "Data type of weights and activations: auto, float32, bfloat16 or float16.",
            "Model",
            "NAME",
            show_default=True,
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        option(
            "Weight format: none, int8, int4-g64, ...; auto keeps the checkpoint's format.",
            "Model",
            "FORMAT",
            "--quant",
            show_default=True,
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        option(
            "Data type of the KV cache: auto, int8, fp8, float16, ...; int8 and fp8 halve its size.",
            "Memory",
            "NAME",
            show_default=True,
        ),
    ] = "auto"
    device: Annotated[
        str, option("Device to run on: auto, cpu or cuda.", "Model", "NAME", show_default=True)
    ] = "auto"
    revision: Annotated[
        str | None, option("Branch, tag or commit of the model on huggingface.co.", "Model", "NAME")
    ] = None
    max_model_len: Annotated[
        int | None,
        option(
            "Maximum length of prompt plus reply in tokens, such as 32K; auto takes what fits.",
            "Memory",
            "N|auto",
            parser=size_or_auto,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, option("Fraction of the GPU's memory to use.", "Memory", "0..1", show_default=True)
    ] = 0.9
    block_size: Annotated[
        int | None,
        option(
            "Tokens per KV block. Default: 16 on a CPU, 64 on a GPU.", "Memory", "N", parser=size
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        option(
            "Number of KV blocks. Default: as many as fit in memory.", "Memory", "N", parser=size
        ),
    ] = None
    kv_host_gib: Annotated[
        float | None,
        option("Host memory for KV blocks offloaded from the device.", "Memory", "GiB"),
    ] = None
    kv_disk: Annotated[
        Path | None,
        option(
            "Offload KV blocks to this directory; they survive a restart.", "Memory", "DIRECTORY"
        ),
    ] = None
    kv_disk_gib: Annotated[
        float, option("Disk space that --kv-disk may use.", "Memory", "GiB", show_default=True)
    ] = 16.0
    max_num_seqs: Annotated[
        int,
        option(
            "Batch slots: the maximum number of sequences that run at once.",
            "Scheduling",
            "N",
            parser=size,
            show_default=True,
        ),
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            "Token budget of a step. Default: 2K on a CPU, 16K on a GPU.",
            "Scheduling",
            "N",
            parser=size,
        ),
    ] = None


@dataclass
class EngineOptions(SizeOptions):
    """What an LLM is made with."""

    depth: Annotated[
        int | None,
        option(
            "Steps in flight. Default: 1 on a CPU; 2 on a GPU unless the policy preempts.",
            "Scheduling",
            "N",
        ),
    ] = None
    enforce_eager: Annotated[
        bool, flag("--enforce-eager", "Do not capture CUDA graphs.", "Scheduling")
    ] = False
    scheduling_policy: Annotated[
        str,
        option(
            "Scheduling policy: fcfs, priority, shortest, deadline, fair, prefix, or package.module:Class.",
            "Scheduling",
            "NAME",
            "--policy",
        ),
    ] = "fcfs"
    batching: Annotated[
        str,
        option(
            "Batching mode: continuous, adaptive, window, static or none.", "Scheduling", "NAME"
        ),
    ] = "continuous"
    max_batch: Annotated[
        int,
        option(
            "Maximum requests per batch with --batching window or static.",
            "Scheduling",
            "N",
            show_default=True,
        ),
    ] = 8
    window_ms: Annotated[
        float,
        option(
            "Milliseconds to wait for a batch to fill with --batching window.",
            "Scheduling",
            "X",
            show_default=True,
        ),
    ] = 20.0
    target_ms: Annotated[
        float,
        option(
            "Target inter-token latency in milliseconds with --batching adaptive.",
            "Scheduling",
            "X",
            show_default=True,
        ),
    ] = 50.0
    short_prompt_share: Annotated[
        float,
        option(
            "Fraction of a step's token budget reserved for short prompts behind a long prompt.",
            "Scheduling",
            "0..1",
            show_default=True,
        ),
    ] = 0.25
    record_trace: Annotated[
        Path | None,
        option(
            "Record arrivals and lengths in this file, for octavo simulate.", "Scheduling", "FILE"
        ),
    ] = None
    kv_canary: Annotated[
        bool, flag("--kv-canary", "Debugging: verify every KV block that is read. Slow.", "Memory")
    ] = False
    kv_eviction: Annotated[
        str,
        option(
            "Eviction mode for sequences that reach --kv-budget: none, sinks or heavy.",
            "Memory",
            "NAME",
        ),
    ] = "none"
    kv_budget: Annotated[
        int | None,
        option(
            "Maximum tokens of KV per sequence with --kv-eviction. Default: 1K.",
            "Memory",
            "N",
            parser=size,
        ),
    ] = None
    no_prefix_caching: Annotated[
        bool, flag("--no-prefix-caching", "Disable the prefix cache.", "Memory")
    ] = False
    generation_config: Annotated[
        str,
        option(
            "Sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory with such a file.",
            "Model",
            "NAME",
            show_default=True,
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        option(
            "auto reads the checkpoint; dummy makes random weights from config.json alone.",
            "Model",
            "NAME",
        ),
    ] = "auto"
    tokenizer: Annotated[
        Path | None,
        option("Directory to read the tokenizer from. Default: the model.", "Model", "DIRECTORY"),
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
            generation_config=self.generation_config,
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
            short_prompt_share=self.short_prompt_share,
            kv_canary=self.kv_canary,
            record_trace=None if self.record_trace is None else str(self.record_trace),
        )

    def load(self, model: str | dict[str, Any] | None, **more: Any) -> LLM:
        from octavo.llm import LLM

        return LLM(model, **self.arguments(), progress=sys.stderr.isatty(), **more)


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# For a model that recommends nothing. The embedded one rambles at a temperature of 0.7 and repeats itself at 0.2.
FALLBACK = {"temperature": 0.4, "top_p": 0.9}


@dataclass
class SamplingOptions:
    """How tokens are chosen and when a text ends."""

    temperature: Annotated[
        float | None,
        option(
            "Sampling temperature; 0 means greedy decoding. Default: the model's recommendation, else 0.4.",
            "Sampling",
            "X",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        option(
            "Sample from the most likely tokens whose probabilities sum to this value. Default: the model's, else 0.9.",
            "Sampling",
            "X",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        option(
            "Sample from this many of the most likely tokens; 0 means all. Default: the model's, else 0.",
            "Sampling",
            "N",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        option(
            "Drop tokens whose probability is below this fraction of the largest one. Default: the model's, else 0.",
            "Sampling",
            "X",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        option(
            "Penalty on tokens of the prompt and the reply; above 1 discourages repetition. Default: the model's, else 1; in a chat 1.05.",
            "Sampling",
            "X",
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        option("Penalty on tokens that the reply already contains, -2 to 2.", "Sampling", "X"),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option(
            "Penalty per earlier occurrence of a token in the reply, -2 to 2.",
            "Sampling",
            "X",
        ),
    ] = 0.0
    seed: Annotated[
        int | None, option("Random seed; the same seed gives the same text.", "Sampling", "N")
    ] = None
    max_tokens: Annotated[
        int,
        option(
            "Maximum number of tokens to generate.", "Sampling", "N", parser=size, show_default=True
        ),
    ] = 128
    stop: Annotated[
        list[str] | None,
        option("Stop before this text. May be given several times.", "Sampling", "TEXT"),
    ] = None

    def with_defaults(
        self, recommended: dict[str, Any], fallback: dict[str, float] = FALLBACK
    ) -> SamplingOptions:
        """These options, with the model's recommendation for those that the user left out, or the fallback if the model
        recommends nothing."""
        defaults: dict[str, Any] = NEUTRAL | (recommended or fallback)
        return replace(
            self, **{name: defaults[name] for name in NEUTRAL if getattr(self, name) is None}
        )

    def params(self, **more: Any) -> SamplingParams:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(
            **{n: value for n, value in given.items() if value is not None} | more
        )


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
