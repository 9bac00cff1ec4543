"""Parse the text of an expression into Python's syntax tree, with what Python's grammar lacks: durations, line
breaks."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

from sentinel.engine.expressions import foreign
from sentinel.engine.source import Text
from sentinel.errors import RuleError

TEXT_LIMIT = 2_000
"""Characters in an expression, at most."""

DEPTH_LIMIT = 100
"""Nesting of an expression, at most, also for what is not in the language: errors repeat it, and Python writes it
recursively."""

_DURATION = re.compile(r"""'[^']*'|"[^"]*"|(?<![\w.])(\d+(?:\.\d+)?(?:ms|s|m|h|d))(?!\w)""")
_NESTED = ast.expr | ast.keyword | ast.comprehension
_FOREIGN = {"#": "there are no comments in it", "&&": "write `and`", "||": "write `or`", ":=": "names go under `let:`"}


@dataclass(frozen=True, slots=True)
class Parsed:
    """An expression's tree, and the text that its nodes point into."""

    tree: ast.expr
    text: Text

    def error(self, message: str, node: ast.expr | None = None) -> RuleError:
        """Return a RuleError at a node, by default at the whole expression."""
        node = node or self.tree
        before = self.text.value.encode()[: node.col_offset]  # ast counts columns in bytes
        return self.text.error(message, len(before.decode()))


def parse(text: Text) -> Parsed:
    """Parse an expression. Raises RuleError at the place of the fault, and nothing else, whatever the text."""
    if len(text.value) > TEXT_LIMIT:
        raise text.error(f"the expression is over {TEXT_LIMIT} characters")
    if not text.value.strip():
        raise text.error("the expression is empty")
    for sign, fix in _FOREIGN.items():
        if sign in text.value:
            raise text.error(f"{sign!r} is not part of the rule language; {fix}", text.value.index(sign))
    spaced = Text(re.sub(r"\s", " ", text.value), text.file, text.places)
    lead = len(spaced.value) - len(spaced.value.lstrip())
    body = spaced[lead:].replace_pattern(_DURATION, "'", "'")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `1if`: accepted today, an error in a future Python
            tree = ast.parse(body.value, mode="eval").body
    except SyntaxError as error:
        raise _locate_error(body, error) from None
    except (ValueError, RecursionError, MemoryError, Warning):
        raise body.error("syntax error: not an expression") from None
    if _is_deep(tree):
        raise body.error(f"nested over {DEPTH_LIMIT} deep; name parts of it under `let:`")
    return Parsed(tree, body)


def _is_deep(tree: ast.expr) -> bool:
    level: list[ast.AST] = [tree]
    for _ in range(DEPTH_LIMIT):
        level = [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, _NESTED)]
        if not level:
            return False
    return True


def _locate_error(body: Text, error: SyntaxError) -> RuleError:
    offset = error.offset - 1 if error.offset else len(body.value)
    if slip := foreign.slip(body.value, offset, max(offset, (error.end_offset or 0) - 1)):
        where, written, fix = slip
        return body.error(f"{written!r} is not part of the rule language; {fix}", where)
    if not error.offset:
        return body.error("syntax error: the expression ends too early", offset)
    if body.value[offset : offset + 1] == "=":
        return body.error("syntax error: `==` compares", offset)
    return body.error(f"syntax error: {error.msg}", offset)
