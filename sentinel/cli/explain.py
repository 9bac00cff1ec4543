"""`sentinel explain`: what an alert means, how to tell its causes apart, what to do."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import resources

import click

from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.config import settings
from sentinel.engine import Rule
from sentinel.errors import ConfigError
from sentinel.rulebook import loader
from sentinel.web import json

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]*)#?([^)]*)\)")
"""A link within the documentation, which a terminal cannot follow."""
_COLUMNS = 100
"""Most columns of a line: longer ones are hard to read, however wide the terminal."""


@click.command()
@click.argument("alert", required=False)
@json_option()
def explain(alert: str | None, as_json: bool) -> None:
    """Print the runbook's section of an alert: what it means, how to tell its causes apart, what to do.

    ALERT is the name of a rule, or of its section; without one, all are listed. Where settings or rules of your own
    cannot be read, stderr says why, and the others are explained.

    Exit code 0; 2: there is no such alert.

    \b
    Example:  sentinel explain LossSpike
              sentinel explain loss-spike --json
    """
    try:
        book = load_rulebook()
    except ConfigError as error:
        book = loader.Rulebook(loader.stock_rules(), (f"settings and rules of your own were not read: {error}",))
    for note in book.notes:
        echo(f"sentinel: {note}", err=True)
    rules = book.rules
    if alert is None:
        echo(json.text(summarize_rules(rules)) if as_json else _list_rules(rules))
        return
    rule = find_rule(alert, rules)
    if as_json:
        echo(json.text(describe_rule(rule)))
    else:
        text = f"{sections().get(rule.runbook) or _own_words(rule)}\n\n{_where(rule)}\n"
        _show(_LINK.sub(_spell_link, text))


def find_rule(alert: str, rules: Sequence[Rule]) -> Rule:
    """Return the rule of that name, in any spelling. Raises ConfigError, which names similar ones."""
    known = {_key(name): rule for rule in rules for name in (rule.runbook, rule.name) if name}
    if (rule := known.get(_key(alert))) is not None:
        return rule
    near = [known[key].name for key in difflib.get_close_matches(_key(alert), known, n=3, cutoff=0.6)]
    meant = f"is {' or '.join(dict.fromkeys(near))} meant?" if near else "`sentinel explain` lists all that there are"
    raise ConfigError(f"no alert {alert!r}; {meant}")


def sections() -> Mapping[str, str]:
    """Return the runbook that comes with Sentinel: name of a section -> its text, without the heading."""
    text = (resources.files("sentinel.rules") / "runbook.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", re.sub(r"<!--.*?-->\n+", "", text), flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _list_rules(rules: Sequence[Rule]) -> str:
    width = max(len(rule.name) for rule in rules)
    return "\n".join(f"{rule.name:<{width}}  {rule.severity:<8}  {rule.group}" for rule in rules)


def _own_words(rule: Rule) -> str:
    """Return the annotations of a rule that has no section in the runbook."""
    said = [rule.annotations.get(name, "") for name in ("summary", "description", "remedy")]
    return "\n\n".join([f"**{rule.name}**, {rule.severity}.", *filter(None, said)])


def _spell_link(link: re.Match[str]) -> str:
    """Spell a link to a section of the runbook as the command that prints it, to another page as the page's name."""
    words, page, section = link.groups()
    place = f"docs/{page}" + (f", section {section}" if section else "") if page else f"`sentinel explain {section}`"
    return place if words in (page, section) else f"{words} ({place})"


def _where(rule: Rule) -> str:
    return f"The rule, with the sources of its thresholds: `{rule.file}`, line {rule.line}."


def load_rulebook() -> loader.Rulebook:
    """Load the stock rules, and those of the settings. Raises ConfigError where the settings cannot be read."""
    return loader.load(settings.load(None).daemon.rules)


def summarize_rules(rules: Sequence[Rule]) -> list[dict[str, str]]:
    """Return what `sentinel explain --json` lists."""
    return [{"alert": rule.name, "severity": rule.severity, "group": rule.group} for rule in rules]


def describe_rule(rule: Rule) -> dict[str, object]:
    """Return a rule with its section of the runbook."""
    return {
        "alert": rule.name,
        "severity": rule.severity,
        "group": rule.group,
        "scope": rule.scope,
        "expr": rule.expr,
        "file": rule.file,
        "line": rule.line,
        "summary": rule.annotations.get("summary", ""),
        "remedy": rule.annotations.get("remedy", ""),
        "runbook": rule.runbook,
        "text": sections().get(rule.runbook, ""),
    }


def _show(text: str) -> None:
    """Print Markdown: formatted on a terminal, unchanged elsewhere."""
    if not sys.stdout.isatty():
        echo(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(_without_tables(text)), width=min(console.width, _COLUMNS))


def _without_tables(text: str) -> str:
    """Turn tables into lists: a terminal's columns are too narrow for them, and a truncated command is useless."""
    lines, head = list[str](), list[str]()
    for line in text.splitlines():
        parts = line.strip("| ").split(" | ") if line.startswith("|") else []
        cells = [part.strip().replace("\\|", "|") for part in parts]  # as Markdown escapes it within a cell
        if not cells:
            head = []
            lines.append(line)
        elif not head:
            head = cells
        elif not line.startswith("| ---"):
            lines.append(f"- **{cells[0]}**")
            lines += [f"  - {name}: {cell}" for name, cell in zip(head[1:], cells[1:], strict=False)]
    return "\n".join(lines)
