"""`sentinel run` of jobs that break.

Each job is completed, or stopped with the right exit code and the reason, and nothing of it is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from sentinel import wire
from sentinel.cli import cli
from sentinel.cli.client import ask_daemons
from sentinel.daemon.ranks.exit_status import has_ended
from sentinel.errors import EXIT_LEFT_OUT, EXIT_STOPPED, EXIT_UNFINISHED
from sentinel.node import paths
from sentinel.store import History
from tests.waiting import until
from tests.zygote import DAEMON, RANKS, TORCHRUN, ForkedProcess, run_fork, start_zygote

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]  # two starts of torch, on a shared machine

PROGRAM = Path(__file__).parent.parent / "programs" / "breaking.py"
RUN = [sys.executable, "-m", "sentinel", "run", "--pause", "0.1"]
SOON = """
group: mine
rules:
  - {alert: Hang, scope: rank, expr: stalled_seconds > 3, severity: critical, actions: [evidence, stacks, restart]}
  - {override: SlowStep, disable: true}
"""
GONE_SECONDS = 60.0
LIMIT_SECONDS = 230.0


class Done:
    """A supervised job that is over: its exit status, its output, and what is left of it."""

    def __init__(self, root: Path, *words: str, ranks: int = 0, options: tuple[str, ...] = ("--restarts", "3")) -> None:
        folder, rules = root / "saved", root / "soon.yaml"
        folder.mkdir()
        rules.write_text(SOON)
        memory = _shared_memory()
        launch = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)] if ranks else [sys.executable]
        command = [*RUN, *options, "--", *launch, str(PROGRAM), str(folder), *words]
        environment = {**os.environ, "SENTINEL_RULES": str(rules), "COLUMNS": "80"}
        done = run_fork(command, DAEMON, env=environment, timeout=LIMIT_SECONDS)
        self.status, self.output, self.stderr = done.returncode, done.stdout, done.stderr
        last = folder / f"starts.{max(ranks - 1, 0)}"
        self.starts = [tuple(map(int, line.split())) for line in last.read_text().splitlines()]
        """The (attempt, step) of each start."""
        self.left = _left(str(folder), memory)

    @property
    def said(self) -> str:
        """What the supervisor said, on one line."""
        return " ".join(re.findall(r"^sentinel: (?!watching)(.*(?:\n  .*)*)", self.stderr, re.MULTILINE)).replace(
            "\n ", ""
        )

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the supervisor said with --json."""
        return [json.loads(line) for line in self.stderr.splitlines() if line.startswith('{"sentinel": ')]


def _end_statuses() -> list[int]:
    """Return how the command ended at each start, according to the run's history."""
    (path,) = paths.histories()
    with History(path) as history:
        return [event.detail["status"] for event in history.events("command ended")]


def _left(folder: str, memory: set[str]) -> list[str]:
    """Return the processes, sockets, directories and shared memory that the job left; its daemon ends after it."""
    deadline = time.monotonic() + GONE_SECONDS
    runtime = paths.runtime_root()
    while True:
        left = [str(path) for path in runtime.glob("*")] + _abandoned(_shared_memory() - memory)
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if folder in words or str(runtime) in words:
                left.append(words)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _shared_memory() -> set[str]:
    """Return the files of shared memory except Zenoh's, which belong to other tests: a job on one node has none."""
    return {name for name in os.listdir("/dev/shm") if not name.endswith(".zenoh")}


def _abandoned(names: set[str]) -> list[str]:
    """Return those that no living process maps: what other tests have made meanwhile is in use."""
    held: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            held.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return sorted(names - held)


