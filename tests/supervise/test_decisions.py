"""What `sentinel run` makes of a daemon's reports and orders: whether it starts the command again, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from sentinel import wire
from sentinel.errors import EXIT_BY_RULE, EXIT_STOPPED, EXIT_UNFINISHED
from sentinel.node import paths
from sentinel.node.run_ids import shorten_id
from tests.supervise.test_supervised import RUN, supervise_messages

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SCRIPT = """
start=$(wc -l < starts)
echo "$SENTINEL_ATTEMPT,$SENTINEL_RESUME_BEFORE" >> starts
trap 'exit 7' TERM
until [ -e answered.$start ]; do sleep 0.02; done
[ "$1" != hangs -o $start -gt 0 ] || while :; do sleep 0.02; done
exit $(sed -n "$((start + 1))p" statuses)
"""
"""It ends with the status of its start, once the daemon has answered; with `hangs` the first start has to be ended."""


class Report(NamedTuple):
    """What the daemon says in one start of the command."""

    standing: wire.Standing
    order: wire.Order | None = None
    """Sent with it."""
    ended: wire.Order | None = None
    """Sent once the supervisor reports the fault that ended this start."""


class Ended(NamedTuple):
    """How it went."""

    status: int
    starts: list[str]
    """Of each start the attempt, and before which step it may resume."""
    lines: dict[str, list[dict[str, Any]]]
    """What was said, by event."""
    heard: list[wire.Supervise]
    """What the daemon heard."""


def stand(step: int, **more: Any) -> wire.Standing:
    return wire.Standing(run="gpt", run_id="gpt-1", attempt=0, step=step, **{"resumes": True, **more})


def answer(connection: socket.socket, reports: list[Report], place: Path, heard: list[wire.Supervise]) -> None:
    """Play the daemon, whose rank is gone before the command ends by itself, or is ended."""
    answered = set[int]()
    with contextlib.suppress(OSError):
        for message in supervise_messages(connection):
            heard.append(message)
            start, job = message.job.start, message.job
            report = reports[start]
            is_ended = report.standing.ends or report.order is not None
            standing = msgspec.structs.replace(report.standing, attempt=start, over=not is_ended)
            if start not in answered:
                answered.add(start)
                connection.sendall(wire.frame(standing) + (wire.frame(report.order) if report.order else b""))
                (place / f"answered.{start}").touch()
            if message.ending:
                connection.sendall(wire.frame(msgspec.structs.replace(standing, over=True, ends=False)))
            if job.fault is not None and report.ended is not None:
                connection.sendall(wire.frame(report.ended))


def supervise(
    place: Path,
    statuses: list[int],
    reports: list[Report],
    *options: str,
    hangs: bool = False,
    address: Path | None = None,
    **given: str,
) -> Ended:
    """Run a command that ends with these statuses, one for each start, and return how it went. `address`: where the
    daemon serves, unless the environment has it; `given`: more of the environment."""
    given = {"SENTINEL_ADDRESS": f"unix:{place / 'daemon'}"} if address is None else given
    (place / "starts").touch()
    (place / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    heard: list[wire.Supervise] = []
    command = [*RUN, "--json", *options, "--", "sh", "-c", SCRIPT, "sh", "hangs" if hangs else "ends"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        daemon.bind(str(address or place / "daemon"))
        daemon.listen()
        pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=place, env={**os.environ, **given}, **pipes)
        connection = daemon.accept()[0]
        thread = threading.Thread(target=answer, args=(connection, reports, place, heard))
        thread.start()
        said = process.communicate()[1]
        thread.join()
        connection.close()
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in (json.loads(line) for line in said.splitlines() if line.startswith('{"sentinel": ')):
        lines.setdefault(line["sentinel"], []).append(line)
    return Ended(process.returncode, (place / "starts").read_text().split(), lines, heard)


def texts(ended: Ended) -> Iterator[str]:
    return (line["text"] for lines in ended.lines.values() for line in lines)


def test_the_next_start_knows_before_which_step_saves_are_good(tmp_path: Path) -> None:
    harm = stand(50, alert="NonFiniteLoss", cause="a batch with infinite values", case="0.1", sign=40)
    ended = supervise(tmp_path, [1, 0], [Report(harm), Report(stand(90))])
    assert (ended.status, ended.starts) == (0, [",", "1,40"])
    assert [line["text"] for name in ("fault", "case", "restart", "complete") for line in ended.lines[name]] == [
        "the job ended at step 50: NonFiniteLoss: a batch with infinite values (exit status 1)",
        "the case: sentinel incidents show 0.1 --run gpt-1",
        "it starts again in 0.1 s (restart 1 of 3), from what it saved before step 40",
        "the run is complete, after 1 restart(s)",
    ]


@pytest.mark.parametrize("named", ["gpt/v1.2", "gpt-" + 60 * "1"], ids=["with other characters", "long"])
def test_a_run_is_started_again_whatever_its_id_is_made_from(tmp_path: Path, private_places: Path, named: str) -> None:
    """The run's daemon serves where `attach` has put it."""
    place = paths.private_directory(paths.run_directory(shorten_id(named)))
    reports = [Report(stand(50)), Report(stand(90))]
    ended = supervise(tmp_path, [1, 0], reports, address=place / paths.SOCKET, SENTINEL_RUN_ID=named)
    assert (ended.status, ended.starts) == (0, [",", "1,"])


