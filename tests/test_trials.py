"""Unusual machines: each trial ends in a watched run, or in one clear sentence and an unwatched run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli.client import ask_daemons
from sentinel.node import paths
from sentinel.store import History
from tests.programs import contained as contained_program
from tests.second_user import NOBODY, other_python
from tests.test_main_job import daemon_gone
from tests.zygote import TRAINING, ForkedProcess, start_zygote

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "programs" / "steady.py"


def start_run(
    steps: int = 50,
    *,
    prefix: Sequence[str] = (),
    mounts: Sequence[str] = (),
    wait: int = 30,
    until: Path | None = None,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start the program, below the command `prefix` or with `mounts` of its own, as a container has them."""
    contained = [str(Path(contained_program.__file__)), "; ".join(mounts)] if mounts else []
    command = [*prefix, sys.executable, *contained, str(PROGRAM), str(steps), str(wait)]
    command += [str(until)] if until else []
    kept = {**os.environ, **environment}
    kept = {name: value for name, value in kept.items() if value != "unset"}
    how: dict[str, Any] = {"env": kept, "cwd": "/", "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **how) if prefix else ForkedProcess(command, zygote=start_zygote(TRAINING), **how)


def finish_run(run: subprocess.Popen[str], *, first: bool = False) -> tuple[dict[str, Any], str]:
    """Wait for the run's end; return what it printed then, and its stderr. `first`: it is its namespace's process 1."""
    output, told = run.communicate(timeout=100)
    assert run.returncode == 0, told
    assert "Traceback" not in told
    end: dict[str, Any] = json.loads(output.splitlines()[0])
    assert end["children"] is first, "the daemon is nobody's child, but for process 1"
    return end, told


def sentences(told: str) -> list[str]:
    """Return Sentinel's lines in stderr, except a run's first and last line."""
    said = [line for line in told.splitlines() if line.startswith("sentinel: ")]
    return [line for line in said if "watching run" not in line and " ended after " not in line]


def serving() -> list[tuple[int, list[str]]]:
    """Return (process, runs) of the daemons that are alive."""
    return [(answer["pid"], [run["run_id"] for run in answer["runs"]]) for answer in ask_daemons("status")]


def until_served(runs: int = 1) -> list[tuple[int, list[str]]]:
    deadline = time.monotonic() + 60
    while sum(len(names) for _, names in serving()) < runs:
        assert time.monotonic() < deadline, serving()
        time.sleep(0.05)
    return serving()


@pytest.mark.slow
def test_two_runs_at_once_have_a_daemon_each(tmp_path: Path) -> None:
    first, second = start_run(600, until=tmp_path / "seen"), start_run(600, until=tmp_path / "seen")
    assert sorted(len(names) for _, names in until_served(2)) == [1, 1]
    (tmp_path / "seen").touch()
    ends = [finish_run(run)[0] for run in (first, second)]
    assert [end["state"] for end in ends] == ["streaming"] * 2
    daemon_gone()
    assert sorted(map(kept_steps, paths.histories())) == sorted(end["steps"] for end in ends)


@pytest.mark.slow
def test_a_pipe_ends_when_training_ends_though_the_daemon_was_killed_and_came_back(tmp_path: Path) -> None:
    command = f"{sys.executable} {PROGRAM} 900 30 {tmp_path}/seen | cat"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/") as pipe:
        (daemon, _), *_ = until_served()
        os.kill(daemon, signal.SIGKILL)
        (successor, _), *_ = until_served()
        assert successor != daemon
        (tmp_path / "seen").touch()
        assert pipe.stdout is not None
        assert json.loads(pipe.stdout.read())["state"] == "streaming"  # to its end: no other process holds the pipe
        pipe.wait(20)
    daemon_gone()


@pytest.mark.slow
def test_a_run_without_the_usual_variables_is_watched() -> None:
    missing = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME", "USER", "LOGNAME")
    end, told = finish_run(start_run(20, **dict.fromkeys(missing, "unset")))
    assert (end["state"], sentences(told)) == ("streaming", [])


@pytest.mark.slow
def test_a_run_is_unmonitored_if_the_runtime_directory_cannot_be_made() -> None:
    Path(os.environ["SENTINEL_RUNTIME"]).write_text("a file where the directory would be")
    end, told = finish_run(start_run(20))
    assert end["state"].startswith("unmonitored")
    (sentence,) = sentences(told)
    assert "set SENTINEL_RUNTIME to" in sentence
    assert sentence.endswith("training goes on unmonitored")


# Containers: mounts of their own.

KEPT = {Path(__file__).parents[1], Path(sys.prefix)}
"""Folders that the trial itself needs, in case they lie in the /tmp that is hidden."""


def in_processes_of_its_own(*mounts: str) -> tuple[str, ...]:
    """Return a command that runs its arguments as process 1 with these mounts, as root of a namespace."""
    unshare = ("unshare", "--mount", "--map-root-user", "sh", "-c", f'set -e; {"; ".join(mounts)}; exec "$@"', "sh")
    return (*unshare, "unshare", "--pid", "--fork")


def own_tmp(scratch: Path) -> list[str]:
    """Return mounts that hide /tmp behind an empty one."""
    scratch.mkdir()
    kept = [path for path in KEPT if path.is_relative_to("/tmp")]
    under = [(path, scratch / path.relative_to("/tmp")) for path in kept]
    return [
        f"mount -t tmpfs tmpfs {scratch}",
        *(f"mkdir -p {inside}; mount --bind {path} {inside}" for path, inside in under),
        f"mount --rbind {scratch} /tmp",
    ]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yield a directory that a container shares with the host; not in /tmp, of which the container has its own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="trial") as folder:
        yield Path(folder)


