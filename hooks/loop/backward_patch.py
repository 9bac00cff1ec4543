"""What stands around `torch.autograd.backward`: it tells the loss that a pass began at, and how long it took."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.overrides import has_torch_function

from sentinel.hooks.loop import losses
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.internals import backward_pass_id

if TYPE_CHECKING:
    from sentinel.hooks.loop.loop_events import LoopEvents

_ALL_WANTED = -math.inf
"""See `StepAccumulator.calm_to`."""


class BackwardPatch:
    """Stands in the place of `torch.autograd.backward`: `around` puts it there."""

    def __init__(self, tell: Callable[[str, Callable[[LoopEvents], object]], None]) -> None:
        """`tell` takes the name of an event and the call that tells a listener of it."""
        self._tell = tell
        self.accumulator: StepAccumulator | None = None

    def serve(self, only: LoopEvents | None) -> None:
        """The one run that is watched from now on; None where there are several, or none any more."""
        self.accumulator = only.accumulator if only is not None else None

    def around(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Stand around `original`, until `live` is [False]."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # A backward inside a backward (reentrant checkpointing) is part of the outer one. Where a mode or a
            # subclass of tensors is asked first (`with torch.device(...)` is a mode), it calls this again.
            if not live[0] or backward_pass_id() != -1 or has_torch_function(_several(tensors)):
                return original(tensors, *args, **kwargs)
            weights = args[0] if args else kwargs.get("grad_tensors")
            accumulator = self._quiet_accumulator() if weights is None else None
            if accumulator is None:
                weighted = weights is not None
                self._tell("backward_begins", lambda run: run.backward_begins(tensors, weighted=weighted))
            begin = perf_counter()
            try:
                result = original(tensors, *args, **kwargs)
            except Exception as error:
                failure = error
                self._tell("backward_failed", lambda run: run.backward_failed(failure))
                raise
            seconds = perf_counter() - begin
            if accumulator is None:
                loss = losses.loss_of(tensors, weights)
                self._tell("backward_ended", lambda run: run.backward_ended(loss, seconds))
            else:
                self._record_end(tensors, seconds, accumulator)
            return result

        return backward

    def _quiet_accumulator(self) -> StepAccumulator | None:
        """The accumulator that may note the pass that begins by itself; None where listeners are to be told."""
        accumulator = self.accumulator
        if accumulator is None or accumulator.calm_to == _ALL_WANTED:
            return None
        totals = accumulator.totals
        # The pass may come after passes of its step that were thrown away, or be of another model.
        if totals.backwards or not (totals.forwards or not accumulator.sees_forwards):
            return None
        return accumulator

    def _record_end(self, root: Any, seconds: float, accumulator: StepAccumulator) -> None:
        """A pass with nothing unusual before it is over. Where its loss is not unusual either, the accumulator has
        it, and no listener is called."""
        try:
            loss = losses.plain_loss(root)
            if loss is not None and loss <= accumulator.calm_to and loss - loss == 0.0:  # the last: minus infinity
                accumulator.backward_ended(loss, seconds)
                return
        except Exception:  # not to be read
            pass
        told = losses.loss_of(root, None)
        self._tell("backward_ended", lambda run: run.backward_ended(told, seconds))


def _several(roots: Any) -> tuple[Any, ...] | list[Any]:
    return roots if isinstance(roots, tuple | list) else (roots,)
