"""The demo of a job over several nodes, of which one has a fault: one page, and all nodes go back together."""

from __future__ import annotations

import contextlib
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil

from sentinel.demo import jobstory, network, shard
from sentinel.demo.course import POLL_SECONDS, Course, DemoFailed
from sentinel.demo.display import Display, Row
from sentinel.demo.inbox import Inbox
from sentinel.demo.jobrecord import CUT_SECONDS, HANG_SECONDS, KINDS, JobFault, JobRecord, find_failure, find_return
from sentinel.demo.outcome import DemoOutcome, describe_job
from sentinel.demo.pair import SCRIPTS
from sentinel.demo.story import State, loss
from sentinel.demo.trainee import Trainee, environment
from sentinel.errors import ConfigError
from sentinel.node import paths

BEGINS = 0.5
"""Share of the steps after which the fault begins."""
END_SECONDS = 30.0
"""Seconds for the daemons to end after their ranks: the coordinator waits for the others."""
SPARE_BATCHES = 3 * shard.BURST
STUCK_SECONDS = 5.0
"""Seconds without a step after which a node is shown as stuck."""
_NOTICES = ("[sentinel] ", "sentinel: watching")
_OURS = (*_NOTICES, "sentinel: ", "\u250f", "\u2503", "\u2517")
"""Beginnings of Sentinel's lines, among those of torchrun."""
RULES = f"""\
group: demo
rules:
  - override: Hang
    expr: stalled_seconds > {HANG_SECONDS:.0f}  # the stock rule waits for a minute at least
"""
SETTINGS = """\
[daemon]
http = 0

[grouping]
wait = "0s"

[[receivers]]
name = "pager"
type = "webhook"
url = "http://{inbox}/"
severities = ["critical"]

[[receivers]]
name = "terminal"
type = "terminal"
severities = ["critical"]
"""


