"""Helpers to test probes and receivers of other packages: a daemon that records, and messages as alerts cause them.

    with FakeDaemon() as daemon:
        with sentinel.attach(model, optimizer, address=daemon.address):
            train(steps=2)                      # every tier is sampled at the first two steps
        daemon.wait_for_goodbye()
        assert daemon.series("my_signal") == {0: ..., 1: ...}

    (delivery,) = deliver(MyReceiver(settings), make_message(make_case()))
    assert delivery.fault is None

They need no test framework. A failure raises AssertionError.
"""

from __future__ import annotations

from sentinel.testing.fake_daemon import FakeDaemon
from sentinel.testing.messages import deliver, make_case, make_message

__all__ = ["FakeDaemon", "deliver", "make_case", "make_message"]
