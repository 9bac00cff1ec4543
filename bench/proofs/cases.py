"""Runs all cases of the tests of which CI runs only a sample (marker `sampled`, tests/sampling.py): a trial each."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARKED = "pytest.mark.sampled("


def list_sampled() -> list[str]:
    """Return the tests with the marker, as pytest names them."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if MARKED in text else ():
            if isinstance(node, ast.FunctionDef) and MARKED in "\n".join(map(ast.unparse, node.decorator_list)):
                found.append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


TESTS = list_sampled()
TRIALS = len(TESTS)
SAMPLE: tuple[int, ...] = ()
"""Empty: the tests run samples of these cases themselves."""


def run_trial(seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "--all-cases", TESTS[seed]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-1000:]
    return {"case": TESTS[seed], "passed": int(passed[1])}
