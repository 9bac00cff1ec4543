"""The queues of a run: none waits for another, and nothing is lost or sent twice, even over restarts."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from sentinel.config.settings import SEVERITIES, Duration, Grouping
from sentinel.diagnose.case import Case
from sentinel.notify import DELIVERED, Delivery, Message, Route
from sentinel.notify import pipeline as pipelines
from sentinel.notify.limiter import Limiter
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from tests.databases import fill_disk, make_room, note_connections
from tests.notify.cases import case

UNSOUND = "its code returned something other than a Delivery"
AT_ONCE = Grouping(wait=Duration(0), interval=Duration(0), repeat=Duration(3600))
SLOW = Grouping(wait=Duration(1000), interval=Duration(1000), repeat=Duration(3600))


class Fake:
    """A receiver that answers with `answer()` and keeps its messages in `got`."""

    def __init__(self, answer: Callable[[], Delivery] = lambda: DELIVERED) -> None:
        self.answer, self.got = answer, list[Message]()
        self.arrived = asyncio.Event()

    async def deliver(self, message: Message) -> Delivery:
        self.got.append(message)
        self.arrived.set()
        return self.answer()

    async def close(self) -> None:
        pass


class Hanging(Fake):
    async def deliver(self, message: Message) -> Delivery:
        self.got.append(message)
        self.arrived.set()
        await asyncio.Event().wait()
        return DELIVERED


def pipeline(
    outbox: Outbox,
    grouping: Grouping = AT_ONCE,
    timeout: float = 30.0,
    severities: Any = SEVERITIES,
    *,
    edits: bool = False,
    **fakes: Fake,
) -> Pipeline:
    routes = [
        Route(name, fake, lambda case: case.severity in severities, timeout, grouping, Limiter(), edits)
        for name, fake in fakes.items()
    ]
    made = Pipeline("train", "r1", routes, outbox=outbox)
    made.start()
    return made


async def until(condition: Callable[[], bool]) -> None:
    """Let the tasks run until the condition holds; bounded by the time limit of the test."""
    while not condition():  # noqa: ASYNC110 (what is waited for is inside)
        await asyncio.sleep(0.001)


def test_a_receiver_that_hangs_delays_no_other() -> None:
    async def scenario() -> None:
        hanging, good = Hanging(), Fake()
        made = pipeline(Outbox(None), hanging=hanging, good=good)
        made.put(case())
        await hanging.arrived.wait()
        made.put(case(alert="Hang"))
        await until(lambda: len(good.got) == 2)
        assert len(hanging.got) == 1
        assert made.pending == 2
        await made.close()

    asyncio.run(scenario())


def test_faults_are_counted_retried_and_shown_and_the_way_back_is_seen() -> None:
    async def scenario() -> None:
        answers = [Delivery(fault="server error", detail="it answers 500", retry=True), DELIVERED]
        fake = Fake(lambda: answers.pop(0))
        made = pipeline(Outbox(None), ops=fake)
        made.put(case())
        await until(lambda: bool(made.status()[0]["failed"]))
        assert made.status()[0] | {"sent": 0, "failed": {"server error": 1}, "pending": 1} == made.status()[0]
        assert made.status()[0]["trouble"] == "it answers 500"
        (queue,) = made.queues
        await until(lambda: queue.counts.sent == 1)
        assert made.status()[0] == {
            "receiver": "ops", "sent": 1, "failed": {"server error": 1}, "retried": 1, "given_up": 0, "held": 0,
            "pending": 0, "trouble": "",
        }  # fmt: skip
        await made.close()

    asyncio.run(scenario())


def test_code_that_raises_or_takes_too_long_is_a_failed_delivery_without_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> Delivery:
        raise RuntimeError("https://secret")

    async def scenario() -> None:
        made = pipeline(Outbox(None), timeout=0.01, broken=Fake(broken), hanging=Hanging())
        made.put(case())
        await until(lambda: all(row["trouble"] for row in made.status()))
        assert [list(row["failed"]) for row in made.status()] == [["internal"], ["timeout"]]
        assert [(row["pending"], row["given_up"]) for row in made.status()] == [(1, 0), (1, 0)], "tried again"
        assert "secret" not in str(made.status()) + caplog.text
        await made.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "trouble", "told"),
    [
        (asyncio.CancelledError(), "CancelledError in its code", 2),
        (SystemExit(), "SystemExit in its code", 2),
        (None, "its code answers NoneType and no Delivery", 1),
        (Delivery(fault="rate limited", retry=True, after=cast(Any, "30")), UNSOUND, 2),
        (Delivery(fault="rate limited", retry=True, after=math.nan), UNSOUND, 2),
        (Delivery(fault=cast(Any, object()), retry=True), UNSOUND, 2),
    ],
)
def test_code_that_gives_up_or_answers_nothing_is_asked_again(answer: Any, trouble: str, told: int) -> None:
    """Before, the receiver's task ended with such an answer, and nothing reported it."""

    def broken() -> Delivery:
        if isinstance(answer, BaseException):
            raise answer
        return cast(Delivery, answer)

    async def scenario() -> None:
        fake = Fake(broken)
        made = pipeline(Outbox(None), broken=fake)
        made.put(case())
        await until(lambda: made.status()[0]["trouble"] == trouble)
        fake.answer = lambda: DELIVERED
        made.put(case(alert="Hang"))
        await until(lambda: made.status()[0]["sent"] == told)
        await made.close()

    asyncio.run(scenario())


