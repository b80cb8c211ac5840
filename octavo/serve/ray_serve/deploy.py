"""Builds the application of Ray Serve, and runs it for `octavo serve --ray`.

A config file of Ray Serve names `octavo.serve.ray_serve.deploy:build_app` as its import path. Its
`args` are the options of the server, the engine and Ray by the names of their fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest
from octavo.serve.limits import Limits
from octavo.serve.ray_serve.endpoint import ClusterEndpoint
from octavo.serve.ray_serve.ray_options import RayOptions, check_server_options
from octavo.serve.ray_serve.relay import Placement
from octavo.serve.ray_serve.replica import Replica
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import ServeError

APPLICATION = "octavo"
HEAD_NODE = {"node:__internal_head__": 0.001}  # The resource that only the head node has.
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
# A replica that dies is replaced after this time, and its router learns of an engine's restart.
CHECK_SECONDS = 2.0
LISTENER_SECONDS = 5.0  # A Ray cluster accepts a connection within this time.
SHUTDOWN_SECONDS = 10.0  # The processes of a deployment have this time to end, after draining.
PREFIX_ROUTER = "octavo.serve.ray_serve.prefix_router:PrefixRouter"
TURN_ROUTER = "octavo.serve.ray_serve.prefix_router:TurnRouter"
LOAD_POLICY = "octavo.serve.ray_serve.scaling:LoadPolicy"


# ---- deployments ---------------------------------------------------------------------------------


class RayReplica(Replica):
    async def __init__(self, config: ServeConfig):  # type: ignore[misc]
        super().__init__(
            config,
            host=ray.util.get_node_ip_address(),
            name=serve.get_replica_context().replica_id.unique_id,
        )
        await self.start()

    async def __del__(self) -> None:
        """Ray Serve awaits this after the open requests have ended."""
        await self.stop()


class RayReplicas:
    """Chooses replicas with the handle of their deployment."""

    def __init__(self, handle: DeploymentHandle):
        self.handle = handle

    async def place(self, hashes: list[bytes], failed: list[str], preferred: str) -> Placement:
        while True:
            call = self.handle.options(stream=True).lease.remote(hashes, failed, preferred)
            try:
                placement: Placement = await anext(call)
                return placement
            except asyncio.CancelledError:
                call.cancel()
                raise
            except RayError:  # The replica was lost before it could reply.
                await asyncio.sleep(0.05)

    async def metrics(self) -> Mapping[str, bytes]:
        return dict(await asyncio.to_thread(self.handle.broadcast("metrics").results))


class RayEndpoint(ClusterEndpoint):
    async def __init__(self, config: ServeConfig, handle: DeploymentHandle):  # type: ignore[misc]
        super().__init__(config, RayReplicas(handle))
        await self.start()

    async def __del__(self) -> None:
        await self.stop()


# ---- the application -----------------------------------------------------------------------------


def application_of(config: ServeConfig, options: RayOptions) -> serve.Application:
    """Return the application: an endpoint on the head node, and replicas on any node."""
    check_server_options(config)
    stopping = config.drain_timeout + SHUTDOWN_SECONDS
    replicas = serve.deployment(
        RayReplica,
        name="Replica",
        num_replicas=options.replicas if options.max_replicas is None else None,
        autoscaling_config=autoscaling(options),
        ray_actor_options={
            "num_cpus": options.replica_cpus,
            "num_gpus": gpus_per_replica(config, options),
        },
        max_ongoing_requests=config.limits.connections,
        health_check_period_s=CHECK_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=stopping,
        request_router_config=request_router(options),
        logging_config=LOGGING,
    )
    endpoint = serve.deployment(
        RayEndpoint,
        name="Endpoint",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": HEAD_NODE},
        health_check_period_s=CHECK_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=stopping,
        logging_config=LOGGING,
    )
    return endpoint.bind(config, replicas.bind(config))


def autoscaling(options: RayOptions) -> AutoscalingConfig | None:
    if options.max_replicas is None:
        return None
    policy = AutoscalingPolicy(
        policy_function=LOAD_POLICY, policy_kwargs={"target_kv_use": options.target_kv_use}
    )
    window = min(max(options.upscale_delay, CHECK_SECONDS), 30.0)
    settings: dict[str, Any] = {
        "min_replicas": options.replicas,
        "max_replicas": options.max_replicas,
        "target_ongoing_requests": options.target_requests,
        "upscale_delay_s": options.upscale_delay,
        "downscale_delay_s": options.downscale_delay,
        "look_back_period_s": window,  # The metrics of this time are averaged.
        "metrics_interval_s": CHECK_SECONDS,
        "policy": policy,
    }
    return AutoscalingConfig(**settings)


def request_router(options: RayOptions) -> RequestRouterConfig:
    if options.routing == "round-robin":
        return RequestRouterConfig(request_router_class=TURN_ROUTER)
    return RequestRouterConfig(
        request_router_class=PREFIX_ROUTER,
        request_router_kwargs={"max_age": options.prefix_max_age, "slack": options.prefix_slack},
        request_routing_stats_period_s=CHECK_SECONDS,
    )


def gpus_per_replica(config: ServeConfig, options: RayOptions) -> float:
    if options.replica_gpus is not None:
        return options.replica_gpus
    if config.engine.device == "cpu" or not ray.is_initialized():
        return 0.0
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return float(config.engine.tensor_parallel_size) if has_gpus else 0.0


def build_app(args: dict[str, Any]) -> serve.Application:
    """Return the application for the `args` of a config file of Ray Serve."""
    remaining = dict(args)
    groups: list[Any] = []
    for group in (EngineOptions, Limits, RayOptions, ServeConfig):
        names = {field.name for field in fields(group)} - {"engine", "limits"}
        values = {name: remaining.pop(name) for name in names & remaining.keys()}
        if group is RayOptions:
            values["ray"] = True
        groups.append(group(**values))
    if remaining:
        raise InvalidRequest(f"{', '.join(sorted(remaining))}: Octavo has no such options")
    engine, limits, options, config = groups
    return application_of(replace(config, engine=engine, limits=limits), options)


# ---- the command ---------------------------------------------------------------------------------


def run(
    config: ServeConfig,
    options: RayOptions,
    on_ready: Callable[[int], None],
    on_phase: Callable[[str, float | None], None],
) -> None:
    """Serve until a signal arrives. A second signal ends open requests at once.

    `on_ready` is called with the port when the replicas are ready. Before that, `on_phase` is
    called with each phase of the start.
    """
    is_own_cluster = connect(options, on_phase)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has replaced the handlers.
        signal.signal(number, interrupt)
    try:
        if is_own_cluster:
            check_resources(config, options)
        serve.start(proxy_location="Disabled", logging_config=LOGGING)
        if APPLICATION in serve.status().applications:
            raise ServeError(
                "this Ray cluster serves Octavo already: stop that server, or use another cluster"
            )
        application = application_of(with_absolute_paths(config), options)
        on_phase(f"starting the replicas ({options.replicas}), which load the model", None)
        with contextlib.suppress(KeyboardInterrupt):
            serve_until_interrupted(application, on_ready)
        serve.delete(APPLICATION)
    finally:
        ray.shutdown()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def serve_until_interrupted(
    application: serve.Application, on_ready: Callable[[int], None]
) -> None:
    """Start the application, and drain it after a KeyboardInterrupt."""
    try:
        handle = serve.run(application, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise ServeError(f"the replicas cannot start: {error}") from None
    on_ready(handle.listening_port.remote().result())
    try:
        threading.Event().wait()
    finally:
        with contextlib.suppress(RayError, RayServeException):  # The endpoint may be lost.
            handle.drain.remote().result()


def connect(options: RayOptions, on_phase: Callable[[str, float | None], None]) -> bool:
    """Connect to the Ray cluster of the options, or start one on this machine.

    Returns whether it was started. Such a cluster has no other machine.
    """
    address = options.ray_address or os.environ.get("RAY_ADDRESS")
    if address is None:
        on_phase("starting a Ray cluster on this machine", None)
        # By default Ray gives its processes, and so the engine, a low priority.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
        return True
    on_phase(f"connecting to the Ray cluster at {address}", None)
    try:
        check_listener(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except OSError:
        raise ServeError(
            f"there is no Ray cluster at {address} that this machine may join: start one with "
            "ray start --head, and set RAY_AUTH_MODE=token if the cluster has a token"
        ) from None
    return False


def check_listener(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Ray would try again for minutes."""
    host, _, port = address.rpartition(":")
    if "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), LISTENER_SECONDS).close()


