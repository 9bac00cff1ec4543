"""If a cause is unknown, the case says what is missing, and how to get it."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import msgspec
import pytest

import sentinel.diagnose
from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.notify import wording
from sentinel.runs.steps import RunStep
from tests.diagnose.made import judged, run_of
from tests.notify.cases import case
from tests.stock import RULES

SOURCES = sorted(Path(sentinel.diagnose.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("alert", sorted(RULES))
def test_without_any_evidence_an_alert_says_what_is_missing_and_what_gets_it(alert: str) -> None:
    found = judged(alert, run_of(3, lambda _: {}))
    if found.confidence == "none":
        assert found.missing
        assert found.command


def test_every_unknown_cause_comes_with_a_command() -> None:
    """`report_unknown` requires a command, but code that makes a `Finding` itself could leave it out."""
    bare = [
        f"{path.name}:{call.lineno}"
        for path in SOURCES
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Finding"
        if any(isinstance(part, ast.Constant) and part.value == "none" for part in call.args)
        if path.name not in ("evidence.py", "catalogue.py")  # the function itself, and a rule without causes
    ]
    assert not bare
    commands = [
        (path.name, call.lineno, keyword.value)
        for path in SOURCES
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "report_unknown"
        for keyword in call.keywords
        if keyword.arg == "command"
    ]
    assert len(commands) > 30
    assert not [where for where in commands if isinstance(where[2], ast.Constant) and not where[2].value]


def test_the_command_is_in_the_alerts_message() -> None:
    steps = run_of(3, lambda _: {})
    told = msgspec.structs.replace(case("0.1", "firing"), diagnosis=judged("GradientSpike", steps))
    assert dict(wording.rows(told))["to know"] == "attach(overhead=0.1) samples more of the steps after step 512"


def test_if_the_process_has_ended_the_command_can_be_copied_whole() -> None:
    gone = {alert: judged(alert, run_of(3, lambda _: {})).command for alert in ("RankLost", "Hang", "OutOfMemory")}
    assert gone == {
        "RankLost": "sentinel last RUN",
        "Hang": "sentinel hang /tmp/nccl_trace_rank_* LOG",
        "OutOfMemory": "grep -i 'tried to allocate' LOG",
    }


def test_a_users_alert_shows_no_empty_cause() -> None:
    evidence = Evidence(alert="Mine", since=1, until=2, last=RunStep(2, 0.0, {}, {}))
    own = diagnose(evidence, "")
    assert own == Finding("not known", "none")
    told = msgspec.structs.replace(case("0.1", "firing"), diagnosis=own, signs=())
    assert "why" not in dict(wording.rows(told))


def test_what_was_not_measured_is_no_cause() -> None:
    """A loss that is not known is none that is not finite, and no step that is known to have overflowed is not none."""
    found = judged("NonFiniteGradient", run_of(11, lambda seq: {"grad_norm": 1.0 if seq < 10 else math.inf}))
    assert (found.confidence, found.missing[0].split(",")[0]) == ("none", "the loss of step 10")
    known = judged("NonFiniteGradient", run_of(11, lambda seq: {"loss": 2.0 if seq < 10 else math.nan}))
    assert (known.confidence, known.cause) == ("high", "the loss of step 10 is not finite, and its gradients with it")
    assert judged("ScalerCollapse", run_of(11, lambda seq: {"loss_scale": 2.0**-seq})).confidence == "none"
