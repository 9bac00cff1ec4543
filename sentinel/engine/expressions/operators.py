"""Write the Python source of an expression over `s`, the slots.

Rules are compiled to Python because a daemon judges each step of a fast loop, where every call costs. The source is
made of what the compiler knows (slots, numbers, the functions below), never of a rule's own text. Arithmetic follows
IEEE 754: nothing raises but `UnreadyError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sentinel.engine.expressions.functions import FUNCTIONS
from sentinel.engine.expressions.plan import ASKED, SEQ, Slots, UnreadyError


def constant(value: float) -> str:
    """Write a number as a literal; one too large for a float is `inf`."""
    return repr(value)


def slot(index: int) -> str:
    """Write the value of a slot. It raises UnreadyError where the slot is empty."""
    return f"(v if (v := s[{index}]) is not None else unready({index}))"


def arithmetic(sign: str, left: str, right: str) -> str:
    """Write `+ - * /`."""
    return f"divided({left}, {right})" if sign == "/" else f"({left} {sign} {right})"


def negative(operand: str) -> str:
    """Write `-x`."""
    return f"(-{operand})"


def apply_function(function: str, operand: str) -> str:
    """Write a call of a function of the language that takes one number and keeps no state."""
    return f"{function}({operand})"


def comparison(signs: Sequence[str], operands: Sequence[str]) -> str:
    """Write `a < b <= c`. It is false where one of them is NaN, also for `!=`."""
    return conjunction([_write_comparison(sign, *operands[i : i + 2]) for i, sign in enumerate(signs)])


def _write_comparison(sign: str, left: str, right: str) -> str:
    return f"differ({left}, {right})" if sign == "!=" else f"({left} {sign} {right})"


def conjunction(parts: Sequence[str]) -> str:
    """Write `a and b`: evaluated from left to right, and no further than needed."""
    return "(" + " and ".join(parts) + ")"


def disjunction(parts: Sequence[str]) -> str:
    """Write `a or b`: evaluated from left to right, and no further than needed."""
    return "(" + " or ".join(parts) + ")"


def write_gate(operand: str, gate: str) -> str:
    """Write `where(x, condition)`: it raises UnreadyError where the condition does not hold."""
    return f"({operand} if {gate} else unready({SEQ}))"


def negation(operand: str) -> str:
    """Write `not a`."""
    return f"(not {operand})"


def steps_since(seen: int) -> str:
    """Write `age(metric)`: slot `seen` has the seq of the metric's last sample."""
    return f"since(s, {seen})"


def none_within(seen: int, count: int) -> str:
    """Write `absent(metric, n)`; with `count` 0: since the start."""
    return f"lacks(s, {seen}, {count})" if count else f"(s[{seen}] is None)"


def _unready(index: int) -> Any:
    raise UnreadyError(index)


def _divide(left: float, right: float) -> float:
    if right:
        return left / right
    if not left or math.isnan(left):
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1.0, right)


def _differ(left: float, right: float) -> bool:
    return left < right or left > right


def _read_since(slots: Slots, seen: int) -> Any:
    slots[ASKED], now, last = True, slots[SEQ], slots[seen]
    if now is None or last is None:
        raise UnreadyError(SEQ if now is None else seen)
    return now - last


def _lacks(slots: Slots, seen: int, count: int) -> bool:
    last = slots[seen]
    if last is None:
        return True
    slots[ASKED], now = True, slots[SEQ]
    return now is not None and now - last >= count


NAMES: dict[str, Any] = {
    "__builtins__": {},
    "UnreadyError": UnreadyError, "any": any, "inf": math.inf, "float": float,
    "differ": _differ, "divided": _divide, "lacks": _lacks, "since": _read_since, "unready": _unready,
    **{name: function.pure for name, function in FUNCTIONS.items() if function.pure is not None},
}  # fmt: skip
"""All names that this source and that of `generation` may use."""
