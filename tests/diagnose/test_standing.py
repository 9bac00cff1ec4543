"""Ranks that stand still, with evidence that comes late or disappears: a case does not depend on the moment."""

from __future__ import annotations

import math

import msgspec
import pytest

from sentinel import wire
from sentinel.diagnose import case as cases
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Evidence
from sentinel.diagnose.explainers.hang import hang
from sentinel.engine import RUN, Entity, Incident
from sentinel.engine.judging.incident import Member
from sentinel.runs import Attempt, Run
from sentinel.runs.steps import RunStep
from sentinel.wire.flight_recorder import Flight, flight_of
from sentinel.wire.heartbeat_page import Kind, Stall
from tests.diagnose.made import layered
from tests.diagnose.test_collectives import entry

IN_A_COLLECTIVE = """\
Current thread 0x0000000000000001 (most recent call first):
  File "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", line 2900 in all_reduce
  File "/home/me/train.py", line 12 in main
"""
IN_USER_CODE = """\
Current thread 0x0000000000000001 (most recent call first):
  File "/usr/lib/python3.11/ssl.py", line 1134 in read
  File "/home/me/data.py", line 7 in load
  File "/home/me/train.py", line 9 in main
"""


def recorded(*entries: dict[str, object], batches: int, exhausted: bool = False) -> Flight:
    flight = flight_of({"entries": list(entries)}, {"0": [0, 1]})
    return Flight(flight.groups, flight.collectives, batches, exhausted)


WAITS = recorded(entry(1), entry(2, done=False), batches=2)
ENDED = recorded(entry(1), batches=1, exhausted=True)


class Standstill:
    """Rank 0 waits in a collective, rank 1 is in its own code; the alert has fired."""

    def __init__(self, *flights: Flight | None) -> None:
        self.run = Run("r", "r-1", 0.0)
        for number in (0, 1):
            identity = wire.Identity(
                run="r", run_id="r-1", attempt=0, rank=number, world_size=2, local_rank=number, pid=1, hostname="h",
                session="s",
            )  # fmt: skip
            self.run.hello(wire.Hello(version="1", identity=identity), 0.0)
        self.attempt: Attempt = self.run.attempt
        dumps = (IN_A_COLLECTIVE, IN_USER_CODE)
        for rank, dump, flight in zip(self.attempt.ranks.values(), dumps, flights, strict=True):
            rank.stall, rank.dump, rank.flight = Stall(70.0, 60.0, Kind.BLOCKED, 70.0), dump, flight
        members = {Entity("rank", str(number)): Member(5, 5, {"stalled_seconds": 70.0}) for number in (0, 1)}
        self.incident = Incident(
            id=1, run="r", rule="Hang", severity="critical", state="firing", first_seq=5, seq=5, time=0.0,
            members=members, summary="", annotations={}, actions=("stacks",), runbook="",
        )  # fmt: skip
        self.case: Case = cases.open_case(self.run, self.attempt, self.incident)

    def again(self) -> tuple[str, str]:
        cases.add_evidence(self.case, self.incident, self.attempt)
        return self.case.diagnosis.cause, self.case.diagnosis.confidence


def test_what_one_rank_waits_for_is_not_certain_before_the_others_have_spoken() -> None:
    standstill = Standstill(None, None)
    found = standstill.case.diagnosis
    assert (found.cause, found.confidence) == (
        "rank 0 waits in a collective for other ranks, at /home/me/train.py:12 in main", "medium"
    )  # fmt: skip
    assert found.missing == ("what ranks 0, 1 did in collectives: no answer yet",)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_cause_is_certain_once_all_ranks_have_answered_in_any_order(order: tuple[int, int]) -> None:
    standstill = Standstill(None, None)
    for number in order:
        standstill.attempt.ranks[number].flight = (WAITS, ENDED)[number]
        standstill.again()
    cause, confidence = standstill.again()
    ended = "rank 1 came to the end of its loader, after 1 batches (rank 0 had more)"
    assert f"{ended}; it is at /home/me/data.py:7 in load" in cause
    assert confidence == "high"


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_goes_on_before_the_others_changes_nothing_in_the_case(first: int) -> None:
    standstill = Standstill(WAITS, ENDED)
    told = standstill.again()
    gone_on = standstill.attempt.ranks[first]
    gone_on.stall, gone_on.dump, gone_on.flight = Stall(), "", None
    assert standstill.again() == told
    standstill.attempt.ranks[1 - first].flight = recorded(entry(1), entry(2), entry(3), batches=3)
    assert standstill.again() == told


