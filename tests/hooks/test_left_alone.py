"""What Sentinel must not change: variables, generators, parameters, batches, copies; and weights to the bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

import sentinel
from sentinel import wire
from sentinel.hooks.evidence.referrers import locals_of
from tests.hooks import loops
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import fit, sgd


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_an_object_that_holds_a_monitor(copied: Callable[[Any], Any], daemon: FakeDaemon) -> None:
    """A copy, as of a trainer with its monitor and loader, watches nothing."""
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer, run="the run") as monitor:
        held = copied(SimpleNamespace(monitor=monitor, loader=monitor.batches([1, 2])))
        other, loader = copied(monitor), copied(monitor.batches([1, 2]))
        other.detach()
        assert list(loader) == list(held.loader) == [1, 2]
        assert other.run == "the run"
        fit(net, optimizer)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]


def look_on(module: nn.Module, args: Any) -> None:
    """A hook of the user's."""


def test_a_pickle_of_a_watched_model_is_as_without_us(daemon: FakeDaemon) -> None:
    """So it loads with `weights_only=True`, and in the loading process a hook of the user's may have the number that
    ours had."""
    net = loops.model()
    optimizer = sgd(net)
    net.register_forward_pre_hook(look_on)
    before = pickle.dumps(net)
    first = sentinel.attach(net, optimizer)
    assert pickle.dumps(net) == before
    fit(net, optimizer)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.GELU, nn.LayerNorm, set, look_on]):
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    copies = [loaded, copy.deepcopy(net), pickle.loads(pickle.dumps(nn.Sequential(net)))[0]]
    first.detach()
    for copied in copies:
        assert [*copied._forward_pre_hooks.values()] == [look_on]
        assert not copied._forward_hooks
        assert not copied._forward_pre_hooks_with_kwargs
        assert torch.equal(copied(torch.ones(1, 6)), net(torch.ones(1, 6)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_copy_of_a_watched_model_is_scripted_after_the_end(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    for copied in copies:
        scripted = torch.jit.script(copied)
        assert torch.equal(scripted(torch.ones(1, 6)), net(torch.ones(1, 6)))


def test_the_users_locals_are_not_changed() -> None:
    def function() -> dict[str, Any]:
        value = 1
        held = locals()
        assert locals_of(sys._getframe())["value"] == value
        return held

    assert function()["value"] == 1


def test_the_variables_of_a_function_are_let_go_of() -> None:
    """Before Python 3.13 the dictionary of the frame would hold its variables otherwise."""

    class Big:
        pass

    big = Big()
    seen = weakref.ref(big)
    assert locals_of(sys._getframe())["big"] is big
    del big
    assert seen() is None


def test_a_parameter_that_the_model_returns_gathers_no_hooks(daemon: FakeDaemon) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(6, 1), nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), self.scale

    net = Net()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(3):
            output, scale = net(batch)
            (output * scale).square().mean().backward()
            optimizer.step()
            assert not net.scale._backward_hooks


def test_an_encoder_layer_evaluates_with_its_fused_kernel(daemon: FakeDaemon) -> None:
    """Torch uses it only where the layer has no hooks; its outputs differ in the last bits."""
    batch = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(6).expand(2, 6) > 3
    outputs = []
    for watched in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        optimizer = sgd(layer)
        with sentinel.attach(layer, optimizer) if watched else contextlib.nullcontext():
            layer.train()
            layer(batch).square().mean().backward()
            optimizer.step()
            layer.eval()
            with torch.no_grad():
                outputs.append(layer(batch, src_key_padding_mask=padding))
    daemon.ended()
    assert torch.equal(*outputs)
    assert any("forward passes (a TransformerEncoderLayer" in text for text in daemon.of(wire.Hello)[0].unseen)
    assert daemon.series("loss").keys() == {0}


class Augmenting:
    """A batch that adds noise to what is read from it."""

    def __getitem__(self, key: Any) -> Any:
        held = super().__getitem__(key)  # type: ignore[misc]
        return held + torch.randn_like(held)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[0]]) if isinstance(self, list) else super().__iter__()  # type: ignore[misc]

    def values(self) -> list[Any]:
        return [self["x"]]


