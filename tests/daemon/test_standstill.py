"""A loop that stands still is reported early, by a line and as `stalled` in status and top; the alert comes later."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sentinel import wire
from sentinel.cli.top_frame import Traces, frame
from sentinel.daemon.ranks.stalls import StallDetector
from sentinel.runs import Attempt, NoRanks
from sentinel.wire.heartbeat_page import PAGE, Heartbeat, Place, pack_heartbeat
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import HEALTHY, sentinel
from tests.daemon.test_stalls import BEAT, hello
from tests.run_parts import FakeIncidents

STACKS = 'Thread 0x0000000000000001 (most recent call first):\n  File "/home/me/train.py", line 33 in load\n'


class Rank:
    """The only rank of a run, and the detector that watches it."""

    def __init__(self) -> None:
        attempt = Attempt(0, 0.0)
        self.rank = attempt.hello(hello(0, world=1), 0.0)
        self.stalls = StallDetector(attempt, NoRanks(), FakeIncidents())
        self._page = os.memfd_create(PAGE)
        self.stalls.add_rank(self.rank, [self._page])

    def look(self, seconds: int, **beat: Any) -> list[int]:
        """Let `seconds` seconds pass without progress, and return those at which the standstill is to be reported."""
        beat = {"progressed": 100.0} | beat
        said = []
        for second in range(seconds):
            now = beat["progressed"] + second
            os.pwrite(self._page, pack_heartbeat(BEAT._replace(beat=now, **beat)), 0)
            self.stalls.tick(now)
            if self.stalls.take_standstill() is not None:
                said.append(second)
        return said


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.stalls.close()


@pytest.mark.parametrize(("longest", "first"), [(0.1, 61), (7.0, 71)])
def test_each_standstill_is_reported_once(rank: Rank, longest: float, first: int) -> None:
    """A standstill is reported after a minute and ten times the longest gap."""
    assert rank.look(200, longest=longest) == [first]
    assert rank.rank.standing
    assert rank.look(2, longest=longest, progress=401, progressed=400.0) == []
    assert not rank.rank.standing
    assert rank.look(200, longest=longest, progress=402, progressed=500.0) == [first], "the next one"


def test_the_length_of_a_standstill_is_known_once_the_rank_goes_on(rank: Rank) -> None:
    rank.look(200)
    assert rank.stalls.take_past_standstill(299.0) is None, "it goes on"
    rank.look(2, progress=401, progressed=400.0)
    assert rank.stalls.take_past_standstill(401.0) == (0, pytest.approx(301.0, abs=1.5))
    assert rank.stalls.take_past_standstill(402.0) is None


@pytest.mark.parametrize(
    "beat", [{"paused": 1}, {"place": Place.LEFT}, {"place": Place.LONG}, {"place": Place.DEBUGGER}]
)
def test_a_pause_with_a_known_reason_is_no_standstill(rank: Rank, beat: dict[str, Any]) -> None:
    """Such pauses are a declared phase, the end of the loop, a checkpoint or a debugger."""
    assert rank.look(300, **beat) == []
    assert not rank.rank.standing


@pytest.mark.slow
@pytest.mark.processes
def test_the_line_and_the_status_name_the_place() -> None:
    page = os.memfd_create(PAGE)
    now = time.monotonic()
    stands = Heartbeat(**BEAT._asdict() | {"beat": now + 600.0, "progressed": now - 70.0})
    os.pwrite(page, pack_heartbeat(stands), 0)
    with daemon_process() as (path, _), SimulatedRank(path) as simulated:
        greeting = wire.Hello(version="test", identity=simulated.identity)
        socket.send_fds(simulated.connection, [wire.frame(greeting)], [page])
        simulated.expect(wire.Welcome)
        simulated.steps(0, HEALTHY[:10])
        while (asked := simulated.expect(wire.Ask)).what != "stacks":
            pass
        simulated.say(wire.Reply(id=asked.id, ok=True, content={"text": STACKS}))
        text = simulated.expect(wire.Notice).text
        assert text.startswith("[sentinel] the loop stands still after step 9, for "), text
        (run,) = json.loads(sentinel("status", "--json").stdout)
        (state,) = run["ranks"]
        assert (state["state"], state["stall"]["at"]) == ("stalled", "/home/me/train.py:33 in load")
        assert "rank 0    stalled for " in sentinel("status").stdout
        shown = "\n".join(line.text for line in frame([run], [], Traces(), 100, 40))
        assert "rank 0 is stalled at step 9, no progress for " in shown
        assert "at /home/me/train.py:33 in load" in shown
        assert json.loads(sentinel("incidents", "--json").stdout) == []
    os.close(page)
