"""The loss scale of optimizers that scale by themselves: DeepSpeed's have it as `cur_scale`, others as `loss_scale`."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sentinel.hooks.tally import Scalar, scalar
from sentinel.hooks.targets import WRAPPERS

_NAMES = ("cur_scale", "loss_scale")


class OwnScale:
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
