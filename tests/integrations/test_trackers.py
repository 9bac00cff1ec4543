"""Trackers in their offline modes: the script's own data is the same with and without Sentinel's marks."""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.toolkit import logs
from tests.hooks.conftest import FakeDaemon
from tests.programs import tracked
from tests.zygote import TRAINING, run_fork

ALERT = {
    "event": "fired", "alert": "NonFiniteLoss", "severity": "critical", "summary": "loss is nan at step 3", "step": 3,
    "first_step": 3, "resolved_step": None,
}  # fmt: skip
ENDED = {**ALERT, "event": "resolved", "resolved_step": 8}
OFFLINE = {
    "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet", "TRACKIO_DIR": "kept", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
LOSSES = [1.0 / (step + 1) for step in range(12)]


def run_script(folder: Path, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(Path(tracked.__file__)), *arguments]
    variables = {**os.environ, **OFFLINE, **environment}
    done = run_fork(command, TRAINING, cwd=folder, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stderr


def read_runs(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return run -> metric -> [(step, value)]."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for log in logs.find_logs([str(folder)]):
        for recording in logs.read(log.path):
            name = recording.run or log.path.relative_to(folder / "runs").as_posix()
            series = {metric: list(zip(*recording.series(metric), strict=True)) for metric in recording.names}
            found[name] = series
    return found


def split(series: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics that the script logged, and Sentinel's."""
    ours = {name: rows for name, rows in series.items() if name.startswith("sentinel/")}
    return {name: rows for name, rows in series.items() if name not in ours}, ours


class MarkingDaemon(FakeDaemon):
    """A daemon that switches on every tracker for the run `on`. When it has steps of a run it reports one incident,
    twice, as after a restart."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.answer = self.welcome
        self.told: list[socket.socket] = []

    def welcome(self, hello: wire.Hello) -> bytes:
        names = ("wandb", "mlflow", "trackio", "tensorboard") if hello.identity.run == "on" else ()
        return wire.frame(wire.Welcome(version="1", trackers=names))

    def _take(self, peer: socket.socket, message: wire.FromRank) -> None:
        super()._take(peer, message)
        if isinstance(message, wire.Batch) and peer not in self.told:
            self.told.append(peer)
            for alert in (ALERT, ENDED, ALERT, ENDED):
                peer.sendall(wire.frame(wire.Notice(id=str(alert["event"]), text="", alert=alert)))


@pytest.fixture
def marking(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MarkingDaemon]:
    with MarkingDaemon(private_places / "d.sock") as made:
        monkeypatch.setenv("SENTINEL_ADDRESS", made.address)
        yield made


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("way", ["wandb", "wandb with steps"])
def test_wandb(marking: MarkingDaemon, tmp_path: Path, way: str) -> None:
    """Marks are in the rows that the script commits, on an axis of their own; no mark replaces another."""
    run_script(tmp_path, way, "off", "on")
    files = [path for path in tmp_path.rglob("run-*.wandb") if path.is_file()]
    runs = {recording.run: recording for path in files for recording in logs.read(path)}
    found = {
        run: {name: list(zip(*recording.series(name), strict=True)) for name in recording.names}
        for run, recording in runs.items()
    }
    scale = 10 if way == "wandb with steps" else 1
    rows, ours = split(found["on"])
    without, nothing = split(found["off"])
    named = {"loss", "final"}
    assert {name: rows[name] for name in named} == {name: without[name] for name in named}
    assert rows["loss"] == [(scale * step, loss) for step, loss in enumerate(LOSSES)]
    assert rows["final"] == [(scale * 12, 1.0)]
    assert nothing == {}
    at = dict(ours["sentinel/step"])
    assert [(at[row], level) for row, level in ours["sentinel/NonFiniteLoss"]] == [(3, 3), (8, 0)]


@pytest.mark.processes
@pytest.mark.slow
def test_mlflow(marking: MarkingDaemon, tmp_path: Path) -> None:
    run_script(tmp_path, "mlflow", "off", "on")
    runs = read_runs(tmp_path)
    rows, ours = split(runs["on"])
    assert (rows, {}) == split(runs["off"])
    assert rows["loss"] == list(enumerate(LOSSES))
    assert ours == {"sentinel/NonFiniteLoss": [(3, 3), (8, 0)]}
    (tag,) = tmp_path.rglob("tags/sentinel/summary")
    assert tag.read_text().startswith("run 'on' ended after 12 steps")


@pytest.mark.processes
@pytest.mark.slow
def test_trackio(marking: MarkingDaemon, tmp_path: Path) -> None:
    run_script(tmp_path, "trackio", "off", "on")
    runs = read_runs(tmp_path)
    assert runs["on"] == runs["off"]
    assert runs["on"]["loss"] == list(enumerate(LOSSES))
    (file,) = tmp_path.rglob("p.db")
    with sqlite3.connect(file) as database:
        alerts = database.execute("SELECT run_name, title, level, step FROM alerts ORDER BY id").fetchall()
    assert alerts == [
        ("on", "sentinel/NonFiniteLoss", "error", 3), ("on", "sentinel/NonFiniteLoss", "info", 8),
        ("on", "sentinel/summary", "info", 11),
    ]  # fmt: skip


@pytest.mark.processes
@pytest.mark.slow
def test_tensorboard(marking: MarkingDaemon, tmp_path: Path) -> None:
    """Marks are in a folder of Sentinel's own: the script's file is not touched, and stays the newest of its folder."""
    run_script(tmp_path, "tensorboard", "off", "on")
    runs = read_runs(tmp_path)
    assert sorted(runs) == ["off", "on", "on/sentinel"]
    assert runs["on"] == runs["off"]
    assert runs["on/sentinel"] == {"sentinel/NonFiniteLoss": [(3, 3), (8, 0)]}


@pytest.mark.processes
@pytest.mark.slow
def test_a_setting_switches_it_on(tmp_path: Path) -> None:
    """With a real daemon, the tracker shows the incident that its rules find, and the summary of the run."""
    (tmp_path / "sentinel.toml").write_text("[daemon]\nhttp = 'off'\n[trackers]\ntensorboard = true\n")
    run_script(tmp_path, "tensorboard", "on", SENTINEL_CONFIG=str(tmp_path / "sentinel.toml"))
    runs = read_runs(tmp_path)
    assert runs["on"]["loss"] == [(step, pytest.approx(loss)) for step, loss in enumerate(LOSSES)]
    assert runs["on/sentinel"]["sentinel/NonFiniteLoss"][0] == (3, 3)
    assert runs["on/sentinel"]["sentinel/incidents/critical"][0][0] == 11
