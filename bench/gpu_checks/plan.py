"""`sentinel plan` against the allocator's peak of real steps: the configurations of bench/plan_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator

import plan_gpu

from gpu_checks import Line


def check(device: str) -> Iterator[Line]:
    for name, build, optimizer, checkpointed in plan_gpu.CONFIGURATIONS[: None if device == "cuda" else 1]:
        plan = plan_gpu.planned(build, optimizer, checkpointed)
        if device == "cpu":
            yield Line(name, f"planned {plan / 1e9:.2f} GB")
            continue
        real = plan_gpu.measured(build, optimizer, checkpointed)
        off = plan / real - 1
        figure = f"planned {plan / 1e9:.2f} GB, measured {real / 1e9:.2f} GB, {off:+.1%}"
        yield Line(name, figure, abs(off) <= plan_gpu.BAR, f"{plan_gpu.BAR:.0%}")
