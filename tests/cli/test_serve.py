"""What the options of `octavo serve` make of the server."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from octavo.cli import COMMANDS_WITH_TIMESTAMPS, OneLine, app
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest
from octavo.option_declaration import flag_of, option_declarations
from octavo.serve.kv_events_config import KVEventsConfig
from octavo.serve.limits import Limits
from octavo.serve.ray_serve.ray_options import RayOptions
from octavo.serve.serve_config import ServeConfig

from .test_chat import Terminal

Octavo = Callable[..., Result]

# Fields of ServeConfig that are not options themselves: an argument and two groups of options.
NOT_OPTIONS = {"model", "engine", "limits"}
# A value of each option that is not its default, as a user writes it and as the server has it.
OTHER_VALUES: dict[type, dict[str, tuple[str | None, object]]] = {
    ServeConfig: {
        "host": ("::1", "::1"),
        "port": ("0", 0),
        "uds": ("socket", "socket"),
        "root_path": ("/llm/", "/llm"),
        "ssl_certfile": ("cert.pem", "cert.pem"),
        "ssl_keyfile": ("key.pem", "key.pem"),
        "ssl_ca_certs": ("ca.pem", "ca.pem"),
        "ssl_cert_reqs": ("2", 2),
        "ssl_ciphers": ("HIGH", "HIGH"),
        "grpc_port": ("50051", 50051),
        "health_port": ("8001", 8001),
        "served_model_name": ("a", ("a",)),
        "chat_template": ("FILE", "{{ messages }}"),
        "tool_parser": ("hermes", "hermes"),
        "reasoning_parser": ("think", "think"),
        "log_level": ("DEBUG", "debug"),
        "files_dir": ("/tmp", "/tmp"),
        "thinking_token_budget": ("64", 64),
        "default_chat_template_kwargs": ('{"a": 1}', {"a": 1}),
        "return_tokens_as_token_ids": (None, True),
        "enable_force_include_usage": (None, True),
        "batch_concurrency": ("3", 3),
        "keys_file": ("keys.toml", "keys.toml"),
        "api_keys": ("a-key", ("a-key",)),
        "allow_unauthenticated": (None, True),
        "allowed_hosts": ("a.example", ("a.example",)),
        "allowed_origins": ("https://a.example", ("https://a.example",)),
        "trusted_proxies": ("10.0.0.1", ("10.0.0.1",)),
        "strict_params": (None, True),
        "request_templates": (None, True),
        "live_controls": (None, True),
        "max_queue_memory": ("1G", 2**30),
        "max_queue": ("1K", 1024),
        "max_queue_tokens": ("1M", 2**20),
        "text_workers": ("4", 4),
        "queue_timeout": ("5", 5.0),
        "request_timeout": ("5", 5.0),
        "drain_timeout": ("0", 0.0),
        "keep_alive": ("5", 5.0),
        "stall_dump": ("5", 5.0),
        "stall_kill": ("50", 50.0),
        "check_interval": ("0", 0.0),
        "metrics_prefix": ("vllm", "vllm"),
        "kv_events_config": ('{"hwm": 5}', KVEventsConfig(hwm=5)),
        "otlp_traces_endpoint": ("http://127.0.0.1:4317", "http://127.0.0.1:4317"),
    },
    Limits: {
        "connections": ("2K", 2048),
        "connections_per_address": ("50", 50),
        "watchers": ("0", 0),
    },
}
GROUP_OF_CONFIG = {ServeConfig: lambda config: config, Limits: lambda config: config.limits}


def config_for(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ServeConfig:
    found: list[ServeConfig] = []
    monkeypatch.setattr("octavo.serve.server.run", lambda config, *_: found.append(config))
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    return found[0]


def test_every_field_of_the_config_is_an_option_with_a_help_text() -> None:
    declared = option_declarations(ServeConfig)
    assert declared.keys() == {field.name for field in fields(ServeConfig)} - NOT_OPTIONS
    assert [name for name, option in declared.items() if not option.help] == []
    assert [name for name, option in option_declarations(Limits).items() if not option.help] == []


def test_the_command_has_the_options_that_the_groups_declare_and_no_others() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    shown = {parameter.name: parameter for parameter in command.params}
    declared = {
        name: (group, option)
        for group in (EngineOptions, ServeConfig, Limits, RayOptions)
        for name, option in option_declarations(group).items()
        if option.help
    }
    assert shown.keys() - declared.keys() == {"model", "seed"}
    assert declared.keys() <= shown.keys()
    for name, (group, option) in declared.items():
        parameter = shown[name]
        assert parameter.opts[0] == flag_of(group, name)
        assert (parameter.help, parameter.rich_help_panel) == (option.help, option.panel)


def test_every_option_of_the_server_is_described() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text(encoding="utf-8")
    flags = [flag_of(group, name) for group in OTHER_VALUES for name in option_declarations(group)]
    assert [flag for flag in flags if not re.search(rf"{flag}\b(?!-)", page)] == []


@pytest.mark.parametrize("group", OTHER_VALUES, ids=lambda group: group.__name__)
def test_every_option_reaches_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: type
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert OTHER_VALUES[group].keys() == option_declarations(group).keys()
    assert config_for(monkeypatch) == ServeConfig()
    for name, (text, value) in OTHER_VALUES[group].items():
        written = [] if text is None else [str(template) if text == "FILE" else text]
        config = config_for(monkeypatch, flag_of(group, name), *written)
        found = GROUP_OF_CONFIG[group](config)
        assert getattr(found, name) == value != getattr(group(), name), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "--port must be an integer of at least 0 and at most 65535"),
        (("--grpc-port", "0"), "--grpc-port must be an integer of at least 1"),
        (("--text-workers", "0"), "--text-workers must be an integer of at least 1, got 0"),
        (("--queue-timeout", "0"), "--queue-timeout must be a number in [0.001, 1e+09], got 0.0"),
        (("--queue-timeout", "inf"), "--queue-timeout must be a number in [0.001, 1e+09]"),
        (("--max-watchers", "-1"), "--max-watchers must be an integer of at least 0, got -1"),
        (("--metrics-prefix", "x"), "--metrics-prefix must be one of octavo, vllm, got 'x'"),
        (("--log-level", "all"), "--log-level must be one of debug, info, warning, error"),
        (("--num-blocks", "0"), "'0' is not a size"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_under_the_name_of_its_flag(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], message: str
) -> None:
    monkeypatch.setattr("octavo.serve.server.run", lambda config, *_: pytest.fail("it started"))
    result = octavo("serve", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": -1}, "port must be an integer of at least 0"),
        ({"allowed_hosts": "a.example"}, "allowed_hosts must be a list of strings"),
        ({"stall_dump": 61}, "--stall-kill must be at least --stall-dump"),
        ({"tool_parser": "llama4"}, "tool_parser must be one of auto, none, hermes"),
    ],
)
def test_a_config_is_always_valid(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ServeConfig(**values)


def test_a_config_is_read_from_json() -> None:
    values = {
        "port": 0,
        "served_model_name": ["a"],
        "limits": {"watchers": 2},
        "engine": {"depth": 2},
    }
    config = msgspec.json.decode(json.dumps(values), type=ServeConfig)
    assert config == ServeConfig(
        port=0,
        served_model_name=("a",),
        limits=Limits(watchers=2),
        engine=EngineOptions(depth=2),
    )


def test_every_served_model_name_is_served_and_the_first_is_in_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/serve/test_routes.py asks a server under its other names."""
    names = ("--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "c")
    config = config_for(monkeypatch, *names)
    assert (config.name, config.names) == ("a", ("a", "b", "c"))


def test_a_command_line_of_vllm_serves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--model Qwen/Qwen3-0.6B --served-model-name a b --api-key first second --seed 7 "
        "--dtype half --max_model_len 4096 --gpu-memory-utilization=0.8 --quantization int8 "
        "--swap_space 3 --scheduling-policy priority --enable-prefix-caching "
        "--enable-auto-tool-choice --tool-call-parser hermes --enable-chunked-prefill "
        "--disable-log-requests --trust-remote-code --tokenizer-mode auto --max-log-len 100 "
        "--uvicorn-log-level warning --pipeline-parallel-size 1 --enable-lora=false "
        '--allowed-origins [] --compilation-config {"level":3} --cuda-graph-sizes 1 2 4 '
        "--enforce-eager"
    )
    config = config_for(monkeypatch, *words.split())
    assert config.model == "Qwen/Qwen3-0.6B"
    assert (config.names, config.api_keys) == (("a", "b"), ("first", "second"))
    assert config.tool_parser == "hermes"
    assert config.engine == EngineOptions(
        seed=7,
        dtype="float16",
        max_model_len=4096,
        gpu_memory_utilization=0.8,
        quantization="int8",
        swap_space=3.0,
        scheduling_policy="priority",
        enforce_eager=True,
    )
    assert not config_for(monkeypatch, "--no-enable-prefix-caching").engine.enable_prefix_caching


