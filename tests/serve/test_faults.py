"""Lines of the list of faults that no other file here has: section by section, named after the
line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from octavo.serve.front.loop_watchdog import LoopWatchdog
from octavo.serve.http.health import STUCK, HealthServer
from tests.serve.running import Running, alive, check_error, events, free_port, server
from tests.serve.test_streams import leave, settled

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Takes templates from requests, and is strict in what the other server is not."""
    folder: Path = tmp_path_factory.mktemp("trusting")
    with server(
        folder, request_templates=True, limits={"logprob_entries": 100}, check_interval=0.01
    ) as found:
        yield found


def probe(running: Running) -> None:
    begun = time.monotonic()
    assert running.get("/livez").status_code == 200
    assert time.monotonic() - begun < 0.5


# ---- A: transport --------------------------------------------------------------------------------


def test_a_name_twice_after_very_many_others_is_found_in_linear_time(running: Running) -> None:
    names = [f'"{k:x}":0' for k in range(300_000)]
    body = f'{{"prompt": "x", "metadata": {{{",".join(names)},"{299_999:x}":1}}}}'.encode()
    begun = time.monotonic()
    check_error(
        running.http.post(TEXT, content=body, headers=JSON), 400, f"{299_999:x}", "invalid_json"
    )
    assert time.monotonic() - begun < 5


# ---- B: identity ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "priority",
    ["9223372036854775807", "-9223372036854775808", "1.5", "true", '"1"', "NaN", "1e400", "[]"],
)
def test_an_invalid_priority_is_refused(running: Running, priority: str) -> None:
    body = f'{{"prompt": "x", "priority": {priority}}}'.encode()
    check_error(
        running.http.post(TEXT, content=body, headers=JSON),
        400,
        None if priority == "NaN" else "priority",
    )


# ---- C: what a request says ----------------------------------------------------------------------


@pytest.mark.parametrize(("path", "param"), [(CHAT, "prompt"), (TEXT, "messages")])
def test_messages_and_a_prompt_at_once(running: Running, path: str, param: str) -> None:
    check_error(running.post(path, {"messages": HI, "prompt": "hi"}), 400, param)


def test_roles_in_an_order_that_the_template_rejects(trusting: Running) -> None:
    template = "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user must come first') }}{% endif %}x"
    body = {"messages": [{"role": "assistant", "content": "hi"}], "chat_template": template}
    assert "the user must come first" in check_error(trusting.post(CHAT, body), 400)["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% include '/etc/passwd' %}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{% if %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ messages | tojson(indent=10**8) }}",
        "{{ (['a'] * 10**5) | join('b' * 10**5) }}",
        "{{ " + "+".join(["1"] * 50000) + " }}",
    ],
)
def test_a_malicious_template(trusting: Running, template: str) -> None:
    with alive(trusting):
        reply = trusting.post(CHAT, {"messages": HI, "chat_template": template, "max_tokens": 1})
    assert "passwd" not in reply.text and "<class" not in reply.text and "uid=" not in reply.text
    if reply.status_code != 200:
        assert reply.status_code in (400, 408), reply.text
        check_error(reply, reply.status_code, "chat_template")
    probe(trusting)
    assert trusting.complete()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "name",
    ["tokenize", "messages", "tools", "add_generation_prompt", "chat_template", "raise_exception"],
)
def test_template_options_that_are_the_servers_own(running: Running, name: str) -> None:
    check_error(
        running.post(CHAT, {"messages": HI, "chat_template_kwargs": {name: 1}}),
        400,
        "chat_template_kwargs",
    )


@pytest.mark.parametrize("given", [2**31, 10**9, 2**63 - 1])
def test_huge_max_tokens_are_an_upper_bound_and_reported(running: Running, given: int) -> None:
    reply = running.post(TEXT, {"prompt": [5] * 1020, "max_tokens": given, "ignore_eos": True})
    assert reply.headers["x-max-tokens"] == "4" and reply.json()["usage"]["completion_tokens"] == 4


