"""Health, token, Host and reload of a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import json
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from sentinel import wire
from sentinel.config import settings as config
from sentinel.daemon.frontend.discovery import Presence
from sentinel.daemon.frontend.http_frontend import HttpFrontend
from sentinel.node import paths
from sentinel.report.stored_runs import StoredRuns
from sentinel.web import http, visit
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import sentinel
from tests.waiting import until
from tests.web.conftest import Served

pytestmark = pytest.mark.processes


def test_ready_once_samples_flow(served: Served) -> None:
    assert served.get("/-/healthy").text == "healthy\n"
    before = served.get("/-/ready")
    assert (before.status_code, before.text) == (503, "no run is connected\n")
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        assert served.get("/-/ready").text == "no step has been reported yet\n"
        rank.steps(0, [1.0])
        until(lambda: served.get("/-/ready").status_code == 200, "readiness")


def test_the_api_requires_the_token(served: Served) -> None:
    for path in ("/api/status", "/api/incidents"):
        for token in ("", "Bearer", "Bearer wrong", "Bearer \u00e4"):
            answer = served.get(path, headers={"Authorization": token.encode()})
            assert answer.status_code == 401, (path, token)
            assert served.state["token"] not in answer.text
        assert served.get(path, headers=served.authorized()).status_code == 200


def test_the_api_writes_nan_as_text(served: Served) -> None:
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        rank.steps(0, [float("nan")])

        def loss() -> str:
            runs = served.get("/api/status", headers=served.authorized()).json()["runs"]
            return str(runs[0]["values"].get("loss", ""))

        assert until(loss, "the loss") == "NaN"
        cases = served.get("/api/incidents", headers=served.authorized()).json()
        assert [case["alert"] for case in cases] == ["NonFiniteLoss"]


def test_a_request_for_another_host_name_gets_nothing(served: Served) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        assert served.get("/metrics", headers={"Host": host}).status_code == 400, host
    assert served.get("/metrics", headers={"Host": "localhost:9477"}).status_code == 200


def test_wrong_paths_and_methods_are_answered_in_words(served: Served) -> None:
    absent = served.get("/nowhere")
    assert (absent.status_code, "/metrics" in absent.text) == (404, True)
    assert served.get("/api/secrets", headers=served.authorized()).status_code == 404
    other = httpx2.post(served.url + "/metrics")
    assert (other.status_code, sorted(other.headers["allow"].split(", "))) == (405, ["GET", "HEAD"])
    assert served.get("/-/reload", headers=served.authorized()).status_code == 405
    assert httpx2.head(served.url + "/metrics").status_code == 200


def reload(served: Served) -> httpx2.Response:
    return httpx2.post(served.url + "/-/reload", headers=served.authorized())


def told(rank: SimulatedRank, notices: int) -> str:
    """Return the texts of the next notices for the training terminal."""
    return "\n".join(rank.expect(wire.Notice).text for _ in range(notices))


def metric(served: Served, name: str) -> str:
    return next(line.split()[-1] for line in served.get("/metrics").text.splitlines() if line.startswith(name))


def test_the_rules_are_not_read_again_without_the_token(served: Served, settings: Path) -> None:
    (settings.parent / "rules" / "mine.yaml").write_text("no rules at all")
    for token in ("", "Bearer wrong"):
        answer = httpx2.post(served.url + "/-/reload", headers={"Authorization": token})
        assert answer.status_code == 401, token
    assert metric(served, "sentinel_config_last_reload_successful") == "1.0", "it was not looked at"


@pytest.mark.slow
def test_rules_are_read_again_and_a_bad_file_leaves_them(served: Served, settings: Path) -> None:
    mine = settings.parent / "rules" / "mine.yaml"
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        mine.write_text(mine.read_text().replace("loss > 5", "loss >"))
        answer = reload(served)
        assert answer.status_code == 400
        assert f"{mine}:3:" in answer.text
        assert metric(served, "sentinel_config_last_reload_successful") == "0.0"
        assert f"{mine}:3:" in sentinel("status").stdout
        rank.steps(0, [9.0])
        cases = until(lambda: served.get("/api/incidents", headers=served.authorized()).json(), "the old rule's alert")
        assert [case["alert"] for case in cases] == ["High"]
        mine.write_text("group: mine\nrules:\n  - {alert: Higher, expr: loss > 8, severity: warning}\n")
        assert reload(served).text == "reloaded\n"
        assert metric(served, "sentinel_config_last_reload_successful") == "1.0"
        rank.steps(1, [9.0])

        def states() -> list[tuple[str, str]]:
            cases = served.get("/api/incidents", headers=served.authorized()).json()
            return [(case["alert"], case["state"]) for case in cases] if len(cases) == 2 else []

        assert until(states, "the new rule's alert") == [("High", "resolved"), ("Higher", "firing")]
        assert "High (since step 0): over: its rule was changed or taken away" in told(rank, 2)
        assert f"{mine}:3:" not in sentinel("status").stdout


@pytest.mark.slow
def test_a_hangup_signal_reads_the_rules_again(served: Served, settings: Path) -> None:
    mine = settings.parent / "rules" / "mine.yaml"
    good = mine.read_text()
    mine.write_text("group: [")
    served.process.send_signal(signal.SIGHUP)
    until(lambda: metric(served, "sentinel_config_last_reload_successful") == "0.0", "the failed reload")
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        rank.steps(0, [9.0])
        cases = until(lambda: served.get("/api/incidents", headers=served.authorized()).json(), "the old rule's alert")
        assert [case["alert"] for case in cases] == ["High"]
    mine.write_text(good.replace("High", "Higher"))
    served.process.send_signal(signal.SIGHUP)
    until(lambda: metric(served, "sentinel_config_last_reload_successful") == "1.0", "the reload")
    assert served.process.poll() is None


def test_the_state_file_is_the_owners_and_goes_with_the_daemon(served: Served) -> None:
    file = paths.run_directory("r1") / paths.STATE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert served.state["pid"] == served.process.pid
    assert served.state["socket"] == str(served.socket)
    served.process.send_signal(signal.SIGTERM)
    assert ended(served.process) == 0
    assert not file.exists()


@pytest.mark.slow
def test_a_port_that_is_taken_is_passed_over(served: Served, settings: Path) -> None:
    settings.write_text(f"[daemon]\nhttp = {served.url.rpartition(':')[2]}\n")
    with daemon_process("--stay", run_id="r2"):
        file = paths.run_directory("r2") / paths.STATE
        until(file.exists, "the state file")
        assert served.url not in file.read_text()


def test_http_can_be_off(settings: Path) -> None:
    settings.write_text('[daemon]\nhttp = "off"\n')
    with daemon_process("--stay") as (socket, _), SimulatedRank(socket) as rank:
        rank.hello()
        file = paths.run_directory("r1") / paths.STATE
        assert '"http": ""' in until(lambda: file.exists() and file.read_text(), "the state file")


@pytest.mark.slow
def test_targets_of_killed_daemons_are_swept(served: Served, settings: Path, private_places: Path) -> None:
    folder = private_places / "discovery"
    settings.write_text(f'[daemon]\nhttp = 0\nfile_sd = "{folder}"\n')
    folder.mkdir()
    foreign = folder / "other.json"
    foreign.write_text("[]")

    def target(run: str) -> Path:
        return until(lambda: list(folder.glob(f"sentinel-{run}-*.json")), f"the target of {run}")[0]

    with daemon_process("--stay", run_id="r2"):
        killed = target("r2")
    assert killed.exists()
    with daemon_process("--stay", run_id="r3"), daemon_process("--stay", run_id="r4") as (_, process):
        kept, mine = target("r3"), target("r4")
        assert stat.S_IMODE(mine.stat().st_mode) == 0o644
        assert {path.name for path in folder.iterdir()} == {foreign.name, kept.name, mine.name}
        process.send_signal(signal.SIGTERM)
        ended(process)
        assert {path.name for path in folder.iterdir()} == {foreign.name, kept.name}


def test_a_daemon_takes_away_its_own_files_and_not_those_of_the_next(private_places: Path) -> None:
    one, two = (Presence(private_places, private_places) for _ in range(2))
    one.announce("127.0.0.1:1")
    two.announce("127.0.0.1:2")
    one.withdraw()
    one.announce("127.0.0.1:1")  # a start that took longer than the run
    assert json.loads((private_places / paths.STATE).read_text())["http"] == "http://127.0.0.1:2"
    (target,) = private_places.glob("sentinel-*.json")
    assert "127.0.0.1:2" in target.read_text()
    two.withdraw()
    assert list(private_places.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), "no HTTP: no port on 127.0.0.1 (Cannot"),
        (RuntimeError("a fault"), "HTTP failed; the daemon's log says why"),
    ],
)
def test_without_http_the_daemon_goes_on(
    private_places: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    async def live() -> None:
        front = HttpFrontend(private_places, config.DaemonSettings(), {}, tuple)
        task = asyncio.create_task(front.serve())
        await task
        status = front.status()
        assert status["http"] == ""
        assert status["trouble"][0].startswith(said)
        assert front._faults.count == isinstance(error, RuntimeError)
        await front.close(task)

    monkeypatch.setattr(http, "listener", fails)
    asyncio.run(live())
    assert list(private_places.iterdir()) == []


def test_the_server_sleeps_until_it_is_told_to_end(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ticks(*_: object) -> bool:
        raise AssertionError("ten times a second, in a processor that somebody trains on")

    async def served() -> httpx2.Response:
        server, listening = http.HttpServer(http.application(front, "t")), http.listener(0)
        task = asyncio.create_task(server.serve(listening))
        port = listening.getsockname()[1]
        answer = await asyncio.to_thread(httpx2.get, f"http://127.0.0.1:{port}/-/healthy")
        server.end()
        await asyncio.wait_for(task, 20)
        return answer

    monkeypatch.setattr(http.uvicorn.Server, "on_tick", ticks)
    front = HttpFrontend(private_places, config.DaemonSettings(), {}, tuple)
    answer = asyncio.run(served())
    assert answer.text == "healthy\n"
    assert email.utils.parsedate_to_datetime(answer.headers["date"]).tzinfo is not None


def test_http_is_imported_once_the_socket_listens() -> None:
    code = "import sys, sentinel.daemon.app; print({'prometheus_client', 'starlette', 'uvicorn'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert loaded.stdout == "set()\n", loaded.stderr


def test_in_a_pod_other_hosts_are_answered(private_places: Path) -> None:
    file = private_places / "config" / "sentinel" / "sentinel.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[daemon]\nhttp = 0\nlisten = "0.0.0.0"\n')
    with daemon_process("--stay"):
        state = paths.run_directory("r1") / paths.STATE
        until(state.exists, "the state file")
        url = json.loads(state.read_text())["http"]
        assert url.startswith("http://127.0.0.1:")
        elsewhere = {"Host": "trainer-0.trainers.svc:9477"}
        assert httpx2.get(f"{url}/metrics", headers=elsewhere).status_code == 200
        assert httpx2.get(f"{url}/api/status", headers=elsewhere).status_code == 401


def test_a_connection_stays_while_its_answer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of months takes longer to read than a connection may be idle."""
    monkeypatch.setattr(visit, "PATIENCE_SECONDS", 0.1)

    class Slow(StoredRuns):
        async def render_whole(self, run_ids: Sequence[str], zoom: tuple[float, float] | None) -> str:
            await asyncio.sleep(0.5)  # the connection is looked at four times meanwhile, by the same loop
            return "all of it"

    async def served() -> str:
        server, listening = http.HttpServer(http.application(Slow(), "t")), http.listener(0)
        task = asyncio.create_task(server.serve(listening))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/whole"
        try:
            async with httpx2.AsyncClient(timeout=60.0) as client:
                return (await client.get(address, headers={"Authorization": "Bearer t"})).text
        finally:
            server.end()
            await asyncio.wait_for(task, 20)

    assert asyncio.run(served()) == "all of it"


def test_connections_without_a_request_are_closed_to_make_room(
    private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a login node every user can connect, and each connection takes a file descriptor that ranks need."""
    monkeypatch.setattr(visit, "MOST", 2)
    monkeypatch.setattr(visit, "PATIENCE_SECONDS", 0.1)

    async def served() -> str:
        server, listening = http.HttpServer(http.application(front, "t")), http.listener(0)
        task = asyncio.create_task(server.serve(listening))
        port = listening.getsockname()[1]
        (silent, held), (drips, other), (third, over) = [
            await asyncio.open_connection("127.0.0.1", port) for _ in "123"
        ]
        other.write(b"GET /-/healthy HTT")
        for reader in (third, silent, drips):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        monkeypatch.setattr(visit, "PATIENCE_SECONDS", 30.0)  # a request may be delayed on a busy machine
        answer = await asyncio.to_thread(httpx2.get, f"http://127.0.0.1:{port}/-/healthy")
        for writer in (held, other, over):
            writer.close()
        server.end()
        await asyncio.wait_for(task, 20)
        return answer.text

    front = HttpFrontend(private_places, config.DaemonSettings(), {}, tuple)
    assert asyncio.run(asyncio.wait_for(served(), 20)) == "healthy\n"
