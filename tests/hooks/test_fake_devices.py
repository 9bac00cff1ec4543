"""Models on GPUs, without a GPU, by torch's fake tensors.

These know where they are, refuse arithmetic across devices, and refuse to be read. Reading one, and copying one to the
host synchronously, is a wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

import sentinel
from sentinel.hooks.core import governor
from sentinel.hooks.loop import losses
from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure import gradients, kernels
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.measure.probes import weights
from sentinel.hooks.measure.statistics import TorchStatistics
from sentinel.hooks.torch_interop.tensors import Sample, meeting_place, on_one_device, row_length
from sentinel.hooks.transport import records
from sentinel.hooks.transport.records import Transfers
from tests.hooks.conftest import FakeDaemon
from tests.hooks.sessions import find_session

STEPS = 6
PARTS = 12
"""Parts of a model: the gradients' depth ratio leaves out the first and the last, and needs eight at least."""


UNDETERMINED = {"bincount", "histc", "kthvalue", "median", "nanmedian", "put_"}
"""Operations without a deterministic kernel on CUDA, which raise in a run that asked for deterministic algorithms (docs
of `torch.use_deterministic_algorithms`)."""


class Faults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from a device to the host, except into our buffers, and operations not every run may use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        named = {**dict(zip([one.name for one in func._schema.arguments], args, strict=False)), **(kwargs or {})}
        source = named.get("src", named.get("self"))
        name = func._schema.name.rpartition("::")[2]
        leaves = isinstance(source, Tensor) and source.is_cuda and isinstance(output, Tensor) and not output.is_cuda
        waits = leaves and not (name == "copy_" and named.get("non_blocking"))  # into a buffer that is read later
        if waits or name in UNDETERMINED:
            self.found.append(str(func))
        return output


class Part(nn.Module):
    """A layer whose parameters are not filled, as that takes a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, device=device))
        self.bias = nn.Parameter(torch.empty(8, device=device))
        self.weight.grad, self.bias.grad = torch.empty_like(self.weight), torch.empty_like(self.bias)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Signal -> its values as measured on a device. All is due at every step, by torch's own operations."""
    found: dict[str, Tensor] = {}
    begin: Callable[..., Any] = Transfers.begin

    def begun(self: Transfers, parts: list[tuple[str, bool, Tensor]]) -> Any:
        found.update((name, tensor) for name, _, tensor in parts)
        return begin(self, parts)

    monkeypatch.setattr(Transfers, "begin", begun)
    monkeypatch.setattr(records._Transfer, "has_arrived", lambda self: False)
    monkeypatch.setattr(losses.scaled, "by", None)  # no pass follows these losses
    monkeypatch.setattr(governor, "FIRST", dict.fromkeys(range(4), 1))
    monkeypatch.setattr(kernels, "measure_in_one_pass", lambda *_: None)
    monkeypatch.setattr(kernels, "measure_tensors", TorchStatistics)
    monkeypatch.setattr(gradients, "is_wrapper_tensor", lambda _: False)  # a fake tensor is of a class of its own
    return found


@contextlib.contextmanager
def faked() -> Iterator[Faults]:
    with FakeTensorMode(), Faults() as found:  # type: ignore[no-untyped-call]
        yield found


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("places", "scaled"),
    [
        (["cuda:0"], False),
        (["cuda:0"], True),
        (["cuda:0", "cuda:1"], False),
        (["cuda:0", "cuda:1"], True),
        (["cpu", "cuda:0", "cuda:1"], False),  # scaled, GradScaler itself would wait
    ],
)
def test_all_is_measured_and_nobody_waits(
    daemon: FakeDaemon, sent: dict[str, Tensor], places: list[str], scaled: bool
) -> None:
    with faked() as faults:
        net = nn.Sequential(*[Part(place) for place in places for _ in range(PARTS // len(places))])
        optimizer = torch.optim.AdamW(net.parameters(), fused=scaled)  # else `scaler.step` itself reads from the device
        scaler = GradScaler("cpu", 8.0)
        with sentinel.attach(net, optimizer) as monitor:
            for _ in range(STEPS):
                for place in (places[-1], places[-2:][0]):  # two losses, which autograd would report
                    loss = torch.empty((), device=place)
                    if scaled:
                        scaler.scale(loss)
                    find_session(monitor).accumulator.backward_ended(loss, 0.01)
                if places[0] != "cpu":  # else torch itself would copy the norm to the host
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                if scaled:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
    assert faults.found == []
    assert {"loss", "grad_norm", "layer_grad_norm", "layer_grad_min", "layer_nonfinite"} < set(sent)
    assert {"gradient_depth_ratio", "layer_grad_tiny_share", "layer_update_ratio", "parameter_checksum"} < set(sent)
    assert ("loss_scale" in sent) == scaled
    assert all(tensor.is_cuda for tensor in sent.values())


def test_values_on_a_device_are_not_brought_to_the_host_for_arithmetic() -> None:
    with faked():
        values = torch.empty(4), torch.empty((), device="cuda:1"), 3.0
        assert [value.device for value in on_one_device(values)[:2]] == [torch.device("cuda:1")] * 2  # type: ignore[union-attr]
        assert on_one_device(values)[2] == 3.0
        assert meeting_place([torch.empty(4), torch.empty(4)]) == torch.device("cpu")


def test_gradients_in_host_memory_and_a_scale_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 with CPU offload has, in fp16, gradients in host memory and a loss scale on a device."""
    monkeypatch.setattr(weights, "scalar", lambda tensor: tensor)  # reading a fake tensor in host memory is no wait
    probe = weights.WeightUpdates()
    with faked() as faults:
        gradients = SimpleNamespace(tensors=[torch.empty(4, 4)], scale=None, one_pass=False, rows=[0])
        known = ((0, torch.empty(4, 4), True),)
        probe._before = known, Sample([known[0][1]], row_length(1))
        step = Step(0, None, StepTotals(), gradients=cast("Any", gradients), scale=torch.empty((), device="cuda:0"))
        probe.before(step)
    assert faults.found == []
    assert cast("Tensor", step.layers["layer_grad_tiny_share"]).is_cuda
