"""Models on GPUs, without one: torch's fake tensors know where they are, refuse arithmetic across devices, and refuse
to be read. Reading one, and copying one to the host at once, is a wait for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

import sentinel
from sentinel.hooks import gradients, onepass, pacing, readout
from sentinel.hooks.readout import Transfers
from sentinel.hooks.statistics import Eager
from tests.hooks.conftest import FakeDaemon

STEPS = 40
"""The first 32 are occasions."""


UNDETERMINED = {"bincount", "histc", "kthvalue", "median", "nanmedian", "put_"}
"""Without a deterministic kernel on CUDA: they raise in a run that asked for deterministic algorithms (the docs of
`torch.use_deterministic_algorithms`)."""


class Faults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies from a device to the host that are not asynchronous, and operations that not every run may use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        named = {**dict(zip([one.name for one in func._schema.arguments], args, strict=False)), **(kwargs or {})}
        source = named.get("src", named.get("self"))
        leaves = isinstance(source, Tensor) and source.is_cuda and isinstance(output, Tensor) and not output.is_cuda
        if (leaves and not named.get("non_blocking")) or func._schema.name.rpartition("::")[2] in UNDETERMINED:
            self.found.append(str(func))
        return output


class Part(nn.Module):
    """One that is made of nothing: to fill parameters takes a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, device=device))
        self.bias = nn.Parameter(torch.empty(8, device=device))
        self.weight.grad, self.bias.grad = torch.empty_like(self.weight), torch.empty_like(self.bias)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What was measured on a device, by its signal. All is due at every step, by torch's own operations."""
    found: dict[str, Tensor] = {}
    begin: Callable[..., Any] = Transfers.begin

    def begun(self: Transfers, parts: list[tuple[str, bool, Tensor]]) -> Any:
        found.update((name, tensor) for name, _, tensor in parts)
        return begin(self, parts)

    monkeypatch.setattr(Transfers, "begin", begun)
    monkeypatch.setattr(readout._Transfer, "arrived", lambda self: False)
    monkeypatch.setattr(pacing, "FIRST", dict.fromkeys(range(4), 1))
    monkeypatch.setattr(onepass, "whole", lambda *_: None)
    monkeypatch.setattr(onepass, "measured", Eager)
    monkeypatch.setattr(gradients, "wrapped", lambda _: False)  # a fake tensor is of a class of its own
    return found


@contextlib.contextmanager
def faked() -> Iterator[Faults]:
    with FakeTensorMode(), Faults() as found:  # type: ignore[no-untyped-call]
        yield found


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("places", [["cuda:0"], ["cuda:0", "cuda:1"], ["cpu", "cuda:0", "cuda:1"]])
@pytest.mark.parametrize("scaled", [False, True])
def test_all_is_measured_and_nobody_waits(
    daemon: FakeDaemon, sent: dict[str, Tensor], places: list[str], scaled: bool
) -> None:
    with faked() as faults:
        net = nn.Sequential(*[Part(place) for place in places for _ in range(12 // len(places))])
        optimizer = torch.optim.AdamW(net.parameters(), fused=scaled)  # else `scaler.step` itself reads from the device
        scaler = GradScaler("cpu", 8.0)
        with sentinel.attach(net, optimizer) as monitor:
            assert monitor._session is not None
            for _ in range(STEPS):
                for place in (places[-1], places[-2:][0]):  # two losses, of which autograd would tell
                    loss = torch.empty((), device=place)
                    if scaled:
                        scaler.scale(loss)
                    monitor._session.ledger.backward_ended(loss, 0.01)
                if places[0] != "cpu":  # where torch itself would bring the norm
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
