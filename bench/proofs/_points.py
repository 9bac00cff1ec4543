"""Lets a proof act on a rank at each point of an agreement to roll back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def watch_restorers(
    reach: Callable[[str, Any], None], results: list[dict[str, Any]], *, verdict_seconds: float
) -> None:
    """Call `reach(point, message)` at each point that this process's restorers pass; add their answers to `results`.

    Points: `prepare` and `promised`, `commit` and `committed` (before and after the message is handled), `message`
    (before any other message), `waiting`, `ready` and `said`, `deciding` and `decided` (before and after each word of
    the rank consensus is written), `restored`.
    """
    from sentinel import wire
    from sentinel.hooks.rollback.agreement import RankConsensus, TwoPhaseCommit
    from sentinel.hooks.rollback.restorer import Restorer

    receive, create = Restorer.receive, Restorer.__init__
    write, wait = RankConsensus._write, TwoPhaseCommit.wait
    kinds = {wire.Prepare: ("prepare", "promised"), wire.Commit: ("commit", "committed")}

    def receive_one(restorer: Restorer, message: wire.Message) -> None:
        before, after = kinds.get(type(message), ("message", ""))
        reach(before, message)
        receive(restorer, message)
        reach(after, message)

    def create_one(restorer: Restorer, *arguments: Any, session: Any, **more: Any) -> None:
        send = session.send

        def send_one(message: wire.FromRank) -> None:
            send(message)
            if isinstance(message, wire.RolledBack):
                reach("restored", message)
                results.append(
                    {"id": message.id, "ok": message.ok, "to": message.to, "at": message.at, "why": message.reason}
                )

        session.send = send_one
        create(restorer, *arguments, session=session, **(more | {"verdict_seconds": verdict_seconds}))

    def write_one(consensus: RankConsensus, promise: wire.Prepare, name: str, text: str) -> str:
        before, after = ("ready", "said") if name.startswith("rank-") else ("deciding", "decided")
        reach(before, promise)
        fault = write(consensus, promise, name, text)
        reach(after, promise)
        return fault

    def wait_one(promise: TwoPhaseCommit, seconds: float) -> Any:
        reach("waiting", None)
        return wait(promise, seconds)

    Restorer.receive, Restorer.__init__ = receive_one, create_one  # type: ignore[method-assign, assignment]
    RankConsensus._write, TwoPhaseCommit.wait = write_one, wait_one  # type: ignore[method-assign, assignment]