def test_evidence_that_comes_later_is_judged_with_the_loss_of_the_step_of_the_alert() -> None:
    run = Run("r", "r-1", 0.0)
    run.hello(wire.Hello(version="1", identity=wire.Identity(run="r", run_id="r-1", session="s")), 0.0)
    incident = Incident(
        id=1, run="r", rule="NonFiniteGradient", severity="critical", state="firing", first_seq=40, seq=40, time=0.0,
        members={RUN: Member(40, 40, {"grad_norm": math.inf})}, summary="", annotations={}, actions=(), runbook="",
    )  # fmt: skip

    def add_step(seq: int, loss: float) -> None:
        values = {"loss": loss, "grad_norm": math.inf}
        run.attempt.recent.append(RunStep(seq, 0.0, {0: values}, values))

    add_step(40, 2.0)
    case = cases.open_case(run, run.attempt, incident)
    add_step(41, math.nan)
    cases.add_evidence(case, incident, run.attempt)
    assert case.diagnosis.cause.startswith("the backward pass of step 40 made it: the loss of that step is finite (2)")


def test_layers_that_are_shown_are_not_said_to_be_missing_later() -> None:
    """Samples of layers are forgotten while the incident is open."""
    run = Run("r", "r-1", 0.0)
    run.hello(wire.Hello(version="1", identity=wire.Identity(run="r", run_id="r-1", session="s")), 0.0)
    incident = Incident(
        id=1, run="r", rule="LossSpike", severity="critical", state="firing", first_seq=40, seq=40, time=0.0,
        members={RUN: Member(40, 40, {})}, summary="", annotations={}, actions=(), runbook="", layers=True,
    )  # fmt: skip
    for seq in range(41):
        values = {"loss": 90.0 if seq == 40 else 1.0, "grad_norm": 90.0 if seq == 40 else 1.0}
        run.attempt.recent.append(RunStep(seq, 0.0, {0: values}, values))
    run.attempt.recent_layers.extend(
        layered(range(41), lambda seq: {"w": {"layer_grad_norm": 90.0 if seq == 40 else 1.0, "layer_nonfinite": 0.0}})
    )
    case = cases.open_case(run, run.attempt, incident)
    assert [layer.name for layer in case.layers] == ["w"]
    run.attempt.recent_layers.clear()
    cases.add_evidence(case, incident, run.attempt)
    assert not any("layer statistics" in missing for missing in case.diagnosis.missing)
    assert any("1 layer with larger gradients than before, most of all w" in fact for fact in case.diagnosis.evidence)


@pytest.mark.parametrize(
    ("local_world_size", "where"),
    [
        (2, "on another node, which was not asked"),
        (4, "not watched, or on another node"),
        (0, "not watched, or on another node"),
    ],
)
def test_ranks_that_are_not_seen_here_are_not_said_to_have_never_come(local_world_size: int, where: str) -> None:
    """The daemon sees ranks 0 and 1 of four, and a launcher may not say how many ranks are on a node."""
    waits = recorded(entry(1), entry(2, done=False), batches=2)
    groups = {name: msgspec.structs.replace(group, ranks=(0, 1, 2, 3)) for name, group in waits.groups.items()}
    run = Run("r", "r-1", 0.0)
    for number in (0, 1):
        identity = wire.Identity(
            run="r", run_id="r-1", rank=number, world_size=4, local_rank=number, local_world_size=local_world_size,
            pid=1, session="s",
        )  # fmt: skip
        run.hello(wire.Hello(version="1", identity=identity), 0.0)
        run.attempt.ranks[number].flight = msgspec.structs.replace(waits, groups=groups)
    found = hang(
        Evidence(alert="Hang", since=1, until=1, last=RunStep(-1, 0.0, {}, {}), ranks=(0, 1), live=run.attempt.ranks)
    )
    assert found.cause == f"ranks 0, 1 wait in all_reduce of 5, number 2, for ranks 2, 3: rank 2 is {where}"
    assert found.confidence == "low"
    assert found.missing[0] == f"what ranks 2, 3 did: {where}"
    assert not [fact for fact in found.evidence if "never" in fact]
