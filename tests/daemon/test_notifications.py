"""A real daemon and a webhook's receiver: each message arrives once, whatever is killed in between."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.cli.client import ask_daemons
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import sentinel
from tests.notify.consumer import HANG, Consumer, check, consumer

pytestmark = pytest.mark.processes

SECRET = "s3cr3ts3cr3ts3cr3ts3cr3t"
HIGH, LOW = 101.0, 1.0


@pytest.fixture
def ops() -> Iterator[Consumer]:
    with consumer() as made:
        yield made


@pytest.fixture
def options(ops: Consumer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Return the options of a daemon with one rule that is easily fired, and one receiver."""
    monkeypatch.setenv("OPS", f"{ops.url}/{SECRET}")
    (tmp_path / "rules.yaml").write_text(
        "group: mine\nrules:\n  - alert: TooHigh\n    scope: run\n    expr: loss > 100\n    severity: warning\n"
    )
    return ("--config", write(tmp_path), "--rules", str(tmp_path / "rules.yaml"))


def write(folder: Path, wait: str = "0s") -> str:
    path = folder / "sentinel.toml"
    path.write_text(
        f"[daemon]\nhttp = 'off'\n[grouping]\nwait = '{wait}'\ninterval = '0s'\n"
        "[[receivers]]\nname = 'ops'\ntype = 'webhook'\nurl_env = 'OPS'\n"
    )
    return str(path)


def status() -> dict[str, Any]:
    (run,) = json.loads(sentinel("status", "--json").stdout)
    assert isinstance(run, dict)
    return run


def nothing_more(ops: Consumer) -> bool:
    try:
        ops.received.get_nowait()
    except queue.Empty:
        return True
    return False


def test_an_incident_and_its_end_are_sent_and_the_url_is_kept_nowhere(
    ops: Consumer, options: tuple[str, ...], private_places: Path
) -> None:
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        fired = ops.next()
        rank.steps(2, [LOW])
        resolved = ops.next()
        shown = status()
        (counts,) = shown["notifications"]
        assert (counts["receiver"], counts["pending"], counts["failed"], counts["trouble"]) == ("ops", 0, {}, "")
        rank.say(wire.Goodbye())
        assert ended(process) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    for payload in (fired, resolved):
        check(payload)
    assert (fired["status"], resolved["status"]) == ("firing", "resolved")
    assert fired["alerts"][0]["fingerprint"] == resolved["alerts"][0]["fingerprint"]
    assert nothing_more(ops)
    kept = b"".join(file.read_bytes() for file in private_places.rglob("*") if file.is_file())
    assert SECRET.encode() not in kept + log + json.dumps(shown).encode()


@pytest.mark.parametrize("stays", [False, True], ids=["the daemon exits", "the daemon stays"])
def test_what_waits_is_sent_when_the_run_ends(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path, stays: bool
) -> None:
    write(tmp_path, wait="1h")
    with daemon_process(*options, *["--stay"] * stays) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        rank.expect(wire.Notice)
        rank.say(wire.Goodbye())
        assert ops.next()["status"] == "firing"
        assert stays or ended(process) == 0


@pytest.mark.slow
@pytest.mark.parametrize("delivered", [True, False])
def test_after_kill_9_only_what_was_not_delivered_is_sent(
    ops: Consumer, options: tuple[str, ...], delivered: bool
) -> None:
    if not delivered:
        ops.answers.append(HANG)
    session = {"session": "s"}
    with daemon_process(*options) as (path, process), SimulatedRank(path, **session) as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        rank.expect(wire.Notice)
        if delivered:
            assert ops.next()["status"] == "firing"
            while status()["notifications"][0]["pending"]:
                pass
        else:
            assert ops.hung.wait(60)
        process.kill()
        process.wait()
    with daemon_process(*options) as (path, process), SimulatedRank(path, **session) as rank:
        rank.hello(next_seq=2)
        if not delivered:
            assert ops.next()["status"] == "firing"
        rank.steps(2, [HIGH, LOW])
        over = ops.next()
        assert (over["status"], len(over["alerts"])) == ("resolved", 1)
        rank.say(wire.Goodbye())
        assert ended(process) == 0
    assert nothing_more(ops)


