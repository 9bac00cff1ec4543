"""Output of training loops: names before numbers, in the forms of public projects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.errors import LogError
from sentinel.toolkit import logs

NAN, INF = math.nan, math.inf
WANTED = ("loss", "grad_norm", "learning_rate", "rival_loss", "step_seconds", "data_seconds")

Series = Mapping[str, list[tuple[int, float]]]

SHAPES: dict[str, tuple[str, Series]] = {
    "nanoGPT": (
        "number of parameters: 124.34M\n"
        "step 0: train loss 4.2874, val loss 4.2823\n"
        "iter 0: loss 4.2654, time 34553.42ms, mfu -100.00%\n"
        "iter 10: loss nan, time 120.00ms, mfu 17.20%\n"
        "step 20: train loss 2.1, val loss 2.2\n"
        "iter 20: loss 2.2, time 120.00ms, mfu 17.20%\n",
        {"loss": [(0, 4.2654), (10, NAN), (20, 2.2)], "step_seconds": [(0, 34.55342), (10, 0.12), (20, 0.12)]},
    ),
    "llm.c": (
        "| max_sequence_length T   | 1024                                               |\n"
        "val loss 11.009\n"
        "step    1/18865 | loss 11.01 (+nanz)| norm 15.39 (+nanz)| lr 8.57e-07 | 1553.26 ms | 337526 tok/s\n"
        "val loss 10.5\n"
        "step    2/18865 | loss inf (+1.2z)| norm 15.1 (-0.1z)| lr 1.57e-06 | 1553.26 ms | 337526 tok/s\n",
        {"loss": [(1, 11.01), (2, INF)], "grad_norm": [(1, 15.39), (2, 15.1)],
         "learning_rate": [(1, 8.57e-7), (2, 1.57e-6)]},
    ),
    "guided-diffusion": (
        "Logging to ./results\n"
        "| name | what it is |\n"
        "----------------------------\n"
        "| grad_norm     | 9.67     |\n"
        "| loss          | 12.5     |\n"
        "| train/        |          |\n"
        "| loss_q0       | 1.02     |\n"
        "| step          | 0        |\n"
        "----------------------------\n"
        "saving model 0...\n"
        "----------------------------\n"
        "| grad_norm     | nan      |\n"
        "| loss          | 2.9e-01  |\n"
        "| step          | 1,000    |\n"
        "----------------------------\n"
        "| loss          | 0.21     |\n"
        "| step          | 2,000    |\n",  # the run was killed
        {"loss": [(0, 12.5), (1000, 0.29), (2000, 0.21)], "grad_norm": [(0, 9.67), (1000, NAN)]},
    ),
    "modded-nanogpt": (
        "step:0/1750 val_loss:10.8258 train_time:0ms step_avg:nanms\n"
        "step:1/1750 train_loss:11.0250 train_time:256ms step_avg:nanms\n"
        "step:2/1750 train_loss:10.8 train_time:356ms step_avg:178ms\n",
        {"loss": [(1, 11.025), (2, 10.8)]},
    ),
    "OLMo-core": (
        "2025-01-01 12:00:00.000\thost:0\tcallbacks.console_logger:48\tINFO\t[step=1/1,000,epoch=1]\n"
        "    optim/total grad norm=1.234\n"
        "    optim/LR (group 0)=0.0004\n"
        "    train/CE loss=10.5\n"
        "    train/PPL=36,000\n"
        "2025-01-01 12:00:01.000\thost:0\tcallbacks.checkpointer:99\tINFO\tsaved step=500\n"
        "2025-01-01 12:00:02.000\thost:0\tcallbacks.console_logger:48\tINFO\t[step=2/1,000,epoch=1]\n"
        "    optim/total grad norm=1.134\n"
        "    train/CE loss=10.2\n",
        {"loss": [(1, 10.5), (2, 10.2)], "grad_norm": [(1, 1.234), (2, 1.134)], "learning_rate": [(1, 0.0004)]},
    ),
    "MLPerf": (
        ':::MLLOG {"namespace": "", "time_ms": 1620000000000, "event_type": "POINT_IN_TIME", "key": "seed", '
        '"value": 7, "metadata": {"file": "x.py", "lineno": 3}}\n'
        '0: :::MLLOG {"namespace": "", "time_ms": 1620000000000, "event_type": "POINT_IN_TIME", "key": "train_loss", '
        '"value": 7.3, "metadata": {"file": "x.py", "lineno": 3, "samples_count": 64, "lr": 0.0002}}\n'
        ':::MLLOG {"namespace": "", "time_ms": 1620000001000, "event_type": "POINT_IN_TIME", "key": "tracked_stats", '
        '"value": {"train_loss": 7.1, "throughput": 9}, "metadata": {"file": "x.py", "lineno": 3, "step": 128}}\n',
        {"loss": [(64, 7.3), (128, 7.1)], "learning_rate": [(64, 0.0002)]},
    ),
    "detectron2": (
        "[07/08 19:36:11 d2.engine.defaults]: Running with full config:\n"
        "[07/08 19:36:21 d2.utils.events]:  eta: 2:14:53  iter: 19  total_loss: 5.07  loss_cls: 4.3  "
        "loss_box_reg: 0.3  time: 0.2  data_time: 0.01  lr: 0.00099  max_mem: 2689M\n"
        "[07/08 19:36:41 d2.utils.events]:  eta: 2:12:53  iter: 39  total_loss: 4.07  loss_cls: 3.3  "
        "loss_box_reg: 0.3  time: 0.2  data_time: 0.01  lr: 0.0019  max_mem: 2689M\n",
        {"loss": [(19, 5.07), (39, 4.07)], "step_seconds": [(19, 0.2), (39, 0.2)],
         "data_seconds": [(19, 0.01), (39, 0.01)], "learning_rate": [(19, 0.00099), (39, 0.0019)]},
    ),
    "logging": (
        "2024-05-01 12:00:00,123 - INFO - model has 12 layers, lr 0.1, resuming from step 5000\n"
        "2024-05-01 12:00:01,123 - INFO - Epoch 1 step 10 loss=2.31 lr=1e-4 grad_norm=tensor(3.5)\n"
        "INFO:root:Epoch 1 Step 20 Loss 2.1\n"
        "INFO Training step 30 loss: -2.0\n",
        {"loss": [(10, 2.31), (20, 2.1), (30, -2.0)], "grad_norm": [(10, 3.5)], "learning_rate": [(10, 1e-4)]},
    ),
    "torchtitan, two ranks in colour": (
        "[rank0]:[titan] 2024-12-01 - root - \x1b[36mstep:  1  \x1b[32mloss: 12.2  grad_norm:  3.1\x1b[0m\n"
        "[rank1]:[titan] 2024-12-01 - root - \x1b[36mstep:  1  \x1b[32mloss: 99.9  grad_norm:  3.1\x1b[0m\n"
        "[rank0]:[titan] 2024-12-01 - root - \x1b[36mstep:  2  \x1b[32mloss: 11.2  grad_norm:  3.0\x1b[0m\n",
        {"loss": [(1, 12.2), (2, 11.2)], "grad_norm": [(1, 3.1), (2, 3.0)]},
    ),
    "the Trainer's bar of progress": (
        "  0%|          | 0/189 [00:00<?, ?it/s]\r  1%| | 1/189 [00:01<?, ?it/s]"
        "{'loss': 2.31, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
        "{'loss': '2.21', 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.2}\n{'eval_loss': 2.0, 'epoch': 0.2}\n",
        {"loss": [(0, 2.31), (1, 2.21)], "grad_norm": [(0, 1.5), (1, NAN)], "learning_rate": [(0, 1e-5), (1, 1e-5)]},
    ),
    "lines without steps": (
        "Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.3\nTrain Epoch: 1 [640/60000 (1%)]\tLoss: 2.2\n"
        "Test set: Average loss: 0.0501, Accuracy: 9830/10000 (98%)\n",
        {"loss": [(0, 2.3), (1, 2.2)]},
    ),
    "a GAN": (
        "[0/5][0/1583]\tLoss_D: 1.7\tLoss_G: 4.9\tD(x): 0.5\tD(G(z)): 0.5 / 0.4\n"
        "[0/5][50/1583]\tLoss_D: 0.7\tLoss_G: 3.9\tD(x): 0.5\tD(G(z)): 0.5 / 0.4\n",
        {"loss": [(0, 1.7), (1, 0.7)], "rival_loss": [(0, 4.9), (1, 3.9)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_text_of(shape: str, tmp_path: Path) -> None:
    text, wanted = SHAPES[shape]
    path = tmp_path / "train.out"
    path.write_text(text)
    (recording,) = logs.read(path)
    chosen = logs.choose_columns(recording.names, WANTED, {})
    series = {metric: list(zip(*recording.series(column), strict=True)) for metric, column in chosen.items()}
    assert series == {
        metric: [(step, pytest.approx(value, nan_ok=True)) for step, value in rows] for metric, rows in wanted.items()
    }


def test_times_are_read_where_lines_have_them(tmp_path: Path) -> None:
    for shape, timed in (("logging", True), ("OLMo-core", True), ("MLPerf", True), ("nanoGPT", False)):
        (tmp_path / "x.log").write_text(SHAPES[shape][0])
        (recording,) = logs.read(tmp_path / "x.log")
        assert recording.timed is timed, shape


@pytest.mark.parametrize(
    "text",
    [
        "The model reaches a loss of 2.3.\nStep 1: install. torch==2.1.0\n",
        "loss_scale: 65536\nloss_scale: 32768\n",
        "step inf loss none\nstep nan loss x\n",
    ],
)
def test_prose_and_settings_are_no_log(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text(text)
    with pytest.raises(LogError, match=r"README\.txt: not a log that can be read"):
        logs.read(tmp_path / "README.txt")


def test_the_loss_by_other_names() -> None:
    for columns, loss in (
        (["mean_loss", "val_loss"], "mean_loss"),
        (["loss/loss", "loss/aux"], "loss/loss"),
        (["token_nll", "test_nll"], "token_nll"),
        (["loss_tgt_mean", "loss_src_mean"], "loss_tgt_mean"),
        (["average training loss", "aux_loss", "loss_scale"], "average training loss"),
        (["train/ent_loss/x", "train/critic_loss", "train/actor_loss"], "train/critic_loss"),
        (["value_loss", "policy_loss"], None),
        (["loss_cls", "loss_box"], None),
        (["val_loss"], None),
    ):
        assert logs.choose_columns(columns, WANTED, {}).get("loss") == loss, columns


@pytest.mark.slow
def test_a_run_whose_loss_was_not_read_says_so_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = "".join(f'{{"step": {i}, "grad_norm": 1.0, "loss_cls": 2.0, "loss_box": 1.0}}\n' for i in range(100))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    result = CliRunner().invoke(cli, ["rules", "backtest", str(tmp_path)], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    first = " ".join(result.output.split()).partition("b 100 rows")[0]
    assert first.startswith("a 100 rows of JSON lines: no loss was read: columns are grad_norm, loss_cls, loss_box; ")
    assert "--map COLUMN=loss" in first
    assert "no alert" not in result.output
    assert "no loss was read in 2 of 2 runs; 0 of 2 runs with an alert" in " ".join(result.output.split())
    result = CliRunner().invoke(cli, ["rules", "backtest", str(tmp_path), "--alert", "NonFiniteGradient"])
    assert "no loss" not in result.output