def kept_steps(path: Path) -> int:
    with History(path) as history:
        return len(history.series("loss").seqs)


@pytest.mark.slow
@pytest.mark.namespaces
def test_a_container_with_a_tmp_of_its_own_starts_its_own_daemon(shared: Path) -> None:
    mounts = own_tmp(shared / "tmp")
    run = start_run(50, mounts=mounts, SENTINEL_RUNTIME="unset", SENTINEL_STATE=str(shared / "state"))
    end, told = finish_run(run)
    assert (end["state"], sentences(told)) == ("streaming", [])
    (path,) = (shared / "state" / "runs").glob("*.sqlite")
    assert kept_steps(path) == 50


@pytest.mark.slow
@pytest.mark.namespaces
def test_a_container_that_does_not_see_the_named_socket_says_so(shared: Path) -> None:
    mounts = own_tmp(shared / "tmp")
    run = start_run(20, mounts=mounts, wait=1, SENTINEL_ADDRESS="unix:/tmp/sentinel-of-the-host/sentinel.sock")
    (sentence,) = sentences(finish_run(run)[1])
    assert sentence.startswith("sentinel: no daemon serves at /tmp/sentinel-of-the-host/sentinel.sock (No such file")
    assert sentence.endswith("training goes on, and it is looked for again")


@pytest.mark.slow
@pytest.mark.namespaces
def test_a_container_with_processes_of_its_own_is_served_through_a_directory_that_it_shares(shared: Path) -> None:
    command = [sys.executable, "-m", "sentinel", "daemon", "--stay", "--directory", str(shared / "d")]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.DEVNULL) as daemon:
        prefix = in_processes_of_its_own(*own_tmp(shared / "tmp"))
        end, told = finish_run(start_run(50, prefix=prefix, SENTINEL_ADDRESS=f"unix:{shared}/d/sentinel.sock"))
        daemon.terminate()
    assert end["state"] == "streaming"
    assert [s for s in sentences(told) if "no daemon serves" not in s] == []
    (path,) = paths.histories()
    assert kept_steps(path) == 50


@pytest.mark.slow
@pytest.mark.namespaces
def test_a_container_whose_first_process_trains() -> None:
    """The daemon is a child of process 1 there, whatever we do, and ends with it."""
    end, told = finish_run(start_run(50, prefix=in_processes_of_its_own("true")), first=True)
    assert (end["state"], sentences(told)) == ("streaming", [])
    daemon_gone()
    assert kept_steps(paths.histories()[0]) == 50


