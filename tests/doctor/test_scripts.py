"""Every planted mistake is found, and healthy scripts have no findings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.cli.doctor import judge_ranks
from sentinel.engine.rules.rule import SEVERITIES
from sentinel.toolkit.doctor.command import Examined
from sentinel.toolkit.doctor.finding import DoctorFinding, finding_texts, sort_findings
from tests.doctor.scripts import HEALTHY, PLANTED, PLANTED_AGAIN, REASONS

pytestmark = pytest.mark.timeout(600)  # the first test waits for all scripts, on a busy machine for over two minutes

SCRIPTS = {
    **PLANTED,
    **{name: text for name, (_, text) in PLANTED_AGAIN.items()},
    **{f"healthy: {name}": text for name, text in HEALTHY.items()},
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[DoctorFinding]]:
    """Return script -> the findings in it, for the scripts of the tests that were chosen."""
    folder = tmp_path_factory.mktemp("scripts")
    chosen = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    names = {item.callspec.params["script"] for item in chosen if hasattr(item, "callspec")}
    scripts = {name: text for name, text in SCRIPTS.items() if name in names}
    files = {name: folder / f"{number}.py" for number, name in enumerate(scripts)}
    for name, path in files.items():
        path.write_text(scripts[name])
    subprocess.run(
        [sys.executable, "-m", "tests.doctor.forks", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
    )
    return {name: _judge(name, path.with_name(f"{path.stem}.0.json")) for name, path in files.items()}


def _judge(script: str, path: Path) -> list[DoctorFinding]:
    facts = json.loads(path.read_text()) if path.exists() else None
    if facts and script != "input-bound":
        facts["waits"] = []  # other programs on the machine make waits longer
    findings = sort_findings(judge_ranks(Examined([facts] if facts else [], "", False)))
    assert all(all((one.what, one.why, one.line, one.source)) and one.severity in SEVERITIES for one in findings)
    return findings


def name_all(findings: list[DoctorFinding]) -> set[str]:
    return {finding.name for finding in findings}


@pytest.mark.slow
@pytest.mark.parametrize("script", list(PLANTED))
def test_a_planted_mistake_is_found_and_nothing_else(script: str, found: dict[str, list[DoctorFinding]]) -> None:
    assert name_all(found[script]) == {script}


@pytest.mark.slow
@pytest.mark.parametrize("script", list(PLANTED_AGAIN))
def test_another_form_of_a_mistake_is_found_and_nothing_else(
    script: str, found: dict[str, list[DoctorFinding]]
) -> None:
    assert name_all(found[script]) == {PLANTED_AGAIN[script][0]}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.startswith("healthy: ")])
def test_a_healthy_script_has_no_findings(script: str, found: dict[str, list[DoctorFinding]]) -> None:
    assert found[script] == []


@pytest.mark.slow
@pytest.mark.parametrize(("script", "what", "why"), [(script, *words) for script, words in REASONS.items()])
def test_the_reason_is_what_was_seen(script: str, what: str, why: str, found: dict[str, list[DoctorFinding]]) -> None:
    (finding,) = found[script]
    assert re.search(what, finding.what)
    assert re.search(why, finding.why)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "severity"),
    [("optimizer-holds-others", "critical"), ("a head that was replaced after the optimizer was made", "warning")],
)
def test_an_optimizer_that_trains_nothing_is_critical(
    script: str, severity: str, found: dict[str, list[DoctorFinding]]
) -> None:
    (finding,) = found[script]
    assert finding.severity == severity


def test_there_are_25_mistakes_and_10_healthy_scripts() -> None:
    assert len(PLANTED) >= 25
    assert len(HEALTHY) >= 10


def test_every_finding_is_planted_somewhere() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    names = {key.partition("/")[0] for key, text in finding_texts().items() if not text.name}
    assert len(names) > 50
    assert {name for name in names if f'"{name}"' not in tests} == set()
