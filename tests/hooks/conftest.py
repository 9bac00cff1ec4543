"""Fixtures: a daemon that only records, and the check that no internal fault of Sentinel was swallowed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import testing, wire
from sentinel.hooks.core import faults, governor, opening
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.loop import forward_passes
from sentinel.hooks.measure import probe
from sentinel.hooks.step import loss_outliers
from sentinel.hooks.transport.sender import Sender
from tests.hooks.sessions import list_sessions

WAIT = 20.0


class FakeDaemon(testing.FakeDaemon):
    """A fake daemon with short names for what nearly every test calls."""

    of = testing.FakeDaemon.list_messages
    ended = testing.FakeDaemon.wait_for_goodbye

    def ended_as(self, **fields: Any) -> bool:
        """Return whether the run ended with this goodbye, at any time."""
        goodbye = self.ended()
        return goodbye == wire.Goodbye(**fields, time=goodbye.time)


@pytest.fixture
def daemon(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A fake daemon that `attach` finds."""
    made = FakeDaemon(private_places / "d.sock")
    monkeypatch.setenv("SENTINEL_ADDRESS", made.address)
    yield made
    made.close()


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "governed: decides how often to sample from the first steps on, as users do")
    config.addinivalue_line("markers", "faults: swallows internal faults, which is what it tests")


@pytest.fixture(autouse=True)
def known_schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample the first 50 steps as `FIRST` says, so that a busy machine's timings do not decide a test."""
    if request.node.get_closest_marker("governed") is None:
        monkeypatch.setattr(governor, "DECISIONS", (50,))
        monkeypatch.setattr(governor, "MEASURED", 0)
        monkeypatch.setattr(opening, "SHARE", 0.0)


@pytest.fixture(autouse=True)
def swallowed(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Internal faults that did not reach the loop; they fail a test that is not marked `faults`."""
    faults._logged.clear()
    kept = _Kept()
    logger = logging.getLogger("sentinel.hooks")
    logger.addHandler(kept)
    yield kept.texts
    for session in [*list_sessions()]:
        session.end(wire.Goodbye(reason="detach"), 0.0)
    list_sessions().clear()
    for thread in threading.enumerate():
        if isinstance(thread, Sender):  # the next test's daemon must not get messages of this test's runs
            thread.stop(wire.Goodbye(reason="detach"), 0.0)
            thread.join(WAIT)
    logger.removeHandler(kept)
    if request.node.get_closest_marker("faults") is None:
        assert not kept.texts


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample all tiers at every step."""
    monkeypatch.setattr(Governor, "due", lambda self, tier, seq, first=True: True)
    monkeypatch.setattr(Governor, "take_rare_turn", lambda self, seq, first=True: True)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine every fourth step in full, whatever it costs, and end the learning of a model early."""
    monkeypatch.setattr(governor, "FIRST", {0: 4, 1: 8, 2: 8, 3: 256})
    monkeypatch.setattr(governor, "FULL_STEPS", 4)
    monkeypatch.setattr(governor, "SLOW_SECONDS", 60.0)  # on a busy machine any step may take 50 ms
    monkeypatch.setattr(probe, "EARLY", 4)
    monkeypatch.setattr(Governor, "_decide", lambda self: None)
    monkeypatch.setattr(forward_passes, "FIRST_CALLS", 6)
    monkeypatch.setattr(loss_outliers, "NONFINITE_STEPS", 4)
    monkeypatch.setattr(forward_passes, "LOOKS", 2)
