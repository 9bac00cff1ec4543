"""Silences: kept in one file, and which messages they hold back."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from sentinel import wire
from sentinel.cli import cli
from sentinel.config.settings import SEVERITIES, Duration, Grouping
from sentinel.diagnose.case import Case
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.notify import Event, Message, Route, silences
from sentinel.notify.limiter import Limiter
from sentinel.notify.notifier import Notifier
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers.terminal import Terminal
from sentinel.notify.silences import Silences
from sentinel.store import Store
from tests.notify.cases import case
from tests.notify.test_pipeline import Fake, until


def sentinel(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize("duration", ["99999999999d", "0s", "9" * 400 + "h"])
def test_a_silence_that_does_not_end_is_refused(duration: str) -> None:
    """Before, listing the silences raised an exception once such a silence was there."""
    refused = sentinel("silence", "LossSpike", "--for", duration)
    assert refused.exit_code != 0
    assert "ends within 366 days" in str(refused.exception) or "--for" in refused.output
    assert sentinel("silence", "--list").exit_code == 0


@pytest.mark.parametrize("until", [math.inf, math.nan, 1e300])
def test_another_program_cannot_write_a_silence_that_does_not_end(until: float, tmp_path: Path) -> None:
    """JSON has no infinity: the file would become unreadable, and that of a system service belongs to root."""
    silence = silences.Silence(id="a", alert="*", began=0.0, until=until)
    with pytest.raises(ConfigError, match="ends within 366 days"):
        silences.put(tmp_path / silences.FILE, silence)
    wordy = msgspec.structs.replace(silence, until=time.time() + 60, comment="x" * 100_000)
    with pytest.raises(ConfigError, match="1000 characters at most"):
        silences.put(tmp_path / silences.FILE, wordy)
    assert not (tmp_path / silences.FILE).exists()


def test_a_silence_is_written_listed_and_ended() -> None:
    assert sentinel("silence", "--list").exit_code == 0
    assert "is silenced until" in sentinel("silence", "LossSpike", "--run", "x", "--for", "2h", "--comment", "a").output
    listed = sentinel("silence", "--list", "--json")
    (one,) = json.loads(listed.output)
    assert listed.exit_code == 1
    assert (one["alert"], one["run"], one["comment"]) == ("LossSpike", "x", "a")
    assert 7000 < one["until"] - time.time() < 7200
    assert one["id"] in sentinel("silence", "--list").output
    assert "is no longer silenced" in sentinel("silence", "--end", one["id"]).output
    assert sentinel("silence", "--list").exit_code == 0
    again = sentinel("silence", "--end", one["id"])
    assert isinstance(again.exception, ConfigError)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name an alert"),
        (("LossSpike",), "say how long: --for 2h"),
        (("LossSpike", "--for", "soon"), "'soon' is no duration"),
        (("LossSpike", "--for", "0s"), "give a longer one"),
        (("LossSpike", "--list"), "or use --list"),
    ],
)
def test_wrong_use_is_a_sentence(arguments: tuple[str, ...], said: str) -> None:
    result = sentinel("silence", *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_silence_is_not_said_to_hold_where_a_daemon_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a service, which does not read the user's file. Without a socket no daemon runs, and the next one of
    the user reads the file."""
    monkeypatch.setenv("SENTINEL_ADDRESS", f"unix:{tmp_path}/s.sock")
    assert "is silenced until" in sentinel("silence", "LossSpike", "--for", "2h").output
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(f"{tmp_path}/s.sock")
        failed = sentinel("silence", "LossSpike", "--for", "2h")
        assert isinstance(failed.exception, ConfigError)
        assert "no daemon answers there" in str(failed.exception)
        assert "is silenced" not in failed.output
        listed = sentinel("silence", "--list", "--json")
        assert "no daemon answers there" in listed.stderr
        assert len(ids := [one["id"] for one in json.loads(listed.stdout)]) == 2
        assert "may hold for its runs" in str(sentinel("silence", "--end", ids[0]).exception)
    (tmp_path / "s.sock").unlink()
    assert [one["id"] for one in json.loads(sentinel("silence", "--list", "--json").output)] == ids[1:]


def test_a_silence_of_an_unknown_rule_is_reported_and_written() -> None:
    result = sentinel("silence", "LosSpike", "--for", "1h")
    assert result.exit_code == 0
    assert "none is called 'LosSpike' now; did you mean 'LossSpike'?" in result.output


