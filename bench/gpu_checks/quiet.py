"""Counts the waits, copies and kernels that Sentinel adds to a step on the device.

By torch's debug mode for operations that wait, and by the profiler's record of calls to the driver.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu_checks import Line
from bench.gpu_checks.loops import Loop, settle, toy
from bench.gpu_checks.watched import statistics_by, watched

STEPS, WARM = 32, 12
WAITS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
)  # fmt: skip
"""Full names of the driver's calls that wait; cudaMemcpyAsync and cudaEventQuery do not."""


def check(device: str) -> Iterator[Line]:
    loops: dict[str, Callable[[], Loop]] = {
        "bf16, clipped": functools.partial(Loop, device, **toy(device), half=torch.bfloat16, clip=1.0),
        "fp16, fused AdamW with a scaler": functools.partial(
            Loop, device, **toy(device), half=torch.float16, scale=1024.0,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
        ),
        "dropout, accumulated": functools.partial(Loop, device, **toy(device), dropout=0.1, accumulate=4),
    }  # fmt: skip
    for name, make in list(loops.items())[: len(loops) if device == "cuda" else 1]:
        steps = STEPS if device == "cuda" else 4
        bare = _count_calls(make, None, steps)
        for how in ("eager", "Triton") if name.startswith("bf16") and device == "cuda" else ("eager",):
            for every_step in (False, True):
                seen = _count_calls(make, how, steps, every_step=every_step)
                spacing = "all at every step" if every_step else "as installed"
                yield from _compare(f"{name}; {how}, {spacing}", bare, seen, steps)


def _compare(what: str, bare: Counter[str], seen: Counter[str], steps: int) -> Iterator[Line]:
    """Yield lines on what a watched loop does in addition to a bare one."""
    more = Counter({name: seen[name] - bare[name] for name in (*WAITS, "warned")})
    named = ", ".join(f"{name} {count:+d}" for name, count in more.items() if count)
    yield Line(f"{what}: waits in {steps} steps", named or "0", more.total() <= 0, "0")
    if bare["kernels"]:
        kernels, copies, asked, spent = (
            (seen[name] - bare[name]) / steps for name in ("kernels", "cudaMemcpyAsync", "copying", "device")
        )
        figure = f"{kernels:.1f} kernels, {copies:.1f} copies ({asked:.0f} us to ask for), {spent:.0f} us of the GPU"
        yield Line(f"{what}: added a step", f"{figure} over {bare['device'] / steps:.0f}")


def _count_calls(make: Callable[[], Loop], how: str | None, steps: int, *, every_step: bool = False) -> Counter[str]:
    """Count calls over some steps. `how`: the kernel that takes the statistics; None: the loop is bare."""
    loop = make()
    with contextlib.ExitStack() as stack:
        if how is not None:
            stack.enter_context(statistics_by(how))
            stack.enter_context(watched(loop, every_step=every_step))
        loop.run(WARM if loop.device == "cuda" else 1)
        settle(loop.device)
        found = _count_warnings(loop, steps)
        loop.run(-loop.steps % steps)  # to the same place in the schedule
        settle(loop.device)
        return found + profile_steps(loop, steps)


def _count_warnings(loop: Loop, steps: int) -> Counter[str]:
    """Count torch's operations that wait for the device."""
    if loop.device != "cuda":
        return Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loop.run(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(warned=sum("synchronizing" in str(one.message) for one in told))


def profile_steps(loop: Loop, steps: int) -> Counter[str]:
    """Count the driver's calls by name, the kernels, and the microseconds of the device and of issuing copies."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if loop.device == "cuda" else [])]
    with profile(activities=activities) as trace:
        loop.run(steps)
        settle(loop.device)  # one wait, with Sentinel and without
    assert trace.profiler is not None
    found: Counter[str] = Counter()
    for event in trace.profiler.kineto_results.events():
        if event.is_user_annotation():  # a span that the optimizer marks, with kernels and gaps in it
            continue
        name, spent = event.name(), event.duration_ns() // 1000
        if event.device_type() == DeviceType.CUDA:
            found["kernels"] += not name.startswith(("Memcpy", "Memset"))
            found["device"] += spent
        elif name.startswith("cu"):
            found[name] += 1
            found["copying"] += spent if name == "cudaMemcpyAsync" else 0
    return found
