"""Rules are run as generated Python functions: what these consist of, whatever a rule says."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sentinel.engine import Rule
from sentinel.engine.expressions.builder import Builder
from sentinel.engine.expressions.compiler import compile_any
from sentinel.engine.expressions.generation import write_source
from sentinel.engine.expressions.operators import NAMES
from sentinel.engine.expressions.plan import Plan
from sentinel.engine.expressions.syntax import parse
from sentinel.engine.rules.rule import plans_of
from sentinel.engine.source import Text
from sentinel.errors import RuleError
from tests.engine.test_bad_rules import PIECES, VOCABULARY
from tests.stock import RULES

LOCALS = {"s", "v", "states", "seq", "time", "values", "fresh", "frozen"}


def expression_is_plain(source: str) -> bool:
    """Whether a source has only slots, numbers and calls of what `operators` knows: no attribute, text, other name."""
    nodes = list(ast.walk(ast.parse(source, mode="eval")))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    foreign = (ast.Attribute, ast.Lambda, ast.JoinedStr, ast.Starred, ast.comprehension, ast.Await, ast.Yield)
    return (
        names <= (NAMES.keys() | {"s", "v"}) - {"__builtins__"}
        and all(constant is None or type(constant) in (int, float) for constant in constants)
        and not any(isinstance(node, foreign) for node in nodes)
    )


def plans(rule: Rule) -> Iterator[Plan]:
    waiting = plans_of([rule])
    while waiting:
        plan = waiting.pop()
        waiting += plan.subplans
        yield plan


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_stock_rule_becomes_plain_code(name: str) -> None:
    for plan in plans(RULES[name]):
        assert all(expression_is_plain(stage.operand) for stage in plan.stages)
        nodes = list(ast.walk(ast.parse(write_source(plan.inputs, plan.stages, plan.awaited))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        mine = {f"p{place}" for place in range(len(plan.stages))} | {f"f{slot}" for slot in range(plan.size)}
        assert names <= NAMES.keys() | LOCALS | mine
        assert {node.attr for node in nodes if isinstance(node, ast.Attribute)} <= {"get", "push"}
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert texts == {source.metric for source in plan.inputs}
    for _, term in RULES[name].condition.shown:
        assert expression_is_plain(term.source)


@given(st.lists(PIECES, max_size=25).map(" ".join))
@example("loss > 1e400 and -3 < loss != 4 / loss")
@example("age(loss) > 3 or absent(loss, 5) and not isnan(log(loss))")
@example("where(loss, grad_norm > 0) > across(loss, 'max')")
def test_whatever_compiles_becomes_plain_code(text: str) -> None:
    try:
        term = compile_any(parse(Text.plain(text)), Builder("run", VOCABULARY), {})
    except RuleError:
        return
    assert expression_is_plain(term.source)


def test_the_check_itself_sees_what_is_not_plain() -> None:
    assert expression_is_plain("(v if (v := s[2]) is not None else unready(2)) + inf")
    for bad in ("s.clear()", "open(0)", "'a'", "__builtins__", "[x for x in s]", "(lambda: 1)()"):
        assert not expression_is_plain(bad), bad


def test_a_rule_runs_without_builtins() -> None:
    assert NAMES["__builtins__"] == {}
    assert not NAMES.keys() & {"open", "eval", "exec", "__import__", "getattr"}
