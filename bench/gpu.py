"""Runs everything that only a GPU can show, in one command that can be stopped and continued.

    python -m bench.gpu --budget 570            on a machine with one NVIDIA GPU; repeat until nothing is left
    python -m bench.gpu --write                 put the results into docs/performance.md
    python -m bench.gpu --list                  list the checks, in their order, with what they take
    python -m bench.gpu --only kernel --again   run one of them once more
    python -m bench.gpu --device cpu            run all as toys: shows that this script works, but gives no figures

Each check is a process of its own with a time limit. It prints a line for each thing it looked at (bar, figure,
verdict), and keeps it in build/gpu.jsonl: a check that is done is not run again, a check that broke off is. The
cheapest checks that tell most come first. Exit status: 0 all is done and met, 1 a bar is not met, 2 something is left.

Only the dependencies and pytest must be installed, not Sentinel: it runs from the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import gpu_checks
from bench.pages import BUILD, DOCS, ROOT, make_table, write_section
from bench.places import make_places

MARKS = "<!-- bench/gpu.py writes this -->", "<!-- the GPU ends here -->"
VERDICTS = {True: "ok", False: "NOT MET", None: ""}
PATIENCE = 3.0
"""A check is ended after this many times its usual seconds, but never before a minute."""


class Check(NamedTuple):
    """A check, which is one process."""

    name: str
    seconds: float
    """Seconds that it takes on a large GPU, approximately."""
    what: str


CHECKS = (
    Check("machine", 20, "what it is; its copy bandwidth, which the bars are over"),
    Check("stream", 25, "losses, norms and allocator figures that arrive are those that the loop has"),
    Check("quiet", 60, "synchronisations, copies and kernels a step, with and without"),
    Check("exact", 40, "weights with and without, to the bit; fp16 that overflows, withheld steps counted"),
    Check("graphs", 50, "CUDA graphs: never broken, nothing of ours in them, said to be unseen"),
    Check("kernel", 30, "the Triton kernel against torch's operations"),
    Check("speed", 75, "its time over one read of the gradients"),
    Check("devices", 30, "NVML's figures, joined to the rank by UUID"),
    Check("oom", 30, "post mortem of allocations that fail, fragmentation"),
    Check("snapshots", 20, "sentinel memory on snapshots of a real allocator"),
    Check("provenance", 45, "who made the first NaN: the faults of the tests"),
    Check("rollback", 60, "restored to the bit; what a snapshot costs and takes"),
    Check("compiled", 60, "torch.compile: no graph break and no graph more"),
    Check("nccl", 75, "DDP and FSDP2 on NCCL: its flight recorder, a rollback by the daemon, a rank that hangs"),
    Check("overhead", 260, "1-B-parameter transformer in bf16: default settings, and everything at every step"),
    Check("faults", 200, "the planted faults, with models and batches on the device, at default settings"),
    Check("plan", 90, "sentinel plan against max_memory_allocated"),
)  # fmt: skip
BY_NAME = {check.name: check for check in CHECKS}
RUN = (sys.executable, "-m", "bench.gpu", "--run")


def make_environment(places: Path, device: str) -> dict[str, str]:
    """Return a check's environment: own places, and a PYTHONPATH by which all that it starts imports this checkout."""
    own = make_places(places) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if device == "cpu":
        own |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    else:  # settings that give the same bits in every run
        own |= {"TRITON_INTERPRET": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "4"}
    return {**os.environ, **own}


