"""Which receivers get what: routes, rate limits, and changed settings while alerts are being delivered."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from sentinel.config import settings as config
from sentinel.config.settings import SEVERITIES, Duration, Grouping
from sentinel.notify import DELIVERED, Delivery, Message, Origin, Route
from sentinel.notify.limiter import Limiter
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.routes import make_origin, make_routes
from tests.notify.cases import case
from tests.notify.test_pipeline import AT_ONCE, Fake, until

SETTINGS = """
[[receivers]]
name = "oncall"
type = "webhook"
url = "http://127.0.0.1:1/"
[[receivers]]
name = "team"
type = "webhook"
url = "http://127.0.0.1:1/"
severities = ["critical", "warning"]
"""


def told(routes: str, severity: str) -> set[str]:
    settings = config.parse_settings(SETTINGS + routes, Path("/etc/s.toml"))
    made, notes = make_routes(settings)
    assert not notes
    return {route.name for route in made if route.wants(case(severity=severity))}


BY_SEVERITY = "[[routes]]\nseverities=['critical']\nreceivers=['oncall']\n[[routes]]\nreceivers=['team']\n"
BY_RULE = "[[routes]]\nrules=['Loss*']\nreceivers=['oncall']\n{}[[routes]]\nreceivers=['team']\n"
BY_RUN = "[[routes]]\nruns=['{}']\nreceivers=['oncall']\n[[routes]]\nruns=['tr?in']\nreceivers=['team']\n"


@pytest.mark.parametrize(
    ("routes", "severity", "names"),
    [
        ("", "critical", {"oncall", "team"}),
        ("", "info", {"oncall"}),
        (BY_SEVERITY, "critical", {"oncall"}),
        (BY_SEVERITY, "warning", {"team"}),
        (BY_SEVERITY, "info", set()),
        (BY_RULE.format(""), "critical", {"oncall"}),
        (BY_RULE.format("continue=true\n"), "critical", {"oncall", "team"}),
        (BY_RULE.replace("Loss*", "Hang").format(""), "critical", {"team"}),
        (BY_RUN.format("r1"), "critical", {"oncall"}),
        (BY_RUN.format("prod-*"), "critical", {"team"}),
        (BY_RUN.format("prod-*").replace("tr?in", "x"), "critical", set()),
    ],
)
def test_the_first_route_that_matches_decides_who_is_told(routes: str, severity: str, names: set[str]) -> None:
    assert told(routes, severity) == names


def made(limiter: Limiter, fake: Fake, outbox: Outbox | None = None, **clock: object) -> Pipeline:
    route = Route("ops", fake, lambda _: True, 5.0, AT_ONCE, limiter)
    pipeline = Pipeline("train", "r1", [route], outbox=outbox or Outbox(None), **clock)  # type: ignore[arg-type]
    pipeline.start()
    return pipeline


def test_a_limit_is_over_any_window() -> None:
    limiter = Limiter([(2, 10.0), (1, 1.0)])
    assert limiter.wait(100.0) == 0
    limiter.took(100.0)
    assert limiter.wait(100.25) == 0.75
    limiter.took(101.0)
    assert limiter.wait(102.0) == 8.0
    assert limiter.wait(110.0) == 0
    limiter.rest(130.0)
    assert limiter.wait(110.0) == 20.0


def test_what_is_over_the_rate_limit_waits_critical_ones_first_is_counted_and_named_and_nothing_is_lost() -> None:
    async def scenario() -> None:
        now, fake = [1e9], Fake()
        pipeline = made(Limiter([(3, 3600.0)]), fake, clock=lambda: now[0])
        for number in range(10):
            pipeline.put(case(f"0.{number}", alert=f"Rule{number}", severity="critical" if number == 9 else "warning"))
        await until(lambda: len(fake.got) == 3 and pipeline.status()[0]["held"] == 7)
        assert fake.got[0].alert == "Rule9"
        assert fake.got[0].held == ()
        assert len(fake.got[2].held) == 7
        assert pipeline.pending == 7
        pipeline.put(case("0.9", "resolved", alert="Rule9", severity="critical"))
        for hour in range(1, 4):
            now[0] += 3600
            # This case is known already: the pipeline only looks at the clock.
            pipeline.put(case("0.0", alert="Rule0", severity="warning"))
            await until(lambda hour=hour: len(fake.got) >= 3 + 3 * hour or not pipeline.pending)  # type: ignore[misc]
        assert pipeline.pending == 0
        assert {message.alert for message in fake.got} == {f"Rule{number}" for number in range(10)}
        await pipeline.close()

    asyncio.run(scenario())


def test_a_receiver_that_asks_for_fewer_is_left_alone_for_all_of_them() -> None:
    async def scenario() -> None:
        now = [1e9]
        answers = [Delivery(fault="rate limited", detail="429", retry=True, after=30.0)]
        fake = Fake(lambda: answers.pop(0) if answers else DELIVERED)
        pipeline = made(Limiter(), fake, clock=lambda: now[0])
        for number in range(50):
            pipeline.put(case(f"0.{number}", alert=f"Rule{number}"))
        await until(lambda: pipeline.status()[0]["held"] == 49)
        assert len(fake.got) == 1
        now[0] += 31
        pipeline.put(case("0.50", alert="Rule50"))
        await until(lambda: pipeline.pending == 0)
        assert len(fake.got) == 52
        await pipeline.close()

    asyncio.run(scenario())


def test_the_next_accepted_message_says_what_was_given_up_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"

    async def first() -> None:
        pipeline = made(Limiter(), Fake(lambda: Delivery(fault="rejected", detail="it answers 400")), Outbox(path))
        pipeline.put(case())
        await until(lambda: pipeline.status()[0]["given_up"] == 1)
        await pipeline.close()

    async def second() -> list[Message]:
        fake = Fake()
        pipeline = made(Limiter(), fake, Outbox(path))
        for alert in ("Hang", "MemoryCreep"):
            pipeline.put(case("0.2", alert=alert))
            await until(lambda: pipeline.pending == 0)
        await pipeline.close()
        return fake.got

    asyncio.run(first())
    assert [message.lost for message in asyncio.run(second())] == [("LossSpike (it answers 400)",), ()]


def test_other_receivers_take_over_and_a_new_one_is_told_what_fires(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, both, new = Fake(), Fake(), Fake()
        routes = {
            name: Route(name, fake, lambda one: one.severity in SEVERITIES, 5.0, AT_ONCE, Limiter())
            for name, fake in (("old", old), ("both", both), ("new", new))
        }
        pipeline = Pipeline("train", "r1", [routes["old"], routes["both"]], outbox=Outbox(tmp_path / "r1.sqlite"))
        pipeline.start()
        pipeline.put(case())
        await until(lambda: pipeline.pending == 0 and bool(both.got))
        pipeline.replace([routes["both"], routes["new"]], Origin(dashboard="https://g.example/r1"))
        pipeline.put(case())
        await until(lambda: bool(new.got))
        pipeline.put(case(state="resolved"))
        await until(lambda: len(new.got) == 2 and len(both.got) == 2 and pipeline.pending == 0)
        assert len(old.got) == 1
        assert both.got[-1].origin.dashboard == new.got[-1].origin.dashboard == "https://g.example/r1"
        assert [row["receiver"] for row in pipeline.status()] == ["both", "new"]
        await pipeline.close()

    asyncio.run(scenario())


def test_a_receiver_that_was_told_gets_the_end_though_the_route_has_changed() -> None:
    async def scenario() -> None:
        fake = Fake()
        pipeline = made(Limiter(), fake)
        pipeline.put(case())
        await until(lambda: pipeline.pending == 0 and bool(fake.got))
        pipeline.replace([Route("ops", fake, lambda _: False, 5.0, AT_ONCE, Limiter())])
        pipeline.put(case(state="resolved"))
        pipeline.put(case("0.2", alert="Hang"))
        await until(lambda: len(fake.got) == 2 and pipeline.pending == 0)
        assert not fake.got[-1].firing
        await pipeline.close()

    asyncio.run(scenario())


def test_alertmanager_and_the_vendors_have_a_pace_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "[[receivers]]\nname='am'\ntype='alertmanager'\nurl='http://127.0.0.1:9093'\n"
        "[[receivers]]\nname='team'\ntype='slack'\nurl_env='S'\nrate_limit='2 per 1h'\n"
    )
    (am, team), _ = make_routes(config.parse_settings(text, Path("/etc/s.toml")))
    assert (am.grouping.wait, am.grouping.repeat) == (0, 60)
    assert team.grouping == Grouping()
    assert am.limiter.wait(0.0) == 0
    team.limiter.took(0.0)
    assert team.limiter.wait(0.0) == Duration(1)
    team.limiter.took(1.0)
    assert team.limiter.wait(2.0) == 3598


def test_what_messages_say_of_where_a_run_is() -> None:
    text = """
    [daemon]
    external_url = "https://grafana.example/{run}"
    [links]
    runbook = "https://wiki.example/runbook"
    page = "https://page.example/{host}/{user}/{run_id}"
    """
    origin = make_origin(config.parse_settings(text, Path("s.toml")), "a b", "r1", 0)
    host = socket.gethostname()
    assert origin == Origin(
        host=host,
        user="root",
        dashboard="https://grafana.example/a%20b",
        page=f"https://page.example/{host}/root/r1",
        runbook="https://wiki.example/runbook#{section}",
    )
    assert origin.link_section("loss-spike") == "https://wiki.example/runbook#loss-spike"
    assert origin.link_section("") == ""
    assert Origin(runbook="https://wiki.example/{section}/").link_section("hang") == "https://wiki.example/hang/"
