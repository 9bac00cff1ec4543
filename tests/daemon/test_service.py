"""A node's service for all users of the node, each of whom sees and changes only their own runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.daemon.tenancy.tenants import Tenants, service_directory
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.node.question import ask_daemon
from sentinel.notify import silences
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import sentinel
from tests.second_user import NOBODY, SOMEBODY, as_user

pytestmark = [pytest.mark.processes, pytest.mark.root]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the socket of a service, in a place that all users can reach."""
    with tempfile.TemporaryDirectory(prefix="sv", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("SENTINEL_STATE", f"{folder}/state")
        path = Path(folder, "sentinel", paths.SOCKET)
        with started(path) as process:
            yield path
            process.terminate()
            assert ended(process) == 0
        assert not path.exists()


def started(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sentinel", "daemon", "--service", "--directory", str(path.parent)]
    process = subprocess.Popen(command, cwd="/", stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not answers(path):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def answers(path: Path) -> bool:
    try:
        ask_daemon(path, "status")
    except ConfigError:
        return False
    return True


def training(path: Path, run_id: str) -> Callable[[], Any]:
    """Return a function that runs a training with an incident, and returns what its user then sees of the node."""

    def train() -> Any:
        with SimulatedRank(path, run_id=run_id) as rank:
            rank.hello()
            rank.steps(0, [1.0, math.nan])
            rank.expect(wire.Notice)
            seen = seen_by_me(path)
            rank.say(wire.Goodbye())
            rank.expect(wire.Kept)
        return seen

    return train


def seen_by_me(path: Path) -> dict[str, list[str]]:
    runs = [run["run_id"] for run in ask_daemon(path, "status")["runs"]]
    return {"runs": runs, "incidents": sorted({case["run_id"] for case in ask_daemon(path, "incidents")})}


def test_a_directory_that_serves_others_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "of somebody").touch()
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"not empty.*chmod 755 it yourself"):
        service_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777


@pytest.mark.slow
def test_each_user_sees_their_own_and_root_all(service: Path) -> None:
    assert stat.S_IMODE(service.stat().st_mode) == 0o666
    assert stat.S_IMODE(service.parent.stat().st_mode) == 0o755
    with SimulatedRank(service, run_id="roots") as rank:
        rank.hello()
        assert as_user(NOBODY, training(service, "nobodys")) == {"runs": ["nobodys"], "incidents": ["nobodys"]}
        assert as_user(SOMEBODY, training(service, "somebodys")) == {"runs": ["somebodys"], "incidents": ["somebodys"]}
        assert seen_by_me(service)["runs"] == ["roots", "nobodys", "somebodys"]
    state = paths.service_state()
    assert (state / str(NOBODY) / "runs" / "nobodys.sqlite").exists()
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


@pytest.mark.slow
def test_a_run_id_that_two_users_have_is_a_run_of_each(service: Path) -> None:
    """A scheduler's run id is easy to guess: who comes first must neither get at the other's run nor keep it out."""

    def other() -> tuple[str, list[Any]]:
        with SimulatedRank(service, 0, 2, run_id="job-7", session="s0") as rank:
            rank.hello()
            told = rank.expect(wire.Notice).text
            with SimulatedRank(service, 1, 2, run_id="job-7", session="s1") as second:
                second.hello()
                (run,) = ask_daemon(service, "status")["runs"]
                second.say(wire.Goodbye())
                second.expect(wire.Kept)
            rank.say(wire.Goodbye())
            rank.expect(wire.Kept)
        return told, [run["run_id"], len(run["ranks"])]

    with SimulatedRank(service, run_id="job-7") as rank:
        rank.hello()
        apart = f"job-7.{SOMEBODY}"
        told, seen = as_user(SOMEBODY, other)
        assert told == f"[sentinel] run id job-7 is another user's too: this run is {apart} here"
        assert seen == [apart, 2]
        rank.steps(0, [math.nan])
        assert rank.expect(wire.Notice)
        assert seen_by_me(service)["runs"] == ["job-7", apart]
        assert {case["run_id"] for case in rank.ask("incidents")} == {"job-7"}
    state = paths.service_state()
    assert (state / str(SOMEBODY) / "runs" / f"{apart}.sqlite").exists()


def test_run_ids_of_two_users_survive_a_restart_of_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SENTINEL_STATE", str(tmp_path))
    identity = wire.Identity(run="train", run_id="job-7", rank=0, world_size=1, session="s")
    hello = wire.Hello(version="t", identity=identity)
    tenants = Tenants(service=True)
    given = {uid: tenants.admit_rank(hello, uid).identity.run_id for uid in (NOBODY, SOMEBODY)}
    assert given == {NOBODY: "job-7", SOMEBODY: f"job-7.{SOMEBODY}"}
    for uid in given:
        file = tenants.history(given[uid])
        file.parent.mkdir(parents=True)
        file.touch()
    tenants.leave("job-7")
    assert tenants.admit_rank(hello, SOMEBODY).identity.run_id == given[SOMEBODY], "the other one's end changes nothing"
    after = Tenants(service=True)
    assert {uid: after.admit_rank(hello, uid).identity.run_id for uid in (SOMEBODY, NOBODY)} == given


@pytest.mark.slow
def test_ended_runs_are_found_after_a_restart_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="sv", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("SENTINEL_STATE", f"{folder}/state")
        path = Path(folder, "sentinel", paths.SOCKET)
        with started(path) as process:
            as_user(NOBODY, training(path, "nobodys"))
            process.kill()
        with started(path) as process:
            assert as_user(NOBODY, lambda: seen_by_me(path)) == {"runs": [], "incidents": ["nobodys"]}
            assert as_user(SOMEBODY, lambda: seen_by_me(path)) == {"runs": [], "incidents": []}
            assert seen_by_me(path)["incidents"] == ["nobodys"]
            monkeypatch.setenv("SENTINEL_ADDRESS", f"unix:{path}")
            monkeypatch.setenv("SENTINEL_STATE", f"{folder}/mine")
            found = sentinel("incidents", "--json")
            assert (found.returncode, "nobodys" in found.stdout) == (1, True)
            assert " until the end " in sentinel("incidents").stdout
            process.kill()


@pytest.mark.slow
def test_a_run_id_that_is_no_name_is_refused(service: Path) -> None:
    for run_id in ("../../etc/cron", "", "a/b", "x" * 41):
        with SimulatedRank(service, run_id=run_id) as rank:
            rank.say(wire.Hello(version="test", identity=rank.identity))
            assert "expected 1 to 40 letters, digits, - or _" in rank.expect(wire.Refused).reason, run_id


def test_only_root_can_start_a_service_and_only_in_a_directory_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    os.chown(tmp_path / "mine", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"no directory of root's"):
        service_directory(tmp_path / "mine")
    (tmp_path / "link").symlink_to("/tmp")
    with pytest.raises(ConfigError, match=r"no directory of root's"):
        service_directory(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    with pytest.raises(ConfigError, match="start it as root"):
        service_directory(tmp_path / "new")


def test_any_other_daemon_serves_its_own_user_only() -> None:
    def knock(path: Path) -> Callable[[], str]:
        def refused() -> str:
            with SimulatedRank(path) as rank:
                return rank.expect(wire.Refused).reason

        return refused

    with daemon_process() as (path, _):
        for folder in path.parents:
            folder.chmod(folder.stat().st_mode | 0o055)
        path.chmod(0o666)
        assert as_user(NOBODY, knock(path)) == f"this daemon belongs to user 0, you are user {NOBODY}"


def silenced(path: Path, run_id: str, order: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that runs a training with an incident, and says if it was silenced and which silences hold."""

    def train() -> Any:
        known = ask_daemon(path, "silence", order)
        with SimulatedRank(path, run_id=run_id) as rank:
            rank.hello()
            rank.steps(0, [1.0, math.nan])
            while not (cases := [case for case in ask_daemon(path, "incidents") if case["run_id"] == run_id]):
                time.sleep(0.01)
            rank.say(wire.Goodbye())
            rank.expect(wire.Kept)
        return {"silenced": bool(cases[0]["silenced"]), "ids": [one["id"] for one in known]}

    return train


@pytest.mark.slow
def test_a_silence_is_that_of_the_user_who_asked_and_of_root_for_all(service: Path) -> None:
    def silence(identity: str, alert: str = "*") -> dict[str, Any]:
        now = time.time()
        return {"add": {"id": identity, "alert": alert, "began": now, "until": now + 600}}

    assert as_user(NOBODY, silenced(service, "n1", silence("abc"))) == {"silenced": True, "ids": ["abc"]}
    assert as_user(SOMEBODY, silenced(service, "s1", {})) == {"silenced": False, "ids": []}
    assert as_user(NOBODY, silenced(service, "n2", {"end": "abc"})) == {"silenced": False, "ids": ["abc"]}
    with pytest.raises(AssertionError, match="no silence abc holds"):
        as_user(SOMEBODY, lambda: ask_daemon(service, "silence", {"end": "abc"}))
    with pytest.raises(AssertionError, match="Expected"):
        as_user(SOMEBODY, lambda: ask_daemon(service, "silence", {"add": {"id": 3}}))


@pytest.mark.slow
def test_a_silence_of_root_reaches_a_service_that_cannot_read_roots_own_file(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under systemd the service sees root's home read-only, and has a place for histories of its own."""
    state = os.environ["SENTINEL_STATE"]
    monkeypatch.setenv("SENTINEL_ADDRESS", f"unix:{service}")
    monkeypatch.setenv("SENTINEL_STATE", str(tmp_path))
    assert "is silenced until" in sentinel("silence", "NonFiniteLoss", "--for", "1h").stdout
    (silence,) = json.loads(sentinel("silence", "--list", "--json").stdout)
    assert as_user(NOBODY, silenced(service, "n1", {})) == {"silenced": True, "ids": []}
    assert silenced(service, "r1", {})() == {"silenced": True, "ids": [silence["id"]]}
    (tmp_path / silences.FILE).unlink()  # as in another environment of root's
    assert "is no longer silenced" in sentinel("silence", "--end", silence["id"]).stdout
    assert as_user(NOBODY, silenced(service, "n2", {})) == {"silenced": False, "ids": []}
    assert sentinel("silence", "--list").returncode == 0
    assert "no silence" in sentinel("silence", "--end", silence["id"]).stderr
    monkeypatch.setenv("SENTINEL_STATE", state)


@pytest.mark.slow
def test_a_silence_that_the_service_does_not_take_is_an_error(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(os.environ["SENTINEL_STATE"], "0").write_text("in the way")
    monkeypatch.setenv("SENTINEL_ADDRESS", f"unix:{service}")
    monkeypatch.setenv("SENTINEL_STATE", str(tmp_path))
    refused = sentinel("silence", "NonFiniteLoss", "--for", "1h")
    assert "silences cannot be kept there" in refused.stderr
    assert "holds for daemons of your own alone" in refused.stderr
    assert "is silenced" not in refused.stdout


@pytest.mark.slow
def test_without_a_place_for_histories_runs_are_watched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="sv", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "state").write_text("in the way")
        monkeypatch.setenv("SENTINEL_STATE", f"{folder}/state")
        path = Path(folder, "sentinel", paths.SOCKET)
        with killed_at_the_end(started(path)) as process, SimulatedRank(path) as rank:
            rank.say(wire.Hello(version="test", identity=rank.identity))
            assert "no place for the histories" in rank.expect(wire.Welcome).notes[-1]
            rank.steps(0, [1.0, math.nan])
            assert "NonFiniteLoss" in rank.expect(wire.Notice).text
            assert ask_daemon(path, "status")["runs"][0]["trouble"] == "no history is kept"
            process.terminate()
            assert ended(process) == 0


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
