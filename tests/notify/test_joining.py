"""A daemon that was restarted, in a job whose nodes have not yet found each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.notify.cases import case
from tests.notify.test_pipeline import until
from tests.notify.test_silences import People, fired, over


def test_what_an_earlier_daemon_knew_of_is_not_told_before_the_nodes_have_found_each_other(tmp_path: Path) -> None:
    """The coordinator may have told people already, under the job's key."""
    people, known = People(tmp_path), case()
    known.told = True
    people.notifier.begin_joining()
    people.notifier.tick([known])
    assert people.pipeline.pending == 0
    people.notifier.end_joining()
    people.notifier.tick([known])
    assert [one.id for message in people.got() for one in message.cases] == [known.id]


def test_what_fires_meanwhile_is_told(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.notifier.begin_joining()
    one = fired(people)
    assert [each.id for message in people.got() for each in message.cases] == [one.id]


def test_what_an_earlier_daemon_had_yet_to_send_waits_too(tmp_path: Path) -> None:
    """Another coordinator may have told people since, also of the end: then its key would stay open."""
    people, earlier = People(tmp_path), case("n0-0.1")
    people.pipeline.put(earlier)
    people.notifier.begin_joining()
    assert people.pipeline.pending == 0
    people.notifier.end_joining()
    assert [one.id for message in people.got() for one in message.cases] == ["n0-0.1"]


@pytest.mark.parametrize("problem", ["", "0.1"], ids=["no problem", "one problem"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_what_is_sent_meanwhile_goes_on_with_what_an_earlier_daemon_sent(
    tmp_path: Path, problem: str, ends: bool
) -> None:
    """Both are one group: what was sent of either is not sent again, and both ends are sent."""
    people = People(tmp_path)
    cases = [msgspec.structs.replace(case(identity), problem_id=problem, told=True) for identity in ("0.1", "0.2")]

    async def deliver() -> None:
        await until(lambda: not people.pipeline.pending)

    async def scenario() -> None:
        people.pipeline.start()
        people.pipeline.put(cases[0])
        await deliver()
        people.notifier.begin_joining()
        people.notifier.tell("fired", cases[1], cases)
        await deliver()
        first = len(people.ops.got)
        for one in cases if ends else ():
            people.notifier.tell("resolved", over(one), cases)
        people.notifier.end_joining()
        people.notifier.tick(cases)
        await deliver()
        states = {one.id: one.state for message in people.ops.got for one in message.cases}
        assert states == {one.id: one.state for one in cases}
        assert len(people.ops.got) - first == ends
        await people.pipeline.close()

    asyncio.run(scenario())


def test_what_ended_meanwhile_is_over_also_where_an_earlier_daemon_sent_it(tmp_path: Path) -> None:
    people, earlier = People(tmp_path), case()
    earlier.told = True

    async def scenario() -> None:
        people.pipeline.start()
        people.pipeline.put(earlier)
        await until(lambda: not people.pipeline.pending)
        people.notifier.begin_joining()
        people.notifier.tell("resolved", over(earlier))
        await until(lambda: not people.pipeline.pending)
        people.notifier.end_joining()
        assert not people.pipeline.is_known(earlier.id)
        await people.pipeline.close()

    asyncio.run(scenario())
