"""Evidence of our own making."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sentinel.diagnose.catalogue import diagnosed
from sentinel.diagnose.evidence import Diagnosis, Evidence
from sentinel.diagnose.signs import first_signs, grown_layers
from sentinel.steps import LayerStats, Step
from sentinel.wire import Layer

Values = Mapping[str, float]


def run_of(count: int, values: Callable[[int], Values]) -> list[Step]:
    return [Step(seq=seq, time=float(seq), ranks={0: values(seq)}, run=values(seq)) for seq in range(count)]


def layered(seqs: Sequence[int], values: Callable[[int], Mapping[str, Values]]) -> list[tuple[int, LayerStats]]:
    """(seq, statistics): `values` gives signals by layer."""
    blocks = []
    for seq in seqs:
        found = values(seq)
        signals = dict.fromkeys(signal for stats in found.values() for signal in stats)
        columns = {signal: array("f", [stats[signal] for stats in found.values()]) for signal in signals}
        blocks.append((seq, LayerStats(tuple(found), columns, b"\x01" * len(found))))
    return blocks


def table(*names: str, dtype: str = "float32") -> list[Layer]:
    return [Layer(name=name, shape=(8, 8), dtype=dtype) for name in names]


def judged(
    alert: str, steps: list[Step], blocks: Sequence[tuple[int, LayerStats]] = (), since: int | None = None, **more: Any
) -> Diagnosis:
    """What is said of an alert that fired at the last step, its condition having held since `since`."""
    last = steps[-1]
    since = last.seq if since is None else since
    signs = first_signs(steps, since, last.seq)
    onset = min([since, *(sign.seq for sign in signs)])
    layers = grown_layers(blocks, onset, last.seq, steps)
    known = {"signs": signs, "layers": layers, "steps": steps, "blocks": blocks, "ranks": (0,)} | more
    evidence = Evidence(alert=alert, since=since, until=last.seq, last=last, before=steps[-2], **known)
    return diagnosed(evidence, "what the rule says")
