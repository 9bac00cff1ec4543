"""Advice is given in one place: causes.yaml, a rule's remedy, doctor's findings, or the runbook's own text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from sentinel.diagnose.causes import causes
from sentinel.toolkit.doctor.finding import finding_texts
from tests.docs.generate import ROOT
from tests.stock import RULES

ALIKE = 8
"""Number of words in a row that texts of two places must not share."""


def list_advice() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of every text that advises a user."""
    for rule in RULES.values():
        yield "rules", rule.annotations.get("remedy", "")
    for named in causes().values():
        for cause in named.values():
            yield "causes.yaml", cause.remedy
    for text in finding_texts().values():
        yield "findings.yaml", text.line
    by_hand = re.sub(r"<!-- generated:.*?<!-- end -->", "", (ROOT / "docs/runbook.md").read_text(), flags=re.DOTALL)
    yield "docs/runbook.md", by_hand


def test_no_advice_is_written_twice() -> None:
    places = defaultdict[str, set[str]](set)
    for place, text in list_advice():
        words = re.findall(r"[\w.()=]+", text.lower())
        for at in range(len(words) - ALIKE + 1):
            places[" ".join(words[at : at + ALIKE])].add(place)
    twice = {words: sorted(where) for words, where in places.items() if len(where) > 1}
    assert not twice, "write it in causes.yaml alone, and point to it"


def test_a_finding_has_advice_of_its_own_or_points_to_a_cause() -> None:
    for name, text in finding_texts().items():
        assert bool(text.cause) != bool(text.line and text.source), name
