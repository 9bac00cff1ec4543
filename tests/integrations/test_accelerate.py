"""Accelerate, in its current release."""

from __future__ import annotations

import pytest
import torch

from tests.hooks.conftest import FakeDaemon

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the library


def trained(*, watched: bool, accumulation: int = 1) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Train; return (weights, losses of the micro-batches, norms before clipping)."""
    from sentinel.hooks.accelerate import attach

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    monitor = attach(accelerator, model, optimizer, loader=loader) if watched else None
    losses, norms = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if monitor is not None:
        monitor.detach()
    return [p.detach().clone() for p in model.parameters()], losses, norms


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_are_the_optimizers_own(daemon: FakeDaemon, accumulation: int) -> None:
    _, losses, norms = trained(watched=True, accumulation=accumulation)
    daemon.ended()
    per_step = [sum(losses[i : i + accumulation]) / accumulation for i in range(0, len(losses), accumulation)]
    assert daemon.series("loss") == pytest.approx(dict(enumerate(per_step)))
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)))


def test_weights_are_the_same_to_the_last_bit(daemon: FakeDaemon) -> None:
    with_it, without = trained(watched=True)[0], trained(watched=False)[0]
    daemon.ended()
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
