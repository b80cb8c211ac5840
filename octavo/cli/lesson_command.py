"""`octavo lesson`: lists the lessons, and runs one, on the page or in the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import status
from octavo.cli.options import command, fail, load_llm, option
from octavo.cli.replay_command import NoBrowser, Port, serve_recording
from octavo.cli.terminal import say
from octavo.engine_options import EngineOptions

if TYPE_CHECKING:
    from octavo.lessons.lesson import Lesson, LessonRun

MAX_WIDTH = 100  # columns of text


@command
def lesson(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Lesson to run. Without it, lessons are listed.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        option("Model that the lesson runs: a directory, a GGUF file or a name.", None, "MODEL"),
    ] = None,
    export: Annotated[
        Path | None,
        option(
            "Write the page with the lesson into this HTML file, and start no server.", None, "FILE"
        ),
    ] = None,
    port: Port = 0,
    no_browser: NoBrowser = False,
) -> None:
    """Predict what the engine does, then watch it: [bold]octavo lesson paging[/bold]"""
    if name is None:
        list_lessons()
        return
    from octavo.lessons.catalog import find_lesson

    chosen = find_lesson(name)
    run = run_chosen(chosen, model)
    if export is not None:
        from octavo.web_page import single_file

        title = f"Octavo, lesson {chosen.name}"
        page = single_file(run.recordings, title, run.to_json())
        export.write_text(page, encoding="utf-8")
        say(f"{export} has the lesson {chosen.name}: open it in a browser")
    elif no_browser or not has_browser():
        teach(run)
    else:
        serve_recording(run.recordings, port, opens_browser=True, lesson=run.to_json())


def has_browser() -> bool:
    """Return whether a browser can be opened from here."""
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def list_lessons() -> None:
    from octavo.lessons.catalog import LESSONS

    for chosen in LESSONS.values():
        say(f"[bold]{chosen.name:16}[/bold] {chosen.title}")
    say(
        "Run one with [bold]octavo lesson NAME[/bold]. --no-browser runs it in the terminal, where "
        "you type your prediction."
    )


def run_chosen(chosen: Lesson, model: str | None) -> LessonRun:
    from octavo.lessons.lesson import run_lesson
    from octavo.lessons.scenario import BASE_OPTIONS

    llm = load_llm(model, EngineOptions(**BASE_OPTIONS))
    llm.warm_up()
    status.show(f"running the lesson {chosen.name}")
    return run_lesson(llm, chosen)


# ---- in the terminal -----------------------------------------------------------------------------


def teach(run: LessonRun) -> None:
    """Ask for a prediction, then show the runs and explain them."""
    chosen = run.lesson
    status.end()
    say(f"[bold]{chosen.title}[/bold]\n")
    print(wrap(chosen.intro), end="\n\n")
    print(wrap(chosen.question))
    for number, choice in enumerate(chosen.choices, 1):
        print(wrap(f"{number}. {choice}", indent="   "))
    predicted = ask_for_choice(len(chosen.choices))
    for scenario, facts in zip(chosen.runs, run.facts, strict=True):
        from octavo.lessons.chart import draw_run

        say(f"\n[bold]run: {scenario.name}[/bold]")
        print("\n".join(draw_run(facts, text_width())))
    from octavo.lessons.chart import LEGEND

    print(f"\n{LEGEND}\n")
    is_right = predicted == chosen.answer
    say(f"[bold]{'Your prediction was right.' if is_right else 'You predicted otherwise.'}[/bold]")
    print(wrap(f"Answer: {chosen.choices[chosen.answer]}. {run.revealed.text}"), end="\n\n")
    for moment in run.revealed.moments:
        location = f"{chosen.runs[moment.run].name}, step {moment.step}"
        print(f"  {location}: {moment.text}")
    print()
    print(f"  code      {', '.join(chosen.code)}")
    print(f"  test      {chosen.test}")
    print(f"  more      {chosen.page}")
    print(f"  exercise  {chosen.exercise}")


def ask_for_choice(count: int) -> int:
    """Return the index of the choice that the user enters."""
    while True:
        if sys.stdin.isatty():
            print(f"\nYour prediction (1 to {count}): ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            fail("the lesson needs a prediction: enter a number, or pipe one in")
        entered = line.strip()
        if entered.isdecimal() and 1 <= int(entered) <= count:
            return int(entered) - 1
        print(f"enter a number from 1 to {count}")


def text_width() -> int:
    return min(MAX_WIDTH, shutil.get_terminal_size().columns)


def wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, text_width(), initial_indent=indent, subsequent_indent=indent)
