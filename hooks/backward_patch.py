"""What stands around `torch.autograd.backward`: it tells the loss that a pass began at, and how long it took."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch._C import _current_graph_task_id as present_pass
from torch.overrides import has_torch_function

from sentinel.hooks import losses
from sentinel.hooks.fast_path_native import called, learned
from sentinel.hooks.tally import Ledger

if TYPE_CHECKING:
    from sentinel.hooks.listener import Listener

_ALL_WANTED = -math.inf
"""See `Ledger.calm_to`."""


@called("backward")
@learned
class BackwardPatch:
    """An object and not a function, for the usual case to be in C."""

    __slots__ = ("__dict__", "__weakref__", "_live", "_original", "_tell", "ledger")

    def __init__(self, tell: Callable[..., None]) -> None:
        """`tell` is called with the event and its arguments."""
        self._tell = tell
        self.ledger: Ledger | None = None

    def serve(self, only: Listener | None) -> None:
        """The one run that is watched from now on; None where there are several, or none any more."""
        self.ledger = only.ledger if only is not None else None

    def around(self, original: Callable[..., Any], live: list[bool]) -> BackwardPatch:
        """Stand around `original`, till `live` is [False]."""
        self._original, self._live = original, live
        return self

    def __call__(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A backward inside a backward (reentrant checkpointing) is part of the outer one. Where a mode or a subclass of
        # tensors is asked first (`with torch.device(...)` is a mode), it calls this again.
        if not self._live[0] or present_pass() != -1 or has_torch_function(_several(tensors)):
            return self._original(tensors, *args, **kwargs)
        weights = args[0] if args else kwargs.get("grad_tensors")
        ledger = self.ledger
        if ledger is not None:
            tally = ledger.tally
            # It may come after passes of its step that were thrown away, or be of another model.
            questionable = tally.backwards or not (tally.forwards or not ledger.sees_forwards)
            if questionable or weights is not None or ledger.calm_to == _ALL_WANTED:
                ledger = None
        if ledger is None:
            self._tell("backward_begins", tensors, weighted=weights is not None)
        begin = perf_counter()
        try:
            result = self._original(tensors, *args, **kwargs)
        except Exception as error:
            self._failed(error)
            raise
        seconds = perf_counter() - begin
        if ledger is None:
            self._tell("backward_ended", losses.loss_of(tensors, weights), seconds)
        else:
            self._ended(tensors, seconds, ledger)
        return result

    def __reduce__(self) -> str:
        """As a function is pickled and copied: by its name."""
        return "backward"

    def _failed(self, error: Exception) -> None:
        self._tell("backward_failed", error)

    def _ended(self, root: Any, seconds: float, ledger: Ledger) -> None:
        """A pass with nothing unusual before it is over. Where its loss is none either, the ledger has it, and nobody
        need be told."""
        try:
            loss = losses.plain_loss(root)
            if loss is not None and loss <= ledger.calm_to and loss - loss == 0.0:  # the last: minus infinity
                ledger.backward_ended(loss, seconds)
                return
        except Exception:  # not to be read
            pass
        self._tell("backward_ended", losses.loss_of(root, None), seconds)


def _several(roots: Any) -> tuple[Any, ...] | list[Any]:
    return roots if isinstance(roots, tuple | list) else (roots,)
