"""A daemon that is killed again and again, and a run that does not notice: part of `make proof PART=history`."""

from __future__ import annotations

import pytest

from bench.proofs._kills import run_killed

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_run_does_not_notice_that_its_daemon_is_killed() -> None:
    assert run_killed(0, 3) >= 1


def test_a_kill_at_the_very_end_leaves_nothing_behind() -> None:
    assert run_killed(7, 1, last=True) == 1
