"""Marks on their way into a tracker: which, when, how many; neither the loop nor its end waits for a tracker.

What real trackers keep is tested in `tests/integrations/test_trackers.py`. Here Trackio is replaced.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.config.trackers import TrackerSettings
from sentinel.hooks.trackers import IncidentMark, tracker_threads
from sentinel.hooks.trackers.tensorboard import TensorBoardFolder
from sentinel.hooks.trackers.tracker_threads import KINDS, WAITING_MARKS
from tests.hooks.conftest import WAIT, FakeDaemon
from tests.hooks.loops import Loop, model

ALERT = {
    "event": "fired", "alert": "LossSpike", "severity": "warning", "summary": "loss \x1b[31m8.9", "step": 7,
    "first_step": 5, "resolved_step": None,
}  # fmt: skip


class Level(Enum):
    INFO, WARN, ERROR = range(3)


class FakeRun:
    """A run of Trackio."""

    def __init__(self) -> None:
        self.alerts: list[tuple[str, str, str, int]] = []
        self.times: list[float] = []
        self.fault: Exception | None = None
        self.entered, self.release = threading.Event(), threading.Event()
        self.release.set()

    def alert(self, *, title: str, text: str, level: Level, step: int) -> None:
        self.times.append(time.monotonic())
        self.entered.set()
        self.release.wait(WAIT)
        if self.fault is not None:
            raise self.fault
        self.alerts.append((title, text, level.name, step))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRun]:
    made = FakeRun()
    current = contextvars.ContextVar[FakeRun | None]("current_run", default=None)
    token = current.set(made)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(AlertLevel=Level))
    monkeypatch.setitem(sys.modules, "trackio.context_vars", SimpleNamespace(current_run=current))
    yield made
    made.release.set()
    current.reset(token)


def switch_on(daemon: FakeDaemon, *names: str) -> None:
    daemon.answer = lambda _: wire.frame(wire.Welcome(version=sentinel.__version__, trackers=names))


def watched(daemon: FakeDaemon, alerts: list[dict[str, Any]], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Train, and receive these alerts in the middle."""
    net = model()
    loop = Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    got = threading.Semaphore(0)
    with sentinel.attach(net, loop.optimizer, run="gpt") as monitor:
        monitor.on_alert(lambda alert: got.release())
        loop.run(3)
        daemon.wait(lambda: daemon.of(wire.Batch))
        loop.run(1)
        for number, alert in enumerate(alerts):
            daemon.send(wire.Notice(id=str(number), text="", alert=alert))
            assert got.acquire(timeout=WAIT)
        meanwhile()
        loop.run(2)


def test_incidents_are_marked_once_at_their_beginning_and_end_and_summed_up(daemon: FakeDaemon, run: FakeRun) -> None:
    switch_on(daemon, "trackio")
    ended = {**ALERT, "event": "rolled_back", "resolved_step": 9}
    again = wire.Notice(id="0", text="", alert=ALERT)  # by a daemon that was restarted
    watched(daemon, [ALERT, {**ALERT, "event": "updated"}, ended], lambda: daemon.send(again))
    assert run.alerts[:2] == [
        ("sentinel/LossSpike", "warning LossSpike at step 7: loss [31m8.9", "WARN", 7),
        ("sentinel/LossSpike", "LossSpike (since step 5) rolled back at step 9", "INFO", 9),
    ]
    (summary,) = run.alerts[2:]
    assert summary[0] == "sentinel/summary"
    assert summary[1].startswith("run 'gpt' ended after 6 steps")
    assert summary[2:] == ("INFO", 5)


def test_without_a_setting_nothing_is_written_and_no_thread_is_there(daemon: FakeDaemon, run: FakeRun) -> None:
    threads: list[str] = []
    watched(daemon, [ALERT], lambda: threads.extend(thread.name for thread in threading.enumerate()))
    assert run.alerts == []
    assert not [name for name in threads if name in {f"sentinel-{kind}" for kind in KINDS}]


def test_a_tracker_of_another_version_is_passed_over(daemon: FakeDaemon, run: FakeRun) -> None:
    switch_on(daemon, "of-tomorrow", "trackio")
    watched(daemon, [ALERT])
    assert len(run.alerts) == 2


