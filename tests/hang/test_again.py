"""The faults between ranks, several times each: the same rank is named each time, and long work raises no alert.

`make proof PART=ranks` does each twenty times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hang.jobs import cause, job, list_incidents, wait_for_incident
from tests.hang.processes import SOON

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

TIMES = 3
TURNS = 6
"""How often the program still says `stalling` once the job has begun: at five more turns, and after the loop."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "alert", "words"),
    [
        ("uneven", "Hang", ["rank 1 came to the end of its loader, after 200 batches (rank 0 had more)"]),
        ("stuck", "Hang", ["in wait_for_the_file", "in wait_for_a_lock", "rank 1 holds the GIL at "]),
        ("drift", "ReplicaDivergence", ["ranks 0, 1 hold different parameters, after step"]),
    ],
)
def test_a_job_that_goes_on_and_fails_again(private_places: Path, kind: str, alert: str, words: list[str]) -> None:
    rules = SOON.replace("> 3", "> 30") if kind == "drift" else SOON
    with job(kind, private_places, rules, rounds=TIMES) as running:
        for number in range(TIMES):
            case = wait_for_incident(alert, words[number % len(words)], number=number)
            if alert == "Hang":  # rank 1 may stand long before rank 0, whose collectives say the rest
                case = wait_for_incident(alert, "rank 1 never came to all_reduce of", number=number)
                assert words[number % len(words)] in cause(case)
            else:
                assert case["diagnosis"]["evidence"][0].endswith(" 1 layer differs: 2.weight")
            running.go_on()
            if number + 1 < TIMES:
                running.stall()
        found = list_incidents()  # before its ranks are ended
    others = [case for case in found if case["alert"] not in (alert, "UnevenBatches")]
    assert not others, [case["alert"] + ": " + case["summary"] for case in others]


ENDS = (
    ("killed", "RankLost", "rank 1 was ended by SIGKILL"),
    ("exit", "RankLost", "rank 1 ended itself with exit status 3"),
    ("crash", "RankLost", "rank 1 was ended by SIGSEGV"),
    *(("mismatch", "CollectiveDesync", "rank 0 issued all_reduce of 321, rank 1 broadcast of 3"),) * 2,
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "alert", "words"), ENDS)
def test_a_job_that_ends_there(private_places: Path, kind: str, alert: str, words: str) -> None:
    with job(kind, private_places):
        wait_for_incident(alert, words)


def test_long_work_raises_no_alert(private_places: Path) -> None:
    """No alert comes of an evaluation, an export, a checkpoint, a compilation or a declared phase, nor after the loop.

    Five ranks do them in turn; a rank that does none of them waits for the others.
    """
    with job("turns", private_places, SOON.replace("> 3", "> 5"), world=5, seconds=7) as running:
        for _ in range(TURNS):
            running.stall()
        assert running.process.wait(60) == 0
    assert not list_incidents()
