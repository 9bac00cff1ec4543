"""Measures what Sentinel costs a 1-B-parameter transformer in bf16, with the real daemon beside it.

Blocks of steps, watched and bare in random order, run in one process. On a GPU two identical loops differ by little,
so the wall clock shows the difference.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import sentinel
from bench import overhead as accounts
from bench.gpu_checks import Line
from bench.gpu_checks.loops import Loop, settle, toy
from bench.gpu_checks.watched import statistics_by
from sentinel.cli.client import ask_daemons

BILLION = {"width": 2048, "layers": 18, "vocabulary": 32_000, "tokens": (8, 2048), "weights": torch.bfloat16}
"""Options of a loop with 1.04 billion parameters and 16,384 tokens per step."""
SMALL = {"width": 512, "layers": 24, "vocabulary": 2000, "tokens": (2, 128)}
"""Options of a loop whose steps take some milliseconds, so that the cost of launching kernels shows."""
INSTALLED = "as installed"
BAR = 0.01
STEPS = 16
"""Steps of a block: a multiple of the usual spacings."""
START_SECONDS = 60


def check(device: str) -> Iterator[Line]:
    if device == "cpu":
        yield from _costs(device, "toy", toy(device), INSTALLED, 0.01, rounds=1)
        return
    yield from _costs(device, "1 B", BILLION, INSTALLED, 0.01, rounds=4, bar=BAR)
    yield from _costs(device, "short steps", SMALL, INSTALLED, 0.01, rounds=4)
    yield from _costs(device, "1 B", BILLION, "Triton", 1.0, rounds=2)


def _costs(
    device: str, name: str, options: Any, how: str, overhead: float, rounds: int, bar: float | None = None
) -> Iterator[Line]:
    loop, steps = Loop(device, **options), STEPS if device == "cuda" else 2
    loop.run(steps)
    peak = _peak(loop)
    with statistics_by(how) if how != INSTALLED else contextlib.nullcontext():
        monitor = sentinel.attach(
            loop.model, loop.optimizer, run=(run := f"{name}, {how}, {overhead}".replace(" ", "")), overhead=overhead
        )
        switch = accounts.Switch(loop, monitor)
        daemon = _settle(loop, switch, run, steps)
        more = _peak(loop) - peak
        own = _account_parts(loop, switch.session, daemon, steps)
        pairs = [accounts.run_round(lambda: _block(loop, steps), switch) for _ in range(rounds)]
        spacing, host = dict(switch.session.governor.spacing), switch.session.governor.costs
        monitor.detach()
    step = statistics.median(bare for _, bare, _ in pairs) / steps
    every = f"norms / layers every {spacing[1]} / {spacing[2]}"
    what = f"{name}, {how}, {'all at every step' if overhead == 1.0 else 'default settings'}"
    mean, low, high = accounts.interval([watched / bare for watched, bare, _ in pairs])
    _, *control = accounts.interval([other / bare for _, bare, other in pairs])
    figure = f"{mean - 1:+.2%} [{low - 1:+.2%}, {high - 1:+.2%}]"
    figure += f", two bare ones [{control[0] - 1:+.2%}, {control[1] - 1:+.2%}]"
    yield Line(f"{what}: a step", f"{step * 1e3:.1f} ms bare; {every}")
    judged = bar is not None and device == "cuda"
    yield Line(f"{what}: wall [95 %]", figure, mean - 1 <= (bar or 0) if judged else None, f"{bar:.0%}" if bar else "")
    parts = ", ".join(f"{part} {share:.2%}" for part, share in own.items())
    yield Line(f"{what}: parts over wall", f"{parts}; by the governor {sum(host.values()):.2%}")
    if device == "cuda":
        yield Line(f"{what}: memory of the GPU more at the peak", f"{more / 1e6:.1f} MB")


def _settle(loop: Loop, switch: accounts.Switch, run: str, steps: int) -> int:
    """Train until the daemon is there and the governor has decided; return the daemon's pid."""
    began, least = time.monotonic(), 8 if loop.device == "cuda" else 1
    while True:
        loop.run(steps)
        settle(loop.device)
        spent = time.monotonic() - began
        if spent > least and switch.session.governor._counted >= 3 * steps and (daemon := _daemon_of(run)):
            return daemon
        assert spent < START_SECONDS, f"no daemon after {spent:.0f} s: {switch.session.sender.state}"


def _daemon_of(run: str) -> int:
    """Return the pid of the run's daemon, or 0. Daemons of earlier runs may still be there."""
    answers = ask_daemons("status")
    return next((int(answer["pid"]) for answer in answers for one in answer["runs"] if one["run"] == run), 0)


def _account_parts(loop: Loop, watch: Any, daemon: int, steps: int) -> dict[str, float]:
    """Return the seconds of each part per second of the loop, while it runs without a break.

    CPU for the sender and the daemon; for the hooks wall time, in which they may wait for room in the device's launch
    queue.
    """

    def used() -> list[float]:
        sender = accounts.thread_seconds(os.getpid(), watch.sender.native_id)
        return [watch.governor.hook_seconds, sender, accounts.process_seconds(daemon)]

    before, began = used(), time.monotonic()
    while time.monotonic() - began < (8 if loop.device == "cuda" else 1):
        loop.run(steps)
        settle(loop.device)
    wall = time.monotonic() - began
    spent = [(now - then) / wall for now, then in zip(used(), before, strict=True)]
    return dict(zip(("hooks", "sender", "daemon"), spent, strict=True))


def _block(loop: Loop, steps: int) -> float:
    settle(loop.device)
    began = time.perf_counter()
    loop.run(steps)
    settle(loop.device)
    return time.perf_counter() - began


def _peak(loop: Loop) -> int:
    """Return the peak of the allocated bytes over `STEPS` steps; 0 on the CPU."""
    if loop.device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    loop.run(STEPS)
    settle(loop.device)
    return torch.cuda.max_memory_allocated()
