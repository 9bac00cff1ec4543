"""A run that ends soon after its alert: its ranks' evidence is still collected, without delaying them for long."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.actions.evidence import LAST_WORDS_SECONDS
from sentinel.node import paths
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_notifications import write
from tests.faults.training import trained
from tests.notify.consumer import consumer

pytestmark = pytest.mark.processes
SPIKING = [2.0 + 0.01 * (seq % 7) for seq in range(150)] + [900.0, 900.0, 900.0]


def test_evidence_that_is_due_at_the_goodbye_is_waited_for(private_places: Path) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, SPIKING)
        rank.say(wire.Goodbye(next_seq=len(SPIKING)))  # before it was asked
        asked: Any = rank.expect(wire.Ask)
        assert asked.what == "moments"
        found = {"seq": len(SPIKING) - 1, "layers": [{"layer": "head", "gradient": 1.0, "second": 40.0}], "usual": 1.0}
        rank.say(wire.Collected(what="moments", seq=len(SPIKING) - 1, content=found))
        rank.expect(wire.Kept)
    (case,) = cases()
    assert case["moments"]["0"]["layers"][0]["layer"] == "head"
    assert any("second moments out of line" in fact for fact in case["diagnosis"]["evidence"])


def test_people_are_told_the_cause_that_came_with_the_goodbye(
    tmp_path: Path, private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause comes within the time in which changes are grouped, which the end of the run cuts short."""
    with consumer() as ops:
        monkeypatch.setenv("OPS", ops.url)
        with daemon_process("--config", write(tmp_path, "60s")) as (path, process), SimulatedRank(path) as rank:
            rank.hello()
            rank.steps(0, [1.0, math.nan])
            rank.expect(wire.Notice)
            found = {"seq": 1, "origin": "operation", "phase": "forward", "module": "head", "operation": "aten.log"}
            last = wire.Collected(what="provenance", seq=1, content=found), wire.Goodbye(next_seq=2)
            rank.send_raw(b"".join(map(wire.frame, last)))
            rank.expect(wire.Kept)
            (told,) = ops.next()["alerts"]
            assert "aten.log" in told["annotations"]["description"]
            assert ended(process) == 0


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_not_held_back_for_long(private_places: Path) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, SPIKING)
        rank.say(wire.Goodbye(next_seq=len(SPIKING)))
        began = time.monotonic()
        rank.expect(wire.Kept)
        assert time.monotonic() - began > LAST_WORDS_SECONDS / 2
    (case,) = cases()
    assert case["moments"] == {}


@pytest.mark.slow
def test_a_real_run_that_dies_at_once_has_its_evidence(private_places: Path) -> None:
    found, _ = trained("dying.py", status=1)
    (case,) = [case for case in found if case["alert"] == "LossSpike"]
    assert case["moments"]["0"]["seq"] >= case["first_seq"]
    assert {one["layer"] for one in case["moments"]["0"]["layers"]} >= {"0.weight", "2.weight"}


def cases() -> list[dict[str, Any]]:
    (kept,) = paths.histories()
    with History(kept) as history:
        return history.incidents()
