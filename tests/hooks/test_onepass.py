"""The compiled kernel against torch's own operations in float64."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sentinel
from sentinel import wire
from sentinel.cli import cli
from sentinel.hooks.measure import kernels
from sentinel.hooks.measure.kernels import ROWS, KernelStatistics, measure_tensors
from sentinel.hooks.measure.statistics import Statistics, TorchStatistics
from sentinel.hooks.torch_interop import tensors
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import model

compiled = pytest.mark.skipif(bool(kernels.kernel_missing), reason="the compiled kernel was not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ODD = (0.0, -0.0, 1.0, -2.5, 6e-8, -3e-7, 1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan, -math.nan)


def shown(found: Statistics) -> dict[str, list[float]]:
    low, high = found.extremes
    for statistic, column in enumerate((found.norms, low, high, found.nonfinite, found.smallest, found.zeros)):
        packed = found.column(statistic)
        assert (packed if isinstance(packed, bytes) else tensors.pack_float32(packed)) == tensors.pack_float32(column)
    columns = {
        "norm": found.norms,
        "low": low,
        "high": high,
        "nonfinite": found.nonfinite,
        "smallest": found.smallest,
        "zeros": found.zeros,
    }
    return {name: column.tolist() for name, column in columns.items()}


def exact(tensor: torch.Tensor) -> dict[str, float]:
    """Return what must come out for one tensor, by the definitions and in double precision."""
    wide = tensor.detach().double().flatten()
    magnitudes = wide.abs()
    finite = magnitudes[(magnitudes > 0) & magnitudes.isfinite()]
    found = {
        "norm": wide.norm(),
        "low": wide.min(),
        "high": wide.max(),
        "nonfinite": (~wide.isfinite()).sum(),
        "smallest": finite.min() if finite.numel() else torch.tensor(0.0),
        "zeros": (wide == 0).sum(),
    }
    return {name: float(value.float()) for name, value in found.items()}


def check(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> None:
    found = measure_tensors([tensor.detach() for tensor in tensors], scale)
    assert isinstance(found, KernelStatistics)
    by = 1.0 if scale is None else float(scale)
    total = float(torch.cat([tensor.detach().double().flatten() for tensor in tensors]).norm()) / by
    assert found.total == pytest.approx(total, rel=1e-6, nan_ok=True)
    columns = shown(found)
    for place, tensor in enumerate(tensors):
        for name, value in exact(tensor).items():
            expected = value if name in ("nonfinite", "zeros") else value / by
            got = columns[name][place]
            assert got == pytest.approx(expected, rel=1e-6, abs=0.0, nan_ok=True), (name, place, tensor.dtype)


def read(tensors: list[Any]) -> list[int]:
    """Return the places of the tensors that the kernel does not read."""
    return kernels.onepass.measure(kernels.EXCHANGE, tensors, 1.0, bytearray(ROWS * 4 * len(tensors)), False)[1]


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    """Draw some thousand normal elements at most, some of them odd, in many shapes and orders of memory."""
    shape = draw(st.sampled_from([(), (1,), (7,), (64, 33), (3, 5, 7), (2, 3, 4, 5), (4096,), (4097,), (130, 100)]))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** draw(st.integers(-30, 30))
    flat = tensor.view(-1)
    for value in draw(st.lists(st.sampled_from(ODD), max_size=6)):
        flat[draw(st.integers(0, flat.numel() - 1))] = value
    tensor = tensor.to(dtype)
    if draw(st.booleans()):
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    if tensor.dim() == 4 and draw(st.booleans()):
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def sets_of_instructions() -> list[str]:
    """Return the instruction sets that this processor has, the one in use last."""
    if kernels.kernel_missing:
        return []
    there = kernels.onepass.use("plain")
    kernels.onepass.use(there[-1])
    return there


@pytest.fixture(params=sets_of_instructions())
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the kernel read with one instruction set."""
    kernels.onepass.use(request.param)
    yield
    kernels.onepass.use(sets_of_instructions()[-1])


@compiled
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(gradients(), min_size=1, max_size=5))
def test_it_is_what_the_definitions_say(instructions: None, tensors: list[torch.Tensor]) -> None:
    check(tensors)


@compiled
def test_instructions_that_the_processor_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="no instructions 'sse9'"):
        kernels.onepass.use("sse9")


@compiled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_two_bytes(instructions: None, dtype: torch.dtype) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    numbers = bits.view(dtype)
    check([numbers, numbers[numbers.isfinite()], *numbers[::97].reshape(-1, 1).unbind()])


@compiled
def test_gradients_are_unscaled() -> None:
    check([torch.randn(100) * 1024, torch.zeros(3)], torch.tensor(1024.0))


