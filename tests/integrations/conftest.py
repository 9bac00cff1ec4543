"""The fake daemon of the hooks' tests, for loops that somebody else wrote."""

from __future__ import annotations

from tests.hooks.conftest import daemon, swallowed

__all__ = ["daemon", "swallowed"]
