"""Calls the command line many times from one process that has imported all of it, each time in a fork of its own.

Reads cases from stdin and writes their results to stdout, each a line of JSON. A case: `argv`, `env`, `cwd`, and
`stdout`, which is `kept`, `closed` (a pipe without a reader) or `full` (a disk without room).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from sentinel.cli import _COMMANDS, main

SECONDS = 30
_MODULES = ("sentinel.daemon.app", "sentinel.daemon.replay", "sentinel.toolkit.postmortem.verdict", "rich.progress")
"""Modules to import beforehand. Not torch: a fork of a process with it takes ten times as long."""


def called(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a fork; return its exit code and output."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            _become(case, out.fileno(), said.fileno())
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, said):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    return {
        "code": os.waitstatus_to_exitcode(status),
        "stdout": texts[0],
        "stderr": texts[1],
    }


def _become(case: dict[str, Any], out: int, said: int) -> None:
    """Run the case in this process, and exit; never returns."""
    code: Any = 70
    try:
        os.setsid()
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(_stdout(case["stdout"], out), 1)
        os.dup2(said, 2)
        os.environ.update(case["env"])
        if case["cwd"].endswith("gone"):
            Path(case["cwd"]).mkdir()
        os.chdir(case["cwd"])
        if case["cwd"].endswith("gone"):
            Path(case["cwd"]).rmdir()
        importlib.import_module("sentinel.cli.hang").SURVEY_SECONDS = 0.0  # type: ignore[attr-defined]
        sys.argv = ["sentinel", *case["argv"]]
        encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
        sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding=encoding, closefd=False, errors="backslashreplace")
        main()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 120  # as the interpreter does
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _stdout(kind: str, kept: int) -> int:
    if kind == "closed":
        reading, writing = os.pipe()
        os.close(reading)
        return writing
    return os.open("/dev/full", os.O_WRONLY) if kind == "full" else kept


if __name__ == "__main__":
    for name in (*(module for module, _ in _COMMANDS.values()), *_MODULES):
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(called(json.loads(line))), flush=True)
