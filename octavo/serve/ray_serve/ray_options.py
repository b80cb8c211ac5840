"""The options of `octavo serve --ray`. They are declared like the options of the server.

This module must not import Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest
from octavo.option_declaration import Option, check_options, flag_of, integer_range, one_of, real
from octavo.serve.serve_config import ServeConfig

# These options are for a single server. Several replicas on one node would share the port or the
# file, or the routes that use the option are not served with --ray.
NOT_ON_RAY: dict[type, tuple[str, ...]] = {
    ServeConfig: (
        "uds",
        "grpc_port",
        "health_port",
        "kv_events_config",
        "files_dir",
        "live_controls",
    ),
    EngineOptions: ("record_trace", "record_events"),
}


def check_address(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be an address such as 10.0.0.1:6379", name)
    return value


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    ray: Annotated[bool, Option("Run several replicas of the server on Ray Serve.", "Ray")] = False
    replicas: Annotated[
        int,
        Option(
            "Number of replicas with --ray; with --max-replicas, the smallest number.",
            "Ray",
            metavar="N",
            show_default=True,
            check=integer_range(1),
        ),
    ] = 1
    max_replicas: Annotated[
        int | None,
        Option(
            "Add replicas up to this number while the load is high. Default: no autoscaling.",
            "Ray",
            metavar="N",
            check=integer_range(1),
        ),
    ] = None
    target_requests: Annotated[
        float,
        Option(
            "Autoscaling adds a replica above this many open requests per replica.",
            "Ray",
            metavar="X",
            show_default=True,
            check=real(0.01, 10**6),
        ),
    ] = 16.0
    target_kv_use: Annotated[
        float,
        Option(
            "Autoscaling adds a replica above this share of used KV blocks per replica.",
            "Ray",
            metavar="0..1",
            show_default=True,
            check=real(0, 1, open_low=True),
        ),
    ] = 0.8
    upscale_delay: Annotated[
        float,
        Option(
            "Seconds of high load before a replica is added.",
            "Ray",
            metavar="X",
            show_default=True,
            check=real(0, 10**6),
        ),
    ] = 10.0
    downscale_delay: Annotated[
        float,
        Option(
            "Seconds of low load before a replica is removed.",
            "Ray",
            metavar="X",
            show_default=True,
            check=real(0, 10**6),
        ),
    ] = 300.0
    routing: Annotated[
        str,
        Option(
            "How replicas are chosen: prefix (cached KV first) or round-robin.",
            "Ray",
            metavar="NAME",
            show_default=True,
            check=one_of("prefix", "round-robin"),
        ),
    ] = "prefix"
    prefix_max_age: Annotated[
        float,
        Option(
            "Seconds after which the router no longer expects a prompt in the cache of a replica.",
            "Ray",
            metavar="X",
            show_default=True,
            check=real(0.1, 10**6),
        ),
    ] = 600.0
    prefix_slack: Annotated[
        int,
        Option(
            "A replica with a cached prefix may have this many more open requests than others.",
            "Ray",
            metavar="N",
            show_default=True,
            check=integer_range(0),
        ),
    ] = 8
    replica_cpus: Annotated[
        float,
        Option(
            "CPU cores that Ray reserves for each replica.",
            "Ray",
            metavar="X",
            show_default=True,
            check=real(0, 10**4),
        ),
    ] = 1.0
    replica_gpus: Annotated[
        float | None,
        Option(
            "GPUs that Ray reserves for each replica. Default: --tensor-parallel-size if the "
            "cluster has GPUs and --device is not cpu, else 0.",
            "Ray",
            metavar="X",
            check=real(0, 1024),
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            "Address of a Ray cluster. Default: RAY_ADDRESS, or a new cluster on this machine.",
            "Ray",
            metavar="ADDRESS",
            check=check_address,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidRequest("--max-replicas must be at least --replicas", "max_replicas")
        changed = [
            field.name for field in fields(self) if getattr(self, field.name) != field.default
        ]
        if changed and not self.ray:
            flag = flag_of(RayOptions, changed[0])
            raise InvalidRequest(f"{flag} has no effect without --ray: add --ray", changed[0])


def check_server_options(config: ServeConfig) -> None:
    """Refuse the options of a server that replicas cannot have."""
    for options in (config, config.engine):
        group = type(options)
        for name in NOT_ON_RAY[group]:
            if getattr(options, name) != getattr(group, name):
                flag = flag_of(group, name)
                raise InvalidRequest(f"{flag} cannot be used with --ray: remove {flag}", name)
