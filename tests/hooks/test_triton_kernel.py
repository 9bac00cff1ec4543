"""The Triton kernel in Triton's interpreter, on the CPU, against torch's own operations."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.hooks.measure import kernels
from sentinel.hooks.measure.kernels import DeviceKernel, is_usable
from sentinel.hooks.measure.statistics import Statistics, TorchStatistics
from tests.hooks.test_onepass import gradients, shown

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the interpreter computes with numpy, which warns of NaN


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


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(tensors=st.lists(gradients().filter(lambda t: t.dtype != torch.float64), min_size=1, max_size=4))
def test_it_is_what_torch_says(fused: ModuleType, tensors: list[torch.Tensor]) -> None:
    check(fused.measure_tensors(tensors), tensors)


@pytest.mark.slow
@pytest.mark.timeout(300)  # Triton is interpreted here
def test_more_than_one_chunk_and_more_than_one_step(fused: ModuleType) -> None:
    many = torch.randn(fused.CHUNK * 300 + 17)
    many[5] = many[-1] = torch.nan
    tensors = [torch.randn(3), many, torch.randn(fused.CHUNK), torch.randn(fused.CHUNK + 1).half()]
    check(fused.measure_tensors(tensors), tensors)


def test_tensors_with_gaps_or_of_another_type_are_left_to_torch(fused: ModuleType) -> None:
    for odd in (torch.randn(64, 64)[:, ::2], torch.randn(1).expand(5, 3), torch.randn(8, 3).double()):
        assert not fused.can_read([torch.ones(2), odd])
    permuted = [torch.randn(4, 6, 5).permute(2, 0, 1), torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)]
    assert fused.can_read(permuted)
    check(fused.measure_tensors(permuted), permuted)


def test_empty_tensors(fused: ModuleType) -> None:
    found = shown(fused.measure_tensors([torch.ones(2), torch.empty(0), torch.full((3,), 2.0)]))
    assert found["norm"] == pytest.approx([2**0.5, 0.0, 12**0.5])
    assert (found["low"][1], found["high"][1]) == (float("inf"), float("-inf"))
    assert [found[name][1] for name in ("nonfinite", "smallest", "zeros")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_type_does_not_matter(fused: ModuleType, dtype: torch.dtype) -> None:
    tensors, scale = [torch.randn(12_345), torch.zeros(12_345)], torch.tensor(512.0)
    torch.set_default_dtype(dtype)
    try:
        found, scaled = fused.measure_tensors(tensors), fused.measure_tensors(tensors, scale)
    finally:
        torch.set_default_dtype(torch.float32)
    check(found, tensors)
    check(scaled, tensors, scale)


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


@pytest.mark.slow
def test_nan_and_infinity(fused: ModuleType) -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[nan, 1.0, 0.0], [nan, nan, nan], [inf, -1.0, 0.0], [-inf, inf, 2.0], [0.0, 0.0, 0.0], [inf, nan, -3.0]]
    short = [torch.tensor(row) for row in rows]
    long = [torch.cat([torch.ones(fused.CHUNK), one, torch.ones(fused.CHUNK - 3)]) for one in short]
    check(fused.measure_tensors([*short, *long]), [*short, *long])


@pytest.mark.slow
def test_plans_do_not_pile_up(fused: ModuleType) -> None:
    for size in range(1, 3 * fused._PLANS):
        fused.measure_tensors([torch.ones(size)])
    assert len(fused._plans) <= fused._PLANS


def make_kernel() -> DeviceKernel:
    """Return a kernel for tensors on the CPU, loaded as by `attach`."""
    kernel = DeviceKernel(usable=True, device_type="cpu")
    kernel.load()
    return kernel


def wait_until_ready(kernel: DeviceKernel, tensors: list[torch.Tensor]) -> Statistics:
    """Measure again and again, as a loop does, until the kernel does it; return what it found."""
    until = time.monotonic() + 60
    while (found := kernel.measure(tensors, None)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


class Compiler:
    """Replaces the compiler, and compiles once it may."""

    def __init__(self, fused: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        self._compile = fused.compile_variants
        monkeypatch.setattr(fused, "_compiled", set())
        monkeypatch.setattr(fused, "compile_variants", self)

    def __call__(self, variants: object) -> None:
        self.entered.set()
        assert self.may_go_on.wait(60)
        self._compile(variants)


def test_torch_computes_until_the_kernel_is_compiled(fused: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensors, compiler = make_kernel(), [torch.randn(5), torch.randn(7).half()], Compiler(fused, monkeypatch)
    assert [kernel.measure(tensors, None) for _ in range(3)] == [None] * 3
    compiler.may_go_on.set()
    check(wait_until_ready(kernel, tensors), tensors)
    odd = [torch.randn(9)[1:]]
    assert kernel.measure(odd, None) is None, "addresses of another kind have a variant of their own"
    check(wait_until_ready(kernel, odd), odd)


def test_compiling_holds_no_gradient(fused: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensors, compiler = make_kernel(), [torch.randn(5)], Compiler(fused, monkeypatch)
    gone = weakref.ref(tensors[0])
    assert kernel.measure(tensors, None) is None
    assert compiler.entered.wait(60)
    tensors.clear()
    assert gone() is None
    compiler.may_go_on.set()


def test_torch_computes_until_attach_has_loaded_the_kernel() -> None:
    assert DeviceKernel(usable=True, device_type="cpu").measure([torch.ones(3)], None) is None


def test_tensors_on_several_devices_are_left_to_torch(fused: ModuleType) -> None:
    kernel = make_kernel()
    wait_until_ready(kernel, [torch.ones(3)])
    assert kernel.measure([torch.ones(3), torch.ones(3, device="meta")], None) is None
    assert kernel.measure([torch.ones(3, device="meta")], None) is None


@pytest.mark.parametrize("variable", ["TRITON_INTERPRET=1", "SENTINEL_TRITON=0"])
def test_the_kernel_is_turned_off(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter reads addresses of the device in host memory, and the process dies of it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert is_usable()
    monkeypatch.setenv(*variable.split("="))
    assert not is_usable()


@pytest.mark.faults
@pytest.mark.parametrize("fails", ["measure_tensors", "compile_variants", "can_read"])
def test_a_kernel_that_fails_gives_way_to_torch(
    fused: ModuleType, fails: str, monkeypatch: pytest.MonkeyPatch, swallowed: list[str]
) -> None:
    def broken(*_: object) -> Statistics:
        raise RuntimeError("no compiler for it")

    kernel, tensors = make_kernel(), [torch.ones(3)]
    monkeypatch.setattr(fused, "_compiled", set())
    monkeypatch.setattr(fused, fails, broken)
    monkeypatch.setattr(kernels, "kernel_missing", "left out")
    monkeypatch.setattr(kernels, "device_kernel", kernel)
    until = time.monotonic() + 60
    while not swallowed:
        assert isinstance(kernels.measure_tensors(tensors), TorchStatistics)
        assert time.monotonic() < until
    assert "the Triton kernel" in swallowed[0]
    assert isinstance(kernels.measure_tensors(tensors), TorchStatistics)
    assert len(swallowed) == 1


@pytest.mark.faults
def test_without_a_thread_that_compiles_torch_computes(
    fused: ModuleType, monkeypatch: pytest.MonkeyPatch, swallowed: list[str]
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(fused, "_compiled", set())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    kernel = make_kernel()
    assert [kernel.measure([torch.ones(3)], None) for _ in range(3)] == [None] * 3


COMPILED = """
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from sentinel.hooks.measure import triton_kernel

