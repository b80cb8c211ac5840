"""Routes that change the settings of the running engine, crash it, and simulate other settings.

They are the controls of the live page and exist for demonstrations (`octavo demo`). A server has
them only with --live-controls. If there are API keys, only an administrator may use them.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import msgspec

from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.channel.messages import ChangeSettings
from octavo.serve.endpoints.operator_routes import check_operator
from octavo.serve.front.front import Front
from octavo.serve.http.exchange import Exchange

REPLY_SECONDS = 10.0  # The engine replies between two steps.
WHAT_IF_SECONDS = 60.0
WHAT_IF = (sys.executable, "-m", "octavo.bench.what_if")


class SettingsRequest(msgspec.Struct, kw_only=True):
    """Settings to change (octavo/core/live_settings.py). A missing field leaves its setting."""

    policy: str | msgspec.UnsetType = msgspec.UNSET
    token_budget: int | msgspec.UnsetType = msgspec.UNSET
    chunk: int | msgspec.UnsetType = msgspec.UNSET
    block_limit: int | msgspec.UnsetType = msgspec.UNSET


def check_controls(exchange: Exchange) -> None:
    """Raise ApiError unless the server has these routes and the caller may use them.

    A web page of another origin could otherwise make a browser send such a request.
    """
    front = exchange.front
    if not front.config.live_controls:
        raise ApiError(
            403,
            "this server has no controls: start it with --live-controls",
            "no_live_controls",
        )
    check_operator(exchange)
    headers = exchange.scope["octavo.headers"]
    origin = headers.get(b"origin", b"").decode("latin-1")
    host = headers.get(b"host", b"").decode("latin-1")
    if origin and origin.partition("://")[2] != host:
        raise ApiError(403, "web pages of this origin may not use the controls", "wrong_origin")


async def settings(exchange: Exchange) -> None:
    check_controls(exchange)
    body, unknown = await exchange.body(SettingsRequest)
    if unknown:
        name = next(iter(unknown))
        raise invalid_field(name, f"{name} is not a setting that can be changed")
    fields = msgspec.structs.asdict(body)
    changes = {name: value for name, value in fields.items() if value is not msgspec.UNSET}
    error = await change_settings(exchange.front, changes)
    if error:
        raise ApiError(400, error, "invalid_setting")
    await exchange.reply({"changed": changes})


async def change_settings(front: Front, changes: dict[str, Any]) -> str:
    """Change settings of the engine. Returns the error, or "" if the engine has applied them."""
    engine_client = front.engine_client
    _ = engine_client.model  # This raises an error while no engine is ready.
    if engine_client.settings_reply is not None:
        raise ApiError(409, "other settings are being changed: try again", "settings_busy")
    engine_client.settings_reply = asyncio.get_running_loop().create_future()
    try:
        engine_client.supervisor.send(ChangeSettings(changes))
        async with asyncio.timeout(REPLY_SECONDS):
            return await engine_client.settings_reply
    except TimeoutError:
        return "the engine has not replied: try again"
    finally:
        engine_client.settings_reply = None


async def crash(exchange: Exchange) -> None:
    """Kill the engine process. The supervisor starts a new one."""
    check_controls(exchange)
    process = exchange.front.engine_client.supervisor.process
    if process is None or process.returncode is not None:
        raise ApiError(409, "no engine process is running", "no_engine")
    process.send_signal(signal.SIGKILL)
    await exchange.reply({"crashed": True})


async def what_if(exchange: Exchange) -> None:
    """Simulate the requests that live pages have shown, under other settings.

    The simulation runs in a separate process, because the event loop must not wait for it.
    """
    check_controls(exchange)
    with exchange.reserve() as reservation:
        changes = await exchange.read(reservation)
    recording = exchange.front.events.lines()
    process = await asyncio.create_subprocess_exec(
        *WHAT_IF,
        bytes(changes).decode(errors="replace"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WHAT_IF_SECONDS):
            result, _ = await process.communicate(recording)
    except TimeoutError:
        raise ApiError(
            503,
            f"the simulation takes longer than {WHAT_IF_SECONDS:g} s: try it with octavo replay",
            "what_if_timeout",
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise ApiError(
            500, "the simulation has failed: see the log of the server", "what_if_failed"
        )
    await exchange.send(result, "application/json")
