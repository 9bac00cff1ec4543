"""The batches of steps whose loss is still on a device.

A loop may be steps ahead of its device. By the time a non-finite loss is known, its update has been applied and the
weights are broken, so that running the batch again says nothing. What was in the batch can still be looked at: the
floating-point inputs of the last steps are held, by reference, until their losses have arrived.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from sentinel.hooks.evidence.nonfinite_trace import is_broken
from sentinel.hooks.loop.forward_passes import LEAVES, CapturedCall, name_tensors
from sentinel.hooks.torch_interop.tensors import storage_address, storage_bytes

MOST_STEPS = 16
MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of a device's memory, for all batches held. Older ones are released first."""
HELD_STEPS = 1000
"""Steps after a non-finite loss for which its batch is held: the daemon may ask for it that long."""


class HeldBatch(msgspec.Struct):
    """The floating-point inputs of a step's forward pass, without their graph and without a copy."""

    seq: int
    read_loss: Callable[[], float | None]
    """Returns the loss of the step; None while it is still on the device."""
    inputs: Sequence[tuple[str, Tensor]] = ()
    versions: Sequence[int] = ()
    """Version of each input: a write into the tensor increments it."""
    nbytes: int = 0
    """Bytes of the memory that the inputs keep alive: of a view, all of what it is a view of."""

    @property
    def unchanged(self) -> bool:
        """Whether none of the inputs was written to since the batch was held."""
        return self.versions == [tensor._version for _, tensor in self.inputs]

    def list_broken(self) -> list[str]:
        """Names of the inputs with NaN or +infinity; empty if one was written to since. This waits for the device."""
        return [name for name, tensor in self.inputs if is_broken(tensor)] if self.unchanged else []


class RecentBatches:
    """Holds the batches whose losses have not arrived, and the one before them. Used on the training thread."""

    def __init__(self) -> None:
        self._awaited: deque[HeldBatch] = deque(maxlen=MOST_STEPS)
        self._before: HeldBatch | None = None
        """The newest batch whose loss has arrived and is finite."""
        self._broken: HeldBatch | None = None
        """The first batch whose loss is not finite. The steps that follow are awaited without their batches."""

    def add(self, seq: int, read_loss: Callable[[], float | None], call: CapturedCall) -> None:
        """Hold the inputs of `call`, the last forward pass of a finished step whose loss has not arrived yet."""
        if self._broken is None:
            self._awaited.append(_hold(seq, read_loss, call))
        elif seq - self._broken.seq > HELD_STEPS:
            self.clear()
        else:
            self._awaited.append(HeldBatch(seq, read_loss))
        self._let_go()

    def find_bad_data(self) -> tuple[int, list[str]] | None:
        """Find NaN and +infinity in the batch of the first step whose loss is not finite. This waits for the device.

        Returns (seq, names of these inputs); None: there are none, or the batch is not held. What an input of that name
        had in the batch before does not count either: NaN may mark values that are missing.
        """
        self._let_go()
        if self._broken is None or not (broken := self._broken.list_broken()):
            return None
        usual = self._before.list_broken() if self._before is not None else ()
        names = [name for name in broken if name not in usual]
        return (self._broken.seq, names) if names else None

    def clear(self) -> None:
        """Release all batches. May be called on any thread."""
        self._awaited = deque(maxlen=MOST_STEPS)
        self._before = self._broken = None

    def _let_go(self) -> None:
        """Release the batches that are not needed, and those over the limit."""
        awaited = self._awaited
        while awaited and (loss := awaited[0].read_loss()) is not None:
            arrived = awaited.popleft()
            if math.isfinite(loss):  # after one that is not: that step broke no weight
                self._before, self._broken = arrived, None
            elif self._broken is None:
                self._broken = arrived
                for one in awaited:
                    one.inputs, one.versions, one.nbytes = (), (), 0
        if self._before is not None and self._count_bytes() > MOST_BYTES:
            self._before = None
        while awaited and self._count_bytes() > MOST_BYTES:
            awaited.popleft()

    def _count_bytes(self) -> int:
        return sum(one.nbytes for one in (*self._awaited, self._before, self._broken) if one is not None)


def _hold(seq: int, read_loss: Callable[[], float | None], call: CapturedCall) -> HeldBatch:
    if not call.unchanged:
        return HeldBatch(seq, read_loss)
    named = itertools.chain(name_tensors(call.args, "args"), name_tensors(call.kwargs, "kwargs"))
    inputs = [
        (name, tensor.detach())
        for name, tensor in itertools.islice(named, LEAVES)
        if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_inference()
    ]
    sizes = {storage_address(tensor): storage_bytes(tensor) for _, tensor in inputs}
    return HeldBatch(seq, read_loss, inputs, [tensor._version for _, tensor in inputs], sum(sizes.values()))
