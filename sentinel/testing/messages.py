"""Invented alerts in the form that receivers get."""

from __future__ import annotations

import asyncio
from typing import Any

from sentinel.diagnose.case import Case, CaseMember
from sentinel.diagnose.evidence import Finding
from sentinel.notify import Delivery, Message, Receiver


def make_case(
    identity: str = "0.1",
    state: str = "firing",
    *,
    ranks: int = 0,
    severity: str = "critical",
    alert: str = "LossSpike",
) -> Case:
    """Return an incident that fired at step 457, of the whole run or of ranks 0 to `ranks` - 1. `state`: "firing",
    "resolved" or "rolled_back"."""
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
        summary="loss 6.861 by step 457, median of up to 100 steps before: 2.093",
        runbook="loss-spike",
        diagnosis=Finding(cause="the batch of step 456", confidence="medium", evidence=(), remedy="look at it"),
        told=True,
    )


def make_message(*cases: Case, **more: Any) -> Message:
    """Return a message about these incidents, or about `make_case()`. `more`: other attributes of `Message`, such as
    `origin` and `repeated`."""
    cases = cases or (make_case(),)
    return Message(run=cases[0].run, run_id=cases[0].run_id, alert=cases[0].alert, cases=cases, **more)


def deliver(receiver: Receiver, *messages: Message) -> list[Delivery]:
    """Deliver the messages, one after the other, and close the receiver. There are none of the pipeline's retries,
    grouping and time-outs: an exception of the receiver is raised."""

    async def hand_over() -> list[Delivery]:
        try:
            return [await receiver.deliver(message) for message in messages]
        finally:
            await receiver.close()

    return asyncio.run(hand_over())
