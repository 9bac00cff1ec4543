"""CUDA graphs without a GPU: capturing is simulated. Nothing may be launched into a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import sentinel
from sentinel import wire
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.hooks.snapshot.snapshot import Snapshot
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from sentinel.hooks.torch_interop import discovery, tensors
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model
from tests.hooks.sessions import find_session


class Launches:
    """Counts the scalars that are copied during a capture; on a device each copy is a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.during_capture = 0
        self.capturing = False
        for name in (
            "sentinel.hooks.loop.losses",
            "sentinel.hooks.step.optimizer_monitor",
            "sentinel.hooks.loop.grad_clipping",
            "sentinel.hooks.measure.probes.accumulation",
        ):
            monkeypatch.setattr(f"{name}.scalar", self._scalar)
        monkeypatch.setattr(tensors, "is_capturing", lambda: self.capturing)

    def _scalar(self, tensor: torch.Tensor) -> tensors.Scalar:
        self.during_capture += self.capturing
        return tensors.scalar(tensor)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the scalers of other tests' runs, which may still be alive."""
    monkeypatch.setattr(discovery, "bystanders", lambda _: ([], []))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def test_nothing_is_launched_into_a_graph(daemon: FakeDaemon, launches: Launches) -> None:
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-2), GradScaler("cpu", 8.0)
    with sentinel.attach(net, optimizer):
        for step, batch in enumerate(batches(4)):
            launches.capturing = step in (1, 2)
            scaler.scale(loss_of(net, batch)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    daemon.ended()
    assert launches.during_capture == 0
    assert (daemon.seqs(), list(daemon.series("loss"))) == ([0, 3], [0, 3])


def test_a_logged_tensor_on_a_device_is_not_copied_into_a_graph(
    daemon: FakeDaemon, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with sentinel.attach(net, optimizer) as monitor:
        for launches.capturing in (False, True, True):
            monitor.log(mine=torch.ones((), device="meta"), plain=2.0)
        launches.capturing = False
        loss_of(net, next(batches(1))).backward()
        optimizer.step()
    daemon.ended()
    assert daemon.series("plain") == {0: 2.0}
    said = capsys.readouterr().err
    assert said.count("log(mine=...) in a CUDA graph that is captured: log it at each replay") == 1
    assert said.count("log(mine=...): a Tensor is no number and is left out") == 1, "one on no device, before it"


def test_optimizers_in_the_backward_pass_of_a_graph_are_not_measured(daemon: FakeDaemon, launches: Launches) -> None:
    net = model()
    optimizers = {p: torch.optim.SGD([p], 1e-2) for p in net.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in optimizers]
    measured: list[bool] = []
    part = OptimizerMonitor.sample_part

    def counted(self: OptimizerMonitor, *arguments: Any, **named: Any) -> Step:
        measured.append(launches.capturing)
        return part(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, sentinel.attach(net, list(optimizers.values())):
        patch.setattr(OptimizerMonitor, "sample_part", counted)
        for step, batch in enumerate(batches(4)):
            launches.capturing = step in (1, 2)
            loss_of(net, batch).backward()
        launches.capturing = False
    for handle in handles:
        handle.remove()
    daemon.ended()
    assert measured == [False] * 2 * len(optimizers)
    assert daemon.seqs() == [0, 3]


def test_autograds_nodes_are_let_go_before_a_graph_is_captured(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node belongs to the stream on which it was made; a capture is on another."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda _: None)
    net = model().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with sentinel.attach(net, optimizer):
        for _ in range(4):  # after the fourth, sums are examined
            for batch in batches(4):
                loss_of(net, batch.bfloat16()).backward()
            optimizer.step()
        loss_of(net, next(iter(batches(1))).bfloat16()).backward()
        assert all(_is_held(parameter) for parameter in list(net.parameters())[:4])
        torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
        assert not any(_is_held(parameter) for parameter in net.parameters())
        for batch in batches(4):
            loss_of(net, batch.bfloat16()).backward()
        optimizer.step()
    daemon.ended()
    assert daemon.series("accumulation_error") == {}


def _is_held(parameter: torch.nn.Parameter) -> bool:
    """Whether the node that adds up its gradient is held: a mark that is set on the node is still there then."""
    torch.autograd.graph.get_gradient_edge(parameter).node.metadata["mark"] = True
    return "mark" in torch.autograd.graph.get_gradient_edge(parameter).node.metadata


def test_no_snapshot_is_taken_or_settled_while_a_graph_is_captured(
    daemon: FakeDaemon, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    left: list[int] = []
    monkeypatch.setattr(Restorer, "enter_step", lambda self, seq: entered.append(seq))
    monkeypatch.setattr(Restorer, "exit_step", lambda self, seq, skipped: left.append(seq))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, keep=2, margin=1)):
        for step, batch in enumerate(batches(4)):
            launches.capturing = step in (1, 2)
            loss_of(net, batch).backward()
            optimizer.step()
    assert (entered, left) == ([0, 3], [0, 3])


def test_a_copy_is_brought_to_its_end_before_a_graph_is_captured(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying: list[bool] = []
    monkeypatch.setattr(Snapshot, "beside", True)  # as on a GPU
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda _: copying.append(restorer.ring.copying))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, keep=2, margin=1)) as monitor:
        restorer: Any = find_session(monitor).restorer
        for batch in batches(2):
            loss_of(net, batch).backward()
            optimizer.step()
        assert restorer.ring.copying
        torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
        assert restorer.held == (0, 1)
        loss_of(net, next(batches(1))).backward()
        optimizer.step()
    assert copying == [False]


def test_what_goes_to_disk_is_copied_before_a_graph_is_captured(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies for the disk wait for the next forward pass, whose capture would record them."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda _: None)
    finished: list[int] = []
    finish = Snapshot.finish
    monkeypatch.setattr(Snapshot, "finish", lambda self, *terms: (finished.append(self.seq), finish(self, *terms)))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, keep=2, margin=1, directory=tmp_path)):
        loss_of(net, next(batches(1))).backward()
        optimizer.step()
        assert finished == []
        torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
        assert finished == [0]


def test_a_watched_module_can_be_graphed(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[int] = []

    def graphed(callables: Any, sample: Any) -> Any:
        hooks.append(len(callables._forward_hooks) + len(callables._forward_pre_hooks))
        return callables

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with sentinel.attach(net, optimizer):
        torch.cuda.make_graphed_callables(net, torch.randn(8, 6))  # type: ignore[no-untyped-call]
        theirs = net.register_forward_hook(lambda *_: None)
        torch.cuda.make_graphed_callables(net, torch.randn(8, 6))  # type: ignore[no-untyped-call]
        theirs.remove()
        loss_of(net, next(batches(1))).backward()
        optimizer.step()
    assert hooks == [0, 1]
    assert torch.cuda.make_graphed_callables is graphed
    daemon.ended()
    assert daemon.series("forward_seconds")
    assert daemon.of(wire.Hello)