def test_a_silence_of_an_unknown_run_is_reported_and_written() -> None:
    paths.state_directory().joinpath("runs").mkdir(parents=True, exist_ok=True)
    Store(paths.state_directory() / "runs" / "t1.sqlite", run="train", run_id="t1").close()
    result = sentinel("silence", "LossSpike", "--run", "trainer", "--for", "1h")
    assert result.exit_code == 0
    assert "the silence holds for a run of that name that begins later: no run is called trainer" in result.output
    for known in ("train", "t1"):
        assert "no run" not in sentinel("silence", "LossSpike", "--run", known, "--for", "1h").output


def test_a_file_that_cannot_be_read_for_a_moment_is_read_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / silences.FILE
    silences.add(path, alert="*", run="", seconds=60, comment="")
    held = Silences(path)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        held.refresh()
    assert not held.find_silence(case())
    held.refresh()
    assert held.find_silence(case())


@pytest.mark.parametrize(
    ("alert", "run", "holds"),
    [("LossSpike", "", True), ("Loss*", "train", True), ("*", "r1", True), ("Loss", "", False), ("*", "other", False)],
)
def test_what_a_silence_is_about(tmp_path: Path, alert: str, run: str, holds: bool) -> None:
    path = tmp_path / silences.FILE
    silences.add(path, alert=alert, run=run, seconds=60, comment="")
    found = Silences(path)
    found.refresh()
    assert bool(found.find_silence(case())) is holds
    later = Silences(path, clock=lambda: time.time() + 61)
    later.refresh()
    assert later.find_silence(case()) == ""


def test_a_damaged_file_leaves_silences_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / silences.FILE
    silences.add(path, alert="*", run="", seconds=60, comment="")
    held = Silences(path)
    held.refresh()
    path.write_text("{")
    held.refresh()
    held.refresh()
    assert held.find_silence(case())
    assert caplog.text.count("silences stay as they were") == 1
    with pytest.raises(ConfigError, match="remove it to begin with no silences"):
        silences.add(path, alert="*", run="", seconds=60, comment="")


class People:
    """A notifier, and what it sent to the terminal, the history and a receiver."""

    def __init__(self, folder: Path, *, edits: bool = False) -> None:
        self.path = folder / silences.FILE
        self.notices: list[wire.Notice] = []
        self.saved: list[tuple[str, bool]] = []
        self.ops = Fake()
        at_once = Grouping(wait=Duration(0), interval=Duration(0), repeat=Duration(3600))
        route = Route("ops", self.ops, lambda _: True, 5, at_once, Limiter(), edits)
        self.pipeline = Pipeline("train", "r1", [route], outbox=Outbox(None))
        terminal = Terminal(self.notices.append, frozenset(SEVERITIES))
        self.notifier = Notifier(terminal, self.pipeline, Silences(self.path), self.save)

    def save(self, one: Case) -> None:
        self.saved.append((one.silenced, one.told))

    def events(self) -> list[Any]:
        return [notice.alert["event"] for notice in self.notices]

    def got(self) -> list[Message]:
        """Return the receiver's messages once it has all of them."""

        async def deliver() -> None:
            self.pipeline.start()
            while self.pipeline.pending:  # noqa: ASYNC110 (what is waited for is inside)
                await asyncio.sleep(0.001)
            await self.pipeline.close()

        asyncio.run(deliver())
        return self.ops.got


def fired(people: People) -> Case:
    one = case()
    people.notifier.open_case(one)
    people.notifier.tell("fired", one)
    return one


def over(one: Case) -> Case:
    one.state, one.resolved_step, one.resolved_time = "resolved", 500, one.time + 60
    return one


def silence(people: People) -> silences.Silence:
    made = silences.add(people.path, alert="LossSpike", run="", seconds=3600, comment="")
    people.notifier.tick([])
    return made


def test_no_message_is_sent_of_a_silenced_incident_nor_of_its_end(tmp_path: Path) -> None:
    people = People(tmp_path)
    held = silence(people)
    one = fired(people)
    assert (one.silenced, one.told) == (held.id, False)
    people.notifier.change_case(one)
    people.notifier.tick([one])
    people.notifier.tell("resolved", over(one))
    assert people.events() == []
    assert people.got() == []


