"""A fork of a zygote behaves in a test as an interpreter of its own would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zygote import run_fork

SHOW = """
import os, sys
print(sys.argv, __name__, sys.path[0], os.getcwd(), os.environ["MARK"], os.getppid(), os.getpgid(0) == os.getpid())
print(sorted(name for name in globals() if not name.startswith("__")), file=sys.stderr)
"""


def run_both(command: list[str], **options: object) -> list[tuple[int, str, str]]:
    """Return (status, stdout, last line of stderr) of an interpreter and of a fork."""
    started = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    return [
        (done.returncode, done.stdout, done.stderr.rstrip().rpartition("\n")[2])
        for done in (started, run_fork(command, (), **options))
    ]


@pytest.mark.parametrize("way", ["code", "script", "module"])
def test_a_fork_has_arguments_folder_environment_and_parent(way: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    program = {"code": ["-c", SHOW], "script": ["shown.py"], "module": ["-m", "shown"]}[way]
    command = [sys.executable, *program, "one", "--two"]
    started, forked = run_both(command, cwd=tmp_path, env={**os.environ, "MARK": "set"})
    assert started == forked
    assert f"{tmp_path} set {os.getpid()}" in forked[1]


@pytest.mark.parametrize(
    "program",
    [
        "print('done')", "raise SystemExit(3)", "raise SystemExit('no')", "raise ValueError('bad data')",
        "import os; os._exit(4)", "import os; os.kill(os.getpid(), 9)", 
        "import atexit; atexit.register(print, 'later')",
        "import threading, time; threading.Timer(0.01, print, ['waited for']).start()", "print(open(0).read())",
        "import sys; sys.stdout.close(); sys.exit(5)",
    ],
)  # fmt: skip
def test_a_fork_ends_as_a_program_ends(program: str) -> None:
    started, forked = run_both([sys.executable, "-c", program], stdin=subprocess.DEVNULL)
    assert started == forked
