"""What the user deletes is freed: Sentinel keeps no model, no optimizer, and no object that a user's function holds."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel import wire
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from tests.hooks.conftest import WAIT, FakeDaemon
from tests.hooks.loops import batches, fit, loss_of, model, sgd
from tests.hooks.sessions import list_sessions


class Trainer:
    """An object of the user's that holds what trains, and whose methods are callbacks."""

    def __init__(self) -> None:
        self.net = model()
        self.optimizer = sgd(self.net)
        self.told = threading.Event()

    def on_alert(self, alert: dict[str, Any]) -> None:
        self.told.set()

    def on_rollback(self, to: int, at: int) -> None: ...


def references(trainer: Trainer) -> list[weakref.ref[Any]]:
    return [weakref.ref(trainer), weakref.ref(trainer.net), weakref.ref(trainer.optimizer)]


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Only reference counts free objects, as in a loop that turns the garbage collector off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_hooks(net: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in net.modules())


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("out of memory")


def gone(references: list[weakref.ref[Any]]) -> bool:
    gc.collect()
    return [one() for one in references] == [None] * len(references)


def test_callbacks_of_the_user_hold_nothing_alive(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a detach, the end of the function that trained is the end of the run."""
    trainer = Trainer()
    monitor = sentinel.attach(trainer.net, trainer.optimizer, rollback=sentinel.Rollback(every=2, margin=1))
    monitor.on_alert(trainer.on_alert)
    monitor.on_rollback(trainer.on_rollback)
    fit(trainer.net, trainer.optimizer)
    alive = references(trainer)
    del trainer
    assert gone(alive)
    daemon.ended()
    assert "is watched no more: its optimizer is gone" in capfd.readouterr().err


@pytest.mark.parametrize("detached", [True, False])
def test_parameters_are_freed_with_model_and_optimizer(detached: bool, daemon: FakeDaemon) -> None:
    trainer = Trainer()
    monitor = sentinel.attach(trainer.net, trainer.optimizer)
    fit(trainer.net, trainer.optimizer, 4)
    if detached:
        monitor.detach()
    alive = [*references(trainer), *map(weakref.ref, trainer.net.parameters())]
    del trainer
    assert gone(alive)


def test_the_thread_that_calls_them_holds_nothing_alive(daemon: FakeDaemon) -> None:
    trainer = Trainer()
    with sentinel.attach(trainer.net, trainer.optimizer) as monitor:
        monitor.on_alert(trainer.on_alert)
        daemon.wait(lambda: daemon.of(wire.Hello))
        daemon.send(wire.Notice(text="", alert={"event": "fired"}))
        assert trainer.told.wait(WAIT)
        (thread,) = [one for one in threading.enumerate() if one.name == "sentinel-alerts"]
    alive = references(trainer)
    del trainer
    assert gone(alive)
    thread.join(WAIT)
    assert not thread.is_alive()


def test_an_alert_at_the_last_moment_reaches_the_user(daemon: FakeDaemon) -> None:
    """The daemon's last messages come after the goodbye."""
    trainer = Trainer()
    monitor = sentinel.attach(trainer.net, trainer.optimizer)
    monitor.on_alert(trainer.on_alert)
    daemon.wait(lambda: daemon.of(wire.Hello))
    session = list_sessions()[0]
    stop = session.sender.stop

    def stopped(*arguments: Any) -> None:
        daemon.send(wire.Notice(text="", alert={"event": "fired"}))
        assert trainer.told.wait(WAIT)
        stop(*arguments)

    session.sender.stop = stopped  # type: ignore[method-assign]
    monitor.detach()
    assert trainer.told.is_set()


def test_a_snapshot_that_waits_for_the_end_of_its_iteration(daemon: FakeDaemon, tmp_path: Path) -> None:
    """The last snapshot of a loop without a loader waits for an end of the iteration that is never seen."""
    trainer = Trainer()
    terms = sentinel.Rollback(every=2, margin=1, directory=tmp_path / "snapshots")
    sentinel.attach(trainer.net, trainer.optimizer, rollback=terms)
    fit(trainer.net, trainer.optimizer, 3)
    assert list_sessions()[0].accumulator.when_next is not None
    alive = references(trainer)
    del trainer
    assert gone(alive)
    daemon.ended()


def test_a_batch_that_was_looked_into_with_two_models(daemon: FakeDaemon) -> None:
    """A batch that was looked into is held until its step is over, and is not taken for that of a later fault."""
    nets = [model(), model(1)]
    optimizers = [sgd(net) for net in nets]
    broken: list[weakref.ref[torch.Tensor]] = []
    with sentinel.attach(nets, optimizers):
        for step, batch in enumerate(batches(6)):
            if step == 2:
                batch[0, 0] = torch.nan
                broken.append(weakref.ref(batch))
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                if loss.isfinite():
                    optimizer.step()
        assert gone(broken)
    daemon.ended()


class Marked(torch.autograd.Function):
    """Its node of the graph holds an object, which lives as long as the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: list[weakref.ref[Any]]) -> torch.Tensor:
        ctx.mark = nn.Module()
        alive.append(weakref.ref(ctx.mark))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Head(nn.Linear):
    """Takes what holds its input, too."""

    def forward(self, given: Any) -> torch.Tensor:
        while not isinstance(given, torch.Tensor):
            given = given["x"] if isinstance(given, dict) else given.x if hasattr(given, "x") else given[-1]
        return super().forward(given)


class Subclass(torch.Tensor):
    """A class of the user's."""


@dataclasses.dataclass
class Features:
    x: torch.Tensor


@pytest.mark.parametrize(
    "holds",
    [
        lambda x: x,
        lambda x: [1, {"x": x}],
        lambda x: (*[torch.ones(1)] * 20, x),
        Features,
        lambda x: x.as_subclass(Subclass),
    ],
    ids=["tensor", "containers", "many", "dataclass", "subclass"],
)
def test_the_graph_of_features_from_a_model_that_is_not_watched(
    holds: Callable[[torch.Tensor], Any], daemon: FakeDaemon, no_collection: None
) -> None:
    """A loop that logs a score without `no_grad` has freed the activations of the whole backbone by then."""
    back, head = nn.Linear(6, 6), Head(6, 1)
    alive: list[weakref.ref[Any]] = []
    with sentinel.attach(head, sgd(head)):
        for batch in batches(3):
            head(holds(Marked.apply(back(batch), alive))).mean().item()
            assert [mark() for mark in alive] == [None] * len(alive)


def test_parameters_that_are_pruned_between_the_steps_of_two_models(daemon: FakeDaemon, no_collection: None) -> None:
    """A graph that is still alive has the shapes that the parameters had."""
    generator, discriminator = nn.Linear(6, 8), Head(8, 1)
    optimizers = sgd(generator), sgd(discriminator)
    with sentinel.attach([generator, discriminator], [*optimizers]):
        for batch in batches(3):
            fake = generator(batch)
            discriminator(nn.functional.pad(fake, (0, 8 - fake.shape[1]))).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for parameter in generator.parameters():
                parameter.data = parameter.data[:-1].clone()
            del fake
    daemon.ended()
    assert daemon.seqs()


def test_a_thread_that_fetches_ahead_does_not_end_the_iteration() -> None:
    class Called:
        times = 0

        def once(self) -> None:
            self.times += 1

    accumulator, called = StepAccumulator(), Called()
    accumulator.defer(called.once)
    ahead = threading.Thread(target=accumulator.next_iteration)
    ahead.start()
    ahead.join()
    assert called.times == 0
    accumulator.next_iteration()
    accumulator.next_iteration()
    assert called.times == 1


def test_a_parameter_that_another_one_replaces(daemon: FakeDaemon) -> None:
    """Splitting and pruning Gaussians replaces parameters, and leaves as many of them, and of groups, as before."""
    net = nn.Linear(6, 1, bias=False)
    optimizer = sgd(net)
    first = weakref.ref(net.weight)
    with sentinel.attach(net, optimizer):
        fit(net, optimizer, 2)
        net.weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.full((1, 6), 2.0))
        for batch in batches(20):
            optimizer.zero_grad()
            loss_of(net, batch).backward()  # type: ignore[no-untyped-call]
            norm = float(net.weight.grad.norm())  # type: ignore[union-attr]
            optimizer.step()
        gc.collect()
        assert first() is None
    daemon.ended()
    assert daemon.series("grad_norm")[21] == pytest.approx(norm, rel=1e-6)


