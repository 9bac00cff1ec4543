"""Steps of which only the loss is taken, and the norm where the loop computed it itself.

A loop of 3 ms has other things than us in the processor's caches, and each function that is called costs a microsecond:
such a step goes by the probes. What happened in it is told by the next one that is looked at whole.
"""

from __future__ import annotations

import math

from sentinel.hooks.clipping import Clip
from sentinel.hooks.layers import Layers
from sentinel.hooks.pacing import Pacing
from sentinel.hooks.probe import OCCASION, Probes
from sentinel.hooks.readout import Record
from sentinel.hooks.tally import Ledger


class Glances:
    """Of one stream, which is the only one of its run."""

    def __init__(self, ledger: Ledger, pacing: Pacing, probes: Probes, layers: Layers) -> None:
        self._ledger, self._pacing, self._probes, self._layers = ledger, pacing, probes, layers

    def enough(self, seq: int, clip: Clip | None) -> bool:
        """Whether no more is wanted of this step, and all of it is on the host."""
        probes, tally = self._probes, self._ledger.tally
        if not self._pacing.glances(seq) or probes.awake or (seq + 1) % OCCASION == 0 or not probes.spared:
            return False
        if type(tally.loss) is not float or tally.logged:
            return False
        return clip is None or clip[0] is None or (type(clip[0]) is float and math.isfinite(clip[0]))

    def taken(self, seq: int, time: float, clip: Clip | None, seconds: float) -> Record:
        """Such a step is over, `seconds` of it in the optimizer."""
        tally = self._ledger.tally
        values = {} if tally.loss is None else {"loss": float(tally.loss)}
        if clip is not None:
            norm, values["clip_limit"] = clip
            if norm is not None:
                values["grad_norm"] = float(norm)
        if tally.batch is not None:
            values.update(tally.batch)
        self._ledger.passed(seconds)
        return Record(self._layers.stream, seq, time, self._layers.table, values)