def test_the_same_fault_at_the_same_step_is_not_met_a_third_time(tmp_path: Path) -> None:
    raised = stand(50, raised="ValueError: no such token", step_seconds=10.0)
    ended = supervise(tmp_path, [1, 1], [Report(raised), Report(raised)])
    assert (ended.status, ended.starts) == (EXIT_STOPPED, [",", "1,"])
    (stopped,) = ended.lines["stopped"]
    assert stopped["why"] == "ValueError came back at step 50: another start would meet it again"
    assert stopped["status"] == EXIT_STOPPED


def test_a_job_is_ended_once_the_evidence_of_its_hang_is_there(tmp_path: Path) -> None:
    hang = stand(50, alert="Hang", cause="rank 1 waits", ends=True)
    ended = supervise(tmp_path, [0, 0], [Report(hang), Report(stand(90))], hangs=True)
    assert (ended.status, ended.starts) == (0, [",", "1,"])
    (fault,) = ended.lines["fault"]
    assert fault["text"] == "the job was ended at step 50: Hang: rank 1 waits"
    (announced,) = [message for message in ended.heard if message.ending]
    assert announced.why == "Hang: rank 1 waits"


@pytest.mark.parametrize(
    ("standing", "options", "status", "said"),
    [
        (stand(7, by_rule=True, stopped="LossSpike, which --stop-on names"), (), EXIT_BY_RULE,
         f"not started again: stopped at step 7, by LossSpike, which --stop-on names (exit code {EXIT_BY_RULE})"),
        (stand(7), ("--restarts", "0"), EXIT_UNFINISHED,
         f"not started again: no restart is allowed (exit code {EXIT_UNFINISHED})"),
        (stand(7, resumes=False), (), 1, "exit status 1"),
        (stand(7, resumes=False, stopped="its rollbacks are used up"), (), EXIT_STOPPED, "exit status 86"),
    ],
    ids=["a rule", "no restart", "not resumable", "rollbacks used up"],
)  # fmt: skip
def test_what_is_not_started_again_ends_with_a_status_of_its_own(
    tmp_path: Path, standing: wire.Standing, options: tuple[str, ...], status: int, said: str
) -> None:
    ended = supervise(tmp_path, [1], [Report(standing)], *options)
    assert (ended.status, len(ended.starts)) == (status, 1)
    assert said in texts(ended)


FAULT = wire.JobFault(kind="RankLost", words="node 1 (host1): RankLost: rank 3 was ended by SIGKILL", step=50)


@pytest.mark.parametrize("hangs", [False, True], ids=["ended here", "ended elsewhere"])
def test_all_nodes_begin_again_by_one_order(tmp_path: Path, hangs: bool) -> None:
    begin = wire.Order(start=0, does="begin", attempt=4, fault=FAULT)
    end = wire.Order(start=0, does="end", fault=FAULT) if hangs else None
    ended = supervise(tmp_path, [1, 0], [Report(stand(50, nodes=2), end, begin), Report(stand(90))], hangs=hangs)
    assert (ended.status, ended.starts) == (0, [",", "5,"]), "one attempt more than any node had"
    (line,) = ended.lines["nodes"]
    assert line["text"] == f"all nodes have ended: {FAULT.words}"
    (fault,) = ended.lines["fault"]
    assert fault["text"] == f"the job {'was ended' if hangs else 'ended'} at step 50: " + (
        FAULT.words if hangs else "exit status 1"
    )


def test_no_node_begins_again_where_the_coordinator_stops_the_job(tmp_path: Path) -> None:
    stop = wire.Order(start=0, does="stop", why="node 2 (host2) was not heard for 60 s")
    ended = supervise(tmp_path, [1], [Report(stand(50, nodes=3), None, stop)])
    assert (ended.status, len(ended.starts)) == (EXIT_UNFINISHED, 1)
    (stopped,) = ended.lines["stopped"]
    assert stopped["why"] == stop.why