def test_what_was_delivered_is_kept_whatever_the_code_calls_it(tmp_path: Path) -> None:
    """Before, the next daemon could not read such a reference, and sent the message again."""

    async def told() -> Fake:
        fake = Fake(lambda: Delivery(reference=cast(str, None)))
        made = pipeline(Outbox(tmp_path / "r1.sqlite"), ops=fake)
        made.put(case())
        await until(lambda: not made.pending)
        await made.close()
        return fake

    assert len(asyncio.run(told()).got) == 1
    assert asyncio.run(told()).got == []


def test_a_receiver_gets_only_the_severities_of_its_settings() -> None:
    async def scenario() -> None:
        fake = Fake()
        made = pipeline(Outbox(None), severities=["critical"], ops=fake)
        made.put(case(severity="warning", alert="GradientSpike"))
        made.put(case())
        await until(lambda: bool(fake.got))
        assert [message.alert for message in fake.got] == ["LossSpike"]
        assert made.pending == 0 or not made.queues[0].entries.get("GradientSpike")
        await made.close()

    asyncio.run(scenario())


def test_a_message_is_in_the_outbox_before_it_is_sent_and_marked_after(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"

    def rows() -> list[Any]:
        with sqlite3.connect(path) as database:
            found = database.execute("SELECT receiver, alert FROM outbox").fetchall()
        database.close()
        return found

    seen: list[Any] = []

    def answer() -> Delivery:
        seen.extend(rows())
        return DELIVERED

    async def scenario() -> None:
        fake = Fake(answer)
        made = pipeline(Outbox(path), ops=fake)
        made.put(case())
        await until(lambda: made.pending == 0 and bool(fake.got))
        await made.close()

    asyncio.run(scenario())
    assert seen == [("ops", "LossSpike")]
    assert [entry.pending for entry in Outbox(path).entries()] == [False]


def test_after_a_restart_only_what_was_not_delivered_is_sent(tmp_path: Path) -> None:
    """The first daemon ends as by kill -9: nothing is closed."""
    path = tmp_path / "r1.sqlite"

    async def first() -> None:
        good, hanging = Fake(), Hanging()
        made = pipeline(Outbox(path), good=good, hanging=hanging)
        made.put(case())
        await hanging.arrived.wait()
        await until(lambda: made.queues[0].pending == 0 and bool(good.got))
        await made.close(0.0)

    async def second() -> tuple[Fake, Fake]:
        good, back = Fake(), Fake()
        made = pipeline(Outbox(path), good=good, hanging=back)
        made.put(case())  # the history has this case, too
        await until(lambda: bool(back.got))
        made.put(case(state="resolved"))
        await until(lambda: len(back.got) == 2)
        await until(lambda: made.pending == 0)
        await made.close()
        return good, back

    asyncio.run(first())
    good, back = asyncio.run(second())
    assert [message.firing for message in back.got] == [True, False]
    assert [message.firing for message in good.got] == [False]


def test_the_end_of_a_run_does_not_wait_and_a_stop_waits_for_the_answer_only_so_long() -> None:
    async def scenario() -> None:
        fake, hanging = Fake(), Hanging()
        made = pipeline(Outbox(None), SLOW, ops=fake, hanging=hanging)
        made.put(case())
        assert made.pending == 2
        made.hurry()
        await fake.arrived.wait()
        await made.close(0.05)
        assert (len(fake.got), len(hanging.got), made.pending) == (1, 1, 1)

    asyncio.run(scenario())


def test_a_full_disk_is_reported_and_receivers_are_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        databases = note_connections(monkeypatch)
        outbox, fake = Outbox(tmp_path / "r1.sqlite"), Fake()
        outbox.write([])
        fill_disk(databases[0])
        made = pipeline(outbox, ops=fake)
        made.put(case(ranks=1000))
        await until(lambda: made.pending == 0 and bool(fake.got))
        assert "notifications are not written" in made.trouble
        assert "full" in made.trouble
        assert Outbox(tmp_path / "r1.sqlite").entries() == []
        make_room(databases[0])
        made.put(case(alert="Hang"))
        await until(lambda: len(fake.got) == 2 and made.pending == 0)
        await made.close()
        assert made.trouble == ""
        assert len(Outbox(tmp_path / "r1.sqlite").entries()) == 2

    asyncio.run(scenario())


def test_receivers_are_told_though_the_disk_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, they got nothing until the disk answered."""
    monkeypatch.setattr(pipelines, "_KEPT_SECONDS", 0.02)
    answers = threading.Event()
    outbox = Outbox(tmp_path / "r1.sqlite")
    really = outbox.write
    monkeypatch.setattr(outbox, "write", lambda rows: really(rows) if answers.wait() else None)

    async def scenario() -> None:
        fake = Fake()
        made = pipeline(outbox, a=fake)
        made.put(case())
        await until(lambda: made.status()[0]["sent"] == 1)
        assert "the disk does not answer" in made.trouble
        answers.set()
        await until(lambda: made.trouble == "")
        await made.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    (kept,) = Outbox(tmp_path / "r1.sqlite").entries()
    assert not kept.pending


@pytest.mark.parametrize("ends", [False, True], ids=["the run goes on", "the daemon ends"])
def test_what_no_thread_could_write_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The writer's task ended, and the rows were forgotten: a killed daemon had lost the alert."""
    monkeypatch.setattr(pipelines, "_WRITE_AGAIN", 0.02)
    outbox = Outbox(tmp_path / "r1.sqlite")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        made = pipeline(outbox, SLOW, ops=Fake())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            made.put(case())
            await until(lambda: "can't start new thread" in made.trouble)
        if ends:
            await made.close()
        else:
            await until(lambda: made.trouble == "")
        assert [entry.alert for entry in Outbox(tmp_path / "r1.sqlite").entries()] == ["LossSpike"]
        if not ends:
            await made.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_rows_that_cannot_be_read_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r1.sqlite"
    box = Outbox(path)
    box.write([("ops", "Broken", b"\xc1"), ("ops", "Older", b"\x80")])
    assert box.entries() == []
    box.close()
    assert caplog.text.count("cannot be read") == 2
    Path(tmp_path / "none").write_bytes(b"no database" * 100)
    none = Outbox(tmp_path / "none")
    assert none.entries() == []
    assert "not a database" in none.trouble


@pytest.mark.slow
def test_two_hundred_alerts_and_a_stop_at_any_moment_lose_none(tmp_path: Path) -> None:
    path, got = tmp_path / "r1.sqlite", set[str]()

    class Noting(Fake):
        async def deliver(self, message: Message) -> Delivery:
            await asyncio.sleep(0)
            got.update(one.id for one in message.cases)
            return DELIVERED

    async def run(cases: list[Case], turns: int) -> None:
        made = pipeline(Outbox(path), ops=Noting())
        for one in cases:
            made.put(one)
        for _ in range(turns):
            await asyncio.sleep(0.001)
        await made.close(0.0)

    alerts = [case(f"0.{number}", alert=f"Rule{number}") for number in range(200)]
    for start in range(0, 200, 20):
        asyncio.run(run(alerts[start : start + 20], turns=start % 7))

    async def rest() -> None:
        made = pipeline(Outbox(path), ops=Noting())
        await until(lambda: made.pending == 0)
        await made.close()

    asyncio.run(rest())
    assert got == {one.id for one in alerts}


def test_pages_under_another_run_id_are_groups_of_their_own() -> None:
    async def scenario() -> None:
        fake = Fake()
        made = pipeline(Outbox(None), ops=fake)
        made.put(case())
        made.put(case(), "r1@node-2")
        await until(lambda: len(fake.got) == 2)
        assert {message.group for message in fake.got} == {"r1/LossSpike", "r1@node-2/LossSpike"}
        assert {message.run_id for message in fake.got} == {"r1", "r1@node-2"}
        assert made.is_known(case().id)
        assert made.is_known(case().id, "r1@node-2")
        made.put(case(state="resolved"), "r1@node-2")
        await until(lambda: len(fake.got) == 3)
        assert fake.got[-1].group == "r1@node-2/LossSpike"
        assert not made.is_known(case().id, "r1@node-2")
        assert made.is_known(case().id)
        await made.close()

    asyncio.run(scenario())


def test_an_end_that_comes_again_is_not_told_again_and_does_not_fire_first() -> None:
    async def scenario() -> None:
        fake = Fake()
        made = pipeline(Outbox(None), ops=fake)
        times = {"problem_id": "0.1", "time": pipelines.steady()}
        fired, over = (msgspec.structs.replace(case(state=state), **times) for state in ("firing", "resolved"))
        over.resolved_time = fired.time + 3
        for count, one in enumerate((fired, over), start=1):
            made.put(one)
            await until(lambda count=count: len(fake.got) == count and not made.pending)
        made.put(over)
        made.put(case("0.2", alert="Hang"))
        await until(lambda: len(fake.got) >= 3)
        assert [(message.alert, message.firing) for message in fake.got] == [
            ("LossSpike", True),
            ("LossSpike", False),
            ("Hang", True),
        ]
        await made.close()

    asyncio.run(scenario())


def test_an_end_that_comes_again_to_a_restarted_daemon_is_not_told_again(tmp_path: Path) -> None:
    """A restarted daemon hands in what ended a short time ago."""
    path, began = tmp_path / "r1.sqlite", pipelines.steady()
    fired = msgspec.structs.replace(case(), problem_id="0.1", time=began)
    over = msgspec.structs.replace(fired, state="resolved", resolved_time=began + 3)

    async def tell(*cases: Case, now: float) -> list[str]:
        fake = Fake()
        route = Route("ops", fake, lambda _: True, 30, AT_ONCE, Limiter())
        made = Pipeline("train", "r1", [route], outbox=Outbox(path), clock=lambda: now)
        made.start()
        for one in cases:
            made.put(one)
            await until(lambda: not made.pending)
        await made.close()
        return [one.state for message in fake.got for one in message.cases]

    assert asyncio.run(tell(fired, over, now=began + 4)) == ["firing", "resolved"]
    assert asyncio.run(tell(over, now=began + 30)) == []
    assert asyncio.run(tell(now=began + 200)) == []
    assert Outbox(path).entries() == []


def test_a_former_consequence_that_fires_again_once_its_problem_is_over_is_told() -> None:
    """It was no news to a receiver whose messages cannot be edited, as the problem was known."""

    async def scenario() -> None:
        fake = Fake()
        route = Route("ops", fake, lambda _: True, 30, AT_ONCE, Limiter(), edits=False)
        made = Pipeline("train", "r1", [route], outbox=Outbox(None))
        made.start()
        cause, consequence = (msgspec.structs.replace(case(id_), problem_id="0.1") for id_ in ("0.1", "0.2"))
        made.put(cause)
        await until(lambda: len(fake.got) == 1 and not made.pending)
        made.put(consequence)
        assert not made.pending
        made.put(msgspec.structs.replace(consequence, state="resolved"))
        made.put(msgspec.structs.replace(cause, state="resolved"))
        await until(lambda: len(fake.got) == 2 and not made.pending)
        made.put(consequence)
        assert made.pending
        await until(lambda: len(fake.got) == 3)
        assert [(one.id, one.state) for one in fake.got[-1].cases] == [("0.2", "firing")]
        await made.close()

    asyncio.run(scenario())


def test_what_is_of_another_problem_at_its_end_ends_where_it_was_told() -> None:
    async def scenario() -> None:
        fake = Fake()
        made = pipeline(Outbox(None), ops=fake)
        fired, over = (msgspec.structs.replace(case(state=state), problem_id="0.1") for state in ("firing", "resolved"))
        made.put(fired)
        await until(lambda: len(fake.got) == 1 and not made.pending)
        over.problem_id = "0.7"
        made.put(over)
        await until(lambda: len(fake.got) == 2)
        assert [(message.group, message.firing) for message in fake.got] == [("r1/0.1", True), ("r1/0.1", False)]
        await made.close()

    asyncio.run(scenario())


def test_what_moves_elsewhere_while_it_is_sent_is_told_as_over_here() -> None:
    async def scenario() -> None:
        def answer() -> Delivery:
            if len(fake.got) == 1:
                made.put(case(state="resolved"), "r1@node-2", moved=True)
            return DELIVERED

        fake = Fake(answer)
        made = pipeline(Outbox(None), ops=fake)
        made.put(case(), "r1@node-2")
        await until(lambda: len(fake.got) == 2)
        assert [message.firing for message in fake.got] == [True, False]
        await made.close()

    asyncio.run(scenario())


def test_what_is_withdrawn_is_not_told_until_it_is_restored_and_not_told_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        fake, outbox = Fake(), Outbox(tmp_path / "r1.sqlite")
        made = pipeline(outbox, ops=fake)
        made.put(case())
        await until(lambda: len(fake.got) == 1 and not made.pending)
        withdrawn = made.withdraw()
        assert not made.is_known(case().id)
        assert not made.entries
        made.restore(withdrawn)
        made.put(case())
        made.put(case(state="resolved"))
        await until(lambda: len(fake.got) == 2)
        assert [message.firing for message in fake.got] == [True, False]
        made.put(case(alert="Hang"))
        await until(lambda: len(fake.got) == 3)
        made.forget(made.withdraw())
        await made.close()
        assert [entry.cases for entry in Outbox(tmp_path / "r1.sqlite").entries()] == [{}, {}]

    asyncio.run(scenario())
