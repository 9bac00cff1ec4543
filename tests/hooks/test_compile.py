"""torch.compile: a watched model has no more graph breaks and no more graphs than an unwatched one."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

import sentinel
from sentinel.hooks.torch_interop.internals import exclude_from_tracing
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model

# Dynamo loads parts of torch that warn of their own deprecation.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def compiled_model(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    whole = compiled(net)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(whole, batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()

    return whole, step


def compiled_copy(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    """Return a step that also runs a compiled EMA of the model, whose hooks are copies."""
    _, step = compiled_model(net, optimizer)
    copies: list[Any] = []

    def step_both(batch: torch.Tensor) -> None:
        if not copies:
            copies.append(compiled(copy.deepcopy(net)))
        copies[0](batch)
        step(batch)

    return net, step_both


def compiled_later(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    """Return the module inside, so that the hooks are on what torch.compile traces."""
    return net, compiled_model(net, optimizer)[1]


def compiled_optimizer(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    step_optimizer = compiled(optimizer.step)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        step_optimizer()

    return net, step


def compiled_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    def forward_backward(batch: torch.Tensor) -> None:
        loss_of(net, batch).backward()

    whole = compiled(forward_backward)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        whole(batch)
        optimizer.step()

    return net, step


def traced() -> tuple[int, int]:
    """Return (graph breaks, graphs) so far."""
    return sum(Counter(counters["graph_break"]).values()), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("build", [compiled_model, compiled_later, compiled_copy, compiled_optimizer, compiled_step])
def test_no_more_graph_breaks(build: Any, daemon: FakeDaemon) -> None:
    weights, graphs = [], []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        seen, step = build(net, optimizer)
        monitor = sentinel.attach(seen, optimizer) if watched else None
        for batch in batches(5):
            step(batch)
        if monitor is not None:
            monitor.detach()
        weights.append([p.detach().clone() for p in net.parameters()])
        graphs.append(traced())
    assert graphs[1][0] <= graphs[0][0]
    # A model and its copy share one graph only while both have the same hooks, which is not the case here.
    assert graphs[1][1] <= graphs[0][1] + (build is compiled_copy)
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    daemon.ended()
    assert daemon.seqs() == list(range(5))
    assert list(daemon.series("loss")) == list(range(5))


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attach at the first step, as in a process of `sentinel run`."""
    from sentinel.hooks import auto_attach
    from sentinel.hooks.torch_interop import discovery
    from sentinel.launch import sitecustomize

    optimizers = sys.modules["torch.optim.optimizer"]
    auto_attach._seen.update(discovery.trainers()[0])
    before = set(optimizers._global_optimizer_pre_hooks)  # type: ignore[attr-defined]
    sitecustomize._listen(optimizers)
    yield
    for key in set(optimizers._global_optimizer_pre_hooks) - before:  # type: ignore[attr-defined]
        del optimizers._global_optimizer_pre_hooks[key]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("build", [compiled_model, compiled_optimizer, compiled_step])
def test_no_more_graph_breaks_when_attached_at_the_first_step(build: Any, daemon: FakeDaemon, request: Any) -> None:
    weights, graphs = [], []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        if watched:
            request.getfixturevalue("unasked")
            sys.modules["sentinel.hooks.auto_attach"]._seen.discard(optimizer)
        _, step = build(net, optimizer)
        for batch in batches(5):
            step(batch)
        weights.append([p.detach().clone() for p in net.parameters()])
        graphs.append(traced())
    assert graphs[1][0] <= graphs[0][0]
    assert graphs[1][1] <= graphs[0][1]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    daemon.wait(lambda: daemon.seqs() == list(range(5)))


@pytest.mark.slow
def test_clipping_in_a_region_that_must_not_break(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    parameters = list(net.parameters())

    @torch.compile(backend="eager", fullgraph=True)
    def clip() -> None:
        nn.utils.clip_grad_norm_(parameters, 0.1)

    with sentinel.attach(net, optimizer):
        for batch in batches(2):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            clip()
            optimizer.step()
    daemon.ended()
    assert traced() == (0, 1)
    assert daemon.series("grad_norm") == pytest.approx({0: 0.1, 1: 0.1}, rel=1e-3)


def test_a_graph_breaks_at_what_is_not_to_be_traced() -> None:
    seen: list[bool] = []

    def ours(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return x

    hidden = exclude_from_tracing(ours)
    whole = compiled(lambda x: hidden(x + 1) * 2)
    assert float(whole(torch.ones(()))) == 4.0
    assert seen == [False], "run as it is written, once"
    assert sum(counters["graph_break"].values()) == 1
