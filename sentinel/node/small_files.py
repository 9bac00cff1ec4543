"""Small text files: rules, settings. What is larger than any of them is not read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

LARGEST = 4 * 1024 * 1024
"""Characters."""


def text(path: Path) -> str:
    """UTF-8. Raises OSError, also where the file does not end, and UnicodeDecodeError."""
    with path.open(encoding="utf-8") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content
