"""Names of layers, tied and frozen parameters, wrappers, and parameters that are sharded over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.hooks.loop.grad_clipping import Clip, Clipping
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.torch_interop.layer_table import Layers, labels, named_parameters
from tests.hooks.loops import model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def sgd(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_tied_parameters_are_measured_once() -> None:
    net = Tied()
    layers = Layers(0, [net], sgd(*net.parameters()))
    assert [(layer.name, layer.tied_to) for layer in layers.table.layers] == [
        ("embedding.weight", ""),
        ("head.weight", "embedding.weight"),
    ]
    assert [row for row, *_ in layers.measured] == [0]


def test_frozen_layers_are_in_the_table() -> None:
    net = model()
    net[0].requires_grad_(False)
    layers = Layers(0, [net], sgd(*(p for p in net.parameters() if p.requires_grad)))
    assert [layer.trainable for layer in layers.table.layers] == [False, False, True, True, True, True]
    assert [row for row, *_ in layers.measured] == [2, 3, 4, 5]


def test_the_table_follows_thawing_and_new_groups() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = sgd(*net[3].parameters())
    layers = Layers(0, [net], optimizer)
    digests = [layers.table.digest]
    layers.refresh(optimizer)
    assert layers.table.digest == digests[0]
    optimizer.add_param_group({"params": list(net[2].parameters())})
    layers.refresh(optimizer)
    digests.append(layers.table.digest)
    assert len(layers.measured) == 4
    net.extra = nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(net.extra.parameters())})
    layers.refresh(optimizer)
    digests.append(layers.table.digest)
    assert layers.table.layers[-1].name == "extra.bias"
    assert len(set(digests)) == 3  # what the optimizer holds is part of it


def test_wrappers_leave_no_trace_in_names() -> None:
    net = model()
    names = [name for name, _ in net.named_parameters()]
    part = nn.Sequential(torch.compile(net, backend="eager"))  # type: ignore[arg-type]
    assert [name for _, name, _ in named_parameters([torch.compile(net, backend="eager")])] == names  # type: ignore[list-item]
    assert [name for _, name, _ in named_parameters([nn.DataParallel(net)])] == names
    assert [name for _, name, _ in named_parameters([part])] == [f"0.{name}" for name in names]
    assert labels([net, nn.DataParallel(net)]) == ["Sequential[0]", "Sequential[1]"]


class Mesh:
    shape = (2,)

    def get_coordinate(self) -> list[int]:
        return [1]


class Placement:
    def __init__(self, dim: int | None) -> None:
        self.dim = dim

    def is_shard(self) -> bool:
        return self.dim is not None

    def is_replicate(self) -> bool:
        return self.dim is None


def spread(shape: tuple[int, ...], part: torch.Tensor, dim: int | None) -> Any:
    """Return a parameter as FSDP2 leaves it, without memory for the whole: any operation on that would fail."""
    parameter: Any = nn.Parameter(torch.empty(shape, device="meta"))
    parameter._local_tensor = part
    parameter.device_mesh, parameter.placements = Mesh(), (Placement(dim),)
    return parameter


def test_sharded_parameters_are_read_where_they_are() -> None:
    """Only this rank's part is touched: no collective can be hidden in it. Uneven shards may be empty."""
    net = nn.Module()
    parts = {"weight": (torch.full((2, 3), 2.0), 0), "empty": (torch.empty(0, 3), 0), "scale": (torch.ones(3), None)}
    for name, (part, dim) in parts.items():
        parameter = spread((5, 3), part, dim)
        parameter.grad = torch.empty((5, 3), device="meta")
        parameter.grad._local_tensor = part
        net.register_parameter(name, parameter)
    layers = Layers(0, [net], sgd(*net.parameters()))
    assert [layer.placement for layer in layers.table.layers] == [("shard(0)",), ("shard(0)",), ("replicate",)]
    assert {(layer.mesh, layer.coordinates) for layer in layers.table.layers} == {((2,), (1,))}
    gradients = Gradients(layers)
    assert gradients.rows == [0, 2]
    assert gradients.norms.tolist() == pytest.approx([math.sqrt(24), math.sqrt(3)])
    assert gradients.sharded == pytest.approx(math.sqrt(24))
    assert gradients.total == pytest.approx(math.sqrt(27))


