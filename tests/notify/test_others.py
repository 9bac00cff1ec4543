"""Receivers by Apprise: the real Apprise, and a server to which it posts."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from sentinel.config import settings
from sentinel.config.settings import Duration
from sentinel.notify import Delivery, Message
from sentinel.notify.receivers import apprise
from sentinel.notify.routes import make_routes
from tests.notify import hostile
from tests.notify.cases import ORIGIN, case
from tests.notify.vendors import Reply, Vendor, serving

pytest.importorskip("apprise", reason="Apprise is not installed (pip install 'training-sentinel[apprise]')")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from modules that Apprise loads

SECRET = "s3cr3ts3cr3ts3cr3ts3cr3t"
MAIL = settings.ReceiverSettings(name="mail", type="apprise", url_env="MAIL_URL", timeout=Duration(20))


class Service(Vendor):
    """The server to which Apprise's `json://` posts."""

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        import json

        self.taken.put({"path": path, **json.loads(body)})
        return 200, {}, b""


def message(*cases: object) -> Message:
    return Message(run="train", run_id="r1", alert="LossSpike", cases=cases or (case(ranks=64),))  # type: ignore[arg-type]


def told(*messages: Message) -> list[Delivery]:
    async def deliver() -> list[Delivery]:
        receiver = apprise.Apprise(MAIL)
        return [await receiver.deliver(one) for one in messages]

    return asyncio.run(deliver())


def test_a_message_ends_with_host_user_and_links() -> None:
    said = apprise.text(Message(run="train", run_id="r1", alert="LossSpike", cases=(case(),), origin=ORIGIN))
    assert "\nrunbook: https://wiki.example/runbook#loss-spike" in said
    assert said.endswith(
        "host: node-7\n\nuser: ada\n\npage: https://page.example/r1\n\nreport: https://files.example/r1.html"
    )


def test_apprise_gets_the_alert_its_severity_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    with serving(service):
        monkeypatch.setenv("MAIL_URL", service.url.replace("http", "json") + f"/{SECRET}")
        assert told(message(), message(case(state="resolved"))) == [Delivery(), Delivery()]
    fired, over = service.next(), service.next()
    assert (fired["title"], fired["type"]) == ("[critical] LossSpike in train", "failure")
    assert "do: look at it" in fired["message"]
    assert "where: rank 0, 1, 2 and 61 more" in fired["message"]
    assert (over["title"], over["type"]) == ("[over] LossSpike in train", "success")
    assert "over at step 500" in over["message"]


def test_what_fails_is_tried_again_and_says_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    service = Service()
    found = []
    with serving(service):
        service.answers.append((500, {}, SECRET.encode()))
        good = service.url.replace("http", "json")
        for url in (f"{good}/{SECRET}", f"json://127.0.0.1:1/{SECRET}", f"nonsense {SECRET}", "", f"mailto://{SECRET}"):
            monkeypatch.setenv("MAIL_URL", url)
            found += told(message())
    assert [delivery.fault for delivery in found] == ["rejected", "rejected", "settings", "settings", "settings"]
    assert all(delivery.retry for delivery in found)
    assert SECRET not in repr(found) + caplog.text


def test_a_hanging_delivery_is_abandoned_and_the_next_waits_for_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def hang(*_: object) -> Delivery:
        begun.release()
        release.wait(10)
        return Delivery()

    monkeypatch.setattr(apprise.Apprise, "_try_delivery", hang)
    monkeypatch.setenv("MAIL_URL", "json://127.0.0.1:1/")

    async def scenario() -> list[Delivery]:
        receiver = apprise.Apprise(MAIL)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await receiver.deliver(message())
        busy = await receiver.deliver(message())
        release.set()
        while (again := await receiver.deliver(message())).fault == "timeout":  # noqa: ASYNC110 (there is no event)
            await asyncio.sleep(0.01)
        return [busy, again]

    busy, again = asyncio.run(scenario())
    assert (busy.fault, busy.retry) == ("timeout", True)
    assert again == Delivery()


def test_what_is_tried_again_goes_only_to_the_services_that_did_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    good, broken = Service(), Service()
    with serving(good), serving(broken):
        broken.answers += [(500, {}, b""), (500, {}, b"")]
        monkeypatch.setenv("MAIL_URL", "\n".join(one.url.replace("http", "json") for one in (good, broken)))
        other = message(case(ranks=2))
        found = told(message(), message(), other, other)
    assert [delivery.fault for delivery in found] == ["rejected", "rejected", None, None]
    assert (good.taken.qsize(), broken.taken.qsize()) == (3, 2)  # a message that was delivered may be sent again


class SlowService(Service):
    """Takes a message once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        self.asked.set()
        self.may.wait(10)
        return super().answer(path, headers, body)


def test_a_service_that_takes_a_message_late_does_not_get_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    service = SlowService()

    async def scenario() -> Delivery:
        receiver = apprise.Apprise(MAIL)
        late = asyncio.create_task(receiver.deliver(message()))
        await asyncio.to_thread(service.asked.wait, 10)
        late.cancel()  # as when its time is up
        service.may.set()
        for thread in threading.enumerate():
            if thread.name == "sentinel-apprise":
                await asyncio.to_thread(thread.join, 10)
        return await receiver.deliver(message())

    with serving(service):
        monkeypatch.setenv("MAIL_URL", service.url.replace("http", "json"))
        assert asyncio.run(scenario()) == Delivery()
    assert service.taken.qsize() == 1


def test_hostile_texts_are_plain() -> None:
    for one in hostile.cases(50):
        body = apprise.text(Message(run=one.run, run_id="r1", alert=one.alert, cases=(one,)))
        assert not set(body) & set("\x1b\x00\ud800\u202e")
        assert len(body) <= apprise.BODY


def test_without_apprise_the_note_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made, notes = make_routes(settings.Settings(receivers=(MAIL,)))
    assert made == []
    assert notes == ["receiver mail: apprise needs the package apprise; pip install 'training-sentinel[apprise]'"]
