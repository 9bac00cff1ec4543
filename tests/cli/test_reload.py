"""`sentinel reload`, with daemons whose rule files have mistakes, with others, and without a daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel import wire
from sentinel.cli import cli
from sentinel.cli.page import list_served
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.waiting import until
from tests.zygote import DAEMON, run_fork

pytestmark = pytest.mark.processes

RULES = "group: mine\nrules:\n  - alert: High\n    expr: loss > {limit}\n"


def sentinel(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_fork([sys.executable, "-m", "sentinel", *arguments], DAEMON, cwd="/")


def test_a_changed_rule_is_in_force_and_a_mistake_is_reported(tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text(RULES.format(limit=3))
    with daemon_process("--rules", str(rules)) as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [2.0] * 5)
        until(list_served, "a daemon that serves HTTP")  # some time after its socket
        rules.write_text(RULES.format(limit="_"))
        refused = sentinel("reload", "--json")
        (answer,) = json.loads(refused.stdout)
        assert refused.returncode == 1
        assert not answer["ok"]
        assert f"{rules}:4:" in answer["answer"]
        rules.write_text(RULES.format(limit=1))
        done = sentinel("reload")
        assert (done.returncode, done.stdout) == (0, f"daemon {answer['daemon']}: reloaded\n")
        rank.steps(5, [2.0] * 5)
        assert "High" in rank.expect(wire.Notice).text


def test_a_daemon_is_asked_without_the_sites_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would get the token, and does not reach this machine's loopback."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [2.0])
        until(list_served, "a daemon that serves HTTP")  # some time after its socket
        done = CliRunner().invoke(cli, ["reload"])
        assert (done.exit_code, done.output.endswith(": reloaded\n")) == (0, True), done.output


def test_without_a_daemon_there_is_nothing_to_do() -> None:
    done = sentinel("reload")
    assert done.returncode == 0
    assert "No daemon of yours" in done.stdout
    status = sentinel("status")
    assert status.returncode == 0
    assert "No run is watched" in status.stdout
