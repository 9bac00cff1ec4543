"""Cases, and the origin of messages, for the tests of notify."""

from __future__ import annotations

from sentinel.notify import Origin
from sentinel.testing import make_case as case

__all__ = ["ORIGIN", "case"]

ORIGIN = Origin(
    host="node-7",
    user="ada",
    page="https://page.example/r1",
    report="https://files.example/r1.html",
    runbook="https://wiki.example/runbook#{section}",
)
