"""Checks snapshots in pinned memory: restored to the bit, from disk too, their cost to the loop, a restore's time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

import torch
from torch import nn

import sentinel
from bench.armed import Armed
from bench.gpu_checks import Line, at_most, equal
from bench.gpu_checks.loops import Loop, deterministic, generators, settle, toy
from sentinel import wire
from sentinel.hooks.rollback.options import Rollback
from tests.waiting import until

SPACING = 8
SHARE_BAR, RESTORE_BAR = 0.02, 5.0
EVERY = 200


def check(device: str) -> Iterator[Line]:
    sizes = {"50 M": {"width": 768, "layers": 6, "vocabulary": 5000}, "1 B": {"width": 2048, "layers": 20}}
    for name, options in sizes.items() if device == "cuda" else {"toy": toy(device)}.items():
        extra = {"vocabulary": 8000, "tokens": (16, 512)} if device == "cuda" else {}
        yield from _costs(device, name, {**extra, **options})
    deterministic()
    yield from _exact(device)
    yield _check_resume(device)


def _arm(loop: Loop, every: int) -> Armed:
    terms = Rollback(every=every, keep=2, margin=every)
    return Armed(loop.step, [loop.model], loop.optimizer, terms, loop.scaler)


def _exact(device: str) -> Iterator[Line]:
    """Check that a restored loop has its old state and makes the same losses; a buffer changes in each forward pass."""
    scaled = {"half": torch.float16, "scale": 1024.0}
    for name, options in {"dropout": {"dropout": 0.1}, "fp16 with a scaler": scaled}.items():
        loop = Loop(device, **toy(device), **options)
        loop.model.norm = nn.Sequential(loop.model.norm, Counting()).to(device)
        armed = _arm(loop, 5)
        loop.run(6)  # a snapshot of step 5 is under way
        then, drawn = [tensor.clone() for tensor in loop.state()], generators(device)
        loop.run(4)
        first = [float(loss) for loss in loop.losses[6:10]]
        loop.steps = 5  # the loop's count, as of the undone step: after it comes the data of step 6 again
        answer = armed.roll_back(5)
        now = list(loop.state())
        alike = len(now) == len(then) and all(map(torch.equal, [*now, *generators(device)], [*then, *drawn]))
        yield Line(f"{name}: restored", answer.reason or "the same to the bit", answer.ok and alike, "bits")
        loop.run(4)
        again = [float(loss) for loss in loop.losses[-4:]]
        yield Line(f"{name}: the same losses after it", f"{again == first}", again == first)


def _check_resume(device: str) -> Line:
    """Check that a new loop goes on from the disk with the same losses: all must be on the device again."""
    loop = Loop(device, **toy(device), dropout=0.1)
    with tempfile.TemporaryDirectory() as folder:
        terms = Rollback(every=5, keep=2, margin=5, directory=folder)
        armed = Armed(loop.step, [loop.model], loop.optimizer, terms, loop.scaler)
        loop.run(10)
        order = wire.Publish(id=1, seq=5, step=5, run="gpu", run_id="gpu-1", attempt=0)
        armed.restorer.receive(order)
        until(lambda: any(isinstance(message, wire.Published) for message in armed.sent), "the snapshot on disk")
        other = Loop(device, **toy(device), dropout=0.1)
        other.steps = sentinel.resume(other.model, other.optimizer, directory=folder)
        armed.restorer.close()
    other.run(4)
    again = [float(loss) for loss in other.losses]
    return equal("resumed from disk: losses", again, [float(loss) for loss in loop.losses[6:10]])


class Counting(nn.Module):
    """Returns its input, and has a buffer that changes in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return x


def _costs(device: str, name: str, options: dict[str, object]) -> Iterator[Line]:
    """Measure a snapshot's and a restore's cost. Whole blocks are timed, because the loop runs ahead of the device."""
    loop, blocks = Loop(device, **options, half=torch.bfloat16), 4 if device == "cuda" else 1
    loop.run(SPACING)
    bare = _seconds(loop, blocks * SPACING) / blocks
    armed = _arm(loop, SPACING)
    first = _seconds(loop, 2 * SPACING + 2) - (2 + 2 / SPACING) * bare
    loop.run(-loop.steps % SPACING)
    cost, blocked = _seconds(loop, blocks * SPACING) / blocks - bare, armed.blocked[-SPACING:]
    taken = [message for message in armed.sent if isinstance(message, wire.SnapshotTaken)][-1]
    parameters, step = sum(parameter.numel() for parameter in loop.model.parameters()) / 1e6, bare / SPACING
    what = f"{name}, {parameters:.0f} M parameters, step {step * 1e3:.0f} ms"
    yield Line(f"{what}: a snapshot", f"{taken.nbytes / 1e9:.2f} GB, copied in {taken.seconds * 1e3:.0f} ms")
    yield Line(f"{what}: the first three, two of which pin memory", f"{first:.1f} s")
    yield Line(f"{what}: loop blocked by one, at most", f"{max(blocked) * 1e3:.0f} ms in one step")
    yield at_most(f"{what}: of the loop at every={EVERY}", cost / (EVERY * step), SHARE_BAR, ".2%", device)
    restores = sorted(_restore(armed) for _ in range(3))
    yield at_most(f"{what}: restore, verified, s", restores[1], RESTORE_BAR, ".2f", device)


def _seconds(loop: Loop, steps: int) -> float:
    settle(loop.device)
    began = time.perf_counter()
    loop.run(steps)
    settle(loop.device)
    return time.perf_counter() - began


def _restore(armed: Armed) -> float:
    answer = armed.roll_back(armed.restorer.held[-1])
    assert answer.ok, answer.reason
    return answer.seconds
