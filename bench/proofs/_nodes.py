"""Runs torchrun on each node of a network, each with places of its own, and a receiver of the daemons' messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.places import find_daemon, make_places
from sentinel.demo.inbox import Inbox
from sentinel.demo.network import Network
from sentinel.errors import SentinelError
from sentinel.node.question import ask_daemon


class NodesJob:
    """A job over nodes, started when created and ended with `close`."""

    def __init__(
        self,
        root: Path,
        network: Network,
        program: Sequence[str],
        *,
        run_id: str,
        ranks_a_node: int,
        settings: str,
        environment: Mapping[str, str],
        launcher: Sequence[str] = (),
    ) -> None:
        """Start it. `program`: what torchrun starts, with arguments; `launcher`: words before `python -m torch...`."""
        self.root, self.node_count = root, len(network.prefixes)
        self.inbox = Inbox(root / "pages.jsonl")
        receive = [*network.inbox_prefix, sys.executable, "-m", "sentinel.demo.inbox", network.inbox]
        self._receiver = subprocess.Popen([*receive, str(root / "pages.jsonl")])
        host, _, port = network.master.rpartition(":")
        self.nodes, self.environments = list[subprocess.Popen[bytes]](), list[dict[str, str]]()
        for node, prefix in enumerate(network.prefixes):
            (root / f"node{node}").mkdir()
            places = make_places(root / f"node{node}", settings)
            self.environments.append({**os.environ, **places, "SENTINEL_RUN_ID": run_id, **environment})
            torchrun = (
                f"-m torch.distributed.run --nnodes {self.node_count} --node-rank {node}"
                f" --nproc-per-node {ranks_a_node} --rdzv-id {run_id} --master-addr {host} --master-port {port}"
            )
            with (root / f"said{node}").open("w") as said:
                command = [*prefix, *launcher, sys.executable, *torchrun.split(), *program]
                self.nodes.append(subprocess.Popen(command, env=self.environments[-1], stdout=said, stderr=said))

    def said(self, node: int) -> str:
        """Return what was printed on a node's terminal."""
        return (self.root / f"said{node}").read_text(errors="replace")

    def ask(self, node: int) -> dict[str, Any]:
        """Return the run's part of `sentinel status` on a node; empty if no daemon answers."""
        with contextlib.suppress(SentinelError, OSError):
            for socket in (self.root / f"node{node}" / "run").glob("*/sentinel.sock"):
                for run in ask_daemon(socket, "status")["runs"]:
                    found: dict[str, Any] = run
                    return found
        return {}

    def run_command(self, node: int, *words: str) -> Any:
        """Return what `sentinel ... --json` prints on a node."""
        command = [sys.executable, "-m", "sentinel", *words, "--json"]
        done = subprocess.run(command, env=self.environments[node], capture_output=True, text=True, timeout=120)
        assert done.stdout, f"`sentinel {' '.join(words)}` on node {node}: {done.stderr}"
        return json.loads(done.stdout)

    @property
    def has_met(self) -> bool:
        """Whether the daemons of all nodes have met: each has joined the coordinator."""
        views = [(self.ask(node).get("job") or {}).get("view", "") for node in range(self.node_count)]
        return sorted(views) == ["coordinator", *["joined"] * (self.node_count - 1)]

    @property
    def over(self) -> bool:
        """Whether the job has ended on all nodes."""
        return all(node.poll() is not None for node in self.nodes)

    def kill_daemon(self, node: int) -> bool:
        """Send SIGKILL to the daemon of a node; return whether there was one."""
        daemon = find_daemon(self.root / f"node{node}" / "run")
        return kill(daemon) if daemon is not None else False

    def close(self) -> None:
        """Kill all processes of the job that are left."""
        for process in [*self.nodes, self._receiver]:
            process.kill()
        for pid in list_processes(self.root):
            kill(pid)
        for process in [*self.nodes, self._receiver]:
            process.wait()


def kill(pid: int) -> bool:
    """Send SIGKILL to a process; return whether it existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def list_processes(root: Path) -> list[int]:
    """Return the pids of the processes whose places are in this folder."""
    found, mark = [], f"SENTINEL_RUNTIME={root}/".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
