"""Unusual but correct models, parameters and gradients: they are measured as they are, or reported as left out."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, init_device_mesh
from torch.utils.data import DataLoader

import sentinel
from sentinel import wire
from sentinel.errors import AttachError, RollbackError
from sentinel.hooks.core import governor
from sentinel.hooks.loop.forward_passes import keep
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.layer_table import Layers
from tests.hooks import loops
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import fit, loss_of, sgd


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample all tiers at every step."""
    monkeypatch.setattr(governor, "FIRST", dict.fromkeys(governor.FIRST, 1))


class With(nn.Module):
    """A parameter beside a linear layer."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.extra, self.linear = nn.Parameter(parameter), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.extra.to_dense() if self.extra.layout is not torch.strided else self.extra
        output: torch.Tensor = self.linear(x) + extra.sum()
        return output


@pytest.mark.usefixtures("everything")
def test_a_parameter_with_gaps_between_its_elements(daemon: FakeDaemon) -> None:
    net = With(torch.arange(40.0).reshape(10, 4)[:, 0])
    optimizer = sgd(net, lr=0.0)
    with sentinel.attach(net, optimizer):
        fit(net, optimizer)
    daemon.ended()
    assert daemon.layers("layer_weight_norm")[0]["extra"] == pytest.approx(float(net.extra.detach().norm()))


@pytest.mark.usefixtures("everything")
def test_a_gradient_whose_elements_share_their_memory(daemon: FakeDaemon, swallowed: list[str]) -> None:
    net = With(torch.randn(5, 3))
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(2):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            net.extra.grad = torch.ones(1, 1).expand(5, 3)
            optimizer.step()
    daemon.ended()
    assert not swallowed
    assert daemon.layers("layer_grad_norm")[1]["extra"] == pytest.approx(15**0.5)


@pytest.mark.usefixtures("everything")
def test_a_sparse_parameter_is_left_out(daemon: FakeDaemon, swallowed: list[str]) -> None:
    net = With(torch.eye(3).to_sparse())
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        fit(net, optimizer)
    daemon.ended()
    assert not swallowed
    assert daemon.layers("layer_grad_norm")[2].keys() == {"linear.weight", "linear.bias"}
    assert daemon.series("update_ratio").keys() == {0, 1, 2}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_batch_that_is_nested(daemon: FakeDaemon, swallowed: list[str]) -> None:
    net = loops.model()
    optimizer = sgd(net)
    rows: Any = [torch.randn(3 + length, 6) for length in range(4)]
    with sentinel.attach(net, optimizer):
        for batch in DataLoader(rows, batch_size=2, collate_fn=lambda some: torch.nested.nested_tensor(some)):
            loss_of(net, torch.nested.to_padded_tensor(batch, 0.0).flatten(0, 1)).backward()
            optimizer.step()
    daemon.ended()
    assert not swallowed
    assert daemon.seqs() == [0, 1]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_that_have_graphs_hold_none_of_them() -> None:
    """A graph leads back to the hook of the output that holds the gradient: a cycle that would never be freed."""
    net = loops.model()
    batch = torch.ones(2, 6)
    kept = keep((batch,), {})
    assert kept is not None
    output = net(batch)
    kept.hold_gradients(output)
    output.square().mean().backward(create_graph=True)
    assert kept.gradients
    assert not any(gradient.requires_grad for gradient in kept.gradients.values())


class Drawing(nn.Module):
    """A model with random generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.generator, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy = {"new": np.random.default_rng(1), "old": np.random.RandomState(1), "system": random.SystemRandom()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=self.generator) > 0.1 * self.python.random()
        factor = 1 + self.numpy["new"].random() + self.numpy["old"].random()  # type: ignore[union-attr]
        output: torch.Tensor = self.linear(x * mask) * factor
        return output


def test_generators_of_the_models_own_are_put_back(daemon: FakeDaemon) -> None:
    """A batch that is run again leaves the generators as they were."""
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        net = Drawing()
        optimizer = sgd(net)
        monitor = sentinel.attach(net, optimizer) if watched else None
        for number, batch in enumerate(loops.batches(5)):
            optimizer.zero_grad()
            loss_of(net, batch * (torch.nan if number == 2 else 1)).backward()
            for parameter in net.parameters():
                torch.nan_to_num_(parameter.grad, nan=0.0)
            optimizer.step()
        if monitor is not None:
            monitor.detach()
        weights.append([p.detach().clone() for p in net.parameters()])
    daemon.ended()
    assert [one.what for one in daemon.of(wire.Collected)] == ["provenance"]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_groups_that_are_added_count_in_the_norm_at_once(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "FIRST", {0: 1, 1: 1, 2: 64, 3: 256})
    net = nn.Sequential(nn.Linear(6, 6), loops.model())
    optimizer, true = sgd(net[1]), []
    with sentinel.attach(net, optimizer):
        for number, batch in enumerate(loops.batches(12)):
            if number == 5:
                optimizer.add_param_group({"params": net[0].parameters()})
            net.zero_grad()
            loss_of(net, batch).backward()
            own = [p.grad for group in optimizer.param_groups for p in group["params"]]
            true.append(float(nn.utils.get_total_norm(own)))
            optimizer.step()
    daemon.ended()
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(true)), rel=1e-5)


