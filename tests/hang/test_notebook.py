"""A real notebook kernel: idle, it does not hang; a cell that stands still in its loop does, and its place is named."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.hang.processes import SOON, ask
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODEL = """
import threading, time, torch, sentinel
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
go_on = threading.Event()
"""
CELL = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = sentinel.attach(model, optimizer, run="notebook")
for step in range(200):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    while monitor.state != "streaming":
        time.sleep(0.01)
"""
RUN_ID, TIMES = "h-notebook", 5
QUIET_SECONDS = 4.0
"""Seconds without progress that must raise no alert; the limit of a hang is 3."""
STUCK = """
for step in range(10):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 5:
        while not go_on.is_set():
            time.sleep(0.05)
"""


@pytest.fixture
def kernel(private_places: Path) -> Iterator[BlockingKernelClient]:
    rules = private_places / "soon.yaml"
    rules.write_text(SOON)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "SENTINEL_RUN_ID": RUN_ID, "SENTINEL_RULES": str(rules)})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_an_idle_notebook_is_quiet_and_a_stuck_cell_is_reported(kernel: BlockingKernelClient) -> None:
    def run(cell: str) -> None:
        content = kernel.execute_interactive(cell, timeout=60)["content"]
        assert content["status"] == "ok", content

    def quiet(run_id: str) -> bool:
        runs = ask(run_id, "status")["runs"]
        stalls = [rank["stall"] for each in runs for rank in each["ranks"]]
        return bool(stalls) and stalls[-1]["quiet_seconds"] > QUIET_SECONDS and stalls[-1]["seconds"] == 0

    run(MODEL)
    for number in range(TIMES):
        run(CELL)  # as users do: the new monitor takes the former one's place
        run_id = RUN_ID + (f"-{number + 1}" if number else "")
        until(functools.partial(quiet, run_id), "more quiet seconds than a hang takes")
        assert not ask(run_id, "incidents")
    kernel.execute(STUCK)
    [case] = until(lambda: [case for case in ask(run_id, "incidents") if case["stacks"]], "the alert")
    assert case["alert"] == "Hang"
    assert "<module>" in case["diagnosis"]["cause"]
