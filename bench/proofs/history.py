"""Checks that nothing is lost when a daemon is killed, or when its history cannot be written for a while.

    kill      watched training with an open incident, whose daemon is killed with -9 up to four times, and a
              receiver that refuses, cuts off and comes back: compared with the same training unwatched
    late kill the same, killed once in the run's last second or a little after it
    locked    another process has the history locked for a minute, as a tool that copies it does
    full      the disk is full for a minute: a tmpfs in a mount namespace of the daemon's own
    ended     locked, and the run ends meanwhile

In the last three, attempts, ranks, incidents and events must all be there afterwards, alerts must have come meanwhile,
no other run of that daemon may have waited, and status and the history itself must count the steps it lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from bench.places import make_places
from bench.proofs import _kills

KILLS, LAST = 100, 12
TRIALS = KILLS + LAST + 12
SAMPLE = (0, KILLS + LAST, KILLS + LAST + 1)
SETTINGS = """
[daemon]
http = "off"
[grouping]
wait = "0s"
interval = "0s"
repeat = "1h"
[[receivers]]
name = "ops"
type = "webhook"
url_env = "PROOF_OPS"
"""
SECONDS, SHORT_SECONDS = 60.0, 7.0
"""How long the history cannot be written. In the tests' trials it is still longer than SQLite waits for a lock."""
PATIENCE_SECONDS = 60.0
"""How long to wait for what should come at once: the machine may be busy."""
LOW, HIGH = 1.0, 1000.0
"""Losses without and with an alert."""
RULES = """
group: proof
rules:
  - alert: High
    expr: loss > 100
    severity: warning
    annotations: {summary: "loss is {loss:.0f}"}
"""


def run_trial(seed: int) -> dict[str, Any]:
    if seed < KILLS + LAST:
        return _kill(seed)
    with tempfile.TemporaryDirectory(prefix="h") as folder:
        for unshare in (["unshare", "-m"], ["unshare", "-Urm"]):
            if subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode == 0:
                command = [*unshare, sys.executable, "-m", "bench.proofs.history", str(seed), folder]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                found: dict[str, Any] = json.loads(done.stdout)
                return found
        return _try_unwritten(seed, Path(folder), own_disk=False)


def main() -> None:
    """Run one trial in a mount namespace of its own, in which a small disk can be mounted."""
    seed, folder = int(sys.argv[1]), sys.argv[2]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True)
    print(json.dumps(_try_unwritten(seed, Path(folder), own_disk=True)))


# A receiver that flaps.


@contextlib.contextmanager
def flapping(chance: random.Random) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Run a receiver; yield its URL, and the (alert, status) of each message that it took.

    It refuses a third of the messages and cuts off a third, but takes each message that follows one of those.
    """
    failed = False
    taken: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            nonlocal failed
            way = "takes" if failed else chance.choice(("takes", "refuses", "cuts off"))
            failed = way != "takes"
            if way == "cuts off":
                return
            if way == "takes":
                taken.append((body["alerts"][0]["labels"]["alertname"], body["status"]))
            self.send_response(200 if way == "takes" else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", taken
    finally:
        server.shutdown()
        server.server_close()


def _kill(seed: int) -> dict[str, Any]:
    last = seed >= KILLS
    with flapping(random.Random(seed)) as (url, taken), mock.patch.dict(os.environ, {"PROOF_OPS": url}):
        killed = _kills.run_killed(seed, 1 if last else _kills.KILLS_A_RUN, SETTINGS, last=last)
    taken = [one for one in taken if one[0] == "High"]
    counts = Counter(taken)
    repeated = sum(counts.values()) - len(counts)
    # On a busy machine a daemon may run so little in these 15 s that the alert is over when its first message is taken:
    # then one message says both.
    assert set(counts) <= {("High", "firing"), ("High", "resolved")}, taken
    assert taken[-1] == ("High", "resolved"), taken
    assert repeated <= killed, f"{taken}: a message is taken twice only where a kill came before it was marked"
    case = "late kill" if last else "kill"
    return {"case": case, "kills": killed, "repeated": repeated, "in one message": int(len(counts) == 1)}


# A history that cannot be written.


class _Daemon:
    """A real daemon that serves several runs."""

    def __init__(self, root: Path, *, own_disk: bool) -> None:
        from sentinel.node import paths

        (root / "rules.yaml").write_text(RULES)
        self.runs = root / "state" / "runs"
        self._own_disk = own_disk
        self.path = paths.socket_path(root / "run" / "proof")
        serve = [sys.executable, "-m", "sentinel", "daemon", "--directory", str(self.path.parent), "--stay"]
        serve += ["--rules", str(root / "rules.yaml")]
        self.process = subprocess.Popen(serve, cwd="/", stderr=subprocess.DEVNULL)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Fill the daemon's disk; if it has no disk of its own, forbid its files to grow instead."""
        if not self._own_disk:
            soft, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (1, hard))
            yield
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
            return
        ballast = self.runs / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass
        yield
        ballast.unlink()

    @contextlib.contextmanager
    def locked(self, run: str) -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(self.runs / f"{run}.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")


