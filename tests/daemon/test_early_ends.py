"""Runs that end while their daemon is still starting are judged all the same, after their end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.node import paths
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SCRIPT = """
import sys, torch, sentinel
steps, mistake, attached = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "attached"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
if attached:
    sentinel.attach(model, optimizer, run="short")
for step in range(steps):
    loss = model(torch.randn(16, 8)).pow(2).mean()
    if mistake == "nan" and step == steps - 1:
        loss = loss * float("nan")
    if mistake != "uncleared":
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RULES = "group: mine\nrules: []\n"


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A named pipe as the rule file: the daemon reads it at its start, and waits until something is written to it."""
    fifo = tmp_path / "rules.yaml"
    os.mkfifo(fifo)
    monkeypatch.setenv("SENTINEL_RULES", str(fifo))
    return fifo


def command(tmp_path: Path, *words: object) -> list[str]:
    script = tmp_path / "short.py"
    script.write_text(SCRIPT)
    return [sys.executable, str(script), *map(str, words)]


def cases() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "sentinel", "incidents", "--json"], capture_output=True, check=False)
    return [case for case in json.loads(done.stdout) if isinstance(case, dict)]


def await_cases(alerts: set[str]) -> list[dict[str, Any]]:
    """Wait until the incidents are of exactly these alerts: a daemon that ends writes its history last."""
    found: list[dict[str, Any]] = []

    def are_there() -> bool:
        found[:] = cases()
        return {case["alert"] for case in found} == alerts

    until(are_there, f"the incidents {sorted(alerts)}")
    return found


def nothing_is_left() -> bool:
    root = paths.runtime_root()
    return not root.exists() or not any(root.iterdir())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("steps", "mistake", "alerts"),
    [
        (5, "nan", {"NonFiniteLoss", "NonFiniteGradient"}),
        (20, "uncleared", {"GradientsNotCleared"}),
        (40, "nan", {"NonFiniteLoss", "NonFiniteGradient"}),
        (20, "none", set()),
    ],
)
def test_the_daemon_judges_what_was_over_before_it_served(
    tmp_path: Path, late: Path, steps: int, mistake: str, alerts: set[str]
) -> None:
    done = subprocess.run(command(tmp_path, steps, mistake, "attached"), capture_output=True, text=True, check=True)
    assert f"run 'short' ended after {steps} steps" in done.stderr
    assert "its daemon has yet to judge it. Details: sentinel last short-" in done.stderr
    late.write_text(RULES)
    until(nothing_is_left, "the end of the daemon")
    found = await_cases(alerts)
    assert all(case["run"] == "short" for case in found)
    if mistake == "nan":
        assert {case["step"] for case in found} == {steps - 1}


@pytest.mark.slow
def test_sentinel_run_prints_the_alert_of_a_job_that_has_ended(tmp_path: Path, late: Path) -> None:
    supervised = subprocess.Popen(
        [sys.executable, "-m", "sentinel", "run", "--", *command(tmp_path, 5, "nan", "alone")],
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: any(paths.runtime_root().glob("*/early-*")), "the record of the job")
    late.write_text(RULES)
    _, said = supervised.communicate()
    assert supervised.returncode == 0
    assert len(re.findall("SENTINEL CRITICAL +NonFiniteLoss", said)) == 1
    assert len(re.findall("first 5 steps: .* checks, found NonFinite", said)) == 1
    await_cases({"NonFiniteLoss", "NonFiniteGradient"})
    until(nothing_is_left, "the end of the daemon")
