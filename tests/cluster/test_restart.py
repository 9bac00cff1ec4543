"""A job over several nodes is ended and started again as a whole: real daemons, and real `sentinel run` of torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.cli import job_status
from sentinel.errors import EXIT_STOPPED, EXIT_UNFINISHED
from tests.cluster.job import RUN as JOB
from tests.cluster.job import SECRET, NodeDaemon, free_address, node_daemon
from tests.daemon.simulated import SimulatedRank
from tests.supervise.test_supervised import PROGRAM, RUN, SOON
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

MARK = "0123456789abcdef"
LOST = wire.JobFault(kind="RankLost", words="RankLost: rank 1 was killed", step=7)
LIMIT_SECONDS = 280.0


class NodeSupervisor(SimulatedRank):
    """The daemon's connection to a node's `sentinel run`, with the test in its place."""

    def __init__(self, daemon: NodeDaemon, mark: str = MARK) -> None:
        super().__init__(daemon.path)
        self.job = wire.JobReport(restarts=3)
        self.daemon, self.mark = daemon, mark
        self.report()

    def report(self, **changes: object) -> None:
        self.job = msgspec.structs.replace(self.job, **changes)
        self.say(wire.Supervise(mark=self.mark, job=self.job))

    def await_order(self, does: str) -> wire.Order:
        """Return the next order of this kind for the present start; skip repeated others."""
        while True:
            order = self.expect(wire.Order)
            if order.does == does and order.start == self.job.start:
                return order


@contextlib.contextmanager
def supervised_nodes(folder: Path, *secrets: str) -> Iterator[list[NodeSupervisor]]:
    """Run nodes whose daemons and supervisors know of each other."""
    address = free_address()
    with contextlib.ExitStack() as stack:
        daemons = [
            stack.enter_context(node_daemon(node, len(secrets), address, folder, secret=secret, supervisor=MARK))
            for node, secret in enumerate(secrets)
        ]
        yield [stack.enter_context(NodeSupervisor(daemon)) for daemon in daemons]


@pytest.mark.slow
def test_an_end_on_one_node_is_ordered_on_the_other_and_both_begin_after_the_same_fault(tmp_path: Path) -> None:
    with supervised_nodes(tmp_path, SECRET, SECRET) as (zero, one):
        one.report(fault=LOST)
        end = zero.await_order("end")
        assert "node 1 (host1): RankLost: rank 1 was killed" in (end.fault.words if end.fault else "")
        zero.report(fault=wire.JobFault(kind="", words="ended with the others", step=9), attempt=2)
        begun = [zero.await_order("begin"), one.await_order("begin")]
        assert begun[0] == begun[1]
        assert begun[0].attempt == 2
        assert begun[0].fault is not None
        assert (begun[0].fault.kind, begun[0].fault.step) == ("RankLost", 9)
        for supervisor in (zero, one):
            supervisor.report(start=1, fault=None)
        zero.report(fault=LOST)
        assert one.await_order("end").start == 1


@pytest.mark.slow
def test_a_node_that_cannot_be_reached_is_named_and_nothing_is_ordered(tmp_path: Path) -> None:
    with supervised_nodes(tmp_path, SECRET, "another secret, as long") as (zero, one):
        zero.report(fault=LOST)
        until(
            lambda: "missing: 1 node never heard" in zero.await_order("wait").why, "node 0 to lead, and to miss node 1"
        )
        one.report(fault=LOST)
        assert "the coordinator at 127.0.0.1" in one.await_order("wait").why


def test_nodes_that_do_not_meet_are_stopped_at_once(tmp_path: Path) -> None:
    with (
        node_daemon(0, 2, "", tmp_path, secret="", supervisor=MARK) as daemon,
        NodeSupervisor(daemon) as supervisor,
    ):
        supervisor.report(fault=LOST)
        assert "the nodes of this job do not meet" in supervisor.await_order("stop").why


@pytest.mark.slow
def test_a_node_that_comes_back_after_it_was_left_out_is_ended_and_counts_for_nothing(tmp_path: Path) -> None:
    with supervised_nodes(tmp_path, SECRET, SECRET, SECRET) as (zero, back, two):
        members = wire.Members(start=1, nodes=(0, 2), whole=3)
        for supervisor in (zero, two):
            supervisor.report(start=1, allow_shrink=2, members=members)
        out = back.await_order("stop")
        assert out.nodes == (0, 2)
        goes_on = "the job goes on with nodes 0, 2 (2 of 3), as the coordinator ordered for restart 1"
        assert out.why == f"left out by --allow-shrink: {goes_on}"
        job = until(lambda: (job := zero.daemon.job())["view"] == "coordinator" and job, "node 0 to lead")
        assert (job["expected"], job["left_out"]) == (2, [1])
        assert job["shrunk"].startswith("2 of 3 nodes: without node 1 (--allow-shrink); world size ")
        assert any(job["shrunk"] in line for line in job_status.lines(job))
        assert job_status.lines(back.daemon.job())[0] == f"  job       node 1, {out.why}"
        assert {node["node"] for node in job["nodes"]} <= {0, 2}
        assert back.daemon.job()["view"] == "left out"
        two.report(fault=LOST)
        back.report(fault=LOST)
        assert zero.await_order("end").why == "waits for node 0 (host0: its ranks have not ended)"


@pytest.mark.slow
def test_a_job_that_is_queued_again_under_its_run_id_begins_with_all_nodes_though_daemons_stayed(
    tmp_path: Path,
) -> None:
    whole = wire.Members(nodes=(0, 1, 2), whole=3)
    with supervised_nodes(tmp_path, SECRET, SECRET, SECRET) as supervisors, contextlib.ExitStack() as stack:
        zero, lost, two = supervisors
        for supervisor in (zero, two):
            supervisor.report(start=1, allow_shrink=2, members=wire.Members(start=1, nodes=(0, 2), whole=3))
        lost.await_order("stop")
        for supervisor in supervisors:
            supervisor.close()
            supervisor.daemon.rank.close()
        fresh = [NodeSupervisor(supervisor.daemon, "another mark") for supervisor in (lost, two, zero)]
        for supervisor in fresh:
            stack.enter_context(supervisor).report(allow_shrink=2, members=whole)
            identity = msgspec.structs.replace(supervisor.daemon.rank.identity, attempt=1, session="again")
            rank = stack.enter_context(SimulatedRank(supervisor.daemon.path))
            rank.say(wire.Hello(version="test", identity=identity, supervisor=supervisor.mark))
            rank.expect(wire.Welcome)
        until(lambda: zero.daemon.job()["view"] == "coordinator", "node 0 to lead")
        until(lambda: all(one.daemon.job()["view"] in ("coordinator", "joined") for one in fresh), "all nodes")
        assert [one.daemon.job()["left_out"] for one in fresh] == [[], [], []]
        fresh[0].report(fault=LOST)
        assert fresh[2].await_order("end").start == 0
        for supervisor in fresh:
            supervisor.say(wire.Query(what="status"))  # what was sent before is there with the answer
            supervisor.expect(wire.Answer)
            assert not [one for one in supervisor.arrived if isinstance(one, wire.Order) and one.nodes]


@pytest.mark.slow
def test_a_supervisor_that_was_started_again_alone_is_no_second_group_and_says_why(tmp_path: Path) -> None:
    with supervised_nodes(tmp_path, SECRET, SECRET) as (zero, again):
        begun = wire.Members(start=1, nodes=(0, 1), whole=2)
        zero.report(start=1, allow_shrink=1, members=begun)
        again.report(allow_shrink=1, members=wire.Members(nodes=(0, 1), whole=2))
        assert "start it again on all" in again.await_order("end").why
        again.report(fault=LOST)
        assert "start it again on all" in again.await_order("stop").why


class Job:
    """`sentinel run -- torchrun --nnodes 2` on two nodes, each with a runtime directory and a history of its own."""

    def __init__(self, root: Path, *words: str, options: tuple[str, ...] = ("--restarts", "3")) -> None:
        folder, rules = root / "saved", root / "soon.yaml"
        folder.mkdir()
        rules.write_text(SOON)
        master, meeting = free_address(), free_address()
        port = master.rpartition(":")[2]
        nodes = []
        for node in range(2):
            torchrun = (
                f"-m torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node 1 --rdzv-id job"
                f" --master-addr 127.0.0.1 --master-port {port}"
            )
            command = [*RUN, *options, "--", sys.executable, *torchrun.split(), str(PROGRAM), str(folder), *words]
            environment = {
                **os.environ,
                "SENTINEL_RULES": str(rules),
                "SENTINEL_RUNTIME": str(root / f"run{node}"),
                "SENTINEL_STATE": str(root / f"state{node}"),
                "SENTINEL_CLUSTER": meeting,
                "SENTINEL_CLUSTER_SECRET": SECRET,
            }
            nodes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        self.said = [
            " ".join(
                re.findall(r"^sentinel: (?!watching)(.*)", node.communicate(timeout=LIMIT_SECONDS)[1], re.MULTILINE)
            )
            for node in nodes
        ]
        self.statuses = [node.returncode for node in nodes]
        self.starts = [
            [tuple(map(int, line.split())) for line in (folder / f"starts.{rank}").read_text().splitlines()]
            for rank in range(2)
        ]
        """Attempt and step of each start, by rank."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"), [("kill", "node 1 .*: RankLost: rank 1 was ended by SIGKILL"), ("hang", "node . .*: Hang")]
)
def test_a_fault_on_one_node_begins_the_next_attempt_on_all(private_places: Path, fault: str, cause: str) -> None:
    job = Job(private_places, fault)
    assert job.statuses == [0, 0], job.said
    assert job.starts == [[(0, 0), (1, 200)]] * 2
    for said in job.said:
        assert re.search(f"all nodes have ended: {cause}", said)
        assert "it starts again in 0.1 s (restart 1 of 3)" in said
        assert "the run is complete, after 1 restart(s)" in said


