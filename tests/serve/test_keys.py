"""Who may use the server, and how much."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.keys import Bucket, Keys, KeysError
from octavo.serve.limits import Limits
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import ServeError, listen
from tests.serve.running import Running, check_error, http_request, raw, server

ALICE, BOB, ROOT = "alice-0123456789abcdef", "bob-0123456789abcdef", "root-0123456789abcdef"
FILE = f"""
[[keys]]
name = "alice"
key = "{ALICE}"
[[keys]]
name = "bob"
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
requests_per_minute = 4
max_concurrency = 1
[[keys]]
name = "root"
key = "{ROOT}"
admin = true
"""
BODY = {"prompt": [9] * 64, "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.toml").write_text(FILE)
    with server(folder, keys_file=str(folder / "keys.toml")) as found:
        yield found


def test_a_key_in_the_header_of_anthropics_clients(locked: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    good = locked.post("/v1/messages", body, headers={"x-api-key": ALICE})
    assert good.status_code == 200
    wrong = locked.post("/v1/messages", body, headers={"x-api-key": f"{ALICE}x"})
    assert wrong.status_code == 401
    assert wrong.json()["error"]["type"] == "authentication_error"
    ollama = locked.post("/api/chat", body)
    assert ollama.status_code == 401 and isinstance(ollama.json()["error"], str)


def test_a_stored_response_belongs_to_its_key(locked: Running) -> None:
    body = {"input": "hi", "max_output_tokens": 1}
    id = locked.post("/v1/responses", body, headers=bearer(ALICE)).json()["id"]
    assert locked.get(f"/v1/responses/{id}", headers=bearer(ALICE)).status_code == 200
    reply = locked.get(f"/v1/responses/{id}", headers=bearer(ROOT))
    check_error(reply, 404, None, "response_not_found")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(locked: Running, key: str, **fields: object) -> httpx.Response:
    return locked.post("/v1/completions", {**BODY, **fields}, headers=bearer(key))


def test_a_key_at_its_limit_is_refused_before_the_body_is_sent(tmp_path: Path) -> None:
    keys = f'[[keys]]\nname = "bob"\nkey = "{BOB}"\nrequests_per_minute = 1\n'
    (tmp_path / "keys.toml").write_text(keys)
    with server(tmp_path, keys_file=str(tmp_path / "keys.toml")) as locked:
        assert complete(locked, BOB).status_code == 200
        head = http_request("/v1/completions", b" ", f"Authorization: Bearer {BOB}")
        head = head[:-1].replace(b"Length: 1\r", b"Length: 8000000\r")
        reply = raw(locked.port, head, seconds=3)
        assert reply.startswith(b"HTTP/1.1 429 ") and b"rate_limit_exceeded" in reply
        reply = raw(locked.port, head + b" " * 7_999_999, seconds=3)
        assert reply.startswith(b"HTTP/1.1 429 "), "a client that sends it all can read why"
        # A small body is received, so that the connection can be used again.
        assert complete(locked, BOB).headers.get("connection") != "close"


ROUTES = [
    ("GET", path)
    for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/tokenizer_info", "/version", "/v1/limits", "/openapi.json",
                 "/docs", "/v1/dumps", "/web", "/web/", "/web/page.py", "/web/../v1/models",
                 "/web/page.js/", "//livez", "/livez/", "/LIVEZ", "/readyz%2f..%2fmetrics", "/livez/../metrics",
                 "/nothing", "//v1/models", "/v1//models", "/v1/models/", "/v1/../v1/models", "/./v1/models", "/V1/MODELS",
                 "/v1/models%2f", "/%76%31/models", "/v1%2fmodels", "/livez%2f..%2fv1%2fmodels", "/livez/%2e%2e/v1/models",
                 "/health/../v1/dumps", "/livez;/v1/models", "/livez%00/v1/models", "/livez?/../v1/models#",
                 "/livez%23/v1/models", "/livez.json",
                 "/livez/v1/models", "/v1/models?x=/livez", "/metrics?livez", "/metrics;livez", "/metrics%20",
                 "http://localhost/v1/models", "http://localhost//livez/../v1/models", "/ws/generate", "/ws/watch")
] + [
    ("POST", path)
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/batch_generate", "/tokenize", "/detokenize",
                 "/v1/requests/req_1/cancel", "/v1/chat/completions/render", "/v1/responses", "/v1/responses/resp_1/cancel")
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_key_every_route_is_closed(locked: Running, method: str, path: str) -> None:
    reply = raw(locked.port, http_request(path, b"{}", "Connection: close", method=method))
    # what stands after the ? is no part of the path: that is the probe, and says no more
    if reply.startswith(b"HTTP/1.1 200"):
        assert path.partition("?")[0] == "/livez" and b'"data"' not in reply
        return
    assert reply.startswith(b"HTTP/1.1 401"), reply[:200]
    assert b"www-authenticate: Bearer" in reply and b"x-request-id: req_" in reply
    assert b"tiny" not in reply


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Original-URL: /livez"],
        ["X-Rewrite-URL: /livez"],
        ["X-HTTP-Method-Override: GET"],
        ["X-Forwarded-For: 127.0.0.1", "X-Forwarded-Host: localhost", "X-Forwarded-Prefix: /livez"],
        ["Authorization: Bearer"],
        [f"Authorization: bearer\t{ALICE}"],
        [f"Proxy-Authorization: Bearer {ALICE}"],
        ["X-Api-Key: wrong-0123456789"],
        [f"Cookie: key={ALICE}"],
    ],
)
def test_other_headers_open_nothing(locked: Running, headers: list[str]) -> None:
    reply = raw(
        locked.port, http_request("/v1/models", b"", *headers, "Connection: close", method="GET")
    )
    assert reply.startswith(b"HTTP/1.1 401"), reply[:200]


def test_two_keys_in_one_request_open_nothing_that_one_does_not(locked: Running) -> None:
    for pair in (
        (f"Bearer {ALICE}", f"Bearer {ROOT}"),
        ("Bearer wrong-0123456789", f"Bearer {ROOT}"),
    ):
        headers = [f"Authorization: {value}" for value in pair]
        reply = raw(
            locked.port, http_request("/v1/dumps", b"", *headers, "Connection: close", method="GET")
        )
        assert reply.startswith((b"HTTP/1.1 401", b"HTTP/1.1 403")), reply[:200]


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/health"])
def test_probes_are_open(locked: Running, path: str) -> None:
    assert locked.get(path).status_code == 200


WRONG = {
    "none": None,
    "wrong": "Bearer wrong-0123456789",
    "Basic": "Basic YWxpY2U6cHc=",
    "Basic with the key": f"Basic {ALICE}",
    "bare": ALICE,
    "longer": f"Bearer {ALICE}x",
    "shorter": f"Bearer {ALICE[:-1]}",
    "upper case": f"Bearer {ALICE.upper()}",
    "the digest": f"Bearer {hashlib.sha256(BOB.encode()).hexdigest()}",
}


@pytest.mark.parametrize("header", WRONG.values(), ids=WRONG.keys())
def test_wrong_keys(locked: Running, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    reply = locked.post("/v1/completions", BODY, headers=headers)
    if reply.status_code == 429:
        pytest.fail("tests used up the failures that an address has")
    error = check_error(reply, 401, None, "invalid_api_key")
    assert error["type"] == "authentication_error" and reply.headers["www-authenticate"] == "Bearer"


def test_a_key_of_other_characters(locked: Running) -> None:
    for key in (b"k\xc3\xa9y\xff", b"", b" ", ALICE.encode() + b"\xc2\xa0"):
        header = b"\r\nAuthorization: Bearer " + key + b"\r\n\r\n"
        data = http_request("/v1/completions", b"{}", "Connection: close").replace(
            b"\r\n\r\n", header, 1
        )
        assert raw(locked.port, data).startswith(b"HTTP/1.1 401")


def test_right_keys(locked: Running) -> None:
    assert complete(locked, ALICE).status_code == 200
    assert locked.get("/metrics", headers=bearer(ALICE)).status_code == 200


def test_keys_share_no_cache(locked: Running) -> None:
    def cached(key: str, **fields: object) -> int:
        reply = complete(locked, key, prompt=[3] * 64, **fields)
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(ALICE), cached(ALICE), cached(ROOT), cached(ROOT)] == [0, 48, 0, 48]
    assert cached(ALICE, cache_salt="x") == 0


def test_a_flood_of_one_key_leaves_the_others_their_share_of_the_cache(locked: Running) -> None:
    def cached(prompt: list[int]) -> int:
        return int(
            complete(locked, ALICE, prompt=prompt).json()["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
        )

    kept = [[word] * 321 for word in (40, 41, 42)]
    assert [cached(prompt) for prompt in kept] == [0, 0, 0]
    for k in range(20):  # 62 blocks each, of a pool of 512
        assert complete(locked, ROOT, prompt=[60 + k] * 1000).status_code == 200
    assert [cached(prompt) for prompt in kept] == [320, 320, 320]


def test_an_administrators_route(locked: Running) -> None:
    check_error(locked.get("/v1/dumps", headers=bearer(ALICE)), 403, code="admin_only")
    assert locked.get("/v1/dumps", headers=bearer(ROOT)).json() == {"dumps": []}


def test_a_key_over_its_limits(locked: Running) -> None:
    with httpx.Client(base_url=locked.url, headers=bearer(BOB)) as bob:
        with bob.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True},
        ) as first:
            assert first.status_code == 200
            reply = bob.post("/v1/completions", json=BODY)
            check_error(reply, 429, code="rate_limit_exceeded")
            assert (
                int(reply.headers["retry-after"]) >= 1 and int(reply.headers["retry-after-ms"]) > 0
            )
        time.sleep(0.1)
        codes = [bob.post("/v1/completions", json=BODY).status_code for _ in range(5)]
    assert codes[0] == 200 and codes[-1] == 429, (
        "one at a time again; then the minute's four are used up"
    )
    assert complete(locked, ALICE).status_code == 200, "others are not concerned"


def test_cancelling_is_for_the_owner(locked: Running) -> None:
    with httpx.Client(base_url=locked.url) as http:
        body = {"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body, headers=bearer(ALICE)) as stream:
            id = stream.headers["x-octavo-request-id"]
            check_error(locked.post(f"/v1/requests/{id}/cancel", None, headers=bearer(ROOT)), 404)
            assert (
                locked.post(f"/v1/requests/{id}/cancel", None, headers=bearer(ALICE)).json()[
                    "cancelled"
                ]
                is True
            )
            text = stream.read().decode()
    assert json.loads(text.split("\n\n")[-3].removeprefix("data: "))["error"]["code"] == "cancelled"


def test_guessing_is_slowed_down() -> None:
    keys = Keys.read(None, Limits())
    assert keys.check(None, "1.2.3.4") is None, "no keys: everybody may"
    keys = Keys(_keys(FILE), Limits(failed_logins=3))
    assert guesses(keys, "1.2.3.4") == 3
    with pytest.raises(ApiError) as caught:
        keys.check("Bearer no", "1.2.3.4")
    assert caught.value.status == 429 and caught.value.retry_after


def test_wrong_keys_never_lock_out_a_valid_one() -> None:
    """Many users may share an address: behind a proxy, or a router that translates addresses."""
    keys = Keys(_keys(FILE), Limits(failed_logins=3))
    for _ in range(10):
        assert guesses(keys, "1.2.3.4") <= 3
        found = keys.check(f"Bearer {ALICE}", "1.2.3.4")
        assert found is not None and found.name == "alice"


@pytest.mark.parametrize("header", ["Bearer  {}", "Bearer {} ", " Bearer {}", "bearer   {}\t"])
def test_whitespace_around_a_key_makes_no_difference(header: str) -> None:
    found = Keys(_keys(FILE), Limits()).check(header.format(ALICE), "1.2.3.4")
    assert found is not None and found.name == "alice"


def test_a_proxy_on_this_machine_tells_the_clients_address(locked: Running) -> None:
    def wrong(client: str) -> int:
        headers = {**bearer("wrong-0123456789"), "x-forwarded-for": client}
        return locked.get("/v1/models", headers=headers).status_code

    codes = [wrong("203.0.113.1") for _ in range(25)]
    assert codes[:20] == [401] * 20 and codes[-1] == 429
    assert wrong("203.0.113.2") == 401
    assert locked.get("/v1/models", headers=bearer(ALICE)).status_code == 200


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In constant time, digest by digest, and none is left out once one has matched: time tells
    nothing of the keys."""
    keys, compared = Keys(_keys(FILE), Limits()), list[bytes]()

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        assert len(a) == len(b) == 32, "digests: of what length a key is cannot be seen"
        return a == b

    monkeypatch.setattr("octavo.serve.front.keys.hmac.compare_digest", compare)
    for header, name in (
        (f"Bearer {ALICE}", "alice"),
        (f"Bearer {ROOT}", "root"),
        ("Bearer no", None),
        ("Bearer ", None),
    ):
        compared.clear()
        if name is None:
            with pytest.raises(ApiError):
                keys.check(header, "1.2.3.4")
        else:
            assert keys.check(header, "1.2.3.4").name == name  # type: ignore[union-attr]
        assert compared == [key.digest for key in keys.keys], header


