"""A daemon that was restarted, in a job whose nodes have not yet found each other."""

from __future__ import annotations

from pathlib import Path

from tests.notify.cases import case
from tests.notify.test_silences import People, fired


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


def test_what_fires_meanwhile_is(tmp_path: Path) -> None:
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
