"""The daemon's log does not grow without end."""

from __future__ import annotations

import logging

import pytest

from sentinel.cli import log_format
from sentinel.cli.log_format import PERIOD_SECONDS, Sparing


def test_a_repeated_message_is_left_out_for_an_hour(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_format, "MOST", 3)
    now = [0.0]
    sparing = Sparing(lambda: now[0])
    caplog.handler.addFilter(sparing)
    log = logging.getLogger("sentinel.test")
    for hour in range(2):
        now[0] = hour * PERIOD_SECONDS
        for number in range(5):
            log.error("fault %d of %s", number, "a tick")
        log.error("another")
    caplog.handler.removeFilter(sparing)
    each = ["fault 0 of a tick", "fault 1 of a tick", "fault 2 of a tick (more of these are left out for an hour)"]
    assert caplog.messages == [*each, "another"] * 2
