"""Where a server listens, as `vllm serve` can too: a Unix domain socket, HTTPS, a path of a
proxy."""

from __future__ import annotations

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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    key = tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=str(certificate))

    def client(port: int) -> httpx.Client:
        return httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=30)

    config = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    with server(tmp_path, ready=False, client=client, **config) as running:
        assert running.get("/livez").status_code == 200
        with pytest.raises(httpx.HTTPError):  # It speaks no plain HTTP.
            httpx.get(f"http://127.0.0.1:{running.port}/livez", timeout=5)


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    assert tls_context(ServeConfig()) is None
    with pytest.raises(ServeError, match="add --ssl-certfile"):
        tls_context(ServeConfig(ssl_keyfile="key.pem"))
    with pytest.raises(ServeError, match="cannot use the certificate"):
        tls_context(ServeConfig(ssl_certfile=str(tmp_path / "no.pem")))


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
