"""What is seen around backward passes: uncleared gradients, undivided losses, sums in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel.hooks.measure.probes import accumulation
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model

STEPS = 6


def kept(daemon: FakeDaemon) -> list[float]:
    daemon.ended()
    return list(daemon.series("gradients_kept").values())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, clear: Callable[[int], object], passes: int = 1) -> None:
    """Train; `clear(i)` is called before each backward pass, `i` counting those of a step."""
    data = batches(STEPS * passes)
    with sentinel.attach(net, optimizer):
        for _ in range(STEPS):
            for i in range(passes):
                loss = loss_of(net, next(data))
                clear(i)
                loss.backward()
            optimizer.step()


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_that_are_never_cleared(passes: int, daemon: FakeDaemon) -> None:
    net = model()
    train(net, torch.optim.SGD(net.parameters(), lr=0.01), lambda _: None, passes)
    assert kept(daemon) == [1.0] * (STEPS - 1)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_that_are_cleared_once_a_step(to_none: bool, passes: int, daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(net, optimizer, lambda i: i or optimizer.zero_grad(set_to_none=to_none), passes)
    assert kept(daemon) == [0.0] * (STEPS - 1)


def test_gradients_that_are_replaced(daemon: FakeDaemon) -> None:
    net = model()

    def replace(_: int) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)

    train(net, torch.optim.SGD(net.parameters(), lr=0.01), replace)
    assert kept(daemon) == [0.0] * (STEPS - 1)


def test_gradients_that_are_0_have_nothing_to_be_cleared(daemon: FakeDaemon) -> None:
    net = nn.Linear(6, 1)
    with sentinel.attach(net, (optimizer := torch.optim.SGD(net.parameters(), lr=0.01))):
        for batch in batches(STEPS):
            (net(batch).sum() * 0.0).backward()
            optimizer.step()
    assert kept(daemon) == [0.0] * (STEPS - 1)


def test_the_pass_of_another_model_is_no_sign(daemon: FakeDaemon) -> None:
    """In a GAN each optimizer clears before its own passes, and the other one's pass goes through both."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (first, second)]
    with sentinel.attach([first, second], optimizers):
        for batch in batches(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss_of(nn.Sequential(first, second), batch).backward()
                optimizer.step()
    daemon.ended()
    for stream in (0, 1):
        assert set(daemon.series("gradients_kept", stream).values()) == {0.0}


def test_a_scaler_a_closure_and_clipping_are_no_signs(daemon: FakeDaemon) -> None:
    net, scaler = model(), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        for batch in batches(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert kept(daemon) == [0.0] * (STEPS - 1)


def unnormalised(daemon: FakeDaemon) -> list[float]:
    daemon.ended()
    return list(daemon.series("unnormalised_passes").values())


def accumulate(
    net: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], *, passes: int = 3, scaler: GradScaler | None = None
) -> None:
    """Train over a loader, with `passes` batches a step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(8 * STEPS * passes, 6)), batch_size=8)
    with sentinel.attach(net, optimizer):
        for number, (batch,) in enumerate(loader, 1):
            made = loss(net(batch))
            (scaler.scale(made) if scaler else made).backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()


MEANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda out: out.square().mean(),
    "mse": lambda out: functional.mse_loss(out, torch.zeros_like(out)),
    "sum-of-two": lambda out: out.square().mean() + out.abs().mean(),
    "cross-entropy": lambda out: functional.cross_entropy(out.expand(-1, 2), torch.zeros(8, dtype=torch.long)),
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS.keys())
def test_micro_batches_whose_mean_is_not_taken(
    mean: Callable[[torch.Tensor], torch.Tensor], daemon: FakeDaemon
) -> None:
    accumulate(model(), mean)
    assert unnormalised(daemon) == [3.0] * STEPS


def test_the_product_of_a_scaler_is_no_normalisation(daemon: FakeDaemon) -> None:
    accumulate(model(), MEANS["mse"], scaler=GradScaler("cpu", init_scale=4.0))
    assert unnormalised(daemon) == [3.0] * STEPS


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.square().mean() / 3,
        lambda out: out.square().mean() * (1 / 3),
        lambda out: functional.mse_loss(out, torch.zeros_like(out), reduction="sum"),
        lambda out: out.square().sum() / 24,
        lambda out: out.square().mean() + 0.1 * out.mean(),  # as far as can be told
    ],
    ids=["divided", "multiplied", "sum", "tokens", "weighted"],
)
def test_losses_that_are_or_may_be_normalised(loss: Callable[[torch.Tensor], torch.Tensor], daemon: FakeDaemon) -> None:
    accumulate(model(), loss)
    assert unnormalised(daemon) == []


def test_a_closure_that_runs_one_batch_again_is_no_accumulation(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=8)
    with sentinel.attach(net, optimizer):
        for batch in batches(STEPS):

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    assert unnormalised(daemon) == []
    assert max(daemon.series("micro_batches").values()) > 4


def test_one_pass_a_step_is_no_accumulation(daemon: FakeDaemon) -> None:
    accumulate(model(), MEANS["mean"], passes=1)
    assert unnormalised(daemon) == []


def test_two_losses_over_one_batch_are_no_accumulation(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        for (batch,) in DataLoader(TensorDataset(torch.randn(48, 6)), batch_size=8):
            optimizer.zero_grad()
            for fake in (batch, batch + 1):
                net(fake).square().mean().backward()
            optimizer.step()
    assert unnormalised(daemon) == []


def test_the_sum_of_bf16_gradients_is_compared_with_that_in_float32(daemon: FakeDaemon) -> None:
    net = model().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    errors: list[float] = []
    with sentinel.attach(net, optimizer):
        for _ in range(9):
            exact = [torch.zeros(p.shape) for p in net.parameters()]
            for batch in batches(16):
                before = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in net.parameters()]
                fresh = torch.autograd.grad(loss_of(net, batch.bfloat16()), list(net.parameters()))
                loss_of(net, batch.bfloat16()).backward()
                assert all(torch.equal(p.grad, b + f) for p, b, f in zip(net.parameters(), before, fresh, strict=True))
                exact = [sum_ + one.float() for sum_, one in zip(exact, fresh, strict=True)]
            taken = [(p.grad.float(), e) for p, e in list(zip(net.parameters(), exact, strict=True))[:4]]  # type: ignore[union-attr]
            lost = sum(float((own - e).square().sum()) for own, e in taken)
            errors.append((lost / sum(float(e.square().sum()) for _, e in taken)) ** 0.5)
            optimizer.step()
            optimizer.zero_grad()
    daemon.ended()
    found = daemon.series("accumulation_error")
    assert found == {4: pytest.approx(errors[4], rel=1e-3), 8: pytest.approx(errors[8], rel=1e-3)}
    assert found[4] > 0.002


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("reduce_dtype", "reduced", "looked_at"),
    [
        (None, "last", True),
        (torch.bfloat16, "last", True),
        (torch.float32, "last", False),
        (torch.bfloat16, "each", False),  # into float32 shards
    ],
)
def test_sums_of_fsdp_are_looked_at_where_it_makes_them_in_bf16(
    reduce_dtype: torch.dtype | None, reduced: str, looked_at: bool, mesh: Any, daemon: FakeDaemon
) -> None:
    net, optimizer = sharded(mesh, reduce_dtype)
    with sentinel.attach(net, optimizer):
        summed = [gradients(net, optimizer, reduced) for _ in range(9)]
    daemon.ended()
    exact = gradients(*sharded(mesh, torch.float32), "last")[:4]  # parameters that are looked at
    lost = sum(float((own - e).square().sum()) for own, e in zip(summed[4], exact, strict=False))
    error = (lost / sum(float(e.square().sum()) for e in exact)) ** 0.5
    found = daemon.series("accumulation_error")
    assert found == ({4: pytest.approx(error, rel=1e-3), 8: pytest.approx(error, rel=1e-3)} if looked_at else {})
    assert error > 0.002 or not looked_at


def sharded(mesh: Any, reduce_dtype: torch.dtype | None) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net = model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net, torch.optim.SGD(net.parameters(), lr=0.0)


def gradients(net: Any, optimizer: torch.optim.Optimizer, reduced: str) -> list[torch.Tensor]:
    """Return the gradients of a step of 16 passes, which ranks reduce after each or after the last."""
    for i, batch in enumerate(batches(16)):
        net.set_requires_gradient_sync(reduced == "each" or i == 15)
        loss_of(net, batch).backward()
    found = [p.grad.full_tensor().clone() for p in net.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return found


def test_a_loop_that_makes_its_parameters_smaller_goes_on(daemon: FakeDaemon) -> None:
    """A node of autograd that is held keeps the shape that its parameter had."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 32, bias=False), torch.nn.Linear(32, 1, bias=False)).bfloat16()
    first, last = net.parameters()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        for _ in range(9):
            for batch in torch.randn(4, 8, 3, dtype=torch.bfloat16):
                net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            first.data, last.data = first.data[:-1].clone(), last.data[:, :-1].clone()
    daemon.ended()
    assert daemon.series("accumulation_error").keys() == {4, 8}


@pytest.mark.parametrize(("passes", "dtype"), [(3, torch.bfloat16), (4, torch.float32)])
def test_few_passes_and_wide_sums_are_not_looked_at(passes: int, dtype: torch.dtype, daemon: FakeDaemon) -> None:
    net = model().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        for _ in range(6):
            for batch in batches(passes):
                loss_of(net, batch.to(dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
    daemon.ended()
    assert daemon.series("accumulation_error") == {}


@pytest.mark.faults
def test_a_fault_of_ours_within_a_backward_pass_costs_only_the_look(
    daemon: FakeDaemon, swallowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulation, "spread", lambda *_: 1 / 0)
    net = model().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        for _ in range(6):
            for batch in batches(4):
                loss_of(net, batch.bfloat16()).backward()
            optimizer.step()
            optimizer.zero_grad()
    daemon.ended()
    assert len(daemon.series("loss")) == 6
    assert len(swallowed) <= 4
