"""A healthy run that stalls after some steps, in the way KIND, until its stdin is closed.

    python stalling.py KIND

Prints `stalling` when it stalls, and `done` at its end.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import sentinel

STEPS = 1000
_released = threading.Event()


def sleep_in_user_code() -> None:
    while not _released.is_set():
        time.sleep(0.05)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lambda: (_released.wait(), lock.release()), daemon=True).start()
    with lock:
        pass


def hold_the_gil() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def spin() -> None:
    while not _released.is_set():
        pass


def translate(model: torch.nn.Module) -> None:
    for _ in range(20):
        model(torch.randn(512, 64))


def score(model: torch.nn.Module) -> None:
    for _ in range(20):
        model(torch.randn(512, 64)).exp().mean()


def evaluate_another_model() -> None:
    other = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)], torch.nn.ReLU(), torch.nn.LayerNorm(64))
    while not _released.is_set():
        translate(other)
        score(other)


def write_a_checkpoint() -> None:
    class Slow:
        def write(self, data: bytes) -> int:
            _released.wait()
            return len(data)

        def flush(self) -> None:
            pass

    torch.save({"weights": torch.randn(10)}, Slow())  # type: ignore[arg-type]


def wait_for_a_checkpoint() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_a_checkpoint).result()


def upload() -> None:
    here, there = socket.socketpair()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    threading.Thread(target=lambda: (_released.wait(), there.send(answer)), daemon=True).start()
    connection = http.client.HTTPConnection("storage")
    connection.sock = here
    connection.request("PUT", "/checkpoint.pt", b"x" * 1000)
    connection.getresponse().read()


def write_where_the_file_system_stands() -> None:
    reader, writer = os.pipe()
    threading.Thread(target=lambda: (_released.wait(), os.read(reader, 1 << 20)), daemon=True).start()
    with os.fdopen(writer, "wb", 0) as file:
        file.write(b"x" * 70_000)


def run_another_program() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        threading.Thread(target=lambda: (_released.wait(), process.kill()), daemon=True).start()
        process.wait()


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):  # type: ignore[no-untyped-def]
        for _ in range(8 * STEPS):
            yield torch.randn(64)
        tell()
        sleep_in_user_code()


STALLS = {
    "sleep": sleep_in_user_code,
    "lock": wait_for_a_lock,
    "gil": hold_the_gil,
    "spin": spin,
    "evaluation": evaluate_another_model,
    "checkpoint": write_a_checkpoint,
    "future": wait_for_a_checkpoint,
    "upload": upload,
    "write": write_where_the_file_system_stands,
    "program": run_another_program,
    "own-handler": sleep_in_user_code,
}


def tell() -> None:
    print("stalling", flush=True)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Any, kind: str, monitor: sentinel.Monitor
) -> None:
    for step, x in enumerate(batches):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < STEPS and step % 100 == 0:
            time.sleep(0.1)  # so that the heartbeat has shown the loop at work before it stalls
        if step == STEPS and kind in STALLS:
            tell()
            STALLS[kind]()
        elif step == STEPS and kind == "phase":
            with monitor.phase("export"):
                tell()
                sleep_in_user_code()
        elif step == STEPS and kind == "after-phase":
            with monitor.phase("export"):
                time.sleep(8)
            tell()
            sleep_in_user_code()
        elif step == STEPS + 5:
            break


def main(kind: str) -> None:
    if kind == "own-handler":
        signal.signal(signal.SIGRTMIN + 7, lambda *_: print("the user's own handler was called", flush=True))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    threading.Thread(target=lambda: (sys.stdin.read(), _released.set()), daemon=True).start()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = sentinel.attach(model, optimizer, run="stalling")
    deadline = time.monotonic() + 60
    while monitor.state != "streaming" and time.monotonic() < deadline:
        time.sleep(0.01)
    if kind == "loader":
        train(model, optimizer, DataLoader(Endless(), batch_size=8), kind, monitor)
    else:
        train(model, optimizer, (torch.randn(8, 64) for _ in iter(int, 1)), kind, monitor)
    if kind == "after":
        tell()
        sleep_in_user_code()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
