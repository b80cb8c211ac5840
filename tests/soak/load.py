"""Normal mixed load: clients that stream, sample, constrain, leave, and whose replies are compared
where they are determined."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2 as httpx

from tests.attacks.clients import connect, post, read_all
from tests.attacks.target import (
    ALICE,
    BOB,
    CHAT,
    COMPLETIONS,
    HELLO,
    NORMAL,
    SCHEMA,
    Target,
    bearer,
)

STUCK_SECONDS = 180.0
BUSY = {429, 503}  # more requests than fit: the client comes back
PREFIXES = ["the quick brown fox jumps over the lazy dog. " * 5, "once upon a time there was. " * 8]


class Load:
    """Clients in threads, until stopped. `wrong` holds what must not happen."""

    def __init__(self, target: Target, clients: int, seed: int):
        self.target = target
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"), i), daemon=True)
            for i in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        end = time.monotonic() + STUCK_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.wrong.append("a request never ended")

    def _run(self, generator: random.Random, number: int) -> None:
        kinds: list[Callable[[httpx.Client, random.Random], None]] = [
            self._probe, self._probe, self._probe, self._sample, self._long, self._structured, self._leave, self._tokenize,
        ]  # fmt: skip
        headers = {"authorization": f"Bearer {(ALICE, BOB)[number % 2]}"}
        while not self._over.is_set():
            kind = generator.choice(kinds)
            name = kind.__name__.strip("_")
            try:
                with httpx.Client(
                    base_url=self.target.running.url, timeout=STUCK_SECONDS, headers=headers
                ) as http:
                    kind(http, generator)
                self.counts[name] += 1
            except Exception as error:
                self.wrong.append(f"{name}: {error!r}"[:500])

    # ---- what clients do -------------------------------------------------------------------------

    def _ask(self, http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        """The reply; comes back later when the server is busy."""
        while True:
            reply = http.post(path, json=body)
            if reply.status_code not in BUSY or self._over.is_set():
                break
            self.counts["busy"] += 1
            time.sleep(int(reply.headers.get("retry-after-ms", 100)) / 1000)
        if reply.status_code in BUSY:
            return None
        assert reply.status_code == 200, (reply.status_code, reply.text[:300])
        return reply

    def _probe(self, http: httpx.Client, generator: random.Random) -> None:
        """A reply that is determined by the request: it must be the one of an idle server."""
        which = generator.randrange(len(NORMAL))
        path, body = NORMAL[which]
        priority = generator.choice([0, 0, 5, 10])
        reply = self._ask(http, path, {**body, "priority": priority})
        if reply is None:
            return
        choices = reply.json()["choices"]
        found = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in choices}
        if found != self.target.expected[which]:
            self.wrong.append(f"other tokens than on an idle server: {NORMAL[which]} got {found}")

    def _sample(self, http: httpx.Client, generator: random.Random) -> None:
        fields = generator.choice(
            [{"n": 3}, {"best_of": 3, "n": 2}, {"logprobs": 3}, {"use_beam_search": True, "n": 2}, {"echo": True}]
        )  # fmt: skip
        prompt = generator.choice(PREFIXES) + str(generator.random())
        temperature = 0 if "use_beam_search" in fields else 1
        body = {
            "prompt": prompt,
            "max_tokens": generator.randint(1, 60),
            "temperature": temperature,
        }
        self._ask(http, COMPLETIONS, {**body, **fields})

    def _long(self, http: httpx.Client, generator: random.Random) -> None:
        """Long texts, so that the pool is full and somebody is preempted."""
        prompt = generator.choice(PREFIXES) + str(generator.random())
        limits = {"max_tokens": generator.randint(50, 200), "ignore_eos": True}
        priority = generator.choice([0, 5, 10])
        self._ask(http, COMPLETIONS, {"prompt": prompt, "priority": priority, **limits})

    def _structured(self, http: httpx.Client, generator: random.Random) -> None:
        fields: dict[str, Any] = generator.choice(
            [
                {"guided_json": SCHEMA},
                {"guided_regex": "[a-f]{3,9}"},
                {"guided_choice": ["yes", "no"]},
                # few enough that the cache of compiled schemas is full after the warm-up
                {"guided_json": {"enum": [generator.randrange(64)]}},
            ]
        )
        reply = self._ask(http, CHAT, {"messages": HELLO, "max_tokens": 60, **fields})
        if reply is not None and "guided_choice" in fields:
            assert reply.json()["choices"][0]["message"]["content"] in ("yes", "no")

    def _leave(self, http: httpx.Client, generator: random.Random) -> None:
        """A client that goes away, before the reply or in the middle of a stream."""
        fields = {"prompt": generator.choice(PREFIXES), "max_tokens": 200, "ignore_eos": True}
        body = {**fields, "stream": generator.random() < 0.7}
        with connect(self.target.port) as connection:
            connection.sendall(post(COMPLETIONS, json.dumps(body).encode(), bearer(ALICE)))
            read_all(connection, generator.random() * 0.3)

    def _tokenize(self, http: httpx.Client, generator: random.Random) -> None:
        text = "a" * generator.choice([10, 5000])
        reply = self._ask(http, "/tokenize", {"prompt": text})
        if reply is not None:
            assert reply.json()["count"] == len(text)
