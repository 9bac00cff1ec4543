"""What the patches tell of one run, handed to what it concerns: ledger, streams, batches, inquest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.amp.grad_scaler import GradScaler

from sentinel.hooks import losses
from sentinel.hooks.batches import Batches
from sentinel.hooks.inquest import Inquest
from sentinel.hooks.streams import Streams
from sentinel.hooks.tally import Ledger, Scalar, is_finite
from sentinel.hooks.witnesses import Witnesses


class Listening:
    """The `Listener` of one run. Called several times at every step: what it costs is measurable."""

    def __init__(
        self,
        streams: Streams,
        *,
        ledger: Ledger,
        batches: Batches,
        inquest: Inquest,
        failed: Callable[[BaseException], None],
        capturing: Callable[[], None],
    ) -> None:
        """`failed` and `capturing` are for the run as a whole: a pass raised, a CUDA graph is about to be captured."""
        self._streams, self.ledger, self.batches = streams, ledger, batches
        self._inquest, self._failed, self.capturing = inquest, failed, capturing
        self._scales = self._looked_at = False
        """A loss of this run was scaled; a probe looks at the present backward pass."""
        parts = streams.parts
        self._witnesses = Witnesses(parts[0].layers) if len(parts) == 1 else None
        """None where several optimizers share the passes: what one clears another may want."""
        self._may_be_ours = True
        """The present pass: the model ran since its last step, or its forward passes are never seen."""

    def model_ran(self) -> bool:
        return self.ledger.tally.forwards > 0 and self.ledger.here()

    def backward_begins(self, roots: object, *, weighted: bool) -> None:
        ledger = self.ledger
        ledger.tally.weighted |= weighted
        ledger.sees_forwards = ledger.sees_forwards or ledger.tally.forwards > 0
        self._may_be_ours = not ledger.sees_forwards or self.model_ran()
        if self._witnesses is not None and self._witnesses.begins(first=not ledger.tally.backwards):
            self._start_over()
        if self._scales and not losses.is_scaled_pass(roots):
            for stream in self._streams.live:
                stream.unscaled()
        self._looked_at = self._streams.awake
        if self._looked_at:
            for stream in self._streams.live:
                if stream.probes.awake:
                    stream.probes.pass_begins(roots)

    def backward_ended(self, loss: Scalar | None, seconds: float) -> None:
        if self._witnesses is not None and not self._witnesses.ended() and not self._may_be_ours:
            loss = None  # of a model that is trained beside ours
        else:
            self.ledger.backward_ended(loss, seconds)
        if self._looked_at:
            for stream in self._streams.live:
                if stream.probes.awake:
                    stream.probes.pass_ended()
        if not is_finite(loss):
            self._inquest.freeze_batch()
        gathering = self._streams.gathering
        if gathering is not None and gathering.whole is not None:
            gathering.ended()

    def _start_over(self) -> None:
        """The loop threw away the passes of the present step so far, and takes it anew."""
        self.ledger.start_over()
        self._inquest.start_over()
        for stream in self._streams.live:
            stream.start_over()

    def backward_failed(self, error: Exception) -> None:
        self._failed(error)

    def scaled(self, scaler: GradScaler) -> None:
        self._scales = True
        for stream in self._streams.live:
            stream.scaled(scaler)

    def batch_fetched(self, iterator: object, seconds: float, batch: object) -> None:
        self.batches.batch_fetched(iterator, seconds, batch)

    def loader_exhausted(self, iterator: object) -> None:
        self.batches.loader_exhausted(iterator)

    def to_skip(self, iterator: object) -> bool:
        self.ledger.next_iteration()
        return self.batches.to_skip(iterator)

    def skipped(self, iterator: object) -> None:
        self.batches.skipped()

    def scaler_enters(self, scaler: GradScaler, optimizer: object) -> None:
        for stream in self._streams.live:
            if stream.watches(optimizer):
                stream.scaler_enters(scaler)

    def scaler_exits(self, scaler: GradScaler, optimizer: object) -> None:
        for stream in self._streams.live:
            if stream.watches(optimizer):
                stream.scaler_exits()

    def scaler_raised(self, scaler: GradScaler, optimizer: object) -> None:
        for stream in self._streams.live:
            if stream.watches(optimizer):
                stream.scaler_raised()

    def clipped(self, parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor | None) -> None:
        for stream in self._streams.live:
            stream.clipped(parameters, max_norm, norm)
