"""`octavo run-batch`: runs a file of requests and writes their replies, without a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli import status
from octavo.cli.options import Model, command, declared_option, fail, option
from octavo.cli.progress import Steps
from octavo.cli.terminal import note
from octavo.engine_options import EngineOptions
from octavo.serve.serve_config import ServeConfig

if TYPE_CHECKING:
    from octavo.serve.offline_batch import BatchProgress


def server_option(name: str) -> Any:
    """Return an option of `octavo serve` that a batch needs too."""
    return declared_option(ServeConfig, name, getattr(ServeConfig, name), panel=None)


@command
def run_batch(
    model: Model = None,
    *,
    input_file: Annotated[
        str,
        option(
            "File with a request in each line, in the format of OpenAI's batches.",
            None,
            "FILE",
            "--input-file",
            "-i",
        ),
    ],
    output_file: Annotated[
        str, option("File for the replies.", None, "FILE", "--output-file", "-o")
    ],
    served_model_name: Annotated[list[str], server_option("served_model_name")] = [],  # noqa: B006
    batch_concurrency: Annotated[int, server_option("batch_concurrency")] = 32,
    chat_template: Annotated[str | None, server_option("chat_template")] = None,
    tool_parser: Annotated[str, server_option("tool_parser")] = "auto",
    reasoning_parser: Annotated[str, server_option("reasoning_parser")] = "auto",
    thinking_token_budget: Annotated[int | None, server_option("thinking_token_budget")] = None,
    engine: EngineOptions,
) -> None:
    """Run a file of requests: [bold]octavo run-batch -i requests.jsonl -o replies.jsonl[/bold]"""
    source, target = Path(input_file).expanduser(), Path(output_file).expanduser()
    if not source.is_file():
        is_missing = not source.exists()
        fail(f"the input file {source} {'does not exist' if is_missing else 'is not a file'}")
    if not target.absolute().parent.is_dir():
        fail(f"the directory of the output file {target} does not exist")
    try:
        from octavo.serve.offline_batch import run_file
    except ImportError as error:
        fail(
            f"run-batch needs more packages than the engine ({error.name} is missing): "
            "pip install 'octavo[serve]'"
        )
    config = ServeConfig(
        model=model,
        engine=engine,
        served_model_name=tuple(served_model_name),
        batch_concurrency=batch_concurrency,
        chat_template=chat_template,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        thinking_token_budget=thinking_token_budget,
    )
    with Steps() as steps:
        task = steps.add_task("starting", total=None)

        def report(phase: str, progress: BatchProgress) -> None:
            steps.update(
                task,
                description=status.PHASES.get(phase, phase),
                total=progress.total if phase == "running" else None,
                completed=progress.done,
            )

        try:
            finished = asyncio.run(run_file(config, source, target, report))
        except KeyboardInterrupt:
            note(f"interrupted: run the command again to continue ({target}.partial has replies)")
            sys.exit(130)
    earlier_note = f", {finished.earlier} of them by an earlier run" if finished.earlier else ""
    print(
        f"{finished.done} of {finished.total} requests done{earlier_note}, "
        f"{finished.failed} failed: {target}"
    )
    if finished.invalid:
        count = f"lines of {source} that are no requests: {finished.invalid}"
        fail(f"{count}; {target} has an error for each", code=1)
