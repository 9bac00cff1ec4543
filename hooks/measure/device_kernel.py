"""Whether the Triton kernel takes the statistics of tensors on a GPU: once it is compiled.

Compiling takes some seconds where Triton's cache does not have it, so a thread does it. Until then, and where it cannot
be done, torch's operations stay, which launch several kernels for each tensor.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from types import ModuleType

import torch

from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.unseen import is_passing
from sentinel.hooks.core.threads import Task, Worker
from sentinel.hooks.measure.statistics import Statistics


def is_usable() -> bool:
    """Whether this is a torch for CUDA, with Triton beside it, and SENTINEL_TRITON does not turn the kernel off.
    Triton's interpreter (TRITON_INTERPRET) would read addresses of the device in host memory."""
    wanted = os.environ.get("SENTINEL_TRITON", "1") not in ("", "0")
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    there = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    return wanted and there and not interpreted


class DeviceKernel:
    """The Triton kernel of this process."""

    def __init__(self, usable: bool, device_type: str = "cuda") -> None:
        self._usable, self._device_type = usable, device_type
        self._kernel: ModuleType | None = None
        self._worker = Worker("sentinel-compile", finishes=True)
        self._compiling: Task | None = None

    def load(self) -> None:
        """Import Triton, which takes some tenths of a second, and start the thread that compiles: before the loop. Not
        called where the model is not on a GPU yet; torch's operations stay then."""
        if self._usable and self._kernel is None:
            try:
                self._kernel = importlib.import_module("sentinel.hooks.measure.triton_kernel")
                self._worker.start()
            except Exception:
                self._give_up()

    def measure(self, tensors: list[torch.Tensor], scale: torch.Tensor | None) -> Statistics | None:
        """The statistics of `tensors`, on their way; None where torch's operations have to compute them."""
        kernel = self._kernel
        if not self._usable or kernel is None or tensors[0].device.type != self._device_type:
            return None
        try:
            if not kernel.can_read(tensors) or not self._is_ready(kernel, tensors):
                return None
            found: Statistics = kernel.measure_tensors(tensors, scale)
        except Exception as error:
            fault_guard.let_through(error)
            if not is_passing(error):
                self._give_up()
            return None
        return found

    def _is_ready(self, kernel: ModuleType, tensors: list[torch.Tensor]) -> bool:
        """Whether all that they need is compiled; if not, have it done."""
        if self._compiling is not None and not self._compiling.over:
            return False
        if missing := kernel.list_uncompiled(tensors):
            self._compiling = self._worker.submit(partial(self._compile, kernel, missing))
            return False
        return True

    def _compile(self, kernel: ModuleType, variants: object) -> None:
        try:
            kernel.compile_variants(variants)
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        """It cannot be had here: no thread, no C compiler, an old GPU, a full disk."""
        self._usable = False
        fault_guard.swallow("the Triton kernel", "with torch's operations in its place")
