"""The options of `octavo serve --ray`, and the autoscaling policy."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo.cli import app
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest
from octavo.option_declaration import flag_of, option_declarations
from octavo.serve.ray_serve.ray_options import RayOptions
from octavo.serve.ray_serve.scaling import LoadPolicy
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import ServeError
from tests.serve.running import free_port

# A value of each option that is not its default, as a user writes it and as the server has it.
OTHER_VALUES: dict[str, tuple[str, object]] = {
    "replicas": ("3", 3),
    "max_replicas": ("4", 4),
    "target_requests": ("2.5", 2.5),
    "target_kv_use": ("0.5", 0.5),
    "upscale_delay": ("1", 1.0),
    "downscale_delay": ("2", 2.0),
    "routing": ("round-robin", "round-robin"),
    "prefix_max_age": ("30", 30.0),
    "prefix_slack": ("2", 2),
    "replica_cpus": ("0.5", 0.5),
    "replica_gpus": ("2", 2.0),
    "ray_address": ("10.0.0.1:6379", "10.0.0.1:6379"),
}


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_every_option_reaches_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[ServeConfig, RayOptions]] = []
    deploy = ModuleType("octavo.serve.ray_serve.deploy")
    deploy.run = lambda config, options, say, report: found.append((config, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, deploy.__name__, deploy)
    assert OTHER_VALUES.keys() == option_declarations(RayOptions).keys() - {"ray"}
    assert serve("--ray", "--port", "0").exit_code == 0
    assert found.pop() == (ServeConfig(port=0), RayOptions(ray=True))
    for name, (text, value) in OTHER_VALUES.items():
        result = serve("--ray", flag_of(RayOptions, name), text)
        assert result.exit_code == 0, result.output
        _, options = found.pop()
        assert getattr(options, name) == value != getattr(RayOptions(), name)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--uds", "octavo.sock"),
        ("--grpc-port", "8001"),
        ("--health-port", "8001"),
        ("--kv-events-config", '{"enable_kv_cache_events": true}'),
        ("--files-dir", "files"),
        ("--live-controls",),
        ("--record-trace", "trace.jsonl"),
        ("--record-events", "events.jsonl"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_options_of_a_single_server_are_refused_before_ray_starts(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = serve("--ray", *arguments)
    flag = arguments[0]
    assert result.exit_code != 0
    shown = result.output + str(result.exception)
    assert f"{flag} cannot be used with --ray: remove {flag}" in shown


def test_paths_are_absolute_for_processes_with_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy = pytest.importorskip("octavo.serve.ray_serve.deploy", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    for name in ("model", "draft", "sampling"):
        (tmp_path / name).mkdir()
    engine = EngineOptions(
        tokenizer="model",
        kv_disk_path="disk",
        generation_config="sampling",
        speculative_config="draft_model,model=draft",  # type: ignore[arg-type]
    )
    config = ServeConfig(model="model", keys_file="keys.toml", ssl_certfile="cert", engine=engine)
    found = deploy.with_absolute_paths(config)
    paths = (found.model, found.keys_file, found.ssl_certfile, found.ssl_keyfile)
    assert paths == (f"{tmp_path}/model", f"{tmp_path}/keys.toml", f"{tmp_path}/cert", None)
    assert found.engine.tokenizer == f"{tmp_path}/model"
    assert found.engine.kv_disk_path == f"{tmp_path}/disk"
    assert found.engine.generation_config == f"{tmp_path}/sampling"
    assert found.engine.speculative_config.model == f"{tmp_path}/draft"
    hub = deploy.with_absolute_paths(ServeConfig(model="Qwen/Qwen3-0.6B"))
    assert (hub.model, hub.engine.generation_config) == ("Qwen/Qwen3-0.6B", "auto")


@pytest.mark.parametrize(
    ("engine", "options", "gpus_of_the_cluster", "wanted"),
    [
        ({}, {}, 8, 1),
        ({"tensor_parallel_size": 4}, {}, 8, 4),
        ({"tensor_parallel_size": 4}, {"replica_gpus": 2}, 8, 2),
        ({"tensor_parallel_size": 4, "device": "cpu"}, {}, 8, 0),
        ({"tensor_parallel_size": 4}, {}, 0, 0),
    ],
)
def test_a_replica_has_a_gpu_for_each_rank(
    engine: dict[str, Any],
    options: dict[str, Any],
    gpus_of_the_cluster: int,
    wanted: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deploy = pytest.importorskip("octavo.serve.ray_serve.deploy", exc_type=ImportError)
    monkeypatch.setattr(deploy.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(deploy.ray, "cluster_resources", lambda: {"GPU": gpus_of_the_cluster})
    config = ServeConfig(engine=EngineOptions(**engine))
    assert deploy.gpus_per_replica(config, RayOptions(ray=True, **options)) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 4}, "--replicas 4 with --replica-cpus 1 needs 4 CPU cores, and .* has 2:"),
        ({"replicas": 4, "replica_cpus": 0.5}, None),
        ({"replicas": 2, "max_replicas": 8}, None),
        ({"replica_gpus": 1}, "--replicas 1 with --replica-gpus 1 needs 1 GPUs, and .* has 0:"),
    ],
)
def test_replicas_that_have_no_room_on_this_machine_are_refused(
    options: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy = pytest.importorskip("octavo.serve.ray_serve.deploy", exc_type=ImportError)
    monkeypatch.setattr(deploy.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(deploy.ray, "cluster_resources", lambda: {"CPU": 2.0})
    raises = pytest.raises(ServeError, match=message) if message else contextlib.nullcontext()
    with raises:
        deploy.check_resources(ServeConfig(), RayOptions(ray=True, **options))


def test_an_address_without_a_cluster_is_refused_before_ray_tries_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deploy = pytest.importorskip("octavo.serve.ray_serve.deploy", exc_type=ImportError)
    tried: list[str] = []
    monkeypatch.setattr(deploy.ray, "init", lambda address, **_: tried.append(address))
    phases: list[str] = []
    nothing = f"127.0.0.1:{free_port()}"
    with pytest.raises(ServeError, match=f"there is no Ray cluster at {nothing}"):
        deploy.connect(
            RayOptions(ray=True, ray_address=nothing), lambda text, _: phases.append(text)
        )
    assert phases == [f"connecting to the Ray cluster at {nothing}"] and not tried
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = f"127.0.0.1:{listener.getsockname()[1]}"
        for address in (found, "auto", "ray://10.0.0.1:10001"):
            options = RayOptions(ray=True, ray_address=address)
            assert deploy.connect(options, lambda text, _: None) is False
    assert tried == [found, "auto", "ray://10.0.0.1:10001"]


def test_every_option_is_described() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "ray.md").read_text(encoding="utf-8")
    flags = [flag_of(RayOptions, name) for name in option_declarations(RayOptions)]
    assert [flag for flag in flags if not re.search(rf"{flag}\b(?!-)", page)] == []


def test_options_of_ray_need_ray() -> None:
    with pytest.raises(InvalidRequest, match="--replicas has no effect without --ray: add --ray"):
        RayOptions(replicas=2)
    with pytest.raises(InvalidRequest, match="--max-replicas must be at least --replicas"):
        RayOptions(ray=True, replicas=3, max_replicas=2)


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "octavo.serve.ray_serve.deploy", raising=False)
    result = serve("--ray")
    assert result.exit_code == 2
    assert "pip install 'octavo[ray]'" in result.output


@pytest.mark.parametrize(
    ("requests", "kv_uses", "replicas"),
    [(0, [], 0), (32, [0.1, 0.1], 2), (33, [0.1, 0.1], 2.0625), (4, [0.9, 0.9, 0.6], 3)],
)
def test_the_policy_wants_replicas_for_requests_and_for_kv(
    requests: int, kv_uses: list[float], replicas: float
) -> None:
    context = SimpleNamespace(
        config=SimpleNamespace(target_ongoing_requests=16),
        total_num_requests=requests,
        aggregated_metrics={"kv_use": dict(enumerate(kv_uses))},
    )
    wanted, state = LoadPolicy(target_kv_use=0.8)(context)
    assert (wanted, state) == (pytest.approx(replicas), {})
