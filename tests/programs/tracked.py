"""Short runs of one loop, each with a run open in a tracker; each waits for an alert before it goes on.

python tracked.py TRACKER NAME...    the trackers write into the working directory
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sentinel

Log = Callable[[dict[str, float], int], object]
Close = Callable[[], object]


def open_wandb(name: str) -> tuple[Log, Close]:
    import wandb

    run = wandb.init(project="p", name=name, settings=wandb.Settings(silent=True, console="off"))
    return lambda row, step: run.log(row), run.finish


def open_wandb_with_steps(name: str) -> tuple[Log, Close]:
    import wandb

    run = wandb.init(project="p", name=name, settings=wandb.Settings(silent=True, console="off"))
    return lambda row, step: run.log(row, step=10 * step), run.finish


def open_mlflow(name: str) -> tuple[Log, Close]:
    import mlflow

    mlflow.set_tracking_uri("file:mlruns")
    mlflow.start_run(run_name=name)
    return lambda row, step: mlflow.log_metrics(row, step=step), mlflow.end_run


def open_trackio(name: str) -> tuple[Log, Close]:
    import trackio

    trackio.init(project="p", name=name, auto_log_cpu=False)
    return lambda row, step: trackio.log(row), trackio.finish


def open_tensorboard(name: str) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(f"runs/{name}")  # type: ignore[no-untyped-call]
    return lambda row, step: [writer.add_scalar(key, value, step) for key, value in row.items()], writer.close


OPEN = {
    "wandb": open_wandb,
    "wandb with steps": open_wandb_with_steps,
    "mlflow": open_mlflow,
    "trackio": open_trackio,
    "tensorboard": open_tensorboard,
}


def main() -> None:
    for name in sys.argv[2:]:
        log, close = OPEN[sys.argv[1]](name)
        train(name, log)
        log({"final": 1.0}, 12)
        close()


def train(name: str, log: Log) -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    alerted = threading.Event()
    with sentinel.attach(net, optimizer, run=name) as monitor:
        monitor.on_alert(lambda alert: alerted.set())
        for step in range(12):
            loss = net(torch.ones(2, 4)).square().mean() * (float("nan") if step == 3 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log({"loss": 1.0 / (step + 1)}, step)
            if step == 5:
                assert alerted.wait(60)


if __name__ == "__main__":
    main()
