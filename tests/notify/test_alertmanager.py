"""Sentinel's webhook compared with a real Alertmanager's: the same alert, keys, types and fingerprint."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from sentinel.config import settings as config
from sentinel.diagnose.case import Case
from sentinel.notify import Delivery, Message
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers.alertmanager import RESENT_SECONDS, Alertmanager, alerts
from sentinel.notify.receivers.webhook import payload
from sentinel.notify.routes import make_routes
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.notify import hostile
from tests.notify.cases import case
from tests.notify.consumer import check, consumer, shape
from tests.notify.test_pipeline import Fake, until
from tests.source import SOURCE

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def alertmanager(
    folder: Path, hook: str, *, group_by: str = "[alertname, run, run_id]", group_wait: str = "0s", inhibit: str = "[]"
) -> Iterator[str]:
    """Run an Alertmanager that sends everything to a webhook at once; yields its address."""
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        pytest.skip("Alertmanager is not installed (Debian package: prometheus-alertmanager)")
    settings = folder / "alertmanager.yml"
    settings.write_text(
        f"route: {{receiver: ops, group_by: {group_by}, group_wait: {group_wait}, group_interval: 1s}}\n"
        f"receivers: [{{name: ops, webhook_configs: [{{url: '{hook}', send_resolved: true}}]}}]\n"
        f"inhibit_rules: {inhibit}\n"
    )
    command = [
        program, f"--config.file={settings}", f"--storage.path={folder}/data", "--cluster.listen-address=",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"address=(127\.0\.0\.1:\d+)", line) for line in process.stderr)))
            yield f"http://{found[1]}"
        finally:
            process.kill()


def post(address: str, alert: dict[str, Any]) -> None:
    body = {key: alert[key] for key in ("labels", "annotations", "startsAt", "generatorURL")}
    if alert["status"] == "resolved":
        body["endsAt"] = alert["endsAt"]
    request = urllib.request.Request(
        f"{address}/api/v2/alerts", json.dumps([body]).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def test_the_payload_has_the_shape_of_a_real_alertmanagers(tmp_path: Path) -> None:
    with consumer() as ops, alertmanager(tmp_path, ops.url) as address:
        for state in ("firing", "resolved"):
            ours = payload(Message(run="train", run_id="r1", alert="LossSpike", cases=(case(state=state),)), "ops")
            post(address, ours["alerts"][0])
            theirs = ops.next()
            check(theirs)
            assert shape(ours) == shape(theirs)
            assert ours["status"] == theirs["status"] == state
            for key in ("receiver", "version", "groupKey", "groupLabels", "commonLabels", "commonAnnotations"):
                assert ours[key] == theirs[key], key
            (our_alert,), (their_alert,) = ours["alerts"], theirs["alerts"]
            assert our_alert.keys() == their_alert.keys()
            for key in ("status", "labels", "annotations", "generatorURL", "fingerprint"):
                assert our_alert[key] == their_alert[key], key
            for key in ("startsAt", "endsAt"):
                assert moment(our_alert[key]) == moment(their_alert[key]), key


def amtool(address: str, *arguments: str) -> str:
    program = shutil.which("amtool")
    if program is None:
        pytest.skip("amtool is not installed (Debian package: prometheus-alertmanager)")
    command = [program, f"--alertmanager.url={address}", "alert", "query", "-o", "json", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


RULES = """
group: mine
rules:
  - {alert: TooHigh, scope: run, expr: loss > 100, severity: critical}
  - {alert: High, scope: run, expr: loss > 50, severity: warning}
