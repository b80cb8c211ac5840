"""What the options of `octavo serve` make of the server."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.serve.serve_config import ServeConfig


def config_for(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ServeConfig:
    found: list[ServeConfig] = []
    monkeypatch.setattr("octavo.serve.server.run", lambda config, say: found.append(config))
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    return found[0]


def test_every_served_model_name_is_served_and_the_first_is_in_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/serve/test_routes.py asks a server under its other names."""
    names = ("--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "c")
    config = config_for(monkeypatch, *names)
    assert (config.name, config.other_names) == ("a", ("b", "c"))
    one = config_for(monkeypatch, "--served-model-name", "a")
    assert (one.name, one.other_names) == ("a", ())
    none = config_for(monkeypatch)
    assert (none.name, none.other_names) == ("smollm2", ())


def test_no_parse_special_makes_control_tokens_in_prompts_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/serve/test_routes.py shows what such a server does."""
    assert config_for(monkeypatch).parse_special
    assert not config_for(monkeypatch, "--no-parse-special").parse_special
