"""What all commands share: quick help, grouped options declared once, sizes, versions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner, Result

from octavo import __version__
from octavo.cli import other_programs
from octavo.cli.options import (
    SamplingOptions,
    command,
    option,
    size,
    size_or_auto,
    sizes,
    with_flags,
)
from octavo.config import PoolerConfig, SpeculativeConfig
from octavo.engine_options import EngineOptions
from octavo.errors import ModelError
from octavo.option_declaration import flag_of, option_declarations

Octavo = Callable[..., Result]
COMMANDS = [
    ["chat"],
    ["complete"],
    ["serve"],
    ["plan"],
    ["doctor"],
    ["simulate"],
    ["bench", "batching"],
    ["bench", "priority"],
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("32K", 32768),
        ("32k", 32768),
        ("1.5M", 3 * 2**19),
        ("80G", 80 * 2**30),
        ("2GiB", 2**31),
        ("1T", 2**40),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "K", "1.0001K", "0.3", "12X", "1e3", "auto"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        size(text)


def test_lists_of_sizes_and_auto() -> None:
    assert sizes("1K, 4K,9") == [1024, 4096, 9]
    assert size_or_auto("AUTO") is None and size_or_auto("1K") == 1024


def test_version(octavo: Octavo) -> None:
    assert octavo("--version").stdout == f"octavo {__version__}\n"


def test_no_command_shows_the_commands(octavo: Octavo) -> None:
    out = octavo().output
    assert all(name in out for name in ("chat", "complete", "plan", "doctor", "bench"))


@pytest.mark.parametrize("args", [[], *COMMANDS], ids=" ".join)
def test_help_needs_no_torch(args: list[str]) -> None:
    code = f"""
