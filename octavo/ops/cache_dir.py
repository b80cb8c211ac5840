"""Where compiled kernels are kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path


def kept_in(name: str) -> Path:
    """A folder of the user's cache, or of what OCTAVO_CACHE names. It need not exist, nor be writable."""
    base = os.environ.get("OCTAVO_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "octavo"
    )
    return Path(os.path.expanduser(base)) / name
