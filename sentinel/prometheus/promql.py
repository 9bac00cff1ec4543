"""Translate an expression of the rule language to PromQL, where what Prometheus sees allows it.

A condition becomes a vector that has a sample for each run (or rank) for which it holds. Prometheus sees the newest
value at each scrape: functions that count samples, look back on steps or ask how old a value is have no counterpart,
and are refused with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from sentinel.engine.expressions.syntax import parse
from sentinel.engine.source import Text
from sentinel.engine.span import seconds
from sentinel.prometheus.metric_names import Scope, name_series
from sentinel.signals import SIGNALS

_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_INVERSE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_OVER_TIME = {"mean": "avg", "min": "min", "max": "max", "sum": "sum", "std": "stddev"}
_ACROSS = {"max": "max", "min": "min", "mean": "avg"}
_PURE = {"abs": "abs", "log": "ln", "sqrt": "sqrt"}
_EVERY: Mapping[Scope, str] = {"run": "max without (name, attempt) (sentinel_run_info)", "rank": "sentinel_rank_up"}
"""Scope -> a vector with one sample per run, or per rank, whatever it reports."""


class UntranslatableError(Exception):
    """Raised where there is no PromQL for an expression; says why."""


def condition(text: str, lets: Mapping[str, str], scope: Scope) -> str:
    """Return PromQL that has a sample where the condition holds. Raises UntranslatableError."""
    return _Translator(lets, scope).condition(parse(Text.plain(text)).tree)


def series(metric: str, scope: Scope) -> str:
    """Return the series of a metric. Raises UntranslatableError where none is exported."""
    found = name_series(metric, scope)
    if not found:
        raise UntranslatableError(f"{metric} of a {scope} is not exported")
    return found


class _Translator:
    def __init__(self, lets: Mapping[str, str], scope: Scope) -> None:
        self._lets = {name: parse(Text.plain(text)).tree for name, text in lets.items()}
        self._scope = scope

    def condition(self, node: ast.expr) -> str:
        match node:
            case ast.Name() if node.id in self._lets:
                return self.condition(self._lets[node.id])
            case ast.UnaryOp(op=ast.Not()):
                return self._negate(node.operand)
            case ast.BoolOp():
                word = " and " if isinstance(node.op, ast.And) else " or "
                return word.join(_group_text(self.condition(part)) for part in node.values)
            case ast.Compare():
                parts = [self.number(part) for part in (node.left, *node.comparators)]
                signs = [_COMPARISONS[type(op)] for op in node.ops]
                pairs = zip(parts, signs, parts[1:], strict=False)
                return " and ".join(f"{left} {sign} {right}" for left, sign, right in pairs)
            case ast.Call(func=ast.Name(id="isnan")):
                value = self.number(node.args[0])
                return f"{value} != {value}"
            case ast.Call(func=ast.Name(id="isinf")):
                return f"abs({self.number(node.args[0])}) == Inf"
            case ast.Call(func=ast.Name(id="isfinite")):
                return f"abs({self.number(node.args[0])}) < Inf"
            case ast.Call(func=ast.Name(id="absent"), args=[metric]) if self._scope in _EVERY:
                return f"{_EVERY[self._scope]} unless {self.number(metric)}"
        raise UntranslatableError(f"{ast.unparse(node)} looks at single steps")

    def _negate(self, node: ast.expr) -> str:
        """Negate a condition. A filter has no negation, so it is moved inwards. A NaN, for which no comparison holds,
        is left out here too."""
        match node:
            case ast.Name() if node.id in self._lets:
                return self._negate(self._lets[node.id])
            case ast.UnaryOp(op=ast.Not()):
                return self.condition(node.operand)
            case ast.Compare(ops=[op]):
                left, right = self.number(node.left), self.number(node.comparators[0])
                return f"{left} {_INVERSE[_COMPARISONS[type(op)]]} {right}"
            case ast.BoolOp():
                word = " or " if isinstance(node.op, ast.And) else " and "
                return word.join(_group_text(self._negate(part)) for part in node.values)
            case ast.Call(func=ast.Name(id="isfinite")):
                value = self.number(node.args[0])
                return f"{value} != {value} or abs({value}) == Inf"
            case ast.Call(func=ast.Name(id="absent"), args=[metric]):
                return self.number(metric)
        raise UntranslatableError(f"not {ast.unparse(node)} has no counterpart")

    def number(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=int() | float() as value):
                return short if float(short := f"{value:g}") == value else repr(value)
            case ast.Name() if node.id in self._lets:
                return self.number(self._lets[node.id])
            case ast.Name():
                return series(node.id, self._scope)
            case ast.UnaryOp(op=ast.USub()):
                return f"-{self.number(node.operand)}"
            case ast.BinOp():
                return f"({self.number(node.left)} {_ARITHMETIC[type(node.op)]} {self.number(node.right)})"
            case ast.Call(func=ast.Name(id=name)) if name in _PURE:
                return f"{_PURE[name]}({self.number(node.args[0])})"
            case ast.Call(func=ast.Name(id="across"), args=[operand, ast.Constant(value=str(how))]):
                return self._across(operand, how)
            case ast.Call(func=ast.Name(id=name), args=[operand, *rest]):
                return self._window(name, operand, rest)
        raise UntranslatableError(f"{ast.unparse(node)} looks at single steps")

    def _across(self, operand: ast.expr, how: str) -> str:
        """Combine the ranks' values to one of the run. Everywhere else the result has other labels than the series that
        it is compared with, and a comparison in PromQL drops what has no match, without a word."""
        scope = self._scope_of(operand)
        if how not in _ACROSS and how not in ("spread", "norm"):
            raise UntranslatableError(f"across(..., {how!r}) names a rank, and Prometheus gives values")
        if (scope, self._scope) != ("rank", "run"):
            raise UntranslatableError(f"across the {scope}s and one {self._scope}: their series have different labels")
        inner = _Translator({}, scope)
        inner._lets = self._lets
        value = inner.number(operand)
        if how == "spread":
            return f"(max without (rank) ({value}) - min without (rank) ({value}))"
        if how == "norm":
            return f"sqrt(sum without (rank) (({value}) ^ 2))"
        return f"{_ACROSS[how]} without (rank) ({value})"

    def _scope_of(self, operand: ast.expr) -> Scope:
        """Return the scope of the metrics in an expression. Raises UntranslatableError for metrics of layers."""
        names = {node.id for node in ast.walk(operand) if isinstance(node, ast.Name)}
        found: Scope = "rank"
        for name in names & SIGNALS.keys():
            scope = SIGNALS[name].scope
            if scope == "layer":
                raise UntranslatableError(f"{name} of a layer is not exported")
            found = scope if scope != "rank" else found
        return found

    def _window(self, name: str, operand: ast.expr, rest: list[ast.expr]) -> str:
        """Translate a function of a window of time. A window of samples counts steps, and Prometheus has one sample per
        scrape."""
        text = rest[-1].value if rest and isinstance(rest[-1], ast.Constant) else None
        length = seconds(text) if isinstance(text, str) else None
        if length is None:
            raise UntranslatableError(
                f"{_format_call(name, operand, rest)} counts steps, and Prometheus sees one a scrape"
            )
        value = self.number(operand)
        is_series = isinstance(operand, ast.Name) and operand.id not in self._lets
        over = f"{value}[{length:.0f}s]" if is_series else f"({value})[{length:.0f}s:]"
        if name in _OVER_TIME:
            return f"{_OVER_TIME[name]}_over_time({over})"
        if name in ("median", "quantile"):
            share = ast.unparse(rest[0]) if name == "quantile" else "0.5"
            return f"quantile_over_time({share}, {over})"
        if name in ("delta", "rate"):
            return f"delta({over})" if name == "delta" else f"(delta({over}) / {length:g})"
        raise UntranslatableError(f"{_format_call(name, operand, rest)} has no counterpart")


def _group_text(text: str) -> str:
    return f"({text})" if " and " in text or " or " in text or " unless " in text else text


def _format_call(name: str, operand: ast.expr, rest: list[ast.expr]) -> str:
    arguments = ", ".join(ast.unparse(part) for part in (operand, *rest))
    text = f"{name}({arguments})"
    return text if len(text) <= 60 else text[:57] + "..."
