"""Stores KV blocks as files in a directory that survives restarts and is bounded in bytes.

All servers of a model on a machine may share the directory. This module uses no device and starts
no threads.

    DIRECTORY/kv-<fingerprint>/<hash>.kv             one record per block
    header | tokens [n] int32 | zeros | KV bytes     the header names model, format and content

The fingerprint identifies the weights and everything else that determines the meaning of a block's
bytes. A record is written to a temporary file and renamed, so that other servers see all of it or
nothing. Every read compares every field, every token and the checksums of KV and header. If one of
them differs, the read is a miss with a reason, so a read never returns wrong bytes. A caller that
can compute KV checksums faster (checksums.py) does not call `verify`, and compares its result with
the record's `kv_checksum`. KV begins at a page boundary, because the system copies aligned pages up
to twice as fast.
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
# magic, version, tokens, hash, fingerprint, format, bytes of KV, KV checksum, header checksum
HEADER = struct.Struct("<8sII16s16s48sQII")
FOLDER_NAME = re.compile(r"kv-[0-9a-f]{32}")
RECORD_NAME = re.compile(r"[0-9a-f]{32}\.kv")
TEMPORARY_NAME = re.compile(r"\.\d+-\d+\.tmp")
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
STALE_SECONDS = 600.0  # An older temporary file belongs to no running server, and is removed.
PAGE_BYTES = 4096
# A sweep removes records down to this fraction of the limit, so that few writes need a sweep.
SWEEP_TARGET = 0.9


class DiskMiss(Exception):
    """A record cannot be read or written. `reason` is one of a few words, which are counted."""

    def __init__(self, reason: str, detail: object = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class DiskFile(NamedTuple):
    """A file of the cache. Files sort by their last use."""

    last_used: float
    path: Path
    size: int


class Disk:
    """The records of one model and format."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        fingerprint: bytes,
        block_format: str,
        block_bytes: int,
    ):
        """Open the directory and count its records. Raises InvalidRequest if that is impossible.

        `block_format` has the dtype and the shape of a block.
        """
        self.root = directory
        self.max_bytes = max_bytes
        self.block_bytes = block_bytes
        # The fingerprint covers the version of the records. Records of other versions are not read
        # and become the least recently used ones.
        versioned = fingerprint + bytes([VERSION])
        self.fingerprint = hashlib.blake2b(versioned, digest_size=16).digest()
        self.block_format = block_format.encode()[:48].ljust(48, b"\0")
        self.folder = directory / f"kv-{self.fingerprint.hex()}"
        self._file_numbers = itertools.count()
        self._check_directory()
        self.used_bytes = 0
        self.known_hashes = self.sweep()  # The hashes of the records that exist at the start.

    def _check_directory(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._new_path()
            probe.touch()
            probe.unlink()
            total = shutil.disk_usage(self.root).total
        except OSError as error:
            raise InvalidRequest(
                f"KV cannot be kept in {self.root} ({error.strerror}): "
                "name a directory that can be written to",
                "kv_disk_path",
            ) from error
        if self.max_bytes > total:
            raise InvalidRequest(
                f"kv_disk_gib {self.max_bytes / 2**30:g} is more than all of the "
                f"{total / 2**30:.1f} GiB that {self.root} is on: use less",
                "kv_disk_gib",
            )

    # ---- one record ------------------------------------------------------------------------------

    def read(self, content_hash: bytes, tokens: array[int], target: memoryview) -> None:
        """Read the KV of this content into `target` [block_bytes].

        Raises DiskMiss if that fails. The content of the target is then undefined.
        """
        record = Record(self, content_hash, tokens)
        try:
            record.read(target)
            record.verify(target)
        finally:
            record.close()

    def remove(self, content_hash: bytes) -> None:
        _remove(self.path(content_hash))

    def write(self, content_hash: bytes, tokens: array[int], kv_bytes: memoryview) -> None:
        """Write the KV of this content. Raises DiskMiss if that fails.

        If the limit is reached, the least recently used records are removed.
        """
        header = self._header(content_hash, tokens, kv_bytes)
        length = len(header) + len(kv_bytes)
        if self.used_bytes + length > self.max_bytes:
            self.sweep(length)
        temporary = self._new_path()
        try:
            # Another process may have removed the folder.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for view in (memoryview(header), kv_bytes):
                    while view:
                        view = view[os.write(file, view) :]
            finally:
                os.close(file)
            os.replace(temporary, self.path(content_hash))
        except OSError as error:
            _remove(temporary)
            raise DiskMiss("full" if error.errno in FULL_ERRORS else "io", error) from error
        self.used_bytes += length

    def _header(self, content_hash: bytes, tokens: array[int], kv_bytes: memoryview) -> bytearray:
        token_bytes = tokens.tobytes()
        header = bytearray(_kv_offset(len(token_bytes)))
        HEADER.pack_into(
            header,
            0,
            *self.header_fields(content_hash, len(tokens)),
            _kv_checksum(kv_bytes),
            0,
        )
        header[HEADER.size : HEADER.size + len(token_bytes)] = token_bytes
        struct.pack_into("<I", header, HEADER.size - 4, _header_checksum(header))
        return header

    def header_fields(self, content_hash: bytes, num_tokens: int) -> list[object]:
        """Return the fields that name model, format and content."""
        return [
            MAGIC,
            VERSION,
            num_tokens,
            content_hash,
            self.fingerprint,
            self.block_format,
            self.block_bytes,
        ]

    def path(self, content_hash: bytes) -> str:
        return f"{self.folder}/{content_hash.hex()}.kv"

    def _new_path(self) -> Path:
        return self.folder / f".{os.getpid()}-{next(self._file_numbers)}.tmp"

    # ---- all records -----------------------------------------------------------------------------

    def sweep(self, needed_bytes: int = 0) -> frozenset[bytes]:
        """Count the bytes of the records of every model, and remove records above the limit.

        The least recently used records are removed if all records and `needed_bytes` exceed the
        limit. Other files are not touched. Returns the hashes of this model's records that remain.
        """
        files = sorted(self._files())
        total = sum(file.size for file in files)
        num_removed = 0
        if total + needed_bytes > self.max_bytes:
            target = max(int(self.max_bytes * SWEEP_TARGET) - needed_bytes, 0)
            while num_removed < len(files) and total > target:
                _remove(files[num_removed].path)
                total -= files[num_removed].size
                num_removed += 1
        self.used_bytes = total
        return frozenset(
            bytes.fromhex(file.path.stem)
            for file in files[num_removed:]
            if file.path.parent == self.folder and RECORD_NAME.fullmatch(file.path.name)
        )

    def _files(self) -> Iterator[DiskFile]:
        now = time.time()
        for folder in _list_folder(self.root):
            is_named = FOLDER_NAME.fullmatch(folder.name)
            if not is_named or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _list_folder(Path(folder.path)):
                is_temporary = TEMPORARY_NAME.fullmatch(entry.name)
                if not is_temporary and not RECORD_NAME.fullmatch(entry.name):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if is_temporary and now - status.st_mtime > STALE_SECONDS:
                    _remove(Path(entry.path))
                elif stat.S_ISREG(status.st_mode):
                    yield DiskFile(status.st_mtime, Path(entry.path), status.st_size)


class Record:
    """A record that is being read.

    Several threads may read parts of it at the same time and in any order. The header is read with
    the part at byte 0. The KV is valid only if the reads of all parts have succeeded.
    """

    def __init__(self, disk: Disk, content_hash: bytes, tokens: array[int]):
        self.disk = disk
        self.hash = content_hash
        self.tokens = tokens
        self.kv_checksum = 0  # The header contains it.
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            self.file = os.open(disk.path(content_hash), flags)
        except FileNotFoundError as error:
            raise DiskMiss("gone", error) from error
        except OSError as error:
            raise DiskMiss("io", error) from error

    def read(self, target: memoryview, start: int = 0) -> None:
        """Fill `target` with the KV from byte `start` on. Raises DiskMiss if that fails."""
        try:
            self._read(target, start)
        except OSError as error:
            raise DiskMiss("io", error) from error
        except DiskMiss as miss:
            if miss.reason == "corrupt":
                self.disk.remove(self.hash)
            raise

    def _read(self, target: memoryview, start: int) -> None:
        """Read a part with as few system calls as possible.

        After each system call, the thread waits for the interpreter lock.
        """
        token_bytes = self.tokens.tobytes()
        kv_offset = _kv_offset(len(token_bytes))
        header = bytearray(0 if start else kv_offset)
        # The last read asks for one byte more, so that a record that is too long is detected.
        is_last_part = start + len(target) == self.disk.block_bytes
        excess = bytearray(is_last_part)
        read_start = kv_offset + start - len(header)
        end = kv_offset + start + len(target)
        # The first call mostly reads everything.
        position = read_start + os.preadv(self.file, [header, target, excess], read_start)
        if header:
            if position < kv_offset:
                raise DiskMiss("corrupt", "the record ends in the header")
            self._verify_header(header, token_bytes)
        while position < end:
            count = os.preadv(self.file, [target[position - end :], excess], position)
            if not count:
                raise DiskMiss("corrupt", f"the record ends after {position} bytes")
            position += count
        if position > end:
            raise DiskMiss("corrupt", f"the record is longer than {end} bytes")

    def _verify_header(self, header: bytearray, token_bytes: bytes) -> None:
        *fields, self.kv_checksum, header_checksum = HEADER.unpack_from(header)
        if fields != self.disk.header_fields(self.hash, len(self.tokens)):
            raise DiskMiss(
                "corrupt" if fields[0] != MAGIC else "foreign",
                "the record is of another version, model, format or content",
            )
        if header_checksum != _header_checksum(header):
            raise DiskMiss("corrupt", "the checksum of the header differs")
        if header[HEADER.size : HEADER.size + len(token_bytes)] != token_bytes:
            raise DiskMiss("collision", "the record has other tokens with the same hash")

    def verify(self, kv_bytes: memoryview) -> None:
        """Raise DiskMiss if the checksum of the whole KV differs from the record's."""
        if _kv_checksum(kv_bytes) != self.kv_checksum:
            self.disk.remove(self.hash)
            raise DiskMiss("corrupt", "the checksum of the KV differs")

    def close(self, used: bool = False) -> None:
        """Close the file. `used` marks the record as the most recently used one."""
        if used:
            with suppress(OSError):
                os.utime(self.file)
        with suppress(OSError):
            os.close(self.file)


def _kv_offset(token_bytes: int) -> int:
    """Return the offset of KV: the first page after the header and this many bytes of tokens."""
    return -(-(HEADER.size + token_bytes) // PAGE_BYTES) * PAGE_BYTES


def _header_checksum(header: bytearray) -> int:
    """Return the checksum of all bytes before KV except the checksum itself."""
    view = memoryview(header)
    return zlib.crc32(view[HEADER.size :], zlib.crc32(view[: HEADER.size - 4]))


def _kv_checksum(kv_bytes: memoryview) -> int:
    num_page_bytes = len(kv_bytes) // PAGE_BYTES * PAGE_BYTES
    words = np.frombuffer(kv_bytes[:num_page_bytes], np.uint64).reshape(-1, PAGE_BYTES // 8)
    return checksum_of_sums(words.sum(1, dtype=np.uint64), kv_bytes[num_page_bytes:])


def checksum_of_sums(page_sums: np.ndarray, tail: memoryview | bytes = b"") -> int:
    """Return the CRC of the sums of each page's 64-bit words and of the `tail`.

    The tail are the bytes after the last whole page. The checksum detects every flipped bit and
    every lost or moved page, at ten times the speed of a CRC of all bytes.
    """
    return zlib.crc32(tail, zlib.crc32(page_sums.tobytes()))


def _list_folder(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _remove(path: Path | str) -> None:
    with suppress(OSError):
        os.unlink(path)
