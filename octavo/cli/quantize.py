"""`octavo quantize`: writes a checkpoint with quantised weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import command, engine_option, fail, option
from octavo.engine_options import EngineOptions


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
        option("Weight format: int8, int4-g64, ...", None, "FORMAT", "--quant", show_default=True),
    ] = "int4-g64",
    revision: Annotated[str | None, engine_option("revision")] = EngineOptions.revision,
) -> None:
    """Write a checkpoint with quantised weights, which every command can load."""
    from octavo.cli.progress import Steps
    from octavo.cli.terminal import in_bytes
    from octavo.model import quant, quantized
    from octavo.model.load import open_checkpoint
    from octavo.ops.weight import WeightFormat
    from octavo.text.gguf_tokenizer import write_tokenizer

    weight_format = quant.parse(form)
    if not isinstance(weight_format, WeightFormat):
        fail(f"--quant must be one of {', '.join(quant.FORMATS)}, not {form}")
    if out.exists():
        fail(f"{out} exists: give a directory that does not exist")
    checkpoint = open_checkpoint(model, revision)
    if current_bits := quantized.quantised_bits(checkpoint, weight_format):
        print(
            f"{model} is quantised already, with {current_bits:.1f} bits per weight: quantising it "
            f"again to {form} costs quality. If there is a 16-bit checkpoint, start from that.",
            file=sys.stderr,
        )
    with Steps() as progress:
        task = progress.add_task("quantising tensors", total=len(checkpoint.tensors))
        quantized.write(
            checkpoint,
            weight_format,
            out,
            lambda count, total: progress.update(task, completed=count, total=total),
        )
    if checkpoint.gguf_metadata is not None:
        write_tokenizer(checkpoint.gguf_metadata, out)
    written_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(
        f"{out}: {in_bytes(written_bytes)} of weights as {form}, from {in_bytes(checkpoint.nbytes)}"
    )
