"""How a rank died, as far as the kernel knows."""

from __future__ import annotations

import pytest

from sentinel import wire
from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.runs import Ending, Rank
from sentinel.runs.steps import RunStep


def rank(number: int, ending: Ending | None = None, reported: int = 7) -> Rank:
    identity = wire.Identity(run="r", run_id="r-1", rank=number, world_size=4, pid=100 + number, session="s")
    made = Rank(wire.Hello(version="1", identity=identity, facts={"memory_limit_bytes": 1000}), 0.0)
    made.last_seq, made.state, made.ending = reported, "lost", ending
    return made


def diagnosis(*dead: Rank, rss: float = 100.0) -> Finding:
    last = RunStep(7, 0.0, {each.identity.rank: {"rss_bytes": rss} for each in dead}, {})
    live = {each.identity.rank: each for each in dead}
    evidence = Evidence(alert="RankLost", since=7, until=7, last=last, steps=[last], ranks=tuple(live), live=live)
    return diagnose(evidence, "what the rule says")


@pytest.mark.parametrize(
    ("status", "oom", "rss", "cause", "confidence"),
    [
        (-9, False, 100, "rank 1 was ended by SIGKILL", "high"),
        (-9, True, 100, "rank 1 was killed by the kernel for want of memory (its cgroup counts an oom_kill)", "high"),
        (-9, False, 950, "rank 1 died, at the limit of memory, by SIGKILL", "medium"),
        (-11, True, 100, "rank 1 was ended by SIGSEGV", "high"),  # the oom_kill was of another process
        (-40, False, 100, "rank 1 was ended by signal 40", "high"),
        (3, False, 100, "rank 1 ended itself with exit status 3, and no goodbye", "high"),
        (None, False, 950, "rank 1 died, at the limit of memory", "medium"),
        (None, False, 100, "rank 1 died; of what is not known", "low"),
    ],
)
def test_how_a_rank_died(status: int | None, oom: bool, rss: float, cause: str, confidence: str) -> None:
    found = diagnosis(rank(1, Ending(5.0, status, oom)), rss=rss)
    assert (found.cause, found.confidence) == (cause, confidence)
    assert bool(found.missing) == (status is None)


def test_the_first_rank_to_die_is_the_cause() -> None:
    found = diagnosis(rank(0, Ending(6.0, -15, oom=False)), rank(2, Ending(5.0, 1, oom=False), reported=9))
    assert found.cause == "rank 2 ended itself with exit status 1, and no goodbye"
    assert "rank 0 ended after it" in found.evidence


def test_the_last_step_that_the_dead_rank_and_others_reported() -> None:
    """A rank sends its steps in batches, so other ranks may have reported later steps, which the evidence also says."""
    killed, ended = rank(1, Ending(5.0, -9, oom=False), reported=3), rank(0, Ending(6.0, -15, oom=False), reported=7)
    assert diagnosis(killed, ended).evidence[0].endswith("reported step 3 last (other ranks step 7)")
    assert diagnosis(killed).evidence[0].endswith("reported step 3 last")
