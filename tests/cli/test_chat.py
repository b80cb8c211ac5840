"""`octavo chat`, from a pipe and at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from octavo import LLM, SamplingParams
from octavo.cli.chat_backend import LocalBackend
from octavo.cli.chat_command import SAMPLING, Chat
from octavo.cli.options import SamplingOptions
from octavo.errors import InvalidRequest

from .conftest import TEMPLATE, write_model

Octavo = Callable[..., Result]
GREEDY = ("--temperature", 0, "--repetition-penalty", 1, "--max-tokens", 8)


def reply(model: str, *said: str, system: str | None = None) -> str:
    """What the model says to a conversation, asked without a prefix cache."""
    llm = LLM(model, progress=False, enable_prefix_caching=False)
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return (
        llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
        .outputs[0]
        .text.strip()
    )


# ---- from a pipe ---------------------------------------------------------------------------------


def test_each_line_is_answered_knowing_the_lines_before(octavo: Octavo, tiny: str) -> None:
    result = octavo("chat", tiny, *GREEDY, stdin="Hi\n\nMore\n")
    first = reply(tiny, "Hi")
    assert (result.exit_code, result.stdout) == (
        0,
        f"{first}\n{reply(tiny, 'Hi', first, 'More')}\n",
    )


def test_the_banner_says_what_it_is_and_how_to_leave(octavo: Octavo, tiny: str) -> None:
    banner = octavo("chat", tiny).stderr
    assert (
        banner
        == "tiny, 35.2K parameters, float32 weights, context 1K; type /help for help, or Ctrl-D to "
        "leave\n"
    )


def test_a_pipe_gets_no_control_characters(octavo: Octavo, tiny: str) -> None:
    result = octavo("chat", tiny, *GREEDY, stdin="Hi\n/stats\n/history\n/help\n/nonsense\n")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", result.output)


def test_the_system_prompt_is_part_of_every_turn(octavo: Octavo, tiny: str) -> None:
    want = reply(tiny, "Hi", system="Be brief.")
    assert want != reply(tiny, "Hi")
    assert (
        octavo("chat", tiny, "--system", "Be brief.", *GREEDY, stdin="Hi\n").stdout == want + "\n"
    )
    assert octavo("chat", tiny, *GREEDY, stdin="/system Be brief.\nHi\n").stdout == want + "\n"
    assert octavo("chat", tiny, "--system", "Be brief.", stdin="/system\n").stdout == "Be brief.\n"
    assert (
        octavo("chat", tiny, "--system", "Be", *GREEDY, stdin="/system -\nHi\n").stdout
        == reply(tiny, "Hi") + "\n"
    )


def test_history_and_reset(octavo: Octavo, tiny: str) -> None:
    said = reply(tiny, "Hi")
    result = octavo(
        "chat",
        tiny,
        *GREEDY,
        "--system",
        "S",
        stdin="/system -\nHi\n/history\n/reset\n/history\nHi\n",
    )
    assert result.stdout == f"{said}\nuser: Hi\nassistant: {said}\n{said}\n"
    assert "starts again" in result.stderr and "conversation is empty" in result.stderr


def test_stats_show_speed_cache_and_blocks(octavo: Octavo, tiny: str) -> None:
    out = octavo(
        "chat",
        tiny,
        *GREEDY,
        "--seed",
        7,
        stdin="Hello there, my friend\n/reset\nHello there, my friend\n/stats\n",
    ).stdout
    found = dict(
        re.findall(r"^(speed|last reply|prompt|KV blocks|sampling) +(.*)$", out, re.MULTILINE)
    )
    assert re.fullmatch(r"[\d.]+ tokens/s, first token after \d+ ms", found["speed"])
    assert found["last reply"].startswith("8 tokens in ")
    prompt, cached = map(
        int, re.match(r"(\d+) tokens, (\d+) of them cached", found["prompt"]).groups()
    )  # type: ignore[union-attr]
    assert prompt == 41 and cached == 32  # all full blocks but one token
    assert re.fullmatch(r"0 used, 3 cached, \d+ free, of 16 tokens each", found["KV blocks"])
    assert found["sampling"] == "temperature 0, top_p 0.9, seed 7"


def test_stats_before_any_reply_and_unknown_commands_do_no_harm(octavo: Octavo, tiny: str) -> None:
    result = octavo("chat", tiny, stdin="/stats\n/nonsense\n/exit\nnever read\n")
    assert result.exit_code == 0 and "KV blocks" in result.stdout and "never" not in result.output
    assert "unknown command /nonsense: /help lists the commands" in result.stderr


def test_a_path_is_not_a_command(octavo: Octavo, tiny: str) -> None:
    assert (
        octavo("chat", tiny, *GREEDY, stdin="/etc/passwd\n").stdout
        == reply(tiny, "/etc/passwd") + "\n"
    )


def test_the_same_seed_gives_the_same_conversation(octavo: Octavo, tiny: str) -> None:
    def talk(seed: int) -> str:
        return octavo(
            "chat", tiny, "--temperature", 1, "--max-tokens", 20, "--seed", seed, stdin="Hi\nHi\n"
        ).stdout

    assert talk(1) == talk(1) != talk(2)


def test_the_same_question_again_is_not_answered_with_the_same_dice(
    octavo: Octavo, tiny: str
) -> None:
    args = ("--temperature", 1, "--max-tokens", 20, "--seed", 1)
    first, second = octavo("chat", tiny, *args, stdin="Hi\n/reset\nHi\n").stdout.splitlines()
    assert first != second


def test_a_model_without_a_template_is_refused_with_advice(octavo: Octavo, tmp_path: Path) -> None:
    model = write_model(tmp_path / "bare", template=None)
    result = octavo("chat", model, stdin="Hi\n")
    assert (
        result.exit_code == 2
        and "no chat template" in result.stderr
        and f"octavo complete {model}" in result.stderr
    )


def test_a_model_without_a_tokenizer_is_refused_before_its_template_is_missed(
    octavo: Octavo, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "bare", template=None)
    (model / "tokenizer.json").unlink()
    for command in ("chat", "complete", "serve"):
        result = octavo(command, model, stdin="Hi\n")
        assert result.exit_code == 2
        assert "has no tokenizer" in result.stderr and "--tokenizer DIRECTORY" in result.stderr
        assert "tokenizer=" not in result.stderr and "no chat template" not in result.stderr


def test_the_temperature_can_be_changed(octavo: Octavo, tiny: str) -> None:
    lines = "/temperature 0.25\n/temperature\n/temperature hot\n/temperature -1\n/stats\n"
    result = octavo("chat", tiny, stdin=lines)
    assert result.stdout.count("temperature 0.25") == 3
    assert "/temperature needs a number, got 'hot'" in result.stderr
    assert "temperature must be a number" in result.stderr


def test_a_message_that_the_template_refuses_leaves_the_conversation_as_it_was(
    octavo: Octavo, tmp_path: Path
) -> None:
    refusing = (
        "{% if 'bad' in messages[-1].content %}{{ raise_exception('not that') }}{% endif %}"
        + TEMPLATE
    )
    model = str(write_model(tmp_path / "prim", template=refusing))
    result = octavo("chat", model, *GREEDY, stdin="bad\nHi\n")
    assert (
        result.stdout == reply(model, "Hi") + "\n"
        and "error: the chat template refuses these messages: not that" in result.stderr
    )


def test_thoughts_are_hidden_unless_asked_for(octavo: Octavo, tmp_path: Path) -> None:
    """The template opens the thought, and this model never closes it."""
    model = str(
        write_model(
            tmp_path / "deep", template=TEMPLATE.replace("assistant\n", "assistant\n<think>")
        )
    )
    assert "<think>" in (tmp_path / "deep" / "tokenizer_config.json").read_text()
    hidden = octavo("chat", model, *GREEDY, stdin="Hi\n/history\n")
    assert hidden.stdout == "" and "no answer: your message was removed" in hidden.stderr
    assert octavo("chat", model, *GREEDY, "--show-thinking", stdin="Hi\n").stdout.strip() == reply(
        model, "Hi"
    )


def test_the_models_own_settings_hold_but_for_what_the_user_gives(
    octavo: Octavo, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "wise")
    (model / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "do_sample": true, "top_p": null}'
    )
    assert (
        "temperature 0.6, top_k 20, seed 7\n"
        in octavo("chat", model, "--seed", 7, stdin="/stats\n").stdout
    )
    given = octavo(
        "chat",
        model,
        "--seed",
        7,
        "--temperature",
        0.4,
        "--repetition-penalty",
        1.05,
        stdin="/stats\n",
    ).stdout
    assert "temperature 0.4, top_k 20, repetition_penalty 1.05, seed 7\n" in given
    ignored = octavo(
        "chat", model, "--seed", 7, "--generation-config", "vllm", stdin="/stats\n"
    ).stdout
    assert "temperature 0.4, top_p 0.9, repetition_penalty 1.05, seed 7\n" in ignored


# ---- a full context ------------------------------------------------------------------------------


def test_the_oldest_exchanges_go_when_the_context_is_full(octavo: Octavo, tiny: str) -> None:
    lines = [f"message number {i}, of some length" for i in range(9)]
    result = octavo(
        "chat",
        tiny,
        *GREEDY,
        "--max-model-len",
        512,
        "--system",
        "Stay.",
        stdin="\n".join([*lines, "/history"]),
    )
    assert result.exit_code == 0
    notices = re.findall(
        r"\(the context of 512 tokens is full: the oldest (\d+) of (\d+) exchanges were dropped\)",
        result.stderr,
    )
    assert notices
    history = result.stdout[result.stdout.index("system: Stay.") :]
    kept = re.findall(r"user: message number (\d)", history)
    assert kept == [str(i) for i in range(sum(int(n) for n, _ in notices), 9)]


def test_after_dropping_several_turns_find_their_prefix_in_the_cache(tiny: str) -> None:
    llm = LLM(tiny, progress=False, max_model_len=512, max_num_seqs=1)
    talk = Chat(LocalBackend(llm), SamplingOptions(temperature=0, max_tokens=8), "Stay.")
    full_misses = 0
    for i in range(20):
        ids, _ = talk.make_room(f"message number {i}, of some length")
        list(talk.reply(f"message number {i}, of some length", ids))
        assert talk.stats is not None and len(ids) + 8 <= 512
        full_misses += talk.stats.cached_tokens <= 32  # the system prompt alone
    assert full_misses <= 4  # where each turn dropped one exchange it would be most of them


def test_a_message_too_long_for_the_context_is_refused_and_nothing_is_forgotten(tiny: str) -> None:
    talk = Chat(LocalBackend(LLM(tiny, progress=False, max_model_len=256)), SAMPLING)
    talk.turns = [("a", "b")]
    with pytest.raises(
        InvalidRequest,
        match=r"the prompt has \d+ tokens, but the context holds 256",
    ):
        talk.make_room("x" * 300)
    assert talk.turns == [("a", "b")]


def test_a_pool_smaller_than_the_context_is_the_limit(octavo: Octavo, tiny: str) -> None:
    result = octavo(
        "chat", tiny, "--num-blocks", 6, "--max-tokens", 500, stdin="Hi\nMore\nAnd more\n"
    )
    assert result.exit_code == 0 and "context 97" in result.stderr and "error" not in result.stderr


# ---- stopping ------------------------------------------------------------------------------------


def test_stopping_frees_everything_and_keeps_what_was_said(tiny: str) -> None:
    llm = LLM(tiny, progress=False)
    talk = Chat(LocalBackend(llm), SamplingOptions(temperature=0, max_tokens=500))
    ids, _ = talk.make_room("Hi")
    said = ""
    for _, text in talk.reply("Hi", ids):
        said += text
        if len(said) >= 20:
            talk.stop()
    assert talk.turns == [("Hi", said.strip())] and len(said) < 30
    assert llm.engine.idle and talk.backend.memory().startswith("0 used, ")  # type: ignore[union-attr]


def test_stopping_works_while_a_long_prompt_is_computed(tiny: str) -> None:
    llm = LLM(tiny, progress=False, max_num_seqs=1, max_num_batched_tokens=16)
    talk = Chat(LocalBackend(llm), SamplingOptions(max_tokens=500))
    ids, _ = talk.make_room("x" * 600)
    real_step, steps = llm.step, 0

    def step() -> list[object]:
        nonlocal steps
        steps += 1
        if steps == 5:
            talk.stop()
        return real_step()  # type: ignore[return-value]

    llm.step = step  # type: ignore[method-assign,assignment]
    assert list(talk.reply("x", ids)) == [] and steps == 5
    assert talk.turns == [] and llm.engine.idle and talk.backend.memory().startswith("0 used, ")  # type: ignore[union-attr]


# ---- at a terminal -------------------------------------------------------------------------------


class Terminal:
    """A program on a pseudo-terminal of 80 columns."""

    def __init__(self, *command: str):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:  # the child
            os.environ.update(
                TERM="xterm",
                COLUMNS="80",
                LINES="24",
                PROMPT_TOOLKIT_NO_CPR="1",
                OMP_NUM_THREADS="1",
            )
            os.execv(command[0], list(command))
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 60.0) -> str:
        """Wait until what came since the last match holds the pattern; returns all up to it."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                raise AssertionError(f"no {pattern!r} within {seconds} s in {self.seen!r}")
            try:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
            except OSError:  # the program ended
                raise AssertionError(f"it ended without {pattern!r}: {self.seen!r}") from None
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def send(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def exit_code(self, seconds: float = 20.0) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:
                    time.sleep(0.05)
        raise AssertionError(f"still running after {seconds} s: {self.seen!r}")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(tiny: str) -> Iterator[Terminal]:
    args = ["--max-tokens", "900", "--temperature", "0", "--stop", "never"]
    program = Terminal(sys.executable, "-m", "octavo", "chat", tiny, *args)
    try:
        yield program
    finally:
        program.close()


def test_ctrl_c_stops_the_reply_and_not_the_program(terminal: Terminal) -> None:
    terminal.expect("> ")
    terminal.send("Hi\r")
    terminal.expect(r"[A-Za-z]{20}")
    terminal.send("\x03")
    terminal.expect(r"\(stopped\)")
    terminal.expect("> ")
    terminal.send("/history\r")
    terminal.expect(r"user: Hi")
    terminal.expect(r"assistant: [A-Za-z]{20}")  # the partial reply was kept
    terminal.expect("> ")
    terminal.send("\x04")
    assert terminal.exit_code() == 0


def test_ctrl_c_empties_the_line_and_on_an_empty_one_leaves(terminal: Terminal) -> None:
    terminal.expect("> ")
    terminal.send("half a thought")
    terminal.expect("thought")
    terminal.send("\x03")
    terminal.send("/exi")
    terminal.expect("/exi")
    terminal.send("\x03")
    time.sleep(0.3)
    terminal.send("\x03")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
