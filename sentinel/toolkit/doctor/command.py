"""Runs a training command under examination, and returns the facts of each rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from sentinel.errors import ConfigError

_EXAMINER = "sentinel.hooks.examine"
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start the script in other processes: these are to be examined."""
_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")
"""Programs that run no module, and whose words may be commands of their own."""
_LARGEST = 64 * 1024 * 1024


class Examined(msgspec.Struct, frozen=True):
    """The result of an examination."""

    ranks: list[dict[str, Any]]
    """Facts of each rank, in order."""
    output: str
    """The end of what the command wrote to stderr."""
    timed_out: bool


def examine_command(command: Sequence[str], *, steps: int, seconds: float) -> Examined:
    """Run `command` for a few optimizer steps. Raises ConfigError if it cannot be started or has no script."""
    with tempfile.TemporaryDirectory(prefix="sentinel-doctor-") as folder:
        base = Path(folder) / "facts"
        environment = {
            **os.environ,
            "SENTINEL_EXAMINATION": str(base),
            "SENTINEL_EXAMINATION_STEPS": str(steps),
            "SENTINEL_DISABLED": "1",
        }
        timed_out, output = _run(rewritten(command), environment, seconds)
        found = sorted(Path(folder).glob("facts.*.json"), key=lambda path: int(path.name.split(".")[1]))
        return Examined([_facts(path) for path in found], output[-2000:], timed_out)


def rewritten(command: Sequence[str]) -> list[str]:
    """Return `python train.py` as `python -m sentinel.hooks.examine train.py`; launchers take -m or --module, too."""
    words, flag = list(command), "-m"
    runs_modules = False  # of other programs, such as numactl, -m is something else
    is_shell = False
    for at, word in enumerate(words):
        name = Path(word).name
        if runs_modules and word in ("-m", "--module") and at + 1 < len(words):
            if words[at + 1] not in _LAUNCHER_MODULES:
                return [*words[:at], flag, _EXAMINER, "-m", *words[at + 1 :]]
        elif word.endswith(".py") and at > 0 and (runs_modules or not is_shell):
            return [*words[:at], flag, _EXAMINER, *words[at:]]
        flag = "--module" if name == "deepspeed" else flag
        runs_modules = runs_modules or name.startswith("python") or name in _LAUNCHERS
        is_shell = is_shell or name in _SHELLS
    raise ConfigError(
        f"{' '.join(command)}: no Python command with a script (.py) or -m module in it: "
        "sentinel doctor -- python train.py"
    )


def _run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[bool, str]:
    # A file instead of a pipe: DataLoader workers that outlive their parent for seconds would hold a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        timed_out = _run_until(command, environment, seconds, said)
        said.seek(0)
        return timed_out, said.read()


def _run_until(command: list[str], environment: dict[str, str], seconds: float, said: IO[str]) -> bool:
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{command[0]}: {error.strerror}") from None
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    finally:
        _kill_all(process)
    return False


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill the command, its group, and all processes below it: torchrun starts each rank in a session of its own."""
    below: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in below:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


def _facts(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST:
        raise ConfigError(f"{path.name}: larger than any examination")
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts
