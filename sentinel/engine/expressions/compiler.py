"""Compile a syntax tree into a `Term`: each node is checked against what is allowed, and typed; a rule's text is never
run.

There are two types, number and condition, and only a comparison and `count` lead from one to the other. Whatever is not
named here is not in the language.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import replace

from sentinel.engine import span
from sentinel.engine.expressions import foreign, operators
from sentinel.engine.expressions.builder import Builder, Term, Type
from sentinel.engine.expressions.definitions import expand_call
from sentinel.engine.expressions.functions import FUNCTIONS, HOWS, Function, Window
from sentinel.engine.expressions.plan import SEQ
from sentinel.engine.expressions.syntax import Parsed
from sentinel.engine.observation import SCOPES
from sentinel.engine.windows.sliding import SAMPLE_LIMIT
from sentinel.errors import RuleError
from sentinel.text import did_you_mean, format_count

DEPTH_LIMIT = 50
"""Nesting of an expression, at most."""

WHOLE_DEPTH_LIMIT = 150
"""Nesting of an expression with its lets put in, at most: each level is a pair of parentheses in the generated source,
and Python reads at most 200 of them."""

OPERATION_LIMIT = 500
"""Operations in an expression with its lets, at most: a let that is used twice counts twice."""

Lets = Mapping[str, Parsed]

_SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


def compile_number(parsed: Parsed, builder: Builder, lets: Lets) -> Term:
    """Compile an expression that must be a number. Raises RuleError."""
    return _Compiler(parsed, builder, lets).compile_as(parsed.tree, "number")


def compile_condition(parsed: Parsed, builder: Builder, lets: Lets) -> Term:
    """Compile an expression that must be a condition. Raises RuleError."""
    return _Compiler(parsed, builder, lets).compile_as(parsed.tree, "condition")


def compile_any(parsed: Parsed, builder: Builder, lets: Lets) -> Term:
    """Compile an expression of either type. Raises RuleError."""
    return _Compiler(parsed, builder, lets).visit(parsed.tree)


class _Compiler:
    def __init__(self, parsed: Parsed, builder: Builder, lets: Lets, around: int = 0) -> None:
        """`around`: the depth of the place where the expression is put in."""
        self._parsed, self._builder, self._lets = parsed, builder, lets
        self._depth, self._around = 0, around

    def _error(self, message: str, node: ast.expr) -> RuleError:
        return self._parsed.error(message, node)

    def _make_inner(self, parsed: Parsed, builder: Builder) -> _Compiler:
        """Return a compiler for an expression inside this one."""
        return _Compiler(parsed, builder, self._lets, self._around + self._depth)

    def compile_as(self, node: ast.expr, wanted: Type) -> Term:
        term = self.visit(node)
        if term.type != wanted:
            fix = "compare it with something" if wanted == "condition" else "count(condition, window) makes a number"
            raise self._error(f"expected a {wanted}, but {_short(term.key)} is a {term.type}; {fix}", node)
        return term

    def visit(self, node: ast.expr) -> Term:
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise self._error(f"nested over {DEPTH_LIMIT} deep; name parts of it under `let:`", node)
        if self._around + self._depth > WHOLE_DEPTH_LIMIT:
            raise self._error(f"nested over {WHOLE_DEPTH_LIMIT} deep, its lets with it", node)
        term = self._visit(node)
        self._depth -= 1
        if term.size > OPERATION_LIMIT:
            raise self._error(f"over {OPERATION_LIMIT} operations, those of its lets with it", node)
        return term

    def _visit(self, node: ast.expr) -> Term:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name():
                return self._name(node)
            case ast.UnaryOp(op=ast.Not()):
                operand = self.compile_as(node.operand, "condition")
                return _join_terms("condition", f"not {operand.key}", operators.negation(operand.source), operand)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                operand = self.compile_as(node.operand, "number")
                if isinstance(node.op, ast.UAdd):
                    return operand
                return _join_terms("number", f"-{operand.key}", operators.negative(operand.source), operand)
            case ast.BinOp() if type(node.op) in _SIGNS:
                sign, left, right = (
                    _SIGNS[type(node.op)],
                    *(self.compile_as(n, "number") for n in (node.left, node.right)),
                )
                source = operators.arithmetic(sign, left.source, right.source)
                if sign == "/" and not (right.metrics or right.needs) and right.read([]) == 0:
                    raise self._error("a division by 0 has no value", node)
                return _join_terms("number", f"({left.key} {sign} {right.key})", source, left, right)
            case ast.Compare() if all(type(op) in _SIGNS for op in node.ops):
                return self._comparison(node)
            case ast.BoolOp():
                parts = [self.compile_as(part, "condition") for part in node.values]
                word, join = ("and", operators.conjunction)
                if isinstance(node.op, ast.Or):
                    word, join = ("or", operators.disjunction)
                key = "(" + f" {word} ".join(part.key for part in parts) + ")"
                return _join_terms("condition", key, join([part.source for part in parts]), *parts)
            case ast.Call():
                return self._call(node)
        raise self._foreign(node)

    def _foreign(self, node: ast.expr) -> RuleError:
        written, fix = foreign.name_construct(node)
        return self._error(f"{written} is not part of the rule language; {fix}", node)

    def _constant(self, node: ast.Constant) -> Term:
        if isinstance(node.value, str) and span.seconds(node.value):
            raise self._error(f"a duration ({node.value}) can be a window only", node)
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise self._foreign(node)
        try:
            value = float(node.value)
        except OverflowError:
            raise self._error("the number is too large", node) from None
        if value == math.inf:
            raise self._error("the number is too large: it is infinite here, and nothing is over it", node)
        return Term(type="number", key=repr(value), source=operators.constant(value))

    def _name(self, node: ast.Name) -> Term:
        name = node.id
        if name in self._lets:
            return self._make_inner(self._lets[name], self._builder).visit(self._lets[name].tree)
        if name in FUNCTIONS:
            raise self._error(f"{name} is a function; write {FUNCTIONS[name].signature}", node)
        scope = self._builder.vocabulary.get(name)
        if scope is None:
            raise self._unknown(node)
        if scope not in ("rank", self._builder.scope):
            raise self._error(f"{name} is one number a {scope}, and the rule is of scope {self._builder.scope}; "
                              f'set `scope: {scope}`, or write across({name}, "max")', node)  # fmt: skip
        return self._builder.input(name)

    def _unknown(self, node: ast.Name) -> RuleError:
        if node.id.lower() in ("nan", "inf", "true", "false"):
            return self._error(f"unknown name {node.id!r}; there are isnan(x), isinf(x) and isfinite(x)", node)
        if node.id in ("step", "steps"):
            return self._error(f"there is no metric {node.id!r}; `warmup: 200 steps` waits for a step, "
                               f"`for: 20 steps` says how long", node)  # fmt: skip
        near = did_you_mean(node.id, [*self._lets, *self._builder.vocabulary])
        hint = "a metric that the script logs itself is declared under `signals:`"
        return self._error(f"unknown metric {node.id!r}{near or ''}; {hint}", node)

    def _comparison(self, node: ast.Compare) -> Term:
        signs = [_SIGNS[type(op)] for op in node.ops]
        parts = [self.compile_as(part, "number") for part in (node.left, *node.comparators)]
        words = [f"{sign} {part.key}" for sign, part in zip(signs, parts[1:], strict=True)]
        key = "(" + " ".join([parts[0].key, *words]) + ")"
        return _join_terms("condition", key, operators.comparison(signs, [part.source for part in parts]), *parts)

    def _call(self, node: ast.Call) -> Term:
        if not isinstance(node.func, ast.Name):
            written = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            example = FUNCTIONS.get(written, FUNCTIONS["mean"]).signature
            raise self._error(f"only the functions of the rule language can be called, as {example}", node)
        function = FUNCTIONS.get(node.func.id)
        if function is None:
            raise self._error(f"unknown function {node.func.id!r}{did_you_mean(node.func.id, FUNCTIONS)}", node)
        arguments = self._arguments(node, function)
        if function.body:
            return self.visit(expand_call(function, arguments, node))
        if function.name == "across":
            return self._across(node, *arguments)
        if function.name == "where":
            return self._where(node, function, *arguments)
        if function.takes[0] == "metric":
            return self._about_samples(node, function, *arguments)
        operand = self.compile_as(arguments[0], "condition" if function.takes[0] == "condition" else "number")
        key = f"{function.name}({', '.join([operand.key, *map(ast.unparse, arguments[1:])])})"
        if function.pure is not None:
            term = _join_terms(function.gives, key, operators.apply_function(function.name, operand.source), operand)
            return replace(term, exposed=0) if function.gives == "condition" else term
        return self._stage(node, function, key, operand, self._window(function, arguments))

    def _arguments(self, node: ast.Call, function: Function) -> list[ast.expr]:
        """Return the arguments in order, with keywords put in their places."""
        names = function.parameters
        arguments = list(node.args)
        for keyword in node.keywords:
            if keyword.arg is None or len(arguments) >= len(function.takes) or keyword.arg != names[len(arguments)]:
                raise self._error(f"{function.name} is written {function.signature}", keyword.value)
            arguments.append(keyword.value)
        most = len(function.takes)
        if not most - function.optional <= len(arguments) <= most:
            given = format_count(len(arguments), "argument")
            raise self._error(f"{function.name} is written {function.signature}, and has {given} here", node)
        return arguments

    def _window(self, function: Function, arguments: list[ast.expr]) -> Window:
        window = Window(needed=self._builder.min_samples, count=1)
        for kind, argument in zip(function.takes[1:], arguments[1:], strict=False):
            if kind == "share":
                window = replace(window, share=self._share(argument))
            elif kind == "window" and isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                window = replace(window, count=0, seconds=self._duration(argument, argument.value))
            else:
                window = replace(window, count=self._count(function, kind, argument))
        return replace(window, needed=max(window.needed, function.least)) if window.needed else window

    def _count(self, function: Function, kind: str, node: ast.expr) -> int:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int):
            what = "a number of samples or a duration (100, 5m)" if kind == "window" else "a number of samples"
            raise self._error(f"{function.name} is written {function.signature}: expected {what}", node)
        if not function.least <= value <= SAMPLE_LIMIT:
            raise self._error(f"{value} samples: {function.name} takes {function.least} to {SAMPLE_LIMIT}", node)
        return value

    def _duration(self, node: ast.expr, text: str) -> float:
        length = span.seconds(text)
        if not length:
            raise self._error(f"{text!r} is no duration; durations are written 90s, 5m, 2h", node)
        return length

    def _share(self, node: ast.expr) -> float:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._error("expected a share from 0 to 1", node)
        return float(value)

    def _stage(self, node: ast.Call, function: Function, key: str, operand: Term, window: Window) -> Term:
        if not operand.metrics:
            raise self._error(f"{function.name} of a constant: there is no metric in it", node)
        if self._builder.scope != "run" and not operand.own:
            return self._of_run(node, key)
        return self._builder.stage(function, key, operand, window)

    def _where(self, node: ast.Call, function: Function, number: ast.expr, condition: ast.expr) -> Term:
        """Compile `where`: a number that has samples only where a condition holds, that is, an operand that is not
        ready elsewhere."""
        operand, gate = self.compile_as(number, "number"), self.compile_as(condition, "condition")
        key = f"where({operand.key}, {gate.key})"
        both = _join_terms("condition", key, operators.write_gate(operand.source, gate.source), operand, gate)
        # Typed as a condition, so that non-finite numbers come through: the result is exposed instead of the operand.
        term = self._stage(node, function, key, replace(both, needs=operand.needs, own=operand.own), Window(count=1))
        return replace(term, exposed=term.needs | gate.exposed)

    def _of_run(self, node: ast.expr, key: str) -> Term:
        """Compile what is only about the run, so that it is kept once, and not once for each layer, rank, GPU or
        node."""
        term = self._make_inner(self._parsed, self._builder.child("run")).visit(node)
        fed = self._builder.feed(key, term, "run", "only")
        return fed if term.type == "number" else replace(fed, type="condition", exposed=0)

    def _across(self, node: ast.Call, operand: ast.expr, how: ast.expr) -> Term:
        if not isinstance(how, ast.Constant) or how.value not in HOWS:
            raise self._error("across wants one of " + ", ".join(f'"{word}"' for word in HOWS), how)
        named = {self._builder.vocabulary.get(name) for name in self._metrics(operand)}
        scopes = [scope for scope in SCOPES if scope in named]
        if len(scopes) != 1:
            raise self._error("across wants metrics of one scope: of ranks, layers, GPUs or nodes", operand)
        (scope,) = scopes
        if scope != "rank" and how.value == "argmax":
            raise self._error(f'"argmax" is the number of a rank; a {scope} has none', how)
        inner = self._make_inner(self._parsed, self._builder.child(scope)).compile_as(operand, "number")
        return self._builder.feed(f'across({inner.key}, "{how.value}")', inner, scope, str(how.value))

    def _metrics(self, node: ast.expr) -> set[str]:
        """Return all names in an expression and in its lets."""
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return names.union(*(self._metrics(self._lets[name].tree) for name in names & set(self._lets)))

    def _about_samples(
        self, node: ast.Call, function: Function, metric: ast.expr, count: ast.expr | None = None
    ) -> Term:
        if not isinstance(metric, ast.Name) or metric.id in self._lets:
            raise self._error(f"{function.name} wants a bare metric", metric)
        source = self._name(metric)
        key = f"{function.name}({ast.unparse(metric)}, {ast.unparse(count) if count else ''})"
        if not source.own:
            return self._of_run(node, key)
        seen = self._builder.add_seen_slot(metric.id)
        steps = self._count(function, "count", count) if count is not None else 0
        written = operators.steps_since(seen) if function.name == "age" else operators.none_within(seen, steps)
        return Term(type=function.gives, key=key, source=written,
                    needs=source.needs | 1 << SEQ, metrics=source.metrics, own=source.own)  # fmt: skip


def _join_terms(type: Type, key: str, source: str, *parts: Term) -> Term:
    needs = exposed = 0
    for part in parts:
        needs |= part.needs
        exposed |= part.exposed
    return Term(
        type=type, key=key, source=source, needs=needs, exposed=exposed,
        metrics=frozenset().union(*(part.metrics for part in parts)),
        own=any(part.own for part in parts),
        baseline=any(part.baseline for part in parts),
        size=1 + sum(part.size for part in parts),
    )  # fmt: skip


def _short(key: str) -> str:
    return key if len(key) <= 40 else key[:37] + "..."