class NodesDemo(Course):
    """Runs `sentinel run -- torchrun` on each node, with a fault on the last node."""

    stall_seconds = 300.0
    language = "bash"
    _places: Path
    """Folder of the sockets, which need a short path."""
    _inbox: Inbox

    def __init__(self, fault: JobFault, nodes: int, seed: int, steps: int, out: Path) -> None:
        """Prepare the demo. Raises ConfigError if the fault needs something that this machine lacks."""
        super().__init__(fault, seed, steps, out)
        self.kind, self._fault, self.nodes = KINDS[fault], fault, nodes
        self.first = round(steps * BEGINS)
        self.hindrance = network.find_hindrance()
        """Why the nodes have no networks of their own; empty if they have."""
        if fault == "cut" and self.hindrance:
            raise ConfigError(f"there is no link to cut without network namespaces: {self.hindrance}")
        if (address := paths.address()) is not None:
            raise ConfigError(f"the demo needs a daemon on each node, and one at {address} serves all: stop it first")
        self._network = network.find_loopback(nodes)
        self._cut_at, self._joined = 0.0, False
        self._heard = set[str]()
        """Lines that were shown already."""

    @property
    def introduction(self) -> str:
        words = jobstory.setting(self._fault, self.nodes, self.first, not self.hindrance)
        return words + (f" (No namespaces: {self.hindrance}.)" if self.hindrance else "")

    @property
    def code(self) -> list[str]:
        return [
            "# on each node",
            "export SENTINEL_CLUSTER=node0:9478 SENTINEL_CLUSTER_SECRET=...",
            f"sentinel run -- torchrun --nnodes={self.nodes} --nproc-per-node=1 ... nodes.py",
        ]

    def start(self) -> None:
        self._places = Path(self.endings.enter_context(tempfile.TemporaryDirectory(prefix="sentinel-demo-")))
        if not self.hindrance:
            self._network = self.endings.enter_context(network.open_namespaces(self.nodes))
        self._inbox = Inbox(self.out / "pages.jsonl")
        receive = [*self._network.inbox_prefix, sys.executable, "-m", "sentinel.demo.inbox", self._network.inbox]
        self.endings.callback(self._end_processes)
        receiver = subprocess.Popen([*receive, str(self.out / "pages.jsonl")], env=self._make_environment(self.nodes))
        self.endings.callback(receiver.wait)
        self.endings.callback(receiver.kill)
        (self.out / "rules.yaml").write_text(RULES)
        (self.out / "sentinel.toml").write_text(SETTINGS.format(inbox=self._network.inbox))
        shutil.rmtree(self.out / "saved", ignore_errors=True)
        (self.out / "saved").mkdir()
        shutil.copy(SCRIPTS / "nodes.py", self.out)  # outside Sentinel's package, as a user's script would be
        secret = secrets.token_hex(16)
        for node in range(self.nodes):
            shutil.rmtree(self.out / f"node-{node}", ignore_errors=True)
            (self.out / f"node-{node}").mkdir()
            changes = {"SENTINEL_CLUSTER": self._network.coordinator, "SENTINEL_CLUSTER_SECRET": secret}
            self.launch_command(f"node-{node}", self._make_command(node), self._make_environment(node) | changes)

    def _make_environment(self, node: int) -> dict[str, str]:
        return environment(
            SENTINEL_RUNTIME=str(self._places / f"node-{node}"), SENTINEL_STATE=str(self.out / f"node-{node}"),
            SENTINEL_CONFIG=str(self.out / "sentinel.toml"), SENTINEL_RULES=str(self.out / "rules.yaml"),
            SENTINEL_RUN="demo", SENTINEL_RUN_ID=self.run_id, GLOO_SOCKET_IFNAME=self._network.interface,
        )  # fmt: skip

    def _make_command(self, node: int) -> list[str]:
        bad = self._fault == "spike" and node == self.nodes - 1
        data = self.out / f"node-{node}" / "shard.bin"
        damage = shard.Damage(fault="spike", first=self.first, batches=shard.BURST) if bad else None
        shard.write_shard(
            data, batches=self.steps + SPARE_BATCHES, batch_rows=shard.SMALL_ROWS, row_bytes=shard.ROW_BYTES,
            seed=self.seed + node, damage=damage,
        )  # fmt: skip
        host, _, port = self._network.master.rpartition(":")
        torchrun = (
            f"-m torch.distributed.run --nnodes {self.nodes} --node-rank {node} --nproc-per-node 1"
            f" --rdzv-id {self.run_id} --master-addr {host} --master-port {port}"
        )
        script = [str(self.out / "nodes.py"), "--data", str(data), "--saved", str(self.out / "saved")]
        script += ["--seed", str(self.seed), "--steps", str(self.steps)]
        if self._fault in ("kill", "hang") and node == self.nodes - 1:
            script += ["--how", self._fault, "--breaks-at", str(self.first)]
        supervised = [sys.executable, "-m", "sentinel", "run", "--restarts", "2", "--pause", "1", "--"]
        # Without the second `--`, torchrun takes the script's `--log` for an abbreviation of its own options.
        return [*self._network.prefixes[node], *supervised, sys.executable, *torchrun.split(), "--", *script]

    def choose_line(self, number: int, line: str) -> str | None:
        """Return all lines of the node with the fault, and new notices of the others."""
        own = number == self.nodes - 1
        if not line.startswith(_OURS if own else _NOTICES) or (not own and line in self._heard):
            return None
        self._heard.add(line)
        return f"node {number}  {line}"

    def look(self, display: Display) -> None:
        """Show the receiver's new messages; cut the link, and restore it, when that is due."""
        for sent in self._inbox.take():
            is_page = sent in self._inbox.pages
            self.show(f"pager   {jobstory.describe_message(sent, is_page=is_page)}", display)
        if self._fault != "cut":
            return
        last, now = self.nodes - 1, time.time()
        if not self._cut_at and self.trainees[last].step >= self.first - 1:
            self._network.set_link(last, "down")
            self._cut_at = now
            self.show(f"switch  the link of node {last} is down", display)
        elif self._cut_at and not self._joined and now > self._cut_at + CUT_SECONDS:
            self._network.set_link(last, "up")
            self._joined = True
            self.show(f"switch  the link of node {last} is up again", display)

    def rows(self) -> tuple[Row, ...]:
        return tuple(
            Row(name, colour, trainee.curve, self._find_state(node, trainee), loss(trainee.curve))
            for node, (trainee, (name, colour)) in enumerate(
                zip(self.trainees, jobstory.name_columns(self.nodes), strict=True)
            )
        )

    def _find_state(self, node: int, trainee: Trainee) -> State:
        curve = trainee.curve
        if trainee.exit_code is not None or trainee.step == self.steps - 1:
            return "done"
        if not curve.steps:
            return "starting"
        if curve.rollbacks or len(curve.starts) > 1:
            if find_return(curve) is None:
                return "rolled back" if curve.rollbacks else "starting"
            return "recovered" if curve.rollbacks else "started again"
        if trainee.step < self.first - 1:
            return "training"
        if not self.kind.rolls_back:
            return "stuck" if time.time() - curve.times[-1] > STUCK_SECONDS else "training"
        return "bad batches" if node == self.nodes - 1 else "training"

    def conclude(self) -> DemoOutcome:
        deadline = time.monotonic() + END_SECONDS
        while self._list_daemons() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._inbox.take()
        job = JobRecord(
            fault=self._fault, seed=self.seed, steps=self.steps, first=self.first,
            curves=[trainee.curve for trainee in self.trainees], messages=self._inbox.messages,
            pages=self._inbox.pages, fault_time=self._find_fault_time(), apart=not self.hindrance,
            run_id=self.run_id, state=str(self.out / "node-0"), python=platform.python_version(),
            torch=version("torch"), seconds=time.monotonic() - self.began,
        )  # fmt: skip
        if reason := find_failure(job):
            raise DemoFailed(f"{reason}; {self.keep_logs()}")
        return describe_job(job)

    def _find_fault_time(self) -> float:
        """Return when the last node had done its last good step, in Unix seconds."""
        curve = self.trainees[-1].curve
        return self._cut_at or curve.times[curve.steps.index(self.first - 1)]

    def _list_daemons(self) -> list[Path]:
        return list(self._places.glob("node-*/*/daemon.json"))

    def _end_processes(self) -> None:
        """End all processes of the demo, including daemons: those with our folder in their environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SENTINEL_RUNTIME", "").startswith(f"{self._places}/"):
                    process.kill()
