"""Loops with more than one plain optimizer step: the signals are right, and the weights the same to the bit."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import sentinel
from sentinel import wire
from sentinel.hooks.core import governor
from sentinel.hooks.step.optimizer_in_backward import BackwardGathering
from sentinel.hooks.torch_interop import tensors
from sentinel.wire.heartbeat_page import SIZE, unpack_heartbeat
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model
from tests.hooks.sessions import find_heartbeat_writer

STEPS = 6
Attach = Callable[..., object]
Losses = dict[int, list[float]]
"""Stream -> the loss of each of its steps."""


def adamw(*parameters: torch.Tensor, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def plain(
    net: nn.Module, optimizer: torch.optim.Optimizer, attach: Attach, model_called: nn.Module | None = None
) -> Losses:
    called = net if model_called is None else model_called
    attach(called, optimizer)
    losses = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(called, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {0: losses}


def bf16_autocast(attach: Attach) -> tuple[nn.Module, Losses]:
    net = model()
    with torch.autocast("cpu", torch.bfloat16):
        return net, plain(net, adamw(*net.parameters()), attach)


def bf16_weights(attach: Attach) -> tuple[nn.Module, Losses]:
    net = model().bfloat16()
    optimizer = adamw(*net.parameters())
    attach(net, optimizer)
    losses = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, batch.bfloat16())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, {0: losses}


def gan(attach: Attach) -> tuple[nn.Module, Losses]:
    """The discriminator steps twice for each step of the generator, whose backward passes go through it."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    ours, theirs = adamw(*judge.parameters()), adamw(*generator.parameters())
    attach([judge, generator], [ours, theirs])
    losses: Losses = {0: [], 1: []}
    for batch in batches(STEPS):
        for _ in range(2):
            ours.zero_grad()
            real = judge(batch).square().mean()
            real.backward()
            fake = (judge(generator(batch).detach()) - 1).square().mean()
            fake.backward()
            ours.step()
            losses[0].append(real.item() + fake.item())
        theirs.zero_grad()
        loss = judge(generator(batch)).square().mean()
        loss.backward()
        theirs.step()
        losses[1].append(loss.item())
    return nn.ModuleList([generator, judge]), losses


