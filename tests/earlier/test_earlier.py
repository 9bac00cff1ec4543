"""Files of an earlier version are read, and its wire messages understood; README.md lists the files."""

from __future__ import annotations

import json
import math
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.node import paths
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import HEALTHY
from tests.daemon.test_daemon import sentinel as command
from tests.earlier.make import BROKEN, EVERY, FAULT, RECORDED, SETTINGS, Training
from tests.hooks.conftest import FakeDaemon, daemon
from tests.notify.consumer import Consumer, consumer
from tests.rollback.training import assert_same
from tests.waiting import until

__all__ = ["daemon"]

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Extract what an earlier version left, with new times, as old files would be deleted."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in tmp_path.rglob("*"):
        os.utime(path)
    (folder,) = tmp_path.iterdir()
    return folder


@pytest.fixture
def state(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the earlier version's histories and silences be found where the current version looks for its own."""
    silences = json.loads((earlier / "state" / "silences.json").read_text())
    for silence in silences:
        silence["until"] += time.time() - silence["began"]
    (earlier / "state" / "silences.json").write_text(json.dumps(silences))
    monkeypatch.setenv("SENTINEL_STATE", str(earlier / "state"))
    return earlier / "state"


@pytest.fixture
def pager(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Consumer]:
    """The receiver that did not answer then, and does now."""
    settings = tmp_path_factory.mktemp("settings") / "sentinel.toml"
    settings.write_text(SETTINGS)
    with consumer() as made:
        monkeypatch.setenv("PAGER", made.url)
        monkeypatch.setenv("SENTINEL_CONFIG", str(settings))
        yield made


def read_frames(path: Path) -> list[bytes]:
    """Return the bodies of the recorded messages."""
    return list(wire.Frames().feed(path.read_bytes()))


def list_cases(run: str) -> dict[str, dict[str, Any]]:
    """Return the incidents of a run, by alert."""
    return {case["alert"]: case for case in json.loads(command("incidents", "--json", "--run", run).stdout)}


@pytest.mark.slow
@pytest.mark.usefixtures("state")
def test_incidents_are_listed_and_shown() -> None:
    spike = list_cases("finished")["LossSpike"]
    assert (spike["state"], spike["step"]) == ("rolled_back", FAULT)
    assert spike["done"] == [f"rolled back to step {FAULT - EVERY} at the exit of step {spike['resolved_step']}"]
    assert {name: case["step"] for name, case in list_cases("killed").items()} == {
        "NonFiniteLoss": BROKEN,
        "NonFiniteGradient": BROKEN,
    }
    shown = command("incidents", "show", spike["id"], "--run", "finished")
    assert shown.returncode == 0, shown.stderr
    assert "3.weight" in shown.stdout


@pytest.mark.usefixtures("state")
def test_a_report_is_written(tmp_path: Path) -> None:
    for run, alert in (("finished", "LossSpike"), ("killed", "NonFiniteLoss")):
        done = command("report", run, "--output", str(tmp_path / "report.html"))
        assert (done.returncode, done.stderr) == (0, "")
        assert alert in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("state")
def test_rules_are_backtested_on_a_history() -> None:
    done = command("rules", "backtest", "finished", "--json")
    (run,) = json.loads(done.stdout)["runs"]
    assert [(alert["alert"], alert["step"]) for alert in run["alerts"]] == [("LossSpike", FAULT)]


def test_a_recording_is_judged(earlier: Path) -> None:
    done = command("replay", str(earlier / "run.rec"), "--json")
    found = {case["alert"]: case["step"] for case in json.loads(done.stdout)}
    assert found["NonFiniteLoss"] == RECORDED - 20


def test_a_run_goes_on_from_a_snapshot_to_the_bit(earlier: Path) -> None:
    training = Training()
    training.step()
    (snapshot,) = (earlier / "snapshots").iterdir()
    step = sentinel.resume(
        training.model, training.optimizer, scheduler=training.schedule, directory=earlier / "snapshots"
    )
    assert step == int(snapshot.name.removeprefix("step-")) + 1
    assert_same(training.list_state(), torch.load(earlier / "expected.pt", weights_only=True))


@pytest.mark.slow
@pytest.mark.processes
def test_a_daemon_goes_on_delivers_what_waited_and_honours_the_silence(
    earlier: Path, state: Path, pager: Consumer
) -> None:
    hello = wire.from_rank(read_frames(earlier / "killed.rank")[0])
    assert isinstance(hello, wire.Hello)
    with History(state / "runs" / "killed-1.sqlite") as history:
        seq = history.last_seq(0) + 1
    told = set[tuple[str, str]]()

    def is_told(*wanted: tuple[str, str]) -> bool:
        while not pager.received.empty():
            told.update((one["labels"]["alertname"], one["status"]) for one in pager.next()["alerts"])
        return told.issuperset(wanted)

    (silence,) = json.loads((state / "silences.json").read_text())
    with daemon_process(run_id="killed-1") as (path, _), SimulatedRank(path) as rank:
        rank.identity = msgspec.structs.replace(hello.identity, pid=os.getpid())
        rank.hello(next_seq=seq)
        until(lambda: is_told(("NonFiniteLoss", "firing"), ("NonFiniteGradient", "firing")), "what waited")
        healthy = len(HEALTHY)
        rank.steps(seq, HEALTHY, grad_norm=[1.0] * healthy)
        until(lambda: is_told(("NonFiniteLoss", "resolved"), ("NonFiniteGradient", "resolved")), "their end")
        rank.steps(seq + healthy, [9.0] * 5, grad_norm=[1.0] * 5)
        until(lambda: "LossSpike" in list_cases("killed"), "the spike")
        assert list_cases("killed")["LossSpike"]["silenced"] == silence["id"]
        rank.say(wire.Goodbye())
        rank.expect(wire.Kept)
    assert not is_told(("LossSpike", "firing"))
    with History(state / "runs" / "killed-1.sqlite") as history:
        assert len(history.attempts()) == 1
        loss = history.series("loss")
    assert list(loss.seqs) == list(range(seq + healthy + 5))
    assert math.isnan(loss.values[BROKEN])


@pytest.mark.slow
@pytest.mark.processes
def test_a_daemon_understands_earlier_hooks(earlier: Path) -> None:
    """All that a rank said from its start to its end is replayed to a current daemon."""
    with daemon_process(run_id="finished-1") as (path, process):
        with SimulatedRank(path) as rank:
            for body in read_frames(earlier / "finished.rank"):
                rank.send_raw(len(body).to_bytes(4, "big") + body)
            rank.expect(wire.Kept)
        assert ended(process) == 0
    with History(paths.histories()[0]) as history:
        steps = list(history.series("loss").seqs)
    assert steps == list(range(steps[-1] + 1))
    assert list_cases("finished")["LossSpike"]["step"] == FAULT


@pytest.mark.slow
def test_hooks_understand_an_earlier_daemon(earlier: Path, daemon: FakeDaemon) -> None:
    """Hooks accept an earlier daemon's Welcome, and can read all that it said to other runs."""
    bodies = [body for run in ("finished", "killed") for body in read_frames(earlier / f"{run}.daemon")]
    assert all(map(wire.is_known, bodies))
    said = [type(wire.to_rank(body)) for body in bodies]
    assert {wire.Welcome, wire.Notice, wire.Attend, wire.Prepare, wire.Commit, wire.Publish, wire.Kept} <= set(said)
    welcome = bodies[said.index(wire.Welcome)]
    daemon.answer = lambda _: len(welcome).to_bytes(4, "big") + welcome
    training = Training()
    with sentinel.attach(training.model, training.optimizer) as monitor:
        daemon.wait(lambda: monitor.state == "streaming")
        for _ in range(3):
            training.step()
        daemon.wait(lambda: 2 in daemon.seqs())


def test_no_message_lacks_what_the_other_version_needs(earlier: Path) -> None:
    """A field that one version requires is sent by the other, and has the same type in both."""
    _, now = msgspec.json.schema_components([*get_args(wire.FromRank), *get_args(wire.ToRank)])
    then = json.loads((earlier / "messages.json").read_text())
    both = {name for name in now.keys() & then.keys() if "properties" in now[name]}
    assert {"Hello", "Batch", "Goodbye", "Welcome", "Prepare", "Commit"} <= both
    for name in both:
        for one, other in ((now, then), (then, now)):
            assert set(one[name].get("required", ())) <= other[name]["properties"].keys(), name
        for field in now[name]["properties"].keys() & then[name]["properties"].keys():
            kinds = [schema[name]["properties"][field].get("type") for schema in (now, then)]
            assert kinds[0] == kinds[1], f"{name}.{field}"
