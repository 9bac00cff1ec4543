"""The loss that a backward pass begins at, as it was before it was scaled.

The loss scale of optimizers that scale by themselves: DeepSpeed's have it as `cur_scale`, others as `loss_scale`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from sentinel.hooks.core import fault_guard
from sentinel.hooks.torch_interop import tensors
from sentinel.hooks.torch_interop.discovery import WRAPPERS
from sentinel.hooks.torch_interop.tensors import Scalar, on_one_device, scalar, sum_of

_RAW = "_sentinel_raw"
"""Attribute of a scaled loss: the loss before scaling, and the version that the scaled one had. An attribute and not a
table by id(): ids are used again."""


class ScaledLosses:
    """What is known of losses that were scaled in this process."""

    def __init__(self) -> None:
        self.ever = False
        """Whether there was one."""
        self.by: list[Tensor] = []
        """Scale of those since the last backward pass."""


scaled = ScaledLosses()


def remember(loss: Any, raw: Any) -> None:
    """`loss` is the loss `raw`, scaled: when a backward pass begins at it, the loss is `raw`."""
    scaled.ever = True
    if isinstance(raw, torch.Tensor):
        setattr(loss, _RAW, (raw.detach(), loss._version))  # the latter: it may be divided in place
    elif isinstance(raw, list | tuple):
        for one, other in zip(loss, raw, strict=True):
            remember(one, other)


def is_scaled(root: torch.Tensor) -> bool:
    """Whether it is a loss as GradScaler gave it back."""
    return hasattr(root, _RAW)


def is_scaled_pass(roots: Any) -> bool:
    """Whether a backward pass that begins is from a scaled loss, or from one that was made of such."""
    return bool(scaled.by) or is_scaled(roots)


def plain_loss(root: Any) -> float | None:
    """Of a pass from `root`: the loss, where that is a number on the host that nobody scaled. Else, and where it has
    several elements, None."""
    if type(root) is not Tensor or not root.is_cpu or root.numel() != 1 or (scaled.ever and is_scaled_pass(root)):
        return None
    loss = root.item()
    return loss if type(loss) is float else None


def loss_of(roots: Any, weights: Any) -> Scalar | None:
    """The sum of the roots, before scaling, times their weights (None: 1). None where one of them is no scalar, or
    nothing has been computed yet."""
    try:
        if tensors.is_capturing():  # the copy would be part of the graph
            return None
        if isinstance(roots, torch.Tensor):  # as nearly always
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
    except Exception:
        fault_guard.swallow("patches.loss", "the loss is not seen")
        return None
    finally:
        scaled.by.clear()


def _is_scalar(root: torch.Tensor) -> bool:
    return root.numel() == 1 and not root.is_complex()  # a pass from a complex number is no descent of it


def _apply_weight(root: torch.Tensor, weight: Any) -> Scalar:
    value = _undo_scale(root)
    known = isinstance(weight, torch.Tensor) and _is_scalar(weight)  # else 1, or what autograd will refuse
    if not known:
        return value
    value, factor = on_one_device((value, scalar(weight)))
    return value * factor


def _undo_scale(root: torch.Tensor) -> Scalar:
    raw, version = getattr(root, _RAW, (None, 0))
    if raw is not None and root._version == version:
        return scalar(raw)
    # Scaled, then divided by the number of micro-batches or added up: the result carries no attribute of ours.
    if not scaled.by:
        return scalar(root)
    value, scale = on_one_device((scalar(root), scalar(scaled.by[0])))
    return value / scale


_NAMES = ("cur_scale", "loss_scale")


class EngineLossScale:
    """The scale that an optimizer, or a wrapper around it, keeps. Held weakly."""

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
        """Whether there is one."""
        return self._owner is not None

    def __call__(self) -> Scalar | None:
        """As it stands; None where there is none."""
        owner = self._owner() if self._owner is not None else None
        return _read(owner, self._name) if owner is not None else None


def _read(owner: Any, name: str) -> Scalar | None:
    try:
        return _number(getattr(owner, name, None))
    except Exception:  # a property that is not ready
        return None


def _number(value: object) -> Scalar | None:
    if isinstance(value, torch.Tensor):
        return scalar(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
