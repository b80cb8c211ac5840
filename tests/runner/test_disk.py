"""Records on disk: what was written comes back, or nothing does. No fault is ever wrong bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest

from octavo.errors import InvalidRequest
from octavo.runner.disk import HEADER, PAGE_BYTES, Disk, DiskMiss, Record

BYTES = 512
TOKENS = array("i", range(16))
HASH, OTHER = b"h" * 16, b"o" * 16
LENGTH = PAGE_BYTES + BYTES  # the header and the tokens have a page of their own


def make(
    root: Path, limit: int = 100 * LENGTH, fingerprint: bytes = b"f" * 16, form: str = "float32 2x2"
) -> Disk:
    return Disk(root, limit, fingerprint, form, BYTES)


def content(seed: int = 1) -> memoryview:
    return memoryview(bytes((seed + i) % 256 for i in range(BYTES)))


def read(disk: Disk, h: bytes = HASH, tokens: array = TOKENS) -> bytes:
    into = bytearray(BYTES)
    disk.read(h, tokens, memoryview(into))
    return bytes(into)


def why(disk: Disk, h: bytes = HASH, tokens: array = TOKENS) -> str:
    with pytest.raises(DiskMiss) as caught:
        read(disk, h, tokens)
    return caught.value.reason


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = make(tmp_path)
    disk.write(HASH, TOKENS, content())
    return disk


def path(disk: Disk, h: bytes = HASH) -> Path:
    return disk.folder / f"{h.hex()}.kv"


def test_what_was_written_is_read(disk: Disk) -> None:
    assert read(disk) == bytes(content())
    assert path(disk).stat().st_size == LENGTH and path(disk).stat().st_mode & 0o777 == 0o600
    assert make(disk.root).known_hashes == {HASH}, "a new server finds it"


def test_what_is_not_there_is_gone(disk: Disk) -> None:
    assert why(disk, OTHER) == "gone"


def test_every_flipped_bit_is_noticed(disk: Disk) -> None:
    sound = path(disk).read_bytes()
    for at in range(0, len(sound), 7):
        broken = bytearray(sound)
        broken[at] ^= 1 << at % 8
        path(disk).write_bytes(broken)
        assert why(disk) in ("corrupt", "foreign"), at
        path(disk).write_bytes(sound)
    assert read(disk) == bytes(content())


def test_every_truncation_is_noticed(disk: Disk) -> None:
    sound = path(disk).read_bytes()
    for length in (
        0,
        1,
        HEADER.size - 1,
        HEADER.size,
        HEADER.size + 64,
        PAGE_BYTES,
        len(sound) - 1,
        len(sound) + 1,
    ):
        path(disk).write_bytes((sound + b"x")[:length])
        assert why(disk) == "corrupt"
        assert not path(disk).exists(), "it would be a miss for ever"


def test_a_record_is_read_in_parts_in_any_order(disk: Disk) -> None:
    record, into = Record(disk, HASH, TOKENS), bytearray(BYTES)
    for at, end in ((300, BYTES), (0, 100), (100, 300)):
        record.read(memoryview(into)[at:end], at)
    record.verify(memoryview(into))
    record.close()
    assert into == content()


@pytest.mark.parametrize(
    "length", [PAGE_BYTES - 1, PAGE_BYTES + 99, PAGE_BYTES + 299, LENGTH - 1, LENGTH + 1]
)
def test_a_part_that_is_not_whole_is_noticed(disk: Disk, length: int) -> None:
    path(disk).write_bytes((path(disk).read_bytes() + b"x")[:length])
    record, misses = Record(disk, HASH, TOKENS), []
    for at, end in ((0, 100), (100, 300), (300, BYTES)):
        try:
            record.read(memoryview(bytearray(end - at)), at)
        except DiskMiss as miss:
            misses.append(miss.reason)
    record.close()
    assert misses and set(misses) == {"corrupt"} and not path(disk).exists()


def test_a_read_that_the_system_cuts_short_goes_on(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def short(file: int, views: list[memoryview], at: int) -> int:
        first = next(view for view in views if len(view))
        return real(file, [first if len(first) == PAGE_BYTES else memoryview(first)[:7]], at)

    monkeypatch.setattr(os, "preadv", short)
    assert read(disk) == bytes(content())


def test_a_record_of_another_model_format_or_content_is_no_hit(disk: Disk, tmp_path: Path) -> None:
    sound = path(disk).read_bytes()
    for other in (make(tmp_path, fingerprint=b"g" * 16), make(tmp_path, form="bfloat16 2x2")):
        other.folder.mkdir(exist_ok=True)
        path(other).write_bytes(sound)
        assert why(other) == "foreign"
    path(disk).write_bytes(sound)
    path(disk, OTHER).write_bytes(sound)  # renamed
    assert why(disk, OTHER) == "foreign"


def test_the_same_hash_with_other_tokens_is_a_miss(disk: Disk) -> None:
    assert why(disk, tokens=array("i", range(1, 17))) == "collision"
    assert read(disk) == bytes(content()), "and stays for those it belongs to"


def test_a_link_is_not_followed(disk: Disk, tmp_path: Path) -> None:
    path(disk).rename(tmp_path / "elsewhere")
    path(disk).symlink_to(tmp_path / "elsewhere")
    assert why(disk) == "io"


def test_an_error_of_the_system_is_a_miss(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        assert why(disk) == "io"
    assert read(disk) == bytes(content()), "and the record is kept: it may be readable again"
    with monkeypatch.context() as patched:
        for name in ("utime", "close"):
            patched.setattr(os, name, broken)
        record = Record(disk, HASH, TOKENS)
        record.close(used=True)
    os.close(record.file)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", broken)
        with pytest.raises(DiskMiss, match="io"):
            disk.write(OTHER, TOKENS, content())
    assert [p.name for p in disk.folder.iterdir()] == [path(disk).name], (
        "nothing half-written stays"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_a_miss(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(name: object, flags: int, *more: int) -> int:
        return real("/dev/full", os.O_WRONLY) if flags & os.O_CREAT else real(name, flags, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        with pytest.raises(DiskMiss, match="full"):
            disk.write(OTHER, TOKENS, content())
    assert why(disk, OTHER) == "gone" and read(disk) == bytes(content())


def test_a_removed_directory_is_made_again(disk: Disk) -> None:
    path(disk).unlink()
    disk.folder.rmdir()
    disk.root.rmdir()
    assert why(disk) == "gone" and disk.sweep() == frozenset()
    disk.write(HASH, TOKENS, content(2))
    assert read(disk) == bytes(content(2))


def test_the_records_unused_for_longest_give_way(tmp_path: Path) -> None:
    disk = make(tmp_path, limit=10 * LENGTH)
    hashes = [bytes([i]) * 16 for i in range(14)]
    now = time.time()
    for i, h in enumerate(hashes[:10]):
        disk.write(h, TOKENS, content(i))
        os.utime(path(disk, h), (now - 100 + i, now - 100 + i))
    Record(disk, hashes[0], TOKENS).close(used=True)  # the oldest, used now
    for i, h in enumerate(hashes[10:], 10):
        disk.write(h, TOKENS, content(i))
    left = disk.sweep()
    assert len(left) * LENGTH <= 10 * LENGTH and disk.used_bytes == len(left) * LENGTH
    assert hashes[0] in left and hashes[1] not in left and {*hashes[10:]} <= left


def test_nothing_of_others_is_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.kv").write_bytes(b"x" * 10_000)
    (tmp_path / "kv-notes").mkdir()
    (tmp_path / "kv-notes" / f"{HASH.hex()}.kv").write_bytes(b"x" * 10_000)
    disk = make(tmp_path, limit=2 * LENGTH)
    (disk.folder / "README").write_text("mine")
    for i in range(5):
        disk.write(bytes([i]) * 16, TOKENS, content())
    assert (tmp_path / "thesis.kv").exists() and (disk.folder / "README").exists()
    assert (tmp_path / "kv-notes" / f"{HASH.hex()}.kv").exists()
    assert len(disk.sweep()) <= 2


def test_the_bound_is_over_all_models(tmp_path: Path) -> None:
    old = make(tmp_path, limit=4 * LENGTH)
    for i in range(3):
        old.write(bytes([i]) * 16, TOKENS, content())
        os.utime(path(old, bytes([i]) * 16), (1000, 1000))
    new = make(tmp_path, limit=4 * LENGTH, fingerprint=b"n" * 16)
    for i in range(3):
        new.write(bytes([i]) * 16, TOKENS, content())
    assert len(new.sweep()) == 3 and len(old.sweep()) <= 1


def test_half_written_files_of_the_dead_are_swept(disk: Disk) -> None:
    old, young = disk.folder / ".123-4.tmp", disk.folder / ".123-5.tmp"
    for half in (old, young):
        half.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    assert disk.sweep() == {HASH}
    assert not old.exists() and young.exists()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InvalidRequest, match="cannot be kept in .*file .Not a directory.: name a directory"
    ):
        make(tmp_path / "file")
    with pytest.raises(InvalidRequest, match="more than all of the"):
        make(tmp_path, limit=2**60)


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    """Both write the same records, sweep and read at once: each read is whole or a miss."""
    code = f"""
import sys, random
from array import array
from pathlib import Path
from octavo.runner.disk import Disk, DiskMiss
root, seed = Path(sys.argv[1]), int(sys.argv[2])
disk = Disk(root, {20 * LENGTH}, b"f" * 16, "float32 2x2", {BYTES})
g, hits, misses, into = random.Random(seed), 0, set(), bytearray({BYTES})
for _ in range(1500):
    i = g.randrange(30)
    h, tokens = bytes([i]) * 16, array("i", range(i, i + 16))
    data = bytes((i + k) % 256 for k in range({BYTES}))
    try:
        if g.random() < 0.5:
            disk.write(h, tokens, memoryview(data))
        else:
            disk.read(h, tokens, memoryview(into))
            assert bytes(into) == data
            hits += 1
    except DiskMiss as miss:
        misses.add(miss.reason)
print(hits, sorted(misses - {{"gone", "io"}}))
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    for child in children:
        out, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        hits, odd = out.split(" ", 1)
        assert int(hits) > 100 and odd.strip() == "[]"
    assert make(tmp_path, limit=20 * LENGTH).used_bytes <= 21 * LENGTH
