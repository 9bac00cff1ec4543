"""`sentinel rules status` of a real daemon, and how it shows many ranks as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sentinel import wire
from sentinel.cli import cli
from sentinel.cli.rule_status import lines
from tests.daemon.simulated import SimulatedRank, daemon_process


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["rules", "status", *arguments], env={"COLUMNS": "80"})


def test_without_a_daemon_no_run_is_watched() -> None:
    assert (run().exit_code, run().output) == (1, "No run is watched on this node.\n")


def test_an_address_at_which_no_daemon_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SENTINEL_ADDRESS", f"unix:{tmp_path}/none")
    assert f"SENTINEL_ADDRESS: {tmp_path}/none: no daemon answers there" in run().stderr


@pytest.mark.processes
def test_the_rules_of_a_watched_run() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [3.0, 2.0, float("nan")])
        rank.expect(wire.Notice)
        result = run()
        (found,) = json.loads(run("--json").output)
        assert run("--run", "other").output == "No run other is watched on this node.\n"
    assert result.exit_code == 1
    told = [line.split() for line in result.output.splitlines()]
    assert ["firing", "NonFiniteLoss", "loss", "nan"] in told
    assert ["no", "data", "GradientSpike", "no", "grad_norm"] in told
    assert ["nonfinite", "LossSpike", "loss"] in [line[:3] for line in told]
    assert ["warming", "LossNotDecreasing", "loss", "3,", "start", "3"] in told
    assert ["not", "applicable", "ScalerCollapse", "no", "step_skipped"] in told
    states = {rule["rule"]: rule["state"] for rule in found["rules"]}
    assert (states["NonFiniteLoss"], states["ScalerMissing"]) == ("firing", "not applicable")


def test_many_ranks_in_one_state_are_a_line() -> None:
    rules = [
        {"rule": "A", "entity": ["rank", str(i)], "state": "firing" if i == 3 else "inactive", "lacking": [],
         "values": {"loss": 1.5, "norm": "NaN"}}
        for i in range(64)
    ]  # fmt: skip
    assert list(lines(rules)) == [
        "  firing         A  rank 3: loss 1.5, norm NaN",
        "  inactive       A  rank 0 and 62 more: loss 1.5, norm NaN",
    ]