def test_short_flags_of_vllm_are_those_of_the_long_names(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "a/model -tp 2 -pp=1 -dp 1 -q int8 -O3 -cc.mode 3 -sc.method ngram -sc.k 3"
    config = config_for(monkeypatch, *words.split())
    assert config.model == "a/model"
    assert config.engine == EngineOptions(
        tensor_parallel_size=2,
        quantization="int8",
        speculative_config={"method": "ngram", "k": 3},
    )


def test_a_model_after_a_flag_is_still_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(monkeypatch, "--enable-chunked-prefill", "--served-model-name", "a", "m")
    assert (config.model, config.names) == ("m", ("a",))


def test_json_objects_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--hf-overrides", '{"a": 1}', "--override-generation-config", '{"top_k": 4}')
    engine = config_for(monkeypatch, *words).engine
    assert (engine.hf_overrides, engine.override_generation_config) == ({"a": 1}, {"top_k": 4})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--enable-lora", "--enable-lora is not supported: an adapter must be merged"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2 is not supported"),
        ("-pp 2", "--pipeline-parallel-size 2 is not supported"),
        ("--middleware a.b", "put a proxy with such middleware before the server"),
        ("--enable-ssl-refresh", "restart the server to read a new certificate"),
        ("--cpu_offload_gb=4", "--cpu-offload-gb 4 is not supported: weights stay on the device"),
        ("--model", "--model needs a value"),
        ("--no-such-flag", "No such option"),
        ("--hf-overrides 3", "--hf-overrides must be a dictionary of fields, got 3"),
    ],
)
def test_a_flag_of_vllm_that_would_have_an_effect_is_refused(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.setattr("octavo.serve.server.run", lambda config, *_: pytest.fail("it started"))
    result = octavo("serve", *words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_the_name_of_a_model_is_never_a_path_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "Qwen3.gguf").touch()
    names = {
        None: "smollm2",
        str(tmp_path / "Qwen3.gguf"): "Qwen3",
        "/missing/Qwen3-0.6B": "Qwen3-0.6B",
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
    }
    assert {model: ServeConfig(model=model).name for model in names} == names


def test_no_parse_special_makes_control_tokens_in_prompts_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/serve/test_routes.py shows what such a server does."""
    assert config_for(monkeypatch).engine.parse_special
    assert not config_for(monkeypatch, "--no-parse-special").engine.parse_special


@pytest.mark.parametrize("has_time", [False, True])
def test_lines_of_the_servers_log_have_the_time(has_time: bool) -> None:
    record = logging.LogRecord("octavo", logging.INFO, "", 0, "GET %s", ("/livez",), None)
    line = OneLine(has_time).format(record)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d " if has_time else ""
    assert re.fullmatch(time + "info: GET /livez", line)
    assert "serve" in COMMANDS_WITH_TIMESTAMPS


def test_at_a_terminal_the_log_keeps_its_level_and_ctrl_c_says_that_the_server_stops(
    tiny: str,
) -> None:
    options = ["--port", "0", "--device", "cpu", "--override-generation-config", '{"top_k": 7}']
    program = Terminal(sys.executable, "-m", "octavo", "serve", tiny, *options)
    try:
        start = program.expect("try: .*\n", seconds=120)
        assert "INFO" not in start
        assert "top_k 7 by default (--override-generation-config)" in start
        program.send("\x03")
        program.expect(r"\^C\r\n.*stopped")
        assert program.exit_code() == 0
    finally:
        program.close()


def test_the_demo_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, octavo: Callable[..., Result]
) -> None:
    monkeypatch.setattr("octavo.serve.server.run", lambda config, announce: announce(None, 7000))
    lines = octavo("demo", "--no-browser").stdout.splitlines()
    assert lines[0].startswith("open:    http://127.0.0.1:7000/ in a browser; its buttons send")
