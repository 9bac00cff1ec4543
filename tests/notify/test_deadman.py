"""The dead man's switch gets heartbeats while all is watched, and none while the daemon sees nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel.config.settings import Duration, HeartbeatSettings
from sentinel.daemon import health
from sentinel.notify.deadman import Deadman
from tests.notify.consumer import Consumer, consumer
from tests.notify.test_pipeline import until

SECRET = "s3cr3ts3cr3ts3cr3ts3cr3t"


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Consumer]:
    with consumer() as made:
        monkeypatch.setenv("HEARTBEAT_URL", f"{made.url}/{SECRET}")
        yield made


def settings(interval: float) -> HeartbeatSettings:
    return HeartbeatSettings(url_env="HEARTBEAT_URL", interval=Duration(interval), timeout=Duration(5))


def test_the_switch_is_told_at_each_interval_and_not_while_the_daemon_is_blind(
    switch: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reason = [""]

    async def scenario() -> None:
        deadman = Deadman(settings(0.01), lambda: reason[0])
        task = asyncio.create_task(deadman.serve())
        await until(lambda: deadman.sent >= 2)
        reason[0] = "the rules have not turned for 9 s"
        await until(lambda: deadman.withheld >= 2)
        sent = deadman.sent
        assert deadman.status() == {
            "sent": sent, "withheld": deadman.withheld, "failed": 0,
            "trouble": "withheld: the rules have not turned for 9 s",
        }  # fmt: skip
        assert switch.received.qsize() == sent
        reason[0] = ""
        await until(lambda: deadman.sent > sent)
        switch.answers.append(500)
        await until(lambda: deadman.failed == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert caplog.text.count("withheld: the rules") == 1
    assert "sent again" in caplog.text
    assert SECRET not in caplog.text


def test_other_settings_are_in_force_at_once(switch: Consumer) -> None:
    async def scenario() -> None:
        deadman = Deadman(None, lambda: "")
        task = asyncio.create_task(deadman.serve())
        await asyncio.sleep(0)
        assert deadman.status() is None
        deadman.replace(settings(3600.0))
        await until(lambda: deadman.sent == 1)
        deadman.replace(None)
        await until(lambda: deadman.status() is None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def test_a_missing_url_is_reported_and_no_url_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> str:
        deadman = Deadman(settings(3600.0), lambda: "")
        task = asyncio.create_task(deadman.serve())
        await until(lambda: deadman.failed == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return deadman.trouble

    assert "HEARTBEAT_URL is empty or not set" in asyncio.run(scenario())
    monkeypatch.setenv("HEARTBEAT_URL", f"nonsense {SECRET}")
    assert SECRET not in asyncio.run(scenario())


def watch(**more: Any) -> Any:
    seen = {"heard": 0.0, "heartbeat": None} | {key: more.pop(key) for key in ("heard", "heartbeat") if key in more}
    live = [SimpleNamespace(**seen)] if more.pop("live", True) else []
    run = SimpleNamespace(name="train", attempt=SimpleNamespace(live=live))
    return SimpleNamespace(**{"store": SimpleNamespace(trouble=""), "faulty": False, "run": run} | more)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (watch(heard=900.0), ""),
        (watch(heard=0.0), "run train: nothing was heard for 1000 s"),
        (watch(heard=0.0, heartbeat=object()), ""),
        (watch(heard=999.0, faulty=True), "its rules raise"),
        (watch(heard=999.0, store=None), "its history is not written"),
        (watch(heard=999.0, store=SimpleNamespace(trouble="disk full")), "its history is not written"),
        (watch(live=False, store=None), ""),
    ],
)
def test_when_a_daemon_is_blind(one: Any, said: str) -> None:
    found = health.reason([one], 1000.0)
    assert (said in found) if said else (found == "")
