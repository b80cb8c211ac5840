"""`octavo chat`: a conversation in the terminal, or line by line from a pipe.

    Chat          the conversation: messages, one reply at a time, and statistics of the last reply.
                  It prints nothing. The model is local (chat_backend.py) or on a server
                  (remote_backend.py).
    ChatSession   the terminal: the prompt, the commands and Ctrl-C

Each turn sends the whole conversation. The prefix cache holds everything except the latest message,
so each turn is cheap.
"""

from __future__ import annotations

import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.chat_backend import ChatBackend, LocalBackend, Messages, Prompt
from octavo.cli.options import (
    FALLBACK,
    NEUTRAL,
    Model,
    SamplingOptions,
    check_model_files,
    command,
    flag,
    load_llm,
    option,
    read_template,
)
from octavo.cli.terminal import (
    DIM,
    ERASE_LINE,
    Writer,
    dim,
    note,
    short,
    speed_line,
    tokens,
    typing_hidden,
)
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest, OctavoError
from octavo.option_declaration import flag_of

HELP = """\
/reset           forget the conversation, keep the system prompt
/history         show the conversation
/system [TEXT]   show the system prompt, or set it; /system - removes it
/temperature [X] show the temperature, or set it
/stats           show speed and memory of the last reply
/help            show this list
/exit            leave; Ctrl-D, and Ctrl-C at an empty prompt, also leave
Ctrl-C           during a reply: stop the reply
Alt-Enter        insert a line break in your message"""


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
    chat_template: Annotated[
        str | None,
        option(
            "File with a chat template that replaces the model's.",
            None,
            "FILE",
            parser=read_template,
        ),
    ] = None,
    show_thinking: Annotated[
        bool, flag("--show-thinking", "Show the reasoning text inside <think>...</think>.")
    ] = False,
    sampling: SamplingOptions = SAMPLING,
    engine: EngineOptions = ENGINE,
) -> None:
    """Talk to a model. Type /help in the conversation to see the commands."""
    sampling.params()  # reports an invalid value before the model is loaded
    seed = secrets.randbits(32) if sampling.seed in (None, -1) else sampling.seed
    given_options = {
        name
        for name in context.params
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    }
    if url is None:
        backend, defaults = open_local(model, engine, seed, chat_template)
    else:
        if chat_template is not None:
            raise InvalidRequest("with --url the server has a chat template: drop --chat-template")
        backend, defaults = open_remote(model, url, api_key, given_options, seed)
    sampling = sampling.with_defaults(defaults, CHAT_FALLBACK)
    sampling.seed = None  # Each reply gets its own seed, derived from `seed`.
    conversation = Chat(backend, sampling, system)
    ChatSession(conversation, show_thinking, seed).run()


def open_local(
    model: str | None, engine: EngineOptions, seed: int, chat_template: str | None
) -> tuple[ChatBackend, dict[str, Any]]:
    """Load the model. Return its backend and the sampling parameters that it recommends."""
    check_model_files(model, engine)
    model_name = Path(model).name if model else EMBEDDED
    if chat_template is None and not has_template(model, engine):
        raise InvalidRequest(
            f"{model_name} has no chat template, so it cannot chat: use `octavo complete "
            f"{model or ''}`, or give a template with --chat-template FILE"
        )
    llm = load_llm(model, engine, seed=seed)
    if chat_template is not None:
        llm.get_tokenizer().chat_templates = {"default": chat_template}
    from octavo.memory import parameter_count

    parameters = short(parameter_count(llm.model))
    backend = LocalBackend(llm)
    note(
        f"{model_name}, {parameters} parameters, {llm.weights_summary}, "
        f"context {tokens(backend.context)}; type /help for help, or Ctrl-D to leave"
    )
    return backend, llm.default_sampling


def has_template(model: str | None, engine: EngineOptions) -> bool:
    """Return whether a model has a chat template. Its weights are not read."""
    from octavo.model.load import open_checkpoint
    from octavo.text.gguf_tokenizer import chat_templates
    from octavo.text.tokenizer import read_directory_templates

    checkpoint = open_checkpoint(model, engine.revision, weights=False)
    if engine.tokenizer is not None:
        return bool(read_directory_templates(Path(engine.tokenizer)))
    if checkpoint.gguf_metadata is not None:
        return bool(chat_templates(checkpoint.gguf_metadata))
    return checkpoint.directory is None or bool(read_directory_templates(checkpoint.directory))


def open_remote(
    model: str | None, url: str, api_key: str | None, given_options: set[str], seed: int
) -> tuple[ChatBackend, dict[str, Any]]:
    """Connect to a server. Return its backend and the recommended sampling parameters."""
    from octavo.cli.remote_backend import RemoteBackend

    engine_options = {field.name for field in fields(EngineOptions)}
    sampling_options = {field.name for field in fields(SamplingOptions)}  # --seed is both
    unusable = sorted(given_options & engine_options - sampling_options)
    if unusable:
        raise InvalidRequest(
            f"{flag_of(EngineOptions, unusable[0])} sets how a model is loaded and cannot be used "
            "with --url: leave it out"
        )
    backend = RemoteBackend(url, api_key, model, seed)
    context = f", context {tokens(backend.context)}" if backend.context else ""
    note(f"{backend.model} at {backend.url}{context}; type /help for help, or Ctrl-D to leave")
    return backend, backend.default_sampling


