"""Compares the Triton kernel with torch's operations, in the types, shapes and values that gradients have."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu_checks import Line
from sentinel.hooks.measure import triton_kernel
from sentinel.hooks.measure.statistics import HIGH, LOW, NONFINITE, NORM, SMALLEST, ZEROS, TorchStatistics

TYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (
    1,
    2,
    3,
    31,
    1000,
    triton_kernel.CHUNK - 1,
    triton_kernel.CHUNK,
    triton_kernel.CHUNK + 1,
    3 * triton_kernel.CHUNK + 5,
)
NAMES = {NORM: "norm", LOW: "minimum", HIGH: "maximum", NONFINITE: "non-finite", SMALLEST: "smallest", ZEROS: "zeros"}
BAR = 1e-5
"""Largest relative error: float32 sums are added in another order. Minimum, maximum, smallest and counts are exact."""


def check(device: str) -> Iterator[Line]:
    torch.manual_seed(0)
    sizes = [*SIZES, 1 << 22, (1 << 24) + 77] if device == "cuda" else SIZES[3:7]
    for kind in TYPES:
        tensors = [torch.randn(size, device=device).to(kind) for size in sizes]
        yield _compare(f"{_short(kind)}: {len(tensors)} tensors", tensors)
        yield _compare(f"{_short(kind)}: with NaN, infinities, zeros", _break_tensors(tensors))
        yield _compare(
            f"{_short(kind)}: parts of a buffer, at odd addresses", [one[1:] for one in tensors if len(one) > 1]
        )
    odd = [
        torch.randn(4, 6, 5, device=device).permute(2, 0, 1),
        torch.randn(2, 8, 3, 3, device=device).to(memory_format=torch.channels_last),
    ]  # fmt: skip
    yield _compare("permuted, channels last", odd)
    mixed = [torch.randn(50, device=device).to(TYPES[place % 3]) for place in range(60)]
    yield _compare("types that alternate, scaled", mixed, torch.tensor(1024.0, device=device))
    empty = triton_kernel.measure_tensors([torch.ones(2, device=device), torch.empty(0, device=device)])
    found = [float(empty.column(statistic)[1]) for statistic in NAMES]
    yield Line("an empty one", f"{found}", found == [0.0, float("inf"), float("-inf"), 0.0, 0.0, 0.0])
    if device == "cuda":
        torch.cuda.empty_cache()
        large = torch.full(((1 << 31) + 9,), 0.5, dtype=torch.bfloat16, device=device)
        large[-1] = -2.0
        found = [float(triton_kernel.measure_tensors([large]).column(statistic)[0]) for statistic in (NORM, LOW, ZEROS)]
        expected = ((0.25 * (large.numel() - 1)) + 4.0) ** 0.5
        off = abs(found[0] / expected - 1)
        yield Line(
            "over 2^31 elements", f"norm {off:.1e} off, minimum {found[1]}", off < BAR and found[1:] == [-2.0, 0.0]
        )


def _break_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for place, tensor in enumerate(tensors):
        tensor = tensor.clone()
        tensor[:: 3 + place] = 0
        tensor[tensor.numel() // 2] = (torch.nan, torch.inf, -torch.inf, 0.0)[place % 4]
        if place % 5 == 4:
            tensor[-1] = torch.nan
        found.append(tensor)
    return found


def _compare(what: str, tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> Line:
    fast, slow = triton_kernel.measure_tensors(tensors, scale), TorchStatistics(tensors, scale)
    worst, where = 0.0, ""
    for statistic, name in NAMES.items():
        pairs = zip(fast.column(statistic).tolist(), slow.column(statistic).tolist(), strict=True)
        off = max(_find_distance(one, other) for one, other in pairs)
        off = off if statistic == NORM or scale is not None or off == 0.0 else float("inf")
        worst, where = max((worst, where), (off, name))
    return Line(what, f"{worst:.1e} off" + (f" ({where})" if worst else ""), worst <= BAR, f"{BAR:.0e}")


def _find_distance(one: float, other: float) -> float:
    if one == other or (one != one and other != other):
        return 0.0
    return abs(one - other) / max(abs(other), 1e-30)


def _short(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
