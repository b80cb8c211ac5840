"""Blocks as files: one directory, shared by whoever serves the same model, kept over restarts, bounded in bytes.

    DIRECTORY/kv-<fingerprint>/<hash>.kv       one record a block
    header | tokens [n] int32 | zeros | KV bytes     the header names the model, the format and the content

The fingerprint stands for the weights and for everything that decides what a block's bytes mean. A record is written to a
file of its own and renamed into place, so that others see all of it or nothing. Every read compares every field, every token
and the checksums of KV and of the rest: what is odd in any way is a miss, with its reason, and never wrong bytes. Who adds up
KV faster than this leaves that out and asks the record what it should come to, its `seal`. KV begins on a page of its own: the
system copies pages that lie alike up to twice as fast as others. Knows no device, starts no thread.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import shutil
import stat
import struct
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.errors import InvalidRequest

MAGIC = b"OCTAVOKV"
VERSION = 4
# magic, version, tokens, hash, fingerprint, format, bytes of KV, seal, checksum
HEADER = struct.Struct("<8sII16s16s48sQII")
FOLDER = re.compile(r"kv-[0-9a-f]{32}")
RECORD = re.compile(r"[0-9a-f]{32}\.kv")
HALF = re.compile(r"\.\d+-\d+\.tmp")
FULL = (errno.ENOSPC, errno.EDQUOT)
STALE = 600.0  # seconds after which a half-written file is nobody's any more
PAGE = 4096  # bytes
KEPT = 0.9  # of the limit, after the oldest records were removed: not one removal a write


class Miss(Exception):
    """The disk does not give or take a record. `why` is one of a few words, to be counted by."""

    def __init__(self, why: str, detail: object = ""):
        super().__init__(f"{why}: {detail}" if detail else why)
        self.why = why


class Entry(NamedTuple):
    used: float  # when it was last written or read
    path: Path
    size: int


class Disk:
    """The records of one model and format. `form` is what a reader of a header should see: dtype and shape of a block."""

    def __init__(
        self, directory: Path, limit: int, fingerprint: bytes, form: str, block_bytes: int
    ):
        self.root = directory
        self.limit = limit
        self.block_bytes = block_bytes
        # Of the records' own version too: those of another are not looked at, and give way as they age.
        self.fingerprint = hashlib.blake2b(fingerprint + bytes([VERSION]), digest_size=16).digest()
        self.form, self.folder = (
            form.encode()[:48].ljust(48, b"\0"),
            directory / f"kv-{self.fingerprint.hex()}",
        )
        self._count = itertools.count()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (probe := self._new_path()).touch()
            probe.unlink()
            total = shutil.disk_usage(directory).total
        except OSError as error:
            raise InvalidRequest(
                f"KV cannot be kept in {directory} ({error.strerror}): name a directory that can be written to",
                "kv_disk_path",
            ) from error
        if limit > total:
            raise InvalidRequest(
                f"kv_disk_gib {limit / 2**30:g} is more than all of the {total / 2**30:.1f} GiB that {directory} is on",
                "kv_disk_gib",
            )
        self.used = 0
        self.known = self.sweep()  # at the start

    # ---- one record --------------------------------------------------------------------------------

    def read(self, h: bytes, tokens: array[int], into: memoryview) -> None:
        """The KV of this content, or Miss. `into` [block_bytes] holds anything after a miss."""
        record = Record(self, h, tokens)
        try:
            record.read(into)
            record.compare(into)
        finally:
            record.close()

    def remove(self, h: bytes) -> None:
        _remove(self.path(h))

    def write(self, h: bytes, tokens: array[int], data: memoryview) -> None:
        """Keep the KV of this content, or Miss. Removes the records unused for longest when there are too many."""
        words = tokens.tobytes()
        head = bytearray(_start(len(words)))
        names = MAGIC, VERSION, len(tokens), h, self.fingerprint, self.form, self.block_bytes
        HEADER.pack_into(head, 0, *names, _seal_of(data), 0)
        head[HEADER.size : HEADER.size + len(words)] = words
        struct.pack_into("<I", head, HEADER.size - 4, _checksum(head))
        length = len(head) + len(data)
        if self.used + length > self.limit:
            self.sweep(length)
        half = self._new_path()
        try:
            # somebody may have removed it
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for view in (memoryview(head), data):
                    while view:
                        view = view[os.write(file, view) :]
            finally:
                os.close(file)
            os.replace(half, self.path(h))
        except OSError as error:
            _remove(half)
            raise Miss("full" if error.errno in FULL else "io", error) from error
        self.used += length

    def path(self, h: bytes) -> str:
        return f"{self.folder}/{h.hex()}.kv"

    def _new_path(self) -> Path:
        return self.folder / f".{os.getpid()}-{next(self._count)}.tmp"

    # ---- all of them -------------------------------------------------------------------------------

    def sweep(self, room: int = 0) -> frozenset[bytes]:
        """Count what there is, of every model; remove the oldest if this and `room` more are over the limit. What is left
        of this model. Nothing is touched that this class did not name."""
        entries = sorted(self._entries())
        total = sum(entry.size for entry in entries)
        gone = 0
        if total + room > self.limit:
            target = max(int(self.limit * KEPT) - room, 0)
            while gone < len(entries) and total > target:
                _remove(entries[gone].path)
                total -= entries[gone].size
                gone += 1
        self.used = total
        return frozenset(
            bytes.fromhex(e.path.stem)
            for e in entries[gone:]
            if e.path.parent == self.folder and RECORD.fullmatch(e.path.name)
        )

    def _entries(self) -> Iterator[Entry]:
        now = time.time()
        for folder in _listed(self.root):
            if not FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for item in _listed(Path(folder.path)):
                half = HALF.fullmatch(item.name)
                if not half and not RECORD.fullmatch(item.name):
                    continue
                try:
                    found = item.stat(follow_symlinks=False)
                except OSError:
                    continue
                if half and now - found.st_mtime > STALE:
                    _remove(Path(item.path))
                elif stat.S_ISREG(found.st_mode):
                    yield Entry(found.st_mtime, Path(item.path), found.st_size)


class Record:
    """A record that is being read: in parts, if somebody likes, in any order and by several threads at once. Nothing of it counts
    before the part at 0 was read, with which the header comes, and all others."""

    def __init__(self, disk: Disk, h: bytes, tokens: array[int]):
        self.disk = disk
        self.hash = h
        self.tokens = tokens
        self.seal = 0  # what KV should come to
        try:
            self.file = os.open(disk.path(h), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Miss("gone", error) from error
        except OSError as error:
            raise Miss("io", error) from error

    def read(self, into: memoryview, at: int = 0) -> None:
        """KV from byte `at` on, as much as `into` holds, or Miss."""
        try:
            self._read(into, at)
        except OSError as error:
            raise Miss("io", error) from error
        except Miss as miss:
            if miss.why == "corrupt":
                self.disk.remove(self.hash)
            raise

    def _read(self, into: memoryview, at: int) -> None:
        """As few calls of the system as can be: after each a thread waits for the interpreter."""
        words = self.tokens.tobytes()
        start = _start(len(words))
        head = bytearray(0 if at else start)
        beyond = bytearray(at + len(into) == self.disk.block_bytes)
        first = at + start - len(head)
        end = at + start + len(into)
        got = first + os.preadv(self.file, [head, into, beyond], first)  # all of it, as a rule
        if head:
            if got < start:
                raise Miss("corrupt", "it ends in the header")
            self._compare_head(head, words)
        while got < end:
            count = os.preadv(self.file, [into[got - end :], beyond], got)
            if not count:
                raise Miss("corrupt", f"it ends after {got} bytes")
            got += count
        if got > end:
            raise Miss("corrupt", f"it goes on after {end} bytes")

    def _compare_head(self, head: bytearray, words: bytes) -> None:
        disk = self.disk
        *fields, self.seal, checksum = HEADER.unpack_from(head)
        if fields != [
            MAGIC,
            VERSION,
            len(self.tokens),
            self.hash,
            disk.fingerprint,
            disk.form,
            disk.block_bytes,
        ]:
            raise Miss(
                "corrupt" if fields[0] != MAGIC else "foreign",
                "another version, model, format or content",
            )
        if checksum != _checksum(head):
            raise Miss("corrupt", "checksum of the header")
        if head[HEADER.size : HEADER.size + len(words)] != words:
            raise Miss("collision", "other tokens of the same hash")

    def compare(self, data: memoryview) -> None:
        """Miss, unless all of KV comes to what it should."""
        if _seal_of(data) != self.seal:
            self.disk.remove(self.hash)
            raise Miss("corrupt", "checksum of KV")

    def close(self, used: bool = False) -> None:
        """`used`: others are removed first."""
        if used:
            with suppress(OSError):
                os.utime(self.file)
        with suppress(OSError):
            os.close(self.file)


def _start(words: int) -> int:
    """Where KV begins: on the first page after the header and so many bytes of tokens."""
    return -(-(HEADER.size + words) // PAGE) * PAGE


def _checksum(head: bytearray) -> int:
    """Of all before KV but the checksum itself."""
    return zlib.crc32(
        memoryview(head)[HEADER.size :], zlib.crc32(memoryview(head)[: HEADER.size - 4])
    )


def _seal_of(data: memoryview) -> int:
    whole = len(data) // PAGE * PAGE
    return seal(
        np.frombuffer(data[:whole], np.uint64).reshape(-1, PAGE // 8).sum(1, dtype=np.uint64),
        data[whole:],
    )


def seal(sums: np.ndarray, tail: memoryview | bytes = b"") -> int:
    """CRC of the sums of each 4 KiB of KV as 64-bit numbers, and of what is left: no flipped bit, no lost or moved page goes
    unnoticed, at ten times the speed of a CRC of it all."""
    return zlib.crc32(tail, zlib.crc32(sums.tobytes()))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _remove(path: Path | str) -> None:
    with suppress(OSError):
        os.unlink(path)