class AugmentingDict(Augmenting, dict[str, Any]): ...


class AugmentingUserDict(Augmenting, UserDict[str, Any]): ...


class AugmentingList(Augmenting, list[Any]): ...


class AugmentingMapping(Augmenting, Mapping[str, Any]):
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, key: Any) -> Any:
        return self.x + torch.randn_like(self.x)

    def __iter__(self) -> Iterator[Any]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


class First(nn.Module):
    """Takes a batch whose first part is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = loops.model()

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.inner(batch[0 if isinstance(batch, list) else "x"])
        return output


@pytest.mark.parametrize(
    "collate",
    [
        lambda x: AugmentingDict(x=x),
        lambda x: AugmentingUserDict(x=x),
        lambda x: AugmentingList([x]),
        AugmentingMapping,
    ],
    ids=["dict", "UserDict", "list", "Mapping"],
)
def test_a_batch_that_draws_random_numbers_when_it_is_read(
    collate: Callable[[torch.Tensor], Any], daemon: FakeDaemon
) -> None:
    weights = []
    for watched in (False, True):
        net = First()
        optimizer = sgd(net)
        loader = DataLoader([*next(loops.batches(1))], batch_size=4, collate_fn=lambda rows: collate(torch.stack(rows)))
        with sentinel.attach(net, optimizer) if watched else contextlib.nullcontext():
            for batch in loader:
                net(batch).square().mean().backward()
                optimizer.step()
        weights.append([parameter.detach().clone() for parameter in net.parameters()])
    daemon.ended()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_pass_of_fake_tensors_is_not_the_loops(daemon: FakeDaemon) -> None:
    """A program makes it to estimate its memory. It was an internal fault, and cost a probe."""
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for step in range(4):
            if step in (0, 2):
                with FakeTensorMode() as mode:
                    fake = {key: mode.from_tensor(one).detach().requires_grad_() for key, one in net.named_parameters()}
                    torch.func.functional_call(net, fake, (torch.empty(8, 6),)).square().mean().backward()
            fit(net, optimizer, 1)
    daemon.ended()
    assert daemon.series("micro_batches") == dict.fromkeys(range(4), 1.0)


def test_a_tensor_that_the_model_makes_once_gathers_no_hooks(daemon: FakeDaemon) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.directions = torch.cat([self.inner.weight, torch.ones(1, 6)])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), self.directions

    net = Net()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(3):
            output, directions = net(batch)
            (output.square().mean() + directions.sum()).backward()
            assert len(directions._backward_hooks) == 1
            optimizer.step()
            assert not directions._backward_hooks
        net(batch)
    assert not net.directions._backward_hooks, "nor after the end"


@pytest.mark.parametrize("passes", [1, 2])
def test_an_output_that_the_loop_keeps_does_not_keep_its_gradient(passes: int, daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net)
    outputs: list[torch.Tensor] = []
    gradients: list[weakref.ref[torch.Tensor]] = []
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(3):
            for _ in range(passes):
                outputs.append(net(batch))
                outputs[-1].register_hook(lambda gradient: gradients.append(weakref.ref(gradient)))
                assert not any(gradient() is not None for gradient in gradients), "of the pass before"
                outputs[-1].square().mean().backward()
            optimizer.step()
    assert len(gradients) == len(outputs)
    assert not any(gradient() is not None for gradient in gradients)


def test_a_batch_that_is_run_again_leaves_the_generator_as_it_was(daemon: FakeDaemon) -> None:
    """Running a batch again restores the random generator, and copes with a buffer that cannot be written to."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = nn.Linear(6, 1), nn.Dropout()
            self.register_buffer("ones", torch.ones(1, 1).expand(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.drop(x)) * self.ones

    net = Net()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        loss = net(next(loops.batches(1))).square().mean() * torch.nan
        torch.rand(3)
        loss.backward()
        before = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
    daemon.ended()
    (found,) = daemon.of(wire.Collected)
    assert found.content["origin"] == "loss"


class Generator(nn.Module):
    """Its graph saves buffers, one of which each call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.inner(x)) * self.calls  # type: ignore[no-any-return]


def test_a_batch_that_is_run_again_leaves_other_graphs_usable(daemon: FakeDaemon) -> None:
    """The discriminator's step takes place while the generator's graph waits for its backward pass."""
    generator, discriminator = Generator(), nn.Linear(6, 1)
    optimizers = sgd(generator), sgd(discriminator)
    with sentinel.attach([generator, discriminator], [*optimizers]):
        fake = generator(next(loops.batches(1)))
        (discriminator(fake.detach()).mean() * torch.inf).backward()
        optimizers[1].step()
        nn.init.ones_(discriminator.weight)
        discriminator(fake).mean().backward()
        optimizers[0].step()
    daemon.ended()
    assert [one.content["origin"] for one in daemon.of(wire.Collected)] == ["loss"]
    assert generator.calls == generator.norm.num_batches_tracked == 1


@pytest.mark.parametrize("models", [1, 2])
def test_no_batch_is_held_after_the_end(models: int, daemon: FakeDaemon) -> None:
    nets = [loops.model(seed) for seed in range(models)]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.01)
    monitor = sentinel.attach(nets, optimizer)
    batch = next(loops.batches(1))
    held = weakref.ref(batch)
    torch.stack([net(batch) for net in nets]).square().mean().backward()
    optimizer.step()
    nets[0](batch)
    monitor.detach()
    del batch
    gc.collect()
    assert held() is None


# Loops whose weights are the same to the bit. `test_exact.py` has the usual ones.

Body = Callable[[int, torch.Tensor], None]


def _raises_halfway() -> tuple[nn.Module, torch.optim.Optimizer, Body]:
    """Return a loop that raises in the forward pass, the backward pass and the step, and goes on."""
    net = loops.model()
    optimizer = torch.optim.Adam(net.parameters())

    def closure() -> float:
        raise ValueError

    def body(number: int, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        with contextlib.suppress(RuntimeError, ValueError):
            loss = loops.loss_of(net, batch[:, :3] if number % 4 == 1 else batch)
            loss.backward(torch.ones(7) if number % 4 == 2 else None)
            optimizer.step(closure if number % 4 == 3 else None)

    return net, optimizer, body


def _functional() -> tuple[nn.Module, torch.optim.Optimizer, Body]:
    net = loops.model()
    optimizer = torch.optim.Adam(net.parameters())

    def loss(weights: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(net, weights, (batch,)) - batch.sum(-1, keepdim=True)).square().mean()

    def body(_: int, batch: torch.Tensor) -> None:
        weights = {name: p.detach() for name, p in net.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, batch)
        for name, parameter in net.named_parameters():
            parameter.grad = found[name].mean(0)
        optimizer.step()

    return net, optimizer, body


def _traced_back() -> tuple[nn.Module, torch.optim.Optimizer, Body]:
    """Return a loop in which the batch of a NaN is run again, after numbers were drawn; it mends the gradients."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters())

    def body(number: int, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (loops.loss_of(net, batch) * (torch.nan if number == 3 else torch.rand(()))).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0)
        optimizer.step()

    return net, optimizer, body


def _odd_parameters() -> tuple[nn.Module, torch.optim.Optimizer, Body]:
    """Return a loop whose parameters are complex, empty, in one storage, or now and then without a gradient."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    net[1].weight.data = net[0].weight.data
    net.complex, net.empty = nn.Parameter(torch.randn(3, dtype=torch.cfloat)), nn.Parameter(torch.zeros(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def body(number: int, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (loops.loss_of(net, batch) + net.complex.abs().sum()).backward()
        list(net.parameters())[number % 6].grad = None
        optimizer.step()

    return net, optimizer, body


@pytest.mark.parametrize("make", [_raises_halfway, _functional, _traced_back, _odd_parameters])
def test_weights_are_the_same_to_the_bit(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer, Body]], daemon: FakeDaemon
) -> None:
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        net, optimizer, body = make()
        with sentinel.attach(net, optimizer) if watched else contextlib.nullcontext():
            for number, batch in enumerate(loops.batches(12)):
                body(number, batch)
        found.append([*net.state_dict().values(), torch.get_rng_state()])
    daemon.ended()
    assert all(map(torch.equal, *found))
