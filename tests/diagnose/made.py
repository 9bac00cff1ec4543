"""Makes synthetic evidence."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.diagnose.signs import first_signs, grown_layers
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.wire import Layer
from tests.stock import RULES

Values = Mapping[str, float]


WAITING = {"run": {"wait": 0.1, "whole": 0.2}}
"""InputBound's numbers, with half of each step spent waiting for data."""


def run_of(count: int, values: Callable[[int], Values]) -> list[RunStep]:
    return [RunStep(seq=seq, time=float(seq), ranks={0: values(seq)}, run=values(seq)) for seq in range(count)]


def layered(seqs: Sequence[int], values: Callable[[int], Mapping[str, Values]]) -> list[tuple[int, LayerStats]]:
    """Return (seq, layer statistics) for each step; `values` gives a step's signals by layer."""
    blocks = []
    for seq in seqs:
        found = values(seq)
        signals = dict.fromkeys(signal for stats in found.values() for signal in stats)
        columns = {signal: array("f", [stats[signal] for stats in found.values()]) for signal in signals}
        blocks.append((seq, LayerStats(tuple(found), columns, b"\x01" * len(found))))
    return blocks


def table(*names: str, dtype: str = "float32", held: bool = True) -> list[Layer]:
    return [Layer(name=name, shape=(8, 8), dtype=dtype, held=held) for name in names]


def judged(
    alert: str,
    steps: list[RunStep],
    blocks: Sequence[tuple[int, LayerStats]] = (),
    since: int | None = None,
    **more: Any,
) -> Finding:
    """Diagnose an alert that fired at the last step and whose condition has held since `since`."""
    last = steps[-1]
    since = last.seq if since is None else since
    signs = first_signs(steps, since, last.seq)
    onset = min([since, *(sign.seq for sign in signs)])
    layers = grown_layers(blocks, onset, last.seq, steps)
    known = {"signs": signs, "layers": layers, "steps": steps, "blocks": blocks, "ranks": (0,)} | more
    known["about_layers"] = alert in RULES and RULES[alert].layers
    evidence = Evidence(alert=alert, since=since, until=last.seq, last=last, **known)
    return diagnose(evidence, "what the rule says")