def check_resources(config: ServeConfig, options: RayOptions) -> None:
    """Refuse replicas that this machine has no room for. Ray would wait for other machines."""
    available = ray.cluster_resources()
    per_replica = (
        ("CPU", "CPU cores", "--replica-cpus", options.replica_cpus),
        ("GPU", "GPUs", "--replica-gpus", gpus_per_replica(config, options)),
    )
    for resource, name, flag, per_replica_count in per_replica:
        needed = options.replicas * per_replica_count
        count_available = available.get(resource, 0)
        if needed > count_available:
            raise ServeError(
                f"--replicas {options.replicas} with {flag} {per_replica_count:g} needs "
                f"{needed:g} {name}, and this machine has {count_available:g}: lower one of the "
                "two options"
            )


def with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Return the config for processes with another working directory."""
    speculative = config.engine.speculative_config
    if speculative is not None:
        speculative = replace(speculative, model=absolute_name(speculative.model))
    engine = replace(
        config.engine,
        tokenizer=absolute_name(config.engine.tokenizer),
        generation_config=absolute_generation_config(config.engine.generation_config),
        kv_disk_path=absolute(config.engine.kv_disk_path),
        speculative_config=speculative,
    )
    return replace(
        config,
        model=absolute_name(config.model),
        keys_file=absolute(config.keys_file),
        ssl_certfile=absolute(config.ssl_certfile),
        ssl_keyfile=absolute(config.ssl_keyfile),
        ssl_ca_certs=absolute(config.ssl_ca_certs),
        engine=engine,
    )


def absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def absolute_name(name: str | None) -> str | None:
    """Return the absolute path of a local model or tokenizer, or the name of one on the hub."""
    return absolute(name) if name is not None and os.path.exists(name) else name


def absolute_generation_config(name: str) -> str:
    return name if name in ("auto", "vllm") else os.path.abspath(os.path.expanduser(name))