@compiled
def test_norms_of_very_large_and_very_small_numbers() -> None:
    check([torch.full((5000,), 1e30), torch.full((5000,), 1e-30), torch.full((9,), 1e-42)])


@compiled
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(64, 64)[:, ::2],
        lambda: torch.randn(1).expand(5, 3),
        lambda: torch.arange(-3, 4),
    ],
    ids=["strided", "expanded", "int64"],
)
def test_tensors_that_the_kernel_cannot_read_are_left_to_torch(make: Callable[[], torch.Tensor]) -> None:
    odd = make()
    before, after = torch.randn(10), torch.randn(20)
    assert read([before, odd, after]) == [1]
    if odd.is_floating_point():
        check([before, odd, after])


@compiled
def test_a_tensor_without_memory_is_not_read() -> None:
    sparse = torch.randn(4, 4).to_sparse()
    assert read([torch.empty(3, device="meta"), sparse, torch.empty(0), None]) == [0, 1, 2, 3]


@compiled
def test_the_kernel_refuses_a_buffer_of_another_size() -> None:
    with pytest.raises(ValueError, match="out must have 48 bytes"):
        kernels.onepass.measure(kernels.EXCHANGE, [torch.ones(2), torch.ones(2)], 1.0, bytearray(47), False)
    with pytest.raises(ValueError, match="PyCapsule"):
        kernels.onepass.measure(object(), [torch.ones(2)], 1.0, bytearray(24), False)


@compiled
def test_several_threads_at_once() -> None:
    tensors = [torch.full((1000,), float(number)) for number in range(50)]
    expected = shown(measure_tensors(tensors))
    found: list[dict[str, list[float]]] = []
    threads = [
        threading.Thread(target=lambda: found.extend(shown(measure_tensors(tensors)) for _ in range(50))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 100


@compiled
@settings(max_examples=40, deadline=None)
@given(st.lists(gradients().filter(lambda t: t.dtype != torch.float64), min_size=1, max_size=4))
def test_torch_alone_says_the_same(tensors: list[torch.Tensor]) -> None:
    fast, slow = shown(measure_tensors(tensors)), shown(TorchStatistics(tensors))
    for name, column in slow.items():
        for got, expected in zip(fast[name], column, strict=True):
            if name == "norm" and expected <= 1e-15:
                continue  # squares that are 0 in float32: the kernel sums in double
            # Torch's sum in float32 is off by 6e-6 for 13,000 elements.
            assert got == pytest.approx(expected, rel=1e-5 if name == "norm" else 2e-6, abs=0.0, nan_ok=True), name


def test_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_missing", "no C compiler")
    tensors = [torch.tensor([3.0, -4.0, 0.0]), torch.tensor([math.inf, 1.0])]
    found = measure_tensors(tensors)
    assert isinstance(found, TorchStatistics)
    assert shown(found) == {
        "norm": [5.0, math.inf],
        "low": [-4.0, 1.0],
        "high": [3.0, math.inf],
        "nonfinite": [0.0, 1.0],
        "smallest": [3.0, 1.0],
        "zeros": [1.0, 0.0],
    }
    assert isinstance(measure_tensors([]), TorchStatistics)


@pytest.mark.usefixtures("every_step")
def test_a_gradient_with_gaps_whose_squares_overflow_has_a_finite_norm(daemon: FakeDaemon) -> None:
    net = torch.nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with sentinel.attach(net, optimizer):
        for size in (1e10, 1e30):
            net.weight.grad = torch.full((1, 16), size)[:, ::2]  # the compiled kernel does not read it
            optimizer.step()
    daemon.ended()
    norms = {0: pytest.approx(1e10 * math.sqrt(8)), 1: pytest.approx(1e30 * math.sqrt(8))}
    assert daemon.series("grad_norm") == norms
    assert daemon.layers("layer_grad_norm") == {seq: {"weight": norm} for seq, norm in norms.items()}


def test_attach_says_that_there_is_no_kernel(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "kernel_missing", "no C compiler")
    net = model()
    with sentinel.attach(net, torch.optim.AdamW(net.parameters())):
        daemon.wait(lambda: daemon.of(wire.Hello))
    assert "without the compiled kernel (no C compiler)" in capsys.readouterr().err
    assert daemon.of(wire.Hello)[0].facts["kernel_missing"] == "no C compiler"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("facts", "said"), [({"kernel_missing": "no C compiler"}, True), ({}, False)])
def test_status_says_that_there_is_no_kernel(facts: dict[str, str], said: bool) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="test", identity=rank.identity, facts=facts))
        rank.expect(wire.Welcome)
        shown = CliRunner().invoke(cli, ["status"]).output
    assert "rank 0" in shown
    assert ("no compiled kernel reads the gradients (no C compiler)" in shown) is said
