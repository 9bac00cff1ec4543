"""Reads the output of Megatron-LM and relatives (Megatron-DeepSpeed, GPT-NeoX, Primus): fields between bars.

     [2024-05-01 12:00:00] iteration   100/ 500000 | consumed samples: 102400 |
     elapsed time per iteration (ms): 1234.5 | learning rate: 1.5E-04 |
     lm loss: 6.1E+00 | loss scale: 65536.0 | grad norm: 1.2 |
     number of skipped iterations:   0 | number of nan iterations:   0 |

Traps: a NaN loss is left out of the line, which only counts it; while steps are skipped, the gradient norm is that of
the last step that was not. So a line without a loss that counts NaN steps has a loss of NaN here, and a line whose
steps were all skipped has no gradient norm. A line of several iterations counts as skipped if most of them were.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from sentinel.toolkit.logs.recording import Recording, number
from sentinel.toolkit.logs.text import lines, matches, plain, seconds

NAME = "Megatron"

_LINE = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_FIELD = re.compile(r"^\s*([^|:]*[^|:\s])\s*:\s*([^\s|/]+)")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[^\]]*)\]")

_ELAPSED = {"elapsed time per iteration (ms)": 1e-3, "elapsed time per iteration (s)": 1.0}
_SKIPPED, _NAN = "number of skipped iterations", "number of nan iterations"


def recognise(path: Path, head: bytes) -> bool:
    """Whether the file has a line of an iteration."""
    return b"\0" not in head and matches(path, _LINE)


def read(path: Path) -> Recording:
    """Return a row for each logged iteration."""
    recording, last = Recording(path, NAME), 0
    for count, raw in lines(path):
        line = plain(raw)
        found = _LINE.search(line)
        if found is None:
            continue
        step = int(found[1])
        values, last = _values(line, max(step - last, 1)), step
        if not values:
            recording.faults.add(count, "an iteration without a single number")
            continue
        stamp = _STAMP.search(line)
        recording.add(step, seconds(stamp[1]) if stamp else None, values)
    return recording


def _values(line: str, iterations: int) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in line.split("|"):
        field = _FIELD.match(part)
        found = number(field[2].rstrip(",")) if field else None
        if field is not None and found is not None:
            values[field[1]] = found
    for name, unit in _ELAPSED.items():
        if name in values:
            values["step_seconds"] = values.pop(name) * unit
    _mend(values, iterations)
    return values


def _mend(values: dict[str, float], iterations: int) -> None:
    skipped, bad = values.pop(_SKIPPED, None), values.pop(_NAN, 0.0)
    if skipped is not None:
        values["step_skipped"] = float(2 * skipped > iterations)
    if any("loss" in name and name != "loss scale" for name in values):
        return
    if bad:
        values["lm loss"] = math.nan
    elif skipped:
        values.pop("grad norm", None)