import sys
from octavo.cli import app
app({[*args, "--help"]!r}, standalone_mode=False)
print(sorted({{"torch", "numpy", "prompt_toolkit", "tokenizers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr


@pytest.mark.parametrize("args", [["chat"], ["complete"], ["bench", "batching"]], ids=" ".join)
def test_help_is_grouped(octavo: Octavo, args: list[str]) -> None:
    out = octavo(*args, "--help").stdout
    assert (
        all(f" {panel} ─" in out for panel in ("Model", "Memory", "Scheduling"))
        and "--max-num-seqs" in out
    )
    assert (" Sampling ─" in out) == (args[0] != "bench")


# A value of each engine option that is not its default, as a user writes it and as the engine has
# it.
OTHER_VALUES: dict[str, tuple[str | None, object]] = {
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int8", "int8"),
    "device": ("cpu", "cpu"),
    "tensor_parallel_size": ("2", 2),
    "revision": ("main", "main"),
    "generation_config": ("vllm", "vllm"),
    "override_generation_config": ('{"top_k": 4}', {"top_k": 4}),
    "load_format": ("dummy", "dummy"),
    "hf_overrides": ('{"vocab_size": 4}', {"vocab_size": 4}),
    "model_class": ("package.module:Class", "package.module:Class"),
    "tokenizer": ("here", "here"),
    "kv_cache_dtype": ("fp8_e4m3", "fp8"),
    "max_model_len": ("2K", 2048),
    "gpu_memory_utilization": ("0.5", 0.5),
    "block_size": ("32", 32),
    "num_gpu_blocks_override": ("1K", 1024),
    "swap_space": ("2", 2.0),
    "kv_disk_path": ("there", "there"),
    "kv_disk_gib": ("3", 3.0),
    "kv_canary": (None, True),
    "kv_eviction": ("heavy", "heavy"),
    "kv_budget": ("1K", 1024),
    "kv_sinks": ("0", 0),
    "enable_prefix_caching": (None, False),
    "kv_allocation": ("contiguous", "contiguous"),
    "kv_cache": (None, False),
    "max_num_seqs": ("8", 8),
    "max_num_batched_tokens": ("1K", 1024),
    "depth": ("2", 2),
    "enable_chunked_prefill": (None, False),
    "enforce_eager": (None, True),
    "attention_backend": ("reference", "reference"),
    "fused_decoder": (None, False),
    "fused_kernels": (None, False),
    "deterministic": (None, True),
    "cascade_attention": (None, True),
    "scheduling_policy": ("fair", "fair"),
    "batching": ("static", "static"),
    "max_batch": ("4", 4),
    "window_ms": ("5", 5.0),
    "target_ms": ("30", 30.0),
    "short_prompt_share": ("0.5", 0.5),
    "piggyback_tokens": ("0", 0),
    "speculative_config": ("ngram,k=3", SpeculativeConfig("ngram", 3)),
    "record_trace": ("trace.jsonl", "trace.jsonl"),
    "record_events": ("events.jsonl", "events.jsonl"),
    "show_text": (None, True),
    "parse_special": (None, False),
    "logits_processors": ("package.module:Class", ("package.module:Class",)),
    "pooler_config": ('{"pooling_type": "MEAN"}', PoolerConfig("MEAN")),
}
NEEDS = {
    "kv_disk_gib": ["--kv-disk", "there"],
    "kv_budget": ["--kv-eviction", "sinks"],
    "kv_sinks": ["--kv-eviction", "sinks"],
    "max_batch": ["--batching", "static"],
    "window_ms": ["--batching", "window"],
    "target_ms": ["--batching", "adaptive"],
}


def test_every_engine_option_with_a_help_text_is_an_option_of_commands() -> None:
    shown = {name for name, declared in option_declarations(EngineOptions).items() if declared.help}
    assert shown == OTHER_VALUES.keys()
    got: list[EngineOptions] = []

    def show(*, engine: EngineOptions) -> None:
        got.append(engine)

    for name, (text, value) in OTHER_VALUES.items():
        args = [
            flag_of(EngineOptions, name),
            *([] if text is None else [text]),
            *NEEDS.get(name, []),
        ]
        result = run(show, *args)
        assert result.exit_code == 0, (args, result.output)
        assert getattr(got[-1], name) == value != getattr(EngineOptions(), name)
    assert run(show).exit_code == 0 and got[-1] == EngineOptions()


def test_a_bad_engine_option_is_one_line() -> None:
    def show(*, engine: EngineOptions) -> None:
        pytest.fail("the command ran")

    result = run(show, "--depth", "4")
    assert result.exit_code == 2
    assert result.stderr == "error: --depth must be an integer of at least 1 and at most 3, got 4\n"


def test_a_parameter_of_a_command_replaces_the_field_of_a_group() -> None:
    def show(
        *, depth: Annotated[str, option("Any.", None, "TEXT")] = "x", engine: EngineOptions
    ) -> None:
        print(depth, engine.depth)

    assert run(show, "--depth", "deep").stdout == "deep None\n"


def test_every_sampling_option_is_a_sampling_parameter() -> None:
    params = SamplingOptions(temperature=0.5, top_k=3, stop=["x"], seed=4).params(n=2)
    assert (params.temperature, params.top_k, params.stop, params.seed, params.n) == (
        0.5,
        3,
        ["x"],
        4,
        2,
    )


def test_sampling_options_that_are_left_out_are_the_models_or_the_fallback() -> None:
    given = SamplingOptions(temperature=0.5)
    advised = given.with_defaults({"temperature": 0.9, "top_k": 20, "max_tokens": 7})
    assert (advised.temperature, advised.top_k, advised.top_p) == (0.5, 20, 1.0)
    assert advised.max_tokens == given.max_tokens, "the command has a length of its own"
    alone = given.with_defaults({})
    assert (alone.temperature, alone.top_p, alone.repetition_penalty) == (0.5, 0.9, 1.0)


def run(function: Callable[..., None], *args: str) -> Result:
    app = typer.Typer()
    app.command()(command(function))
    return CliRunner().invoke(app, args)


HOT = SamplingOptions(temperature=2.0)


def test_a_group_arrives_filled_in_with_the_commands_own_defaults() -> None:
    def show(
        *,
        word: Annotated[str, option("Any.", None, "TEXT")] = "w",
        engine: EngineOptions,
        sampling: SamplingOptions = HOT,
    ) -> None:
        print(word, engine.max_num_seqs, sampling.temperature, sampling.top_p)

    assert run(show).stdout == "w 256 2.0 None\n"
    assert (
        run(
            show, "--word", "v", "--max-num-seqs", "1K", "--top-p", "0.5", "--temperature", "1"
        ).stdout
        == "v 1024 1.0 0.5\n"
    )
    assert HOT.temperature == 2.0


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelError("it is broken"), 2, "error: it is broken\n"),
        (FileNotFoundError(2, "gone", "f"), 2, "error: [Errno 2] gone: 'f'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line(error: BaseException, code: int, text: str) -> None:
    def broken() -> None:
        raise error

    result = run(broken)
    assert (result.exit_code, result.stderr) == (code, text)


def test_debugging_shows_where_an_error_arose(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ModelError("it is broken")

    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    assert isinstance(run(broken).exception, ModelError)


@pytest.mark.parametrize(
    ("template", "says"), [(None, "No such file"), ("{{ broken", "syntax error in line 1")]
)
def test_a_chat_template_that_cannot_be_used_is_told_of_at_the_start(
    octavo: Octavo, tmp_path: Path, template: str | None, says: str
) -> None:
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
    result = octavo("serve", "--chat-template", tmp_path / "t.jinja")
    assert result.exit_code == 2 and "--chat-template" in result.stderr and says in result.stderr


@pytest.mark.parametrize("option", ["--tool-parser", "--tool-call-parser"])
def test_an_unknown_format_of_tool_calls_is_refused_with_the_known_ones(
    octavo: Octavo, option: str
) -> None:
    """The second name and --enable-auto-tool-choice are vLLM's."""
    result = octavo("serve", option, "llama4", "--enable-auto-tool-choice")
    assert result.exit_code == 2
    for word in ("--tool-parser", "auto", "none", "hermes", "pythonic"):
        assert word in result.stderr


def test_a_watchdog_that_restarts_before_it_logs_is_refused(octavo: Octavo) -> None:
    result = octavo("serve", "--stall-kill", "5", "--stall-dump", "6")
    assert result.exit_code == 2
    assert "--stall-kill must be at least --stall-dump" in result.stderr


@pytest.mark.parametrize("command", [[], *COMMANDS, ["quantize"], ["bench"]])
def test_help_shows_no_types_of_python(command: list[str], octavo: Octavo) -> None:
    text = octavo(*command, "--help").stdout
    assert "--help" in text
    assert re.findall(r"<(bool|str|int|float|path)>", text) == []


def test_help_wraps_long_names_of_options(monkeypatch: pytest.MonkeyPatch, octavo: Octavo) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = octavo("serve", "--help").stdout
    assert "…" not in page
    assert "--default-chat-template-kwar" in page


def test_a_value_of_the_wrong_type_is_refused_in_our_words(octavo: Octavo) -> None:
    for words, message in (
        ("--port abc", "Invalid value for '--port': it must be an integer"),
        ("--keep-alive abc", "Invalid value for '--keep-alive': it must be a number"),
    ):
        result = octavo("serve", *words.split())
        assert result.exit_code == 2 and message in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("python", "command_line"),
    [
        ("with tokenizer=DIRECTORY (--tokenizer). In", "with --tokenizer DIRECTORY. In"),
        ('with load_format="dummy" (--load-format dummy)', "with --load-format dummy"),
        ("lower swap_space (--kv-host-gib)", "lower --kv-host-gib"),
        ("max_model_len 900 (--max-model-len) is", "--max-model-len 900 is"),
        ("quantised weights (--quant)", "quantised weights (--quant)"),
    ],
)
def test_errors_have_the_flags_of_the_command_line(python: str, command_line: str) -> None:
    assert with_flags(python) == command_line


# ---- names of other programs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --ctx-size 4096", "No such option: --ctx-size. Use --max-model-len N"),
        ("serve -c=4096", "No such option: -c. Use --max-model-len N"),
        ("serve -ngl 99 model", "No such option: -ngl. Use --device cuda"),
        ("chat -m model.gguf", "No such option: -m. Give the model as an argument"),
        ("run model", "No such command: run. Use: octavo chat MODEL"),
        ("bench run", "No such command 'run'."),
        ("serve --ports 1", "No such option: --ports (Possible options: "),
    ],
)
def test_names_of_other_programs_are_explained(octavo: Octavo, words: str, message: str) -> None:
    result = octavo(*words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_hints_name_options_that_exist_for_names_that_do_not(octavo: Octavo) -> None:
    page = octavo("serve", "--help").stdout
    options = set(re.findall(r"--?[a-z][a-z-]*", page))
    assert not options & other_programs.OPTIONS.keys()
    for hint in other_programs.OPTIONS.values():
        assert set(re.findall(r"--[a-z-]+", hint)) <= options, hint
