"""The demo and its script as a new user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.demo.trainee import SCRIPT

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.mark.slow
@needs_torch
@pytest.mark.processes
def test_the_script_runs_by_hand_and_is_the_same_alone(tmp_path: Path) -> None:
    for name, changes in (("watched", {}), ("alone", {"SENTINEL_DISABLED": "1"})):
        command = [sys.executable, str(SCRIPT), "--steps", "20", "--log", str(tmp_path / name)]
        done = subprocess.run(
            command, env=os.environ | changes, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "step   19   loss" in done.stdout
        assert ("sentinel: watching" in done.stderr) == (name == "watched")
    watched = losses(tmp_path / "watched")
    assert len(watched) == 20
    assert watched[-1] < watched[0] - 0.1
    assert watched == losses(tmp_path / "alone"), "to the bit"


@needs_torch
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_alerts_rolls_back_and_recovers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sentinel", "demo", "--steps", "400", "--seed", "1", "--json", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    assert shown["saved"] is True
    assert shown["alert"]["alert"] == "LossSpike"
    assert shown["damaged_batches"]["first"] <= shown["alert"]["step"] <= shown["damaged_batches"]["first"] + 4
    assert shown["alert"]["layers"]
    assert shown["alert"]["signs"]
    (rollback,) = shown["rollbacks"]
    assert rollback["to"] < shown["damaged_batches"]["first"] <= rollback["at"]
    assert shown["runs"]["without"]["loss_at_end"] - shown["runs"]["with_sentinel"]["loss_at_end"] > 0.5
    assert Path(shown["picture"]).read_text(encoding="utf-8").startswith("<svg ")
    assert "with Sentinel" in Path(shown["page"]).read_text(encoding="utf-8")
    assert "SENTINEL CRITICAL" in (tmp_path / "out/with-sentinel/stderr.txt").read_text()


@pytest.mark.sampled(1)
@pytest.mark.slow
@needs_torch
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_both_children_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "sentinel",
        "demo",
        "--out",
        "out",
    ]  # a background job would ignore SIGINT
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        for line in driver.stdout:
            if "step" in line and "loss" in line:
                break
        children = psutil.Process(driver.pid).children()
        assert len(children) == 2
        driver.send_signal(number)
        driver.stdout.read()
        assert "interrupted" in driver.stderr.read()
    assert driver.returncode == 130
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "out").exists()
    gone_by = time.monotonic() + 30
    while daemons := list(Path(os.environ["SENTINEL_RUNTIME"]).glob("*/sentinel.sock")):
        assert time.monotonic() < gone_by, f"a daemon is left behind: {daemons}"
        time.sleep(0.05)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    result = CliRunner().invoke(cli, ["demo"])
    assert "needs torch" in str(result.exception)
    assert "pip install torch" in str(result.exception)


def test_too_few_steps_are_wrong_use() -> None:
    result = CliRunner().invoke(cli, ["demo", "--steps", "100"])
    assert result.exit_code == 2
    assert "400" in result.output


@needs_torch
def test_an_output_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = CliRunner().invoke(cli, ["demo", "--out", str(tmp_path / "file" / "out")])
    assert "name another --out" in str(result.exception)
