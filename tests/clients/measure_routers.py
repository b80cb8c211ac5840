"""Measures the routers of vLLM and SGLang before two servers with a tiny model.

    python -m tests.clients.measure_routers --json results/routing-two-workers.json

It measures the latency that a router adds (requests to a server and to both routers alternate), the
prefix cache hit rate and the balance of a multi-turn workload under two policies, and what clients
see when a server is killed. tools/tables.py writes the tables of docs/routing.md from the result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai

from octavo.bench.provenance import provenance
from tests.clients.test_routers import ROUTERS, router
from tests.serve.running import NAME, Running, server

LATENCY_REQUESTS = 1500
CONVERSATIONS = 16
TURNS = 6
ROUNDS = 3  # of the multi-turn workload; routers and policies alternate
KILL_SECONDS = 20.0
CLIENTS = 4
# A worker holds about two thirds of the conversations.
ENGINE = {"num_gpu_blocks_override": 400}


def complete(client: httpx.Client, url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    reply = client.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def measure_latency(direct: str, routers: dict[str, str]) -> list[dict[str, Any]]:
    """Time requests for one token, in turn directly and through each router."""
    urls = {"none": direct, **routers}
    times: dict[str, list[float]] = {name: [] for name in urls}
    with httpx.Client(timeout=60) as client:
        for number in range(LATENCY_REQUESTS + 10):
            for name, url in urls.items():
                begun = time.perf_counter()
                complete(client, url, prompt=f"{number}")
                if number >= 10:
                    times[name].append((time.perf_counter() - begun) * 1000)
    base = statistics.median(times["none"])
    return [
        {
            "router": name,
            "median_ms": statistics.median(found),
            "p90_ms": sorted(found)[int(0.9 * len(found))],
            "added_ms": statistics.median(found) - base,
            "ratio": statistics.median(found) / base,
        }
        for name, found in times.items()
    ]


async def converse(client: openai.AsyncOpenAI, number: int, dice: random.Random) -> list[Any]:
    """Hold a conversation. Returns (prompt tokens, cached tokens) of each turn."""
    text = f"conversation {number} of {dice.random()}: "
    counts = []
    for _ in range(TURNS):
        text += "".join(dice.choice("abcdefgh ") for _ in range(80))
        reply = await client.completions.create(
            model=NAME, prompt=text, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
        )
        text += reply.choices[0].text
        usage: Any = reply.usage
        counts.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        await asyncio.sleep(dice.random() * 0.2)
    return counts


async def hold_conversations(url: str, seed: int) -> list[Any]:
    dice = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", timeout=120) as client:
        tasks = [converse(client, n, random.Random(dice.random())) for n in range(CONVERSATIONS)]
        return [count for counts in await asyncio.gather(*tasks) for count in counts]


def count_hits(
    name: str, policy: str, workers: list[Running], log: Path, seed: int
) -> tuple[int, int, list[float]]:
    """Run the multi-turn workload with empty caches.

    Returns the prompt tokens, those found in the cache, and the requests of each worker."""
    for worker in workers:
        worker.http.post("/flush_cache")
    before = [worker.metrics()["inference_requests_total"] for worker in workers]
    with router(name, [worker.url for worker in workers], log, "--policy", policy) as running:
        counts = asyncio.run(hold_conversations(running.url, seed))
    after = [worker.metrics()["inference_requests_total"] for worker in workers]
    shares = [end - begin for begin, end in zip(before, after, strict=True)]
    return sum(total for total, _ in counts), sum(cached for _, cached in counts), shares


def measure_policies(workers: list[Running], log: Path) -> list[dict[str, Any]]:
    cases = [(name, policy) for policy in ("round_robin", "cache_aware") for name in ROUTERS]
    found: dict[tuple[str, str], list[tuple[int, int, list[float]]]] = {case: [] for case in cases}
    for number in range(ROUNDS):
        for name, policy in cases:
            found[name, policy].append(count_hits(name, policy, workers, log, seed=number))
    return [
        {
            "router": name,
            "policy": policy,
            "hit_rate": sum(cached for _, cached, _ in rounds) / sum(n for n, _, _ in rounds),
            "hit_rates": [cached / total for total, cached, _ in rounds],
            "busiest_share": max(max(shares) / sum(shares) for _, _, shares in rounds),
        }
        for (name, policy), rounds in found.items()
    ]


async def load_with_a_kill(url: str, victim: Running) -> dict[str, Any]:
    """Send requests all the time, and kill a worker. Count what fails afterwards."""
    done: list[tuple[float, float, bool]] = []  # (end, seconds, success)
    begun = time.monotonic()

    async def send_requests(client: openai.AsyncOpenAI, number: int) -> None:
        count = 0
        while time.monotonic() - begun < KILL_SECONDS:
            count += 1
            sent = time.monotonic()
            success = True
            try:
                await client.completions.create(
                    model=NAME, prompt=f"{number} {count}", max_tokens=8, temperature=0
                )
            except openai.OpenAIError:
                success = False
            now = time.monotonic()
            done.append((now, now - sent, success))

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        tasks = [asyncio.create_task(send_requests(client, n)) for n in range(CLIENTS)]
        await asyncio.sleep(KILL_SECONDS / 4)
        killed = time.monotonic()
        victim.process.kill()
        await asyncio.gather(*tasks)
    later = [entry for entry in done if entry[0] >= killed]
    failures = [end for end, _, success in later if not success]
    return {
        "requests": len(later),
        "failed": len(failures),
        "last_failure_s": max(failures) - killed if failures else 0.0,
        "slowest_ms": max(seconds for _, seconds, _ in later) * 1000,
        "median_before_ms": statistics.median(s for end, s, _ in done if end < killed) * 1000,
        "median_after_ms": statistics.median(s for _, s, _ in later) * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"provenance": provenance()}
    load = [os.getloadavg()[0]]
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        workers = [stack.enter_context(server(folder, engine=ENGINE)) for folder in folders]
        urls = [worker.url for worker in workers]
        log = folders[0] / "router.log"
        with contextlib.ExitStack() as routers:
            addresses = {n: routers.enter_context(router(n, urls, log)).url for n in ROUTERS}
            found["latency"] = measure_latency(urls[0], addresses)
        found["policies"] = measure_policies(workers, log)
    found["kill"] = []
    for name in ROUTERS:
        with contextlib.ExitStack() as stack:
            folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
            workers = [stack.enter_context(server(folder, engine=ENGINE)) for folder in folders]
            urls = [worker.url for worker in workers]
            running = stack.enter_context(router(name, urls, folders[0] / "router.log"))
            after = asyncio.run(load_with_a_kill(running.url, workers[0]))
            found["kill"].append({"router": name, **after})
    load.append(os.getloadavg()[0])
    found["load_average"] = load
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
