"""How processes ended, as the kernel tells it before their parent asks."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.daemon.ranks import cgroups
from sentinel.daemon.ranks.exit_status import ExitStatuses, exit_status, has_ended

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os; os._exit(3)", 3),
        ("import os; os.abort()", -6),
    ],
)
def test_the_status_of_a_process_that_was_not_waited_for_yet(program: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", program])
    descriptor = os.pidfd_open(process.pid)
    select.select([descriptor], [], [])
    assert exit_status(process.pid, descriptor) == status
    assert has_ended(process.pid)
    assert process.wait() == status
    assert exit_status(process.pid, descriptor) in (status, None), "its parent was quicker: known from Linux 6.15 on"
    os.close(descriptor)


def test_a_living_process_has_no_exit_status() -> None:
    descriptor = os.pidfd_open(os.getpid())
    assert exit_status(os.getpid(), descriptor) is None
    os.close(descriptor)
    assert not has_ended(os.getpid())


@pytest.mark.parametrize(("controllers", "name"), [("", "memory.events"), ("memory", "memory.oom_control")])
def test_an_out_of_memory_kill_that_the_cgroup_counted(
    controllers: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / controllers / name
    counter.parent.mkdir(exist_ok=True)
    counter.write_text("low 0\noom_kill 2\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    known = ExitStatuses()
    for process in (os.getpid(), os.getppid()):
        known.watch_process(process)
    assert not known.explain_ending(os.getppid(), -9, 0.0).oom
    counter.write_text("low 0\noom_kill 3\n")
    assert known.explain_ending(os.getpid(), -9, 0.0).oom