def guesses(keys: Keys, address: str) -> int:
    """How many wrong keys an address may try."""
    for k in range(100):
        try:
            keys.check("Bearer no", address)
        except ApiError as error:
            if error.status == 429:
                return k
    return 100


def test_a_network_of_addresses_has_one_allowance() -> None:
    keys = Keys(_keys(FILE), Limits(failed_logins=3))
    assert guesses(keys, "2001:db8::1") == 3 and guesses(keys, "2001:db8::ffff:2") == 0, (
        "one IPv6 network"
    )
    assert guesses(keys, "2001:db8:0:1::1") == 3, "another"
    assert (
        guesses(keys, "10.0.0.1") == 3
        and guesses(keys, "::ffff:10.0.0.1") == 0
        and guesses(keys, "10.0.0.2") == 3
    )


def test_a_flood_of_addresses_does_not_clear_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.front.keys.MAX_ADDRESSES", 10)
    keys = Keys(_keys(FILE), Limits(failed_logins=3))
    for k in range(9):
        guesses(keys, f"10.0.0.{k}")
    assert guesses(keys, "10.0.1.1") == 3
    for k in range(9):
        guesses(keys, f"10.0.2.{k}")
    assert guesses(keys, "10.0.1.1") == 0 and len(keys._failures) == 10