def test_what_still_fires_when_the_silence_ends_is_told_then_and_once(tmp_path: Path) -> None:
    people = People(tmp_path)
    held = silence(people)
    one = fired(people)
    silences.end(people.path, held.id)
    people.notifier.tick([one])
    people.notifier.tick([one])
    assert people.events() == ["fired"]
    assert people.saved[-1] == ("", True)
    assert len(people.got()) == 1


def test_receivers_told_before_a_silence_get_the_end_and_nothing_between(tmp_path: Path) -> None:
    people = People(tmp_path)
    one = fired(people)
    held = silence(people)
    people.notifier.tick([one])
    assert people.saved[-1] == (held.id, True)
    people.notifier.change_case(one)
    people.notifier.tick([one])
    people.notifier.tell("resolved", over(one))
    assert people.events() == ["fired", "resolved"]


@pytest.mark.parametrize("edits", [True, False], ids=["edited messages", "separate messages"])
@pytest.mark.parametrize("alone", [True, False], ids=["one alert", "a problem of two"])
def test_what_was_told_and_still_fires_when_the_silence_ends_is_told_again_and_its_end_once(
    tmp_path: Path, alone: bool, edits: bool
) -> None:
    """The end of another alert of its problem closed the page, and it was not told when the silence ended."""
    people = People(tmp_path, edits=edits)
    parent, consequence = case(), case("0.2", alert="Divergence")
    parent.problem_id = consequence.problem_id = "0.1"
    cases = [parent] if alone else [parent, consequence]

    async def tell(event: Event, *changed: Case) -> list[tuple[str, str]]:
        """Return the alert that leads each message, and whether the message says that the problem is over."""
        former = len(people.ops.got)
        for one in changed:
            people.notifier.tell(event, one, cases)
        people.notifier.tick(cases)
        await until(lambda: not people.pipeline.pending)
        return [(one.leading.alert, "firing" if one.firing else "over") for one in people.ops.got[former:]]

    async def scenario() -> None:
        people.pipeline.start()
        for one in cases:
            people.notifier.open_case(one)
        assert await tell("fired", *cases) == [("LossSpike", "firing")]
        held = silence(people)
        assert await tell("resolved", *(over(one) for one in cases if one is consequence)) == []
        silences.end(people.path, held.id)
        assert await tell("updated") == [("LossSpike", "firing")]
        assert people.ops.got[-1].escalated
        silence(people)
        assert await tell("resolved", over(parent)) == [("LossSpike", "over")]
        await people.pipeline.close()

    asyncio.run(scenario())


def test_members_that_join_one_by_one_are_one_update_a_tick(tmp_path: Path) -> None:
    people = People(tmp_path)
    one = fired(people)
    for _ in range(64):
        people.notifier.change_case(one)
    people.notifier.tick([one])
    people.notifier.tick([one])
    assert people.events() == ["fired", "updated"]
    assert [bool(notice.text) for notice in people.notices] == [True, False]


@pytest.mark.parametrize("told", [True, False])
def test_after_a_restart_the_receivers_learn_what_they_do_not_know(tmp_path: Path, told: bool) -> None:
    people = People(tmp_path)
    one, ended = case(), over(case("0.2"))
    one.told = told
    people.notifier.tick([one, ended])
    (message,) = people.got()
    assert [known.id for known in message.cases] == ["0.1"]
    assert people.events() == ([] if told else ["fired"])


def test_the_terminal_prints_what_it_was_asked_for_and_on_alert_gets_all() -> None:
    notices: list[wire.Notice] = []
    terminal = Terminal(notices.append, frozenset(["critical"]))
    terminal.notify("fired", case(severity="warning"))
    terminal.notify("fired", case())
    assert [(bool(notice.text), notice.alert["severity"]) for notice in notices] == [
        (False, "warning"),
        (True, "critical"),
    ]


def test_what_a_run_sends_cannot_steer_the_terminal() -> None:
    notices: list[wire.Notice] = []
    odd = case()
    odd.run = odd.summary = "\x1b[2J\x9b31m\u202eevil"
    Terminal(notices.append, frozenset(SEVERITIES)).notify("fired", odd)
    assert not set(notices[0].text) & set("\x1b\x9b\u202e")


def test_after_a_restart_a_silenced_incident_stays_untold(tmp_path: Path) -> None:
    people = People(tmp_path)
    held = silences.add(people.path, alert="LossSpike", run="", seconds=3600, comment="")
    one = case()
    one.told, one.silenced = False, held.id
    people.notifier.tick([one])
    assert people.events() == []
    assert people.pipeline.pending == 0
    assert people.got() == []
