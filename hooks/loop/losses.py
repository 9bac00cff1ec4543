"""Reads the loss that a backward pass begins at, without its loss scale.

Optimizers that scale by themselves keep the scale as `cur_scale` (DeepSpeed's) or `loss_scale`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import is_passing
from sentinel.hooks.torch_interop import tensors
from sentinel.hooks.torch_interop.discovery import WRAPPERS
from sentinel.hooks.torch_interop.tensors import Scalar, on_one_device, scalar, sum_of, to_scalar

_RAW = "_sentinel_raw"
"""Attribute of a scaled loss: the loss before scaling, and the version that the scaled one had. An attribute and not a
table by id(), since ids are reused."""
_ever_scaled = False
"""Whether any loss was scaled in this process."""


class ScaledLosses(threading.local):
    """The losses that were scaled on the calling thread: another thread may train another model, without a scale."""

    by: Tensor | None = None
    """Scale of the losses scaled since the last backward pass; None where there are none."""


scaled = ScaledLosses()


def note_scale(scale: Tensor | None) -> None:
    """Note that the calling thread multiplied a loss by `scale`. None: the scaler has no scale."""
    global _ever_scaled
    _ever_scaled, scaled.by = True, scale


def remember(loss: Any, raw: Any) -> None:
    """Remember that `loss` is `raw` scaled: when a backward pass begins at `loss`, the loss is `raw`."""
    if isinstance(raw, torch.Tensor):
        setattr(loss, _RAW, (raw.detach(), loss._version))  # the version, as it may be divided in place
    elif isinstance(raw, list | tuple):
        for one, other in zip(loss, raw, strict=True):
            remember(one, other)


def is_scaled(root: torch.Tensor) -> bool:
    """Whether `root` is a loss that GradScaler returned."""
    return hasattr(root, _RAW)


def is_scaled_pass(roots: Any) -> bool:
    """Whether a backward pass begins at a scaled loss, or at a loss computed from one."""
    return scaled.by is not None or is_scaled(roots)


def plain_loss(root: Any) -> float | None:
    """Return the loss of a pass from `root`, if it is an unscaled number on the host; otherwise, and if it has several
    elements, None."""
    if type(root) is not Tensor or not root.is_cpu or root.numel() != 1 or (_ever_scaled and is_scaled_pass(root)):
        return None
    loss = root.item()
    return loss if type(loss) is float else None


def loss_of(roots: Any, weights: Any) -> Scalar | None:
    """Return the sum of the roots, without scale, times their weights (None: 1). None where one of them is no scalar,
    or while a graph is captured, as nothing is computed yet. Raises what torch raises."""
    try:
        if tensors.is_capturing():  # the copy would be part of the graph
            return None
        if isinstance(roots, torch.Tensor):  # nearly always so
            return _apply_weight(roots, weights) if _is_scalar(roots) else None
        total: Scalar | None = None
        several = tuple(roots.values() if isinstance(roots, dict) else roots)
        factors = weights if isinstance(weights, list | tuple) else (weights,) * len(several)
        for root, factor in zip(several, factors, strict=True):
            if not isinstance(root, torch.Tensor) or not _is_scalar(root):
                return None
            value = _apply_weight(root, factor)
            total = value if total is None else sum_of(total, value)
        return total
    finally:
        scaled.by = None


def _is_scalar(root: torch.Tensor) -> bool:
    return root.numel() == 1 and not root.is_complex()  # a pass from a complex number does not descend on it


def _apply_weight(root: torch.Tensor, weight: Any) -> Scalar:
    value = _undo_scale(root)
    known = isinstance(weight, torch.Tensor) and _is_scalar(weight)  # else 1, or a weight that autograd will refuse
    if not known:
        return value
    value, factor = on_one_device((value, scalar(weight)))
    return value * factor


def _undo_scale(root: torch.Tensor) -> Scalar:
    raw, version = getattr(root, _RAW, (None, 0))
    if raw is not None and root._version == version:
        return scalar(raw)
    # Scaled, then divided by the number of micro-batches or added up: the result does not have our attribute.
    if scaled.by is None:
        return scalar(root)
    value, scale = on_one_device((scalar(root), scalar(scaled.by)))
    return value / scale


_NAMES = ("cur_scale", "loss_scale")


class EngineLossScale:
    """The loss scale that an optimizer, or a wrapper around it, keeps. Its owner is held weakly."""

    def __init__(self, optimizer: Any) -> None:
        self._owner: weakref.ref[Any] | None = None
        self._name = ""
        for _ in range(WRAPPERS):
            for name in _NAMES:
                if _read(optimizer, name) is not None:
                    self._owner, self._name = weakref.ref(optimizer), name
                    return
            optimizer = getattr(optimizer, "optimizer", None)

    @property
    def found(self) -> bool:
        """Whether the optimizer keeps a scale."""
        return self._owner is not None

    def __call__(self) -> Scalar | None:
        """Return the present scale; None where there is none."""
        owner = self._owner() if self._owner is not None else None
        return _read(owner, self._name) if owner is not None else None


def _read(owner: Any, name: str) -> Scalar | None:
    try:
        return to_scalar(getattr(owner, name, None))
    except Exception as error:  # a property that is not ready yet
        faults.let_through(error)
        if is_passing(error):  # the caller counts it, and the step goes without
            raise
        return None
