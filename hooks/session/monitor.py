"""What `sentinel.attach` returns: the user's handle on one run. Integrations log a trainer's own numbers through it."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from sentinel import wire
from sentinel.errors import AttachError
from sentinel.hooks.core import faults
from sentinel.hooks.core.identity import printable
from sentinel.hooks.rollback.step_guard import LAST_SECONDS
from sentinel.hooks.session.session import GOODBYE_SECONDS, PHASE_LETTERS, RunSession
from sentinel.hooks.torch_interop import tensors
from sentinel.hooks.torch_interop.tensors import Scalar, scalar
from sentinel.naming import clean_name
from sentinel.signals import SIGNALS

Batch = TypeVar("Batch")


class Monitor:
    """Watches one run. A context manager: leaving it detaches.

    Nothing in it raises into the loop or waits for the daemon. Model and optimizer are held weakly. Where nothing can
    be watched (SENTINEL_DISABLED=1, no socket directory) every method exists and does nothing.
    """

    def __init__(self, run: str, session: RunSession | None, *, why: str = "", step: int = 0) -> None:
        """Made by `sentinel.attach`. `why`: the reason for having no session; `step`: the user's number of the first
        step."""
        self.run = run
        """Name of the run."""
        self._session, self._why, self._step = session, why, step

    @property
    def state(self) -> str:
        """The present state, in words: `looking for the daemon`, `streaming`, `refused: ...`, `detached` and so on."""
        return self._why if self._session is None else self._session.sender.state

    def log(self, **scalars: float | torch.Tensor) -> None:
        """Add numbers of your own to the present step, or replace what is measured: `log(loss=...)`.

        Call it before `optimizer.step()`: what is logged later belongs to the next step, or to the last if none comes.
        One-element tensors are read without waiting for the device. A value that is not a number is left out, with a
        line on the terminal the first time.
        """
        if self._session is None:
            return
        with self._session.accumulator.unseen.swallow_faults("what is logged", "it is lost"):
            for name, value in scalars.items():
                if isinstance(value, torch.Tensor) and not value.is_cpu and tensors.is_capturing():
                    self._session.say_once(f"log({name}=...) in a CUDA graph that is captured: log it at each replay")
                    continue  # the copy would become part of the graph
                number = _number(value)
                if number is None:
                    self._session.say_once(f"log({name}=...): a {type(value).__name__} is no number and is left out")
                else:
                    self._session.log(name, number)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark what runs inside as not training: `with monitor.phase("eval"): ...`."""
        self._enter_phase(name)
        try:
            yield
        finally:
            self._enter_phase("")

    def stage(self, name: str) -> None:
        """Announce that from the next step on the task or the data change on purpose.

        For example at the next part of a curriculum, for longer sequences, or for another mixture. Rules over losses,
        gradients, updates and times start over there, as at the start of a run; their open incidents end; and no
        rollback goes back across it. With several ranks all may call it: it counts once.
        """
        if self._session is not None:
            with self._session.accumulator.unseen.swallow_faults("stages", "the new stage is not seen"):
                self._session.stage()
                said = printable(str(name))[:PHASE_LETTERS]
                self._session.sender.post(wire.StageBegan(name=said, seq=self._next_seq(), time=time.time()))

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Wrap `loader`: the wait for data is measured, and a rollback can skip batches."""
        return loader if self._session is None else self._session.batches.watch(loader)

    def on_alert(self, function: Callable[[dict[str, Any]], object]) -> None:
        """Call `function(alert)` when an incident of this run fires, when ranks or layers join it, and when it ends.

        `alert["event"]` is `fired`, `updated`, `resolved` or `rolled_back`; the rest is the case, in the shape that
        `sentinel incidents --json` prints. On rank 0 alone, and not for a silenced incident. The functions are called
        one after the other on a thread of their own: a slow one holds up the others and nothing else, and what they
        raise is logged. Raises AttachError if `function` cannot be called.
        """
        _refuse_uncallable("on_alert", function)
        alerts = self._session.alerts if self._session is not None else None
        if alerts is not None:
            alerts.add(function)

    def on_rollback(self, function: Callable[[int, int], object]) -> None:
        """Call `function(to, at)` after a rollback, on the training thread: the place to rewind counters of your own.

        The state at the exit of step `to` was then restored at the exit of step `at`. What the function raises is
        logged. Raises AttachError if `function` cannot be called.
        """
        _refuse_uncallable("on_rollback", function)
        offset = self._step
        self.after_rollback(lambda to, at: function(to + offset, at + offset))

    def after_rollback(self, function: Callable[[int, int], object]) -> None:
        """Like `on_rollback`, with steps counted from this attach on."""
        restorer = self._session.restorer if self._session is not None else None
        if restorer is not None:  # without armed rollback nothing is rolled back
            restorer.functions.append(function)

    def on_stop(self, function: Callable[[int], object], *, seconds: float = LAST_SECONDS) -> None:
        """Call `function(step)` where an alert with the action `stop` ends the run. The place to save a checkpoint.

        It is called on every rank, on the training thread, once step `step` is done on all of them; collectives work in
        it. What it raises is printed, and after `seconds` the process is ended: by then all such functions must be
        done, on all ranks, and the longest time that was given counts. Either way the exit status is 87. Raises
        AttachError where `seconds` is not a positive number, or `function` cannot be called.
        """
        _refuse_uncallable("on_stop", function)
        if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise AttachError(f"on_stop(seconds={seconds!r}): must be a number over 0")
        guard = self._session.guard if self._session is not None else None
        if guard is not None:
            guard.last_functions.append((function, seconds))

    def follow(self, other: Monitor) -> None:
        """Become the handle on what `other` watches: the same run, with another optimizer."""
        self._session, self._why, self._step = other._session, other._why, other._step

    def detach(self) -> None:
        """Stop watching; remove every hook and patch. Calling it twice does no harm."""
        self._leave(wire.Goodbye(reason="detach", next_seq=self._next_seq()))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or self._session is None:
            self.detach()
        elif (stop := self._session.stopped) is not None:
            self._leave(self._session.make_goodbye(stop))
        else:
            if error is not None:
                self._session.report_failure(error, backward=False)
            self._leave(wire.Goodbye(reason="exception", next_seq=self._next_seq(), detail=kind.__name__))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also one out of a pickle, watches nothing: a trainer that holds a monitor may be copied."""
        return functools.partial(Monitor, why="a copy, which watches nothing"), (self.run, None)

    def __repr__(self) -> str:
        return f"<sentinel.Monitor: run {self.run!r}, next step {self._step + self._next_seq()}, {self.state}>"

    def _next_seq(self) -> int:
        return self._session.next_seq if self._session is not None else 0

    def _leave(self, goodbye: wire.Goodbye) -> None:
        if self._session is not None:
            with faults.swallow_faults("detach", "some of it may still be in place"):
                self._session.leave(goodbye, GOODBYE_SECONDS)

    def _enter_phase(self, name: str) -> None:
        if self._session is not None:
            with self._session.accumulator.unseen.swallow_faults("phases", "the phase is not seen"):
                self._session.enter_phase(str(name))