def gan_one_scaler(attach: Attach) -> tuple[nn.Module, Losses]:
    torch.manual_seed(0)
    generator, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizers = [adamw(*judge.parameters()), adamw(*generator.parameters())]
    scaler = GradScaler("cpu", 64.0)
    attach([judge, generator], optimizers)
    losses: Losses = {0: [], 1: []}
    for batch in batches(STEPS):
        for turn, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            made = generator(batch)
            loss = judge(made if turn else made.detach()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            losses[turn].append(loss.item())
        scaler.update()
    return nn.ModuleList([generator, judge]), losses


def lbfgs(attach: Attach) -> tuple[nn.Module, Losses]:
    """Train with LBFGS, whose closure runs several times a step."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    attach(net, optimizer)
    losses = []
    for batch in batches(STEPS):
        within: list[float] = []

        def closure(batch: torch.Tensor = batch, within: list[float] = within) -> float:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            within.append(loss.item())
            return within[-1]

        optimizer.step(closure)
        losses.append(sum(within))
    return net, {0: losses}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = model(), reentrant
        self.first = nn.Linear(6, 6)

    def forward(self, batch: torch.Tensor) -> Any:
        return checkpoint(self.inner, self.first(batch), use_reentrant=self.reentrant)


def checkpointed(attach: Attach) -> tuple[nn.Module, Losses]:
    net = Checkpointed(reentrant=False)
    return net, plain(net, adamw(*net.parameters()), attach)


def checkpointed_reentrant(attach: Attach) -> tuple[nn.Module, Losses]:
    """The backward pass of the checkpointed part runs inside the outer one: its root is no loss."""
    net = Checkpointed(reentrant=True)
    return net, plain(net, adamw(*net.parameters()), attach)


def foreach(attach: Attach) -> tuple[nn.Module, Losses]:
    net = model()
    return net, plain(net, adamw(*net.parameters(), foreach=True), attach)


def for_loop(attach: Attach) -> tuple[nn.Module, Losses]:
    net = model()
    return net, plain(net, adamw(*net.parameters(), foreach=False), attach)


class Quantised(torch.optim.Optimizer):
    """Keeps its momentum in 8 bits and a scale, as bitsandbytes does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "scale" not in state:
                    state["momentum"], state["scale"] = torch.zeros_like(p, dtype=torch.int8), torch.zeros(())
                momentum = 0.9 * state["momentum"].float() * state["scale"] + p.grad
                state["scale"] = momentum.abs().max() / 127
                state["momentum"] = (momentum / state["scale"]).round().to(torch.int8)
                p.sub_(group["lr"] * momentum)


def eight_bit(attach: Attach) -> tuple[nn.Module, Losses]:
    net = model()
    return net, plain(net, Quantised(net.parameters()), attach)


def data_parallel(attach: Attach) -> tuple[nn.Module, Losses]:
    net = model()
    return net, plain(net, adamw(*net.parameters()), attach, nn.DataParallel(net))


def ema(attach: Attach) -> tuple[nn.Module, Losses]:
    """Keep two averages: torch's, and one by deepcopy that is swapped in for an evaluation between two steps."""
    net = model()
    optimizer = adamw(*net.parameters())
    attach(net, optimizer)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    copied = copy.deepcopy(net)
    losses = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        average.update_parameters(net)
        with torch.no_grad():
            for mean, p in zip(copied.parameters(), net.parameters(), strict=True):
                mean.lerp_(p, 0.1)
                kept = p.clone()
                p.copy_(mean)
                mean.copy_(kept)
            loss_of(net, batch)
            loss_of(average, batch)
            for mean, p in zip(copied.parameters(), net.parameters(), strict=True):
                kept = p.clone()
                p.copy_(mean)
                mean.copy_(kept)
    return nn.ModuleList([net, average, copied]), {0: losses}


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that are augmented at random in the worker."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(6)


def forked_workers(attach: Attach) -> tuple[nn.Module, Losses]:
    net = model()
    optimizer = adamw(*net.parameters())
    attach(net, optimizer)
    losses = []
    for batch in DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, {0: losses}


def lora(attach: Attach) -> tuple[nn.Module, Losses]:
    """Train with PEFT's LoRA: the base is frozen, the adapters are in the optimizer."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0", "3"]), model())
    return net, plain(net, adamw(*(p for p in net.parameters() if p.requires_grad)), attach)


def in_backward(attach: Attach) -> tuple[nn.Module, Losses]:
    """Train with an optimizer for each parameter, which steps and clears the gradient as soon as that is there."""
    net = model()
    net[2].bias.requires_grad_(False)
    optimizers = {p: adamw(p) for p in net.parameters() if p.requires_grad}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    attach(net, list(optimizers.values()))
    losses = []
    for batch in batches(STEPS):
        loss = loss_of(net, batch)
        loss.backward()
        losses.append(loss.item())
    for handle in handles:  # the garbage collector cannot see what hangs on a tensor
        handle.remove()
    return net, {0: losses}


LOOPS = {
    loop.__name__: loop
    for loop in (
        bf16_autocast, bf16_weights, gan, gan_one_scaler, lbfgs, checkpointed, checkpointed_reentrant, foreach,
        for_loop, eight_bit, data_parallel, ema, forked_workers, lora, in_backward,
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of peft, and of forks in a process with threads
def test_signals_are_right_and_weights_the_same_to_the_bit(
    name: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "FIRST", dict.fromkeys(governor.FIRST, 1))
    torch.manual_seed(0)
    bare, expected = LOOPS[name](lambda *_: None)
    torch.manual_seed(0)
    monitors: list[sentinel.Monitor] = []
    watched, losses = LOOPS[name](lambda *given: monitors.append(sentinel.attach(*given)))
    monitors[0].detach()
    assert losses == expected
    for one, other in zip(bare.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert daemon.ended().reason == "detach"
    assert len({hello.identity.session for hello in daemon.of(wire.Hello)}) == 1
    assert {batch.stream for batch in daemon.of(wire.Batch)} == set(losses)
    for stream, series in losses.items():
        assert daemon.seqs(stream) == list(range(len(series)))
        assert daemon.series("loss", stream) == pytest.approx(dict(enumerate(series)), rel=1e-5)
        assert all(norm > 0 for norm in daemon.series("grad_norm", stream).values())
        assert set(daemon.layers("layer_grad_norm", stream)) == set(range(len(series)))


def test_the_layers_of_lora_are_named_and_the_frozen_are_known(daemon: FakeDaemon) -> None:
    monitors: list[sentinel.Monitor] = []
    net, _ = lora(lambda *given: monitors.append(sentinel.attach(*given)))
    monitors[0].detach()
    daemon.ended()
    layers = daemon.of(wire.LayerTable)[0].layers
    assert {layer.name: layer.trainable for layer in layers} == {n: p.requires_grad for n, p in net.named_parameters()}
    assert sum(layer.trainable for layer in layers) == 4
    assert set(daemon.layers("layer_grad_norm")[0]) == {layer.name for layer in layers if layer.trainable}


def test_gradients_of_optimizers_in_the_backward_pass_are_the_whole_models(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    monitors: list[sentinel.Monitor] = []
    rollback = sentinel.Rollback(every=2, margin=1)
    in_backward(lambda *given: monitors.append(sentinel.attach(*given, rollback=rollback)))
    monitors[0].detach()
    daemon.ended()
    net = model()
    net[2].bias.requires_grad_(False)
    loss_of(net, next(batches(1))).backward()
    norms = {name: p.grad.norm().item() for name, p in net.named_parameters() if p.grad is not None}
    assert daemon.layers("layer_grad_norm")[0] == pytest.approx(norms)
    assert daemon.series("grad_norm")[0] == pytest.approx(sum(norm**2 for norm in norms.values()) ** 0.5)
    assert list(daemon.series("learning_rate").values()) == [1e-2] * STEPS
    hello = daemon.of(wire.Hello)[-1]
    assert (hello.rollback, hello.streams) == (None, ("OptimizersInBackward",))
    assert "rollback (the optimizers step inside the backward pass)" in hello.unseen[-1]
    assert "rollback cannot be had there, and is not armed" in capsys.readouterr().err


def test_optimizers_in_the_backward_pass_are_not_kept_alive(daemon: FakeDaemon) -> None:
    in_backward(lambda *given: sentinel.attach(*given) and None)
    gc.collect()
    assert daemon.ended().reason == "detach"


def test_steps_in_a_cuda_graph_are_reported_as_unseen_and_are_no_hang(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU: the stream's capture is simulated."""
    net = model()
    optimizer = adamw(*net.parameters())
    with sentinel.attach(net, optimizer) as monitor:
        heartbeat_writer = find_heartbeat_writer(monitor)

        def step(capturing: bool) -> bool:
            monkeypatch.setattr(tensors, "is_capturing", lambda: capturing)
            loss_of(net, next(batches(1))).backward()
            optimizer.step()
            heartbeat_writer.beat()
            heartbeat = unpack_heartbeat(os.pread(heartbeat_writer.page, SIZE, 0))
            assert heartbeat is not None
            return bool(heartbeat.paused)

        assert [step(capturing) for capturing in (False, True, True, False)] == [False, True, True, False]
    daemon.ended()
    assert daemon.seqs() == [0, 3]
    assert "the steps that a CUDA graph replays, and whether they hang" in daemon.of(wire.Hello)[-1].unseen
    assert capsys.readouterr().err.count("a step is recorded into a CUDA graph") == 1


@pytest.mark.faults
@pytest.mark.parametrize("name", ["enter_part", "end_pass", "_fill"])
def test_a_fault_in_gathering_does_not_reach_the_backward_pass(
    name: str, daemon: FakeDaemon, swallowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(BackwardGathering, name, fail)
    bare, expected = in_backward(lambda *_: None)
    watched, losses = in_backward(lambda *given: sentinel.attach(*given) and None)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), watched.parameters(), strict=True))
    assert swallowed
    assert all("a fault of ours" in text for text in swallowed)