def _keys(text: str) -> list:  # type: ignore[type-arg]
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return Keys.read(file.name, Limits()).keys


BAD_FILES = {
    "no keys": ("", "no .*keys"),
    "no TOML": ("keys = [", "cannot use"),
    "an unknown field": ('[[keys]]\nname = "a"\nkey = "0123456789abcdef"\nrpm = 5', "rpm"),
    "a short key": ('[[keys]]\nname = "a"\nkey = "short"', "at least 16"),
    "a key with a space": ('[[keys]]\nname = "a"\nkey = "0123456789 abcdef"', "no spaces"),
    "neither key nor digest": ('[[keys]]\nname = "a"', "either"),
    "twice one key": (
        "".join(f'[[keys]]\nname = "{n}"\nkey = "0123456789abcdef"\n' for n in "ab"),
        "'a' and 'b' have the same",
    ),
    "twice one name": ('[[keys]]\nname = "a"\nkey = "0123456789abcdef"\n' * 2, "two keys"),
    "a limit of 0": (
        '[[keys]]\nname = "a"\nkey = "0123456789abcdef"\nmax_concurrency = 0',
        "below 1",
    ),
    "a bad digest": ('[[keys]]\nname = "a"\nsha256 = "abc"', "64"),
}


@pytest.mark.parametrize(("text", "why"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_of_keys_that_cannot_be_used(text: str, why: str) -> None:
    with pytest.raises(KeysError, match=why):
        _keys(text)


def test_no_such_file() -> None:
    with pytest.raises(KeysError, match="nowhere"):
        Keys.read("/nowhere/keys.toml", Limits())


def test_a_bucket_fills_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bucket = Bucket(60)
    for _ in range(60):
        assert bucket.wait() == 0
        bucket.take()
    assert bucket.wait() == pytest.approx(1.0)
    now += 0.5
    assert bucket.wait() == pytest.approx(0.5)
    now += 1000
    assert bucket.wait() == 0 and bucket.level == 60


def test_a_public_address_needs_keys() -> None:
    with pytest.raises(ServeError, match="allow-unauthenticated"):
        listen(ServeConfig(host="0.0.0.0", port=0))
    listen(ServeConfig(host="0.0.0.0", port=0, allow_unauthenticated=True)).close()
    listen(ServeConfig(host="127.0.0.1", port=0)).close()
