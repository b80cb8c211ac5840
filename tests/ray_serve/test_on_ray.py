"""Two replicas on a real Ray: the tests of one server pass, killed processes lose only their own
streams, scaling fails no request, and the prefix router doubles the hit rate of round robin."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: run `make test-ray`")

import httpx2 as httpx
import openai

from tests import tiny
from tests.serve.running import NAME, ROOT, Running, free_port

# The same tests as for one server. They use the fixtures `running` and `client` of this file.
from tests.serve.test_openai_client import (  # noqa: F401
    test_a_chat_that_echoes_its_last_message,
    test_a_stream_is_the_whole_reply_in_pieces,
    test_best_of_returns_the_likeliest,
    test_both_sides_of_a_prompt_can_be_cut,
    test_chat,
    test_chat_logprobs,
    test_completions_of_many_prompts,
    test_echoed_prompt_logprobs_as_lm_eval_asks_for_them,
    test_errors_have_types_and_codes,
    test_keys_without_a_value_are_null,
    test_many_streams_at_once_do_not_mix,
    test_models_are_listed_and_retrieved,
    test_n_choices_differ_and_share_the_prompt,
    test_seeds_and_biases_and_penalties_are_heard,
    test_stop_strings_end_the_text,
    test_the_fingerprint_is_that_of_the_settings,
    test_token_ids_of_a_chat,
    test_token_ids_of_completions,
    test_tokens_are_those_of_transformers,
    test_tokens_as_ids_and_tokens_by_name,
    test_usage_in_every_chunk,
)
from tests.serve.test_structured import (  # noqa: F401
    test_a_reply_parses_into_a_model,
    test_json_object_and_what_max_tokens_cuts,
    test_json_schema_whole_and_streamed,
    test_n_choices_are_guided_each,
    test_openai_raises_for_a_bad_schema_in_a_stream_too,
    test_the_ways_to_say_it,
    test_what_cannot_be_followed_is_a_400,
)
from tests.serve.test_tools import (  # noqa: F401
    test_a_forced_call_is_made_whatever_the_model_would_say,
    test_a_schema_that_cannot_be_followed_is_refused,
    test_an_answer_in_a_format_may_come_instead_of_a_call,
    test_an_unknown_tool_is_told_which_there_are,
    test_odd_calls_in_a_conversation_never_break_the_server,
    test_refused,
    test_tools_are_for_chats,
)
from tests.serve.test_tracing import Collector, collector  # noqa: F401

pytestmark = pytest.mark.slow
# The other work on this machine, before the tests begin, makes everything slower.
SLOWDOWN = max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
RECOVERY_SECONDS = 30 * SLOWDOWN
# The chats of `hit_rate` fit into the KV caches of two replicas together, and not into one.
NUM_BLOCKS = "420"
REPLICA_PROCESS = b"ray::ServeReplica:octavo:Replica"
REPLICA = re.compile(r'replica="(\w+)"')


@contextlib.contextmanager
def on_ray(folder: Path, *options: str) -> Iterator[Running]:
    """Runs `octavo serve --ray` with a cluster of its own."""
    port = free_port()
    log = folder / "ray.log"
    argv = [
        *(sys.executable, "-m", "octavo", "serve", tiny.model_dir(), "--served-model-name", NAME),
        *("--port", str(port), "--max-model-len", "1024", "--max-num-seqs", "64"),
        *("--num-blocks", NUM_BLOCKS, "--ray", "--replica-cpus", "0.5", *options),
    ]
    with open(log, "w") as out:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=out, text=True)
    running = Running(process, port, log, folder)
    try:
        running.wait("/readyz", seconds=400)
        yield running
        assert running.stop(seconds=100) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with on_ray(tmp_path_factory.mktemp("ray"), "--replicas", "2") as found:
        wait_for_replicas(found, 2)
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


# ---- processes -----------------------------------------------------------------------------------


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def pids_below(parent: int, text: bytes) -> list[int]:
    """The processes below this one whose command line has this text."""
    found = []
    for pid in descendants(parent):
        with contextlib.suppress(OSError):
            if text in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def replica_pids(running: Running) -> list[int]:
    return pids_below(running.process.pid, REPLICA_PROCESS)


def engine_pids(running: Running) -> list[int]:
    return pids_below(running.process.pid, b"octavo.serve.engine.engine_process")


def replicas(running: Running) -> set[str]:
    """The names of the replicas that the endpoint knows."""
    answer = running.get("/metrics")
    if answer.status_code != 200:
        return set()
    return set(REPLICA.findall(answer.text)) - {"endpoint"}


def wait_for_replicas(running: Running, count: int, seconds: float = 200) -> float:
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        with contextlib.suppress(httpx.HTTPError):
            if len(replicas(running)) == count:
                return time.monotonic() - begun
        time.sleep(0.2)
    raise AssertionError(f"there were never {count} replicas: {running.log.read_text()[-3000:]}")


# ---- load ----------------------------------------------------------------------------------------


class Load:
    """Clients that send short requests one after another until they are stopped."""

    def __init__(self, running: Running, clients: int, tokens: int = 24):
        self.url = running.url
        self.tokens = tokens
        self.failures: list[str] = []
        self.replies = 0
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        body = {"prompt": "load", "max_tokens": self.tokens, "ignore_eos": True}
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self._stopped.is_set():
                try:
                    answer = client.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                if answer.status_code == 200:
                    self.replies += 1
                else:
                    self.failures.append(answer.text)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


STREAMED = 800


def stream(running: Running, begun: threading.Semaphore) -> tuple[list[int], str | None]:
    """Stream a long reply. Returns its tokens, and the code of its error."""
    body = {"prompt": "a", "max_tokens": STREAMED, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True, "temperature": 0}
    tokens: list[int] = []
    with (
        httpx.Client(base_url=running.url, timeout=200) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return tokens, event["error"]["code"]
            for choice in event["choices"]:
                tokens += choice["token_ids"] or ()
            begun.release()
    return tokens, None


def kill_under_load(running: Running, victims: Callable[[Running], list[int]], code: str) -> None:
    """Kill one of two processes, and check who notices."""
    wait_for_replicas(running, 2)
    names = replicas(running)
    begun = [threading.Semaphore(0) for _ in range(8)]
    wanted, error = stream(running, threading.Semaphore(0))
    assert (len(wanted), error) == (STREAMED, None)
    load = Load(running, clients=2)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, running, each) for each in begun]
        for each in begun:
            assert each.acquire(timeout=100)
        killed = victims(running)
        assert len(killed) == 2
        os.kill(killed[0], signal.SIGKILL)
        killed_at = time.monotonic()
        results = [streamed.result() for streamed in streams]
    recovered = wait_for_recovery(running, names, victims, killed) - killed_at
    load.stop()
    lost = [result for result in results if result[1] is not None]
    assert {error for _, error in lost} == {code}
    complete = [tokens for tokens, error in results if error is None]
    assert complete and all(tokens == wanted for tokens in complete)
    assert load.replies and load.failures == []
    print(f"{len(lost)} of 8 streams lost, {load.replies} replies, recovered in {recovered:.1f} s")
    assert recovered < RECOVERY_SECONDS


def wait_for_recovery(
    running: Running, names: set[str], victims: Callable[[Running], list[int]], killed: list[int]
) -> float:
    """Returns the time at which two replicas reply again."""
    while len(set(victims(running)) - {killed[0]}) < 2 or len(replicas(running)) < 2:
        time.sleep(0.2)
    # Every replica must reply, so enough requests at once must go to both of them.
    before = counts(running)
    while True:
        with ThreadPoolExecutor(4) as pool:
            for each in [pool.submit(running.complete) for _ in range(4)]:
                each.result()
        after = counts(running)
        if sum(after[name] > before.get(name, 0) for name in after) >= 2:
            return time.monotonic()


def counts(running: Running) -> dict[str, float]:
    """The finished requests of each replica."""
    found: dict[str, float] = {}
    for line in running.get("/metrics").text.splitlines():
        name = REPLICA.search(line)
        if line.startswith("octavo:request_success_total") and name and name[1] != "endpoint":
            found[name[1]] = found.get(name[1], 0) + float(line.rsplit(" ", 1)[1])
    return found


# ---- tests ---------------------------------------------------------------------------------------


def test_requests_go_to_both_replicas(running: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: running.complete(max_tokens=32), range(32)))
    found = counts(running)
    assert len(found) == 2 and min(found.values()) >= 8


def test_a_client_that_leaves_frees_its_memory(running: Running) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    deadline = time.monotonic() + 20
    while any(
        float(line.rsplit(" ", 1)[1])
        for line in running.get("/metrics").text.splitlines()
        if line.startswith("octavo:num_requests_running")
    ):
        assert time.monotonic() < deadline


def test_a_killed_engine_loses_only_its_own_streams(running: Running) -> None:
    kill_under_load(running, engine_pids, "engine_restarting")


def test_a_killed_replica_loses_only_its_own_streams(running: Running) -> None:
    kill_under_load(running, replica_pids, "replica_lost")


def hit_rate(running: Running) -> float:
    """The share of prompt tokens that were cached, over chats of several turns."""
    order = random.Random(5)
    chats: list[list[dict[str, Any]]] = []
    for _ in range(20):
        text = "".join(order.choices("abcdefghijklmnopqrstuvwxyz ", k=410))
        chats.append([{"role": "user", "content": text}])
    prompt_tokens = 0
    cached_tokens = 0
    for _ in range(6):
        order.shuffle(chats)
        for messages in chats:
            answer = running.post(
                "/v1/chat/completions",
                {"messages": messages, "max_tokens": 16, "ignore_eos": True, "temperature": 0},
            ).json()
            prompt_tokens += answer["usage"]["prompt_tokens"]
            cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            text = "".join(order.choices("abcdefghijklmnopqrstuvwxyz ", k=40))
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": text})
    return cached_tokens / prompt_tokens


def test_the_prefix_router_doubles_the_hit_rate_of_round_robin(
    running: Running, tmp_path: Path
) -> None:
    with_prefixes = hit_rate(running)
    with on_ray(tmp_path, "--replicas", "2", "--routing", "round-robin") as other:
        wait_for_replicas(other, 2)
        round_robin = hit_rate(other)
    print(f"hit rate: {with_prefixes:.3f} with prefixes, {round_robin:.3f} round robin")
    assert with_prefixes > 2 * round_robin


def test_scaling_up_and_down_under_load_fails_no_request(tmp_path: Path) -> None:
    """When a replica is removed, long streams are open on both replicas."""
    options = ("--replicas", "1", "--max-replicas", "2", "--target-requests", "2")
    delays = ("--upscale-delay", "1", "--downscale-delay", "3")
    with on_ray(tmp_path, *options, *delays) as found, ThreadPoolExecutor(2) as pool:
        heavy = Load(found, clients=8)
        up = wait_for_replicas(found, 2)
        time.sleep(3)
        stopped = threading.Event()
        light = [pool.submit(stream_until, found, stopped) for _ in range(2)]
        heavy.stop()
        down = wait_for_replicas(found, 1)
        stopped.set()
        streams = [result for each in light for result in each.result()]
        print(f"two replicas after {up:.1f} s, one after {down:.1f} s, {len(streams)} streams")
        assert heavy.replies and heavy.failures == []
        assert {(len(tokens), error) for tokens, error in streams} == {(STREAMED, None)}


def stream_until(running: Running, stopped: threading.Event) -> list[tuple[list[int], str | None]]:
    """Stream long replies one after another."""
    results = []
    while not stopped.is_set():
        results.append(stream(running, threading.Semaphore(0)))
    return results


def test_a_replica_is_added_when_the_kv_cache_fills(tmp_path: Path) -> None:
    """The bound on requests is never reached, so only the KV use can add the replica."""
    options = ("--replicas", "1", "--max-replicas", "2", "--upscale-delay", "1")
    targets = ("--target-requests", "1000", "--target-kv-use", "0.2")
    with on_ray(tmp_path, *options, *targets) as found:
        load = Load(found, clients=8, tokens=STREAMED)
        wait_for_replicas(found, 2)
        load.stop()
        assert load.replies and load.failures == []


def test_a_response_is_continued_and_read_on_the_replica_that_stores_it(
    running: Running, client: openai.OpenAI
) -> None:
    wait_for_replicas(running, 2)
    response = client.responses.create(model=NAME, input="hello", max_output_tokens=8)
    for _ in range(6):
        earlier = response.id
        response = client.responses.create(
            model=NAME, input="and then?", previous_response_id=earlier, max_output_tokens=8
        )
        assert response.previous_response_id == earlier
        assert client.responses.retrieve(earlier).id == earlier


@pytest.mark.parametrize("collector", ["grpc"], indirect=True)
def test_spans_of_the_endpoint_and_of_a_replica_form_one_trace(
    collector: tuple[Collector, str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    spans, endpoint, _ = collector
    options = ("--replicas", "1", "--otlp-traces-endpoint", endpoint)
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    parent = f"00-{trace_id}-00f067aa0ba902b7-01"
    with on_ray(tmp_path, *options) as found:
        body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
        answer = found.post("/v1/completions", body, headers={"traceparent": parent})
        assert answer.headers["traceresponse"].startswith(f"00-{trace_id}-")
        tree = spans.tree(trace_id, count=6)
    by_id = {span.span_id: span.name for span in tree}
    parents = {span.name: by_id.get(span.parent_span_id, "client") for span in tree}
    assert parents == {
        "POST /v1/completions": "client",
        "replica": "POST /v1/completions",
        "llm_request": "replica",
        "queued": "llm_request",
        "prefill": "llm_request",
        "decode": "llm_request",
    }


def test_an_open_stream_ends_before_the_server(tmp_path: Path) -> None:
    with on_ray(tmp_path, "--replicas", "1") as found, ThreadPoolExecutor(1) as pool:
        while "ready:" not in found.log.read_text():
            time.sleep(0.1)
        begun = threading.Semaphore(0)
        streamed = pool.submit(stream, found, begun)
        assert begun.acquire(timeout=100)
        found.process.send_signal(signal.SIGTERM)
        tokens, error = streamed.result()
        assert (len(tokens), error) == (STREAMED, None)
        found.process.wait(100)  # A second signal would end it at once.


def test_the_limits_of_a_key_hold_for_all_replicas(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "a-0123456789abcdef"\nrequests_per_minute = 6\n')
    with on_ray(tmp_path, "--replicas", "2", "--api-keys", str(keys)) as found:
        assert found.post("/v1/completions", {"prompt": "a"}).status_code == 401
        headers = {"authorization": "Bearer a-0123456789abcdef"}
        body = {"prompt": "a", "max_tokens": 2}
        statuses = [
            found.post("/v1/completions", body, headers=headers).status_code for _ in range(10)
        ]
        assert statuses[:6] == [200] * 6 and 429 in statuses[6:]


CONFIG = """
proxy_location: Disabled
applications:
  - name: octavo
    route_prefix: null
    import_path: octavo.serve.ray_serve.deploy:build_app
    args: {model: MODEL, served_model_name: [tiny], port: PORT, replicas: 2, max_model_len: 1024}
"""


def test_a_config_file_of_ray_serve_and_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has one core, so there is one replica on each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    # A shell that runs the tests in the background ignores SIGINT, and so would `serve run`.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    port = free_port()
    config = tmp_path / "octavo.yaml"
    config.write_text(CONFIG.replace("MODEL", tiny.model_dir()).replace("PORT", str(port)))
    log = tmp_path / "ray.log"
    other_raylets = set(pids_below(os.getpid(), b"raylet/raylet"))
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    argv = [sys.executable, "-m", "ray.serve.scripts", "run", str(config)]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*argv, "--address", nodes.address], cwd=ROOT, stdout=out, stderr=out, text=True
        )
    running = Running(process, port, log, tmp_path)
    try:
        running.wait("/readyz", seconds=400)
        wait_for_replicas(running, 2)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: running.complete(max_tokens=32), range(32)))
        assert min(counts(running).values()) > 0
        # Each node has a raylet, which is the parent of its processes.
        raylets = set(pids_below(os.getpid(), b"raylet/raylet")) - other_raylets
        assert [len(pids_below(raylet, REPLICA_PROCESS)) for raylet in raylets] == [1, 1]
    finally:
        running.stop(signal.SIGINT, seconds=100)
        nodes.shutdown()
