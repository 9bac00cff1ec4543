"""Cases for the tests of notify."""

from __future__ import annotations

from sentinel.diagnose.case import Case, CaseMember
from sentinel.diagnose.evidence import Finding
from sentinel.notify import Origin


def case(
    identity: str = "0.1",
    state: str = "firing",
    *,
    ranks: int = 0,
    severity: str = "critical",
    alert: str = "LossSpike",
) -> Case:
    """A case that fired at step 457."""
    return Case(
        id=identity,
        run="train",
        run_id="r1",
        attempt=0,
        alert=alert,
        severity=severity,
        state=state,
        first_step=456,
        first_seq=456,
        step=457,
        time=1_000_000.0,
        resolved_step=None if state == "firing" else 500,
        resolved_time=None if state == "firing" else 1_000_060.5,
        members=tuple(CaseMember("rank", str(rank), 456, {}) for rank in range(ranks))
        or (CaseMember("run", "", 456, {}),),
        summary="loss 6.861 by step 457, median of the last 100 steps 2.093",
        runbook="loss-spike",
        diagnosis=Finding(cause="the batch of step 456", confidence="medium", evidence=(), remedy="look at it"),
        told=True,
    )


ORIGIN = Origin(
    host="node-7",
    user="ada",
    page="https://page.example/r1",
    report="https://files.example/r1.html",
    runbook="https://wiki.example/runbook#{section}",
)
