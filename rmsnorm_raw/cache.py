"""Compiled objects on disk: whole or not at all, and never loaded damaged.

Knows: the cache folder, atomic writes, a digest behind each object.
Must not: know compilers or what the bytes mean.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

_DIGEST = 32


def folder() -> Path:
    """RMSNORM_RAW_CACHE_DIR, else rmsnorm_raw in the user's cache folder. It need not exist."""
    own = os.environ.get("RMSNORM_RAW_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rmsnorm_raw"


@lru_cache(maxsize=1)
def temporary_folder() -> Path:
    """Where objects go when the cache folder is of no use; gone with the process."""
    path, owner = tempfile.mkdtemp(prefix="rmsnorm_raw-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child may end first
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return Path(path)


def find(name: str) -> Path | None:
    """A whole object of that name. A truncated or altered one is as good as none."""
    return folder() / name if read(name) is not None else None


def read(name: str) -> bytes | None:
    """What was kept under that name, without the digest: for a loader that might look behind an image."""
    try:
        content = (folder() / name).read_bytes()
    except OSError:
        return None
    if len(content) <= _DIGEST or hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        return None
    return content[:-_DIGEST]


def keep(name: str, content: bytes, where: Path | None = None) -> Path:
    """Writes an object beside its final name and renames it, so that no other process ever sees half of it."""
    content += hashlib.sha256(content).digest()  # behind an ELF image a loader never looks
    for choose in [lambda: where] if where else [folder, temporary_folder]:
        try:
            target = choose()
            target.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(prefix=f".{name}-", dir=target)
        except OSError:
            continue
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(partial, 0o755)
            os.replace(partial, target / name)
            return target / name
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
    raise RuntimeError(
        f"neither {where or folder()} nor a temporary folder can be written; set RMSNORM_RAW_CACHE_DIR to one that can"
    )
