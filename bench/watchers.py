"""Compares the cost of every statistic at every step with what other tools cost for less.

    python -m venv peers && peers/bin/pip install -r bench/watchers.txt -e '.[torch]'
    peers/bin/python -m bench.watchers [--rounds 6] [--loop small gpt wide] [--variant ...] [--write]

(smdebug requires an older protobuf than wandb: install it with --no-deps.) The loops are those of bench/overhead.py.
Each variant is a process of its own with the same loop; all processes of a loop live at once, and in each round every
one of them runs a block of two seconds, alone, in random order.

    added       CPU per step, of the process and all that it started, over the bare loop's in the same round: mean of
                the paired ratios minus 1, with the 95 % interval of 2,000 bootstrap samples
    accounted   CPU that is known not to be the loop's own: of the calls in the loop, of other threads, and of other
                processes, over that of a bare step. What a peer does inside functions that it has replaced is not
                included: "at least". Small differences are judged by this: two identical loops differ by some per
                cent in `added`
    wall        wall time per step over the bare loop's, as `added`

After each block come 0.3 s in which what was queued is sent and judged; their CPU is included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil

from bench.overhead import LOOPS, MODELS, interval
from bench.pages import BUILD, DOCS, ROOT, make_table, write_section
from bench.places import make_places
from bench.watched import VARIANTS, Watched

RESULTS = BUILD / "watchers.json"
MARKS = "<!-- bench/watchers.py writes this -->", "<!-- the watchers end here -->"
BLOCK_SECONDS = 2.0
SETTLE_SECONDS = 0.3
PARTS = ("calls", "threads", "processes")
"""The parts of the accounted CPU."""
SLOW_SECONDS = 10.0
"""A variant whose steps take at least this long runs two rounds only."""


def work(loop_name: str, variant: str, address: str) -> None:
    """Run one variant's process: answer each 'block' with a measured block, until 'end' comes."""
    with Client(address) as line:
        try:
            loop = Watched(loop_name)
            VARIANTS[variant][0](loop)
            loop.block(2)
        except Exception as error:
            line.send({"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"})
            return
        line.send({"pid": os.getpid(), "also": loop.also})
        while line.recv() == "block":
            line.send(measure_block(loop))
        loop.end()


def measure_block(loop: Watched) -> dict[str, float]:
    """Make steps for two seconds; return what they took, and the CPU of it that is known to be the watcher's."""
    own, threads = loop.own, time.process_time() - time.thread_time()
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < BLOCK_SECONDS:
        loop.block(1)
        steps += 1
    wall = time.perf_counter() - begin
    time.sleep(SETTLE_SECONDS)
    threads = time.process_time() - time.thread_time() - threads
    return {"steps": steps, "wall": wall / steps, "calls": loop.own - own, "threads": threads}


