"""What a finding is, and its words (`findings.yaml`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import msgspec
import yaml

from sentinel.diagnose.causes import causes
from sentinel.rulebook.loader import stock_rules
from sentinel.text import rank_severity


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that `sentinel doctor` found before the training meets it."""

    name: str
    """Short and stable, for scripts."""
    severity: str
    """That of the rule which finds the same mistake in a run. Without one: `critical`: it will not train as it is;
    `warning`: it costs, or fails under conditions; `info`: good to know."""
    what: str
    """With the numbers that say so."""
    why: str
    line: str
    """What to write."""
    source: str
    """Where it can be read."""


class FindingText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A finding's words. `{names}` in them are filled from the facts."""

    what: str
    why: str
    severity: str = ""
    """Where no rule has it."""
    line: str = ""
    source: str = ""
    cause: str = ""
    """`Alert/cause`, where a rule finds the same mistake later: that cause's remedy and source are said."""
    alert: str = ""
    """The alert alone, where the finding has words of its own."""
    downgraded: bool = False
    """Whether the rule downgrades it."""
    name: str = ""
    """Of the finding, where it depends on the facts."""


_CONSEQUENCES = (
    ("optimizer-holds-others", "no-gradient"),
    ("no-gradient", "unused-parameters"),
    ("scaled-step", "loss-not-finite"),
    ("frozen-batch-norm-learns", "frozen-in-optimizer"),
)
"""(cause, what follows from it and needs no word of its own)."""


@functools.cache
def finding_texts() -> Mapping[str, FindingText]:
    """Name of the finding, or `name/variant` -> its words."""
    text = (resources.files("sentinel.toolkit.doctor") / "findings.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, FindingText])


def describe_finding(key: str, **facts: Any) -> DoctorFinding:
    """The finding `key` of `findings.yaml`, about these facts."""
    text = finding_texts()[key]
    line, source = text.line, text.source
    if text.cause:
        alert, _, cause = text.cause.partition("/")
        line, source = causes()[alert][cause].remedy, causes()[alert][cause].source
    return DoctorFinding(
        name=text.name.format(**facts) or key.partition("/")[0],
        severity=text.severity or _find_severity(text),
        what=text.what.format(**facts),
        why=text.why.format(**facts),
        line=line.format(**facts),
        source=source.format(**facts),
    )


def _find_severity(text: FindingText) -> str:
    """That of the rule."""
    alert = text.alert or text.cause.partition("/")[0]
    rule = next(rule for rule in stock_rules() if rule.name == alert)
    return rule.downgrade.severity if text.downgraded and rule.downgrade is not None else rule.severity


def sort_findings(found: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """The most severe first, each name once, consequences of others left out."""
    unique = {finding.name: finding for finding in reversed(list(found))}
    for cause, consequence in _CONSEQUENCES:
        if cause in unique:
            unique.pop(consequence, None)
    return sorted(reversed(unique.values()), key=lambda finding: -rank_severity(finding.severity))
