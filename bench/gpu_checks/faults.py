"""Trains the faults of tests/faults, and their healthy twins, on the device at default settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

from bench.gpu_checks import Line
from tests.faults.fault import Fault
from tests.faults.train import faults
from tests.faults.verdict import Verdict, verdicts

FAMILIES = "stability", "precision", "bugs", "throughput", "memory"
"""The families to train. The others simulate drivers, or need two devices, for jobs of two ranks."""
LEFT_OUT = "B4", "B4 noise", "M2", "M3", "M4"
"""Faults with batches from forked workers, which cannot use CUDA, and faults with made-up allocator figures."""
TOYS = ("B5",)


def check(device: str) -> Iterator[Line]:
    chosen = [(family, fault) for family in FAMILIES for fault in faults(family) if is_chosen(fault, device)]
    found, silent, trained = 0, 0, 0
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        begun = {pool.submit(verdicts, family, 0, [fault.id], device=device): fault for family, fault in chosen}
        for future in as_completed(begun):
            line, verdict = judge(begun[future], future)
            yield line
            if verdict is not None:
                trained += 1
                found += verdict.delay is not None and verdict.delay <= verdict.allowed
                silent += not verdict.false_alarms
    yield Line("told in time", f"{found} of {trained}")
    yield Line("healthy twins that were silent", f"{silent} of {trained}")


def is_chosen(fault: Fault, device: str) -> bool:
    return fault.id not in LEFT_OUT and not fault.every_step and (device == "cuda" or fault.id in TOYS)


def judge(fault: Fault, future: Future[list[Verdict]]) -> tuple[Line, Verdict | None]:
    try:
        (verdict,) = future.result()
    except (AssertionError, subprocess.SubprocessError) as error:
        return Line(fault.id, f"not trained: {str(error)[-300:]}", False), None
    figure = "; ".join(verdict.notes)[:400] or f"{verdict.alert} after {verdict.delay} steps of {verdict.allowed}"
    return Line(fault.id, figure, verdict.good), verdict
