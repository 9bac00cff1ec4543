"""What the daemon answers to a goodbye: what the run came to, where that is understood."""

from __future__ import annotations

import time

import msgspec
import pytest

from sentinel import wire
from tests.daemon.simulated import SimulatedRank, daemon_process

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("takes_closing", [True, False])
def test_only_who_understands_it_is_told_what_the_run_came_to(takes_closing: bool) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        now = time.time()
        rank.say(wire.Hello(version="test", identity=rank.identity, takes_closing=takes_closing, began=now - 90))
        rank.expect(wire.Welcome)
        rank.steps(0, [2.0, 1.0, 0.5])
        rank.say(wire.Goodbye(next_seq=3, time=now - 30))
        while rank.expect(wire.Kept).frames != 3:
            pass
        closings = [message for message in rank._arrived if isinstance(message, wire.Closing)]
        assert [closing.summary and closing.summary.seconds for closing in closings] == [
            pytest.approx(60)
        ] * takes_closing
        summaries = [msgspec.structs.replace(closing.summary, seconds=0.0) for closing in closings if closing.summary]
        assert summaries == [wire.RunSummary(steps=3, step=2)] * takes_closing
