"""A job's processes are found wherever they are, and all ended, with what they leave in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SUPERVISOR = """
import os, signal, sys
from sentinel.supervise.job import Job, members
job = Job([sys.executable, "-c", sys.argv[1]], os.environ, set())
print(sys.stdin.readline(), end="")  # until the job is as it is to be
job.end(grace=float(sys.argv[2]))
job.reap()
print(job.status, len(members()), flush=True)
"""


def ended(script: str, ready: Path, grace: float = 30.0, supervisor: str = SUPERVISOR) -> str:
    """Return what a supervisor prints that ends a job of `script` once that has made `ready`.

    A process that dies of SIGTERM is not waited for; `grace`, in seconds, is for those that do not.
    """
    command = [sys.executable, "-c", supervisor, script, str(grace)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process.communicate("go\n", timeout=60)[0].removeprefix("go\n").strip()


def test_sessions_of_their_own_and_orphans_are_ended(tmp_path: Path) -> None:
    """torchrun's ranks have sessions of their own, and a rank that died may leave orphans behind."""
    ready = tmp_path / "ready"
    script = f"""
import os, pathlib, subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
subprocess.Popen(sleeper, start_new_session=True)
parent = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True, env={{}}); os._exit(0)"
subprocess.run([sys.executable, "-c", parent, *sleeper])
pathlib.Path({str(ready)!r}).touch()
time.sleep(1000)
"""
    assert ended(script, ready) == f"{-signal.SIGTERM} 0"


READING = """
import os, sys
from sentinel.supervise import job as jobs
job, listed = jobs.Job([sys.executable, "-c", sys.argv[1]], os.environ, set()), os.listdir
print(sys.stdin.readline(), end="")

def slowly(path):
    found = listed(path)
    if path == "/proc":
        os.listdir = listed
        os.kill(job._process.pid, 10)
        os.waitid(os.P_PID, job._process.pid, os.WEXITED | os.WNOWAIT)
    return found

os.listdir = slowly
job.end(grace=30.0)
job.reap()
print(job.status, len(jobs.members()), flush=True)
"""


def test_a_process_that_starts_while_the_processes_are_read_is_ended(tmp_path: Path) -> None:
    """The parent of the new process is gone by the time its own entry is read."""
    ready = tmp_path / "ready"
    script = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os.fork() and os._exit(0))
pathlib.Path({str(ready)!r}).touch()
while True:
    time.sleep(1000)
"""
    assert ended(script, ready, supervisor=READING) == "0 0"


def test_a_process_that_ignores_sigterm_is_killed_and_a_stopped_one_receives_it(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"""
import os, pathlib, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(ready)!r}).touch()
time.sleep(1000)
"""
    assert ended(script, ready, grace=0.3) == f"{-signal.SIGKILL} 0"


def test_shared_memory_of_the_killed_is_removed(tmp_path: Path) -> None:
    """multiprocessing's own resource tracker removes the memory, and is given the time to do so."""
    ready = tmp_path / "ready"
    script = f"""
import pathlib, signal, time
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=4096)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
draft = pathlib.Path({str(tmp_path / "draft")!r})
draft.write_text(block.name)
draft.rename({str(ready)!r})
time.sleep(1000)
"""
    assert ended(script, ready, grace=0.3) == f"{-signal.SIGKILL} 0"
    assert not (Path("/dev/shm") / ready.read_text()).exists()


@pytest.mark.slow
def test_sentinels_daemon_is_not_part_of_the_job(tmp_path: Path) -> None:
    """The job starts the daemon, which must be able to report how the job died."""
    ready, directory = tmp_path / "ready", tmp_path / "d"
    script = f"""
import pathlib, subprocess, sys, time
command = [sys.executable, "-P", "-m", "sentinel", "daemon", "--stay", "--directory", {str(directory)!r}]
process = subprocess.Popen(command, stdout=-3, stderr=-3, start_new_session=True)
while not pathlib.Path({str(directory)!r}, "sentinel.sock").exists():
    time.sleep(0.05)
pathlib.Path({str(tmp_path / "draft")!r}).write_text(str(process.pid))
pathlib.Path({str(tmp_path / "draft")!r}).rename({str(ready)!r})
time.sleep(1000)
"""
    assert ended(script, ready) == f"{-signal.SIGTERM} 0"
    daemon = int(ready.read_text())
    os.kill(daemon, 0)
    os.kill(daemon, signal.SIGKILL)