"""


@pytest.mark.slow
def test_a_real_alertmanager_receives_groups_and_resolves_our_alerts(tmp_path: Path) -> None:
    """It groups by run: two firing rules are one notification of Alertmanager."""
    (tmp_path / "rules.yaml").write_text(RULES)
    with (
        consumer() as ops,
        alertmanager(tmp_path, ops.url, group_by="[run]", group_wait="500ms") as address,
    ):
        (tmp_path / "sentinel.toml").write_text(
            f"[daemon]\nhttp = 'off'\n[[receivers]]\nname = 'am'\ntype = 'alertmanager'\nurl = '{address}'\n"
        )
        options = ("--config", str(tmp_path / "sentinel.toml"), "--rules", str(tmp_path / "rules.yaml"))
        with daemon_process(*options) as (path, _), SimulatedRank(path) as rank:
            rank.hello()
            rank.steps(0, [1.0, 200.0])
            while len((fired := ops.next())["alerts"]) < 2:
                pass  # these began far in the past, and Alertmanager does not wait for the second
            seen = {one["labels"]["alertname"]: one for one in json.loads(amtool(address))}
            assert set(seen) == {"TooHigh", "High"}
            assert seen["TooHigh"]["labels"] == {
                "alertname": "TooHigh", "run": "train", "run_id": "r1", "severity": "critical"
            }  # fmt: skip
            ahead = moment(seen["TooHigh"]["endsAt"]) - datetime.datetime.now(datetime.UTC)
            assert datetime.timedelta(minutes=3) < ahead < datetime.timedelta(minutes=5)
            assert json.loads(amtool(address, "severity=warning"))[0]["labels"]["alertname"] == "High"
            rank.steps(2, [1.0])
            resolved = ops.next()
            while resolved["status"] == "firing":
                resolved = ops.next()
            assert amtool(address).strip() == "[]"
    assert fired["groupLabels"] == {"run": "train"}
    assert {alert["labels"]["alertname"] for alert in fired["alerts"]} == {"TooHigh", "High"}
    assert {alert["status"] for alert in resolved["alerts"]} == {"resolved"}


@pytest.mark.slow
@pytest.mark.parametrize("odd", [True, False])
def test_a_real_alertmanager_takes_whatever_texts_there_are_and_ends_before_beginnings(
    tmp_path: Path, odd: bool
) -> None:
    with consumer() as ops, alertmanager(tmp_path, ops.url) as address:
        cases = hostile.cases(60) if odd else [case(state="resolved")]
        if not odd:
            cases[0].resolved_time = cases[0].time - 3600  # a clock that was set back
        for one in cases:
            message = Message(run=one.run, run_id="r1", alert=one.alert, cases=(one,))
            assert asyncio.run(told(address, message)).fault is None
        assert len(json.loads(amtool(address))) == (60 if odd else 0)


async def told(address: str, message: Message) -> Delivery:
    receiver = Alertmanager(config.ReceiverSettings(name="am", type="alertmanager", url=address))
    try:
        return await receiver.deliver(message)
    finally:
        await receiver.close()


def test_what_follows_from_a_known_problem_is_inhibited_as_we_ship_it(tmp_path: Path) -> None:
    """The critical alert outranks the earlier warning, and inhibits, also after its end while the problem lasts."""
    shipped = yaml.safe_load((SOURCE / "deploy/alertmanager/alertmanager.yml").read_text())
    first = case("0.1", severity="warning", alert="GradientSpike")
    severe, joins = case("0.2"), case("0.3", severity="warning", alert="ExplodingGradient")
    over = case("0.2", "resolved")

    def message(*cases: Case) -> Message:
        return Message(
            run="train", run_id="r1", alert="GradientSpike", problem_id="0.1", cases=cases, quiet=frozenset({"0.3"})
        )

    with consumer() as ops, alertmanager(tmp_path, ops.url, inhibit=json.dumps(shipped["inhibit_rules"])) as address:
        assert asyncio.run(told(address, message(first))).fault is None
        assert ops.next()["commonLabels"]["alertname"] == "GradientSpike"
        assert asyncio.run(told(address, message(first, severe, joins))).fault is None
        assert ops.next()["commonLabels"] == {
            "alertname": "LossSpike", "run": "train", "run_id": "r1", "severity": "critical", "problem": "0.1"
        }  # fmt: skip
        assert asyncio.run(told(address, message(first, over, joins))).fault is None
        for state, names in (("--inhibited", {"ExplodingGradient"}), ("--active", {"GradientSpike", "LossSpike"})):
            assert {one["labels"]["alertname"] for one in json.loads(amtool(address, state))} == names


def test_a_silenced_alert_that_it_has_is_renewed_as_it_was_until_its_end() -> None:
    """It was not renewed, which Alertmanager announced as its end; after the silence it announced the alert again."""
    settings = "[[receivers]]\nname = 'am'\ntype = 'alertmanager'\nurl = 'http://am'\n"
    (made,), _ = make_routes(config.parse_settings(settings, Path("sentinel.toml")))
    fake, now = Fake(), [2e6]

    async def scenario() -> None:
        pipeline = Pipeline("train", "r1", [made._replace(receiver=fake)], outbox=Outbox(None), clock=lambda: now[0])
        pipeline.start()
        pipeline.put(case(alert="Hang"))
        await until(lambda: len(fake.got) == 1)
        silenced = msgspec.structs.replace(case(alert="Hang", ranks=64), silenced="3f9a1c")
        pipeline.put(silenced)
        pipeline.put(msgspec.structs.replace(case("0.2"), silenced="3f9a1c"))  # it never had this one
        for count in range(1, 9):
            (renewed,) = alerts(fake.got[-1], now[0])
            assert renewed["labels"]["alertname"] == "Hang"
            assert "members" not in renewed["annotations"]
            now[0] += RESENT_SECONDS
            assert moment(renewed["endsAt"]).timestamp() > now[0]
            pipeline.hurry()
            await until(lambda count=count: len(fake.got) > count)  # type: ignore[misc]
        pipeline.put(msgspec.structs.replace(silenced, state="resolved", resolved_time=now[0] - 1))
        now[0] += 1
        pipeline.hurry()
        await until(lambda: not pipeline.pending)
        assert moment(alerts(fake.got[-1], now[0])[0]["endsAt"]).timestamp() == now[0] - 2
        await pipeline.close()

    asyncio.run(scenario())


def test_a_consequence_that_became_a_problem_of_its_own_ends_and_inhibits_no_more() -> None:
    opener, moved = case("0.1", severity="warning", alert="GradientSpike"), case("0.2", "resolved")
    opener.problem_id, moved.problem_id = "0.1", "0.2"
    message = Message(run="train", run_id="r1", alert="GradientSpike", problem_id="0.1", cases=(opener, moved))
    now = moved.time + 100
    ends = {one["labels"]["alertname"]: moment(one["endsAt"]).timestamp() > now for one in alerts(message, now)}
    assert ends == {"GradientSpike": True, "LossSpike": False}