@pytest.mark.slow
@pytest.mark.namespaces
def test_a_home_that_cannot_be_written(shared: Path) -> None:
    (shared / "var").mkdir()
    mounts = ["mount -t tmpfs -o ro tmpfs /mnt", f"mount --bind {shared}/var /var/tmp"]
    run = start_run(50, mounts=mounts, HOME="/mnt", SENTINEL_STATE="unset", XDG_STATE_HOME="unset")
    end, told = finish_run(run)
    assert (end["state"], sentences(told)) == ("streaming", [])
    (path,) = (shared / "var").glob("sentinel-*/runs/*.sqlite")
    assert kept_steps(path) == 50


@pytest.mark.slow
@pytest.mark.namespaces
def test_no_place_for_a_history_is_said_and_the_run_is_watched() -> None:
    mounts = ["mount -t tmpfs -o ro tmpfs /mnt", "mount -t tmpfs -o ro tmpfs /var/tmp"]
    run = start_run(50, mounts=mounts, HOME="/mnt", SENTINEL_STATE="unset", XDG_STATE_HOME="unset")
    end, told = finish_run(run)
    assert end["state"] == "streaming"
    (sentence,) = sentences(told)
    assert sentence.startswith("sentinel: no place for the history: /mnt/.local/state/sentinel (Read-only")
    assert sentence.endswith("set SENTINEL_STATE to a local directory")


@pytest.mark.slow
@pytest.mark.namespaces
def test_a_machine_on_which_nothing_can_be_written(shared: Path) -> None:
    run = start_run(20, mounts=[f"mount -t tmpfs -o ro tmpfs {shared}"], SENTINEL_RUNTIME=f"{shared}/run")
    end, told = finish_run(run)
    assert end["state"].startswith("unmonitored")
    (sentence,) = sentences(told)
    assert "(Read-only file system); set SENTINEL_RUNTIME to a directory that you may write to" in sentence


# Users.


@pytest.fixture
def open_place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="us") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.second_user
def test_two_users_on_one_machine(open_place: Path) -> None:
    """Each user has a daemon and a history of their own, and gets no message about the other's."""
    (open_place / "site").mkdir()
    places_of_packages = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    base = open_place / "site" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    base.mkdir(parents=True)
    (base / "ours.pth").write_text(f"import site; {places_of_packages}\n")
    own = {"SENTINEL_RUNTIME": "unset", "SENTINEL_STATE": "unset", "XDG_STATE_HOME": "unset"}
    program = shutil.copy(PROGRAM, open_place)
    runs = []
    for uid, python in ((0, sys.executable), (NOBODY, other_python())):
        home = open_place / str(uid)
        home.mkdir()
        os.chown(home, uid, uid)
        environment = {**os.environ, "HOME": str(home), "PYTHONUSERBASE": str(open_place / "site")}
        for name in own:
            environment.pop(name, None)
        runs.append(
            subprocess.Popen(
                [python, program, "300"], env=environment, cwd="/", user=uid, group=uid, extra_groups=[],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    for uid, run in zip((0, NOBODY), runs, strict=True):
        end, told = finish_run(run)
        assert (end["uid"], end["state"], sentences(told)) == (uid, "streaming", [])
        (path,) = (open_place / str(uid) / ".local/state/sentinel/runs").glob("*.sqlite")
        assert path.stat().st_uid == uid
        assert kept_steps(path) == 300


@pytest.mark.second_user
def test_a_directory_that_another_user_made_first_is_not_used(open_place: Path) -> None:
    squatted = open_place / "sentinel-0"
    squatted.mkdir()
    os.chown(squatted, NOBODY, NOBODY)
    end, told = finish_run(start_run(20, SENTINEL_RUNTIME=str(squatted)))
    assert end["state"].startswith("unmonitored")
    (sentence,) = sentences(told)
    assert f"belongs to user {NOBODY}, not to you (0), and is not used; set SENTINEL_RUNTIME" in sentence
