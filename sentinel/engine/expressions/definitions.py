"""Functions that are defined in the rule language itself: a call is replaced by the definition."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from sentinel.engine.expressions.functions import Function
from sentinel.engine.expressions.syntax import parse
from sentinel.engine.source import Text


def expand_call(function: Function, arguments: Sequence[ast.expr], call: ast.expr) -> ast.expr:
    """Return the body of a function, with the arguments of a call in place of the parameters.

    The result computes, freezes and counts as if it had been written out. Its nodes point at the call, so that errors
    do; those of the arguments keep their places.
    """
    known: dict[str, ast.expr] = dict(zip(function.parameters, arguments, strict=True))
    for name, text in function.lets.items():
        known[name] = _substitute(text, known, call)
    return _substitute(function.body, known, call)


def _substitute(text: str, known: Mapping[str, ast.expr], call: ast.expr) -> ast.expr:
    tree: ast.expr = _Substitution(known, call).visit(parse(Text.plain(text)).tree)
    return tree


class _Substitution(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, ast.expr], call: ast.expr) -> None:
        self._known, self._call = known, call

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name) and node.id in self._known:
            return self._known[node.id]
        return ast.copy_location(self.generic_visit(node), self._call)