def test_ignore_eos_without_a_maximum_ends_with_the_context(running: Running) -> None:
    reply = running.post(CHAT, {"messages": HI, "ignore_eos": True})
    assert (
        reply.json()["choices"][0]["finish_reason"] == "length"
        and reply.json()["usage"]["total_tokens"] == 1024
    )


@pytest.mark.parametrize("maximum", [0, 1])
def test_echo_with_logprobs_gives_the_prompts_with_a_null_first(
    running: Running, maximum: int
) -> None:
    choice = running.complete(prompt="abc", echo=True, max_tokens=maximum, logprobs=1)["choices"][0]
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None and len(values) == 3 + maximum and all(v <= 0 for v in values[1:])


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "top_p", "min_p"])
def test_an_infinite_penalty(running: Running, field: str) -> None:
    body = f'{{"prompt": "x", "{field}": 1e999}}'.encode()
    check_error(running.http.post(TEXT, content=body, headers=JSON), 400, field)


def test_prompt_logprobs_are_bounded_by_the_work_they_make(trusting: Running) -> None:
    fields = {"prompt": [5] * 60, "max_tokens": 1, "prompt_logprobs": 5}
    check_error(trusting.post(TEXT, fields), 400, "prompt_logprobs", "param_out_of_range")
    assert trusting.post(TEXT, {**fields, "prompt": [5] * 10}).status_code == 200


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


