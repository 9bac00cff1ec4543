"""The daemon's answer to a goodbye: a summary of the run, for ranks that understand it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.daemon.run.summary import summarize_run
from sentinel.store import Store
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_problems import Watched, watched


def summed_up(folder: Path, held: Callable[[int], float], **more: float) -> str:
    """Return the summary of a run of 120 steps that held so many bytes at each step, with 20 GB left."""

    async def scenario(run: Watched) -> None:
        steps = range(120)
        columns = {"memory_held_bytes": [held(step) for step in steps], "memory_left_bytes": [2e10] * 120}
        await run.steps(loss=[1.0] * 120, **columns, **{name: [value] * 120 for name, value in more.items()})

    summary = summarize_run(watched(folder, scenario, stock=True).watch)
    assert summary is not None
    return summary.text


def test_memory_that_rose_for_too_short_a_time_to_judge_is_mentioned(tmp_path: Path) -> None:
    said = summed_up(tmp_path, lambda step: 1e9 + 1e7 * step)
    assert said.startswith("no incidents; memory rose by ")
    assert said.endswith(" MB, and the run was too short to judge it")


@pytest.mark.parametrize(
    "held",
    [
        lambda step: 1e9 + 1e6 * step,
        lambda step: 1e9 + 1e9 * (step > 10),
        lambda step: 1e9 + 1e9 * (step % 30) / 30,
        lambda step: 1e9 + min(1e7 * step, 5e8),
    ],
    ids=["little", "once", "sawtooth", "a cache that is full"],
)
def test_memory_of_healthy_runs_is_not_mentioned(tmp_path: Path, held: Callable[[int], float]) -> None:
    assert summed_up(tmp_path, held) == "no incidents"


def test_memory_of_a_replay_buffer_that_fills_is_not_mentioned(tmp_path: Path) -> None:
    assert summed_up(tmp_path, lambda step: 1e9 + 1e7 * step, reinforcement_learning=1.0) == "no incidents"


def test_a_leak_with_an_alert_is_not_reported_twice(tmp_path: Path) -> None:
    assert summed_up(tmp_path, lambda step: 1e9 + 1e8 * step).startswith("1 warning (MemoryCreep at step ")


@pytest.mark.parametrize(
    ("trouble", "dropped", "said"),
    [
        ("no room", {}, "no incidents; its history is incomplete: it cannot be written at the moment"),
        ("", {"steps": 40}, "no incidents; its history lacks up to 40 steps"),
        ("", {"layers": 40}, "no incidents"),
    ],
)
def test_the_summary_says_what_the_history_lacks(
    trouble: str, dropped: dict[str, int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "trouble", trouble)
    monkeypatch.setattr(Store, "dropped", dropped)
    assert summed_up(tmp_path, lambda _: 1e9) == said


@pytest.mark.processes
@pytest.mark.parametrize("takes_closing", [True, False])
def test_only_a_rank_that_understands_it_gets_the_summary_of_the_run(takes_closing: bool) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        now = time.time()
        rank.say(wire.Hello(version="test", identity=rank.identity, takes_closing=takes_closing, began=now - 90))
        rank.expect(wire.Welcome)
        rank.steps(0, [2.0, 1.0, 0.5])
        rank.say(wire.Goodbye(next_seq=3, time=now - 30))
        while rank.expect(wire.Kept).frames != 3:
            pass
        closings = [message for message in rank.arrived if isinstance(message, wire.Closing)]
        assert [closing.summary and closing.summary.seconds for closing in closings] == [
            pytest.approx(60)
        ] * takes_closing
        summaries = [msgspec.structs.replace(closing.summary, seconds=0.0) for closing in closings if closing.summary]
        assert summaries == [wire.RunSummary(steps=3, step=2)] * takes_closing


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reason", "said"), [("exception", "no incidents; no word yet of how rank 1 ended"), ("exit", "no incidents")]
)
def test_a_summary_says_that_the_end_of_a_rank_is_not_known_yet(reason: str, said: str) -> None:
    with daemon_process() as (path, _), SimulatedRank(path, 0, 2) as rank, SimulatedRank(path, 1, 2) as killed:
        rank.say(wire.Hello(version="test", identity=rank.identity, takes_closing=True))
        rank.expect(wire.Welcome)
        killed.hello()
        for one in (rank, killed):
            one.steps(0, [2.0, 1.0, 0.5])
        rank.ask("status")
        killed.close()
        rank.say(wire.Goodbye(next_seq=3, reason=reason))
        summary = rank.expect(wire.Closing).summary
        assert summary is not None
        assert summary.text == said


@pytest.mark.processes
def test_the_summary_of_a_node_of_a_job_claims_nothing_about_the_others() -> None:
    """The alert of a rank that died on another node may be on its way here, or be over."""
    with daemon_process() as (path, _), SimulatedRank(path, 0, 2, on_a_node=1) as rank:
        identity = msgspec.structs.replace(rank.identity, local_world_size=1)
        rank.say(wire.Hello(version="test", identity=identity, takes_closing=True))
        rank.expect(wire.Welcome)
        rank.steps(0, [2.0, 1.0, 0.5])
        rank.say(wire.Goodbye(next_seq=3, reason="exception"))
        summary = rank.expect(wire.Closing).summary
        assert summary is not None
        assert summary.text == "no incidents on this node"
