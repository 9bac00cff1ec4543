"""What a supervisor makes of the reports of several daemons: each `attach` of a process is a run with its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.node import paths
from sentinel.supervise.words import Words
from tests.waiting import until

FIRST, SECOND = "gan-1", "gan-1-2"


class RunDaemon:
    """A daemon as the supervisor sees it: it serves where `attach` has put it, and reports on one run."""

    def __init__(self, run_id: str, words: Words) -> None:
        self._run_id, self._words = run_id, words
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(str(paths.private_directory(paths.run_directory(run_id)) / paths.SOCKET))
            server.listen()
            words.read()
            self.connection = server.accept()[0]

    def report(self, **facts: Any) -> wire.Standing | None:
        """Send a report; return what the supervisor knows of the job once it is there."""
        sent = wire.Standing(run="gan", run_id=self._run_id, **{"attempt": 0, **facts})
        self.connection.sendall(wire.frame(sent))
        until(lambda: self._words.read() and self._words.standings.get(self._run_id) == sent, "the report")
        return self._words.standing


@pytest.fixture
def words(private_places: Path) -> Iterator[Words]:
    made = Words("mark", FIRST, always=True, print_notice=print)
    yield made
    made.close()


@pytest.fixture
def daemons(words: Words) -> Iterator[tuple[RunDaemon, RunDaemon]]:
    made = RunDaemon(FIRST, words), RunDaemon(SECOND, words)
    yield made
    for daemon in made:
        daemon.connection.close()


@pytest.mark.parametrize(
    "trouble", [{"ends": True}, {"alert": "NonFiniteLoss"}, {"raised": "ValueError"}, {"stopped": "x"}]
)
def test_the_run_that_breaks_is_the_reason_whichever_reports_last(
    words: Words, daemons: tuple[RunDaemon, RunDaemon], trouble: dict[str, Any]
) -> None:
    for broken, other in (daemons, daemons[::-1]):
        words.forget(0)
        other.report(step=50)
        broken.report(step=40, **trouble)
        found = other.report(step=60)
        assert found is not None
        assert (found.step, found.over) == (40, False)
        found = broken.report(step=40, over=True, **trouble)
        assert found is not None
        assert not found.over, "the other one is not over"
        found = other.report(step=61, over=True)
        assert found is not None
        assert (found.step, found.over) == (40, True)


def test_a_run_that_was_over_before_another_went_on_is_no_reason(
    words: Words, daemons: tuple[RunDaemon, RunDaemon]
) -> None:
    """As the first fold of a cross-validation, whose loss was not finite, where the second one is killed."""
    first, second = daemons
    first.report(step=40, alert="NonFiniteLoss", over=True)
    second.report(step=5)
    found = second.report(step=9, over=True)
    assert found is not None
    assert (found.step, found.alert, found.over) == (9, "", True)
    assert [one.run_id for one in words.standings.values()] == [FIRST, SECOND], "both have a closing line"


def test_of_a_job_that_was_started_again_nothing_is_known_of_the_start_before(
    words: Words, daemons: tuple[RunDaemon, RunDaemon]
) -> None:
    first, second = daemons
    first.report(step=40, over=True)
    second.report(step=5)
    words.forget(1)
    assert words.standing is None
    found = first.report(attempt=1, step=3, over=True)
    assert found is not None
    assert found.step == 3
