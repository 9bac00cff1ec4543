"""Real ranks under rollback commands, with the daemon alive and killed: bench/agreement.py, short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[2] / "bench" / "agreement.py"


@pytest.mark.parametrize("options", [["--commands", "8"], ["--kills", "2"]])
def test_everywhere_or_nowhere(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "2", *options], capture_output=True, text=True, timeout=290, cwd="/"
    )
    assert done.stdout, done.stderr
    jobs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [finding for job in jobs for finding in job["found"]] == []
    assert sum(job["applied"] for job in jobs) >= 1
    assert done.returncode == 0