PLAIN = """
import sys
import time
from pathlib import Path

import torch

import sentinel

net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
monitor = sentinel.attach(net, optimizer)
while not Path(sys.argv[1]).exists():
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
if sys.argv[2] == "raises":
    raise RuntimeError("boom")
monitor.detach()
sys.exit(3)
"""
"""A program that does not resume, and waits for no other rank."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "is ended", "fails after training"])
def test_a_rank_that_fails_ends_all_nodes_of_a_job_that_is_not_started_again(tmp_path: Path, how: str) -> None:
    """Node 1 has a real `sentinel run`, whose rank fails, or must be ended because that of node 0 failed."""
    address, program, end = free_address(), tmp_path / "plain.py", tmp_path / "end"
    program.write_text(PLAIN)
    environment = {
        **os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
        "SENTINEL_RUN_ID": JOB, "SENTINEL_RUNTIME": str(tmp_path / "run1"), "SENTINEL_STATE": str(tmp_path / "state1"),
        "SENTINEL_CLUSTER": address, "SENTINEL_CLUSTER_SECRET": SECRET,
    }  # fmt: skip
    command = [*RUN, "--", sys.executable, str(program), str(end), how]
    with (
        node_daemon(0, 2, address, tmp_path, secret=SECRET, supervisor=MARK) as daemon,
        NodeSupervisor(daemon) as zero,
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as one,
    ):
        try:
            until(lambda: daemon.states().get(1) == "alive", "the nodes to meet", LIMIT_SECONDS)
            if how == "is ended":
                zero.report(fault=LOST, restarts=0)
            else:
                end.touch()
            if how != "fails after training":
                order = zero.await_order("end" if how == "raises" else "begin")
                zero.report(fault=LOST, restarts=0)
                assert order.fault is not None
                assert order.fault.words.startswith("node 1 (" if how == "raises" else "node 0 (host0): RankLost")
            said = one.communicate(timeout=LIMIT_SECONDS)[1]
        finally:
            one.kill()
        assert how != "fails after training" or not zero.list_arrived(wire.Order)
    assert one.returncode == {"raises": 1, "is ended": EXIT_STOPPED, "fails after training": 3}[how], said
    assert how != "is ended" or "not started again: the script does not say that it resumes" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("restarts", "starts", "status", "why"),
    [
        ("0", [(0, 0)], EXIT_UNFINISHED, "no restart is allowed"),
        ("3", [(0, 0), (1, 200)], EXIT_STOPPED, "RankLost came back at step"),
    ],
)
def test_all_nodes_end_with_the_same_status(
    private_places: Path, restarts: str, starts: list[tuple[int, int]], status: int, why: str
) -> None:
    job = Job(private_places, "kill", "always", options=("--restarts", restarts))
    assert job.statuses == [status, status], job.said
    assert job.starts == [starts, starts]
    assert all(why in said for said in job.said)
