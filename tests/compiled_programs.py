"""Where the tests keep compiled programs: beside pip's cache, so that all checkouts share them."""

import contextlib
import hashlib
import os
import time
from pathlib import Path

DAYS = 14


def folder() -> Path:
    """The folder, which exists; in the checkout where there is no home to write to.

    A program is for the kind of CPU that it was compiled on, and a home may serve several.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
        kind = hashlib.sha256("".join(features).encode()).hexdigest()[:8]
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        found = caches / "jaxcomm-tests" / kind
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK):
            return found
    except (OSError, RuntimeError):
        pass  # no /proc, no home, or none to write to
    return Path(__file__).parents[1] / ".jax_cache"


def drop_old() -> None:
    """Removes what no test has written or read for long."""
    for file in folder().glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another run drops them too
            used = file.stat()
            if time.time() - max(used.st_atime, used.st_mtime) > DAYS * 86400:
                file.unlink()
