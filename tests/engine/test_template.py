"""Annotations: which formats a number may have, and how long they get."""

from __future__ import annotations

import pytest

from sentinel.engine import RUN, Evaluator, Observation, load_rules
from sentinel.engine.rules.template import LONGEST
from sentinel.errors import RuleError


def said(annotation: str) -> str:
    text = f"group: g\nrules:\n  - alert: High\n    expr: loss > 1\n    annotations: {{summary: '{annotation}'}}\n"
    evaluator = Evaluator(load_rules(text, "my.yaml").rules, run="t")
    (fired,) = evaluator.observe(Observation(0, 0.0, {RUN: {"loss": 1234.5}}))
    return fired.incident.summary


@pytest.mark.parametrize(
    "spec",
    [".3f", ".0%", ".2e", "g", "10.1f", "<10.1f", "*^12.1f", "+.1f", " .1f", ",.1f", "012.1f"[1:], "9,.1f", ".3"],
)
def test_formats_that_a_number_may_have(spec: str) -> None:
    assert said(f"[{{loss:{spec}}}]") == f"[{1234.5:{spec}}]"


@pytest.mark.parametrize(
    "spec", ["999", "100.1f", ".100f", "_", "n", "z.1f", "d", "x", "c", "#", "%%", "..1f", "{}", "1 f"]
)
def test_formats_that_are_refused(spec: str) -> None:
    with pytest.raises(RuleError):
        said(f"{{loss:{spec}}}")


def test_a_text_that_is_too_long_is_cut() -> None:
    whole = said("x" * 3000 + "{loss:.0f}")
    assert whole == "x" * 3000 + "1234"
    cut = said("x" * 5000 + "{loss:.0f}")
    assert len(cut) == LONGEST
    assert cut.endswith("x [...]")
    assert len(said("{loss:99.1f}" * 100)) == LONGEST
