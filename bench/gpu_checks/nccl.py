"""Checks one rank under torchrun on NCCL, with DDP and FSDP2: flight recorder, rollback by the daemon, a hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.gpu_checks import Line
from tests.hang.jobs import RUN_ID, cause, wait_for_incident
from tests.hang.processes import SOON

PROGRAM = "bench.gpu_checks.one_rank"


def check(device: str) -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        rules = Path(folder) / "soon.yaml"
        rules.write_text(SOON)
        for way in ("fsdp", "ddp") if device == "cuda" else ("ddp",):
            with _job(device, way, rules) as (found, errors):
                yield from _check_record(way, found, errors)
                if way == "ddp" and found:
                    yield _hang()


def _check_record(way: str, found: dict[str, Any], errors: str) -> Iterator[Line]:
    if not found:
        yield Line(f"{way}: a run", _first_error(errors), False)
        return
    issued = max((number for number, _ in found["groups"].values()), default=0)
    said = f"{issued} collectives: {', '.join(found['operations']) or 'none'}"
    # On a mesh of one rank FSDP issues no collective.
    yield Line(f"{way}: flight recorder", said, issued > 0 if way == "ddp" else None, "some" if way == "ddp" else "")
    yield Line(f"{way}: members of the groups", str([ranks for _, ranks in found["groups"].values()]))
    yield Line(f"{way}: time-out of the process group", f"{found['timeout']:g} s", found["timeout"] > 0)
    back = [to for to, _ in found["rolled back"] if to < found["broken"]]
    whole = bool(back) and found["loss"] < float("inf")
    said = f"broken at step {found['broken']}, back at {back}, loss then {found['loss']:.3f}"
    yield Line(f"{way}: rolled back by the daemon", said, whole, "before it broke")
    yield Line(f"{way}: state", found["state"], found["state"] == "streaming", "streaming")


def _hang() -> Line:
    """Check that the hang is reported with its function.

    A process that waits for CUDA spins: alone, it may look as if it computed, and then counts as hung only later.
    """
    what = "a rank that waits for its device"
    try:
        return Line(what, cause(wait_for_incident("Hang", "wait_for_the_device")), True, "its function is named")
    except AssertionError as error:
        return Line(what, f"not told in 30 s: {str(error)[-200:]}")


def _first_error(output: str) -> str:
    """Return the line that says why the rank died, which comes before torchrun's own, long report."""
    said = [
        line.strip() for line in output.splitlines() if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)
    ]
    return said[0] if said else output[-200:] or "nothing was said"


@contextlib.contextmanager
def _job(device: str, way: str, rules: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Run the job until the block ends; yields what the rank found, and all its output until then."""
    environment = {**os.environ, "SENTINEL_RUN_ID": RUN_ID, "SENTINEL_RULES": str(rules)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*torchrun, "-m", PROGRAM, device, way], env=environment, cwd="/", **pipes) as process:
        try:
            assert process.stdout is not None
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line)
                if line.startswith("{"):
                    break
            found = json.loads(seen[-1]) if seen and seen[-1].startswith("{") else {}
            yield found, "".join(seen)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()  # ranks are sessions of their own
            process.kill()
