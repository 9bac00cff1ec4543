"""Make Python functions of the source that the compiler wrote: of an expression, and of a plan as a whole.

The function of a plan takes a step's samples of one entity and moves its windows:

    s[0] = seq
    f2 = f3 = False
    v = values.get('loss')
    if v is not None:
        s[2] = v
        fresh |= 4
        f2 = True
    if not fresh & 12:
        return fresh
    p0, p1, = states
    if f2:
        ...

A loop over the stages would cost as much as their windows do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sentinel.engine.expressions.operators import NAMES
from sentinel.engine.expressions.plan import SEQ, Advance, Input, PlanStage, Read, Scan
from sentinel.engine.windows.since_start import First, Highest, Lowest
from sentinel.engine.windows.steady import Steady


@functools.lru_cache(maxsize=4096)
def reading(source: str) -> Read:
    """Return the function that evaluates an expression over the slots; `operators` writes its source."""
    read: Read = eval(f"lambda s: {source}", NAMES)
    return read


def scanning(source: str, inputs: Iterable[Input]) -> Scan:
    """Return the function that tests whether a condition holds for any row of samples of the inputs."""
    targets = "".join(f"s[{each.slot}], " for each in inputs)
    scan: Scan = eval(f"lambda s, rows: any({source} for {targets}in rows)", NAMES)
    return scan


def advancing(inputs: Sequence[Input], stages: Sequence[PlanStage], awaited: int, told: int = 0) -> Advance:
    """Return the function that takes a step's samples of an entity, as `Advance` has it.

    `awaited`: bits of the slots that stages read; `told`: bits of the slots whose changes are asked for.
    """
    found: dict[str, Any] = {}
    exec(write_source(inputs, stages, awaited, told), NAMES, found)
    advance: Advance = found["advance"]
    return advance


def write_source(inputs: Sequence[Input], stages: Sequence[PlanStage], awaited: int, told: int = 0) -> str:
    """Return the source of the function that `advancing` makes."""
    lines = ["def advance(s, states, seq, time, values, fresh, frozen):"]
    return "\n".join([*lines, *_indent_lines(_body(inputs, stages, awaited, told))])


def _body(inputs: Sequence[Input], stages: Sequence[PlanStage], awaited: int, told: int) -> Iterator[str]:
    # Each slot that a stage waits for gets a variable of its own: testing a bit takes ten times as long.
    made = [stage.slot for stage in stages if awaited >> stage.slot & 1]
    given = [slot for slot, _, _ in inputs if awaited >> slot & 1]
    yield f"s[{SEQ}] = seq"
    yield from [f"f{slot} = fresh & {1 << slot}" for slot in _slots(awaited) if slot not in (*made, *given)]
    if made or given:
        yield "".join(f"f{slot} = " for slot in (*given, *made)) + "False"
    for slot, metric, seen in inputs:
        yield f"v = values.get({metric!r})"
        yield "if v is not None:"
        yield from _indent_lines([f"s[{slot}] = v", f"fresh |= {1 << slot}"])
        if slot in given:
            yield from _indent_lines([f"f{slot} = True"])
        if seen >= 0:
            yield from _indent_lines([f"s[{seen}] = seq"])
    if stages:
        yield f"if not fresh & {awaited}:"
        yield from _indent_lines(["return fresh"])
        yield "".join(f"p{place}, " for place in range(len(stages))) + "= states"
    for place, stage in enumerate(stages):
        news = " or ".join([f"f{slot}" for slot in _slots(stage.needs)])
        # A window over `past` is frozen while its rule is pending or firing.
        yield f"if not frozen and ({news}):" if stage.baseline else f"if {news}:"
        yield from _indent_lines(_write_window_update(stage, f"p{place}", awaited, told))
    yield "return fresh"


def _slots(bits: int) -> list[int]:
    return [slot for slot in range(bits.bit_length()) if bits >> slot & 1]


_UNMOVED: dict[type[object], str] = {First: "", Lowest: " or v < s[{slot}]", Highest: " or v > s[{slot}]"}
"""Statistics that most samples do not change: the slot has the state's value, and whether a sample changes it is seen
without a call."""


def _write_window_update(stage: PlanStage, state: str, awaited: int, told: int) -> Iterator[str]:
    """Write the code that pushes a sample of a stage's operand into its window: only finite numbers, unless it is a
    condition."""
    slot, news = stage.slot, []
    if awaited >> slot & 1:
        news.append(f"f{slot} = True")
    if told >> slot & 1:
        news.append(f"fresh |= {1 << slot}")
    kind = type(stage.make(stage.window))
    unmoved, at = _UNMOVED.get(kind), "seq" if kind is Steady else "time"
    if unmoved is None:
        push = [f"v = {state}.push({at}, v)", "if v is not None:", *_indent_lines([f"s[{slot}] = v", *news])]
    else:
        known = f"if s[{slot}] is None{unmoved.format(slot=slot)}:"
        push = [known, f"    s[{slot}] = {state}.push(time, v)", *news]
    if not stage.judges:
        push = ["if -1e999 < v < 1e999:", *_indent_lines(push)]
    if stage.bare:
        yield from [f"v = s[{stage.bare}]", *push]
        return
    yield "try:"
    yield f"    v = {stage.operand}"
    yield from ["except UnreadyError:", "    pass", "else:"]
    yield from _indent_lines(push)


def _indent_lines(lines: Iterable[str]) -> list[str]:
    return ["    " + line for line in lines]