def test_only_one_write_a_second(daemon: FakeDaemon, run: FakeRun) -> None:
    """The second mark waits although the first one is written."""
    switch_on(daemon, "trackio")
    watched(daemon, [ALERT, {**ALERT, "alert": "GradientSpike"}], lambda: run.entered.wait(WAIT))
    first, *_, last = run.times
    assert last - first >= tracker_threads.WRITE_SECONDS


def test_a_tracker_that_hangs_is_not_waited_for(
    daemon: FakeDaemon, run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The marks that wait are bounded; dropped ones are counted and reported, once at first and once at the end."""
    monkeypatch.setattr(tracker_threads, "END_SECONDS", 0.1)
    switch_on(daemon, "trackio")
    run.release.clear()
    watched(daemon, [dict(ALERT) for _ in range(WAITING_MARKS + 5)], lambda: run.entered.wait(WAIT))
    said = capsys.readouterr().err
    assert said.count("trackio: marks of incidents are dropped: more than 256 wait") == 1
    assert "sentinel-trackio: not everything was written within 0.1 s" in said
    writer = next(thread for thread in threading.enumerate() if thread.name == "sentinel-trackio")
    run.release.set()
    writer.join(WAIT)
    assert "5 marks of incidents not written into trackio" in capsys.readouterr().err
    assert len(run.alerts) == WAITING_MARKS + 1


def test_what_a_tracker_raises_is_counted_and_its_text_is_not_shown(
    daemon: FakeDaemon, run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    switch_on(daemon, "trackio")
    run.fault = ConnectionError("https://me:secret@host/")
    watched(daemon, [ALERT])
    said = capsys.readouterr().err
    assert "1 mark of incidents not written into trackio: it raised ConnectionError" in said
    assert "secret" not in said


def test_marks_without_an_open_tracker_run_are_reported_as_not_written(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """All trackers are reported, as none is imported."""
    switch_on(daemon, *KINDS)
    watched(daemon, [ALERT])
    said = capsys.readouterr().err
    for name in KINDS:
        assert f"1 mark of incidents not written into {name}: no run is open there" in said


def test_under_a_supervisor_the_first_rank_asks_for_the_summary_of_its_run(
    daemon: FakeDaemon, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor prints the line at the end; the trackers' summary comes from the rank."""
    monkeypatch.setenv("SENTINEL_SUPERVISOR", "mark")
    switch_on(daemon, "trackio")
    watched(daemon, [ALERT], lambda: daemon.wait(lambda: len(daemon.of(wire.Hello)) == 2))
    assert [hello.takes_closing for hello in daemon.of(wire.Hello)] == [False, True]


def test_settings_and_hooks_know_the_same_trackers() -> None:
    assert TrackerSettings.__struct_fields__ == tuple(KINDS)


class FakeWriter:
    """TensorBoard's `SummaryWriter`."""

    made: list[FakeWriter] = []

    def __init__(self, log_dir: str) -> None:
        self.log_dir, self.scalars = log_dir, list[tuple[Any, ...]]()
        self.made.append(self)

    def add_scalar(self, *scalar: Any) -> None:
        self.scalars.append(scalar)

    def add_text(self, *text: Any) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_the_scripts_writer_is_found_by_what_it_writes_and_its_class_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeWriter, "made", [])
    module = SimpleNamespace(SummaryWriter=FakeWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    original, theirs, tracker = FakeWriter.add_scalar, FakeWriter("runs/a"), TensorBoardFolder()
    tracker.look()
    assert not tracker.open
    theirs.add_scalar("loss", 1.0, 0)
    assert theirs.scalars == [("loss", 1.0, 0)]
    assert FakeWriter.add_scalar is original
    tracker.look()
    assert FakeWriter.add_scalar is original
    assert tracker.write([IncidentMark("LossSpike", 2, 7, "")], None) == 1
    _, ours = FakeWriter.made
    assert (ours.log_dir, ours.scalars) == ("runs/a/sentinel", [("sentinel/LossSpike", 2, 7)])


def test_a_class_of_writers_that_writes_nothing_is_put_back_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    module, original, tracker = SimpleNamespace(SummaryWriter=FakeWriter), FakeWriter.add_scalar, TensorBoardFolder()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    tracker.look()
    assert FakeWriter.add_scalar is not original
    tracker.close()
    assert FakeWriter.add_scalar is original
