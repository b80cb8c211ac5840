"""`octavo chat`: a conversation in the terminal, or line by line from a pipe.

    Chat     the conversation: messages, one reply at a time, what the last one cost. Prints nothing. With a model of this process
             or a server's (partner.py, remote.py)
    ChatSession  the words around it: the prompt, the commands, Ctrl-C

Each turn sends the whole conversation; the prefix cache has all of it but the latest message, so turns stay cheap.
"""

from __future__ import annotations

import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.chat_backend import Local, Messages, Partner, Prompt
from octavo.cli.options import (
    EMBEDDED,
    FALLBACK,
    NEUTRAL,
    Model,
    SamplingOptions,
    command,
    flag,
    load_llm,
    option,
)
from octavo.cli.reasoning_filter import OPEN, Thinking
from octavo.cli.terminal import DIM, ERASE_LINE, Writer, dim, note, short, tokens
from octavo.engine_options import EngineOptions, flag_of
from octavo.errors import InvalidRequest, OctavoError

HELP = """\
/reset           forget the conversation, keep the system prompt
/history         show the conversation
/system [TEXT]   show the system prompt, or set it; /system - removes it
/stats           speed and memory of the last reply
/help            this list
/exit            leave; so do Ctrl-D, and Ctrl-C at an empty prompt
Ctrl-C           while a reply is coming: stop it there
Alt-Enter        begin a new line in your message"""


SAMPLING = SamplingOptions(max_tokens=1024)
CHAT_FALLBACK = FALLBACK | {"repetition_penalty": 1.05}
ENGINE = EngineOptions(max_num_seqs=1)


@command
def chat(
    context: typer.Context,
    model: Model = None,
    system: Annotated[
        str | None, option("System prompt of the conversation.", None, "TEXT")
    ] = None,
    url: Annotated[
        str | None, option("Talk to a running server, such as http://127.0.0.1:8000.", None, "URL")
    ] = None,
    api_key: Annotated[
        str | None,
        option(
            "API key for --url. Prefer the environment variable.",
            None,
            "KEY",
            envvar="OCTAVO_API_KEY",
            show_envvar=True,
        ),
    ] = None,
    show_thinking: Annotated[
        bool, flag("--show-thinking", "Show the reasoning text inside <think>...</think>.")
    ] = False,
    sampling: SamplingOptions = SAMPLING,
    engine: EngineOptions = ENGINE,
) -> None:
    """Talk to a model. /help in the conversation lists what else it understands."""
    sampling.params()  # a bad value is reported before the model is loaded
    seed = secrets.randbits(32) if sampling.seed in (None, -1) else sampling.seed
    given = {
        name
        for name in context.params
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    }
    if url is None:
        partner, defaults = here(model, engine, seed)
    else:
        partner, defaults = there(model, url, api_key, given, seed)
    sampling = sampling.with_defaults(defaults, CHAT_FALLBACK)
    sampling.seed = None  # each reply gets a seed of its own, derived from `seed`
    talk = Chat(partner, sampling, system)
    ChatSession(talk, show_thinking, seed).run()


def here(model: str | None, engine: EngineOptions, seed: int) -> tuple[Partner, dict[str, Any]]:
    """The model, loaded, and the sampling parameters that it recommends."""
    from octavo.memory import parameter_count

    llm = load_llm(model, engine, seed=seed)
    name = Path(model).name if model else EMBEDDED
    if llm.get_tokenizer().chat_template is None:
        raise InvalidRequest(
            f"{name} has no chat template, so it cannot hold a conversation: use `octavo complete {model or ''}`"
        )
    parameters = short(parameter_count(llm.model))
    dtype = str(llm.model_dtype).removeprefix("torch.")
    partner = Local(llm)
    note(
        f"{name}, {parameters} parameters, {dtype}, context {tokens(partner.context)}; /help, or Ctrl-D to leave"
    )
    return partner, llm.default_sampling