def test_a_gradient_that_ranks_have_yet_to_add_up_is_left_out() -> None:
    """`SequenceParallel` of tensor parallelism leaves parts of sums: these have no norm; adding up is a collective."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        net = nn.Linear(2, 2, bias=False)
        weight = DTensor.from_local(torch.ones(2, 2), mesh)
        net.weight = nn.Parameter(weight)
        net.weight.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
        found = Gradients(Layers(0, [net], sgd(net)))
    finally:
        dist.destroy_process_group()
    assert found.left_out == {"weight": "partial sums, which the ranks have yet to add up"}
    assert not found.tensors


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_a_model_of_fsdp1_is_not_rolled_back() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = FullyShardedDataParallel(loops.model(), device_id=torch.device("cpu"))
        with pytest.raises(RollbackError, match="fully_shard can"):
            sentinel.attach(net, sgd(net), rollback=sentinel.Rollback())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [lambda net: net, lambda net: torch.compile(net, backend="eager"), checkpoint_wrapper],
    ids=["bare", "compiled", "checkpointed"],
)
def test_the_ddp_around_a_model_that_is_wrapped_itself(
    wrap: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP is found from `attach(model.module)` too: without it, nothing sees replicas that drift apart."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        around = nn.parallel.DistributedDataParallel(wrap(loops.model()))
        outermost = wrap(around)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        assert discovery.replicating([around.module, around, outermost]) == [around, around, outermost]
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_a_module_without_parameters_among_the_models(daemon: FakeDaemon, swallowed: list[str]) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach([net, nn.MSELoss()], optimizer):
        fit(net, optimizer)
    daemon.ended()
    assert not swallowed
    assert daemon.seqs() == [0, 1, 2]


def test_layers_that_are_not_made_yet() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with pytest.raises(AttachError, match=r"0\.weight, 0\.bias.*run one batch through the model first"):
        sentinel.attach(net, sgd(net))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_seen_but_for_its_forward_passes(daemon: FakeDaemon, swallowed: list[str]) -> None:
    net = torch.jit.script(loops.model())
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        fit(net, optimizer)
    daemon.ended()
    assert not swallowed
    assert daemon.series("loss").keys() == {0, 1, 2}
    assert "forward passes (a ScriptModule takes no hooks)" in daemon.of(wire.Hello)[0].unseen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_watched_model_and_its_copy_can_be_scripted(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for model in (net, nn.Sequential(copy.deepcopy(net)), nn.Sequential(net)):
            torch.jit.script(model)
        fit(net, optimizer)
    daemon.ended()
    assert len(daemon.series("forward_seconds")) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_a_watched_part_of_a_model_that_is_quantized_in_place(daemon: FakeDaemon) -> None:
    """Torch moves the hooks to the module that takes the part's place, and forgets that they take keywords."""
    back, head = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 1)
    net = nn.Sequential(back, head)
    optimizer = sgd(net)
    with sentinel.attach([back, head], optimizer):
        fit(net, optimizer)
        torch.ao.quantization.quantize_dynamic(net.eval(), {nn.Linear}, inplace=True)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert net(torch.ones(2, 6)).shape == (2, 1)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]


class Sharpness(torch.optim.Optimizer):
    """An optimizer as in the common implementation of SAM: its own `step` is never called."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=1e-2)

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        self.base_optimizer.step()
        self.zero_grad()


def test_an_optimizer_that_steps_by_methods_of_its_own(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = Sharpness(net.parameters())
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(3):
            loss_of(net, batch).backward()
            optimizer.first_step()
            loss_of(net, batch).backward()
            optimizer.second_step()
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]


def test_clipping_twice_was_clipping_to_the_lower_limit(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer, true = sgd(net), []
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(2):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            true.append(float(nn.utils.clip_grad_norm_(net.parameters(), float("inf"))))
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
    daemon.ended()
    assert daemon.series("clip_limit") == {0: 0.1, 1: 0.1}
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(true)))


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_learning_rate_that_is_learnt_itself(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net, lr=torch.tensor(0.01, requires_grad=True))
    with sentinel.attach(net, optimizer):
        loss_of(net, torch.ones(2, 6)).backward()
        with torch.no_grad():
            optimizer.step()
    daemon.ended()
    assert daemon.series("learning_rate") == {0: pytest.approx(0.01)}
