"""Read and write small text files: rules and settings, reports and pictures."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sentinel.errors import ConfigError

LARGEST = 4 * 1024 * 1024
"""Characters of a file that is read, at most."""


def text(path: Path) -> str:
    """Return a file's text in UTF-8. Raises OSError, also where the file is longer than `LARGEST`, and
    UnicodeDecodeError."""
    with path.open(encoding="utf-8") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


@contextmanager
def lock_changes(path: Path) -> Iterator[None]:
    """Hold a lock while the file is read and written again, so that of two changes at once none is lost. Raises
    ConfigError."""
    try:
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}), and stays as it was") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_whole(path: Path, text: str) -> None:
    """Write the whole text, or leave the existing file. Raises ConfigError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigError(f"{path}: cannot be written ({error.strerror}), and stays as it was") from None
