"""Whether the Triton kernel takes the statistics of tensors on a GPU: once it is compiled.

Compiling takes some seconds where Triton's cache does not have it, so a thread does it. Until then, and where it cannot
be done, torch's operations stay, which launch several kernels for each tensor.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.unseen import is_passing
from sentinel.hooks.core.worker import Task, Worker
from sentinel.hooks.measure.statistics import Statistics


def is_usable() -> bool:
    """Whether this is a torch for CUDA, with Triton beside it, and SENTINEL_TRITON does not turn the kernel off."""
    wanted = os.environ.get("SENTINEL_TRITON", "1") not in ("", "0")
    return wanted and torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


class DeviceKernel:
    """The Triton kernel of this process."""

    def __init__(self, usable: bool, device_type: str = "cuda") -> None:
        self._usable, self._device_type = usable, device_type
        self._kernel: ModuleType | None = None
        self._worker = Worker("sentinel-compile", finishes=True)
        self._preparing: Task | None = None

    def measure(self, tensors: list[torch.Tensor], scale: torch.Tensor | None) -> Statistics | None:
        """The statistics of `tensors`, on their way; None where torch's operations have to compute them."""
        if not self._usable or {tensor.device for tensor in tensors} != {tensors[0].device}:
            return None
        if tensors[0].device.type != self._device_type or not self._is_ready(tensors):
            return None
        assert self._kernel is not None
        try:
            found: Statistics = self._kernel.measure_tensors(tensors, scale)
        except Exception as error:
            fault_guard.let_through(error)
            if is_passing(error):
                raise
            self._give_up()
            return None
        return found

    def _is_ready(self, tensors: list[torch.Tensor]) -> bool:
        """Whether all that they need is compiled; if not, have it done."""
        if self._preparing is not None and not self._preparing.over:
            return False
        if self._kernel is None:
            self._prepare(self._load)
            return False
        if missing := self._kernel.list_uncompiled(tensors):
            self._prepare(partial(self._kernel.compile_variants, missing))
            return False
        return True

    def _prepare(self, do: Callable[[], object]) -> None:
        self._preparing = self._worker.submit(partial(self._try, do))

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception:
            self._give_up()

    def _load(self) -> None:
        self._kernel = importlib.import_module("sentinel.hooks.measure.triton_kernel")

    def _give_up(self) -> None:
        """It cannot be compiled here: no C compiler, an old GPU."""
        self._usable = False
        fault_guard.swallow("the Triton kernel", "with torch's operations in its place")
