"""Times the statistics of all gradients against one read of them.

    python -m bench.onepass

CPU time of the loop's thread, median of 30 calls, for the gradients of the three loops of bench/overhead.py:

    kernel      norm, minimum, maximum, non-finite, smallest magnitude over 0, zeros, by the compiled kernel
    norm        torch._foreach_norm: one read of all gradients, and torch's work around it
    torch       norm, minimum, maximum, non-finite by torch's operations: what is used without the kernel
    clip        torch.nn.utils.clip_grad_norm_
"""

from __future__ import annotations

import time

import torch
from torch import nn

from bench.overhead import MODELS, Loop, least_of
from sentinel.hooks.measure import kernels
from sentinel.hooks.measure.statistics import TorchStatistics


def measure_by_torch(gradients: list[torch.Tensor]) -> None:
    found = TorchStatistics(gradients)
    found.norms, found.extremes, found.nonfinite  # noqa: B018 (each is computed when it is read)


def main() -> None:
    print(f"compiled kernel: {kernels.kernel_missing or 'there'}")
    for name in MODELS:
        loop = Loop(name)
        loop.step()
        parameters = list(loop.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        calls = {
            "kernel": lambda: kernels.measure_in_one_pass(gradients),  # noqa: B023
            "norm": lambda: torch._foreach_norm(gradients),  # noqa: B023
            "torch": lambda: measure_by_torch(gradients),  # noqa: B023
            "clip": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),  # noqa: B023
        }
        taken = {what: least_of(30, time.thread_time, call) * 1000 for what, call in calls.items()}
        print(f"{name:6}" + "".join(f"  {what} {milliseconds:7.3f} ms" for what, milliseconds in taken.items()))


if __name__ == "__main__":
    main()
