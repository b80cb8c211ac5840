"""`octavo quantize`: writes a checkpoint with quantised weights, and measures what it costs."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import status
from octavo.cli.options import command, engine_option, fail, flag, load_llm, option
from octavo.engine_options import EngineOptions
from octavo.errors import NotEnoughMemory, OctavoError
from octavo.model_files import find_model_files

if TYPE_CHECKING:
    from octavo.model.checkpoint import Checkpoint

PASSAGES = 4  # passages of the text whose perplexity is measured
PASSAGE_TOKENS = 512
COSTLY = 1.02  # If the perplexity grows by a larger factor, a better format is suggested.


@command
def quantize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A directory, a .gguf file, a name on the hub, or smollm2."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; it must not exist.")
    ],
    form: Annotated[
        str,
        option(
            "Weight format: int8-g32, int4-g32-asym, ...",
            None,
            "FORMAT",
            "--quant",
            show_default=True,
        ),
    ] = "int8-g32",
    revision: Annotated[str | None, engine_option("revision")] = EngineOptions.revision,
    no_measure: Annotated[
        bool, flag("--no-measure", "Do not measure the perplexity before and after.")
    ] = False,
) -> None:
    """Write a checkpoint with quantised weights, which every command can load."""
    find_model_files(model)  # refuses a wrong name
    status.show("importing PyTorch")
    from octavo.cli.terminal import in_bytes
    from octavo.model import quant, quantized
    from octavo.model.load import open_checkpoint
    from octavo.ops.weight import WeightFormat

    weight_format = quant.parse(form)
    if not isinstance(weight_format, WeightFormat):
        fail(f"--quant must be one of {', '.join(quant.FORMATS)}, not {form}")
    if out.exists():
        fail(f"{out} exists: give a directory that does not exist")
    checkpoint = open_checkpoint(model, revision)
    current_bits = quantized.quantised_bits(checkpoint, weight_format)
    check_memory(checkpoint, form)
    write(checkpoint, weight_format, out)
    written_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    if current_bits is not None:
        warn_of_second_rounding(model, form, current_bits, written_bytes > checkpoint.nbytes)
    print(
        f"{out}: {in_bytes(written_bytes)} of weights as {form}, from {in_bytes(checkpoint.nbytes)}"
    )
    if not no_measure:
        show_perplexity(model, out, form, revision)


def check_memory(checkpoint: Checkpoint, form: str) -> None:
    """Raise NotEnoughMemory if the quantised weights do not fit into memory. They are in memory
    before they are written."""
    import torch

    from octavo.cli.terminal import in_bytes
    from octavo.memory import available_memory
    from octavo.memory_planner import ModelOutline

    options = EngineOptions(quantization=form, device="cpu")
    needed = ModelOutline(checkpoint).facts(options, "cpu").weights
    free, _ = available_memory(torch.device("cpu"))
    if needed > free:
        raise NotEnoughMemory(
            f"{checkpoint.source} takes {in_bytes(needed)} of memory as {form} before it is "
            f"written, and {in_bytes(free)} are free. Use a format of fewer bits, close other "
            "programs, or quantise on a larger machine"
        )


def warn_of_second_rounding(model: str, form: str, current_bits: float, is_larger: bool) -> None:
    result = "costs quality and makes it larger" if is_larger else "costs quality"
    print(
        f"{model} is quantised already, with {current_bits:.1f} bits per weight: quantising it "
        f"again to {form} {result}. If there is a 16-bit checkpoint, start from that.",
        file=sys.stderr,
    )


def write(checkpoint: Checkpoint, weight_format: object, out: Path) -> None:
    """Write the weights, the configuration, the tokenizer and the chat template."""
    from octavo.cli.progress import Steps
    from octavo.model import quantized
    from octavo.text.gguf_tokenizer import write_tokenizer

    with Steps() as progress:
        task = progress.add_task("quantising tensors", total=len(checkpoint.tensors))
        quantized.write(
            checkpoint,
            weight_format,  # type: ignore[arg-type]
            out,
            lambda count, total: progress.update(task, completed=count, total=total),
        )
    if checkpoint.gguf_metadata is not None:
        write_tokenizer(checkpoint.gguf_metadata, out)


def show_perplexity(model: str, out: Path, form: str, revision: str | None) -> None:
    """Print the perplexity of the written model, and that of the model it was made from."""
    perplexities = {}
    for name, source in (("before", model), ("after", str(out))):
        status.begin(f"measuring the perplexity {name}")
        try:
            perplexities[name] = perplexity(source, revision if name == "before" else None)
        except OctavoError as error:
            print(f"the perplexity {name} could not be measured: {error}", file=sys.stderr)
        finally:
            status.end()
    if "after" not in perplexities:
        return
    after = perplexities["after"]
    if "before" not in perplexities:
        print(f"perplexity {after:.2f}, over Python's language reference")
        return
    before = perplexities["before"]
    change = f"{before:.2f} before: {after / before - 1:+.1%}"
    print(f"perplexity {after:.2f} ({change}), over Python's language reference")
    if after > COSTLY * before and form != "int8-g32":
        print(
            "If the perplexity has increased too much, quantise to int8-g32 instead.",
            file=sys.stderr,
        )


def perplexity(model: str, revision: str | None) -> float:
    """Return the perplexity of a model over passages of a text."""
    from octavo.bench.measure_quant import passages, quality

    options = EngineOptions(revision=revision, max_num_seqs=1)
    llm = load_llm(model, options, generation_config="vllm")
    length = min(PASSAGE_TOKENS, llm.schedule.max_model_len - 1)
    logprobs, _ = quality(llm, passages(llm, PASSAGES, length))
    return math.exp(-statistics.fmean(logprobs))