def test_the_graph_of_a_backward_pass_that_raised(daemon: FakeDaemon, no_collection: None) -> None:
    """After an error for lack of memory, a loop tries again with smaller batches."""
    net = model()
    held: list[weakref.ref[torch.Tensor]] = []

    def step(batch: torch.Tensor) -> None:
        output = net(batch)
        held.append(weakref.ref(output))
        FailingBackward.apply(output).sum().backward()

    with sentinel.attach(net, sgd(net)):
        with pytest.raises(RuntimeError, match="out of memory"):
            step(next(batches(1)))
        assert [output() for output in held] == [None]


class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("closure", [None, lambda: 0.0])
def test_a_step_that_raised(closure: Any, daemon: FakeDaemon, no_collection: None) -> None:
    """The loop may clear the gradients and try again, or delete the optimizer."""
    net = model()
    optimizer = FailingOptimizer(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        loss_of(net, next(batches(1))).backward()  # type: ignore[no-untyped-call]
        held = [weakref.ref(parameter.grad) for parameter in net.parameters()]
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(closure)
        optimizer.zero_grad()
        assert {gradient() for gradient in held} == {None}
        watched = weakref.ref(optimizer)
        del optimizer
        assert watched() is None


def test_gradients_of_optimizers_that_step_inside_the_backward_pass(daemon: FakeDaemon, no_collection: None) -> None:
    """Such loops clear each gradient as soon as it is applied, so that no two are in memory."""
    net = model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in net.parameters()}
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def apply(parameter: torch.Tensor) -> None:
        alive.append(sum(gradient() is not None for gradient in held))
        assert parameter.grad is not None
        held.append(weakref.ref(parameter.grad))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    with sentinel.attach(net, [*optimizers.values()]):
        loss_of(net, next(batches(1))).backward()  # type: ignore[no-untyped-call]
    daemon.ended()
    assert daemon.layers("layer_grad_norm")[0].keys() == {name for name, _ in net.named_parameters()}
    assert alive == [0] * len(optimizers)


def test_a_model_that_gets_a_new_optimizer_for_each_fold_has_the_hooks_of_one_run(daemon: FakeDaemon) -> None:
    net, counts = model(), list[int]()
    for _ in range(3):
        optimizer = sgd(net)
        sentinel.attach(net, optimizer)
        fit(net, optimizer)
        counts.append(count_hooks(net))
        del optimizer
        gc.collect()
        daemon.ended()
    assert counts[0] == counts[1] == counts[2] > 0