def test_a_shard_that_two_ranks_hold_counts_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """HSDP: the mesh has a dimension of replicas and one of shards. FSDP2 over tensor parallelism has two of shards,
    one of them strided, which is no shard by is_shard()."""

    class Strided(Placement):
        def is_shard(self) -> bool:
            return False

    parameter = spread((5, 3), torch.ones(2, 3), 0)
    parameter.placements = Placement(None), Placement(0)
    net = nn.ParameterList([parameter])
    for coordinates, part, replica, norm in (([0, 1], (1,), 0, math.sqrt(6)), ([1, 1], (1,), 1, 0.0)):
        monkeypatch.setattr(Mesh, "get_coordinate", lambda _, coordinates=coordinates: coordinates)
        parameter.grad = torch.empty((5, 3), device="meta")
        parameter.grad._local_tensor = torch.ones(2, 3)
        layers = Layers(0, [net], sgd(parameter))
        (layer,) = layers.table.layers
        assert (layer.part, layer.replica, Gradients(layers).sharded) == (part, replica, pytest.approx(norm))
    parameter.placements = Strided(0), Placement(1)
    (layer,) = Layers(0, [net], sgd(parameter)).table.layers
    assert (layer.placement, layer.part, layer.replica) == (("shard(0)", "shard(1)"), (1, 1), 0)


def test_gradients_of_mixed_types() -> None:
    net = nn.ParameterDict(
        {
            "f16": nn.Parameter(torch.ones(4, dtype=torch.float16)),
            "f32": nn.Parameter(torch.ones(4)),
            "f64": nn.Parameter(torch.ones(4, dtype=torch.float64)),
            "bf16": nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
        }
    )
    for number, parameter in enumerate(net.values()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    gradients = Gradients(Layers(0, [net], sgd(*net.values())))
    assert gradients.norms.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert gradients.norms.dtype == torch.float32
    low, high = gradients.extremes
    assert low.tolist() == high.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert gradients.nonfinite.tolist() == [0.0] * 4


def test_elements_that_are_not_finite_are_counted() -> None:
    net = model()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    grads = dict(net.named_parameters())
    grads["0.weight"].grad[0, :3] = math.nan  # type: ignore[index]
    grads["3.bias"].grad.fill_(-math.inf)  # type: ignore[union-attr]
    grads["2.weight"].grad.fill_(3e38)  # type: ignore[union-attr]  # finite, though its norm is not
    gradients = Gradients(Layers(0, [net], sgd(*net.parameters())))
    counts = dict(zip(grads, gradients.nonfinite.tolist(), strict=True))
    assert counts == {"0.weight": 3, "0.bias": 0, "2.weight": 0, "2.bias": 0, "3.weight": 0, "3.bias": 1}


def test_the_parameters_that_clipping_covers_follow_the_optimizer() -> None:
    net = model()
    optimizer = sgd(*net[0].parameters())
    layers = Layers(0, [net], optimizer)
    clipping = Clipping(lambda: layers.trained_ids)
    own, norm = list(net[0].parameters()), torch.tensor(2.0)
    clipping.record_clipping(own, 1.0, norm, l2=True, scale=None)
    assert clipping.take() == Clip(2.0, 1.0)
    optimizer.add_param_group({"params": list(net[2].parameters())})
    layers.refresh(optimizer)
    clipping.record_clipping(own, 1.0, norm, l2=True, scale=None)
    assert clipping.take() == Clip(None, 1.0), "it is a part by now"
    clipping.record_clipping([*own, *net[2].parameters()], 1.0, norm, l2=True, scale=4.0)
    assert clipping.take() == Clip(0.5, 1.0)
    net[2].requires_grad_(False)
    layers.refresh(optimizer)
    for given in (own, [*own, *net[2].parameters()]):
        clipping.record_clipping(list(given), 1.0, norm, l2=True, scale=None)
        assert clipping.take() == Clip(2.0, 1.0), "what is frozen has no gradient"
    for _ in range(500):
        clipping.record_clipping([torch.ones(1, requires_grad=True), *own], 1.0, norm, l2=True, scale=None)
    assert len(clipping._covers) < 100
