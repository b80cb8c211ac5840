"""Generated text on a terminal: broken between words, and unable to steer it. Thoughts told from
answers at every split."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.terminal import (
    Writer,
    in_bytes,
    plain,
    print_result,
    short,
    table,
    tokens,
    typing_hidden,
)
from octavo.text.reasoning import ReasoningFilter


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(pieces: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, style: str = "") -> str:
    screen = Screen()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        patch.setenv("COLUMNS", str(columns))
        writer = Writer()
        for piece in pieces:
            writer.write(piece, style)
        writer.end()
    return screen.getvalue()


def test_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(["one two", " thr", "ee four"], 10, monkeypatch) == "one two \nthree four\n"


def test_own_line_breaks_and_indents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(["def f():\n    return 1\n"], 20, monkeypatch) == "def f():\n    return 1\n"


def test_text_without_spaces_is_shown_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    writer = Writer()
    writer.write("今日は")
    assert screen.getvalue() == "今日は"
    writer.write(" " + "x" * 40)
    assert screen.getvalue().endswith("x" * 40)


@given(st.text("ab \n", max_size=60), st.integers(3, 30), st.lists(st.integers(1, 7), min_size=1))
def test_no_word_is_lost_and_no_line_too_long(text: str, columns: int, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sizes, pieces, at = itertools.cycle(cuts), [], 0
        while at < len(text):
            n = next(sizes)
            pieces.append(text[at : at + n])
            at += n
        out = shown(pieces, columns, patch)
        assert out == shown([text], columns, patch)
    words = text.split()
    if all(len(word) <= columns for word in words):
        assert out.split() == words and all(len(line) <= columns for line in out.split("\n"))


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(["a\x1b]0;title\x07b\x9bc\rd\x7f"], 80, monkeypatch) == "a]0;titlebcd\n"
    assert plain("tab\tand\nnewline") == "tab\tand\nnewline"


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer()
    writer.write("a very\x1b long line " * 10, style="\x1b[2m")
    writer.end()
    assert capsys.readouterr().out == "a very\x1b long line " * 10 + "\n"


def test_numbers_for_people() -> None:
    assert [in_bytes(n) for n in (0, 2048, 5 * 2**20, 3 * 2**30, -(2**31))] == [
        "0 B",
        "2 KiB",
        "5 MiB",
        "3.00 GiB",
        "-2.00 GiB",
    ]
    assert [short(n) for n in (12, 35_168, 134_515_008, 1_100_048_384)] == [
        "12",
        "35.2K",
        "135M",
        "1.1B",
    ]
    assert [tokens(n) for n in (97, 1000, 1024, 131072, 5000)] == [
        "97",
        "1,000",
        "1K",
        "128K",
        "5,000",
    ]


CASES = {
    "plain": [(False, "plain")],
    "<think>a b</think>c": [(True, "a b"), (False, "c")],
    "x<think>a</think>y<think>b</think>": [(False, "x"), (True, "a"), (False, "y"), (True, "b")],
    "<think>never closed": [(True, "never closed")],
    "a < b <thin air": [(False, "a < b <thin air")],
    "<think><</think></": [(True, "<"), (False, "</")],
    "no</think>": [(False, "no</think>")],
}


def merged(pieces: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
    return [
        (kind, "".join(text for _, text in run))
        for kind, run in itertools.groupby(pieces, key=lambda p: p[0])
    ]


@pytest.mark.parametrize("text", CASES)
def test_thoughts_are_told_from_the_answer_however_the_text_is_split(text: str) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        thinking = ReasoningFilter()
        pieces = [
            p
            for part in (text[:first], text[first:second], text[second:])
            for p in thinking.push(part)
        ]
        assert merged(pieces + thinking.finish()) == CASES[text], (first, second)


def test_a_prompt_may_open_the_thought() -> None:
    thinking = ReasoningFilter(in_reasoning=True)
    assert thinking.push("a</think>b") == [(True, "a"), (False, "b")]


def test_a_wide_table_is_not_cut_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = [f"a long heading {number}" for number in range(9)]
    table(None, columns, [[f"value {number}" for number in range(9)]])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(column in printed for column in columns)


@pytest.mark.parametrize("width", [30, 200])
def test_rows_and_columns_are_exchanged_on_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    columns = ["policy", *(f"heading {number}" for number in range(9))]
    values = [[name, *(f"{name}{number}" for number in range(9))] for name in ("a", "b")]
    table(None, columns, values)
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())  # without colours
    lines = [line.split() for line in text.splitlines()]
    if width == 30:
        assert ["policy", "a", "b"] in lines and ["heading", "8", "a8", "b8"] in lines
    else:
        assert values[0] in lines and values[1] in lines


def test_a_result_is_for_programs_and_not_for_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_result('{"bench": "one"}')
    assert capsys.readouterr().out == '{"bench": "one"}\n'
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    print_result('{"bench": "one"}')
    assert screen.getvalue() == ""


def test_what_is_typed_during_a_reply_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = pty.openpty()

    def echoes() -> bool:
        return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)

    with os.fdopen(keyboard, "wb", buffering=0), os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert echoes()
        with pytest.raises(KeyError), typing_hidden():
            assert not echoes()
            raise KeyError
        assert echoes()
