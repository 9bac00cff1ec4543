"""Fixtures: the fake daemon of the hooks' tests, for loops that frameworks own."""

from __future__ import annotations

from tests.hooks.conftest import daemon, swallowed

__all__ = ["daemon", "swallowed"]
