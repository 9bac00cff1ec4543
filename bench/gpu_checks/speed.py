"""Times the statistics on the device, relative to one read of the gradients at the card's copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu_checks import Line, at_most
from bench.gpu_checks.loops import Transformer
from bench.gpu_checks.machine import copy_bandwidth, time_call
from sentinel.hooks.measure import triton_kernel
from sentinel.hooks.measure.statistics import HIGH, NONFINITE, NORM, TorchStatistics

BAR = 1.5
BILLION = {"width": 2048, "layers": 18, "vocabulary": 32_000}
"""Options of a model with 1.04 billion parameters."""


def check(device: str) -> Iterator[Line]:
    bandwidth = copy_bandwidth(device)
    shapes = _shapes(device)
    for kind in (torch.bfloat16, torch.float32, torch.float16):
        gradients = [torch.randn(shape, device=device).to(kind) for shape in shapes]
        size = sum(gradient.nbytes for gradient in gradients)
        floor = size / bandwidth
        name = f"{str(kind).removeprefix('torch.')}, {len(gradients)} tensors, {size / 1e9:.1f} GB"
        yield Line(f"{name}: one read", f"{floor * 1e3:.3f} ms")
        whole = time_call(device, lambda tensors=gradients: triton_kernel.measure_tensors(tensors))
        yield at_most(f"{name}: Triton, all six", whole / floor, BAR, ".2f", device)
        for what, statistics in {"norm": (NORM,), "norm, extremes, non-finite": (NORM, HIGH, NONFINITE)}.items():
            yield Line(f"{name}: eager, {what}", f"{time_call(device, _eager(gradients, statistics)) / floor:.2f}")
        del gradients
    small = [torch.randn(32, 32, device=device) for _ in range(200 if device == "cuda" else 4)]
    yield Line(
        "200 small tensors: Triton", f"{time_call(device, lambda: triton_kernel.measure_tensors(small)) * 1e6:.0f} us"
    )
    yield Line("200 small tensors: eager", f"{time_call(device, _eager(small, (NORM, HIGH, NONFINITE))) * 1e6:.0f} us")


def _shapes(device: str) -> list[torch.Size]:
    if device == "cpu":
        return [torch.Size((20, 30)), torch.Size((7,))]
    with torch.device("meta"):
        return [parameter.shape for parameter in Transformer(**BILLION).parameters()]


def _eager(tensors: list[torch.Tensor], statistics: tuple[int, ...]) -> Callable[[], Any]:
    def measure() -> None:
        found = TorchStatistics(tensors)
        for statistic in statistics:
            found.column(statistic)

    return measure
