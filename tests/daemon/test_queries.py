"""Answers to the command line, however much there is to answer."""

from __future__ import annotations

import asyncio
from typing import Any

from sentinel import wire
from sentinel.daemon.frontend.queries import Queries, fitting


def case(number: int, size: int = 0) -> dict[str, Any]:
    return {"id": f"0.{number}", "time": float(number), "text": "x" * size}


class Asker:
    """Receives frames, as a connection would."""

    uid = 0

    def __init__(self) -> None:
        self.got: list[wire.Answer] = []

    def send(self, message: wire.Answer) -> None:
        wire.frame(message)
        self.got.append(message)


class History:
    """The histories of a service's users."""

    def __init__(self, cases: list[dict[str, Any]] | None) -> None:
        self._cases = cases

    def visible(self, *_: object) -> list[Any]:
        return []

    def list_ended_incidents(self, *_: object) -> list[dict[str, Any]]:
        if self._cases is None:
            raise OSError("the disk is gone")
        return self._cases


def answered(cases: list[dict[str, Any]] | None) -> wire.Answer:
    asker = Asker()

    async def scenario() -> None:
        queries = Queries(History(cases), None, None)  # type: ignore[arg-type]
        queries.answer(asker, wire.Query(what="incidents"), [])  # type: ignore[arg-type]
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(scenario())
    (answer,) = asker.got
    return answer


def test_the_newest_incidents_are_returned_where_a_frame_cannot_hold_all() -> None:
    """There was no answer before, and `sentinel incidents` said that there was no daemon."""
    cases = [case(number, 1 << 20) for number in range(40)]
    found = answered(cases[::-1]).content
    assert 10 <= len(found) < 40
    assert [one["time"] for one in found] == [float(number) for number in range(40 - len(found), 40)]


def test_all_incidents_are_returned_where_they_fit() -> None:
    assert fitting([case(1), case(2)]) == [case(1), case(2)]
    assert fitting([]) == []


def test_a_fault_is_an_answer_too() -> None:
    assert answered(None) == wire.Answer(ok=False, reason="OSError; the daemon's log says why")
