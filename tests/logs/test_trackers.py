"""Files of trackers about a run, as their own packages write them."""

from __future__ import annotations

import gzip
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.toolkit import logs
from sentinel.toolkit.logs import Recording
from tests.logs.test_damage import damage

NAN, INF = math.nan, math.inf

WANDB = """
import wandb
run = wandb.init(project="p", name="gpt", settings=wandb.Settings(silent=True, console="off"))
for step in range(900):
    run.log({"train": {"loss": 900.0 - step}, "note": "x" * 99})
run.log({"train": {"loss": float("nan")}}, step=1000)
run.log({"grad/norm": float("inf")}, step=1000)
run.finish()
"""

MLFLOW = """
import mlflow
mlflow.set_tracking_uri("file:mlruns")
with mlflow.start_run(run_name="gpt") as run:
    for step in range(6):
        mlflow.log_metrics({"loss": 6.0 - step, "train/lr": 0.5}, step=step)
    mlflow.log_metric("eval_loss", 9.0, step=0)  # by epochs
    mlflow.log_metric("loss", float("nan"), step=6)
    mlflow.log_metric("grad_norm", float("inf"), step=6)
with mlflow.start_run(run.info.run_id):
    for step in (3, 4, 5):
        mlflow.log_metrics({"loss": 8.0 + step, "train/lr": 0.25}, step=step)
    mlflow.log_metric("system/cpu", 1.0, step=9)
with mlflow.start_run(run_name="bert"):
    mlflow.log_metric("loss", 1.5, step=3)
"""

TRACKIO = """
import trackio
for name in ("gpt", "bert"):
    trackio.init(project="p", name=name, auto_log_cpu=False)
    for step in range(3):
        trackio.log({"loss": 3.0 - step, "train": {"lr": 0.5}})
    trackio.log({"loss": float("nan"), "grad_norm": float("-inf")}, step=7)
    trackio.finish()
"""


def keep(program: str, folder: Path) -> Path:
    """Run a program; return the folder, which holds what its tracker kept."""
    environment = {
        **os.environ, "WANDB_DIR": str(folder), "MLFLOW_ALLOW_FILE_STORE": "true", "TRACKIO_DIR": str(folder / "kept"),
        "HF_HUB_OFFLINE": "1", "GIT_PYTHON_REFRESH": "quiet", "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture(scope="session")
def wandb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keep(WANDB, tmp_path_factory.mktemp("wandb"))


@pytest.fixture(scope="session")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keep(MLFLOW, tmp_path_factory.mktemp("mlflow"))


@pytest.fixture(scope="session")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keep(TRACKIO, tmp_path_factory.mktemp("trackio"))


def read(folder: Path) -> dict[str, Recording]:
    """Return run name -> run, for the runs found in the folder, without what the package logs about itself."""
    found = [log.path for log in logs.find_logs([str(folder)]) if log.path.suffix != ".log"]
    return {recording.run: recording for path in found for recording in logs.read(path)}


def rows(recording: Recording, name: str) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value, nan_ok=True)) for step, value in zip(*recording.series(name), strict=True)]


@pytest.mark.slow
def test_wandb(wandb: Path) -> None:
    """The file has records over several blocks, and nested names."""
    (file,) = wandb.rglob("run-*.wandb")
    assert file.stat().st_size > 3 * 32 * 1024
    (recording,) = read(wandb).values()
    assert (recording.format, recording.run, recording.timed, recording.faults.count) == ("W&B", "gpt", True, 0)
    assert rows(recording, "train/loss") == [*((step, 900.0 - step) for step in range(900)), (1000, NAN)]
    assert rows(recording, "grad/norm") == [(1000, INF)]


