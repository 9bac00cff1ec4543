"""Write the reference of rules, metrics and functions as Markdown, from the rule files and the tables:
docs/rules.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sentinel.engine.expressions.functions import FUNCTIONS
from sentinel.engine.rules.loading import load_rules
from sentinel.engine.rules.rule import Rule
from sentinel.signals import CLOCK, SIGNALS

_HEAD = """\
# Rules, metrics, functions

Generated from the rule files in `rules/` and from the tables of the engine; do not edit.
[rule-language.md](rule-language.md) says how rules are written and what they mean.
"""


def reference(files: Iterable[tuple[str, str]]) -> str:
    """Return Markdown for rule files, given as (name, text). Raises RuleError where one is wrong."""
    parts = [_HEAD, "## Stock rules\n"]
    for name, text in files:
        loaded = load_rules(text, name)
        parts.append(f"### {loaded.group}\n")
        parts += ("\n".join(_rule(rule, text.splitlines())) for rule in loaded.rules)
    parts.append("## Metrics\n\n" + "\n".join(_metrics()))
    parts.append("## Functions\n\n" + "\n".join(_functions()))
    return "\n".join(parts) + "\n"


def _rule(rule: Rule, lines: list[str]) -> Iterator[str]:
    yield f"#### {rule.name}\n"
    yield from (_comment(lines[rule.line :]) or ["(no source given)"])
    yield "\n```"
    yield from _write_out(rule.lets, rule.expr)
    yield "```\n"
    yield f"- {rule.severity}, of scope {rule.scope}; holds for {rule.for_}" + _extras(rule)
    yield f"- actions: {', '.join(rule.actions) or 'none'}"
    if (less := rule.downgrade) is not None:
        yield f"- {less.severity}, with actions: {', '.join(less.actions) or 'none'}, where `{less.when}`"
    if rule.evidence:
        yield f"- evidence of the ranks: {', '.join(f'`{one}`' for one in rule.evidence)}"
    for name, text in rule.annotations.items():
        yield f"- {name}: {' '.join(text.split())}"
    if rule.runbook:
        yield f"- runbook: {rule.runbook}"
    yield ""


def _write_out(lets: Mapping[str, str], expr: str) -> Iterator[str]:
    for name, text in lets.items():
        yield f"{name} = {' '.join(text.split())}"
    yield " ".join(expr.split())


def _comment(lines: list[str]) -> list[str]:
    """Return the comment right under the alert's name: why its thresholds are what they are."""
    found = []
    for line in lines:
        if not line.lstrip().startswith("#"):
            break
        found.append(line.lstrip().removeprefix("#").strip())
    return found


def _keep_while(rule: Rule) -> str:
    node = rule.definition.fields.get("keep_while")
    return f"`{node.text('keep_while').value.strip()}`" if node is not None else ""


def _extras(rule: Rule) -> str:
    told = {
        "warm-up": str(rule.warmup) if rule.warmup.steps or rule.warmup.seconds else "",
        "looks at": f"every {rule.every}th of its samples" if rule.every > 1 else "",
        "looks where there is": " or ".join(rule.at),
        "windows from": f"{rule.min_samples} samples" if rule.min_samples else "",
        "keeps firing": str(rule.keep_firing) if rule.keep_firing.steps or rule.keep_firing.seconds else "",
        "and while": _keep_while(rule),
    }
    return "".join(f"; {name} {text}" for name, text in told.items() if text)


def _metrics() -> Iterator[str]:
    yield "Tier 0 is sampled at every step, the others more rarely; the governor says how often. What is sampled by the"
    yield "clock is measured by the daemon, between steps: stalls four times a second, GPUs and host every 4 s.\n"
    yield "In loops of a few milliseconds only the loss, the loss scale, withheld steps, clipping, the batch and what"
    yield "`monitor.log` reports are taken at every step from the 512th on; what else tier 0 has, times (as means) and"
    yield "rates, at every 64th at least.\n"
    yield "| metric | unit | of | the run's value | tier | what it is |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for signal in SIGNALS.values():
        tier = "clock" if signal.tier == CLOCK else str(signal.tier)
        cells = (f"`{signal.name}`", signal.unit, signal.scope, signal.combine, tier, signal.meaning)
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""


def _functions() -> Iterator[str]:
    yield "| function | gives | what |"
    yield "| --- | --- | --- |"
    for function in FUNCTIONS.values():
        yield f"| `{function.signature}` | {function.gives} | {function.meaning} |"
    yield "\n### Definitions\n"
    yield "Some functions are made of the others: a call of one does exactly what its definition does, written out."
    for function in FUNCTIONS.values():
        if function.body:
            yield from ("", f"#### {function.signature}", "")
            yield from ((function.source, "") if function.source else ())
            yield from ("```", *_write_out(function.lets, function.body), "```")
