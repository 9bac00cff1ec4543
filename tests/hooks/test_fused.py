"""The Triton kernel in Triton's interpreter, on the CPU, against torch's own operations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.hooks.measure import cpu_kernel
from sentinel.hooks.measure.statistics import Statistics, TorchStatistics
from tests.hooks.test_onepass import gradients, shown

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the interpreter computes with numpy, which tells of NaN


@pytest.fixture(scope="module")
def fused() -> ModuleType:
    pytest.importorskip("triton", reason="Triton is not installed")
    from sentinel.hooks.measure import triton_kernel

    return triton_kernel


def check(found: Statistics, tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> None:
    fast, slow = shown(found), shown(TorchStatistics(tensors, scale))
    # The definition: torch's own sum in float32 is off by 6e-6 for 13,000 elements.
    by = 1.0 if scale is None else float(scale)
    slow["norm"] = [float(tensor.double().norm()) / by for tensor in tensors]
    for name, column in slow.items():
        for got, expected in zip(fast[name], column, strict=True):
            if name == "norm" and not 1e-15 < expected < 1e15 and expected != 0.0:
                continue  # squares that float32 cannot hold
            assert got == pytest.approx(expected, rel=2e-6, abs=0.0, nan_ok=True), name


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(tensors=st.lists(gradients().filter(lambda t: t.dtype != torch.float64), min_size=1, max_size=4))
def test_it_is_what_torch_says(fused: ModuleType, tensors: list[torch.Tensor]) -> None:
    check(fused.measure_tensors(tensors), tensors)


def test_more_than_one_chunk_and_more_than_one_step(fused: ModuleType) -> None:
    many = torch.randn(fused.CHUNK * 300 + 17)
    many[5] = many[-1] = torch.nan
    tensors = [torch.randn(3), many, torch.randn(fused.CHUNK), torch.randn(fused.CHUNK + 1).half()]
    check(fused.measure_tensors(tensors), tensors)


def test_what_has_gaps_and_what_is_empty(fused: ModuleType) -> None:
    odd = [torch.randn(64, 64)[:, ::2], torch.randn(1).expand(5, 3), torch.randn(8, 3).double()]
    check(fused.measure_tensors(odd), odd)
    found = shown(fused.measure_tensors([torch.ones(2), torch.empty(0), torch.full((3,), 2.0)]))
    assert found["norm"] == pytest.approx([2**0.5, 0.0, 12**0.5])
    assert (found["low"][1], found["high"][1]) == (float("inf"), float("-inf"))
    assert [found[name][1] for name in ("nonfinite", "smallest", "zeros")] == [0.0, 0.0, 0.0]


def test_gradients_are_unscaled(fused: ModuleType) -> None:
    tensors, scale = [torch.randn(50) * 512, torch.zeros(2)], torch.tensor(512.0)
    check(fused.measure_tensors(tensors, scale), tensors, scale)


def test_addresses_are_sent_when_they_change(fused: ModuleType) -> None:
    tensors = [torch.ones(4), torch.ones(5)]
    plan = fused.LaunchPlan(tensors)
    first = plan.addresses(tensors)
    assert plan.addresses(tensors) is first
    other = [torch.ones(4), torch.ones(5)]
    assert plan.addresses(other).tolist() == [tensor.data_ptr() for tensor in other]


def test_types_and_addresses_that_alternate_take_few_launches(fused: ModuleType) -> None:
    types = (torch.bfloat16, torch.float32, torch.float16)
    whole = [torch.randn(40).to(types[place % 3]) for place in range(12)]
    parts = [torch.randn(fused.CHUNK + 9)[1:], torch.randn(9)[1:], torch.randn(5).bfloat16()[1:]]
    tensors = [*whole[:6], *parts, *whole[6:], torch.empty(0)]
    assert len(fused.LaunchPlan(tensors).launches) == 5
    check(fused.measure_tensors(tensors[:-1]), tensors[:-1])


def test_numbers_that_are_none(fused: ModuleType) -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[nan, 1.0, 0.0], [nan, nan, nan], [inf, -1.0, 0.0], [-inf, inf, 2.0], [0.0, 0.0, 0.0], [inf, nan, -3.0]]
    short = [torch.tensor(row) for row in rows]
    long = [torch.cat([torch.ones(fused.CHUNK), one, torch.ones(fused.CHUNK - 3)]) for one in short]
    check(fused.measure_tensors([*short, *long]), [*short, *long])


def test_plans_do_not_pile_up(fused: ModuleType) -> None:
    for size in range(1, 3 * fused._PLANS):
        fused.measure_tensors([torch.ones(size)])
    assert len(fused._plans) <= fused._PLANS


@pytest.mark.faults
def test_a_kernel_that_fails_gives_way_to_torch(monkeypatch: pytest.MonkeyPatch, swallowed: list[str]) -> None:
    def fails(*_: object) -> Statistics:
        raise RuntimeError("no compiler for it")

    on_device = [torch.ones(3, device="meta")]
    monkeypatch.setattr(cpu_kernel, "_fused", fails)
    assert isinstance(cpu_kernel.measure_tensors(on_device), TorchStatistics)
    assert cpu_kernel._fused is None
    assert "the Triton kernel" in swallowed[0]


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sentinel.hooks.measure import triton_kernel

hopper = GPUTarget("cuda", 90, 32)
numbers = {"addresses": "*i64", "counts": "*i64", "slot_of": "*i32", "first_of": "*i32", "sums": "*fp32"}
read = {**numbers, "begin": "i32", "width": "i32", "KIND": "constexpr", "ALIGNED": "constexpr", "CHUNK": "constexpr"}
gather = {"sums": "*fp32", "first_of": "*i32", "place_of": "*i32", "scale": "*fp32", "out": "*fp32"}
gather |= {"width": "i32", "tensors": "i32", "STEP": "constexpr"}
for kind, aligned in ((0, True), (1, True), (2, True), (0, False)):
    fixed = {"KIND": kind, "ALIGNED": aligned, "CHUNK": triton_kernel.CHUNK}
    ptx = compile(ASTSource(triton_kernel._read, read, fixed), target=hopper).asm["ptx"]
    print(ptx.count("ld.global.v4.b32"))  # loads of 16 bytes
print(len(compile(ASTSource(triton_kernel._gather, gather, {"STEP": triton_kernel.STEP}), target=hopper).asm["cubin"]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_it_compiles_for_a_gpu(fused: ModuleType, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    wide, size = [int(line) for line in done.stdout.split()[:-1]], int(done.stdout.split()[-1])
    a_thread = 8192 // 128
    assert wide == [a_thread * 4 // 16, a_thread * 2 // 16, a_thread * 2 // 16, 0]
    assert size > 1000
