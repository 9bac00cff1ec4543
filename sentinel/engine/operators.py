"""Closures over slots: what an expression becomes. Arithmetic is IEEE 754's: nothing raises but `UnreadyError`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sentinel.engine.plan import ASKED, SEQ, Read, Slots, UnreadyError


def constant(value: float) -> Read:
    """A number as it stands."""
    return lambda slots: value


def slot(index: int) -> Read:
    """What a slot holds. Raises UnreadyError where it is empty."""

    def read(slots: Slots) -> float:
        value = slots[index]
        if value is None:
            raise UnreadyError(index)
        return value

    return read


def arithmetic(sign: str, left: Read, right: Read) -> Read:
    """`+ - * /`."""
    if sign == "+":
        return lambda slots: left(slots) + right(slots)
    if sign == "-":
        return lambda slots: left(slots) - right(slots)
    if sign == "*":
        return lambda slots: left(slots) * right(slots)
    return lambda slots: _divided(left(slots), right(slots))


def _divided(left: float, right: float) -> float:
    if right:
        return left / right
    if not left or math.isnan(left):
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1.0, right)


def negative(operand: Read) -> Read:
    """`-x`."""
    return lambda slots: -operand(slots)


def applied(function: Callable[[float], float], operand: Read) -> Read:
    """A function of one number that keeps nothing."""
    return lambda slots: function(operand(slots))


def comparison(signs: Sequence[str], operands: Sequence[Read]) -> Read:
    """`a < b <= c`. False where a NaN is in it, `!=` too."""
    if len(signs) == 1:
        return _compared(signs[0], *operands)
    pairs = [_compared(sign, *operands[i : i + 2]) for i, sign in enumerate(signs)]
    return conjunction(pairs)


def _compared(sign: str, left: Read, right: Read) -> Read:
    match sign:
        case "<":
            return lambda slots: left(slots) < right(slots)
        case "<=":
            return lambda slots: left(slots) <= right(slots)
        case ">":
            return lambda slots: left(slots) > right(slots)
        case ">=":
            return lambda slots: left(slots) >= right(slots)
        case "==":
            return lambda slots: left(slots) == right(slots)
    return lambda slots: _differ(left(slots), right(slots))


def _differ(left: float, right: float) -> bool:
    return left < right or left > right


def conjunction(parts: Sequence[Read]) -> Read:
    """`a and b`: from left to right, and what is not needed is not asked for."""

    def read(slots: Slots) -> bool:
        for part in parts:  # noqa: SIM110 (a generator costs twice the time)
            if not part(slots):
                return False
        return True

    return read


def disjunction(parts: Sequence[Read]) -> Read:
    """`a or b`: from left to right, and what is not needed is not asked for."""

    def read(slots: Slots) -> bool:
        for part in parts:  # noqa: SIM110
            if part(slots):
                return True
        return False

    return read


def gated(operand: Read, gate: Read) -> Read:
    """`where(x, condition)`: where it does not hold there is nothing to read."""

    def read(slots: Slots) -> Any:
        if gate(slots):
            return operand(slots)
        raise UnreadyError(SEQ)

    return read


def negation(operand: Read) -> Read:
    """`not a`."""
    return lambda slots: not operand(slots)


def steps_since(seen: int) -> Read:
    """`age(metric)`: slot `seen` has the seq of its last sample."""
    last, now = slot(seen), slot(SEQ)

    def read(slots: Slots) -> Any:
        slots[ASKED] = True
        return now(slots) - last(slots)

    return read


def none_within(seen: int, count: int) -> Read:
    """`absent(metric, n)`; 0: since the start."""

    def read(slots: Slots) -> bool:
        last = slots[seen]
        if last is None or not count:
            return last is None
        slots[ASKED], now = True, slots[SEQ]
        return now is not None and now - last >= count

    return read
