"""The directory in which compiled kernels are cached."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, or of OCTAVO_CACHE. It may not exist or be writable."""
    base = os.environ.get("OCTAVO_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "octavo"
    )
    return Path(os.path.expanduser(base)) / name
