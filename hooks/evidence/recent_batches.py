"""The batches of steps whose loss is still on a device.

A loop may be steps ahead of its device. By the time a non-finite loss is known, its update has been applied and the
weights are broken, so that running the batch again says nothing. What was in the batch can still be looked at: the
floating-point inputs of the last steps are held, by reference, until their losses have arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from sentinel.hooks.evidence.nonfinite_trace import finite
from sentinel.hooks.loop.forward_passes import CapturedCall, name_tensors
from sentinel.hooks.torch_interop.layer_table import nbytes_of

MOST_STEPS = 16
MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of a device's memory, for all batches held. Older ones are released first."""
HELD_STEPS = 1000
"""Steps after a non-finite loss for which its batch is held: the daemon may ask for it that long."""


class HeldBatch(msgspec.Struct):
    """The floating-point inputs of a step's forward pass, by reference."""

    seq: int
    read_loss: Callable[[], float | None]
    """Returns the loss of the step; None while it is still on the device."""
    inputs: Sequence[tuple[str, Tensor]]
    versions: Sequence[int]
    """Version of each input: a write into the tensor increments it."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes_of(tensor) for _, tensor in self.inputs)

    @property
    def unchanged(self) -> bool:
        """Whether none of the inputs was written to since the batch was held."""
        return self.versions == [tensor._version for _, tensor in self.inputs]


class RecentBatches:
    """Holds the batches whose losses have not arrived, and the one before them. Used on the training thread."""

    def __init__(self) -> None:
        self._awaited: deque[HeldBatch] = deque()
        self._before: HeldBatch | None = None
        """The newest batch whose loss has arrived and is finite."""
        self._broken: HeldBatch | None = None
        """The first batch whose loss is not finite: no other is held from then on."""

    def add(self, seq: int, read_loss: Callable[[], float | None], call: CapturedCall) -> None:
        """Hold the inputs of `call`, the last forward pass of a finished step whose loss has not arrived yet."""
        if self._broken is not None:
            if seq - self._broken.seq > HELD_STEPS:
                self.clear()
            return
        if call.unchanged:
            named = (*name_tensors(call.args, "args"), *name_tensors(call.kwargs, "kwargs"))
            inputs = [(name, tensor) for name, tensor in named if tensor.is_floating_point()]
            if inputs:
                self._awaited.append(HeldBatch(seq, read_loss, inputs, [tensor._version for _, tensor in inputs]))
        self._let_go()

    def find_bad_data(self) -> tuple[int, list[str]] | None:
        """Find NaN and infinities in the batch of the first step whose loss is not finite. This waits for the device.

        Returns (seq, names of these inputs); None: the inputs are finite, or not held. An input that was not finite in
        the batch before either, like a mask of infinities, does not count; without such a batch to compare with, only
        NaN counts.
        """
        self._let_go()
        if self._broken is None or not self._broken.unchanged:
            return None
        bad = {name: tensor for name, tensor in self._broken.inputs if not finite(tensor)}
        if self._before is not None and self._before.unchanged:
            usual = {name for name, tensor in self._before.inputs if not finite(tensor)}
            names = [name for name in bad if name not in usual]
        else:
            names = [name for name, tensor in bad.items() if bool(tensor.isnan().any())]
        return (self._broken.seq, names) if names else None

    def clear(self) -> None:
        """Release all batches."""
        self._awaited.clear()
        self._before = self._broken = None

    def _let_go(self) -> None:
        """Release what is not needed, and what exceeds the limits."""
        awaited = self._awaited
        while self._broken is None and awaited and (loss := awaited[0].read_loss()) is not None:
            arrived = awaited.popleft()
            if math.isfinite(loss):
                self._before = arrived
            else:
                self._broken = arrived
                awaited.clear()
        if self._before is not None and self._count_bytes() > MOST_BYTES:
            self._before = None
        while awaited and (len(awaited) > MOST_STEPS or self._count_bytes() > MOST_BYTES):
            awaited.popleft()

    def _count_bytes(self) -> int:
        return sum(one.nbytes for one in (*self._awaited, self._before, self._broken) if one is not None)