# ---- the conversation ----------------------------------------------------------------------------


@dataclass
class ReplyStats:
    """Statistics of one reply."""

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_seconds: float | None = None  # until the first token
    total_seconds: float = 0.0
    finish_reason: str | None = None  # None means that the user stopped it

    @property
    def rate(self) -> float | None:
        """Return the tokens per second after the first token."""
        if (
            self.first_token_seconds is None
            or self.generated_tokens < 2
            or self.total_seconds <= self.first_token_seconds
        ):
            return None
        return (self.generated_tokens - 1) / (self.total_seconds - self.first_token_seconds)


class Chat:
    def __init__(self, backend: ChatBackend, sampling: SamplingOptions, system: str | None = None):
        self.backend = backend
        self.sampling = sampling
        self.system = system
        self.turns: list[tuple[str, str]] = []  # (message, answer)
        self.context = backend.context
        self.stats: ReplyStats | None = None

    def messages(self, latest_message: str | None = None) -> Messages:
        conversation = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            conversation += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        if latest_message is not None:
            conversation.append({"role": "user", "content": latest_message})
        return conversation

    def make_room(self, latest_message: str) -> tuple[Prompt, int]:
        """Return the prompt, and how many of the oldest exchanges were dropped to make it fit.

        If the context is full, exchanges are dropped until half of it is free. Dropping one
        exchange at every turn would change the start of the prompt each time, and the prefix cache
        would never match.
        """
        reply_tokens = min(self.sampling.max_tokens, self.context // 4)
        prompt = self.backend.encode(self.messages(latest_message))
        if len(prompt) + reply_tokens <= self.context or not self.context:
            return prompt, 0
        turns_before = len(self.turns)
        all_turns = self.turns
        while self.turns and len(prompt) > self.context // 2:
            self.turns = self.turns[1:]
            prompt = self.backend.encode(self.messages(latest_message))
        if len(prompt) >= self.context:
            self.turns = all_turns
            raise InvalidRequest(
                f"with this message the prompt has {len(prompt):,} tokens, but the context holds "
                f"{self.context:,}: shorten the message"
            )
        return prompt, turns_before - len(self.turns)

    def reply(self, latest_message: str, prompt: Prompt) -> Iterator[tuple[bool, str]]:
        """Yield (is reasoning, text) as the reply arrives. The answer is added to `turns`."""
        stats = self.stats = ReplyStats(len(prompt))
        started = time.monotonic()
        from octavo.text.reasoning import OPEN_TAG, ReasoningFilter

        reasoning_filter = ReasoningFilter(prompt.end.rstrip().endswith(OPEN_TAG))
        answer = ""
        try:
            for piece in self.backend.pieces(prompt, self.sampling):
                stats.cached_tokens = piece.cached_tokens
                stats.generated_tokens = piece.generated_tokens
                stats.total_seconds = time.monotonic() - started
                if stats.first_token_seconds is None:
                    stats.first_token_seconds = stats.total_seconds
                stats.finish_reason = piece.finish_reason or stats.finish_reason
                texts = reasoning_filter.push(piece.text)
                if piece.finish_reason:
                    texts += reasoning_filter.finish()
                for is_reasoning, text in texts:
                    if not is_reasoning:
                        text = text if answer else text.lstrip()
                        answer += text
                    yield is_reasoning, text
        except OctavoError:
            stats.finish_reason = "error"
            raise
        finally:
            if answer.strip() and stats.finish_reason != "error":
                self.turns.append((latest_message, answer.rstrip()))

    def stop(self) -> None:
        """End the current reply. The part that has arrived stays."""
        self.backend.stop()


# ---- the terminal --------------------------------------------------------------------------------


class ChatSession:
    def __init__(self, chat: Chat, show_thinking: bool, seed: int):
        self.chat = chat
        self.show_thinking = show_thinking
        self.seed = seed
        self.commands = {
            "/reset": self.reset,
            "/history": self.history,
            "/system": self.system,
            "/temperature": self.temperature,
            "/stats": self.stats,
            "/help": lambda _: print(HELP),
            "/exit": self.leave,
            "/quit": self.leave,
            "/bye": self.leave,
        }

    def run(self) -> None:
        if sys.stdin.isatty() and sys.stdout.isatty():
            lines = read_terminal()
        else:
            lines = (line.rstrip("\n") for line in sys.stdin)
        try:
            for line in lines:
                command_name, _, argument = line.strip().partition(" ")
                if not command_name:
                    continue
                try:
                    if command_name in self.commands:
                        self.commands[command_name](argument.strip())
                    elif re.fullmatch(r"/\w*", command_name):
                        note(f"unknown command {command_name}: /help lists the commands")
                    else:
                        self.answer(line.strip())
                except OctavoError as error:
                    note(f"error: {error}")
                sys.stdout.flush()
        except (EOFError, KeyboardInterrupt):
            pass

    def answer(self, message: str) -> None:
        chat = self.chat
        turns_before = len(chat.turns)
        prompt, dropped_turns = chat.make_room(message)
        if dropped_turns:
            note(
                f"(the context of {chat.context:,} tokens is full: the oldest {dropped_turns} of "
                f"{turns_before} exchanges were dropped)"
            )
        writer = Writer()
        shows_waiting = False  # "thinking..." is on the screen
        try:
            with stop_on_ctrl_c(chat), typing_hidden():
                for is_reasoning, text in chat.reply(message, prompt):
                    if is_reasoning and not self.show_thinking:
                        if writer.terminal and not shows_waiting:
                            shows_waiting = True
                            print(dim("thinking...", True), end="", flush=True)
                        continue
                    if shows_waiting:
                        shows_waiting = False
                        print(ERASE_LINE, end="")
                    writer.write(text, DIM if is_reasoning else "")
        finally:
            if shows_waiting:
                print(ERASE_LINE, end="")
            writer.end()
        assert chat.stats is not None
        finish_reason = chat.stats.finish_reason
        has_answer = len(chat.turns) > turns_before - dropped_turns
        if finish_reason == "error":
            note("error: the computation failed; your message was removed from the conversation")
        elif not has_answer:
            cause = "stopped before an answer" if finish_reason is None else "no answer"
            note(f"({cause}: your message was removed from the conversation)")
        elif finish_reason is None:
            note("(stopped)")
        elif finish_reason == "length":
            note(
                f"(the reply ended at {chat.stats.generated_tokens:,} tokens: see --max-tokens and "
                "--max-model-len)"
            )
        if has_answer and sys.stderr.isatty():
            note(speed_line(chat.stats.generated_tokens, chat.stats.rate, chat.stats.cached_tokens))

    def reset(self, _: str) -> None:
        self.chat.turns = []
        note("(the conversation starts again)")

    def history(self, _: str) -> None:
        writer = Writer()
        for message in self.chat.messages():
            writer.write(f"{message['role']}: {message['content']}")
            writer.end()
        if not self.chat.turns:
            note("(the conversation is empty)")

    def system(self, text: str) -> None:
        if text:
            self.chat.system = None if text == "-" else text
            removed = self.chat.system is None
            note("(the system prompt is removed)" if removed else "(the system prompt is set)")
        else:
            no_prompt = "no system prompt is set; the template of the model may have its own"
            print(self.chat.system or no_prompt)

    def temperature(self, text: str) -> None:
        if text:
            try:
                changed = replace(self.chat.sampling, temperature=float(text))
            except ValueError:
                raise InvalidRequest(f"/temperature needs a number, got {text!r:.20}") from None
            changed.params()  # raises an error for a value that is not allowed
            self.chat.sampling = changed
        print(f"temperature {self.chat.sampling.temperature:g}")

    def stats(self, _: str) -> None:
        last_stats = self.chat.stats
        memory_usage = self.chat.backend.memory()
        if last_stats is not None:
            rate = "-" if last_stats.rate is None else f"{last_stats.rate:.1f} tokens/s"
            first_token = "-"
            if last_stats.first_token_seconds is not None:
                first_token = f"{last_stats.first_token_seconds * 1000:.0f} ms"
            print(f"speed        {rate}, first token after {first_token}")
            duration = f"{last_stats.total_seconds:.2f} s"
            print(f"last reply   {last_stats.generated_tokens:,} tokens in {duration}")
            if last_stats.prompt_tokens:
                cached_share = last_stats.cached_tokens / last_stats.prompt_tokens
                print(
                    f"prompt       {last_stats.prompt_tokens:,} tokens, "
                    f"{last_stats.cached_tokens:,} of them cached ({cached_share:.0%})"
                )
        if memory_usage is not None:
            print(f"KV blocks    {memory_usage}")
        sampling_values = {name: getattr(self.chat.sampling, name) for name in NEUTRAL}
        non_default = [
            f"{name} {value:g}" for name, value in sampling_values.items() if value != NEUTRAL[name]
        ]
        print(f"sampling     {', '.join([*non_default, f'seed {self.seed}'])}")

    def leave(self, _: str) -> None:
        raise EOFError


def read_terminal() -> Iterator[str]:
    """Yield lines typed at a terminal.

    Ctrl-C clears the line. On an empty line it ends the program.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    key_bindings = KeyBindings()

    @key_bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @key_bindings.add("c-c")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    session: PromptSession[str] = PromptSession(key_bindings=key_bindings)
    while True:
        print()
        yield session.prompt(FormattedText([("bold ansicyan", "> ")]))


@contextmanager
def stop_on_ctrl_c(chat: Chat) -> Iterator[None]:
    """Make Ctrl-C end the reply between two steps. The third Ctrl-C ends the program."""
    press_count = 0

    def on_press(*_: Any) -> None:
        nonlocal press_count
        press_count += 1
        chat.stop()
        if press_count >= 3:
            raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGINT, on_press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