class Worker:
    """The parent's handle on one variant's process."""

    def __init__(self, loop: str, variant: str, places: str) -> None:
        self.variant = variant
        self._line: Connection | None = None
        address = f"{places}/{abs(hash(variant))}.sock"
        own = make_places(Path(places))
        own |= {"WANDB_DIR": places, "WANDB_MODE": "offline", "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        if variant == "smdebug":
            own["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
        command = [*_command(variant), "--work", loop, variant, address]
        with Listener(address) as listener, Path(places, "log").open("a") as log:
            self.process = subprocess.Popen(command, env={**os.environ, **own}, cwd=places, stdout=log, stderr=log)
            self._line = listener.accept()
        answer = self._line.recv()
        self.failed: str = answer.get("failed", "")
        self._pid, self._also = answer.get("pid", 0), answer.get("also", [])

    def block(self) -> dict[str, float]:
        """Run a block; return seconds per step: wall time, all CPU, and the accounted parts of it."""
        assert self._line is not None
        before = self._cpu()
        self._line.send("block")
        found: dict[str, float] = self._line.recv()
        after = self._cpu()
        used = {pid: after[pid] - before.get(pid, 0.0) for pid in after}
        others = sum(seconds for pid, seconds in used.items() if pid != self._pid)
        steps = found["steps"]
        parts = {"calls": found["calls"], "threads": found["threads"], "processes": others, "cpu": sum(used.values())}
        return {"wall": found["wall"], **{part: seconds / steps for part, seconds in parts.items()}}

    def _cpu(self) -> dict[int, float]:
        """Return CPU seconds by pid, with nanoseconds, from Linux's clocks of other processes (clock_getcpuclockid)."""
        found = {}
        for pid in [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(True)), *self._also]:
            with contextlib.suppress(OSError):
                found[pid] = time.clock_gettime(~pid << 3 | 2)
        return found

    def end(self) -> None:
        """Ask the process to end, and kill it if it has not after a minute."""
        if self._line is not None and not self.failed:
            self._line.send("end")
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _command(variant: str) -> list[str]:
    if variant != "traceml-ai":
        return [sys.executable, "-W", "ignore", __file__]
    return [str(Path(sys.executable).with_name("traceml")), "run", __file__, "--args"]


def compare_variants(loop: str, variants: list[str], rounds: int) -> dict[str, Any]:
    """Run all variants of one loop in rounds; return what `table` reads, by variant."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as places:
        workers: list[Worker] = []
        try:
            for variant in variants:
                workers.append(Worker(loop, variant, places))
            found |= {worker.variant: {"failed": worker.failed} for worker in workers if worker.failed}
            going = [worker for worker in workers if not worker.failed]
            blocks: dict[str, list[dict[str, float]]] = {worker.variant: [] for worker in going}
            for number in range(rounds):
                due = [w for w in going if number < 2 or blocks[w.variant][0]["wall"] < SLOW_SECONDS]
                for worker in random.sample(due, len(due)):
                    blocks[worker.variant].append(worker.block())
        finally:
            for worker in workers:
                worker.end()
    return found | {variant: compare_with_bare(of, blocks["bare"]) for variant, of in blocks.items()}


def compare_with_bare(blocks: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    """Return the results of a variant, with paired ratios over the rounds in which it ran."""
    step = statistics.median(block["cpu"] for block in plain)
    return {
        "rounds": len(blocks),
        "wall_seconds": statistics.median(block["wall"] for block in blocks),
        "added": [x - 1 for x in interval([b["cpu"] / p["cpu"] for b, p in zip(blocks, plain, strict=False)])],
        "accounted": {part: statistics.fmean(block[part] for block in blocks) / step for part in PARTS},
        "wall": interval([b["wall"] / p["wall"] for b, p in zip(blocks, plain, strict=False)]),
        "load": os.getloadavg()[0],
    }


PARTLY = {"traceml-ai", "cockpit", "smdebug"}
"""Variants of which only threads and processes are accounted."""


HEAD = ("variant", "calls", "threads", "processes", "accounted", "added CPU [95 %]", "gives")


def table(loop: str, results: dict[str, Any]) -> str:
    """Return the results of one loop as Markdown."""
    bare, loads = results["bare"], [of["load"] for of in results.values() if "load" in of]
    said = f"**{loop}**: {LOOPS[loop]}. A bare step took {bare['wall_seconds'] * 1000:.3g} ms; "
    said += f"{bare['rounds']} rounds; load average of the machine {min(loads):.0f} to {max(loads):.0f}."
    rows = [_cells(name, results[name]) for name in VARIANTS if name in results and name != "bare"]
    return f"{said}\n\n{make_table(HEAD, rows)}"


def _cells(name: str, result: dict[str, Any]) -> list[str]:
    gives = VARIANTS[name][2]
    if "failed" in result:
        return [name, "fails", *[""] * 4, result["failed"]]
    mean, low, high = result["added"]
    parts = [max(result["accounted"][part], 0.0) for part in PARTS]
    if name in PARTLY:
        parts[0] = 0.0
    digits = 0 if mean > 1 else 1
    shares = [f"{part:.{digits}%}" for part in parts]
    total = f"**{sum(parts):.{digits}%}**"
    if name in PARTLY:
        shares[0], total = "not known", f"at least {sum(parts):.{digits}%}"
    return [name, *shares, total, f"{mean:.{digits}%} [{low:.{digits}%}, {high:.{digits}%}]", gives]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--loop", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variant", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    missing = [name for name in options.variant if (of := VARIANTS[name][1]) and not importlib.util.find_spec(of)]
    print("".join(f"not installed: {name}\n" for name in missing), end="")
    variants = [name for name in dict.fromkeys(["bare", *options.variant]) if name not in missing]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for loop in options.loop:
        results[loop] = compare_variants(loop, variants, options.rounds)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1))
        print(table(loop, results[loop]), flush=True)
    if options.write:
        tables = "\n\n".join(table(loop, results[loop]) for loop in MODELS if loop in results)
        write_section(DOCS / "performance.md", MARKS, tables)


if __name__ == "__main__":
    main()
