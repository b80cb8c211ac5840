"""Writes to the terminal: generated text to stdout, remarks to stderr.

Colours and line breaks are added only on a terminal. Generated text may contain anything, so
characters that control a terminal are removed. This module does not depend on models.
"""

from __future__ import annotations

import re
import shutil
import sys
import termios
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.table import Table

DIM = "\x1b[2m"
RESET = "\x1b[0m"
ERASE_LINE = "\r\x1b[K"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except tab and newline


MAX_TABLE_WIDTH = 1000  # columns of the terminal


def plain(text: str) -> str:
    """Remove control characters: a model must not move the cursor or set the window title."""
    return _CONTROL.sub("", text)


def dim(text: str, terminal: bool) -> str:
    return f"{DIM}{text}{RESET}" if terminal else text


def note(text: str) -> None:
    """Print a remark to the user on stderr."""
    print(dim(text, sys.stderr.isatty()), file=sys.stderr, flush=True)


def speed_line(num_tokens: int, rate: float | None, cached_tokens: int = 0) -> str:
    """Describe the length and the speed of a reply."""
    description = f"{num_tokens:,} token" + ("" if num_tokens == 1 else "s")
    speed = "" if rate is None else f", {rate:.0f} tokens/s"
    cached = f", {cached_tokens:,} prompt tokens from the cache" if cached_tokens else ""
    return f"({description}{speed}{cached})"


def in_bytes(count: float) -> str:
    """Format a number of bytes: 512 B, 45 KiB, 8.00 GiB."""
    sign = "-" if count < 0 else ""
    count = abs(count)
    for unit, decimals in (("B", 0), ("KiB", 0), ("MiB", 0)):
        if count < 1024:
            return f"{sign}{count:.{decimals}f} {unit}"
        count /= 1024
    return f"{sign}{count:,.2f} GiB"


def short(count: float) -> str:
    """Format a number of parameters: 135M, 1.1B."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.{0 if count >= 100 * scale else 1}f}{unit}"
    return str(int(count))


def tokens(count: int) -> str:
    """Format a number of tokens: 8K, 1000, 128K for 131,072."""
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


def say(markup: str) -> None:
    """Print a line on stdout. `[bold]...[/bold]` and rich's other marks become styles."""
    from rich.console import Console

    Console(highlight=False).print(markup, soft_wrap=True)


def table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[int] = (0,),
    dim: Collection[int] = (),
) -> None:
    """Print a table on stdout. All columns but those in `left` are aligned to the right.

    A table that is too wide for a terminal is printed transposed, if the transposed table fits.
    Otherwise the table is as wide as its content: lines wrap, and no number is cut short.
    """
    from rich.console import Console

    rows = list(rows)
    console = Console(highlight=False)
    unlimited = console.options.update(width=MAX_TABLE_WIDTH)

    def width(table: Table) -> int:
        return console.measure(table, options=unlimited).maximum

    rich_table = _make_table(title, columns, rows, left, dim)
    if any(columns) and console.is_terminal and width(rich_table) > console.width:
        headings, *values = zip(columns, *rows, strict=True)
        transposed = _make_table(title, headings, values)
        if width(transposed) <= console.width:
            rich_table = transposed
    console.width = max(console.width, width(rich_table))
    console.print(rich_table)


def _make_table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[int] = (0,),
    dim: Collection[int] = (),
) -> Table:
    from rich import box
    from rich.table import Table

    rich_table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, show_header=any(columns))
    for index, column in enumerate(columns):
        rich_table.add_column(
            column,
            justify="left" if index in left else "right",
            style="dim" if index in dim else None,
            no_wrap=True,
        )
    for row in rows:
        rich_table.add_row(*row)
    return rich_table


def print_result(line: str) -> None:
    """Print a result in JSON as the last line of stdout, for programs. On a terminal it is not
    printed, because the user sees the tables."""
    if not sys.stdout.isatty():
        print(line, flush=True)


@contextmanager
def typing_hidden() -> Iterator[None]:
    """Keep the terminal from showing what is typed, such as the ^C of Ctrl-C, inside a reply."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    previous_modes = termios.tcgetattr(terminal)
    *other_modes, local_modes, in_speed, out_speed, characters = previous_modes
    hidden_modes = [*other_modes, local_modes & ~termios.ECHO, in_speed, out_speed, characters]
    termios.tcsetattr(terminal, termios.TCSADRAIN, hidden_modes)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, previous_modes)


class Writer:
    """Prints generated text as it arrives.

    On a terminal, lines break between words. The last word is held back until it is complete,
    because it may not fit the line.
    """

    # Longer words, and scripts without spaces, are shown as they arrive.
    LONGEST_WORD = 30

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self._column = 0
        self._partial_word = ""
        self._style = ""
        self._at_line_start = True

    def write(self, text: str, style: str = "") -> None:
        if not self.terminal:
            sys.stdout.write(text)
            self._at_line_start = text.endswith("\n") if text else self._at_line_start
        else:
            if style != self._style:
                self._print_word(self._partial_word)
                self._partial_word = ""
                self._style = style
            *complete_parts, self._partial_word = re.split(
                r"(\s)", self._partial_word + plain(text)
            )
            for complete_part in complete_parts:
                self._print_word(complete_part)
            if len(self._partial_word) > self.LONGEST_WORD or cell_len(self._partial_word) > len(
                self._partial_word
            ):
                self._print_word(self._partial_word)
                self._partial_word = ""
        sys.stdout.flush()

    def end(self) -> None:
        """Print the text that was held back, and start a new line."""
        self._print_word(self._partial_word)
        self._partial_word = ""
        self._style = ""
        if not self._at_line_start:
            sys.stdout.write("\n")
        self._column = 0
        self._at_line_start = True
        sys.stdout.flush()

    def _print_word(self, text: str) -> None:
        """Print one word, or one whitespace character."""
        if not text:
            return
        columns = shutil.get_terminal_size().columns
        text_width = 8 - self._column % 8 if text == "\t" else cell_len(text)
        if text != "\n" and 0 < self._column <= columns < self._column + text_width:
            sys.stdout.write("\n")
            self._column = 0
            if text.isspace():
                return
        styled = self._style and not text.isspace()
        sys.stdout.write(f"{self._style}{text}{RESET}" if styled else text)
        self._column = 0 if text == "\n" else (self._column + text_width - 1) % columns + 1
        self._at_line_start = text == "\n"