# what it is: schema, the code of its refusal or None where it may be followed
SCHEMAS: dict[str, tuple[Any, str | None]] = {
    "invalid": ({"type": 5}, "invalid_structured_output"),
    "remote $ref": ({"$ref": "http://127.0.0.1:9/schema.json"}, "invalid_structured_output"),
    "$ref to a file": ({"$ref": "file:///etc/passwd"}, "invalid_structured_output"),
    "$ref to nothing": ({"$ref": "#/$defs/none"}, "invalid_structured_output"),
    "recursive $ref": ({"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}, None),
    "$ref to itself": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "invalid_structured_output"),
    "1 MB": ({"type": "object", "description": "x" * 2**20}, "param_out_of_range"),
    "contradictory": ({"type": "string", "minLength": 5, "maxLength": 2}, "invalid_structured_output"),
    "contradictory all of": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "invalid_structured_output"),
    "anything": ({}, None),
    "huge enum": ({"enum": [f"value {k}" for k in range(10_000)]}, None),
    "catastrophic pattern": ({"type": "string", "pattern": "^(a+)+(b|b)*(c*)*$"}, None),
    "counted pattern": ({"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"}, ...),
    "lookahead": ({"type": "string", "pattern": "^(?=a)b$"}, "invalid_structured_output"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "code"), SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_schema(running: Running, schema: Any, code: Any) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    begun = time.monotonic()
    reply = running.post(CHAT, {"messages": HI, "max_tokens": 20, "response_format": form})
    assert time.monotonic() - begun < 7
    if code is ...:  # followed or refused, as long as it ends in time
        assert reply.status_code in (200, 400)
    elif code is None:
        assert reply.status_code == 200, reply.text
    else:
        check_error(reply, 400, "response_format", code)
    probe(running)
    assert running.complete()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("schema", [False, True, None, "x", []])
def test_a_schema_that_is_not_an_object(running: Running, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    check_error(
        running.post(CHAT, {"messages": HI, "response_format": form}),
        400,
        "response_format.json_schema.schema",
    )


@pytest.mark.parametrize("depth", [100, 1000, 20_000])
def test_a_schema_nested_deep(running: Running, depth: int) -> None:
    """However deep: a 400, or followed within the deadline of compiling."""
    deep = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    body = f'{{"prompt": "x", "max_tokens": 2, "structured_outputs": {{"json": {deep}}}}}'.encode()
    begun = time.monotonic()
    reply = running.http.post(TEXT, content=body, headers=JSON)
    assert time.monotonic() - begun < 7 and reply.status_code in (200, 400), reply.text
    if depth >= 1000:
        check_error(reply, 400)
    text = json.dumps(
        {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": deep}}
    ).encode()
    assert running.http.post(TEXT, content=text, headers=JSON).status_code in (200, 400)
    probe(running)
    assert running.complete()["usage"]["completion_tokens"] == 4


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_very_many_distinct_schemas(trusting: Running) -> None:
    pytest.importorskip("llguidance")

    def ask(k: int) -> None:
        properties = {f"p{k}_{i}": {"type": "string", "maxLength": 20} for i in range(20)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        reply = trusting.post(
            TEXT, {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
        )
        assert reply.status_code == 200, reply.text

    for k in range(300):
        ask(k)
    (engine,) = trusting.engines()
    before = resident(engine)
    for k in range(300, 1300):
        ask(k)
    assert resident(engine) - before < 400 * 2**20


def test_parallel_tool_calls_null_is_the_default(running: Running) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    reply = running.post(
        CHAT, {"messages": HI, "max_tokens": 1, "tools": [tool], "parallel_tool_calls": None}
    )
    assert reply.status_code == 200


# ---- G: the host ---------------------------------------------------------------------------------


def test_a_blocked_event_loop_is_reported_and_livez_answers_on_its_own_port(tmp_path: Path) -> None:
    port = free_port()
    with (
        server(tmp_path, ready=False, health_port=port, log_level="INFO") as front,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        assert http.get("/livez").json()["state"] == "alive"
        assert http.get("/metrics").status_code == 404
        front.process.send_signal(signal.SIGUSR2)
        time.sleep(0.2)
        begun, slowest, late = time.monotonic(), 0.0, 0.0
        while time.monotonic() - begun < 1.5:
            asked = time.monotonic()
            reply = http.get("/livez")
            slowest = max(slowest, time.monotonic() - asked)
            assert reply.status_code == 200
            late = reply.json()["loop_late_s"]
            time.sleep(0.01)
        assert slowest < 0.3 and late > 1, (slowest, late)
        assert front.get("/livez").status_code == 200, "the other one waits for the loop"
        time.sleep(0.3)
        assert front.metrics()["octavo:event_loop_lag_seconds"] > 1
        log = front.log.read_text()
        assert "the event loop has been blocked" in log and "launch.py" in log, (
            "and where it stands"
        )
        asked = time.monotonic()
        for _ in range(100):  # who connects and says nothing keeps nobody out for long
            idle = socket.create_connection(("127.0.0.1", port))
            idle.close()
        assert http.get("/livez").status_code == 200 and time.monotonic() - asked < 3, (
            "a crowd does not hold up a probe"
        )


def test_a_loop_that_stands_still_for_a_minute_is_dead() -> None:
    watchdog = LoopWatchdog(lambda: 0)
    found = HealthServer(("127.0.0.1", 0), watchdog)
    found.begin()
    try:
        url = f"http://127.0.0.1:{found.server_address[1]}/livez"
        assert httpx.get(url).status_code == 200
        watchdog.last_tick -= STUCK + 1
        assert httpx.get(url).status_code == 503 and httpx.get(url).json()["state"] == "stuck"
    finally:
        found.shutdown()
        found.server_close()


def test_the_books_are_checked_while_it_serves_and_every_block_is_counted(
    trusting: Running,
) -> None:
    checks = trusting.metrics()["octavo:invariant_checks_total"]
    for k in range(8):
        trusting.complete(prompt=[k] * 200, max_tokens=50)
        found = trusting.metrics()
        parts = [found[f"octavo:kv_blocks_{state}"] for state in ("used", "cached", "free")]
        assert sum(parts) == found["octavo:kv_blocks_total"] == 512, parts
    time.sleep(0.5)
    found = trusting.metrics()
    assert (
        found["octavo:invariant_checks_total"] > checks
        and found["octavo:invariant_failures_total"] == 0
    )


# ---- E: streams ----------------------------------------------------------------------------------


def test_a_deadline_in_a_stream_is_a_typed_error_before_the_end(running: Running) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 1000, "ignore_eos": True, "timeout": 0.05}
    reply = running.post(TEXT, body)
    if reply.status_code == 200:  # it had begun
        assert events(reply.text)[-1]["error"]["code"] == "deadline_exceeded"
    else:
        check_error(reply, 504, code="deadline_exceeded")


def test_two_clients_cancel_one_request_and_two_share_a_label(running: Running) -> None:
    """Cancelling is idempotent, ends that stream and no other, and a label that clients share never
    crosses streams."""
    body = {
        "max_tokens": 400,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "request_id": "same",
    }
    prompts = [[k] * 20 for k in (1, 2, 3)]

    def text(found: list[dict[str, Any]]) -> str:
        return "".join(e["choices"][0]["text"] for e in found if e.get("choices"))

    alone = [text(events(running.post(TEXT, {**body, "prompt": p}).text)) for p in prompts]
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=running.url))
        open_ = [
            stack.enter_context(http.stream("POST", TEXT, json={**body, "prompt": p}))
            for p in prompts
        ]
        ids = [reply.headers["x-octavo-request-id"] for reply in open_]
        assert len(set(ids)) == 3
        with ThreadPoolExecutor(8) as pool:
            replies = list(
                pool.map(
                    lambda _: httpx.post(f"{running.url}/v1/requests/{ids[1]}/cancel"), range(8)
                )
            )
        assert {r.status_code for r in replies} == {200} and sum(
            r.json()["cancelled"] for r in replies
        ) >= 1
        check_error(running.post("/v1/requests/same/cancel", None), 404)
        found = [events(reply.read().decode()) for reply in open_]
    assert text(found[0]) == alone[0] and text(found[2]) == alone[2]
    assert alone[1].startswith(text(found[1])) and found[1][-1]["error"]["code"] == "cancelled"
    settled(running)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_disconnect_while_blocks_are_loaded(tmp_path: Path, tier: str) -> None:
    """From host memory or from disk, each block slowly: blocks and slots come back, and the next
    one gets the same tokens."""
    engine = {"num_gpu_blocks_override": 40, "swap_space": 1 / 1024, "max_model_len": 512}
    if tier == "disk":
        # host memory for half a prompt only
        engine |= {"kv_disk_path": str(tmp_path / "kv"), "swap_space": 24 * 4096 / 2**30}
    with server(tmp_path, engine=engine, program="tests.serve.slow_tiers_engine") as slow:
        bodies = [
            {"prompt": [k] * 400, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            for k in range(1, 4)
        ]
        want = [slow.complete(**b)["choices"][0]["text"] for b in bodies]
        before = slow.metrics()
        for k in range(9):
            asyncio.run(
                leave(slow.port, {**bodies[k % 3], "stream": k % 2 == 0}, 0.01 * (k + 1), None)
            )
        found = settled(slow, 5)
        name = "kv_tier_loads_total" if tier == "host" else "kv_tier_fetches_total"
        assert found[f"octavo:{name}"] > before[f"octavo:{name}"], (
            "they left while something was brought"
        )
        assert [slow.complete(**b)["choices"][0]["text"] for b in bodies] == want
        for _ in range(100):
            found = settled(slow, 5)
            if found["octavo:kv_host_blocks_filling"] == 0:
                break
            time.sleep(0.05)
        assert (
            found["octavo:kv_host_blocks_filling"] == 0
            and found["octavo:invariant_failures_total"] == 0
        )
        parts = [found[f"octavo:kv_blocks_{state}"] for state in ("used", "cached", "free")]
        assert parts[0] == 0 and sum(parts) == 40