def _number(value: object) -> Scalar | None:
    if isinstance(value, torch.Tensor):
        return scalar(value) if value.numel() == 1 and not value.is_complex() and not value.is_meta else None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _refuse_uncallable(method: str, function: object) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise AttachError(f"monitor.{method}(function): got a {kind}; pass the function itself, without parentheses")


LIMIT = 256
"""Most columns that are passed on. A trainer logs a few dozen; each is a series in the history and in Prometheus."""


class TrainerNumbers:
    """Gives each column a name that rules can use, and logs it. Sentinel's own measurements are not replaced."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """Column -> name; empty: left out."""
        self._full = False

    def log(self, monitor: Monitor, columns: Mapping[str, object]) -> None:
        """Log finite numbers for the present step. Never waits for a device: values on one are not checked."""
        with faults.swallow_faults("the trainer's numbers", "they are lost"):
            found: dict[str, float | torch.Tensor] = {}
            for column, value in columns.items():
                if isinstance(value, int | float | torch.Tensor) and _is_finite(value):
                    found[self._name(str(column))] = value
            found.pop("", None)
            if found:
                monitor.log(**found)

    def _name(self, column: str) -> str:
        name = self._names.get(column)
        if name is None:
            if len(self._names) >= LIMIT:
                if not self._full:
                    self._full = True
                    faults.say(f"the trainer logs more than {LIMIT} numbers: {column!r} and others are left out")
                return ""
            name = clean_name(column, self._names.values())
            self._names[column] = name = "" if name in SIGNALS else name
        return name


def _is_finite(value: float | torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and (not value.is_cpu or bool(torch.isfinite(value)))
    return math.isfinite(value)