@pytest.mark.slow
def test_after_kill_9_and_a_change_of_the_rules_a_page_about_the_host_stays_open(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    rules = "group: mine\nrules:\n  - alert: HostOdd\n    scope: node\n    expr: host_memory_available_bytes > 0\n"
    (tmp_path / "rules.yaml").write_text(rules)
    with daemon_process(*options) as (path, process), SimulatedRank(path, session="s") as rank:
        rank.hello()
        rank.steps(0, [LOW] * 5)
        assert ops.next()["status"] == "firing"
        while status()["notifications"][0]["pending"]:
            pass
        process.kill()
        process.wait()
    (tmp_path / "rules.yaml").write_text(f"{rules}  - alert: Another\n    scope: run\n    expr: loss > 1000\n")
    with daemon_process(*options) as (path, process), SimulatedRank(path, session="s") as rank:
        rank.hello(next_seq=5)
        rank.steps(5, [LOW] * 3)
        while not any(row["rule"] == "HostOdd" and row["state"] == "firing" for row in status()["rules"]):
            pass
        rank.say(wire.Goodbye())
        assert ended(process) == 0
    assert nothing_more(ops)
    (case,) = json.loads(sentinel("incidents", "--json").stdout)
    assert case["id"] == "0.1"


def test_a_receiver_that_hangs_holds_nothing_up(ops: Consumer, options: tuple[str, ...]) -> None:
    ops.answers.append(HANG)
    with daemon_process(*options) as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        assert "TooHigh" in rank.expect(wire.Notice).text
        assert ops.hung.wait(60)
        rank.steps(2, [LOW])
        assert "over at step 2" in rank.expect(wire.Notice).text
        assert status()["notifications"][0]["pending"] == 1
        shown = sentinel("status").stdout
        assert "notifies  ops: 0 sent, 1 waiting" in shown


@pytest.mark.slow
def test_a_silenced_incident_is_kept_and_not_sent(ops: Consumer, options: tuple[str, ...]) -> None:
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        assert sentinel("silence", "Too*", "--for", "1h", "--comment", "new data").returncode == 0
        while not status()["silences"]:
            pass
        rank.steps(0, [LOW, HIGH])
        while not (found := json.loads(sentinel("incidents", "--json").stdout)):
            pass
        assert (found[0]["state"], bool(found[0]["silenced"])) == ("firing", True)
        assert " silenced " in sentinel("incidents").stdout
        assert "silenced  Too* until" in sentinel("status").stdout
        (held,) = json.loads(sentinel("silence", "--list", "--json").stdout)
        assert sentinel("silence", "--end", held["id"]).returncode == 0
        assert "TooHigh" in rank.expect(wire.Notice).text
        assert ops.next()["status"] == "firing"
        rank.say(wire.Goodbye())
        assert ended(process) == 0


def test_broken_settings_stop_a_daemon_started_by_hand_and_not_a_run(tmp_path: Path) -> None:
    broken = tmp_path / "sentinel.toml"
    broken.write_text("[grouping]\nwiat = '5s'\n")
    by_hand = sentinel("daemon", "--config", str(broken))
    assert by_hand.returncode == 2
    assert f"{broken}:2: unknown key 'wiat'" in by_hand.stderr
    options = ("--config", str(broken), "--started-by", str(os.getpid()))
    with daemon_process(*options) as (path, _), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="test", identity=rank.identity))
        (note,) = rank.expect(wire.Welcome).notes
        assert note.startswith(f"settings not used: {broken}:2: unknown key 'wiat'")


def test_what_a_former_attempt_left_open_is_over(ops: Consumer, options: tuple[str, ...]) -> None:
    with daemon_process(*options) as (path, process):
        with SimulatedRank(path, session="first") as rank:
            rank.hello()
            rank.steps(0, [LOW, HIGH])
            assert ops.next()["status"] == "firing"
            with SimulatedRank(path, session="second") as again:
                again.hello()
                over = ops.next()
                again.say(wire.Goodbye())
        assert ended(process) == 0
    assert over["status"] == "resolved"
    assert over["alerts"][0]["annotations"]["done"] == "over: attempt 1 began"
    assert nothing_more(ops)


@pytest.mark.slow
def test_what_could_not_be_delivered_is_reported_where_people_look(ops: Consumer, options: tuple[str, ...]) -> None:
    ops.answers += [500] * 100
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        ops.next()
        while not status()["notifications"][0]["failed"]:
            pass
        process.terminate()
        assert ended(process) == 0
    shown = sentinel("incidents", "--run", "train")
    assert shown.stderr == "sentinel: run train: TooHigh was not delivered to ops (it answers 500)\n"
    assert shown.returncode == 1


def test_receivers_are_read_again_and_a_mistake_leaves_them_as_they_were(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Path(write(tmp_path))
    with consumer() as other, daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        assert ops.next()["status"] == "firing"
        former = settings.read_text()
        settings.write_text(former + "[[receivers]]\nname = 'ops'\n")
        process.send_signal(signal.SIGHUP)
        while not (trouble := daemon_trouble()):
            pass
        assert f"{settings}:10: type is missing" in trouble[0]
        settings.write_text(former.replace("'ops'", "'other'").replace("url_env = 'OPS'", f"url = '{other.url}'"))
        process.send_signal(signal.SIGHUP)
        assert other.next()["status"] == "firing"
        assert daemon_trouble() == []
        rank.steps(2, [LOW])
        assert other.next()["status"] == "resolved"
        assert [row["receiver"] for row in status()["notifications"]] == ["other"]
    assert nothing_more(ops)


def daemon_trouble() -> list[str]:
    (answer,) = ask_daemons("status")
    found: list[str] = answer["trouble"]
    return found