@pytest.mark.slow
@pytest.mark.parametrize("shrinks", [False, True], ids=["plainly", "one node that might shrink"])
def test_a_rank_that_ends_itself_is_started_again_from_its_last_checkpoint(
    private_places: Path, monkeypatch: pytest.MonkeyPatch, shrinks: bool
) -> None:
    for name, number in (("SENTINEL_NODES", "1"), ("SENTINEL_NODE_RANK", "0")):
        monkeypatch.setenv(name, number)
    words, options = (("{nodes}", "{node_rank}"), ("--allow-shrink", "1")) if shrinks else ((), ())
    done = Done(private_places, "exit", *words, options=("--restarts", "3", *options))
    assert (done.status, done.output) == (0, "complete\n"), done.stderr
    assert done.starts == [(0, 0), (1, 200)]
    # Steps are reported twice a second: the last known one may be from before the restart or from after it.
    assert re.search(r"the job ended at step (1|2)\d\d: RankLost: .*\(exit status 3\)", done.said)
    assert "it starts again in 0.1 s (restart 1 of 3)" in done.said
    assert "the run is complete, after 1 restart(s)" in done.said
    assert len(re.findall("run 'breaking' ended after 400 steps|at step 399", done.said)) == 1
    assert done.left == []
    (path,) = paths.histories()
    with History(path) as history:
        assert [number for number, *_ in history.attempts()] == [0, 1]
        assert [case["alert"] for case in history.incidents()] == ["RankLost"]
    assert _end_statuses() == [3, 0]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "ranks"), [("kill", 4), ("oom", 2), ("hang", 2)])
def test_ranks_of_torchrun_are_started_again(private_places: Path, fault: str, ranks: int) -> None:
    done = Done(private_places, fault, ranks=ranks)
    assert (done.status, done.output) == (0, "complete\n" * ranks), done.stderr
    assert done.starts == [(0, 0), (1, 200)]
    words = {"kill": "RankLost: rank 1", "oom": "OutOfMemory", "hang": "Hang"}
    assert words[fault] in done.said
    assert done.left == []


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "ranks"), [("kill", 2), ("nan", 0)])
def test_a_script_that_resumes_is_started_again_unasked(private_places: Path, fault: str, ranks: int) -> None:
    """The script starts from a good snapshot on disk, even if a spent rollback budget has stopped the run."""
    done = Done(private_places, fault, "ours", ranks=ranks, options=())
    assert (done.status, done.output) == (0, "complete\n" * max(ranks, 1)), done.stderr
    assert [attempt for attempt, _ in done.starts] == [0, 1]
    # A snapshot on disk is a margin old and from before the first sign; on busy cores the newest may not be complete.
    assert 0 < done.starts[1][1] <= 230
    assert done.left == []


@pytest.mark.slow
def test_a_fixed_bad_batch_stops_the_job_from_before_its_first_sign(private_places: Path) -> None:
    """No rollback is armed, so the supervisor acts for alerts that ask for one."""
    done = Done(private_places, "nan", "always")
    assert done.status == EXIT_STOPPED, done.stderr
    assert done.starts == [(0, 0), (1, 200)]
    assert "from what it saved before step 230" in done.said
    assert "NonFiniteLoss came back at step 230" in done.said
    assert done.left == []


@pytest.mark.slow
def test_a_hung_job_without_a_restart_is_ended_with_its_evidence(private_places: Path) -> None:
    done = Done(private_places, "hang", options=("--restarts", "0", "--json"))
    assert done.status == EXIT_UNFINISHED, done.stderr
    fault, told, stopped, closing, end = (line for line in done.lines if line["sentinel"] != "notice")
    assert (fault["sentinel"], fault["kind"], fault["first_sign"]) == ("fault", "Hang", None)
    assert fault["step"] >= 200
    assert "in break_down" in fault["text"]
    assert (stopped["sentinel"], stopped["status"], stopped["why"]) == ("stopped", 85, "no restart is allowed")
    assert (closing["sentinel"], closing["incidents"]["critical"], closing["worst"][:4]) == ("closing", 1, "Hang")
    assert (end["sentinel"], end["status"], end["signal"], end["starts"]) == ("end", 85, None, 1)
    assert done.left == []
    (path,) = paths.histories()
    with History(path) as history:
        (case,) = (case for case in history.incidents() if case["alert"] == "Hang")
        assert (told["sentinel"], told["case"], told["run_id"]) == ("case", case["id"], history.run_id)
        (announced,) = history.events("end wanted")
    assert announced.detail["why"] == f"Hang: {case['diagnosis']['cause']}"
    said = " ".join(CliRunner().invoke(cli, ["last", "breaking"]).output.split())
    assert f", ended by sentinel run: {announced.detail['why']}: 1 critical" in said
    assert case["state"] == "firing", "nothing has resolved it"
    assert case["done"] == ["the job is ended by its supervisor"]
    assert "break_down" in case["stacks"]["0"]


