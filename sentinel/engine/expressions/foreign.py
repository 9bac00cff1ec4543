"""Constructs of Python that the rule language lacks: as they were written, and what to write instead."""

from __future__ import annotations

import ast
import re

SHOWN = 40
"""Characters of the written text that an error repeats, at most."""
NEAR = 8
"""Characters, at most, between the place that Python's parser reports and what made it fail."""

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Pow: ("'**'", "write x * x, or sqrt(x)"),
    ast.FloorDiv: ("'//'", "write x / y; nothing is rounded"),
    ast.Mod: ("'%'", "`every: 10` looks at each tenth sample; 50 % is written 0.5"),
    ast.MatMult: ("'@'", "metrics are single numbers: write x * y"),
    ast.RShift: ("'>>'", "write `>`"),
    ast.LShift: ("'<<'", "write `<`"),
    ast.BitAnd: ("'&'", "write `and`"),
    ast.BitOr: ("'|'", "write `or`"),
    ast.BitXor: ("'^'", "write x * x for a square; of two conditions, (a or b) and not (a and b)"),
    ast.Invert: ("'~'", "write `not`"),
    ast.Is: ("'is'", "write `==`; isnan(x) asks for NaN, absent(x) for a metric without a sample"),
    ast.IsNot: ("'is not'", "write `!=`; isfinite(x) asks for a number, not absent(x) for a sample"),
    ast.In: ("'in'", "write x == 1 or x == 2"),
    ast.NotIn: ("'not in'", "write x != 1 and x != 2"),
}
"""Class of the operator -> its sign, the fix."""
_OVER = 'mean(x, 100) is over samples, across(x, "max") over ranks'
_NODES: dict[type[ast.AST], tuple[str, str]] = {
    ast.IfExp: ("'if ... else'", "write a and b or not a and c, or two rules"),
    ast.Lambda: ("'lambda'", "name an expression under `let:`"),
    ast.JoinedStr: ("an f-string", "numbers are put into `annotations:`, as {loss:.3g}"),
    ast.ListComp: ("a comprehension", _OVER),
    ast.SetComp: ("a comprehension", _OVER),
    ast.DictComp: ("a comprehension", _OVER),
    ast.GeneratorExp: ("a comprehension", _OVER),
    ast.Set: ("'{ }'", "write the bare name; braces are for annotations"),
    ast.Dict: ("'{ }'", "write the bare name; braces are for annotations"),
    ast.List: ("a list", f"a metric is one number; {_OVER}"),
    ast.Tuple: ("','", "conditions are joined by `and` and `or`; a decimal point is a dot"),
    ast.Starred: ("'*' before a name", "write out the arguments"),
    ast.Await: ("'await'", "take it out"),
    ast.Yield: ("'yield'", "take it out"),
    ast.YieldFrom: ("'yield from'", "take it out"),
}  # fmt: skip

# For where Python's parser only says "invalid syntax": the likely slips.
_SLIPS = (
    (re.compile(r"\b(?:AND|And)\b"), "write `and`, in small letters"),
    (re.compile(r"\b(?:OR|Or)\b"), "write `or`, in small letters"),
    (re.compile(r"\b(?:NOT|Not)\b"), "write `not`, in small letters"),
    (re.compile(r"=>|≥"), "write `>=`"),
    (re.compile(r"=<|≤"), "write `<=`"),
    (re.compile(r"<>|≠"), "write `!=`"),
    (re.compile(r"!(?!=)"), "write `not`"),
    (re.compile(r"[\d.]+\s*%"), "a share is written 0.5, not 50%"),
    (re.compile(r"\d+\s+(?:steps?|samples?)\b"), "a window of samples is written as their number: mean(x, 10)"),
    (re.compile(r"[;`$?]"), "take it out"),
    (re.compile(r"\b(?:IF|If|if|when|where|then|for|while|return|yield)\b(?!\s*\()"),
     "an expression is one condition, joined by `and` and `or`"),
)  # fmt: skip


def name_construct(node: ast.expr) -> tuple[str, str]:
    """Return what a node is, as the user wrote it, and the fix."""
    operators = [getattr(node, "op", None), *getattr(node, "ops", [])]
    for operator in operators:
        if type(operator) in OPERATORS:
            return OPERATORS[type(operator)]
    match node:
        case ast.Attribute():
            return f"'.{node.attr}'", "a name has no dots"
        case ast.Subscript():
            return (
                f"'[{_short(ast.unparse(node.slice))}]'",
                "past(x, k) looks k samples back, mean(x, 10) at the last ten",
            )
        case ast.Constant():
            return _short(ast.unparse(node)), "only numbers stand for themselves"
    what = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(node).__name__).lower()
    return _NODES.get(type(node), (what, "see docs/rule-language.md"))


def slip(text: str, start: int, stop: int) -> tuple[int, str, str] | None:
    """Return a habitual slip near the place where an expression cannot be parsed: where it stands, what it is, the
    fix."""
    least, most = start - NEAR, stop + NEAR
    found = [(match.start(), match[0], fix) for pattern, fix in _SLIPS for match in pattern.finditer(text)]
    return min((one for one in found if least <= one[0] <= most), default=None)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
