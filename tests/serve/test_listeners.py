"""Where a server listens, as `vllm serve` can too: a Unix domain socket, HTTPS, a path of a
proxy."""

from __future__ import annotations

import functools
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

import httpx2 as httpx
import pytest

from octavo.serve.front.keys import Keys, KeysError
from octavo.serve.limits import Limits
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import ServeError, listen_unix, tls_context
from tests.serve.running import server


def test_a_unix_socket_below_a_path_with_a_key(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="o") as folder:  # a socket's path must be short
        file = f"{folder}/socket"
        listen_unix(file).close()  # It is left behind, as after a crash.
        transport = httpx.HTTPTransport(uds=file)

        def client(port: int) -> httpx.Client:
            return httpx.Client(base_url="http://localhost", transport=transport, timeout=30)

        config = {"uds": file, "root_path": "/llm", "api_keys": ["a-key"]}
        with server(tmp_path, ready=False, client=client, **config) as running:
            assert running.get("/llm/livez").status_code == 200
            assert running.get("/llm/version").status_code == 401
            key = {"Authorization": "Bearer a-key"}
            for path in ("/version", "/llm/version"):
                assert running.get(path, headers=key).status_code == 200
            assert running.get("/other/version", headers=key).status_code == 404


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The options of a certificate that signs itself, so it is its own authority too."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


def connect(port: int, trusted: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=30)


def test_https(tmp_path: Path, certificate: dict[str, str]) -> None:
    trusted = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    client = functools.partial(connect, trusted=trusted)
    with server(tmp_path, ready=False, client=client, **certificate) as running:
        assert running.get("/livez").status_code == 200
        with pytest.raises(httpx.HTTPError):  # It speaks no plain HTTP.
            httpx.get(f"http://127.0.0.1:{running.port}/livez", timeout=5)


def test_clients_must_have_a_certificate(tmp_path: Path, certificate: dict[str, str]) -> None:
    authority = certificate["ssl_certfile"]
    anyone = ssl.create_default_context(cafile=authority)
    known = ssl.create_default_context(cafile=authority)
    known.load_cert_chain(authority, certificate["ssl_keyfile"])
    client = functools.partial(connect, trusted=known)
    config = {**certificate, "ssl_ca_certs": authority, "ssl_cert_reqs": 2}
    with server(tmp_path, ready=False, client=client, **config) as running:
        assert running.get("/livez").status_code == 200
        with connect(running.port, anyone) as other, pytest.raises(httpx.HTTPError):
            other.get("/livez")


def test_ciphers_are_those_of_the_option(certificate: dict[str, str]) -> None:
    wanted = "ECDHE-RSA-AES256-GCM-SHA384"
    context = tls_context(ServeConfig(**certificate, ssl_ciphers=wanted))
    assert context is not None
    names = [cipher["name"] for cipher in context.get_ciphers()]
    assert [name for name in names if not name.startswith("TLS_")] == [wanted]  # TLS_: of TLS 1.3


def test_certificates_that_cannot_be_used(tmp_path: Path, certificate: dict[str, str]) -> None:
    assert tls_context(ServeConfig()) is None
    missing = str(tmp_path / "no.pem")
    for options, message in (
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile needs .* add --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs .* add --ssl-certfile"),
        ({"ssl_certfile": missing}, "cannot use the certificate"),
        ({**certificate, "ssl_ca_certs": missing}, "cannot use --ssl-ca-certs"),
        ({**certificate, "ssl_cert_reqs": 1}, "add --ssl-ca-certs FILE"),
        ({**certificate, "ssl_ciphers": "none at all"}, "cannot use --ssl-ciphers"),
    ):
        with pytest.raises(ServeError, match=message):
            tls_context(ServeConfig(**options))


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("keep")
    with pytest.raises(ServeError, match="cannot listen on the socket"):
        listen_unix(str(file))
    assert file.read_text() == "keep"


def test_keys_of_the_command_line(caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys.read(None, Limits(), ("a-key", "b-key"))
    found = keys.check("Bearer b-key", "127.0.0.1")
    assert found is not None and found.name == "api-key-2" and not found.admin
    assert "an API key of 5 characters can be guessed" in caplog.text
    for wrong in ((" ",), ("a-key", "a-key")):
        with pytest.raises(KeysError):
            Keys.read(None, Limits(), wrong)


def test_a_path_begins_with_a_slash() -> None:
    assert ServeConfig(root_path="/llm/").root_path == "/llm"
    with pytest.raises(ValueError, match="root_path must begin with a slash"):
        ServeConfig(root_path="llm")