def run(check: Check, device: str, limit: float, results: Path) -> bool:
    """Run a check, showing and keeping its lines as they come. Return whether it completed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="g") as places, open(results, "a") as kept:
        command = [*RUN, check.name, "--device", device]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(
            command, env=make_environment(Path(places), device), start_new_session=True, **pipes
        ) as process:
            overdue = threading.Timer(limit, _end, [process])
            overdue.start()
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
            reader.start()
            for found in _lines(process):
                _keep(kept, {"check": check.name, "device": device, **found})
            code = process.wait()
            late = not overdue.is_alive()
            overdue.cancel()
            _end(process)  # and the processes that it has left behind
            reader.join(5)
        seconds = round(time.monotonic() - begun, 1)
        if code:
            said = [line.strip() for line in errors if line.strip()]
            why = f"not over in {limit:.0f} s" if late else f"exit status {code}: {said[-1] if said else ''}"
            _keep(kept, {"check": check.name, "device": device, "what": "the check itself", "ok": False, "figure": why})
            (results.parent / f"gpu-{check.name}.err").write_text("".join(errors))
        else:
            _keep(kept, {"check": check.name, "device": device, "done": True, "seconds": seconds})
    return not code


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, 9)  # the check has a process group of its own
    except ProcessLookupError:
        pass


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def _keep(kept: Any, found: dict[str, Any]) -> None:
    if "figure" in found:  # the checkout's path is of no use to a reader
        found["figure"] = found["figure"].replace(f"{ROOT}/", "")
    kept.write(json.dumps(found) + "\n")
    kept.flush()
    print(describe_line(found), flush=True)


def describe_line(found: dict[str, Any]) -> str:
    """Return a kept entry as one line for a reader."""
    if found.get("done"):
        return f"{found['check']:<11} done in {found['seconds']:.0f} s"
    bar = f"   bar {found['bar']}" if found.get("bar") else ""
    verdict = VERDICTS[found.get("ok")]
    return f"{found['check']:<11} {found['what']:<56} {found['figure']}{bar}   {verdict}".rstrip()


def read_known(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the kept entries by check; of several runs of a check only the last's."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        one = json.loads(line)
        if any(last.get("done") or last["what"] == "the check itself" for last in found.get(one["check"], ())[-1:]):
            del found[one["check"]]
        found.setdefault(one["check"], []).append(one)
    return found


def is_done(lines: list[dict[str, Any]]) -> bool:
    return bool(lines) and bool(lines[-1].get("done"))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as a Markdown table, followed by the names of the checks that are not done."""
    rows = [
        (check.name, one["what"], one.get("bar", ""), one["figure"], VERDICTS[one.get("ok")])
        for check in CHECKS
        for one in found.get(check.name, ())
        if not one.get("done")
    ]
    left = [check.name for check in CHECKS if not is_done(found.get(check.name, []))]
    text = make_table(("check", "what", "bar", "figure", ""), rows)
    return f"{text}\n\nNot done: {', '.join(left)}." if left else text


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds; what does not fit is left [1200]")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--again", action="store_true", help="run what is done, too")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md, and run nothing")
    parser.add_argument("--results", type=Path, help="[build/gpu.jsonl, or build/gpu-cpu.jsonl]")
    parser.add_argument("--run", choices=list(BY_NAME), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.run:
        gpu_checks.run_check(options.run, options.device)
        return 0
    if options.list:
        print(*(f"{check.name:<11} {check.seconds:4.0f} s  {check.what}" for check in CHECKS), sep="\n")
        return 0
    results = options.results or BUILD / ("gpu.jsonl" if options.device == "cuda" else "gpu-cpu.jsonl")
    results.parent.mkdir(parents=True, exist_ok=True)
    if options.write:
        if options.device != "cuda":
            sys.exit("--write is for figures of a GPU")
        write_section(DOCS / "performance.md", MARKS, table(read_known(results)))
        return 0
    until = time.monotonic() + options.budget
    for check in (BY_NAME[name] for name in BY_NAME if name in options.only):
        left = until - time.monotonic()
        if is_done(read_known(results).get(check.name, [])) and not options.again:
            continue
        if check.seconds > left:
            print(f"{check.name:<11} left for the next time: it takes some {check.seconds:.0f} s")
            continue
        run(check, options.device, min(max(60.0, PATIENCE * check.seconds), left), results)
    found = {name: lines for name, lines in read_known(results).items() if name in options.only}
    bad = [one for lines in found.values() for one in lines if one.get("ok") is False]
    print(
        *(["", "not met:", *map(describe_line, bad)] if bad else ["", "every bar that was looked at is met"]), sep="\n"
    )
    return 1 if bad else 2 * any(not is_done(found.get(name, [])) for name in options.only)


if __name__ == "__main__":
    sys.exit(main())
