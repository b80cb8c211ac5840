"""`octavo quantize`: writes a checkpoint with its weights in another format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import command, fail, option


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
    revision: Annotated[
        str | None, option("Branch, tag or commit of the model on huggingface.co.", None, "NAME")
    ] = None,
) -> None:
    """Write a checkpoint with quantised weights, which every command then loads as it is."""
    from octavo.cli.progress import Steps
    from octavo.cli.terminal import in_bytes
    from octavo.model import quant, quantized
    from octavo.model.load import open_checkpoint
    from octavo.ops.weight import WeightFormat
    from octavo.text.gguf_tokenizer import write_tokenizer

    parsed = quant.parse(form)
    if not isinstance(parsed, WeightFormat):
        fail(f"--quant must be one of {', '.join(quant.FORMATS)}, not {form}")
    if out.exists():
        fail(f"{out} exists already: give another directory")
    checkpoint = open_checkpoint(model, revision)
    if bits := quantized.quantised_bits(checkpoint, parsed):
        print(
            f"{model} is quantised already, to {bits:.1f} bits a weight: quantising it again to {form} costs quality. "
            "Where there is one, start from the checkpoint in 16 bits.",
            file=sys.stderr,
        )
    with Steps() as progress:
        task = progress.add_task("quantising tensors", total=len(checkpoint.tensors))
        quantized.write(
            checkpoint,
            parsed,
            out,
            lambda count, total: progress.update(task, completed=count, total=total),
        )
    if checkpoint.gguf_metadata is not None:
        write_tokenizer(checkpoint.gguf_metadata, out)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(f"{out}: {in_bytes(size)} of weights as {form}, from {in_bytes(checkpoint.nbytes)}")