hopper = GPUTarget("cuda", 90, 32)
numbers = {"addresses": "*i64", "counts": "*i64", "slot_of": "*i32", "first_of": "*i32", "sums": "*fp32"}
read = {**numbers, "begin": "i32", "width": "i32", "KIND": "constexpr", "ALIGNED": "constexpr", "CHUNK": "constexpr"}
read["BLOCK"] = "constexpr"
gather = {"sums": "*fp32", "first_of": "*i32", "place_of": "*i32", "scale": "*fp32", "out": "*fp32"}
gather |= {"width": "i32", "tensors": "i32", "STEP": "constexpr"}
for kind, aligned in ((0, True), (1, True), (2, True), (0, False)):
    fixed = {"KIND": kind, "ALIGNED": aligned, "CHUNK": triton_kernel.CHUNK, "BLOCK": triton_kernel.BLOCK}
    options = {"num_warps": triton_kernel.WARPS}
    ptx = compile(ASTSource(triton_kernel._read, read, fixed), target=hopper, options=options).asm["ptx"]
    print(ptx.count("ld.global.v4.b32"))  # loads of 16 bytes
def list_keys(function, *arguments, **fixed):  # as JITFunction.run finds a kernel that is compiled
    bind = create_function_from_signature(function.signature, function.params, make_backend(hopper))
    _, specialization, options = bind(*arguments, **fixed)
    return specialization, options


launches = []
for function in (triton_kernel._read, triton_kernel._gather):
    function.run = lambda *given, grid, warmup, function=function, **fixed: launches.append(
        list_keys(function, *given, **fixed))
tensors = [torch.randn(30), torch.randn(40).half(), torch.randn(9)[1:]]
triton_kernel._make_launcher = lambda kernel: None
triton_kernel.compile_variants(triton_kernel.list_uncompiled(tensors))
warm, launches = launches, []
triton_kernel.measure_tensors(tensors)
missing = [launch for launch in launches if launch not in warm]
assert launches and not missing, (missing, warm)
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
    assert wide == [2, 1, 1, 0], "eight elements a thread"
    assert size > 1000
