"""Allocations that fail: how memory was used, and that the user's exception is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import sentinel
from sentinel import wire
from sentinel.hooks.core.faults import is_out_of_memory
from sentinel.hooks.evidence import oom_report
from sentinel.hooks.evidence.oom_report import post_mortem
from sentinel.wire.evidence import OutOfMemory
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import model

HUGE = 1 << 50
RECORDED = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.12 GiB is free."
    " Including non-PyTorch memory, this process has 78.02 GiB memory in use. Of the allocated memory 60.25 GiB is "
    "allocated by PyTorch, and 16.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


class Fails(torch.autograd.Function):
    """A backward pass that asks for too much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.empty(HUGE).sum()


def told(daemon: FakeDaemon) -> list[OutOfMemory]:
    content = [one.content for one in daemon.of(wire.Collected) if one.what == "out_of_memory"]
    return [msgspec.convert(one, OutOfMemory) for one in content]


def train(ask: Callable[[Tensor], Tensor], daemon: FakeDaemon) -> OutOfMemory:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())

    def loop() -> None:
        with sentinel.attach(net, optimizer):
            for step in range(4):
                loss = net(torch.randn(8, 6)).square().mean()
                (ask(loss) if step == 3 else loss).backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        loop()
    daemon.ended()
    (found,) = told(daemon)
    return found


def test_a_forward_pass_on_the_cpu(daemon: FakeDaemon) -> None:
    found = train(lambda loss: loss + torch.empty(HUGE).sum(), daemon)
    size = sum(p.nbytes for p in model().parameters())
    assert (found.seq, found.phase, found.device, found.requested) == (3, "forward", "cpu", 4 * HUGE)
    assert (found.parameters, found.gradients, found.buffers) == (size, size, 0)
    assert 2 * size <= found.optimizer <= 2 * size + 64
    assert found.line.startswith(__file__)
    assert (found.largest_layer, found.largest_layer_bytes) == ("0", 4 * (6 * 16 + 16))
    assert found.allocated > 0


def test_a_backward_pass_that_the_loop_catches(daemon: FakeDaemon) -> None:
    assert train(Fails.apply, daemon).phase == "backward"


def test_the_figures_of_a_recorded_message_of_cuda() -> None:
    net = nn.Linear(4, 4)
    found = post_mortem(torch.OutOfMemoryError(RECORDED), 5, [net], [], backward=False)
    assert found.requested == int(2.5 * 1024**3)
    gib = 1024**3
    assert oom_report._on_device(RECORDED) == {
        "allocated": int(60.25 * gib), "reserved": int(60.25 * gib) + int(16.5 * gib),
        "free": int(1.12 * gib), "limit": int(79.15 * gib),
    }  # fmt: skip


def test_a_share_of_the_card_is_a_limit_too() -> None:
    """torch.cuda.set_per_process_memory_fraction sets such a limit."""
    said = RECORDED.replace("Of the allocated memory", "2.00 GiB allowed; Of the allocated memory")
    assert oom_report._on_device(said)["limit"] == 2 * 1024**3


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), KeyError("a")])
def test_other_exceptions_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