@pytest.mark.slow
def test_a_script_that_does_not_say_that_it_resumes_is_watched_and_left_alone(private_places: Path) -> None:
    done = Done(private_places, "exit", options=())
    assert done.status == 3
    assert done.starts == [(0, 0)]
    ended = r"run 'breaking' ended after at least \d+ steps in .* s, exit status 3: "
    found = r"1 critical \(RankLost at step \d+\)\. Details: sentinel last breaking-\w+"
    assert re.fullmatch(ended + found, done.said), done.said
    assert "SENTINEL CRITICAL  RankLost" in done.stderr
    assert done.left == []
    assert _end_statuses() == [3]


@pytest.mark.slow
def test_a_hung_job_that_does_not_resume_is_left_with_a_line_on_what_ends_it(private_places: Path) -> None:
    folder, rules = private_places / "saved", private_places / "soon.yaml"
    folder.mkdir()
    rules.write_text(SOON)
    command = [*RUN, "--", sys.executable, str(PROGRAM), str(folder), "hang"]
    environment = {**os.environ, "SENTINEL_RULES": str(rules)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        left = next(line for line in process.stderr if "the job is left as it is" in line)
        os.kill(int(left.rpartition("kill ")[2]), signal.SIGKILL)
        said = process.stderr.read()
    assert process.returncode == -signal.SIGKILL
    assert re.match(r"\[sentinel\] Hang at step 2\d\d: the job is left as it is: `sentinel run` ends, ", left)
    assert "the job is left as it is" not in said
    assert re.search(r"run 'breaking' ended after at least \d+ steps in .*, killed by SIGKILL: \d critical ", said)


def test_the_last_json_line_says_how_a_command_ended() -> None:
    command = [*RUN, "--json", "--", "sh", "-c", "echo own words >&2; kill -KILL $$"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    words, line = done.stderr.splitlines()
    assert words == "own words"
    assert json.loads(line) == {
        "sentinel": "end", "status": 137, "signal": "SIGKILL", "starts": 1, "text": "killed by SIGKILL",
    }  # fmt: skip


def test_a_place_of_daemons_that_cannot_be_looked_at_leaves_the_command_alone(tmp_path: Path) -> None:
    """As a directory that another user has made and closed: root would see into it."""
    environment = {**os.environ, "SENTINEL_RUNTIME": str(tmp_path / ("d" * 300))}
    done = subprocess.run([*RUN, "--", "sh", "-c", "exit 3"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


WITHOUT_DESCRIPTORS = """
import os, resource, sys, time
supervisor, command = os.getppid(), os.getpid()
_, most = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, most))
if os.fork() == 0:  # a rank that outlives the command
    while os.getppid() == command: time.sleep(0.01)
    time.sleep(0.3)  # the supervisor has looked for what is left of the job
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (most, most))
    time.sleep(600)
time.sleep(1.2)  # it has looked for the daemon twice
os._exit(3)
"""


@pytest.mark.slow
def test_a_supervisor_without_a_descriptor_left_neither_ends_the_job_nor_leaves_a_part_of_it() -> None:
    command = [*RUN, "--", sys.executable, "-c", WITHOUT_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, ""), "and the last process that held the pipes has ended"


def test_a_command_that_cannot_be_started_again_may_go_on_elsewhere(tmp_path: Path, private_places: Path) -> None:
    command = tmp_path / "train"
    command.write_text('#!/bin/sh\nrm "$0"\nexit 3\n')
    command.chmod(0o755)
    paths.private_directory(paths.run_directory("gpt-1"))  # the command came so far that it attached
    environment = {**os.environ, "SENTINEL_RUN_ID": "gpt-1"}
    words = [*RUN, "--json", "--restarts", "3", "--", str(command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    lines = {line["sentinel"]: line for line in map(json.loads, done.stderr.splitlines())}
    assert lines["stopped"]["text"] == f"not started again: {command}: No such file or directory (exit code 85)"
    assert (done.returncode, lines["end"]["status"], lines["end"]["starts"]) == (EXIT_UNFINISHED, EXIT_UNFINISHED, 1)


def test_a_job_that_is_ended_in_the_pause_before_a_restart_was_started_once(private_places: Path) -> None:
    paths.private_directory(paths.run_directory("gpt-1"))
    environment = {**os.environ, "SENTINEL_RUN_ID": "gpt-1"}
    words = [*RUN, "--pause", "300", "--json", "--restarts", "3", "--", "sh", "-c", "exit 3"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = map(json.loads, process.stderr)
        next(line for line in lines if line["sentinel"] == "restart")
        process.terminate()
        (end,) = (line for line in lines if line["sentinel"] == "end")
    assert (end["signal"], end["starts"]) == ("SIGTERM", 1)


def test_a_command_has_its_exit_status_where_a_parent_ignores_the_end_of_children() -> None:
    words = [*RUN, "--", "sh", "-c", "exit 3"]
    ignore = f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv({words[0]!r}, {words!r})"
    assert subprocess.run([sys.executable, "-c", ignore], timeout=LIMIT_SECONDS).returncode == 3


@pytest.mark.parametrize("whole", [1, 2, 3])
def test_the_start_says_that_of_fewer_than_three_nodes_none_can_be_left_out(whole: int) -> None:
    place = {"SENTINEL_NODES": str(whole), "SENTINEL_NODE_RANK": "0"}
    command = [*RUN, "--allow-shrink", "1", "--", "sh", "-c", 'echo "$SENTINEL_NODES $@"', "{nodes}", "of {nodes}"]
    done = subprocess.run([*command, "{node_rank}"], capture_output=True, text=True, env={**os.environ, **place})
    assert done.stdout == f"{whole} of {whole} 0\n"
    assert ("of fewer than three nodes none can be left out" in " ".join(done.stderr.split())) == (whole < 3)


SLEEPING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print("ready", flush=True)
while True: time.sleep(0.1)  # a signal right before a sleep waits for its end
"""


def start_shrinkable(*launcher: str) -> subprocess.CompletedProcess[str]:
    """Start a command on node 1 of three; the last argument of the launcher is `310`."""
    environment = {**os.environ, "SENTINEL_NODES": "3", "SENTINEL_NODE_RANK": "1"}
    command = [*RUN, "--allow-shrink", "2", "--", *launcher, "{nodes}{node_rank}0"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


@pytest.mark.parametrize(
    ("ranks", "wanted", "seconds"),
    [pytest.param(4, 3, 200, marks=pytest.mark.slow), (6, 3, 1), (2, 1, 1)],
    ids=["of two nodes", "of all three", "of another command before the job"],
)
def test_a_node_whose_torchrun_meets_a_job_that_goes_on_without_it_is_ended_and_says_so(
    ranks: int, wanted: int, seconds: int
) -> None:
    """The ranks of that node wait in vain for others, long before one can attach."""
    elastic = ("TORCHELASTIC_RUN_ID=job", f"GROUP_WORLD_SIZE={wanted}", "LOCAL_WORLD_SIZE=2", f"WORLD_SIZE={ranks}")
    done = start_shrinkable("env", *elastic, "timeout", str(seconds), "sleep")
    if ranks == 4:
        assert done.returncode == EXIT_LEFT_OUT
        met = "torchrun met a job of 2 nodes at its address, where this start has 3: it goes on without this node"
        assert met in done.stderr
    else:
        assert done.returncode == 124, "the command's own"
        assert "no rank of this node came to train" in done.stderr
    assert "end it, and start it on all nodes" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 9), (signal.SIGUSR1, -signal.SIGUSR1)])
def test_a_job_that_is_told_to_end_is_not_started_again(number: int, status: int) -> None:
    command = [*RUN, "--restarts", "3", "--", sys.executable, "-c", SLEEPING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate() == ("", "")
    assert process.returncode == status


OBEDIENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(child.pid, flush=True)
signal.sigwait({signal.SIGTERM})  # and the exit status 0: it has saved, as it was asked to
"""


def test_a_command_that_ends_well_when_it_is_asked_to_end_leaves_no_process_behind() -> None:
    with subprocess.Popen([*RUN, "--", sys.executable, "-c", OBEDIENT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


LEFT_BEHIND = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if os.fork():
    os._exit(7)
signal.sigwait({signal.SIGTERM})  # from the supervisor, as the command has ended
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_command_has_ended_does_not_change_the_exit_status(number: int) -> None:
    command = [*RUN, "--", sys.executable, "-c", LEFT_BEHIND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 7


UNHURRIED = """
import signal, sys
requests = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, requests)  # one that comes between two waits is not lost
print("ready", flush=True)
signal.sigwait(requests)
print("asked", flush=True)
signal.sigwait(requests)  # hung in its last checkpoint
sys.exit(9)
"""


@pytest.mark.slow
def test_a_job_that_hangs_after_it_was_asked_to_end_was_ended_by_request(tmp_path: Path) -> None:
    """A Hang after the request used to be announced as the supervisor's own reason, so that the run had failed."""
    place = tmp_path / "daemon.sock"
    command = [*RUN, "--", sys.executable, "-c", UNHURRIED]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon, contextlib.ExitStack() as stack:
        daemon.bind(str(place))
        daemon.listen()
        given = {**os.environ, "SENTINEL_ADDRESS": f"unix:{place}"}
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, env=given, text=True))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        connection = stack.enter_context(daemon.accept()[0])
        said = supervise_messages(connection)
        assert next(said).ending == 0
        process.send_signal(signal.SIGTERM)
        announced = [next(message for message in said if message.ending)]
        assert process.stdout.readline() == "asked\n"
        hung = wire.Standing(run="r", run_id="r", attempt=0, resumes=True, ends=True, alert="Hang", cause="a sleep")
        connection.sendall(wire.frame(hung))
        connection.sendall(wire.frame(msgspec.structs.replace(hung, over=True)))
        announced += [message for message in said if message.ending]
    assert [(message.ending, message.why) for message in announced] == [(signal.SIGTERM, "")] * 2
    assert process.returncode == -signal.SIGTERM


LOST_NODE = wire.JobFault(kind="RankLost", words="node 1 (host1): its daemon is silent")
ORDERS = [
    (wire.Order(start=0, does="begin", nodes=(0, 2), fault=LOST_NODE), f"restart 1, after {LOST_NODE.words}"),
    (wire.Order(start=0, does="stop", nodes=(0, 2), why="left out by --allow-shrink: so said its daemon"), ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "decided"), ORDERS, ids=["by the coordinator", "by its daemon"])
def test_a_node_that_is_left_out_says_so_by_whose_decision_and_what_the_job_goes_on_with(
    tmp_path: Path, order: wire.Order, decided: str
) -> None:
    """The line was `the job was ended at step 7: ` without a reason, and `sentinel last` called the run failed."""
    place, goes_on = (
        tmp_path / "daemon.sock",
        "the job goes on with nodes 0, 2 (2 of 3), as the coordinator ordered for ",
    )
    why = order.why or f"left out by --allow-shrink: {goes_on}{decided}"
    command = [*RUN, "--allow-shrink", "2", "--", sys.executable, "-c", SLEEPING, "{nodes}{node_rank}"]
    given = {"SENTINEL_ADDRESS": f"unix:{place}", "SENTINEL_NODES": "3", "SENTINEL_NODE_RANK": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon, contextlib.ExitStack() as stack:
        daemon.bind(str(place))
        daemon.listen()
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = stack.enter_context(subprocess.Popen(command, env=os.environ | given, **pipes))
        connection = stack.enter_context(daemon.accept()[0])
        said = supervise_messages(connection)
        next(said)
        standing = wire.Standing(run="r", run_id="r", attempt=0, step=7, resumes=True, nodes=3)
        connection.sendall(wire.frame(standing) + wire.frame(order))
        announced = next(message for message in said if message.ending)
        connection.sendall(wire.frame(msgspec.structs.replace(standing, over=True)))
        spoken = process.communicate()[1]
    assert (process.returncode, announced.left_out, announced.why) == (EXIT_LEFT_OUT, True, why)
    assert f"sentinel: this node's ranks were ended at step 7: {why} (exit code 88)\n" in spoken
    assert "left out of the job: no step was judged" in spoken


def supervise_messages(connection: socket.socket) -> Iterator[wire.Supervise]:
    """Yield what the supervisor says on this connection, until it hangs up."""
    frames = wire.Frames()
    while chunk := connection.recv(65536):
        for body in frames.feed(chunk):
            message = wire.from_rank(body)
            assert isinstance(message, wire.Supervise)
            yield message


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_ranks_of_a_job_that_is_ended_from_outside_are_not_lost(private_places: Path, ranks: int) -> None:
    """A scheduler's SIGTERM was passed on, and people used to be paged for RankLost."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [*RUN, "--", sys.executable, *torchrun, str(PROGRAM.with_name("lasting.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: any(run["step"] > 20 for answer in ask_daemons("status") for run in answer["runs"]), "steps")
        (daemon,) = ask_daemons("status")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = " ".join(process.stderr.read().split())
    assert re.search(r"sentinel: SIGTERM was passed on: the job ended at step \d+", said)
    until(lambda: has_ended(daemon["pid"]), "the end of the daemon, which writes its history last")
    (path,) = paths.histories()
    with History(path) as history:
        assert not {"RankLost", "Hang"} & {case["alert"] for case in history.incidents()}
        assert [event.detail for event in history.events("end wanted")] == [{"signal": signal.SIGTERM}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "outcome", "alerts"),
    [
        (signal.SIGTERM, "ended by SIGTERM", []),
        (signal.SIGINT, "ended by KeyboardInterrupt", []),
        (signal.SIGKILL, "failed: rank 1 was ended by SIGKILL", ["RankLost"]),
    ],
)
def test_a_job_of_torchrun_alone_that_is_asked_to_end_has_lost_no_rank(
    private_places: Path, number: int, outcome: str, alerts: list[str]
) -> None:
    """A scheduler's time limit used to cause a page for RankLost.

    A single rank that is killed is lost, though torchrun then ends the other one by SIGTERM.
    """
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(PROGRAM.with_name("lasting.py"))]
    with ForkedProcess(command, zygote=start_zygote(RANKS), stdin=subprocess.PIPE, text=True) as torchrun:

        def list_ranks() -> list[dict[str, Any]]:
            runs = [run for answer in ask_daemons("status") for run in answer["runs"] if run["step"] > 20]
            return [rank for run in runs for rank in run["ranks"]]

        ranks = until(lambda: found if len(found := list_ranks()) == 2 else None, "steps of both ranks")
        (daemon,) = ask_daemons("status")
        os.kill(ranks[1]["pid"] if number == signal.SIGKILL else torchrun.pid, number)
        until(lambda: has_ended(daemon["pid"]), "the end of the daemon, which writes its history last")
    (row,) = json.loads(CliRunner().invoke(cli, ["last", "--json"]).output)
    (path,) = paths.histories()
    with History(path) as history:
        found = [case["alert"] for case in history.incidents()]
        assert [alert for alert in found if alert != "Straggler"] == alerts, "which a busy machine makes"
    assert row["outcome"] == outcome


def test_a_supervisor_that_is_killed_leaves_no_job_behind() -> None:
    command = [*RUN, "--", sys.executable, "-c", SLEEPING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == "", "whoever held the pipe has ended"


COUNTING = """
import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
print("ready", sys.stdin.readline().strip(), flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.3)  # a second one would be here by now
print("interrupts", len(got), flush=True)
sys.exit(5)
"""


def test_keys_at_a_terminal_reach_the_command_once_and_it_may_read_what_is_typed() -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [*RUN, "--restarts", "3", "--", sys.executable, "-c", COUNTING])
    try:
        os.write(terminal, b"typed\n")
        shown = b""
        while b"ready typed" not in shown:
            shown += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while not re.search(rb"interrupts \d", shown):
            shown += os.read(terminal, 1000)
        assert b"interrupts 1" in shown
        _, status = os.waitpid(process, 0)
        assert os.waitstatus_to_exitcode(status) == 5, "who pressed the key wants no restart"
    finally:
        os.close(terminal)