def there(
    model: str | None, url: str, key: str | None, given: set[str], seed: int
) -> tuple[Partner, dict[str, Any]]:
    """A server's model, and the sampling parameters that it recommends, if the server tells."""
    from octavo.cli.remote_backend import Remote

    useless = sorted(given & {field.name for field in fields(EngineOptions)})
    if useless:
        raise InvalidRequest(
            f"{flag_of(useless[0])} is for a model that is loaded here, not for a server's (--url)"
        )
    partner = Remote(url, key, model, seed)
    context = f", context {tokens(partner.context)}" if partner.context else ""
    note(f"{partner.model} at {partner.url}{context}; /help, or Ctrl-D to leave")
    return partner, partner.default_sampling


# ---- the conversation -------------------------------------------------------------------------------------


@dataclass
class Stats:
    """What one reply cost."""

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_s: float | None = None  # until the first token
    total_s: float = 0.0
    finish_reason: str | None = None  # None: stopped by the user

    @property
    def rate(self) -> float | None:
        """Tokens a second, after the first."""
        if self.first_s is None or self.generated_tokens < 2 or self.total_s <= self.first_s:
            return None
        return (self.generated_tokens - 1) / (self.total_s - self.first_s)


class Chat:
    def __init__(self, partner: Partner, sampling: SamplingOptions, system: str | None = None):
        self.partner = partner
        self.sampling = sampling
        self.system = system
        self.turns: list[tuple[str, str]] = []  # what was said, what was replied
        self.context = partner.context
        self.stats: Stats | None = None

    def messages(self, latest: str | None = None) -> Messages:
        said = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.turns:
            said += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return said if latest is None else [*said, {"role": "user", "content": latest}]

    def make_room(self, latest: str) -> tuple[Prompt, int]:
        """The prompt, and how many of the oldest exchanges had to go. Down to half the context where any must: dropping one at
        every turn would change the beginning each time, and the prefix cache would never have it."""
        reply = min(self.sampling.max_tokens, self.context // 4)
        prompt = self.partner.encode(self.messages(latest))
        if len(prompt) + reply <= self.context or not self.context:
            return prompt, 0
        before = len(self.turns)
        kept = self.turns
        while self.turns and len(prompt) > self.context // 2:
            self.turns = self.turns[1:]
            prompt = self.partner.encode(self.messages(latest))
        if len(prompt) >= self.context:
            self.turns = kept
            raise InvalidRequest(
                f"this message makes a prompt of {len(prompt):,} tokens, but the context holds {self.context:,}: shorten it"
            )
        return prompt, before - len(self.turns)

    def reply(self, latest: str, prompt: Prompt) -> Iterator[tuple[bool, str]]:
        """(is a thought, text) as it comes. Whatever came of the answer is in `turns` afterwards."""
        stats = self.stats = Stats(len(prompt))
        start = time.monotonic()
        thinking = Thinking(prompt.end.rstrip().endswith(OPEN))
        answer = ""
        try:
            for piece in self.partner.pieces(prompt, self.sampling):
                stats.cached_tokens = piece.cached_tokens
                stats.generated_tokens = piece.generated_tokens
                stats.total_s = time.monotonic() - start
                if stats.first_s is None:
                    stats.first_s = stats.total_s
                stats.finish_reason = piece.finish_reason or stats.finish_reason
                for thought, text in thinking.push(piece.text) + (
                    thinking.finish() if piece.finish_reason else []
                ):
                    if not thought:
                        text = text if answer else text.lstrip()
                        answer += text
                    yield thought, text
        except OctavoError:
            stats.finish_reason = "error"
            raise
        finally:
            if answer.strip() and stats.finish_reason != "error":
                self.turns.append((latest, answer.rstrip()))

    def stop(self) -> None:
        """End the reply that is coming; what has come of it stays."""
        self.partner.stop()


# ---- the words around it ----------------------------------------------------------------------------------


class ChatSession:
    def __init__(self, talk: Chat, show_thinking: bool, seed: int):
        self.chat = talk
        self.show_thinking = show_thinking
        self.seed = seed
        self.commands = {
            "/reset": self.reset,
            "/history": self.history,
            "/system": self.system,
            "/stats": self.stats,
            "/help": lambda _: print(HELP),
            "/exit": self.leave,
            "/quit": self.leave,
        }

    def run(self) -> None:
        lines = (
            ask()
            if sys.stdin.isatty() and sys.stdout.isatty()
            else (line.rstrip("\n") for line in sys.stdin)
        )
        try:
            for line in lines:
                name, _, rest = line.strip().partition(" ")
                if not name:
                    continue
                try:
                    if name in self.commands:
                        self.commands[name](rest.strip())
                    elif re.fullmatch(r"/\w*", name):
                        note(f"there is no command {name}: /help lists them")
                    else:
                        self.answer(line.strip())
                except OctavoError as error:
                    note(f"error: {error}")
                sys.stdout.flush()
        except (EOFError, KeyboardInterrupt):
            pass

    def answer(self, message: str) -> None:
        talk = self.chat
        before = len(talk.turns)
        prompt, dropped = talk.make_room(message)
        if dropped:
            note(
                f"(the context of {talk.context:,} tokens is full: the oldest {dropped} of {before} exchanges were dropped)"
            )
        writer = Writer()
        waiting = False  # the word "thinking..." is on the screen
        try:
            with ctrl_c_stops(talk):
                for thought, text in talk.reply(message, prompt):
                    if thought and not self.show_thinking:
                        if writer.terminal and not waiting:
                            waiting = True
                            print(dim("thinking...", True), end="", flush=True)
                        continue
                    if waiting:
                        waiting = False
                        print(ERASE_LINE, end="")
                    writer.write(text, DIM if thought else "")
        finally:
            if waiting:
                print(ERASE_LINE, end="")
            writer.end()
        assert talk.stats is not None
        reason = talk.stats.finish_reason
        answered = len(talk.turns) > before - dropped
        if reason == "error":
            note("error: the computation failed; your message is taken back")
        elif not answered:
            note(
                f"({'stopped before an answer' if reason is None else 'no answer'}: your message is taken back)"
            )
        elif reason is None:
            note("(stopped)")
        elif reason == "length":
            note(
                f"(cut at {talk.stats.generated_tokens:,} tokens: see --max-tokens and --max-model-len)"
            )

    def reset(self, _: str) -> None:
        self.chat.turns = []
        note("(the conversation begins anew)")

    def history(self, _: str) -> None:
        writer = Writer()
        for message in self.chat.messages():
            writer.write(f"{message['role']}: {message['content']}")
            writer.end()
        if not self.chat.turns:
            note("(nothing has been said yet)")

    def system(self, text: str) -> None:
        if text:
            self.chat.system = None if text == "-" else text
            note(
                "(the system prompt is set)"
                if self.chat.system
                else "(there is no system prompt now)"
            )
        else:
            print(
                self.chat.system
                or "no system prompt is set; the model's template may bring its own"
            )

    def stats(self, _: str) -> None:
        last = self.chat.stats
        memory = self.chat.partner.memory()
        if last is not None:
            rate = "-" if last.rate is None else f"{last.rate:.1f} tokens/s"
            first = "-" if last.first_s is None else f"{last.first_s * 1000:.0f} ms"
            print(f"speed        {rate}, first token after {first}")
            print(f"last reply   {last.generated_tokens:,} tokens in {last.total_s:.2f} s")
            if last.prompt_tokens:
                share = last.cached_tokens / last.prompt_tokens
                print(
                    f"prompt       {last.prompt_tokens:,} tokens, {last.cached_tokens:,} of them cached ({share:.0%})"
                )
        if memory is not None:
            print(f"KV blocks    {memory}")
        chosen = {name: getattr(self.chat.sampling, name) for name in NEUTRAL}
        unusual = [f"{name} {value:g}" for name, value in chosen.items() if value != NEUTRAL[name]]
        print(f"sampling     {', '.join([*unusual, f'seed {self.seed}'])}")

    def leave(self, _: str) -> None:
        raise EOFError


def ask() -> Iterator[str]:
    """Lines typed at a terminal. Ctrl-C empties the line, and on an empty one ends the program."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    session: PromptSession[str] = PromptSession(key_bindings=keys)
    while True:
        print()
        yield session.prompt(FormattedText([("bold ansicyan", "> ")]))


@contextmanager
def ctrl_c_stops(talk: Chat) -> Iterator[None]:
    """Ctrl-C asks the reply to end, where nothing is half done. One who insists ends the program."""
    presses = 0

    def on_press(*_: Any) -> None:
        nonlocal presses
        presses += 1
        talk.stop()
        if presses >= 3:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
