"""Node daemons of one job on this machine, and simulated ranks that speak the wire protocol with them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sentinel import wire
from sentinel.node.question import ask_daemon
from tests.daemon.simulated import SimulatedRank, daemon_process

SECRET = "a secret of all nodes"
RUN = "job1"
HIGH, LOW = 101.0, 1.0


class NodeDaemon:
    """A daemon, and one rank of its node."""

    def __init__(
        self, path: Path, process: subprocess.Popen[bytes], node: int, nodes: int, supervisor: str, page: int
    ) -> None:
        self.path, self.process, self.node = path, process, node
        self.rank = SimulatedRank(path, node, nodes, run_id=RUN)
        self.rank.identity = msgspec.structs.replace(
            self.rank.identity, local_world_size=1, node=node, hostname=f"host{node}"
        )
        hello = wire.Hello(version="test", identity=self.rank.identity, supervisor=supervisor)
        socket.send_fds(self.rank.connection, [wire.frame(hello)], [page] if page >= 0 else [])
        self.notes = self.rank.expect(wire.Welcome).notes

    def run(self) -> dict[str, Any]:
        """Return the run as `sentinel status` shows it on this node."""
        run: dict[str, Any]
        (run,) = ask_daemon(self.path, "status")["runs"]
        return run

    def job(self) -> dict[str, Any]:
        """Return the job as `sentinel status` shows it on this node."""
        job: dict[str, Any] = self.run()["job"]
        return job

    def cases(self) -> list[dict[str, Any]]:
        """Return the daemon's own cases."""
        cases: list[dict[str, Any]] = ask_daemon(self.path, "incidents")
        return cases

    def judges(self) -> bool:
        """Return whether a step has closed; it waits a while for ranks of other nodes."""
        return "loss" in self.run()["values"]

    def states(self) -> dict[int, str]:
        """Return the state of each node, as this node knows it."""
        return {node["node"]: node["state"] for node in self.job()["nodes"]}


def free_address() -> str:
    """Return `127.0.0.1:PORT` with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def node_daemon(
    node: int,
    nodes: int,
    address: str,
    folder: Path,
    *options: str,
    secret: str = SECRET,
    supervisor: str = "",
    page: int = -1,
) -> Iterator[NodeDaemon]:
    """Run a node's daemon with a history of its own, killed at the end. `page`: descriptor of its rank's heartbeats."""
    environment = {
        "SENTINEL_STATE": str(folder / f"state{node}"),
        "SENTINEL_CLUSTER": address,
        "SENTINEL_CLUSTER_SECRET": secret,
    }
    with daemon_process(*options, run_id=f"{RUN}-{node}", **environment) as (path, process):
        daemon = NodeDaemon(path, process, node, nodes, supervisor, page)
        with daemon.rank:
            yield daemon
