"""Checks NVML's figures: that a card's are read, and are joined to its rank by the card's UUID."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import sentinel
from bench.gpu_checks import Line, equal
from bench.gpu_checks.loops import Loop, toy
from sentinel.cli.client import ask_daemons
from sentinel.collect.gpus import Gpus

PATIENCE_SECONDS = 25.0


def check(device: str) -> Iterator[Line]:
    if device == "cuda":
        gpus = Gpus.open()
    else:
        from tests.collect.fake_nvml import FakeNvml

        gpus = Gpus.open(FakeNvml(1))
    try:
        loop = Loop(device, **toy(device), half=torch.bfloat16)
        loop.run(20)
        gpus.order()
        began = time.monotonic()
        readings, faults = gpus.collect(began + 5)
        yield Line("one read of all cards", f"{(time.monotonic() - began) * 1e3:.0f} ms", bool(readings), "5 s")
        yield Line("faults told", "; ".join(fault.text for fault in faults) or "none", not faults, "none")
        for reading in readings[:1]:
            said = ", ".join(f"{name.removeprefix('gpu_')} {value:g}" for name, value in sorted(reading.values.items()))
            yield Line(f"{len(reading.values)} figures", said, len(reading.values) >= 10, "10")
    finally:
        gpus.close()
    yield _doctor()
    if device == "cuda":
        yield from _check_join(loop)


def _doctor() -> Line:
    """Return a line with what `sentinel doctor` finds here; it must end within a minute."""
    command = [sys.executable, "-m", "sentinel", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return Line(
        "sentinel doctor", done.stdout if done.returncode > 1 else _list_findings(done.stdout), done.returncode < 2
    )


def _list_findings(text: str) -> str:
    findings = json.loads(text)
    findings = findings.get("findings", []) if isinstance(findings, dict) else findings
    return "; ".join(str(one.get("what", one))[:60] for one in findings) or "nothing"


def _check_join(loop: Loop) -> Iterator[Line]:
    """Check how a real daemon, started by `attach`, joins the card to the rank."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    with sentinel.attach(loop.model, loop.optimizer, run="gpu"):
        until, found = time.monotonic() + PATIENCE_SECONDS, {}
        while time.monotonic() < until and not (found and found.get("values")):
            loop.run(5)
            torch.cuda.synchronize()
            found = _device(ask_daemons("status"))
        yield equal("UUID of CUDA and of NVML", found.get("uuid", "").removeprefix("GPU-"), uuid)
        yield Line("joined to rank", str(found.get("ranks")), found.get("ranks") == [0], "[0]")
        known = found.get("values", {})
        used = next((value for name, value in known.items() if "memory_used" in name), 0.0)
        free, total = torch.cuda.mem_get_info()
        off = abs(used - (total - free)) / total
        yield Line("memory in use, NVML's beside CUDA's", f"{off:.1%} of the card apart", off < 0.05, "5%")
        yield Line("figures of the daemon", str(len(known)), len(known) >= 5, "5")
    os.environ.pop("SENTINEL_ADDRESS", None)


def _device(answers: list[Any]) -> dict[str, Any]:
    runs = [run for answer in answers for run in answer["runs"]]
    devices = [device for run in runs for device in run["gpus"]["devices"]]
    return devices[0] if devices else {}
