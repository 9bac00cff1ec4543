"""Drives a loop's restorer as the hooks do, and measures how long it holds the loop up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sentinel import wire
from sentinel.errors import RunStopped
from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer


class RecordingSession:
    """The session of a restorer without a run: keeps the messages that the restorer sends."""

    def __init__(self, **given: Any) -> None:
        """`given`: attributes and methods that are to be others than those here."""
        self.sent: list[Any] = []
        self.disarmed: list[str] = []
        self.unseen, self.is_cut_off = Unseen(), False
        self.batches: Batches | None = None
        vars(self).update(given)

    def send(self, message: wire.FromRank) -> None:
        self.sent.append(message)

    def find_directory(self) -> Path | None:
        return None

    def defer(self, method: Callable[[], None]) -> None:
        pass

    def disarm(self, reason: str) -> None:
        self.disarmed.append(reason)

    def begin_stop(self) -> None:
        pass

    def say_goodbye(self, stop: RunStopped) -> None:
        pass


class Armed:
    """Rollback for a loop with one optimizer. `step` makes the loop's next step."""

    def __init__(
        self,
        step: Callable[[], object],
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        terms: Rollback,
        scaler: Any = None,
    ) -> None:
        self._step, self.seq = step, 0
        session = RecordingSession()
        self.sent: list[wire.FromRank] = session.sent
        self.restorer = Restorer(terms, models=list(models), optimizers=[optimizer], session=session, scaler=scaler)
        self.blocked: list[float] = []
        """Seconds that the loop waited for the restorer, step by step."""
        optimizer.register_step_pre_hook(lambda *_: self._enter())
        optimizer.register_step_post_hook(lambda *_: self._exit())

    def _enter(self) -> None:
        began = time.perf_counter()
        self.restorer.enter_step(self.seq)
        self.blocked.append(time.perf_counter() - began)

    def _exit(self) -> None:
        began = time.perf_counter()
        self.restorer.exit_step(self.seq, skipped=False)
        self.blocked[-1] += time.perf_counter() - began
        self.seq += 1

    def roll_back(self, to: int) -> wire.RolledBack:
        """Roll back to step `to` at the exit of the next step, and return the restorer's answer."""
        self.restorer.receive(wire.Prepare(id=self.seq + 1, at=self.seq, to=to))
        self.restorer.receive(wire.Commit(id=self.seq + 1))
        self._step()
        answer = self.sent[-1]
        assert isinstance(answer, wire.RolledBack), answer
        return answer
