"""Python functions of what the compiler wrote: of an expression, and of a plan as a whole.

The plan's takes a step's samples of one entity and moves its windows:

    s[0] = seq
    v = values.get('loss')
    if v is not None:
        s[2] = v
        fresh |= 4
    if not fresh & 12:
        return fresh
    p0, p1, = states
    if fresh & 4:
        ...

A loop over the stages would cost as much again as their windows do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sentinel.engine.operators import NAMES
from sentinel.engine.plan import SEQ, Advance, Input, Read, Stage
from sentinel.engine.windows import First, Highest, Lowest


@functools.lru_cache(maxsize=4096)
def reading(source: str) -> Read:
    """The function of the slots that an expression is, as `operators` writes it."""
    read: Read = eval(f"lambda s: {source}", NAMES)
    return read


def advancing(inputs: Sequence[Input], stages: Sequence[Stage], awaited: int) -> Advance:
    """See `Advance`. `awaited`: bits of the slots that stages read."""
    found: dict[str, Any] = {}
    exec(written(inputs, stages, awaited), NAMES, found)
    advance: Advance = found["advance"]
    return advance


def written(inputs: Sequence[Input], stages: Sequence[Stage], awaited: int) -> str:
    """Its source."""
    lines = ["def advance(s, states, seq, time, values, fresh, frozen):", *_indented(_body(inputs, stages, awaited))]
    return "\n".join(lines)


def _body(inputs: Sequence[Input], stages: Sequence[Stage], awaited: int) -> Iterator[str]:
    yield f"s[{SEQ}] = seq"
    for slot, metric, seen in inputs:
        yield f"v = values.get({metric!r})"
        yield "if v is not None:"
        yield from _indented([f"s[{slot}] = v", f"fresh |= {1 << slot}"])
        if seen >= 0:
            yield from _indented([f"s[{seen}] = seq"])
    if stages:
        yield f"if not fresh & {awaited}:"
        yield from _indented(["return fresh"])
        yield "".join(f"p{place}, " for place in range(len(stages))) + "= states"
    for place, stage in enumerate(stages):
        # A window over `past` stands still while its rule is pending or firing.
        yield f"if fresh & {stage.needs} and not frozen:" if stage.baseline else f"if fresh & {stage.needs}:"
        yield from _indented(_moved(stage, f"p{place}"))
    yield "return fresh"


_UNMOVED = {First: "", Lowest: " or v < s[{slot}]", Highest: " or v > s[{slot}]"}
"""What most samples do not change: the slot has what the state has, and whether it will is seen without a call."""


def _moved(stage: Stage, state: str) -> Iterator[str]:
    """A sample of a stage's operand goes into its window: what is not finite does not, but for conditions."""
    kept = [f"s[{stage.slot}] = v", f"fresh |= {1 << stage.slot}"]
    push = [f"v = {state}.push(time, v)", "if v is not None:", *_indented(kept)]
    unmoved = _UNMOVED.get(type(stage.make(stage.window)))
    if unmoved is not None:
        push = [
            f"if s[{stage.slot}] is None{unmoved.format(slot=stage.slot)}:",
            f"    s[{stage.slot}] = {state}.push(time, v)",
            f"fresh |= {1 << stage.slot}",
        ]
    if not stage.judges:
        push = ["if -inf < v < inf:", *_indented(push)]
    if stage.bare:
        yield from [f"v = s[{stage.bare}]", *push]
        return
    yield "try:"
    yield f"    v = {stage.operand}"
    yield from ["except UnreadyError:", "    pass", "else:"]
    yield from _indented(push)


def _indented(lines: Iterable[str]) -> list[str]:
    return ["    " + line for line in lines]
