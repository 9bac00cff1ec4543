"""Bad rule files: each mistake is reported with its exact place and a message that says how to fix it."""

# ruff: noqa: E501 (tables: a mistake a line)

from __future__ import annotations

import ast
import builtins
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sentinel.engine import RUN, Evaluator, Observation, load_rules, rules_of
from sentinel.engine.expressions import foreign
from sentinel.engine.expressions.builder import Builder
from sentinel.engine.expressions.compiler import compile_any
from sentinel.engine.expressions.syntax import parse
from sentinel.engine.source import Text
from sentinel.errors import RuleError
from sentinel.rulebook import loader
from sentinel.signals import SIGNALS

HEAD = "group: test\nrules:\n  - alert: Test\n"


def fault(text: str) -> str:
    """Return the error of a rule file, as a person sees it."""
    with pytest.raises(RuleError) as caught:
        load_rules(text, "my.yaml")
    return str(caught.value)


FILES = {
    "unknown key of a file": ("group: test\nrule: []\n", "my.yaml:2:1: unknown key 'rule' in a rule file; did you mean 'rules'?"),
    "unknown key of a rule": (HEAD + "    exprr: loss > 1\n", "my.yaml:4:5: unknown key 'exprr' in a rule; did you mean 'expr'?"),
    "unknown key of the annotations": (
        HEAD + "    expr: loss > 1\n    annotations:\n      sumary: x\n",
        "my.yaml:6:7: unknown key 'sumary' in annotations; did you mean 'summary'?",
    ),
    "a key that is missing": (HEAD + "    scope: run\n", "my.yaml:3:5: a rule needs 'expr'"),
    "a key that comes twice": (
        HEAD + "    expr: loss > 1\n    expr: loss > 2\n",
        "my.yaml:5:5: key 'expr' is there twice; the first is in line 4",
    ),
    "an alert that comes twice": (
        HEAD + "    expr: loss > 1\n  - alert: Test\n    expr: loss > 2\n",
        "my.yaml:5:12: alert 'Test' is there twice; the first is in line 3",
    ),
    "text for true or false": (
        HEAD + "    expr: loss > 1\n    layers: some\n",
        "my.yaml:5:13: expected layers: true or false, found text (some)",
    ),
    "text for a number": (
        HEAD + "    expr: loss > 1\n    min_samples: many\n",
        "my.yaml:5:18: expected min_samples: a whole number, found text (many)",
    ),
    "text that is tagged as a number": (
        HEAD + "    expr: loss > 1\n    every: !!int abc\n",
        "my.yaml:5:12: expected every: a whole number, found a number (abc)",
    ),
    "a number of thousands of digits": (
        HEAD + f"    expr: loss > 1\n    every: 0x{'f' * 4000}\n",
        f"my.yaml:5:12: every: {0xffffffffffffffffffffffffffff} is not between 1 and 1000",
    ),
    "a number for a span": (
        HEAD + "    expr: loss > 1\n    for: 3\n",
        "my.yaml:5:10: for: 3 of what? Write `3 steps`, or a time, as `90s`",
    ),
    "a span that is none": (
        HEAD + "    expr: loss > 1\n    for: 3 minutes\n",
        "my.yaml:5:10: for: '3 minutes' is not `20 steps`, `90s` or `3 of 5 steps`",
    ),
    "more of steps than there are": (
        HEAD + "    expr: loss > 1\n    for: 6 of 5 steps\n",
        "my.yaml:5:10: for: '6 of 5 steps' is not `20 steps`, `90s` or `3 of 5 steps`",
    ),
    "seconds for steps": (
        HEAD + "    expr: loss > 1\n    rebase_after: 90s\n",
        "my.yaml:5:19: rebase_after: expected steps, `500 steps`",
    ),
    "a list for a mapping": (HEAD + "    expr: loss > 1\n    let: [a]\n", "my.yaml:5:10: expected let: a mapping, found a list"),
    "a word for a list": (
        HEAD + "    expr: loss > 1\n    actions: evidence\n",
        "my.yaml:5:14: expected actions: a list, found text (evidence)",
    ),
    "a file of another kind": (
        "root:x:0:0:root:/root:/bin/bash and more\nthan a word\n",
        "my.yaml:1:1: expected a rule file: a mapping, found text",
    ),
    "rules that are no list": ("group: test\nrules: none\n", "my.yaml:2:8: expected rules: a list, found text (none)"),
    "a downgrade to nothing": (
        HEAD + "    expr: loss > 1\n    downgrade: {when: loss > 2}\n",
        "my.yaml:5:16: downgrade needs 'severity'",
    ),
    "a condition to keep firing, of a metric that is none": (
        HEAD + "    expr: loss > 1\n    keep_while: los > 2\n",
        "my.yaml:5:17: unknown metric 'los'; did you mean 'loss'?; a metric that the script logs itself is declared under `signals:`",
    ),
    "a downgrade of a metric that is none": (
        HEAD + "    expr: loss > 1\n    downgrade: {when: los > 2, severity: info}\n",
        "my.yaml:5:23: unknown metric 'los'; did you mean 'loss'?; a metric that the script logs itself is declared under `signals:`",
    ),
    "a severity that is none": (
        HEAD + "    expr: loss > 1\n    severity: crit\n",
        "my.yaml:5:15: severity: 'crit' is not one of info, warning, critical; did you mean 'critical'?",
    ),
    "a scope that is none": (
        HEAD + "    expr: loss > 1\n    scope: device\n",
        "my.yaml:5:12: scope: 'device' is not one of run, rank, layer, gpu, node",
    ),
    "a name that is none": (
        "group: test\nrules:\n  - alert: loss spike\n    expr: loss > 1\n",
        "my.yaml:3:12: alert 'loss spike': expected a name like LossSpike",
    ),
    "a let that hides a metric": (
        HEAD + "    let:\n      loss: median(loss, 3)\n    expr: loss > 1\n",
        "my.yaml:5:7: let 'loss': the name of a metric; choose another one",
    ),
    "a let that is used before it is there": (
        HEAD + "    let:\n      a: b + 1\n      b: loss\n    expr: a > 1\n",
        "my.yaml:5:10: unknown metric 'b'; a metric that the script logs itself is declared under `signals:`",
    ),
    "a signal that is ours": (
        "group: test\nsignals:\n  loss: mine\nrules: []\n",
        "my.yaml:3:3: loss is a signal of Sentinel's own already",
    ),
    "members of a rule that has some": (
        HEAD + "    scope: layer\n    expr: layer_nonfinite > 0\n    members: {layer: layer_nonfinite > 0}\n",
        "my.yaml:6:14: members: one scope and its condition, in a rule of scope run",
    ),
    "YAML that is none": (
        HEAD + "    expr: loss: 1\n",
        "my.yaml:4:15: not YAML: mapping values are not allowed in this context; put the text in quotes",
    ),
    "YAML that is not closed": ("group: 'test\n", "my.yaml:2:1: not YAML: found unexpected end of stream"),
    "control characters": ("group: test\nrules: \x07\n", "my.yaml:2:8: not YAML: control characters are not allowed"),
    "nothing": ("# nothing\n", "my.yaml:1:1: the file is empty"),
    "a bomb": ("[" * 900, "my.yaml:1:1: nested over 20 deep: not a rule file"),
    "on and no are words": (HEAD + "    expr: loss > 1\n    severity: no\n", "my.yaml:5:15: severity: 'no' is not one of info, warning, critical; did you mean 'info'?"),
    "a runbook that is none": (
        HEAD + "    expr: loss > 1\n    annotations: {runbook: See the wiki}\n",
        "my.yaml:5:28: runbook 'See the wiki': expected a section's name like loss-spike",
    ),
    "a template's metric": (
        HEAD + '    expr: loss > 1\n    annotations:\n      summary: "at {lss:.3f}"\n',
        "my.yaml:6:21: unknown metric 'lss'; did you mean 'loss'?; a metric that the script logs itself is declared under `signals:`",
    ),
    "a template's format": (
        HEAD + '    expr: loss > 1\n    annotations:\n      summary: "{loss:.3q}"\n',
        "my.yaml:6:23: '.3q' is no format for a number; write .3f, .2e or .0%: fill and alignment, sign, width of up to 2 "
        "digits, comma, precision of up to 2 digits, one of e E f F g G %",
    ),
    "a template's width that fills the memory": (
        HEAD + '    expr: loss > 1\n    annotations:\n      summary: "{loss:999999999}"\n',
        "my.yaml:6:23: '999999999' is no format for a number; write .3f, .2e or .0%: fill and alignment, sign, width of up "
        "to 2 digits, comma, precision of up to 2 digits, one of e E f F g G %",
    ),
    "a template's precision that does": (
        HEAD + '    expr: loss > 1\n    annotations:\n      summary: "{loss:.999999999f}"\n',
        "my.yaml:6:23: '.999999999f' is no format for a number; write .3f, .2e or .0%: fill and alignment, sign, width of "
        "up to 2 digits, comma, precision of up to 2 digits, one of e E f F g G %",
    ),
    "a template's brace": (
        HEAD + '    expr: loss > 1\n    annotations:\n      summary: "{loss"\n',
        "my.yaml:6:17: a lone '{'; write '{{' for the sign itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_bad_file(name: str) -> None:
    text, message = FILES[name]
    assert fault(text) == message


def test_a_bomb_that_the_yaml_parser_may_refuse_first_is_an_error_too() -> None:
    """Newer versions of libyaml have a limit of their own, a depth of 1,000, which they reach while they read ahead."""
    assert "nest" in fault("[" * 100_000)


EXPRESSIONS = {
    "lss > 1": "1: unknown metric 'lss'; did you mean 'loss'?; a metric that the script logs itself is declared under `signals:`",
    "loss > my_reward": "8: unknown metric 'my_reward'; a metric that the script logs itself is declared under `signals:`",
    "medain(loss, 3) > 1": "1: unknown function 'medain'; did you mean 'median'?",
    "loss > median": "8: median is a function; write median(x, window)",
    "median(loss) > 1": "1: median is written median(x, window), and has 1 argument here",
    "median(loss, 3, 4) > 1": "1: median is written median(x, window), and has 3 arguments here",
    "median(loss, lag=3) > 1": "18: median is written median(x, window)",
    "median(loss, 0) > 1": "14: 0 samples: median takes 1 to 100000",
    "std(loss, 1) > 1": "11: 1 samples: std takes 2 to 100000",
    "median(loss, 2.5) > 1": "14: median is written median(x, window): expected a number of samples or a duration (100, 5m)",
    "median(loss, grad_norm) > 1": "14: median is written median(x, window): expected a number of samples or a duration (100, 5m)",
    "median(loss, '5q') > 1": "14: '5q' is no duration; durations are written 90s, 5m, 2h",
    "ewma(loss, 5m) > 1": "12: ewma is written ewma(x, n): expected a number of samples",
    "quantile(loss, 9, 10) > 1": "16: expected a share from 0 to 1",
    "median(3, 10) > 1": "1: median of a constant: there is no metric in it",
    "loss > 5m": "8: a duration (5m) can be a window only",
    "loss": "1: expected a condition, but loss is a number; compare it with something",
    "loss + (loss > 1) > 2": "9: expected a number, but (loss > 1.0) is a condition; count(condition, window) makes a number",
    "count(loss, 5) > 1": "7: expected a condition, but loss is a number; compare it with something",
    "mean(loss > 1, 5) > 1": "6: expected a number, but (loss > 1.0) is a condition; count(condition, window) makes a number",
    "loss and loss > 1": "1: expected a condition, but loss is a number; compare it with something",
    "not loss": "5: expected a condition, but loss is a number; compare it with something",
    "1 > 0": "1: there is no metric in the condition",
    "layer_grad_norm > 1": '1: layer_grad_norm is one number a layer, and the rule is of scope run; set `scope: layer`, or write across(layer_grad_norm, "max")',
    "across(loss, 'median') > 1": '14: across wants one of "max", "min", "mean", "spread", "norm", "argmax"',
    "across(loss + layer_grad_norm, 'max') > 1": "8: across wants metrics of one scope: of ranks, layers, GPUs or nodes",
    "across(layer_grad_norm, 'argmax') > 1": '25: "argmax" is the number of a rank; a layer has none',
    "age(loss + 1) > 1": "5: age wants a bare metric",
    "loss > nan": "8: unknown name 'nan'; there are isnan(x), isinf(x) and isfinite(x)",
    "loss > 1e400": "8: the number is too large: it is infinite here, and nothing is over it",
    "loss > -1e400": "9: the number is too large: it is infinite here, and nothing is over it",
    "loss / 0 > 1": "1: a division by 0 has no value",
    "mean(loss, 5) / (2 - 2 * 1) > 1": "1: a division by 0 has no value",
    "loss >": "7: syntax error: the expression ends too early",
    "loss > 1 and": "13: syntax error: the expression ends too early",
    "loss = 1": "6: syntax error: `==` compares",
    "loss > 1 && loss < 2": "10: '&&' is not part of the rule language; write `and`",
    "loss > 1 # why": "10: '#' is not part of the rule language; there are no comments in it",
    "(a := loss) > 1": "4: ':=' is not part of the rule language; names go under `let:`",
    "loss.real > 1": "1: '.real' is not part of the rule language; a name has no dots",
    "loss[0] > 1": "1: '[0]' is not part of the rule language; past(x, k) looks k samples back, mean(x, 10) at the last ten",
    "loss ** 2 > 1": "1: '**' is not part of the rule language; write x * x, or sqrt(x)",
    "loss // 2 > 1": "1: '//' is not part of the rule language; write x / y; nothing is rounded",
    "loss % 2 > 1": "1: '%' is not part of the rule language; `every: 10` looks at each tenth sample; 50 % is written 0.5",
    "loss >> 1": "1: '>>' is not part of the rule language; write `>`",
    "loss > 1 & loss < 2": "8: '&' is not part of the rule language; write `and`",
    "~loss > 1": "1: '~' is not part of the rule language; write `not`",
    "loss is nan": "1: 'is' is not part of the rule language; write `==`; isnan(x) asks for NaN, absent(x) for a metric without a sample",
    "loss not in (1, 2)": "1: 'not in' is not part of the rule language; write x != 1 and x != 2",
    "loss > 1, 2": "1: ',' is not part of the rule language; conditions are joined by `and` and `or`; a decimal point is a dot",
    "{loss} > 1": "1: '{ }' is not part of the rule language; write the bare name; braces are for annotations",
    "f'{loss}' > 1": "1: an f-string is not part of the rule language; numbers are put into `annotations:`, as {loss:.3g}",
    "[x for x in loss] > 1": '1: a comprehension is not part of the rule language; mean(x, 100) is over samples, across(x, "max") over ranks',
    "lambda: loss": "1: 'lambda' is not part of the rule language; name an expression under `let:`",
    "loss > 1 AND loss < 2": "10: 'AND' is not part of the rule language; write `and`, in small letters",
    "loss > 1 or NOT loss": "13: 'NOT' is not part of the rule language; write `not`, in small letters",
    "loss => 1": "6: '=>' is not part of the rule language; write `>=`",
    "loss > 50%": "8: '50%' is not part of the rule language; a share is written 0.5, not 50%",
    "mean(loss, 10 steps) > 1": "12: '10 steps' is not part of the rule language; a window of samples is written as their number: mean(x, 10)",
    "where(loss, loss > 1 AND loss < 2) > 1": "22: 'AND' is not part of the rule language; write `and`, in small letters",
    "loss > 1 and (loss > 2": "14: syntax error: '(' was never closed",
    "step > 100": "1: there is no metric 'step'; `warmup: 200 steps` waits for a step, `for: 20 steps` says how long",
    "loss.mean() > 1": "1: only the functions of the rule language can be called, as mean(x, window)",
    "(lambda: loss)() > 1": "1: only the functions of the rule language can be called, as mean(x, window)",
    "loss in (1, 2)": "1: 'in' is not part of the rule language; write x == 1 or x == 2",
    "loss > True": "8: True is not part of the rule language; only numbers stand for themselves",
    "__import__('os') > 1": "1: unknown function '__import__'",
    "loss if loss > 1 else loss": "1: 'if ... else' is not part of the rule language; write a and b or not a and c, or two rules",
    "loss > " + "1" * 400: "8: the number is too large",
    "-" * 60 + "loss > 1": "50: nested over 50 deep; name parts of it under `let:`",
    "é > 1 and lss > 1": "1: unknown metric 'é'; a metric that the script logs itself is declared under `signals:`",
    "loss > 1 and é > 1": "14: unknown metric 'é'; a metric that the script logs itself is declared under `signals:`",
    " ": "1: the expression is empty",
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_bad_expression(expression: str) -> None:
    """The expression is on one line in double quotes, so that the place is the offset behind the quote."""
    said = fault(HEAD + f'    expr: "{expression}"\n')
    column, _, message = EXPRESSIONS[expression].partition(": ")
    assert said == f"my.yaml:4:{int(column) + 11}: {message}"


def test_a_number_that_touches_a_word_is_refused_though_python_only_warns_of_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as outside of tests
        assert "syntax error" in fault(HEAD + "    expr: loss > 1and loss < 2\n")


def test_every_operator_of_python_is_named_by_its_sign() -> None:
    """The author of `>>` does not know it as "rshift"."""
    ours = {ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd, ast.Not}
    ours |= {ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq}
    theirs = {kind for base in (ast.operator, ast.cmpop, ast.unaryop) for kind in base.__subclasses__()}
    assert theirs - ours == foreign.OPERATORS.keys()


@pytest.mark.parametrize(
    ("written", "line", "column"),
    [
        ("expr: loss > 1 and lss > 2", 4, 24),
        ("expr: 'loss > 1 and lss > 2'", 4, 25),
        ('expr: "loss > 1 and lss > 2"', 4, 25),
        ('expr: "loss > \\x31 and lss > 2"', 4, 28),
        ("expr: across(loss, \"max\") > 1 and lss > 2", 4, 39),
        ("expr: 'across(loss, ''max'') > 1 and lss > 2'", 4, 42),
        ("expr: loss > 1\n      and lss > 2", 5, 11),
        ("expr: |\n      loss > 1\n      and lss > 2", 6, 11),
        ("expr: >-\n      loss > 1\n\n      and lss > 2", 7, 11),
        ("expr: |2-\n        loss > 1\n         and lss > 2", 6, 14),
        ('expr: "loss > 1\n      and\n\n      lss > 2"', 7, 7),
        ('expr: "loss > 1 \\\n      and lss > 2"', 5, 11),
        ("expr: &a loss > 1 and lss > 2", 4, 27),
        ("expr: median(loss, 5m) > 1 and lss > 2", 4, 36),
        ("expr: median(loss, '5m') > 1 and lss > 2", 4, 38),
        ("let:\n      base: |-\n        median(loss, 5m) +\n        lss\n    expr: base > 1", 7, 9),
    ],
)  # fmt: skip
def test_the_place_in_any_style_of_yaml(written: str, line: int, column: int) -> None:
    assert fault(HEAD + f"    {written}\n").startswith(f"my.yaml:{line}:{column}: unknown metric 'lss'")


def test_a_let_that_doubles_itself_is_refused() -> None:
    lets = "".join(f"      x{i}: x{i - 1} + x{i - 1}\n" for i in range(1, 60))
    text = HEAD + f"    let:\n      x0: loss\n{lets}    expr: x59 > 1\n"
    assert "over 500 operations, those of its lets with it" in fault(text)


@pytest.mark.parametrize("deeper", ["-" * 45 + "{}", "{}" + " + 1" * 45, "abs(" * 45 + "{}" + ")" * 45])
@pytest.mark.parametrize("lets", [5, 9])
def test_lets_that_nest_too_deep_together_are_refused(deeper: str, lets: int) -> None:
    """Each let alone is fine. Python would not read a source of so many parentheses, nor could we recurse so deep."""
    written = "".join(f"      x{i}: {deeper.format(f'x{i - 1}' if i else 'loss')!r}\n" for i in range(lets))
    text = HEAD + f"    let:\n{written}    expr: x{lets - 1} > 1\n"
    assert "nested over 150 deep, its lets with it" in fault(text)


def test_lets_that_nest_as_deep_as_they_may_are_judged() -> None:
    """Conditions and numbers nest in each other; the source for Python has a pair of parentheses for each."""
    lets = {"x0": "-" * 46 + "where(loss / 2 + grad_norm, loss > 1)", "x1": "-" * 48 + "x0", "x2": "-x1"}
    written = "".join(f"      {name}: {text}\n" for name, text in lets.items())
    text = HEAD + f"    let:\n{written}    expr: {'not ' * 42}({'-' * 4}x2 / 2 < -1)\n"
    (rule,) = load_rules(text, "my.yaml").rules
    found = Evaluator([rule], run="test").observe(Observation(0, 0.0, {RUN: {"loss": 4.0, "grad_norm": 1.0}}))
    assert [transition.kind for transition in found] == ["fired"]
    assert "nested over 150 deep" in fault(text.replace("(----", "(-----"))


def test_two_files_with_the_same_alert() -> None:
    one = load_rules(HEAD + "    expr: loss > 1\n", "one.yaml")
    two = load_rules(HEAD + "    expr: loss > 2\n", "two.yaml")
    with pytest.raises(RuleError, match=r"two.yaml:3:1: alert 'Test' is there twice; the first is in one.yaml, line 3"):
        rules_of([one, two])


def test_an_unknown_action() -> None:
    text = HEAD + "    expr: loss > 1\n    actions: [rolback]\n"
    with pytest.raises(RuleError, match=r"my.yaml:5:15: unknown action 'rolback'; did you mean 'rollback'"):
        load_rules(text, "my.yaml", actions={"evidence", "rollback"})
    assert load_rules(text, "my.yaml").rules[0].actions == ("rolback",)


def test_unknown_evidence() -> None:
    text = HEAD + "    expr: loss > 1\n    evidence: [moments, provenence]\n"
    with pytest.raises(RuleError, match=r"my.yaml:5:25: unknown evidence 'provenence'; did you mean 'provenance'"):
        load_rules(text, "my.yaml", evidence=loader.EVIDENCE)
    with pytest.raises(RuleError, match=r"there are: census, moments, out_of_memory, provenance"):
        load_rules(text.replace("provenence", "tea"), "my.yaml", evidence=loader.EVIDENCE)
    assert load_rules(text, "my.yaml").rules[0].evidence == ("moments", "provenence")


PIECES = st.sampled_from(
    ["loss", "grad_norm", "layer_grad_norm", "median", "past", "count", "across", "absent", "isnan", "(", ")", ",", " ", "\n",
     "+", "-", "*", "/", "<", "==", "and", "or", "not", "3", "1e400", "5m", "0x1F", "'max'", '"', "lambda", ":", "[", "]", "{",
     "}", ".", "__class__", "\\", "\x00", "é", "if", "else", "for", "in", "k=", "**", "f'{loss}'", "…", "\ud800"]
)  # fmt: skip
VOCABULARY = {name: signal.scope for name, signal in SIGNALS.items()}


@pytest.mark.slow
@given(
    st.one_of(
        st.text(max_size=60), st.lists(PIECES, max_size=25).map(" ".join), st.lists(PIECES, max_size=25).map("".join)
    )
)
@example("(" * 300)
@example("-" * 1900 + "1")
@example("loss" + "+1" * 900)
@example("9" * 1900)
@example("loss[" + "-" * 1900 + "1]")
@example("absent(loss, " + "-" * 1900 + "1)")
@example("mean(loss, 1" + "+1" * 900 + ")")
def test_any_text_compiles_or_is_a_rule_error(text: str) -> None:
    error = None
    try:
        compile_any(parse(Text.plain(text)), Builder("run", VOCABULARY), {})
    except RuleError as caught:
        error = caught
    assert error is None or 1 <= error.column <= len(text) + 1


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true') > 1",
        "eval('1') > 1",
        "open('/etc/passwd') > 1",
        "().__class__.__bases__[0].__subclasses__() > 1",
        "(lambda: exec('1'))() > 1",
        "[loss for loss in (1, 2)] > 1",
        "f'{open(0)}' > 1",
        "loss > (yield)",
    ],
)
def test_what_is_not_allowed_is_never_evaluated(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("eval", "exec", "open", "__import__"):
        monkeypatch.setattr(builtins, name, lambda *_, name=name, **__: ran.append(name))
    error = None
    try:
        compile_any(parse(Text.plain(expression)), Builder("run", VOCABULARY), {})
    except RuleError as caught:
        error = caught
    finally:
        monkeypatch.undo()
    assert error is not None
    assert ran == []


@given(
    st.one_of(
        st.text(max_size=80), st.lists(PIECES, max_size=30).map("".join).map(lambda text: HEAD + "    expr: " + text)
    )
)
def test_any_file_loads_or_is_a_rule_error(text: str) -> None:
    error = None
    try:
        load_rules(text, "my.yaml")
    except RuleError as caught:
        error = caught
    assert error is None or 1 <= error.line <= len(text.splitlines()) + 1
