"""Each format, as its program writes it: recognised by its content, with exact numbers."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest

from sentinel.engine import Observation
from sentinel.errors import LogError
from sentinel.toolkit import logs
from sentinel.toolkit.logs import Recording
from tests.source import SOURCE

NAN, INF = math.nan, math.inf

LIGHTNING = """\
epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss
,0.001,0,,,
0,,0,,2.5,
0,,1,,nan,
0,,1,,,2.75
0,,1,2.4,,
,0.002,2,,,
1,,2,,inf,
"""

MEGATRON = """\
> building train, validation, and test datasets for GPT ...
[default7]: iteration       10/  500000 | consumed samples:        20480 | elapsed time per iteration (ms): 2500.0 | \
learning rate: 1.500E-04 | global batch size:  2048 | lm loss: 6.384045E+00 | loss scale: 4096.0 | \
grad norm: 15906.210 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |
time (ms) | forward-compute: 53.79 | backward-compute: 138.84
 validation loss at iteration 10 | lm loss value: 6.1E+00 | lm loss PPL: 4.5E+02 |
 [2024-05-01 12:00:00] iteration       11/  500000 | elapsed time per iteration (s): 2.6 | learning rate: 1.6E-04 | \
loss scale: 2048.0 | grad norm: 15906.210 | number of skipped iterations:   1 | number of nan iterations:   0 |
\x1b[32m[2024-05-01 12:00:03]\x1b[0m iteration       12/  500000 | elapsed time per iteration (ms): 2700.5/2600.1 | \
learning rate: 1.7E-04 | loss scale: 2048.0 | grad norm: nan | number of skipped iterations:   0 | \
number of nan iterations:   1 |
"""

DEEPSPEED = """\
[2023-07-24 13:21:32,187] [INFO] [config.py:976:print]   steps_per_print .............. 10
  0%|          | 0/189 [00:00<?, ?it/s]\r  1%| | 1/189 [00:01<?, ?it/s][2023-07-24 13:21:32,378] [INFO] \
[loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. \
Attempted loss scale: 65536, reducing to 32768
[2023-07-24 13:21:32,471] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. \
Attempted loss scale: 32768, but hysteresis is 2. Reducing hysteresis to 1
[2023-07-24 13:21:33,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, \
lr=[0.0001, 0.0001], mom=[(0.9, 0.999)]
steps: 20 loss: 2.3456 iter time (s): 1.500 samples/sec: 6.500
[2023-07-24 13:21:43,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=3, lr=[0.0002], mom=[(0.9, 0.999)]
steps: 30 loss: nan iter time (s): 1.500 samples/sec: 6.500
"""


def test_every_format_is_in_the_docs_by_its_name() -> None:
    table = (SOURCE / "docs" / "backtest.md").read_text().partition("\n| format | what is read |\n")[2]
    documented = re.findall(r"^\| ([^-|][^|]*) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert sorted(documented) == sorted(logs.FORMATS), "a row for each in docs/backtest.md"


def one(path: Path, content: str | bytes) -> Recording:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (recording,) = logs.read(path)
    return recording


def rows(recording: Recording, name: str) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value, nan_ok=True)) for step, value in zip(*recording.series(name), strict=True)]


def test_json_lines_in_every_spelling(tmp_path: Path) -> None:
    values = ["2.5", '"nan"', "NaN", '"-inf"', "-Infinity", '"Infinity"', '"+Inf"', "null", "1e-3", '"0.5"', "7"]
    recording = one(tmp_path / "x", "".join(f'{{"step": {i}, "loss": {v}}}\n' for i, v in enumerate(values)))
    assert recording.format == "JSON lines"
    assert rows(recording, "loss") == [
        (0, 2.5), (1, NAN), (2, NAN), (3, -INF), (4, -INF), (5, INF), (6, INF), (8, 1e-3), (9, 0.5), (10, 7.0),
    ]  # fmt: skip


def test_json_lines_of_wandb_and_of_a_users_own_logger(tmp_path: Path) -> None:
    wandb = [{"_step": 4, "_timestamp": 1.7e9, "_runtime": 3.5, "train": {"loss": 2.0, "name": "x"}, "ok": True}]
    recording = one(tmp_path / "a.jsonl", "\n".join(map(json.dumps, wandb)) + "\n")
    assert (recording.names, rows(recording, "train/loss"), recording.timed) == (
        ["_runtime", "train/loss", "ok"], [(4, 2.0)], True,
    )  # fmt: skip
    recording = one(tmp_path / "b.jsonl", '{"config": {"name": "x"}}\n\n{"loss": 3, "time": 0.25}\n{"loss": 2}\n')
    assert (rows(recording, "loss"), rows(recording, "time"), recording.timed) == ([(0, 3), (1, 2)], [(0, 0.25)], False)


def test_a_gzipped_log_is_read_as_what_it_holds(tmp_path: Path) -> None:
    recording = one(tmp_path / "x.jsonl.gz", gzip.compress(b'{"step": 3, "loss": 1.5}\n'))
    assert rows(recording, "loss") == [(3, 1.5)]


def test_a_gzipped_log_whose_first_part_is_a_header_only_is_recognised(tmp_path: Path) -> None:
    """As a logger writes that opens the file again for each row, or `cat a.gz b.gz`."""
    parts = [b"step,loss\n", *(b"%d,1.5\n" % step for step in range(3))]
    recording = one(tmp_path / "x.csv.gz", b"".join(map(gzip.compress, parts)))
    assert rows(recording, "loss") == [(0, 1.5), (1, 1.5), (2, 1.5)]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_with_the_reason(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("\ufeffstep,loss\n1,2.5\n".encode(encoding))
    with pytest.raises(LogError, match="is UTF-16, as PowerShell writes it: convert it to UTF-8"):
        logs.read(tmp_path / "x.csv")


def test_bad_lines_are_counted_and_quoted(tmp_path: Path) -> None:
    bad = ['{"step": 1, "loss": 2', "[1]", '{"step": -1, "loss": 2}', "tensor(3)"]
    recording = one(tmp_path / "x.jsonl", "\n".join(['{"step": 0, "loss": 1}', *bad, '{"step": 5, "loss": 1}']))
    assert (len(recording), recording.faults.count) == (2, 4)
    assert [fault.partition(": ")[0] for fault in recording.faults.shown] == [
        f"{tmp_path}/x.jsonl:{n}" for n in (2, 3, 4)
    ]
    assert recording.faults.shown[2].endswith("step is -1, and must be a number from 0 on")


def test_a_log_of_bad_lines_alone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        LogError, match=r"x\.jsonl: no row of numbers in it, read as JSON lines: .*x\.jsonl:1: step is -1"
    ):
        one(tmp_path / "x.jsonl", '{"step": -1, "loss": 2}\n{"step": -2, "loss": 2}\n')


def test_a_log_whose_rows_are_all_of_one_step_is_an_error(tmp_path: Path) -> None:
    """Its `batch` is the size of a batch. Each row would replace the one before."""
    with pytest.raises(LogError, match=r"x\.csv: its 3 rows all have step 32, read as CSV: rename the column"):
        one(tmp_path / "x.csv", "batch,loss\n32,3\n32,2\n32,1\n")
    joined = one(tmp_path / "y.jsonl", '{"step": 5, "loss": 1}\n{"step": 5, "lr": 2}\n')
    assert (len(joined), joined.names) == (1, ["loss", "lr"])


def test_trainer_state_of_hugging_face(tmp_path: Path) -> None:
    history = [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 2.5, "step": 10},
        {"epoch": 0.2, "grad_norm": NAN, "learning_rate": 2e-4, "loss": 0.0, "step": 20},
        {"epoch": 0.2, "eval_loss": 2.25, "step": 20},
        {"epoch": 0.2, "step": 20, "train_loss": 2.4, "train_runtime": 12.0},
    ]
    state = {"best_metric": None, "global_step": 20, "log_history": history}
    for content in (json.dumps(state, indent=2), json.dumps(state), json.dumps(history)):
        recording = one(tmp_path / "trainer_state.json", content)
        assert recording.format == "trainer state"
        assert rows(recording, "grad_norm") == [(10, 1.5), (20, NAN)]
        assert rows(recording, "loss") == [(10, 2.5), (20, 0.0)]
        assert logs.choose_columns(recording.names, ["loss"], {}) == {"loss": "loss"}


def test_metrics_of_lightning(tmp_path: Path) -> None:
    recording = one(tmp_path / "metrics.csv", LIGHTNING)
    assert recording.format == "CSV"
    assert rows(recording, "train_loss_step") == [(0, 2.5), (1, NAN), (2, INF)]
    assert rows(recording, "lr-AdamW") == [(0, 0.001), (2, 0.002)]
    assert rows(recording, "val_loss") == [(1, 2.75)]
    assert logs.choose_columns(recording.names, ["loss", "learning_rate"], {}) == {
        "loss": "train_loss_step", "learning_rate": "lr-AdamW",
    }  # fmt: skip


def test_csv_with_semicolons_words_and_faults(tmp_path: Path) -> None:
    text = 'iteration;loss;note\n1;"2.5";warm\n2;2.25;\niteration;loss;note\n3;2,0;x\n4;2;x;y\n5;-;x\n6;NaN;x\n'
    recording = one(tmp_path / "x.tsv", text)
    assert rows(recording, "loss") == [(1, 2.5), (2, 2.25), (6, NAN)]
    assert [fault.removeprefix(f"{tmp_path}/x.tsv:") for fault in recording.faults.shown] == [
        "5: loss is '2,0', which is no number", "6: 4 cells, and the header has 3",
    ]  # fmt: skip


def test_csv_whose_header_is_a_comment(tmp_path: Path) -> None:
    """`numpy.savetxt(..., header="step,loss")` writes it so."""
    recording = one(tmp_path / "x.csv", "# made by hand\n# step,loss\n0,2.5\n# a remark\n1,2.25\n")
    assert rows(recording, "loss") == [(0, 2.5), (1, 2.25)]


def test_a_csv_row_that_is_none_is_a_fault(tmp_path: Path) -> None:
    recording = one(tmp_path / "x.csv", f"step,loss\n0,2.5\n1,2\r.5\n2,{'9' * 200_000}\n3,2.25\n")
    assert rows(recording, "loss") == [(0, 2.5), (3, 2.25)]
    words = "no row of cells: a carriage return in it, or a cell of more than 128 KiB"
    assert recording.faults.shown == [f"{tmp_path}/x.csv:{line}: {words}" for line in (3, 4)]
    with pytest.raises(LogError, match="no row of cells"):
        one(tmp_path / "old-mac.csv", "step,loss\r0,2.5\r1,2.25\r")


def test_a_line_that_is_nested_too_deeply_is_a_fault(tmp_path: Path) -> None:
    deep = '{"loss": NaN, "deep": ' + "[" * 100_000 + "]" * 100_000 + "}"
    recording = one(tmp_path / "x.jsonl", f'{{"loss": 2}}\n{deep}\n')
    assert recording.faults.shown == [f"{tmp_path}/x.jsonl:2: no JSON: nested too deeply"]


@pytest.mark.parametrize("unit", [1, 1000, 10**6, 10**9])
def test_unix_times_in_every_unit(tmp_path: Path, unit: int) -> None:
    lines = [json.dumps({"loss": 2.0, "timestamp": (1_764_198_000 + second) * unit}) for second in range(3)]
    recording = one(tmp_path / "x.jsonl", "\n".join(lines) + "\n")
    times = [step.time for step in recording.observations({"loss": "loss"}) if isinstance(step, Observation)]
    assert times == [1_764_198_000, 1_764_198_001, 1_764_198_002]


def test_megatron(tmp_path: Path) -> None:
    recording = one(tmp_path / "run.out", MEGATRON)
    assert recording.format == "Megatron"
    assert rows(recording, "lm loss") == [(10, 6.384045), (12, NAN)]  # a NaN loss is left out, and counted
    assert rows(recording, "grad norm") == [(10, 15906.210), (12, NAN)]  # that of the skipped step was stale
    assert rows(recording, "step_skipped") == [(10, 0.0), (11, 1.0), (12, 0.0)]
    assert rows(recording, "loss scale") == [(10, 4096.0), (11, 2048.0), (12, 2048.0)]
    assert rows(recording, "step_seconds") == [(10, 2.5), (11, 2.6), (12, 2.7005)]
    wanted = ["loss", "grad_norm", "loss_scale", "learning_rate", "step_skipped"]
    assert list(logs.choose_columns(recording.names, wanted, {})) == wanted


def test_deepspeed(tmp_path: Path) -> None:
    recording = one(tmp_path / "run.log", DEEPSPEED)
    assert recording.format == "DeepSpeed"
    between = [(step, 0.0) for step in range(3, 11)]  # rules count steps, and lines are sparse
    assert rows(recording, "step_skipped") == [(1, 1.0), (2, 1.0), *between, (20, 1.0)]  # the third was never printed
    assert rows(recording, "loss_scale") == [(1, 65536.0), (2, 32768.0)]
    assert rows(recording, "learning_rate") == [(10, 0.0001), (20, 0.0002)]
    assert rows(recording, "loss") == [(20, 2.3456), (30, NAN)]
    assert rows(recording, "step_seconds") == [(20, 1.5), (30, 1.5)]
    assert recording.timed


def test_the_trainers_lines_count_where_deepspeed_prints_its_first_alone(tmp_path: Path) -> None:
    made = DEEPSPEED.splitlines()[-2].replace("step=20, skipped=3", "step=0, skipped=0")
    told = "\n".join(f"{{'loss': {loss}, 'grad_norm': 0.4, 'epoch': 0.1}}" for loss in (2.5, 2.25, 2.0))
    recording = one(tmp_path / "job.out", f"{made}\n{told}\n")
    assert [value for _, value in rows(recording, "loss")] == [2.5, 2.25, 2.0]


def test_the_trainers_lines_count_where_deepspeed_prints_only_withheld_steps(tmp_path: Path) -> None:
    """The Trainer turns DeepSpeed's progress off: which steps were withheld is not said then."""
    overflow = DEEPSPEED.splitlines()[2]
    told = "\n".join(f"{{'loss': {loss}, 'grad_norm': 0.4, 'epoch': 0.1}}\n{overflow}" for loss in (2.5, 2.25, 2.0))
    recording = one(tmp_path / "job.out", f"{overflow}\n{told}\n")
    assert [value for _, value in rows(recording, "loss")] == [2.5, 2.25, 2.0]
    assert "step_skipped" not in recording.names


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 64, b"hello\n", b"{}", b"a,b\n", b"\x1f\x8b\x08\0broken", b"SQLite format 3\0" + b"\0" * 84],
)
def test_content_that_is_no_log_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(LogError, match=r"odd\.jsonl: "):
        one(tmp_path / "odd.jsonl", content)


def test_a_folder_is_searched_and_runs_get_names_that_tell_them_apart(tmp_path: Path) -> None:
    for name in ("a/version_0/metrics.csv", "b/version_0/metrics.csv", "lr0.25.jsonl.gz", "weights.pt",
                 "tb/events.out.tfevents.1.x", "hf/checkpoint-9/trainer_state.json",
                 "hf/checkpoint-10/trainer_state.json"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = {log.run: str(log.path.relative_to(tmp_path)) for log in logs.find_logs([str(tmp_path)])}
    assert found == {
        "a/version_0/metrics": "a/version_0/metrics.csv",
        "b/version_0/metrics": "b/version_0/metrics.csv",
        "lr0.25": "lr0.25.jsonl.gz",
        "tb": "tb",
        "checkpoint-10/trainer_state": "hf/checkpoint-10/trainer_state.json",
    }
    assert [log.named for log in logs.find_logs([str(tmp_path / "*.gz")])] == [True]
    with pytest.raises(LogError, match="no such file or folder"):
        logs.find_logs([str(tmp_path / "*.zip")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(LogError, match="no log in this folder"):
        logs.find_logs([str(tmp_path / "empty")])


def test_which_column_is_which_metric() -> None:
    wanted = ["loss", "grad_norm", "learning_rate", "reward"]
    there = ["val_loss", "Train/Loss", "train_loss", "gnorm", "lr", "reward", "my loss"]
    assert logs.choose_columns(there, wanted, {}) == {
        "loss": "train_loss", "grad_norm": "gnorm", "learning_rate": "lr", "reward": "reward",
    }  # fmt: skip
    assert logs.choose_columns(["losses/cls_loss", "losses/total_loss"], wanted, {}) == {"loss": "losses/total_loss"}
    assert logs.choose_columns(["Training Loss", "Loss/tok"], wanted, {}) == {"loss": "Loss/tok"}
    assert logs.choose_columns(["Average Loss", "Loss function"], wanted, {}) == {"loss": "Loss function"}
    assert logs.choose_columns(["loss_prior", "loss_total"], wanted, {}) == {"loss": "loss_total"}
    assert logs.choose_columns(there, wanted, {"my loss": "loss"})["loss"] == "my loss"
    with pytest.raises(LogError, match="--map gnorm=gradnorm: no rule reads gradnorm; they read grad_norm"):
        logs.choose_columns(there, wanted, {"gnorm": "gradnorm"})
