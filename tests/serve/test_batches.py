"""Files and batches, with OpenAI's client and with forms that are no forms."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from octavo.serve.api import multipart
from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.batch_lines import completed_ids
from tests.serve.running import NAME, Running, check_error, server

CHAT = "/v1/chat/completions"


def request(custom_id: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **fields}}


def jsonl(*lines: Any) -> bytes:
    return b"".join((json.dumps(line) if isinstance(line, dict) else line).encode() + b"\n" for line in lines)  # fmt: skip


def client_of(running: Running) -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)


def upload(client: OpenAI, data: bytes) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch").id


def ended(client: OpenAI, id: str, seconds: float = 60) -> Any:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        batch = client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch is still {batch.status}")


def output(client: OpenAI, id: str | None) -> dict[str, Any]:
    text = client.files.content(id or "").text
    return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


def test_a_batch_from_upload_to_output(running: Running) -> None:
    client = client_of(running)
    data = jsonl(
        request("one"),
        request("two", temperature=9),
        request("three", url="/v1/completions", prompt="x"),
        "not json",
        request("five", stream=True),
    )
    file = upload(client, data)
    stored = client.files.retrieve(file)
    assert (stored.bytes, stored.filename, stored.purpose) == (len(data), "in.jsonl", "batch")
    assert client.files.content(file).content == data
    batch = client.batches.create(
        input_file_id=file, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
    )
    batch = ended(client, batch.id)
    assert batch.status == "completed" and batch.metadata == {"a": "b"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 1, 4)
    found = output(client, batch.output_file_id)
    assert set(found) == {"one"} and found["one"]["response"]["status_code"] == 200
    assert found["one"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    errors = output(client, batch.error_file_id)
    assert errors["two"]["response"]["status_code"] == 400
    assert errors["two"]["error"]["param"] == "temperature"
    assert "url must be" in errors["three"]["error"]["message"]
    assert "line 4: the line is not valid JSON" in errors["line-4"]["error"]["message"]
    assert "cannot be streamed" in errors["five"]["error"]["message"]
    assert batch.id in [each.id for each in client.batches.list(limit=100)]
    assert file in [each.id for each in client.files.list(purpose="batch")]
    assert client.files.delete(file).deleted
    check_error(running.get(f"/v1/files/{file}"), 404, "id", "file_not_found")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\n\n", "empty_file"),
        (jsonl(request("a"), request("a")), "duplicate_custom_id"),
    ],
)
def test_a_file_that_is_no_batch_fails_as_a_whole(running: Running, data: bytes, code: str) -> None:
    client = client_of(running)
    file = upload(client, data)
    batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    batch = ended(client, batch.id)
    assert batch.status == "failed" and batch.errors and batch.errors.data
    assert batch.errors.data[0].code == code


def test_a_cancelled_batch_keeps_its_replies(running: Running) -> None:
    client = client_of(running)
    lines = [request(f"r{i}", max_tokens=200, ignore_eos=True) for i in range(400)]
    file = upload(client, jsonl(*lines))
    batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    while client.batches.retrieve(batch.id).request_counts.completed == 0:  # type: ignore[union-attr]
        time.sleep(0.02)
    check_error(running.http.delete(f"/v1/files/{file}"), 400, "id", "file_in_use")
    client.batches.cancel(batch.id)
    batch = ended(client, batch.id)
    assert batch.status == "cancelled" and batch.output_file_id
    assert 0 < len(output(client, batch.output_file_id)) < 400
    assert running.get("/load").json() == {"server_load": 0}


@pytest.mark.slow
def test_a_restarted_server_continues_a_batch(tmp_path: Path) -> None:
    files = tmp_path / "files"
    lines = [request(f"r{i}", max_tokens=100, ignore_eos=True) for i in range(150)]
    with server(tmp_path, files_dir=str(files)) as first:
        client = client_of(first)
        batch = client.batches.create(
            input_file_id=upload(client, jsonl(*lines)), endpoint=CHAT, completion_window="24h"
        )
        while client.batches.retrieve(batch.id).request_counts.completed == 0:  # type: ignore[union-attr]
            time.sleep(0.02)
        first.process.kill()
        first.process.wait()
        first.stop = lambda *_: 0  # type: ignore[method-assign, assignment]
    before = completed_ids(files / f"{batch.id}.output")
    assert 0 < len(before) < 150
    with server(tmp_path, files_dir=str(files)) as second:
        client = client_of(second)
        batch = ended(client, batch.id)
        assert batch.status == "completed" and batch.request_counts.completed == 150
        text = client.files.content(batch.output_file_id or "").text
        found = [json.loads(line)["custom_id"] for line in text.splitlines()]
        assert sorted(found) == sorted(line["custom_id"] for line in lines), "each exactly once"
        assert second.metrics()["inference_requests_total"] == 150 - len(before)


def test_files_belong_to_their_key_and_operators_need_an_administrators(tmp_path: Path) -> None:
    keys = ("first-secret-key-0001", "second-secret-key-0002")
    with server(tmp_path, api_keys=keys) as locked:
        mine, other = (
            OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) for key in keys
        )
        file = upload(mine, jsonl(request("a")))
        assert not list(other.files.list()) and len(list(mine.files.list())) == 1
        batch = mine.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        assert ended(mine, batch.id).status == "completed"
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch.id}"):
            header = {"authorization": f"Bearer {keys[1]}"}
            assert locked.get(path, headers=header).status_code == 404
            assert locked.get(path).status_code == 401
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
            header = {"authorization": f"Bearer {keys[0]}"}
            check_error(locked.http.post(path, headers=header), 403, None, "admin_only")


@pytest.mark.slow
def test_storage_is_bounded(tmp_path: Path) -> None:
    with server(tmp_path, limits={"file_bytes": 20_000, "upload_bytes": 15_000}) as small:
        client = client_of(small)
        upload(client, b"x" * 12_000)
        for size, code in ((12_000, "file_storage_full"), (16_000, "body_too_large")):
            form = {"file": ("x", b"x" * size)}
            reply = small.http.post("/v1/files", data={"purpose": "batch"}, files=form)
            check_error(reply, 413, code=code)
        assert len(list(client.files.list())) == 1
        assert not list(small.temporary.glob("*/upload-*")), "nothing is left of what was refused"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"endpoint": CHAT}, "input_file_id"),
        ({"endpoint": CHAT, "input_file_id": "file-../../etc"}, "input_file_id"),
        ({"endpoint": "/v1/models", "input_file_id": "x"}, "endpoint"),
        ({"endpoint": CHAT, "input_file_id": "x", "completion_window": "1h"}, "completion_window"),
    ],
)
def test_batches_that_cannot_be_created(running: Running, asked: Any, param: str) -> None:
    status = 404 if "etc" in str(asked) else 400
    check_error(running.post("/v1/batches", asked), status, param)


def test_lists_have_pages(running: Running) -> None:
    client = client_of(running)
    made = [upload(client, b"x") for _ in range(3)]
    first = running.get("/v1/files?limit=2&order=desc").json()
    assert first["has_more"] and first["last_id"] == first["data"][1]["id"]
    after = running.get(f"/v1/files?limit=1&after={first['last_id']}").json()
    assert after["data"][0]["id"] not in (first["first_id"], first["last_id"])
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("after=nothing", "after")):
        check_error(running.get(f"/v1/files?{query}"), 400, param)
    for id in made:
        client.files.delete(id)


# ---- forms -------------------------------------------------------------------------------------

FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a\r.jsonl"\r\n'
    b"Content-Type: text/plain\r\n\r\n--b?\r\n\r\n\r\n--b--\r\n"
)


def parts_of(tmp_path: Path, form: bytes) -> dict[str, multipart.FormPart]:
    path = tmp_path / "form"
    path.write_bytes(form)
    return multipart.read_parts(path, b"b")


def test_a_form_is_read_where_it_lies(tmp_path: Path) -> None:
    form = FORM.replace(b"a\r.jsonl", b"a.jsonl")
    parts = parts_of(tmp_path, form)
    assert parts["purpose"].text(tmp_path / "form") == "batch"
    parts["file"].copy(tmp_path / "form", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"--b?\r\n\r\n"
    assert parts["file"].filename == "a.jsonl"
    empty = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n--b--'
    assert parts_of(tmp_path, empty)["x"].text(tmp_path / "form") == ""


@pytest.mark.parametrize("length", range(0, len(FORM) - 8, 3))
def test_a_form_that_is_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ApiError, match="the form cannot be read"):
        parts_of(tmp_path, FORM[:length])


@pytest.mark.parametrize(
    ("content", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"x", 415),
        ("multipart/form-data; boundary=b", b"x", 400),
        ("multipart/form-data; boundary=b", b"--b--", 400),
        ("multipart/form-data; boundary=b", b"", 400),
    ],
)
def test_uploads_that_are_no_forms(
    running: Running, content: str, body: bytes, status: int
) -> None:
    reply = running.http.post("/v1/files", content=body, headers={"content-type": content})
    check_error(reply, status)