@pytest.mark.slow
def test_mlflow(mlflow: Path) -> None:
    """A resumed run's steps go back; a metric with steps of its own must not make them go back."""
    runs = read(mlflow)
    assert sorted(runs) == ["bert", "gpt"]
    assert rows(runs["gpt"], "loss") == [
        (0, 6.0), (1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (5, 1.0), (6, NAN), (3, 11.0), (4, 12.0), (5, 13.0),
    ]  # fmt: skip
    assert rows(runs["gpt"], "train/lr") == [*((step, 0.5) for step in range(6)), (3, 0.25), (4, 0.25), (5, 0.25)]
    assert (rows(runs["gpt"], "grad_norm"), rows(runs["gpt"], "eval_loss")) == ([(6, INF)], [(0, 9.0)])
    assert (runs["gpt"].timed, "system/cpu" in runs["gpt"].names) == (True, False)
    assert rows(runs["bert"], "loss") == [(3, 1.5)]


@pytest.mark.slow
def test_trackio(trackio: Path) -> None:
    runs = read(trackio)
    assert sorted(runs) == ["bert", "gpt"]
    for recording in runs.values():
        assert rows(recording, "loss") == [(0, 3.0), (1, 2.0), (2, 1.0), (7, NAN)]
        assert rows(recording, "train/lr") == [(0, 0.5), (1, 0.5), (2, 0.5)]
        assert (rows(recording, "grad_norm"), recording.timed) == ([(7, -INF)], True)


@pytest.mark.slow
@pytest.mark.parametrize(("tracker", "endings"), [("wandb", [".wandb"]), ("mlflow", ["", ""])])
def test_files_beside_a_run_are_no_runs(tracker: str, endings: list[str], request: pytest.FixtureRequest) -> None:
    """Beside runs lie W&B's requirements and output, and MLflow's metrics and tags."""
    folder = request.getfixturevalue(tracker)
    assert list(folder.rglob("requirements.txt" if tracker == "wandb" else "mlflow.runName"))
    found = [log.path for log in logs.find_logs([str(folder)])]
    assert [path.suffix for path in found if path.suffix != ".log"] == endings


@pytest.mark.slow
def test_a_named_folder_of_mlflow_is_a_run(mlflow: Path) -> None:
    folder = next(path.parent for path in mlflow.rglob("meta.yaml") if (path.parent / "metrics").is_dir())
    (log,) = logs.find_logs([str(folder)])
    assert (log.path, log.named) == (folder, True)


def test_a_bad_line_of_mlflow_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "meta.yaml").write_text("run_name: [")
    (tmp_path / "metrics" / "loss").write_text("1000 2.5 1\n\n1000 x 2\n1000 2.5\n1000 2.0 -1\n2000 nan 3\n")
    (recording,) = logs.read(tmp_path)
    assert (recording.run, rows(recording, "loss"), recording.faults.count) == ("", [(1, 2.5), (3, NAN)], 3)
    assert recording.faults.shown[0].endswith(":3: loss: `milliseconds value step` is expected in each line")


@pytest.mark.slow
def test_a_file_of_wandb_that_was_cut_off_is_read_as_far_as_it_goes(wandb: Path, tmp_path: Path) -> None:
    (file,) = wandb.rglob("run-*.wandb")
    (tmp_path / "x").write_bytes(file.read_bytes()[: 40 * 1024])
    (recording,) = logs.read(tmp_path / "x")
    assert 50 < len(recording) < 900
    assert recording.faults.count == 0
    packed = gzip.compress(file.read_bytes())
    (tmp_path / "x.wandb.gz").write_bytes(packed[: len(packed) * 3 // 4])
    (recording,) = logs.read(tmp_path / "x.wandb.gz")
    assert 50 < len(recording) < 900


@pytest.mark.slow
def test_damage_in_a_block_of_wandb_is_counted_and_the_next_block_is_read(wandb: Path, tmp_path: Path) -> None:
    (file,) = wandb.rglob("run-*.wandb")
    content = bytearray(file.read_bytes())
    content[33 * 1024] ^= 1
    (tmp_path / "x").write_bytes(content)
    (recording,) = logs.read(tmp_path / "x")
    assert recording.series("train/loss")[0][-1] == 1000
    assert 100 < len(recording) < 901
    assert recording.faults.shown[0].endswith("block 2 is damaged: a checksum is wrong; its rest is not read")


def test_damage_to_a_file_of_wandb(wandb: Path, tmp_path: Path) -> None:
    (file,) = wandb.rglob("run-*.wandb")
    damage(file.read_bytes()[: 10 * 1024], tmp_path / "x", seed="wandb")


@pytest.mark.slow
def test_damage_to_a_database_of_trackio(trackio: Path, tmp_path: Path) -> None:
    (file,) = trackio.rglob("p.db")
    damage(file.read_bytes(), tmp_path / "x", seed="trackio")
