"""`on_alert`: each alert once, on one thread, and no other work waits for the user's function."""

from __future__ import annotations

import threading

import pytest

import sentinel
from sentinel import wire
from sentinel.hooks.core.threads import QUEUE_ALERTS, Alert, UserCallbacks
from tests.hooks.conftest import WAIT, FakeDaemon
from tests.hooks.loops import model
from tests.hooks.test_attach import adamw

pytestmark = pytest.mark.faults


def test_nothing_waits_for_a_slow_function_and_its_queue_is_bounded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alerts, entered, release = UserCallbacks(), threading.Event(), threading.Event()
    got: list[int] = []

    def slow(alert: Alert) -> None:
        entered.set()
        assert release.wait(WAIT)
        got.append(alert["number"])
        if alert["number"] == QUEUE_ALERTS:
            done.set()

    done = threading.Event()
    alerts.add(slow)
    alerts.put({"number": 0})
    assert entered.wait(WAIT)
    before = threading.active_count()
    for number in range(1, 1000):
        alerts.put({"number": number})
    assert threading.active_count() <= before, "no thread an alert; one of another test may end meanwhile"
    assert alerts.dropped == 999 - QUEUE_ALERTS
    assert capsys.readouterr().err.count("slower than the alerts come") == 1
    release.set()
    assert done.wait(WAIT)
    assert got == list(range(QUEUE_ALERTS + 1))


def test_what_a_function_raises_is_logged_and_the_next_one_is_called(swallowed: list[str]) -> None:
    alerts, got = UserCallbacks(), threading.Event()

    def broken(alert: Alert) -> None:
        raise ValueError("the user's own")

    alerts.add(broken)
    alerts.add(lambda alert: got.set())
    alerts.put({"event": "fired"})
    assert got.wait(WAIT)
    assert "the user's own" in swallowed[0]


def test_each_event_reaches_the_user_once_and_plain_lines_do_not(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    net, alerts = model(), list[Alert]()
    done = threading.Event()

    def note(alert: Alert) -> None:
        alerts.append(alert)
        if alert["event"] == "resolved":
            done.set()

    optimizer = adamw(net)  # held weakly by the session
    with sentinel.attach(net, optimizer) as monitor:
        monitor.on_alert(note)
        daemon.wait(lambda: daemon.of(wire.Hello))
        daemon.send(wire.Notice(text="[sentinel] the disk is full"))
        for event, text in [("fired", "a block"), ("fired", "a block"), ("updated", ""), ("resolved", "over")]:
            daemon.send(wire.Notice(id=f"r/0.1/{event}", text=text, alert={"event": event, "id": "0.1"}))
        assert done.wait(WAIT)
    assert [alert["event"] for alert in alerts] == ["fired", "updated", "resolved"]
    printed = capsys.readouterr().err
    assert printed.count("a block") == 1
    assert "\n\n" not in printed
