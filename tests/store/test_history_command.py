"""`sentinel history`: listing, export, prune."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store import Store
from sentinel.toolkit import logs


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["history", *arguments])


@pytest.fixture
def run() -> Path:
    """The history of a run with two attempts, of which the first has two ranks, layers and a NaN."""
    path = paths.state_directory() / "runs" / "t1.sqlite"
    store = Store(path, run="train", run_id="t1")
    store.records.begin_attempt(0, msgspec.msgpack.encode({"step_offset": 100}))
    layers = LayerStats(("a", "b"), {"layer_grad_norm": array("f", [0.5, math.inf])}, b"\x01\x01")
    ranks = [{0: {"loss": 1.0 + seq}, 1: {"loss": 3.0 + seq}} for seq in range(3)]
    store.records.add_step(0, RunStep(0, 10.0, ranks[0], {"loss": 2.0, "grad_norm": 0.25}, layers))
    store.records.add_step(0, RunStep(1, 11.0, ranks[1], {"loss": math.nan}))
    store.records.add_step(0, RunStep(2, 12.0, ranks[2], {"loss": -math.inf, "grad_norm": 1 / 3}))
    store.records.begin_attempt(1, msgspec.msgpack.encode({}))
    store.records.add_step(1, RunStep(0, 20.0, {0: {"loss": 9.0}}, {"loss": 9.0}))
    store.records.put_incident("0.1", 1, {"id": "0.1"})
    store.close()
    return path


ROWS: list[dict[str, Any]] = [
    {"attempt": 0, "step": 100, "time": 10.0, "loss": 2.0, "grad_norm": 0.25},
    {"attempt": 0, "step": 101, "time": 11.0, "loss": "NaN"},
    {"attempt": 0, "step": 102, "time": 12.0, "loss": "-Inf", "grad_norm": 1 / 3},
    {"attempt": 1, "step": 0, "time": 20.0, "loss": 9.0},
]


@pytest.mark.usefixtures("run")
def test_json_lines() -> None:
    result = invoked("export", "train")
    assert [json.loads(line) for line in result.output.splitlines()] == ROWS
    assert invoked("export", "train", "--json").output == result.output
    assert invoked("export", "train", "--json", "--format", "csv").exit_code == 2
    assert [json.loads(line) for line in invoked("export", "t1", "--attempt", "1").output.splitlines()] == ROWS[3:]
    ranks = [json.loads(line) for line in invoked("export", "t1", "--rank", "1").output.splitlines()]
    assert [row["loss"] for row in ranks] == [3.0, 4.0, 5.0]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("option", ["--attempt", "--rank"])
@pytest.mark.parametrize("number", ["99999999999999999999", "-1", str(2**31)])
def test_a_number_that_no_attempt_and_no_rank_has_is_wrong_use(option: str, number: str) -> None:
    result = invoked("export", "train", option, number)
    assert result.exit_code == 2
    assert "is not in the range" in result.output


def test_incidents_of_an_unknown_run_are_an_error() -> None:
    Store(paths.state_directory() / "runs" / "t1.sqlite", run="train", run_id="t1").close()
    for arguments in (("incidents",), ("incidents", "show", "0.1")):
        result = CliRunner().invoke(cli, [*arguments, "--run", "trainer"])
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception) == "no run is called trainer; did you mean 'train'?"
    known = CliRunner().invoke(cli, ["incidents", "--run", "train"])
    assert (known.exit_code, known.output) == (0, "No incidents of run train.\n")


@pytest.mark.usefixtures("run")
def test_all_histories_are_older_than_0_seconds() -> None:
    result = invoked("prune", "--older-than", "0s", "--dry-run")
    assert "would be deleted" in result.output
    assert "Nothing is over the limits" not in result.output


@pytest.mark.usefixtures("run")
def test_csv_has_a_column_for_each_signal_and_loses_no_digit() -> None:
    rows = list(csv.DictReader(io.StringIO(invoked("export", "train", "--format", "csv").output)))
    assert list(rows[0]) == ["attempt", "step", "time", "loss", "grad_norm"]
    assert [row["loss"] for row in rows] == ["2.0", "NaN", "-Inf", "9.0"]
    assert [row["grad_norm"] for row in rows[:2]] == ["0.25", ""]
    assert float(rows[2]["grad_norm"]) == 1 / 3


@pytest.mark.usefixtures("run")
def test_layers() -> None:
    rows = [json.loads(line) for line in invoked("export", "train", "--layers").output.splitlines()]
    assert rows == [
        {"attempt": 0, "step": 100, "layer": "a", "layer_grad_norm": 0.5},
        {"attempt": 0, "step": 100, "layer": "b", "layer_grad_norm": "+Inf"},
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_what_was_exported_can_be_backtested(run: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"run.{kind}"
    assert invoked("export", str(run), "--format", kind, "--output", str(file), "--attempt", "0").output == ""
    (recording,) = logs.read(file)
    steps, losses = recording.series("loss")
    assert steps == [100, 101, 102]
    assert losses[0] == 2.0
    assert math.isnan(losses[1])
    assert losses[2] == -math.inf


def test_the_list(run: Path) -> None:
    result = invoked()
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.output.splitlines())
    (row,) = json.loads(invoked("--json").output)
    assert (row["run"], row["run_id"], row["attempts"], row["step"], row["incidents"]) == ("train", "t1", 2, 0, 1)
    run.write_bytes(b"nothing of ours")
    result = invoked()
    assert result.exit_code == 1
    assert "damaged" in result.output


def test_a_node_without_histories() -> None:
    assert invoked().output == "No history is kept on this node.\n"
    assert json.loads(invoked("--json").output) == []


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "other"], "no history of other; there are: train"),
        (["export", "train", "--attempt", "7"], "nothing is kept of steps, attempt 7"),
        (["export", "train", "--rank", "7"], "nothing is kept of steps, rank 7"),
        (["export", "train", "--output", "/proc/none"], "/proc/none: cannot be written"),
    ],
)
def test_missing_runs_steps_and_folders_are_reported(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(cli, ["history", *arguments], catch_exceptions=False)


@pytest.mark.usefixtures("run")
def test_stdout_on_a_full_disk_is_named() -> None:
    command = [sys.executable, "-m", "sentinel", "history", "export", "train"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "sentinel: what it prints: cannot be written (No space left on device)\n"


def test_pruning_can_list_first_what_it_would_delete(run: Path) -> None:
    os.utime(run, (time.time() - 10 * 86400,) * 2)
    assert invoked("prune").output == "Nothing is over the limits.\n"
    assert "would be deleted" in invoked("prune", "--older-than", "9d", "--dry-run").output
    assert run.exists()
    (row,) = json.loads(invoked("prune", "--keep-size", "1kB", "--json").output)
    assert (row["why"], row["deleted"], round(row["days"])) == ("size", True, 10)
    assert not run.exists()
    assert invoked("prune", "--older-than", "soon").exit_code == 2
    assert invoked("prune", "--keep-size", "1 sack").exit_code == 2
