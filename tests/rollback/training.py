"""A training loop as users write them, with the restorer driven as the monitor drives it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from bench.armed import RecordingSession
from sentinel import wire
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.hooks.rollback.step_guard import VERDICT_SECONDS
from sentinel.hooks.snapshot.capture import Cell
from sentinel.hooks.snapshot.directory import DiskSnapshot, list_published
from sentinel.hooks.snapshot.host_buffer import HostBuffer

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "tensor lr of two groups": lambda p: torch.optim.AdamW(
        [{"params": [*p]}, {"params": [], "weight_decay": 0.0}], lr=torch.tensor(1e-2), foreach=False
    ),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


def wait_for_disk(restorer: Restorer) -> None:
    """Wait until the last snapshot to write is on disk, or was refused."""
    assert restorer.disk is not None
    assert restorer.disk.written is not None
    assert restorer.disk.written.wait(60)


def find_latest(place: Path) -> DiskSnapshot | None:
    """Return the newest sound snapshot on disk, or None."""
    return next((snapshot for snapshot in list_published(place) if not snapshot.flaw()), None)


def note_cells(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """Return the list to which from now on each cell is added that a snapshot gives a place in host memory."""
    noted, seat = list[Cell](), HostBuffer.seat

    def seat_and_note(buffer: HostBuffer, cells: Sequence[Cell]) -> None:
        seat(buffer, cells)
        noted.extend(cells)

    monkeypatch.setattr(HostBuffer, "seat", seat_and_note)
    return noted


class Parts:
    """The parts of which a ring takes snapshots: always the same."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def refresh(self) -> None:
        """Add nothing."""


class Ema:
    """A moving average of the weights, as users write it: it keeps the objects that load_state_dict gets."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        parameters = dict(model.named_parameters())
        for name, shadow in self.shadow.items():
            shadow.lerp_(parameters[name].detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


class Scaler(torch.amp.GradScaler):
    """Reports the steps that it withholds, as the monitor's patch of GradScaler.step does."""

    training: Training

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = self.training.seq
        result = super().step(optimizer, *args, **kwargs)
        if self.training.seq == before:
            self.training.exit(skipped=True)
        return result


class Training:
    """A model with BatchNorm, dropout, a tied weight and a buffer of infinities; optimizer, scaler, schedule, EMA."""

    def __init__(self, optimizer: str = "adamw", *, amp: bool = False, schedule: str = "cosine", zero: str = "start"):
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 16)
        )
        self.model[5].weight = self.model[4].weight
        self.model.register_buffer("mask", torch.full((4,), float("-inf")), persistent=False)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = Scaler("cpu", init_scale=1024.0, growth_interval=3) if amp else None
        if self.scaler is not None:
            self.scaler.training = self
        self.schedule: Any = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
            if schedule == "cosine"
            else torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.97**step)
        )
        self.ema = Ema(self.model)
        self.zero, self.seq, self.micro = zero, 0, 0
        self.losses: list[float] = []
        self.on_next: Callable[[], object] = lambda: None
        self.on_enter: Callable[[int], None] = lambda seq: None
        self.on_exit: Callable[[int, bool], None] = lambda seq, skipped: None
        self.optimizer.register_step_pre_hook(lambda *_: self.on_enter(self.seq))
        self.optimizer.register_step_post_hook(lambda *_: self.exit(skipped=False))

    def exit(self, *, skipped: bool) -> None:
        seq, self.seq = self.seq, self.seq + 1
        self.on_exit(seq, skipped)

    def arm(
        self, terms: Rollback | None = None, *, verdict_seconds: float = VERDICT_SECONDS, step: int = 0, **given: Any
    ) -> tuple[Restorer, list[Any]]:
        """Add a restorer; return it, and the list of the messages that it sends. `given`: as of `RecordingSession`."""
        session = RecordingSession(defer=lambda function: setattr(self, "on_next", function), **given)
        restorer = Restorer(
            terms or Rollback(every=5, keep=2, margin=5, state={"ema": self.ema}), models=[self.model],
            optimizers=[self.optimizer], scaler=self.scaler, schedulers=[self.schedule],
            session=session, verdict_seconds=verdict_seconds, step=step,
        )  # fmt: skip
        self.on_enter = restorer.enter_step
        self.on_exit = lambda seq, skipped: restorer.exit_step(seq, skipped=skipped)
        return restorer, session.sent

    def _backward(self, batch: Tensor) -> Tensor:
        if self.scaler is not None:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.model(batch).float().square().mean()
            self.scaler.scale(loss).backward()
            return loss
        loss = self.model(batch).square().mean() * (1 + random.random() * 1e-3 + numpy.random.rand() * 1e-3)
        loss.backward()
        return loss

    def step(self, batch: Tensor) -> None:
        """Make one iteration. With `accumulate` it has two backward passes, and zeroes gradients after the step."""
        self.on_next()
        if self.zero == "start":
            self.optimizer.zero_grad()
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self._step_closure(batch)
        else:
            loss = self._backward(batch)
            if self.zero == "accumulate":
                loss = self._backward(batch + 1)
            self._step(loss)
        self.schedule.step()
        self.ema.update(self.model)
        if self.zero in ("end", "accumulate"):
            self.optimizer.zero_grad(set_to_none=self.zero == "end")

    def _step(self, loss: Tensor) -> None:
        self.losses.append(float(loss.detach()))
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _step_closure(self, batch: Tensor) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            return self._backward(batch)

        self.losses.append(float(self.optimizer.step(closure).detach()))

    def state(self) -> dict[str, Any]:
        """Return a copy of all that a rollback must restore, as the loop sees it."""
        return copy.deepcopy(
            {
                "parameters": [p.detach() for p in self.model.parameters()],
                "buffers": dict(self.model.named_buffers()),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict() if self.scaler is not None else None,
                "schedule": {
                    key: v for key, v in self.schedule.state_dict().items() if key != "_get_lr_called_within_step"
                },
                "ema": self.ema.state_dict(),
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": numpy.random.get_state(),
            }
        )


def batches(count: int) -> list[Tensor]:
    """Return data that draws nothing from the global generators."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, 8, generator=generator) for _ in range(count)]


def poisoned(batch: Tensor) -> Tensor:
    """Return a batch that wrecks a run: every weight is NaN afterwards, or the scaler withholds the step."""
    return batch * float("inf")


def roll_back(restorer: Restorer, *, at: int, to: int, **terms: Any) -> None:
    """Order a rollback, as the daemon does with one rank."""
    restorer.receive(wire.Prepare(id=at, at=at, to=to))
    restorer.receive(wire.Commit(id=at, **terms))


def of_type(sent: Sequence[Any], kind: type) -> list[Any]:
    return [message for message in sent if isinstance(message, kind)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Check that two states are equal to the bit."""
    if isinstance(one, Tensor):
        assert one.shape == other.shape, path
        assert one.dtype == other.dtype, path
        assert torch.equal(bits(one), bits(other)), path  # NaN too
    elif isinstance(one, numpy.ndarray):
        assert numpy.array_equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (mine, its) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, its, f"{path}.{index}")
    else:
        assert one == other, f"{path}: {one} {other}"
