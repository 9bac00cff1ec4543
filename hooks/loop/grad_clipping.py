"""Reads the gradient norm before clipping, for free, from the loop's own clipping; and what GradScaler left scaled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from sentinel.hooks.torch_interop.layer_table import local
from sentinel.hooks.torch_interop.tensors import Scalar, is_finite, on_one_device, scalar

_Call = tuple[int, int, int]
"""Distinguishes the parameters of one call from another's: ids of the first and the last, and their number."""

_SMALL = 1e-6
"""What torch adds to a norm before it divides the limit by it."""


class Clip(NamedTuple):
    """What the loop clipped before a step, or in one call."""

    norm: Scalar | None
    """L2 norm before clipping. None unless it is that of exactly the optimizer's parameters that train: frozen ones
    have no gradient, and may be missing in a call. A norm that is not finite is that of all that was clipped by it."""
    limit: float
    by: Scalar | None = None
    """Norm, of any type, by which all of the optimizer's gradients were clipped in one call, perhaps with others."""

    def find_norm_before(self, after: Scalar) -> Scalar | None:
        """Return the L2 norm before clipping of the optimizer's gradients, whose norm is `after` now; None where that
        cannot be known."""
        if self.by is None or not self.limit > 0:
            return None
        after, by = on_one_device((after, self.by))
        factor = (by + _SMALL) / self.limit
        return after * (factor.clamp(min=1.0) if isinstance(factor, torch.Tensor) else max(factor, 1.0))


_CALLS = 64
"""Most different calls that are remembered: a loop has a few, unless it keeps making new parameters."""


class Clipping:
    """Calls of `clip_grad_norm_` on the parameters of one optimizer, since its last step."""

    def __init__(self, ids: Callable[[], frozenset[int]]) -> None:
        """`ids` returns the ids of the optimizer's parameters that train."""
        self._ids = ids
        self.calls: dict[_Call, Clip] = {}
        """Calls since the last step."""
        self._passes: dict[_Call, int] = {}
        """Call -> the number of backward passes before it in its step."""
        self._covers: dict[_Call, tuple[int, bool]] = {}
        self._covered = ids()

    def record_clipping(
        self,
        parameters: list[torch.Tensor],
        limit: float,
        norm: torch.Tensor,
        *,
        l2: bool,
        scale: Scalar | None,
        passes: int = 0,
    ) -> None:
        """Record that the gradients of `parameters` had this norm (`l2`: it is an L2 norm) and were clipped to `limit`.

        `scale` is the factor by which they were still multiplied, `passes` the number of backward passes so far.
        """
        if not parameters:
            return
        call = (id(parameters[0]), id(parameters[-1]), len(parameters))
        if self._ids() is not self._covered or len(self._covers) > _CALLS:
            self._covered, self._covers, self._passes, self.calls = self._ids(), {}, {}, {}
        if call not in self._covers:
            self._covers[call] = self._coverage(parameters)
        if not self._covers[call][0]:
            return
        if call in self.calls and self._passes[call] == passes:  # clipped already: the norm before is the first
            first, before, _ = self.calls[call]
            self.calls[call] = Clip(first, min(before, float(limit)))
        else:
            by = value = scalar(local(norm))
            if l2 and scale is not None:
                value, scale = on_one_device((value, scale))
                value = value / scale
            self.calls[call], self._passes[call] = Clip(value if l2 else None, float(limit), by), passes

    def start_over(self) -> None:
        """Forget this step's clipping, as its gradients were discarded."""
        self.calls = {}

    def take(self) -> Clip | None:
        """Return what was clipped since the last step, and forget it; None where nothing was."""
        if not self.calls:
            return None
        calls, self.calls = self.calls, {}
        covers = [self._covers[call] for call in calls]
        finite = [clip.limit for clip in calls.values() if math.isfinite(clip.limit)]
        limit = max(finite, default=math.inf)  # a call without a limit only asks for the norm
        norms = [clip.norm for clip in calls.values() if clip.norm is not None]
        whole = sum(count for count, _ in covers) == len(self._ids()) and not any(others for _, others in covers)
        if not whole or len(norms) < len(calls):
            broken = next((clip.by for clip in calls.values() if not is_finite(clip.by)), None)
            all_by_one = len(calls) == 1 and covers[0][0] == len(self._ids())
            return Clip(broken, limit, next(iter(calls.values())).by if all_by_one else None)
        if len(norms) == 1:
            return Clip(norms[0], limit)
        squares = sum(norm * norm for norm in on_one_device(norms))
        return Clip(torch.sqrt(squares) if isinstance(squares, torch.Tensor) else math.sqrt(squares), limit)

    def _coverage(self, parameters: list[torch.Tensor]) -> tuple[int, bool]:
        """Return how many of `parameters` the optimizer trains, and whether others among them are trained."""
        ids = self._ids()
        own = len({id(p) for p in parameters} & ids)
        return own, any(p.requires_grad and id(p) not in ids for p in parameters)


def scale_left(scaler: GradScaler | None, optimizer: object) -> Scalar | None:
    """Return the factor of the optimizer's gradients after `scaler` scaled the loss; None where there is none now."""
    if scaler is None or scaler._scale is None:
        return None
    state = scaler._per_optimizer_states.get(id(optimizer))
    return None if state is not None and state["stage"] is OptState.UNSCALED else scalar(scaler._scale)


def read_overflow(optimizer: object) -> Scalar:
    """Return 1 where GradScaler found a non-finite gradient of a fused optimizer (its step does nothing), else 0."""
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, torch.Tensor):
        return 0.0
    value = scalar(found)
    return float(value > 0) if isinstance(value, float) else value.clamp(max=1.0)
