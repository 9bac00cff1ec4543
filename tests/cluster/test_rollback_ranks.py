"""Real ranks of torchrun on two nodes, each with its own daemon, roll back to the same step together, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from sentinel.cluster.orders import NO_ORDERS
from sentinel.errors import ConfigError
from sentinel.node.question import ask_daemon
from tests.cluster.job import SECRET, free_address
from tests.programs import rolling
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

NODES = 2
LIMIT_SECONDS = 240.0


class Job:
    """torchrun on two nodes, each with a runtime directory and a history of its own."""

    def __init__(
        self,
        root: Path,
        *,
        way: str = "ddp",
        ranks: int = 1,
        meeting: str = "",
        secret: str = SECRET,
        settings: str = "",
        master: str = "",
        within: Sequence[Sequence[str]] = (),
        nodes: int = NODES,
        program: str = "rolling_nodes",
        text: str = rolling.RULES,
    ) -> None:
        """Start torchrun on all nodes.

        `ranks` is the number on each node. `meeting` and `master` are the addresses of the daemons' coordinator and of
        torch's store; without `meeting` the daemons find each other. `settings` is the text of the daemons' settings,
        `within` has words before each node's command, `program` is one of tests/programs, `way` its first argument, and
        `text` the rules.
        """
        self.root, self.world = root, nodes * ranks
        rules = root / "rules.yaml"
        rules.write_text(text)
        (root / "sentinel.toml").write_text(settings)
        host, _, port = (master or free_address()).rpartition(":")
        self.nodes = []
        for node in range(nodes):
            torchrun = (
                f"-m torch.distributed.run --nnodes {nodes} --node-rank {node} --nproc-per-node {ranks} --rdzv-id job"
                f" --master-addr {host} --master-port {port} -m tests.programs.{program}"
            )
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "SENTINEL_RULES": str(rules),
                "SENTINEL_RUNTIME": str(root / f"run{node}"), "SENTINEL_STATE": str(root / f"state{node}"),
                "SENTINEL_CLUSTER": meeting, "SENTINEL_CLUSTER_SECRET": secret,
                "SENTINEL_CONFIG": str(root / "sentinel.toml"),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            }  # fmt: skip
            with (root / f"said{node}").open("w") as said:
                command = [*(within[node] if within else ()), sys.executable, *torchrun.split(), way, str(root)]
                self.nodes.append(subprocess.Popen(command, env=environment, stderr=said))

    def status(self, node: int) -> dict[str, Any]:
        """Return the run as `sentinel status` shows it on a node; empty as long as nothing is watched."""
        for socket in (self.root / f"run{node}").glob("*/*.sock"):
            with contextlib.suppress(ConfigError):  # its daemon may be killed just now
                for run in ask_daemon(socket, "status")["runs"]:
                    found: dict[str, Any] = run
                    return found
        return {}

    def kill_daemon(self, node: int) -> None:
        """Kill the daemon of a node, if there is one now: the ranks start another one."""
        for socket in (self.root / f"run{node}").glob("*/*.sock"):
            with contextlib.suppress(ConfigError, psutil.NoSuchProcess):
                psutil.Process(ask_daemon(socket, "status")["pid"]).kill()

    def said(self, node: int) -> str:
        """Return the output on the terminal of a node."""
        return (self.root / f"said{node}").read_text()

    def judges(self) -> bool:
        """Whether each node judges steps."""
        return all("loss" in self.status(node).get("values", {}) for node in range(NODES))

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end, and return the result of each rank."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the assertion shows the output
            for node in self.nodes:
                node.wait(LIMIT_SECONDS)
        assert [node.poll() for node in self.nodes] == [0] * NODES, [self.said(node) for node in range(NODES)]
        return [json.loads((self.root / f"{rank}.json").read_text()) for rank in range(self.world)]

    def close(self) -> None:
        for node in self.nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(node.pid).children(recursive=True):
                    each.kill()  # ranks are sessions of their own
            node.kill()
            node.wait()


def broken_and_rolled_back(job: Job) -> tuple[int, int]:
    """Break the ranks once all are watched; return the step to which all went back, and the step at which."""
    try:
        until(lambda: "rollback is armed on all ranks" in job.said(0), "the nodes to meet", LIMIT_SECONDS)
        until(job.judges, "steps to be judged")
        (job.root / "break").touch()
        ranks = job.finish()
    finally:
        job.close()
    ((to, at),) = ranks[0]["rolled"]
    assert all(rank["rolled"] == [[to, at]] for rank in ranks)
    assert to < ranks[0]["broken"] < at
    assert all(rank["same"] for rank in ranks)
    return to, at


def test_a_fault_that_one_node_sees_rolls_back_the_ranks_of_all(private_places: Path) -> None:
    job = Job(private_places, ranks=2, meeting=free_address())
    to, at = broken_and_rolled_back(job)
    assert "rollback is armed once all nodes have met" in job.said(0)
    assert "Broken" not in job.said(0), "the alert of the other node"
    assert f"rolled back to step {to} at the exit of step {at}" in job.said(1)


def test_nodes_that_have_no_address_find_each_other_and_are_rolled_back_with_a_secret_of_their_own(
    private_places: Path,
) -> None:
    job = Job(private_places)
    broken_and_rolled_back(job)
    assert re.search(r"meet at 127\.0\.0\.1:\d+, found by the process group's store\n", job.said(0))


def test_nodes_whose_secret_came_through_the_store_share_what_they_see_and_order_nothing(private_places: Path) -> None:
    job = Job(private_places, secret="")
    try:
        until(lambda: f"rollback is not armed: {NO_ORDERS}" in job.said(0), "the line", LIMIT_SECONDS)
        for node in range(NODES):
            until(lambda node=node: _knows_all(job, node), f"node {node} to know all")
        assert f"they share what they see: {NO_ORDERS}" in job.said(0)
        (private_places / "break").touch()
        until(lambda: "Broken" in _list_alerts(job, 0), "node 0 to know the incident of node 1")
        until(lambda: "not rolled back: orders need TLS" in job.said(1), "the alert")
        shown = [job.status(node)["job"] for node in range(NODES)]
        (private_places / "stop").touch()
        ranks = job.finish()
    finally:
        job.close()
    assert [rank["rolled"] for rank in ranks] == [[], []]
    assert [one["no_orders"] for one in shown] == [NO_ORDERS] * NODES
    assert [one["view"] for one in shown] == ["coordinator", "joined"]


def _knows_all(job: Job, node: int) -> bool:
    known = job.status(node).get("job")
    return known is not None and [one["state"] for one in known["nodes"]] == ["alive"] * NODES


def _list_alerts(job: Job, node: int) -> list[str]:
    return [incident["alert"] for incident in job.status(node)["job"]["incidents"]]


def test_nodes_that_do_not_meet_are_not_rolled_back_and_say_so(private_places: Path) -> None:
    job = Job(private_places, settings="[cluster]\nenabled = false\n")
    try:
        until(lambda: "rollback is not armed: the nodes of this job do not meet" in job.said(0), "the line")
        until(job.judges, "steps to be judged")
        (private_places / "break").touch()
        until(lambda: "not rolled back: the nodes of this job do not meet" in job.said(1), "the alert", LIMIT_SECONDS)
        (private_places / "stop").touch()
        ranks = job.finish()
    finally:
        job.close()
    assert [rank["rolled"] for rank in ranks] == [[], []]


@pytest.mark.networks
def test_over_two_network_namespaces(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes share nothing but a bridge: no loopback, no abstract socket. Their daemons find each other."""
    with namespaces(NODES) as (names, addresses):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        job = Job(
            private_places,
            master=f"{addresses[0]}:29511",
            within=[("ip", "netns", "exec", name) for name in names],
        )
        broken_and_rolled_back(job)
        assert f"the nodes of this job meet at {addresses[0]}:" in job.said(0)


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[tuple[list[str], list[str]]]:
    """Make network namespaces joined by a bridge; yields their names, and their addresses there."""
    mark = secrets.token_hex(3)
    bridge, names = f"sb{mark}", [f"sentinel-{mark}-{n}" for n in range(count)]
    addresses = [f"10.213.77.{n + 1}" for n in range(count)]
    try:
        run_ip(f"link add {bridge} type bridge", f"link set {bridge} up")
        for n, (name, address) in enumerate(zip(names, addresses, strict=True)):
            run_ip(
                f"netns add {name}",
                f"link add sv{mark}{n} type veth peer name eth0 netns {name}",
                f"link set sv{mark}{n} master {bridge} up",
                f"-n {name} addr add {address}/24 dev eth0",
                f"-n {name} link set eth0 up",
                f"-n {name} link set lo up",
            )
        yield names, addresses
    finally:
        for words in [*(f"netns delete {name}" for name in names), f"link delete {bridge}"]:
            with contextlib.suppress(subprocess.CalledProcessError):
                run_ip(words)


def run_ip(*commands: str) -> None:
    """Run commands of iproute2."""
    for words in commands:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)
