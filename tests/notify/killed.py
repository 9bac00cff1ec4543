"""Delivers 200 alerts from children that can be killed: `python -m tests.notify.killed DATABASE URL`.

For each line of its input, `GENERATION STATE`, it forks a child and prints the child's pid, and then its exit code: a
fork has all modules loaded, which takes a new interpreter half a second. The child does what a daemon does that takes
over: it puts every case into the pipeline, in its present state.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from sentinel.config import settings
from sentinel.config.settings import Duration, Grouping
from sentinel.notify import Route
from sentinel.notify.limiter import Limiter
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers import pagerduty
from tests.notify.cases import case

ALERTS = 200
AT_ONCE = Grouping(wait=Duration(0), interval=Duration(0), repeat=Duration(3600))


def main() -> None:
    """Fork a child for each line, until the end of the input."""
    database, url = Path(sys.argv[1]), sys.argv[2]
    receiver = pagerduty.PagerDuty(
        settings.ReceiverSettings(name="oncall", type="pagerduty", token_env="PD_KEY", url_env="PD_URL")
    )
    receiver._poster._client = receiver._poster._make_client()  # saves each child 50 ms
    for line in sys.stdin:
        generation, state = line.split()
        child = os.fork()
        if child == 0:
            os.environ["PD_URL"] = f"{url}/{generation}"  # shows the server which child it is
            asyncio.run(deliver(database, receiver, state))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


async def deliver(database: Path, receiver: pagerduty.PagerDuty, state: str) -> None:
    """Put all cases, and wait until all are delivered."""
    route = Route("oncall", receiver, lambda _: True, 30.0, AT_ONCE, Limiter())
    pipeline = Pipeline("train", "r1", [route], outbox=Outbox(database))
    pipeline.start()
    for number in range(ALERTS):
        pipeline.put(case(f"0.{number}", state, alert=f"Rule{number}"))
    while pipeline.pending:  # noqa: ASYNC110 (there is no event to wait for)
        await asyncio.sleep(0.005)
    await pipeline.close()


if __name__ == "__main__":
    main()