def _try_unwritten(seed: int, root: Path, *, own_disk: bool) -> dict[str, Any]:
    case = ("locked", "full", "ended")[(seed - KILLS - LAST) % 3]
    seconds = SHORT_SECONDS if seed in SAMPLE else SECONDS
    return {"case": case} | _hold_back(case, seconds, root, own_disk=own_disk)


def _hold_back(case: str, seconds: float, root: Path, *, own_disk: bool) -> dict[str, Any]:
    from sentinel import wire
    from sentinel.node.question import ask_daemon
    from tests.daemon.simulated import SimulatedRank

    with mock.patch.dict(os.environ, make_places(root)):
        daemon = _Daemon(root, own_disk=own_disk)
        try:
            _until(lambda: daemon.path.exists() and _answers(daemon.path), "the daemon")
            with contextlib.ExitStack() as held:
                first, second = (held.enter_context(SimulatedRank(daemon.path, n, 2, run_id="a")) for n in (0, 1))
                other = held.enter_context(SimulatedRank(daemon.path, run_id="b"))
                for rank in (first, other):
                    rank.hello()
                _until(lambda: _is_kept(daemon, "a") and _is_kept(daemon, "b"), "the histories")
                outage = held.enter_context(contextlib.ExitStack())
                outage.enter_context(daemon.full() if case == "full" else daemon.locked("a"))
                ranks = (first, second, other)
                second.hello()
                until, alerts, slowest = time.monotonic() + seconds, 0, 0.0
                seq = _train(ranks, 0, 40, LOW)
                while time.monotonic() < until:
                    began = time.monotonic()
                    seq = _train(ranks, seq, 10, HIGH)
                    first.say(wire.PhaseChanged(seq=seq, time=0.0, name=f"phase {seq}"))
                    _expect_alert(other)
                    slowest = max(slowest, time.monotonic() - began)
                    _expect_alert(first)
                    alerts += 1
                    seq = _train(ranks, seq, 30, LOW)
                    time.sleep(0.5)
                (run,) = (run for run in ask_daemon(daemon.path, "status")["runs"] if run["run_id"] == "a")
                assert "history is not written" in run["trouble"], run["trouble"]
                if case == "ended":
                    first.say(wire.Goodbye())
                    second.say(wire.Goodbye())
                outage.close()
                _until(lambda: not _status(daemon, "a")["trouble"], "the end of the trouble")
                dropped = _status(daemon, "a")["history_dropped"]
                for rank in (other,) if case == "ended" else ranks:
                    rank.say(wire.Goodbye())
            found = _await_end(daemon, "a")
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(PATIENCE_SECONDS) == 0
        finally:
            daemon.process.kill()
            daemon.process.wait()
    assert (found["attempts"], found["ranks"]) == (1, [0, 1]), found
    assert (found["incidents"], found["phases"], found["open"]) == (alerts, alerts, 0), (found, alerts)
    assert found["gaps"][-1]["dropped"] == dropped, (found, dropped)
    assert found["steps"] + dropped.get("steps", 0) == seq, (found, dropped, seq)
    return {"alerts": alerts, "seconds": seconds, "dropped": sum(dropped.values()), "slowest_ms": 1000 * slowest}


def _train(ranks: Sequence[Any], seq: int, steps: int, loss: float) -> int:
    for rank in ranks:
        rank.steps(seq, [loss] * steps)
    return seq + steps


def _expect_alert(rank: Any) -> None:
    from sentinel import wire

    while "resolved" in (text := rank.expect(wire.Notice).text) or "High" not in text or "over at" in text:
        pass


def _answers(path: Path) -> bool:
    from sentinel.errors import ConfigError
    from sentinel.node.question import ask_daemon

    try:
        ask_daemon(path, "status")
    except ConfigError:
        return False
    return True


def _status(daemon: _Daemon, run_id: str) -> dict[str, Any]:
    from sentinel.node.question import ask_daemon

    (run,) = (run for run in ask_daemon(daemon.path, "status")["runs"] if run["run_id"] == run_id)
    assert isinstance(run, dict)
    return run


def _is_kept(daemon: _Daemon, run_id: str) -> bool:
    from sentinel.store import History

    with History(daemon.runs / f"{run_id}.sqlite") as history:
        return bool(history.attempts())


def _await_end(daemon: _Daemon, run_id: str) -> dict[str, Any]:
    """Wait until the history has the end of its attempt; return what it has."""
    from sentinel.store import History

    def read() -> dict[str, Any] | None:
        with History(daemon.runs / f"{run_id}.sqlite") as history:
            attempts, cases = history.attempts(), history.incidents()
            if attempts[-1][2] is None or not history.events("history gap"):
                return None
            return {
                "attempts": len(attempts),
                "ranks": sorted(history.ranks(0)),
                "incidents": sum(case["alert"] == "High" for case in cases),
                "open": sum(case["alert"] == "High" and case["state"] == "firing" for case in cases),
                "phases": len(history.events("phase")),
                "gaps": [event.detail for event in history.events("history gap")],
                "steps": len(history.series("loss").seqs),
            }

    found = _until(read, "the end of the attempt in the history")
    assert isinstance(found, dict)
    return found


def _until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := found()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
    return answer


if __name__ == "__main__":
    main()
