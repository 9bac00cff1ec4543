"""Read and write small text files: rules and settings, reports and pictures."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
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
